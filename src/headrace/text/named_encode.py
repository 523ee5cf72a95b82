"""Encoding whose errors name the document. A tokenizer itself only says that one text of a batch failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.errors import TokenizerError
from headrace.text.token_batch import TokenBatch
from headrace.text.tokenizer import Tokenizer


def encode_named(tokenizer: Tokenizer, texts: Sequence[str], place: Callable[[int], str]) -> TokenBatch:
    """Return the ids of some texts; TokenizerError if the tokenizer fails or gives impossible ids or offsets.

    Args:
        tokenizer: The tokenizer. Compiled loops trust its arrays, and it may be a user's own, so they are checked here.
        texts: The documents.
        place: Returns the name of document number i, for errors.
    """
    name, size = tokenizer.name, tokenizer.vocab_size
    try:
        batch = tokenizer.encode(texts)
    except (Exception, SystemExit) as error:  # a tokenizer that calls exit() must not end a thread without a word
        for i, text in enumerate(texts):
            try:
                tokenizer.encode([text])
            except (Exception, SystemExit) as alone:
                why = f"it called for an exit, {alone!r}" if isinstance(alone, SystemExit) else alone
                raise TokenizerError(
                    f"tokenizer {name} failed on {place(i)}: {why}. Remove the row, or use another tokenizer."
                ) from error
        raise TokenizerError(f"tokenizer {name} failed on a batch from {place(0)} on: {error}") from error
    ids, offsets = batch.ids, batch.offsets
    if not all(a.dtype == kind and a.flags.c_contiguous for a, kind in ((ids, np.int32), (offsets, np.int64))):
        raise TokenizerError(
            f"tokenizer {name} gave ids of {ids.dtype} and offsets of {offsets.dtype}; int32 and int64 in one piece are needed"
        )
    if len(offsets) != len(texts) + 1 or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise TokenizerError(
            f"tokenizer {name} gave {len(offsets) - 1} documents for {len(texts)} texts, or offsets that do not cover its ids"
        )
    unsigned = ids.view(np.uint32)  # a negative id is a large one
    if len(ids) and int(unsigned.max()) >= size:
        wrong = int(np.argmax(unsigned >= size))
        document = int(np.searchsorted(offsets, wrong, side="right")) - 1
        raise TokenizerError(
            f"tokenizer {name} gave id {int(ids[wrong])} for {place(document)}, outside its vocabulary of {size:,}. Use the tokenizer "
            "that belongs to this vocabulary."
        )
    return batch
