"""Batches leave for the trainer.

    loader = Loader(data, global_batch_size=32)
    for batch in loader:                      # dict of tensors, the rank's share of the global batch
        ...
        saved = loader.state_dict()           # what was delivered, not what was prefetched; local, needs no other rank
    loader.load_state_dict(saved)             # or the list of all ranks' states, at another world size

One loader for three kinds of data: packed text (`TextDataset`), prepared blocks (`PreparedDataset`) and streams (`StreamMixingDataset`). What differs
between them is in their plans (loader_plan.py).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

from headrace.batch import BatchSpec
from headrace.errors import ConfigError, DeadlineExceeded, EndOfData
from headrace.loader.dataset import TextDataset
from headrace.loader.loader_plan import LoaderPlan, Rank
from headrace.loader.prepared import PreparedDataset
from headrace.loader.prepared_plan import PreparedPlan
from headrace.loader.report import LoaderReport
from headrace.loader.text_plan import TextPlan
from headrace.loader.windows import Piece
from headrace.metrics import Histogram, MetricSpec, Wait
from headrace.runtime.background import BackgroundThread
from headrace.runtime.prefetch import Prefetch
from headrace.settings import LoaderOptions, LoaderSettings, with_options

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger(__name__)
_TIMES_AT_ONCE = 256
"""Durations of next() that are added to the histogram together; the call that adds them is slower."""


class Loader:
    """Delivers this rank's share of each global batch of a dataset, as dicts of tensors.

    - `data`: a `TextDataset`, `PreparedDataset` or `StreamMixingDataset`. Of the last it takes the files and the mixing, not the position.
    - `settings`: a `LoaderSettings`. Its fields may be given by name too, and then win: `Loader(data, global_batch_size=32, prefetch_batches=4)`.
      Labels are those of the same position, already shifted, unless `labels="hf"`.
    - `dp_rank`, `dp_world_size`: this rank; from torch.distributed unless given.
    - `mesh`, `dp_dims`: a DeviceMesh in place of both. Ranks that differ only outside of `dp_dims` get the same rows.
    - `device`: move batches there. With `pin_memory=True` the copy does not block.
    - `record`: keep what `drain_flight` returns.

    A batch belongs to its receiver: its memory is reused only when nothing refers to it any more. Iterating again goes on where delivery stopped; after the end it
    starts the next pass. Near the end of finite sources of text some lanes are dry before others. A step in which no rank has anything to learn is skipped, and
    steps keep their numbers. A rank of several may still get a batch with nothing to learn, at a step that teaches other ranks something.
    """

    def __init__(
        self,
        data: Any,
        settings: LoaderSettings | None = None,
        *,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        dp_dims: Sequence[str] = ("dp",),
        device: str | torch.device | None = None,
        record: bool = False,
        **options: Unpack[LoaderOptions],
    ) -> None:
        chosen = with_options(settings or LoaderSettings(), options, type(self).__name__)
        rank = Rank.find(dp_rank, dp_world_size, mesh, dp_dims)
        if isinstance(data, TextDataset):
            self.plan: LoaderPlan[Any] = TextPlan(data, chosen, rank, record=record)
        elif isinstance(data, PreparedDataset):
            self.plan = PreparedPlan(data, chosen, rank)
        elif hasattr(data, "loader_plan"):
            self.plan = data.loader_plan(chosen, rank)
        else:
            raise ConfigError(
                f"a loader takes a TextDataset, a PreparedDataset or a StreamMixingDataset, got a {type(data).__name__}"
            )
        if device is not None:
            _check_device(device)
        self._device = device
        self._wait = Wait(self.plan.next_wait, meter=self.meter, deadline=chosen.deadline * self.plan.patience)
        self._next_times = Histogram("loader/next")
        self._seconds: list[float] = []
        """What next() took, until the histogram knows of it."""
        self._started: float | None = None
        self._begun_tokens = 0
        self._running: _Running | None = None
        weakref.finalize(self, self.plan.close)

    data = property(lambda self: self.plan.data, doc="The dataset.")
    meter = property(lambda self: self.plan.meter, doc="What the waits are counted by.")
    rank = property(lambda self: self.plan.rank.rank, doc="This rank.")
    world_size = property(lambda self: self.plan.rank.world_size, doc="How many ranks there are.")
    global_batch_size = property(
        lambda self: self.plan.settings.global_batch_size, doc="Rows of a step, over all ranks."
    )
    fields = property(lambda self: self.plan.settings.lm_fields(), doc="The fields of a batch of tokens.")

    # -------------------------------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.plan.state.ended:
            self.stop()
            self.plan.next_pass()
        return self

    def __next__(self) -> dict[str, Any]:
        plan = self.plan
        if plan.state.ended:
            raise StopIteration
        if self._running is None:
            self._running = _Running(plan, self)
        if self._started is None:
            self._started = time.perf_counter()
            self._begun_tokens = plan.state.delivered["tokens"]
        with self._wait as wait:
            try:
                ready = self._running.take(wait.deadline)
            except DeadlineExceeded as error:
                explained = self._running.maker.explained(error)
                self.stop()
                raise explained from error
            except BaseException:
                self.stop()
                raise
        if ready is None:
            plan.end(self._running.maker)
            self.stop()
            raise StopIteration
        batch = plan.deliver(ready)
        self._seconds.append(wait.seconds)
        if len(self._seconds) == _TIMES_AT_ONCE:
            self._record_times()
        return batch if self._device is None else self._moved(batch)

    def __len__(self) -> int:
        """How many steps a pass has; TypeError where that is not known beforehand, or the pass never ends."""
        return len(self.plan)

    def __bool__(self) -> bool:
        return True

    def set_epoch(self, epoch: int) -> None:
        """Start pass `epoch` over finite data, if none is under way and it was not had yet; otherwise change nothing.

        Passes follow each other by themselves. Only a loop that names its epochs needs this.
        """
        if not isinstance(epoch, int) or epoch < 0:
            raise ConfigError(f"set_epoch takes an integer of 0 or more, got {epoch!r}")
        self.stop()
        self.plan.skip_to_pass(epoch)

    def stop(self) -> None:
        """Make no more batches. What was made and not delivered is forgotten; iterating again makes it anew."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def close(self) -> None:
        """Stop the threads, and the processes that read. Iterating again starts them anew."""
        self.stop()
        self.plan.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _moved(self, batch: dict[str, Any]) -> dict[str, Any]:
        """On its way to the device."""
        wait = not self.plan.settings.pin_memory
        return {k: v.to(self._device, non_blocking=not wait) if hasattr(v, "to") else v for k, v in batch.items()}

    # ------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """What this rank has delivered, as a plain JSON-able dict. Not collective."""
        return self.plan.state_dict()

    def load_state_dict(
        self,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        accept: Collection[str] = (),
        fixed: Mapping[str, str] | None = None,
    ) -> None:
        """Go on where a state was saved: one state, or the list of all ranks' states.

        Refuses a state of other data, another tokenizer, other settings or other steps passed over, naming what differs;
        `accept` takes the names (such as {"weights"}) that may differ. With "data" the sources are counted anew and their bytes
        taken as they are now; without it a chunk that differs from what was read before is refused when it is read. `fixed`
        names what may not be accepted, and why: {"config:seq_len": "the model has 2,048 positions"}.
        """
        self.stop()
        self.plan.load_state_dict(state, accept=accept, fixed=fixed or {})
        self._started = None

    def gather_state(self) -> dict[str, Any]:
        """The states of all ranks as one. Collective: every rank must call it, and every rank gets it."""
        own = self.state_dict()
        if self.world_size == 1:
            return own
        if not self.plan.rank.connected:
            raise ConfigError(
                "gather_state() needs torch.distributed: call init_process_group first, or collect the ranks' state_dict() "
                "yourself and pass the list to load_state_dict"
            )
        from headrace.loader.exchange import gather_json

        # Ranks of a mesh that get the same rows have the same state: one of each is enough.
        return self.plan.merge(list({tuple(s["body"].get("share", ())): s for s in gather_json(own)}.values()))

    # ---------------------------------------------------------------------------------------- insight

    @property
    def spec(self) -> BatchSpec:
        """The fields of this loader's batches: names, dtypes, shapes and roles."""
        return self.plan.spec

    @property
    def ended(self) -> bool:
        """Whether the pass is over and was seen to be; iterating then starts the next one."""
        return self.plan.state.ended

    @property
    def step(self) -> int:
        """The number of the last step delivered, counted from 1; 0 before the first. Steps that were passed over have their numbers too."""
        return self.plan.state.step

    @property
    def delivered_steps(self) -> int:
        """How many steps were delivered: `step` without those that were passed over."""
        return self.plan.delivered_steps

    @property
    def skipped(self) -> list[list[int]]:
        """The ranges of steps [from, to) that were passed over on request (`skip`), counted from 1."""
        return self.plan.skipped

    @property
    def skipped_steps(self) -> int:
        """How many steps were passed over on request (`skip`)."""
        return sum(b - a for a, b in self.plan.skipped)

    @property
    def empty_steps(self) -> int:
        """How many steps were passed over because no rank had anything to learn in them."""
        return self.plan.empty_steps

    @property
    def digest(self) -> str:
        """Over everything this rank delivered. The sum over ranks is the run's digest: see `gather_state`. Streams have none."""
        return self.plan.digest

    @property
    def step_digest(self) -> str:
        """The part of the digest that the last batch added."""
        return self.plan.step_digest

    def pieces(self, batch: Mapping[str, Any]) -> list[Piece]:
        """Where the tokens of the batch that was delivered last come from."""
        return self.plan.pieces(batch)

    def drain_flight(self) -> dict[str, Any] | None:
        """What was delivered since the last call, as one line of a flight record (provenance/record.py); None if nothing was."""
        return self.plan.drain_flight()

    def left_out(self) -> dict[str, int]:
        """What this rank left out since it was made or loaded a state: `empty_documents` and `bad_rows` of the windows it opened,
        and `bad_shards`, files of which nothing could be read (the same on every rank). {} where that is not counted."""
        return self.plan.left_out()

    def metric_specs(self) -> tuple[MetricSpec, ...]:
        """Every key of `drain_metrics`, with its reduction over ranks."""
        return self.plan.metric_specs()

    def drain_metrics(self) -> dict[str, int | float]:
        """What was delivered since the last call; {} if nothing was."""
        self._record_times()
        changed = self.plan.drain()
        return changed | self._next_times.drain() if changed else {}

    def _record_times(self) -> None:
        self._next_times.record_many(self._seconds)
        self._seconds.clear()

    def report(self) -> LoaderReport:
        """What this loader did since it started: speed, waits by name, realised mix, padding."""
        plan, state = self.plan, self.plan.state
        tokens, padding, by_source = state.delivered["tokens"], state.delivered["padding"], state.tokens_by_source
        seconds = time.perf_counter() - self._started if self._started is not None else 0.0
        total, waits = sum(by_source), self.meter.totals()
        shares = [count / total if total else 0.0 for count in by_source]
        return LoaderReport(
            steps=self.delivered_steps,
            tokens=tokens,
            seconds=seconds,
            tokens_per_second=(tokens - self._begun_tokens) / seconds if seconds else 0.0,
            padding=padding / (tokens + padding) if tokens + padding else 0.0,
            documents=state.delivered["rows"],
            mix=dict(zip(plan.names, zip(shares, plan.targets(), strict=True), strict=True)),
            exposed={n: float(waits[k]) for n in (plan.next_wait,) if (k := f"wait/{n}/seconds") in waits},
            digest=self.digest,
            left_out=self.left_out(),
            unit=plan.unit,
        )

    def __repr__(self) -> str:
        of = f"rank {self.rank} of {self.world_size}"
        return f"{type(self).__name__}({of}, global_batch_size {self.global_batch_size}, step {self.step})"


