"""Which checkpoint does a run go on from, whatever happened to the last one.

    store = CheckpointStore(run / "checkpoints", keep=2, report=print)
    store.save(20, arrays, dtypes, meta)        checkpoints/step-00000020.safetensors
    store.latest()                              (20, container), the newest that verifies; None in a new run

A generation appears whole and durable, and only then is an old one removed: a process killed at any moment leaves a
generation to go on from. A damaged one is set aside in quarantine/ with its reason and the one before it is used, and
`report` says so. If all are damaged nothing is moved and the run does not start: starting from step 0 as if nothing had
been there would be the worst answer.

Saving step n makes n the newest. Later generations can exist then only if the run went back, and they belong to a future
that will not happen: they are set aside in superseded/ first, so that the next resume cannot land on one of them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ConfigError, FileCorrupt, StorageError
from headrace.files import Container, open_container, quarantine, sweep_temporaries, write_container

__all__ = ["CheckpointStore"]

_NAME = re.compile(r"step-(\d{8,})\.safetensors")


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=3)


class CheckpointStore:
    """The generations of one run. One process writes (rank 0); others open it with `writer=False` and change nothing."""

    def __init__(
        self, folder: Path, keep: int = 2, *, writer: bool = True, report: Callable[[str], None] = _warn
    ) -> None:
        if keep < 1:
            raise ConfigError(f"a run keeps at least 1 checkpoint, got keep={keep}; 2 survive one damaged file")
        self.folder, self.keep, self.writer, self._report = folder, keep, writer, report
        if writer:
            folder.mkdir(parents=True, exist_ok=True)
            sweep_temporaries(folder)

    def steps(self) -> list[int]:
        """The steps that have a generation, oldest first; none of them is checked yet."""
        if not self.folder.is_dir():
            return []
        return sorted(int(m[1]) for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name)))

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.safetensors"

    def save(
        self, step: int, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str] | None = None, meta: Any = None
    ) -> Path:
        """Make `step` the newest generation, durably; then remove what is more than `keep` back."""
        if not self.writer:
            raise StorageError(
                f"checkpoint {self.path(step)} was not written: this process opened the store to read only"
            )
        if step < 0:
            raise ValueError(f"a checkpoint needs step >= 0, got {step}")
        path = self.path(step)
        for later in (s for s in self.steps() if s > step):
            went = quarantine(self.path(later), f"the run went back and saved step {step}", self.folder / "superseded")
            self._report(f"the run went back and saves step {step}; the checkpoint of step {later} was moved to {went}")
        write_container(path, arrays, meta, dtypes=dtypes, replace=path.exists())
        for old in self.steps()[: -self.keep]:
            try:
                self.path(old).unlink()
            except OSError as error:  # the new generation is safe; a folder that fills up is worth a word, not the run
                self._report(
                    f"checkpoint {self.path(old)} is no longer needed and could not be removed: {error.strerror}"
                )
        return path

    def open(self, step: int) -> Container:
        """One generation, verified; for ranks that are told which by rank 0."""
        return open_container(self.path(step))

    def latest(self, suits: Callable[[Container], bool] = lambda _: True) -> tuple[int, Container] | None:
        """The newest generation that verifies, of those that suit; None if there is none.

        What a rank finds may depend on the moment when another one sets a file aside: let rank 0 ask, and tell the
        others the step.
        """
        damaged: list[tuple[Path, str]] = []
        for step in reversed(self.steps()):
            path = self.path(step)
            try:
                found = open_container(path)
            except FileCorrupt as error:
                if isinstance(error.__cause__, OSError):  # no sign of damage: a permission, a mount, too many files
                    raise StorageError(
                        f"{error}. Make it readable and resume, or move it away to use an older one."
                    ) from error
                damaged.append((path, str(error)))
                continue
            if not suits(found):
                self._report(
                    f"the checkpoint of step {step} is passed over: its run read data that is to be skipped now"
                )
                continue
            for bad, reason in damaged:
                went = quarantine(bad, reason) if self.writer else bad
                self._report(f"{reason}; it is kept as {went}, and the run goes on from step {step}")
            return step, found
        if damaged:
            reasons = "; ".join(reason for _, reason in damaged)
            raise FileCorrupt(
                f"none of the {len(damaged)} checkpoints in {self.folder} verifies ({reasons}). Restore one from a copy, or "
                "delete the folder to start from step 0."
            )
        return None
