"""Read positions, commit point and deletion of files.

    read-<rank>         read position of a rank: the provider makes `max_backlog_files` beyond the slowest one
    commit              commit point: written durably first, then files below it are deleted
    taken-<split>       with ack="consume": the files that were begun, which are not read again after a crash

The trainer's thread writes `taken-<split>` before a file is begun. The background thread does all other writing, and tries again where
the disk does not allow it. All three are records that are overwritten in place (records.py). They are made when
the consumer starts, so that on a full disk a commit, which frees space, needs none.

`taken-<split>` is not synced (durability.py): a file is only deleted below the commit point, so after a power cut an older record is as good.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headrace.errors import FileCorrupt, StorageError
from headrace.metrics import Meter, MetricSpec, Reduction, register
from headrace.runtime.background import BackgroundThread
from headrace.spool.channel import Channel
from headrace.spool.durability import BEGUN_FILES
from headrace.spool.folder import SpoolFolder, names_in, patiently
from headrace.spool.rank_lock import RankLock
from headrace.spool.records import read_record, reserve_record, write_record
from headrace.spool.settings import ConsumerSettings

_NOTHING_TAKEN = {"seq": 0, "row": 0}

register(
    MetricSpec("spool/files_deleted", Reduction.SUM, unit="files", help="files deleted, or moved to archives/"),
)


class Retention:
    """Writes the read position of one consumer; on rank 0 also the commit point, and deletes files below it."""

    def __init__(
        self,
        folder: SpoolFolder,
        lock: RankLock,
        background: BackgroundThread,
        channel: Callable[[str, int], Channel],
        positions: Callable[[], Mapping[str, list[int]]],
        settings: ConsumerSettings,
        kept_below: int,
        meter: Meter,
    ) -> None:
        """`channel`: returns the channel of a split and part. `positions`: returns, for every split, the file that is read in each part.
        `kept_below`: files kept below the commit point, because a sequential producer starts from the last one."""
        self._folder, self._lock, self._background = folder, lock, background
        self._channel, self._positions = channel, positions
        self._ack, self._archive, self._deadline = settings.ack, settings.archive, settings.deadline
        self._kept_below = kept_below
        self._meter = meter
        self.deleted = 0
        self._committing = threading.Lock()
        """The background thread commits delivered files, the trainer's thread saved states."""

    def recover(self) -> None:
        """Make the records of all ranks, and remove what a crash may have left: temporaries, files below the commit point, positions of
        ranks beyond the present world size. Rank 0 calls this when it starts."""
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
        self._folder.commit_points()  # a damaged one is refused before a batch is read
        self._delete_later()

    def starting_point(self, split: str, parts: int, *, again: bool = False) -> dict[str, Any]:
        """The position at which a consumer without a state begins: the commit point or, with ack="consume", the first file that was not begun.
        `again`: the same consumer reads the split again, so files that it has begun count too."""
        beginning = {"g": 0, "at": [[0, 0]] * parts, "start": [0] * parts}
        point: dict[str, Any] = self._folder.commit_points().get(split) or beginning
        if self._ack == "consume" and not again:
            seq, row = self._begun(split)
            if seq > point["at"][0][0]:
                point = {"g": row, "at": [[seq, 0]], "start": [row]}
            self.move_commit({split: point})
        return point

    def _taken(self, split: str) -> Path:
        return self._folder.state / f"taken-{split}"

    def _begun(self, split: str) -> tuple[int, int]:
        """The first file that was not begun, and its first row; (0, 0) if unknown: then the commit point counts."""
        with contextlib.suppress(FileCorrupt, KeyError, TypeError, ValueError):
            value = read_record(self._taken(split)) or _NOTHING_TAKEN
            return int(value["seq"]), int(value["row"])
        return 0, 0

    # ---------------------------------------------------------------------------------------------- read

    def entered(self, split: str, seq: int, end: int) -> None:
        """The first row of file `seq`, which ends at row `end`, is about to be delivered. With ack="consume" the file counts as taken before that."""
        if self._ack == "commit":
            return
        self._lock.require()
        what, value = f"writing the position of {self._folder.path}", {"seq": seq + 1, "row": end}
        write = partial(write_record, self._taken(split), value, durable=BEGUN_FILES)
        patiently(what, write, deadline=self._deadline, hidden=False)

    def finished(self, split: str, seq: int, end: int) -> None:
        """All rows of file `seq`, which ends at row `end`, were delivered: write the position in the background, or commit the file and delete it."""
        if self._ack == "commit":
            self.write_position_later()
        else:
            self._background.later(partial(self._commit_delivered, split, seq, end))

    def _commit_delivered(self, split: str, seq: int, end: int) -> None:
        """Commit a file that was delivered. If the disk does not allow it the task is tried again; other work goes on meanwhile."""
        self.move_commit({split: {"g": end, "at": [[seq + 1, 0]], "start": [end]}}, patience=0.0)
        self.write_position()

    def write_position_later(self) -> None:
        """Write the read position in the background."""
        self._background.later(self.write_position, "read position")

    def write_position(self) -> None:
        """Write the read position now. In the background thread."""
        splits = {split: {"done": done} for split, done in self._positions().items()}
        if splits:
            self._folder.write_read_position(self._lock.rank, self._lock.world_size, splits)

    # -------------------------------------------------------------------------------------------- commit

    def move_commit(self, moved: Mapping[str, Mapping[str, Any]], *, patience: float | None = None) -> None:
        """Move the commit points forward, then delete files below them. A point before the one on disk changes nothing. `patience`: the longest
        wait for a full disk, in seconds; the deadline unless given."""
        what, patience = f"committing {self._folder.path}", self._deadline if patience is None else patience
        with self._committing:
            self._lock.require()
            points = patiently(what, self._folder.commit_points, deadline=patience)
            forward = {s: dict(point) for s, point in moved.items() if s not in points or point["g"] >= points[s]["g"]}
            merged = {**points, **forward}
            if merged != points:
                patiently(what, lambda: self._folder.write_commit_points(merged), deadline=patience)
            self._delete_later()

    def _delete_later(self) -> None:
        """Delete what lies below the commit points, in the background."""
        self._background.later(self._delete_committed, "deletion")

    def _delete_committed(self) -> None:
        """Delete all files below the commit points. A file that cannot be deleted stops no other; the error lets the task be tried again."""
        problem = None
        for split, point in self._folder.commit_points().items():
            for part, (seq, _) in enumerate(point["at"]):
                channel = self._channel(split, part)
                for old in channel.leftovers(seq - self._kept_below):
                    self._lock.require()
                    there = channel.find(old) is not None
                    try:
                        channel.delete(old, self._archive)
                    except (OSError, StorageError) as error:
                        problem = error
                        continue
                    if there:
                        self.deleted += 1
                        self._meter.add("spool/files_deleted")
        if problem is not None:
            raise problem
