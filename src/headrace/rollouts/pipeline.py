"""The pipeline from arriving rollouts to a published batch, beside an event loop that it does not stall: `RolloutPipeline`.

    async with RolloutPipeline(folder, seq_len=8192, ranks=4) as pipeline:
        pipeline.arrive(rollout_dict, step=12, key=(task, member))     returns at once
        report = await pipeline.finish(12, policy_version=11)          a batch file, metrics, seconds by phase

One worker thread takes each rollout when it arrives, makes its samples (`sample_rollout.py`) and writes their experts from the chunks they came in.
Every half millisecond it lets the loop run (`loop_yield.py`). The end of a step writes columns, a header and a name, in the worker thread as well.
With `use_process_pool` samples are made in processes (`processes.py`), and only written here.

A step ends once. A rollout that arrives later, or that is not samples by then, is counted as late and enters no batch. A rollout that cannot become samples is
counted by its cause. Samples are ordered by their keys, so a batch does not depend on the order of arrival. The rollouts of one task are one group: two draws of
one example have two baselines.

While it is open the pipeline samples the loop's lag ten times a second, for the metrics of each step. It also keeps the objects that were alive when it opened out of
the garbage collector (`freeze_garbage`): a full collection runs on the thread that allocates next, mostly the loop's, and walking the modules of a
process with torch in it takes 0.1 s of CPU and more (docs/decisions/rollouts-arrival.md).
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from headrace.errors import ConfigError, RolloutRefused, StorageError
from headrace.metrics import EventLoopLagMonitor, Sink, Wait, phase
from headrace.rollouts.advantages import AdvantageConfig, AdvantageFn, compute_advantages
from headrace.rollouts.batch_files import BatchWriter, WrittenSample, batch_path
from headrace.rollouts.checks import Limits
from headrace.rollouts.filters import Filter, Filtered, apply_filters
from headrace.rollouts.ingest import ENCODED
from headrace.rollouts.loop_yield import LoopYield
from headrace.rollouts.packing import pack_samples
from headrace.rollouts.pretokenize import Render
from headrace.rollouts.processes import RolloutProcesses
from headrace.rollouts.records import Rollout
from headrace.rollouts.sample_rollout import Processed, process_rollout
from headrace.rollouts.saving import save_rollouts
from headrace.rollouts.step_metrics import rollout_metrics

_log = logging.getLogger("headrace.rollouts")
_SMALL_TOKENS, _SMALL_TURNS = 4096, 8
Key = tuple[int, ...]
"""(task, member), or with the attempt after them: where a rollout stands in its step."""


class StepPhases:
    """Seconds by phase of one step. Used by any thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, name: str) -> Generator[None]:
        """Add the time of the body to phase `name`, and to the phase `rollouts.<name>` of the process's metrics."""
        start = time.perf_counter()
        try:
            with phase(f"rollouts.{name}"):
                yield
        finally:
            took = time.perf_counter() - start
            with self._lock:
                self.seconds[name] = self.seconds.get(name, 0.0) + took

    def line(self, step: int) -> str:
        """The phases on one line, the costliest first."""
        ordered = sorted(self.seconds.items(), key=lambda item: (-item[1], item[0]))
        return f"Step {step} phase breakdown: " + ", ".join(f"{name}={seconds:.3f}" for name, seconds in ordered)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of a step."""

    step: int
    policy_version: int
    path: Path | None
    """The batch; None if every rollout was filtered, refused or missing, and so nothing was published."""
    rollouts: int
    """Rollouts that became samples, filtered ones included."""
    samples: int
    """Samples in the batch."""
    tokens: int
    """Tokens of those samples."""
    refused: Mapping[str, int]
    """Rollouts that could not become samples, by cause."""
    truncated: int
    """Samples that were longer than seq_len and lost their end."""
    filtered: Filtered
    advantages: tuple[float, ...]
    """One for each rollout, in the order of their keys."""
    metrics: Mapping[str, float]
    phases: StepPhases

    @property
    def all_filtered(self) -> bool:
        """Whether the step has nothing to train on: the caller then asks for its groups again, a bounded number of times."""
        return self.path is None


@dataclass(slots=True)
class _OpenStep:
    writer: BatchWriter
    phases: StepPhases = field(default_factory=StepPhases)
    pending: dict[asyncio.Future[str | None], Key] = field(default_factory=dict)
    """Rollouts that are not samples yet."""
    keys: set[Key] = field(default_factory=set)
    done: dict[Key, tuple[Rollout, list[WrittenSample]]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    ended: bool = False
    """No rollout is written any more. Set on the loop; writers read it while they hold the lock."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that writes: the worker thread, or one that talks to a process."""


