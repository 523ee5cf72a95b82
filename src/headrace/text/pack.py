"""Packing of documents into blocks of exactly `seq_len` tokens.

    best_fit   the longest run of documents that fits into K blocks, packed best fit decreasing: only documents longer
               than a block are cut; padding well under one per cent
    concat     documents joined end to end, cut at every block's end: no padding, a third of the documents cut; what
               does not fill a block is carried to the next window as (document, token offset)

Packing is a pure function of the token counts. A block keeps its pieces (which document, from which token, how many),
from which labels, positions and provenance follow:

    block   | doc 3: tokens 0–511 ……… | doc 9: 0–99 | doc 4: 2048–2100 | padding |
    labels    the next token of the same document everywhere; −100 at a document's last token and on padding
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from headrace.order import Permutation, content_hash
from headrace.text.block_layout import best_fit, copy_run, join_documents, lay_blocks
from headrace.text.token_batch import TokenBatch

PACK_KERNELS = (copy_run, best_fit, join_documents, lay_blocks)
"""The kernels of packing, for `wait_for_kernels`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Settings of a packer."""

    seq_len: int
    strategy: Literal["best_fit", "concat"] = "best_fit"
    blocks: int = 64
    """Blocks of a window."""
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int = 0

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise ValueError(f"seq_len must be at least 2, got {self.seq_len}")
        if self.blocks < 1:
            raise ValueError(f"a window needs at least one block, got {self.blocks}")

    @property
    def budget(self) -> int:
        """Tokens of a full window."""
        return self.seq_len * self.blocks

    @property
    def extra(self) -> int:
        """Tokens that are added to a document: BOS and EOS."""
        return (self.bos_id is not None) + (self.eos_id is not None)

    def lengths(self, encoded: np.ndarray) -> np.ndarray:
        """Return the token counts of documents with BOS and EOS, from those without. A document without tokens stays empty."""
        return np.where(encoded > 0, encoded + self.extra, 0)

    def total(self, batch: TokenBatch) -> int:
        """Return the tokens of all documents with BOS and EOS."""
        return len(batch.ids) + self.extra * int(np.count_nonzero(batch.counts()))


@dataclass(frozen=True, slots=True)
class Blocks:
    """Packed blocks in delivery order. The arrays belong to the window and are not written again."""

    tokens: np.ndarray
    """int32 [blocks, seq_len], padded."""
    piece_ptr: np.ndarray
    """int64 [blocks + 1]: the pieces of block b are [piece_ptr[b], piece_ptr[b + 1])."""
    piece_doc: np.ndarray
    piece_start: np.ndarray
    piece_len: np.ndarray
    """int32, tokens of the piece."""
    piece_next: np.ndarray
    """int32, the token that follows the piece in its document, or -100."""
    real: np.ndarray
    """int64 [blocks]: tokens that are not padding."""
    row_count: np.ndarray
    """int64 [blocks]: documents whose last piece lies in the block."""
    hashes: np.ndarray
    """uint64 [blocks, 2]: the 16 bytes of each block's content hash, of which the digest is made."""

    def __len__(self) -> int:
        return len(self.tokens)


class Packed(NamedTuple):
    """The result of `pack`: blocks, and the beginning of the next window."""

    blocks: Blocks
    documents: int
    """Documents used up, counted from the first."""
    offset: int
    """Tokens of document number `documents` that are already in a block (concat only)."""
    cut: int
    """Documents that are in more than one piece."""
    empty: int
    """Documents without a token, of those used up."""


_NO_LIMIT = np.iinfo(np.int64).max


class _Placed(NamedTuple):
    """The pieces of documents: piece i is tokens [start[i], start[i] + length[i]) of document doc[i], in bin bin_of[i]."""

    doc: np.ndarray
    start: np.ndarray
    length: np.ndarray
    bin_of: np.ndarray
    bins: int
    documents: int
    """Documents used up, counted from the first."""
    offset: int
    """Tokens used of the document after those."""


def pack(
    batches: Sequence[TokenBatch],
    packing: Packing,
    *,
    offset: int = 0,
    last: bool,
    shuffle_key: int | None = None,
) -> Packed:
    """Pack documents from the first on, until the window is full.

    Args:
        batches: The documents, as `encode_named` gives them: their arrays are trusted.
        packing: The settings.
        offset: Tokens of the first document that are already delivered (concat only).
        last: There are no more documents: the last block of concat may be padded.
        shuffle_key: Key of the order of the blocks; in packing order if None.
    """
    encoded = np.concatenate([b.counts() for b in batches]) if batches else np.empty(0, np.int64)
    lengths = packing.lengths(encoded)
    if packing.strategy == "best_fit":
        placed = place_best_fit(lengths, packing.seq_len, packing.blocks)
    else:
        placed = _place_in_a_row(lengths, packing.seq_len, packing.blocks, offset, last)
    blocks = _lay(batches, lengths, placed, packing, shuffle_key)
    cut, empty = np.count_nonzero(np.bincount(placed.doc) > 1), np.count_nonzero(lengths[: placed.documents] == 0)
    return Packed(blocks, placed.documents, placed.offset, int(cut), int(empty))


