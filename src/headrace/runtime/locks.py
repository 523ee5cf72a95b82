"""Exclusive locks between processes, by file. The refusal names the holder.

    lock = ExclusiveLock.acquire(folder / "run.lock", in_use=f"{folder} is being written by", advice="stop that run first")
    ...
    lock.release()

The lock is the kernel's (`flock`): it ends with its process, however the process ends. The file holds one line that says who took the lock
last. Lock files are opened without following symbolic links. The package `filelock` writes no holder into the file, and does not notice
that a lock file was removed and made again by another process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import stat
import time
from pathlib import Path
from typing import Self

from headrace.errors import ConfigError, FileCorrupt, StorageError
from headrace.files import open_inside, open_regular
from headrace.metrics import Wait

_POLL_SECONDS = 0.02


class ExclusiveLock:
    """An exclusive lock on a file. It is held until `release`, or until this process ends."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd

    @classmethod
    def take(cls, path: Path, owner: str = "", *, inside: Path | None = None) -> Self | None:
        """Take the lock now; None while another holder has it.

        Args:
            path: The lock file. A missing file is made; its folder has to exist.
            owner: What the holder is, for the refusals of others; the process and the machine are added.
            inside: A folder below which no symbolic link is followed, not only the last name; missing folders below it are made.

        Raises OSError if the file cannot be opened or locked, and StorageError with `inside`.
        """
        for _ in range(100):
            fd = _open(path, inside)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock = cls(path, fd)
                if lock.valid():
                    lock._write_holder(owner)
                    return lock
                os.close(fd)  # the file was removed between the two calls
            except BlockingIOError:
                os.close(fd)
                return None
            except BaseException:
                os.close(fd)
                raise
        raise StorageError(f"{path} keeps being removed by another process; look for a second janitor on this folder")

    @classmethod
    def acquire(
        cls,
        path: Path,
        owner: str = "",
        *,
        in_use: str,
        advice: str,
        inside: Path | None = None,
        patience: float = 0.0,
        wait_name: str = "lock",
    ) -> Self:
        """Take the lock, or raise ConfigError(f"{in_use} {holder}: {advice}").

        Args:
            path, owner, inside: As for `take`.
            in_use: Beginning of the refusal, such as "runs/a is being written by".
            advice: End of the refusal: what to do about it.
            patience: Seconds to wait for a holder that is about to leave.
            wait_name: Name of that wait.
        """
        with Wait(wait_name, deadline=patience) if patience else contextlib.nullcontext() as wait:
            while True:
                try:
                    lock = cls.take(path, owner, inside=inside)
                except OSError as error:
                    if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
                        raise ConfigError(
                            f"{path} cannot be locked ({error.strerror}): put the folder on a file system with flock"
                        ) from error
                    raise StorageError(f"{path} cannot be opened: {error.strerror or error}") from error
                if lock is not None:
                    return lock
                if wait is None or wait.expired():
                    break
                time.sleep(_POLL_SECONDS)
        holder = lock_holder(path) or "a process that just ended"
        if f"process {os.getpid()} " in f"{holder} ":
            advice = f"{advice}. It is this process that has it open: close() it"
        raise ConfigError(f"{in_use} {holder}: {advice}")

    def _write_holder(self, owner: str) -> None:
        text = f"{owner}, process" if owner else "process"
        line = f"{text} {os.getpid()} on {platform.node()}\n".encode()
        # Written before the rest is cut off: on a full disk, a block that was given back may not come again.
        os.pwrite(self._fd, line, 0)
        os.ftruncate(self._fd, len(line))

    def valid(self) -> bool:
        """Whether the path still names the locked file. False once the file was removed: another process may hold its successor."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(self.path))
        except OSError:
            return False

    def release(self, *, remove: bool = False) -> None:
        """Let go of the lock; a second call does nothing. `remove`: also remove the file."""
        if self._fd >= 0:
            if remove and self.valid():
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            os.close(self._fd)
            self._fd = -1


def lock_holder(path: Path) -> str | None:
    """The line that the holder of a lock wrote; None if no process holds it. StorageError if the file cannot be read."""
    try:
        fd = open_regular(path)
    except (FileNotFoundError, FileCorrupt):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError:
        return os.pread(fd, 300, 0).decode(errors="replace").partition("\n")[0].strip() or "another process"
    finally:
        os.close(fd)


def _open(path: Path, inside: Path | None) -> int:
    if inside is not None:
        return open_inside(inside, str(path.relative_to(inside)), os.O_RDWR)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return fd
