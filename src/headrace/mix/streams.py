"""Table of streams: path, rows and modality of each, and how many rows a pick takes.

    table = StreamTable(paths=("atac/0.npz", "rna/0.parquet"), rows=(900, 4000), modalities=("atac", "rna"))
    table.rows_per_pick({"atac": 32, "rna": 64})     -> (32, 64)

A stream is one file that a pool can read; `stream_id` is its index here. Paths are in bytewise order, so that the index
of a stream is the same on every machine. Opens no file: the caller has counted the rows.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from headrace.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StreamTable:
    """The manifest as a plan sees it: one path, one number of rows and one modality a stream."""

    paths: tuple[str, ...]
    rows: tuple[int, ...]
    modalities: tuple[str, ...]

    def __post_init__(self) -> None:
        if not len(self.paths) == len(self.rows) == len(self.modalities):
            raise ValueError(
                f"a table needs as many rows and modalities as paths, got {len(self.paths)} paths, {len(self.rows)} rows "
                f"and {len(self.modalities)} modalities"
            )
        raw = [os.fsencode(path) for path in self.paths]
        if any(a >= b for a, b in itertools.pairwise(raw)):
            raise ValueError("the paths of a table are distinct and in bytewise order; these are not")
        if min(self.rows, default=0) < 0:
            raise ValueError(f"a stream has 0 rows or more, got {min(self.rows)}")

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The modalities that occur, sorted: the layout of every metric that has one value for each."""
        return tuple(sorted(set(self.modalities)))

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """For each stream the place of its modality in `kinds`."""
        place = {kind: i for i, kind in enumerate(self.kinds)}
        return tuple(place[m] for m in self.modalities)

    def rows_per_pick(self, batch_size: Mapping[str, int], ranks: int = 1) -> tuple[int, ...]:
        """Rows that one pick takes from each stream: the batch size of its modality, once for each of `ranks`."""
        missing = [kind for kind in self.kinds if kind not in batch_size]
        if missing:
            raise ConfigError(
                f"batch_size names no size for {', '.join(missing)}; the modalities are {', '.join(self.kinds)}. Give each "
                "of them a number of rows, or one number for all."
            )
        return tuple(batch_size[m] * ranks for m in self.modalities)


def picks_of(rows: int, rows_per_pick: int) -> int:
    """ceil(rows / rows_per_pick): the last pick of a stream may be smaller than the others."""
    return -(-rows // rows_per_pick)


def rank_share(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """The rows of [start, stop) that a rank reads. The shares of all ranks tile it; one may be empty."""
    rows = stop - start
    return start + rows * rank // world_size, start + rows * (rank + 1) // world_size


def dealt_to_lanes(picks: Sequence[int], lanes: int) -> tuple[tuple[int, ...], ...]:
    """The streams of each lane: largest first, each to the lane with the least to do so far. Pure in the manifest.

    Streams without rows go nowhere. With fewer streams than lanes, some lanes have none.
    """
    dealt: list[list[int]] = [[] for _ in range(lanes)]
    load = [(0, lane) for lane in range(lanes)]
    for stream in sorted((s for s, n in enumerate(picks) if n), key=lambda s: (-picks[s], s)):
        done, lane = load[0]
        dealt[lane].append(stream)
        heapq.heapreplace(load, (done + picks[stream], lane))
    return tuple(tuple(sorted(part)) for part in dealt)
