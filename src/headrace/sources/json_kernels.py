"""The compiled loop that finds the text in lines of JSON.

    {"id": 7, "text": "caf\\u00e9", "tags": ["a", {"b": null}]}        one field's string, unescaped, as UTF-8, behind the one before it

Every line is checked from { to }, as strictly as msgspec does it: strings, escapes, numbers and brackets of the fields that nobody asked for,
too. It never guesses: at the first line that is not plainly right, or has a form that it does not know (an escape in a key, the
field twice, more than 60 brackets deep, half a surrogate pair, blanks around the line), it stops, and whoever called it takes the
slow way, which refuses in words or knows the form. Whether the text is UTF-8 shows when it is made a string.

Eight bytes are looked at in one go: .6 ns a byte of one core (msgspec 1.2), and without the interpreter's lock, which msgspec holds. Nothing is read past
the end. Imported through `headrace.sources.lines.json_kernels()` only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.core import types as nb

from headrace.compiled.addresses import byte_at, first_bit, put_byte, put_word, word_at

_OPTIONS: Any = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}
_ONES, _HIGHS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_QUOTES, _ESCAPES, _BLANKS = _ONES * np.uint64(34), _ONES * np.uint64(92), _ONES * np.uint64(32)
_NEWLINE, _RETURN, _TAB, _BLANK, _QUOTE, _COMMA, _COLON, _ESCAPE = 10, 13, 9, 32, 34, 44, 58, 92
_OPEN, _CLOSE, _OPEN_LIST, _CLOSE_LIST = 123, 125, 91, 93
_TRUE, _FALSE, _NULL = (int.from_bytes(word, "little") for word in (b"true", b"false", b"null"))
_DEEPEST = 60
_NO = -1
"""Instead of an address: here is something else."""


@njit(inline="always", **_OPTIONS)
def _marks(word):
    """A bit in the lowest of 8 bytes that is ", \\ or below a blank, and perhaps in others above it."""
    quote, escape = word ^ _QUOTES, word ^ _ESCAPES
    return (((quote - _ONES) & ~quote) | ((escape - _ONES) & ~escape) | ((word - _BLANKS) & ~word)) & _HIGHS


@njit(**_OPTIONS)
def _hex(at):
    """The number that four hexadecimal digits write."""
    value = 0
    for i in range(4):
        c = byte_at(at + i)
        if 48 <= c <= 57:
            digit = c - 48
        elif 97 <= c <= 102:
            digit = c - 87
        elif 65 <= c <= 70:
            digit = c - 55
        else:
            return _NO
        value = value * 16 + digit
    return value


@njit(**_OPTIONS)
def _character(at, end):
    """(the character that an escape stands for, where it ends), or _NO twice; `at` is after its \\."""
    if at >= end:
        return _NO, _NO
    c = byte_at(at)
    at += 1
    if c == 110:
        return 10, at
    if c in (_QUOTE, _ESCAPE, 47):
        return c, at
    if c == 116:
        return 9, at
    if c == 114:
        return 13, at
    if c == 98:
        return 8, at
    if c == 102:
        return 12, at
    if c != 117 or at + 4 > end:
        return _NO, _NO
    value = _hex(at)
    at += 4
    if value < 0xD800 or value > 0xDFFF:
        return (value, at) if value >= 0 else (_NO, _NO)
    if value > 0xDBFF or at + 6 > end or byte_at(at) != _ESCAPE or byte_at(at + 1) != 117:
        return _NO, _NO
    low = _hex(at + 2)
    if low < 0xDC00 or low > 0xDFFF:
        return _NO, _NO
    return 0x10000 + ((value - 0xD800) << 10) + (low - 0xDC00), at + 6


@njit(**_OPTIONS)
def _unescaped(at, end, into):
    """Write the string that begins at `at`, after its quote; (where it ends, after its quote; where what was written ends)."""
    while True:
        while at + 8 <= end:
            word = word_at(at)
            put_word(into, word)
            marks = _marks(word)
            if marks:
                clean = first_bit(marks) >> 3
                at += clean
                into += clean
                break
            at += 8
            into += 8
        if at >= end:
            return _NO, into
        c = byte_at(at)
        if c == _QUOTE:
            return at + 1, into
        if c < _BLANK:
            return _NO, into
        if c != _ESCAPE:  # among the last 7 bytes
            put_byte(into, c)
            at += 1
            into += 1
            continue
        c, at = _character(at + 1, end)
        if c < 0:
            return _NO, into
        if c < 0x80:
            put_byte(into, c)
            into += 1
        elif c < 0x800:
            put_byte(into, 0xC0 | c >> 6)
            put_byte(into + 1, 0x80 | c & 63)
            into += 2
        elif c < 0x10000:
            put_byte(into, 0xE0 | c >> 12)
            put_byte(into + 1, 0x80 | c >> 6 & 63)
            put_byte(into + 2, 0x80 | c & 63)
            into += 3
        else:
            put_byte(into, 0xF0 | c >> 18)
            put_byte(into + 1, 0x80 | c >> 12 & 63)
            put_byte(into + 2, 0x80 | c >> 6 & 63)
            put_byte(into + 3, 0x80 | c & 63)
            into += 4


