"""What a run over streams of cells was asked to be, as checked values.

    [streams]
    roots = ["data/cells"]
    batch_size = 32
    batch_sizes = {rna = 64}

A config with a [streams] table is read as this; one with [[source]] as a text job (schema.py). Loaded only for such a config:
the mixing settings bring numpy.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from headrace.batch import LoaderSettings
from headrace.errors import ConfigError
from headrace.ledger.settings import EvictionMode, LedgerSettings
from headrace.mix import BatchingMode, MixSettings, PickMode, Queue
from headrace.runs.config.schema import (
    OneOf,
    RunSection,
    _array,
    _Beta,
    _Name,
    _Section,
    _table_toml,
    _Text,
    default_of,
)
from headrace.train.settings import TrainSettings

__all__ = ["CellTrainSection", "LedgerSection", "StreamsConfig", "StreamsSection"]


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
    num_streams_mixed: int = Field(default_of(MixSettings, "slots"), ge=1, le=1 << 16)
    """Files that are open at a time."""
    pick_mode: PickMode = default_of(MixSettings, "pick_mode")
    """How the next file is chosen among the open ones."""
    queue: Queue = default_of(MixSettings, "queue")
    """Which file is opened next."""
    batching_mode: BatchingMode = default_of(MixSettings, "batching_mode")
    """per_stream: all ranks share each draw. device_per_stream: each lane has streams of its own."""
    global_ranks: int = Field(default_of(MixSettings, "global_ranks"), ge=1, le=1 << 16)
    """per_stream: a pick covers batch_size x global_ranks rows. device_per_stream: the number of lanes unless given."""
    lanes: int | None = Field(None, ge=1, le=1 << 16, examples=[4])
    """Lanes of device_per_stream; the number of ranks divides them."""
    on_reshard: Literal["park", "drop"] = "park"
    """What happens to open files that a smaller pool has no slot for: wait in the queue, or be dropped."""
    columns: Annotated[tuple[_Text, ...], BeforeValidator(_array)] = Field((), examples=[["x", "group_id"]])
    """Only these columns are read; all of them unless given."""
    group_key: _Text = "group_id"
    """Column that holds the group of a row."""
    feature: _Text = "x"
    """The column that the trainer learns from."""
    targets: dict[_Name, Annotated[float, Field(ge=0)]] = Field(default_factory=dict, examples=[{"rna": 0.7}])
    """Shares of the values that each modality should have; only shown beside what was."""
    num_workers: int = Field(0, ge=0, le=256)
    """Processes that read."""
    prefetch_batches: int = Field(default_of(LoaderSettings, "prefetch_batches"), ge=0, le=1 << 16)
    """Batches made ahead of need."""
    allow_symlinks: bool = False
    """Follow symbolic links out of the roots."""

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
    """Width of the model."""
    depth: int = Field(2, ge=0, le=256)
    """Layers of the model."""
    mask: float = Field(0.25, gt=0, lt=1)
    """Share of the features that is hidden and guessed."""
    lr: float = Field(default_of(TrainSettings, "lr"), gt=0)
    """Largest learning rate."""
    min_lr_ratio: float = Field(default_of(TrainSettings, "min_lr_ratio"), ge=0, le=1)
    """The learning rate falls to this part of `lr` by the last step."""
    warmup_steps: int = Field(default_of(TrainSettings, "warmup_steps"), ge=0)
    """Steps over which the learning rate rises."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's weight decay."""
    betas: Annotated[tuple[_Beta, _Beta], BeforeValidator(_array)] = default_of(TrainSettings, "betas")
    """AdamW's betas."""
    grad_clip: float = Field(default_of(TrainSettings, "grad_clip"), gt=0)
    """Largest norm of the gradient."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a device."""
    threads: int | None = Field(None, ge=1, examples=[2])
    """torch threads of each process."""


class LedgerSection(_Section):
    """[ledger]: one state a group, kept between steps. With it the job trains a recurrent model."""

    mode: Annotated[str, OneOf(lambda: [mode.value for mode in EvictionMode])] = default_of(
        LedgerSettings, "mode"
    ).value
    """What is evicted: nothing, the least recently stored groups, stale groups, or everything."""
    capacity: int | None = Field(None, ge=1, le=2**31 - 1, examples=[100_000])
    """Groups a rank may hold."""
    stale_threshold: int | None = Field(None, ge=0, le=2**31 - 2, examples=[64])
    """Steps after which a group that was not stored is forgotten."""
    sweep_every: int = Field(default_of(LedgerSettings, "sweep_every"), ge=1, le=2**31 - 2)
    """Steps between sweeps of stale groups."""
    wipe_every: int | None = Field(None, ge=1, le=2**31 - 2, examples=[1_000])
    """Steps between wipes; for full_wipe."""
    protect_active: bool = default_of(LedgerSettings, "protect_active")
    """Leave alone the groups of files that are still read."""
    ghost_capacity: int = Field(default_of(LedgerSettings, "ghost_capacity"), ge=0, le=2**30 - 1)
    """Evicted groups that are remembered, to notice false evictions."""
    ghost_horizon: int = Field(default_of(LedgerSettings, "ghost_horizon"), ge=1, le=2**31 - 2)
    """Steps for which an evicted group is remembered."""
    dtype: Literal["float32", "bfloat16", "float16"] = default_of(LedgerSettings, "dtype")
    """Type of the stored states."""
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

    def check_world_size(self, world: int) -> None:
        """Refuse a number of ranks that cannot share the lanes; per_stream takes any."""
        lanes = self.streams.lane_count
        if self.streams.batching_mode == "device_per_stream" and lanes % world:
            fitting = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
            raise ConfigError(
                f"streams.lanes: {world} ranks cannot share {lanes} lanes, because the number of ranks must divide them; start {fitting} "
                "ranks, or change streams.lanes (that may be done at a resume)"
            )

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
        "base",
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
