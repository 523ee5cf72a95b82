"""Saved states of a reduction: the newest one that verifies is resumed from.

    files = CheckpointFiles(folder, "coordinator")
    files.save(arrays, meta)         coordinator-000000000007.safetensors, whole, durable, checked; the one before it is kept
    files.newest(read)               what `read` makes of the newest generation that verifies; None if there never was one

How files appear, are kept and are set aside: `headrace.runtime.generations`. A state whose numbers do not add up counts as damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from headrace.errors import ConfigError, DataError, FileCorrupt
from headrace.files import Container
from headrace.reduce.tree import BorderState
from headrace.runtime.generations import Generations

__all__ = ["CHECKPOINT_BYTES", "CheckpointFiles", "state_arrays", "state_from"]

T = TypeVar("T")
CHECKPOINT_BYTES = "the bytes of a checkpoint"
"""What sentences call a checkpoint that came as bytes and not as a file."""


class CheckpointFiles:
    """Two generations of one writer's state."""

    def __init__(self, folder: Path, name: str, *, report: Callable[[str], None] = lambda _: None) -> None:
        """`report`: called with a sentence for every file that was set aside."""
        self.folder = folder
        self._files = Generations(
            folder, name, digits=12, report=report, resumes="the sum goes on from generation", remedy="Remove the folder to begin again"
        )  # fmt: skip

    def generations(self) -> list[Path]:
        """Oldest first; none of them is verified yet."""
        return [self._files.path(number) for number in self._files.numbers()]

    def save(self, arrays: Mapping[str, np.ndarray], meta: Any) -> Path:
        """Make this the newest generation, durably; then remove what is more than one back."""
        return self._files.save(max(self._files.numbers(), default=0) + 1, arrays, meta)

    def remove(self) -> None:
        """Remove all generations."""
        self._files.remove()

    def newest(self, read: Callable[[Container], T]) -> T | None:
        """`read` of the newest generation that verifies and that `read` accepts."""
        # ConfigError: a partition or a pass that cannot be
        found = self._files.newest(read, damage=(FileCorrupt, DataError, ConfigError))
        return None if found is None else found[1]


def state_arrays(state: BorderState) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A fold's state as named arrays and JSON."""
    arrays: dict[str, np.ndarray] = {}
    if state.block_partial is not None:
        arrays["block"] = state.block_partial
    if state.tail is not None:
        arrays["tail"] = state.tail
    for at, (_, total) in enumerate(state.forest):
        arrays[f"forest.{at}"] = total
    for chunk, gram in state.pending:
        arrays[f"pending.{chunk}"] = gram
    meta = {
        "frontier": state.frontier,
        "block_len": state.block_len,
        "weights": [weight for weight, _ in state.forest],
        "pending": [chunk for chunk, _ in state.pending],
    }
    return arrays, meta


def state_from(container: Container, meta: Any) -> BorderState:
    """The other way; whether the numbers add up is checked by the fold that resumes from it."""
    arrays = container.arrays
    try:
        frontier, block_len = meta["frontier"], meta["block_len"]
        weights, pending = list(meta["weights"]), list(meta["pending"])
        if not all(type(n) is int for n in (frontier, block_len, *weights, *pending)):
            raise TypeError("a number of the fold is no whole number")
        return BorderState(
            frontier=frontier,
            block_len=block_len,
            block_partial=arrays.get("block"),
            forest=tuple((weight, arrays[f"forest.{at}"]) for at, weight in enumerate(weights)),
            pending=tuple((chunk, arrays[f"pending.{chunk}"]) for chunk in pending),
            tail=arrays.get("tail"),
        )
    except (KeyError, TypeError) as error:
        raise FileCorrupt(f"{container.path} does not hold the state of a fold: {error}") from error
