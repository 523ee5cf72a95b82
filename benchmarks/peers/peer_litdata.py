"""litdata: tokens optimised into chunks once, StreamingDataset with a TokensLoader, shuffled, StreamingDataLoader."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import litdata
import numpy as np
import torch
from measure import BATCH, SEQ_LEN, Feed, Task, run

PARTS = 16


def tokens_of(part: int, path: str) -> Iterator[torch.Tensor]:
    tokens = np.fromfile(path, np.uint16)
    tokens = tokens[: len(tokens) // SEQ_LEN * SEQ_LEN].reshape(-1, SEQ_LEN)[part::PARTS]
    yield torch.from_numpy(tokens.reshape(-1).view(np.int16).copy())


def prepare(task: Task) -> None:
    folder = task.prepared / "litdata"
    shutil.rmtree(folder, ignore_errors=True)
    litdata.optimize(
        fn=partial(tokens_of, path=str(task.prepared / "tokens.bin")),
        inputs=list(range(PARTS)),
        output_dir=str(folder),
        chunk_size=SEQ_LEN * 1024,
        item_loader=litdata.TokensLoader(),
        num_workers=1,
    )


def loader_of(folder: Path, workers: int) -> litdata.StreamingDataLoader:
    data = litdata.StreamingDataset(
        str(folder), item_loader=litdata.TokensLoader(block_size=SEQ_LEN), shuffle=True, drop_last=True, seed=1
    )
    extra: dict[str, Any] = {"prefetch_factor": 8, "persistent_workers": True} if workers else {}
    return litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, drop_last=True, **extra)


def open_loader(task: Task, state: Any) -> Feed:
    loader = loader_of(task.prepared / "litdata", task.workers)
    if state is not None:
        loader.load_state_dict(state)

    def batches() -> Iterator[torch.Tensor]:
        while True:
            for batch in loader:
                yield batch.long()

    return Feed(batches=batches(), state=loader.state_dict)


if __name__ == "__main__":
    run(open_loader, versions=("litdata", "torch"), prepare=prepare)
