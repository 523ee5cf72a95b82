"""The ids of several documents, in one flat array."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The ids of n documents: document d is ids[offsets[d]:offsets[d + 1]]."""

    ids: np.ndarray
    """int32."""
    offsets: np.ndarray
    """int64, one more than documents."""

    @classmethod
    def of_counts(cls, ids: np.ndarray, counts: Iterable[int]) -> TokenBatch:
        """Make a batch of the joined ids of documents that have `counts` ids each."""
        return cls(ids, np.array(list(itertools.accumulate(counts, initial=0)), np.int64))

    def counts(self) -> np.ndarray:
        """Return how many ids each document has."""
        return self.offsets[1:] - self.offsets[:-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def documents(self, start: int, stop: int | None = None) -> TokenBatch:
        """Return the documents [start, stop), as views."""
        offsets = self.offsets[start : None if stop is None else stop + 1]
        return TokenBatch(self.ids[offsets[0] : offsets[-1]], offsets - offsets[0])


def join_batches(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Copy several batches into one."""
    offsets = np.zeros(sum(map(len, batches)) + 1, np.int64)
    np.cumsum(np.concatenate([b.counts() for b in batches]), out=offsets[1:])
    return TokenBatch(np.concatenate([b.ids for b in batches]), offsets)
