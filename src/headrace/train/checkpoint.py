"""Checkpoints of a training run: the newest one that verifies is resumed from.

    store = CheckpointStore(run / "checkpoints", keep=2, report=print)
    store.save(20, arrays, dtypes, meta)        checkpoints/step-00000020.safetensors
    store.latest()                              (20, container), the newest that verifies; None in a new run

How files appear, are kept and are set aside: `headrace.runtime.generations`.
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
    """The checkpoints of one run. One process writes (rank 0); others open it with `writer=False` and change nothing."""

    def __init__(
        self, folder: Path, keep: int = 2, *, writer: bool = True, report: Callable[[str], None] = _warn
    ) -> None:
        """`keep`: checkpoints to keep. `report`: called with a sentence for every file that was moved or passed over."""
        self._report = report
        self._files = Generations(
            folder, "step", digits=8, keep=keep, writer=writer, report=report, resumes="the run goes on from step",
            remedy="Restore one from a copy, or delete the folder to start from step 0.",
        )  # fmt: skip
        if writer:
            self._files.sweep()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first; none of them is verified yet."""
        return self._files.numbers()

    def path(self, step: int) -> Path:
        return self._files.path(step)

    def save(
        self, step: int, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str] | None = None, meta: Any = None
    ) -> Path:
        """Make `step` the newest checkpoint, durably; then remove what is more than `keep` back."""
        return self._files.save(step, arrays, meta, dtypes)

    def open(self, step: int) -> Container:
        """One checkpoint, verified; for ranks that rank 0 tells the step."""
        return open_container(self.path(step))

    def latest(self, suits: Callable[[Container], bool] = lambda _: True) -> tuple[int, Container] | None:
        """The newest checkpoint that verifies, of those that suit; None if there is none. Let rank 0 ask, and tell the others the step."""

        def read(found: Container) -> Container | None:
            if suits(found):
                return found
            self._report(f"the checkpoint {found.path} is passed over: its run read data that is to be skipped now")
            return None

        return self._files.newest(read)
