"""A consumer that lost its rank lock to another consumer hands out no further batch, and does not wait for one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import HeadraceError
from headrace.spool import DataProviderBase, DatasetConsumer

ROUNDS = 24
READ_AND_LOG = """
import os, sys, time
from headrace.errors import HeadraceError
from headrace.spool import DatasetConsumer
consumer = DatasetConsumer(sys.argv[1], "cpu", ack="commit", deadline=60)
log = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
number = 0
try:
    while True:
        for _ in range(1500):
            os.write(log, b"asked %d\\n" % number)
            consumer.get_batch("train", "cpu")
            os.write(log, b"got %d %d\\n" % (number, time.monotonic_ns()))
            number += 1
        consumer.reset_state("train")
except HeadraceError as error:
    print(error, flush=True)
    os._exit(3)
"""


class Drawn(DataProviderBase):
    def build_meta(self) -> dict[str, Any]:
        fields = [{"name": "x", "dtype": "int64", "shape": [8]}, {"name": "y", "dtype": "int64", "shape": [8]}]
        return {"dataset_name": "drawn", "training_type": "LM", "vocab_size": 1000, "batch_schema": fields}

    def sample_batch(self, split: str, rng: torch.Generator) -> dict[str, torch.Tensor]:
        x = torch.randint(0, 1000, (self.batch_size, 8), generator=rng)
        return {"x": x, "y": x}


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    Drawn(tmp_path / "spool", 4, batches_per_file=100, max_backlog_files=16, durable=False).run(
        ("train",), max_files=16
    )
    return tmp_path / "spool"


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def take_over(spool: Path) -> DatasetConsumer:
    """A second consumer of the same rank, after an operator removed the lock file of the first."""
    (spool / "state" / "consumer-0.lock").unlink()
    return DatasetConsumer(spool, "cpu", ack="commit", deadline=60)


@pytest.mark.timeout(600)
def test_a_stopped_consumer_that_lost_its_lock_delivers_nothing_that_is_asked_for_after_it_wakes(
    spool, tmp_path, warm, until, capsys
):
    chance, in_flight = random.Random(7), 0
    for turn in range(ROUNDS):
        log = tmp_path / f"log-{turn}"
        log.touch()
        process = warm.Popen(
            [sys.executable, "-c", READ_AND_LOG, spool, log],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            enough = chance.randrange(100, 20_000)
            until(lambda log=log, enough=enough: log.stat().st_size > enough)
            os.kill(process.pid, signal.SIGSTOP)
            until(lambda pid=process.pid: is_stopped(pid))
            stopped_at = time.monotonic_ns()
            before = log.read_text().splitlines()
            with take_over(spool) as successor:
                successor.get_batch("train")
                os.kill(process.pid, signal.SIGCONT)
                said, _ = process.communicate(timeout=60)
            assert process.returncode == 3, said
            after = log.read_text().splitlines()[len(before) :]
            asked = {line.split()[1] for line in after if line.startswith("asked")}
            got = {line.split()[1]: int(line.split()[2]) for line in after if line.startswith("got")}
            assert not got.keys() & asked, (
                f"round {turn}: {len(got.keys() & asked)} batches were asked for and delivered"
            )
            assert len(got) <= 1
            in_flight += sum(at > stopped_at for at in got.values())
            assert "lost its rank lock: consumer-0.lock was removed and is now held by rank 0 of 1" in said
        finally:
            process.kill()
            process.wait()
    with capsys.disabled():
        print(f"\n{ROUNDS} rounds; in {in_flight} the stop fell between the look at the lock and the end of get_batch")


def test_a_consumer_that_lost_its_lock_while_it_ran_delivers_nothing_more(spool):
    for _ in range(ROUNDS):
        with DatasetConsumer(spool, "cpu", ack="commit", deadline=60) as reader:
            for _ in range(5):
                reader.get_batch("train")
            with take_over(spool) as successor:
                successor.get_batch("train")
                with pytest.raises(HeadraceError, match="lost its rank lock"):
                    reader.get_batch("train")


@pytest.mark.parametrize("wait", ["get_batch", "wait_for_data"])
def test_a_consumer_that_waits_for_a_file_notices_long_before_its_deadline_that_it_lost_its_lock(spool, until, wait):
    reader = DatasetConsumer(spool, "cpu", ack="commit", deadline=600)
    for _ in range(1600):
        reader.get_batch("train")
    said: list[HeadraceError] = []

    def work() -> None:
        try:
            getattr(reader, wait)("train")
        except HeadraceError as error:
            said.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    until(lambda: reader._meter.open_waits())
    with take_over(spool) as successor:
        successor.get_batch("train")
        thread.join(20)
        assert not thread.is_alive(), "it still waits, until its deadline of 600 s"
    assert "lost its rank lock" in str(said[0])
    reader.close()
