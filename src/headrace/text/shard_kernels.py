"""The compiled loops over token shards: checking segments, filling batches.

`fill` makes a whole batch in one call and without the interpreter's lock. It reads the mapped files through a table of
their addresses, because a batch touches as many shards as it has rows; every position is compared with the table's sizes
before it is read, so a damaged index gives a code and never a wild read.

Imported through `headrace.text.shards.shard_kernels()` only: compiling takes seconds the first time and milliseconds from
numba's cache after that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit
from numba.core import types as nb

from headrace.compiled.addresses import ask_for, matrix, pointer

SEGMENT = 4096
"""Tokens that share a checksum. 8 KiB of uint16: a block of 2,048 tokens touches one or two."""

# Columns of the table of shards: addresses of the mapped arrays, and how long they are.
TOKENS, TOKEN_COUNT, OFFSETS, DOCUMENTS, SUMS, FIRST_DOCS, CHECKED, BLOCK_PTR, BLOCKS, PIECE_AT, PIECE_LEN, PIECES = (
    range(12)
)
COLUMNS = 12

_AHEAD = 8
"""Rows between asking for a block's tokens and copying them, over the end of a batch too; as many again since its index was read."""
FINE, BAD_TOKENS, BAD_INDEX = 0, 1, 2
"""What `fill` found: nothing amiss, a segment that fails its checksum, an index that points outside."""

_I64 = nb.int64
_A64, _A32 = nb.Array(nb.int64, 1, "C"), nb.Array(nb.int32, 1, "C")
_AU64 = nb.Array(nb.uint64, 1, "C")
_R16, _R32 = nb.Array(nb.uint16, 1, "C", readonly=True), nb.Array(nb.uint32, 1, "C", readonly=True)
_R64 = nb.Array(nb.int64, 1, "C", readonly=True)
_M64 = nb.Array(nb.int64, 2, "C")
_OPTIONS: Any = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}

_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_S29, _S31, _S32, _S33 = np.uint64(29), np.uint64(31), np.uint64(32), np.uint64(33)


@njit(nb.uint64(_I64, _I64, _I64), **_OPTIONS)
def _segment_sum(address, start, count):
    """64 bits over `count` bytes from address + start. Every step is a bijection of what it takes in, so a change inside
    one eight-byte word never goes unnoticed; other changes pass with probability 2**-64."""
    words = count >> 3
    data = carray(pointer(address + start), (words,), dtype=np.uint64)
    a, b, c, d = _P1, _P2, _P3, _P1 ^ _P2
    k = 0
    while k + 4 <= words:  # four chains, so that the multiplications overlap
        a = (a ^ data[k]) * _P1
        a = (a << _S31) | (a >> _S33)
        b = (b ^ data[k + 1]) * _P1
        b = (b << _S31) | (b >> _S33)
        c = (c ^ data[k + 2]) * _P1
        c = (c << _S31) | (c >> _S33)
        d = (d ^ data[k + 3]) * _P1
        d = (d << _S31) | (d >> _S33)
        k += 4
    while k < words:
        a = (a ^ data[k]) * _P1
        a = (a << _S31) | (a >> _S33)
        k += 1
    tail = carray(pointer(address + start + words * 8), (count - words * 8,), dtype=np.uint8)
    rest = np.uint64(count)
    for i in range(count - words * 8):
        rest = (rest << np.uint64(8)) | np.uint64(tail[i])
    total = rest * _P3
    for lane in (a, b, c, d):
        total = (total ^ lane) * _P2
        total ^= total >> _S29
    total *= _P3
    return total ^ (total >> _S32)


@njit(nb.void(_I64, _I64, _I64, _AU64), **_OPTIONS)
def segment_sums(address, count, item, sums):
    """The checksum of every segment of `count` tokens of `item` bytes at an address."""
    for s in range(len(sums)):
        first = s * SEGMENT
        sums[s] = _segment_sum(address, first * item, min(SEGMENT, count - first) * item)


