"""torchdata's StatefulDataLoader around the IterableDataset one writes: shards by worker, groups of lines, concat and chunk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from measure import BATCH, Cutter, Feed, Task, encoder, run
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

PIECE = 1 << 18


class Blocks(IterableDataset):
    """Where it stands: (shard, byte) of the piece in hand, blocks of it already given, and the ids held before it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.place: dict[str, Any] = {"shard": 0, "byte": 0, "given": 0, "held": []}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = dict(state)

    def __iter__(self) -> Iterator[np.ndarray]:
        info = get_worker_info()
        paths = self.task.shards[info.id :: info.num_workers] if info else self.task.shards
        encode = encoder(self.task, threads=1 if info else 2)
        place, cutter = self.place, Cutter(self.place["held"])
        while True:
            with paths[place["shard"] % len(paths)].open("rb") as handle:
                handle.seek(place["byte"])
                while lines := handle.readlines(PIECE):
                    blocks = cutter.cut(encode([json.loads(line)["text"] for line in lines]))
                    for n in range(place["given"], len(blocks)):
                        place["given"] = n + 1
                        yield blocks[n]
                    place |= {"byte": handle.tell(), "given": 0, "held": cutter.held.tolist()}
            place |= {"shard": place["shard"] + 1, "byte": 0}


def open_loader(task: Task, state: Any) -> Feed:
    extra = {"prefetch_factor": 4} if task.workers else {}
    loader = StatefulDataLoader(Blocks(task), batch_size=BATCH, num_workers=task.workers, **extra)
    if state is not None:
        loader.load_state_dict(state)
    return Feed(batches=iter(loader), state=loader.state_dict)


if __name__ == "__main__":
    run(open_loader, versions=("torchdata", "torch"))
