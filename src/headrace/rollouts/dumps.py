"""Dumps of a step's raw rollouts, for a replay: `dump_raw_rollouts`, `read_dump`, `synthetic_rollouts`.

    magic · (length, sum, rollout as msgpack)* · end mark with the count

A dump holds plain values and no pickle, so it may come from an untrusted source. It is written record by record and read the same way; every length is
compared with the file's size before a record is decoded. Two synthetic steps replace captured ones in benchmarks:

    r3      128 rollouts of 4 turns and 23,600 tokens with 384 bytes of routed experts a token: 1.16 GB; an engine that sends the rows
            after its cached prefix
    text    256 rollouts of 30 turns and 15,000 tokens, every turn with the ids of its whole context: 60 million numbers
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash

from headrace.errors import ConfigError, FileCorrupt, StorageError
from headrace.files import open_regular, publish
from headrace.rollouts.values import model_values

DumpKind = Literal["r3", "text"]
_MAGIC = b"headrace-rollout-dump-1\n"
_RECORD = struct.Struct("<QQ")
_END = 2**64 - 1


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if (fields := model_values(value)) is not value:
        return fields
    # A live response object or the like: a replay gets its type's name.
    return {"omitted": type(value).__name__}


def dump_raw_rollouts(path: Path | str, rollouts: Iterable[Any]) -> int:
    """Publish raw rollouts at `path`; how many. An object that is no plain value is replaced by the name of its type."""
    encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
    count, path = 0, Path(path)

    def parts() -> Iterator[bytes]:
        nonlocal count
        yield _MAGIC
        for rollout in rollouts:
            raw = encoder.encode(rollout)
            yield _RECORD.pack(len(raw), xxhash.xxh3_64_intdigest(raw))
            yield raw
            count += 1
        yield _RECORD.pack(_END, count)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, parts(), replace=True, durable=False)
    except OSError as error:
        raise StorageError(
            f"the dump {path} cannot be written: {error.strerror or error}. Nothing was left there; free space or name another file"
        ) from error
    return count


def read_dump(path: Path | str) -> Iterator[Any]:
    """Yield the rollouts of a dump. FileCorrupt names the first that is damaged."""
    try:
        fd = open_regular(path, follow=True)
    except OSError as error:
        raise ConfigError(f"the dump {path} cannot be opened: {error.strerror}") from error
    with open(fd, "rb") as dump:
        if dump.read(len(_MAGIC)) != _MAGIC:
            raise FileCorrupt(
                f"{path} is no dump of rollouts; `dump_raw_rollouts` or `headrace replay --make` writes one"
            )
        size, count = os.fstat(fd).st_size, 0
        while len(head := dump.read(_RECORD.size)) == _RECORD.size:
            length, recorded = _RECORD.unpack(head)
            if length == _END:
                if recorded != count or dump.read(1):
                    raise FileCorrupt(f"{path} is damaged: its end mark says {recorded} rollouts, {count} were read")
                return
            if length > (left := size - dump.tell()):
                raise FileCorrupt(f"{path} is damaged: rollout {count} claims {length:,} bytes, {left:,} are left")
            raw = dump.read(length)
            if xxhash.xxh3_64_intdigest(raw) != recorded:
                raise FileCorrupt(f"{path} is damaged: rollout {count} fails its checksum")
            try:
                yield msgspec.msgpack.decode(raw)
            except (msgspec.DecodeError, RecursionError) as error:
                raise FileCorrupt(f"{path} is damaged: rollout {count} cannot be decoded: {error}") from error
            count += 1
    raise FileCorrupt(f"{path} ends after {count} rollouts without its end mark: it was cut short")


def synthetic_rollouts(kind: DumpKind, *, scale: float = 1.0, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the rollouts of a synthetic step. `scale` shortens every turn; the numbers of rollouts and turns stay."""
    if kind not in ("r3", "text"):
        raise ConfigError(f"a synthetic step is 'r3' or 'text', got {kind!r}")
    if not 0 < scale <= 10:
        raise ConfigError(f"scale is {scale}, expected more than 0 and at most 10")
    rollouts, turns, tokens, layers, topk = (128, 4, 23_600, 48, 8) if kind == "r3" else (256, 30, 15_000, 0, 0)
    per_turn = max(2, round(tokens * scale / turns))
    for number in range(rollouts):
        rng = np.random.default_rng([seed, number])
        ids = rng.integers(0, 150_000, per_turn * turns).tolist()
        steps = []
        for turn in range(turns):
            # A third of a turn comes from the environment.
            begin, end = turn * per_turn, (turn + 1) * per_turn
            middle = begin + per_turn // 3 + 1
            said = end - middle
            columns: dict[str, Any] = {
                "prompt_ids": ids[:middle], "prompt_mask": [0] * middle, "completion_ids": ids[middle:end], "completion_mask": [1] * said,
                "completion_logprobs": (-rng.random(said)).tolist(),
            }  # fmt: skip
            if layers:
                start = max(0, begin - 1)
                rows = end - 1 - start
                columns["routed_experts"] = {
                    "data": rng.bytes(rows * layers * topk),
                    "shape": [rows, layers, topk],
                    "start": start,
                }
            steps.append({"prompt": [{"role": "user", "content": f"turn {turn}"}], "completion": [], "tokens": columns})
        yield {
            "example_id": number // 8, "env_name": ("reverse", "search")[number // 8 % 2], "reward": float(rng.integers(2)),
            "trajectory": steps, "sampling_args": {"temperature": 1.0}, "timing": {"total": 1.0},
        }  # fmt: skip