@njit(nb.int64(_M64, _I64, _I64, _I64, _I64), **_OPTIONS)
def _unsound(table, s, at, length, item):
    """The first segment of tokens [at, at + length) that fails its checksum, or -1. Each is looked at once."""
    count = table[s, TOKEN_COUNT]
    segments = (count + SEGMENT - 1) // SEGMENT
    sums = carray(pointer(table[s, SUMS]), (segments,), dtype=np.uint64)
    checked = carray(pointer(table[s, CHECKED]), (segments,), dtype=np.uint8)
    for g in range(at // SEGMENT, (min(at + length, count) + SEGMENT - 1) // SEGMENT):
        if checked[g] == 0:
            first = g * SEGMENT
            if _segment_sum(table[s, TOKENS], first * item, min(SEGMENT, count - first) * item) != sums[g]:
                return g
            checked[g] = 1
    return -1


@njit(nb.void(_I64, _I64, _A64), **_OPTIONS)
def _widen(address, item, row):
    """Tokens at an address as int64. Views of one row and of one run: with indices into both the loop is not vectorised
    and takes 11 us instead of 4 for 8 x 2,048 tokens."""
    count = len(row)
    if item == 2:
        narrow = carray(pointer(address), (count,), dtype=np.uint16)
        for k in range(count):
            row[k] = narrow[k]
    else:
        wide = carray(pointer(address), (count,), dtype=np.uint32)
        for k in range(count):
            row[k] = wide[k]


@njit(nb.void(_I64, _I64), **_OPTIONS)
def _ask_for_run(address, size):
    """Ask for every cache line, so that a run is on its way while others are copied."""
    for at in range(address, address + size, 64):
        ask_for(at)


@njit(_I64(_M64, _I64, _I64, _I64, nb.boolean), **_OPTIONS)
def _looked_up(table, s, b, capacity, concat):
    """Fetch what says where a block's pieces are, one block earlier than the tokens: it takes two reads, one after the other."""
    if s < 0 or b < 0:
        return 0
    if concat:
        count = table[s, TOKEN_COUNT]
        if b * capacity >= count:
            return 0
        parts = (count + SEGMENT - 1) // SEGMENT
        document = carray(pointer(table[s, FIRST_DOCS]), (parts,), dtype=np.int64)[b * capacity // SEGMENT]
        if document < 0 or document >= table[s, DOCUMENTS]:
            return 0
        return carray(pointer(table[s, OFFSETS]), (table[s, DOCUMENTS] + 1,), dtype=np.int64)[document]
    if b >= table[s, BLOCKS]:
        return 0
    p = carray(pointer(table[s, BLOCK_PTR]), (table[s, BLOCKS] + 1,), dtype=np.int64)[b]
    if p < 0 or p >= table[s, PIECES]:
        return 0
    at = carray(pointer(table[s, PIECE_AT]), (table[s, PIECES],), dtype=np.int64)[p]
    return at + carray(pointer(table[s, PIECE_LEN]), (table[s, PIECES],), dtype=np.int32)[p]


@njit(nb.void(_M64, _I64, _I64, _I64, _I64, nb.boolean), **_OPTIONS)
def _ask_for_block(table, s, b, capacity, item, concat):
    """Ask for a block's tokens. What lies outside is passed over here and refused when it is its turn."""
    if s < 0 or b < 0:
        return
    count = table[s, TOKEN_COUNT]
    if concat:
        at = b * capacity
        if at < count:
            _ask_for_run(table[s, TOKENS] + at * item, (min(at + capacity, count) - at) * item)
        return
    if b >= table[s, BLOCKS]:
        return
    ptr = carray(pointer(table[s, BLOCK_PTR]), (table[s, BLOCKS] + 1,), dtype=np.int64)
    pieces = carray(pointer(table[s, PIECE_AT]), (table[s, PIECES],), dtype=np.int64)
    sizes = carray(pointer(table[s, PIECE_LEN]), (table[s, PIECES],), dtype=np.int32)
    if ptr[b] >= 0 and ptr[b + 1] <= table[s, PIECES]:
        for p in range(ptr[b], ptr[b + 1]):
            length = abs(np.int64(sizes[p]))
            if pieces[p] >= 0 and pieces[p] + length <= count:
                _ask_for_run(table[s, TOKENS] + pieces[p] * item, length * item)


# What is counted of a batch: tokens that are not padding, padding, documents that end, samples, fillers; the number of piece borders
# and the longest piece (or the shard and the place of what is wrong); then the tokens of each source, and a place for filler.
(
    COUNT_TOKENS,
    COUNT_PADDING,
    COUNT_DOCUMENTS,
    COUNT_SAMPLES,
    COUNT_FILLERS,
    COUNT_EDGES,
    COUNT_LONGEST,
    COUNT_SOURCES,
) = range(8)

# Where planned samples are, and where a batch goes: what is the same from batch to batch is handed over as addresses, because
# each argument of a call costs .2 us (8.5 us for a batch of 8 x 2,048 tokens with 21 arguments, 5.5 with these).
AT_TABLE, SHARDS, AT_SAMPLE, AT_SOURCE, AT_SHARD, AT_LOCAL, SAMPLES, WIDTH, ITEM, PAD, CONCAT = range(11)
PLAN_WORDS = 11
AT_IDS, AT_LABELS, AT_POSITIONS, AT_SEGMENTS, AT_INDEX, AT_ENDED, AT_COUNTS, AT_BORDERS, ROWS, BORDERS, COUNTS = range(
    11
)
BATCH_WORDS = 11


@njit(**_OPTIONS)
def _fill(
    table, samples, sources, shards, blocks, begin, end, width, item, pad, unshifted, concat, ids, labels, positions, segments,
    sample_index, row_count, counts, borders,
):  # fmt: skip
    """Block `blocks[n]` of shard `shards[n]` for every n.

    A sample of shard -1 is filler. Arrays without rows are left out. `unshifted`: labels as "hf" has them. `borders` takes
    the ends of the pieces over all rows (padding is its own piece), or is empty.
    """
    edges = 0
    longest = 0
    fetched = 0
    tokens_in_all = 0
    ended_in_all = 0
    want_labels, want_positions = len(labels) > 0, len(positions) > 0
    want_segments, want_borders = len(segments) > 0, len(borders) > 0
    if want_borders:
        borders[0] = 0
    counts[:] = 0
    for n in range(begin, end):
        r = n - begin
        s, b = shards[n], blocks[n]
        row = ids[r]
        column = 0
        ended = 0
        number = 0
        if n + 2 * _AHEAD < len(samples):
            fetched |= _looked_up(table, shards[n + 2 * _AHEAD], blocks[n + 2 * _AHEAD], width, concat) & 1
        if n + _AHEAD < len(samples):
            _ask_for_block(table, shards[n + _AHEAD], blocks[n + _AHEAD], width, item, concat)
        if s >= 0:
            counts[COUNT_EDGES], counts[COUNT_LONGEST] = s, b
            count, tokens, documents = table[s, TOKEN_COUNT], table[s, TOKENS], table[s, DOCUMENTS]
            offsets = carray(pointer(table[s, OFFSETS]), (documents + 1,), dtype=np.int64)
            at, stop, document, p, last = 0, 0, 0, 0, 0
            if concat:
                # The whole block is one run of tokens; documents are looked at only to know where they end.
                at, stop = b * width, min(b * width + width, count)
                if b < 0 or at >= count:
                    return BAD_INDEX
                parts = (count + SEGMENT - 1) // SEGMENT
                document = carray(pointer(table[s, FIRST_DOCS]), (parts,), dtype=np.int64)[at // SEGMENT]
                if document < 0:
                    return BAD_INDEX
                while document < documents and offsets[document + 1] <= at:
                    document += 1
                bad = _unsound(table, s, at, stop - at + 1, item)
                if bad >= 0:
                    counts[COUNT_LONGEST] = bad
                    return BAD_TOKENS
                _widen(tokens + at * item, item, row[: stop - at])
            else:
                if b < 0 or b >= table[s, BLOCKS]:
                    return BAD_INDEX
                ptr = carray(pointer(table[s, BLOCK_PTR]), (table[s, BLOCKS] + 1,), dtype=np.int64)
                p, last = ptr[b], ptr[b + 1]
                if p < 0 or last > table[s, PIECES]:
                    return BAD_INDEX
            pieces = carray(pointer(table[s, PIECE_AT]), (table[s, PIECES],), dtype=np.int64)
            sizes = carray(pointer(table[s, PIECE_LEN]), (table[s, PIECES],), dtype=np.int32)
            while (at < stop) if concat else (p < last):
                if concat:
                    if document >= documents:
                        return BAD_INDEX
                    length = min(offsets[document + 1], stop) - at
                    closes = at + length == offsets[document + 1]
                    document += 1
                    if length == 0:  # a document without tokens
                        continue
                    if length < 0:
                        return BAD_INDEX
                else:
                    at, length = pieces[p], np.int64(sizes[p])
                    closes = length < 0  # the sign says that the document ends here
                    length = abs(length)
                    p += 1
                    if length == 0 or at < 0 or at + length > count or column + length > width:
                        return BAD_INDEX
                    bad = _unsound(table, s, at, length + 1, item)
                    if bad >= 0:
                        counts[COUNT_LONGEST] = bad
                        return BAD_TOKENS
                    _widen(tokens + at * item, item, row[column : column + length])
                number += 1
                ended += 1 if closes else 0
                stops = column + length
                if want_labels:
                    goal = labels[r]
                    if unshifted:
                        _widen(tokens + at * item, item, goal[column:stops])
                        goal[column] = -100
                    else:
                        inside = length - 1 if closes else length  # a cut piece learns the token that follows the cut
                        if at + inside + 1 > count:
                            return BAD_INDEX
                        _widen(tokens + (at + 1) * item, item, goal[column : column + inside])
                        if closes:
                            goal[stops - 1] = -100
                if want_positions:
                    place = positions[r, column:stops]
                    for k in range(length):
                        place[k] = k
                if want_segments:
                    segments[r, column:stops] = number
                column = stops
                longest = max(longest, length)
                if want_borders:
                    edges += 1
                    borders[edges] = r * width + column
                if concat:
                    at += length
        if column < width:
            row[column:] = pad
            if want_labels:
                labels[r, column:] = -100
            if want_positions:
                place = positions[r, column:]
                for k in range(len(place)):
                    place[k] = k
            if want_segments:
                segments[r, column:] = 0
            longest = max(longest, width - column)
            if want_borders:
                edges += 1
                borders[edges] = (r + 1) * width
        sample_index[r] = samples[n]
        row_count[r] = ended
        counts[COUNT_SOURCES + sources[n] if s >= 0 else len(counts) - 1] += column  # filler has none
        counts[COUNT_FILLERS] += 1 if s < 0 else 0
        tokens_in_all += column
        ended_in_all += ended
    counts[COUNT_EDGES], counts[COUNT_LONGEST] = edges, longest
    counts[COUNT_TOKENS], counts[COUNT_DOCUMENTS], counts[COUNT_SAMPLES] = tokens_in_all, ended_in_all, end - begin
    counts[COUNT_PADDING] = (end - begin) * width - tokens_in_all
    # `fetched` is never negative; comparing it keeps the compiler from leaving out what was looked up.
    return FINE if fetched >= 0 else BAD_INDEX


@njit(_I64(_A64, _A64, _I64, _I64, nb.boolean), **_OPTIONS)
def fill(plan, batch, begin, end, unshifted):
    """Write planned samples [begin, end) into the rows of a batch; FINE, or what is wrong."""
    rows, width, samples = batch[ROWS], plan[WIDTH], plan[SAMPLES]
    return _fill(
        carray(pointer(plan[AT_TABLE]), (plan[SHARDS], COLUMNS), dtype=np.int64),
        carray(pointer(plan[AT_SAMPLE]), (samples,), dtype=np.int64),
        carray(pointer(plan[AT_SOURCE]), (samples,), dtype=np.int64),
        carray(pointer(plan[AT_SHARD]), (samples,), dtype=np.int64),
        carray(pointer(plan[AT_LOCAL]), (samples,), dtype=np.int64),
        begin, end, width, plan[ITEM], plan[PAD], unshifted, plan[CONCAT] != 0,
        matrix(batch[AT_IDS], rows, width),
        matrix(batch[AT_LABELS], rows, width),
        matrix(batch[AT_POSITIONS], rows, width),
        matrix(batch[AT_SEGMENTS], rows, width),
        carray(pointer(batch[AT_INDEX]), (rows,), dtype=np.int64),
        carray(pointer(batch[AT_ENDED]), (rows,), dtype=np.int64),
        carray(pointer(batch[AT_COUNTS]), (batch[COUNTS],), dtype=np.int64),
        carray(pointer(batch[AT_BORDERS]), (batch[BORDERS],), dtype=np.int32),
    )  # fmt: skip
