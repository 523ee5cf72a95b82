"""A batch out of the spool, beside a memcpy and beside the BatchManager pattern (torch.load of a file, then slices).

Figures of one run on one machine. Files lie in the page cache, as they do between two processes of one machine.

How long torch.load takes depends on where its memory comes from: tensors of up to 32 MiB get what the one before gave back, larger ones are
new to the process each time, and the kernel clears every page of them.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from headrace.spool import DataProviderBase, DatasetConsumer, FieldSpec, FileHeader, open_batch_file, write_batch_file

CALLS = 600
"""At least: of fewer, p99 is nearly their maximum."""
ROUNDS = 4


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
    """The BatchManager pattern: load a file, slice it per batch."""

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


def mapped_copies(paths: list[Path], per_file: int) -> Iterator[Callable[[], None]]:
    """Copies of one batch after the other, out of mapped files, into memory that is used in turns."""
    targets: list[list[np.ndarray]] = []
    for path in paths:
        file = open_batch_file(path)
        file.check()  # its pages are mapped, as they are once the background has checked them
        many = file.rows // per_file
        for turn in range(per_file):
            row = [file.arrays[name][turn * many : (turn + 1) * many] for name in ("x", "y")]
            if len(targets) < 2:
                targets.append([np.ones_like(array) for array in row])
            pairs = list(zip(targets[turn % 2], row, strict=True))
            yield lambda pairs=pairs: [np.copyto(into, array) for into, array in pairs] and None


def busy(seconds: float) -> None:
    """A call that does nothing, for as long: how often the machine itself makes one late."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        continue


def used_up(spool: Path, folder: Path) -> Path:
    """The same files for a consumer that deletes what it has read."""
    return shutil.copytree(
        spool, folder, copy_function=os.link, ignore=shutil.ignore_patterns("state", "claims", "verdicts")
    )


