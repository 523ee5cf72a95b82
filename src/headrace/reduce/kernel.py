"""The Gram of one chunk: the same bits on every processor, with any number of threads.

    chunk_gram(rows)                    k x k, f64, for f64, f32, f16 rows, or bf16 as uint16
    chunk_gram_packed(rows, extra)      the upper triangle as one vector; `extra`: more columns, f64 (ones, targets)

Each entry is `pairwise_sum` over the rows in order with base 128, products fused into the left folds. Products of f32, f16 and
bf16 numbers are exact in f64, so for such rows this equals multiplying and adding one after the other. Threads take
superblocks of rows, which are nodes of the cascade, so they never wait for each other.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np

from headrace.errors import ConfigError, DataError
from headrace.metrics import Wait
from headrace.reduce.partition import CROSS_CHUNK_BASE

__all__ = ["chunk_gram", "chunk_gram_packed", "mirrored", "row_dtype_name", "warm_gram_kernel"]

_NAMES = {"float64": "f64", "float32": "f32", "float16": "f16", "uint16": "bf16"}
_PACKED_BYTES = 64 << 20
"""Packed rows of a superblock. More rows mean fewer visits to the matrix: GFLOP/s at k = 2048 with 256, 512, 1,024, 2,048 and
4,096 rows: 25.8, 32.0, 36.4, 38.5, 40.0."""
_LEAST_ROWS, _MOST_ROWS = 512, 4096
_NARROW_ROWS = 1 << 16
"""Rows of a superblock where nothing but 128 rows is packed at a time."""
_local = threading.local()
_lock = threading.Lock()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_module: ModuleType | None = None


def row_dtype_name(rows: np.ndarray) -> str:
    """f64, f32, f16, or bf16 for uint16 (numpy has no bfloat16)."""
    name = _NAMES.get(rows.dtype.name)
    if name is None or not rows.dtype.isnative:
        raise DataError(
            f"rows must be float64, float32, float16, or bfloat16 as uint16, in native byte order; got {rows.dtype.str}"
        )
    return name


def warm_gram_kernel() -> ModuleType:
    """Compile, or load what was compiled: a quarter of a minute the first time, a moment after that."""
    global _module
    if _module is None:
        with Wait("kernels.compile"), _lock:
            from headrace.reduce import tiles

            _module = tiles
    return _module


def chunk_gram(rows: np.ndarray, *, threads: int = 1) -> np.ndarray:
    """The k x k Gram matrix of a chunk of rows, f64, symmetric."""
    return mirrored(chunk_gram_packed(rows, threads=threads), rows.shape[1])


def mirrored(packed: np.ndarray, k: int) -> np.ndarray:
    """The full matrix of a packed triangle."""
    full = np.empty((k, k))
    warm_gram_kernel().mirror(np.ascontiguousarray(packed), k, full)
    return full


def chunk_gram_packed(rows: np.ndarray, extra: np.ndarray | None = None, *, threads: int = 1) -> np.ndarray:
    """The upper triangle of the Gram of [rows, extra], row by row."""
    row_dtype_name(rows)
    if rows.ndim != 2 or rows.shape[1] < 1:
        raise DataError(f"a chunk is a matrix of rows with at least one column, got shape {rows.shape}")
    if extra is not None and (extra.ndim != 2 or len(extra) != len(rows) or extra.dtype != np.float64):
        raise DataError(f"extra columns must be float64 of {len(rows)} rows, got {extra.dtype} of shape {extra.shape}")
    if not 1 <= threads <= 1024:
        raise ConfigError(f"threads must be between 1 and 1,024, got {threads}")
    _require_denormals()
    n, columns = len(rows), rows.shape[1] + (0 if extra is None else extra.shape[1])
    entries = columns * (columns + 1) // 2
    if n == 0:
        return np.zeros(entries)
    task = _Task(rows, extra, columns)
    size = _superblock(n, columns, threads)
    nodes = -(-n // size)
    if nodes == 1 or threads == 1:
        return task.run(0, n, size)
    # Whole subtrees of the cascade for each thread, as large as leaves every thread at least two.
    while nodes > 4 * threads:
        nodes, size = -(-nodes // 2), size * 2
    inner = _superblock(size, columns, 1)
    starts = range(0, n, size)
    pool = _pool(threads)
    sums = list(pool.map(lambda at: task.run(at, min(at + size, n), inner), starts))
    while len(sums) > 1:  # neighbours of equal weight; the odd last one goes up as it is
        pairs = [(sums[i], sums[i + 1]) for i in range(0, len(sums) - 1, 2)]
        for left, right in pairs:
            _add(pool, threads, left, right)
        sums = [left for left, _ in pairs] + ([sums[-1]] if len(sums) % 2 else [])
    return sums[0]


def _superblock(n: int, columns: int, threads: int) -> int:
    """Rows packed at once: 128·2^p, near 8 MiB, and small enough that every thread gets a share."""
    tiles = warm_gram_kernel()
    wanted = min(max(_PACKED_BYTES // (8 * columns), _LEAST_ROWS), _MOST_ROWS)
    if columns <= tiles.MACRO * tiles.NR:
        wanted = _NARROW_ROWS
    if threads > 1:
        wanted = min(wanted, max(n // (2 * threads), tiles.BLOCK))
    size = tiles.BLOCK
    while size * 2 <= wanted:
        size *= 2
    return size


class _Task:
    """The rows of a chunk, and how a run of superblocks becomes one node of the cascade."""

    def __init__(self, rows: np.ndarray, extra: np.ndarray | None, columns: int) -> None:
        self._rows, self._columns = rows, columns
        self._extra = np.ascontiguousarray(extra) if extra is not None else np.empty((len(rows), 0))
        self._plain = rows.dtype.itemsize > 2 and rows.flags.c_contiguous and rows.flags.aligned

    def run(self, start: int, end: int, size: int) -> np.ndarray:
        tiles, columns = warm_gram_kernel(), self._columns
        count = -(-columns // tiles.NR)
        narrow = count <= tiles.MACRO
        packed_rows = tiles.BLOCK if narrow else size
        panels, levels = _buffers(count * tiles.NR * packed_rows, tiles.level_size(size // tiles.BLOCK))
        entries = columns * (columns + 1) // 2
        forest: list[tuple[int, np.ndarray]] = []
        for at in range(start, end, size):
            rows = min(size, end - at)
            merge = bool(forest) and forest[-1][0] == 1
            out = forest.pop()[1] if merge else np.empty(entries)
            x, extra, first = self._slice(at, rows)
            if narrow:
                tiles.narrow(x, extra, first, rows, columns, panels, levels)
                level = tiles.fold(-(-rows // tiles.BLOCK), levels)
                tiles.write(columns, level, 0, count, 0, count, levels, merge, out)
            else:
                tiles.pack(x, first, rows, 0, x.shape[1], count, panels)
                tiles.pack(extra, first, rows, x.shape[1], extra.shape[1], count, panels)
                tiles.blank(rows, columns, count, panels)
                for j in range(0, count, tiles.MACRO):
                    right = min(j + tiles.MACRO, count)
                    for i in range(0, right, tiles.MACRO):
                        low = min(i + tiles.MACRO, right)
                        tiles.multiply(panels, rows, count, i, low, j, right, levels)
                        level = tiles.fold(-(-rows // tiles.BLOCK), levels)
                        tiles.write(columns, level, i, low, j, right, levels, merge, out)
            weight = 2 if merge else 1
            while forest and forest[-1][0] == weight:
                out = np.add(forest[-1][1], out, out=forest.pop()[1])
                weight *= 2
            forest.append((weight, out))
        total = forest.pop()[1]
        while forest:
            total = np.add(forest[-1][1], total, out=forest.pop()[1])
        return total

    def _slice(self, at: int, rows: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Rows the compiled loops can read, the extra columns, and where to begin in both."""
        if self._plain:
            return self._rows, self._extra, at
        x = self._rows[at : at + rows]
        x = _widened(x) if x.dtype.itemsize == 2 else np.array(x, order="C")
        return x, np.ascontiguousarray(self._extra[at : at + rows]), 0


