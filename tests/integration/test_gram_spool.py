"""Partials through a folder: the sum has the same bits if workers join, die or are stopped, and if files are damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from headrace.errors import ConfigError, DataChanged, DataError, DeadlineExceeded
from headrace.order import fingerprint_json
from headrace.reduce import (
    CheckpointFiles,
    Columns,
    CrossNodeCheckpoint,
    CrossNodeGramReduction,
    CrossNodePartition,
    GramResult,
    NodePartial,
    Provenance,
    gram,
)
from headrace.reduce.orders import WorkOrder
from headrace.reduce.reduce_shards import GramPlan, join_spool, reduce_shards
from headrace.reduce.shards import RowShards
from headrace.reduce.transports.folder import FolderTransport, SpoolWorker, wait_for_pass
from headrace.reduce.transports.transport import drive

CHUNK = 10
ENV = os.environ | {"NO_COLOR": "1"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    x = np.random.default_rng(2).standard_normal((1711, 5)).astype("f4")
    np.save(folder / "0.npy", x)
    return folder, x, gram(x, chunk_size=CHUNK).sha256


def order_for(folder, *, span=1, job="t", threads=1) -> WorkOrder:
    shards = RowShards.open([folder])
    columns = Columns(width=shards.width)
    partition = CrossNodePartition(k=columns.k, n_rows=shards.n_rows, chunk_size=CHUNK, n_ranks=1, span=span)
    provenance = Provenance(job=job, rows=shards.dtype)
    return WorkOrder(
        partition=partition, provenance=provenance, columns=columns, shards=shards.spec, data=shards.fingerprint(), threads=threads
    )  # fmt: skip


def begun(path, order, *, workers=0, first_unit=0, lease=30.0, notice=lambda _: None) -> FolderTransport:
    return FolderTransport(
        path, order, workers=workers, first_unit=first_unit, window=4, lease=lease, notice=notice, patience=30
    )


def sha(reduction, order) -> str:
    return GramResult.of(reduction.finish(), order.columns, order.partition.n_rows, {}).sha256


def take(transport, reduction) -> bool:
    """Fold the next partial, if it is there."""
    transport.ask(0, reduction.received_per_rank[0])
    answer = transport.answer(0)
    if answer is None:
        return False
    if answer.error is not None:
        raise answer.error
    reduction.receive(NodePartial.from_bytes(answer.message))
    return True


@pytest.mark.parametrize(("logical", "span"), [(64, 1), (3, 128)])
def test_any_number_of_workers_in_any_order_gives_the_bits_of_one_process(rows, tmp_path, logical, span):
    folder, _, expected = rows
    order = order_for(folder, span=span, threads=1 + logical % 2)
    transport = begun(tmp_path / "s", order)
    reduction, rng = (
        CrossNodeGramReduction(order.partition, provenance=order.provenance),
        np.random.default_rng(logical),
    )
    workers = [SpoolWorker(tmp_path / "s") for _ in range(logical)]
    while not reduction.complete:
        workers[rng.integers(logical)].step()
        while rng.random() < 0.5 and take(transport, reduction):
            continue
    assert sha(reduction, order) == expected
    assert sum(w.made for w in workers) == order.partition.n_units
    transport.finish()
    assert {w.step() for w in workers} == {"finished"}
    transport.close()
    assert not (tmp_path / "s").exists()


def test_a_killed_coordinator_finds_every_partial_that_neither_generation_holds(rows, tmp_path):
    folder, _, expected = rows
    order = order_for(folder)
    reduction, transport = (
        CrossNodeGramReduction(order.partition, provenance=order.provenance),
        begun(tmp_path / "s", order),
    )
    files, commit = CheckpointFiles(tmp_path / "c", "coordinator"), transport.spool.channel.commit_point
    worker = SpoolWorker(tmp_path / "s")
    for stop in (40, 90, 130):
        while reduction.frontier < stop:
            worker.step()
            take(transport, reduction)
        newest = reduction.checkpoint().save(files)
        transport.saved(reduction.received_per_rank[0])
    assert commit() == 90, "what the older of two generations lacks is kept"
    while worker.step() == "made":
        continue
    made = worker.made
    transport._lock.release()  # as when the process is gone
    os.truncate(newest, 1000)
    resumed = CrossNodeGramReduction.resume(CrossNodeCheckpoint.load(files))
    again = begun(tmp_path / "s", order, first_unit=resumed.received_per_rank[0])
    while not resumed.complete:
        assert take(again, resumed), "nothing has to be computed again"
    assert sha(resumed, order) == expected
    assert worker.step() == "idle"
    assert worker.made == made == order.partition.n_units
    again.close()


def test_a_lost_checkpoint_means_that_everything_is_made_again(rows, tmp_path):
    folder, _, expected = rows
    order = order_for(folder)
    transport = begun(tmp_path / "s", order)
    transport.spool.commit(60)
    transport.close()
    transport, reduction = (
        begun(tmp_path / "s", order),
        CrossNodeGramReduction(order.partition, provenance=order.provenance),
    )
    worker = SpoolWorker(tmp_path / "s")
    for _ in range(2 * order.partition.n_units):
        worker.step()
        take(transport, reduction)
    transport.close()
    assert sha(reduction, order) == expected


def test_a_damaged_or_foreign_file_is_set_aside_and_made_again(rows, tmp_path):
    folder, _, expected = rows
    order, told = order_for(folder), []
    transport = begun(tmp_path / "s", order, notice=told.append)
    reduction, queue = CrossNodeGramReduction(order.partition, provenance=order.provenance), transport.spool.channel
    worker = SpoolWorker(tmp_path / "s")
    while worker.step() == "made":
        continue
    good = {unit: queue.path(unit).read_bytes() for unit in (3, 4)}
    queue.path(3).write_bytes(good[3][:-9])
    queue.path(4).write_bytes(good[4][:-1] + bytes([good[4][-1] ^ 1]))
    queue.path(5).write_bytes(good[4])
    os.truncate(queue.path(6), 1 << 40)  # sparse: read whole, it would be a terabyte
    queue.path(7).unlink()
    queue.path(7).symlink_to("/dev/zero")
    while not reduction.complete:
        while worker.step() == "made":
            continue
        take(transport, reduction)
    assert sha(reduction, order) == expected
    assert [s.partition(" ")[0] and s.rpartition(" and is made again")[1] for s in told] == [" and is made again"] * 5
    for sentence, words in zip(
        told, ("truncated", "checksum", "another chunk", "at most", "symbolic link"), strict=True
    ):
        assert words in sentence
    transport.close()


def test_a_unit_that_keeps_coming_damaged_ends_the_pass_with_its_number(rows, tmp_path):
    order = order_for(rows[0])
    transport = begun(tmp_path / "s", order)
    transport.ask(0, 0)
    for _ in range(5):
        transport.spool.channel.path(0).write_bytes(b"nothing")
        assert transport.answer(0) is None
    transport.spool.channel.path(0).write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"unit 0 is truncated.*the 6th time: look after the disk"):
        transport.answer(0)
    transport.close()


def test_other_bits_for_the_same_unit_end_the_pass_and_equal_ones_do_not(rows, tmp_path):
    order = order_for(rows[0])
    transport = begun(tmp_path / "s", order)
    reduction = CrossNodeGramReduction(order.partition, provenance=order.provenance)
    worker = SpoolWorker(tmp_path / "s")
    worker.step()
    message = transport.spool.channel.path(0).read_bytes()
    worker._publish(0, message)  # equal bits: nothing happens
    partial = NodePartial.from_bytes(message)
    other = NodePartial(
        chunk=0,
        chunks=1,
        rank=0,
        partition=partial.partition,
        provenance=partial.provenance,
        gram=partial.gram + 1.0,
    )
    with pytest.raises(DataError, match="two workers came to other bits"):
        worker._publish(0, other.to_bytes())
    take(transport, reduction)  # the first answer stands
    with pytest.raises(DataError, match=r"process \d+ on .*, unit 0: two workers came to other bits"):
        take(transport, reduction)
    transport.close()
    with pytest.raises(DataError, match=r"the pass in .* failed: .*other bits"):
        worker.step()


def test_a_row_that_is_not_finite_is_named_and_ends_the_pass_for_everybody(tmp_path):
    bad = np.ones((95, 3))
    bad[57, 1] = np.nan
    np.save(tmp_path / "a.npy", bad)
    order = order_for(tmp_path)
    transport = begun(tmp_path / "s", order, workers=1)
    try:
        with pytest.raises(DataError, match=r"unit 5: chunk 5 \(rows 50 to 60\) gives NaN or infinity"):
            drive(CrossNodeGramReduction(order.partition, provenance=order.provenance), transport, deadline=30)
    finally:
        transport.close()
    with pytest.raises(DataError, match=r"failed: .*gives NaN"):
        SpoolWorker(tmp_path / "s").run()


def test_killed_and_stopped_workers_hold_nobody_up(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "headrace.reduce.transports.folder._AHEAD_UNITS", 1
    )  # units are left to make when the workers are killed
    folder, _, expected = rows
    order, told = order_for(folder), []
    transport = begun(tmp_path / "s", order, workers=2, lease=0.5, notice=told.append)
    reduction, stopped = CrossNodeGramReduction(order.partition, provenance=order.provenance), []

    def harm(progress):
        if progress.frontier >= 20 and not stopped:  # both: what is left can only be made by somebody new
            os.kill(transport.pids[0], signal.SIGSTOP)
            os.kill(transport.pids[1], signal.SIGKILL)
            stopped.extend(transport.pids[:2])

    try:
        assert drive(reduction, transport, progress=harm, notice=told.append, deadline=60)
    finally:
        transport.close()
    assert sha(reduction, order) == expected
    assert len(stopped) == 2
    assert any("was killed by SIGKILL" in sentence for sentence in told), told


def test_a_folder_of_something_else_is_not_touched(rows, tmp_path):
    order = order_for(rows[0])
    with pytest.raises(ConfigError, match=r"no spool of partials, and not empty"):
        begun(rows[0], order)
    transport = begun(tmp_path / "s", order)
    with pytest.raises(ConfigError, match=r"is in use by the coordinator of a Gram, process \d+.*give another --spool"):
        begun(tmp_path / "s", order)
    transport.close()
    with pytest.raises(ConfigError, match=r"holds the partials of another pass \(pass differ\)"):
        begun(tmp_path / "s", order_for(rows[0], job="u"))
    with pytest.raises(DeadlineExceeded, match="No coordinator has begun a pass"):
        wait_for_pass(tmp_path / "nowhere", patience=0.05)
    worker = SpoolWorker(tmp_path / "s", patience=0.05)
    worker.spool.want(0, 0)
    with pytest.raises(DeadlineExceeded, match="no process has coordinated the pass"):
        worker.run()


def test_those_who_join_may_have_the_same_rows_elsewhere_but_no_others(rows, tmp_path):
    folder, x, expected = rows
    order = order_for(folder)
    (tmp_path / "here").mkdir()
    np.save(tmp_path / "here" / "0.npy", x)
    (tmp_path / "other").mkdir()
    np.save(tmp_path / "other" / "0.npy", x + 1)
    transport = begun(tmp_path / "s", order)
    with pytest.raises(DataChanged):
        join_spool(tmp_path / "s", shards=[str(tmp_path / "other")])
    done = []
    joined = threading.Thread(
        target=lambda: done.append(join_spool(tmp_path / "s", shards=[str(tmp_path / "here")], workers=1, deadline=60))
    )
    joined.start()
    reduction = CrossNodeGramReduction(order.partition, provenance=order.provenance)
    try:
        assert drive(reduction, transport, deadline=60)
        transport.finish()
    finally:
        transport.close()
    joined.join(30)
    assert sha(reduction, order) == expected
    assert [(s.state, s.partials) for s in done] == [("finished", order.partition.n_units)]


class Quiet:
    """A watcher that prints nothing."""

    def began(self, *_): ...
    def progress(self, _): ...
    def notice(self, _): ...


def test_the_command_goes_on_from_the_spool_after_its_coordinator_was_killed(rows, warm, until, tmp_path):
    folder, _, expected = rows
    words = ("gram", str(folder), "--chunk", str(CHUNK), "--spool", "s", "--out", "g.safetensors", "--format", "json")
    process = warm.Popen(
        [sys.executable, "-m", "headrace", *words, "--workers", "1", "--save-every", "0"],
        cwd=tmp_path,
        env=ENV,
        stdout=subprocess.DEVNULL,
    )
    queue = tmp_path / "s" / "queue" / "partials"
    try:
        until(lambda: process.poll() is not None or (queue.is_dir() and any(queue.iterdir())))
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "s" / "gram.json").exists(), "it was killed under way"
    plan = GramPlan(
        shards=[str(folder)], chunk=CHUNK, spool=tmp_path / "s", out=tmp_path / "g.safetensors", workers=1, deadline=60
    )
    done = reduce_shards(plan, Quiet())
    assert (done.sha256, done.engine, done.state) == (expected, "spool", "reduced")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g.safetensors"]
    shards, columns = RowShards.open([folder]), Columns(width=5)
    partition = CrossNodePartition(k=columns.k, n_rows=shards.n_rows, chunk_size=CHUNK, n_ranks=1)
    data = fingerprint_json([shards.fingerprint(), columns.fingerprint])
    provenance = Provenance(job="g.safetensors", data=data, rows=shards.dtype)
    left = WorkOrder(
        partition=partition, provenance=provenance, columns=columns, shards=shards.spec, data=shards.fingerprint()
    )
    begun(tmp_path / "s", left).close()  # as when it is killed between the result and the folder
    assert reduce_shards(plan, Quiet()).state == "complete"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g.safetensors"]
    with pytest.raises(ConfigError, match="--spool is for --engine spool, not for ray"):
        replace(plan, engine="ray")
