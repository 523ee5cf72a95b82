"""Provider whose next file depends on all files before it.

    class Pipeline(SequentialProvider):
        def build_meta(self): …
        def start_from(self, split, part, cursor): go to the position `cursor`; None: to the beginning
        def next_batch(self, split, part): the next rows, or None at the end
        def cursor(self, split, part): the position now, as JSON

Each file's header holds the cursor after it. A provider that was killed continues from the newest file, and a file that went
bad is made again from the file before it. Both give the file that an undisturbed producer would have made. Consumers
keep one file below the commit point for this.

One producer makes one file after the other. For more speed the spool has parts: part q of P holds the samples g with
g mod P = q, has its own files, and belongs to one provider at a time (a lock). A provider without `join` takes all parts;
a provider that joins takes the parts that are free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from headrace.errors import ConfigError, DataError, FileCorrupt, StorageError
from headrace.order import fingerprint_json
from headrace.runtime.locks import ExclusiveLock
from headrace.spool.batch_file import BatchFile, FileHeader, RowBuffer, open_batch_file
from headrace.spool.channel import Channel
from headrace.spool.provider import DataProviderBase


class SequentialProvider(DataProviderBase):
    """Makes the files of a spool one after the other, each from where the one before it ended."""

    kind: ClassVar[str] = "sequential"
    splits = ("train",)

    def __init__(self, *args: Any, parts: int = 1, take: int | None = None, **more: Any) -> None:
        """As `DataProviderBase`. `parts`: how many producers the spool is laid out for. `take`: the most parts this provider takes."""
        super().__init__(*args, **more)
        if type(parts) is not int or not 1 <= parts <= 1000:
            raise ConfigError(f"{type(self).__name__}: parts is {parts!r}, expected a whole number from 1 to 1000")
        if take is not None and (type(take) is not int or take < 1):
            raise ConfigError(f"{type(self).__name__}: take is {take!r}, expected a whole number of 1 or more")
        self.parts, self._most = parts, parts if take is None else take
        self._part_locks: dict[int, ExclusiveLock] = {}
        self._next: dict[Channel, tuple[int, int, str]] = {}
        """The file that each producer makes next: its number, its first row, and the fingerprint of the cursor before it."""
        self._last: dict[Channel, int] = {}
        """Number of the last file of each part, once it is known."""

    def start_from(self, split: str, part: int, cursor: Mapping[str, Any] | None) -> None:
        """Go to the position `cursor` of a part; None: to its beginning."""
        raise NotImplementedError(f"{type(self).__name__} needs start_from(split, part, cursor)")

    def next_batch(self, split: str, part: int) -> Mapping[str, Any] | None:
        """The next rows of this part, as arrays or tensors by field; None at the end."""
        raise NotImplementedError(f"{type(self).__name__} needs next_batch(split, part)")

    def cursor(self, split: str, part: int) -> Mapping[str, Any]:
        """The position of this part after the rows that `next_batch` returned last, as JSON values."""
        raise NotImplementedError(f"{type(self).__name__} needs cursor(split, part)")

    # -------------------------------------------------------------------------------------------- parts

    def channels(self, split: str) -> list[Channel]:
        """The parts of a split that this provider has locked; all before it has."""
        everything = super().channels(split)
        return [c for c in everything if c.part in self._part_locks] if self._part_locks else everything

    def open(self, splits: Sequence[str] | None = None) -> None:
        super().open(splits)
        for part in range(self.parts):
            if len(self._part_locks) >= self._most:
                break
            path = self.folder.state / f"part-{part:03d}.lock"
            try:
                held = ExclusiveLock.take(path, type(self).__name__)
            except OSError as error:
                self.close()
                raise StorageError(f"{path} cannot be opened: {error.strerror or error}") from error
            if held is not None:
                self._part_locks[part] = held
        if not self._part_locks:
            self.close()
            raise ConfigError(
                f"all {self.parts} parts of {self.data_dir} have a provider already. More providers need a spool laid out for more parts "
                "(parts=, spool.parts)"
            )

    def close(self) -> None:
        for lock in self._part_locks.values():
            lock.release()
        self._part_locks.clear()
        super().close()

    # --------------------------------------------------------------------------------------------- make

    def _wanted(self, channel: Channel) -> range:
        wanted, last = super()._wanted(channel), self._last.get(channel)
        return wanted if last is None else range(wanted.start, min(wanted.stop, last + 1))

    def _missing(self, splits: Sequence[str]) -> list[tuple[int, Channel, int]]:
        for channel in (channel for split in splits for channel in self.channels(split)):
            if channel not in self._last:
                self._look_for_end(channel)
        # Only the first missing file of a part can be made: the next one follows from it.
        first: dict[Channel, tuple[int, Channel, int]] = {}
        for entry in super()._missing(splits):
            first.setdefault(entry[1], entry)
        return list(first.values())

    def _look_for_end(self, channel: Channel) -> None:
        """Note the end of a part, if its newest file says that it is the last one. For a provider that has just started."""
        present = channel.present() if channel not in self._next else []
        if present:
            file = self._readable(channel, present[-1])
            if file is not None and file.header.last:
                self._last[channel] = file.header.seq

    def _complete(self, splits: Sequence[str]) -> bool:
        ended = all(channel in self._last for split in splits for channel in self.channels(split))
        return ended and not self._missing(splits)

    def _content(self, channel: Channel, seq: int) -> tuple[FileHeader, dict[str, np.ndarray]]:
        split, part = channel.split, channel.part
        first, before = self._move_to(channel, seq)
        self._next.pop(channel, None)  # unknown until the file is whole
        rows, batch = RowBuffer(self.schema), None
        while len(rows) < self.rows_per_file and (batch := self.next_batch(split, part)) is not None:
            rows.add(batch)
        cursor, ended = dict(self.cursor(split, part)), batch is None
        if ended:
            self._last[channel] = seq
        header = FileHeader(
            split=split, seq=seq, schema=self.schema, rows=len(rows), first=first, batch_size=self.batch_size, job=self.job,
            part=part, parts=self.parts_of(split), last=ended, cursor={"cursor": cursor, "end": first + len(rows)}, follows=before,
        )  # fmt: skip
        self._next[channel] = (seq + 1, first + len(rows), fingerprint_json(cursor))
        return header, rows.arrays()

    def _move_to(self, channel: Channel, seq: int) -> tuple[int, str]:
        """Move the producer to the beginning of file `seq`; returns the file's first row and the fingerprint of the cursor there."""
        following, first, before = self._next.get(channel, (-1, 0, ""))
        if following == seq:
            return first, before
        if seq == 0:
            self.start_from(channel.split, channel.part, None)
            return 0, ""
        file = self._readable(channel, seq - 1)
        if file is None and seq - 1 >= channel.commit_point():
            # No consumer has read the file yet, or it went bad after it was made: make it again from the file before it.
            channel.set_aside(seq - 1, "its header could not be read by the provider")
            channel.clear_verdict(seq - 1)
            self._publish(channel, seq - 1)
            return self._move_to(channel, seq)
        if file is None or file.header.cursor is None:
            raise DataError(
                f"{self.data_dir}: file {seq} of {channel} cannot be made, because the file before it, which says where to begin, is gone or "
                "damaged. Restore that file, or start over with force_regenerate=True (--force_regenerate)"
            )
        saved = file.header.cursor
        self.start_from(channel.split, channel.part, saved["cursor"])
        return int(saved["end"]), fingerprint_json(saved["cursor"])

    def _readable(self, channel: Channel, seq: int) -> BatchFile | None:
        path = channel.find(seq)
        if path is None:
            return None
        try:
            file = open_batch_file(path)
        except FileCorrupt:
            return None
        return file if file.header.job == self.job and file.header.seq == seq else None
