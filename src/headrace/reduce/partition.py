"""Which rows form a chunk, and which rank computes it.

    partition = CrossNodePartition(k=512, n_rows=10_000_000, chunk_size=4096, n_ranks=64)
    partition.chunk_rows(7)        (28672, 32768)
    partition.owner(7)             7

Chunk j is the rows [j·c, (j+1)·c). Chunks are dealt to ranks in *units*: a unit is one chunk, or with
`span` an aligned run of 128·2^p of them whose sum is one node of the global tree, so that a rank may ship the run as one
partial. Unit u belongs to rank u mod n_ranks. Ranks and spans decide which process computes a chunk and what
is shipped; the sum depends on (k, n_rows, chunk_size) alone.

Pure arithmetic: two participants built from the same fields agree on everything without talking.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from headrace.errors import ConfigError, CursorMismatch, DataError
from headrace.order import fingerprint_json

CROSS_CHUNK_BASE = 128
"""Chunks that are added one after the other before the tree begins; also rows within a chunk."""

ARITHMETIC = "f64, fused multiply-add, pairwise base 128"
"""How a sum is rounded. It stands in every message and checkpoint, so that two ways are never mixed."""

ROW_DTYPES = ("f64", "f32", "f16", "bf16")

MOST_ROWS = (1 << 62) - 1
"""Rows of a pass at most."""


def default_chunk_size(k: int) -> int:
    """Rows a chunk should have: 4k, so that a partial (k²/2 numbers) is an eighth of the rows it stands for; never below
    4,096, where the cost of a message would show."""
    return max(4096, -(-4 * k // CROSS_CHUNK_BASE) * CROSS_CHUNK_BASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossNodePartition:
    """The chunks of one pass and their owners."""

    k: int
    """Columns of a row."""
    n_rows: int
    """Rows of the pass."""
    chunk_size: int
    """Rows of a chunk; the last one may be short."""
    n_ranks: int
    """Workers that chunks are dealt to."""
    span: int = 1
    """Chunks shipped as one partial: 1, or 128·2^p."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be a whole number of at least {least}, got {value!r}"
            for name, value, least in (
                ("k", self.k, 1), ("n_rows", self.n_rows, 0), ("chunk_size", self.chunk_size, 1),
                ("n_ranks", self.n_ranks, 1), ("span", self.span, 1),
            )
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST_ROWS
        ]  # fmt: skip
        if not problems and self.span != 1:
            blocks, rest = divmod(self.span, CROSS_CHUNK_BASE)
            if rest or blocks & (blocks - 1):
                problems = [
                    f"span must be 1 or 128·2^p (128, 256, 512, …), got {self.span}: only such a run of chunks is one node of "
                    "the tree, and shipping another would change the bits"
                ]
        if problems:
            raise ConfigError([f"partition: {p}" for p in problems])

    # ------------------------------------------------------------------------------------------- chunks

    @property
    def n_chunks(self) -> int:
        return -(-self.n_rows // self.chunk_size)

    @property
    def n_units(self) -> int:
        """What is dealt and shipped: chunks, or spans of them."""
        return -(-self.n_chunks // self.span)

    @property
    def entries(self) -> int:
        """Numbers in a partial: the upper triangle with its diagonal."""
        return self.k * (self.k + 1) // 2

    def chunk_rows(self, chunk: int) -> tuple[int, int]:
        """The rows [start, end) of a chunk."""
        if not 0 <= chunk < self.n_chunks:
            raise DataError(f"there is no chunk {chunk}: {self.n_rows:,} rows make {self.n_chunks:,} chunks")
        return chunk * self.chunk_size, min((chunk + 1) * self.chunk_size, self.n_rows)

    def unit_chunks(self, unit: int) -> tuple[int, int]:
        """First chunk of a unit, and how many it has; the last unit may be short."""
        first = unit * self.span
        return first, min(self.span, self.n_chunks - first)

    # -------------------------------------------------------------------------------------------- ranks

    def owner(self, chunk: int) -> int:
        """The rank that computes a chunk."""
        return chunk // self.span % self.n_ranks

    def owned(self, rank: int) -> int:
        """How many units a rank has."""
        return self.owned_below(rank, self.n_chunks)

    def owned_below(self, rank: int, chunk: int) -> int:
        """How many units of a rank start before a chunk."""
        units = -(-chunk // self.span)
        return max(0, -(-(units - rank) // self.n_ranks))

    def unit_of(self, rank: int, ordinal: int) -> int:
        """The ordinal-th unit of a rank."""
        return rank + ordinal * self.n_ranks

    def ordinal_of(self, chunk: int) -> int:
        """Which one it is among its owner's units."""
        return chunk // self.span // self.n_ranks

    # ----------------------------------------------------------------------------------------- identity

    @property
    def fingerprint(self) -> str:
        """16 hex digits over all fields: what participants compare."""
        return fingerprint_json(asdict(self))

    @property
    def order(self) -> dict[str, int]:
        """The fields that the bits depend on."""
        return {"k": self.k, "n_rows": self.n_rows, "chunk_size": self.chunk_size}


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Which pass a message or a checkpoint belongs to. Anything else is refused by name."""

    job: str = ""
    """Name of the pass."""
    data: str = ""
    """Fingerprint of the rows."""
    rows: str = "f64"
    """What the rows are stored as; decides nothing but what is compared."""
    arithmetic: str = ARITHMETIC

    def __post_init__(self) -> None:
        if self.rows not in ROW_DTYPES:
            raise ConfigError(f"rows must be one of {', '.join(ROW_DTYPES)}, got {self.rows!r}")
        long = [name for name in ("job", "data", "arithmetic") if len(getattr(self, name)) > 200]
        if long:
            raise ConfigError(f"{long[0]} may have 200 characters at most: it travels with every message")

    def differences(self, other: Provenance) -> dict[str, tuple[str, str]]:
        """What differs, as (theirs, ours)."""
        return {
            name: (str(theirs), str(getattr(self, name)))
            for name, theirs in asdict(other).items()
            if theirs != getattr(self, name)
        }

    def require_same_as(self, saved: Provenance, what: str) -> None:
        """CursorMismatch if `what` was saved for another pass."""
        if differences := self.differences(saved):
            listed = "; ".join(f"{name}: saved {theirs}, now {ours}" for name, (theirs, ours) in differences.items())
            raise CursorMismatch(
                f"{what} was saved for another pass ({listed}). Going on would mix two sums; restore what changed, or begin again in "
                "a new folder",
                differences,
            )
