"""The ids of several documents, in one flat array."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["TokenBatch", "join_batches"]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The ids of documents 0…n−1: document d is ids[offsets[d]:offsets[d + 1]]."""

    ids: np.ndarray
    """int32."""
    offsets: np.ndarray
    """int64, one more than documents."""

    def counts(self) -> np.ndarray:
        return self.offsets[1:] - self.offsets[:-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def documents(self, start: int, stop: int | None = None) -> TokenBatch:
        """The documents [start, stop) alone, as views."""
        offsets = self.offsets[start : None if stop is None else stop + 1]
        return TokenBatch(self.ids[offsets[0] : offsets[-1]], offsets - offsets[0])

    def copy(self) -> TokenBatch:
        """The same in memory of its own."""
        return TokenBatch(self.ids.copy(), self.offsets)


_scratch = threading.local()


def join_batches(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Several batches as one, in memory that the thread's next join uses again: half a megabyte of fresh memory costs more than to
    copy into it. Who keeps documents of it keeps a copy."""
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return TokenBatch(np.empty(0, np.int32), np.zeros(1, np.int64))
    counts = np.concatenate([b.counts() for b in batches])
    total = sum(len(b.ids) for b in batches)
    room = getattr(_scratch, "room", None)
    if room is None or len(room) < total:
        room = _scratch.room = np.empty(total + total // 4, np.int32)
    ids = np.concatenate([b.ids for b in batches], out=room[:total])
    return TokenBatch(ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]))
