"""Layout of a spool's folder, its locks and its small state.

    data/web/
      meta.json, meta.pkl               what it holds
      queue/train/000000000007.safetensors    the batches, in the order of the numbers
      claims/train/000000000008         a provider is making this file (saves work, decides nothing)
      verdicts/train/000000000007       good or bad, decided once for all ranks, before any rank reads the file
      state/commit                      commit point: files below it may be deleted
      state/read-0                      read position of rank 0; the provider's backlog is measured from it
      state/taken-train                 files that a consumer with ack="consume" has begun
      state/*.lock                      held by living processes; the kernel releases them when a process dies
      quarantine/train/…                bad files, each with its reason
      archives/train/…                  the newest files below the commit point, with archive=N

A spool of several parts has a folder part-<q> below each split. Names that begin with `.tmp-` are unfinished files; every start of a
provider or a consumer removes those of dead processes.

State files are sealed records that are overwritten in place (records.py). Version 0.1 wrote `state/commit.json`, a sealed file; it is read
until the first commit is written here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import ConfigError, FileCorrupt, StorageError
from headrace.files import TEMP_PREFIX, process_start, temporary_name
from headrace.runtime.locks import ExclusiveLock, lock_holder
from headrace.runtime.retry import retry
from headrace.spool.durability import COMMIT_POINT, READ_POSITION
from headrace.spool.records import read_record, read_sealed, reserve_record, write_record

_FOLDERS = ("queue", "claims", "verdicts", "quarantine")
_BYTES_PER_PART = 96
"""Room for one part in the record of commit points."""
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""Errors of a file system that has no hard links, or of a folder in which this user can make none."""
T = TypeVar("T")


def patiently(what: str, call: Callable[[], T], *, deadline: float, hidden: bool = True) -> T:
    """The result of `call`, which is tried again while the disk is full or fails; the last error after `deadline` seconds. `hidden`: a background
    thread waits, and no trainer."""
    return retry(
        call, passes=lambda error: isinstance(error, StorageError), wait_name="spool.disk", deadline=deadline, doing=what, hidden=hidden
    )  # fmt: skip


def names_in(folder: Path) -> list[str]:
    """The names in a folder; none if there is no folder. StorageError if the system cannot list it."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{folder} could not be listed: {error.strerror or error}") from error


def sweep_dead_temporaries(folder: Path) -> None:
    """Remove temporaries whose process does not live on this machine. A writer on another machine tries again."""
    for name in names_in(folder):
        if name.startswith(TEMP_PREFIX):
            pid, _, start = name.removeprefix(TEMP_PREFIX).partition("-")[0].partition("_")
            if not (pid.isdecimal() and _alive(int(pid), start)):
                with contextlib.suppress(OSError):
                    os.unlink(folder / name)


def _alive(pid: int, start: str) -> bool:
    """Whether the process with this id that began at `start` is alive; if `start` is empty, any process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return not start or process_start(pid) in ("", start)


