"""Saved states of a reduction: the newest one that verifies is resumed from.

    files = CheckpointFiles(folder, "coordinator")
    checkpoint.save(files)           coordinator-000000000007.safetensors, whole, durable, checked; the one before it is kept
    type(checkpoint).load(files)     the newest generation that verifies; None if there never was one

`headrace.runtime.generations` writes, keeps and sets aside the files. A state whose numbers do not add up counts as damaged.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from headrace.errors import ConfigError, DataError, FileCorrupt
from headrace.files import Container, container_bytes, read_container
from headrace.reduce.partition import CrossNodePartition, Provenance
from headrace.reduce.tree import BorderState
from headrace.runtime.generations import Generations


class CheckpointFiles(Generations):
    """Two generations of one writer's state."""

    def __init__(self, folder: Path, name: str, *, report: Callable[[str], None] = lambda _: None) -> None:
        """`report`: called with a sentence for every file that was set aside."""
        super().__init__(
            folder,
            name,
            digits=12,
            resumes="the sum goes on from generation",
            remedy="Remove the folder to begin again",
            report=report,
        )


class SavedState(abc.ABC):
    """A state that is saved in a folder, or travels as bytes. Both forms carry checksums."""

    __slots__ = ()
    kind: ClassVar[str]
    partition: CrossNodePartition
    provenance: Provenance

    def save(self, files: CheckpointFiles) -> Path:
        """Make it the newest generation of a folder, durably."""
        return files.save(max(files.numbers(), default=0) + 1, *self._saved())

    @classmethod
    def load(cls, files: CheckpointFiles) -> Self | None:
        """The newest generation that verifies and adds up; None if there is none."""
        # ConfigError: a partition or a pass that cannot be
        found = files.newest(cls._read, damage=(FileCorrupt, DataError, ConfigError))
        return None if found is None else found[1]

    def to_bytes(self) -> bytes:
        """The bytes of the file that `save` writes, for a transport or a store of the caller's."""
        return container_bytes(*self._saved())

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """What `to_bytes` gave. FileCorrupt or DataError if the bytes changed, or do not add up."""
        return cls._read(read_container(data, "the bytes of a checkpoint"))

    def _saved(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        arrays, meta = self._content()
        about = {"partition": self.partition.to_dict(), "pass": self.provenance.to_dict()}
        return arrays, {"kind": self.kind, "version": 1, **about, **meta}

    @classmethod
    def _about(cls, container: Container) -> tuple[Any, CrossNodePartition, Provenance]:
        """The JSON of a state of this kind, with its partition and pass."""
        meta, what = container.meta, str(container.path)
        if not isinstance(meta, dict) or meta.get("kind") != cls.kind or meta.get("version") != 1:
            raise DataError(f"{what} is no {cls.kind} checkpoint of version 1")
        partition = CrossNodePartition.from_dict(meta.get("partition"), what=what)
        return meta, partition, Provenance.from_dict(meta.get("pass"), what=what)

    @abc.abstractmethod
    def _content(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Arrays, and JSON beside the partition and the pass."""

    @classmethod
    @abc.abstractmethod
    def _read(cls, container: Container) -> Self:
        """The state in a verified file."""


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
