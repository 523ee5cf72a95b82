"""Ready ways to sample: spans of a text, masked tokens, balanced classes.

    next_span(tokens, 8, 64, rng)                       x, y for a language model: y is x moved by one
    mask_tokens(ids, rng, mask_id=4, vocab_size=1000)   BERT: 15 % of the tokens are to be predicted, −100 elsewhere
    stratified(labels, 32, rng)                         row numbers, every class equally often

All randomness comes from the generator that `sample_batch` is given, so a file that is made again is the same file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.batch import FieldSpec
from headrace.errors import ConfigError

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""The label of a position that the loss ignores."""


def next_span(tokens: np.ndarray, count: int, length: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` random spans of `length` tokens, and the same spans moved by one token: (x, y), int64.

    Args:
        tokens: The text as one array of ids.
        count, length: How many spans, and tokens of a span.
        rng: Generator of the draw.
    """
    import torch

    if len(tokens) <= length:
        raise ConfigError(
            f"a span of {length:,} tokens and the one after it need {length + 1:,}, the text has {len(tokens):,}"
        )
    starts = torch.randint(0, len(tokens) - length, (count,), generator=rng).numpy()
    spans = tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return torch.from_numpy(spans[:, :-1].copy()), torch.from_numpy(spans[:, 1:].copy())


def mask_tokens(
    ids: torch.Tensor,
    rng: torch.Generator,
    *,
    mask_id: int,
    vocab_size: int,
    probability: float = 0.15,
    protected: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """BERT's masking: (inputs, labels). Of the chosen positions 80 % show the mask, 10 % a random token, 10 % their own token.

    Args:
        ids: Tokens, of any shape.
        rng: Generator of the draw.
        mask_id: Id of the mask.
        vocab_size: Random tokens are below this.
        probability: Share of the positions to choose.
        protected: True where a position is never chosen.
    """
    import torch

    chosen = torch.rand(ids.shape, generator=rng) < probability
    if protected is not None:
        chosen &= ~protected
    labels = torch.where(chosen, ids, IGNORED)
    fate = torch.rand(ids.shape, generator=rng)
    others = torch.randint(0, vocab_size, ids.shape, generator=rng, dtype=ids.dtype)
    inputs = torch.where(chosen & (fate < 0.8), mask_id, ids)
    return torch.where(chosen & (fate >= 0.8) & (fate < 0.9), others, inputs), labels


def stratified(labels: np.ndarray, count: int, rng: torch.Generator) -> np.ndarray:
    """`count` row numbers: each class gets count // classes of them, and the remainder goes to random classes.

    Args:
        labels: The class of each row.
        count: How many row numbers.
        rng: Generator of the draw.
    """
    import torch

    classes, inverse = np.unique(labels, return_inverse=True)
    if not len(classes):
        raise ConfigError("stratified sampling needs at least one labelled row")
    order = np.argsort(inverse, kind="stable")
    borders = np.searchsorted(inverse[order], np.arange(len(classes) + 1))
    turn = torch.randperm(len(classes), generator=rng).numpy()
    chosen = turn[np.arange(count) % len(classes)]
    draw = torch.rand(count, generator=rng, dtype=torch.float64).numpy()
    rows = order[borders[chosen] + (draw * (borders[chosen + 1] - borders[chosen])).astype(np.int64)]
    return rows[torch.randperm(count, generator=rng).numpy()]


def token_fields(length: int, labels: tuple[int, ...]) -> list[FieldSpec]:
    """The fields input_ids, attention_mask and labels. `length`: tokens of a sample. `labels`: shape of a sample's labels."""
    return [
        FieldSpec("input_ids", "int64", (length,), "input"),
        FieldSpec("attention_mask", "int8", (length,), "mask"),
        FieldSpec("labels", "int64", labels, "target"),
    ]
