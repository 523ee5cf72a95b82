"""The file system of a spool: its guarantees, and its free space.

    FileSystem.of(path)           its kind, and whether other machines share it
    FileSystem.of(path).warnings  what it does not guarantee, for the log of a provider or consumer
    room(path)                    free bytes and inodes, and how many of them providers leave to consumers

A spool relies on three guarantees: `link` is exclusive, `fsync` reaches the disk, `flock` is seen by all readers. Links
are tried out whenever a spool is opened. The other two cannot be tried, so they are judged by the file system's name. On
Linux the name is read from /proc/self/mountinfo; elsewhere it is unknown, and there are no warnings.
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
"""File systems on which a lock of one machine is not seen by another, or only with mount options that are not the default."""

_KEPT_BYTES, _KEPT_INODES = 1 << 18, 64
"""What providers leave to consumers, or a quarter of the disk where that is less."""
_INODES_OF_A_FILE = 2
"""A temporary, and on file systems that count links (tmpfs) its second name."""
_BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """The file system a folder lies on."""

    kind: str
    """Its name as `mount` prints it; empty if unknown."""

    @classmethod
    def of(cls, path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Self:
        """The file system of `path`, or of its nearest parent that exists. `mounts`: the kernel's list of mounts."""
        while not path.exists() and path != path.parent:
            path = path.parent
        try:
            lines = mounts.read_text(errors="replace").splitlines()
        except OSError:
            return cls(kind="")
        resolved, best = str(path.resolve()), ("", "")
        for line in lines:
            words, _, after = line.partition(" - ")
            fields, kind = words.split(), after.split(maxsplit=1)[:1]
            if len(fields) < 5 or not kind:
                continue
            point = fields[4].replace("\\040", " ")
            inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best[0]):  # of several on one point the last is on top
                best = (point, kind[0])
        return cls(kind=best[1])

    @property
    def local(self) -> bool:
        """Whether a deleted file stays readable to a process that has it mapped, also if another machine deletes it."""
        return self.kind not in _SHARED and not self.kind.startswith("fuse")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Guarantees of a spool that the file system does not give, one sentence each."""
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
    """Free space on a disk."""

    bytes: int
    inodes: int | None
    """None where the file system does not count them."""
    kept_bytes: int = 0
    kept_inodes: int = 0
    """How many of them a provider leaves to consumers, which need them to start, judge files and commit. Only consumers free space."""

    def __str__(self) -> str:
        return f"{self.bytes:,} bytes" + ("" if self.inodes is None else f" and {self.inodes:,} inodes")

    def require(self, size: int, verdicts: int, waited_for: bool, sentence: str) -> None:
        """StorageError, beginning with `sentence`, if a file of `size` bytes would take room that consumers need. Never where the size of the
        file system is unknown.

        Args:
            size: Bytes of the file.
            verdicts: Verdicts that consumers have to write before they can free room.
            waited_for: Whether a consumer waits for this file. It may use the kept space then.
            sentence: What cannot be done, as the beginning of the message.
        """
        if not self.kept_bytes:
            return
        inodes = verdicts + (0 if waited_for else self.kept_inodes)
        space = verdicts * _BLOCK + (0 if waited_for else self.kept_bytes)
        if self.bytes < space + size or (self.inodes is not None and self.inodes < inodes + _INODES_OF_A_FILE):
            raise StorageError(
                f"{sentence}: {self} are free, and {space:,} bytes and {inodes} inodes are left to consumers, "
                "which need them to read and to free room. Free space, or let a consumer read and commit"
            )


def room(path: Path) -> Room:
    """Free space on the disk of a folder, for this user. StorageError if the system does not report it."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        raise StorageError(f"the free space on the disk of {path} is not known: {error.strerror or error}") from error
    return Room(
        bytes=found.f_bavail * found.f_frsize,
        inodes=found.f_favail if found.f_files else None,
        kept_bytes=min(_KEPT_BYTES, found.f_blocks * found.f_frsize // 4),
        kept_inodes=min(_KEPT_INODES, found.f_files // 4),
    )
