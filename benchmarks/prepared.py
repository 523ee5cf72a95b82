"""Batches from prepared tokens: against memcpy of the same bytes, and against the two ways in which it is usually written.

tokens/s   shuffled [rows, 2048] int64 batches, one thread     limit: memcpy of as many int64 bytes into one reused batch
           first epoch       every page faulted in, every segment compared with its checksum (peers compare nothing)
           np.memmap crops   as nanoGPT has it: slice, astype, stack
           sample index      as Megatron has it: documents, sample index, shuffle index, concatenate, collate
restore    fresh dataset and loader + state → first batch      at 1 % and at 99 % of the epoch
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from headrace.batch import DEFAULT_LM_FIELDS
from headrace.loader import PreparedDataset, PreparedLoader
from headrace.text.shards import SHARD_FOLDER, PreparedManifest, PreparedSource, shard_name, write_shard

SEQ_LEN, SHARDS, SHARD_TOKENS = 2048, 3, 24 << 20
BATCHES = 400


def prepared(folder: Path) -> np.ndarray:
    """A folder as `headrace prepare` leaves it, with log-normal documents, and its tokens in one flat file."""
    rng = np.random.default_rng(0)
    entries, row = [], 0
    place = folder / SHARD_FOLDER / "web"
    place.mkdir(parents=True)
    with open(folder / "flat.bin", "wb") as flat:
        for n in range(SHARDS):
            lengths = np.maximum(rng.lognormal(np.log(400), 1.0, SHARD_TOKENS // 300).astype(np.int64), 2)
            lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), SHARD_TOKENS - SEQ_LEN))]
            short = SHARD_TOKENS - int(lengths.sum())  # a whole number of blocks, so that all deliver the same rows
            lengths = np.append(lengths, short)
            tokens = rng.integers(0, 32_000, SHARD_TOKENS).astype(np.uint16)
            flat.write(tokens.data)
            entries.append(write_shard(place / shard_name(n), tokens, lengths, first_row=row, bad=0, about={}))
            row += len(lengths)
            np.save(folder / f"lengths-{n}.npy", lengths)
    source = PreparedSource(
        name="web", spec="jsonl:web", weight=1.0, max_epochs=None, max_tokens=None, data="", files=(("web", row),),
        shards=tuple(entries),
    )  # fmt: skip
    PreparedManifest(
        tokenizer="none", vocab_size=32_000, dtype="uint16", bos_id=None, eos_id=1, pad_id=0, seq_len=SEQ_LEN, pack="concat",
        sources=(source,),
    ).write(folder)  # fmt: skip
    return np.concatenate([np.load(folder / f"lengths-{n}.npy") for n in range(SHARDS)])


def speeds(steps: dict[str, Callable[[int], object]], rows: int, rounds: int = 7) -> dict[str, float]:
    """M tokens/s of each `step(n)`, n = 0 …; all in every round, side by side, the best round of each.

    By the processor time of the calling thread, so that other work on the machine does not count; a thread ahead is
    measured by the clock on the wall, because it works elsewhere.
    """
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name, step in steps.items():
            clock = time.perf_counter if "thread" in name else time.thread_time
            began = clock()
            for n in range(BATCHES):
                step(n)
            best[name] = min(best[name], clock() - began)
    return {name: BATCHES * rows * SEQ_LEN / seconds / 1e6 for name, seconds in best.items()}


def memcpy(rows: int) -> Callable[[int], object]:
    source = np.zeros((BATCHES * rows, SEQ_LEN), np.int64)
    source[:] = 1
    batch = np.empty((rows, SEQ_LEN), np.int64)
    return lambda n: np.copyto(batch, source[n * rows : (n + 1) * rows])


def loader(data: PreparedDataset, rows: int, **options) -> Callable[[int], object]:
    walker = PreparedLoader(data, global_batch_size=rows, **options)
    return lambda n: next(walker)


def epoch(data: PreparedDataset, rows: int) -> float:
    """M tokens/s of one epoch from a cold start of the process; after it every page is mapped and every segment checked."""
    walker = PreparedLoader(data, global_batch_size=rows, fields=("input_ids",), prefetch_batches=0)
    next(walker)
    steps = SHARDS * SHARD_TOKENS // SEQ_LEN // rows
    began = time.thread_time()
    for _ in range(steps):
        next(walker)
    return steps * rows * SEQ_LEN / (time.thread_time() - began) / 1e6


def crops(folder: Path, order: np.ndarray, rows: int) -> Callable[[int], object]:
    tokens = np.memmap(folder / "flat.bin", np.uint16, "r")

    def step(n: int) -> torch.Tensor:
        starts = order[n * rows : (n + 1) * rows] * SEQ_LEN
        return torch.stack([torch.from_numpy(tokens[i : i + SEQ_LEN].astype(np.int64)) for i in starts])

    return step


def sample_index(folder: Path, order: np.ndarray, lengths: np.ndarray, rows: int) -> Callable[[int], object]:
    tokens = np.memmap(folder / "flat.bin", np.uint16, "r")
    begins = np.cumsum(lengths) - lengths
    starts = np.arange(len(tokens) // SEQ_LEN + 1) * SEQ_LEN
    document = np.searchsorted(begins, starts, side="right") - 1
    offset = starts - begins[document]

    def sample(i: int) -> torch.Tensor:
        first, last = int(document[i]), int(document[i + 1])
        if first == last:
            at = int(begins[first] + offset[i])
            ids = tokens[at : at + SEQ_LEN]
        else:
            parts = [tokens[begins[first] + offset[i] : begins[first] + lengths[first]]]
            parts += [tokens[begins[d] : begins[d] + lengths[d]] for d in range(first + 1, last)]
            parts.append(tokens[begins[last] : begins[last] + offset[i + 1]])
            ids = np.concatenate(parts)
        return torch.from_numpy(ids.astype(np.int64))

    return lambda n: torch.stack([sample(int(i)) for i in order[n * rows : (n + 1) * rows]])


def restore(folder: Path, state: dict) -> float:
    """Seconds from nothing but a state to the first batch."""
    began = time.perf_counter()
    with PreparedLoader(PreparedDataset(folder), global_batch_size=8) as walker:
        walker.load_state_dict(state)
        next(walker)
    return time.perf_counter() - began


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = prepared(folder)
        open_ = {"exhausted": "repeat", "seed": 1}
        concat = PreparedDataset(folder, **open_)
        began = time.perf_counter()
        packed = PreparedDataset(folder, pack="best_fit", **open_)
        indexed = time.perf_counter() - began
        order = concat.plan(np.arange(BATCHES * 32)).block
        first = epoch(concat, 32), epoch(packed, 32)
        three = ("input_ids", "labels", "position_ids")
        print(
            f"{SHARDS} shards, {SHARDS * SHARD_TOKENS / 1e6:.0f} M tokens, {len(lengths):,} documents, {SEQ_LEN} a row"
        )
        for rows in (8, 32):
            steps: dict[str, Callable[[int], object]] = {
                "memcpy": memcpy(rows),
                "np.memmap crops": crops(folder, order, rows),
                "sample index": sample_index(folder, order, lengths[:-1], rows),
            }
            for packing, data in (("concat", concat), ("best_fit", packed)):
                for label, fields in (
                    ("input_ids", three[:1]),
                    ("+ labels, positions", three),
                    ("whole contract", DEFAULT_LM_FIELDS),
                ):
                    steps[f"{packing:<9} {label}"] = loader(data, rows, fields=fields, prefetch_batches=0)
            steps["concat    input_ids, thread ahead"] = loader(concat, rows, fields=three[:1], prefetch_batches=2)
            found = speeds(steps, rows)
            limit, best = found["memcpy"], max(found["np.memmap crops"], found["sample index"])
            print(f"[{rows}, {SEQ_LEN}]")
            for label, value in found.items():
                print(
                    f"  {label:<34} {value:7,.0f} M tokens/s   / memcpy {value / limit:.2f}   / best of the two {value / best:.1f}"
                )
        print(
            f"first epoch   input_ids {first[0]:,.0f} M tokens/s, best_fit {first[1]:,.0f}   / best of the two {first[0] / best:.1f}"
        )
        total = len(PreparedDataset(folder))
        states = {}
        for share in (0.01, 0.99):
            walker = PreparedLoader(PreparedDataset(folder), global_batch_size=8, prefetch_batches=0)
            state = walker.state_dict()
            state["body"]["sample"] = int(total * share)
            states[share] = state
        rounds = [[restore(folder, states[s]) for s in (0.01, 0.99)] for _ in range(9)]
        early, late = (statistics.median(times) for times in zip(*rounds, strict=True))
        print(
            f"restore       at 1 % {early * 1e3:.1f} ms   at 99 % {late * 1e3:.1f} ms   ratio {max(early, late) / min(early, late):.2f}; "
            f"state {len(json.dumps(states[0.99])):,} bytes; another seq_len indexed in {indexed:.2f} s"
        )


if __name__ == "__main__":
    main()
