"""The loops over documents and tokens that numpy cannot express (`headrace.runtime.compiled`)."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from headrace.runtime.compiled import kernel


def _copy_slice(out, at, values, start, count):
    out[at : at + count] = values[start : start + count]


@kernel("void(int32[::1], int64, Array(int32, 1, 'C', readonly=True), int64, int64)", python=_copy_slice)
def copy_run(out, at, values, start, count):
    """out[at : at + count] = values[start : start + count]. A loop over two views compiles to vector code; numba's slice assignment takes
    three times as long, and seconds to compile."""
    to, come = out[at : at + count], values[start : start + count]
    for i in range(count):
        to[i] = come[i]


@kernel(
    "int64(Array(int32, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True), int64, int64, int32[::1], int64)"
)
def join_documents(ids, offsets, bos, eos, stream, at):
    """Append documents to a stream of tokens, each between its BOS and EOS (below 0: none); a document without tokens stays empty.
    Returns where the stream ends."""
    for d in range(len(offsets) - 1):
        count = offsets[d + 1] - offsets[d]
        if count == 0:
            continue
        if bos >= 0:
            stream[at] = bos
            at += 1
        copy_run(stream, at, ids, offsets[d], count)
        at += count
        if eos >= 0:
            stream[at] = eos
            at += 1
    return at


def _best_fit(rest, whole, order, count, least, capacity, blocks, bin_of):
    """The rule in plain Python: open bins as a sorted list of (room, −turn in which the bin got that room, bin)."""
    while True:
        bins = int(whole[:count].sum())
        rooms: list[tuple[int, int, int]] = []
        for turn, d in enumerate(order[order < count].tolist()):
            size = int(rest[d])
            found = bisect_left(rooms, (size, -len(order), 0))
            if found < len(rooms):
                room, _, target = rooms.pop(found)
            else:
                room, target = capacity, bins
                bins += 1
            bin_of[d] = target
            if room > size:
                insort(rooms, (room - size, -turn, target))
        if bins <= blocks or count <= least:
            return bins, count
        count -= 1


_DOCUMENTS = "Array(int64, 1, 'C', readonly=True)"


@kernel(
    f"UniTuple(int64, 2)({_DOCUMENTS}, {_DOCUMENTS}, {_DOCUMENTS}, int64, int64, int64, int64, int64[::1])",
    python=_best_fit,
)
def best_fit(rest, whole, order, count, least, capacity, blocks, bin_of):
    """Pack the first documents into bins, best fit decreasing: as many of `count` documents as fit into `blocks`, but at least `least`.

    rest, whole: each document's length modulo `capacity`, and divided by it. Whole bins come first and are not packed here.
    order: the documents that have a rest, the longest rest first, equal ones in document order.
    bin_of: receives the bin of each document's rest. Among bins of equal room the one that got that room last is taken.
    Returns the number of bins and of documents.
    """
    # Open bins by room left: a bit set finds the tightest room that fits, linked lists hold the bins of equal room.
    words = (capacity >> 6) + 1
    one = np.uint64(1)
    occupied = np.empty(words, np.uint64)
    head = np.empty(capacity + 1, np.int64)
    following = np.empty(len(order) + 1, np.int64)
    while True:
        for w in range(words):
            occupied[w] = np.uint64(0)
        for room in range(capacity + 1):
            head[room] = -1
        first_open = 0
        for d in range(count):
            first_open += whole[d]
        opened = 0
        for n in range(len(order)):
            d = order[n]
            if d >= count:
                continue
            size = rest[d]
            w = size >> 6
            bits = occupied[w] & ~((one << np.uint64(size & 63)) - one)
            while bits == 0 and w + 1 < words:
                w += 1
                bits = occupied[w]
            if bits == 0:
                room, slot = capacity, opened
                opened += 1
            else:
                room = w << 6
                while bits & one == 0:
                    bits >>= one
                    room += 1
                slot = head[room]
                head[room] = following[slot]
                if head[room] < 0:
                    occupied[w] &= ~(one << np.uint64(room & 63))
            bin_of[d] = first_open + slot
            left = room - size
            if left > 0:
                following[slot] = head[left]
                head[left] = slot
                occupied[left >> 6] |= one << np.uint64(left & 63)
        if first_open + opened <= blocks or count <= least:
            return first_open + opened, count
        count -= 1


@kernel(
    f"void(Array(int32, 1, 'C', readonly=True), {_DOCUMENTS}, {_DOCUMENTS}, int64[::1], int64[::1], int64[::1], int32[::1], int64,"
    " int32[:, ::1], int32[::1], int64[::1], int64[::1])"
)
def lay_blocks(
    stream, first, lengths, piece_ptr, piece_doc, piece_start, piece_len, pad, tokens, piece_next, real, row_count
):  # fmt: skip
    """Write the tokens of every piece into its block, padded with `pad`, and fill the arrays of `Blocks`.

    stream, first: the documents' tokens, and the place of each document's first token.
    """
    for b in range(len(tokens)):
        row = tokens[b]
        column = ended = 0
        for p in range(piece_ptr[b], piece_ptr[b + 1]):
            d, count = piece_doc[p], np.int64(piece_len[p])
            where = first[d] + piece_start[p]
            copy_run(row, column, stream, where, count)
            column += count
            if piece_start[p] + count == lengths[d]:
                piece_next[p] = -100
                ended += 1
            else:
                piece_next[p] = stream[where + count]
        real[b], row_count[b] = column, ended
        for k in range(column, len(row)):
            row[k] = pad
