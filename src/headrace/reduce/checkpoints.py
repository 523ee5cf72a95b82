"""Which saved state does a reduction go on from, whatever happened to the last one.

    files = CheckpointFiles(folder, "coordinator")
    files.save(arrays, meta)         coordinator-000000000007.safetensors, whole, durable, checked; the one before it is kept
    files.newest(read)               what `read` makes of the newest generation that verifies; None if there never was one

A damaged generation, or one whose numbers do not add up, is set aside with its reason and the one before it is used. If all
are bad nothing is moved and the error goes up: to begin again as if nothing had been there is for a person to decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from headrace.errors import ConfigError, DataError, FileCorrupt
from headrace.files import Container, open_container, quarantine, write_container
from headrace.reduce.tree import BorderState

__all__ = ["CHECKPOINT_BYTES", "CheckpointFiles", "state_arrays", "state_from"]

T = TypeVar("T")
_KEPT = 2
CHECKPOINT_BYTES = "the bytes of a checkpoint"
"""What sentences call a checkpoint that came as bytes and not as a file."""


class CheckpointFiles:
    """Two generations of one writer's state."""

    def __init__(self, folder: Path, name: str, *, report: Callable[[str], None] | None = None) -> None:
        self.folder, self.name = folder, name
        self._pattern = re.compile(re.escape(name) + r"-(\d{12})\.safetensors")
        self._report = report
        folder.mkdir(parents=True, exist_ok=True)

    def generations(self) -> list[Path]:
        """Oldest first; none of them is checked yet."""
        return sorted(p for p in self.folder.iterdir() if self._pattern.fullmatch(p.name))

    def save(self, arrays: Mapping[str, np.ndarray], meta: Any) -> Path:
        """Make this the newest generation, durably; then remove what is more than one back."""
        before = self.generations()
        number = int(before[-1].stem.rpartition("-")[2]) + 1 if before else 1
        path = self.folder / f"{self.name}-{number:012d}.safetensors"
        write_container(path, arrays, meta)
        for old in before[: len(before) + 1 - _KEPT]:
            old.unlink(missing_ok=True)
        return path

    def remove(self) -> None:
        """Forget all of it."""
        for path in self.generations():
            path.unlink(missing_ok=True)

    def newest(self, read: Callable[[Container], T]) -> T | None:
        """`read` of the newest generation that verifies and that `read` accepts."""
        bad: list[tuple[Path, str]] = []
        for path in reversed(self.generations()):
            try:
                value = read(open_container(path))
            except (FileCorrupt, DataError, ConfigError) as error:  # ConfigError: a partition or a pass that cannot be
                bad.append((path, str(error)))
                continue
            for damaged, reason in bad:
                where = quarantine(damaged, reason)
                if self._report is not None:
                    self._report(f"{reason}. It was set aside as {where}; going on from {path.name}")
            return value
        if bad:
            raise FileCorrupt(
                f"no saved state in {self.folder} can be used: {'; '.join(reason for _, reason in bad)}. Remove the folder to "
                "begin again"
            )
        return None


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
