"""Batches leave for the trainer.

    loader = Loader(data, global_batch_size=32)
    for batch in loader:                      # dict of tensors, the rank's share of the global batch
        ...
        saved = loader.state_dict()           # what was delivered, not what was prefetched; local, needs no other rank
    loader.load_state_dict(saved)             # or the list of all ranks' states, at any world size that divides the lanes

Step t is samples t·B … t·B+B−1; rank r of W delivers those with g mod W = r; sample g is made by lane g mod L. A thread
assembles batches ahead of need into a ring of buffers; every sample carries the state of its lane right after it, and
that state counts only once the batch is handed over. So prefetching can never leak into a checkpoint.
"""

from __future__ import annotations

import atexit
import itertools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from headrace.batch import Batch
from headrace.errors import ConfigError, HeadraceError
from headrace.loader.dataset import TextDataset
from headrace.loader.ends import AloneEnds, Ends, ReplayEnds, StoreEnds
from headrace.loader.lanes import Lane, LanePlan, Sample
from headrace.loader.pool import WindowPool
from headrace.loader.report import LoaderReport
from headrace.loader.state import LaneState, LoaderState, load_states, merge_states
from headrace.loader.windows import Piece
from headrace.metrics import Histogram, Meter, MetricSpec, Reduction, Wait, phase, register
from headrace.order import Digest, content_hash, sample_term
from headrace.text import expand_block

if TYPE_CHECKING:
    import torch

__all__ = ["Loader"]

_SPECS = (
    MetricSpec("data/tokens", Reduction.SUM, unit="tokens", help="tokens delivered that are not padding"),
    MetricSpec("data/padding", Reduction.SUM, unit="tokens", help="padding delivered"),
    MetricSpec("data/rows", Reduction.SUM, unit="documents", help="documents whose last token was delivered"),
    MetricSpec("data/samples", Reduction.SUM, unit="samples", help="rows of batches delivered"),
    MetricSpec("data/fillers", Reduction.SUM, unit="samples", help="samples without anything to learn, at the end of finite sources"),
    MetricSpec("data/source_tokens/<source>", Reduction.SUM, unit="tokens", help="tokens delivered from this source"),
    *Histogram("loader/next").metric_specs(),
)  # fmt: skip
register(*_SPECS)

