"""The compiled loops of a Gram: pack rows, multiply tiles, cascade.

    rows ──pack──► panels of NR columns ──► tiles of MR x NR in registers, 128 rows each ──► cascade

A tile is multiplied by an intrinsic that writes the vector code itself: `llvm.fma` on vectors of VW doubles, every
accumulator starting at −0.0 (adding to which changes nothing, not even the sign of a zero) and taking rows in order. So neither
the compiler nor the processor decides where a sum is rounded; tile shapes, vector widths and threads decide who computes an
entry, never how. On a processor without fused multiply-add LLVM calls C's `fma`: slow, and the same bits.

Blocks of 128 rows become nodes of a binary cascade: within a macro tile that stays in the second-level cache first (partial
sums never leave it), then over superblocks of rows. Only the upper triangle is computed.

Imported through `headrace.reduce.kernel` only, because it needs llvmlite.
"""

from __future__ import annotations

import os
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from headrace.runtime.compiled import Intrinsic, kernel

BLOCK = 128
"""Rows of one left fold."""


def _shape() -> tuple[int, int, int]:
    """(MR, NR, VW). 4 x 8 in vectors of four reaches the multiply-add limit of AVX2 (50 GFLOP/s where a 4 x 12 tile reaches 49
    and OpenBLAS 32 to 40) and wastes least at the diagonal; AVX-512 has the registers for 8 x 16."""
    chosen = os.environ.get("HEADRACE_GRAM_TILE")
    if chosen:
        mr, nr, vw = (int(n) for n in chosen.split("x"))
        return mr, nr, vw
    if os.environ.get("NUMBA_CPU_NAME", "host") != "host" or not llvm.get_host_cpu_features().get("avx512f", False):
        return 4, 8, 4
    return 8, 16, 8


MR, NR, VW = _shape()
NV, SUB, TILE = NR // VW, NR // MR, MR * NR
if NR % VW or NR % MR:
    raise ValueError(f"a tile needs MR and VW to divide NR, got {MR}x{NR}x{VW}")
MACRO = 256 // NR
"""Panels on a side of a macro tile: 256 columns. 64 and 128 are as good to k = 256 and up to a tenth slower beyond."""
UNROLL = 4
_ASKED = 32 * BLOCK
"""Bytes that a tile asks for ahead of need."""

_F64, _I64, _I32 = ir.DoubleType(), ir.IntType(64), ir.IntType(32)
_VEC = ir.VectorType(_F64, VW)


def _constant(n: int) -> ir.Constant:
    return ir.Constant(_I64, n)


