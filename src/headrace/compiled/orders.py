"""`order.mix64` inside a compiled loop, for modules that are not moved to `headrace.runtime.compiled` yet."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["mixed"]

_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = (np.uint64(n) for n in (27, 30, 31))


@njit("uint64(uint64)", nogil=False, cache=True, error_model="numpy", boundscheck=False)
def mixed(z):
    """`order.mix64`."""
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return z ^ (z >> _S31)
