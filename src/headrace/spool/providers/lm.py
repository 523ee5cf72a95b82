"""Language-model provider: the batches of a text loader in files.

Part q of P is what rank q of P of an ordinary loader delivers, so the files hold the samples of a run without a spool, and a file's
cursor is that loader's state. What the loader counts for a batch (its digest, tokens by source) travels in the batch's
first row and is 0 in the others. Summed over the ranks of a step it is what a run without a spool counts, so digests, losses and reports are
the same. Each row also holds its source and window, so the provenance record is that of a run without a spool.

`headrace.runs.spool_plan` reads these files for a run.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from headrace.loader import Loader, TextDataset
from headrace.order import Digest
from headrace.spool import FieldSpec, SequentialProvider

COUNTS = ("tokens", "padding", "rows", "samples", "fillers", "skipped")
"""Leading columns of the field `counts`; tokens by source follow."""
ORIGIN = ("source", "opens", "epoch", "position", "offset")
"""Columns of the field `origin`: the row's source, or −1 for a filler. In the first row of a window, `opens` is 1 and the others say where the
window starts; else they are 0."""


class TextProvider(SequentialProvider):
    """Fills a spool with the batches of a text loader."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        data: TextDataset,
        open_loader: Callable[..., Loader],
        *,
        recipe: str,
        segment_ids: bool = False,
        **options: Any,
    ) -> None:
        """Check the settings. Nothing is opened before `open` or `run`.

        Args:
            data_dir: Folder of the spool.
            data: The texts. All loaders of this provider share it.
            open_loader: Opens a loader over `data`; gets options of `Loader`: `dp_rank`, `dp_world_size`, `record`, `segment_ids`. It skips no steps.
            recipe: Fingerprint of what decides the batches. The meta holds it, so that a trainer knows the spool without opening the sources.
            segment_ids: Whether batches have the field `segment_ids`.
            options: Those of `SequentialProvider`.
        """
        super().__init__(data_dir, block_size=data.seq_len, **options)
        self._data, self._open_loader, self._recipe, self._segment_ids = data, open_loader, recipe, segment_ids
        self._loaders: dict[int, Loader] = {}

    def build_meta(self) -> dict[str, Any]:
        data, row = self._data, (self._data.seq_len,)
        tokens = "int32" if data.vocab_size > 1 << 15 else "int16"
        fields = [
            FieldSpec("input_ids", tokens, row, "input"), FieldSpec("labels", tokens, row, "target"),
            FieldSpec("position_ids", "int32", row, "input"), FieldSpec("sample_index", "int64", (), "meta"),
            FieldSpec("row_count", "int32", (), "meta"), FieldSpec("digest", "uint64", (2,), "meta"),
            FieldSpec("counts", "int64", (len(COUNTS) + len(data.names),), "meta"), FieldSpec("origin", "int64", (len(ORIGIN),), "meta"),
        ]  # fmt: skip
        if self._segment_ids:
            fields.append(FieldSpec("segment_ids", "int32", row, "input"))
        weights = data.mean_weights(1)
        return {
            "dataset_name": "+".join(data.names), "training_type": "LM", "vocab_size": data.vocab_size, "batch_schema": fields,
            "split_info": {"train": {"sources": list(data.names), "weights": [float(w) for w in weights]}},
            "recipe": self._recipe, "data": dict(data.fingerprint(0)),
        }  # fmt: skip

    def start_from(self, split: str, part: int, cursor: Mapping[str, Any] | None) -> None:
        # All loaders of a process share its dataset; each has the lanes of its own part.
        if part in self._loaders:
            self._loaders.pop(part).close()
        loader = self._open_loader(dp_rank=part, dp_world_size=self.parts, **self._loader_options())
        if cursor is not None:
            loader.load_state_dict(cursor)
        self._loaders[part] = loader

    def _loader_options(self) -> dict[str, Any]:
        """Options of `Loader` that the batches of this provider need."""
        return {"record": True}

    def next_batch(self, split: str, part: int) -> Mapping[str, Any] | None:
        loader = self._loaders[part]
        batch = next(loader, None) if not loader.ended else None
        if batch is None:
            return None
        rows = len(batch["sample_index"])
        kinds = {f.name: f.dtype for f in self.schema}
        arrays = {name: batch[name].numpy().astype(kind) for name, kind in kinds.items() if name in batch}
        metrics, term = loader.drain_metrics(), Digest(loader.step_digest).value
        digest = np.zeros((rows, 2), np.uint64)
        digest[0] = term >> 64, term & (1 << 64) - 1
        keys = [f"data/{name}" for name in COUNTS] + [f"data/source_tokens/{name}" for name in self._data.names]
        counts = np.zeros((rows, len(keys)), np.int64)
        counts[0] = [metrics.get(key, 0) for key in keys]
        origin = _origin(loader.drain_flight() or {}, batch["sample_index"].numpy())
        return {**arrays, "digest": digest, "counts": counts, "origin": origin}

    def cursor(self, split: str, part: int) -> Mapping[str, Any]:
        return self._loaders[part].state_dict()

    def on_stop(self) -> None:
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()


def _origin(line: Mapping[str, Any], samples: np.ndarray) -> np.ndarray:
    """The flight record of one batch, row by row."""
    origin = np.zeros((len(samples), len(ORIGIN)), np.int64)
    origin[:, 0] = np.frombuffer(base64.b64decode(line["picks"]), "<i2")
    for sample, _, source, *start in line["opened"]:
        origin[np.searchsorted(samples, sample)] = (source, 1, *start)
    return origin
