"""Tokens in one flat file, read by hand.

    option crops   nanoGPT: rows of [8, 2048] at random offsets of an np.memmap
    option index   Megatron: sample i is a run of tokens over documents, found through a shuffled sample index, collated by
                   torch's DataLoader

`prepare` writes tokens.bin (uint16, EOS after every document) and documents.npy (where each begins) from the corpus; the
other prepared contestants cut their blocks from the same file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from measure import BATCH, SEQ_LEN, Feed, Task, encoder, run
from torch.utils.data import DataLoader, Dataset


def crops(task: Task) -> Iterator[torch.Tensor]:
    tokens = np.memmap(task.prepared / "tokens.bin", np.uint16, mode="r")
    draw = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(len(tokens) - SEQ_LEN, (BATCH,), generator=draw)
        yield torch.stack([torch.from_numpy(tokens[i : i + SEQ_LEN].astype(np.int64)) for i in starts])


class Indexed(Dataset):
    """Sample i begins in document sample_index[i, 0] at its token sample_index[i, 1]; shuffle_index says which i comes when."""

    def __init__(self, task: Task) -> None:
        self.tokens = np.memmap(task.prepared / "tokens.bin", np.uint16, mode="r")
        self.begins = np.load(task.prepared / "documents.npy")
        starts = np.arange(0, self.begins[-1] - SEQ_LEN, SEQ_LEN)
        documents = np.searchsorted(self.begins, starts, side="right") - 1
        self.sample_index = np.stack([documents, starts - self.begins[documents]], axis=1)
        self.shuffle_index = np.random.default_rng(1).permutation(len(starts))

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, index: int) -> torch.Tensor:
        document, offset = self.sample_index[self.shuffle_index[index]]
        parts, wanted = [], SEQ_LEN
        while wanted:
            begin, end = self.begins[document] + offset, self.begins[document + 1]
            part = self.tokens[begin : min(end, begin + wanted)]
            parts.append(part)
            wanted, document, offset = wanted - len(part), document + 1, 0
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def indexed(task: Task) -> Iterator[torch.Tensor]:
    """Epoch after epoch; the workers stay."""
    loader = DataLoader(
        Indexed(task), batch_size=BATCH, drop_last=True, num_workers=task.workers,
        **({"persistent_workers": True, "prefetch_factor": 8} if task.workers else {}),
    )  # fmt: skip
    while True:
        yield from loader


def prepare(task: Task) -> None:
    encode = encoder(task, threads=2)
    runs: list[np.ndarray] = []
    counts: list[int] = []
    for path in task.shards:
        for line in path.open():
            runs.append(encode([json.loads(line)["text"]]).astype(np.uint16))
            counts.append(len(runs[-1]))
    task.prepared.mkdir(parents=True, exist_ok=True)
    np.concatenate(runs).tofile(task.prepared / "tokens.bin")
    np.save(task.prepared / "documents.npy", np.append(0, np.cumsum(counts)))


def open_loader(task: Task, state: Any) -> Feed:
    return Feed(batches=crops(task) if task.option == "crops" else indexed(task))


if __name__ == "__main__":
    run(open_loader, versions=("numpy", "torch"), prepare=prepare)
