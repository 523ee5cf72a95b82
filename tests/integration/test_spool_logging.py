"""What a user of a spool sees of it: one line a file, warnings, and nothing on the way to a batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.spool import DataProviderBase

READ = """
import logging, sys
from headrace.spool import DatasetConsumer
if "--log" in sys.argv:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
with DatasetConsumer(sys.argv[1], "cpu", ack="commit", deadline=60) as consumer:
    for _ in range(8):
        consumer.get_batch("train")
    if "--resize" in sys.argv:
        consumer.set_batch_size(6)
        print(tuple(consumer.get_batch("train")[0].shape), consumer.state_dict()["body"]["splits"]["train"]["g"])
"""


class Drawn(DataProviderBase):
    def build_meta(self) -> dict[str, Any]:
        fields = [{"name": "x", "dtype": "int64", "shape": [3]}, {"name": "y", "dtype": "int64", "shape": [3]}]
        return {"dataset_name": "drawn", "training_type": "LM", "vocab_size": 1000, "batch_schema": fields}

    def sample_batch(self, split: str, rng: torch.Generator) -> dict[str, torch.Tensor]:
        x = torch.randint(0, 1000, (self.batch_size, 3), generator=rng)
        return {"x": x, "y": x}


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    Drawn(tmp_path / "spool", 4, batches_per_file=3, max_backlog_files=4).run(("train",), max_files=4)
    return tmp_path / "spool"


def read(warm, spool: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", READ, spool, *words]
    done = warm.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_a_consumer_logs_one_line_a_file_that_was_read_and_none_a_batch(spool, warm):
    lines = read(warm, spool, "--log").stderr.splitlines()
    assert [line for line in lines if "headrace.spool" in line] == [
        f"INFO headrace.spool {spool}: train 0: read, 12 rows",
        f"INFO headrace.spool {spool}: train 1: read, 12 rows",
    ]


def test_a_consumer_prints_nothing_where_logging_is_not_set_up(spool, warm):
    done = read(warm, spool)
    assert done.stdout == ""
    assert "read" not in done.stderr


def test_a_bad_file_is_logged_as_a_warning_that_says_where_it_went_wrong(spool, warm):
    path = spool / "queue" / "train" / "000000000000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 16
    path.write_bytes(raw)
    code = READ.replace("deadline=60", "deadline=0.5")
    done = warm.run([sys.executable, "-c", code, spool, "--log"], capture_output=True, text=True)
    assert f"WARNING headrace.spool {spool}: train 0: bad, set aside: " in done.stderr
    assert "fails its checksum" in done.stderr


def test_another_batch_size_slices_the_same_rows_differently_and_warns(spool, warm):
    done = read(warm, spool, "--resize")
    assert done.stdout.split("\n")[0] == "(6, 3) 38", "eight batches of 4, and one of 6"
    assert "was made with batch_size 4, batches now have 6" in done.stderr
