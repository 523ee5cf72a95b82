"""Words to guess, over any text source: BERT's batches out of the run's own pipeline.

    [spool]
    task = "mlm"                # headrace provide fills S with input_ids, attention_mask, labels

    consumer = DatasetConsumer("S")
    batch = consumer.get_batch("train")

Blocks are packed, mixed and ordered as for a language model. Of each block 15 % of the tokens are to be guessed (`mask_probability`), −100
elsewhere and on padding. Which ones follows from the seed and from the number of the batch's first sample, so a batch that is made again is
the same. The mask is `mask_id`, or, where the tokenizer has none, the number after its last: then vocab_size in the meta counts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import ConfigError
from headrace.jobs.spooled import TextProvider
from headrace.jobs.wiring import Job
from headrace.loader import TextDataset
from headrace.order import key
from headrace.spool import FieldSpec
from headrace.spool.sampling import mask_tokens

__all__ = ["MaskedTextProvider"]


class MaskedTextProvider(TextProvider):
    """The text pipeline of a config as a producer of masked batches."""

    def __init__(self, job: Job, data: TextDataset, **more: Any) -> None:
        super().__init__(job, data, **more)
        wanted = job.config.spool.mask_id
        if wanted is not None and wanted > data.vocab_size:
            raise ConfigError(
                f"spool.mask_id = {wanted}, the tokenizer's ids end at {data.vocab_size - 1}: give one of them, or leave it out for one more id"
            )
        self.mask_id = data.vocab_size if wanted is None else wanted
        self.vocab_size = max(data.vocab_size, self.mask_id + 1)
        tokenizer = data.tokenizer
        self._special = [
            i for i in (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id, self.mask_id) if i is not None
        ]

    def build_meta(self) -> dict[str, Any]:
        meta, width = super().build_meta(), (self._data.seq_len,)
        fields = [
            FieldSpec("input_ids", "int64", width, "input"), FieldSpec("attention_mask", "int8", width, "mask"),
            FieldSpec("labels", "int64", width, "target"), FieldSpec("sample_index", "int64", (), "meta"),
        ]  # fmt: skip
        return meta | {
            "training_type": "MLM", "vocab_size": self.vocab_size, "mask_token_id": self.mask_id, "pad_token_id": self._data.tokenizer.pad_id,
            "mask_probability": self._job.config.spool.mask_probability, "batch_schema": fields,
        }  # fmt: skip

    def _loader_options(self) -> dict[str, Any]:
        return {"segment_ids": True}

    def next_batch(self, split: str, part: int) -> Mapping[str, Any] | None:
        import torch

        batch = next(self._loaders[part], None) if not self._loaders[part].ended else None
        if batch is None:
            return None
        ids, samples, padding = batch["input_ids"], batch["sample_index"], batch["segment_ids"] == 0
        rng = torch.Generator().manual_seed(
            key("spool.mask", seed=self._job.config.run.seed, sample=int(samples[0])) >> 1
        )
        inputs, labels = mask_tokens(
            ids, rng, mask_id=self.mask_id, vocab_size=self._data.vocab_size, probability=self._job.config.spool.mask_probability,
            protected=padding | torch.isin(ids, torch.tensor(self._special)),
        )  # fmt: skip
        return {
            "input_ids": inputs,
            "attention_mask": (~padding).to(torch.int8),
            "labels": labels,
            "sample_index": samples,
        }
