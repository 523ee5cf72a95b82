"""One part of one split: its files in order, each made once, judged once, deleted once.

    provider   claim(k) ─► publish(k) ─► release
    checker    verdict(k)? ─► judge(k) ─► bad: set_aside(k), the provider makes it again
    reader     waits for file k and its verdict, by name
    janitor    delete(k) below the commit point, never above

Order is the number in the name. Exclusive links decide every race: two providers of one file, two verdicts of one file.
What a file holds follows from its number (or, for a sequential producer, from the file before it), so a file that was made
twice, or made again after it went bad, is the same file.

A provider that slept while its number was committed and deleted publishes a file that is never read: readers ignore what
lies below the commit point, and `publish` looks at the commit point again after it linked and takes its file away.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from headrace.errors import FileCorrupt, StorageError
from headrace.files import (
    make_inside,
    publish,
    quarantine,
    read_json,
    read_regular,
)
from headrace.runtime.locks import ExclusiveLock
from headrace.spool.batch_file import FORMATS
from headrace.spool.durability import BAD_VERDICT, GOOD_VERDICT
from headrace.spool.folder import SpoolFolder, names_in
from headrace.spool.meta import parts_of
from headrace.spool.records import read_sealed, seal

_OURS = re.compile(rf"(\d{{12,18}})\.({'|'.join(FORMATS)})")
_TIMESTAMPED = re.compile(r"\d{1,20}-(\d{1,18})-\d{1,12}\.pt")
Published = Literal["published", "exists", "late"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a file may be read: found by one rank, followed by all."""

    good: bool
    reason: str = ""


