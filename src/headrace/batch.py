"""The fields of a batch: the one description that loaders, the spool and trainers share.

spec = BatchSpec([FieldSpec("x", "int64", (128,), "input"), FieldSpec("y", "int64", (), "target")])
spec.check({"x": x, "y": y})      -> number of rows, or a DataError that names every field that does not fit
BatchSpec.from_json(spec.to_json()) == spec

lm_batch_spec(2048, fields)       what a text loader delivers
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headrace.errors import DataError

if TYPE_CHECKING:
    import numpy as np

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""torch's names of the types that a field may have, and safetensors' names of the same types."""
OFFSETS = "_offsets"
"""Suffix of the array that says where each row of a ragged field begins."""
Labels = Literal["shifted", "hf"]
"""`shifted`: labels[k] is the token after input_ids[k]. `hf`: labels[k] is input_ids[k], because transformers' models shift by themselves."""


def numpy_dtype(name: str) -> np.dtype:
    """Return the numpy type that holds a field's bits. bfloat16 is carried as uint16, because numpy has none."""
    import numpy as np  # not at the top: configs import this module, and `headrace --help` loads no numpy

    return np.dtype("uint16" if name == "bfloat16" else name)


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One named tensor of a batch."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    """Shape of one sample, without the batch axis. Empty for one number per sample and for a ragged field."""
    role: str | None = None
    """What the field is for: input, target, mask or meta."""
    ragged: bool = False
    """Rows of any length, stored as values and offsets: a batch has `name` with all values and `name_offsets` with the start of each row."""
    whole_batch: bool = False
    """The field describes the batch and has no batch axis, like `cu_seqlens`. `shape` then gives the number of axes only. A spool holds none."""

    def __post_init__(self) -> None:
        if not (self.name.isidentifier() and len(self.name) <= 100):
            raise ValueError(f"a field is named like a Python variable, got {self.name!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"field {self.name!r} has dtype {self.dtype!r}; a field is one of {', '.join(DTYPES)}")
        if any(type(n) is not int or n < 0 for n in self.shape) or math.prod(self.shape) > 1 << 40:
            raise ValueError(f"field {self.name!r} has shape {list(self.shape)}; a shape is a few numbers of 0 or more")
        if self.ragged and self.shape:
            raise ValueError(f"field {self.name!r} is ragged and has shape {list(self.shape)}; a ragged field has none")

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}
        return value | ({"role": self.role} if self.role else {}) | ({"ragged": True} if self.ragged else {})

    @classmethod
    def from_json(cls, value: object) -> FieldSpec:
        """Make a field of a mapping with name, dtype, shape and perhaps role and ragged; a ValueError says what is wrong with it."""
        if isinstance(value, FieldSpec):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"a field is a mapping with name, dtype, shape, got a {type(value).__name__}")
        unknown = set(value) - {"name", "dtype", "shape", "role", "ragged"}
        if unknown or not {"name", "dtype", "shape"} <= set(value):
            raise ValueError(
                f"a field has name, dtype, shape and perhaps role and ragged, got {sorted(map(str, value))}"
            )
        name, dtype, shape, role = value["name"], value["dtype"], value["shape"], value.get("role")
        if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(shape, (list, tuple)):
            raise ValueError(f"a field has a name, a dtype and a list of sizes, got {dict(value)!r:.200}")
        if role is not None and not isinstance(role, str):
            raise ValueError(f"field {name!r} has the role {role!r}; a role is a word such as input, target or mask")
        return cls(name, dtype.removeprefix("torch."), tuple(shape), role, bool(value.get("ragged", False)))


class BatchSpec(tuple[FieldSpec, ...]):
    """The fields of a batch, in order, with different names."""

    __slots__ = ()

    def __new__(cls, fields: Iterable[FieldSpec]) -> BatchSpec:
        spec = super().__new__(cls, fields)
        names = spec.array_names()
        if len(set(names)) != len(names):
            raise ValueError(f"fields must have different names, got {names}")
        return spec

    def array_names(self) -> list[str]:
        """Return the names of all arrays of a batch, offsets of ragged fields included."""
        return [f.name for f in self] + [f.name + OFFSETS for f in self if f.ragged]

    def to_json(self) -> list[dict[str, Any]]:
        return [field.to_json() for field in self]

    @classmethod
    def from_json(cls, value: object) -> BatchSpec:
        """Make a spec of a list of fields (`batch_schema` in a spool's meta); a ValueError says what is wrong with it."""
        if isinstance(value, BatchSpec):
            return value
        if not isinstance(value, Sequence) or isinstance(value, str) or not value or len(value) > 1000:
            raise ValueError(f"a batch_schema is a list of fields, got {value!r:.100}")
        return cls(FieldSpec.from_json(entry) for entry in value)

    def check(self, arrays: Mapping[str, Any], rows: int | None = None) -> int:
        """Return the number of rows of a batch of numpy arrays or tensors; a DataError names everything that does not fit.

        rows: the number of rows that is expected, if it is known.
        """
        known = set(self.array_names())
        problems = [f"{name!r} is not in the schema" for name in arrays if name not in known]
        for field in self:
            lead = field.name + OFFSETS if field.ragged else field.name
            missing = [name for name in dict.fromkeys((field.name, lead)) if name not in arrays]
            problems += [f"{name!r} is missing" for name in missing]
            if missing:
                continue
            problems += _wrong_dtype(field.name, field.dtype, arrays[field.name])
            if field.ragged:
                problems += _wrong_dtype(lead, "int64", arrays[lead])
            shape = tuple(getattr(arrays[lead], "shape", ()))
            if field.whole_batch:
                if len(shape) != len(field.shape):
                    problems.append(f"{lead!r} has shape {list(shape)}, expected {len(field.shape)} axes")
                continue
            if rows is None:
                rows = shape[0] - field.ragged if shape else -1
            expected = (rows + 1,) if field.ragged else (rows, *field.shape)
            if shape != expected:
                problems.append(f"{lead!r} has shape {list(shape)}, expected {list(expected)}")
        if problems or rows is None:
            raise DataError("a batch does not fit the schema: " + "; ".join(problems))
        return rows


def _wrong_dtype(name: str, expected: str, array: Any) -> list[str]:
    if not hasattr(array, "dtype"):
        fits = type(array) is int and expected == "int64"
        return [] if fits else [f"{name!r} is a {type(array).__name__}, expected {expected}"]
    found = str(array.dtype).removeprefix("torch.")
    return [] if found in (expected, str(numpy_dtype(expected))) else [f"{name!r} is {found}, expected {expected}"]


# ------------------------------------------------------------------------------------------ language models

LM_FIELDS = ("input_ids", "labels", "position_ids", "cu_seqlens", "row_count", "segment_ids")
"""Fields that a text loader can be asked for, in the order in which a batch has them."""
DEFAULT_LM_FIELDS = LM_FIELDS[:5]


def lm_batch_spec(seq_len: int, fields: Sequence[str] = DEFAULT_LM_FIELDS) -> BatchSpec:
    """Return the spec of a text loader's batches: [rows, seq_len] for each token field.

    fields: some of LM_FIELDS. `sample_index` is always there, and `max_seqlen` wherever `cu_seqlens` is.
    """
    width = (seq_len,)
    every = (
        FieldSpec("input_ids", "int64", width, "input"),
        FieldSpec("labels", "int64", width, "target"),  # -100 where there is nothing to learn
        FieldSpec("position_ids", "int64", width, "input"),  # restart at 0 in every piece
        FieldSpec("cu_seqlens", "int32", (0,), "input", whole_batch=True),  # piece borders over the flattened rows
        FieldSpec("max_seqlen", "int64", (), "input", whole_batch=True),  # the longest piece
        FieldSpec("sample_index", "int64", (), "meta"),  # the global index of each row
        FieldSpec("row_count", "int64", (), "meta"),  # documents that end in each row
        FieldSpec("segment_ids", "int64", width, "input"),  # 1, 2, … per piece; 0 on padding
    )
    present = {*fields, "sample_index", *(["max_seqlen"] if "cu_seqlens" in fields else [])}
    return BatchSpec(field for field in every if field.name in present)


def lm_field_problems(fields: Sequence[str]) -> list[str]:
    """Return what is wrong with the fields asked of a text loader, one sentence each."""
    problems = [
        f"fields: there is no field {f!r}; there are {', '.join(LM_FIELDS)}" for f in fields if f not in LM_FIELDS
    ]
    return problems + ([] if "input_ids" in fields else ["fields must hold 'input_ids': the others describe them"])


def label_problems(labels: object) -> list[str]:
    """Return what is wrong with a `labels` option, as a list of at most one sentence."""
    return [] if labels in ("shifted", "hf") else [f'labels must be "shifted" or "hf", got {labels!r}']
