"""What the command refuses, what it goes on with and what it leaves alone."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.errors import CursorMismatch, DataChanged, DataError, HeadraceError
from headrace.reduce import GramResult, gram
from headrace.reduce.orders import PartialMaker
from headrace.reduce.reduce_shards import GramPlan, reduce_shards
from headrace.reduce.transports.transport import Answer, Transport

RNG = np.random.default_rng(3)


class InThisProcess(Transport):
    """Makes every partial when it is asked for: these tests are about files, and a worker process takes a second to start."""

    def __init__(self, order):
        self._makers = [PartialMaker(order, rank) for rank in range(order.partition.n_ranks)]
        self._asked = []

    def ask(self, rank, ordinal):
        self._asked.append((rank, ordinal))

    def answer(self, timeout):
        rank, ordinal = self._asked.pop(0)
        try:
            return Answer(rank=rank, message=self._makers[rank].make(ordinal))
        except HeadraceError as error:
            return Answer(rank=rank, error=error)

    def replace(self, rank): ...
    def close(self): ...


@pytest.fixture(autouse=True)
def no_processes(monkeypatch):
    monkeypatch.setattr("headrace.reduce.transports.processes.ProcessTransport", InThisProcess)


class Quiet:
    def began(self, *_): ...
    def progress(self, progress): ...
    def notice(self, sentence): ...


class StopAt(Quiet):
    """Ends a pass under way, as a machine that goes away would."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def progress(self, progress):
        if progress.frontier >= self.chunk:
            raise KeyboardInterrupt


def plan(folder, **changes) -> GramPlan:
    options = {"shards": [str(folder / "*.npy")], "out": folder / "r.s", "chunk": 100, "workers": 1, "save_every": 0.0}
    return GramPlan(**(options | changes))


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, RNG.standard_normal((1000, 3)))
    np.save(tmp_path / "b.npy", RNG.standard_normal((100_000, 3)))
    return path


def write_into(path) -> None:
    """Change one number where the fingerprint does not look."""
    rows = np.load(path, mmap_mode="r+")
    rows[len(rows) // 3] += 1.0
    rows.flush()
    status = path.stat()
    os.utime(
        path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000)
    )  # a clock may tick less often than a test writes


def test_a_shard_that_was_written_since_is_noticed_at_a_resume_and_at_the_end(tmp_path, shard):
    big = tmp_path / "b.npy"
    before = reduce_shards(plan(tmp_path, chunk=10_000), Quiet())
    assert before.sha256 == gram(np.concatenate([np.load(shard), np.load(big)]), chunk_size=10_000).sha256
    assert reduce_shards(plan(tmp_path, chunk=10_000), Quiet()).state == "complete"
    write_into(big)
    with pytest.raises(DataChanged, match=rf"{big} was written since .*r\.s was summed.* --replace .* --out"):
        reduce_shards(plan(tmp_path, chunk=10_000), Quiet())
    after = reduce_shards(plan(tmp_path, chunk=10_000, replace=True), Quiet())
    assert after.sha256 != before.sha256
    with pytest.raises(KeyboardInterrupt):
        reduce_shards(plan(tmp_path, chunk=10_000, out=tmp_path / "q.s"), StopAt(6))
    write_into(big)
    with pytest.raises(
        DataChanged, match=rf"{big} was written since the pass in .*q\.s\.work was begun.* remove .*q\.s\.work"
    ):
        reduce_shards(plan(tmp_path, chunk=10_000, out=tmp_path / "q.s"), Quiet())
    anew = reduce_shards(plan(tmp_path, chunk=10_000, out=tmp_path / "q.s", replace=True), Quiet())
    assert (anew.state, anew.resumed_at) == ("reduced", 0)
    assert anew.sha256 == reduce_shards(plan(tmp_path, chunk=10_000, out=tmp_path / "z.s"), Quiet()).sha256


def test_a_shard_that_is_written_under_way_ends_the_pass_without_a_result(tmp_path, shard):
    class Writer(Quiet):
        def progress(self, progress):
            if progress.frontier == 5:
                os.utime(shard, ns=(1, 1))

    with pytest.raises(DataChanged, match=r"a\.npy was written since the pass"):
        reduce_shards(plan(tmp_path, shards=[str(shard)]), Writer())
    assert not (tmp_path / "r.s").exists()


def test_partials_of_shards_that_were_written_since_are_not_mixed_in_through_a_spool(tmp_path, shard):
    words = {"spool": tmp_path / "spool", "shards": [str(tmp_path / "b.npy")], "chunk": 10_000}
    with pytest.raises(KeyboardInterrupt):
        reduce_shards(plan(tmp_path, **words), StopAt(5))
    write_into(tmp_path / "b.npy")
    for path in (tmp_path / "r.s.work").iterdir():
        path.unlink()
    (tmp_path / "r.s.work").rmdir()
    through = reduce_shards(plan(tmp_path, **words), Quiet())
    assert through.sha256 == gram(np.load(tmp_path / "b.npy"), chunk_size=10_000).sha256


