"""Sinks of metric records: a JSON-lines file always, wandb and TensorBoard from background threads.

    with JsonlSink(folder / "metrics.jsonl") as log, BackgroundSinks([WandbSink(project="p")]) as others:
        log.write({"step": 10, "loss": 3.2})        # a line, on its way to the disk when this returns
        others.write({"step": 10, "loss": 3.2})     # queued; never blocks, never raises

A record is a flat dict of scalars; `step` is its place on the axis. JSONL is written by the caller, because a line of 12
scalars costs 3 us. wandb (249 us offline) and TensorBoard (880 us) are fed by a thread each, so a sink that is slow, fails or
hangs drops only its own records, and the drops are counted.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import orjson

from headrace.errors import ConfigError, StorageError
from headrace.files import open_inside
from headrace.metrics.spec import MetricSpec, Reduction, register
from headrace.metrics.wait import Meter, Wait, default_meter

_log = logging.getLogger(__name__)

_SPECS = (
    MetricSpec("sink/dropped", Reduction.SUM, True, "records", (0, 0), "records that a background sink did not take"),
    MetricSpec("sink/failed", Reduction.SUM, True, "records", (0, 0), "records on which a background sink raised"),
)
register(*_SPECS)


@runtime_checkable
class Sink(Protocol):
    """Takes records until it is closed."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Finish what was taken. Again is fine."""
        ...


class _Closing:
    """`with sink:` closes it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------------- file


class JsonlSink(_Closing):
    """One JSON object a line, appended and handed to the kernel line by line. NaN and infinities become null.

    A process that died in the middle of a line leaves a torn one; the next to open the file ends it, so that only the
    torn line is lost. A symbolic link in the place of the file is refused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = open_inside(path.parent, path.name, os.O_RDWR | os.O_APPEND)
        try:
            size = os.fstat(self._fd).st_size
            self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        except OSError as error:
            os.close(self._fd)
            raise StorageError(f"cannot read the end of {path}: {error.strerror or error}. Fix the disk.") from error

    def write(self, record: Mapping[str, Any]) -> None:
        line = orjson.dumps(dict(record), option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
        if self._fd < 0:
            raise ValueError(f"{self.path} is closed")
        if self._torn:
            line = b"\n" + line
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            # Part of the line may be there; the next write starts a new one.
            self._torn = self._torn or len(view) < len(line)
            raise StorageError(
                f"could not append metrics to {self.path}: {error.strerror or error}. Free space or fix the folder."
            ) from error
        self._torn = False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# -------------------------------------------------------------------------------------------------- extras


class WandbSink(_Closing):
    """Logs to Weights & Biases. The run is opened with the first record, on whatever thread writes it.

    Keyword arguments are those of `wandb.init` (project, name, dir, mode, config, ...).
    """

    def __init__(self, **init: Any) -> None:
        _require("wandb", "wandb")
        self._init = init
        self._run: Any = None

    def write(self, record: Mapping[str, Any]) -> None:
        if self._run is None:
            import wandb

            self._run = wandb.init(**self._init)
        values = dict(record)
        self._run.log(values, step=values.pop("step", None))

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()


class TensorboardSink(_Closing):
    """Writes TensorBoard event files into `folder`, one scalar a key. What is not a number is left out."""

    def __init__(self, folder: Path) -> None:
        _require("tensorboard", "tensorboard")
        self.folder = folder
        self._writer: Any = None

    def write(self, record: Mapping[str, Any]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=str(self.folder))
        step = record.get("step")
        for key, value in record.items():
            if key != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext:
    """The run that a sink is made for."""

    name: str
    """Name of the run."""
    config: Mapping[str, Any]
    """Every key of the config with its value."""
    folder: Path
    make_folder: Callable[[str], Path]
    """Makes a folder inside the run's folder and returns its path."""


def _tensorboard(run: SinkContext) -> Sink:
    return TensorboardSink(run.make_folder("tensorboard"))


def _wandb(run: SinkContext) -> Sink:
    run.make_folder("wandb")
    return WandbSink(name=run.name, dir=str(run.folder), config=run.config)


SINKS: dict[str, Callable[[SinkContext], Sink]] = {"wandb": _wandb, "tensorboard": _tensorboard}
"""The names that `run.sinks` takes, and how each sink is made. A new sink is a class and a line here."""


def _require(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"the {extra} sink needs the package {module}, which is not installed. Run: pip install 'headrace[{extra}]', or "
            "take it out of the sinks."
        )


# ---------------------------------------------------------------------------------------------- background


class BackgroundSinks(_Closing):
    """Feeds sinks from threads of their own, so that none of them can hold up or fail the run, or another sink.

    Up to `capacity` records wait for each sink; more are dropped and counted (`sink/dropped`). An exception is counted
    (`sink/failed`) and logged the first time.
    """

    def __init__(self, sinks: Sequence[Sink], *, capacity: int = 1024, meter: Meter | None = None) -> None:
        self._meter = meter if meter is not None else default_meter()
        self._capacity = capacity
        self._closed = False
        self._threads = [_SinkThread(sink, self._meter) for sink in sinks]

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue a record for every sink. Never blocks and never raises for what a sink does."""
        copied = dict(record)
        for thread in self._threads:
            if self._closed or thread.queue.qsize() >= self._capacity:
                self._meter.add("sink/dropped")
            else:
                thread.queue.put(copied)

    def close(self, deadline: float = 10.0) -> None:
        """Let the sinks finish what is queued, for at most `deadline` seconds together; the rest is dropped and counted."""
        if self._closed:
            return
        self._closed = True
        for thread in self._threads:
            thread.queue.put(None)
        with Wait("sink.close", meter=self._meter, deadline=deadline) as wait:
            for thread in self._threads:
                thread.join(wait.remaining())
        for thread in self._threads:
            if thread.is_alive():
                left = thread.queue.qsize()  # the end is in the queue, and the record that the sink hangs in is not
                self._meter.add("sink/dropped", left)
                _log.warning("%s did not finish in time; %d of its records may be lost", thread.sink_name, left)

    def metric_specs(self) -> tuple[MetricSpec, ...]:
        """`sink/dropped` and `sink/failed`; their values are in the meter."""
        return _SPECS


class _SinkThread(threading.Thread):
    """Writes the records of a queue to one sink, until it takes None."""

    def __init__(self, sink: Sink, meter: Meter) -> None:
        self.sink_name = type(sink).__name__
        # A daemon: a sink that hangs must not keep the process from ending.
        super().__init__(name=f"headrace-sink-{self.sink_name}", daemon=True)
        self.queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._sink = sink
        self._meter = meter
        self._logged = False
        self.start()

    def run(self) -> None:
        while (record := self._next()) is not None:
            self._attempt("write a record", lambda record=record: self._sink.write(record))
        self._attempt("close", self._sink.close)

    def _next(self) -> dict[str, Any] | None:
        with Wait("sink.idle", meter=self._meter, deadline=threading.TIMEOUT_MAX, hidden=True):
            return self.queue.get()

    def _attempt(self, doing: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._meter.add("sink/failed")
            if not self._logged:
                self._logged = True
                why = f"{type(error).__name__}: {error}"
                _log.warning("%s could not %s: %s (logged once; counted as sink/failed)", self.sink_name, doing, why)
