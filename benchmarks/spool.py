"""A batch out of the spool, beside a memcpy and beside the BatchManager pattern (torch.load of a file, then slices).

Figures of one run on one machine. Files lie in the page cache, as they do between two processes of one machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from headrace.spool import DataProviderBase, DatasetConsumer, FieldSpec, FileHeader, open_batch_file, write_batch_file


class Random(DataProviderBase):
    """x and y of `block_size` int64 tokens."""

    def build_meta(self) -> dict[str, Any]:
        fields = [
            FieldSpec("x", "int64", (self.block_size or 0,), "input"),
            FieldSpec("y", "int64", (self.block_size or 0,), "target"),
        ]
        return {"dataset_name": "bench", "training_type": "LM", "vocab_size": 50_000, "batch_schema": fields}

    def sample_batch(self, split: str, rng: torch.Generator) -> dict[str, torch.Tensor]:
        x = torch.randint(0, 50_000, (self.batch_size, self.block_size or 0), generator=rng)
        return {"x": x, "y": x}


class BatchManager:
    """The pattern of the document's baseline: load a file, slice it per batch."""

    def __init__(self, paths: list[Path], batch_size: int) -> None:
        self.paths, self.batch_size, self.at, self.row = paths, batch_size, -1, 0
        self.x = self.y = torch.empty(0)

    def get_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.row >= len(self.x):
            self.at, self.row = (self.at + 1) % len(self.paths), 0
            tensors = torch.load(self.paths[self.at], weights_only=True)["tensors"]
            self.x, self.y = tensors["x"], tensors["y"]
        rows = slice(self.row, self.row + self.batch_size)
        self.row += self.batch_size
        return self.x[rows], self.y[rows]


def quantiles(times: list[float]) -> tuple[float, float]:
    times = sorted(times)
    return statistics.median(times), times[min(len(times) - 1, int(0.99 * len(times)))]


def timed(call, count: int, use=None) -> list[float]:
    times = []
    gc.disable()
    for _ in range(count):
        began = time.perf_counter()
        value = call()
        times.append(time.perf_counter() - began)
        if use is not None:
            use(value)
    gc.enable()
    return times


def copy_next(target: np.ndarray, source: np.ndarray, turn: Iterator[int]) -> None:
    np.copyto(target, source[next(turn)])


