"""Queue modes: the order in which streams enter the pool.

    permuted      one keyed permutation of all of them
    stratified    permuted within each modality, then merged so that every stretch of the queue has its share of each
    banded        sorted by length into bands as wide as the pool, the bands shuffled: the pool holds streams of a size

Stratified is the default. With a plain permutation, a pool of 4 and 4 modalities of 8 files, one modality was absent from the
pool for a whole run of 1,500 steps. Banded is for heavy-tailed sizes: streams of a band run dry together.

An order is a function of (seed, epoch) and the table: there is no generator, and a cursor holds only a place in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from headrace.order import derive, draws

Queue = Literal["stratified", "permuted", "banded"]
QUEUES: tuple[Queue, ...] = get_args(Queue)


def queue_order(
    streams: Sequence[int], *, kinds: Sequence[int], picks: Sequence[int], queue: Queue, key: int, epoch: int, band: int
) -> list[int]:
    """The streams in the order of one epoch. `kinds` and `picks` are those of all streams, by stream_id."""
    if not streams:
        return []
    ids = np.asarray(streams, dtype=np.int64)
    parent = derive(key, epoch)
    keys = draws(parent, int(ids.max()) + 1)[ids]
    if queue == "permuted":
        return ids[np.lexsort((ids, keys))].tolist()
    if queue == "stratified":
        return ids[np.lexsort((ids, keys, _places(np.asarray(kinds)[ids], keys)))].tolist()
    by_size = np.lexsort((ids, -np.asarray(picks)[ids]))
    bands = np.empty(len(ids), dtype=np.int64)
    bands[by_size] = np.arange(len(ids)) // band
    band_keys = draws(~parent, int(bands.max()) + 1)[bands]
    return ids[np.lexsort((ids, keys, bands, band_keys))].tolist()


def _places(kinds: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """(k + ½) / count for the k-th of `count` streams of its modality, in keyed order."""
    places = np.empty(len(kinds), dtype=np.float64)
    for kind in np.unique(kinds):
        members = np.flatnonzero(kinds == kind)
        ordered = members[np.argsort(keys[members], kind="stable")]
        places[ordered] = (2 * np.arange(len(ordered)) + 1) / (2 * len(ordered))
    return places
