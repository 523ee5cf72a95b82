"""The loops over samples and tokens between the windows and a batch, compiled.

    next_batch          a whole batch in one call:
        take_samples    which block each sample is, and where the lanes stand after it
        fill_rows       those blocks as the batch contract has them, and what a run counts of them

A batch of 8 x 2,048 tokens is due every 200 us when the encoder does 80 M tokens/s. Each argument of a call costs .2 us to
hand over, so what stays the same from batch to batch is passed as one array of addresses. Blocks are reached by address,
too: the table of lanes keeps the windows alive, and a batch keeps those that it was made from. Imported only through
`headrace.loader.lanes.kernels()`, in the background.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit
from numba.core import types as nb

from headrace.compiled.addresses import matrix, pointer
from headrace.compiled.xxh3 import term_of
from headrace.loader.lanes import (
    BORDERS,
    DIGEST_HIGH,
    DIGEST_LOW,
    DOCUMENTS_MADE,
    FILLERS_MADE,
    LONGEST,
    PADDING_MADE,
    SAMPLES_MADE,
    SOURCES_MADE,
    TOKENS_MADE,
)

_I64 = nb.int64
_A32, _A64, _U64 = nb.Array(nb.int32, 1, "C"), nb.Array(nb.int64, 1, "C"), nb.Array(nb.uint64, 1, "C")
_M64, _C64 = nb.Array(nb.int64, 2, "C"), nb.Array(nb.int64, 3, "C")
_OPTIONS: Any = {"nogil": False, "cache": True, "error_model": "numpy", "boundscheck": False}
_UNLOCKED: Any = _OPTIONS | {"nogil": True}
"""A trainer that takes batch after batch would otherwise keep Python's lock for all of them, while tokenizer threads wait for it: 400 us each
time, a sixth of a window."""

# One source in one lane, as it is saved.
EPOCH, POSITION, OFFSET, BLOCK, TOKENS, CREDIT = range(6)
STATE_FIELDS = 6

# The window that is open there.
COUNT, SERIAL, END_EPOCH, END_POSITION, END_OFFSET, TOKENS_AT, PTR_AT, LEN_AT, NEXT_AT, REAL_AT, ROWS_AT, HASH_AT = (
    range(12)
)
WINDOW_FIELDS = 12

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
    ROW_HASH_AT,
) = range(10)
ROW_FIELDS = 10

SCALE_BITS = 24


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
        real = carray(pointer(window[REAL_AT]), (window[COUNT],), np.int64)
        documents = carray(pointer(window[ROWS_AT]), (window[COUNT],), np.int64)
        ptr = carray(pointer(window[PTR_AT]), (window[COUNT] + 1,), np.int64)
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
        rows[i, ROW_HASH_AT] = window[HASH_AT] + 16 * b
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


@njit(nb.void(_M64, _I64, _I64, _I64, _U64, _A64), **_OPTIONS)
def count_rows(rows, first, stride, width, filler, facts):
    """All facts but the longest piece. The digest is the sum of `order.sample_term`; `filler`: the content of a sample
    without anything to learn."""
    low = high = np.uint64(0)
    facts[:] = 0
    facts[SAMPLES_MADE] = len(rows)
    facts[BORDERS] = 1
    for i in range(len(rows)):
        source, tokens = rows[i, ROW_SOURCE], rows[i, ROW_TOKENS]
        facts[TOKENS_MADE] += tokens
        facts[PADDING_MADE] += width - tokens
        facts[DOCUMENTS_MADE] += rows[i, ROW_DOCUMENTS]
        facts[BORDERS] += rows[i, ROW_PIECES] + (1 if tokens < width else 0)
        content = filler
        if source < 0:
            facts[FILLERS_MADE] += 1
        else:
            facts[SOURCES_MADE + source] += tokens
            content = carray(pointer(rows[i, ROW_HASH_AT]), (2,), np.uint64)
        a, b = term_of(content[0], content[1], np.uint64(first + i * stride))
        low += a
        high += b
        if low < a:
            high += np.uint64(1)
    facts[DIGEST_LOW], facts[DIGEST_HIGH] = np.int64(low), np.int64(high)


@njit(_I64(_M64, _I64, _I64, _I64, _I64, nb.boolean, _A64, _A64, _M64, _M64, _M64, _M64, _A32), **_OPTIONS)
def fill_rows(
    rows, first, stride, width, pad, unshifted, index, documents, input_ids, labels, positions, segments, borders
):
    """Blocks into the rows of a batch, and the borders of their pieces; the longest piece. An array of no rows is left out."""
    longest = 0
    at = 0
    borders[0] = 0
    for i in range(len(rows)):
        index[i] = first + i * stride
        if len(documents):
            documents[i] = rows[i, ROW_DOCUMENTS]
        real = rows[i, ROW_TOKENS]
        pieces = rows[i, ROW_PIECES]
        ids = input_ids[i]
        if real > 0:
            tokens = carray(pointer(rows[i, ROW_TOKENS_AT]), (real,), np.int32)
            lengths = carray(pointer(rows[i, ROW_LEN_AT]), (pieces,), np.int32)
            following = carray(pointer(rows[i, ROW_NEXT_AT]), (pieces,), np.int32)
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
    return longest


# Where the table of lanes and the buffers of a batch are.
(
    AT_SLOTS, AT_STATE, AT_WEIGHTS, AT_WINDOWS, AT_CAPS, AT_CHANGE, AT_FILLER, AT_TOTALS, LANES_ALL, LANES_OWN, SOURCES_ALL, WIDTH_OF_ROW,
) = range(12)  # fmt: skip
TABLE_WORDS = 12
AT_INDEX, AT_DOCUMENTS, AT_FIELDS, AT_BORDERS, BORDER_ROOM, PAD_WITH, UNSHIFTED = 0, 1, 2, 6, 7, 8, 9
BATCH_WORDS = 10


@njit(_I64(_A64, _A64, _I64, _I64, _I64, _I64, _M64, _A64), **_UNLOCKED)
def next_batch(table, batch, first, stride, begin, count, rows, facts):
    """Samples first + i·stride for i in [begin, count) taken from the lanes, and all `count` of them laid out and counted.

    `count` when that is done. Less: a lane needs a closer look before that sample, and the next call begins there. More: there
    are so many borders more than `count` that the buffer must grow first. A `batch` of zeros is counted and not laid out, nor added to
    the table's totals.
    """
    own, sources, width = table[LANES_OWN], table[SOURCES_ALL], table[WIDTH_OF_ROW]
    if begin < count:
        at = take_samples(
            first, stride, begin, count, table[LANES_ALL],
            carray(pointer(table[AT_SLOTS]), (table[LANES_ALL],), np.int64),
            carray(pointer(table[AT_STATE]), (own, sources, STATE_FIELDS), np.int64),
            carray(pointer(table[AT_WEIGHTS]), (own, sources), np.int64),
            carray(pointer(table[AT_WINDOWS]), (own, sources, WINDOW_FIELDS), np.int64),
            carray(pointer(table[AT_CAPS]), (own, sources), np.int64),
            carray(pointer(table[AT_CHANGE]), (own,), np.int64),
            width, rows,
        )  # fmt: skip
        if at < count:
            return at
    count_rows(rows, first, stride, width, carray(pointer(table[AT_FILLER]), (2,), np.uint64), facts)
    if batch[AT_INDEX] == 0:
        return count
    if facts[BORDERS] > batch[BORDER_ROOM]:
        return count + facts[BORDERS]
    documents = batch[AT_DOCUMENTS]
    facts[LONGEST] = fill_rows(
        rows, first, stride, width, batch[PAD_WITH], batch[UNSHIFTED] != 0,
        carray(pointer(batch[AT_INDEX]), (count,), np.int64),
        carray(pointer(documents), (count if documents else 0,), np.int64),
        matrix(batch[AT_FIELDS], count, width),
        matrix(batch[AT_FIELDS + 1], count, width),
        matrix(batch[AT_FIELDS + 2], count, width),
        matrix(batch[AT_FIELDS + 3], count, width),
        carray(pointer(batch[AT_BORDERS]), (batch[BORDER_ROOM],), np.int32),
    )  # fmt: skip
    totals = carray(pointer(table[AT_TOTALS]), (len(facts),), np.int64)
    low = np.uint64(totals[DIGEST_LOW]) + np.uint64(facts[DIGEST_LOW])
    carried = 1 if low < np.uint64(facts[DIGEST_LOW]) else 0
    for i in range(len(facts)):
        totals[i] += facts[i]
    totals[DIGEST_HIGH] += carried
    return count
