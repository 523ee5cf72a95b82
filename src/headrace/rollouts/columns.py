"""How numbers of others become columns: `ids_column`, `mask_column`, `logprobs_column`, and `decoded_with_columns` for bytes.

    a list of a decoder's       its objects are read where they lie: 3 ns an id, where array.array takes 10 and np.asarray 30
    msgpack, JSON text          the token lists are read from the bytes and never become lists; without the interpreter's lock
    an array                    checked, and as it is

Compiled loops (`kernels.py`) do the reading where there is something to gain. Each stops at whatever it does not know, and then the slow
way is taken: array.array and the ordinary decoder, which take every form there is or refuse it in words. So results never depend on which
way was taken. Reading lists relies on how CPython lays objects out; it is tried on known objects first, and left where they look different.
"""

from __future__ import annotations

import array
import ctypes
import functools
import threading
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headrace.compiled import CompiledLoops
from headrace.errors import RolloutRefused

__all__ = ["decoded_with_columns", "ids_column", "kernels", "logprobs_column", "mask_column"]

kernels = CompiledLoops("headrace.rollouts.kernels")
_LOOP_ITEMS = 256
"""Shorter lists are read without the loops: a call of one and its arrays take as long."""
_LOOP_BYTES = 1 << 14
"""Shorter messages go through the decoder whole."""
_LOADED_FOR = 16
"""While the loops are not there yet, lists and messages must be so many times longer: loading them takes a second, and a pipeline does it when it opens."""
_MAX_SPANS = 1 << 16
_PLACE = -(1 << 40)
"""Stands for column i as the number _PLACE - i while the rest is decoded."""
_FIELDS = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask", "completion_logprobs", "data")
"""As the loops number them; the last are the experts' bytes."""
_DTYPES = (np.int32, np.int32, np.uint8, np.uint8, np.float32)
_ORDER = (0, 2, 1, 3, 4)
"""The loops take a context's ids and mask first."""
_ROOM = 1 << 18
_LIMIT = 1 << 30


class _Read(NamedTuple):
    """A column that a loop read from bytes for the very field it stands in."""

    column: np.ndarray


class _Scratch(NamedTuple):
    """What a loop reads into: which list lay where, how many numbers each array has got, and the arrays by column."""

    table: np.ndarray
    used: np.ndarray
    arrays: list[np.ndarray]

    @classmethod
    def of(cls, room: int) -> _Scratch:
        return cls(
            np.empty((_MAX_SPANS, 7), np.int64), np.zeros(6, np.int64), [np.empty(room, dtype) for dtype in _DTYPES]
        )


_of_thread = threading.local()


def _scratch() -> _Scratch:
    """This thread's own, used again for every rollout: fresh pages cost more than what is read into them."""
    if not hasattr(_of_thread, "scratch"):
        _of_thread.scratch = _Scratch.of(_ROOM)
    return _of_thread.scratch


class _Layout(NamedTuple):
    """What the interpreter's objects look like to the loop of each kind of column."""

    list_ids: tuple[int, int, int]
    """The type of whole numbers; the sign and size of 0, and of those above it with one digit."""
    list_bits: tuple[int, int, int, int]
    """Where 0, False, 1 and True are."""
    list_floats: tuple[int]
    """The type of floats."""


@functools.cache
def _layout() -> _Layout | None:
    """None where objects do not look like CPython's with one lock."""
    items: list[Any] = [0, 7, 2**30 - 1, -3, 2**30, 0.5]
    if _word(id(items), 2) != len(items):
        return None
    where = _word(id(items), 3)
    if [_word(where, i) for i in range(len(items))] != [id(item) for item in items] or _word(id(7), 1) != id(int):
        return None
    zero, one_digit, largest, negative, longer = (_word(id(item), 2) for item in items[:5])
    if one_digit != largest or len({zero, one_digit, negative, longer}) < 4:
        return None
    layout = _Layout((id(int), zero, one_digit), (id(0), id(False), id(1), id(True)), (id(float),))
    loops, ids, floats, other = kernels(), np.zeros(6, np.int32), np.zeros(2, np.float32), [0.5, 0]
    read = loops.list_ids(id(items), ids, *layout.list_ids)
    floating = loops.list_floats(id(other), floats, *layout.list_floats)
    return layout if (read, floating, ids.tolist(), floats[0]) == (3, 1, [0, 7, 2**30 - 1, 0, 0, 0], 0.5) else None


def _word(address: int, number: int) -> int:
    return ctypes.c_int64.from_address(address + 8 * number).value


# --------------------------------------------------------------------------------------------------- lists


def ids_column(value: Any, name: str, limit: int) -> np.ndarray:
    """Token ids as int32; they are 0 or more."""
    if (read := _read(value, name, limit, "list_ids", np.int32)) is not None:
        return read
    # "I" takes 10 ns a number, "i" 22: its setter asks the int itself instead of going through the argument parser.
    column = _column(value, "I", np.dtype(np.uint32), name, limit)
    if column.size and int(column.max()) >= 2**31:
        raise RolloutRefused("wrong_type", f"{name} holds a number that is no token id: {int(column.max())}")
    return column.view(np.int32)


def mask_column(value: Any, name: str, limit: int) -> np.ndarray:
    """0, 1, False and True as uint8."""
    if (read := _read(value, name, limit, "list_bits", np.uint8)) is not None:
        return read
    if isinstance(value, (list, tuple)):
        check_count(len(value), name, limit)
        try:
            value = np.frombuffer(bytes(value), np.uint8)
        except (TypeError, ValueError) as error:
            raise RolloutRefused("wrong_type", f"{name} holds something other than 0 and 1: {error}") from error
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "biu":
        raise RolloutRefused("wrong_type", f"{name} is a {type(value).__name__}, expected a list of 0 and 1")
    if value.size and not 0 <= int(value.min()) <= int(value.max()) <= 1:
        raise RolloutRefused("wrong_type", f"{name} holds numbers other than 0 and 1")
    return np.ascontiguousarray(value, np.uint8)


