"""What a run over streams of cells was asked to be, as checked values.

    [streams]
    roots = ["data/cells"]
    batch_size = 32
    batch_sizes = {rna = 64}

A config with a [streams] table is read as this; one with [[source]] as a text job (config.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from headrace.errors import ConfigError
from headrace.jobs.config import RunSection, _array, _Beta, _Name, _Section, _table_toml, _Text
from headrace.ledger.settings import LedgerSettings

__all__ = ["CellTrainSection", "LedgerSection", "StreamsConfig", "StreamsSection", "check_stream_ranks"]

REMOVED = {
    "debug_log_active_every_n_batches": "removed; metrics are emitted every step",
}
"""Keys that [streams] once had, and what to say to whoever still sets one."""


class StreamsSection(_Section):
    """[streams]: which files of cells, and how they are mixed."""

    roots: Annotated[tuple[_Text, ...], BeforeValidator(_array)] = Field(examples=[["data/cells"]])
    """Folders of stream files."""
    layout: Literal["nested", "direct"] = "nested"
    """nested: root/<modality>/<file>; direct: root/<file>, the modality being the root's own name."""
    batch_size: int = Field(32, ge=1, le=1 << 24)
    """Rows a batch and rank."""
    batch_sizes: dict[_Name, Annotated[int, Field(ge=1, le=1 << 24)]] = Field(
        default_factory=dict, examples=[{"rna": 64}]
    )
    """The same for single modalities, in place of batch_size."""
    num_streams_mixed: int = Field(8, ge=1, le=1 << 16)
    pick_mode: Literal["proportional", "weighted", "uniform", "round_robin", "sequential"] = "proportional"
    queue: Literal["stratified", "permuted", "banded"] = "stratified"
    batching_mode: Literal["per_stream", "device_per_stream"] = "per_stream"
    global_ranks: int = Field(1, ge=1, le=1 << 16)
    """per_stream: a pick covers batch_size x global_ranks rows. device_per_stream: the number of lanes unless given."""
    lanes: int | None = Field(None, ge=1, le=1 << 16, examples=[4])
    on_reshard: Literal["park", "drop"] = "park"
    columns: Annotated[tuple[_Text, ...], BeforeValidator(_array)] = Field((), examples=[["x", "group_id"]])
    """Only these columns are read; all of them unless given."""
    group_key: _Text = "group_id"
    feature: _Text = "x"
    """The column that the trainer learns from."""
    targets: dict[_Name, Annotated[float, Field(ge=0)]] = Field(default_factory=dict, examples=[{"rna": 0.7}])
    """Shares of the values that each modality should have; only shown beside what was."""
    num_workers: int = Field(0, ge=0, le=256)
    """Processes that read."""
    prefetch_batches: int = Field(2, ge=0, le=1 << 16)
    allow_symlinks: bool = False

    @field_validator("roots")
    @classmethod
    def _require_a_root(cls, roots: tuple[str, ...]) -> tuple[str, ...]:
        if not roots or not all(root.strip() for root in roots):
            raise ValueError('expected at least one folder of stream files, such as roots = ["data/cells"]')
        return roots

    @model_validator(mode="after")
    def _keep_lanes_to_their_mode(self) -> StreamsSection:
        if self.lanes is not None and self.batching_mode == "per_stream":
            raise ValueError(
                'streams.lanes belong to batching_mode = "device_per_stream"; per_stream has one plan for all ranks'
            )
        return self

    @property
    def lane_count(self) -> int:
        """Lanes of device_per_stream; 1 otherwise."""
        return (self.lanes or self.global_ranks) if self.batching_mode == "device_per_stream" else 1


