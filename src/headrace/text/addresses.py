"""How does a compiled loop reach an array of which it is told only the address?

    carray(pointer(at), (n,), np.int64)      any array
    matrix(at, rows, columns)                int64 [rows, columns]; of no rows if there is none at 0

Whoever passes an address keeps the array alive for as long as the loop may use it. Brings numba: import it in modules of
compiled loops only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["matrix", "pointer"]


def _as_pointer(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


pointer: Any = intrinsic(_as_pointer)


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)
def matrix(address, rows, columns):
    return carray(pointer(address), (rows if address else 0, columns), np.int64)
