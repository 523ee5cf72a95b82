"""Owner of a group: the rank that holds its state.

    gid ──► mix64 ──► one of 4,096 buckets ──► contiguous ranges of buckets, one a rank

The buckets are fixed for ever, so another number of ranks moves whole buckets and never splits one.
"""

from __future__ import annotations

import numpy as np

from headrace.order.keys import mix64_array

BUCKETS = 4_096


def bucket_of(gids: np.ndarray) -> np.ndarray:
    """The bucket of each gid: 0 to 4,095."""
    return (mix64_array(gids.view(np.uint64)) & np.uint64(BUCKETS - 1)).view(np.int64)


def owner_of(gids: np.ndarray, world_size: int) -> np.ndarray:
    """The rank that owns each gid."""
    return bucket_of(gids) * world_size // BUCKETS
