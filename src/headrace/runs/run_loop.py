"""The run loop that all kinds of training runs share.

    run_task(folder, watcher, open_task)

    ranks ──► open_task ──► newest checkpoint that verifies? ──► step, step, … ──► checkpoint, summary
                                                                  │ every log_every steps: one line over all ranks
                                                                  │ every checkpoint_every steps: one checkpoint

A `Task` supplies what differs between kinds of runs: its data, its trainer, one step, what a checkpoint and the summary
hold beside the model. The loop owns the process group, signals, metrics and their sinks, the journal, checkpoints, progress
and the summary. Step n is the same step whether it is reached in one go or after any number of kills, because the model, the
optimiser and the state of the data are saved together. Nothing here prints: a `Watcher` gets the events.
"""

from __future__ import annotations

import abc
import contextlib
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from headrace.errors import CursorMismatch, HeadraceError, short_number
from headrace.files import Container
from headrace.loader.exchange import gather_json
from headrace.metrics import (
    SINKS,
    Accumulator,
    BackgroundSinks,
    JsonlSink,
    Mean,
    MetricSpec,
    Reducer,
    Reduction,
    Sink,
    SinkContext,
    default_meter,
    register,
    registered_specs,
)  # fmt: skip
from headrace.runs.folder import RunFolder
from headrace.runtime.signals import stop_signals

if TYPE_CHECKING:
    import numpy as np

    from headrace.train import CheckpointStore

S = TypeVar("S", bound="RunSummary")
_LOSSES_KEPT = 10
"""The last loss of a run is the mean over this many steps: one batch alone says little."""

register(
    MetricSpec(
        "train/loss", Reduction.MEAN, unit="", help="mean loss over the interval (of a language model: nat per token)"
    ),
    MetricSpec(
        "train/grad_norm", Reduction.MAX, unit="", help="largest gradient norm of the interval, before clipping"
    ),
    MetricSpec("train/lr", Reduction.MAX, unit="", help="learning rate"),
    MetricSpec("train/tokens", Reduction.SUM, unit="tokens", help="tokens (of cells: hidden features) learned from"),
    MetricSpec("run/stop", Reduction.MAX, unit="", help="1 once a rank was asked to stop"),
)


