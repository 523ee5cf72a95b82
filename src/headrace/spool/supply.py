"""Which files are made ready before they are asked for, and what becomes of them afterwards.

    reader ── want(3) ──► background thread: judged, checked, cut into batches: 3, then 4 ──► take(3), microseconds
           ── finished(2) ──► told to whoever keeps count; unmapped once no batch of it is referred to

Files that look alike come on a conveyor once one of them was prepared, where there is one rank: see conveyor.py.

The trainer's thread only leaves notes. It wakes nobody, because to wake a thread takes 50 us of its own time, and up to
milliseconds where that thread is put on the same core: the background looks for itself, and two files are ready meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from headrace.buffers import BufferPool
from headrace.errors import HeadraceError
from headrace.metrics import Meter, Wait
from headrace.spool.ahead import Ahead
from headrace.spool.batch_file import BatchFile
from headrace.spool.channel import Channel
from headrace.spool.checker import FileChecker
from headrace.spool.conveyor import MOST_AHEAD, Conveyor
from headrace.spool.place import Place
from headrace.spool.provider import CIRCULAR_SPLITS
from headrace.spool.reader import Stripe

__all__ = ["SplitFiles", "Supply"]

_FILES_AHEAD, _BYTES_AHEAD = 2, 32 << 20
"""Files prepared beyond the one that is read: so many at least, and as many as have so many bytes. With one, the background thread waits for the trainer
whenever the trainer waited for it; of small ones several pass between two looks of the background."""
_SLICE = 0.001
"""Seconds between two looks at whether the background is still at the conveyor."""

_UNMAPPED_AFTER = 0.1
"""Seconds for which a file nobody uses may stay mapped."""


class Supply:
    """Makes files ready for one rank, in the background thread."""

    def __init__(
        self,
        ahead: Ahead[BatchFile],
        checker: FileChecker,
        place: Place,
        stripe: Stripe,
        batch_size: Callable[[], int],
        *,
        cuts: bool,
        gathers: bool,
        meter: Meter,
    ) -> None:
        """`cuts`: lay batches out in advance. `gathers`: in memory of their own, which is used again."""
        self.ahead, self._checker, self._place, self._stripe = ahead, checker, place, stripe
        ahead.beside = self.carry
        self._mapper, self.meter = checker.mapper, meter
        self.batch_size, self._cuts, self._gathers = batch_size, cuts, gathers
        self.alone = stripe.world_size == 1 and not gathers
        """Whether nobody else judges files, and they take no memory of our own: then more of them may be prepared."""
        self.conveyor = Conveyor(self._mapper, ahead.called, meter) if self.alone else None
        self._room: BufferPool | None = None
        self.make: Callable[[np.ndarray, int], Sequence[Any]] | None = None
        """What to make of rows that are gathered, so many a batch: tensors, once somebody has asked for some."""
        self._retired: list[BatchFile] = []
        """Files read to their end of which a batch is still in use."""

    def prepare(self, channel: Channel, seq: int, start: int) -> BatchFile:
        """File `seq`, ready to be read; NotYet names what is missing."""
        file = self._checker.prepare(channel, seq, start)
        fixed = not any(f.ragged for f in file.header.schema)
        if self._cuts and fixed and channel.parts == 1 and channel.split not in CIRCULAR_SPLITS:
            if self._gathers and self._room is None:  # a file that is read, two ahead, and one of which a batch is kept
                self._room = BufferPool(depth=4 * len(file.header.schema))
            room = self._room.array if self._room is not None else None
            file.cut(self.batch_size(), start, self._stripe.rank, self._stripe.world_size, room, self.make)
        self._place.require_lately()
        return file

    def convey(self, files: SplitFiles, channel: Channel, file: BatchFile, start: int, deep: int) -> bool:
        """Let what lies behind `file` come on the conveyor, where that is worth it; whether it does. In the background thread."""
        return self.conveyor is not None and self.hurried and self.conveyor.begin(files, channel, file, start, deep)

    @property
    def hurried(self) -> bool:
        """Whether files go by as fast as they can be brought."""
        return self._mapper.hurried

    def carry(self, until: float) -> bool:
        """Let the conveyor run, if files go by fast; whether any came. In the background thread."""
        came = False
        if self.conveyor is not None and self.conveyor.open:
            try:
                self._place.require_lately()
            except HeadraceError:  # goes up where the next file is prepared
                self.conveyor.drop()
            if not self.hurried:
                self.conveyor.end()
            came = self.conveyor.run(until)
        self._unmap_soon()
        return came

    def retire(self, file: BatchFile | None, at: float) -> None:
        """All of a file was delivered; none where no array of it is left to hold it. In the background thread. `at`: when it was (time.monotonic)."""
        self._mapper.went_by(at)
        if file is not None:
            file.stock = None  # what was not used of it would hold the file
            self._retired.append(file)
            self.ahead.later(self.let_go, "let go")

    def let_go(self) -> None:
        """Unmap files nobody uses any more. In the background: the trainer's own last reference would do it in its step."""
        self._retired = [f for f in self._retired if f.held]
        self._unmap_soon()

    def _unmap_soon(self) -> None:
        if self._mapper.unused:  # by the call that maps the next, if one comes soon
            soon = time.monotonic() + _UNMAPPED_AFTER
            self.ahead.later(self._mapper.let_go, "unmap", at=soon, sooner_if_missed=True)

    def clear(self) -> None:
        self._retired.clear()
        if self.conveyor is not None:
            self.conveyor.clear()
        self._mapper.close()