class RolloutPipeline:
    """The post-processing of one orchestrator. Its methods are called on one event loop."""

    def __init__(
        self, folder: Path | str, *, seq_len: int, ranks: int = 1, advantage: AdvantageConfig | AdvantageFn | None = None,
        filters: Sequence[Filter] = (), render: Render | None = None, save_to: Path | str | None = None,
        state_columns: Mapping[str, Sequence[str]] | None = None, limits: Limits | None = None, first_step: int = 0, deadline: float = 600.0,
        sinks: Sequence[Sink] = (), use_process_pool: bool | int = False, worker_retries: int = 2, worker_deadline: float = 60.0,
        freeze_garbage: bool = True, warn_of_lag: bool = True,
    ) -> None:  # fmt: skip
        """Make a pipeline; it works while it is entered.

        Args:
            folder: where batches are published; made if it is not there.
            seq_len: tokens of a micro batch. A longer sample loses its end.
            ranks: ranks of the trainer that the micro batches are dealt to.
            advantage: how rewards become advantages; None takes the rewards themselves.
            filters: which rollouts send no sample, in their order.
            render: makes tokens for turns whose engine returned none.
            save_to: folder of one JSON-lines file a step with its rollouts; None saves none.
            state_columns: fields of an environment's state that are saved, by environment.
            limits: the largest rollout that is taken.
            first_step: steps before it have ended: their rollouts are late.
            deadline: seconds that `finish` waits for the worker thread.
            sinks: given the metrics of every step, in the worker thread; the caller closes them.
            use_process_pool: True for one process less than there are cores, or the number of processes.
            worker_retries: how often a rollout is tried again after a process died over it.
            worker_deadline: seconds after which a process that has not answered is replaced.
            freeze_garbage: collect garbage when the pipeline opens and freeze the objects that are alive then (`gc.freeze`) until it closes.
            warn_of_lag: log a warning when the event loop is late. Its lag is in the metrics of every step anyway.
        """
        problems = []
        if use_process_pool is not True and use_process_pool < 0:
            problems.append(f"use_process_pool is {use_process_pool}, expected True, False or a number of processes")
        if seq_len < 1 or ranks < 1:
            problems.append(f"seq_len is {seq_len} and ranks is {ranks}, both must be at least 1")
        if problems:
            raise ConfigError(problems)
        self.folder, self.seq_len, self.ranks = Path(folder), seq_len, ranks
        self._advantage, self._filters, self._render = advantage, tuple(filters), render
        self._columns = state_columns
        self._save_to = None if save_to is None else Path(save_to)
        self._freeze, self._frozen = freeze_garbage, False
        self._lag = EventLoopLagMonitor(warn_above=None if warn_of_lag else {})
        self._sinks = tuple(sinks)
        self._limits, self._deadline = limits or Limits(), deadline
        self._steps: dict[int, _OpenStep] = {}
        self._first_step = first_step
        self._ended: set[int] = set()
        self.late = 0
        """Rollouts that came after their step had ended."""
        self._worker: ThreadPoolExecutor | None = None
        self._askers: ThreadPoolExecutor | None = None
        self.processes: RolloutProcesses | None = None
        """The processes that make samples; None without `use_process_pool`."""
        if use_process_pool:
            wanted = max(1, (os.cpu_count() or 2) - 1) if use_process_pool is True else int(use_process_pool)
            self.processes = RolloutProcesses(
                wanted, seq_len=seq_len, limits=self._limits, render=render, retries=worker_retries, deadline=worker_deadline
            )  # fmt: skip
        self._pause: LoopYield
        """Made when the pipeline opens, for the loop it is opened on."""
        self._restarts_reported = self._late_reported = 0
        self._refused: Counter[str] = Counter()
        """Rollouts that were refused by `prepare`: they count for the next step."""

    # ------------------------------------------------------------------------------------------ lifetime

    async def __aenter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be made: {error.strerror or error}") from error
        if self.processes is not None:
            await asyncio.to_thread(self.processes.start)
            self._askers = ThreadPoolExecutor(self.processes.workers, "headrace-rollouts-ask")
        self._worker = ThreadPoolExecutor(1, "headrace-rollouts")
        self._pause = LoopYield(asyncio.get_running_loop())
        if self._freeze and not gc.get_freeze_count():
            # Here, and not in a thread: the caller waits until the pipeline is open anyway, and nothing else is under way on the loop yet.
            gc.collect()
            gc.freeze()
            self._frozen = True
        self._lag.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._lag.stop()
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
        worker, self._worker = self._worker, None
        askers, self._askers = self._askers, None
        threads = [t for t in (askers, worker) if t is not None]
        for executor in threads:
            executor.shutdown(wait=False, cancel_futures=True)
        if self.processes is not None:
            await asyncio.to_thread(self.processes.close)
        pending = [f for s in self._steps.values() for f in s.pending]
        if pending:
            await asyncio.wait(pending, timeout=self._deadline)
        for executor in threads:
            await asyncio.to_thread(executor.shutdown)
        for step in self._steps.values():
            step.writer.close()
        self._steps.clear()

    # ------------------------------------------------------------------------------------------- arrival

    def arrive(self, raw: Any, *, step: int, key: Key, policy_version: int = 0, **about: Any) -> bool:
        """Take a rollout for a step; whether the step was still open. Returns at once.

        `raw` is a `verifiers` rollout, episode or trace (a dict, msgpack or JSON text) or a Rollout. msgpack with binary columns (`wire.encode_rollout`)
        costs least; lists of numbers cost more in every form. `key` is (task, member) or (task, member, attempt): rollouts of different tasks are never in one
        group, also where they are of one example. `about` goes to `rollout_from_verifiers`: `env_name` for a rollout that has none, `run`, `draw`.
        """
        return self._arrived(raw, step, key, policy_version, about) is not None

    async def settle(
        self, raw: Any, *, step: int, key: Key, policy_version: int = 0, until: float = math.inf, **about: Any
    ) -> str | None:
        """`arrive`, and wait until the rollout is samples: None, or the cause it was refused under ("late" if its step had ended). `until`: when its step
        ends (monotonic); a worker process gets no more time than that."""
        if isinstance(raw, Rollout) and _is_small(raw):  # two thread switches would cost more than its work
            state = self._open_step(step, key)
            return "late" if state is None else self._process(state, key, [raw], {}, until)
        future = self._arrived(raw, step, key, policy_version, about, until)
        return "late" if future is None else await asyncio.shield(future)

    async def prepare(
        self, raw: Any, *, policy_version: int = 0, until: float = math.inf, **about: Any
    ) -> Processed | str:
        """Make samples of a rollout whose step is not known yet, for `add`; or the cause it was refused under. Arguments as of `settle`."""
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._executor(raw), self._samples, [raw], {"policy_version": policy_version, **about}, until
            )
        except RolloutRefused as error:
            self._refused[error.cause] += 1
            return error.cause

    async def add(self, step: int, prepared: Sequence[tuple[Key, Processed]]) -> None:
        """Write prepared rollouts into a step."""
        states = [self._open_step(step, key) for key, _ in prepared]
        for state, (key, made) in zip(states, prepared, strict=True):
            if state is not None:
                await asyncio.get_running_loop().run_in_executor(self._worker, self._write, state, key, made)

    def _arrived(
        self, raw: Any, step: int, key: Key, policy_version: int, about: dict[str, Any], until: float = math.inf
    ) -> asyncio.Future[str | None] | None:
        about = {"policy_version": policy_version, **about}
        state = self._open_step(step, key)
        if state is None:
            return None
        # In a list, which is emptied: an executor keeps what it was called with until the call is over.
        future = asyncio.get_running_loop().run_in_executor(
            self._executor(raw), self._process_in_thread, state, key, [raw], about, until
        )
        state.pending[future] = key
        future.add_done_callback(functools.partial(_settled, state))
        return future

    def _executor(self, raw: Any) -> ThreadPoolExecutor | None:
        """Where a rollout is processed: a process if there are some and it is encoded, else the worker thread."""
        return self._askers if self._askers is not None and isinstance(raw, ENCODED) else self._worker

    def _open_step(self, step: int, key: Key) -> _OpenStep | None:
        """The state of a step that a rollout arrived for; None, and a late rollout more, if the step has ended."""
        if self._worker is None:
            raise RuntimeError("the pipeline is not open; use it as `async with`")
        if self._has_ended(step):
            self.late += 1
            return None
        state = self._steps.get(step)
        if state is None:
            state = self._steps[step] = _OpenStep(BatchWriter(self.folder, step=step))
        if key in state.keys:
            raise ConfigError(f"rollout {key} of step {step} arrived twice; give every request its own (task, member)")
        state.keys.add(key)
        return state

    def _process_in_thread(self, state: _OpenStep, *rollout: Any) -> str | None:
        cause = None if state.ended else self._process(state, *rollout)
        self._pause()
        return "late" if state.ended else cause

    def _process(self, state: _OpenStep, key: Key, box: list[Any], about: dict[str, Any], until: float) -> str | None:
        """Check one rollout, make samples of it and write them. The cause it was refused under, if it was."""
        try:
            with state.phases.measure("process_rollout"):
                made = self._samples(box, about, until, state.phases)
            with state.phases.measure("write_experts"):
                self._write(state, key, made)
        except RolloutRefused as error:
            with state.lock:
                if not state.ended:
                    state.refused[error.cause] += 1
            _log.warning("step %d: rollout %s was refused: %s", state.writer.step, key, error)
            return error.cause
        return None

    def _samples(
        self, box: list[Any], about: dict[str, Any], until: float, phases: StepPhases | None = None
    ) -> Processed:
        """Samples of one rollout, in a thread. The rollout comes in a list, which is emptied."""
        raw = box.pop()
        if self.processes is not None and isinstance(raw, ENCODED):
            return self.processes.process(raw, about, until=until)
        return process_rollout(
            raw, about, seq_len=self.seq_len, limits=self._limits, render=self._render,
            measure=None if phases is None else phases.measure, pause=self._pause,
        )  # fmt: skip

    def _write(self, state: _OpenStep, key: Key, made: Processed) -> None:
        with state.lock:
            if not state.ended:
                state.done[key] = (made.rollout, state.writer.add(made.samples))
                state.truncated += made.truncated

    # ------------------------------------------------------------------------------------------ end of a step

    async def finish(self, step: int, *, policy_version: int = 0, only: Collection[Key] | None = None) -> StepReport:
        """End a step and publish its batch. Whatever arrives for it afterwards is late. `only`: rollouts with other keys are left out, and those of
        them that are not samples yet are not waited for: they are late."""
        worker = self._worker
        if worker is None:
            raise RuntimeError("the pipeline is not open; use it as `async with`")
        if self._has_ended(step):
            raise ConfigError(f"step {step} has been finished already")
        self._ended.add(step)
        state = self._steps.pop(step, None) or _OpenStep(BatchWriter(self.folder, step=step))
        loop = asyncio.get_running_loop()
        try:
            await self._drained(state, only)
            state.ended = True
            self.late += len(state.pending)
            state.refused.update(self._refused)
            self._refused.clear()
            report = await loop.run_in_executor(worker, self._finish, state, policy_version, only, self._lag.drain())
        finally:
            await loop.run_in_executor(worker, state.writer.close)
        _log.info("%s", report.phases.line(step))
        return report

    def reopen(self, step: int) -> None:
        """Let a step that was finished without a batch begin anew."""
        if step not in self._ended or batch_path(self.folder, step).exists():
            raise ConfigError(f"step {step} cannot begin anew: it is open, or its batch is published")
        self._ended.remove(step)

    async def settled(self, step: int) -> None:
        """Wait until everything that has arrived for a step is processed; `finish` does so too."""
        if (state := self._steps.get(step)) is not None:
            await self._drained(state)

    def _has_ended(self, step: int) -> bool:
        return step < self._first_step or step in self._ended

    async def _drained(self, state: _OpenStep, only: Collection[Key] | None = None) -> None:
        # An error that no single rollout caused is raised, whichever request met it.
        awaited = {future for future, key in state.pending.items() if only is None or key in only or future.done()}
        if not awaited:
            return
        with Wait(
            "rollouts.worker", deadline=self._deadline, remedy="the worker thread is behind; look at process_rollout"
        ) as wait:
            await asyncio.wait(awaited, timeout=wait.remaining())
            wait.check()
        for future in awaited:
            future.result()

    def _finish(
        self, state: _OpenStep, policy_version: int, only: Collection[Key] | None, lag: dict[str, float]
    ) -> StepReport:
        """The end of a step, in the worker thread."""
        try:
            return self._reported(state, policy_version, only, lag)
        finally:
            # Freed one by one: the 60,000 objects of 256 rollouts of 30 turns would keep the GIL for 60 ms.
            while state.done:
                state.done.popitem()
                self._pause()

    def _reported(
        self, state: _OpenStep, policy_version: int, only: Collection[Key] | None, lag: dict[str, float]
    ) -> StepReport:
        step = state.writer.step
        with state.lock:  # a writer has seen that the step has ended, or is done before this
            for key in [k for k in state.done if only is not None and k not in only]:
                del state.done[key]
        order = sorted(state.done)

        def measured(name: str) -> AbstractContextManager[None]:
            self._pause()
            return state.phases.measure(name)

        rollouts = [_drawn_for(state.done[key][0], key[0]) for key in order]
        with measured("compute_advantages"):
            advantages = compute_advantages(rollouts, self._advantage)
        with measured("apply_filters"):
            filtered = apply_filters(self._filters, rollouts, advantages)
        with measured("result_collection_loop"):
            written = [state.done[key][1] for key in order]
            split = sum(max(0, len(some) - 1) for some in written)
            slots = collected_samples(written, advantages, filtered.sends)
        path = None
        if slots:
            with measured("pack"):
                packed = pack_samples([s.sample for s in slots], seq_len=self.seq_len, ranks=self.ranks)
            with measured("training_batch_send"):
                path = state.writer.publish(packed, slots, seq_len=self.seq_len, policy_version=policy_version)
        if self._save_to is not None:
            with measured("save_rollouts"):
                save_rollouts(
                    self._save_to / f"step_{step}.jsonl", self._pause.between(rollouts), advantages=advantages, state_columns=self._columns,
                    durable=False,
                )  # fmt: skip
        with measured("metrics_aggregation"):
            metrics = rollout_metrics(rollouts, filtered)
            metrics |= {f"rollouts/refused/{cause}": float(n) for cause, n in state.refused.items()}
            metrics |= {
                "rollouts/late": float(self.late - self._late_reported),
                "rollouts/split_samples": float(split),
                **lag,
            }
            self._late_reported = self.late
            if self.processes is not None:
                metrics["rollouts/worker_restarts"] = float(self.processes.restarts - self._restarts_reported)
                self._restarts_reported = self.processes.restarts
        with measured("sinks"):
            for sink in self._sinks:
                sink.write({"step": step, "policy_version": policy_version, **metrics})
        return StepReport(
            step=step, policy_version=policy_version, path=path, rollouts=len(rollouts), samples=len(slots), tokens=sum(len(s.sample) for s in slots),
            refused=dict(state.refused), truncated=state.truncated, filtered=filtered,
            advantages=tuple(advantages), metrics=metrics, phases=state.phases,
        )  # fmt: skip


