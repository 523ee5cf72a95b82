"""The loops over samples and tokens between the windows and a batch, compiled.

    take_samples    which block each sample of a batch is, and where the lanes stand after it
    fill_rows       those blocks as the batch contract has them

A batch of 8 x 2,048 tokens is due every 370 us when the encoder does 44 M tokens/s: one call each for a batch takes 60,
the same in Python a row took 400. Blocks are reached by address: the table of lanes keeps the windows alive, and a batch
keeps those that it was made from. Imported only through `headrace.loader.lanes.kernels()`, in the background.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.core import types as nb
from numba.extending import intrinsic

_I64 = nb.int64
_A32, _A64 = nb.Array(nb.int32, 1, "C"), nb.Array(nb.int64, 1, "C")
_M64, _C64 = nb.Array(nb.int64, 2, "C"), nb.Array(nb.int64, 3, "C")
_OPTIONS: Any = {"nogil": False, "cache": True, "error_model": "numpy", "boundscheck": False}

# One source in one lane, as it is saved.
EPOCH, POSITION, OFFSET, BLOCK, TOKENS, CREDIT = range(6)
STATE_FIELDS = 6

# The window that is open there.
COUNT, SERIAL, END_EPOCH, END_POSITION, END_OFFSET, TOKENS_AT, PTR_AT, LEN_AT, NEXT_AT, REAL_AT, ROWS_AT = range(11)
WINDOW_FIELDS = 11

# One sample of a batch.
(
    ROW_SOURCE,
    ROW_BLOCK,
    ROW_TOKENS,
    ROW_DOCUMENTS,
    ROW_SERIAL,
    ROW_TOKENS_AT,
    ROW_LEN_AT,
    ROW_NEXT_AT,
    ROW_PIECES,
) = range(9)
ROW_FIELDS = 9

SCALE_BITS = 24


def _as_pointer(typing_context, address):
    """An integer as an address, for `carray`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


_pointer: Any = intrinsic(_as_pointer)


@njit(_I64(_A64, _M64, _I64), **_OPTIONS)
def next_source(weights, state, width):
    """`mix.LaneMix.next_source` on a row of the table."""
    best, most = -1, -1
    best_deadline = 0.0
    most_owed = 0
    half = (width << SCALE_BITS) // 2
    whole = width << SCALE_BITS
    for i in range(len(weights)):
        weight = weights[i]
        if weight == 0:
            continue
        owed = state[i, CREDIT] + weight * width
        if owed >= half:
            deadline = (whole - owed) / weight
            if best < 0 or deadline < best_deadline:
                best, best_deadline = i, deadline
        if most < 0 or owed > most_owed:
            most, most_owed = i, owed
    return best if best >= 0 else most


@njit(_I64(_I64, _I64, _I64, _I64, _I64, _A64, _C64, _M64, _C64, _M64, _A64, _I64, _M64), **_OPTIONS)
def take_samples(first, stride, begin, count, lanes, slots, state, weights, windows, caps, change_at, width, rows):
    """Samples first + i·stride for i in [begin, count), into `rows`; how far it came before a lane needed a closer look.

    That is when a window is to be opened, a source to be dropped or weights to be changed: rare, and done in Python.
    """
    for i in range(begin, count):
        g = first + i * stride
        s = slots[g % lanes]
        if g >= change_at[s]:
            return i
        source = next_source(weights[s], state[s], width)
        if source < 0:
            rows[i, :] = 0
            rows[i, ROW_SOURCE] = -1
            continue
        entry = state[s, source]
        window = windows[s, source]
        cap = caps[s, source]
        if (cap >= 0 and 2 * (cap - entry[TOKENS]) < width) or entry[BLOCK] >= window[COUNT]:
            return i
        b = entry[BLOCK]
        real = carray(_pointer(window[REAL_AT]), (window[COUNT],), np.int64)
        documents = carray(_pointer(window[ROWS_AT]), (window[COUNT],), np.int64)
        ptr = carray(_pointer(window[PTR_AT]), (window[COUNT] + 1,), np.int64)
        tokens = real[b]
        rows[i, ROW_SOURCE] = source
        rows[i, ROW_BLOCK] = b
        rows[i, ROW_TOKENS] = tokens
        rows[i, ROW_DOCUMENTS] = documents[b]
        rows[i, ROW_SERIAL] = window[SERIAL]
        rows[i, ROW_TOKENS_AT] = window[TOKENS_AT] + 4 * b * width
        rows[i, ROW_LEN_AT] = window[LEN_AT] + 4 * ptr[b]
        rows[i, ROW_NEXT_AT] = window[NEXT_AT] + 4 * ptr[b]
        rows[i, ROW_PIECES] = ptr[b + 1] - ptr[b]
        for j in range(weights.shape[1]):
            state[s, j, CREDIT] += weights[s, j] * tokens
        entry[CREDIT] -= tokens << SCALE_BITS
        entry[TOKENS] += tokens
        entry[BLOCK] = b + 1
        if b + 1 == window[COUNT]:  # a resume from here need not make the old window again to learn where it ended
            entry[EPOCH], entry[POSITION], entry[OFFSET] = window[END_EPOCH], window[END_POSITION], window[END_OFFSET]
            entry[BLOCK] = 0
            window[COUNT] = 0
    return count


