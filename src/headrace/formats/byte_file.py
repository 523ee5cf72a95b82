"""Bytes at any offset of a file, an object of a store or a decompressed shard, and the file object that libraries get.

    with RawFile(path) as file:
        file.read(offset, length)      exactly these bytes, or a DataError that names the file

Files are read with pread, never through a map: a mapped page of a truncated file kills the process with SIGBUS, a short pread is an
error with a sentence. It costs nothing: the line ends of a warm file are found at 3.0 GB/s through pread and at 2.8 through a map.

FIFOs and devices are refused once they are open; the open itself never blocks.
Errors of a failing disk or network mount are tried three times; everything else is raised at once as a DataError.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from headrace.errors import DataChanged, DataError
from headrace.runtime.retry import retry

T = TypeVar("T")

MAX_DECODED = 4 << 30
"""Bytes that one row group, record batch or archive may have in memory."""
MAX_RATIO = 200
"""How many times its own size a compressed or encoded piece may decode to, once that is more than RATIO_COUNTS_FROM bytes."""
RATIO_COUNTS_FROM = 64 << 20
_TRIES = 3
_DEADLINE = 60.0
"""Seconds after which a read that fails is not tried again."""
_NAMES = "EINTR EIO EAGAIN EBUSY ESTALE ETIMEDOUT ECONNRESET EREMOTEIO ENETDOWN ENETUNREACH"
_TRANSIENT = frozenset(getattr(errno, name) for name in _NAMES.split() if hasattr(errno, name))
"""Errors that may pass. macOS has no EREMOTEIO."""


class Undecodable(DataError):
    """The content of a file cannot be decoded. `reason` ("is cut short: ...") is a pure function of its bytes."""

    def __init__(self, path: object, reason: str, remedy: str = "Restore it, or take it out of the source") -> None:
        self.reason = reason
        self._parts = (str(path), reason, remedy)
        super().__init__(f'{path} {reason}. {remedy}; on_bad = "skip" leaves such a shard out as a recorded hole.')

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), self._parts


def first_line(error: BaseException) -> str:
    """The first line of another library's message, cut to 200 characters."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def most_decoded(stored: int) -> int:
    """Return how many bytes a piece of `stored` bytes of a file may have in memory."""
    return min(max(RATIO_COUNTS_FROM, MAX_RATIO * stored), MAX_DECODED)


def patiently(doing: str, call: Callable[[], T]) -> T:
    """Return `call()`. It is tried again after errors that may pass; a DataError begins with `doing`."""

    def gave_up(error: Exception, tries: int, seconds: float) -> DataError:
        assert isinstance(error, OSError)
        return DataError(
            f"{doing}: {_reason(error)}, {tries} times in a row. Check the disk or the mount and run again."
        )

    try:
        return retry(
            call, passes=lambda error: isinstance(error, OSError) and error.errno in _TRANSIENT, wait_name="source.retry",
            deadline=_DEADLINE, doing=doing, most_tries=_TRIES, first_pause=0.05, longest_pause=0.25, gave_up=gave_up,
        )  # fmt: skip
    except OSError as error:
        raise DataError(f"{doing}: {_reason(error)}") from error


ACCEPT_DATA = 'accept the change with load_state_dict(state, accept={"data"}) (command: --accept data)'
"""What a DataChanged advises besides restoring the file."""


class ByteFile:
    """Bytes that a format reads at any offset: a file on disk (RawFile), an object in a store (StoredObject), or the text of a
    compressed file (UnpackedFile)."""

    path: Path | str
    """Name in errors."""
    size: int
    version: int | str
    """A time of modification or an entity tag: another content has another version, as far as the file system or store can tell."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, offset: int, length: int) -> bytearray:
        """Return exactly these bytes. Memory is taken only for what the file can hold."""
        self._require_within(offset, length)
        buffer = bytearray(length)
        self.read_into(memoryview(buffer), offset)
        return buffer

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset` on."""
        raise NotImplementedError

    def _require_within(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise DataError(
                f"{self.path} has {self.size:,} bytes; bytes {offset:,} to {offset + length:,} were asked of it. It is cut "
                "short or damaged; restore the file."
            )


class RawFile(ByteFile):
    """One regular file, read at any offset. Safe to share between threads.

    Within `with` the file stays open. Outside, every read opens and closes it, so that thousands of shards hold no descriptor.
    """

    def __init__(self, path: Path | str, *, follow: bool = False, size: int | None = None) -> None:
        """Args:
        path: The file.
        follow: Whether the name may be a symbolic link.
        size: Size in the manifest; another size is refused.
        """
        self.path = path
        self.follow = follow
        self._expected = size
        self._fd = -1
        self.size = 0
        self.version: int | str = 0

    def __enter__(self) -> Self:
        self._fd = self._opened()
        return self

    def _opened(self) -> int:
        """Open the file, check that it is regular and has the expected size, and return the descriptor."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if self.follow else os.O_NOFOLLOW)
        fd = patiently(f"opening {self.path}", lambda: os.open(self.path, flags))
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                kind = file_kind(status.st_mode)
                raise DataError(f"{self.path} is {kind}; a source reads regular files (name regular files only)")
            self.size, self.version = status.st_size, status.st_mtime_ns
            if self._expected is not None and self.size != self._expected:
                raise DataChanged(
                    f"{self.path} has {self.size:,} bytes; it had {self._expected:,} when its rows were counted. Its rows "
                    "would no longer be the ones the run was planned on; restore the file, or start again with the new one."
                )
        except BaseException:
            os.close(fd)
            raise
        return fd

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor, if the file is open."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset` on."""
        self._require_within(offset, len(view))
        fd = self._fd if self._fd >= 0 else self._opened()
        try:
            while len(view):
                got = patiently(
                    f"reading {self.path} at byte {offset:,}",
                    lambda view=view, offset=offset: os.preadv(fd, [view[: 1 << 30]], offset),
                )
                if got == 0:
                    raise DataChanged(
                        f"{self.path} ends at byte {offset:,} while being read; it had {self.size:,} bytes. It was cut "
                        "short under the run; restore the file and run again."
                    )
                view, offset = view[got:], offset + got
        finally:
            if fd != self._fd:
                os.close(fd)


class FileObject(io.RawIOBase):
    """A file object for zipfile and pyarrow over the `size` bytes that `read(offset, length)` returns."""

    def __init__(self, read: Callable[[int, int], Any], size: int) -> None:
        super().__init__()
        self._read, self._size = read, size
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        place = offset + (0, self.at, self._size)[whence]
        if place < 0:
            raise ValueError(f"byte {place} of a file")
        self.at = place
        return place

    def read(self, size: int = -1) -> Any:
        left = max(self._size - self.at, 0)
        data = self._read(self.at, left if size is None or size < 0 else min(size, left)) if left else b""
        self.at += len(data)
        return data


_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def file_kind(mode: int) -> str:
    """Return what a file that is no regular one is, for messages."""
    return _KINDS.get(stat.S_IFMT(mode), "no regular file")


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "the file is gone. Restore it, or take it out of the source"
    if error.errno == errno.ELOOP:
        return "it is a symbolic link; allow_symlinks = true lets it through"
    return error.strerror or str(error)
