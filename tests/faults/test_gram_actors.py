"""Ray actors reduce to the bits of one process, also when one of them is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from headrace.reduce import gram

pytest.importorskip("ray")
LONG = os.environ.get("HEADRACE_FAULTS", "long") == "long"
ENV = os.environ | {"NO_COLOR": "1", "OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
CHUNK = 10
KILLING = """
import sys, ray
from headrace.reduce import Columns, CrossNodeGramReduction, CrossNodePartition, GramResult, Provenance
from headrace.reduce.transports.transport import drive
from headrace.reduce.orders import WorkOrder
from headrace.reduce.transports.ray import RayTransport
from headrace.reduce.shards import RowShards

shards = RowShards.open([sys.argv[1]])
columns = Columns(width=shards.width)
partition = CrossNodePartition(k=columns.k, n_rows=shards.n_rows, chunk_size=10, n_ranks=2)
order = WorkOrder(partition=partition, provenance=Provenance(rows=shards.dtype), columns=columns, shards=shards.spec, data=shards.fingerprint())
reduction, transport, told, left = CrossNodeGramReduction(partition, provenance=order.provenance), RayTransport(order), [], [60, 20]

def kill(progress):
    if left and progress.frontier >= left[-1]:
        ray.kill(transport._actors[left.pop() // 20 % 2])

drive(reduction, transport, progress=kill, notice=told.append, deadline=100)
transport.close()
assert len(told) == 2, told
print(GramResult.of(reduction.finish(), columns, shards.n_rows, {}).sha256)
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    x = np.random.default_rng(2).standard_normal((2011, 5)).astype("f4")
    np.save(folder / "0.npy", x)
    return folder, gram(x, chunk_size=CHUNK).sha256


def test_ray_actors_give_the_bits_of_one_process(rows, tmp_path):
    pytest.importorskip("ray")
    folder, expected = rows
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "gram", str(folder), "--chunk", str(CHUNK), "--workers", "2", "--engine", "ray",
         "--out", "g.safetensors", "--format", "json"],
        cwd=tmp_path, env=ENV | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sha256"] == expected


@pytest.mark.skipif(not LONG, reason="long fault sweeps only")
def test_actors_that_are_killed_are_replaced(rows, tmp_path):
    folder, expected = rows
    done = subprocess.run(
        [sys.executable, "-c", KILLING, str(folder)],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == expected
