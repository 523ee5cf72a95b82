"""Encoding whose errors name the document. A tokenizer itself only says that one text of a batch failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.errors import TokenizerError
from headrace.text.token_batch import TokenBatch
from headrace.text.tokenizer import Tokenizer


def encode_named(tokenizer: Tokenizer, texts: Sequence[str], place: Callable[[int], str]) -> TokenBatch:
    """Return the ids of some texts; TokenizerError if the tokenizer fails or gives impossible ids.

    Args:
        tokenizer: The tokenizer.
        texts: The documents.
        place: Returns the name of document number i, for errors.
    """
    name, size = tokenizer.name, tokenizer.vocab_size
    try:
        batch = tokenizer.encode(texts)
    except Exception as error:
        for i, text in enumerate(texts):
            try:
                tokenizer.encode([text])
            except Exception as alone:
                raise TokenizerError(
                    f"tokenizer {name} failed on {place(i)}: {alone}. Remove the row, or use another tokenizer."
                ) from error
        raise TokenizerError(f"tokenizer {name} failed on a batch from {place(0)} on: {error}") from error
    ids, offsets = batch.ids, batch.offsets
    if len(batch) != len(texts) or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise TokenizerError(
            f"tokenizer {name} gave {len(batch)} documents for {len(texts)} texts, or offsets that do not cover its ids"
        )
    wrong = np.flatnonzero((ids < 0) | (ids >= size))
    if wrong.size:
        document = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
        raise TokenizerError(
            f"tokenizer {name} gave id {int(ids[wrong[0]])} for {place(document)}, outside its vocabulary of {size:,}. Use the tokenizer "
            "that belongs to this vocabulary."
        )
    return batch
