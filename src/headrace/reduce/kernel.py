"""The Gram of one chunk: the same bits on every processor, with any number of threads.

    chunk_gram(rows)                    k x k, f64, for f64, f32, f16 rows, or bf16 as uint16
    chunk_gram_packed(rows, extra)      the upper triangle as one vector; `extra`: more columns, f64 (ones, targets)

Each entry is `pairwise_sum` over the rows in order with base 128, products fused into the left folds. Products of f32, f16 and
bf16 numbers are exact in f64, so for such rows this equals multiplying and adding one after the other. Up to 256 columns threads
take subtrees of rows; beyond that they pack a superblock of rows together and then share its tiles.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from headrace.errors import ConfigError, DataError
from headrace.metrics import Wait
from headrace.reduce.partition import CROSS_CHUNK_BASE
from headrace.runtime.compiled import KernelModule

T = TypeVar("T")
R = TypeVar("R")
_NAMES = {"float64": "f64", "float32": "f32", "float16": "f16", "uint16": "bf16"}
_PACKED_BYTES = 64 << 20
"""Packed rows of a superblock. More rows mean fewer visits to the matrix: GFLOP/s at k = 2048 with 256, 512, 1,024, 2,048 and
4,096 rows: 25.8, 32.0, 36.4, 38.5, 40.0."""
_LEAST_ROWS, _MOST_ROWS = 512, 4096
_WORTH_SHARING = 16_000_000
"""Multiply-adds below which one thread does it all: they take 1 ms at most, and to wake another thread and wait for it takes 0.1 to 0.3 ms."""
_local = threading.local()


def dtype_name(dtype: np.dtype) -> str:
    """f64, f32, f16, or bf16 for uint16 (numpy has no bfloat16)."""
    name = _NAMES.get(dtype.name)
    if name is None or not dtype.isnative:
        raise DataError(f"rows must be float64, float32, float16 or bfloat16, in native byte order; got {dtype.str}")
    return name


def as_rows(value: Any) -> np.ndarray:
    """An array, a torch tensor or lists as rows the kernel takes; bfloat16 becomes uint16 without a copy."""
    if isinstance(value, np.ndarray):
        return value
    if type(value).__module__.partition(".")[0] == "torch":
        import torch

        tensor = value.detach()
        tensor = tensor.cpu() if tensor.device.type != "cpu" else tensor
        if tensor.dtype == torch.bfloat16:
            return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
        return tensor.numpy()
    return np.asarray(value)


_tiles = KernelModule("headrace.reduce.tiles")


def chunk_gram(rows: Any, *, threads: int = 1) -> np.ndarray:
    """The k x k Gram matrix of a chunk of rows, f64, symmetric. `threads` share the work and never change the bits."""
    rows = as_rows(rows)
    return unpack_upper(chunk_gram_packed(rows, threads=threads), rows.shape[1])


def unpack_upper(packed: np.ndarray, k: int) -> np.ndarray:
    """The full k x k matrix of a packed upper triangle."""
    if packed.shape != (k * (k + 1) // 2,):
        raise DataError(f"a packed Gram of {k} columns has {k * (k + 1) // 2:,} entries, got shape {packed.shape}")
    full, at = np.empty((k, k)), 0
    for i in range(k):
        full[i, i:] = full[i:, i] = packed[at : at + k - i]
        at += k - i
    return full


def chunk_gram_packed(rows: Any, extra: np.ndarray | None = None, *, threads: int = 1) -> np.ndarray:
    """The upper triangle of the Gram of [rows, extra], row by row, in one vector.

    `rows`: an array, a torch tensor or lists. `extra`: more columns, f64. `threads` share the work and never change the bits.
    """
    rows = as_rows(rows)
    dtype_name(rows.dtype)
    if rows.ndim != 2 or rows.shape[1] < 1:
        raise DataError(f"a chunk is a matrix of rows with at least one column, got shape {rows.shape}")
    if extra is not None and (extra.ndim != 2 or len(extra) != len(rows) or extra.dtype != np.float64):
        raise DataError(f"extra columns must be float64 of {len(rows)} rows, got {extra.dtype} of shape {extra.shape}")
    if not 1 <= threads <= 1024:
        raise ConfigError(f"threads must be between 1 and 1,024, got {threads}")
    n, columns = len(rows), rows.shape[1] + (0 if extra is None else extra.shape[1])
    entries = columns * (columns + 1) // 2
    if n == 0:
        return np.zeros(entries)
    if n * entries < _WORTH_SHARING:
        threads = 1
    return _Task(rows, extra, columns).gram(threads)


class _Task:
    """The Gram of one chunk.

    Threads share a narrow matrix by subtrees of rows, and a wide one by tiles over rows that all threads packed together. Neither changes
    how an entry is computed.
    """

    def __init__(self, rows: np.ndarray, extra: np.ndarray | None, columns: int) -> None:
        self._tiles = _tiles()
        self._rows, self._columns = rows, columns
        self._extra = np.ascontiguousarray(extra) if extra is not None else np.empty((len(rows), 0))
        self._plain = rows.dtype.itemsize > 2 and rows.flags.c_contiguous and rows.flags.aligned
        self._panels = -(-columns // self._tiles.NR)
        self._entries = columns * (columns + 1) // 2

    def gram(self, threads: int) -> np.ndarray:
        n, block = len(self._rows), self._tiles.BLOCK
        if self._panels <= self._tiles.MACRO:
            size = _node_rows(n, threads, block)
            return _cascade(_share(range(0, n, size), lambda at: self._node(at, min(size, n - at)), threads))
        size = _superblock(self._columns, block)
        return _cascade(self._wide(at, min(size, n - at), threads) for at in range(0, n, size))

    def _node(self, at: int, rows: int) -> np.ndarray:
        """The sum of some rows of a narrow matrix: one macro tile."""
        tiles, count = self._tiles, self._panels
        panels = _scratch("panels", count * tiles.NR * tiles.BLOCK)
        x, extra, first = self._slice(at, rows)
        return self._multiplied([(0, count, 0, count)], x, extra, first, rows, panels, 1)

    def _wide(self, at: int, rows: int, threads: int) -> np.ndarray:
        """The sum of a superblock of a wide matrix."""
        tiles, count = self._tiles, self._panels
        # Kept from chunk to chunk by the thread that calls: fresh pages would cost as much as packing.
        panels = _scratch("panels", count * tiles.NR * -(-rows // tiles.BLOCK) * tiles.BLOCK)
        step = tiles.BLOCK * max(1, -(-rows // (4 * threads * tiles.BLOCK))) if threads > 1 else rows

        def pack(start: int) -> np.ndarray:
            many = min(step, rows - start)
            x, extra, first = self._slice(at + start, many)
            tiles.pack_of[x.dtype.name](x, extra, first, many, count, panels[start * count * tiles.NR :])
            return x[:0]

        packed = _share(range(0, rows, step), pack, threads)[0]
        return self._multiplied(self._tile_list(threads), packed, self._extra[:0], 0, rows, panels, threads)

    def _multiplied(
        self,
        work: list[tuple[int, int, int, int]],
        x: np.ndarray,
        extra: np.ndarray,
        first: int,
        rows: int,
        panels: np.ndarray,
        threads: int,
    ) -> np.ndarray:
        """The packed triangle of macro tiles over so many rows: of `x` from `first` on, or in the panels where `x` is empty."""
        tiles, out = self._tiles, np.empty(self._entries)

        def one(tile: tuple[int, int, int, int]) -> None:
            levels = _scratch("levels", tiles.level_size(-(-rows // tiles.BLOCK)))
            tiles.multiply_of[x.dtype.name](x, extra, first, rows, self._columns, *tile, panels, levels, out)

        _share(work, one, threads)
        return out

    def _tile_list(self, threads: int) -> list[tuple[int, int, int, int]]:
        """Macro tiles of the upper triangle as ranges of panels (i, i, j, j), the heaviest first; narrower ones where there
        would be too few to go round."""
        macro, count = self._tiles.MACRO, self._panels
        strip = macro
        while True:
            found = [
                (i, min(i + macro, j + strip, count), j, min(j + strip, count))
                for j in range(0, count, strip)
                for i in range(0, min(j + strip, count), macro)
            ]
            if threads == 1 or len(found) >= 8 * threads or strip <= macro // 8:
                return sorted(
                    found, key=lambda t: (-sum(max(0, min(t[1], j + 1) - t[0]) for j in range(t[2], t[3])), t)
                )
            strip //= 2

    def _slice(self, at: int, rows: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Rows the compiled loops can read, the extra columns, and where to begin in both."""
        if self._plain:
            return self._rows, self._extra, at
        x = self._rows[at : at + rows]
        x = _widened(x) if x.dtype.itemsize == 2 else np.array(x, order="C")
        return x, np.ascontiguousarray(self._extra[at : at + rows]), 0