def logprobs_column(value: Any, name: str, limit: int) -> np.ndarray:
    """Numbers as float32. What has no float32 is infinite, and refused for it by whoever checks them."""
    if (read := _read(value, name, limit, "list_floats", np.float32)) is not None:
        return read
    return _column(value, "f", np.dtype(np.float32), name, limit)


def _read(value: Any, name: str, limit: int, loop: str, dtype: type) -> np.ndarray | None:
    """The column, where a loop has read it from bytes or can read it from a list; None where there is nothing to gain by one, or it met something it does not know."""
    if type(value) is _Read:
        check_count(len(value.column), name, limit)
        return value.column
    if type(value) is not list or len(value) < (_LOOP_ITEMS if kernels.ready else _LOOP_ITEMS * _LOADED_FOR):
        return None
    check_count(len(value), name, limit)
    if (layout := _layout()) is None:
        return None
    out = np.empty(len(value), dtype)
    read = getattr(kernels(), loop)(id(value), out, *getattr(layout, loop))
    return out if read == len(out) else None


def _column(value: Any, code: str, dtype: np.dtype, name: str, limit: int) -> np.ndarray:
    """A list or an array of numbers as one column."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in ("iu" if code == "I" else "iuf"):
            raise RolloutRefused("wrong_type", f"{name} is an array of {value.dtype} with shape {list(value.shape)}")
        check_count(len(value), name, limit)
        if code == "I" and value.size and not 0 <= int(value.min()) <= int(value.max()) < 2**31:
            raise RolloutRefused("wrong_type", f"{name} holds a number that is no token id")
        return np.ascontiguousarray(value, dtype)
    if not isinstance(value, (list, tuple)):
        raise RolloutRefused("wrong_type", f"{name} is a {type(value).__name__}, expected a list of numbers")
    check_count(len(value), name, limit)
    try:
        # A copy: a view of an array.array is two objects more for the garbage collector, which walked 60,000 of them a step on the loop's time.
        return np.frombuffer(array.array(code, value), dtype).copy() if value else np.empty(0, dtype)
    except (TypeError, OverflowError, ValueError) as error:
        raise RolloutRefused("wrong_type", f"{name} holds something that is no number of its kind: {error}") from error


def check_count(found: int, name: str, limit: int) -> None:
    if found > limit:
        raise RolloutRefused("oversize", f"{name} has {found:,} entries, at most {limit:,} are taken")


# --------------------------------------------------------------------------------------------------- bytes


def is_msgpack(raw: bytes | bytearray | memoryview) -> bool:
    """Whether bytes are a map in msgpack; JSON text begins with a bracket or white space, which no such map does."""
    first = raw[0] if len(raw) else 0
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def decoded_with_columns(raw: bytes | bytearray | memoryview | str) -> Any:
    """What a rollout's JSON text or msgpack stands for, its long token lists as columns and its experts as views of the bytes."""
    if len(raw) > _LIMIT:
        raise RolloutRefused("oversize", f"a rollout of {len(raw):,} bytes, at most {_LIMIT:,} are taken")
    try:
        data = raw.encode() if isinstance(raw, str) else raw
        decode = msgspec.msgpack.decode if is_msgpack(data) else msgspec.json.decode
        long = len(data) >= _LOOP_BYTES * (1 if kernels.ready else _LOADED_FOR)
        if long and (value := _columnar(data, decode)) is not None:
            return value
        return decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RolloutRefused("malformed", f"a rollout is neither JSON nor msgpack: {error}") from error


def _columnar(raw: bytes | bytearray | memoryview, decode: Any) -> Any:
    """None where the ordinary decoder has to do all of it."""
    loops, text = kernels(), decode is msgspec.json.decode
    data = np.frombuffer(raw, np.uint8)
    read = loops.json_columns if text else loops.msgpack_columns
    # A number takes at least a byte, so in arrays of as many as there are bytes there is room for all. Mostly far less is needed.
    for scratch in (_scratch(), None):
        table, used, arrays = scratch or _Scratch.of(len(data))
        used[:] = 0
        spans = table[: read(data, table, used, *(arrays[i] for i in _ORDER))].tolist()
        if not used[-1]:
            break
    # Completions stay until the step ends: not in an array with all contexts. And the scratch is used again.
    columns = [column[:n].copy() for column, n in zip(arrays, used.tolist(), strict=False)]
    if not spans:
        return None
    view, rest, upto = memoryview(raw), [], 0
    for number, (_, _, start, stop, *_) in enumerate(spans):
        place = _PLACE - number
        rest += [view[upto:start], str(place).encode() if text else msgspec.msgpack.encode(place)]
        upto = stop
    value = decode(b"".join([*rest, view[upto:]]))
    for number, (turn, field, _, _, count, offset, _) in enumerate(spans):
        try:
            holder = value["trajectory"][turn]["tokens"]
            name = _FIELDS[field]
            holder = holder["routed_experts"] if name == "data" else holder
            if holder[name] != _PLACE - number:
                return None  # a name that stands there twice: the decoder knows which counts
        except (KeyError, TypeError, IndexError):
            return None
        if name == "data":
            holder[name] = view[offset : offset + count]
        else:
            holder[name] = _Read(columns[field][offset : offset + count])
    return value
