"""What every run needs while it goes on, whatever it trains: who looks on, where lines go, how it is asked to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from headrace.jobs.folder import RunFolder
from headrace.metrics import (
    BackgroundSinks,
    JsonlSink,
    MetricSpec,
    Reduction,
    Sink,
    TensorboardSink,
    WandbSink,
    register,
)

__all__ = [
    "Progress",
    "RunSummary",
    "Stoppable",
    "Watcher",
    "cpu_group",
    "open_sinks",
    "signal_asked",
    "stop_on_signal",
    "waits_by_name",
]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One interval of a run, over all ranks."""

    step: int
    steps: int
    loss: float
    lr: float
    tokens_per_second: float
    wait_ms: float
    """Exposed wait per step."""
    wait_share: float
    mix: Mapping[str, float]
    unit: str = "tok"
    """What `tokens_per_second` counts."""


class Watcher(Protocol):
    """Whoever looks on. Called on rank 0 only."""

    def waiting(self, what: str) -> None: ...
    def first_batch(self, seconds: float, waits: Mapping[str, float]) -> None: ...
    def progress(self, progress: Progress) -> None: ...
    def info(self, sentence: str) -> None:
        """Worth a line to whoever looks on."""
        ...

    def notice(self, sentence: str) -> None:
        """Worth a line even where stdout is for machines; `--quiet` silences it too."""
        ...


class Stoppable(Protocol):
    """A run as a signal sees it."""

    rank: int
    world_size: int
    watcher: Watcher
    asked_to_stop: int
    """The signal that asked, if one did."""


def waits_by_name(totals: Mapping[str, float]) -> dict[str, float]:
    """Seconds by name of wait, the longest first."""
    found = {k[5:-8]: float(v) for k, v in totals.items() if k.startswith("wait/") and k.endswith("/seconds")}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def open_sinks(stack: contextlib.ExitStack, folder: RunFolder) -> list[Sink]:
    sinks: list[Sink] = [stack.enter_context(JsonlSink(folder.path / "metrics.jsonl"))]
    slow: list[Sink] = []
    if "tensorboard" in folder.config.run.sinks:
        slow.append(TensorboardSink(folder.make_folder("tensorboard")))
    if "wandb" in folder.config.run.sinks:
        folder.make_folder("wandb")
        slow.append(WandbSink(name=folder.config.run.name, dir=str(folder.path), config=folder.config.resolved()))
    if slow:
        sinks.append(stack.enter_context(BackgroundSinks(slow)))
    return sinks


def cpu_group(world_size: int) -> Any:
    """Metrics are reduced in CPU memory: under nccl that takes a gloo group of its own."""
    if world_size == 1:
        return None
    import torch.distributed as dist

    return dist.new_group(backend="gloo") if dist.get_backend() == "nccl" else None


@dataclass(slots=True, kw_only=True)
class RunSummary:
    """How a run stands when a process leaves it; what it trained on is added by its kind."""

    state: str
    """completed or stopped; of text also data_ended."""
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
    """What asked the run to stop, if something did."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: a loss that never was is null."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: None if value != value else value for name, value in values.items()}


@contextlib.contextmanager
def stop_on_signal(run: Stoppable) -> Generator[None]:
    """The first SIGINT or SIGTERM asks for a stop after the step, with a checkpoint; the second is as rude as ever."""

    def ask(number: int, _: Any) -> None:
        run.asked_to_stop = number
        signal.signal(number, before[number])
        if run.rank == 0:
            when = "after this step" if run.world_size == 1 else "at the next line, when all ranks know"
            sentence = f"{signal.Signals(number).name}: stopping {when} (again: at once, without saving)"
            # From a thread: a handler that prints while a line is being printed breaks both.
            said.append(threading.Thread(target=run.watcher.notice, args=(sentence,), name="headrace-stop"))
            said[-1].start()

    said: list[threading.Thread] = []
    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask)
    except ValueError:  # not the main thread: whoever runs us there handles signals
        before.clear()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for thread in said:
            thread.join()


@contextlib.contextmanager
def signal_asked() -> Generator[Callable[[], int]]:
    """For jobs without steps, which ask now and then: the number of the signal, or 0. SIGINT and SIGTERM ask once; a second one ends the process as usual. Off the main thread signals stay as they are."""
    asked = [0]

    def remember(number: int, _: object) -> None:
        asked[0] = number
        for n in before:
            signal.signal(n, before[n])

    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, remember)
    except ValueError:
        before = {}
    try:
        yield lambda: asked[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