_FILLER = content_hash(b"filler")
_pipelines: weakref.WeakSet[_Pipeline] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Threads that are still in a tokenizer when the interpreter goes away can abort the process: stop them first."""
    for pipeline in list(_pipelines):
        pipeline.close()


_numbers = itertools.count()


@dataclass(slots=True)
class _Made:
    """A batch on its way: its arrays, its samples, and the buffer it occupies."""

    batch: Batch
    indices: range
    """The global index of each sample. The buffers are reused, so what must last is kept here."""
    samples: tuple[Sample, ...]
    digest: int
    next_sample: int
    slot: _Slot
    ready: Any = None
    """A CUDA event: the copy to the device has been made."""


@dataclass(slots=True)
class _Slot:
    """One set of buffers of the ring."""

    arrays: dict[str, np.ndarray]
    tensors: dict[str, Any] = field(default_factory=dict)


class Loader:
    """Walks over a dataset and delivers this rank's share of each global batch.

    Batches are views of reused buffers: valid until the next one is taken, unless `copy=True`.
    """

    def __init__(
        self,
        data: TextDataset,
        *,
        global_batch_size: int,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        tokenizer_workers: int = 4,
        prefetch_batches: int = 2,
        labels: Literal["shifted", "hf"] = "shifted",
        segment_ids: bool = False,
        copy: bool = False,
        pin_memory: bool = False,
        device: str | torch.device | None = None,
        deadline: float = 300.0,
    ) -> None:
        self.data = data
        self.meter: Meter = data.meter
        self.rank, self.world_size, self._distributed = _rank_and_world(dp_rank, dp_world_size)
        self.global_batch_size = global_batch_size
        self._check(tokenizer_workers, prefetch_batches, labels)
        self._workers = tokenizer_workers
        self._prefetch = prefetch_batches
        self._unshifted = labels == "hf"
        self._segments = segment_ids
        self._copy = copy
        self._pin = pin_memory
        self._device = device
        self._deadline = deadline
        self._own = tuple(range(self.rank, data.lanes, self.world_size))
        # Only loaders that all ranks make are counted: a rank may have others of its own.
        self._number = next(_numbers) if self._distributed else -1
        self._plan: LanePlan = data.plan(0)
        self._state = LoaderState(source_tokens=[0] * len(data.sources))
        self._state.lanes = {lane: self._plan.start(lane) for lane in self._own}
        self._foreign: dict[int, LaneState] | None = {lane: self._plan.start(lane) for lane in range(data.lanes)}
        self._origin = 0
        self._started: float | None = None
        self._begun_tokens = 0
        self._next_times = Histogram("loader/next")
        self._step_digest = Digest()
        self._drained: dict[str, int] = {}
        self._running: _Pipeline | None = None
        self._delivered: deque[_Made] = deque(maxlen=1)

    # -------------------------------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._state.ended:
            self._begin_pass(self._state.number + 1)
        return self

    def __next__(self) -> dict[str, Any]:
        if self._state.ended:
            raise StopIteration
        if self._running is None:
            self._running = _Pipeline(self)
        if self._started is None:
            self._started = time.perf_counter()
            self._begun_tokens = self._state.delivered["tokens"]
        with Wait("loader.next", meter=self.meter, deadline=self._deadline * 2) as wait:
            try:
                made = self._running.next(wait)
            except BaseException:
                self.close()
                raise
        self._next_times.record(wait.seconds)
        if made is None:
            self._state.ended = True
            self.close()
            raise StopIteration
        self._count(made)
        return self._tensors(made)

    def _count(self, made: _Made) -> None:
        """From here on the batch is delivered: this is the only place where the saved state moves."""
        state, batch = self._state, made.batch
        for sample in made.samples:
            state.lanes[sample.lane] = (sample.entries, sample.credits)
            if sample.source >= 0:
                state.source_tokens[sample.source] += sample.tokens
        delivered = state.delivered
        delivered["tokens"] += batch.tokens
        delivered["padding"] += len(made.samples) * self.data.seq_len - batch.tokens
        delivered["rows"] += batch.rows
        delivered["samples"] += len(made.samples)
        delivered["fillers"] += sum(1 for s in made.samples if s.source < 0)
        state.digest.add(made.digest)
        self._step_digest = Digest(made.digest)
        state.step = batch.step + 1
        state.sample = made.next_sample
        self._delivered.append(made)

    def _tensors(self, made: _Made) -> dict[str, Any]:
        import torch

        tensors = dict(made.slot.tensors)
        arrays = made.batch.arrays
        tensors["cu_seqlens"] = torch.from_numpy(arrays["cu_seqlens"])
        if self._copy:
            tensors = {name: t.clone() for name, t in tensors.items()}
        if self._device is not None:
            tensors = {name: t.to(self._device, non_blocking=self._pin) for name, t in tensors.items()}
            if self._pin:
                made.ready = torch.cuda.Event()
                made.ready.record()
        return tensors | {"max_seqlen": made.batch.max_seqlen}

    def _begin_pass(self, number: int) -> None:
        self.close()
        self._plan = self.data.plan(number)
        self._state.number, self._state.ended = number, False
        self._state.lanes = {lane: self._plan.start(lane) for lane in self._own}
        self._foreign = {lane: self._plan.start(lane) for lane in range(self.data.lanes)}
        self._origin = self._state.sample

    # ------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """What this rank has delivered, as a plain JSON-able dict. Not collective."""
        return self._state.to_cursor(self.data.fingerprint(), self.data.lanes, self.data.names).to_dict()

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, accept: Collection[str] = ()
    ) -> None:
        """Go on where a state was saved: one state, or the list of all ranks' states.

        Refuses a state of other data, another tokenizer or other settings, naming what differs; `accept` takes the
        names (such as {"weights"}) that may differ.
        """
        self.close()
        number = _pass_of(state)
        plan = self.data.plan(number)
        loaded, known = load_states(
            state,
            fingerprint=self.data.fingerprint(),
            names=self.data.names,
            lanes=self.data.lanes,
            own=self._own,
            rank=self.rank,
            accept=accept,
            fresh={lane: plan.start(lane) for lane in range(self.data.lanes)},
        )
        self._plan, self._state = plan, loaded
        self._foreign = known if len(known) == self.data.lanes else None
        self._origin = loaded.sample
        self._step_digest = Digest()
        self._started = None
        self._drained = self._totals()
        self._delivered.clear()

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

        return merge_states(gather_json(own))

    @property
    def ended(self) -> bool:
        """Whether the pass is over and was seen to be; iterating then starts the next one."""
        return self._state.ended

    @property
    def step(self) -> int:
        """How many steps were delivered."""
        return self._state.step

    @property
    def digest(self) -> str:
        """Over everything this rank delivered. The sum over ranks is the run's digest: see `gather_state`."""
        return str(self._state.digest)

    @property
    def step_digest(self) -> str:
        """The part of the digest that the last batch added."""
        return str(self._step_digest)

    # ---------------------------------------------------------------------------------------- insight

    def pieces(self, batch: Mapping[str, Any]) -> list[Piece]:
        """Where the tokens of the batch that was delivered last come from."""
        first = int(batch["sample_index"][0])
        for made in self._delivered:
            if made.indices.start == first:
                return [
                    piece
                    for g, sample in zip(made.indices, made.samples, strict=True)
                    if sample.window is not None
                    for piece in self.data.makers[sample.source].pieces(sample.window, sample.block, g)
                ]
        raise ValueError(
            f"the batch with sample {first} is not the one this loader delivered last: ask before taking the next"
        )

    def metric_specs(self) -> tuple[MetricSpec, ...]:
        return _SPECS

    def drain_metrics(self) -> dict[str, int | float]:
        """What was delivered since the last call; {} if nothing was."""
        totals = self._totals()
        changed: dict[str, int | float] = {k: v - self._drained.get(k, 0) for k, v in totals.items()}
        self._drained = totals
        if not any(changed.values()):
            return {}
        return changed | self._next_times.drain()

    def _totals(self) -> dict[str, int]:
        totals = {f"data/{k}": v for k, v in self._state.delivered.items()}
        totals |= {
            f"data/source_tokens/{n}": t for n, t in zip(self.data.names, self._state.source_tokens, strict=True)
        }
        return totals

    def report(self) -> LoaderReport:
        """What this loader did since it started: speed, waits by name, realised mix, padding."""
        seconds = time.perf_counter() - self._started if self._started is not None else 0.0
        return LoaderReport.of(
            names=self.data.names,
            targets=self.data.weights,
            source_tokens=self._state.source_tokens,
            delivered=self._state.delivered,
            new_tokens=self._state.delivered["tokens"] - self._begun_tokens,
            seconds=seconds,
            waits=self.meter.totals(),
            digest=self.digest,
            steps=self._state.step,
        )

    def close(self) -> None:
        """Stop the threads. What was prefetched and not delivered is forgotten; iterating again makes it anew."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------- private

    def _check(self, workers: int, prefetch: int, labels: str) -> None:
        problems = []
        size, world, lanes = self.global_batch_size, self.world_size, self.data.lanes
        if not isinstance(size, int) or size < 1:
            problems.append(f"global_batch_size must be a positive integer, got {size!r}")
        elif size % world:
            problems.append(
                f"global_batch_size {size} cannot be shared by {world} ranks: use a world size that divides it, such as "
                f"{_divisors(size, lanes)}"
            )
        if lanes % world:
            problems.append(f"{lanes} lanes cannot be shared by {world} ranks: use a world size that divides them")
        if not isinstance(workers, int) or workers < 0:
            problems.append(f"tokenizer_workers must be 0 or more, got {workers!r}")
        if not isinstance(prefetch, int) or prefetch < 0:
            problems.append(f"prefetch_batches must be 0 or more, got {prefetch!r}")
        if labels not in ("shifted", "hf"):
            problems.append(f'labels must be "shifted" or "hf", got {labels!r}')
        if problems:
            raise ConfigError(problems)

    def _new_slot(self) -> _Slot:
        import torch

        rows, width = self.global_batch_size // self.world_size, self.data.seq_len
        shapes: dict[str, tuple[int, ...]] = {
            "input_ids": (rows, width),
            "labels": (rows, width),
            "position_ids": (rows, width),
        }
        shapes |= {"sample_index": (rows,), "row_count": (rows,)}
        if self._segments:
            shapes["segment_ids"] = (rows, width)
        if self._pin and not torch.cuda.is_available():
            raise ConfigError("pin_memory=True needs a CUDA device, and torch sees none here: leave it off")
        tensors = {name: torch.empty(shape, dtype=torch.int64, pin_memory=self._pin) for name, shape in shapes.items()}
        return _Slot(arrays={name: t.numpy() for name, t in tensors.items()}, tensors=tensors)

    def _new_ends(self, pool: WindowPool) -> Ends | None:
        if not self._plan.finite():
            return None
        if self.world_size == 1:
            return AloneEnds()
        if self._distributed:
            from headrace.loader.exchange import process_group_store

            name = f"headrace/ends/{self._number}/{self._state.number}/{self._origin}"
            return StoreEnds(process_group_store(), name, self.rank, self.world_size, self.meter)
        known = self._foreign or {}
        others = {
            lane: Lane(
                lane,
                self._plan,
                WindowPool(self.data.make_window, workers=0, meter=self.meter, deadline=self._deadline),
                *known[lane],
            )
            for lane in known
            if lane not in self._own
        }
        return ReplayEnds(
            others, lane_count=self.data.lanes, origin=self._origin, missing=self._foreign is None, meter=self.meter
        )


class _Pipeline:
    """Lanes in motion, and the thread that turns their samples into batches. Lives from one load to the next."""

    def __init__(self, loader: Loader) -> None:
        # A loader that is let go without close() takes its threads along: they hold the pipeline, which must not hold it.
        self._loader: Loader = weakref.proxy(loader)
        self._meter = loader.meter
        state = loader._state
        self._step, self._sample = state.step, state.sample
        self._pool = WindowPool(
            loader.data.make_window, workers=loader._workers, meter=loader.meter, deadline=loader._deadline
        )
        self._lanes = {lane: Lane(lane, loader._plan, self._pool, *state.lanes[lane]) for lane in loader._own}
        self._ends = loader._new_ends(self._pool)
        self._free: deque[_Slot] = deque()
        self._made: deque[_Made | None] = deque()
        self._failure: BaseException | None = None
        self._handed_over: _Made | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._depth = loader._prefetch + 2
        self._slots = 0
        origin = self._sample
        for lane in sorted(self._lanes, key=lambda lane: (lane - origin) % loader.data.lanes):
            self._lanes[lane].announce(float(origin + (lane - origin) % loader.data.lanes))
        self._thread: threading.Thread | None = None
        self._forgotten = weakref.finalize(loader, self.close)
        self._forgotten.atexit = False
        _pipelines.add(self)
        if loader._prefetch:
            self._thread = threading.Thread(target=self._produce, name="headrace-batches", daemon=True)
            self._thread.start()

    def next(self, wait: Wait) -> _Made | None:
        """The next batch, or None at the end. Gives the buffers of the one before back to the ring."""
        self._release()
        if self._thread is None:
            made = self._assemble(self._slot())
        else:
            with self._changed:
                while not self._made:
                    if self._failure is not None:
                        raise self._failure
                    wait.check()
                    self._changed.wait(min(0.5, max(wait.remaining(), 0.001)))
                made = self._made.popleft()
                self._changed.notify_all()
        self._handed_over = made
        return made

    def close(self, timeout: float = 2.0) -> None:
        self._forgotten.detach()  # it would keep this pipeline and its buffers for as long as the loader lives
        until = time.monotonic() + timeout
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.close(timeout)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(until - time.monotonic(), 0.0))

    def _release(self) -> None:
        before = self._handed_over
        if before is None:
            return
        if before.ready is not None:
            with Wait("loader.copy", meter=self._meter):
                before.ready.synchronize()
        with self._changed:
            self._free.append(before.slot)
            self._handed_over = None
            self._changed.notify_all()

    def _produce(self) -> None:
        try:
            while True:
                with self._changed, Wait("loader.ahead", meter=self._meter, deadline=1e6, hidden=True):
                    while not self._closed and (len(self._made) > self._loader._prefetch or not self._may_take_slot()):
                        self._changed.wait(1.0)
                    if self._closed:
                        return
                made = self._assemble(self._slot())
                with self._changed:
                    self._made.append(made)
                    self._changed.notify_all()
                if made is None:
                    return
        except BaseException as error:  # raised again by the next() that needs the batch
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _may_take_slot(self) -> bool:
        return bool(self._free) or self._slots < self._depth

    def _slot(self) -> _Slot:
        with self._changed:
            if self._free:
                return self._free.popleft()
            self._slots += 1
        return self._loader._new_slot()

    def _assemble(self, slot: _Slot) -> _Made | None:
        """Step `self._step`, or None when no rank has anything more to deliver."""
        loader = self._loader
        lanes, world, rank = loader.data.lanes, loader.world_size, loader.rank
        first = self._sample
        mine = range(first + (rank - first) % world, first + loader.global_batch_size, world)
        with phase("lanes", meter=self._meter):
            own = self._has_data(mine)
            if self._ends is None:
                if not own:
                    raise HeadraceError(
                        "no source has a single document with text left to read: repeating would go on for ever without "
                        "delivering anything. Check the files, or text_key."
                    )
            else:
                others = self._ends.others_have_data(self._step, first, own, lambda: self._closed)
                if not own and not others:
                    return None
            samples = tuple(self._lanes[g % lanes].take(float(g)) for g in mine)
        with phase("assemble", meter=self._meter):
            made = self._fill(slot, mine, samples, first)
        self._step += 1
        self._sample = first + loader.global_batch_size
        return made

    def _has_data(self, mine: range) -> bool:
        lanes = self._loader.data.lanes
        seen = dict.fromkeys(g % lanes for g in mine)
        return any(self._lanes[lane].has_more(float(mine.start)) for lane in itertools.chain(seen, self._lanes))

    def _fill(self, slot: _Slot, mine: range, samples: Sequence[Sample], first: int) -> _Made:
        loader, arrays = self._loader, slot.arrays
        pad, width = loader.data.packing.pad_id, loader.data.seq_len
        digest = tokens = rows = 0
        lengths: list[np.ndarray] = []
        for i, (g, sample) in enumerate(zip(mine, samples, strict=True)):
            arrays["sample_index"][i] = g
            if sample.window is None:
                arrays["input_ids"][i] = pad
                arrays["labels"][i] = -100
                arrays["position_ids"][i] = np.arange(width)
                arrays["row_count"][i] = 0
                pieces, content = np.empty(0, np.int32), _FILLER
            else:
                blocks, b = sample.window.blocks, sample.block
                expand_block(
                    blocks,
                    b,
                    pad,
                    loader._unshifted,
                    arrays["input_ids"][i],
                    arrays["labels"][i],
                    arrays["position_ids"][i],
                )
                arrays["row_count"][i] = blocks.row_count[b]
                pieces = blocks.piece_len[blocks.piece_ptr[b] : blocks.piece_ptr[b + 1]]
                content = blocks.hashes[b]
                rows += int(blocks.row_count[b])
                tokens += sample.tokens
            if loader._segments:
                arrays["segment_ids"][i, : sample.tokens] = np.repeat(np.arange(1, len(pieces) + 1), pieces)
                arrays["segment_ids"][i, sample.tokens :] = 0
            lengths.append(pieces)
            if sample.tokens < width:
                lengths.append(np.array([width - sample.tokens], np.int32))
            digest += sample_term(g, content)
        sizes = np.concatenate(lengths)
        borders = np.zeros(len(sizes) + 1, np.int32)
        np.cumsum(sizes, out=borders[1:])
        batch = Batch(
            arrays={**arrays, "cu_seqlens": borders},
            step=self._step,
            max_seqlen=int(sizes.max()),
            tokens=tokens,
            rows=rows,
        )
        return _Made(batch, mine, tuple(samples), digest, first + loader.global_batch_size, slot)


def _rank_and_world(rank: int | None, world: int | None) -> tuple[int, int, bool]:
    """Rank, world size, and whether torch.distributed connects them."""
    if (rank is None) != (world is None):
        raise ConfigError(f"dp_rank and dp_world_size belong together, got dp_rank={rank}, dp_world_size={world}")
    distributed = sys.modules.get("torch.distributed")  # never imported here: whoever initialised it has
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


def _pass_of(state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> int:
    """Which pass a state is in; a state that does not say is refused later, by name."""
    first = state if isinstance(state, Mapping) else (state[0] if state else {})
    body = first.get("body") if isinstance(first, Mapping) else None
    number = body.get("pass", 0) if isinstance(body, Mapping) else 0
    return number if isinstance(number, int) and number >= 0 else 0


def _divisors(size: int, lanes: int) -> str:
    return ", ".join(str(w) for w in range(1, min(size, lanes) + 1) if size % w == 0 and lanes % w == 0)
