"""How do small files reach a trainer that takes them faster than the interpreter can prepare them?

    background:  begin(lane, channel, file, 8, start, deep)     file 8 and those behind it are likely to look like `file`
                 run(until)                                     opens, maps and checks one after the other without the interpreter's lock
    trainer:     carries(lane, 8)                               whether it comes this way
                 wait(8, seconds), take(lane, 8, start)         whether it is ready; the file

Both look at a few numbers they share (`map_kernels`): how many files are ready and how many were taken. So a file costs the background no
Python at all, and the trainer never stands still because the background holds the lock. A file that is missing, was judged, or looks
in any way different ends it: what is ready is still taken, and the next goes the usual way, which says what is the matter with it.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

import numpy as np
import xxhash

from headrace.metrics import Meter, Wait
from headrace.spool.batch_file import AlikeFile, BatchFile, Kind
from headrace.spool.channel import Channel
from headrace.spool.mapping import FileMapper, Memory, map_loops, paths

__all__ = ["MOST_AHEAD", "Conveyor"]

MOST_AHEAD = 8
_RING = 2 * MOST_AHEAD
_MAX_HEADER = 64 << 10
_READY, _TAKEN, _OPEN, _FREED, _UNMAPPED, _WAITED = range(6)
"""Places in the numbers that both share: as map_kernels has them, which brings numba."""
_SHARED, _LINE = 8, 17
"""How many these are, and all, with those that only the loops use."""
_TRIES = 8
"""How often files that look alike are hoped for in vain before it is given up."""


class Lane(Protocol):
    """Who asks for files."""

    def goes_on(self, seq: int, start: int) -> None:
        """File `seq`, which begins at row `start`, and those behind it do not come on the conveyor."""
        ...


class _Pattern:
    """What a compiled loop compares files with."""

    def __init__(self, kind: Kind, channel: Channel) -> None:
        form = kind.form
        names = [os.fsencode(name) for name in channel.names_of(0)]
        self.kind, self.channel, self.rows = kind, channel, kind.header.rows
        self.names = paths(names)
        self.digits = np.array([name.rindex(b"/") + 1 for name in names], np.int64)
        self.about = np.zeros(4, np.int64)
        self.pieces = np.frombuffer(bytearray(b"".join(form.pieces)), np.uint8)
        self.bounds = np.cumsum([0, *map(len, form.pieces)]).astype(np.int64)
        places = {name: place for place, (name, *_) in enumerate(form.layout)}
        loops = map_loops()
        code = {
            "sum": places,
            "header": {"": loops.OWN_SUM},
            "number": {key: loops.NUMBER - n for n, key in enumerate(kind.NUMBERS)},
            "any": dict.fromkeys(kind.TEXTS, loops.ANY),
        }
        self.gaps = np.array([code[what][name] for what, name in form.gaps], np.int64)
        self.spans = np.array([(first, end) for _, first, end, *_ in form.layout], np.int64)
        least = loops.SHORTEST_BYTES
        self.short = [(k, first, end) for k, (_, first, end, *_) in enumerate(form.layout) if end - first < least]
        """Arrays the loop does not sum: (place, where they begin and end)."""
        self.usable = least <= len(self.pieces) <= _MAX_HEADER // 2


class Conveyor:
    """Brings the files of one split of one consumer, one after the other."""

    def __init__(self, mapper: FileMapper, called: np.ndarray, meter: Meter) -> None:
        """`called`: becomes 1 when the background thread has something else to do."""
        self._mapper, self._called = mapper, called
        self._waited = Wait("spool.ahead", hidden=True, meter=meter)
        self._lock = threading.Lock()
        """For who is on it: held for microseconds."""
        self._pattern: _Pattern | None = None
        """What those on it look like."""
        self._known: _Pattern | None = None
        """What the last ones looked like: the next are likely to."""
        self._lane: Lane | None = None
        self._seq = self._start = 0
        """The file at index 0, and its first row."""
        self._dropped = False
        """Nothing that is on it will be taken."""
        self.running = False
        """Whether the background is at it."""
        self._tries = _TRIES
        self._line = np.zeros(_LINE, np.int64)
        self._now = self._line.data
        """The same: a number of it is had in a third of the time."""
        self._ring, self._freed = np.zeros((_RING, 2), np.int64), np.zeros((_RING, 2), np.int64)
        self._where = np.zeros((_RING, 1), np.int64)
        self._scratch = np.zeros(_MAX_HEADER, np.uint8)

    # -------------------------------------------------------------------------------------- the trainer's

    def carries(self, lane: Lane, seq: int) -> bool:
        """Whether a file is on it, or comes next."""
        if lane is not self._lane or self._dropped:
            return False
        index, ready = seq - self._seq, self._now[_READY]
        return self._now[_TAKEN] <= index < ready or (index == ready and self._now[_OPEN] == 1)

    def brings(self, lane: Lane) -> bool:
        """Whether more files may come."""
        return lane is self._lane and not self._dropped and self._now[_OPEN] == 1

    def wait(self, seq: int, seconds: float) -> bool:
        """Whether a file that is carried is ready, within so many seconds."""
        until = time.monotonic_ns() + int(seconds * 1e9) if seconds else 0
        return map_loops().await_file(self._line, seq - self._seq, until) == 1

    def take(self, lane: Lane, seq: int, start: int) -> AlikeFile | None:
        """A file, if it is ready; None if it is not, or goes the usual way."""
        # Every line shows, as in get_batch: after a file's batches its code is no longer in the cache.
        with self._lock:
            pattern, now = self._pattern, self._now
            if pattern is None or lane is not self._lane or self._dropped:
                return None
            index = seq - self._seq
            if index != now[_TAKEN] or not map_loops().await_file(self._line, index, 0):
                return None
            now[_TAKEN] = index + 1  # the loop is far from using its place again
            at, size = self._ring[index % _RING].tolist()
            data = Memory(at, size, self._mapper.private, self._mapper.old).data
            if start != self._start + index * pattern.rows or (
                pattern.short and not self._short_are_right(index, data)
            ):
                self._drop()  # the usual way says what is wrong
                return None
            if now[_OPEN]:
                while now[_FREED] - now[_UNMAPPED] < _RING and (old := self._mapper.old.pop()) is not None:
                    self._freed[now[_FREED] % _RING] = old
                    now[_FREED] += 1
        return AlikeFile(pattern.kind, pattern.channel.names_of(seq)[1], data)

    def _short_are_right(self, index: int, data: np.ndarray) -> bool:
        """Whether arrays that are too short for the loop have the sums that the header says."""
        assert self._pattern is not None
        pattern, where = self._pattern, self._where[index % _RING].tolist()
        begin = len(data) - pattern.kind.end
        return all(
            xxhash.xxh3_128_hexdigest(data[begin + first : begin + end].tobytes()).encode() == data[where[k] : where[k] + 32].tobytes()
            for k, first, end in pattern.short
        )  # fmt: skip

    def drop(self, lane: Lane | None = None) -> None:
        """Nothing will be taken any more: of `lane`, or of any."""
        with self._lock:
            if self._lane is not None and (lane is None or lane is self._lane):
                self._drop()

    def _drop(self) -> None:
        self._dropped = True
        self._called[0] = 1

    # ----------------------------------------------------------------------------------- the background's

    @property
    def open(self) -> bool:
        """Whether there is something to do."""
        return self._now[_OPEN] == 1 or self._dropped

    def begin(self, lane: Lane, channel: Channel, file: BatchFile, start: int, deep: int) -> bool:
        """Bring the files behind `file`, the first of which begins at row `start` of its part. False if that cannot be done, or not yet."""
        if not map_loops.ready or channel.foreign or channel.parts > 1 or not self._tries or file.container is None:
            return False
        if self._dropped:
            self.clear()
        if self._now[_READY] > self._now[_TAKEN] or self._now[_OPEN]:
            return False
        if self._known is None or self._known.channel is not channel:
            kind = Kind.of(file)
            self._known = _Pattern(kind, channel) if kind is not None else None
        pattern = self._known
        if pattern is None or not pattern.usable:
            self._tries -= 1
            return False
        pattern.about[:] = file.header.seq + 1, start, pattern.rows, min(deep, MOST_AHEAD)
        with self._lock:
            self._lane, self._pattern = lane, pattern
            self._seq, self._start = file.header.seq + 1, start
            if self._where.shape[1] != len(pattern.spans):
                self._where = np.zeros((_RING, len(pattern.spans)), np.int64)
            self._line[:3] = 0, 0, 1
        return True

    def run(self, until: float) -> bool:
        """Bring files until `until` (time.monotonic), and no longer than there is nothing else to do; whether any came."""
        if self._dropped:
            self.clear()
        pattern, now = self._pattern, self._now
        if pattern is None or not now[_OPEN]:
            return False
        loops, before = map_loops(), now[_READY]
        now[_WAITED] = 0
        self.running = True
        why = loops.convey(
            self._line, self._called, pattern.names, pattern.digits, self._mapper.how, pattern.about, pattern.pieces, pattern.bounds, pattern.gaps,
            pattern.spans, self._scratch, self._ring, self._where, self._freed, int(until * 1e9),
        )  # fmt: skip
        self.running = False
        if now[_WAITED]:
            self._waited.over(time.perf_counter() - now[_WAITED] / 1e9)
        ready = now[_READY]
        if ready > before:
            self._tries = _TRIES
        if why != loops.ALIKE:
            if why == loops.ODD:
                self._tries -= 1
                self._known = None
            self.end()
        return ready > before

    def end(self) -> None:
        """Bring no more: what is on it is still taken."""
        pattern, lane, now = self._pattern, self._lane, self._now
        if pattern is None or lane is None or self._dropped or not now[_OPEN]:
            return
        with self._lock:
            now[_OPEN] = 0
            self._keep_freed()
        lane.goes_on(self._seq + now[_READY], self._start + now[_READY] * pattern.rows)

    def clear(self) -> None:
        """Unmap what is on it."""
        if self._pattern is None:
            return
        with self._lock:
            for index in range(self._now[_TAKEN], self._now[_READY]):
                self._mapper.old.add(*self._ring[index % _RING].tolist())
            self._keep_freed()
            self._line[:_SHARED] = 0
            self._lane = self._pattern = None
            self._dropped = False

    def _keep_freed(self) -> None:
        """What the loop did not come to unmap is unmapped later."""
        for index in range(self._now[_UNMAPPED], self._now[_FREED]):
            self._mapper.old.add(*self._freed[index % _RING].tolist())
        self._now[_UNMAPPED] = self._now[_FREED]
