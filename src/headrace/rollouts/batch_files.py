"""Files of a step's training batch: experts are written as they arrive, and a small file that is published last makes them a batch.

    step_000000000012.experts.safetensors    routed experts: one row a token, in the order of arrival, written from the chunks they came in
    step_000000000012.safetensors            the batch: token columns, one entry a sample, the micro batches of each rank; published last

    writer = BatchWriter(folder, step=12)
    slots = writer.add(samples)                    on arrival: the experts are not copied
    writer.publish(packed, slots, ...)             at the end of the step: columns (8.1 bytes a token), a header and two names
    batch = open_training_batch(path)              the trainer maps both files; `micro_batches(rank)` checks and gathers a rank's own

Only the position of a sample's rows in the sidecar depends on arrival: samples, their order and the layout follow from the requests. The sidecar is
an ordinary safetensors file whose header is reserved first and filled in last. Both files carry a digest of all samples' checksums, so
a batch is never read with the experts of another batch. Writes are not synced: a batch that is lost in a power cut is made again.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from headrace.errors import ConfigError, FileCorrupt, RolloutRefused, StorageError
from headrace.files import Container, open_container, open_regular, temporary_name, write_container
from headrace.rollouts.packing import MicroBatch, Packed
from headrace.rollouts.records import TOKEN_COLUMNS, TrainingSample
from headrace.rollouts.values import decode_value, encode_value

_KIND, _VERSION = "headrace-rollouts", 1
_HEADER = 4096
_SLICE = 1 << 20
"""Bytes hashed at a time. xxhash releases the GIL above 100 kB; below, an update is too short to matter."""


def batch_path(folder: Path | str, step: int) -> Path:
    """The file of a step's batch."""
    return Path(folder) / f"step_{step:012d}.safetensors"


def sidecar_path(path: Path) -> Path:
    """The file of a batch's routed experts."""
    return path.with_name(path.name.removesuffix(".safetensors") + ".experts.safetensors")


