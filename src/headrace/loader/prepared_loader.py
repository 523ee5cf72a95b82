"""Batches of prepared tokens leave for the trainer; one integer says where a run stands.

    loader = PreparedLoader(PreparedDataset("prepared/web-mix", seed=7), global_batch_size=32)
    for batch in loader: ...                                      the batch contract of `Loader`
    loader.load_state_dict(saved)                                 any number of ranks, any batch size

Every rank works out any sample by itself, so the end of the data is known to all without a word between them, and a resume
costs what a start costs, wherever the run stands.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.batch import DEFAULT_LM_FIELDS, DEFAULT_PREFETCH_BATCHES, BatchSpec, Labels, label_problems, lm_batch_spec
from headrace.errors import ConfigError, CursorMismatch, EndOfData
from headrace.loader.batch_fill import COUNTS, BatchFill
from headrace.loader.prepared import Planned, PreparedDataset, checked_fields
from headrace.loader.rank_loader import TIMES_AT_ONCE, RankLoader, rank_and_world
from headrace.loader.windows import Piece
from headrace.metrics import Histogram, Meter, Wait
from headrace.order import Cursor, Digest
from headrace.runtime.background import BackgroundThread
from headrace.runtime.buffers import TensorMemory
from headrace.runtime.prefetch import Prefetch

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["PreparedLoader"]

_log = logging.getLogger(__name__)
KIND, VERSION = "prepared", 1
_PLANNED_FIRST, _PLANNED = 256, 8192
"""Samples that are planned at once: few at first, so that the first batch comes soon, then twice as many each time up to
about 2 ms, .25 us a sample; 1,024 at a time take .9 us each."""


class _ReadyBatch(NamedTuple):
    """A batch, what it adds to the counts, and what it is made of."""

    batch: dict[str, Any]
    totals: np.ndarray
    """As in `_State`."""
    planned: Planned
    begin: int
    end: int
    digest: int
    next_sample: int


@dataclass(slots=True)
class _State:
    """What was delivered. Where the run stands is `sample` alone; the rest is said about it."""

    sample: int = 0
    step: int = 0
    number: int = 0
    """Which pass over finite sources, and the sample at which it began."""
    begun: int = 0
    ended: bool = False
    digest: int = 0
    totals: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """COUNTS, then the tokens of each source."""

    @property
    def delivered(self) -> dict[str, int]:
        return dict(zip(COUNTS, self.totals.tolist(), strict=False))

    @property
    def tokens_by_source(self) -> list[int]:
        return self.totals[len(COUNTS) :].tolist()


class PreparedLoader(RankLoader):
    """Delivers this rank's share of each global batch: samples t·B … t·B+B−1, those with g mod W = rank.

    Any world size up to the batch size will do, today another than yesterday; where it does not divide the batch, ranks get
    one row more or less. A batch belongs to its receiver: its memory is used again only when nothing refers to it any more.

    `data` is a `PreparedDataset`. `global_batch_size`, `dp_rank`, `dp_world_size`, `mesh`, `dp_dims`, `labels`, `fields`, `pin_memory`, `device`, `deadline`
    and `copy` are those of `Loader`. With `prefetch_batches` = 0 a batch is made when it is asked for.
    """

    def __init__(
        self,
        data: PreparedDataset,
        *,
        global_batch_size: int,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        dp_dims: Sequence[str] = ("dp",),
        fields: Sequence[str] = DEFAULT_LM_FIELDS,
        prefetch_batches: int = DEFAULT_PREFETCH_BATCHES,
        labels: Labels = "shifted",
        copy: bool = False,
        pin_memory: bool = False,
        device: str | torch.device | None = None,
        deadline: float = 300.0,
    ) -> None:
        self.data = data
        self.meter: Meter = data.meter
        self.rank, self.world_size, self._distributed = rank_and_world(dp_rank, dp_world_size, mesh, dp_dims)
        self.global_batch_size = global_batch_size
        self.fields = checked_fields(fields)
        self._check(prefetch_batches, labels)
        self._prefetch = prefetch_batches
        self._unshifted = labels == "hf"
        self._pin, self._device, self._deadline = pin_memory, device, deadline
        self._state = _State(totals=np.zeros(len(COUNTS) + len(data.sources), np.int64))
        self._step_digest = 0
        self._started: float | None = None
        self._begun_tokens = 0
        self._wait = Wait("loader.next", meter=self.meter, deadline=deadline)
        self._next_times = Histogram("loader/next")
        self._seconds: list[float] = []
        self._drained: dict[str, int] = {}
        self._running: _Assembly | None = None
        self._last: tuple[Planned, int, int] | None = None
        """The samples of the batch that was delivered last: the rows [begin, end) of a plan."""

    # -------------------------------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._state.ended:
            self.close()
            self._state.number += 1
            self._state.begun, self._state.ended = self._state.sample, False
        return self

    @property
    def spec(self) -> BatchSpec:
        """The fields of this loader's batches: names, dtypes, shapes and roles."""
        return lm_batch_spec(self.data.seq_len, self.fields)

    def __next__(self) -> dict[str, Any]:
        state = self._state
        if state.ended:
            raise StopIteration
        if self._running is None:
            self._running = _Assembly(self)
            self._started = self._started or time.perf_counter()
        with self._wait as wait:
            try:
                ready = self._running.next(wait.deadline)
            except BaseException:
                self.close()
                raise
        self._seconds.append(wait.seconds)
        if len(self._seconds) == TIMES_AT_ONCE:
            self._record_times()
        if ready is None:
            state.ended = True
            self.close()
            raise StopIteration
        self._deliver(ready)
        return ready.batch if self._device is None else self._moved(ready.batch)

    def _deliver(self, ready: _ReadyBatch) -> None:
        """From here on the batch is delivered: this is the only place where the saved state moves."""
        state = self._state
        state.totals += ready.totals
        self._step_digest = ready.digest
        state.digest += ready.digest
        state.step += 1
        state.sample = ready.next_sample
        self._last = (ready.planned, ready.begin, ready.end)

    def _moved(self, batch: dict[str, Any]) -> dict[str, Any]:
        """On its way to the device."""
        return {
            name: value if name == "max_seqlen" else value.to(self._device, non_blocking=self._pin)
            for name, value in batch.items()
        }

    # ------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Where this run stands, and what this rank delivered. Not collective; under 1 KiB for a dozen sources."""
        state = self._state
        body = {
            "sample": state.sample, "step": state.step, "pass": state.number, "begun": state.begun, "ended": state.ended,
            "share": [self.rank, self.world_size], "digest": str(Digest(state.digest)), "delivered": state.delivered,
            "source_tokens": state.tokens_by_source,
        }  # fmt: skip
        return Cursor(kind=KIND, version=VERSION, fingerprint=self.data.fingerprint(), body=body).to_dict()

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, accept: Collection[str] = ()
    ) -> None:
        """Go on where a state was saved, at any world size and batch size.

        One rank's state says where; digest and counts go on whole only from the states of all ranks (the list, or what
        `gather_state` gave). Refuses a state of other data or settings, naming what differs, unless `accept` names it: other
        weights then hold as if they had held from the start, so blocks near this point may come twice or not at all.
        """
        self.close()
        cursor = Cursor.from_dict(_merged(state if isinstance(state, Sequence) else [state]))
        cursor.require(kind=KIND, version=VERSION, fingerprint=self.data.fingerprint(), accept=accept)
        loaded = _State(totals=np.zeros_like(self._state.totals))
        try:
            body = cursor.body
            loaded.sample, loaded.step = int(body["sample"]), int(body["step"])
            loaded.number, loaded.begun, loaded.ended = int(body["pass"]), int(body["begun"]), bool(body["ended"])
            if not 0 <= loaded.begun <= loaded.sample < 1 << 62 or loaded.step < 0 or loaded.number < 0:
                raise ValueError(f"impossible position {loaded.sample} of a pass that began at {loaded.begun}")
            share = tuple(int(n) for n in body["share"])
            # What was delivered before is added up once: on rank 0, or by the rank that goes on with its own share.
            if share == (self.rank, self.world_size) or (share == (0, 1) and self.rank == 0):
                loaded.digest = Digest(body["digest"]).value
                loaded.totals[: len(COUNTS)] = [int(body["delivered"][k]) for k in COUNTS]
                tokens = [int(n) for n in body["source_tokens"]][: len(self.data.sources)]
                loaded.totals[len(COUNTS) : len(COUNTS) + len(tokens)] = tokens
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CursorMismatch(f"state is damaged: {type(error).__name__} {error} while reading its body") from error
        self._state = loaded
        self._step_digest = 0
        self._started = None
        self._begun_tokens = loaded.delivered["tokens"]
        self._drained = self._totals()
        self._last = None

    @property
    def _now(self) -> _State:
        return self._state

    @property
    def _names(self) -> Sequence[str]:
        return self.data.names

    def _targets(self) -> Sequence[float]:
        return self.data.weights

    def _merged(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return _merged(states)

    @property
    def digest(self) -> str:
        """Over everything this rank delivered. The sum over ranks is the run's digest: see `gather_state`."""
        return str(Digest(self._state.digest))

    @property
    def step_digest(self) -> str:
        """The part of the digest that the last batch added."""
        return str(Digest(self._step_digest))

    # ---------------------------------------------------------------------------------------- insight

    def pieces(self, batch: Mapping[str, Any]) -> list[Piece]:
        """Where the tokens of the batch that was delivered last come from."""
        first = int(batch["sample_index"][0]) if len(batch["sample_index"]) else -1
        planned, begin, end = self._last if self._last is not None else (None, 0, 0)
        if planned is None or int(planned.sample[begin]) != first:
            raise ValueError(
                f"the batch with sample {first} is not the one this loader delivered last: ask before taking the next"
            )
        columns = (c[begin:end].tolist() for c in (planned.sample, planned.source, planned.shard, planned.local))
        return [piece for sample in zip(*columns, strict=True) for piece in self.data.pieces(*sample)]

    def close(self) -> None:
        """Stop the thread. What was made and not delivered is forgotten; iterating again makes it anew."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _check(self, prefetch: int, labels: str) -> None:
        problems = []
        size, world = self.global_batch_size, self.world_size
        if not isinstance(size, int) or size < 1:
            problems.append(f"global_batch_size must be a positive integer, got {size!r}")
        elif size < world:
            problems.append(
                f"global_batch_size {size} leaves some of {world} ranks without a sample: use at most {size} ranks"
            )
        if not isinstance(prefetch, int) or prefetch < 0:
            problems.append(f"prefetch_batches must be 0 or more, got {prefetch!r}")
        problems += label_problems(labels)
        if problems:
            raise ConfigError(problems)


class _Assembly:
    """Batches in the making, from one load to the next: planned many samples at once, filled one batch at a time."""

    def __init__(self, loader: PreparedLoader) -> None:
        self._data, self._meter, self._fields = loader.data, loader.meter, loader.fields
        self._rank, self._world, self._size = loader.rank, loader.world_size, loader.global_batch_size
        state = loader._state
        self._sample, self._begun, self._number = state.sample, state.begun, state.number
        self._most = -(-self._size // self._world)
        self._ahead = _PLANNED_FIRST
        self._planned: Planned | None = None
        self._batches: deque[tuple[int, int, int]] = deque()
        """Where in `_planned` the next batches begin and end, and what each adds to the digest."""
        memory = TensorMemory(depth=len(self._fields) * (loader._prefetch + 4), pin=loader._pin)
        self._fill = BatchFill(
            self._data.seq_len, self._fields, pad=self._data.pad_id, unshifted=loader._unshifted, memory=memory
        )
        self._thread = BackgroundThread("prepared", on_error=_log.error, meter=self._meter)
        self._ready = Prefetch(
            self._thread, self._assemble, depth=loader._prefetch, wait_name="prepared.batch", take_makes=True, meter=self._meter
        )  # fmt: skip
        # A loader that is let go without close() must not leave its thread behind.
        self._forgotten = weakref.finalize(loader, self.close)

    def next(self, deadline: float) -> _ReadyBatch | None:
        """The next batch, or None at the end."""
        try:
            return self._ready.take(deadline)
        except EndOfData:
            return None

    def close(self, timeout: float = 2.0) -> None:
        self._forgotten.detach()  # it would keep the buffers for as long as the loader lives
        self._ready.close()
        self._thread.close(timeout)

    def _assemble(self) -> _ReadyBatch | None:
        """The next batch, or None when the pass is over."""
        if not self._batches and not self._plan():
            return None
        assert self._planned is not None
        begin, end, digest = self._batches.popleft()
        planned, first = self._planned, int(self._planned.sample[begin])
        rows = self._fill.rows(end - begin)
        self._data.gather(planned, begin, end, rows)
        batch = self._fill.batch(rows, range(first, first + (end - begin) * self._world, self._world))
        self._sample += self._size
        totals = rows.totals(planned.source[begin:end], len(self._data.sources))
        return _ReadyBatch(batch, totals, planned, begin, end, digest, self._sample)

    def _plan(self) -> bool:
        """Work out the next batches; False at the end. All ranks come to the end at the same batch."""
        first, size, world = self._sample, self._size, self._world
        count = max(1, self._ahead // self._most)
        self._ahead = min(2 * self._ahead, _PLANNED)
        if not self._data.schedule.reaches(first + (count - 1) * size - self._begun):
            total = self._data.schedule.total
            assert total is not None
            count = -(-(self._begun + total - first) // size)
        if count <= 0:
            return False
        # A rank's samples are one arithmetic progression; batches are cut from it where a global batch ends.
        own = first + (self._rank - first) % world
        samples = np.arange(own, first + count * size, world, dtype=np.int64)
        ends = -(-(first + size * np.arange(1, count + 1) - own) // world)
        self._planned = planned = self._data.plan(samples, self._number, self._begun)
        begins = np.concatenate([[0], ends[:-1]])
        self._batches.extend(zip(begins.tolist(), ends.tolist(), _sums(planned.low, planned.high, begins), strict=True))
        return True


def _merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of several ranks, saved at the same step, as one."""
    if not states:
        raise CursorMismatch("no state was given: pass one state, or the list of all ranks' states")
    cursors = [Cursor.from_dict(s, what=f"state {i} of {len(states)}") for i, s in enumerate(states)]
    first = cursors[0]
    if len(cursors) == 1:
        return first.to_dict()
    for i, other in enumerate(cursors[1:], start=1):
        other.require(
            kind=KIND, version=first.version, fingerprint=first.fingerprint, what=f"state {i} of {len(states)}"
        )
    try:
        bodies = [dict(c.body) for c in cursors]
        for name in ("sample", "step", "pass", "begun", "ended"):
            found = [b[name] for b in bodies]
            if any(f != found[0] for f in found):
                raise CursorMismatch(
                    f"the states of the ranks do not belong together: {name} is {', '.join(map(str, found))}. Save all ranks at "
                    "the same step."
                )
        shares = sorted(tuple(b["share"]) for b in bodies)
        if shares != [(rank, len(bodies)) for rank in range(len(bodies))]:
            raise CursorMismatch(f"the states are of ranks {shares} (rank, of how many): pass each rank's state once")
        merged = bodies[0] | {
            "share": [0, 1],
            "digest": str(Digest(sum(Digest(b["digest"]).value for b in bodies))),
            "delivered": {k: sum(b["delivered"][k] for b in bodies) for k in bodies[0]["delivered"]},
            "source_tokens": [sum(t) for t in zip(*(b["source_tokens"] for b in bodies), strict=True)],
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CursorMismatch(f"state is damaged: {type(error).__name__} {error} while reading its body") from error
    return Cursor(kind=KIND, version=first.version, fingerprint=first.fingerprint, body=merged).to_dict()


def _sums(low: np.ndarray, high: np.ndarray, starts: np.ndarray) -> list[int]:
    """Sums of 128-bit numbers, given as halves, over the runs that begin at `starts`: 32 bits at a time, so nothing overflows."""
    small = np.uint64(0xFFFFFFFF)
    quarters = (low & small, low >> np.uint64(32), high & small, high >> np.uint64(32))
    columns = [np.add.reduceat(q, starts).tolist() for q in quarters]
    return [a + (b << 32) + (c << 64) + (d << 96) for a, b, c, d in zip(*columns, strict=True)]