@njit(_I64(_M64), **_OPTIONS)
def count_borders(rows):
    """Room for the borders of all pieces, each row perhaps with one of padding."""
    total = 1
    for i in range(len(rows)):
        total += rows[i, ROW_PIECES] + 1
    return total


# What fill_rows counts: real tokens, documents, fillers, borders, the longest piece; then tokens per source.
SUM_TOKENS, SUM_DOCUMENTS, SUM_FILLERS, SUM_BORDERS, SUM_LONGEST, SUM_SOURCES = range(6)


@njit(nb.void(_M64, _I64, _I64, _I64, _I64, nb.boolean, _A64, _A64, _M64, _M64, _M64, _M64, _A32, _A64), **_OPTIONS)
def fill_rows(
    rows, first, stride, width, pad, unshifted, index, documents, input_ids, labels, positions, segments, borders, sums
):
    """Blocks into the rows of a batch, the borders of their pieces, and the sums. An array of no rows is left out."""
    longest = 0
    at = 0
    borders[0] = 0
    sums[:] = 0
    for i in range(len(rows)):
        index[i] = first + i * stride
        if len(documents):
            documents[i] = rows[i, ROW_DOCUMENTS]
        sums[SUM_DOCUMENTS] += rows[i, ROW_DOCUMENTS]
        sums[SUM_TOKENS] += rows[i, ROW_TOKENS]
        if rows[i, ROW_SOURCE] < 0:
            sums[SUM_FILLERS] += 1
        else:
            sums[SUM_SOURCES + rows[i, ROW_SOURCE]] += rows[i, ROW_TOKENS]
        real = rows[i, ROW_TOKENS]
        pieces = rows[i, ROW_PIECES]
        ids = input_ids[i]
        if real > 0:
            tokens = carray(_pointer(rows[i, ROW_TOKENS_AT]), (real,), np.int32)
            lengths = carray(_pointer(rows[i, ROW_LEN_AT]), (pieces,), np.int32)
            following = carray(_pointer(rows[i, ROW_NEXT_AT]), (pieces,), np.int32)
            for k in range(real):
                ids[k] = tokens[k]
            if len(labels):
                out = labels[i]
                if unshifted:
                    for k in range(real):
                        out[k] = tokens[k]
                else:
                    for k in range(real - 1):
                        out[k] = tokens[k + 1]
                column = 0
                for p in range(pieces):
                    n = lengths[p]
                    if unshifted:
                        out[column] = -100
                    else:
                        out[column + n - 1] = following[p]
                    column += n
            column = 0
            for p in range(pieces):
                n = lengths[p]
                if len(positions):
                    place = positions[i, column : column + n]  # indices from 0 compile to vector instructions
                    for k in range(n):
                        place[k] = k
                if len(segments):
                    segments[i, column : column + n] = p + 1
                longest = max(longest, n)
                column += n
                at += 1
                borders[at] = borders[at - 1] + n
        if real < width:
            for k in range(real, width):
                ids[k] = pad
            if len(labels):
                for k in range(real, width):
                    labels[i, k] = -100
            if len(positions):
                for k in range(real, width):
                    positions[i, k] = k - real
            if len(segments):
                for k in range(real, width):
                    segments[i, k] = 0
            longest = max(longest, width - real)
            at += 1
            borders[at] = borders[at - 1] + (width - real)
    sums[SUM_BORDERS] = at + 1
    sums[SUM_LONGEST] = longest
