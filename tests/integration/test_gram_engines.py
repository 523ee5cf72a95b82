"""The sum has the same bits for any workers, also if workers or the coordinator are killed. Real processes and sockets (gloo: test_gram_command.py, Ray: tests/faults)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from headrace.errors import DataError, WorkerDied
from headrace.reduce import Columns, CrossNodeGramReduction, CrossNodePartition, GramResult, Provenance, gram
from headrace.reduce.orders import WorkOrder
from headrace.reduce.shards import RowShards
from headrace.reduce.transports.processes import ProcessTransport
from headrace.reduce.transports.transport import Answer, Transport, drive

ENV = os.environ | {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
CHUNK = 10


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    x = np.random.default_rng(2).standard_normal((2011, 5)).astype("f4")
    np.save(folder / "0.npy", x[:900])
    np.save(folder / "1.npy", x[900:])
    return folder, gram(x, chunk_size=CHUNK).sha256


def order_for(folder, n_ranks, span=1, chunk=CHUNK) -> WorkOrder:
    shards = RowShards.open([folder])
    columns = Columns(width=shards.width)
    partition = CrossNodePartition(k=columns.k, n_rows=shards.n_rows, chunk_size=chunk, n_ranks=n_ranks, span=span)
    return WorkOrder(
        partition=partition, provenance=Provenance(job="t", rows=shards.dtype), columns=columns, shards=shards.spec, data=shards.fingerprint()
    )  # fmt: skip


def sha(reduction, order) -> str:
    return GramResult.of(reduction.finish(), order.columns, order.partition.n_rows, {}).sha256


def test_workers_that_are_killed_are_replaced_and_the_sum_has_the_same_bits(rows):
    folder, expected = rows
    order = order_for(folder, 2)
    reduction = CrossNodeGramReduction(order.partition, provenance=order.provenance)
    transport, told, kill_at = ProcessTransport(order), [], [5, 60]

    def kill(progress):
        if kill_at and progress.frontier >= kill_at[0]:
            os.kill(transport.pids[kill_at.pop() % 2], signal.SIGKILL)

    try:
        assert drive(reduction, transport, progress=kill, notice=told.append, deadline=60)
    finally:
        transport.close()
    assert [sentence.partition(" (")[2] for sentence in told] == [
        "was killed by SIGKILL); a new one goes on where it was"
    ] * 2
    assert sha(reduction, order) == expected


def test_a_worker_that_dies_again_and_again_ends_the_pass_with_its_name(rows):
    class Doomed(Transport):
        def ask(self, rank, ordinal): ...
        def replace(self, rank): ...
        def close(self): ...
        def answer(self, timeout):
            return Answer(rank=1, lost="exit code 137")

    order = order_for(rows[0], 2)
    with pytest.raises(WorkerDied, match=r"rank 1 died 6 times in a row without an answer .exit code 137"):
        drive(CrossNodeGramReduction(order.partition, provenance=order.provenance), Doomed(), deadline=10)


def test_a_row_that_is_not_finite_is_named_by_the_worker_that_read_it(tmp_path):
    bad = np.ones((95, 3))
    bad[57, 1] = np.inf
    np.save(tmp_path / "a.npy", bad)
    order = order_for(tmp_path, 1)
    transport = ProcessTransport(order)
    try:
        with pytest.raises(
            DataError,
            match=r"rank 0: chunk 5 \(rows 50 to 60\) gives NaN or infinity.* The first is row 57 of .*a\.npy",
        ):
            drive(CrossNodeGramReduction(order.partition, provenance=order.provenance), transport, deadline=60)
    finally:
        transport.close()


def test_the_command_goes_on_after_its_coordinator_was_killed(rows, headrace, warm, until, tmp_path):
    folder, expected = rows
    words = ("gram", str(folder), "--chunk", str(CHUNK), "--out", "g.safetensors", "--format", "json")
    process = warm.Popen(
        [sys.executable, "-m", "headrace", *words, "--workers", "1", "--save-every", "0"],
        cwd=tmp_path,
        env=ENV,
        stdout=subprocess.DEVNULL,
    )
    work = tmp_path / "g.safetensors.work"
    try:  # until it has saved something
        until(lambda: len(list(work.glob("coordinator-*"))) >= 2 or process.poll() is not None)
    finally:
        process.kill()
        process.wait()
    assert list(work.glob("coordinator-*")), "it was killed under way"
    done = headrace(*words, "--workers", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["sha256"] == expected
    assert 0 < told["resumed_at"] < told["n_chunks"]
    assert not work.exists()
    again = headrace(*words, cwd=tmp_path)
    assert json.loads(again.stdout)["state"] == "complete"
    assert GramResult.load(tmp_path / "g.safetensors").sha256 == expected
    other = headrace("gram", str(folder), "--chunk", "99", "--out", "g.safetensors", cwd=tmp_path)
    assert other.returncode == 1
    assert "holds the sum of something else (chunk_size was 10, is 99)" in other.stderr
