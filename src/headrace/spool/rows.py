"""The rows of each file that make a batch: arithmetic and array slices, without files, threads or clocks.

Sample g of a split lies in part g mod P, there in row g // P, and belongs to rank g mod W. A batch of size B at position G is the samples
G … G+B−1, whatever P and W are. Of them a rank gets its own, in order.

    file of part 1 of 2     row      0   1   2   3   4   5        P = 2 parts, W = 3 ranks
                            sample   1   3   5   7   9  11
                            rank     1   0   2   1   0   2        rows_of(): rank 0 has rows 1 and 4: (start 1, step 3)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from headrace.batch import OFFSETS, BatchSpec, FieldSpec, numpy_dtype

Rows = Mapping[str, np.ndarray]
"""Arrays by field. A ragged field has its values, and under `<name>_offsets` where each row begins and the last row ends."""
NewArray = Callable[[tuple[int, ...], np.dtype], np.ndarray]


def rows_before(g: int, part: int, parts: int) -> int:
    """Number of samples below g in a part. It is the row of sample g, or of the next sample of the part."""
    return max(0, -(-(g - part) // parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripe:
    """The samples of one rank: g mod world_size = rank."""

    rank: int = 0
    world_size: int = 1

    def rows_of(self, part: int, parts: int, first: int) -> tuple[int, int] | None:
        """(start, step) of the rank's rows in a file that begins at row `first` of its part; None if the part has no rows of the rank."""
        common = math.gcd(parts, self.world_size)
        if (part - self.rank) % common:
            return None
        step = self.world_size // common
        for row in range(step):
            if ((first + row) * parts + part) % self.world_size == self.rank:
                return row, step
        return None

    def places_of(self, part: int, parts: int, begin: int) -> tuple[int, int] | None:
        """(start, step) of a part's rows in the rank's share of a batch that begins at sample `begin`; None if the share has no rows of the part."""
        first = begin + (self.rank - begin) % self.world_size
        for place in range(parts):
            if (first + place * self.world_size) % parts == part:
                return place, math.lcm(parts, self.world_size) // self.world_size
        return None


def slice_rows(schema: BatchSpec, rows: Rows, start: int, stop: int) -> dict[str, np.ndarray]:
    """Rows start … stop−1, as views; only a ragged field's offsets are new."""
    out: dict[str, np.ndarray] = {}
    for field in schema:
        name = field.name
        if field.ragged:
            borders = rows[name + OFFSETS][start : stop + 1]
            out[name] = rows[name][borders[0] : borders[-1]]
            out[name + OFFSETS] = borders - borders[0]
        else:
            out[name] = rows[name][start:stop]
    return out


def gather_rows(
    schema: BatchSpec, rows: Rows, start: int, step: int, new_array: NewArray | None
) -> dict[str, np.ndarray]:
    """Rows start, start + step, … to the end. `new_array`: allocates the memory they are copied to; None: views, except of ragged fields."""
    out: dict[str, np.ndarray] = {}
    for field in schema:
        if field.ragged:
            out |= _ragged(field, _ragged_rows(field, rows)[start::step])
            continue
        found = out[field.name] = rows[field.name][start::step]
        if new_array is not None:
            out[field.name] = new_array(found.shape, found.dtype)
            np.copyto(out[field.name], found)
    return out


def merge_rows(
    schema: BatchSpec, pieces: Iterable[tuple[slice, Rows]], count: int, new_array: NewArray
) -> dict[str, np.ndarray]:
    """`count` rows put together from pieces, each with the slice of the result that it fills. `new_array`: allocates the result."""
    out = {f.name: new_array((count, *f.shape), numpy_dtype(f.dtype)) for f in schema if not f.ragged}
    ragged: dict[str, list[np.ndarray]] = {f.name: [np.empty(0)] * count for f in schema if f.ragged}
    for places, rows in pieces:
        for field in schema:
            if field.ragged:
                ragged[field.name][places] = _ragged_rows(field, rows)
            else:
                out[field.name][places] = rows[field.name]
    for field in schema:
        if field.ragged:
            out |= _ragged(field, ragged[field.name])
    return out


def _ragged_rows(field: FieldSpec, rows: Rows) -> list[np.ndarray]:
    values, borders = rows[field.name], rows[field.name + OFFSETS].tolist()
    return [values[begin:end] for begin, end in itertools.pairwise(borders)]


def _ragged(field: FieldSpec, rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.concatenate(rows) if rows else np.empty(0, numpy_dtype(field.dtype))
    return {field.name: values, field.name + OFFSETS: offsets}