class Channel:
    """One part of one split of a spool."""

    def __init__(
        self,
        folder: SpoolFolder,
        split: str,
        part: int = 0,
        parts: int = 1,
        *,
        suffix: str = ".safetensors",
        foreign: bool = False,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", split):
            raise ValueError(f"a split is named by letters, digits and _.- such as train, got {split!r}")
        self.folder, self.split, self.part, self.parts = folder, split, part, parts
        self.suffix, self.foreign = suffix, foreign
        below = Path(split) if parts == 1 else Path(split) / f"part-{part:03d}"
        self.queue, self.claims, self.verdicts, self.bad, self.archive = (
            folder.path / name / below for name in ("queue", "claims", "verdicts", "quarantine", "archives")
        )
        self._lease_seen: dict[int, tuple[bytes, float]] = {}

    @classmethod
    def of_spool(cls, folder: SpoolFolder, meta: Mapping[str, Any], split: str, part: int) -> Self:
        """A channel of the spool that a meta describes; ValueError if no split can be called so."""
        ours = meta.get("headrace")
        if not ours:  # the timestamped .pt layout
            return cls(folder, split, part, suffix=".pt", foreign=True)
        return cls(folder, split, part, parts_of(meta, split), suffix=f".{ours['format']}")

    def __repr__(self) -> str:
        return f"{self.split} part {self.part}" if self.parts > 1 else self.split

    def prepare(self) -> None:
        for folder in (self.queue, self.claims, self.verdicts, self.bad):
            make_inside(self.folder.path, str(folder.relative_to(self.folder.path)))

    # -------------------------------------------------------------------------------------------- files

    def path(self, seq: int) -> Path:
        return self.queue / f"{seq:012d}{self.suffix}"

    def find(self, seq: int) -> Path | None:
        """Where file `seq` lies, if it does. Asked by name; only the names of the legacy `.pt` layout, which hold a timestamp, have to be looked for."""
        path = self.path(seq)
        if os.path.lexists(path):
            return path
        if self.foreign:
            for name in names_in(self.queue):
                match = _TIMESTAMPED.fullmatch(name)
                if match and int(match[1]) == seq:
                    return self.queue / name
        return None

    def present(self) -> list[int]:
        """The numbers of all files, sorted. Lists the folder: for starts and for people."""
        return sorted(self.names().values())

    def files_from(self, seq: int) -> int:
        """How many files there are from number `seq` on."""
        return sum(number >= seq for number in self.names().values())

    def names(self) -> dict[str, int]:
        """The number of every file, by its name."""
        found = {}
        for name in names_in(self.queue):
            match = _OURS.fullmatch(name) or (_TIMESTAMPED.fullmatch(name) if self.foreign else None)
            if match:
                found[name] = int(match[1])
        return found

    def publish(self, seq: int, write: Callable[[Path], None], *, ring: bool = False) -> Published:
        """Let `write` publish file `seq`. The first one stays; one that is no longer wanted is taken away again."""
        path = self.path(seq)
        if not ring and seq < self.commit_point():
            return "late"
        try:
            write(path)
        except FileExistsError:
            return "exists"
        except StorageError:
            # It may have appeared before the folder's fsync failed. The next attempt must start from nothing.
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        if not ring and seq < self.commit_point():
            # It is never read. What cannot be removed now, the next start of a consumer removes.
            with contextlib.suppress(OSError):
                os.unlink(path)
            return "late"
        return "published"

    def commit_point(self) -> int:
        point = self.folder.commit_points().get(self.split)
        return int(point["at"][self.part][0]) if point else 0

    def read_position(self) -> int:
        """The file the slowest rank is reading; what lies before it is read."""
        read = [v["done"].get(self.split, ()) for v in self.folder.read_positions()]
        return max(self.commit_point(), min((done[self.part] for done in read if self.part < len(done)), default=0))

    # ------------------------------------------------------------------------------------------- claims

    def claim(self, seq: int, who: str, lease: float) -> ExclusiveLock | Literal["expired"] | None:
        """Claim file `seq` for this provider; None while another living provider holds the claim.

        A claim is a lock, so that of a dead process is free at once. One that has not changed hands for `lease` seconds by our
        own clock belongs to a provider that is stuck, or runs where locks do not reach: "expired" means go ahead without the claim.
        """
        path = self.claims / f"{seq:012d}"
        try:
            held = ExclusiveLock.take(path, who)
        except OSError as error:
            raise StorageError(
                f"{path} cannot be claimed: {error.strerror or error}. Free space, or remove what lies there"
            ) from error
        if held is not None:
            self._lease_seen.pop(seq, None)
            return held
        with contextlib.suppress(OSError, FileCorrupt):
            token = read_regular(path, 1 << 20)[:300]
            before, since = self._lease_seen.get(seq, (b"", 0.0))
            if token != before:
                self._lease_seen[seq] = (token, time.monotonic())
            elif time.monotonic() - since > lease:
                return "expired"
        return None

    # ----------------------------------------------------------------------------------------- verdicts

    def verdict(self, seq: int) -> Verdict | None:
        """What was decided about file `seq`, if anything was. A damaged verdict is no verdict: it is removed."""
        path = self.verdicts / f"{seq:012d}"
        try:
            value = read_sealed(path)
            return None if value is None else Verdict(good=bool(value["good"]), reason=str(value["reason"]))
        except (FileCorrupt, KeyError, TypeError):
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None

    def judge(self, seq: int, reason: str = "") -> Verdict:
        """Decide: good, or bad for a reason. The first verdict stands, also against a later one that differs."""
        value = {"good": not reason, "reason": reason, "seq": seq}
        try:
            publish(self.verdicts / f"{seq:012d}", seal(value), durable=BAD_VERDICT if reason else GOOD_VERDICT)
        except FileExistsError:
            standing = self.verdict(seq)
            if standing is not None:
                return standing
            path = self.verdicts / f"{seq:012d}"
            if path.is_dir() and not path.is_symlink():  # which `verdict` could not remove
                raise StorageError(f"{path} is a folder in the place of a verdict. Remove it and run again") from None
            return self.judge(seq, reason)  # a damaged one was in the way and is gone now
        return Verdict(good=not reason, reason=reason)

    def condemn(self, seq: int, reason: str) -> None:
        """Overrule a good verdict: the file went bad after it was judged, before any rank read it."""
        value = {"good": False, "reason": reason, "seq": seq}
        publish(self.verdicts / f"{seq:012d}", seal(value), replace=True, durable=BAD_VERDICT)

    def set_aside(self, seq: int, reason: str) -> Path | None:
        """Move a bad file into the quarantine with its reason; where it went. Does nothing if it is gone already."""
        path = self.find(seq)
        if path is None:
            return None
        try:
            return quarantine(path, reason, self.bad, {"split": self.split})
        except FileNotFoundError:
            return None

    def clear_verdict(self, seq: int) -> None:
        """Forget what was decided about a file that is gone, before it is made again."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.verdicts / f"{seq:012d}")

    # ------------------------------------------------------------------------------------------ janitor

    def delete(self, seq: int, archive: int = 0) -> None:
        """Remove file `seq` and what belongs to it. OSError if the system does not allow it: the caller tries again."""
        path = self.find(seq)
        if path is not None and archive:
            make_inside(self.folder.path, str(self.archive.relative_to(self.folder.path)))
            os.replace(path, self.archive / path.name)
            kept = sorted(
                p for p in self.archive.iterdir() if _OURS.fullmatch(p.name) or _TIMESTAMPED.fullmatch(p.name)
            )
            for old in kept[:-archive]:
                os.unlink(old)
        elif path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self.clear_verdict(seq)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.claims / f"{seq:012d}")

    def leftovers(self, below: int) -> list[int]:
        """Numbers below the commit point of which something is still there: a crash came between commit and deletion."""
        found = set(self.present())
        for folder in (self.claims, self.verdicts):
            found |= {int(name) for name in names_in(folder) if name.isdecimal()}
        return sorted(seq for seq in found if seq < below)

    def unjudged(self) -> int:
        """How many files have no verdict yet. Lists two folders."""
        return len(set(self.present()) - {int(name) for name in names_in(self.verdicts) if name.isdecimal()})

    def quarantined(self) -> list[dict[str, str]]:
        """The files set aside, with their reasons."""
        found = []
        for name in sorted(names_in(self.bad)):
            if name.endswith(".reason.json") or name.startswith("."):
                continue
            reason = "no reason was written down: the process died in between"
            with contextlib.suppress(OSError, FileCorrupt, KeyError, TypeError):
                reason = str(read_json(self.bad / f"{name}.reason.json")["reason"])[:2000]
            found.append({"file": name, "split": self.split, "part": str(self.part), "reason": reason})
        return found
