"""Read positions, commit point and deletion: how far has been read, and which files may go.

    read-<rank>         where each rank reads: the provider makes no more than so many files beyond it
    commit              below this nothing is needed any more: durable first, then files are deleted
    taken-<split>       in the consume mode: files that were begun, which are not read again after a crash

The trainer's thread says what happened, and writes down that a file was begun; all other writing is done by the background thread, again
and again where the disk does not allow it. All three are records that are overwritten in place (records.py). They are made when
the consumer starts, so that on a full disk nothing has to be made before a commit frees room.

`taken-<split>` is not synced (durability.py): a file is only deleted below the commit point, so after a power cut an older record is as good.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from headrace.errors import FileCorrupt
from headrace.metrics import Meter, MetricSpec, Reduction, register
from headrace.runtime.background import BackgroundThread
from headrace.spool.channel import Channel
from headrace.spool.durability import BEGUN_FILES
from headrace.spool.folder import SpoolFolder, names_in, patiently
from headrace.spool.rank_lock import RankLock
from headrace.spool.records import read_record, reserve_record, write_record

_SHORTEST, _LONGEST = 0.005, 0.1
"""Seconds between two positions told to the provider: 50 times what it took to write the last one (1 to 2 ms on ext4, where a file of small
batches lasts less, and as long a trainer stands still), within these bounds. Where a file is missed it is told at once."""

_NOTHING_TAKEN = {"seq": 0, "row": 0}

register(
    MetricSpec(
        "spool/files_deleted", Reduction.SUM, unit="files", help="files deleted or archived below the commit point"
    ),
)


class Retention:
    """What one consumer tells about its reading, and what rank 0 lets go of."""

    def __init__(
        self,
        folder: SpoolFolder,
        lock: RankLock,
        background: BackgroundThread,
        channel: Callable[[str, int], Channel],
        positions: Callable[[], Mapping[str, list[int]]],
        *,
        ack: Literal["consume", "commit"],
        archive: int,
        kept_below: int,
        deadline: float,
        meter: Meter,
    ) -> None:
        """`channel`: that of a split and part. `positions`: per split, the file each part is read in. `kept_below`: files kept below the
        commit point, because a sequential producer starts from the last one."""
        self._folder, self._lock, self._background = folder, lock, background
        self._channel, self._positions = channel, positions
        self._ack, self._archive, self._kept_below, self._deadline = ack, archive, kept_below, deadline
        self._meter = meter
        self.deleted = 0
        self._writing, self._committing = threading.Lock(), threading.Lock()
        self._next_position = 0.0
        """When a position may be written again."""

    def recover(self) -> None:
        """Make the state of all ranks, and remove what a crash may have left: temporaries, files below the commit point, positions of
        ranks that are no more. Rank 0 calls this when it starts."""
        self._folder.sweep()
        for name in names_in(self._folder.state):
            match = re.fullmatch(r"read-(\d{1,9})(\.json)?", name)  # .json: of version 0.1
            if match and (match[2] or int(match[1]) >= self._lock.world_size):
                with contextlib.suppress(OSError):
                    os.unlink(self._folder.state / name)
        for rank in range(self._lock.world_size):
            self._folder.reserve_read_position(rank)
        if self._ack == "consume":
            for split in names_in(self._folder.path / "queue"):
                reserve_record(self._taken(split), _NOTHING_TAKEN, durable=BEGUN_FILES)
        for split, point in self._folder.commit_points().items():
            for part, (seq, _) in enumerate(point["at"]):
                for old in self._channel(split, part).leftovers(seq - self._kept_below):
                    self._delete_later(split, part, range(old, old + 1))

    def starting_point(self, split: str, parts: int, *, again: bool = False) -> dict[str, Any]:
        """Where a consumer without a state begins: at the commit point, or behind every file that was begun, unless it was begun by the
        same consumer, which reads it `again`."""
        point: dict[str, Any] = self._folder.commit_points().get(split) or {
            "g": 0,
            "at": [[0, 0]] * parts,
            "start": [0] * parts,
        }
        if self._ack == "consume" and not again:
            seq, row = self._begun(split)
            if seq > point["at"][0][0]:
                point = {"g": row, "at": [[seq, 0]], "start": [row]}
            self.move_commit({split: point})
        return {"g": point["g"], "at": [list(pair) for pair in point["at"]], "start": list(point["start"])}

    def _taken(self, split: str) -> Path:
        return self._folder.state / f"taken-{split}"

    def _begun(self, split: str) -> tuple[int, int]:
        """The first file that was not begun, and its first row. (0, 0) where that is not known: the commit point counts then."""
        with contextlib.suppress(FileCorrupt, KeyError, TypeError, ValueError):
            value = read_record(self._taken(split)) or _NOTHING_TAKEN
            return int(value["seq"]), int(value["row"])
        return 0, 0

    # ---------------------------------------------------------------------------------------------- read

    def entered(self, split: str, seq: int, end: int) -> None:
        """A row of this file is about to be delivered. In the consume mode the file counts as taken before that."""
        if self._ack == "commit":
            return
        self._lock.require()
        what, value = f"writing the position of {self._folder.path}", {"seq": seq + 1, "row": end}
        write = partial(write_record, self._taken(split), value, durable=BEGUN_FILES)
        patiently(what, write, deadline=self._deadline, hidden=False)

    def finished(self, files: Sequence[tuple[str, int, int]]) -> None:
        """All rows of these files were delivered: split, number, where each ends. In the background thread."""
        if self._ack == "commit":
            self.tell_position(at=self._next_position)
        else:
            for split, seq, end in files:
                self._background.later(partial(self._used_up, split, seq, end))

    def _used_up(self, split: str, seq: int, end: int) -> None:
        """Commit a file that was delivered to its end, then delete it. Where the disk does not allow it the job is tried again, and files are
        made ready meanwhile."""
        self.move_commit({split: {"g": end, "at": [[seq + 1, 0]], "start": [end]}}, patience=0.0)
        self.write_position()

    def tell_position(self, *, at: float = 0.0) -> None:
        """Let the provider know where reading stands, not before `at`, unless a file is missed meanwhile."""
        self._background.later(self.write_position, "read position", at=at, sooner_if_missed=True)

    def write_position(self) -> None:
        """The same now."""
        began = time.monotonic()
        with self._writing:  # both threads do: the one that looked first must not write last
            splits = {split: {"done": done} for split, done in self._positions().items()}
            if splits:
                self._folder.write_read_position(self._lock.rank, self._lock.world_size, splits)
        now = time.monotonic()
        self._next_position = now + min(_LONGEST, max(_SHORTEST, 50 * (now - began)))

    # -------------------------------------------------------------------------------------------- commit

    def move_commit(self, moved: Mapping[str, Mapping[str, Any]], *, patience: float | None = None) -> None:
        """Let files below these points go. A point that lies behind the one that was written changes nothing. `patience`: seconds for which a full
        disk is waited for, the deadline unless given."""
        with self._committing:  # what is used up is committed by the background thread, what was saved by the trainer's
            self._move_commit(moved, self._deadline if patience is None else patience)

    def _move_commit(self, moved: Mapping[str, Mapping[str, Any]], patience: float) -> None:
        self._lock.require()
        what = f"committing {self._folder.path}"
        points = patiently(what, self._folder.commit_points, deadline=patience, hidden=True)
        before = {
            split: [pair[0] for pair in points[split]["at"]] if split in points else [0] * len(moved[split]["at"])
            for split in moved
        }
        forward = {s: dict(point) for s, point in moved.items() if s not in points or point["g"] >= points[s]["g"]}
        if any(split not in points or point != points[split] for split, point in forward.items()):
            merged = {**points, **forward}
            patiently(what, lambda: self._folder.write_commit_points(merged), deadline=patience, hidden=True)
        for split, point in forward.items():
            for part, (seq, _) in enumerate(point["at"]):
                self._delete_later(split, part, range(max(0, before[split][part] - 1), seq - self._kept_below))

    def _delete_later(self, split: str, part: int, seqs: range) -> None:
        channel = self._channel(split, part)

        def job(seq: int) -> None:
            self._lock.require()
            there = channel.find(seq) is not None
            channel.delete(seq, self._archive)
            if there:
                self.deleted += 1
                self._meter.add("spool/files_deleted")

        for seq in seqs:
            self._background.later(lambda seq=seq: job(seq))