@njit(**_OPTIONS)
def _past_string(at, end):
    """The same without writing it."""
    while True:
        while at + 8 <= end:
            marks = _marks(word_at(at))
            if marks:
                at += first_bit(marks) >> 3
                break
            at += 8
        if at >= end:
            return _NO
        c = byte_at(at)
        at += 1
        if c == _QUOTE:
            return at
        if c < _BLANK:
            return _NO
        if c == _ESCAPE:
            c, at = _character(at, end)
            if c < 0:
                return _NO


@njit(**_OPTIONS)
def _past_blanks(at, end):
    while at < end and (byte_at(at) == _BLANK or byte_at(at) == _TAB):
        at += 1
    return at


@njit(**_OPTIONS)
def _past_digits(at, end):
    """One or more."""
    start = at
    while at < end and 48 <= byte_at(at) <= 57:
        at += 1
    return at if at > start else _NO


@njit(**_OPTIONS)
def _past_number(at, end):
    if byte_at(at) == 45:
        at += 1
    if at < end and byte_at(at) == 48:
        at += 1
    else:
        at = _past_digits(at, end)
    if 0 <= at < end and byte_at(at) == 46:
        at = _past_digits(at + 1, end)
    if 0 <= at < end and (byte_at(at) == 101 or byte_at(at) == 69):
        at += 1
        if at < end and (byte_at(at) == 43 or byte_at(at) == 45):
            at += 1
        at = _past_digits(at, end)
    return at


@njit(**_OPTIONS)
def _past_word(at, end, word, size):
    for i in range(size):
        if at + i >= end or byte_at(at + i) != word >> 8 * i & 255:
            return _NO
    return at + size


@njit(**_OPTIONS)
def _past_colon(at, end):
    """To the value of a key that ends at `at`."""
    at = _past_blanks(at, end)
    return _past_blanks(at + 1, end) if at < end and byte_at(at) == _COLON else _NO


@njit(**_OPTIONS)
def _past_key(at, end):
    """To the value of the key that begins at `at`."""
    if at >= end or byte_at(at) != _QUOTE:
        return _NO
    at = _past_string(at + 1, end)
    return at if at < 0 else _past_colon(at, end)


@njit(**_OPTIONS)
def _past_value(at, end):
    """To the end of any value; nested ones without recursion."""
    kinds, depth = 0, 0  # the lowest bit of `kinds`: the innermost that is open is an object
    while True:
        if at < 0 or at >= end:
            return _NO
        c = byte_at(at)
        if c in (_OPEN, _OPEN_LIST):
            at = _past_blanks(at + 1, end)
            if at >= end:
                return _NO
            if byte_at(at) == c + 2:
                at += 1
            elif depth == _DEEPEST:
                return _NO
            else:
                depth += 1
                kinds = kinds << 1 | (1 if c == _OPEN else 0)
                if c == _OPEN:
                    at = _past_key(at, end)
                continue
        elif c == _QUOTE:
            at = _past_string(at + 1, end)
        elif c == 116:
            at = _past_word(at, end, _TRUE, 4)
        elif c == 102:
            at = _past_word(at, end, _FALSE, 5)
        elif c == 110:
            at = _past_word(at, end, _NULL, 4)
        else:
            at = _past_number(at, end)
        while True:
            if at < 0 or depth == 0:
                return at
            at = _past_blanks(at, end)
            if at >= end:
                return _NO
            c = byte_at(at)
            at += 1
            if c == _COMMA:
                at = _past_blanks(at, end)
                if kinds & 1:
                    at = _past_key(at, end)
                break
            if c != (_CLOSE if kinds & 1 else _CLOSE_LIST):
                return _NO
            depth -= 1
            kinds >>= 1


@njit(nb.int64(nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.Array(nb.int64, 1, "C")), **_OPTIONS)
def json_texts(data, size, key, key_size, into, offsets):
    """Write the strings under `key` of len(offsets) - 1 lines and say where each ends; whether that is what the data is.

    Addresses: `data` of `size` bytes, `key` as it stands between its quotes, `into` with room for size + 8 bytes.
    """
    at, end, written = data, data + size, into
    offsets[0] = 0
    for row in range(len(offsets) - 1):
        if at >= end or byte_at(at) != _OPEN:
            return 0
        at = _past_blanks(at + 1, end)
        found = False
        while True:
            if at >= end or byte_at(at) != _QUOTE:
                return 0
            at += 1
            start = at
            while at < end and byte_at(at) != _QUOTE:
                if byte_at(at) == _ESCAPE or byte_at(at) < _BLANK:
                    return 0
                at += 1
            same = at - start == key_size
            for i in range(key_size if same else 0):
                same = same and byte_at(start + i) == byte_at(key + i)
            at = _past_colon(at + 1, end)
            if not same:
                at = _past_value(at, end)
            elif found or at < 0 or at >= end or byte_at(at) != _QUOTE:
                return 0
            else:
                found = True
                at, written = _unescaped(at + 1, end, written)
            if at < 0:
                return 0
            at = _past_blanks(at, end)
            if at >= end:
                return 0
            c = byte_at(at)
            at += 1
            if c == _CLOSE:
                break
            if c != _COMMA:
                return 0
            at = _past_blanks(at, end)
        if not found:
            return 0
        offsets[row + 1] = written - into
        if at + 1 < end and byte_at(at) == _RETURN:
            at += 1
        if at < end:
            if byte_at(at) != _NEWLINE:
                return 0
            at += 1
    return 1 if at == end else 0
