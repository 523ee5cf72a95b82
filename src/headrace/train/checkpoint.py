"""Checkpoints of a training run: the newest one that verifies is resumed from.

    store = CheckpointStore(run / "checkpoints", keep=2, report=print)
    store.save(20, arrays, dtypes, meta)        checkpoints/step-00000020.safetensors
    store.latest()                              (20, container), the newest that verifies; None in a new run

`headrace.runtime.generations` publishes, keeps and quarantines the files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.files import Container, open_container
from headrace.runtime.generations import Generations


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=4)


class CheckpointStore:
    """The checkpoints of one run. Rank 0 writes; the other ranks open the store with `writer=False` and change no file."""

    def __init__(
        self, folder: Path, keep: int = 2, *, writer: bool = True, report: Callable[[str], None] = _warn
    ) -> None:
        """`keep`: checkpoints to keep. `report`: called with a sentence for every file that was set aside or skipped."""
        self._report = report
        self._files = Generations(
            folder, "step", digits=8, keep=keep, writer=writer, report=report, resumes="the run goes on from step",
            remedy="Restore one from a copy, or delete the folder to start from step 0.",
        )  # fmt: skip
        if writer:
            self._files.sweep()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first, not verified."""
        return self._files.numbers()

    def path(self, step: int) -> Path:
        return self._files.path(step)

    def save(
        self, step: int, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str] | None = None, meta: Any = None
    ) -> Path:
        """Make `step` the newest checkpoint, durably; then remove all but the newest `keep`."""
        return self._files.save(step, arrays, meta, dtypes)

    def open(self, step: int) -> Container:
        """One checkpoint, verified. Ranks other than 0 call this with the step that rank 0 chose."""
        return open_container(self.path(step))

    def latest(self, suits: Callable[[Container], bool] = lambda _: True) -> tuple[int, Container] | None:
        """The newest checkpoint that verifies, of those that `suits` accepts; None if there is none. Rank 0 calls this and tells the others the step."""

        def read(found: Container) -> Container | None:
            if suits(found):
                return found
            self._report(f"the checkpoint {found.path} is passed over: its run read data that is to be skipped now")
            return None

        return self._files.newest(read)
