"""The few loops over tokens that numpy cannot express, compiled: where documents go, and the tokens laid there.

Compiling takes seconds the first time and milliseconds from numba's cache after that, so nothing imports this module at
the top: `headrace.text.pack.pack_kernels()` imports it in a thread while sources open.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit
from numba.core import types as nb

from headrace.compiled.addresses import pointer
from headrace.compiled.orders import mixed, order_of
from headrace.compiled.xxh3 import SHORTEST, content_words

__all__ = ["drawn_rows", "pack_window", "total_with"]

_I32, _I64 = nb.int32, nb.int64
_A32, _A64 = nb.Array(nb.int32, 1, "C"), nb.Array(nb.int64, 1, "C")
_R64 = nb.Array(nb.int64, 1, "C", readonly=True)
_M32, _M64, _W64 = nb.Array(nb.int32, 2, "C"), nb.Array(nb.int64, 2, "C"), nb.Array(nb.uint64, 2, "C")
_PLACES = nb.Tuple((_A64, _A64, _A64, _A64, _I64, _I64))
"""Document, first token and length of every piece; the blocks' borders; documents used up; tokens used of the one after."""
_LAID = nb.UniTuple(_I64, 3)
_PACKED = nb.Tuple((_M32, _A64, _A64, _A64, _A32, _A32, _A64, _A64, _W64, *(7 * [_I64])))
"""The arrays of `text.Blocks`; documents used up, tokens used of the one after, documents cut, empty ones, blocks without a hash, the
first document with an id outside the vocabulary (-1: none) and the id's place in it."""
PART_FIELDS = 3
"""Of some documents: where their ids are, where their offsets are, and how many they are."""
_OPTIONS: Any = {"nogil": False, "cache": True, "error_model": "numpy", "boundscheck": False}
"""Short enough to keep Python's lock: giving it away and getting it back takes longer."""
_LONG: Any = _OPTIONS | {"nogil": True}
"""100 us a window, in which a trainer that wakes up should not have to wait: next() of a ready batch then had a p99 of 4 ms."""


