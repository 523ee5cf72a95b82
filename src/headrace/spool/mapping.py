"""How are files brought into memory without standing in the trainer's way?

    mapper.map(channel, 7)          mapped, and summed where the file before it had its arrays
    mapper.learn(file)              where this one has them
    mapper.went_by(at)              a file was read to its end

By one call that leaves the interpreter alone (`map_kernels`), where files go by so fast that it shows. To bring numba takes a
second, so that is done, beside the trainer, once they do: a trainer that spends seconds on a file never pays for it. None is no
failure: whoever gets it opens the file step by step, and learns why it cannot be opened.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from headrace.compiled import CompiledLoops, address, warm_kernels
from headrace.files import SEGMENT_SUMS, MappedFile, first_bad_segment
from headrace.spool.batch_file import BatchFile
from headrace.spool.channel import Channel

__all__ = ["FileMapper", "Memory", "OldMemory", "map_loops", "paths"]

map_loops = CompiledLoops("headrace.spool.map_kernels")
_FAST = 0.1
"""Seconds for a file, below which a millisecond of waiting shows."""
_HURRIED = 0.01
"""Seconds for a file, below which a tenth of a millisecond does."""
_IN_A_ROW = 4
"""Fast files that are followed by more of them."""
_MAX_SPANS = 64
_HOW = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_NOTHING = np.zeros((0, 2), np.int64)


def _first_bad(data: memoryview, size: int, sums: np.ndarray, segments: Sequence[int]) -> int | None:
    """The same as files.first_bad_segment, in one call."""
    loops, rest = map_loops(), len(data) % size
    if size < loops.SHORTEST_BYTES or 0 < rest < loops.SHORTEST_BYTES or not len(segments):
        return first_bad_segment(data, size, sums, segments)
    raw = np.frombuffer(data, np.uint8)
    bad = loops.first_bad(address(raw), len(data), size, sums, np.asarray(segments, np.int64))
    return None if bad < 0 else int(bad)


class OldMemory:
    """Memory to be unmapped. Whoever drops the last array of it, the trainer perhaps, only notes that."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int]] = deque()
        self._closed = False
        self._unmap = map_loops().unmap

    def add(self, at: int, size: int) -> None:
        self._waiting.append((at, size))
        if self._closed:
            self.unmap()

    def __len__(self) -> int:
        return len(self._waiting)

    def pop(self) -> tuple[int, int] | None:
        """Address and size of one: whoever asks unmaps it."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def take(self) -> np.ndarray:
        """Those of all."""
        found: list[tuple[int, int]] = []
        while (one := self.pop()) is not None:
            found.append(one)
        return np.array(found, np.int64) if found else _NOTHING

    def unmap(self) -> None:
        self._unmap(self.take())

    def close(self) -> None:
        """From now on it is unmapped at once."""
        self._closed = True
        self.unmap()


class Memory:
    """A mapped file, for as long as an array of it is in use."""

    def __init__(self, at: int, size: int, private: bool, old: OldMemory) -> None:
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (at, not private)}
        self._at, self._size, self._old = at, size, old

    @property
    def data(self) -> np.ndarray:
        """All of it, which it lives as long as."""
        return np.asarray(self)

    def __del__(self, _ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ends():  # then it goes with the process
            self._old.add(self._at, self._size)


class FileMapper:
    """Maps the files of one consumer. Used by one thread."""

    def __init__(self, *, private: bool) -> None:
        """`private`: what is mapped may be written to; the files stay as they are."""
        self.private = private
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if private else 0)
        self.how = np.array([_HOW, protection, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED], np.int64)
        """How files are opened and mapped: flags, protection, kind."""
        self._old: OldMemory | None = None
        self._spans: tuple[tuple[int, int], ...] = ()
        """Where the last file had its arrays, sums of segments first: those of the next are likely to lie there too."""
        self._first = 0
        """How many these are."""
        self._wanted = np.zeros((_MAX_SPANS, 2), np.int64)
        self._mapped = np.zeros(2, np.int64)
        self._sums = np.zeros((_MAX_SPANS, 2), np.uint64)
        self._last, self._pace, self._fast = time.monotonic(), 0.0, 0

    @property
    def old(self) -> OldMemory:
        """What is to be unmapped."""
        if self._old is None:
            self._old = OldMemory()
        return self._old

    def went_by(self, at: float) -> None:
        """A file was read to its end, then (time.monotonic): the loops are brought where several were within a moment each."""
        self._pace, self._last = at - self._last, at
        self._fast = self._fast + 1 if self._pace < _FAST else 0
        if self._fast == _IN_A_ROW and not map_loops.ready and sys.platform == "linux":
            warm_kernels(map_loops)

    @property
    def hurried(self) -> bool:
        """Whether files go by so fast that the interpreter could not prepare them beside the trainer, for all one knows."""
        return self._pace < _HURRIED and time.monotonic() - self._last < 2 * _HURRIED

    def map(self, channel: Channel, seq: int, *, whole: bool = True, judged: bool = False) -> MappedFile | None:
        """The file, unless it cannot be opened, is none of ours, or has a verdict that is not known (`judged`). `whole`: all of it will be checked."""
        if not map_loops.ready or channel.foreign or channel.suffix != ".safetensors":
            return None
        names = [os.fsencode(name) for name in channel.names_of(seq)]
        summed = len(self._spans) if whole else self._first
        if not map_loops().map_summed(
            self.old.take(), paths([b"" if judged else names[0], names[1]]), self.how, self._wanted, summed, self._mapped, self._sums
        ):  # fmt: skip
            return None
        made = {
            span: f"{high:016x}{low:016x}"
            for span, (high, low) in zip(self._spans, self._sums[:summed].tolist(), strict=False)
            if high or low
        }
        memory = Memory(*self._mapped.tolist(), self.private, self.old)
        return MappedFile(memory.data.data, made, _first_bad)

    def learn(self, file: BatchFile) -> None:
        """The next file is likely to have its arrays where this one has them."""
        if file.container is None or len(file.container.spans) > _MAX_SPANS:
            return
        spans = file.container.spans
        first = [span for name, span in spans.items() if name.endswith(SEGMENT_SUMS)]
        self._spans = (*first, *(span for span in spans.values() if span not in first))
        self._first = len(first)
        self._wanted[: len(self._spans)] = self._spans

    @property
    def unused(self) -> bool:
        """Whether files are mapped that nobody uses: until the next one is."""
        return bool(self._old)

    def let_go(self) -> None:
        """Unmap them now: what was deleted takes its room on the disk until then."""
        if self._old is not None:
            self._old.unmap()

    def close(self) -> None:
        if self._old is not None:
            self._old.close()


def paths(names: Sequence[bytes]) -> np.ndarray:
    """Paths as a compiled loop takes them: a line each, ended by zeros; they may be written to."""
    width = max(map(len, names)) + 1
    return np.frombuffer(bytearray(b"".join([name.ljust(width, b"\0") for name in names])), np.uint8).reshape(-1, width)
