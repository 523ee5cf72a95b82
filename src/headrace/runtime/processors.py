"""How many processors this process may use."""

from __future__ import annotations

import os

__all__ = ["usable_processors"]


def usable_processors() -> int:
    """Return the number of processors in this process's affinity mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
