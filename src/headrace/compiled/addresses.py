"""How does a compiled loop reach an array of which it is told only the address?

    carray(pointer(at), (n,), np.int64)      any array
    matrix(at, rows, columns)                int64 [rows, columns]; of no rows if there is none at 0
    byte_at(at), put_byte(at, value)         one byte
    word_at(at), put_word(at, word)          the 8 bytes that begin there, wherever that is; the lowest is the first
    ask_for(at)                              have the line of memory there brought into the cache; nobody waits, and nothing is read
    first_bit(word)                          how many zeros lie below the lowest one of a word that is not 0

Whoever passes an address keeps the array alive for as long as the loop may use it. Brings numba: import it in modules of
compiled loops only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "ask_for",
    "byte_at",
    "first_bit",
    "matrix",
    "pointer",
    "prefetch",
    "put_byte",
    "put_word",
    "word_at",
]

_BYTE, _WORD = ir.IntType(8), ir.IntType(64)


def _as_pointer(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def _byte_at(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.zext(builder.load(builder.inttoptr(arguments[0], _BYTE.as_pointer())), _WORD)

    return types.int64(types.int64), generate


def _put_byte(typing_context, address, value):
    def generate(context, builder, signature, arguments):
        builder.store(builder.trunc(arguments[1], _BYTE), builder.inttoptr(arguments[0], _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _word_at(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], _WORD.as_pointer()), align=1)

    return types.uint64(types.int64), generate


def _put_word(typing_context, address, word):
    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], builder.inttoptr(arguments[0], _WORD.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """What `ask_for` is made of, for other intrinsics."""
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), number, number, number])
    ask = builder.module.declare_intrinsic("llvm.prefetch", [_BYTE.as_pointer()], kind)
    # For reading, to be kept as near as can be, data.
    builder.call(ask, [builder.inttoptr(address, _BYTE.as_pointer()), *(ir.Constant(number, n) for n in (0, 3, 1))])


def _ask_for(typing_context, address):
    def generate(context, builder, signature, arguments):
        prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _first_bit(typing_context, word):
    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


pointer: Any = intrinsic(_as_pointer)
byte_at: Any = intrinsic(_byte_at)
put_byte: Any = intrinsic(_put_byte)
word_at: Any = intrinsic(_word_at)
put_word: Any = intrinsic(_put_word)
first_bit: Any = intrinsic(_first_bit)
ask_for: Any = intrinsic(_ask_for)


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)
def matrix(address, rows, columns):
    return carray(pointer(address), (rows if address else 0, columns), np.int64)