def collected_samples(
    written: Sequence[Sequence[WrittenSample]], advantages: Sequence[float], sends: Sequence[bool]
) -> list[WrittenSample]:
    """The samples of the rollouts that send any, each with its rollout's advantage; `written` has those of each rollout."""
    told = zip(written, advantages, sends, strict=True)
    return [slot.with_advantage(advantage) for slots, advantage, sent in told if sent for slot in slots]


def _drawn_for(rollout: Rollout, task: int) -> Rollout:
    """The rollout with its task in its group's key: two tasks may draw one example, and are compared with nothing but themselves."""
    return msgspec.structs.replace(rollout, draw=task if rollout.draw is None else f"{task}.{rollout.draw}")


def _is_small(rollout: Rollout) -> bool:
    """Whether its samples are made in a fraction of a millisecond: few tokens, few turns, no experts, nothing to tokenise."""
    turns = [turn.tokens for turn in rollout.trajectory]
    plain = [t for t in turns if t is not None and t.routed_experts is None and not t.multimodal]
    return len(plain) == len(turns) <= _SMALL_TURNS and sum(t.length for t in plain) <= _SMALL_TOKENS


def _settled(state: _OpenStep, future: asyncio.Future[str | None]) -> None:
    """A rollout is through. One that failed for no reason of its own stays, so that `finish` raises it."""
    if not future.cancelled() and future.exception() is None:
        state.pending.pop(future, None)
