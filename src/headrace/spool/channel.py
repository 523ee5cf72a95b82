"""One part of one split: its files in order, each made once, judged once, deleted once.

    provider   claim(k) ─► publish(k) ─► release
    consumer   verdict(k)? ─► judge(k) ─► bad: set_aside(k), the provider makes it again
    retention  delete(k) below the commit point, never above

Files are ordered by the number in their name. Exclusive links decide every race: two providers of one file, two verdicts about one file.
The content of a file follows from its number (or, for a sequential producer, from the file before it), so a file that was made
twice, or made again after it went bad, is the same file.

A provider may be suspended while its file is committed and deleted, and publish it later. Readers ignore files below the commit point, and
`publish` reads the commit point again after it linked the file, and removes it.
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

from headrace.errors import ConfigError, FileCorrupt, StorageError
from headrace.files import make_inside, publish, quarantine, read_json, read_regular
from headrace.runtime.locks import ExclusiveLock
from headrace.spool.batch_file import FORMATS
from headrace.spool.durability import BAD_VERDICT, GOOD_VERDICT
from headrace.spool.folder import SpoolFolder, names_in
from headrace.spool.meta import CIRCULAR_SPLITS, parts_of
from headrace.spool.records import read_sealed, seal

_OURS = re.compile(rf"(\d{{12,18}})\.({'|'.join(FORMATS)})")
_TIMESTAMPED = re.compile(r"\d{1,20}-(\d{1,18})-\d{1,12}\.pt")
Published = Literal["published", "exists", "late"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a file may be read: decided by one rank, followed by all."""

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
        """ConfigError if no split can have this name. `foreign`: another program makes the files, in the timestamped `.pt` layout."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", split):
            raise ConfigError(f"a split is named by letters, digits and _.- such as train, got {split!r}")
        self.folder, self.split, self.part, self.parts = folder, split, part, parts
        self.suffix, self.foreign, self.circular = suffix, foreign, split in CIRCULAR_SPLITS
        below = Path(split) if parts == 1 else Path(split) / f"part-{part:03d}"
        self.queue, self.claims, self.verdicts, self.bad, self.archive = (
            folder.path / name / below for name in ("queue", "claims", "verdicts", "quarantine", "archives")
        )
        self._lease_seen: dict[int, tuple[bytes, float]] = {}

    @classmethod
    def of_spool(cls, folder: SpoolFolder, meta: Mapping[str, Any], split: str, part: int) -> Self:
        """A channel of the spool that `meta` describes; ConfigError if no split can have this name."""
        ours = meta.get("headrace")
        if not ours:  # the timestamped .pt layout
            return cls(folder, split, part, suffix=".pt", foreign=True)
        return cls(folder, split, part, parts_of(meta, split), suffix=f".{ours['format']}")

    def __repr__(self) -> str:
        return f"{self.split} part {self.part}" if self.parts > 1 else self.split

    def prepare(self) -> None:
        """Make the folders of the part."""
        for folder in (self.queue, self.claims, self.verdicts, self.bad):
            make_inside(self.folder.path, str(folder.relative_to(self.folder.path)))

    # -------------------------------------------------------------------------------------------- files

    def path(self, seq: int) -> Path:
        return self.queue / f"{seq:012d}{self.suffix}"

    def find(self, seq: int) -> Path | None:
        """Path of file `seq`; None if it is not there. Names of the timestamped `.pt` layout are found by listing the folder."""
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
        """The numbers of all files, sorted. Lists the folder, so it is not called for every file."""
        found = []
        for name in names_in(self.queue):
            match = _OURS.fullmatch(name) or (_TIMESTAMPED.fullmatch(name) if self.foreign else None)
            if match:
                found.append(int(match[1]))
        return sorted(found)

    def files_from(self, seq: int) -> int:
        """How many files there are from number `seq` on."""
        return sum(number >= seq for number in self.present())

    def publish(self, seq: int, write: Callable[[Path], None]) -> Published:
        """Call `write(path)`, which publishes file `seq`, unless the file is there or below the commit point. Circular splits have none."""
        path = self.path(seq)
        if not self.circular and seq < self.commit_point():
            return "late"
        try:
            write(path)
        except FileExistsError:
            return "exists"
        except StorageError:
            # The file may have appeared before the fsync of its folder failed. The next attempt must start without it.
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        if not self.circular and seq < self.commit_point():
            # It is never read. If it cannot be removed now, a consumer removes it at its next commit or start.
            with contextlib.suppress(OSError):
                os.unlink(path)
            return "late"
        return "published"

    def commit_point(self) -> int:
        """The first file that is still needed."""
        point = self.folder.commit_points().get(self.split)
        return int(point["at"][self.part][0]) if point else 0

    def read_position(self) -> int:
        """The file that the slowest rank is reading."""
        read = [v["done"].get(self.split, ()) for v in self.folder.read_positions()]
        return max(self.commit_point(), min((done[self.part] for done in read if self.part < len(done)), default=0))

    # ------------------------------------------------------------------------------------------- claims

    def claim(self, seq: int, who: str, lease: float) -> ExclusiveLock | Literal["expired"] | None:
        """Claim file `seq` for this provider; None while another living provider holds the claim.

        A claim is a lock, so the claim of a dead process is free at once. A claim that has had the same holder for `lease` seconds by our
        own clock belongs to a provider that is stuck, or runs where locks do not reach. Then the result is "expired": make the file without
        the claim.
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
        """The verdict about file `seq`; None if there is none. A damaged verdict is removed."""
        path = self.verdicts / f"{seq:012d}"
        try:
            value = read_sealed(path)
            return None if value is None else Verdict(good=bool(value["good"]), reason=str(value["reason"]))
        except (FileCorrupt, KeyError, TypeError):
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None

    def judge(self, seq: int, reason: str = "") -> Verdict:
        """Publish a verdict: good, or bad for `reason`. Returns the verdict that stands, which is the first one that was published."""
        value = {"good": not reason, "reason": reason, "seq": seq}
        try:
            publish(self.verdicts / f"{seq:012d}", seal(value), durable=BAD_VERDICT if reason else GOOD_VERDICT)
        except FileExistsError:
            standing = self.verdict(seq)
            if standing is not None:
                return standing
            path = self.verdicts / f"{seq:012d}"
            if path.is_dir() and not path.is_symlink():  # `verdict` could not remove it
                raise StorageError(f"{path} is a folder in the place of a verdict. Remove it and run again") from None
            return self.judge(seq, reason)  # a damaged verdict was there and is removed now
        return Verdict(good=not reason, reason=reason)

    def condemn(self, seq: int, reason: str) -> None:
        """Replace a good verdict: the file went bad after it was judged."""
        value = {"good": False, "reason": reason, "seq": seq}
        publish(self.verdicts / f"{seq:012d}", seal(value), replace=True, durable=BAD_VERDICT)

    def set_aside(self, seq: int, reason: str) -> Path | None:
        """Move a bad file into the quarantine with its reason; returns its new path, None if the file is gone."""
        path = self.find(seq)
        if path is None:
            return None
        try:
            return quarantine(path, reason, self.bad, {"split": self.split})
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{path} could not be set aside: {error.strerror or error}") from error

    def clear_verdict(self, seq: int) -> None:
        """Remove the verdict about a file that is gone, before the file is made again."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.verdicts / f"{seq:012d}")

    # ----------------------------------------------------------------------------------------- deletion

    def delete(self, seq: int, archive: int = 0) -> None:
        """Remove file `seq`, its verdict and its claim. OSError if the system does not allow it: the caller tries again. `archive`: move the file
        to archives/ instead, where this many are kept."""
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
        """Numbers below `below` that still have a file, claim or verdict."""
        found = {*self.present(), *_numbers_in(self.claims), *_numbers_in(self.verdicts)}
        return sorted(seq for seq in found if seq < below)

    def unjudged(self) -> int:
        """How many files have no verdict yet. Lists two folders."""
        return len(set(self.present()) - _numbers_in(self.verdicts))

    def quarantined(self) -> list[dict[str, str]]:
        """The files set aside, with their reasons."""
        found = []
        for name in sorted(names_in(self.bad)):
            if name.endswith(".reason.json") or name.startswith("."):
                continue
            reason = "no reason was recorded: the process died before it was written"
            with contextlib.suppress(OSError, FileCorrupt, KeyError, TypeError):
                reason = str(read_json(self.bad / f"{name}.reason.json")["reason"])[:2000]
            found.append({"file": name, "split": self.split, "part": str(self.part), "reason": reason})
        return found


def _numbers_in(folder: Path) -> set[int]:
    """The files that a folder has claims or verdicts of."""
    return {int(name) for name in names_in(folder) if name.isdecimal()}
