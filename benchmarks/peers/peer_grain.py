"""Grain: random access, global shuffle, transformations, ConcatThenSplit, worker processes or threads.

option online     lines of jsonl found by offset → groups of texts → encoder → concat and split → batch
option prepared   blocks of 2048 uint16 tokens as ArrayRecord, shuffled → batch
"""

from __future__ import annotations

import json
import mmap
from typing import Any

import grain
import numpy as np
from measure import BATCH, SEQ_LEN, Encode, Feed, Task, encoder, run

GROUP = 64


def mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as handle:
        return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)


class JsonLines:
    """A random-access source over jsonl shards; opened where it is used, so that it pickles."""

    def __init__(self, paths: list[str]) -> None:
        self.paths, self.maps = paths, None
        spans = []
        for n, path in enumerate(paths):
            data = np.fromfile(path, np.uint8)
            ends = np.flatnonzero(data == 10) + 1
            spans.append(np.stack([np.full(len(ends), n), np.append(0, ends[:-1]), ends], axis=1))
        self.spans = np.concatenate(spans)

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> str:
        if self.maps is None:
            self.maps = [mapped(path) for path in self.paths]
        shard, start, end = self.spans[index]
        return json.loads(self.maps[shard][start:end])["text"]

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "spans": self.spans, "maps": None}


class Tokenise(grain.transforms.Map):
    """A group of texts → one run of ids."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.encode: Encode | None = None

    def map(self, texts: list[str]) -> dict[str, np.ndarray]:
        if self.encode is None:
            self.encode = encoder(self.task, threads=1 if self.task.workers else 2)
        return {"input_ids": self.encode(texts).astype(np.int64)}

    def __getstate__(self) -> dict[str, Any]:
        return {"task": self.task, "encode": None}


def online(task: Task) -> grain.IterDataset:
    documents = grain.MapDataset.source(JsonLines([str(p) for p in task.shards])).seed(1).shuffle().repeat()
    groups = documents.batch(GROUP, batch_fn=list).map(Tokenise(task))
    rows = groups.to_iter_dataset(grain.ReadOptions(num_threads=0 if task.workers else 2, prefetch_buffer_size=16))
    blocks = grain.experimental.ConcatThenSplitIterDataset(rows, length_struct={"input_ids": SEQ_LEN})
    return blocks.map(lambda block: block["input_ids"]).batch(BATCH)


def prepared(task: Task) -> grain.IterDataset:
    source = grain.sources.ArrayRecordDataSource(str(task.prepared / "grain.array_record"))
    blocks = grain.MapDataset.source(source).seed(1).shuffle().repeat()
    rows = blocks.map(lambda body: np.frombuffer(body, np.uint16).astype(np.int64)).batch(BATCH)
    return rows.to_iter_dataset(grain.ReadOptions(num_threads=0 if task.workers else 2, prefetch_buffer_size=16))


def prepare(task: Task) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    tokens = np.fromfile(task.prepared / "tokens.bin", np.uint16)
    writer = ArrayRecordWriter(str(task.prepared / "grain.array_record"), "group_size:1,uncompressed")
    for block in tokens[: len(tokens) // SEQ_LEN * SEQ_LEN].reshape(-1, SEQ_LEN):
        writer.write(block.tobytes())
    writer.close()


def open_loader(task: Task, state: Any) -> Feed:
    data = online(task) if task.option == "online" else prepared(task)
    if task.workers:
        data = data.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(task.workers, per_worker_buffer_size=16))
    batches = iter(data)
    if state is not None:
        batches.set_state(state)
    return Feed(batches=batches, state=batches.get_state)


if __name__ == "__main__":
    run(open_loader, versions=("grain",), prepare=prepare)