def _multiply(builder: ir.IRBuilder, a: Any, b: Any, rows: Any, ahead: Any) -> list[Any]:
    """Emit the loop over rows; the accumulators, MR x NV vectors. `ahead`: where lines begin that are needed soon, 32 bytes a row."""
    from numba.core import cgutils

    bytes_ = ir.IntType(8).as_pointer()
    ask = builder.module.declare_intrinsic(
        "llvm.prefetch", [bytes_], ir.FunctionType(ir.VoidType(), [bytes_, _I32, _I32, _I32])
    )
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_VEC, [_VEC] * 3), f"llvm.fma.v{VW}f64")
    undefined = ir.Constant(_VEC, ir.Undefined)
    everywhere = ir.Constant(ir.VectorType(_I32, VW), [0] * VW)

    def one_row(sums: list[Any], a_row: Any, b_row: Any) -> list[Any]:
        right = []
        for v in range(NV):
            place = builder.bitcast(builder.gep(b_row, [_constant(v * VW)]), _VEC.as_pointer())
            right.append(builder.load(place, align=8))
        sums = list(sums)
        for i in range(MR):
            left = builder.load(builder.gep(a_row, [_constant(i)]))
            left = builder.insert_element(undefined, left, ir.Constant(_I32, 0))
            left = builder.shuffle_vector(left, undefined, everywhere)
            for v in range(NV):
                sums[i * NV + v] = builder.call(fma, [left, right[v], sums[i * NV + v]])
        return sums

    def loop(sums: list[Any], start: Any, end: Any, step: int) -> tuple[Any, list[Any]]:
        before = builder.block
        head, body, done = (builder.append_basic_block(name) for name in ("rows.head", "rows.body", "rows.done"))
        builder.branch(head)
        builder.position_at_end(head)
        row = builder.phi(_I64)
        row.add_incoming(start, before)
        carried = [builder.phi(_VEC) for _ in sums]
        for phi, value in zip(carried, sums, strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", row, end), body, done)
        builder.position_at_end(body)
        offset = builder.mul(row, _constant(NR))
        a_row, b_row = builder.gep(a, [offset]), builder.gep(b, [offset])
        now = list(carried)
        for line in range(0, 32 * step, 64):
            place = builder.add(ahead, builder.add(builder.mul(row, _constant(32)), _constant(line)))
            builder.call(ask, [builder.inttoptr(place, bytes_), *(ir.Constant(_I32, n) for n in (0, 3, 1))])
        for u in range(step):
            now = one_row(now, builder.gep(a_row, [_constant(u * NR)]), builder.gep(b_row, [_constant(u * NR)]))
        row.add_incoming(builder.add(row, _constant(step)), builder.block)
        for phi, value in zip(carried, now, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(done)
        return row, carried

    whole = builder.sub(rows, builder.srem(rows, _constant(UNROLL)))
    row, sums = loop([ir.Constant(_VEC, [ir.Constant(_F64, -0.0)] * VW)] * (MR * NV), _constant(0), whole, UNROLL)
    return loop(sums, row, rows, 1)[1]


def _tile(typingctx, panels, a, b, rows, levels, slot, size, level, ahead):
    """One tile over up to 128 rows, and its carries: levels[level] = levels[level−1] + (… + (levels[0] + tile)), in registers."""

    def codegen(context, builder, signature, arguments):
        held = context.make_array(signature.args[0])(context, builder, arguments[0])
        a, b = builder.gep(held.data, [arguments[1]]), builder.gep(held.data, [arguments[2]])
        sums = _multiply(builder, a, b, arguments[3], arguments[8])
        held = context.make_array(signature.args[4])(context, builder, arguments[4])
        base, size, level = builder.gep(held.data, [arguments[5]]), arguments[6], arguments[7]
        before = builder.block
        head, body, done = (builder.append_basic_block(name) for name in ("carry.head", "carry.body", "carry.done"))
        builder.branch(head)
        builder.position_at_end(head)
        lower = builder.phi(_I64)
        lower.add_incoming(_constant(0), before)
        carried = [builder.phi(_VEC) for _ in sums]
        for phi, value in zip(carried, sums, strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", lower, level), body, done)
        builder.position_at_end(body)
        place = builder.gep(base, [builder.mul(lower, size)])
        for at, phi in enumerate(carried):
            vector = builder.bitcast(builder.gep(place, [_constant(at * VW)]), _VEC.as_pointer())
            phi.add_incoming(builder.fadd(builder.load(vector, align=8), phi), builder.block)
        lower.add_incoming(builder.add(lower, _constant(1)), builder.block)
        builder.branch(head)
        builder.position_at_end(done)
        place = builder.gep(base, [builder.mul(level, size)])
        for at, value in enumerate(carried):
            vector = builder.bitcast(builder.gep(place, [_constant(at * VW)]), _VEC.as_pointer())
            builder.store(value, vector, align=8)
        return context.get_dummy_value()

    from numba.core import types as nb

    whole = nb.int64
    return nb.void(panels, whole, whole, whole, levels, whole, whole, whole, whole), codegen


tile = Intrinsic(_tile, MR, NR, VW)


_WAITS: Any = {"interpretable": False}
"""Rows are millions of multiply-adds: callers wait for the compiler."""
_ROWS = {"float64": "Array(float64, 2, 'C', readonly=True)", "float32": "Array(float32, 2, 'C', readonly=True)"}
_PACK = {name: f"void({rows}, {_ROWS['float64']}, int64, int64, int64, float64[::1])" for name, rows in _ROWS.items()}


@kernel(_PACK["float64"], **_WAITS)
def pack(x, extra, first, count, panels_count, panels):
    """Rows [first, first+count) of [x, extra] into the panels, as f64. Zero right of the last column: those entries are computed and dropped.

    Eight rows at a time: whole lines are read in order and 512 bytes are written in order, where row by row would write one
    line in each of hundreds of places that share a cache set.
    """
    width = x.shape[1]
    columns, whole = width + extra.shape[1], width // NR
    for s in range((count + BLOCK - 1) // BLOCK):
        start, base = first + s * BLOCK, s * panels_count * BLOCK * NR
        rows = min(BLOCK, count - s * BLOCK)
        for r0 in range(0, rows, 8):
            r1 = min(r0 + 8, rows)
            for p in range(whole):
                at = base + p * BLOCK * NR
                for r in range(r0, r1):
                    row = x[start + r]
                    for c in range(NR):
                        panels[at + r * NR + c] = row[p * NR + c]
            for c in range(whole * NR, panels_count * NR):
                at = base + (c // NR) * BLOCK * NR + c % NR
                for r in range(r0, r1):
                    if c < width:
                        panels[at + r * NR] = x[start + r, c]
                    elif c < columns:
                        panels[at + r * NR] = extra[start + r, c - width]
                    else:
                        panels[at + r * NR] = 0.0


_MULTIPLY = {
    name: f"void({rows}, {_ROWS['float64']}, {7 * 'int64, '}float64[::1], float64[::1], float64[::1])"
    for name, rows in _ROWS.items()
}


@kernel(_MULTIPLY["float64"], **_WAITS)
def multiply(x, extra, first, count, columns, i0, i1, j0, j1, panels, levels, out):
    """The sum of one macro tile over `count` rows, put into the packed triangle `out`. The cascade stands in `levels`: after s blocks of
    rows, one level for each bit of s.

    Rows of an empty `x` are in the panels already. Others are packed here, a block at a time: of a matrix of a single macro tile 128 packed
    rows stay in the second-level cache, and the rows that come next are asked for meanwhile.
    """
    panels_count, slices = (columns + NR - 1) // NR, (count + BLOCK - 1) // BLOCK
    size, here, width = MACRO * MACRO * SUB * TILE, panels.ctypes.data, x.shape[1] * x.itemsize
    for s in range(slices):
        base, rows, level = s * panels_count * BLOCK * NR, min(BLOCK, count - s * BLOCK), 0
        coming = coming_end = 0
        if len(x):
            base = 0
            pack(x, extra, first + s * BLOCK, rows, panels_count, panels)
            coming = x.ctypes.data + (first + (s + 1) * BLOCK) * width
            coming_end = min(coming + BLOCK * width, x.ctypes.data + (first + count) * width)
        while (s >> level) & 1:
            level += 1
        for j in range(j0, j1):
            slot = (j - j0) * MACRO * SUB * TILE
            for i in range(i0, min(i1, j + 1)):
                a, b = base + i * BLOCK * NR, base + j * BLOCK * NR
                for sub in range(SUB):
                    ahead = here + 8 * (a + BLOCK * NR) + sub * _ASKED
                    if coming < coming_end:
                        ahead = coming
                        coming += _ASKED
                    tile(panels, a + sub * MR, b, rows, levels, slot, size, level, ahead)
                    slot += TILE
    # What the cascade left, right to left.
    lowest = 0
    while not (slices >> lowest) & 1:
        lowest += 1
    total = levels[lowest * size : (lowest + 1) * size]
    for higher in range(lowest + 1, 63):
        if (slices >> higher) & 1:
            held = levels[higher * size : (higher + 1) * size]
            for e in range(size):
                total[e] = held[e] + total[e]
    for j in range(j0, j1):
        for i in range(i0, min(i1, j + 1)):
            at = ((j - j0) * MACRO + i - i0) * SUB * TILE
            for r in range(min(NR, columns - i * NR)):
                row = i * NR + r
                left, right = max(j * NR, row), min(j * NR + NR, columns)
                start = row * columns - row * (row - 1) // 2 - row
                line, place = total[at + r * NR :], out[start + left : start + right]
                for c in range(right - left):
                    place[c] = line[left - j * NR + c]


pack_of = {"float64": pack, "float32": pack.variant(_PACK["float32"])}
multiply_of = {
    "float64": multiply,
    "float32": multiply.variant(_MULTIPLY["float32"], pack=pack_of["float32"]),
}


def level_size(slices: int) -> int:
    """Doubles that `multiply` needs for its cascade."""
    return max(1, slices.bit_length()) * MACRO * MACRO * SUB * TILE
