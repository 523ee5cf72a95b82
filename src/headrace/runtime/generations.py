"""Numbered generations of one saved state: the newest that verifies is used.

    files = Generations(folder, "step", digits=8, resumes="the run goes on from step", remedy="Delete the folder to start from step 0.")
    files.save(20, arrays, meta)           step-00000020.safetensors, whole, durable, checked; one generation before it is kept
    files.newest(lambda found: found)      (20, container); None if there never was a generation

A generation appears whole and durable, and only then is an old one removed: a process killed at any moment leaves a generation to go on
from. A damaged generation is moved to quarantine/ with its reason, the one before it is used, and `report` says so. If all are damaged,
nothing is moved and an error is raised: whether to begin again as if nothing had been there is for a person to decide.

Saving generation n makes n the newest. Later generations exist only if the work went back, and they belong to a future that will not
happen: they are moved to superseded/ first, so that the next resume cannot use one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from headrace.errors import ConfigError, FileCorrupt, StorageError
from headrace.files import Container, open_container, quarantine, sweep_temporaries, write_container

T = TypeVar("T")


class Generations:
    """The generations of one name in a folder. One process writes; others open the folder with `writer=False` and change nothing."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        digits: int,
        resumes: str,
        remedy: str,
        keep: int = 2,
        writer: bool = True,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Open the folder, which is made if it is missing.

        Args:
            folder: Where the files lie.
            name: Files are called `<name>-<number>.safetensors`.
            digits: Digits of a number in a file name, at least.
            resumes: Words before a number in the sentence that `report` gets, such as "the run goes on from step".
            remedy: End of the error for a folder in which no generation verifies: what to do about it.
            keep: Generations to keep, at least 1.
            writer: Whether this process may save and move files.
            report: Called with a sentence for every file that was moved, or could not be removed.
        """
        if keep < 1:
            raise ConfigError(f"a run keeps at least 1 checkpoint, got keep={keep}; 2 survive one damaged file")
        self.folder, self.name, self.keep, self.writer = folder, name, keep, writer
        self._digits, self._resumes, self._remedy, self._report = digits, resumes, remedy, report
        self._pattern = re.compile(re.escape(name) + rf"-(\d{{{digits},}})\.safetensors")
        if writer:
            folder.mkdir(parents=True, exist_ok=True)

    def sweep(self) -> None:
        """Remove what dead writers left unfinished. Only for a folder that has one writer."""
        sweep_temporaries(self.folder)

    def numbers(self) -> list[int]:
        """Numbers of the generations that are there, oldest first. None of them is verified yet."""
        if not self.folder.is_dir():
            return []
        return sorted(int(m[1]) for p in self.folder.iterdir() if (m := self._pattern.fullmatch(p.name)))

    def path(self, number: int) -> Path:
        return self.folder / f"{self.name}-{number:0{self._digits}d}.safetensors"

    def save(
        self, number: int, arrays: Mapping[str, np.ndarray], meta: Any = None, dtypes: Mapping[str, str] | None = None
    ) -> Path:
        """Make `number` the newest generation, durably; then remove the oldest ones beyond `keep`. Arguments as of `write_container`."""
        path = self.path(number)
        if not self.writer:
            raise StorageError(f"checkpoint {path} was not written: this process opened the store to read only")
        if number < 0:
            raise ValueError(f"a checkpoint needs a number >= 0, got {number}")
        for later in (n for n in self.numbers() if n > number):
            reason = f"the run went back and saved {self.name} {number}"
            went = quarantine(self.path(later), reason, self.folder / "superseded")
            self._report(
                f"the run went back and saves {self.name} {number}; the checkpoint of {self.name} {later} was moved to {went}"
            )
        write_container(path, arrays, meta, dtypes=dtypes, replace=path.exists())
        for old in map(self.path, self.numbers()[: -self.keep]):
            try:
                old.unlink(missing_ok=True)
            except OSError as error:  # the new generation is safe: report it, and go on
                self._report(f"checkpoint {old} is no longer needed and could not be removed: {error.strerror}")
        return path

    def newest(
        self, read: Callable[[Container], T | None], *, damage: tuple[type[Exception], ...] = (FileCorrupt,)
    ) -> tuple[int, T] | None:
        """Number and value of the newest generation that verifies and that `read` accepts; None if there is none.

        Processes may find different generations while one of them moves a file. Let one process call this and send the number to the others.

        Args:
            read: Makes the value from a verified file. None passes over the generation and leaves it where it is.
            damage: Errors of `read` that mean that the file is damaged.
        """
        damaged: list[tuple[Path, str]] = []
        for number in reversed(self.numbers()):
            path = self.path(number)
            try:
                value = read(open_container(path))
            except damage as error:
                if isinstance(error.__cause__, OSError):  # no sign of damage: a permission, a mount, too many files
                    raise StorageError(
                        f"{error}. Make it readable and resume, or move it away to use an older one."
                    ) from error
                damaged.append((path, str(error)))
                continue
            if value is None:
                continue
            for bad, reason in damaged:
                went = quarantine(bad, reason) if self.writer else bad
                self._report(f"{reason}; it is kept as {went}, and {self._resumes} {number}")
            return number, value
        if damaged:
            reasons = "; ".join(reason for _, reason in damaged)
            raise FileCorrupt(
                f"none of the {len(damaged)} checkpoints in {self.folder} verifies ({reasons}). {self._remedy}"
            )
        return None