class SplitFiles:
    """What the reader of one split asks for."""

    def __init__(
        self,
        split: str,
        supply: Supply,
        channel: Callable[[str, int], Channel],
        *,
        deadline: float,
        entered: Callable[[str, int, int], None],
        finished: Callable[[str, int, int, int, BatchFile | None], None],
    ) -> None:
        """`entered`: (split, number, where it ends), before a file's first row is delivered. `finished`: (split, part, number, where it
        ends, the file unless it stays open), after its last."""
        self.split, self._supply, self._ahead, self._conveyor = split, supply, supply.ahead, supply.conveyor
        self._channel, self._deadline = channel, deadline
        self._on_entered, self._on_finished = entered, finished
        self._entered: dict[int, int] = {}
        self._ends: dict[tuple[int, int], int] = {}
        self._reading: dict[int, int] = {}
        """The file of each part before the one that is wanted next."""
        self._following: dict[int, tuple[int, int]] = {}
        """The first file of each part that is not prepared, and its first row."""
        self._deep = _FILES_AHEAD
        self._dropped = False

    def drop(self) -> None:
        """Somebody loaded another position: prepare nothing more."""
        self._dropped = True
        if self._conveyor is not None:
            self._conveyor.drop(self)
        self._ahead.forget(lambda key: key[0] == self.split)

    def want(self, part: int, seq: int, start: int) -> None:
        """Have this file prepared, and those behind it: where each begins is known once the one before it is open."""
        if self.split in CIRCULAR_SPLITS:  # there each file is asked for by itself
            self._ahead.want(
                (self.split, part, seq), partial(self._supply.prepare, self._channel(self.split, part), seq, start)
            )
        elif self._conveyor is None or not self._conveyor.carries(self, seq):
            self._ahead.soon(partial(self._wanted, part, seq, start))

    def _wanted(self, part: int, seq: int, start: int) -> None:
        if self._conveyor is not None and self._conveyor.brings(self):
            return  # and what lies before those it brings was prepared
        following = self._following.get(part)
        if following is None or following[0] <= seq:
            following = self._following[part] = (seq, start)
        self._reading[part] = seq - 1
        if following[0] < seq + self._deep // 2 + 1:
            self._prepare(part, *following)

    def _prepare(self, part: int, seq: int, start: int) -> None:
        def prepare() -> BatchFile:
            channel = self._channel(self.split, part)
            several = self._supply.alone and channel.parts == 1
            file = self._supply.prepare(channel, seq, start)
            if several and self._supply.hurried:
                self._deep = min(MOST_AHEAD, max(_FILES_AHEAD, _BYTES_AHEAD // max(1, file.nbytes)))
            following = (seq + 1, start + file.rows)
            if not file.last and self._following.get(part) == (seq, start):
                self._following[part] = following
                if several and self._supply.convey(self, channel, file, following[1], self._deep):
                    return file
                if following[0] <= self._reading[part] + self._deep:
                    self._prepare(part, *following)
            return file

        if not self._dropped:
            self._ahead.want((self.split, part, seq), prepare)

    def goes_on(self, seq: int, start: int) -> None:
        """The conveyor brings those before file `seq`, which goes the usual way. In the background thread."""
        self._following[0] = (seq, start)
        self._prepare(0, seq, start)

    def hold(self, part: int, seq: int, start: int, deadline: float) -> None:
        """Wait until a file is ready; it stays to be taken."""
        until = time.monotonic() + deadline
        if not self._carried(seq, deadline):
            self.want(part, seq, start)
            self._ahead.hold((self.split, part, seq), max(0.0, until - time.monotonic()))

    def _carried(self, seq: int, deadline: float) -> bool:
        """Wait until a file is ready that comes on the conveyor; False if it does not."""
        conveyor = self._conveyor
        if conveyor is None or not conveyor.carries(self, seq):
            return False
        if conveyor.wait(seq, 0.0):
            return True
        with Wait("spool.open", deadline=deadline, meter=self._supply.meter) as wait:
            while conveyor.carries(self, seq):
                if not conveyor.running:
                    self._ahead.ring()
                if conveyor.wait(seq, min(_SLICE, wait.remaining())):
                    return True
                self._ahead.require(wait, (self.split, 0, seq))
        return False

    def take(self, part: int, seq: int, start: int) -> BatchFile:
        key = (self.split, part, seq)
        file = self._ahead.ready(key)
        if file is None and self._conveyor is not None:
            file = self._conveyor.take(self, seq, start)
            if file is None and self._carried(seq, self._deadline):
                file = self._conveyor.take(self, seq, start)
            if file is not None:
                file.batches(self._supply.batch_size())
        if file is None:
            self.want(part, seq, start)
            file = self._ahead.take(key, self._deadline)
        self._ends[part, seq] = start + file.rows
        return file

    def entered(self, part: int, seq: int) -> None:
        if seq > self._entered.get(part, -1):
            self._entered[part] = seq
            self._on_entered(self.split, seq, self._ends[part, seq])

    def finished(self, part: int, seq: int, file: BatchFile | None) -> None:
        end = self._ends.pop((part, seq), None)
        if end is not None:
            self._on_finished(self.split, part, seq, end, file)
