"""Verdicts: whether a file may be read, decided once for all ranks before any rank reads it.

    rank k mod W    checks all of file k and links the verdict
    other ranks     wait for the verdict, then check the rows they will deliver

A bad file goes to the quarantine and counts as missing, so the provider makes it again. A bad file in the timestamped `.pt` layout, whose
provider makes no file again, counts as a file without rows. If a rank is slow to judge, the others judge after `patience` seconds; the
exclusive link decides which verdict stands. A good verdict is replaced if a later process finds the file bad. So no
flipped bit reaches a trainer, and all ranks read the same files.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headrace.batch import BatchSpec, numpy_dtype
from headrace.errors import DataError, EndOfData, FileCorrupt
from headrace.runtime.prefetch import NotReady
from headrace.spool.batch_file import BatchFile, FileHeader, open_batch_file
from headrace.spool.channel import Channel, Verdict
from headrace.spool.folder import patiently
from headrace.spool.rank_lock import RankLock
from headrace.spool.rows import Stripe
from headrace.spool.settings import ConsumerSettings


class FileChecker:
    """Opens, checks and judges files for one rank. Used by the background thread."""

    def __init__(
        self,
        meta: Mapping[str, Any],
        stripe: Stripe,
        lock: RankLock,
        settings: ConsumerSettings,
        *,
        on_bad: Callable[[str], None],
        writable: bool,
    ) -> None:
        """`on_bad`: gets a sentence for every file that was set aside. `writable`: whether the trainer may write to the arrays of a file; the file
        does not change."""
        self._meta, self._stripe, self._lock = meta, stripe, lock
        self._patience, self._deadline = settings.verdict_patience, settings.deadline
        self._on_bad, self._writable = on_bad, writable
        self._seen: dict[tuple[str, int, int], float] = {}
        """When each file that has no verdict yet was first seen."""

    def open(self, channel: Channel, seq: int, start: int) -> BatchFile:
        """Open, judge and check file `seq`, which has to begin at row `start` of the part; NotReady names what is missing."""
        self._lock.require()
        key = (channel.split, channel.part, seq)
        mine = seq % self._stripe.world_size == self._stripe.rank or channel.circular
        verdict, path = channel.verdict(seq), channel.find(seq)
        if path is None:
            self._seen.pop(key, None)
            if verdict is not None and not verdict.good:
                return self._wait_for_remake(channel, seq, start, verdict.reason)
            self._refuse_beyond_the_end(channel, seq, start)
            raise NotReady(
                "spool.empty",
                f"File {seq} of {channel} in {channel.folder.path} is not there. Is its provider running, and not at an error?",
            )
        if verdict is not None and not verdict.good:
            channel.set_aside(seq, verdict.reason)
            return self._wait_for_remake(channel, seq, start, verdict.reason)
        since = self._seen.setdefault(key, time.monotonic())
        if verdict is None and not mine and time.monotonic() - since <= self._patience:
            raise NotReady(
                "spool.verdict",
                f"Rank {seq % self._stripe.world_size} has not judged file {seq} of {channel} in {channel.folder.path}. Is that rank running?",
            )
        file = self._checked(channel, seq, start, path, verdict, everything=mine or verdict is None)
        self._seen.pop(key, None)
        return file

    def _checked(
        self, channel: Channel, seq: int, start: int, path: Path, verdict: Verdict | None, *, everything: bool
    ) -> BatchFile:
        """Check `everything`, or the rows that this rank delivers; publish a verdict if there is none, and follow the one that stands."""
        file, problem = None, ""
        try:
            file = self._opened(channel, seq, start, path)
            own = (0, 1) if everything else self._stripe.rows_of(channel.part, channel.parts, start)
            if own is not None:
                file.check(own[0], None, own[1])
        except FileCorrupt as error:
            if not os.path.lexists(path):
                raise NotReady("spool.empty", f"File {seq} of {channel} was taken away while it was opened.") from error
            problem = str(error)
        decide = partial(patiently, f"judging {channel} {seq}", deadline=self._deadline)
        if problem and verdict is not None:
            # The file was good when it was judged. Ranks that read it checked their rows themselves, and a file that is made again has the same rows.
            decide(lambda: channel.condemn(seq, problem))
            verdict = Verdict(good=False, reason=problem)
        elif verdict is None and self._stripe.world_size == 1 and not problem:
            verdict = Verdict(good=True)  # no other rank waits for it, and a full disk may have no space for it
        elif verdict is None:
            verdict = decide(lambda: channel.judge(seq, problem))
        if file is not None and not problem and verdict.good:
            return file
        reason = verdict.reason or problem
        decide(lambda: channel.set_aside(seq, reason))
        self._on_bad(f"{channel} {seq}: bad, set aside: {reason}")
        return self._wait_for_remake(channel, seq, start, reason)

    def _opened(self, channel: Channel, seq: int, start: int, path: Path) -> BatchFile:
        """Open a file and compare its header with the channel and the meta; FileCorrupt or DataError if they differ."""
        file = open_batch_file(path, split=channel.split, seq=seq, private=self._writable)
        header, wanted = file.header, BatchSpec.from_json(self._meta["batch_schema"])
        if (header.split, header.seq, header.part) != (channel.split, seq, channel.part):
            raise FileCorrupt(
                f"{path} says it is file {header.seq} of {header.split} part {header.part}: it was renamed or moved"
            )
        ours = self._meta.get("headrace")
        if [replace(f, role=None) for f in header.schema] != [replace(f, role=None) for f in wanted]:
            raise DataError(
                f"{path} holds {[f.to_json() for f in header.schema]}, the spool's meta says {[f.to_json() for f in wanted]}. It was made by another provider: "
                "remove it, or start over with force_regenerate=True (--force_regenerate)"
            )
        if ours and header.job != ours["job"]:
            raise DataError(
                f"{path} was made for job {header.job}, this spool is {ours['job']}: another provider wrote into it. Remove the file"
            )
        if ours and not channel.circular and header.first != start:
            raise DataError(
                f"{path} begins at row {header.first:,} of its part, the files before it end at {start:,}: files of two spools were mixed"
            )
        return file

    def _wait_for_remake(self, channel: Channel, seq: int, start: int, reason: str) -> BatchFile:
        """NotReady until a bad file is made again. In the timestamped layout it is never made again: returns a file without rows."""
        if not channel.foreign:
            raise NotReady(
                "spool.remake",
                f"File {seq} of {channel} in {channel.folder.path} was bad ({reason}). Is its provider running, to make it again?",
            )
        schema = BatchSpec.from_json(self._meta["batch_schema"])
        header = FileHeader(
            split=channel.split, seq=seq, schema=schema, rows=0, first=start, batch_size=self._meta["batch_size"]
        )
        arrays = {f.name: np.empty((0, *f.shape), numpy_dtype(f.dtype)) for f in schema}
        return BatchFile(channel.path(seq), header, arrays, lambda *_: None)

    def _refuse_beyond_the_end(self, channel: Channel, seq: int, start: int) -> None:
        """EndOfData if the file before `seq` is the last of its part. Needed by a consumer that starts after the last file was read."""
        path = channel.find(seq - 1) if not channel.foreign and channel.parts == 1 and seq > 0 else None
        with contextlib.suppress(FileCorrupt):
            if path is not None and open_batch_file(path).header.last:
                raise EndOfData(
                    f"{channel} of {channel.folder.path} ended after {start:,} samples; start a new spool to go on"
                )
