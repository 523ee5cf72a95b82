"""Ready ways to sample: spans of a text, masked tokens, balanced classes; and providers that use them.

    next_span(tokens, 8, 64, rng)                       x, y for a language model: y is x moved by one
    mask_tokens(ids, rng, mask_id=4, vocab_size=1000)   BERT: 15 % of the tokens are to be predicted, −100 elsewhere
    stratified(labels, 32, rng)                         row numbers, every class equally often

All randomness comes from the generator that `sample_batch` is given, so a file that is made again is the same file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.batch import FieldSpec
from headrace.errors import ConfigError
from headrace.order import content_hash
from headrace.spool.provider import DataProviderBase

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


class _OverArrays(DataProviderBase):
    """A provider whose data are arrays in memory, by split."""

    training_type = ""

    def __init__(self, *args: Any, dataset_name: str, **more: Any) -> None:
        super().__init__(*args, **more)
        self.dataset_name = dataset_name

    def _meta_of(
        self, arrays: Mapping[str, tuple[np.ndarray, ...]], unit: str, fields: list[FieldSpec], **more: Any
    ) -> dict[str, Any]:
        """A meta with the size of every split in `unit`s and its fingerprint, so that a provider of other data is refused."""
        splits = {
            split: {unit: len(held[0]), "fingerprint": content_hash(*map(np.ascontiguousarray, held)).hex()}
            for split, held in arrays.items()
        }
        about = {"dataset_name": self.dataset_name, "training_type": self.training_type}
        return {**about, "batch_schema": fields, **more, "split_info": splits}


class NextTokenProvider(_OverArrays):
    """Random spans of a token array: x and y for a language model."""

    training_type = "LM"

    def __init__(self, *args: Any, tokens: Mapping[str, np.ndarray], vocab_size: int, **more: Any) -> None:
        """As `DataProviderBase`. `tokens`: one array of ids for each split. `vocab_size`: for the meta."""
        super().__init__(*args, **more)
        self.tokens, self.vocab_size = tokens, vocab_size

    @property
    def _length(self) -> int:
        if self.block_size is None:
            raise ConfigError(f"{type(self).__name__}: block_size is missing; it says how many tokens a sample has")
        return self.block_size

    def build_meta(self) -> dict[str, Any]:
        shape = (self._length,)
        fields = [FieldSpec("x", "int64", shape, "input"), FieldSpec("y", "int64", shape, "target")]
        return self._token_meta(fields)

    def _token_meta(self, fields: list[FieldSpec], **more: Any) -> dict[str, Any]:
        arrays = {split: (tokens,) for split, tokens in self.tokens.items()}
        return self._meta_of(arrays, "tokens", fields, vocab_size=self.vocab_size, **more)

    def sample_batch(self, split: str, rng: torch.Generator) -> Mapping[str, torch.Tensor]:
        x, y = next_span(self.tokens[split], self.batch_size, self._length, rng)
        return {"x": x, "y": y}


class MLMProvider(NextTokenProvider):
    """Random spans with 15 % of the tokens to predict: input_ids, attention_mask, labels."""

    training_type = "MLM"

    def __init__(
        self,
        *args: Any,
        mask_token_id: int,
        pad_token_id: int | None = None,
        special_ids: Sequence[int] = (),
        probability: float = 0.15,
        **more: Any,
    ) -> None:
        """As `NextTokenProvider`.

        Args:
            mask_token_id: Id of the mask.
            pad_token_id: Id of padding, which is never masked and has no attention.
            special_ids: Further ids that are never masked.
            probability: Share of the tokens to predict.
        """
        super().__init__(*args, **more)
        if not 0 < probability < 1:
            raise ConfigError(f"MLMProvider: probability is {probability!r}, expected a share between 0 and 1")
        self.mask_token_id, self.pad_token_id, self.probability = mask_token_id, pad_token_id, probability
        self.special_ids = (*special_ids, *(() if pad_token_id is None else (pad_token_id,)))

    def build_meta(self) -> dict[str, Any]:
        ids = {"mask_token_id": self.mask_token_id, "pad_token_id": self.pad_token_id}
        fields = token_fields(self._length, (self._length,))
        return self._token_meta(fields, **ids, mask_probability=self.probability)

    def sample_batch(self, split: str, rng: torch.Generator) -> Mapping[str, torch.Tensor]:
        import torch

        ids, _ = next_span(self.tokens[split], self.batch_size, self._length, rng)
        protected = torch.isin(ids, torch.tensor(self.special_ids, dtype=torch.int64))
        masking = {"mask_id": self.mask_token_id, "vocab_size": self.vocab_size, "probability": self.probability}
        inputs, labels = mask_tokens(ids, rng, **masking, protected=protected)
        attended = torch.ones_like(ids) if self.pad_token_id is None else (ids != self.pad_token_id)
        return {"input_ids": inputs, "attention_mask": attended.to(torch.int8), "labels": labels}


class ClassificationProvider(_OverArrays):
    """Labelled sequences, every class equally often: one label for each sample, or for each token."""

    def __init__(
        self,
        *args: Any,
        examples: Mapping[str, tuple[np.ndarray, np.ndarray]],
        classes: int,
        vocab_size: int | None = None,
        pad_token_id: int = 0,
        label_map: Mapping[str, int] | None = None,
        **more: Any,
    ) -> None:
        """As `DataProviderBase`.

        Args:
            examples: For each split (ids [n, block_size], labels [n] or [n, block_size]). Labels of −100 are ignored.
            classes: Number of classes.
            vocab_size, label_map: For the meta.
            pad_token_id: Id of padding, which has no attention.
        """
        super().__init__(*args, **more)
        shapes = {labels.ndim for _, labels in examples.values()}
        if len(shapes) != 1 or shapes - {1, 2}:
            raise ConfigError(
                "ClassificationProvider: labels have one number a sample or one a token, the same in all splits"
            )
        self.training_type = "CLASSIFICATION" if shapes == {1} else "TOKEN_CLASSIFICATION"
        for split, (ids, labels) in examples.items():
            fits = labels.shape == (ids.shape if shapes == {2} else ids.shape[:1])
            if ids.ndim != 2 or not len(ids) or not fits:
                raise ConfigError(
                    f"ClassificationProvider: {split} has ids {list(ids.shape)} and labels {list(labels.shape)}, which do not fit"
                )
            if labels.max() >= classes or ((labels < 0) & (labels != IGNORED)).any():
                raise ConfigError(
                    f"ClassificationProvider: {split} has labels from {labels.min()} to {labels.max()}; there are {classes} classes"
                )
        self.examples, self.classes, self.vocab_size = examples, classes, vocab_size
        self.pad_token_id, self.label_map = pad_token_id, dict(label_map or {})
        # A sequence with a label for each token counts for its rarest class.
        self._strata = {split: _strata(labels) for split, (_, labels) in examples.items()}

    def build_meta(self) -> dict[str, Any]:
        length = next(iter(self.examples.values()))[0].shape[1]
        if self.block_size not in (None, length):
            raise ConfigError(
                f"ClassificationProvider: block_size is {self.block_size}, the sequences have {length} tokens"
            )
        fields = token_fields(length, (length,) if self.training_type == "TOKEN_CLASSIFICATION" else ())
        sizes = {"block_size": length, "target_size": self.target_size or self.classes}
        if self.vocab_size is not None:
            sizes["vocab_size"] = self.vocab_size
        named = {"pad_token_id": self.pad_token_id, "label_map": self.label_map}
        return self._meta_of(self.examples, "samples", fields, **sizes, **named)

    def sample_batch(self, split: str, rng: torch.Generator) -> Mapping[str, Any]:
        ids, labels = self.examples[split]
        rows = stratified(self._strata[split], self.batch_size, rng)
        chosen = ids[rows].astype(np.int64)
        attended = (chosen != self.pad_token_id).astype(np.int8)
        return {"input_ids": chosen, "attention_mask": attended, "labels": labels[rows].astype(np.int64)}


def _strata(labels: np.ndarray) -> np.ndarray:
    if labels.ndim == 1:
        return labels
    classes, counts = np.unique(labels[labels != IGNORED], return_counts=True)
    rarest_first = classes[np.argsort(counts, kind="stable")]
    strata = np.full(len(labels), IGNORED, np.int64)
    for name in rarest_first[::-1]:
        strata[(labels == name).any(axis=1)] = name
    return strata
