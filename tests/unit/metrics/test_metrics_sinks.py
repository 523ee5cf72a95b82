import errno
import importlib.util
import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ConfigError, StorageError
from headrace.metrics import BackgroundSinks, JsonlSink, Meter, Sink, TensorboardSink, WandbSink


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --------------------------------------------------------------------------------------------------- jsonl


def test_a_record_is_one_line_that_is_there_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with JsonlSink(path) as sink:
        assert isinstance(sink, Sink)
        sink.write({"step": 1, "loss": 2.5, "rows": 2**53 + 1, "name": "a\nb"})
        assert lines(path)[0] == {"step": 1, "loss": 2.5, "rows": 2**53 + 1, "name": "a\nb"}
        sink.write({"step": 2, "n": np.int64(3), "x": np.float32(0.5)})
    assert lines(path)[1] == {"step": 2, "n": 3, "x": 0.5}
    with JsonlSink(path) as sink:
        sink.write({"step": 3})
    assert [line["step"] for line in lines(path)] == [1, 2, 3]


def test_what_json_cannot_say_becomes_null(tmp_path: Path) -> None:
    with JsonlSink(tmp_path / "m.jsonl") as sink:
        sink.write({"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float64("nan")})
    assert lines(tmp_path / "m.jsonl") == [{"a": None, "b": None, "c": None, "d": None}]


def test_a_torn_last_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2,"lo')
    with JsonlSink(path) as sink:
        sink.write({"step": 3})
        sink.write({"step": 4})
    assert path.read_bytes() == b'{"step":1}\n{"step":2,"lo\n{"step":3}\n{"step":4}\n'


def test_a_killed_writer_loses_no_line_that_write_returned_from(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    code = (
        "import sys, os, signal; from pathlib import Path; from headrace.metrics import JsonlSink\n"
        "sink = JsonlSink(Path(sys.argv[1]))\n"
        "for step in range(100): sink.write({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -signal.SIGKILL
    assert [line["step"] for line in lines(path)] == list(range(100))


def test_a_full_disk_is_a_sentence_and_the_next_line_starts_fresh(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with JsonlSink(path) as sink:
        sink.write({"step": 1})
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4, before[1]))  # room for a torn line
            with pytest.raises(StorageError, match=r"could not append metrics to .*m\.jsonl: File too large"):
                sink.write({"step": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, previous)
        sink.write({"step": 3})
    assert path.read_bytes() == b'{"step":1}\n{"st\n{"step":3}\n'


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"could not write .*file: " + os.strerror(errno.EEXIST)):
        JsonlSink(tmp_path / "file" / "m.jsonl")


def test_a_closed_sink_refuses_and_closes_again(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.close()
    sink.close()
    with pytest.raises(ValueError, match=r"m\.jsonl is closed"):
        sink.write({})


# -------------------------------------------------------------------------------------------------- extras


@pytest.mark.parametrize(("extra", "make"), [("wandb", WandbSink), ("tensorboard", lambda: TensorboardSink(Path("x")))])
def test_a_missing_extra_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, extra: str, make: Any
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == extra else real(name, *a))
    with pytest.raises(ConfigError, match=rf"{extra} sink needs.*pip install 'headrace\[{extra}\]'"):
        make()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_back_what_was_written_through_a_thread(tmp_path: Path) -> None:
    meter = Meter()
    with BackgroundSinks([TensorboardSink(tmp_path)], meter=meter) as sinks:
        for step in range(5):
            sinks.write({"step": step, "loss": 1.0 / (1 + step), "note": "text", "bad": math.nan})
    assert "sink/failed" not in meter.totals()
    assert "sink/dropped" not in meter.totals()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["bad", "loss"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (step, pytest.approx(1.0 / (1 + step))) for step in range(5)
    ]


def test_wandb_offline_keeps_what_was_written_through_a_thread(tmp_path: Path) -> None:
    # In a process of its own: wandb leaves a service process and warnings of other people's code behind.
    code = """
import sys
from headrace.metrics import BackgroundSinks, Meter, WandbSink
meter = Meter()
sinks = BackgroundSinks([WandbSink(project="p", mode="offline", dir=sys.argv[1])], meter=meter)
for step in range(5):
    sinks.write({"step": step, "loss": 0.5 * step})
sinks.close(60)
assert not {"sink/failed", "sink/dropped"} & set(meter.totals()), meter.totals()
"""
    environment = {**os.environ, "WANDB_SILENT": "true", "WANDB_MODE": "offline"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    from wandb.proto import wandb_internal_pb2

    found: dict[int, float] = {}
    for data in leveldb_log(written.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found[items["_step"]] = items["loss"]
    assert found == {step: 0.5 * step for step in range(5)}


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format (crc 4, length 2, type 1; blocks of 32 KiB) after 7 bytes."""
    at, block, record = 7, 32 * 1024, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # no header fits: the rest of the block is padding
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


# ---------------------------------------------------------------------------------------------- background


class Keeping:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.closed = 0

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1


class Failing(Keeping):
    def write(self, record: Mapping[str, Any]) -> None:
        super().write(record)
        raise OSError("no route to host")


class Hanging(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.entered, self.leave = threading.Event(), threading.Event()

    def write(self, record: Mapping[str, Any]) -> None:
        self.entered.set()
        self.leave.wait(30)
        super().write(record)


def test_everything_queued_arrives_in_order_and_the_sink_is_closed_once() -> None:
    keeping = Keeping()
    sinks = BackgroundSinks([keeping], meter=Meter())
    for step in range(500):
        sinks.write({"step": step})
    sinks.close()
    sinks.close()
    assert [r["step"] for r in keeping.records] == list(range(500))
    assert keeping.closed == 1


def test_a_record_that_changes_after_it_was_written_arrives_as_it_was() -> None:
    hanging = Hanging()
    sinks = BackgroundSinks([hanging], meter=Meter())
    record = {"step": 1}
    sinks.write(record)
    record["step"] = 2
    hanging.leave.set()
    sinks.close()
    assert hanging.records == [{"step": 1}]


def test_a_full_queue_drops_counts_and_does_not_block() -> None:
    meter, hanging = Meter(), Hanging()
    sinks = BackgroundSinks([hanging], capacity=10, meter=meter)
    sinks.write({"step": 0})
    assert hanging.entered.wait(10)
    began = time.perf_counter()
    for step in range(1, 101):
        sinks.write({"step": step})
    assert time.perf_counter() - began < 10  # of the 30 that it hangs
    assert meter.drain()["sink/dropped"] == 90
    hanging.leave.set()
    sinks.close()
    assert [r["step"] for r in hanging.records] == list(range(11))


def test_a_hanging_sink_holds_up_neither_close_nor_another_sink(caplog: pytest.LogCaptureFixture) -> None:
    meter, hanging, keeping = Meter(), Hanging(), Keeping()
    sinks = BackgroundSinks([hanging, keeping], meter=meter)
    for step in range(3):
        sinks.write({"step": step})
    assert hanging.entered.wait(10)
    began = time.perf_counter()
    sinks.close(0.2)
    assert time.perf_counter() - began < 10  # of the 30 that it hangs
    assert len(keeping.records) == 3
    assert keeping.closed == 1
    assert meter.totals()["sink/dropped"] == 3  # one it hangs in, two behind it
    assert "Hanging did not finish in time; 3 of its records may be lost" in caplog.text
    assert meter.totals()["wait/sink.close/seconds"] >= 0.15
    sinks.close(0.01)
    assert meter.totals()["sink/dropped"] == 3
    hanging.leave.set()


def test_a_failing_sink_is_counted_and_logged_once_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    meter, failing, keeping = Meter(), Failing(), Keeping()
    sinks = BackgroundSinks([failing, keeping], meter=meter)
    with caplog.at_level(logging.WARNING):
        for step in range(10):
            sinks.write({"step": step})
        sinks.close()
    assert len(failing.records) == 10
    assert meter.totals()["sink/failed"] == 10
    assert len(keeping.records) == 10
    assert [r.getMessage() for r in caplog.records if "no route to host" in r.getMessage()] == [
        "Failing could not write a record: OSError: no route to host (logged once; counted as sink/failed)"
    ]


def test_a_sink_that_cannot_be_closed_does_not_fail_the_run() -> None:
    class Stuck(Keeping):
        def close(self) -> None:
            raise RuntimeError("cannot")

    meter = Meter()
    BackgroundSinks([Stuck()], meter=meter).close()
    assert meter.totals()["sink/failed"] == 1


def test_a_record_after_close_is_dropped_and_counted() -> None:
    meter, keeping = Meter(), Keeping()
    sinks = BackgroundSinks([keeping], meter=meter)
    sinks.close()
    sinks.write({"step": 1})
    assert meter.totals()["sink/dropped"] == 1
    assert keeping.records == []


def test_the_wait_for_work_is_hidden() -> None:
    meter = Meter()
    sinks = BackgroundSinks([Keeping()], meter=meter)
    sinks.write({"step": 1})
    sinks.close()
    totals = meter.totals()
    assert totals["waits/hidden/seconds"] == totals["wait/sink.idle/seconds"]
