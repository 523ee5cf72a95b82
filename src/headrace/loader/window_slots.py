"""Shared memory in which a worker process leaves a window, so that no pipe copies it.

    slots, descriptor = WindowSlots.create(count, size)     at the trainer, for one worker
    slots = WindowSlots(descriptor, count, size)            at the worker
    slot = slots.put(arrays)                                at the worker; None: there is no room, send them another way
    arrays = slots.get(slot, [(np.int32, 640), …])          at the trainer: views, and nothing is copied

The memory has no name, so nothing is left of it when both processes are gone, whatever ended them. A slot is the trainer's from
`put` until the last view of it is gone; then its mark says that it is free. Only the worker sets a mark, only the trainer clears it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

_LINE = 64


def shared_memory_works() -> bool:
    """Whether this system has memory without a name that two processes can share."""
    return hasattr(os, "memfd_create")


class WindowSlots:
    """Slots of equal size in memory that two processes share. Pages that were never used take no memory."""

    def __init__(self, descriptor: int, count: int, size: int) -> None:
        self._size = _whole(size, mmap.PAGESIZE)
        self._first = _whole(count, mmap.PAGESIZE)
        self._map = mmap.mmap(descriptor, self._first + count * self._size)
        self._marks = np.frombuffer(self._map, np.uint8, count)
        self._owner = os.getpid()

    @classmethod
    def create(cls, count: int, size: int) -> tuple[WindowSlots, int]:
        """New slots, all free, and the descriptor that another process finds them by. Close it once it was sent."""
        descriptor = os.memfd_create("headrace-windows", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, _whole(count, mmap.PAGESIZE) + count * _whole(size, mmap.PAGESIZE))
            return cls(descriptor, count, size), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def free(self) -> int:
        """How many slots are free."""
        return int(np.count_nonzero(self._marks == 0))

    def put(self, arrays: Sequence[np.ndarray]) -> int | None:
        """Copy arrays into a free slot; its number, or None where they do not fit or no slot is free."""
        if sum(_whole(a.nbytes, _LINE) for a in arrays) > self._size:
            return None
        slot = int(np.argmin(self._marks))  # the first that is free: its memory was used before
        if self._marks[slot]:
            return None
        at = self._first + slot * self._size
        for array in arrays:
            flat = array.reshape(-1)
            np.frombuffer(self._map, flat.dtype, len(flat), at)[:] = flat
            at += _whole(array.nbytes, _LINE)
        self._marks[slot] = 1
        return slot

    def get(self, slot: int, shapes: Iterable[tuple[Any, int]]) -> list[np.ndarray]:
        """The arrays in a slot, of these types and lengths, as views. The slot is free again once the last of them is gone."""
        held = np.frombuffer(self._map, np.uint8, self._size, self._first + slot * self._size)
        weakref.finalize(held, self._let_go, slot).atexit = False
        arrays, at = [], 0
        for dtype, length in shapes:
            size = np.dtype(dtype).itemsize * length
            arrays.append(held[at : at + size].view(dtype))
            at += _whole(size, _LINE)
        return arrays

    def _let_go(self, slot: int) -> None:
        if os.getpid() == self._owner:  # a fork's copy of a view says nothing about the trainer's
            self._marks[slot] = 0


def _whole(size: int, unit: int) -> int:
    """`size` rounded up to whole units."""
    return -(-size // unit) * unit