class CellTrainSection(_Section):
    """[train]: the model and how it learns."""

    dim: int = Field(64, ge=1, le=1 << 14)
    depth: int = Field(2, ge=0, le=256)
    mask: float = Field(0.25, gt=0, lt=1)
    """Share of the features that is hidden and guessed."""
    lr: float = Field(3e-3, gt=0)
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    warmup_steps: int = Field(20, ge=0)
    weight_decay: float = Field(0.01, ge=0)
    betas: Annotated[tuple[_Beta, _Beta], BeforeValidator(_array)] = (0.9, 0.95)
    grad_clip: float = Field(1.0, gt=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = Field(None, ge=1, examples=[2])


class LedgerSection(_Section):
    """[ledger]: one state a group, kept between steps. With it the job trains a recurrent model."""

    mode: Literal["none", "full_wipe", "lru", "periodic_stale"] = "none"
    capacity: int | None = Field(None, ge=1, le=2**31 - 1, examples=[100_000])
    """Groups a rank may hold."""
    stale_threshold: int | None = Field(None, ge=0, le=2**31 - 2, examples=[64])
    """Steps after which a group that was not stored is forgotten."""
    sweep_every: int = Field(1, ge=1, le=2**31 - 2)
    wipe_every: int | None = Field(None, ge=1, le=2**31 - 2, examples=[1_000])
    protect_active: bool = False
    """Leave alone the groups of files that are still read."""
    ghost_capacity: int = Field(65_536, ge=0, le=2**30 - 1)
    ghost_horizon: int = Field(10_000, ge=1, le=2**31 - 2)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the states are kept. auto: where the model is."""

    @model_validator(mode="after")
    def _fit_together(self) -> LedgerSection:
        try:
            self.settings(1)
        except ConfigError as error:
            raise ValueError("; ".join(error.problems)) from error
        return self

    def settings(self, width: int, device: str = "cpu") -> LedgerSettings:
        """The ledger's own settings, for states of so many numbers."""
        return LedgerSettings(width=width, device=device, **self.model_dump(exclude={"device"}))


class StreamsConfig(_Section):
    """Everything a stream run was asked to be, with every default filled in."""

    run: RunSection = RunSection()
    streams: StreamsSection
    train: CellTrainSection = CellTrainSection()
    ledger: LedgerSection | None = None

    @model_validator(mode="after")
    def _refuse_skips(self) -> StreamsConfig:
        if self.run.skip:
            raise ValueError("run.skip passes over steps of a text job; a stream run has none to pass over")
        return self

    @property
    def kind(self) -> Literal["streams"]:
        return "streams"

    def resolved(self) -> dict[str, Any]:
        """Every key with the value that holds, as plain JSON values."""
        return self.model_dump(mode="json")

    @property
    def hash(self) -> str:
        """12 hex digits over what decides the result of the run."""
        from headrace.order.fingerprint import fingerprint_json

        tables = self.model_dump(mode="json", exclude_none=True)
        for table, keys in _WITHOUT_EFFECT.items():
            for name in keys:
                tables[table].pop(name, None)
        return fingerprint_json(tables)[:12]

    def to_toml(self) -> str:
        """A file that is read back to this very config."""
        tables = self.resolved()
        if self.run.dir == f"runs/{self.run.name}":
            del tables["run"]["dir"]
        named = ("run", "streams", "train") if self.ledger is None else ("run", "streams", "train", "ledger")
        return "\n".join(_table_toml(f"[{name}]", tables[name]) for name in named)


_WITHOUT_EFFECT = {
    "run": (
        "name",
        "dir",
        "checkpoint_every",
        "keep_checkpoints",
        "log_every",
        "sinks",
        "stop_after",
        "deadline",
        "skip",
    ),
    "streams": ("num_workers", "prefetch_batches", "targets"),
    "train": ("threads",),
}


def check_stream_ranks(config: StreamsConfig, world: int) -> None:
    """Refuse a number of ranks that cannot share the lanes; per_stream takes any."""
    lanes = config.streams.lane_count
    if config.streams.batching_mode == "device_per_stream" and lanes % world:
        fitting = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
        raise ConfigError(
            f"streams.lanes: {world} ranks cannot share {lanes} lanes, because the number of ranks must divide them; start {fitting} "
            "ranks, or change streams.lanes (that may be done at a resume)"
        )
