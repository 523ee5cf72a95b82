"""The checked config of a run over streams of cells: one with a [streams] table.

    [streams]
    roots = ["data/cells"]
    batch_size = 32
    batch_sizes = {rna = 64}

Imported only for such a config, because the mixing settings import numpy.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from headrace.errors import ConfigError
from headrace.ledger.settings import EvictionMode, LedgerSettings
from headrace.mix import BatchingMode, MixSettings, PickMode, Queue
from headrace.runs.config.base import Array, JobConfig, Name, OneOf, OptimiserSection, Section, Text, default_of
from headrace.settings import LoaderSettings


class StreamsSection(Section):
    """[streams]: which files of cells, and how they are mixed."""

    roots: Array[tuple[Text, ...]] = Field(examples=[["data/cells"]])
    """Folders of stream files."""
    layout: Literal["nested", "direct"] = "nested"
    """nested: root/<modality>/<file>; direct: root/<file>, the modality being the root's own name."""
    batch_size: int = Field(32, ge=1, le=1 << 24)
    """Rows a batch and rank."""
    batch_sizes: dict[Name, Annotated[int, Field(ge=1, le=1 << 24)]] = Field(
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
    columns: Array[tuple[Text, ...]] = Field((), examples=[["x", "group_id"]])
    """Only these columns are read; all of them unless given."""
    group_key: Text = "group_id"
    """Column that holds the group of a row."""
    feature: Text = "x"
    """The column that the trainer learns from."""
    targets: dict[Name, Annotated[float, Field(ge=0)]] = Field(default_factory=dict, examples=[{"rna": 0.7}])
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


class CellTrainSection(OptimiserSection):
    """[train]: the model and how it learns."""

    dim: int = Field(64, ge=1, le=1 << 14)
    """Width of the model."""
    depth: int = Field(2, ge=0, le=256)
    """Layers of the model."""
    mask: float = Field(0.25, gt=0, lt=1)
    """Share of the features that is hidden and guessed."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's weight decay."""


class LedgerSection(Section):
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


class StreamsConfig(JobConfig):
    """The config of a run that trains on streams of cells."""

    kind = "streams"
    without_effect: ClassVar = {
        "run": ("skip",),
        "streams": ("num_workers", "prefetch_batches", "targets"),
        "train": ("threads",),
    }

    streams: StreamsSection
    train: CellTrainSection = CellTrainSection()
    ledger: LedgerSection | None = None

    def check_world_size(self, world: int) -> None:
        """Raise ConfigError for a number of ranks that does not divide the lanes of device_per_stream."""
        lanes = self.streams.lane_count
        if self.streams.batching_mode == "device_per_stream" and lanes % world:
            raise ConfigError(
                f"streams.lanes: {world} ranks cannot share {lanes} lanes, because the number of ranks must divide them; start "
                f"{self.ranks_that_divide(lanes)} ranks, or change streams.lanes (that may be done at a resume)"
            )
