"""Base of all loaders: reports of what was delivered, and the states of all ranks merged.

`Loader` and `PreparedLoader` make batches in different ways; what they say afterwards is the same: step, digest, metrics, a report,
and one state of all ranks.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from headrace.errors import ConfigError
from headrace.loader.report import LoaderReport
from headrace.metrics import Histogram, Meter, MetricSpec, Reduction, register

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["TIMES_AT_ONCE", "Delivered", "RankLoader", "rank_and_world"]

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
    MetricSpec("text/bad_shards", Reduction.SUM, unit="files", help='files of which nothing could be read, left out whole (on_bad = "skip"); told once a process'),
    *Histogram("loader/next").metric_specs(),
)  # fmt: skip
register(*_SPECS)

TIMES_AT_ONCE = 256
"""Times of next() that a histogram is told of in one go: one call in so many is slower by that."""


class Delivered(Protocol):
    """What a loader's state has counted."""

    step: int
    ended: bool

    @property
    def delivered(self) -> Mapping[str, int]: ...

    @property
    def tokens_by_source(self) -> list[int]: ...


class RankLoader(ABC):
    """A rank's share of global batches, and what is said about it."""

    rank: int
    world_size: int
    meter: Meter
    _distributed: bool
    _next_times: Histogram
    _seconds: list[float]
    """What next() took, until the histogram knows of it."""
    _drained: dict[str, int]
    _started: float | None
    _begun_tokens: int

    @property
    @abstractmethod
    def _now(self) -> Delivered:
        """The state."""

    @property
    @abstractmethod
    def _names(self) -> Sequence[str]:
        """The sources."""

    @abstractmethod
    def _targets(self) -> Sequence[float]:
        """The shares that the sources should have had until now."""

    @abstractmethod
    def _merged(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The states of all ranks as one."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Over everything this rank delivered. The sum over ranks is the run's digest: see `gather_state`."""

    @property
    @abstractmethod
    def step_digest(self) -> str:
        """The part of the digest that the last batch added."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands. Not collective."""

    @abstractmethod
    def close(self) -> None:
        """Stop the threads. What was made and not delivered is forgotten; iterating again makes it anew."""

    def gather_state(self) -> dict[str, Any]:
        """The states of all ranks as one. Collective: every rank must call it, and every rank gets it."""
        own = self.state_dict()
        if self.world_size == 1:
            return own
        if not self._distributed:
            raise ConfigError(
                "gather_state() needs torch.distributed: call init_process_group first, or collect the ranks' state_dict() "
                "yourself and pass the list to load_state_dict"
            )
        from headrace.loader.exchange import gather_json

        # Ranks of a mesh that get the same rows have the same state: one of each is enough.
        return self._merged(list({tuple(state["body"].get("share", ())): state for state in gather_json(own)}.values()))

    @property
    def ended(self) -> bool:
        """Whether the pass is over and was seen to be; iterating then starts the next one."""
        return self._now.ended

    @property
    def step(self) -> int:
        """The number of the last step delivered, counted from 1; 0 before the first. Steps that were passed over have their numbers too."""
        return self._now.step

    @property
    def delivered_steps(self) -> int:
        """How many steps were delivered."""
        return self._now.step

    def metric_specs(self) -> tuple[MetricSpec, ...]:
        return _SPECS

    def drain_metrics(self) -> dict[str, int | float]:
        """What was delivered since the last call; {} if nothing was."""
        self._record_times()
        totals = self._totals()
        changed: dict[str, int | float] = {k: v - self._drained.get(k, 0) for k, v in totals.items()}
        self._drained = totals
        if not any(changed.values()):
            return {}
        return changed | self._next_times.drain()

    def _record_times(self) -> None:
        self._next_times.record_many(self._seconds)
        self._seconds.clear()

    def _totals(self) -> dict[str, int]:
        state = self._now
        totals = {f"data/{k}": v for k, v in state.delivered.items()}
        return totals | {f"data/source_tokens/{n}": t for n, t in zip(self._names, state.tokens_by_source, strict=True)}

    def report(self) -> LoaderReport:
        """What this loader did since it started: speed, waits by name, realised mix, padding."""
        state = self._now
        return LoaderReport.of(
            names=self._names,
            targets=self._targets(),
            source_tokens=state.tokens_by_source,
            delivered=state.delivered,
            new_tokens=state.delivered["tokens"] - self._begun_tokens,
            seconds=time.perf_counter() - self._started if self._started is not None else 0.0,
            waits=self.meter.totals(),
            digest=self.digest,
            steps=self.delivered_steps,
            left_out=self.left_out(),
        )

    def left_out(self) -> dict[str, int]:
        """What was in the sources and not delivered, by kind; {} where that is not counted."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rank_and_world(
    rank: int | None, world: int | None, mesh: DeviceMesh | None = None, dp_dims: Sequence[str] = ("dp",)
) -> tuple[int, int, bool]:
    """Rank, world size, and whether torch.distributed connects them.

    mesh: a DeviceMesh with named dimensions. Ranks that differ only outside of `dp_dims` (tensor, pipeline or context parallel ones) get
    the same data rank, so the same rows.
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
        return rank, world, True
    if (rank is None) != (world is None):
        raise ConfigError(f"dp_rank and dp_world_size belong together, got dp_rank={rank}, dp_world_size={world}")
    distributed = sys.modules.get(
        "torch.distributed"
    )  # never imported here: the code that initialised it has imported it
    initialised = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if rank is None or world is None:
        return (
            (distributed.get_rank(), distributed.get_world_size(), True)
            if initialised and distributed
            else (0, 1, False)
        )
    if world < 1 or not 0 <= rank < world:
        raise ConfigError(f"dp_rank must be in [0, dp_world_size), got dp_rank={rank}, dp_world_size={world}")
    same = (
        initialised
        and distributed is not None
        and distributed.get_world_size() == world
        and distributed.get_rank() == rank
    )
    return rank, world, bool(same)