def test_a_mended_row_is_told_the_way_on_and_replace_begins_anew(tmp_path, shard):
    rows = RNG.standard_normal((1000, 3))
    good = rows.copy()
    rows[750, 1] = np.nan
    np.save(shard, rows)
    words = {"shards": [str(shard)]}
    with pytest.raises(DataError, match=r"The first is row 750 of .*a\.npy"):
        reduce_shards(plan(tmp_path, **words), Quiet())
    np.save(shard, good)
    with pytest.raises((DataChanged, CursorMismatch), match=r"r\.s\.work.* --replace"):
        reduce_shards(plan(tmp_path, **words), Quiet())
    assert reduce_shards(plan(tmp_path, **words, replace=True), Quiet()).state == "reduced"


def test_a_replacing_pass_that_was_stopped_goes_on(tmp_path, shard):
    words = {"shards": [str(shard)], "replace": True}
    with pytest.raises(KeyboardInterrupt):
        reduce_shards(plan(tmp_path, **words), StopAt(4))
    assert reduce_shards(plan(tmp_path, **words), Quiet()).resumed_at >= 3


def test_a_pass_that_saved_nothing_begins_with_the_shards_as_they_are(tmp_path, shard):
    with pytest.raises(KeyboardInterrupt):
        reduce_shards(plan(tmp_path, shards=[str(shard)], save_every=99.0), StopAt(2))
    np.save(shard, np.ones((1000, 3)))
    assert reduce_shards(plan(tmp_path, shards=[str(shard)]), Quiet()).state == "reduced"


def test_a_weight_below_zero_is_named_with_its_file(tmp_path):
    weights = np.ones(300)
    weights[250] = -1
    save_file({"x": np.ones((300, 2)), "w": weights}, tmp_path / "a.safetensors")
    with pytest.raises(
        DataError, match=r"chunk 2 \(rows 200 to 300\): weights must be .* The first is row 250 of .*a\.saf"
    ):
        reduce_shards(plan(tmp_path, shards=[str(tmp_path)], field="x", weights="w"), Quiet())


def test_a_result_in_the_folder_of_its_shards_is_not_read(tmp_path, headrace):
    save_file({"x": RNG.standard_normal((50, 2))}, tmp_path / "a.safetensors")
    for state in ("reduced", "complete"):
        done = headrace("gram", ".", "--format", "json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["state"] == state
    named = headrace("gram", "a.safetensors", "gram.safetensors", "--format", "json", cwd=tmp_path)
    assert json.loads(named.stdout)["state"] == "complete"


@pytest.mark.parametrize(
    ("words", "env", "told"),
    [
        ((), {"WORLD_SIZE": "2"}, "is for ranks that torchrun started"),
        ((), {"WORLD_SIZE": "foo"}, "WORLD_SIZE must be a whole number, got 'foo'"),
        (("--out", os.fsdecode(b"\xff.s")), {}, "--out must be a name in UTF-8"),
        (("--chunk", "1.5"), {}, "1.5"),
        (("--rows", "bf16"), {}, "holds f64 rows: they can be converted"),
    ],
    ids=["no rank", "no number", "no utf-8", "no whole chunk", "no bf16"],
)
def test_a_call_that_cannot_be_meant_ends_in_one_sentence(words, env, told, tmp_path, headrace):
    np.save(tmp_path / "a.npy", np.ones((9, 2)))
    done = headrace("gram", "a.npy", *words, cwd=tmp_path, env=env)
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "gram.safetensors").exists()


def test_the_speed_counts_rows_and_not_whole_chunks():
    from headrace.cli.gram import rows_folded
    from headrace.reduce.reduce_shards import GramSummary

    done = GramSummary(out="", state="reduced", n_rows=105, chunk_size=100, n_chunks=2, resumed_at=1, folded=2)
    assert rows_folded(done) == 5


def test_ranks_of_torchrun_give_the_bits_of_one_process_and_do_not_compute_a_finished_result_again(
    tmp_path, shard, headrace
):
    words = ("gram", str(shard), "--out", "r.s", "--chunk", "100", "--format", "json")
    first = headrace(*words, cwd=tmp_path, ranks=2)
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["engine"] == "torchrun"
    assert json.loads(first.stdout)["sha256"] == gram(np.load(shard), chunk_size=100).sha256
    written = (tmp_path / "r.s").stat().st_mtime_ns
    again = headrace(*words, cwd=tmp_path, ranks=2)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["state"] == "complete"
    assert (tmp_path / "r.s").stat().st_mtime_ns == written
    assert GramResult.load(tmp_path / "r.s").files
