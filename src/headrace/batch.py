"""What passes from room to room: named arrays whose shape and type were agreed beforehand.

    LM = Schema(fields=(Field("input_ids", "int64", ("b", "T")), …))
    LM.check(arrays)      -> {"b": 8, "T": 2048}, or an error that names field, expected and found

A shape may hold letters: a letter stands for the same number wherever it occurs in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

__all__ = ["LM_SCHEMA", "Batch", "Field", "Schema"]

Role = Literal["input", "target", "meta"]


@dataclass(frozen=True, slots=True)
class Field:
    """One named array of a batch."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    role: Role = "input"
    optional: bool = False
    help: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a field needs a name")
        np.dtype(self.dtype)
        for size in self.shape:
            if isinstance(size, int) and size < 0:
                raise ValueError(f"field {self.name!r} has a negative size in shape {self.shape}")


@dataclass(frozen=True, slots=True)
class Schema:
    """The fields of a batch."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        names = [f.name for f in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"fields must have different names, got {names}")

    def __getitem__(self, name: str) -> Field:
        return next(f for f in self.fields if f.name == name)

    def check(self, arrays: Mapping[str, Any]) -> dict[str, int]:
        """The sizes of the letters, or a ValueError that names every field that does not fit."""
        problems: list[str] = []
        letters: dict[str, int] = {}
        known = {f.name for f in self.fields}
        problems += [f"{name!r} is not in the schema" for name in arrays if name not in known]
        for field in self.fields:
            if field.name not in arrays:
                if not field.optional:
                    problems.append(f"{field.name!r} is missing")
                continue
            problems += _misfits(field, arrays[field.name], letters)
        if problems:
            raise ValueError("batch does not fit its schema: " + "; ".join(problems))
        return letters

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"name": f.name, "dtype": f.dtype, "shape": list(f.shape), "role": f.role, "optional": f.optional}
            for f in self.fields
        ]

    @classmethod
    def from_json(cls, value: list[dict[str, Any]]) -> Schema:
        return cls(
            fields=tuple(
                Field(f["name"], f["dtype"], tuple(f["shape"]), f.get("role", "input"), f.get("optional", False))
                for f in value
            )
        )


def _misfits(field: Field, value: Any, letters: dict[str, int]) -> list[str]:
    dtype = str(value.dtype).removeprefix("torch.") if hasattr(value, "dtype") else type(value).__name__
    shape = tuple(value.shape) if hasattr(value, "shape") else ()
    if not hasattr(value, "dtype"):
        return [] if dtype == "int" and field.shape == () else [f"{field.name!r} is a {dtype}, expected {field.dtype}"]
    problems = []
    if dtype != field.dtype:
        problems.append(f"{field.name!r} is {dtype}, expected {field.dtype}")
    if len(shape) != len(field.shape):
        return [*problems, f"{field.name!r} has shape {shape}, expected {field.shape}"]
    for found, wanted in zip(shape, field.shape, strict=True):
        expected = letters.setdefault(wanted, found) if isinstance(wanted, str) else wanted
        if found != expected:
            problems.append(f"{field.name!r} has shape {shape}, expected {field.shape} with {wanted} = {expected}")
    return problems


LM_SCHEMA = Schema(
    fields=(
        Field("input_ids", "int64", ("b", "T"), help="the rank's share of the global batch"),
        Field(
            "labels", "int64", ("b", "T"), "target", help="the token that follows; -100 where there is nothing to learn"
        ),
        Field("position_ids", "int64", ("b", "T"), help="restart at 0 in every piece"),
        Field(
            "cu_seqlens", "int32", ("pieces+1",), help="piece borders over the flattened rows, padding as its own piece"
        ),
        Field("max_seqlen", "int64", (), help="the longest piece"),
        Field("sample_index", "int64", ("b",), "meta", help="the global index g of each row"),
        Field("row_count", "int64", ("b",), "meta", help="documents that end in each row"),
        Field("segment_ids", "int64", ("b", "T"), optional=True, help="1, 2, … per piece; 0 on padding"),
    )
)


@dataclass(slots=True)
class Batch:
    """Arrays on their way from the pipeline to the trainer, with what the pipeline knows about them."""

    arrays: dict[str, np.ndarray]
    step: int
    max_seqlen: int = 0
    tokens: int = 0
    """Tokens that are not padding."""
    rows: int = 0
    """Documents that end in this batch."""
