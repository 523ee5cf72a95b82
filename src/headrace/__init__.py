"""headrace: the data plane for training foundation models with PyTorch.

    files ──► sources ──► mix ──► text ──► loader ──────────────────► trainer
              rows       who is   tokens,  batches,       │        ▲
              enter      next     packing  state, digest  └► spool ┘        metrics beside everything
    files of cells ───► mix ──────────────► StreamMixingDataset ────► trainer

    import headrace as hr

    data = hr.TextDataset(["jsonl:web/*.jsonl"], tokenizer="tokenizer.json", seq_len=2048, seed=7)
    loader = hr.Loader(data, global_batch_size=32)
    for batch in loader:
        loss = model(batch["input_ids"], batch["labels"])

Four laws hold everywhere. Order is a pure function of (manifest, seed, index). State is a small cursor of what was
delivered. Every wait has a name and a metric. A file appears whole, durable and checked, or not at all.

Importing this package imports neither torch nor numba: both come when they are first needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headrace.errors import (
    ConfigError,
    CursorMismatch,
    DataChanged,
    DataError,
    DeadlineExceeded,
    EndOfData,
    FileCorrupt,
    HeadraceError,
    StorageError,
    TokenizerError,
    WorkerDied,
)

if TYPE_CHECKING:
    from headrace import ledger, reduce, rollouts, testing
    from headrace.loader import (
        Loader,
        MixChange,
        PreparedDataset,
        PreparedLoader,
        TextDataset,
        merge_states,
    )
    from headrace.loader.data_stats import DataStatsCollector
    from headrace.loader.stream_metrics import extra_metrics
    from headrace.loader.streams import StreamMixingDataset
    from headrace.loader.torch_adapters import TorchDataset, attach_to_trainer
    from headrace.metrics import MetricSpec, Reducer, Reduction, Wait, phase
    from headrace.order import Cursor, Digest
    from headrace.runs.job import Job, load
    from headrace.sources import Source
    from headrace.spool import DataProviderBase, DatasetConsumer
    from headrace.train import global_token_mean

__version__ = "0.3.0"

# Where each public name lives. Looked up when it is first used, so that importing the package stays light.
_HOME = {
    "Job": "runs.job", "load": "runs.job",
    "Loader": "loader", "MixChange": "loader", "PreparedDataset": "loader", "PreparedLoader": "loader", "TextDataset": "loader", "merge_states": "loader",
    "StreamMixingDataset": "loader.streams", "DataStatsCollector": "loader.data_stats", "extra_metrics": "loader.stream_metrics",
    "TorchDataset": "loader.torch_adapters", "attach_to_trainer": "loader.torch_adapters",
    "MetricSpec": "metrics", "Reducer": "metrics", "Reduction": "metrics", "Wait": "metrics", "phase": "metrics",
    "Cursor": "order", "Digest": "order",
    "Source": "sources",
    "DataProviderBase": "spool", "DatasetConsumer": "spool",
    "global_token_mean": "train",
}  # fmt: skip

__all__ = [
    "ConfigError",
    "Cursor",
    "CursorMismatch",
    "DataChanged",
    "DataError",
    "DataProviderBase",
    "DataStatsCollector",
    "DatasetConsumer",
    "DeadlineExceeded",
    "Digest",
    "EndOfData",
    "FileCorrupt",
    "HeadraceError",
    "Job",
    "Loader",
    "MetricSpec",
    "MixChange",
    "PreparedDataset",
    "PreparedLoader",
    "Reducer",
    "Reduction",
    "Source",
    "StorageError",
    "StreamMixingDataset",
    "TextDataset",
    "TokenizerError",
    "TorchDataset",
    "Wait",
    "WorkerDied",
    "__version__",
    "attach_to_trainer",
    "extra_metrics",
    "global_token_mean",
    "ledger",
    "load",
    "merge_states",
    "phase",
    "reduce",
    "rollouts",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name in ("ledger", "reduce", "rollouts", "testing"):
        return importlib.import_module(f"headrace.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"headrace.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
