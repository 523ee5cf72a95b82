"""The few loops over tokens that numpy cannot express, compiled.

Compiling takes seconds the first time and milliseconds from numba's cache after that, so nothing imports this module at
the top: `headrace.text.pack.pack_kernels()` imports it in a thread while sources open. All kernels release the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.core import types as nb

_I32, _I64 = nb.int32, nb.int64
_A32, _A64 = nb.Array(nb.int32, 1, "C"), nb.Array(nb.int64, 1, "C")
_R32 = nb.Array(nb.int32, 1, "C", readonly=True)
_R64 = nb.Array(nb.int64, 1, "C", readonly=True)
_M32 = nb.Array(nb.int32, 2, "C")
_OPTIONS: Any = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}


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


@njit(nb.void(_R32, _R64, _A64, _A64, _A64, _A64, _A64, _I64, _I64, _I64, _M32, _A32, _A32, _A64), **_OPTIONS)
def lay_tokens(
    ids,
    offsets,
    lengths,
    piece_doc,
    piece_start,
    piece_len,
    block_ptr,
    bos,
    eos,
    pad,
    tokens,
    piece_next,
    stamp,
    stamp_ptr,
):
    """Write every piece's tokens into its block, and for each piece the token that follows it in its document (-100 at
    a document's end). `bos`/`eos` < 0: none.

    `stamp` receives what a block's hash is taken over, one block after the other: its tokens, the lengths of its pieces
    and the tokens that follow them, each led by its size in bytes as 64 bits.
    """
    head = 1 if bos >= 0 else 0
    at = 0
    for b in range(len(block_ptr) - 1):
        column = 0
        row = tokens[b]
        for p in range(block_ptr[b], block_ptr[b + 1]):
            d = piece_doc[p]
            base = offsets[d]
            encoded = offsets[d + 1] - base
            start = piece_start[p]
            end = start + piece_len[p]
            k = start
            if k < head:
                row[column] = bos
                column += 1
                k += 1
            upto = min(end, encoded + head)
            shift = base - head
            if upto > k:
                row[column : column + upto - k] = ids[shift + k : shift + upto]
                column += upto - k
            if upto < end:
                row[column] = eos
                column += 1
            if end == lengths[d]:
                piece_next[p] = -100
            elif end - head < encoded:
                piece_next[p] = ids[base + end - head]
            else:
                piece_next[p] = eos
        stamp_ptr[b] = at
        stamp[at], stamp[at + 1] = 4 * column, 0
        at += 2
        stamp[at : at + column] = row[:column]
        at += column
        pieces = block_ptr[b + 1] - block_ptr[b]
        stamp[at], stamp[at + 1] = 4 * pieces, 0
        at += 2
        for p in range(pieces):
            stamp[at + p] = piece_len[block_ptr[b] + p]
        at += pieces
        stamp[at], stamp[at + 1] = 4 * pieces, 0
        at += 2
        for p in range(pieces):
            stamp[at + p] = piece_next[block_ptr[b] + p]
        at += pieces
        for j in range(column, tokens.shape[1]):
            row[j] = pad
    stamp_ptr[len(block_ptr) - 1] = at
