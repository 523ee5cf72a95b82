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
from typing import Any, Literal, Self, TypeVar

import msgspec
import numpy as np

from headrace.errors import ConfigError, DataError, FileCorrupt
from headrace.files import Container, container_bytes, read_container
from headrace.reduce.partition import CrossNodePartition, Provenance
from headrace.reduce.tree import BorderState
from headrace.runtime.generations import Generations

M = TypeVar("M", bound="SavedMeta")


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

    def save(self, files: CheckpointFiles) -> Path:
        """Make it the newest generation of a folder, durably."""
        arrays, meta = self._saved()
        return files.save(max(files.numbers(), default=0) + 1, arrays, msgspec.to_builtins(meta))

    @classmethod
    def load(cls, files: CheckpointFiles) -> Self | None:
        """The newest generation that verifies and adds up; None if there is none."""
        # ConfigError: a partition or a pass that cannot be
        found = files.newest(cls._read, damage=(FileCorrupt, DataError, ConfigError))
        return None if found is None else found[1]

    def to_bytes(self) -> bytes:
        """The bytes of the file that `save` writes, for a transport or a store of the caller's."""
        arrays, meta = self._saved()
        return container_bytes(arrays, msgspec.to_builtins(meta))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """What `to_bytes` gave. FileCorrupt or DataError if the bytes changed, or do not add up."""
        return cls._read(read_container(data, "the bytes of a checkpoint"))

    @abc.abstractmethod
    def _saved(self) -> tuple[dict[str, np.ndarray], Any]:
        """The state as arrays and JSON."""

    @classmethod
    @abc.abstractmethod
    def _read(cls, container: Container) -> Self:
        """The state in a verified file."""


class SavedFold(msgspec.Struct):
    """The JSON of a fold's state."""

    frontier: int
    block_len: int
    weights: list[int]
    pending: list[int]


class SavedMeta(msgspec.Struct, kw_only=True, tag_field="kind"):
    """The JSON that every state has."""

    version: Literal[1] = 1
    partition: CrossNodePartition
    provenance: Provenance = msgspec.field(name="pass")


def read_meta(container: Container, kind: type[M]) -> M:
    """The JSON of a state; DataError if it is of another kind or version, or lacks something."""
    try:
        return msgspec.convert(container.meta, kind)
    except msgspec.ValidationError as error:
        named = kind.__struct_config__.tag
        raise DataError(f"{container.path} is no {named} checkpoint of version 1: {error}") from error


def state_arrays(state: BorderState) -> tuple[dict[str, np.ndarray], SavedFold]:
    """A fold's state as named arrays and JSON."""
    single = {"block": state.block_partial, "tail": state.tail}
    arrays = {name: array for name, array in single.items() if array is not None}
    arrays |= {f"forest.{at}": total for at, (_, total) in enumerate(state.forest)}
    arrays |= {f"pending.{chunk}": gram for chunk, gram in state.pending}
    return arrays, SavedFold(
        frontier=state.frontier,
        block_len=state.block_len,
        weights=[weight for weight, _ in state.forest],
        pending=[chunk for chunk, _ in state.pending],
    )


def state_from(container: Container, saved: SavedFold) -> BorderState:
    """The other way; whether the numbers add up is checked by the fold that resumes from it."""
    arrays = container.arrays
    try:
        return BorderState(
            frontier=saved.frontier,
            block_len=saved.block_len,
            block_partial=arrays.get("block"),
            forest=tuple((weight, arrays[f"forest.{at}"]) for at, weight in enumerate(saved.weights)),
            pending=tuple((chunk, arrays[f"pending.{chunk}"]) for chunk in saved.pending),
            tail=arrays.get("tail"),
        )
    except KeyError as error:
        raise FileCorrupt(f"{container.path} does not hold the state of a fold: {error} is missing") from error
