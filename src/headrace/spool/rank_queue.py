"""The queue of a spool as one rank reads it: its lock, the readers of its splits, and the retirement of files that were read.

open("train", position) ─► SplitReader ─► batches                 trainer's thread
                                │ finished file
                                ▼
                    count, move the position or delete, unmap     background thread
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from headrace.batch import BatchSpec
from headrace.errors import ConfigError, CursorMismatch
from headrace.files import make_inside
from headrace.metrics import Meter
from headrace.runtime.background import BackgroundThread
from headrace.runtime.buffers import BufferPool
from headrace.runtime.prefetch import Prefetch
from headrace.spool.batch_file import BatchFile
from headrace.spool.channel import Channel
from headrace.spool.folder import SpoolFolder
from headrace.spool.journal import FileJournal
from headrace.spool.meta import CIRCULAR_SPLITS, parts_of
from headrace.spool.rank_lock import RankLock
from headrace.spool.reader import OpenFile, PartFiles, PartReader, SplitReader
from headrace.spool.retention import Retention
from headrace.spool.rows import Stripe
from headrace.spool.settings import ConsumerSettings
from headrace.spool.verdicts import FileChecker

_TIMESTAMPED_JOB = "document"
"""The job of a queue in the timestamped `.pt` layout, as saved states name it."""
_FILES_AHEAD = 2
"""Files that the background thread keeps open ahead of the trainer. With one, both threads waited for each other in turns."""


class RankQueue:
    """`queue/` of one spool, locked for one rank. Called by the trainer's thread; `background` is its background thread."""

    def __init__(
        self, settings: ConsumerSettings, meta: Mapping[str, Any], journal: FileJournal, meter: Meter, *, copy: bool
    ) -> None:
        """Take the lock of this rank. Rank 0 also deletes what a crash left below the commit point. `copy`: whether rows are gathered in memory,
        instead of handed out as views of the mapped file."""
        self.folder = SpoolFolder(settings.data_dir)
        self._settings, self._copy, self._journal, self._meter = settings, copy, journal, meter
        self._spool_meta, self._meta = meta, meta.get("headrace") or {}
        """`_meta` is the part of the meta that a provider of headrace adds; empty in the timestamped `.pt` layout."""
        self.job: str = self._meta.get("job", _TIMESTAMPED_JOB)
        self._schema = BatchSpec.from_json(meta["batch_schema"])
        self._stripe = stripe = Stripe(rank=settings.dp_rank, world_size=settings.dp_world_size)
        self._channels: dict[tuple[str, int], Channel] = {}
        self._readers: dict[str, SplitReader] = {}
        self._begun: set[str] = set()
        """Splits whose reader was dropped, so that they are read again."""
        self._retired: list[BatchFile] = []
        """Files read to their end that a batch still refers to."""
        self._gathered = BufferPool(4 * len(self._schema) * self._meta.get("parts", 1))
        """Memory of gathered rows. Four files a part: one being read, two ahead, and one that a batch still refers to."""
        self.background = BackgroundThread("spool", on_error=journal.task_failed, meter=meter)
        self.lock = RankLock(self.folder, stripe.rank, stripe.world_size, meter)
        self._checker = FileChecker(meta, stripe, self.lock, settings, on_bad=journal.file_bad, writable=not copy)
        kept_below = 1 if self._meta.get("kind") == "sequential" else 0
        self.retention = Retention(
            self.folder, self.lock, self.background, self.channel, self._positions, settings, kept_below, meter
        )
        self.folder.prepare(self._meta.get("parts", 1))
        self.lock.acquire()
        if stripe.rank == 0:
            try:
                self.retention.recover()
            except BaseException:
                self.lock.release()
                raise

    # ------------------------------------------------------------------------------------------ splits

    def parts_of(self, split: str) -> int:
        return parts_of(self._spool_meta, split)

    def channel(self, split: str, part: int) -> Channel:
        """The channel of one part; ConfigError if no split can have this name."""
        if (split, part) not in self._channels:
            channel = Channel.of_spool(self.folder, self._spool_meta, split, part)
            make_inside(self.folder.path, str(channel.verdicts.relative_to(self.folder.path)))
            self._channels[split, part] = channel
        return self._channels[split, part]

    def files_ahead(self, split: str) -> int:
        """Number of files from the read position on, over all parts."""
        return sum(self.channel(split, part.number).files_from(part.seq) for part in self._readers[split].parts)

    def require_position(self, split: str, position: Mapping[str, Any], *, rewind: bool) -> None:
        """CursorMismatch if files from the position on were deleted. `rewind`: rank 0 moves the commit point back, so that they are made again."""
        points = self.folder.commit_points() if split not in CIRCULAR_SPLITS else {}
        point = points.get(split)
        if point is None or all(
            at[0] >= committed[0] for at, committed in zip(position["at"], point["at"], strict=True)
        ):
            return
        if not rewind:
            raise CursorMismatch(
                f"{self.folder.path}: the state is at file {position['at'][0][0]} of {split}, and files below {point['at'][0][0]} were committed and deleted. "
                "Load a newer state, or, where the provider can make files again, load with rewind=True",
                {"file": (position["at"][0][0], point["at"][0][0])},
            )
        if self._stripe.rank == 0:
            self.lock.require()
            self.folder.write_commit_points({**points, split: dict(position)})

    # ----------------------------------------------------------------------------------------- readers

    def open(self, split: str, position: dict[str, Any] | None) -> SplitReader:
        """A reader of a split, from a position that `SplitReader.state` returned; None: from `Retention.starting_point`."""
        channels, circular = [self.channel(split, part) for part in range(self.parts_of(split))], 0
        if self._settings.ack == "consume" and len(channels) > 1:
            raise ConfigError(f'{self.folder.path} has {len(channels)} parts; a consumer of parts needs ack="commit"')
        if split in CIRCULAR_SPLITS:
            circular = int(self._meta.get("circular", {}).get(split) or max(1, len(channels[0].present())))
            g, at = (position["g"], position["at"]) if position is not None else (0, [[0, 0]])
            position = {"g": g, "at": at, "start": [g - at[0][1]]}  # rows are counted on from pass to pass
        elif position is None:
            if split in self._begun:  # files that were read are settled first: they move the commit point
                self.background.drain(self._settings.deadline)
            position = self.retention.starting_point(split, len(channels), again=split in self._begun)
        parts = [
            self._part_reader(channel, seq, start, circular)
            for channel, (seq, _), start in zip(channels, position["at"], position["start"], strict=True)
        ]
        self._readers[split] = SplitReader(
            split, self._schema, self._stripe, parts, position["g"], circular=circular, deadline=self._settings.deadline, pool=BufferPool(8),
            entered=self.retention.entered, finished=self._finished,
        )  # fmt: skip
        self.retention.write_position_later()
        return self._readers[split]

    def _part_reader(self, channel: Channel, seq: int, start: int, circular: int) -> PartReader:
        gathers = self._copy or circular > 0
        files = PartFiles(
            channel, self._checker, self._stripe, self._gathered if gathers else None, seq=seq, start=start, circular=circular,
            keep=self._settings.cache_files,
        )  # fmt: skip
        ahead = Prefetch(
            self.background, files.open_next, depth=_FILES_AHEAD, wait_name="spool.open", while_waiting=self.lock.require, meter=self._meter
        )  # fmt: skip
        return PartReader(channel.part, ahead, seq, start)

    def drop(self, split: str) -> None:
        """Close the reader of a split, if there is one."""
        self._begun.add(split)
        if split in self._readers:
            self._readers.pop(split).close()

    def _positions(self) -> dict[str, list[int]]:
        """For every split that is not circular: the file that is read in each part."""
        readers = list(self._readers.items())
        return {split: [part.seq for part in reader.parts] for split, reader in readers if not reader.circular}

    # --------------------------------------------------------------------------------- finished files

    def _finished(self, reader: SplitReader, part: PartReader, opened: OpenFile) -> None:
        """All rows of a file were delivered: let the background thread unmap it, log it, and move the position or delete it."""
        self.background.later(partial(self._retire, opened.file))
        if not reader.circular:
            sentence = f"{self.channel(reader.split, part.number)} {opened.seq}: read, {opened.file.rows:,} rows"
            self.background.later(partial(self._journal.file_read, sentence))
            self.retention.finished(reader.split, opened.seq, opened.end)

    def _retire(self, file: BatchFile) -> None:
        """Unmap files that no batch refers to. In the background thread: the trainer would spend 1 to 3 ms of its step on a file of 32 MiB."""
        self._retired = [file for file in (*self._retired, file) if file.held]

    def close(self) -> None:
        """Stop the background thread, unmap all files that no batch refers to, release the lock."""
        self.background.close()
        for split in list(self._readers):
            self.drop(split)
        self._retired.clear()
        self.lock.release()
