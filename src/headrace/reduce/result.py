"""The result of a Gram pass: covariance, correlation, PCA, whitening, ridge; saved to safetensors.

    result = gram(rows)
    result.covariance()  result.correlation()  result.pca(64)  result.whitening()  result.ridge(1e-3)
    result.save("acts.gram.safetensors");  GramResult.load(...)

`gram`, `sums`, `count`, `cross` and `covariance()` have the same bits everywhere. What goes through an eigensolver or a linear
solver (`pca`, `whitening`, `ridge`) is as reproducible as the LAPACK that numpy was built with; signs of components are
fixed, so that equal matrices give equal answers rather than mirrored ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.errors import ConfigError, DataError, FileCorrupt, HeadraceError
from headrace.files import open_container, write_container
from headrace.formats.byte_file import ByteFile
from headrace.order import fingerprint_json
from headrace.reduce.columns import Columns, shift_of_hex
from headrace.reduce.kernel import unpack_upper

_KIND = "headrace-gram"
_NOISE = 256 * 2.0**-53
"""What rounding leaves of a difference that should be zero, in units of what was subtracted: 107 at most in sums of up to 300,000
equal numbers, whose roundings all go one way."""
_MOST_FACTS = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pca:
    """Directions of largest variance."""

    components: np.ndarray
    """[n, width], orthonormal; the entry of largest magnitude of each is positive."""
    variance: np.ndarray
    """[n], largest first."""
    share: np.ndarray
    """[n], of the total variance."""
    mean: np.ndarray

    def transform(self, rows: np.ndarray) -> np.ndarray:
        """Coordinates of rows along the components."""
        return (np.asarray(rows, np.float64) - self.mean) @ self.components.T


@dataclass(frozen=True, slots=True, kw_only=True)
class Ridge:
    """A linear map with an intercept."""

    weights: np.ndarray
    """[width, targets]"""
    intercept: np.ndarray
    """[targets]"""

    def predict(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(rows, np.float64) @ self.weights + self.intercept


@dataclass(frozen=True, kw_only=True)
class GramResult:
    """The sums of one pass over all rows."""

    columns: Columns
    n_rows: int
    full: np.ndarray = field(repr=False)
    """The whole matrix, [k, k]: rows, targets, and the column of ones."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What was reduced: chunk size, data, how rows were stored, how sums were rounded."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """The files that were read, with size and time of writing. Other machines have other times: no part of the fingerprint."""

    @classmethod
    def of(
        cls,
        packed: np.ndarray,
        columns: Columns,
        n_rows: int,
        about: Mapping[str, Any],
        files: Mapping[str, Any] | None = None,
    ) -> GramResult:
        """From the packed sum that a reduction finishes with."""
        full = unpack_upper(packed, columns.k)
        return cls(columns=columns, n_rows=n_rows, full=full, about=dict(about), files=dict(files or {}))

    # --------------------------------------------------------------------------------------------- sums

    @property
    def gram(self) -> np.ndarray:
        """Σ w·x·xᵀ, [width, width]; about the shift where there is one."""
        return self.full[: self.columns.width, : self.columns.width]

    @property
    def count(self) -> float:
        """Σ w: the number of rows where they have no weights."""
        return float(self.full[-1, -1])

    @property
    def sums(self) -> np.ndarray:
        """Σ w·(x − shift), [width]."""
        return self.full[-1, : self.columns.width]

    @property
    def cross(self) -> np.ndarray:
        """Σ w·x·yᵀ, [width, targets]."""
        return self.full[: self.columns.width, self.columns.width : -1]

    @property
    def mean(self) -> np.ndarray:
        """Of the rows themselves: the shift is added back."""
        mean = self.sums / self._positive_count()
        return mean if self.columns.shift is None else mean + self.columns.shift

    @property
    def sha256(self) -> str:
        """Of `gram` as row-major little-endian f64: what two machines compare."""
        return _sha256(self.gram)

    # ------------------------------------------------------------------------------------------ derived

    def covariance(self, ddof: float = 1.0) -> np.ndarray:
        """Σ w·(x − x̄)(x − x̄)ᵀ / (count − ddof)."""
        count = self._positive_count()
        if count <= ddof:
            raise DataError(f"a covariance over {count:g} rows with ddof={ddof:g} would divide by {count - ddof:g}")
        return self._centred(self.gram, self.sums, self.sums) / (count - ddof)

    def correlation(self) -> np.ndarray:
        """The covariance in units of the columns' own deviations; a constant column has none and gives NaN with no warning."""
        covariance = self.covariance()
        deviation = np.sqrt(np.where(self._constant(), np.nan, np.maximum(np.diag(covariance), 0.0)))
        correlation = covariance / deviation[:, None] / deviation[None, :]
        np.fill_diagonal(correlation, np.where(np.isnan(deviation), np.nan, 1.0))
        return np.clip(correlation, -1.0, 1.0)

    def pca(self, n: int | None = None) -> Pca:
        """The n directions of largest variance; all of them unless given."""
        width = self.columns.width
        n = width if n is None else n
        if not 1 <= n <= width:
            raise ConfigError(f"a PCA of {width} columns has 1 to {width} components, {n} were asked for")
        values, vectors = _spectrum(self.covariance())
        total = values.sum()
        return Pca(
            components=vectors[:, :n].T.copy(),
            variance=values[:n].copy(),
            share=values[:n] / total if total > 0 else np.zeros(n),
            mean=self.mean,
        )

    def whitening(self, eps: float = 0.0, kind: str = "zca") -> np.ndarray:
        """W with covariance(W x) = I: `zca` is the symmetric one, `pca` gives whitened components. `eps` is added to variances."""
        if kind not in ("zca", "pca"):
            raise ConfigError(f"whitening is 'zca' or 'pca', got {kind!r}")
        if not 0 <= eps < np.inf:
            raise ConfigError(f"eps must be 0 or a finite number above it, got {eps}")
        covariance = self.covariance()
        values, vectors = _spectrum(covariance)
        noise = np.sqrt(np.diag(self.gram) / (self.count - 1.0))
        if eps == 0 and (self.n_rows <= len(values) or _is_noise(values, vectors[:, -1], noise)):
            raise DataError(
                f"the rows do not span all {len(values)} columns (smallest variance {values[-1]:.3g}), so they cannot be whitened; "
                "give an eps above 0, or fewer columns"
            )
        scaled = vectors / np.sqrt(values + eps)
        return scaled @ vectors.T if kind == "zca" else scaled.T.copy()

    def ridge(self, lam: float) -> Ridge:
        """The weights and intercept that minimise Σ w·|y − xᵀB − b|² + lam·|B|². The intercept is not shrunk."""
        if not self.columns.targets:
            raise ConfigError(
                "ridge needs targets: give them to the pass (targets=…), so that the cross-Gram is summed too"
            )
        if not 0 <= lam < np.inf:
            raise ConfigError(f"lam must be 0 or a finite number above it, got {lam}")
        count, width = self._positive_count(), self.columns.width
        target_sums = self.full[-1, width:-1]
        left = self._centred(self.gram, self.sums, self.sums)
        left[np.diag_indices(width)] += lam
        try:
            if lam == 0 and not self._spans(left):
                raise np.linalg.LinAlgError("singular but for rounding")
            weights = np.linalg.solve(left, self._centred(self.cross, self.sums, target_sums))
        except np.linalg.LinAlgError as error:
            raise DataError("the rows do not span all columns, so no weights are best; give a lam above 0") from error
        return Ridge(weights=weights, intercept=target_sums / count - self.mean @ weights)

    def _centred(self, matrix: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return matrix - np.outer(left, right) / self._positive_count()

    def _constant(self) -> np.ndarray:
        """Which columns do not vary: what is left of their squares about the mean is what rounding leaves of nothing."""
        squares = np.diag(self.gram)
        return np.diag(self._centred(self.gram, self.sums, self.sums)) <= _NOISE * squares

    def _spans(self, centred: np.ndarray) -> bool:
        """Whether the rows span all columns, in units of the columns' own deviations: scales do not matter to a solver."""
        if self.n_rows <= len(centred) or self._constant().any():
            return False
        deviation = np.sqrt(np.diag(centred))
        values, vectors = _spectrum(centred / deviation[:, None] / deviation[None, :])
        return not _is_noise(values, vectors[:, -1], np.sqrt(np.diag(self.gram)) / deviation)

    def _positive_count(self) -> float:
        if not self.count > 0:
            raise DataError("there are no rows (or all weights are 0): nothing can be averaged")
        return self.count

    # --------------------------------------------------------------------------------------------- disk

    def to_dict(self) -> dict[str, Any]:
        """What it is, without its numbers."""
        return {
            "kind": _KIND, "version": 1, "n_rows": self.n_rows, "count": self.count, "columns": self.columns.to_dict(),
            "sha256": self.sha256, "full_sha256": _sha256(self.full), "about": dict(self.about),
        }  # fmt: skip

    @property
    def fingerprint(self) -> str:
        """16 hex digits over everything it was made of, and all of its sums."""
        return fingerprint_json(self.to_dict())

    def save(self, path: str | Path, *, replace: bool = False) -> Path:
        """Write one checked safetensors file with the facts in its metadata. A file that is there is refused unless `replace`."""
        path, facts = Path(path), self.to_dict()
        facts |= {"fingerprint": self.fingerprint} | ({"files": dict(self.files)} if self.files else {})
        arrays = {
            "gram": self.gram,
            "sums": self.sums,
            "mean": self.mean if self.count > 0 else self.sums,
            "full": self.full,
        }
        if self.columns.targets:
            arrays["cross"] = self.cross
        try:
            write_container(path, arrays, facts, replace=replace)
        except FileExistsError:
            raise ConfigError(f"{path} exists: give another name, or replace it on purpose") from None
        return path

    @classmethod
    def load(cls, path: str | Path) -> GramResult:
        """A saved result, verified."""
        container = open_container(Path(path))
        facts = container.meta
        try:
            if facts["kind"] != _KIND or facts["version"] != 1:
                raise ValueError("another kind or version")
            result = cls(
                columns=msgspec.convert(facts["columns"], Columns, dec_hook=shift_of_hex),
                n_rows=facts["n_rows"],
                full=container.arrays["full"],
                about=facts["about"],
                files=dict(facts.get("files", {})),
            )
            if result.full.shape != (result.columns.k, result.columns.k):
                raise ValueError("its matrix is not the one it describes")
            found = {name: value for name, value in result.to_dict().items() if name in facts}
            if found["sha256"] != facts["sha256"] or fingerprint_json(found) != facts["fingerprint"]:
                raise ValueError("its matrix is not the one it describes")
        except (KeyError, TypeError, ValueError, AttributeError, HeadraceError) as error:
            raise FileCorrupt(f"{path} is no saved Gram of headrace's: {error}") from error
        return result


def is_result(file: ByteFile) -> bool:
    """Whether the header of a .safetensors file names a saved Gram. The rest of the file is not checked."""
    try:
        length = int.from_bytes(file.read(0, 8), "little")
        if length > _MOST_FACTS:
            return False
        return json.loads(json.loads(file.read(8, length))["__metadata__"]["headrace"])["meta"]["kind"] == _KIND
    except (DataError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _sha256(matrix: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(matrix, "<f8").data).hexdigest()


def _is_noise(values: np.ndarray, smallest: np.ndarray, noise: np.ndarray) -> bool:
    """Whether the last eigenvalue is what rounding leaves of zero: that of the solver, and that of the sums, `noise` a column, along
    the eigenvector."""
    solver = len(values) * 2.0**-52 * values[0]
    return bool(values[-1] <= solver + _NOISE * np.sum((noise * smallest) ** 2))


def _spectrum(covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues, largest first and none below zero, and their vectors with fixed signs."""
    values, vectors = np.linalg.eigh(covariance)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    largest = np.argmax(np.abs(vectors), axis=0)
    signs = np.sign(vectors[largest, np.arange(vectors.shape[1])])
    return values, vectors * np.where(signs == 0, 1.0, signs)