# ------------------------------------------------------------------------------------------ what a task is


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """Result of one training step; the same on every rank."""

    loss: float
    learned: int
    """Tokens or values that the loss is a mean over; 0 for a step with nothing to learn, which has no loss."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    lr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskState:
    """The task's part of a checkpoint, beside the model, the optimiser and the losses."""

    meta: Mapping[str, Any]
    """JSON values, stored beside the loop's own keys."""
    digest: str
    """Digest of the data delivered so far, by all ranks."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)


class Trainer(Protocol):
    """A model with its optimiser, as checkpoints see it."""

    @property
    def steps_taken(self) -> int: ...
    def state_arrays(self) -> tuple[dict[str, np.ndarray], dict[str, str], dict[str, Any]]: ...
    def load_state_arrays(
        self, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str], meta: Mapping[str, Any], /
    ) -> None: ...
    def model_sha256(self) -> str: ...


class Task(abc.ABC, Generic[S]):
    """One kind of run. The loop calls every method on its own thread; "collective" methods are called on every rank."""

    kind: ClassVar[str]
    """Written into checkpoints."""
    unit: ClassVar[str]
    """Unit of the rate in the progress line: tok, cells."""
    rate_key: ClassVar[str]
    """Key of that rate in metrics.jsonl, such as tokens_per_second."""
    amount_metric: ClassVar[str]
    """Metric that is divided by the seconds of an interval to give the rate."""
    wait: ClassVar[str]
    """Name of the wait for data that the progress line shows."""
    exposed_waits: ClassVar[tuple[str, ...]]
    """Names of all waits for data in the trainer's thread; the summary adds them up."""

    trainer: Any
    """The model with its optimiser: a `Trainer`, and whatever the task itself calls."""

    @abc.abstractmethod
    def step(self) -> StepOutcome | None:
        """Take the next training step; None if the data ended on all ranks, or a signal stopped the run before the step. Runs inside `meter.step()`."""

    @abc.abstractmethod
    def step_metrics(self) -> Mapping[str, Any]:
        """Metrics of the step just taken, to be accumulated over the interval. Called after every step."""

    @abc.abstractmethod
    def mix(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Share of each source in an interval, from its reduced metrics."""

    def progress_text(self, line: Mapping[str, Any]) -> str:
        """Text that replaces loss, rate and mix in the progress line; empty to leave them."""
        return ""

    @abc.abstractmethod
    def state(self) -> TaskState:
        """State of the data after the step just taken. Collective; only what rank 0 returns is saved."""

    @abc.abstractmethod
    def restore(self, container: Container, step: int) -> Mapping[str, Any]:
        """Load the state that a checkpoint of `step` holds; the loop loads the trainer's afterwards.

        Returns facts for the journal. Raises CursorMismatch if the state does not fit the data of this run.
        """

    @abc.abstractmethod
    def summarise(self, common: Mapping[str, Any]) -> S:
        """The summary: `common` holds the fields of RunSummary. Collective."""

    # ---- Hooks that a task may leave as they are.

    @property
    def data_ended(self) -> bool:
        """Whether a finite run has delivered everything."""
        return False

    def select_checkpoint(self, store: CheckpointStore) -> tuple[int, Container] | None:
        """The generation to continue from; None starts at step 0. Rank 0 only."""
        return store.latest()

    def begin(self, resumed: Mapping[str, Any] | None) -> None:
        """Called before the first step, after the journal's first line; `resumed` is the checkpoint's meta."""

    def interval_metrics(self) -> Mapping[str, Any]:
        """Metrics that describe an interval as a whole and are not accumulated step by step."""
        return {}

    def write_records(self) -> None:
        """Write the records of all steps since the last call. Collective; called before every line and checkpoint."""

    def saved(self, state: TaskState, oldest: int) -> None:
        """Called on rank 0 once a checkpoint with `state` is durable; `oldest` is the step of the oldest one that is kept."""


# ------------------------------------------------------------------------------------ progress and summary


class Watcher(Protocol):
    """Receives the events of a run for people. Called on rank 0 only."""

    def waiting(self, what: str) -> None: ...
    def step(self, line: str, done: int, total: int) -> None:
        """Show the line of an interval; `done` of `total` steps are taken."""
        ...

    def info(self, sentence: str) -> None:
        """Show a sentence, unless standard output is for machines."""
        ...

    def notice(self, sentence: str) -> None:
        """Show a sentence, also where standard output is for machines."""
        ...


@dataclass(slots=True, kw_only=True)
class RunSummary:
    """The state of a run when its process ends. Every kind of run adds fields of its own."""

    state: str
    """completed, stopped or data_ended."""
    step: int
    steps: int
    world_size: int
    loss_first: float
    loss_last: float
    seconds: float
    exposed_wait_seconds: float
    exposed_wait_share: float
    model_sha256: str
    config_hash: str
    resume: str
    signal: int = 0
    """Number of the signal that stopped the run; 0 if none did."""

    @property
    def data_digest(self) -> str:
        """Digest of the data that the run delivered."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; NaN, the loss of a run without a step, is null."""
        return {name: None if value != value else value for name, value in asdict(self).items()}


# ---------------------------------------------------------------------------------------------------- run


@dataclass(slots=True, kw_only=True)
class Run:
    """The run that a task belongs to: its folder, rank, journal and resources."""

    folder: RunFolder
    watcher: Watcher
    rank: int = 0
    world_size: int = 1
    accept: frozenset[str] = frozenset()
    """Kinds of changes since the checkpoint that the user accepted (`--accept`)."""
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Closed when the run ends, before the process group."""
    journal: JsonlSink | None = None
    """Open on rank 0 only."""
    stop_signal: int = 0
    """Number of the signal that asked for a stop; 0 if none did."""

    @property
    def is_lead(self) -> bool:
        """Whether this rank writes the run's folder."""
        return self.rank == 0

    def note(self, event: str, **facts: Any) -> None:
        """Append a fact to the journal; does nothing on other ranks than 0."""
        if self.journal is not None:
            self.journal.write({"event": event, "time": time.time(), "world_size": self.world_size, **facts})

    def gather(self, value: Any) -> list[Any]:
        """The JSON value of every rank, in rank order. Collective."""
        return gather_json(value) if self.world_size > 1 else [value]


def run_task(
    folder: RunFolder,
    watcher: Watcher,
    open_task: Callable[[Run], Task[S]],
    *,
    accept: Collection[str] = (),
    device: str,
) -> S:
    """Run or continue the run in `folder` until its last step, or until a signal stops it. Every rank calls this.

    Args:
        folder: The run's folder; rank 0 holds its lock.
        watcher: Receives the events of the run.
        open_task: Makes the task once this process knows its rank. What it enters into `run.resources` is closed at the end.
        accept: Kinds of changes since the checkpoint that the user accepted.
        device: Where the model is: auto, cpu or cuda.
    """
    watcher.waiting("torch, ranks")
    from headrace.train import CheckpointStore, init_distributed, shutdown_distributed

    config = folder.config
    ranks = init_distributed(device, timeout_seconds=config.run.deadline)
    try:
        with contextlib.ExitStack() as stack:
            run = Run(
                folder=folder, watcher=watcher, rank=ranks.rank, world_size=ranks.world_size, accept=frozenset(accept), resources=stack
            )  # fmt: skip
            if run.is_lead:
                run.journal = stack.enter_context(JsonlSink(folder.path / "journal.jsonl"))
            task = open_task(run)
            store = CheckpointStore(
                folder.make_folder("checkpoints"), config.run.keep_checkpoints, writer=run.is_lead, report=watcher.notice
            )  # fmt: skip
            loop = _Loop(run, task, store, _open_sinks(run) if run.is_lead else ())
            loop.restore()
            stack.enter_context(stop_on_signal(run))
            return loop.finish(loop.take_steps())
    finally:
        shutdown_distributed()


class _Loop(Generic[S]):
    """The steps of one run in this process, with its losses, metrics and checkpoints."""

    def __init__(self, run: Run, task: Task[S], store: CheckpointStore, sinks: Sequence[Sink]) -> None:
        self.run, self.task, self.store, self.sinks = run, task, store, sinks
        self.trainer: Trainer = task.trainer
        self.settings = run.folder.config.run
        self.losses: deque[float] = deque(maxlen=_LOSSES_KEPT)
        self.loss_first = math.nan
        self.exposed_seconds = 0.0
        self.started = self.interval_started = time.perf_counter()
        self.newest_saved: tuple[int, bool] = (0, False)
        """Step of the newest checkpoint, and whether the data had ended. Step 0 needs none."""

    # ------------------------------------------------------------------------------------------ restore

    def restore(self) -> None:
        """Continue from the newest checkpoint that verifies; all ranks from the same one."""
        run, task = self.run, self.task
        found = task.select_checkpoint(self.store) if run.is_lead else None
        step = run.gather(found[0] if found is not None else None)[0]
        if step is None:
            run.note("started", step=0)
            task.begin(None)
            return
        container = found[1] if found is not None else self.store.open(step)
        meta = container.meta
        try:
            facts = task.restore(container, step)
        except CursorMismatch as error:
            raise CursorMismatch(
                f"cannot resume {run.folder.path} at step {step}: {error}", error.differences
            ) from error
        self.trainer.load_state_arrays(container.arrays, container.dtypes, meta["trainer"])
        if self.trainer.steps_taken != step:
            raise HeadraceError(
                f"checkpoint of step {step} holds a model of step {self.trainer.steps_taken}; it was put together by hand, use another"
            )
        self.loss_first = math.nan if meta["loss_first"] is None else meta["loss_first"]
        self.losses.extend(meta["losses"])
        self.newest_saved = (step, task.data_ended)
        if run.is_lead:
            run.watcher.notice(f"resuming at step {step} of {self.settings.steps}")
            run.folder.keep_config()
        run.note("resumed", step=step, accepted=sorted(run.accept), config_hash=run.folder.config.hash, **facts)
        task.begin(meta)

    # -------------------------------------------------------------------------------------------- steps

    def take_steps(self) -> str:
        """Train until the last step, the end of the data or a stop, and save; returns the state of the run then."""
        run, task, meter = self.run, self.task, default_meter()
        last = min(self.settings.steps, self.settings.stop_after or self.settings.steps)
        specs = registered_specs()
        interval = Accumulator(specs)
        reducer = Reducer(specs, cpu_group(run.world_size), deadline=self.settings.deadline)
        meter.drain()
        self.started = self.interval_started = time.perf_counter()
        if task.data_ended:
            return "data_ended"
        first = True
        if self.step < last:
            run.watcher.waiting("the first batch")
        state = "completed"
        while self.step < last:
            with meter.step(), _naming_waits(run.watcher) if first else contextlib.nullcontext():
                outcome = task.step()
            if outcome is None:
                state = "stopped" if run.stop_signal and not task.data_ended else "data_ended"
                break
            if first:
                self._tell_first_step(meter.totals())
                first = False
            interval.add(self._step_values(outcome, {**meter.drain(), **task.step_metrics()}))
            # Several ranks stop only at a line, where they agree on it.
            stops = bool(run.stop_signal) and run.world_size == 1
            if stops or self.step % self.settings.log_every == 0 or self.step in (1, last):
                stops = self._write_line(interval, reducer)
            if stops:
                state = "stopped"
                break
            if self.step % self.settings.checkpoint_every == 0 and self.step < last:
                self.save()
        if interval.steps:  # the data ended between two lines
            self._write_line(interval, reducer)
        self.save()
        return "stopped" if state == "completed" and self.step < self.settings.steps else state

    @property
    def step(self) -> int:
        return self.trainer.steps_taken

    def _tell_first_step(self, totals: Mapping[str, float]) -> None:
        """Show when the first step was done, and the longest waits until then."""
        waits = {k[5:-8]: v for k, v in totals.items() if k.startswith("wait/") and k.endswith("/seconds")}
        longest = sorted((item for item in waits.items() if item[1] >= 0.05), key=lambda item: -item[1])[:4]
        named = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in longest)
        since = time.perf_counter() - self.run.folder.opened
        self.run.watcher.info(f"first step after {since:.1f} s" + (f" ({named})" if named else ""))

    def _step_values(self, outcome: StepOutcome, values: dict[str, Any]) -> dict[str, Any]:
        if outcome.learned:
            self.loss_first = outcome.loss if math.isnan(self.loss_first) else self.loss_first
            self.losses.append(outcome.loss)
        self.exposed_seconds += sum(float(values.get(f"wait/{n}/seconds", 0.0)) for n in self.task.exposed_waits)
        return values | {
            "train/loss": Mean(outcome.loss * outcome.learned, outcome.learned),
            "train/grad_norm": outcome.grad_norm,
            "train/lr": outcome.lr,
            "train/tokens": outcome.learned if self.run.is_lead else 0,  # `learned` counts those of all ranks
            "run/stop": self.run.stop_signal,
        }

    def _write_line(self, interval: Accumulator, reducer: Reducer) -> bool:
        """Sum up the interval over ranks and write its line; returns whether the ranks agreed to stop. Collective."""
        run, task = self.run, self.task
        line = reducer.reduce({**interval.drain(), **task.interval_metrics()}, step=self.step)
        now = time.perf_counter()
        seconds, self.interval_started = now - self.interval_started, now
        task.write_records()
        if run.is_lead:
            wait = float(line.get(f"wait/{task.wait}/seconds_max", line.get(f"wait/{task.wait}/seconds", 0.0)))
            rate = float(line.get(task.amount_metric, 0)) / seconds if seconds else 0.0
            record = {"step": self.step, "time": time.time(), "seconds": seconds, task.rate_key: rate, **line}
            for sink in self.sinks:
                sink.write(record)
            share = wait / seconds if seconds else 0.0
            waited = f"wait {1e3 * wait / max(int(line['steps_in_interval']), 1):.1f} ms ({share:.0%})"
            steps = self.settings.steps
            text = task.progress_text(line)
            if not text:
                # The loss is absent if no step of the interval learned from anything.
                text = f"loss {float(line.get('train/loss', 'nan')):.3f}  {task.unit}/s {short_number(rate):>5}"
                mix = (f"{name} {part:.2f}".replace("0.", ".") for name, part in task.mix(line).items())
                waited += f"  mix {' '.join(mix)}"
            run.watcher.step(f"step {self.step:>{len(str(steps))}}  {text}  {waited}", self.step, steps)
        # A signal may have come since the metrics were reduced: a single rank stops for it now, several at the next line.
        agreed = int(line["run/stop"])
        run.stop_signal = run.stop_signal or agreed
        return bool(run.stop_signal if run.world_size == 1 else agreed)

    # ------------------------------------------------------------------------------- checkpoint, summary

    def save(self) -> None:
        """Write model, optimiser, state of the data and losses of this step as one file. Collective."""
        run, task = self.run, self.task
        task.write_records()  # no step of a checkpoint may be missing there
        place = (self.step, task.data_ended)
        if place == self.newest_saved or self.step == 0:
            return
        state = task.state()
        if run.is_lead:
            arrays, dtypes, trainer = self.trainer.state_arrays()
            meta = {
                **state.meta,
                "kind": task.kind,
                "trainer": trainer,
                "digest": state.digest,
                "loss_first": None if math.isnan(self.loss_first) else self.loss_first,
                "losses": list(self.losses),
                "world_size": run.world_size,
                "model_sha256": self.trainer.model_sha256(),
                "config_hash": run.folder.config.hash,
            }
            self.store.save(self.step, {**arrays, **state.arrays}, {**dtypes, **state.dtypes}, meta)
            run.note("saved", step=self.step, digest=state.digest)
            task.saved(state, self.store.steps()[0])
        self.newest_saved = place

    def finish(self, state: str) -> S:
        """Write the summary and the journal's last line. Collective."""
        run, seconds = self.run, time.perf_counter() - self.started
        common = {
            "state": state, "step": self.step, "steps": self.settings.steps, "world_size": run.world_size,
            "loss_first": self.loss_first, "loss_last": sum(self.losses) / len(self.losses) if self.losses else math.nan, "seconds": seconds,
            "exposed_wait_seconds": self.exposed_seconds, "exposed_wait_share": self.exposed_seconds / seconds if seconds else 0.0,
            "model_sha256": self.trainer.model_sha256(), "config_hash": run.folder.config.hash,
            "resume": f"headrace run --resume {run.folder.path}", "signal": run.stop_signal if state == "stopped" else 0,
        }  # fmt: skip
        summary = self.task.summarise(common)
        if run.is_lead:
            run.note(state, step=summary.step, digest=summary.data_digest)
            run.folder.finish(summary.to_dict())
        return summary