def batches(folder: Path, batch_size: int, block: int, per_file: int, files: int) -> None:
    """get_batch over many files: usual and worst, beside a memcpy and beside the BatchManager pattern."""
    spool, pt = folder / f"s{batch_size}x{block}", folder / f"p{batch_size}x{block}"
    for path, kind in ((spool, "safetensors"), (pt, "pt")):
        made = Random(
            path, batch_size, block, batches_per_file=per_file, max_backlog_files=files, durable=False, file_format=kind
        )
        made.run(("train",), max_files=files)
    size = 2 * batch_size * block * 8
    # As cold as a file that another core has checked: the copy walks through as many bytes as the spool holds.
    source = np.ones((per_file * files, size // 8), np.int64)
    target = np.empty(size // 8, np.int64)
    turn = iter(range(10**9))
    copy, _ = quantiles(timed(partial(copy_next, target, source, turn), per_file * files))

    pause = 4 * copy + 200e-6

    def train(_: Any) -> None:  # a step of some length: what a spool is for is being ready in the meantime
        until = time.perf_counter() + pause
        while time.perf_counter() < until:
            time.sleep(0)

    with DatasetConsumer(spool, ack="commit", deadline=60) as consumer:
        consumer.wait_for_data("train", 60)
        began = time.perf_counter()
        ours = timed(lambda: consumer.get_batch("train"), per_file * files, train)
        seconds = time.perf_counter() - began - pause * per_file * files
    paths = sorted((pt / "queue" / "train").iterdir())
    manager = BatchManager(paths, batch_size)
    theirs = timed(manager.get_batch, per_file * files, train)
    p50, p99 = quantiles(ours)
    q50, q99 = quantiles(theirs)
    print(
        f"batch {size / 2**20:6.2f} MiB  get_batch p50 {p50 * 1e6:7.1f} us  p99 {p99 * 1e6:7.1f} us (x {p99 / p50:.1f})   memcpy {copy * 1e6:7.1f} us  ratio {p50 / copy:.2f}"
        f"   torch.load + slice p50 {q50 * 1e6:6.1f}  p99 {q99 * 1e6:8.1f} us, max {max(theirs) * 1e6:8.1f} against {max(ours) * 1e6:8.1f}"
    )
    # Throughput with nothing in between: each batch is read once (summed), so that a lazy view pays for its pages too.
    with DatasetConsumer(spool, ack="commit", deadline=60) as consumer:
        consumer.load_state_dict(_start(consumer))
        began = time.perf_counter()
        for _ in range(per_file * files):
            x, y = consumer.get_batch("train")
            x.view(-1)[::512].sum(), y.view(-1)[::512].sum()
        straight = time.perf_counter() - began
    manager = BatchManager(paths, batch_size)
    began = time.perf_counter()
    for _ in range(per_file * files):
        x, y = manager.get_batch()
        x.reshape(-1)[::512].sum(), y.reshape(-1)[::512].sum()
    loaded = time.perf_counter() - began
    volume = size * per_file * files / 1e9
    print(
        f"                   throughput, verified, {volume / straight:.2f} GB/s   torch.load + slice (unverified) {volume / loaded:.2f} GB/s   ratio {loaded / straight:.2f}"
        f"   [with steps in between: {seconds * 1e3:.0f} ms over {files} files]"
    )


def _start(consumer: DatasetConsumer) -> dict[str, Any]:
    consumer.reset_state()
    consumer._reader("train")
    return consumer.state_dict()


def ranks(folder: Path) -> None:
    """One of 8 ranks reads its share of a 50 MiB file."""
    rows, block = 3200, 1024
    arrays = {name: np.random.default_rng(1).integers(0, 50_000, (rows, block)) for name in ("x", "y")}
    schema = (FieldSpec("x", "int64", (block,)), FieldSpec("y", "int64", (block,)))
    header = FileHeader(split="train", seq=0, schema=schema, rows=rows, first=0, batch_size=32)
    write_batch_file(folder / "r.safetensors", header, arrays, durable=False)
    write_batch_file(folder / "r.pt", header, arrays, durable=False)
    count = rows // 8 // 10  # a rank's share of one batch of a tenth of the file

    def share() -> np.ndarray:
        file = open_batch_file(folder / "r.safetensors")
        return np.concatenate([file.arrays[n][3 : 8 * count : 8].reshape(-1) for n in ("x", "y")])

    def checked() -> np.ndarray:
        file = open_batch_file(folder / "r.safetensors")
        file.check(3, None, 8)
        return np.concatenate([file.arrays[n][3::8].reshape(-1) for n in ("x", "y")])

    def loaded() -> torch.Tensor:
        tensors = torch.load(folder / "r.pt", weights_only=True)["tensors"]
        return torch.cat([tensors[n][3::8].reshape(-1) for n in ("x", "y")])

    def mapped() -> torch.Tensor:
        tensors = torch.load(folder / "r.pt", weights_only=True, mmap=True)["tensors"]
        return torch.cat([tensors[n][3::8].reshape(-1) for n in ("x", "y")])

    def opened() -> Any:
        return open_batch_file(folder / "r.safetensors")

    figures = {f.__name__: quantiles(timed(f, 15))[0] for f in (opened, share, checked, loaded, mapped)}
    print(
        f"rank 3 of 8, 50 MiB file   open {figures['opened'] * 1e3:.2f} ms, first batch of its share {figures['share'] * 1e3:.2f} ms, whole share checked and copied {figures['checked'] * 1e3:.2f} ms"
        f"   torch.load of the file {figures['loaded'] * 1e3:.1f} ms   ratio {figures['loaded'] / figures['share']:.0f} (first batch), {figures['loaded'] / figures['checked']:.1f} (whole share, checked)"
        f"   torch.load mmap, whole share, unchecked {figures['mapped'] * 1e3:.1f} ms"
    )


def writing(folder: Path) -> None:
    """What publishing costs: checksums, fsyncs."""
    rows, block = 3200, 1024
    arrays = {name: np.random.default_rng(1).integers(0, 50_000, (rows, block)) for name in ("x", "y")}
    schema = (FieldSpec("x", "int64", (block,)), FieldSpec("y", "int64", (block,)))
    header = FileHeader(split="train", seq=0, schema=schema, rows=rows, first=0, batch_size=32)
    name = folder / "w.safetensors"
    raw = [memoryview(a).cast("B") for a in arrays.values()]

    def ours(durable: bool) -> None:
        name.unlink(missing_ok=True)
        write_batch_file(name, header, arrays, durable=durable)

    def plain() -> None:
        name.unlink(missing_ok=True)
        with open(name, "wb", buffering=0) as handle:
            for part in raw:
                handle.write(part)

    def plain_durable() -> None:
        name.unlink(missing_ok=True)
        with open(name, "wb", buffering=0) as handle:
            for part in raw:
                handle.write(part)
            os.fsync(handle.fileno())

    def saved() -> None:
        torch.save({"tensors": {k: torch.from_numpy(v) for k, v in arrays.items()}}, folder / "w.pt")

    def unsummed() -> None:
        name.unlink(missing_ok=True)
        real = xxhash.xxh3_64_intdigest
        xxhash.xxh3_64_intdigest = lambda _: 0
        try:
            ours_again()
        finally:
            xxhash.xxh3_64_intdigest = real

    def ours_again() -> None:
        write_batch_file(name, header, arrays, durable=True)

    calls = {
        "durable": lambda: ours(True), "unsummed": unsummed, "plain_durable": plain_durable, "loose": lambda: ours(False), "plain": plain, "saved": saved,
    }  # fmt: skip
    times: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(11):  # in turns: the disk has better and worse moments
        for label, call in calls.items():
            times[label] += timed(call, 1)
    figures = {label: quantiles(found)[0] * 1e3 for label, found in times.items()}
    segment = 2 * rows * block * 8 / (16 << 10)
    summed = (
        quantiles(
            timed(lambda: [xxhash.xxh3_64_intdigest(p[i : i + 16384]) for p in raw for i in range(0, len(p), 16384)], 9)
        )[0]
        * 1e3
    )
    print(
        f"publish 50 MiB   durable {figures['durable']:.1f} ms, the same without sums {figures['unsummed']:.1f}, without fsync {figures['loose']:.1f}   plain write + fsync {figures['plain_durable']:.1f} (ratio {figures['durable'] / figures['plain_durable']:.2f})"
        f", plain write {figures['plain']:.1f}, torch.save {figures['saved']:.1f} (ratio {figures['loose'] / figures['saved']:.2f})"
    )
    added = figures["durable"] - figures["unsummed"]
    print(
        f"                 checksums of {segment:.0f} segments: {summed:.1f} ms alone, {added:+.1f} ms = {added / figures['durable']:+.1%} of a durable publish, beside which they are made"
    )
    small = {"x": np.zeros((8, 16), np.int64), "y": np.zeros((8, 16), np.int64)}
    tiny = FileHeader(
        split="train",
        seq=0,
        schema=(FieldSpec("x", "int64", (16,)), FieldSpec("y", "int64", (16,))),
        rows=8,
        first=0,
        batch_size=8,
    )
    for durable in (True, False):
        times = []
        for k in range(60):
            began = time.perf_counter()
            write_batch_file(folder / f"t{durable}{k}.safetensors", tiny, small, durable=durable)
            times.append(time.perf_counter() - began)
        print(
            f"                 a file of 2 KiB, {'durable' if durable else 'without fsync'}: {quantiles(times)[0] * 1e6:.0f} us"
        )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        batches(folder, 32, 64, 40, 40)
        batches(folder, 128, 2048, 8, 10)
        batches(folder, 512, 2048, 4, 6)
        ranks(folder)
        writing(folder)


if __name__ == "__main__":
    main()
