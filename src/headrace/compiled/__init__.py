"""When are compiled loops compiled?

    pack_kernels = CompiledLoops("headrace.text.kernels")
    pack_kernels().lay_blocks(...)          the first call imports the module: numba compiles it, or loads it from its cache

Compiling takes seconds the first time and milliseconds from numba's cache after that, so nothing imports such a module at
the top, and `warm_kernels` does it in a thread while files are opened.
"""

from __future__ import annotations

import importlib
import os
import threading
from types import ModuleType

import numpy as np

from headrace.metrics import Wait

__all__ = ["CompiledLoops", "address", "warm_kernels"]

_lock = threading.Lock()


def address(array: np.ndarray) -> int:
    """Where an array is, for a loop that reaches it so: `array.ctypes.data` in a tenth of the time."""
    return array.__array_interface__["data"][0]


class CompiledLoops:
    """A module of compiled loops, imported when it is first asked for."""

    def __init__(self, module: str) -> None:
        self._name = module
        self._module: ModuleType | None = None

    @property
    def ready(self) -> bool:
        """Whether asking for it takes no time."""
        return self._module is not None

    def __call__(self) -> ModuleType:
        if self._module is None:
            with Wait("kernels.compile"), _lock:
                self._module = importlib.import_module(self._name)
        return self._module


_warming: list[threading.Thread] = []


def _finish_warming() -> None:
    """A process that forks while a thread imports the compiler leaves the import lock held in its child for ever."""
    while _warming:
        _warming.pop().join()


os.register_at_fork(before=_finish_warming)


def warm_kernels(*loops: CompiledLoops) -> threading.Thread:
    """Compile in the background, while files are opened. Not a daemon: a process must not end inside the compiler."""
    thread = threading.Thread(target=lambda: [load() for load in loops], name="headrace-kernels")
    thread.start()
    _warming.append(thread)
    return thread