# ------------------------------------------------------------------------------------------------- details


def _open_sinks(run: Run) -> list[Sink]:
    """metrics.jsonl, and the sinks that the config names, which are fed in the background."""
    folder, config = run.folder, run.folder.config
    sinks: list[Sink] = [run.resources.enter_context(JsonlSink(folder.path / "metrics.jsonl"))]
    context = SinkContext(
        name=config.run.name, config=config.resolved(), folder=folder.path, make_folder=folder.make_folder
    )
    if slow := [SINKS[name](context) for name in config.run.sinks]:
        sinks.append(run.resources.enter_context(BackgroundSinks(slow)))
    return sinks


def cpu_group(world_size: int) -> Any:
    """The process group that reduces metrics, which are in CPU memory: a new gloo group if the default one is nccl."""
    if world_size == 1:
        return None
    import torch.distributed as dist

    return dist.new_group(backend="gloo") if dist.get_backend() == "nccl" else None


@contextlib.contextmanager
def _naming_waits(watcher: Watcher, after: float = 1.0) -> Generator[None]:
    """Tell the watcher the names of the waits that are open, once, if the block takes longer than `after` seconds."""

    def show_waits() -> None:
        names = dict.fromkeys(wait.name for wait in default_meter().open_waits() if wait.exposed)
        if names:
            watcher.waiting(f"the first step ({', '.join(names)})")

    timer = threading.Timer(after, show_waits)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@contextlib.contextmanager
def stop_on_signal(run: Run) -> Generator[None]:
    """Stop after a step, with a checkpoint, at the first SIGINT or SIGTERM; a second one of the same kind has its usual effect."""

    def ask(number: int) -> None:
        run.stop_signal = number
        restore(number)  # of this signal only: a launcher sends SIGTERM to its ranks after the terminal's SIGINT
        if run.is_lead:
            when = "after this step" if run.world_size == 1 else "at the next line, when all ranks know"
            sentence = f"{signal.Signals(number).name}: stopping {when} (again: at once, without saving)"
            # In a thread: a signal handler that prints while the main thread prints would mix the two lines.
            threads.append(threading.Thread(target=run.watcher.notice, args=(sentence,), name="headrace-stop"))
            threads[-1].start()

    threads: list[threading.Thread] = []
    try:
        with stop_signals(ask) as restore:
            yield
    finally:
        for thread in threads:
            thread.join()