class SpoolFolder:
    """The folder of one spool."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = path / "state"
        self._commit, self._old_commit = self.state / "commit", self.state / "commit.json"

    def prepare(self, parts: int = 1) -> None:
        """Make the folders and the commit record of a spool of `parts` parts, and check that the file system has exclusive links."""
        try:
            for name in (*_FOLDERS, "state"):
                folder = self.path / name
                if folder.is_symlink():
                    raise ConfigError(f"{folder} is a symbolic link; a spool follows none. Put the folder itself there")
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the spool {self.path} cannot be made: {error.strerror or error}") from error
        _check_exclusive_link(self.state)
        reserve_record(self._commit, {"splits": {}}, size=parts * _BYTES_PER_PART, durable=COMMIT_POINT)

    def sweep(self) -> None:
        """Remove temporaries of dead processes, anywhere in the spool."""
        sweep_dead_temporaries(self.path)
        sweep_dead_temporaries(self.state)
        for name in _FOLDERS:
            for below, _, _ in os.walk(self.path / name):
                sweep_dead_temporaries(Path(below))

    # ------------------------------------------------------------------------------------------- commit

    def commit_points(self) -> dict[str, dict[str, Any]]:
        """Per split: `g`, the global index of the first sample still needed, and `at`, its (file, row) in every part."""
        path = self._commit
        try:
            value = read_record(path)
            if not value or not value["splits"]:  # nothing was committed here yet
                path = self._old_commit
                value = read_sealed(path)
            splits: dict[str, dict[str, Any]] = {} if value is None else value["splits"]
            for point in splits.values():
                if min(point["g"], *point["start"], *(n for pair in point["at"] for n in pair)) < 0:
                    raise ValueError("a negative number")
        except (FileCorrupt, KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileCorrupt(
                f"{path} holds no commit point ({error}). Nothing is read or deleted without one: remove the file, "
                "and let the trainer load its newest state with rewind=True"
            ) from error
        return splits

    def write_commit_points(self, splits: Mapping[str, Any]) -> None:
        """Overwrite the older of the two commit records, durably."""
        write_record(self._commit, {"splits": dict(splits)}, durable=COMMIT_POINT)
        with contextlib.suppress(OSError):
            os.unlink(self._old_commit)

    # --------------------------------------------------------------------------------------------- read

    def read_positions(self) -> list[dict[str, Any]]:
        """The read position of each rank of the present world. A damaged position is left out."""
        found: list[dict[str, Any]] = []
        for name in names_in(self.state):
            if re.fullmatch(r"read-\d{1,9}", name):
                with contextlib.suppress(FileCorrupt, KeyError, TypeError, ValueError, AttributeError):
                    value = read_record(self.state / name)
                    if value is not None and value["splits"]:
                        done = {s: [int(n) for n in v["done"]] for s, v in value["splits"].items()}
                        found.append({"rank": int(value["rank"]), "world_size": int(value["world_size"]), "done": done})
        lead = next((v for v in found if v["rank"] == 0), None)
        return [
            v
            for v in found
            if lead is not None and v["world_size"] == lead["world_size"] and v["rank"] < v["world_size"]
        ]

    def reserve_read_position(self, rank: int) -> None:
        """Make the record in which a rank writes its position."""
        reserve_record(self._read(rank), {"splits": {}}, durable=READ_POSITION)

    def write_read_position(self, rank: int, world_size: int, splits: Mapping[str, Any]) -> None:
        """Overwrite the older position of a rank."""
        value = {"rank": rank, "world_size": world_size, "splits": dict(splits)}
        write_record(self._read(rank), value, durable=READ_POSITION)

    def _read(self, rank: int) -> Path:
        return self.state / f"read-{rank}"

    # -------------------------------------------------------------------------------------------- locks

    def reader_at_work(self) -> str | None:
        """A consumer that holds its rank lock now; None if there is none."""
        names = [n for n in names_in(self.state) if n.startswith("consumer-") and n.endswith(".lock")]
        return next((holder for n in names if (holder := lock_holder(self.state / n)) is not None), None)

    def provider_at_work(self) -> str | None:
        """The provider that holds the lock of the spool now; None if there is none. Providers that joined count if every part has one."""
        holder = lock_holder(self.state / "provider.lock")
        if holder is None:
            parts = [n for n in names_in(self.state) if re.fullmatch(r"part-\d{3}\.lock", n)]
            holders = [lock_holder(self.state / n) for n in parts]
            holder = holders[0] if holders and all(holders) else None
        return holder

    def take_lock(self, name: str, who: str, advice: str) -> ExclusiveLock:
        """Take a lock of the spool; ConfigError within a second if another process holds it. `who`, `advice`: as of `ExclusiveLock.acquire`."""
        return ExclusiveLock.acquire(
            self.state / f"{name}.lock",
            who,
            in_use=f"{self.path} is in use by",
            advice=advice,
            patience=1.0,
            wait_name="spool.lock",
        )


def _check_exclusive_link(folder: Path) -> None:
    """ConfigError if the file system has no exclusive hard links, as some network and FUSE file systems."""
    name = temporary_name()
    first, second = folder / name, folder / f"{name}-b"
    try:
        fd = os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.close(fd)
        os.link(first, second)
        with contextlib.suppress(FileExistsError):
            os.link(first, second)
            raise ConfigError(
                f"{folder} lies on a file system where link overwrites, and a spool needs exclusive links: give the spool another folder"
            )
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise ConfigError(
                f"{folder} cannot be written, or its file system has no hard links ({error.strerror}): give the spool another folder"
            ) from error
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # a consumer has to start on a full disk: it frees room
            raise StorageError(
                f"{folder} cannot be written: {error.strerror or error}. Free space or fix the disk and run again"
            ) from error
    finally:
        for path in (first, second):
            with contextlib.suppress(OSError):
                os.unlink(path)


def purge_spool(path: Path) -> None:
    """Empty the spool in folder `path`: queue, claims, verdicts, quarantine, archives, state and meta. Lock files stay, because they are held."""
    try:
        for name in (*_FOLDERS, "archives"):
            below = path / name
            if below.is_symlink():
                raise ConfigError(f"{below} is a symbolic link; nothing behind it is deleted. Remove the link by hand")
            if below.exists():
                shutil.rmtree(below)
        # The state goes last: as long as it exists, a half-emptied spool refuses to start over from file 0.
        for name in names_in(path / "state"):
            if not name.endswith(".lock"):
                os.unlink(path / "state" / name)
        for name in ("meta.json", "meta.pkl"):
            (path / name).unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"{path} could not be emptied: {error.filename or path}: {error.strerror or error}. Allow it, and run again: what is left is removed then"
        ) from error
