"""Which values go through a pipe or lie in a file without pickle: `encode_value`, `decode_value`.

msgpack for plain values, and three things that it has no form of: an array of numbers keeps its type and shape, a pydantic model (a live message)
goes as its fields, and an object that is no value leaves its type's name, so that the check on the other side refuses it in the words it would have been refused in here.
Decoding makes values and arrays only; nothing that is read chooses what code runs.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from headrace.errors import FileCorrupt

_FOREIGN, _ARRAY = 1, 2


class _Foreign:
    """Stands for an object that stayed where it was."""


def model_values(value: Any) -> Any:
    """The fields of a pydantic model (a live message, a trace); anything else as it is."""
    dump = getattr(value, "model_dump", None)
    return dump() if callable(dump) and not isinstance(value, type) else value


def _encoded(value: Any) -> Any:
    if (fields := model_values(value)) is not value:
        return fields
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        array = np.asarray(value)
        head = msgspec.msgpack.encode((array.dtype.str, array.shape))
        return msgspec.msgpack.Ext(_ARRAY, len(head).to_bytes(4, "little") + head + array.tobytes())
    return msgspec.msgpack.Ext(_FOREIGN, type(value).__name__.encode(errors="replace"))


def _decoded(code: int, data: memoryview) -> Any:
    if code == _FOREIGN:
        return type(bytes(data).decode(errors="replace").replace("\0", "") or "object", (_Foreign,), {})()
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
    # A copy: what is decoded may go away or be written over.
    array = np.frombuffer(raw, dtype).reshape(shape).copy()
    return array if array.ndim else array[()]


def _encoded_strictly(value: Any) -> Any:
    found = _encoded(value)
    if isinstance(found, msgspec.msgpack.Ext) and found.code == _FOREIGN:
        raise TypeError(f"a {type(value).__name__} is no plain value and no array of numbers")
    return found


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)
_STRICT = msgspec.msgpack.Encoder(enc_hook=_encoded_strictly)
_DECODER = msgspec.msgpack.Decoder(ext_hook=_decoded)


def encode_value(value: Any, *, strict: bool = False) -> bytes:
    """The value as bytes. What msgpack cannot hold (a number of more than 64 bits, a lone surrogate) raises ValueError or one of its kind;
    with `strict`, so does an object that is no value."""
    try:
        return (_STRICT if strict else _ENCODER).encode(value)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error


def decode_value(raw: bytes | memoryview) -> Any:
    """What was encoded. FileCorrupt if it was not."""
    try:
        return _DECODER.decode(raw)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise FileCorrupt(f"an encoded value cannot be read: {error}") from error