def _widened(rows: np.ndarray) -> np.ndarray:
    """f16 or bf16 as f32: exact."""
    if rows.dtype == np.float16:
        return rows.astype(np.float32)
    return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _buffers(panels: int, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """This thread's scratch, kept from chunk to chunk: fresh pages would cost as much as packing."""
    held = getattr(_local, "held", None)
    if held is None or len(held[0]) < panels or len(held[1]) < levels:
        held = (np.empty(panels), np.empty(levels))
        _local.held = held
    return held


def _add(pool: ThreadPoolExecutor, threads: int, left: np.ndarray, right: np.ndarray) -> None:
    step = -(-len(left) // threads)
    parts = [slice(at, at + step) for at in range(0, len(left), step)]
    list(pool.map(lambda part: np.add(left[part], right[part], out=left[part]), parts))


def _pool(threads: int) -> ThreadPoolExecutor:
    key = (os.getpid(), threads)  # a forked child has none of its parent's threads
    with _lock:
        if key not in _pools:
            _pools[key] = ThreadPoolExecutor(threads, thread_name_prefix="headrace-gram")
        return _pools[key]


def _require_denormals() -> None:
    """A library built with -ffast-math may have told this thread's processor to round tiny numbers to zero."""
    if np.float64(5e-324) * np.float64(1.0) == 0.0:
        raise ConfigError(
            "this process rounds denormal numbers to zero (a library switched that on, or torch.set_flush_denormal): sums would have "
            "other bits than elsewhere. Switch it off, or load that library later"
        )


assert CROSS_CHUNK_BASE == 128  # the compiled loops fold 128 rows too: one base for both
