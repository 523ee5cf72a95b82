"""The loop one writes around an encoder: read, parse, encode, concatenate, cut. No mixing, no shuffle, no packing, no state.

option loop       everything in the caller's thread; the encoder's own threads are the parallelism
option threads    two threads read, parse and encode pieces of shards, in order, ahead of the caller
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from measure import BATCH, Cutter, Encode, Feed, Task, encoder, run

PIECE = 1 << 20

try:
    import orjson
except ImportError:
    loads = json.loads
else:
    loads = orjson.loads


def pieces(task: Task) -> Iterator[list[bytes]]:
    """About a megabyte of lines at a time, shard after shard, for ever."""
    while True:
        for path in task.shards:
            with path.open("rb") as handle:
                while lines := handle.readlines(PIECE):
                    yield lines


def encoded(lines: list[bytes], encode: Encode) -> np.ndarray:
    return encode([loads(line)["text"] for line in lines])


def arrays(task: Task) -> Iterator[np.ndarray]:
    if task.option == "loop":
        encode = encoder(task, threads=2)
        for lines in pieces(task):
            yield encoded(lines, encode)
    encode = encoder(task, threads=1)
    with ThreadPoolExecutor(2) as pool:
        ahead: deque[Any] = deque()
        for lines in pieces(task):
            ahead.append(pool.submit(encoded, lines, encode))
            if len(ahead) == 4:
                yield ahead.popleft().result()


def batches(task: Task) -> Iterator[torch.Tensor]:
    cutter = Cutter()
    left = np.empty((0, 2048), np.int64)
    for ids in arrays(task):
        blocks = np.concatenate([left, cutter.cut(ids)])
        whole = len(blocks) // BATCH * BATCH
        for at in range(0, whole, BATCH):
            yield torch.from_numpy(blocks[at : at + BATCH])
        left = blocks[whole:]


def open_loader(task: Task, state: object) -> Feed:
    return Feed(batches=batches(task))


if __name__ == "__main__":
    run(open_loader, versions=("torch",))
