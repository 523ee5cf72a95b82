"""How do bytes leave a file that may be cut short, deleted or unreachable under our hands?

By pread into our own memory, never through a map: a mapped page of a truncated file kills the process with SIGBUS, a
short pread is an error with a sentence. It costs nothing: finding the line ends of a warm file runs at 3.0 GB/s through
pread in blocks of 256 KiB and at 2.8 through a map. Every file is opened for one task and closed after it, so nothing is
held between reads, and neither threads nor forks share a position.

FIFOs and devices are refused by lstat before the open, and again by fstat after it; the open itself never blocks.
Errors of a sick disk or network mount are tried three times; everything else goes up at once as a DataError.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

from headrace.errors import DataChanged, DataError
from headrace.metrics import Wait

__all__ = ["ACCEPT_DATA", "ByteFile", "RawFile", "Tally", "patiently"]

T = TypeVar("T")

_TRIES = 3
_BACKOFF = (0.05, 0.25)
_TRANSIENT = frozenset(
    code
    for name in (
        "EINTR",
        "EIO",
        "EAGAIN",
        "EBUSY",
        "ESTALE",
        "ETIMEDOUT",
        "ECONNRESET",
        "EREMOTEIO",
        "ENETDOWN",
        "ENETUNREACH",
    )
    if (code := getattr(errno, name, None)) is not None
)


class Tally:
    """Named counts that threads may add to."""

    def __init__(self, *names: str) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(names, 0)

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] = self._counts.get(name, 0) + count

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


def patiently(doing: str, call: Callable[[], T], tally: Tally | None = None) -> T:
    """`call()`, again if the error is one that passes; a DataError that says what was being done otherwise."""
    for attempt in range(_TRIES):
        try:
            return call()
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise DataError(f"{doing}: {_reason(error)}") from error
            if attempt == _TRIES - 1:
                raise DataError(
                    f"{doing}: {_reason(error)}, {_TRIES} times in a row. Check the disk or the mount and run again."
                ) from error
            if tally is not None:
                tally.add(retries=1)
            _back_off(_BACKOFF[attempt])
    raise AssertionError("the last try returns or raises")


ACCEPT_DATA = 'accept the change with load_state_dict(state, accept={"data"}) (command: --accept data)'
"""What a DataChanged advises besides restoring the file. Both accept it for good: nothing else has to be said."""


class ByteFile(Protocol):
    """What a format reads from: bytes at any offset of something whose size is known. A file on disk (RawFile), an object
    in a store (headrace.stores), or what a compressed one unpacks to (packed.py)."""

    path: Path | str
    """What an error calls it."""
    size: int
    version: int | str
    """Another content has another version, as far as the place can tell: a time of modification, an entity tag."""

    def __enter__(self) -> ByteFile: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def read(self, offset: int, length: int) -> bytearray:
        """Exactly these bytes. Memory is taken only for what the file can hold."""
        ...

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset` on."""
        ...


class RawFile:
    """One regular file, open for reading at any offset. Safe to share between threads."""

    def __init__(
        self, path: Path | str, *, follow: bool = False, size: int | None = None, tally: Tally | None = None
    ) -> None:
        """`size`: what the manifest says; another size is refused. `follow`: whether the name may be a symbolic link."""
        self.path = path
        self.follow = follow
        self._expected = size
        self._tally = tally
        self._fd = -1
        self.size = 0
        self.version: int | str = 0

    def __enter__(self) -> RawFile:
        self._fd = patiently(f"opening {self.path}", self._open, self._tally)
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise DataError(_not_regular(self.path, status.st_mode))
            self.size, self.version = status.st_size, status.st_mtime_ns
            if self._expected is not None and self.size != self._expected:
                raise DataChanged(
                    f"{self.path} has {self.size:,} bytes; it had {self._expected:,} when its rows were counted. Its rows "
                    "would no longer be the ones the run was planned on; restore the file, or start again with the new one."
                )
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
        self._fd = -1

    def read(self, offset: int, length: int) -> bytearray:
        """Exactly these bytes. Memory is taken only for what the file can hold."""
        self._within(offset, length)
        buffer = bytearray(length)
        self.read_into(memoryview(buffer), offset)
        return buffer

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset` on."""
        self._within(offset, len(view))
        while len(view):
            got = patiently(
                f"reading {self.path} at byte {offset:,}",
                lambda view=view, offset=offset: os.preadv(self._fd, [view[: 1 << 30]], offset),
                self._tally,
            )
            if got == 0:
                raise DataChanged(
                    f"{self.path} ends at byte {offset:,} while being read; it had {self.size:,} bytes. It was cut short "
                    "under the run; restore the file and run again."
                )
            view, offset = view[got:], offset + got

    def _within(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise DataError(
                f"{self.path} has {self.size:,} bytes; bytes {offset:,} to {offset + length:,} were asked of it. It is cut "
                "short or damaged; restore the file."
            )

    def _open(self) -> int:
        status = os.stat(self.path, follow_symlinks=self.follow)  # noqa: PTH116 (a read is too short for a Path)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(_not_regular(self.path, status.st_mode))
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(self.path, flags if self.follow else flags | os.O_NOFOLLOW)


def _not_regular(path: Path | str, mode: int) -> str:
    kinds = (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    kind = next((name for test, name in kinds if test(mode)), "no regular file")
    remedy = "allow_symlinks = true lets it through" if kind == "a symbolic link" else "name regular files only"
    return f"{path} is {kind}; a source reads regular files ({remedy})"


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "the file is gone. Restore it, or take it out of the source"
    if error.errno == errno.ELOOP:
        return "it is a symbolic link; allow_symlinks = true lets it through"
    return error.strerror or str(error)


def _back_off(seconds: float) -> None:
    with Wait("source.retry", hidden=True):
        time.sleep(seconds)
