"""Values in msgpack without pickle, for pipes and files: `encode_value`, `decode_value`.

msgpack holds plain values. Two more kinds are encoded: an array of numbers keeps its type and shape, and a pydantic model (a live message) becomes its fields.
Decoding makes values and arrays only; the bytes never choose which code runs.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from headrace.errors import FileCorrupt

_ARRAY = 2
"""Code of the msgpack extension that holds an array: u32 length of the head, head (dtype, shape), raw numbers."""


def model_values(value: Any) -> Any:
    """The fields of a pydantic model (a live message, a trace); any other value as it is."""
    dump = getattr(value, "model_dump", None)
    return dump() if callable(dump) and not isinstance(value, type) else value


def _encoded(value: Any) -> Any:
    if (fields := model_values(value)) is not value:
        return fields
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        array = np.asarray(value)
        head = msgspec.msgpack.encode((array.dtype.str, array.shape))
        return msgspec.msgpack.Ext(_ARRAY, len(head).to_bytes(4, "little") + head + array.tobytes())
    raise TypeError(f"a {type(value).__name__} is no plain value and no array of numbers")


def _decoded(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise FileCorrupt(f"an encoded value holds an extension {code} that is not known")
    size = int.from_bytes(data[:4], "little")
    name, shape = msgspec.msgpack.decode(data[4 : 4 + size], type=tuple[str, tuple[int, ...]])
    dtype = np.dtype(name) if len(name) <= 4 else None
    if dtype is None or dtype.kind not in "biuf" or min(shape, default=0) < 0:
        raise FileCorrupt(f"an encoded array has type {name!r:.20} and shape {shape}")
    raw = data[4 + size :]
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise FileCorrupt(f"an encoded array of {name} and shape {list(shape)} has {len(raw):,} bytes")
    # A copy: the decoded bytes may be freed or written over.
    array = np.frombuffer(raw, dtype).reshape(shape).copy()
    return array if array.ndim else array[()]


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)


def encode_value(value: Any) -> bytes:
    """The value as bytes. ValueError for an object that is no value, a number of more than 64 bits, or a lone surrogate."""
    try:
        return _ENCODER.encode(value)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error


def decode_value(raw: bytes | memoryview, type: Any = Any) -> Any:
    """The value that `encode_value` was given, of this type. FileCorrupt if the bytes are not such a value."""
    try:
        return msgspec.msgpack.decode(raw, type=type, ext_hook=_decoded)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise FileCorrupt(f"an encoded value cannot be read: {error}") from error
