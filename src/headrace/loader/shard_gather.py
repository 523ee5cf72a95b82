"""Gather: blocks of a token shard are copied into the rows of a batch (`BatchRows`), with their pieces.

One call gathers all rows of a batch that lie in one shard. Every position is compared with the size of the array before it is read, so
a damaged index is refused. Segments of tokens that have not been compared with their checksum yet are marked `TO_CHECK`: the caller
checks them before it hands the batch out.
"""

from __future__ import annotations

from headrace.loader.batch_fill import DOCUMENTS, PIECES, REAL
from headrace.runtime.compiled import Kernel, kernel
from headrace.text.block_layout import copy_run
from headrace.text.shards import SEGMENT

CHECKED, TO_CHECK = 1, 2
"""Marks of a segment. 0: no block has touched it yet."""

_TOKENS = "Array({0}, 1, 'C', readonly=True)"
_INT64, _INT32 = "Array(int64, 1, 'C', readonly=True)", "Array(int32, 1, 'C', readonly=True)"
_ROWS = "int64, int64[::1], int64[::1], int32[:, ::1], int32[:, ::1], int32[:, ::1], int64[:, ::1]"


_COPY = f"void(int32[::1], int64, {_TOKENS}, int64, int64)"
copy_tokens = copy_run.variant(_COPY.format("uint16"))
"""out[at : at + count] = values[start : start + count]"""


@kernel("int64(uint8[::1], int64, int64)")
def mark_segments(checked, first, last):
    """Mark the segments of tokens [first, last) that were not checked; how many these are."""
    marked = 0
    for segment in range(first // SEGMENT, min((last + SEGMENT - 1) // SEGMENT, len(checked))):
        if checked[segment] != CHECKED:
            checked[segment] = TO_CHECK
            marked += 1
    return marked


_PACKED = f"int64({_TOKENS}, uint8[::1], {_INT64}, {_INT64}, {_INT32}, {_ROWS})"


@kernel(_PACKED.format("uint16"))
def _gather_packed(
    tokens, checked, block_ptr, piece_at, piece_len, shard, shards, blocks, rows, lengths, following, facts
):
    """Gather best-fit blocks; returns how many segments were marked, or -1 - r if the block of row r points outside the shard.

    tokens, checked: the shard's tokens, and the marks of its segments.
    block_ptr, piece_at, piece_len: the shard's index, as in `PackedShard`.
    shards, blocks: the shard and the block of every row; rows of shards other than `shard` are left as they are.
    rows, lengths, following, facts: as in `BatchRows`.
    """
    marked = 0
    width = rows.shape[1]
    for r in range(len(shards)):
        b = blocks[r]
        if shards[r] != shard:
            continue
        if b < 0 or b >= len(block_ptr) - 1:
            return -1 - r
        first, last = block_ptr[b], block_ptr[b + 1]
        if first < 0 or last < first or last > len(piece_at) or last - first > width:
            return -1 - r
        column = ended = 0
        for p in range(first, last):
            at, length = piece_at[p], abs(int(piece_len[p]))
            is_last = piece_len[p] < 0  # the sign says that the document ends with this piece
            end = at + length
            if (
                length == 0 or at < 0 or at > len(tokens) - length or column + length > width
            ):  # `end` may have overflowed
                return -1 - r
            if not is_last and end >= len(tokens):
                return -1 - r
            marked += mark_segments(checked, at, end + 1)
            copy_tokens(rows[r], column, tokens, at, length)
            lengths[r, p - first] = length
            following[r, p - first] = -100 if is_last else tokens[end]
            ended += 1 if is_last else 0
            column += length
        facts[r, REAL], facts[r, PIECES], facts[r, DOCUMENTS] = column, last - first, ended
    return marked


_RUNS = f"int64({_TOKENS}, uint8[::1], {_INT64}, {_INT64}, {_ROWS})"


@kernel(_RUNS.format("uint16"))
def _gather_runs(tokens, checked, offsets, segment_docs, shard, shards, blocks, rows, lengths, following, facts):
    """Gather blocks that are runs of tokens (concat); arguments and result as of `gather_packed`.

    offsets: the first token of every document, and the end of the last. segment_docs: the document of each segment's first token.
    """
    marked = 0
    width, count, documents = rows.shape[1], len(tokens), len(offsets) - 1
    for r in range(len(shards)):
        if shards[r] != shard:
            continue
        at = blocks[r] * width
        if at < 0 or at >= count:
            return -1 - r
        stop = min(at + width, count)
        document = segment_docs[at // SEGMENT]
        if document < 0:
            return -1 - r
        while document < documents and offsets[document + 1] <= at:
            document += 1
        marked += mark_segments(checked, at, stop + 1)
        copy_tokens(rows[r], 0, tokens, at, stop - at)
        pieces = ended = 0
        while at < stop:
            if document >= documents:
                return -1 - r
            end = min(offsets[document + 1], stop)
            is_last = end == offsets[document + 1]
            if end < at or (not is_last and end >= count):
                return -1 - r
            if end > at:  # a document may have no tokens
                lengths[r, pieces] = end - at
                following[r, pieces] = -100 if is_last else tokens[end]
                pieces += 1
                ended += 1 if is_last else 0
            at = end
            document += 1
        facts[r, REAL], facts[r, PIECES], facts[r, DOCUMENTS] = stop - blocks[r] * width, pieces, ended
    return marked


_copy_tokens32 = copy_run.variant(_COPY.format("uint32"))
gather_packed: dict[int, Kernel] = {
    2: _gather_packed,
    4: _gather_packed.variant(_PACKED.format("uint32"), copy_tokens=_copy_tokens32),
}
"""By the bytes of a token."""
gather_runs: dict[int, Kernel] = {
    2: _gather_runs,
    4: _gather_runs.variant(_RUNS.format("uint32"), copy_tokens=_copy_tokens32),
}
