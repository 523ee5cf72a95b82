"""Which files were begun by a reader that uses them up: they are not read again after a crash.

One small file a split, `state/taken-<split>`, with two records of 256 bytes that are written in turns and in place, each with its checksum.
A record that was torn leaves the other, so what is read is whole: the newer of those that are. To write one takes 5 us; a sealed file
that takes another's place takes .3 to 2 ms on ext4, in the trainer's thread, at the first batch of every file. It survives a kill;
after a power cut an older record is as good, because a file is only deleted below the commit point.
"""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path

from headrace.errors import StorageError
from headrace.spool.folder import seal

__all__ = ["TakenFiles"]

_RECORD = 256


class TakenFiles:
    """Per split: the first file that was not begun, and its first row."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, tuple[int, int]] = {}
        """Descriptor, and the number of the last record."""
        # A consumer that is let go without close() must not keep a descriptor.
        weakref.finalize(self, _close, self._open)

    def read(self, split: str) -> tuple[int, int]:
        """(file, row); (0, 0) where nothing was begun."""
        _, seq, row = self._newest(self._descriptor(split)[0])
        return seq, row

    def write(self, split: str, seq: int, row: int) -> None:
        """Everything below file `seq` was begun. StorageError where the disk does not allow it: nothing has changed then."""
        fd, turn = self._descriptor(split)
        record = seal({"turn": turn + 1, "seq": seq, "row": row})
        assert len(record) <= _RECORD
        try:
            written = os.pwrite(fd, record.ljust(_RECORD), (turn + 1) % 2 * _RECORD)
        except OSError as error:
            raise StorageError(self._sentence(split, error)) from error
        if written != _RECORD:
            raise StorageError(
                f"{self._path(split)} could not be written: {written} of {_RECORD} bytes. Free space and run again"
            )
        self._open[split] = (fd, turn + 1)

    def close(self) -> None:
        _close(self._open)

    def _path(self, split: str) -> Path:
        return self._folder / f"taken-{split}"

    def _descriptor(self, split: str) -> tuple[int, int]:
        if split not in self._open:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            try:
                fd = os.open(self._path(split), flags, 0o666)
            except OSError as error:
                raise StorageError(self._sentence(split, error)) from error
            try:
                self._open[split] = (fd, self._newest(fd)[0])
            except OSError as error:
                os.close(fd)
                raise StorageError(self._sentence(split, error)) from error
        return self._open[split]

    def _sentence(self, split: str, error: OSError) -> str:
        return f"{self._path(split)} cannot be used: {error.strerror or error}. Free space, or remove what lies there, and run again"

    @staticmethod
    def _newest(fd: int) -> tuple[int, int, int]:
        """(number, file, row) of the newest whole record."""
        found = [(0, 0, 0)]
        for place in (0, 1):
            raw = os.pread(fd, _RECORD, place * _RECORD).rstrip(b" ")
            try:
                value = json.loads(raw)["value"]
                record = (int(value["turn"]), int(value["seq"]), int(value["row"]))
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if seal(value) == raw and min(record) >= 0:
                found.append(record)
        return max(found)


def _close(opened: dict[str, tuple[int, int]]) -> None:
    while opened:
        os.close(opened.popitem()[1][0])
