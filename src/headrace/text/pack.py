"""How documents become blocks of exactly `seq_len` tokens.

    best_fit   the longest run of documents that fits into K blocks, packed best fit decreasing: only documents longer
               than a block are cut; padding well under one per cent
    concat     documents one after the other, cut at every block's end: no padding, a third of the documents cut; what
               does not fill a block is carried to the next window as (document, token offset)

Packing is a pure function of the token counts. A block keeps its pieces (which document, from which token, how many),
from which labels, positions and provenance follow:

    block   | doc 3: tokens 0–511 ……… | doc 9: 0–99 | doc 4: 2048–2100 | padding |
    labels    the next token of the same document everywhere; −100 at a document's last token and on padding
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import xxhash

from headrace.order import Permutation
from headrace.text.compiled import CompiledLoops
from headrace.text.token_batch import TokenBatch

__all__ = ["Blocks", "Packing", "pack", "pack_kernels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What a packer is told."""

    seq_len: int
    strategy: Literal["best_fit", "concat"] = "best_fit"
    blocks: int = 64
    """The budget of a window."""
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
        """Tokens that a window asks for."""
        return self.seq_len * self.blocks

    def lengths(self, encoded: np.ndarray) -> np.ndarray:
        """Token counts of documents with BOS and EOS; a document without tokens stays empty."""
        extra = (self.bos_id is not None) + (self.eos_id is not None)
        return np.where(encoded > 0, encoded + extra, 0)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Packed blocks in delivery order. Arrays are owned by the window and never written again."""

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
    hashes: tuple[bytes, ...]
    """16 bytes over the content of each block; what the digest is made of."""

    def __len__(self) -> int:
        return len(self.tokens)


class Packed(NamedTuple):
    """What `pack` made, and where the next window begins."""

    blocks: Blocks
    documents: int
    """Documents used up, counted from the first."""
    offset: int
    """Tokens of document number `documents` that are already in a block (concat only)."""
    cut: int
    """Documents that are in more than one piece."""


pack_kernels = CompiledLoops("headrace.text.kernels")


def pack(batch: TokenBatch, packing: Packing, *, offset: int = 0, last: bool, shuffle_key: int | None = None) -> Packed:
    """Pack documents from the first on, until the window's budget is used or (`last`) there are no more.

    `offset` tokens of the first document are already delivered. `shuffle_key` orders the finished blocks.
    """
    lengths = packing.lengths(batch.counts()).astype(np.int64)
    if packing.strategy == "best_fit":
        doc, start, length, ptr, used, next_offset = _best_fit(lengths, packing)
    else:
        doc, start, length, ptr, used, next_offset = _concat(lengths, packing, offset, last)
    count = len(ptr) - 1
    if shuffle_key is not None and count > 1:
        doc, start, length, ptr = _shuffled(doc, start, length, ptr, shuffle_key)
    tokens = np.empty((count, packing.seq_len), np.int32)
    piece_next = np.empty(len(doc), np.int32)
    stamp, stamp_ptr = np.empty(int(length.sum()) + 2 * len(doc) + 6 * count, np.int32), np.empty(count + 1, np.int64)
    bos = -1 if packing.bos_id is None else packing.bos_id
    eos = -1 if packing.eos_id is None else packing.eos_id
    pack_kernels().lay_tokens(
        batch.ids,
        batch.offsets,
        lengths,
        doc,
        start,
        length,
        ptr,
        bos,
        eos,
        packing.pad_id,
        tokens,
        piece_next,
        stamp,
        stamp_ptr,
    )
    ends = piece_next == -100
    whole = np.bincount(doc, minlength=1)
    piece_len = length.astype(np.int32)
    real = _sums(length, ptr)
    blocks = Blocks(
        tokens=tokens,
        piece_ptr=ptr,
        piece_doc=doc,
        piece_start=start,
        piece_len=piece_len,
        piece_next=piece_next,
        real=real,
        row_count=_sums(ends.astype(np.int64), ptr),
        hashes=_hashes(stamp, stamp_ptr),
    )
    return Packed(blocks, used, next_offset, int((whole > 1).sum()))


def _best_fit(lengths: np.ndarray, packing: Packing) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int, int]:
    """The longest prefix that packs into the budgeted blocks; at least one document, however long."""
    capacity = packing.seq_len
    sums = np.cumsum(lengths)
    count = int(np.searchsorted(sums, packing.budget, side="right"))
    count = max(count, _through_first_document(lengths))
    room = int((-(-lengths[:count] // capacity)).sum()) + 1
    doc, start, length, bin_of = (np.empty(room, np.int64) for _ in range(4))
    k = pack_kernels()
    least = _through_first_document(lengths)
    while True:
        bins = k.best_fit_bins(lengths, count, capacity, doc, start, length, bin_of)
        if bins <= packing.blocks or count <= least:
            break
        count -= 1
    pieces = int(doc[-1])
    order, ptr = np.empty(pieces, np.int64), np.empty(bins + 1, np.int64)
    k.bins_in_document_order(bin_of, doc, pieces, bins, order, ptr)
    return doc[order], start[order], length[order], ptr, count, 0


def _concat(
    lengths: np.ndarray, packing: Packing, offset: int, last: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int, int]:
    """Cut the stream of tokens every seq_len; the documents reach just over the budget unless they are the last."""
    capacity = packing.seq_len
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    count = len(lengths)
    if total - offset > packing.budget:
        count = max(int(np.searchsorted(ends, offset + packing.budget, side="left")) + 1, 1)
        total = int(ends[count - 1])
        last = False
    blocks = -(-(total - offset) // capacity) if last else (total - offset) // capacity
    stop = min(offset + blocks * capacity, total)
    edges = np.unique(
        np.concatenate(
            [np.arange(offset, stop, capacity), ends[:count] - lengths[:count], ends[:count], [offset, stop]]
        )
    )
    edges = edges[(edges >= offset) & (edges <= stop)]
    start, end = edges[:-1], edges[1:]
    doc = np.searchsorted(ends[:count], start, side="right")
    ptr = np.searchsorted(start, offset + np.arange(blocks + 1) * capacity, side="left")
    begin = ends[doc] - lengths[doc]
    if stop == total:
        return doc, start - begin, end - start, ptr.astype(np.int64), count, 0
    used = int(np.searchsorted(ends[:count], stop, side="right"))
    return doc, start - begin, end - start, ptr.astype(np.int64), used, int(stop - (ends[used] - lengths[used]))


def _through_first_document(lengths: np.ndarray) -> int:
    """How many documents it takes to have one with tokens (all of them, if none has)."""
    filled = np.flatnonzero(lengths)
    return int(filled[0]) + 1 if filled.size else len(lengths)


def _shuffled(
    doc: np.ndarray, start: np.ndarray, length: np.ndarray, ptr: np.ndarray, key: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    order = Permutation(len(ptr) - 1, key).slice(0, len(ptr) - 1)
    sizes = (ptr[1:] - ptr[:-1])[order]
    moved = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    pieces = np.repeat(ptr[:-1][order] - moved[:-1], sizes) + np.arange(moved[-1])
    return doc[pieces], start[pieces], length[pieces], moved


def _hashes(stamp: np.ndarray, ptr: np.ndarray) -> tuple[bytes, ...]:
    """`order.content_hash` of every block's tokens, piece lengths and following tokens, laid out by the kernel."""
    whole = stamp.view(np.uint8).data
    borders = (4 * ptr).tolist()
    return tuple(xxhash.xxh3_128_digest(whole[a:b]) for a, b in itertools.pairwise(borders))


def _sums(values: np.ndarray, ptr: np.ndarray) -> np.ndarray:
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    return total[ptr[1:]] - total[ptr[:-1]]
