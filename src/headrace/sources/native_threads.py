"""How many threads do native libraries start in a worker process?"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator

__all__ = ["one_native_thread"]

_NATIVE_THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
_spawning = threading.Lock()


@contextlib.contextmanager
def one_native_thread() -> Generator[None]:
    """Processes started inside have one native thread each: they are the parallelism themselves. Libraries read this when they load.

    The environment is the process's own, so one thread at a time may be in here.
    """
    with _spawning:
        before = {name: os.environ.get(name) for name in _NATIVE_THREADS}
        os.environ.update(dict.fromkeys(_NATIVE_THREADS, "1"))
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