def place_best_fit(lengths: np.ndarray, capacity: int, blocks: int = _NO_LIMIT) -> _Placed:
    """Pack the longest run of documents that fits into `blocks` blocks of `capacity` tokens; at least one document with tokens.

    Best fit decreasing. A document longer than a block is cut: whole blocks first, and the rest is packed like any other document.
    """
    ends = np.cumsum(lengths)
    some = int(np.argmax(lengths > 0)) + 1 if len(lengths) and ends[-1] else len(lengths)
    budget = min(capacity * blocks, _NO_LIMIT)
    count = max(int(np.searchsorted(ends, budget, side="right")), some)
    whole, rest = np.divmod(lengths[:count], capacity)
    order = np.argsort(-rest, kind="stable")
    order = order[: np.count_nonzero(rest)]
    bin_of = np.empty(count, np.int64)
    bins, count = best_fit(rest, whole, order, count, some, capacity, blocks, bin_of)
    whole, doc = whole[:count], np.flatnonzero(rest[:count])
    start, length, bin_of = lengths[doc] - rest[doc], rest[doc], bin_of[doc]
    full = int(whole.sum())
    if full:
        cut = np.repeat(np.arange(count), whole)
        number = np.arange(full) - np.repeat(np.cumsum(whole) - whole, whole)
        doc, start = np.concatenate([cut, doc]), np.concatenate([number * capacity, start])
        length, bin_of = np.concatenate([np.full(full, capacity), length]), np.concatenate([np.arange(full), bin_of])
    return _Placed(doc, start, length, bin_of, bins, count, 0)


def _place_in_a_row(lengths: np.ndarray, capacity: int, blocks: int, offset: int, last: bool) -> _Placed:
    """Cut the joined tokens from `offset` on into blocks of `capacity`, up to just over the window's budget, or (`last`) to the end."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    count = len(lengths)
    if total - offset > capacity * blocks:
        count = int(np.searchsorted(ends, offset + capacity * blocks)) + 1
        total, last = int(ends[count - 1]), False
    bins = (total - offset + capacity - 1) // capacity if last else (total - offset) // capacity
    stop = min(offset + bins * capacity, total)
    ends = ends[:count]
    inside = ends[(ends > offset) & (ends < stop)]
    points = np.unique(np.concatenate([offset + capacity * np.arange(bins), inside, [stop]]))
    begin, length = points[:-1], np.diff(points)
    doc = np.searchsorted(ends, begin, side="right")
    start = begin - (ends[doc] - lengths[doc])
    used = count if stop == total else int(np.searchsorted(ends, stop, side="right"))
    left = 0 if stop == total else stop - (int(ends[used - 1]) if used else 0)
    return _Placed(doc, start, length, (begin - offset) // capacity, bins, used, left)


def token_stream(batches: Sequence[TokenBatch], packing: Packing) -> np.ndarray:
    """Return the tokens of all documents joined end to end, each between its BOS and EOS."""
    stream = np.empty(sum(map(packing.total, batches)), np.int32)
    bos, eos = (-1 if token is None else token for token in (packing.bos_id, packing.eos_id))
    at = 0
    for batch in batches:
        at = join_documents(batch.ids, batch.offsets, bos, eos, stream, at)
    return stream


def _lay(
    batches: Sequence[TokenBatch], lengths: np.ndarray, placed: _Placed, packing: Packing, shuffle_key: int | None
) -> Blocks:
    """Make the blocks, in delivery order. The pieces of a block are in the order of documents."""
    first = np.cumsum(lengths) - lengths
    stream = token_stream(batches, packing)
    count, pieces, block_of = placed.bins, len(placed.doc), placed.bin_of
    if shuffle_key is not None:
        order = Permutation(count, shuffle_key)
        block_of = order.positions(block_of)
    sort = np.argsort(block_of * (len(lengths) + 1) + placed.doc)
    piece_ptr = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(block_of, minlength=count), out=piece_ptr[1:])
    blocks = Blocks(
        tokens=np.empty((count, packing.seq_len), np.int32),
        piece_ptr=piece_ptr,
        piece_doc=placed.doc[sort],
        piece_start=placed.start[sort],
        piece_len=placed.length[sort].astype(np.int32),
        piece_next=np.empty(pieces, np.int32),
        real=np.empty(count, np.int64),
        row_count=np.empty(count, np.int64),
        hashes=np.empty((count, 2), np.uint64),
    )
    lay_blocks(
        stream, first, lengths, piece_ptr, blocks.piece_doc, blocks.piece_start, blocks.piece_len, packing.pad_id,
        blocks.tokens, blocks.piece_next, blocks.real, blocks.row_count,
    )  # fmt: skip
    for b, (real, (begin, end)) in enumerate(zip(blocks.real.tolist(), pairwise(piece_ptr.tolist()), strict=True)):
        content = content_hash(blocks.tokens[b, :real], blocks.piece_len[begin:end], blocks.piece_next[begin:end])
        blocks.hashes[b] = np.frombuffer(content, np.uint64)
    return blocks
