"""The file system of a spool: its guarantees, and the room that is left.

    FileSystem.of(path)           its kind, whether other machines share it, what it does not keep
    FileSystem.of(path).warnings  what it does not guarantee, for the log of a provider or consumer
    room(path)                    bytes and inodes that are free, and how many of them are left to consumers

A spool stands on three things: `link` excludes, `fsync` reaches the disk, `flock` is seen by all readers. Links
are tried out whenever a spool is opened; the other two cannot be tried, so they are judged by the file system's name. On
Linux that is read from /proc/self/mountinfo; elsewhere it is unknown, and nothing is said.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from headrace.errors import StorageError

_SHARED = {"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "orangefs", "smb3", "virtiofs", "wekafs"}  # fmt: skip
_IN_MEMORY = {"tmpfs", "ramfs"}
_LOCKS_OF_ONE_MACHINE = {"9p", "cifs", "smb3"}
"""Where a lock of one machine is not seen by another, or only with mount options that are not the default."""

_KEPT_BYTES, _KEPT_INODES = 1 << 18, 64
"""What providers leave to consumers, or a quarter of the disk where that is less."""
_INODES_OF_A_FILE = 2
"""A temporary, and on file systems that count links (tmpfs) its second name."""
_BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """The file system a folder lies on."""

    kind: str
    """As `mount` names it; empty where that cannot be found out."""

    @classmethod
    def of(cls, path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Self:
        """That of the nearest folder of `path` that exists."""
        while not path.exists() and path != path.parent:
            path = path.parent
        try:
            device = path.stat().st_dev
            lines = mounts.read_text(errors="replace").splitlines()
        except OSError:
            return cls(kind="")
        wanted, resolved = f"{os.major(device)}:{os.minor(device)}", str(path.resolve())
        best = ("", "")
        for line in lines:
            words, _, after = line.partition(" - ")
            fields, kind = words.split(), after.split(maxsplit=1)[:1]
            if len(fields) < 5 or not kind:
                continue
            point = fields[4].replace("\\040", " ")
            inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
            # By number where a file system shows the same one everywhere; btrfs and some network ones do not: there by the longest path.
            if fields[2] == wanted and inside:
                return cls(kind=kind[0])
            if inside and len(point) >= len(best[0]):
                best = (point, kind[0])
        return cls(kind=best[1])

    @property
    def local(self) -> bool:
        """Whether a deleted file stays readable to a process that has it mapped, also if another machine deletes it."""
        return self.kind not in _SHARED and not self.kind.startswith("fuse")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What it does not keep of what a spool relies on."""
        found = []
        if self.kind in _IN_MEMORY:
            found.append(f"{self.kind} is memory: nothing in it survives a power cut or a reboot")
        if self.kind in _LOCKS_OF_ONE_MACHINE:
            found.append(
                f"locks on {self.kind} are not seen by other machines: see to it that there is one consumer per rank"
            )
        if self.kind.startswith("fuse") and self.kind != "fuseblk":
            found.append(f"{self.kind} may not pass fsync and locks on: try a power cut before you rely on it")
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is free."""

    bytes: int
    inodes: int | None
    """None where the file system does not count them."""
    kept_bytes: int = 0
    kept_inodes: int = 0
    """What a provider leaves of them, so that consumers can start, judge files and commit. Only consumers free room."""

    def __str__(self) -> str:
        return f"{self.bytes:,} bytes" + ("" if self.inodes is None else f" and {self.inodes:,} inodes")

    def is_little(self, size: int, files: int) -> bool:
        """Whether `files` more files of `size` bytes do not fit."""
        return self.bytes < size * files or (self.inodes is not None and self.inodes < _KEPT_INODES + files)

    def is_ample(self, size: int, verdicts: int) -> bool:
        """Whether a file of `size` bytes and so many verdicts fit beside what is kept, or the file system does not say how large it is."""
        if not self.kept_bytes:
            return True
        inodes = self.kept_inodes + verdicts + _INODES_OF_A_FILE
        return self.bytes > self.kept_bytes + verdicts * _BLOCK + size and (self.inodes is None or self.inodes > inodes)

    def require(self, size: int, verdicts: int, waited_for: bool, sentence: str) -> None:
        """StorageError, beginning with `sentence`, if a file of `size` bytes would take room that consumers need.

        Args:
            size: Bytes of the file.
            verdicts: Verdicts that consumers have to write before they can free room.
            waited_for: A consumer waits for this file: it may take what is kept.
            sentence: What cannot be done.
        """
        inodes = verdicts + (0 if waited_for else self.kept_inodes)
        space = verdicts * _BLOCK + (0 if waited_for else self.kept_bytes)
        if self.bytes < space + size or (self.inodes is not None and self.inodes < inodes + _INODES_OF_A_FILE):
            raise StorageError(
                f"{sentence}: {self} are free, and {space:,} bytes and {inodes} inodes are left to consumers, "
                "which need them to read and to free room. Free space, or let a consumer read and commit"
            )


def room(path: Path) -> Room:
    """What is free on the disk of a folder, for this user. StorageError if the system does not say."""
    try:
        told = os.statvfs(path)
    except OSError as error:
        raise StorageError(f"the room on the disk of {path} is not known: {error.strerror or error}") from error
    return Room(
        bytes=told.f_bavail * told.f_frsize,
        inodes=told.f_favail if told.f_files else None,
        kept_bytes=min(_KEPT_BYTES, told.f_blocks * told.f_frsize // 4),
        kept_inodes=min(_KEPT_INODES, told.f_files // 4),
    )
