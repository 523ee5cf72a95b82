"""Masked-language-model provider: BERT's batches over any text source.

    [spool]
    task = "mlm"                # headrace provide fills S with input_ids, attention_mask, labels

    consumer = DatasetConsumer("S")
    batch = consumer.get_batch("train")

Blocks are packed, mixed and ordered as for a language model. In each block 15 % of the tokens are to be predicted (`mask_probability`); all
other labels are −100. The choice follows from the seed and from the number of the batch's first sample, so a batch that is made again is
the same. The mask is `mask_id` or, if that is not given, the id after the tokenizer's last; vocab_size in the meta counts it then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import ConfigError
from headrace.loader import Loader, TextDataset
from headrace.order import key
from headrace.spool import FieldSpec
from headrace.spool.providers.lm import TextProvider
from headrace.spool.providers.sampling import mask_tokens, token_fields


class MaskedTextProvider(TextProvider):
    """Fills a spool with the masked batches of a text loader."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        data: TextDataset,
        open_loader: Callable[..., Loader],
        *,
        mask_id: int | None = None,
        mask_probability: float = 0.15,
        **options: Any,
    ) -> None:
        """As `TextProvider`.

        Args:
            data_dir, data, open_loader, options: Those of `TextProvider`.
            mask_id: Id of the mask; one after the tokenizer's last unless given.
            mask_probability: Share of the tokens to predict.
        """
        super().__init__(data_dir, data, open_loader, **options)
        if mask_id is not None and mask_id > data.vocab_size:
            raise ConfigError(
                f"spool.mask_id = {mask_id}, the tokenizer's ids end at {data.vocab_size - 1}: give one of them, or leave it out for one more id"
            )
        self.mask_id = data.vocab_size if mask_id is None else mask_id
        self.mask_probability = mask_probability
        self.vocab_size = max(data.vocab_size, self.mask_id + 1)
        tokenizer = data.tokenizer
        self._special = [
            i for i in (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id, self.mask_id) if i is not None
        ]

    def build_meta(self) -> dict[str, Any]:
        length = self._data.seq_len
        fields = [*token_fields(length, (length,)), FieldSpec("sample_index", "int64", (), "meta")]
        return super().build_meta() | {
            "training_type": "MLM", "vocab_size": self.vocab_size, "mask_token_id": self.mask_id, "pad_token_id": self._data.tokenizer.pad_id,
            "mask_probability": self.mask_probability, "batch_schema": fields,
        }  # fmt: skip

    def _loader_options(self) -> dict[str, Any]:
        return {"segment_ids": True}

    def next_batch(self, split: str, part: int) -> Mapping[str, Any] | None:
        import torch

        batch = next(self._loaders[part], None) if not self._loaders[part].ended else None
        if batch is None:
            return None
        ids, samples, padding = batch["input_ids"], batch["sample_index"], batch["segment_ids"] == 0
        rng = torch.Generator().manual_seed(key("spool.mask", seed=self.seed, sample=int(samples[0])) >> 1)
        inputs, labels = mask_tokens(
            ids, rng, mask_id=self.mask_id, vocab_size=self._data.vocab_size, probability=self.mask_probability,
            protected=padding | torch.isin(ids, torch.tensor(self._special)),
        )  # fmt: skip
        return {
            "input_ids": inputs,
            "attention_mask": (~padding).to(torch.int8),
            "labels": labels,
            "sample_index": samples,
        }