@njit(_I64(_A64, _I64, _I64, _A64, _A64, _A64, _A64), **_OPTIONS)
def best_fit_bins(lengths, count, capacity, piece_doc, piece_start, piece_len, piece_bin):
    """Best-fit decreasing of documents [0, count) into bins of `capacity`; the number of bins.

    Documents longer than a bin are cut: whole bins first, the rest is packed like any other. Fills the piece arrays in
    the order of placement (they must hold sum(ceil(length / capacity)) entries) and leaves the piece count in
    piece_doc[-1] (so each array has one entry to spare).
    """
    bins = 0
    pieces = 0
    # Counting sort of what is left of each document, longest first, ties by document.
    starts = np.zeros(capacity + 2, np.int64)
    for d in range(count):
        rest = lengths[d] % capacity
        if rest:
            starts[capacity - rest + 1] += 1
        for k in range(lengths[d] // capacity):
            piece_doc[pieces] = d
            piece_start[pieces] = k * capacity
            piece_len[pieces] = capacity
            piece_bin[pieces] = bins
            pieces += 1
            bins += 1
    for i in range(capacity + 1):
        starts[i + 1] += starts[i]
    order = np.empty(starts[capacity + 1] + 1, np.int64)
    total = starts[capacity + 1]
    for d in range(count):
        rest = lengths[d] % capacity
        if rest:
            order[starts[capacity - rest]] = d
            starts[capacity - rest] += 1
    # Open bins by room left: a bit set finds the tightest room that fits, linked lists hold the bins of equal room.
    words = (capacity >> 6) + 1
    occupied = np.zeros(words, np.uint64)
    head = np.full(capacity + 1, -1, np.int64)
    following = np.full(total + 1, -1, np.int64)
    first_open = bins
    one = np.uint64(1)
    for n in range(total):
        d = order[n]
        rest = lengths[d] % capacity
        room = -1
        w = rest >> 6
        bits = occupied[w] & ~((one << np.uint64(rest & 63)) - one)
        while True:
            if bits:
                low = bits & (~bits + one)
                room = w << 6
                while low > one:
                    low >>= one
                    room += 1
                break
            w += 1
            if w >= words:
                break
            bits = occupied[w]
        if room < 0:
            target = bins
            bins += 1
            room = capacity
        else:
            target = first_open + head[room]
            head[room] = following[head[room]]
            if head[room] < 0:
                occupied[room >> 6] &= ~(one << np.uint64(room & 63))
        piece_doc[pieces] = d
        piece_start[pieces] = lengths[d] - rest
        piece_len[pieces] = rest
        piece_bin[pieces] = target
        pieces += 1
        left = room - rest
        if left > 0:
            slot = target - first_open
            following[slot] = head[left]
            head[left] = slot
            occupied[left >> 6] |= one << np.uint64(left & 63)
    piece_doc[len(piece_doc) - 1] = pieces
    return bins


@njit(nb.void(_A64, _A64, _I64, _I64, _A64, _A64), **_OPTIONS)
def bins_in_document_order(piece_bin, piece_doc, pieces, bins, order, bin_ptr):
    """Sort pieces by (bin, document): fills `order` and the bins' borders. A piece index breaks no tie: a document has
    at most one piece in a bin."""
    for b in range(bins + 1):
        bin_ptr[b] = 0
    for p in range(pieces):
        bin_ptr[piece_bin[p] + 1] += 1
    for b in range(bins):
        bin_ptr[b + 1] += bin_ptr[b]
    at = bin_ptr.copy()
    for p in range(pieces):
        order[at[piece_bin[p]]] = p
        at[piece_bin[p]] += 1
    for b in range(bins):
        for i in range(bin_ptr[b] + 1, bin_ptr[b + 1]):
            p = order[i]
            j = i - 1
            while j >= bin_ptr[b] and piece_doc[order[j]] > piece_doc[p]:
                order[j + 1] = order[j]
                j -= 1
            order[j + 1] = p


@njit(_A64(_R64, _R64, _R64, nb.uint64, _I64), **_OPTIONS)
def drawn_rows(first_row, chunks, rows, key, every):
    """Which of some rows are drawn: one in `every`, by `order.mix64` of the row's number and a key."""
    found = np.empty(len(rows), np.int64)
    count = 0
    for i in range(len(rows)):
        if mixed(np.uint64(first_row[chunks[i]] + rows[i]) ^ key) % np.uint64(every) == 0:
            found[count] = i
            count += 1
    return found[:count].copy()


@njit(**_OPTIONS)
def _copy(out, values):
    """Numba's own slice assignment takes three times as long."""
    for i in range(len(out)):
        out[i] = values[i]


@njit(nb.int32(nb.Array(nb.int32, 1, "C"), nb.Array(nb.int32, 1, "C"), nb.int32), **_OPTIONS)
def _copy_sound(out, ids, largest):
    """The same for ids, at the same speed; below 0 if one of them is not in [0, largest]."""
    seen = nb.int32(0)
    for i in range(len(out)):
        found = ids[i]
        out[i] = found
        seen |= found | (largest - found)
    return seen


@njit(nb.UniTuple(_I64, 2)(_A64, _A64, _I64), **_OPTIONS)
def first_unsound(where, encoded, vocabulary):
    """The first document with an id outside the vocabulary, and the id's place in it; -1: there is none."""
    for d in range(len(where)):
        ids = carray(pointer(where[d]), (encoded[d],), np.int32)
        for i in range(len(ids)):
            if ids[i] < 0 or ids[i] >= vocabulary:
                return d, i
    return -1, 0


@njit(_I64(_R64, _I64, _I64), **_OPTIONS)
def total_with(offsets, ids, extra):
    """Tokens of documents with their BOS and EOS; one without text stays empty. -1: the offsets do not cover so many ids."""
    if len(offsets) == 0 or offsets[0] != 0 or offsets[len(offsets) - 1] != ids:
        return -1
    total = 0
    for d in range(len(offsets) - 1):
        n = offsets[d + 1] - offsets[d]
        if n < 0:
            return -1
        total += n + extra if n > 0 else 0
    return total


@njit(nb.UniTuple(_A64, 2)(_M64), **_OPTIONS)
def documents_of(parts):
    """Where the ids of every document are, and how many."""
    count = 0
    for p in range(len(parts)):
        count += parts[p, 2]
    where, encoded = np.empty(count, np.int64), np.empty(count, np.int64)
    at = 0
    for p in range(len(parts)):
        ids, documents = parts[p, 0], parts[p, 2]
        offsets = carray(pointer(parts[p, 1]), (documents + 1,), np.int64)
        for d in range(documents):
            where[at] = ids + 4 * offsets[d]
            encoded[at] = offsets[d + 1] - offsets[d]
            at += 1
    return where, encoded


@njit(_PLACES(_A64, _I64, _I64), **_OPTIONS)
def place_best_fit(lengths, capacity, blocks):
    """The longest run of documents that packs into so many blocks; at least one document with tokens, however long."""
    budget, total, count, least = capacity * blocks, 0, 0, len(lengths)
    for d in range(len(lengths)):
        total += lengths[d]
        if total <= budget:
            count = d + 1
        if least == len(lengths) and lengths[d] > 0:
            least = d + 1
        if total > budget and d >= least:
            break
    count = max(count, least)
    room = 1
    for d in range(count):
        room += (lengths[d] + capacity - 1) // capacity
    doc, start, length, bin_of = (
        np.empty(room, np.int64),
        np.empty(room, np.int64),
        np.empty(room, np.int64),
        np.empty(room, np.int64),
    )
    while True:
        bins = best_fit_bins(lengths, count, capacity, doc, start, length, bin_of)
        if bins <= blocks or count <= least:
            break
        count -= 1
    pieces = doc[room - 1]
    order, borders = np.empty(pieces, np.int64), np.empty(bins + 1, np.int64)
    bins_in_document_order(bin_of, doc, pieces, bins, order, borders)
    return doc[order], start[order], length[order], borders, count, 0


@njit(_PLACES(_A64, _I64, _I64, _I64, nb.boolean), **_OPTIONS)
def place_in_a_row(lengths, capacity, blocks, offset, last):
    """The stream of tokens from `offset` on, cut every `capacity`; reaches just over the budget, or (`last`) to its end."""
    budget, total, count = capacity * blocks, 0, len(lengths)
    for d in range(len(lengths)):
        total += lengths[d]
        if total - offset >= budget:
            more = total - offset > budget
            for e in range(d + 1, len(lengths)):
                more = more or lengths[e] > 0
            if more:
                count, last = d + 1, False
                break
    whole = (total - offset + capacity - 1) // capacity if last else (total - offset) // capacity
    stop = min(offset + whole * capacity, total)
    room = count + whole + 1
    doc, start, length, borders = (
        np.empty(room, np.int64),
        np.empty(room, np.int64),
        np.empty(room, np.int64),
        np.empty(whole + 1, np.int64),
    )
    pieces = block = 0
    used, begin, at = 0, 0, offset
    borders[0] = 0
    for d in range(count):
        end = begin + lengths[d]
        while at < min(end, stop):
            upto = min(end, stop, offset + (block + 1) * capacity)
            doc[pieces], start[pieces], length[pieces] = d, at - begin, upto - at
            pieces += 1
            at = upto
            if at == offset + (block + 1) * capacity or at == stop:
                block += 1
                borders[block] = pieces
        if end > stop:
            break
        begin, used = end, d + 1
    if stop == total:
        return doc[:pieces].copy(), start[:pieces].copy(), length[:pieces].copy(), borders, count, 0
    return doc[:pieces].copy(), start[:pieces].copy(), length[:pieces].copy(), borders, used, stop - begin


@njit(
    _LAID(
        _A64, _A64, _A64, _A64, _A64, _A64, _A64, _A64, _I64, _I64, _I64, _I64,
        _M32, _A64, _A64, _A64, _A32, _A32, _A64, _A64, _W64,
    ),
    **_OPTIONS,
)  # fmt: skip
def lay_blocks(
    where, encoded, lengths, doc, start, length, borders, order, bos, eos, pad, vocabulary,
    tokens, piece_ptr, piece_doc, piece_start, piece_len, piece_next, real, row_count, hashes,
):  # fmt: skip
    """The tokens of every piece into its block, the blocks in `order`; the numbers of documents in more than one piece, of blocks without
    a hash, and below 0 where an id was outside the vocabulary.

    For each piece the token that follows it in its document (-100 at its end). `bos`/`eos` < 0: none. A block's hash is taken
    over its tokens, the lengths of its pieces and the tokens that follow them, each led by its size in bytes as 64 bits:
    `order.content_hash`. One of fewer than SHORTEST words is left 0.
    """
    head = 1 if bos >= 0 else 0
    largest, seen = nb.int32(vocabulary - 1), nb.int32(0)
    width = tokens.shape[1]
    most = 0
    for b in range(len(order)):
        most = max(most, borders[b + 1] - borders[b])
    stamp = np.empty(6 + width + 2 * most, np.int32)
    times = np.zeros(len(lengths), np.int64)
    piece = cut = unhashed = 0
    piece_ptr[0] = 0
    for b in range(len(order)):
        column = 0
        ended = 0
        row = tokens[b]
        first = piece
        for p in range(borders[order[b]], borders[order[b] + 1]):
            d = doc[p]
            ids = carray(pointer(where[d]), (encoded[d],), np.int32)
            end = start[p] + length[p]
            k = start[p]
            if k < head:
                row[column] = bos
                column += 1
                k += 1
            upto = min(end, encoded[d] + head)
            if upto > k:
                part = ids[k - head : upto - head]
                seen |= _copy_sound(row[column : column + upto - k], part, largest)
                column += upto - k
            if upto < end:
                row[column] = eos
                column += 1
            following = -100
            if end == lengths[d]:
                ended += 1
            elif end - head < encoded[d]:
                following = ids[end - head]
            else:
                following = eos
            piece_doc[piece], piece_start[piece], piece_len[piece] = d, start[p], length[p]
            piece_next[piece] = following
            times[d] += 1
            if times[d] == 2:
                cut += 1
            piece += 1
        pieces = piece - first
        piece_ptr[b + 1] = piece
        real[b], row_count[b] = column, ended
        words = 6 + column + 2 * pieces
        if words >= SHORTEST:
            stamp[0], stamp[1] = 4 * column, 0
            _copy(stamp[2 : 2 + column], row[:column])
            at = 2 + column
            stamp[at], stamp[at + 1] = 4 * pieces, 0
            stamp[at + 2 : at + 2 + pieces] = piece_len[first:piece]
            at += 2 + pieces
            stamp[at], stamp[at + 1] = 4 * pieces, 0
            stamp[at + 2 : at + 2 + pieces] = piece_next[first:piece]
            hashes[b, 0], hashes[b, 1] = content_words(stamp, words)
        else:
            hashes[b, 0] = hashes[b, 1] = 0
            unhashed += 1
        row[column:] = pad
    return cut, unhashed, seen


@njit(_PACKED(_M64, _I64, _I64, _I64, nb.boolean, _I64, _I64, _I64, _I64, nb.boolean, nb.uint64, nb.boolean), **_LONG)
def pack_window(parts, capacity, blocks, offset, best_fit, bos, eos, pad, vocabulary, shuffle, key, last):
    """The blocks of a window out of the documents of `parts`: see `text.pack`."""
    where, encoded = documents_of(parts)
    extra = (1 if bos >= 0 else 0) + (1 if eos >= 0 else 0)
    lengths = np.empty(len(encoded), np.int64)
    for d in range(len(encoded)):
        lengths[d] = encoded[d] + extra if encoded[d] > 0 else 0
    if best_fit:
        doc, start, length, borders, used, next_offset = place_best_fit(lengths, capacity, blocks)
    else:
        doc, start, length, borders, used, next_offset = place_in_a_row(lengths, capacity, blocks, offset, last)
    count, pieces = len(borders) - 1, len(doc)
    order = order_of(count, key) if shuffle else np.arange(count)
    tokens = np.empty((count, capacity), np.int32)
    piece_ptr, piece_doc, piece_start = (
        np.empty(count + 1, np.int64),
        np.empty(pieces, np.int64),
        np.empty(pieces, np.int64),
    )
    piece_len, piece_next = np.empty(pieces, np.int32), np.empty(pieces, np.int32)
    real, row_count, hashes = np.empty(count, np.int64), np.empty(count, np.int64), np.empty((count, 2), np.uint64)
    cut, unhashed, seen = lay_blocks(
        where, encoded, lengths, doc, start, length, borders, order, bos, eos, pad, vocabulary,
        tokens, piece_ptr, piece_doc, piece_start, piece_len, piece_next, real, row_count, hashes,
    )  # fmt: skip
    empty = 0
    for d in range(used):
        if lengths[d] == 0:
            empty += 1
    unsound, place = first_unsound(where, encoded, vocabulary) if seen < 0 else (-1, 0)
    return (
        tokens, piece_ptr, piece_doc, piece_start, piece_len, piece_next, real, row_count, hashes,
        used, next_offset, cut, empty, unhashed, unsound, place,
    )  # fmt: skip
