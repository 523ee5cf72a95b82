"""How are files brought into memory without standing in the trainer's way?

    mapper.map(channel, 7, more=3)    file 7: mapped, and summed where the file before it had its arrays; and up to three behind it, for the next calls
    mapper.open(path, 7, mapped)      opened; checked too, where it looks like the file before it
    mapper.went_by()                  a file was read to its end

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
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.compiled import CompiledLoops, address, warm_kernels
from headrace.files import SEGMENT_SUMS, MappedFile, first_bad_segment
from headrace.spool.batch_file import BatchFile, Kind, open_batch_file
from headrace.spool.channel import Channel

__all__ = ["FileMapper", "map_loops"]

map_loops = CompiledLoops("headrace.spool.map_kernels")
_FAST = 0.1
"""Seconds for a file, below which a millisecond of waiting shows."""
_IN_A_ROW = 4
"""Fast files that are followed by more of them."""
_MOST, _ENOUGH = 8, 8 << 20
"""Files and bytes that are mapped in one call: the first of them is waited for until all are summed."""
_MAX_SPANS = 64
_TRIES = 8
"""How often it is learned anew what files look like: where each has something of its own, they are not alike."""
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


class _Old:
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

    def take(self) -> np.ndarray:
        found: list[tuple[int, int]] = []
        try:
            while True:
                found.append(self._waiting.popleft())
        except IndexError:
            return np.array(found, np.int64) if found else _NOTHING

    def unmap(self) -> None:
        self._unmap(self.take())

    def close(self) -> None:
        """From now on it is unmapped at once."""
        self._closed = True
        self.unmap()


class _Memory:
    """A mapped file, for as long as an array of it is in use."""

    def __init__(self, at: int, size: int, private: bool, old: _Old) -> None:
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (at, not private)}
        self._at, self._size, self._old = at, size, old

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then it goes with the process
            self._old.add(self._at, self._size)


class FileMapper:
    """Maps the files of one consumer. Used by one thread."""

    def __init__(self, *, private: bool) -> None:
        """`private`: what is mapped may be written to; the files stay as they are."""
        self._protection = mmap.PROT_READ | (mmap.PROT_WRITE if private else 0)
        self._sharing = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        self._private = private
        self._old: _Old | None = None
        self._ready: dict[tuple[Channel, int], MappedFile] = {}
        """Files that were mapped with the last one."""
        self._mapped_at = 0.0
        self._kind: Kind | None = None
        """What the last file that was opened from its beginning has in common with others."""
        self._tries = _TRIES
        self._spans: tuple[tuple[int, int], ...] = ()
        """Where it had its arrays, sums of segments first: those of the next are likely to lie there too."""
        self._first = 0
        """How many these are."""
        self._wanted = np.zeros((_MAX_SPANS, 2), np.int64)
        self._mapped = np.zeros((_MOST, 2), np.int64)
        self._sums = np.zeros((_MOST, _MAX_SPANS, 2), np.uint64)
        self._last, self._fast = 0.0, 0

    def went_by(self) -> None:
        """A file was read to its end: the loops are brought where several were within a moment each."""
        now = time.monotonic()
        self._fast = self._fast + 1 if now - self._last < _FAST else 0
        self._last = now
        if self._fast == _IN_A_ROW and not map_loops.ready and sys.platform == "linux":
            warm_kernels(map_loops)

    def map(
        self, channel: Channel, seq: int, more: int = 0, *, whole: bool = True, judged: bool = False
    ) -> MappedFile | None:
        """The file, unless it cannot be opened, is none of ours, or has a verdict that is not known (`judged`). `more`: files behind it that
        are asked for next. `whole`: all of it will be checked."""
        if not map_loops.ready or channel.foreign or channel.suffix != ".safetensors":
            return None
        if (channel, seq) not in self._ready or time.monotonic() - self._mapped_at > _FAST:
            self._map(channel, seq, min(_MOST, 1 + more), len(self._spans) if whole else self._first, judged)
        return self._ready.pop((channel, seq), None)

    def open(self, path: Path | str, seq: int, mapped: MappedFile) -> BatchFile:
        """The mapped file. Where it is like those before it, and was summed as a whole, every byte of it is checked."""
        file = self._kind.open(path, mapped) if self._kind is not None else None
        if file is None:
            file = open_batch_file(Path(path), seq=seq, mapped=mapped)
            self._learn(file)
        return file

    def _learn(self, file: BatchFile) -> None:
        """The next file is likely to look like this one."""
        if file.container is None or len(file.container.spans) > _MAX_SPANS:
            return
        spans = file.container.spans
        first = [span for name, span in spans.items() if name.endswith(SEGMENT_SUMS)]
        self._spans = (*first, *(span for span in spans.values() if span not in first))
        self._first = len(first)
        self._wanted[: len(self._spans)] = self._spans
        if self._tries:
            self._tries -= 1
            self._kind = Kind.of(file)

    def _map(self, channel: Channel, seq: int, count: int, summed: int, judged: bool) -> None:
        self._ready.clear()  # asked for in another order than it was said, or long ago
        self._mapped_at = time.monotonic()
        loops = map_loops()
        if self._old is None:
            self._old = _Old()
        names = [os.fsencode(name) for n in range(seq, seq + count) for name in channel.names_of(n)]
        if judged:
            names[::2] = [b""] * count
        width = max(map(len, names)) + 1
        paths = np.frombuffer(b"".join([name.ljust(width, b"\0") for name in names]), np.uint8).reshape(-1, width)
        done = loops.map_summed(
            self._old.take(), paths, _HOW, self._protection, self._sharing, self._wanted, summed, self._mapped[:count], self._sums, _ENOUGH
        )  # fmt: skip
        sums = self._sums[:done, :summed].tolist()
        for n, (at, size) in enumerate(self._mapped[:done].tolist()):
            made = {
                span: f"{high:016x}{low:016x}"
                for span, (high, low) in zip(self._spans, sums[n], strict=False)
                if high or low
            }
            memory = _Memory(at, size, self._private, self._old)
            self._ready[channel, seq + n] = MappedFile(np.asarray(memory).data, made, _first_bad)

    @property
    def unused(self) -> bool:
        """Whether files are mapped that nobody uses: until the next one is."""
        return bool(self._old)

    def let_go(self) -> None:
        """Unmap them now: what was deleted takes its room on the disk until then."""
        if self._old is not None:
            self._old.unmap()

    def close(self) -> None:
        self._ready.clear()
        if self._old is not None:
            self._old.close()
