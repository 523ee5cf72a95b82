"""Estimates of a source's size from a few of its chunks: tokens of one epoch, median length, first document.

Tokens are estimated per byte of a chunk, because the bytes of every chunk are known: documents that differ in length do no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.text import Packing, Tokenizer

SAMPLED_CHUNKS = 16
_CHARACTERS = 48 << 10
"""Characters that are encoded of a chunk."""
_PIECE = 8 << 10
"""Characters that are encoded of one document; of a longer document they come from its middle."""
_SHOWN = 200
"""Characters of the first document that are kept."""


@dataclass(frozen=True, slots=True)
class SourceEstimate:
    """What a few chunks say about a source."""

    tokens: int
    """Tokens of one epoch, with BOS and EOS."""
    median_tokens: int
    """Tokens of the middle one of the documents in those chunks, ordered by length; empty documents are left out."""
    first_document: str
    """The beginning of the first document that is not empty, of the chunks that were read."""


def estimate_source(
    chunk_rows: np.ndarray,
    chunk_bytes: np.ndarray,
    read: Callable[[int], Sequence[str | None]],
    tokenizer: Tokenizer,
    packing: Packing,
    *,
    sample_chunks: int = SAMPLED_CHUNKS,
) -> SourceEstimate:
    """Estimate a source from chunks spread evenly over it.

    Args:
        chunk_rows: Rows of each chunk that count.
        chunk_bytes: Bytes of each chunk.
        read: The texts of a chunk's rows.
        tokenizer: Encodes the texts.
        packing: Says what BOS and EOS add.
        sample_chunks: How many chunks are read at most.
    """
    filled = np.flatnonzero(chunk_rows)
    picks = (
        filled[np.unique(np.linspace(0, filled.size - 1, sample_chunks).round().astype(np.int64))]
        if filled.size
        else filled
    )
    sizes = chunk_bytes + chunk_rows  # a chunk of empty rows has a size too
    lengths: list[float] = []
    first, read_bytes, tokens = "", 0, 0.0
    for chunk in picks.tolist():
        texts = [text for text in read(chunk)[: int(chunk_rows[chunk])] if text]
        read_bytes += int(sizes[chunk])
        if texts:
            first = first or texts[0][:_SHOWN]
            rate = _tokens_per_character(texts, tokenizer)
            estimated = np.array([len(text) for text in texts], np.float64) * rate + packing.extra
            lengths += estimated.tolist()
            tokens += float(estimated.sum())
    total = tokens / read_bytes * int(sizes[filled].sum()) if read_bytes else 0.0
    return SourceEstimate(round(total), round(float(np.median(lengths))) if lengths else 0, first)


def _tokens_per_character(texts: Sequence[str], tokenizer: Tokenizer) -> float:
    """Of pieces of documents spread evenly over a chunk."""
    step = max(sum(min(len(text), _PIECE) for text in texts) // _CHARACTERS, 1)
    pieces = [text[max((len(text) - _PIECE) // 2, 0) :][:_PIECE] for text in texts[::step]]
    return len(tokenizer.encode(pieces).ids) / sum(map(len, pieces))
