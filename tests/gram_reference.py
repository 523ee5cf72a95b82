"""What a chunk Gram is, so slowly that it is obviously right.

Two definitions that the compiled kernel is compared with, bit by bit:

    unfused_gram(rows)     f32, f16, bf16 rows: products of two such numbers are exact in f64, so a separate multiply and add
                           rounds exactly where a fused one does. numpy, one outer product a row.
    fused_gram(rows)       f64 rows: every step as an exact fraction, rounded once.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from headrace.reduce.partition import CROSS_CHUNK_BASE
from headrace.reduce.tree import pairwise_sum


def unfused_gram(rows: np.ndarray) -> np.ndarray:
    """pairwise_sum over the rows' outer products, each rounded, then added."""
    wide = rows.astype(np.float64)
    total = pairwise_sum([np.outer(row, row) for row in wide])
    return np.zeros((rows.shape[1], rows.shape[1])) if len(rows) == 0 else np.asarray(total)


def fused_gram(rows: np.ndarray) -> np.ndarray:
    """The same with one rounding for each multiply-add inside 128 rows."""
    k = rows.shape[1]
    gram = np.zeros((k, k))
    for i in range(k):
        for j in range(i, k):
            gram[i, j] = gram[j, i] = _entry(rows[:, i].tolist(), rows[:, j].tolist())
    return gram


def _entry(a: list[float], b: list[float]) -> float:
    blocks = []
    for at in range(0, len(a), CROSS_CHUNK_BASE):
        total = -0.0  # the one number that adding changes nothing of, not even the sign of a zero
        for x, y in zip(a[at : at + CROSS_CHUNK_BASE], b[at : at + CROSS_CHUNK_BASE], strict=True):
            total = _fused(x, y, total)
        blocks.append(total)
    return _cascade(blocks)


def _cascade(blocks: list[float]) -> float:
    """pairwise_sum over rows is pairwise with base 1 over blocks of 128."""
    if not blocks:
        return 0.0
    if len(blocks) == 1:
        return blocks[0]
    half = 1
    while half * 2 < len(blocks):
        half *= 2
    return _cascade(blocks[:half]) + _cascade(blocks[half:])


def _fused(x: float, y: float, z: float) -> float:
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact:
        try:
            return float(exact)
        except OverflowError:
            return math.inf if exact > 0 else -math.inf
    if Fraction(x) * Fraction(y):  # opposite and equal: +0.0 in round-to-nearest
        return 0.0
    return x * y + z  # a zero product: its sign and that of z decide, and no rounding happens
