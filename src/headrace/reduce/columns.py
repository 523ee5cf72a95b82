"""The columns that are multiplied: rows, targets, and a column of ones; shifted and weighted.

    [ (x − shift)·√w │ y·√w │ √w ]      k = width + targets + 1

The last column gives the row count (or the sum of weights) and the column sums, `y` the cross-Gram, all in one pass and in
one tree. A shift near the mean keeps the digits that an uncentred covariance loses when means are large. Plain rows go to
the kernel as they are stored; with a shift or weights they become f64 first, by one subtraction and one product an entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from headrace.errors import ConfigError, DataError
from headrace.order import fingerprint_json
from headrace.reduce.kernel import as_f64, as_rows, chunk_gram_packed, dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Some rows, with their targets and weights where the pass has them."""

    x: np.ndarray
    y: np.ndarray | None = None
    w: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The design of a pass. Checks itself; equal designs have equal fingerprints."""

    width: int
    """Columns of a row."""
    targets: int = 0
    """Columns of targets."""
    weighted: bool = False
    """Whether every row has a weight."""
    shift: np.ndarray | None = None
    """[width], subtracted from every row."""

    def __post_init__(self) -> None:
        if self.width < 1 or self.targets < 0:
            raise ConfigError(f"rows need at least one column, got width {self.width} and {self.targets} targets")
        if self.shift is not None:
            object.__setattr__(self, "shift", self._checked(self.shift))

    def _checked(self, shift: Any) -> np.ndarray:
        expected = f"a shift is {self.width} finite numbers, one a column; got"
        try:
            given = as_given(shift, "a shift")
        except DataError as error:
            raise ConfigError(str(error)) from None
        if given.dtype.kind not in "fiu":
            raise ConfigError(f"{expected} {given.dtype}")
        if given.shape != (self.width,):
            raise ConfigError(f"{expected} shape {given.shape}")
        wide = np.array(_wide(given, "a shift"))  # it is subtracted from every row: not the caller's to change
        if not np.isfinite(wide).all():
            bad = int(np.argmin(np.isfinite(wide)))
            raise ConfigError(f"{expected} {wide[bad]} for column {bad}")
        return wide

    @property
    def k(self) -> int:
        """Columns of the matrix that is reduced."""
        return self.width + self.targets + 1

    @property
    def fingerprint(self) -> str:
        return fingerprint_json(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self, enc_hook=hex_of_shift)

    def gram(self, batch: RowBatch, threads: int = 1) -> np.ndarray:
        """The packed Gram of one chunk under this design."""
        x, y, w = batch.x, batch.y, batch.w
        n = len(x)
        if x.ndim != 2 or x.shape[1] != self.width:
            raise DataError(f"rows of {self.width} columns are expected, got an array of shape {x.shape}")
        if (y is not None) != bool(self.targets) or (y is not None and y.shape != (n, self.targets)):
            raise DataError(f"{n} rows of {self.targets} targets are expected, got {None if y is None else y.shape}")
        if (w is not None) != self.weighted or (w is not None and w.shape != (n,)):
            raise DataError(
                f"{n if self.weighted else 'no'} weights are expected, got {None if w is None else w.shape}"
            )
        extra = np.empty((n, self.targets + 1))
        extra[:, -1] = 1.0
        if y is not None:
            extra[:, :-1] = _wide(y, "targets")
        if self.shift is None and w is None:
            return chunk_gram_packed(x, extra, threads=threads)
        dtype_name(x.dtype)
        wide = np.array(_wide(x, "rows"))
        if self.shift is not None:
            wide -= self.shift
        if w is not None:
            w = _wide(w, "weights")
            if not (np.isfinite(w) & (w >= 0)).all():
                bad = int(np.flatnonzero(~(np.isfinite(w) & (w >= 0)))[0])
                raise DataError(f"weights must be finite and not negative, got {w[bad]} at row {bad} of the chunk")
            root = np.sqrt(w)[:, None]
            wide *= root
            extra *= root
        return chunk_gram_packed(wide, extra, threads=threads)


def hex_of_shift(shift: np.ndarray) -> list[str]:
    """The exact numbers of a shift, as JSON. For `msgspec.to_builtins`."""
    return [float(number).hex() for number in shift]


def shift_of_hex(_: type, numbers: list[str]) -> np.ndarray:
    """The other way, for `msgspec.convert`."""
    return np.array([float.fromhex(number) for number in numbers])


def as_given(value: Any, what: str) -> np.ndarray:
    """What a user gave, as an array. uint16 is refused: it carries bfloat16 inside, and whole numbers would be taken for it."""
    array = as_rows(value)
    if array.dtype == np.uint16 and str(getattr(value, "dtype", "")) != "torch.bfloat16":
        raise DataError(
            f"{what} of uint16 may be whole numbers or the bits of bfloat16: convert them to float32, or give a torch.bfloat16 tensor"
        )
    return array


def _wide(values: np.ndarray, what: str) -> np.ndarray:
    if values.dtype.kind not in "fiub" or values.dtype.itemsize > 8:
        raise DataError(f"{what} must be real numbers, got {values.dtype}")
    return as_f64(values)
