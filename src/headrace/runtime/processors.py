"""How many processors this process may use, and how many threads to start for it."""

from __future__ import annotations

import os

_MOST_THREADS = 16
"""More threads than this wait for the GIL, which they need between two calls of the encoder."""


def usable_processors() -> int:
    """Return the number of processors in this process's affinity mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tokenizer_threads() -> int:
    """Return how many threads make windows by default: this rank's share of the processors, at least 2 and at most 16."""
    try:
        ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    except ValueError:
        ranks = 1
    return min(max(usable_processors() // ranks, 2), _MOST_THREADS)
