"""Safetensors: named tensors, read in place. The header is compared with the file's size before it is believed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from headrace.formats.byte_file import ByteFile, Undecodable, first_line
from headrace.formats.rows import Column, Ragged, chosen, common_rows

__all__ = ["SafetensorsRows"]

_MAX_HEADER = 8 << 20
_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
"""BF16 appears as uint16, because numpy has no bfloat16."""


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
            read = {n: _placed(e, 8 + length, size) for n, e in entries.items() if e["dtype"] in _DTYPES and e["shape"]}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise Undecodable(file.path, f"has a damaged header: {first_line(error)}") from error
        names = chosen(file.path, list(read), columns)
        self._places = {name: read[name][1] for name in names}
        self.schema = {name: read[name][0] for name in names}

    @property
    def rows(self) -> int:
        return common_rows(self._file.path, self.schema)

    def read(self, start: int, stop: int, columns: Sequence[str]) -> dict[str, np.ndarray | Ragged]:
        return {name: self._read(name, start, stop) for name in columns}

    def _read(self, name: str, start: int, stop: int) -> np.ndarray:
        column = self.schema[name]
        out = np.empty((stop - start, *(column.shape or ())), column.dtype)
        if out.nbytes:
            row = out.nbytes // len(out)
            self._file.read_into(out.reshape(-1).view(np.uint8).data, self._places[name] + start * row)
        return out


def _placed(entry: Mapping[str, Any], base: int, size: int) -> tuple[Column, int]:
    """A tensor's column and the place of its first byte. ValueError if it does not lie in the file."""
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(n) is int for n in (start, end, *shape)):
        raise ValueError("a shape or an offset is no whole number")
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    if min((start, *shape)) < 0 or end - start != math.prod(shape) * dtype.itemsize or base + end > size:
        raise ValueError("a tensor lies outside the file")
    if max(shape) > 1 << 40:
        raise ValueError(f"a tensor of shape {shape}")
    return Column(dtype=dtype, shape=shape[1:], rows=shape[0], stored_as=entry["dtype"]), base + start
