"""Labelled provider: texts with labels, the classes in turn, from any source that has columns.

    [[source]]
    spec = "jsonl:reviews/*.jsonl"       # {"text": "...", "label": "positive"} a line; label_key names another field
    [spool]
    task = "classify"                    # one label a text; "tag": a list of words and a list of as many labels

    consumer = DatasetConsumer("S")
    batch = consumer.get_batch("train")  # input_ids, attention_mask, labels, sample_index, origin
    batch = consumer.get_batch("val")    # with spool.val_fraction = 0.1: a tenth of each class, never trained on

`labels.py` judges rows, and `examples.py` tokenises them into the cache; after that a sample costs a lookup. The example of sample g follows
from the manifests, the seed and g (mix.strata), so any provider can make any file, and several may join.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from headrace.errors import DataError
from headrace.mix import Strata, held_out
from headrace.order import key
from headrace.spool import DataProviderBase, FieldSpec
from headrace.spool.providers.examples import Examples
from headrace.spool.providers.sampling import IGNORED, token_fields
from headrace.text import Tokenizer


class LabelledTextProvider(DataProviderBase):
    """Fills a spool with labelled rows, the classes in turn."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        examples: Examples,
        tokenizer: Tokenizer,
        *,
        sources: Sequence[str],
        seq_len: int,
        balance: Literal["equal", "natural"] = "equal",
        val_fraction: float = 0.0,
        **options: Any,
    ) -> None:
        """Deal the examples to the splits. Nothing is opened before `open` or `run`.

        Args:
            data_dir: Folder of the spool.
            examples: The labelled rows.
            tokenizer: The tokenizer that made their ids.
            sources: Names of the sources, for the meta.
            seq_len: Tokens of a row; shorter examples are padded.
            balance: "equal": every class comes up equally often. "natural": as often as it occurs.
            val_fraction: The share of every class that is kept out of training and read as split `val`.
            options: Those of `DataProviderBase`.
        """
        super().__init__(data_dir, block_size=seq_len, **options)
        self.examples, self._tokenizer, self._sources, self._seq_len = examples, tokenizer, tuple(sources), seq_len
        self._balance, self._val_fraction = balance, val_fraction
        strata = examples.strata
        drawn = np.flatnonzero(strata != IGNORED)  # examples that have a label
        if not len(drawn):
            raise DataError("no row of the sources has a label. Check label_key")
        kept = held_out(strata[drawn], val_fraction, key=key("spool.val", seed=self.seed))
        self._drawn = {"train": drawn[~kept], "val": drawn[kept]}
        self._plan = {"train": Strata(strata[drawn[~kept]], key=key("spool.strata", seed=self.seed), balance=balance)}
        if val_fraction:
            if not kept.any():
                raise DataError(
                    f"spool.val_fraction = {val_fraction:g} leaves nothing to validate on: no class has a second row. Give more rows, or leave it out"
                )
            # Every row once, whatever `balance` is: a pass over all of them measures the data as it is.
            self._plan["val"] = Strata(
                strata[drawn[kept]], key=key("spool.strata.val", seed=self.seed), balance="natural"
            )
            self.val_files = -(-int(kept.sum()) // self.rows_per_file)
            alone = np.setdiff1d(np.unique(strata[drawn]), np.unique(strata[drawn[kept]]))
            names = ", ".join(self.examples.names[int(i)] for i in alone[:8])
            self._notify(
                f"{int(kept.sum()):,} examples are held out as split val"
                + (f"; none of {names}, which have one row" if names else "")
            )

        self.splits = tuple(self._plan)

    def build_meta(self) -> dict[str, Any]:
        examples, names, tag = self.examples, list(self._sources), self.examples.tagged
        fields = [
            *token_fields(self._seq_len, (self._seq_len,) if tag else ()),
            FieldSpec("sample_index", "int64", (), "meta"),
            FieldSpec("origin", "int64", (2,), "meta"),
        ]
        return {
            "dataset_name": "+".join(names), "training_type": "TOKEN_CLASSIFICATION" if tag else "CLASSIFICATION",
            "vocab_size": self._tokenizer.vocab_size, "target_size": len(examples.names), "pad_token_id": self._pad, "batch_schema": fields,
            "label_map": {name: i for i, name in enumerate(examples.names)}, "balance": self._balance, "val_fraction": self._val_fraction,
            "split_info": {
                "train": {"sources": names, "samples": len(self._drawn["train"]), "left_out": examples.left_out, "fingerprint": examples.fingerprint},
                "val": {"samples": len(self._drawn["val"])},
            },
        }  # fmt: skip

    def rows_of(self, split: str, seq: int) -> int:
        if split != "val":
            return self.rows_per_file
        return max(0, min(self.rows_per_file, len(self._drawn["val"]) - seq * self.rows_per_file))

    @property
    def _pad(self) -> int:
        return 0 if self._tokenizer.pad_id is None else self._tokenizer.pad_id

    def batches_of(self, split: str, seq: int, rng: Any) -> Iterator[Mapping[str, Any]]:
        """The batches of file `seq`: a function of the examples, the seed and the samples' numbers alone."""
        begin = seq * self.rows_per_file
        end = begin + self.rows_of(split, seq)
        for first in range(begin, end, self.batch_size):
            yield self._batch(split, first, min(self.batch_size, end - first))

    def _batch(self, split: str, first: int, count: int) -> dict[str, np.ndarray]:
        examples, places = self.examples, np.arange(self._seq_len)
        chosen = self._drawn[split][self._plan[split].rows(first, count)]
        starts, lengths = examples.offsets[chosen], examples.offsets[chosen + 1] - examples.offsets[chosen]
        there = places < lengths[:, None]
        at = np.where(there, starts[:, None] + places, 0)
        ids = np.where(there, examples.ids[at], self._pad).astype(np.int64)
        return {
            "input_ids": ids,
            "attention_mask": there.astype(np.int8),
            "labels": np.where(there, examples.labels[at], IGNORED) if examples.tagged else examples.labels[chosen],
            "sample_index": np.arange(first, first + count),
            "origin": examples.origin[chosen],
        }
