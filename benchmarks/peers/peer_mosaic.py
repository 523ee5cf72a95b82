"""MosaicML Streaming: blocks of tokens as MDS shards, StreamingDataset with its default shuffle, StreamingDataLoader."""

from __future__ import annotations

import importlib.machinery
import shutil
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from measure import BATCH, SEQ_LEN, Feed, Task, run

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    # Streaming imports it for its image datasets, and the usual wheel does not load beside a CPU build of torch.
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules["torchvision.datasets"].VisionDataset = object
    sys.modules["torchvision.transforms.functional"].to_tensor = None

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory


def prepare(task: Task) -> None:
    folder = task.prepared / "mosaic"
    shutil.rmtree(folder, ignore_errors=True)
    tokens = np.fromfile(task.prepared / "tokens.bin", np.uint16)
    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{SEQ_LEN}"}, size_limit=1 << 23) as writer:
        for block in tokens[: len(tokens) // SEQ_LEN * SEQ_LEN].reshape(-1, SEQ_LEN):
            writer.write({"tokens": block})


def collated(rows: list[dict[str, np.ndarray]]) -> torch.Tensor:
    return torch.from_numpy(np.stack([row["tokens"] for row in rows]).astype(np.int64))


def open_loader(task: Task, state: Any) -> Feed:
    clean_stale_shared_memory()
    data = StreamingDataset(local=str(task.prepared / "mosaic"), shuffle=True, shuffle_seed=1, batch_size=BATCH)
    extra: dict[str, Any] = {"prefetch_factor": 8, "persistent_workers": True} if task.workers else {}
    loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=task.workers, collate_fn=collated, **extra)
    if state is not None:
        loader.load_state_dict(state)

    def batches() -> Iterator[torch.Tensor]:
        while True:
            yield from loader

    return Feed(batches=batches(), state=loader.state_dict)


if __name__ == "__main__":
    run(open_loader, versions=("mosaicml-streaming", "torch"), prepare=prepare)
