"""Collects batches into the arrays of one file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.batch import OFFSETS, BatchSpec, numpy_dtype
from headrace.errors import DataError
from headrace.spool.batch_file import tensor_array

__all__ = ["RowBuffer"]


class RowBuffer:
    """The rows of one file while it is made: each field is one array, filled from the front."""

    def __init__(self, schema: BatchSpec, rows: int) -> None:
        self._schema, self._rows = schema, 0
        self._fixed = {f.name: np.empty((rows, *f.shape), numpy_dtype(f.dtype)) for f in schema if not f.ragged}
        self._ragged: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {
            f.name: ([], []) for f in schema if f.ragged
        }

    def add(self, batch: Mapping[str, Any]) -> int:
        """Take a batch over; how many rows it has. DataError if it does not fit the schema."""
        if not isinstance(batch, Mapping):
            raise DataError(
                f"a batch is {type(batch).__name__}, expected a dict with an array or tensor for every field"
            )
        arrays = {
            name: np.asarray(v) if isinstance(v, (np.ndarray, list)) else tensor_array(v) for name, v in batch.items()
        }
        rows = self._schema.check(arrays)
        for name, array in self._fixed.items():
            array[self._rows : self._rows + rows] = arrays[name]
        for name, (values, lengths) in self._ragged.items():
            values.append(arrays[name].copy())
            lengths.append(np.diff(arrays[name + OFFSETS]))
        self._rows += rows
        return rows

    def __len__(self) -> int:
        return self._rows

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything added so far."""
        whole = {name: array[: self._rows] for name, array in self._fixed.items()}
        for field in self._schema:
            if field.ragged:
                values, lengths = self._ragged[field.name]
                offsets = np.zeros(self._rows + 1, np.int64)
                if lengths:
                    np.cumsum(np.concatenate(lengths), out=offsets[1:])
                whole[field.name] = np.concatenate(values) if values else np.empty(0, numpy_dtype(field.dtype))
                whole[field.name + OFFSETS] = offsets
        return whole
