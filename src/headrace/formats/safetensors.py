"""Safetensors: named tensors, read in place. The claims of the header are compared with the file's size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from headrace.files import SAFETENSORS_DTYPES
from headrace.formats.byte_file import ByteFile, Undecodable, first_line
from headrace.formats.rows import Column, Ragged, chosen, common_rows, read_array

_MAX_HEADER = 8 << 20


class SafetensorsRows:
    """Tensors of at least one dimension. Those of other dtypes (F8, ...) are left out."""

    def __init__(self, file: ByteFile, columns: Sequence[str] | None = None) -> None:
        self._file = file
        size = file.size
        length = int.from_bytes(file.read(0, min(8, size)), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise Undecodable(
                file.path, f"is no .safetensors file: its header claims {length:,} bytes, the file has {size:,}"
            )
        try:
            entries = orjson.loads(file.read(8, length))
            entries.pop("__metadata__", None)
            read = {
                n: _placed(e, 8 + length, size)
                for n, e in entries.items()
                if e["dtype"] in SAFETENSORS_DTYPES and e["shape"]
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise Undecodable(file.path, f"has a damaged header: {first_line(error)}") from error
        names = chosen(file.path, list(read), columns)
        self._places = {name: read[name][1] for name in names}
        self.schema = {name: read[name][0] for name in names}

    @property
    def rows(self) -> int:
        return common_rows(self._file.path, self.schema)

    def read(self, start: int, stop: int, columns: Sequence[str]) -> dict[str, np.ndarray | Ragged]:
        found: dict[str, np.ndarray | Ragged] = {}
        for name in columns:
            column = self.schema[name]
            found[name] = read_array(self._file, self._places[name], column.dtype, column.shape or (), start, stop)
        return found


def _placed(entry: Mapping[str, Any], base: int, size: int) -> tuple[Column, int]:
    """The column of a tensor and the offset of its first byte; ValueError if the tensor is not within the file."""
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(n) is int for n in (start, end, *shape)):
        raise ValueError("a shape or an offset is no whole number")
    dtype = np.dtype(SAFETENSORS_DTYPES[entry["dtype"]])
    if min((start, *shape)) < 0 or end - start != math.prod(shape) * dtype.itemsize or base + end > size:
        raise ValueError("a tensor lies outside the file")
    if max(shape) > 1 << 40:
        raise ValueError(f"a tensor of shape {shape}")
    return Column(dtype=dtype, shape=shape[1:], rows=shape[0], stored_as=entry["dtype"]), base + start