def batches(folder: Path, batch_size: int, block: int, per_file: int, files: int, more: int) -> None:
    """get_batch over many files: usual and worst, beside a memcpy and beside the BatchManager pattern. `more`: files for its throughput, enough for a
    tenth of a second, so that what a consumer does once at its start does not count for more than it is."""
    spool, pt = folder / f"s{batch_size}x{block}", folder / f"p{batch_size}x{block}"
    for path, kind in ((spool, "safetensors"), (pt, "pt")):
        made = Random(
            path, batch_size, block, batches_per_file=per_file, max_backlog_files=more, durable=False, file_format=kind
        )
        made.run(("train",), max_files=more)
    size = 2 * batch_size * block * 8
    ours_paths, paths = (sorted((path / "queue" / "train").iterdir()) for path in (spool, pt))
    pause = 4 * size / 10e9 + 200e-6

    def train(_: Any) -> None:  # a step of some length: what a spool is for is being ready in the meantime
        until = time.perf_counter() + pause
        while time.perf_counter() < until:
            time.sleep(0)

    times: dict[str, list[float]] = {name: [] for name in ("ours", "theirs", "copied", "memcpy", "consumed")}
    for turn in range(
        max(ROUNDS, -(-CALLS // (per_file * files)))
    ):  # in turns: the machine has better and worse moments
        for name, how in (("ours", {}), ("copied", {"copy": True})):
            with DatasetConsumer(spool, ack="commit", deadline=60, **how) as consumer:
                consumer.get_batch("train")  # the first of all, which nobody could prepare for
                times[name] += timed(lambda: consumer.get_batch("train"), per_file * files - 1, train)
        for copy in mapped_copies(ours_paths[:files], per_file):
            times["memcpy"] += timed(copy, 1, train)
        manager = BatchManager(paths, batch_size)
        manager.get_batch()
        times["theirs"] += timed(manager.get_batch, per_file * files - 1, train)
        with DatasetConsumer(used_up(spool, folder / f"c{size}-{turn}"), deadline=60) as consumer:
            consumer.get_batch("train")
            times["consumed"] += timed(lambda: consumer.get_batch("train"), per_file * files - 1, train)
    at = {name: quantiles(found) for name, found in times.items()}
    (p50, p99), (q50, q99), (memcpy, _), (copied, copied99) = (at[n] for n in ("ours", "theirs", "memcpy", "copied"))
    _, idle99 = quantiles(timed(partial(busy, p50), len(times["ours"]), train))
    worst = {name: max(times[name]) * 1e6 for name in ("ours", "theirs")}
    rest = " " * 18
    print(
        f"batch {size / 2**20:6.2f} MiB  get_batch p50 {p50 * 1e6:6.1f} us  p99 {p99 * 1e6:6.1f} us (x {p99 / p50:.1f}; a call that does nothing for as long {idle99 * 1e6:.1f})"
    )
    print(
        f"{rest}memcpy {memcpy * 1e6:.1f} us   ratio {p50 / memcpy:.2f}   copy=True p50 {copied * 1e6:.1f} (ratio {copied / memcpy:.2f})  p99 {copied99 * 1e6:.1f} (x {copied99 / copied:.1f})"
    )
    print(f"{rest}deleting what was read: p50 {at['consumed'][0] * 1e6:.1f}, p99 {at['consumed'][1] * 1e6:.1f}")
    print(
        f"{rest}torch.load + slice p50 {q50 * 1e6:.1f}  p99 {q99 * 1e6:.1f} us (x {q99 / q50:.0f}), max {worst['theirs']:.1f} against {worst['ours']:.1f}"
    )

    # Throughput with nothing in between: as both hand batches out, and with each batch copied once, as a trainer would.
    # By one thread: two of OpenMP's on a machine with two cores and other work wait for each other, at a tenth of the speed on both sides.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    used = [torch.empty((batch_size, block), dtype=torch.int64) for _ in range(2)]

    def handed_out(get_batch: Callable[[], Any]) -> float:
        began = time.perf_counter()
        for _ in range(per_file * more):
            get_batch()
        return time.perf_counter() - began

    def copied_once(get_batch: Callable[[], Any]) -> float:
        began = time.perf_counter()
        for _ in range(per_file * more):
            for kept, field in zip(used, get_batch(), strict=True):
                kept.copy_(field)
        return time.perf_counter() - began

    volume = size * per_file * more / 1e9
    for label, through in (("", handed_out), (", each batch copied", copied_once)):
        rounds: list[tuple[float, float]] = []
        for _ in range(2 * ROUNDS):
            with DatasetConsumer(spool, ack="commit", deadline=60) as consumer:
                spooled = through(lambda: consumer.get_batch("train"))
            rounds.append((spooled, through(BatchManager(paths, batch_size).get_batch)))
        ours, loaded = (statistics.median(side) for side in zip(*rounds, strict=True))
        print(
            f"{rest}throughput, verified{label}: {volume / ours:.2f} GB/s   torch.load + slice (unverified) {volume / loaded:.2f}   ratio {loaded / ours:.2f}"
        )
    torch.set_num_threads(threads)
    for path in (spool, pt, *folder.glob(f"c{size}-*")):
        shutil.rmtree(path)


def ranks(folder: Path) -> None:
    """One of 8 ranks reads its share of a 50 MiB file."""
    rows, block = 3200, 1024
    arrays = {name: np.random.default_rng(1).integers(0, 50_000, (rows, block)) for name in ("x", "y")}
    schema = (FieldSpec("x", "int64", (block,)), FieldSpec("y", "int64", (block,)))
    header = FileHeader(split="train", seq=0, schema=schema, rows=rows, first=0, batch_size=32)
    write_batch_file(folder / "r.safetensors", header, arrays, durable=False)
    write_batch_file(folder / "r.pt", header, arrays, durable=False)
    count = rows // 8 // 10  # a rank's share of one batch of a tenth of the file

    # As a consumer does it: into memory that is used again.
    memory = np.ones((2, rows // 8, block), np.int64)
    other = np.ones_like(memory)

    def share() -> None:
        file = open_batch_file(folder / "r.safetensors")
        for k, name in enumerate(("x", "y")):
            np.copyto(memory[k, :count], file.arrays[name][3 : 8 * count : 8])

    def views() -> list[torch.Tensor]:
        file = open_batch_file(folder / "r.safetensors", private=True)
        return [torch.from_numpy(file.arrays[name][3::8]) for name in ("x", "y")]

    def copied() -> None:
        file = open_batch_file(folder / "r.safetensors")
        for k, name in enumerate(("x", "y")):
            np.copyto(memory[k], file.arrays[name][3::8])

    def checked() -> None:
        file = open_batch_file(folder / "r.safetensors")
        file.check(3, None, 8)
        for k, name in enumerate(("x", "y")):
            np.copyto(memory[k], file.arrays[name][3::8])

    def memcpy() -> None:
        np.copyto(memory, other)

    def loaded() -> torch.Tensor:
        tensors = torch.load(folder / "r.pt", weights_only=True)["tensors"]
        return torch.cat([tensors[n][3::8].reshape(-1) for n in ("x", "y")])

    def mapped() -> torch.Tensor:
        tensors = torch.load(folder / "r.pt", weights_only=True, mmap=True)["tensors"]
        return torch.cat([tensors[n][3::8].reshape(-1) for n in ("x", "y")])

    def opened() -> Any:
        return open_batch_file(folder / "r.safetensors")

    calls = (opened, views, share, copied, checked, memcpy, loaded, mapped)
    times: dict[str, list[float]] = {call.__name__: [] for call in calls}
    for _ in range(25):  # in turns: the machine has better and worse moments
        for call in calls:
            times[call.__name__] += timed(call, 1)
    ms = {name: quantiles(found)[0] * 1e3 for name, found in times.items()}
    print(
        f"rank 3 of 8, 50 MiB file   torch.load of the file {ms['loaded']:.1f} ms   its share as views {ms['views']:.2f} (ratio {ms['loaded'] / ms['views']:.0f}), first batch of it copied {ms['share']:.2f} "
        f"({ms['loaded'] / ms['share']:.0f}), all copied {ms['copied']:.2f} ({ms['loaded'] / ms['copied']:.0f}), all checked and copied {ms['checked']:.2f} ({ms['loaded'] / ms['checked']:.0f})"
        f"   limit: memcpy of a share {ms['memcpy']:.2f} ({ms['loaded'] / ms['memcpy']:.0f})   open alone {ms['opened']:.2f}   torch.load mmap, all copied, unchecked {ms['mapped']:.1f}"
    )


def rank_in_turn(folder: Path, batch_size: int, block: int, per_file: int) -> None:
    """The trainer's own time for a rank's share of a file, one of 8: checks are made in the background."""
    files = 4
    spool, pt = folder / f"ranks{batch_size}", folder / f"pts{batch_size}"
    for path, kind in ((spool, "safetensors"), (pt, "pt")):
        made = Random(
            path, batch_size, block, batches_per_file=per_file, max_backlog_files=files, durable=False, seed=1, file_format=kind
        )  # fmt: skip
        made.run(("train",), max_files=files)
    paths = sorted((pt / "queue" / "train").iterdir())
    times: dict[str, list[float]] = {"gathered": [], "views": [], "copies": [], "loaded": []}
    for copy in (None, False, True) * 3:
        # A world of 8 of which one reads: the others' verdicts are not waited for.
        with DatasetConsumer(
            spool, ack="commit", dp_rank=3, dp_world_size=8, deadline=60, verdict_patience=0, copy=copy
        ) as consumer:
            for _ in range(files):
                consumer.wait_for_data("train", 60)
                began = time.perf_counter()
                for _ in range(per_file):
                    consumer.get_batch("train", "cpu")
                times["gathered" if copy is None else "copies" if copy else "views"].append(time.perf_counter() - began)
        manager = BatchManager(paths, batch_size)
        for _ in paths:  # the file, and its batches' rows of this rank
            began = time.perf_counter()
            for _ in range(per_file):
                x, y = manager.get_batch()
                x[3::8], y[3::8]
            times["loaded"].append(time.perf_counter() - began)
    ms = {name: quantiles(found)[0] * 1e3 for name, found in times.items()}
    print(
        f"rank 3 of 8, {2 * batch_size * block * 8 * per_file >> 20} MiB in {per_file} batches, file after file   torch.load + slices {ms['loaded']:.1f} ms a file   get_batch of its share: {ms['gathered']:.2f} (ratio {ms['loaded'] / ms['gathered']:.0f}; checked and gathered in the background), "
        f"views {ms['views']:.2f} ({ms['loaded'] / ms['views']:.0f}), copy=True {ms['copies']:.2f} ({ms['loaded'] / ms['copies']:.0f})"
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
        real = xxhash.xxh3_64_intdigest, xxhash.xxh3_128_hexdigest
        xxhash.xxh3_64_intdigest, xxhash.xxh3_128_hexdigest = lambda _: 0, lambda _: "0" * 32
        try:
            ours_again()
        finally:
            xxhash.xxh3_64_intdigest, xxhash.xxh3_128_hexdigest = real

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
    size = 8 << 10

    def sums() -> None:
        for part in raw:
            for at in range(0, len(part), size):
                xxhash.xxh3_64_intdigest(part[at : at + size])
            xxhash.xxh3_128_hexdigest(part)

    summed = quantiles(timed(sums, 9))[0] * 1e3
    print(
        f"publish 50 MiB   durable {figures['durable']:.1f} ms, the same without sums {figures['unsummed']:.1f}, without fsync {figures['loose']:.1f}   plain write + fsync {figures['plain_durable']:.1f} (ratio {figures['durable'] / figures['plain_durable']:.2f})"
        f", plain write {figures['plain']:.1f}, torch.save {figures['saved']:.1f} (ratio {figures['loose'] / figures['saved']:.2f})"
    )
    added = figures["durable"] - figures["unsummed"]
    print(
        f"                 checksums of {2 * rows:,} rows and of the whole: {summed:.1f} ms alone, {added:+.1f} ms = {added / figures['durable']:+.1%} of a durable publish, beside which they are made"
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
    logging.getLogger("headrace.spool").addHandler(
        logging.NullHandler()
    )  # a line a file would be part of what is measured
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        batches(folder, 32, 64, 100, 32, 96)
        batches(folder, 64, 256, 100, 12, 24)
        batches(folder, 32, 1024, 100, 8, 16)  # files of 50 MiB in as many batches as a provider makes unless told
        batches(folder, 32, 2048, 100, 4, 6)
        batches(folder, 128, 2048, 8, 10, 20)
        batches(folder, 512, 2048, 4, 6, 10)
        ranks(folder)
        rank_in_turn(folder, 320, 1024, 10)
        rank_in_turn(folder, 32, 2048, 100)
        writing(folder)


if __name__ == "__main__":
    main()
