"""May a file be read? One verdict for all ranks, given before any rank reads it.

    rank k mod W    checks all of file k and links the verdict
    other ranks     wait for the verdict, then check the rows they will deliver

A bad file goes to the quarantine and counts as missing, so the provider makes it again. A file in the timestamped `.pt` layout, whose provider
makes nothing again, counts as a file without rows. A rank that is slow to judge is overtaken by the others after `patience` seconds; the
exclusive link decides whose verdict stands. A file that was good once and is bad when a later process looks again is condemned anew. So no
flipped bit reaches a trainer, and no two ranks ever disagree about which file was read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.batch import BatchSpec, numpy_dtype
from headrace.errors import DataError, EndOfData, FileCorrupt, StorageError
from headrace.runtime.prefetch import NotReady
from headrace.spool.batch_file import BatchFile, FileHeader, open_batch_file
from headrace.spool.channel import Channel, Verdict
from headrace.spool.folder import patiently
from headrace.spool.meta import CIRCULAR_SPLITS
from headrace.spool.rank_lock import RankLock
from headrace.spool.rows import Stripe


class FileChecker:
    """Opens, checks and judges files for one rank. Used by the background thread."""

    def __init__(
        self,
        meta: Mapping[str, Any],
        stripe: Stripe,
        lock: RankLock,
        *,
        patience: float,
        deadline: float,
        on_bad: Callable[[str], None],
        writable: bool,
    ) -> None:
        """`patience`: seconds to wait for the verdict of another rank. `deadline`: seconds to wait for room on the disk. `on_bad`: gets a sentence
        for every file that was set aside. `writable`: rows are handed out as views that the trainer may write to; the file stays as it is."""
        self._meta, self._stripe, self._lock = meta, stripe, lock
        self._patience, self._deadline, self._on_bad, self._writable = patience, deadline, on_bad, writable
        self._seen: dict[tuple[str, int, int], float] = {}
        """When each file that has no verdict yet was first seen."""
        self._opened_before: dict[str, set[str]] = {}
        """Names in the timestamped layout, by split: files that were opened, or that may lie where reading began."""
        self._followed: set[tuple[str, int, int]] = set()
        """Files after which another comes."""

    def open(self, channel: Channel, seq: int, start: int) -> BatchFile:
        """File `seq`, opened, judged and checked; NotReady names what is missing. `start`: row of the part at which it begins."""
        self._lock.require()
        key = (channel.split, channel.part, seq)
        mine = seq % self._stripe.world_size == self._stripe.rank or channel.split in CIRCULAR_SPLITS
        verdict, path = channel.verdict(seq), channel.find(seq)
        if channel.foreign and path is not None:
            self._known(channel, seq).add(path.name)
        if path is None:
            self._seen.pop(key, None)
            if verdict is not None and not verdict.good:
                return self._wait_for_remake(channel, seq, start, verdict.reason)
            if channel.foreign:
                self._refuse_recount(channel, seq)
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
        """Check all of a file, or the rows this rank will deliver; publish what follows from it, and go by the verdict that stands."""
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
        what, patience = f"judging {channel} {seq}", self._deadline
        if problem and verdict is not None:
            # It was good when it was judged. Ranks that read it checked their rows themselves; made again it has the same rows.
            patiently(what, lambda: channel.condemn(seq, problem), deadline=patience, hidden=True)
            verdict = Verdict(good=False, reason=problem)
        elif verdict is None and self._stripe.world_size == 1 and not problem:
            verdict = Verdict(good=True)  # no other rank waits for it, and a full disk may have no room for it
        elif verdict is None:
            verdict = patiently(what, lambda: channel.judge(seq, problem), deadline=patience, hidden=True)
        if file is not None and not problem and verdict.good:
            return file
        reason = verdict.reason or problem
        patiently(
            what, lambda: channel.set_aside(seq, reason), deadline=patience, hidden=True, retry=(StorageError, OSError)
        )
        self._on_bad(f"{channel} {seq}: bad, set aside: {reason}")
        return self._wait_for_remake(channel, seq, start, reason)

    @functools.cached_property
    def _schema(self) -> tuple[Any, ...]:
        return tuple((f.name, f.dtype, f.shape, f.ragged) for f in BatchSpec.from_json(self._meta["batch_schema"]))

    def _opened(self, channel: Channel, seq: int, start: int, path: Path) -> BatchFile:
        """The file, whose header says what it has to say here."""
        file = open_batch_file(path, split=channel.split, seq=seq, private=self._writable)
        header = file.header
        if (header.split, header.seq, header.part) != (channel.split, seq, channel.part):
            raise FileCorrupt(
                f"{path} says it is file {header.seq} of {header.split} part {header.part}: it was renamed or moved"
            )
        ours = self._meta.get("headrace")
        if tuple((f.name, f.dtype, f.shape, f.ragged) for f in header.schema) != self._schema:
            wanted = BatchSpec.from_json(self._meta["batch_schema"])
            raise DataError(
                f"{path} holds {[f.to_json() for f in header.schema]}, the spool's meta says {[f.to_json() for f in wanted]}. It was made by another provider: "
                "remove it, or start over with force_regenerate=True (--force_regenerate)"
            )
        if ours and header.job != ours["job"]:
            raise DataError(
                f"{path} was made for job {header.job}, this spool is {ours['job']}: another provider wrote into it. Remove the file"
            )
        if ours and channel.split not in CIRCULAR_SPLITS and header.first != start:
            raise DataError(
                f"{path} begins at row {header.first:,} of its part, the files before it end at {start:,}: files of two spools were mixed"
            )
        return file

    def _wait_for_remake(self, channel: Channel, seq: int, start: int, reason: str) -> BatchFile:
        """A bad file is waited for, unless no provider makes it again: then it has no rows, for every rank and every run."""
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

    def _known(self, channel: Channel, seq: int) -> set[str]:
        """Names that say nothing about a provider that starts over: files this consumer has opened, or found when it began at `seq`."""
        known = self._opened_before.get(channel.split)
        if known is None:
            commit = channel.commit_point()
            known = {name for name, number in channel.names().items() if commit <= number < seq}
            self._opened_before[channel.split] = known
        return known

    def _refuse_beyond_the_end(self, channel: Channel, seq: int, start: int) -> None:
        """EndOfData where the file before is the last. A reader that has it open knows that; a consumer that deleted what it read and starts anew does not."""
        before = (channel.split, channel.part, seq - 1)
        if channel.foreign or channel.parts > 1 or seq == 0 or before in self._followed:
            return
        path = channel.find(seq - 1)
        if path is None:
            return
        with contextlib.suppress(FileCorrupt):
            if open_batch_file(path, split=channel.split, seq=seq - 1).header.last:
                raise EndOfData(
                    f"{channel} of {channel.folder.path} ended after {start:,} samples; start a new spool to go on"
                )
            self._followed.add(before)

    def _refuse_recount(self, channel: Channel, seq: int) -> None:
        """DataError where a provider of the timestamped layout restarted: it counts its files from 0 again, and so repeats itself."""
        known = self._known(channel, seq)
        present = [number for name, number in channel.names().items() if name not in known]
        if present and max(present) < seq:
            raise DataError(
                f"{channel.queue} holds file {max(present)} while {seq} comes next: its provider restarted and counts from the beginning again, so it repeats "
                "itself. Use a provider of headrace's, or start over in an empty folder"
            )