def _pair(sums: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(np.sort(sums).tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSample:
    """A sample whose experts were written: its columns, and the row that its experts begin at."""

    sample: TrainingSample
    row: int
    sum: int
    routed: bool
    multimodal: bytes = b""
    """Fields of its images, encoded; the sample keeps their names."""

    def with_advantage(self, advantage: float) -> WrittenSample:
        return replace(self, sample=msgspec.structs.replace(self.sample, advantage=advantage))


class BatchWriter:
    """Writes the batch of one step. Used by one thread at a time."""

    def __init__(self, folder: Path | str, *, step: int) -> None:
        if step < 0:
            raise ConfigError(f"a batch has a step of 0 or more, got {step}")
        self.path, self.step = batch_path(folder, step), step
        self._temp = self.path.parent / temporary_name()
        self._fd = -1
        self._kind: tuple[int, int] | None = None
        self._rows = 0
        self._sums: list[int] = []

    def add(self, samples: Sequence[TrainingSample]) -> list[WrittenSample]:
        """Write the experts of samples now. The returned slots keep the columns, and go to `publish`."""
        encoded = [_encoded_images(sample) for sample in samples]
        slots = []
        for sample, images in zip(samples, encoded, strict=True):
            if images:
                sample = msgspec.structs.replace(sample, multimodal=dict.fromkeys(sample.multimodal or ()))
            row, digest, routed = self._rows, 0, sample.experts is not None
            if sample.experts is not None:
                digest = self._append(sample.experts.chunks, sample.experts.shape)
                sample = msgspec.structs.replace(sample, experts=None)
            slots.append(WrittenSample(sample=sample, row=row, sum=digest, routed=routed, multimodal=images))
        return slots

    def _append(self, chunks: Sequence[np.ndarray], shape: tuple[int, int, int]) -> int:
        if self._kind is None:
            self._kind = shape[1:]
            try:
                self._fd = os.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                os.lseek(self._fd, _HEADER, os.SEEK_SET)
            except OSError as error:
                raise self._failed(error) from error
        if shape[1:] != self._kind:
            raise ConfigError(
                f"step {self.step} has samples with routed experts of {list(self._kind)} and of {list(shape[1:])} layers and experts a token"
            )
        digest = xxhash.xxh3_64()
        try:
            for view in (chunk.reshape(-1).data for chunk in chunks):
                for at in range(0, len(view), _SLICE):
                    digest.update(view[at : at + _SLICE])
                while len(view):
                    view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise self._failed(error) from error
        self._rows += shape[0]
        self._sums.append(digest.intdigest())
        return self._sums[-1]

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(
            f"the experts of step {self.step} could not be written below {self.path.parent}: {error.strerror or error}. "
            "Nothing was published; free space or fix the folder and make the step again"
        )

    def publish(self, packed: Packed, slots: Sequence[WrittenSample], *, seq_len: int, policy_version: int) -> Path:
        """Publish the batch; its path. `packed` was made from the slots' samples; slots in no micro batch are left out."""
        if len({slot.routed for slot in slots}) > 1:
            envs = sorted({slot.sample.env_name for slot in slots if not slot.routed})
            raise ConfigError(
                f"step {self.step}: rollouts of {', '.join(envs)} came without routed experts, others with them; a trainer that replays "
                "routing needs them for all. Let every engine return them, or none"
            )
        micro = [m for rank in packed.ranks for m in rank]
        by_sample = {id(slot.sample): at for at, slot in enumerate(slots)}
        arrays = _columns(micro, slots, by_sample)
        if any(slot.multimodal for slot in slots):
            arrays["multimodal"] = np.frombuffer(b"".join(slot.multimodal for slot in slots), np.uint8)
            arrays["multimodal_start"] = np.cumsum([0, *(len(slot.multimodal) for slot in slots)], dtype=np.int64)
        envs: list[str] = sorted({slot.sample.env_name for slot in slots})
        arrays["env"] = np.array([envs.index(s.sample.env_name) for s in slots], np.int32)
        classes = sorted({(m.run, m.mode) for m in micro})
        arrays["micro_class"] = np.array([classes.index((m.run, m.mode)) for m in micro], np.int32)
        experts = None
        if self._kind is not None:
            layers, topk = self._kind
            experts = {
                "rows": self._rows,
                "layers": layers,
                "topk": topk,
                "pair": _pair(np.array(self._sums, np.uint64)),
            }
        meta = {
            "kind": _KIND, "version": _VERSION, "step": self.step, "policy_version": policy_version, "seq_len": seq_len,
            "ranks": len(packed.ranks), "micro_batches": packed.micro_batches, "envs": envs, "classes": classes, "experts": experts,
        }  # fmt: skip
        if self.path.exists():
            raise ConfigError(
                f"{self.path} is there already: step {self.step} was published before; give the run its own folder"
            )
        try:
            if experts is not None:
                self._finish_sidecar(experts)
            write_container(self.path, arrays, meta, durable=False)
        except FileExistsError as error:
            raise ConfigError(
                f"{self.path} was published by another process just now; give the run its own folder"
            ) from error
        except OSError as error:
            raise self._failed(error) from error
        return self.path

    def _finish_sidecar(self, experts: dict[str, Any]) -> None:
        shape = [self._rows, experts["layers"], experts["topk"]]
        entry = {"dtype": "U8", "shape": shape, "data_offsets": [0, math.prod(shape)]}
        ours = json.dumps({"kind": _KIND, "version": _VERSION, "step": self.step, "pair": experts["pair"]})
        header = json.dumps(
            {"__metadata__": {"rollouts": ours}, "routed_experts": entry}, separators=(",", ":")
        ).encode()
        header += b" " * (_HEADER - 8 - len(header))
        os.pwrite(self._fd, (_HEADER - 8).to_bytes(8, "little") + header, 0)
        os.close(self._fd)
        self._fd = -1
        # A sidecar without a batch has no reader: one that a killed writer of this step left behind is replaced.
        os.replace(self._temp, sidecar_path(self.path))

    def close(self) -> None:
        """Remove the files that were not published."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(OSError):
            os.unlink(self._temp)


def _encoded_images(sample: TrainingSample) -> bytes:
    if not sample.multimodal:
        return b""
    try:
        return encode_value(dict(sample.multimodal))
    except ValueError as error:
        raise RolloutRefused(
            "wrong_type", f"the sample of example {sample.example_id!r} in {sample.env_name}: {sorted(sample.multimodal)} cannot be written: {error}"
        ) from error  # fmt: skip


_SAMPLE_COLUMNS = (
    ("prompt_length", np.int32), ("advantage", np.float32), ("temperature", np.float32), ("reward", np.float32),
    ("sample_policy_version", np.int64), ("expert_row", np.int64), ("expert_sum", np.uint64),
)  # fmt: skip


def _columns(
    micro: Sequence[MicroBatch], slots: Sequence[WrittenSample], by_sample: dict[int, int]
) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {}
    for name, dtype in (("ids", np.int32), ("logprobs", np.float32), ("mask", np.uint8)):
        rows = [getattr(slot.sample, name) for slot in slots]
        columns[name] = np.concatenate(rows) if rows else np.empty(0, dtype)
    columns["mask_bits"] = np.packbits(columns.pop("mask"))
    for name in TOKEN_COLUMNS:
        if any(name in slot.sample.columns for slot in slots):
            columns[name] = np.concatenate([_token_column(slot.sample, name) for slot in slots])
    starts, told = [0], []
    for slot in slots:
        s = slot.sample
        starts.append(starts[-1] + len(s))
        told.append((s.prompt_length, s.advantage, s.temperature, s.reward, s.policy_version, slot.row, slot.sum))
    columns["sample_start"] = np.array(starts, np.int64)
    for at, (name, dtype) in enumerate(_SAMPLE_COLUMNS):
        columns[name] = np.array([line[at] for line in told], dtype)
    members = [[by_sample[id(s)] for s in m.samples] if not m.dummy else [] for m in micro]
    columns["micro_samples"] = np.array([at for m in members for at in m], np.int32)
    columns["micro_start"] = np.cumsum([0, *(len(m) for m in members)], dtype=np.int64)
    return columns


def _token_column(sample: TrainingSample, name: str) -> np.ndarray:
    """One of TOKEN_COLUMNS of a sample. Without it: the sample's advantage, a weight of 1, the policy itself as its reference."""
    column = sample.columns.get(name)
    if name == "advantages":
        column = np.full(len(sample), np.nan, np.float32) if column is None else column
        return np.where(np.isnan(column), np.float32(sample.advantage), column)
    if column is None:
        return np.ones(len(sample), np.float32) if name == "loss_weights" else sample.logprobs
    return column


# --------------------------------------------------------------------------------------------------- read


@dataclass(frozen=True)
class TrainingBatch:
    """An open batch. Types, lengths and ranges of its columns were checked when it was opened; experts are checked when they are read."""

    path: Path
    step: int
    policy_version: int
    ranks: int
    micro_batches_per_rank: int
    seq_len: int
    envs: tuple[str, ...]
    classes: tuple[tuple[str, str], ...]
    arrays: dict[str, np.ndarray]
    experts: np.ndarray | None
    """All rows, mapped: uint8 [rows, layers, topk]."""

    @property
    def tokens(self) -> int:
        return len(self.arrays["ids"])

    @property
    def samples(self) -> int:
        return len(self.arrays["advantage"])

    def micro_batches(self, rank: int) -> Iterator[dict[str, Any]]:
        """Yield the micro batches of one rank.

        By token: ids, positions, mask, logprobs, advantages, temperatures, and where rollouts have them loss_weights, reference_logprobs and
        routed_experts. By sample: env, samples, and multimodal where any has images. Of the micro batch: cu_seqlens, run, mode.
        """
        if not 0 <= rank < self.ranks:
            raise ConfigError(f"{self.path} was packed for {self.ranks} ranks, there is no rank {rank} in it")
        for at in range(rank * self.micro_batches_per_rank, (rank + 1) * self.micro_batches_per_rank):
            yield self._micro_batch(at)

    def _micro_batch(self, at: int) -> dict[str, Any]:
        a = self.arrays
        members = a["micro_samples"][a["micro_start"][at] : a["micro_start"][at + 1]].tolist()
        run, mode = self.classes[int(a["micro_class"][at])]
        spans = [(int(a["sample_start"][m]), int(a["sample_start"][m + 1])) for m in members]
        sizes = [end - start for start, end in spans] or [1]  # a dummy has one token, which is not learnt

        def by_token(name: str) -> np.ndarray:
            parts = [a[name][start:end] for start, end in spans]
            return np.concatenate(parts) if parts else np.zeros(1, a[name].dtype)

        def by_sample(name: str, of_dummy: float) -> np.ndarray:
            return np.repeat(a[name][members] if members else np.array([of_dummy], np.float32), sizes)

        batch: dict[str, Any] = {
            "advantages": by_sample("advantage", 0.0), "temperatures": by_sample("temperature", 1.0),
            **{name: by_token(name) for name in ("ids", "mask", "logprobs", *TOKEN_COLUMNS) if name in a},
            "run": run, "mode": mode, "cu_seqlens": np.cumsum([0, *sizes]).astype(np.int32), "samples": members,
            "positions": np.concatenate([np.arange(n, dtype=np.int32) for n in sizes]),
            "env": [self.envs[int(a["env"][m])] for m in members],
        }  # fmt: skip
        if "multimodal" in a:
            borders = a["multimodal_start"]
            raw = [a["multimodal"][borders[m] : borders[m + 1]].tobytes() for m in members]
            batch["multimodal"] = [decode_value(r) if r else None for r in raw]
        if self.experts is not None:
            batch["routed_experts"] = self._experts(members, sizes)
        return batch

    def _experts(self, members: list[int], sizes: list[int]) -> np.ndarray:
        assert self.experts is not None
        if not members:
            return np.zeros((1, *self.experts.shape[1:]), np.uint8)
        out = np.empty((sum(sizes), *self.experts.shape[1:]), np.uint8)
        at = 0
        for member, size in zip(members, sizes, strict=True):
            row = int(self.arrays["expert_row"][member])
            np.copyto(out[at : at + size], self.experts[row : row + size])
            found = xxhash.xxh3_64_intdigest(out[at : at + size].reshape(-1).data)
            if found != int(self.arrays["expert_sum"][member]):
                raise FileCorrupt(
                    f"{sidecar_path(self.path)} is damaged: the experts of sample {member} fail their checksum"
                )
            at += size
        return out


def open_training_batch(path: Path | str) -> TrainingBatch:
    """Map a batch and check it. FileCorrupt if it or its sidecar is damaged, or the sidecar belongs to another batch."""
    path = Path(path)
    container = open_container(path)
    try:
        return _opened(path, container)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise FileCorrupt(f"{path} is not a training batch, or is damaged: {type(error).__name__}: {error}") from error


def _opened(path: Path, container: Container) -> TrainingBatch:
    meta, arrays = container.meta, dict(container.arrays)
    if meta["kind"] != _KIND or meta["version"] != _VERSION:
        raise ValueError(f"it is {meta['kind']!r} version {meta['version']!r}, expected {_KIND!r} version {_VERSION}")
    tokens = _checked_arrays(arrays, meta)
    arrays["mask"] = np.unpackbits(arrays.pop("mask_bits"), count=tokens)
    experts = _open_sidecar(path, meta, arrays) if meta["experts"] is not None else None
    return TrainingBatch(
        path=path, step=int(meta["step"]), policy_version=int(meta["policy_version"]), ranks=int(meta["ranks"]),
        micro_batches_per_rank=int(meta["micro_batches"]), seq_len=int(meta["seq_len"]), envs=tuple(map(str, meta["envs"])),
        classes=tuple((str(r), str(m)) for r, m in meta["classes"]), arrays=arrays, experts=experts,
    )  # fmt: skip


def _checked_arrays(arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> int:
    """Check type, length and range of every array; the number of tokens. ValueError names the first array that is wrong."""
    samples, micro = len(arrays["advantage"]), int(meta["ranks"]) * int(meta["micro_batches"])
    tokens, members = len(arrays["ids"]), len(arrays["micro_samples"])
    expected: dict[str, tuple[Any, int]] = {
        "ids": (np.int32, tokens), "logprobs": (np.float32, tokens), "mask_bits": (np.uint8, -(-tokens // 8)),
        "sample_start": (np.int64, samples + 1), **{name: (dtype, samples) for name, dtype in _SAMPLE_COLUMNS}, "env": (np.int32, samples),
        "micro_samples": (np.int32, members), "micro_start": (np.int64, micro + 1), "micro_class": (np.int32, micro),
    }  # fmt: skip
    expected |= {name: (np.float32, tokens) for name in TOKEN_COLUMNS if name in arrays}
    if "multimodal" in arrays or "multimodal_start" in arrays:
        expected |= {"multimodal": (np.uint8, len(arrays["multimodal"])), "multimodal_start": (np.int64, samples + 1)}
    for name, (dtype, length) in expected.items():
        if arrays[name].dtype != dtype or arrays[name].shape != (length,):
            raise ValueError(
                f"{name} is {arrays[name].dtype} of shape {list(arrays[name].shape)}, expected {np.dtype(dtype)} of shape [{length}]"
            )
    for name, end in (("sample_start", tokens), ("micro_start", members), ("multimodal_start", len(arrays.get("multimodal", ())))):  # fmt: skip
        starts = arrays.get(name)
        if starts is not None and (starts[0] != 0 or starts[-1] != end or (np.diff(starts) < 0).any()):
            raise ValueError(f"{name} does not divide {end} entries")
    for name, stop in (
        ("ids", 2**31), ("env", len(meta["envs"])), ("micro_class", len(meta["classes"])), ("micro_samples", samples),
    ):  # fmt: skip
        if len(arrays[name]) and not 0 <= int(arrays[name].min()) <= int(arrays[name].max()) < stop:
            raise ValueError(f"{name} holds a number that is not 0 to {stop - 1}")
    if (arrays["prompt_length"] < 0).any() or (arrays["prompt_length"] > np.diff(arrays["sample_start"])).any():
        raise ValueError("prompt_length is longer than its sample")
    return tokens


def _open_sidecar(path: Path, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> np.ndarray:
    sidecar, about = sidecar_path(path), meta["experts"]
    shape = (int(about["rows"]), int(about["layers"]), int(about["topk"]))
    size = _HEADER + shape[0] * shape[1] * shape[2]
    try:
        fd = open_regular(sidecar)
    except (FileNotFoundError, FileCorrupt) as error:
        raise FileCorrupt(
            f"{path} has its routed experts in {sidecar.name}, which cannot be opened ({error}): a batch without them would train on "
            "other experts than were used. Make the step again"
        ) from error
    try:
        if os.fstat(fd).st_size != size:
            raise FileCorrupt(f"{sidecar} has {os.fstat(fd).st_size:,} bytes, its batch says {size:,}")
        header = json.loads(os.pread(fd, _HEADER, 0)[8:])
        ours = json.loads(header["__metadata__"]["rollouts"])
        if ours.get("pair") != about["pair"] or ours.get("step") != meta["step"]:
            raise FileCorrupt(f"{sidecar} belongs to another batch than {path.name} (step {ours.get('step')})")
        mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileCorrupt(f"{sidecar} is damaged: {type(error).__name__} in its header") from error
    finally:
        os.close(fd)
    last = shape[0] - np.diff(arrays["sample_start"])  # a sum with expert_row could overflow
    if ((arrays["expert_row"] < 0) | (arrays["expert_row"] > last)).any():
        raise FileCorrupt(f"{path} is damaged: its samples have rows that {sidecar.name} does not")
    return np.frombuffer(mapped, np.uint8, offset=_HEADER).reshape(shape)
