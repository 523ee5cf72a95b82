"""What a loader asks of its data: the contract of the three plans.

    packed text        text_plan.py        windows are tokenised, lanes deal out their blocks
    prepared blocks    prepared_plan.py    block i of the token shards, by arithmetic
    streams            stream_plan.py      K files of cells are open, a pick says which gives the next batch

A `LoaderPlan` holds what was delivered, which is what is saved. A `BatchMaker` starts there and makes the batches that follow, ahead of need. Each batch
carries what it changes; that counts when `LoaderPlan.deliver` hands it over, so prefetching can never leak into a checkpoint.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from headrace.batch import BatchSpec, lm_batch_spec
from headrace.errors import ConfigError, DeadlineExceeded
from headrace.loader.batch_fill import BatchFill
from headrace.loader.state import LoaderState
from headrace.metrics import Histogram, Meter, MetricSpec, Reduction, register
from headrace.order import Digest
from headrace.runtime.buffers import TensorMemory
from headrace.settings import LoaderSettings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from headrace.loader.windows import Piece

States = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A saved state, or the list of all ranks' states."""
_SPECS = (
    MetricSpec("data/tokens", Reduction.SUM, unit="tokens", help="tokens delivered that are not padding"),
    MetricSpec("data/padding", Reduction.SUM, unit="tokens", help="padding delivered"),
    MetricSpec("data/rows", Reduction.SUM, unit="documents", help="documents whose last token was delivered"),
    MetricSpec("data/samples", Reduction.SUM, unit="samples", help="rows of batches delivered"),
    MetricSpec("data/fillers", Reduction.SUM, unit="samples", help="samples without anything to learn in delivered steps, at the end of finite sources"),
    MetricSpec("data/skipped", Reduction.SUM, unit="samples", help="samples of steps that were passed over on request"),
    MetricSpec("data/source_tokens/<source>", Reduction.SUM, unit="tokens", help="tokens delivered from this source"),
    MetricSpec("text/spot_checks", Reduction.SUM, unit="documents", help="documents that the reference tokenizer encoded too, and agreed on"),
    MetricSpec("text/empty_documents", Reduction.SUM, unit="documents", help="documents without a token, in the windows that were opened for what was delivered"),
    MetricSpec("text/bad_rows", Reduction.SUM, unit="rows", help='rows that could not be used and were left out (on_bad = "skip"), in the windows that were opened'),
    MetricSpec("text/bad_shards", Reduction.SUM, unit="files", help='files of which nothing could be read, left out whole (on_bad = "skip"); counted once a process'),
    *Histogram("loader/next").metric_specs(),
)  # fmt: skip
register(*_SPECS)


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of those that share the batches."""

    rank: int
    world_size: int
    connected: bool
    """Whether torch.distributed connects these ranks."""

    @classmethod
    def find(
        cls, rank: int | None, world: int | None, mesh: DeviceMesh | None = None, dp_dims: Sequence[str] = ("dp",)
    ) -> Rank:
        """As given; or by a mesh with named dimensions; or that of torch.distributed; or the only one.

        Ranks of a mesh that differ only outside of `dp_dims` (tensor, pipeline or context parallel ones) get the same data rank, so the same rows.
        """
        if mesh is not None:
            if rank is not None or world is not None:
                raise ConfigError("mesh says which rank this is: leave dp_rank and dp_world_size out")
            names = mesh.mesh_dim_names or ()
            dims = [dp_dims] if isinstance(dp_dims, str) else list(dp_dims)
            unknown = [dim for dim in dims if dim not in names]
            if unknown or not dims:
                raise ConfigError(
                    f"dp_dims={tuple(dims)!r}: the mesh has the dimensions {', '.join(names) or 'without names'}"
                )
            rank, world = 0, 1
            for dim in dims:
                size = mesh.size(names.index(dim))
                rank, world = rank * size + mesh.get_local_rank(dim), world * size
            return cls(rank, world, True)
        if (rank is None) != (world is None):
            raise ConfigError(f"dp_rank and dp_world_size belong together, got dp_rank={rank}, dp_world_size={world}")
        distributed = sys.modules.get(
            "torch.distributed"
        )  # not imported here: code that initialised it has imported it
        joined = distributed is not None and distributed.is_available() and distributed.is_initialized()
        group = (distributed.get_rank(), distributed.get_world_size()) if joined and distributed else None
        if rank is None or world is None:
            return cls(*(group or (0, 1)), group is not None)
        if world < 1 or not 0 <= rank < world:
            raise ConfigError(f"dp_rank must be in [0, dp_world_size), got dp_rank={rank}, dp_world_size={world}")
        return cls(rank, world, group == (rank, world))


class Delivered(Protocol):
    """What a plan has counted of what was delivered."""

    ended: bool

    @property
    def step(self) -> int: ...

    @property
    def delivered(self) -> Mapping[str, int]: ...

    @property
    def tokens_by_source(self) -> list[int]: ...


S = TypeVar("S", bound=Delivered)


class BatchMaker(ABC):
    """Makes the batches that follow what was delivered. One thread at a time calls `make_next`."""

    @abstractmethod
    def make_next(self) -> Any | None:
        """The next batch with what it changes; None after the last one."""

    def explained(self, error: DeadlineExceeded) -> DeadlineExceeded:
        """The error, with what is being made."""
        return error

    def interrupt(self, timeout: float) -> None:  # noqa: B027
        """Have a `make_next` that runs in another thread return soon."""

    def close(self) -> None:  # noqa: B027
        """Let go of files. `make_next` is not called again."""


class LoaderPlan(ABC, Generic[S]):
    """Which batches a rank delivers, and what is saved of them."""

    room = "batches"
    """Names the thread that makes batches."""
    next_wait = "loader.next"
    """Names the trainer's wait for a batch."""
    batch_wait = "loader.batch"
    """Names the wait for a batch that is being made."""
    take_makes = True
    """Whether the trainer's thread makes a batch itself if none is ready."""
    patience = 1
    """How many deadlines `next()` may take: what it waits for may have a deadline of its own."""
    unit = "tokens"
    """What speed and shares are counted in."""
    data: Any
    meter: Meter
    state: S

    def __init__(self, data: Any, settings: LoaderSettings, rank: Rank) -> None:
        self.data, self.settings, self.rank = data, settings, rank
        self.meter = data.meter
        self._drained: dict[str, int] = {}

    # ------------------------------------------------------------------------------------- delivery

    @abstractmethod
    def start(self) -> BatchMaker:
        """Make the batches that follow what was delivered."""

    @abstractmethod
    def deliver(self, ready: Any) -> Any:
        """The batch, which counts as delivered from here on. No other method moves what is saved."""

    def end(self, maker: BatchMaker) -> None:
        """The pass is over: `maker` has no batch left."""
        self.state.ended = True

    @abstractmethod
    def next_pass(self) -> None:
        """Begin the next pass over finite data, after `end`."""

    @abstractmethod
    def skip_to_pass(self, number: int) -> None:
        """Have `next_pass` begin pass `number`, if no pass is under way and that one was not had yet."""

    def close(self) -> None:
        """Let go of processes and files; a later `start` opens them again."""

    def __len__(self) -> int:
        raise TypeError(
            "how many batches live text gives is known only once it has been tokenised, so it has no length: count steps "
            "instead (max_steps in a Trainer), or iterate until it ends"
        )

    # ---------------------------------------------------------------------------------------- state

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What this rank has delivered."""

    @abstractmethod
    def load_state_dict(self, state: States, *, accept: Collection[str], fixed: Mapping[str, str]) -> None:
        """Go on where a state was saved. Changes nothing if it does not fit."""

    @abstractmethod
    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The states of all ranks as one."""

    # -------------------------------------------------------------------------------------- insight

    @property
    def spec(self) -> BatchSpec:
        """The fields of the batches."""
        return lm_batch_spec(self.data.seq_len, self.settings.lm_fields())

    @property
    def names(self) -> Sequence[str]:
        """The sources."""
        return self.data.names

    @abstractmethod
    def targets(self) -> Sequence[float]:
        """The shares that the sources should have had until now."""

    @property
    def digest(self) -> str:
        """Over everything this rank delivered."""
        return ""

    @property
    def step_digest(self) -> str:
        """The part of the digest that the last batch added."""
        return ""

    @property
    def delivered_steps(self) -> int:
        return self.state.step

    @property
    def skipped(self) -> list[list[int]]:
        """The ranges of steps [from, to) that were passed over on request, counted from 1."""
        return []

    @property
    def empty_steps(self) -> int:
        return 0

    def left_out(self) -> dict[str, int]:
        """What was in the sources and not delivered, by kind; {} where that is not counted."""
        return {}

    def pieces(self, batch: Mapping[str, Any]) -> list[Piece]:
        """Where the tokens of the batch that was delivered last come from."""
        raise TypeError("rows of streams say themselves where they come from: stream_id and row")

    def drain_flight(self) -> dict[str, Any] | None:
        """What was delivered since the last call, as one line of a flight record; None where nothing was, or none is kept."""
        return None

    def metric_specs(self) -> tuple[MetricSpec, ...]:
        return _SPECS

    def totals(self) -> dict[str, int]:
        """What was delivered so far, by metric."""
        totals = {f"data/{k}": v for k, v in self.state.delivered.items()}
        named = zip(self.names, self.state.tokens_by_source, strict=True)
        return totals | {f"data/source_tokens/{name}": tokens for name, tokens in named}

    def drain(self) -> dict[str, int | float]:
        """What was delivered since the last call; {} if nothing was."""
        totals = self.totals()
        changed: dict[str, int | float] = {k: v - self._drained.get(k, 0) for k, v in totals.items()}
        self._drained = totals
        return changed if any(changed.values()) else {}


class TokenPlan(LoaderPlan[LoaderState]):
    """Batches of tokens: packed text, made here or read from a spool, and prepared blocks. They have a digest, and some steps may be passed over."""

    @property
    def digest(self) -> str:
        return str(self.state.digest)

    @property
    def step_digest(self) -> str:
        return str(Digest(self.state.last_term))

    @property
    def delivered_steps(self) -> int:
        return self.state.delivered_steps

    @property
    def skipped(self) -> list[list[int]]:
        return [[a + 1, b + 1] for a, b in self.state.skipped]

    @property
    def empty_steps(self) -> int:
        return self.state.empty_steps


def batch_fill(settings: LoaderSettings, seq_len: int, pad_id: int) -> BatchFill:
    """What writes the batches of tokens of one maker."""
    fields = settings.lm_fields()
    memory = TensorMemory(depth=len(fields) * (settings.prefetch_batches + 4), pin=settings.pin_memory)
    return BatchFill(seq_len, fields, pad=pad_id, unshifted=settings.labels == "hf", memory=memory)
