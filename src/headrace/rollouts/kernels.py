"""The compiled loops that read numbers where they came: out of Python lists, msgpack and JSON text, into columns.

list_ids, list_bits, list_floats       a list's items, with the interpreter's lock: nobody changes the list meanwhile
msgpack_columns, json_columns          the token lists of a rollout from its bytes, and where they lay; without the lock

Every loop stops at the first thing that is not what it reads and says so; it never guesses. Whoever calls it takes the slow way then, which
refuses in words or knows a form that the loop does not. Nothing is read past the end that the caller gave.

Imported through `headrace.rollouts.columns.kernels()` only: compiling takes seconds the first time and milliseconds from
numba's cache after that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit
from numba.core import types as nb

from headrace.compiled.addresses import byte_at, pointer, word_at

PROMPT_IDS, COMPLETION_IDS, PROMPT_MASK, COMPLETION_MASK, LOGPROBS, EXPERTS = range(6)
"""Whose numbers lie somewhere."""
TURN, COLUMN, START, STOP, COUNT, OFFSET, ITEMS = range(7)

_LEAST = 32
"""Shorter lists are left to the decoder."""
_FULL = 5
"""After the numbers used of each array: whether something was left out because an array was full."""

_A64 = nb.Array(nb.int64, 1, "C")
_I64, _U8, _F32 = nb.int64, nb.Array(nb.uint8, 1, "C"), nb.Array(nb.float32, 1, "C")
_I32 = nb.Array(nb.int32, 1, "C")
_RAW = nb.Array(nb.uint8, 1, "C", readonly=True)
_ARRAYS = (_I32, _U8, _I32, _U8, _F32)
_TABLE = nb.Array(nb.int64, 2, "C")
_LOCKED: Any = {"nogil": False, "cache": True, "error_model": "numpy", "boundscheck": False}
_OPTIONS: Any = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}


def _name(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


_TRAJECTORY, _TOKENS, _ROUTED, _DATA = _name("trajectory"), _name("tokens"), _name("routed_experts"), _name("data")
_P_IDS, _C_IDS = _name("prompt_ids"), _name("completion_ids")
_P_MASK, _C_MASK, _C_LOGPROBS = _name("prompt_mask"), _name("completion_mask"), _name("completion_logprobs")

# --------------------------------------------------------------------------------------------------- lists
# CPython's objects, in words of 8 bytes: 1 is the type. A list has its length in 2 and its items' address in 3. A whole number has its sign and
# number of digits in 2 and its lowest digit (30 bits of a uint32) from 3 on; a float has its value in 2. `columns.py` tries all of this on
# known objects before it relies on it.


@njit(_I64(_I64, _I32, _I64, _I64, _I64), **_LOCKED)
def list_ids(where, out, kind, zero, one_digit):
    """The whole numbers of the list at `where`, which has as many items as `out` has room; how many were read before the first that is none, or has more than 30 bits."""
    count, head = len(out), carray(pointer(where), (4,), np.int64)
    if head[2] != count:  # somebody changed it since it was measured: nobody can now
        return -1
    places = carray(pointer(head[3]), (count,), np.int64)
    for i in range(count):
        words = carray(pointer(places[i]), (3,), np.int64)
        if words[1] != kind:
            return i
        if words[2] == one_digit:
            out[i] = carray(pointer(places[i]), (7,), np.uint32)[6]
        elif words[2] == zero:
            out[i] = 0
        else:
            return i
    return count


@njit(_I64(_I64, _U8, _I64, _I64, _I64, _I64), **_LOCKED)
def list_bits(where, out, zero, false, one, true):
    """0, False, 1 and True, of which there is one object each; how many were read, or -1 if there was another. Without a branch an entry takes a fifth of the time."""
    count, head = len(out), carray(pointer(where), (4,), np.int64)
    if head[2] != count:  # somebody changed it since it was measured: nobody can now
        return -1
    places = carray(pointer(head[3]), (count,), np.int64)
    other = False
    for i in range(count):
        place = places[i]
        bit = (place == one) | (place == true)
        other |= not (bit | (place == zero) | (place == false))
        out[i] = bit
    return np.int64(-1) if other else np.int64(count)


@njit(_I64(_I64, _F32, _I64), **_LOCKED)
def list_floats(where, out, kind):
    """The floats of a list; how many were read before something that is none."""
    count, head = len(out), carray(pointer(where), (4,), np.int64)
    if head[2] != count:  # somebody changed it since it was measured: nobody can now
        return -1
    places = carray(pointer(head[3]), (count,), np.int64)
    for i in range(count):
        if carray(pointer(places[i]), (2,), np.int64)[1] != kind:
            return i
        out[i] = carray(pointer(places[i]), (3,), np.float64)[2]
    return count


# ------------------------------------------------------------------------------------------------- msgpack

# Bytes of a value without length or items of its own, by its first byte; 0 for all others. A table, because ids of 3 and of 5 bytes come in no
# order: a branch on it was wrong every other time and took 17 ns an id.
_SIZE = np.zeros(256, np.int64)
_SIZE[:0x80] = _SIZE[0xE0:] = _SIZE[[0xC0, 0xC2, 0xC3]] = 1
_SIZE[0xCA:0xD4] = [5, 9, 2, 3, 5, 9, 2, 3, 5, 9]
# How far the four bytes after a first byte are shifted to be its number; ids have no other first bytes than these.
_SHIFT = np.zeros(256, np.int64)
_SHIFT[0xCC:0xCF] = [24, 16, 0]
_IS_ID = np.zeros(256, np.bool_)
_IS_ID[:0x80] = _IS_ID[0xCC:0xCF] = True


@njit(nb.boolean(_RAW, _I64, _I64, _RAW), **_OPTIONS)
def _is(raw, at, size, name):
    if size != len(name):
        return False
    same = True
    for i in range(size):
        same &= raw[at + i] == name[i]
    return same


@njit(_I64(_RAW, _I64, _I64), **_OPTIONS)
def _column_of(raw, at, size):
    if _is(raw, at, size, _P_IDS):
        return PROMPT_IDS
    if _is(raw, at, size, _C_IDS):
        return COMPLETION_IDS
    if _is(raw, at, size, _P_MASK):
        return PROMPT_MASK
    if _is(raw, at, size, _C_MASK):
        return COMPLETION_MASK
    if _is(raw, at, size, _C_LOGPROBS):
        return LOGPROBS
    return EXPERTS if _is(raw, at, size, _ROUTED) else -1


@njit(nb.Tuple((_I64, _I64, _I64, _I64))(_RAW, _I64), **_OPTIONS)
def _head(raw, at):
    """What begins at `at`: (what it is, bytes before its contents, bytes of contents, items that follow).
    What it is: 0 a scalar, 1 a list, 2 a map (whose items are keys and values by turns), 3 a text, 4 bytes, -1 cut off or nothing."""
    left = len(raw) - at
    if left < 1:
        return -1, 0, 0, 0
    b = np.int64(raw[at])
    kind, width, contents, items = 0, 0, _SIZE[b] - 1, 0
    if b < 0x80 or b >= 0xE0 or contents >= 0:
        contents = max(contents, 0)
    elif b < 0x90:
        kind, items, contents = 2, 2 * (b & 0x0F), 0
    elif b < 0xA0:
        kind, items, contents = 1, b & 0x0F, 0
    elif b < 0xC0:
        kind, contents = 3, b & 0x1F
    elif b == 0xC1:
        return -1, 0, 0, 0
    elif b >= 0xDC:
        kind, width, contents = 1 + (b >= 0xDE), 2 << (b & 1), 0
    elif b >= 0xD9:
        kind, width = 3, 1 << (b - 0xD9)
    elif b >= 0xD4:
        contents = 1 + (1 << (b - 0xD4))
    elif b >= 0xC7:
        width = 1 << (b - 0xC7)
    else:
        kind, width = 4, 1 << (b - 0xC4)
    if width:
        if left < 1 + width:
            return -1, 0, 0, 0
        told = np.int64(0)
        for i in range(width):
            told = (told << 8) | np.int64(raw[at + 1 + i])
        if kind == 1 or kind == 2:
            items = kind * told
        else:
            contents = told + (0xC7 <= b <= 0xC9)
    if 1 + width + contents > left:
        return -1, 0, 0, 0
    return kind, 1 + width, contents, items


@njit(_I64(_RAW, _I64), **_OPTIONS)
def _skip_msgpack(raw, at):
    """Where the value after the one at `at` begins; -1 if it is cut off."""
    pending = np.int64(1)
    end = len(raw)
    while pending > 0 and 0 <= at < end:
        size = _SIZE[raw[at]]
        if size:
            at += size
            pending -= 1
            continue
        kind, lead, contents, items = _head(raw, at)
        if kind < 0:
            return -1
        at += lead + contents
        pending += items - 1
    return at if not pending and at <= end else np.int64(-1)


@njit(_I64(_RAW, _I64, _I64, _I64, _I64, _I32, _U8, _F32), **_OPTIONS)
def _read_msgpack(raw, at, count, column, offset, ids, bits, floats):
    """`count` numbers from `at` on, into the array of their kind from `offset` on; what follows them, or -1 if one does not belong there."""
    end = len(raw)
    if column == LOGPROBS:
        if count > (end - at) // 9 or offset + count > len(floats):
            return -1
        told = np.empty(1, np.uint64)
        number = told.view(np.float64)
        for i in range(count):
            if raw[at] != 0xCB:
                return -1
            value = np.uint64(0)
            for k in range(8):
                value = (value << np.uint64(8)) | np.uint64(raw[at + 1 + k])
            told[0] = value
            floats[offset + i] = number[0]
            at += 9
        return at
    if column in (PROMPT_MASK, COMPLETION_MASK):
        if count > end - at or offset + count > len(bits):
            return -1
        other = False
        for i in range(count):
            b = raw[at + i]
            other |= (b > 1) & (b != 0xC2) & (b != 0xC3)
            bits[offset + i] = b & 1
        return np.int64(-1) if other else at + count
    if count > end - at or offset + count > len(ids):
        return -1
    other = False
    for i in range(count):
        if at + 5 > end:  # the last bytes of all: there may be less than four after the first
            if at >= end or at + _SIZE[raw[at]] > end:
                return -1
            value = np.uint32(0)
            for k in range(_SIZE[raw[at]] - 1):
                value = (value << np.uint32(8)) | np.uint32(raw[at + 1 + k])
        else:
            value = (
                (np.uint32(raw[at + 1]) << np.uint32(24))
                | (np.uint32(raw[at + 2]) << np.uint32(16))
                | (np.uint32(raw[at + 3]) << np.uint32(8))
                | np.uint32(raw[at + 4])
            ) >> np.uint32(_SHIFT[raw[at]])
        b = raw[at]
        value = np.uint32(b) if b < 0x80 else value
        other |= (not _IS_ID[b]) | (value >= 0x80000000)
        ids[offset + i] = np.int32(value)
        at += _SIZE[b]
        if other:
            return -1
    return at


@njit(nb.boolean(_RAW, _I64, _I64, _I64), **_OPTIONS)
def _same_bytes(raw, a, b, size):
    base = raw.ctypes.data
    a, b = base + a, base + b
    words = size >> 3
    for block in range(0, words, 128):
        other = np.uint64(0)
        for i in range(block, min(block + 128, words)):
            other |= word_at(a + 8 * i) ^ word_at(b + 8 * i)
        if other:
            return False
    other = np.uint64(0)
    for i in range(8 * words, size):
        other |= np.uint64(byte_at(a + i) ^ byte_at(b + i))
    return other == 0


@njit(_I64(_TABLE, _I64, _I64), **_OPTIONS)
def _context_before(table, row, column):
    """The last row before `row` of the same column, if that is one of contexts; -1 if there is none."""
    if column != PROMPT_IDS and column != PROMPT_MASK:
        return -1
    before = row - 1
    while before >= 0 and table[before, COLUMN] != column:
        before -= 1
    return before


@njit(nb.Tuple((_I64, _I64))(_RAW, _I64, _I64, _TABLE, _I64, _I64), **_OPTIONS)
def _told_before(raw, at, column, table, rows, trail):
    """(bytes, numbers) of the context before, if what begins at `at` begins with the very bytes of that: they stand for the same numbers, which lie at the
    end of their array. `trail` bytes end a list. A context is mostly the one before it and a turn more, and comparing bytes takes a tenth of reading them."""
    before = _context_before(table, rows, column)
    if before < 0:
        return 0, 0
    first = table[before, ITEMS]
    size = table[before, STOP] - trail - first
    if size > len(raw) - at or not _same_bytes(raw, first, at, size):
        return 0, 0
    return size, table[before, COUNT]


@njit(nb.void(_TABLE, _I64, _A64, _I64, _I64, _I64, _I64, _I64, _I64, _I64, _I32, _U8), **_OPTIONS)
def _note(table, row, used, turn, column, start, items, stop, count, known, ids, bits):
    """What was just read at the end of its array into row `row`; its first `known` numbers lay there already. A context that begins with the numbers of the
    one before it, told in other bytes, is kept once as well: the rest of it moves up."""
    offset = used[column] - known
    table[row, ITEMS] = items
    table[row, TURN], table[row, COLUMN], table[row, START], table[row, STOP] = turn, column, start, stop
    table[row, COUNT], table[row, OFFSET] = count, offset
    used[column] = offset + count
    before = np.int64(-1) if known else _context_before(table, row, column)
    if before < 0 or table[before, COUNT] > count:
        return
    first, length = table[before, OFFSET], table[before, COUNT]
    if column == PROMPT_IDS:
        for i in range(length):
            if ids[first + i] != ids[offset + i]:
                return
        for i in range(length, count):
            ids[first + i] = ids[offset + i]
    else:
        for i in range(length):
            if bits[first + i] != bits[offset + i]:
                return
        for i in range(length, count):
            bits[first + i] = bits[offset + i]
    table[row, OFFSET] = first
    used[column] = first + count


@njit(nb.Tuple((_I64, _I64))(_RAW, _I64, _I64, _TABLE, _I64, _A64, *_ARRAYS), **_OPTIONS)
def _msgpack_tokens(raw, at, turn, table, rows, used, context, context_bits, said, said_bits, floats):
    """The lists of the map at `at` into arrays and table: (what follows the map, rows filled); -1 if it is cut off."""
    _, lead, _, items = _head(raw, at)
    at += lead
    for _ in range(items // 2):
        kind, lead, size, _ = _head(raw, at)
        column = _column_of(raw, at + lead, size) if kind == 3 else np.int64(-1)
        start = _skip_msgpack(raw, at)
        if start < 0:
            return -1, rows
        kind, lead, _, count = _head(raw, start)
        at = np.int64(-1)
        if 0 <= column <= LOGPROBS and kind == 1 and count >= _LEAST and rows < len(table):
            ids = context if column == PROMPT_IDS else said
            bits = context_bits if column == PROMPT_MASK else said_bits
            room = len(ids) if column <= COMPLETION_IDS else len(bits) if column <= COMPLETION_MASK else len(floats)
            inside = start + lead
            same, known = _told_before(raw, inside, column, table, rows, 0)
            if known > count:
                same = known = np.int64(0)
            if used[column] + count - known <= room:
                at = _read_msgpack(raw, inside + same, count - known, column, used[column], ids, bits, floats)
            else:
                used[_FULL] = 1
            if at >= 0:
                _note(table, rows, used, turn, column, start, inside, at, count, known, ids, bits)
                rows += 1
        if at < 0:
            at = _skip_msgpack(raw, start)
            if at < 0:
                return -1, rows
        if column == EXPERTS and kind == 2:
            inside = start + lead
            for _ in range(count // 2):
                kind, lead, size, _ = _head(raw, inside)
                is_data = kind == 3 and _is(raw, inside + lead, size, _DATA)
                start = _skip_msgpack(raw, inside)
                inside = _skip_msgpack(raw, start)
                kind, lead, size, _ = _head(raw, start)
                if is_data and kind == 4 and size >= _LEAST and rows < len(table):
                    table[rows, TURN], table[rows, COLUMN], table[rows, START], table[rows, STOP] = (
                        turn,
                        column,
                        start,
                        inside,
                    )
                    table[rows, COUNT], table[rows, OFFSET] = size, start + lead
                    rows += 1
                    break
    return at, rows


@njit(_I64(_RAW, _TABLE, _A64, *_ARRAYS), **_OPTIONS)
def msgpack_columns(raw, table, used, context, context_bits, said, said_bits, floats):
    """Read the token lists of a rollout into arrays of their kind, of which `used` numbers are taken; how many rows of the table say what lay where,
    experts' bytes included. None where the rollout is cut off or has another form; what the table or an array has no room for is left out."""
    kind, at, _, items = _head(raw, 0)
    rows = np.int64(0)
    if kind != 2:
        return 0
    for _ in range(items // 2):
        kind, lead, size, _ = _head(raw, at)
        wanted = not rows and kind == 3 and _is(raw, at + lead, size, _TRAJECTORY)
        at = _skip_msgpack(raw, at)
        if at < 0:
            return 0
        kind, lead, _, turns = _head(raw, at)
        if not wanted or kind != 1:
            at = _skip_msgpack(raw, at)
            if at < 0:
                return 0
            continue
        at += lead
        for turn in range(turns):
            kind, lead, size, fields = _head(raw, at)
            if kind != 2:
                fields = np.int64(0)
                at = _skip_msgpack(raw, at)
                if at < 0:
                    return 0
            else:
                at += lead
            for _ in range(fields // 2):
                kind, lead, size, _ = _head(raw, at)
                wanted = kind == 3 and _is(raw, at + lead, size, _TOKENS)
                at = _skip_msgpack(raw, at)
                if at < 0:
                    return 0
                if wanted and _head(raw, at)[0] == 2:
                    at, rows = _msgpack_tokens(
                        raw, at, turn, table, rows, used, context, context_bits, said, said_bits, floats
                    )
                else:
                    at = _skip_msgpack(raw, at)
                if at < 0:
                    return 0
    return rows


# ---------------------------------------------------------------------------------------------------- json

_QUOTE, _BACKSLASH, _COMMA, _COLON, _ZERO, _NINE = 0x22, 0x5C, 0x2C, 0x3A, 0x30, 0x39
_OPEN_LIST, _CLOSE_LIST, _OPEN_MAP, _CLOSE_MAP = 0x5B, 0x5D, 0x7B, 0x7D


@njit(_I64(_RAW, _I64), **_OPTIONS)
def _blank(raw, at):
    """The first byte from `at` on that is no white space."""
    while at < len(raw) and (raw[at] == 0x20 or raw[at] == 0x0A or raw[at] == 0x0D or raw[at] == 0x09):
        at += 1
    return at


@njit(_I64(_RAW, _I64), **_OPTIONS)
def _skip_json(raw, at):
    """What follows the value at `at`; -1 if it does not end. Whether the value is JSON is for the decoder of the rest to say."""
    depth = 0
    while at < len(raw):
        b = raw[at]
        if b == _QUOTE:
            at += 1
            while at < len(raw) and raw[at] != _QUOTE:
                at += 2 if raw[at] == _BACKSLASH else 1
            if not depth:
                return at + 1 if at < len(raw) else np.int64(-1)
        elif b in (_OPEN_LIST, _OPEN_MAP):
            depth += 1
        elif b in (_CLOSE_LIST, _CLOSE_MAP):
            depth -= 1
            if depth <= 0:
                return at + 1 + depth  # one too many is the end of what the value stands in
        elif b == _COMMA and not depth:
            return at
        at += 1
    return -1


@njit(nb.Tuple((_I64, _I64, _I64))(_RAW, _I64), **_OPTIONS)
def _key(raw, at):
    """The key at `at`: (its first character, how many, its value); -1 if there is none."""
    at = _blank(raw, at)
    if at >= len(raw) or raw[at] != _QUOTE:
        return -1, 0, 0
    key = at + 1
    at = _skip_json(raw, at)
    if at < 0:
        return -1, 0, 0
    length = at - 1 - key
    at = _blank(raw, at)
    if at >= len(raw) or raw[at] != _COLON:
        return -1, 0, 0
    value = _blank(raw, at + 1)
    return (key, length, value) if value < len(raw) else (-1, 0, 0)


@njit(nb.Tuple((_I64, _I64))(_RAW, _I64, _I64, _I64, _I32, _U8), **_OPTIONS)
def _read_json(raw, at, column, offset, ids, bits):
    """The list at `at` into the array of its column from `offset` on: (what follows it, how many); -1 if something does not belong there, and -1 numbers if the array is full."""
    end, count = len(raw), np.int64(0)
    is_mask = column >= PROMPT_MASK
    room = (len(bits) if is_mask else len(ids)) - offset
    while at < end and count < room:
        at = _blank(raw, at + 1)
        first, value = at, np.int64(0)
        while at < end and _ZERO <= raw[at] <= _NINE and at - first < 11:
            value = 10 * value + (raw[at] - _ZERO)
            at += 1
        if at == first and is_mask and at + 5 < end:
            if raw[at] == 0x74 and raw[at + 1] == 0x72 and raw[at + 2] == 0x75 and raw[at + 3] == 0x65:
                value, at = np.int64(1), at + 4
            elif (
                raw[at] == 0x66
                and raw[at + 1] == 0x61
                and raw[at + 2] == 0x6C
                and raw[at + 3] == 0x73
                and raw[at + 4] == 0x65
            ):
                at += 5
        if at == first or (raw[first] == _ZERO and at - first > 1) or value >= (2 if is_mask else 2**31):
            return -1, 0
        if is_mask:
            bits[offset + count] = value
        else:
            ids[offset + count] = value
        count += 1
        at = _blank(raw, at)
        if at >= end or raw[at] != _COMMA:
            return (at + 1, count) if at < end and raw[at] == _CLOSE_LIST else (-1, 0)
    return -1, -1


@njit(nb.Tuple((_I64, _I64))(_RAW, _I64, _I64, _TABLE, _I64, _A64, *_ARRAYS), **_OPTIONS)
def _json_tokens(raw, at, turn, table, rows, used, context, context_bits, said, said_bits, floats):
    """The lists of the map that opens at `at` into arrays and table: (what follows the map, rows filled); -1 if it does not end."""
    while True:
        key, length, value = _key(raw, at + 1)
        if key < 0:
            return -1, rows
        column = _column_of(raw, key, length)
        at = np.int64(-1)
        if 0 <= column < LOGPROBS and raw[value] == _OPEN_LIST and rows < len(table):
            ids = context if column == PROMPT_IDS else said
            bits = context_bits if column == PROMPT_MASK else said_bits
            same, known = _told_before(raw, value + 1, column, table, rows, 1)
            more = _blank(raw, value + 1 + same)
            if known and more < len(raw) and raw[more] == _CLOSE_LIST:
                at, count = more + 1, np.int64(0)
            else:
                if not known or more >= len(raw) or raw[more] != _COMMA:  # or the last number goes on here
                    more, known = value, np.int64(0)
                at, count = _read_json(raw, more, column, used[column], ids, bits)
            if at >= 0 and known + count >= _LEAST:
                _note(table, rows, used, turn, column, value, value + 1, at, known + count, known, ids, bits)
                rows += 1
            elif count < 0:
                used[_FULL] = 1
        if at < 0:
            at = _skip_json(raw, value)
            if at < 0:
                return -1, rows
        at = _blank(raw, at)
        if at >= len(raw) or raw[at] != _COMMA:
            return at + 1, rows


@njit(_I64(_RAW, _TABLE, _A64, *_ARRAYS), **_OPTIONS)
def json_columns(raw, table, used, context, context_bits, said, said_bits, floats):
    """`msgpack_columns` for JSON text. Logprobs and experts stay where they are: decimal fractions and texts are the decoder's.
    What is no JSON gives rows or none; the decoder of the rest says what is wrong with it."""
    rows = np.int64(0)
    at = _blank(raw, 0)
    if at >= len(raw) or raw[at] != _OPEN_MAP:
        return 0
    more = True
    while more:
        key, length, value = _key(raw, at + 1)
        if key < 0:
            return 0
        if not rows and raw[value] == _OPEN_LIST and _is(raw, key, length, _TRAJECTORY):
            turn, at = np.int64(-1), value
            while more:
                turn += 1
                at = _blank(raw, at + 1)
                if at < len(raw) and raw[at] == _OPEN_MAP:
                    while more:
                        key, length, value = _key(raw, at + 1)
                        if key < 0:
                            return 0
                        if raw[value] == _OPEN_MAP and _is(raw, key, length, _TOKENS):
                            at, rows = _json_tokens(
                                raw, value, turn, table, rows, used, context, context_bits, said, said_bits, floats
                            )
                        else:
                            at = _skip_json(raw, value)
                        if at < 0:
                            return 0
                        at = _blank(raw, at)
                        more = at < len(raw) and raw[at] == _COMMA
                    at += 1
                else:
                    at = _skip_json(raw, at)
                    if at < 0:
                        return 0
                at = _blank(raw, at)
                more = at < len(raw) and raw[at] == _COMMA
            at += 1
        else:
            at = _skip_json(raw, value)
            if at < 0:
                return 0
        at = _blank(raw, at)
        more = at < len(raw) and raw[at] == _COMMA
    return rows