def _widened(rows: np.ndarray) -> np.ndarray:
    """f16, or bf16 as uint16, as f32: exact."""
    if rows.dtype == np.float16:
        return rows.astype(np.float32)
    return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)


def as_f64(values: np.ndarray) -> np.ndarray:
    """Real numbers, or bf16 as uint16, as f64: exact, but for whole numbers beyond 2^53."""
    return (_widened(values) if values.dtype == np.uint16 else values).astype(np.float64, copy=False)


def _superblock(columns: int, block: int) -> int:
    """Rows packed at once: 128·2^p."""
    wanted = min(max(_PACKED_BYTES // (8 * columns), _LEAST_ROWS), _MOST_ROWS)
    size = block
    while size * 2 <= wanted:
        size *= 2
    return size


def _node_rows(n: int, threads: int, block: int) -> int:
    """Rows of the subtrees that threads take, 128·2^p: as large as leaves no thread idle for more than a thirtieth of the time."""
    size = block
    while size < n:
        size *= 2
    while size > block:
        nodes = -(-n // size)
        rounds = -(-nodes // threads)
        if rounds * size * threads <= n * 31 / 30 or nodes >= 16 * threads:
            break
        size //= 2
    return size


_LARGE_PAGE = (2 << 20) // 8
_SMALL = (1 << 20) // 8
"""Doubles."""


def _scratch(what: str, size: int) -> np.ndarray:
    """This thread's buffer, kept: fresh pages would cost as much as packing."""
    held = getattr(_local, what, None)
    if held is None or len(held) < size:
        held = _in_large_pages(size) if size > _SMALL else np.empty(size)
        setattr(_local, what, held)
    return held


def _in_large_pages(size: int) -> np.ndarray:
    """Memory that begins with a large page: numpy asks for those from 4 MiB on. Small ones lie anywhere, and share sets of the second-level cache
    in one process and not in the next (k = 2,048, one thread: 35 to 40 GFLOP/s, 41 to 43 so)."""
    room = np.empty(max(size, _LARGE_PAGE) + _LARGE_PAGE)
    begin = -room.ctypes.data % (8 * _LARGE_PAGE) // 8
    return room[begin : begin + size]


def _share(work: Iterable[T], do: Callable[[T], R], threads: int) -> list[R]:
    """What `do` gives for each item of `work`, on so many threads."""

    def one(item: T) -> R:
        _require_denormals()
        return do(item)

    if threads == 1:
        return list(map(one, work))
    with Wait("reduce.threads"):
        return list(_pool(threads, os.getpid()).map(one, work))


def _cascade(blocks: Iterable[np.ndarray]) -> np.ndarray:
    """The sum of blocks of equal weight, and a lighter last one, as a binary tree by index. Overwrites them."""
    forest: list[tuple[int, np.ndarray]] = []
    for total in blocks:
        weight = 1
        while forest and forest[-1][0] == weight:
            total = _added(forest.pop()[1], total)
            weight *= 2
        forest.append((weight, total))
    return functools.reduce(lambda right, left: _added(left, right), [total for _, total in reversed(forest)])


def _added(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.add(left, right, out=left)


@functools.cache
def _pool(threads: int, pid: int) -> ThreadPoolExecutor:
    """The threads of process `pid`: a forked child has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="headrace-gram")


def _require_denormals() -> None:
    """ConfigError if this thread rounds denormal numbers to zero, as a library built with -ffast-math may have made it do."""
    if np.float64(5e-324) * np.float64(1.0) == 0.0:
        raise ConfigError(
            "this process rounds denormal numbers to zero (a library switched that on, or torch.set_flush_denormal): sums would have "
            "other bits than elsewhere. Switch it off, or load that library later"
        )


assert CROSS_CHUNK_BASE == 128  # the compiled loops fold 128 rows too: one base for both
