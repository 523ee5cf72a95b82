"""Gram matrices, beside what one would use instead. Ratios above 1: ours is faster, or more accurate.

kernel     chunk_gram of f64 rows        against the better of numpy `x.T @ x` and scipy's dsyrk, 1 and 2 threads
           limit: the tiles alone, on rows that are packed already and lie in the cache
f32        chunk_gram of f32 rows        against numpy with an upcast of the rows
fold       adding partials to the tree   against a copy of as many bytes
workers    2 processes over .npy shards, by sockets and through a spool, against the kernel alone with 2 threads on the same rows
pca        64 components                 against sklearn's IncrementalPCA on the same rows: time, and distance to the exact answer
error      largest error of an entry     against OpenBLAS, in units of 2^-53 sum |x_i x_j|

    python benchmarks/reduce.py              everything
    python benchmarks/reduce.py kernel-1     one part; kernel-1, kernel-2, f32-1, f32-2, fold, workers, pca, error
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

PARTS = ("kernel-1", "kernel-2", "f32-1", "f32-2", "fold", "workers", "pca", "error")
FOLDED = 96
ROUNDS = 5
WIDTHS, LENGTHS = (64, 256, 1024, 2048), (4096, 65536)


def best(calls: dict[str, Callable[[], object]], budget: float) -> dict[str, float]:
    """Seconds of each, the best call; all of them in every round, so that a busy neighbour meets them alike.

    A rest before each: threads of a BLAS spin for some milliseconds after their work, and would take a core from whoever comes next.
    """
    found = dict.fromkeys(calls, math.inf)
    for call in calls.values():
        call()
    end, rounds = time.perf_counter() + budget, 0
    while time.perf_counter() < end or rounds < 3:
        rounds += 1
        for name, call in calls.items():
            time.sleep(0.1)
            turn = time.perf_counter()
            while True:
                began = time.perf_counter()
                call()
                now = time.perf_counter()
                found[name] = min(found[name], now - began)
                if now - turn > 0.05:
                    break
    return found


def kernel(threads: int) -> None:
    from scipy.linalg.blas import dsyrk

    from headrace.reduce.kernel import chunk_gram

    limit = packed_speed()
    for k in WIDTHS:
        for n in LENGTHS:
            x = np.random.default_rng(0).standard_normal((n, k))
            took = best({
                "numpy": lambda x=x: x.T @ x, "dsyrk": lambda x=x: dsyrk(1.0, x.T), "ours": lambda x=x: chunk_gram(x, threads=threads),
            }, 3.0)  # fmt: skip
            speed = {name: n * k * (k + 1) / s / 1e9 for name, s in took.items()}
            other = max(speed["numpy"], speed["dsyrk"])
            print(
                f"f64 k={k:<5} n={n:<6} {threads} thread{'s' * (threads > 1)}   ours {speed['ours']:5.1f} GFLOP/s   numpy {speed['numpy']:5.1f}   "
                f"dsyrk {speed['dsyrk']:5.1f}   ratio {speed['ours'] / other:.2f}   of the limit {speed['ours'] / limit / threads:.2f}",
                flush=True,
            )


def packed_speed() -> float:
    """GFLOP/s of the tiles alone."""
    from headrace.reduce import tiles

    panels_count, rows = 64 // tiles.NR, 512
    panels, levels, out = np.ones(64 * rows), np.empty(tiles.level_size(rows // tiles.BLOCK)), np.empty(64 * 65 // 2)
    none, whole = np.empty((0, 0)), (0, panels_count, 0, panels_count)
    took = best({"tiles": lambda: tiles.multiply(none, none, 0, rows, 64, *whole, panels, levels, out)}, 0.5)
    computed = sum(min(panels_count, j + 1) for j in range(panels_count)) * tiles.NR * tiles.NR
    return 2 * computed * rows / took["tiles"] / 1e9


def f32(threads: int) -> None:
    from headrace.reduce.kernel import chunk_gram

    def upcast(x: np.ndarray) -> np.ndarray:
        wide = x.astype(np.float64)
        return wide.T @ wide

    for k in WIDTHS:
        for n in LENGTHS:
            x = np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)
            took = best({"numpy": lambda x=x: upcast(x), "ours": lambda x=x: chunk_gram(x, threads=threads)}, 1.5)
            print(
                f"f32 k={k:<5} n={n:<6} {threads} thread{'s' * (threads > 1)}   ours {n * k * (k + 1) / took['ours'] / 1e9:5.1f} GFLOP/s   "
                f"numpy with upcast {n * k * (k + 1) / took['numpy'] / 1e9:5.1f}   ratio {took['numpy'] / took['ours']:.2f}",
                flush=True,
            )


def fold() -> None:
    from headrace.reduce import StreamingBorderGram

    for k in (256, 1024, 2048):
        entries = k * (k + 1) // 2
        grams = [np.random.default_rng(i).standard_normal(entries) for i in range(4)]
        target = np.empty(entries)

        def run(entries: int = entries, grams: list[np.ndarray] = grams) -> None:
            tree = StreamingBorderGram(entries=entries, n_chunks=FOLDED)
            for j in range(FOLDED):
                tree._fold(grams[j % 4])

        def submit(entries: int = entries, grams: list[np.ndarray] = grams) -> None:
            tree = StreamingBorderGram(entries=entries, n_chunks=FOLDED)
            for j in range(FOLDED):
                tree.submit_chunk_gram(j, grams[j % 4])

        def copy(target: np.ndarray = target, grams: list[np.ndarray] = grams) -> None:
            for j in range(FOLDED):
                np.copyto(target, grams[j % 4])

        took = best({"fold": run, "submit": submit, "copy": copy}, 2.0)
        moved = 8 * entries * FOLDED / 1e9
        print(
            f"fold k={k:<5} {moved / took['fold']:5.1f} GB/s of partials ({3 * moved / took['fold']:.1f} GB/s of memory)   checked for NaN "
            f"{moved / took['submit']:5.1f}   copy {moved / took['copy']:5.1f}   ratio to copy {took['copy'] / took['fold']:.2f}",
            flush=True,
        )


def workers() -> None:
    from headrace.reduce import Columns, CrossNodeGramReduction, CrossNodePartition, Provenance, default_chunk_size
    from headrace.reduce.orders import WorkOrder
    from headrace.reduce.shards import RowShards
    from headrace.reduce.transports.folder import FolderTransport
    from headrace.reduce.transports.processes import ProcessTransport
    from headrace.reduce.transports.transport import Transport, drive

    def rate(hire: Callable[[], Transport], order: WorkOrder) -> float:
        """Rows a second once everybody is under way: the first chunks pay for starting and compiling. Hired here, because workers of
        a spool begin at once."""
        transport = hire()
        seen: list[tuple[float, int]] = []

        def note(reduction: CrossNodeGramReduction) -> None:
            seen.append((time.perf_counter(), reduction.frontier))

        try:
            drive(CrossNodeGramReduction(order.partition, provenance=order.provenance), transport, progress=note)
        finally:
            transport.close()
        steady = [mark for mark in seen if mark[1] >= 4]
        return (steady[-1][1] - steady[0][1]) * order.partition.chunk_size / (steady[-1][0] - steady[0][0])

    for k, n in ((255, 1 << 20), (1023, 1 << 17)):
        with tempfile.TemporaryDirectory() as folder:
            for part in range(2):
                rows = np.random.default_rng(part).standard_normal((n // 2, k)).astype(np.float32)
                np.save(Path(folder) / f"{part}.npy", rows)
            shards, columns = RowShards.open([folder]), Columns(width=k)
            chunk = default_chunk_size(columns.k)

            def order(
                ranks: int, shards: RowShards = shards, columns: Columns = columns, chunk: int = chunk
            ) -> WorkOrder:
                partition = CrossNodePartition(k=columns.k, n_rows=shards.n_rows, chunk_size=chunk, n_ranks=ranks)
                data = shards.fingerprint()
                return WorkOrder(
                    partition=partition,
                    provenance=Provenance(rows="f32"),
                    columns=columns,
                    shards=shards.spec,
                    data=data,
                )

            def alone(shards: RowShards = shards, columns: Columns = columns, chunk: int = chunk) -> None:
                for at in range(0, 16 * chunk, chunk):
                    columns.gram(shards.read(at, at + chunk), 2)

            two, one = order(2), order(1)
            hired = {"sockets": (lambda two=two: ProcessTransport(two), two)}
            rounds: dict[str, list[tuple[float, float]]] = {"sockets": [], "spool": []}
            alone()
            before = steady(alone, 16 * chunk)
            for turn in range(ROUNDS):
                spool = Path(folder) / f"spool{turn}"
                hired["spool"] = (
                    lambda one=one, spool=spool: FolderTransport(spool, one, workers=2, first_unit=0, window=4),
                    one,
                )
                for name, (hire, wanted) in hired.items():
                    speed = rate(hire, wanted)
                    after = steady(alone, 16 * chunk)
                    rounds[name].append((speed, (before + after) / 2))
                    before = after
            for name, found in rounds.items():
                speed, kernel = (statistics.median(side) for side in zip(*found, strict=True))
                ratios = sorted(a / b for a, b in found)
                print(
                    f"2 workers k={k:<5} {name:<8} {speed / 1e3:7.0f} k rows/s   kernel alone, 2 threads, just before and after {kernel / 1e3:7.0f} k   "
                    f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f} in {ROUNDS} rounds)",
                    flush=True,
                )


def steady(call: Callable[[], object], rows: int) -> float:
    """Rows a second over a second: as what it is compared with, good and bad moments of the machine alike."""
    began, done = time.perf_counter(), 0
    while (now := time.perf_counter()) - began < 1.0:
        call()
        done += rows
    return done / (now - began)


def pca() -> None:
    from sklearn.decomposition import IncrementalPCA

    from headrace.reduce import gram

    rng = np.random.default_rng(0)
    n, k, components = 65536, 512, 64
    x = rng.standard_normal((n, k)) * (1.0 / np.arange(1, k + 1)) @ rng.standard_normal((k, k)) + 5.0
    x = x.astype(np.float32)
    wide = x.astype(np.float64)
    wide -= wide.mean(0)
    exact = np.linalg.eigvalsh(wide.T @ wide / (n - 1))[::-1][:components]
    found: dict[str, np.ndarray] = {}

    def ours() -> None:
        found["ours"] = gram(x, threads=2).pca(components).variance

    def theirs() -> None:
        found["sklearn"] = IncrementalPCA(components, batch_size=4096).fit(x).explained_variance_

    began = time.perf_counter()
    theirs()
    slow = time.perf_counter() - began
    fast = best({"ours": ours}, 2.0)["ours"]
    error = {name: float(np.abs(values / exact - 1).max()) for name, values in found.items()}
    print(
        f"pca {n} x {k} f32, {components} components   ours {fast:.2f} s   IncrementalPCA {slow:.2f} s   ratio {slow / fast:.1f}   "
        f"largest relative error of a variance: ours {error['ours']:.1e}, IncrementalPCA {error['sklearn']:.1e}"
    )


def error() -> None:
    from headrace.reduce.kernel import chunk_gram

    rng = np.random.default_rng(1)
    n, k = 65536, 64
    for name, mean in (("Gaussian", 0.0), ("large mean", 100.0)):
        x = (rng.standard_normal((n, k)) + mean).astype(np.float32)
        wide = x.astype(np.float64)
        results = {"ours": chunk_gram(x), "OpenBLAS": wide.T @ wide}
        worst = dict.fromkeys(results, 0.0)
        for i, j in zip(*np.triu_indices(k), strict=True):
            products = wide[:, i] * wide[:, j]  # exact: f32 times f32
            unit = 2.0**-53 * float(np.abs(products).sum())
            exact = math.fsum(products.tolist())
            for who, gram in results.items():
                worst[who] = max(worst[who], abs(gram[i, j] - exact) / unit)
        print(
            f"error {name:<10} n={n}   ours {worst['ours']:.2f}   OpenBLAS {worst['OpenBLAS']:.2f}   ratio {worst['OpenBLAS'] / worst['ours']:.1f}",
            flush=True,
        )


def main() -> int:
    parts = sys.argv[1:] or list(PARTS)
    if unknown := [p for p in parts if p not in PARTS]:
        print(f"no part {unknown[0]}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    if len(parts) > 1:  # each in a process of its own: BLAS takes its number of threads when it is loaded
        return max(subprocess.run([sys.executable, __file__, part], check=False).returncode for part in parts)
    part, _, threads = parts[0].partition("-")
    {"kernel": kernel, "f32": f32}[part](int(threads)) if threads else globals()[part]()
    return 0


if __name__ == "__main__":
    # Before numpy is used: OpenBLAS starts its threads when it is first called, and reads this when it is loaded.
    wanted = sys.argv[1].partition("-")[2] if len(sys.argv) == 2 else ""
    if wanted and os.environ.get("OPENBLAS_NUM_THREADS") != wanted:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OPENBLAS_NUM_THREADS": wanted})
    sys.exit(main())