class PreparedLoader(Loader):
    """`Loader` over prepared blocks, by the name of earlier versions.

    `data` is a `PreparedDataset`. `settings`, `dp_rank`, `dp_world_size`, `mesh`, `dp_dims`, `device` and `record` are those of `Loader`.
    Any world size up to the batch size works; where it does not divide the batch, ranks get one row more or less.
    """


class _Running:
    """Batches in the making, from one load of a state to the next."""

    def __init__(self, plan: LoaderPlan[Any], loader: Loader) -> None:
        self.maker = plan.start()
        self._thread = BackgroundThread(plan.room, on_error=_log.error, meter=plan.meter)
        self._batches = Prefetch(
            self._thread, self.maker.make_next, depth=plan.settings.prefetch_batches, wait_name=plan.batch_wait,
            take_makes=plan.take_makes or not plan.settings.prefetch_batches, meter=plan.meter,
        )  # fmt: skip
        # A loader that is let go without close() takes its threads along: they hold the maker, which does not hold the loader. Those of loaders
        # that are left when the interpreter exits are stopped too: a thread that is still in a tokenizer then can abort the process.
        self._forgotten = weakref.finalize(loader, self.close)

    def take(self, deadline: float) -> Any | None:
        """The next batch, or None at the end."""
        try:
            return self._batches.take(deadline)
        except EndOfData:
            return None

    def close(self, timeout: float = 2.0) -> None:
        self._forgotten.detach()  # it would keep the maker and its buffers for as long as the loader lives
        until = time.monotonic() + timeout
        self._batches.close()
        self.maker.interrupt(timeout)
        self._thread.close(until - time.monotonic())
        self.maker.close()


def _check_device(device: Any) -> None:
    """A device that is not there is refused now, not with the first batch."""
    import torch

    try:
        wanted = torch.device(device)
        if wanted.type == "cuda":
            if (wanted.index or 0) >= torch.cuda.device_count():
                raise RuntimeError(f"torch sees {torch.cuda.device_count()} CUDA devices here")
        else:
            torch.empty(0, device=wanted)
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"device={device!r} cannot be used: {reason}. Leave it out to have batches in memory"
        ) from error
