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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from headrace.compiled import CompiledLoops, address
from headrace.order import content_hash
from headrace.text.token_batch import TokenBatch

__all__ = ["Blocks", "Packed", "Packing", "Unsound", "pack", "pack_kernels"]


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

    @property
    def extra(self) -> int:
        """Tokens that a document gets besides its own."""
        return (self.bos_id is not None) + (self.eos_id is not None)

    def lengths(self, encoded: np.ndarray) -> np.ndarray:
        """Token counts of documents with BOS and EOS; a document without tokens stays empty."""
        return np.where(encoded > 0, encoded + self.extra, 0)

    def total(self, batch: TokenBatch) -> int:
        """Tokens of documents with BOS and EOS; -1: the batch's offsets do not cover its ids."""
        return pack_kernels().total_with(batch.offsets, len(batch.ids), self.extra)


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
    hashes: np.ndarray
    """uint64 [blocks, 2]: the 16 bytes of each block's content hash; what the digest is made of."""

    def __len__(self) -> int:
        return len(self.tokens)

    def content(self, block: int) -> bytes:
        """The content hash of a block, worked out anew."""
        pieces = slice(int(self.piece_ptr[block]), int(self.piece_ptr[block + 1]))
        return content_hash(
            self.tokens[block, : int(self.real[block])], self.piece_len[pieces], self.piece_next[pieces]
        )


class Unsound(NamedTuple):
    """An id outside the vocabulary."""

    document: int
    place: int
    """Of the id in its document."""


class Packed(NamedTuple):
    """What `pack` made, and where the next window begins."""

    blocks: Blocks
    documents: int
    """Documents used up, counted from the first."""
    offset: int
    """Tokens of document number `documents` that are already in a block (concat only)."""
    cut: int
    """Documents that are in more than one piece."""
    empty: int
    """Documents without a token, of those used up."""
    unsound: Unsound | None
    """The first one seen: then the blocks are of no use."""


pack_kernels = CompiledLoops("headrace.text.kernels")
_ANY_ID = np.iinfo(np.int32).max


def pack(
    batches: Sequence[TokenBatch],
    packing: Packing,
    *,
    offset: int = 0,
    last: bool,
    shuffle_key: int | None = None,
    vocabulary: int = _ANY_ID,
) -> Packed:
    """Pack documents from the first on, until the window's budget is used or (`last`) there are no more.

    The offsets of every batch must cover its ids (`Packing.total` tells). `offset` tokens of the first document are already delivered.
    `shuffle_key` orders the finished blocks. One compiled call, and other threads run meanwhile.
    """
    k = pack_kernels()
    parts = np.array([(address(b.ids), address(b.offsets), len(b)) for b in batches], np.int64).reshape(
        -1, k.PART_FIELDS
    )
    *arrays, used, next_offset, cut, empty, unhashed, unsound, place = k.pack_window(
        parts, packing.seq_len, packing.blocks, offset, packing.strategy == "best_fit",
        -1 if packing.bos_id is None else packing.bos_id, -1 if packing.eos_id is None else packing.eos_id, packing.pad_id,
        vocabulary, shuffle_key is not None, shuffle_key or 0, last,
    )  # fmt: skip
    blocks = Blocks(*arrays)
    if unhashed:
        for b in np.flatnonzero(blocks.hashes[:, 0] == 0).tolist():
            blocks.hashes[b] = np.frombuffer(blocks.content(b), np.uint64)
    return Packed(blocks, used, next_offset, cut, empty, None if unsound < 0 else Unsound(unsound, place))
