"""What is refused, in which order, and that a refusal changes nothing."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from gram_reference import unfused_gram
from headrace.errors import ConfigError, CursorMismatch, DataError, FileCorrupt
from headrace.files import open_container
from headrace.reduce import (
    CheckpointFiles,
    ChunkAssembler,
    Columns,
    CrossNodeCheckpoint,
    CrossNodeGramReduction,
    CrossNodePartition,
    NodePartial,
    NodeWorker,
    NodeWorkerCheckpoint,
    Provenance,
    Receipt,
    RowBatch,
    StreamingBorderGram,
    chunk_gram,
    chunk_gram_packed,
    default_chunk_size,
    kernel,
)

PARTITION = CrossNodePartition(k=3, n_rows=70, chunk_size=10, n_ranks=3)
PASS = Provenance(job="j", data="d", rows="f64")
ROWS = np.random.default_rng(0).standard_normal((70, 3))


def partial(chunk: int, /, **changes) -> NodePartial:
    start, end = PARTITION.chunk_rows(chunk)
    made = NodePartial(
        chunk=chunk, chunks=1, rank=PARTITION.owner(chunk), partition=PARTITION.fingerprint, provenance=PASS,
        gram=chunk_gram_packed(ROWS[start:end]),
    )  # fmt: skip
    return replace(made, **changes)


def reduction(**options) -> CrossNodeGramReduction:
    return CrossNodeGramReduction(PARTITION, provenance=PASS, **options)


def test_a_partition_deals_chunks_round_and_round():
    assert PARTITION.n_chunks == 7
    assert [PARTITION.owner(j) for j in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [PARTITION.owned(r) for r in range(3)] == [3, 2, 2]
    assert PARTITION.chunk_rows(6) == (60, 70)
    wide = CrossNodePartition(k=1, n_rows=1000, chunk_size=1, n_ranks=3, span=256)
    assert [wide.owned(r) for r in range(3)] == [2, 1, 1]
    assert wide.unit_chunks(3) == (768, 232)
    assert {wide.owner(j) for j in range(256, 512)} == {1}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"k": 0}, "k must be .* at least 1, got 0"),
        ({"n_rows": -1, "chunk_size": 0}, "n_rows must .*\n.*chunk_size must"),
        ({"n_ranks": True}, "n_ranks must"),
        ({"span": 100}, "span must be 1 or 128·2"),
        ({"span": 384}, "span must be 1 or 128·2"),
    ],
)
def test_a_partition_refuses_impossible_numbers(changes, told):
    with pytest.raises(ConfigError, match=told):
        CrossNodePartition(**(asdict(PARTITION) | changes))


def test_default_chunks_have_four_rows_a_column_at_least():
    assert default_chunk_size(64) == 4096
    assert default_chunk_size(2048) == 8192


def test_the_fold_refuses_in_the_stated_order():
    fold = StreamingBorderGram(entries=6, n_chunks=7)
    bad = np.full(5, np.nan)
    with pytest.raises(DataError, match="chunk 7 was submitted, but there are 7"):
        fold.submit_chunk_gram(7, bad)
    fold.submit_chunk_gram(2, np.ones(6))
    with pytest.raises(DataError, match="chunk 2 was already submitted"):
        fold.submit_chunk_gram(2, bad)
    with pytest.raises(DataError, match=r"chunk 3 is float64 of shape \(5,\)"):
        fold.submit_chunk_gram(3, bad)
    for wrong in (np.nan, np.inf, -np.inf):
        with pytest.raises(DataError, match="chunk 3 holds NaN or infinity"):
            fold.submit_chunk_gram(3, np.array([1, 2, 3, wrong, 5, 6]))
    assert (fold.frontier, fold.pending) == (0, 1)


def test_finishing_early_names_the_first_eight_missing_chunks():
    fold = StreamingBorderGram(entries=1, n_chunks=40)
    fold.submit_chunk_gram(2, np.ones(1))
    with pytest.raises(
        DataError, match="39 partials are still missing, the first at chunks 0, 1, 3, 4, 5, 6, 7, 8 and 31 more"
    ):
        fold.finish()


def test_a_fold_of_nothing_is_positive_zero():
    assert StreamingBorderGram(entries=2, n_chunks=0).finish().tobytes() == np.zeros(2).tobytes()


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (partial(0, provenance=replace(PASS, job="other")), "another pass .job: theirs other, ours j"),
        (partial(0, provenance=replace(PASS, data="x")), "another pass .data: theirs x"),
        (partial(0, provenance=replace(PASS, rows="f32")), "another pass .rows: theirs f32, ours f64"),
        (partial(0, provenance=replace(PASS, arithmetic="unfused")), "another pass .arithmetic: theirs unfused"),
        (partial(0, partition="0" * 16), "another pass .partition"),
        (partial(0, rank=3), "from rank 3; this pass has ranks 0 to 2"),
        (partial(0, rank=1), "rank 1 sent chunk 0: it belongs to rank 0"),
        (partial(3), "rank 0 sent chunk 3: its cursor expects chunk 0"),
        (partial(0, chunk=9), "rank 0 sent chunk 9: its cursor expects chunk 0"),
        (partial(0, chunks=2), "as a sum of 2 chunks"),
        (partial(0, gram=np.ones(5)), r"rank 0: the partial of chunk 0 is float64 of shape \(5,\)"),
        (partial(0, gram=np.full(6, np.nan)), "rank 0: the partial of chunk 0 holds NaN"),
        (partial(0, gram=np.ones(6, "f4")), "rank 0: the partial of chunk 0 is float32"),
    ],
)
def test_a_message_that_does_not_belong_is_refused_and_changes_nothing(message, told):
    desk = reduction()
    with pytest.raises(DataError, match=told):
        desk.receive(message)
    assert desk.received_per_rank == (0, 0, 0)
    assert desk.receive(partial(0)) is Receipt.TAKEN


def test_a_partial_past_the_end_of_its_rank_is_refused():
    desk = reduction()
    for chunk in range(7):
        desk.receive(partial(chunk))
    with pytest.raises(DataError, match="rank 0 sent chunk 9: it is past the end of its 3 partials"):
        desk.receive(partial(0, chunk=9))


def test_an_identical_retry_is_counted_and_another_answer_is_refused():
    desk = reduction()
    desk.receive(partial(0))
    assert desk.receive(partial(0)) is Receipt.DUPLICATE
    with pytest.raises(DataError, match="rank 0 sent chunk 0 again with other bits"):
        desk.receive(partial(0, gram=np.nextafter(partial(0).gram, 9)))
    for chunk in range(1, 7):
        desk.receive(partial(chunk))
    assert desk.finish().tobytes() == reduced().tobytes()


def reduced() -> np.ndarray:
    desk = reduction(window=99)
    for chunk in range(7):
        desk.receive(partial(chunk))
    return desk.finish()


def test_with_one_rank_stalled_the_others_are_asked_to_wait_and_pending_stays_bounded():
    partition = CrossNodePartition(k=1, n_rows=300, chunk_size=1, n_ranks=3)
    desk = CrossNodeGramReduction(partition, window=4)
    workers = [NodeWorker(partition, rank=r, compute=lambda rows, _: rows[0] ** 2) for r in range(3)]
    waits = 0
    for turn in range(200):
        for worker in workers[0 if turn > 150 else 1 :]:
            if worker.next_chunk is None or desk.credit(worker.rank) < 1:
                waits += 1
                continue
            made = worker.compute(np.ones((1, 1)))
            assert desk.receive(made) is Receipt.TAKEN
            assert desk.pending <= 4 * 3
            worker.acknowledge(made)
    assert waits > 100
    stuck = CrossNodeGramReduction(partition, window=1)
    one = NodeWorker(partition, rank=1, compute=lambda rows, _: rows[0] ** 2)
    assert stuck.receive(one.compute(np.ones((1, 1)))) is Receipt.TAKEN
    assert stuck.receive(one.compute(np.ones((1, 1)))) is Receipt.WAIT
    assert stuck.pending == 1


def test_two_coordinators_that_share_the_matrix_fold_the_bits_of_one():
    halves = [reduction(window=99, entries=part) for part in ((0, 4), (4, 6))]
    for chunk in (3, 0, 1, 2, 4, 5, 6):
        for desk in halves:
            if chunk in (3,):
                continue
            desk.receive(partial(chunk).cut(*desk.entries))
            if chunk == 0:
                desk.receive(partial(3).cut(*desk.entries))
    assert np.concatenate([desk.finish() for desk in halves]).tobytes() == reduced().tobytes()


def test_a_worker_refuses_rows_that_are_not_its_chunk():
    worker = NodeWorker(PARTITION, rank=1, provenance=PASS)
    assert worker.next_rows == (10, 20)
    with pytest.raises(DataError, match=r"chunk 1 \(rows 10 to 20\) of rank 1 needs 10 rows, got 9"):
        worker.compute(ROWS[:9])
    with pytest.raises(DataError, match=r"needs rows of 3 columns, got shape \(10, 2\)"):
        worker.compute(ROWS[:10, :2])
    with pytest.raises(DataError, match="needs rows of f64, got f32"):
        worker.compute(ROWS[:10].astype("f4"))
    for value in (np.nan, np.inf, 1e200):
        poisoned = ROWS[:10].copy()
        poisoned[4, 1] = value
        with pytest.raises(DataError, match=r"chunk 1 .* gives NaN or infinity"):
            worker.compute(poisoned)
    assert worker.compute(ROWS[10:20]).chunk == 1
    with pytest.raises(ConfigError, match="rank 3 is outside the partition's 3 ranks"):
        NodeWorker(PARTITION, rank=3)


def test_negative_zeros_and_denormals_keep_their_bits():
    rows = np.array([[-0.0, 1.0], [0.0, 5e-324]])
    assert chunk_gram(rows[:1]).tobytes() == np.array([[0.0, -0.0], [-0.0, 1.0]]).tobytes()
    assert chunk_gram(rows).tobytes() == np.array([[0.0, 0.0], [0.0, 1.0]]).tobytes()
    tiny = np.full((3, 1), 2.0**-537)
    assert chunk_gram(tiny)[0, 0] == 3 * 2.0**-1074


def test_the_kernel_refuses_what_it_cannot_mean():
    for wrong in (np.ones((3, 2), "i4"), np.ones((3, 2), ">f8")):
        with pytest.raises(DataError, match="rows must be float64"):
            chunk_gram(wrong)
    with pytest.raises(DataError, match=r"got shape \(3,\)"):
        chunk_gram(np.ones(3))
    with pytest.raises(ConfigError, match="threads must be between"):
        chunk_gram(np.ones((3, 2)), threads=0)
    assert chunk_gram(np.ones((0, 2))).tobytes() == np.zeros((2, 2)).tobytes()
    assert chunk_gram(ROWS[::2]).tobytes() == chunk_gram(np.ascontiguousarray(ROWS[::2])).tobytes()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_wide_matrix_of_many_superblocks_has_the_bits_of_the_reference(threads, monkeypatch):
    monkeypatch.setattr(kernel, "_LEAST_ROWS", 256)
    monkeypatch.setattr(kernel, "_MOST_ROWS", 256)
    rows = np.random.default_rng(8).standard_normal((1701, 261)).astype("f4")
    assert chunk_gram(rows, threads=threads).tobytes() == unfused_gram(rows).tobytes()


def test_extra_columns_give_the_bits_of_a_wider_matrix():
    more = np.random.default_rng(3).standard_normal((70, 9))
    wide = np.concatenate([ROWS, more], axis=1)
    assert chunk_gram_packed(ROWS, more).tobytes() == chunk_gram_packed(wide).tobytes()


def test_the_assembler_refuses_width_overrun_and_an_end_inside_a_chunk():
    assembler = ChunkAssembler.of(CrossNodePartition(k=3, n_rows=15, chunk_size=10, n_ranks=1))
    with pytest.raises(DataError, match="rows of 3 columns are expected"):
        assembler.push(np.ones((2, 4)))
    assert list(assembler.push(np.ones((4, 3)))) == []
    with pytest.raises(DataError, match="holds 4 rows of chunk 0"):
        assembler.checkpoint()
    with pytest.raises(DataError, match="began with rows of float64, now float32"):
        assembler.push(np.ones((4, 3), "f4"))
    with pytest.raises(DataError, match="ended inside chunk 0: it has 4 of its 10 rows"):
        assembler.finish()
    assert [c for c, _ in assembler.push(np.ones((11, 3)))] == [0, 1]
    assert assembler.checkpoint() == 2
    with pytest.raises(DataError, match="1 rows came past the last chunk"):
        list(assembler.push(np.ones((1, 3))))
    open_end = ChunkAssembler.unbounded(k=3, chunk_size=10)
    assert [c for c, _ in open_end.push(np.ones((23, 3)))] == [0, 1]
    assert open_end.finish()[0] == 2
    assert open_end.finish() is None


# ---------------------------------------------------------------------------------------------- checkpoints


def saved(tmp_path, chunks) -> CheckpointFiles:
    desk, files = reduction(), CheckpointFiles(tmp_path, "coordinator")
    for chunk in chunks:
        desk.receive(partial(chunk))
        desk.checkpoint().save(files)
    return files


def test_a_torn_checkpoint_is_set_aside_and_the_one_before_it_is_used(tmp_path):
    files = saved(tmp_path, [0, 1, 3])
    newest = files.path(files.numbers()[-1])
    assert len(files.numbers()) == 2
    newest.write_bytes(newest.read_bytes()[:-30])
    told: list[str] = []
    files = CheckpointFiles(tmp_path, "coordinator", report=told.append)
    assert CrossNodeCheckpoint.load(files).received_per_rank == (1, 1, 0)
    assert "goes on from generation 2" in told[0]
    assert (tmp_path / "quarantine" / newest.name).exists()


def test_a_checkpoint_that_does_not_add_up_is_refused_with_its_numbers(tmp_path):
    files = CheckpointFiles(tmp_path, "coordinator")
    desk = reduction()
    desk.receive(partial(0))
    desk.receive(partial(2))
    good = desk.checkpoint()
    replace(good, received_per_rank=(1, 1, 0), digests=(good.digests[0], good.digests[2], good.digests[1])).save(files)
    with pytest.raises(FileCorrupt, match="1 partials received of rank 1, but 0 are folded and none parked"):
        CrossNodeCheckpoint.load(files)
    assert len(files.numbers()) == 1, "nothing is moved when nothing is left to go on from"


def test_a_parked_partial_right_at_the_frontier_is_folded_at_a_resume():
    desk = reduction()
    desk.receive(partial(1))
    state = desk.checkpoint()
    fold = replace(state.fold, pending=((0, partial(0).gram), *state.fold.pending))
    digests = (np.array([partial(0).digest], np.uint64), *state.digests[1:])
    again = CrossNodeGramReduction.resume(replace(state, fold=fold, received_per_rank=(1, 1, 0), digests=digests))
    assert (again.frontier, again.pending) == (2, 0)


def test_a_resume_for_another_pass_is_refused_by_name(tmp_path):
    files = saved(tmp_path, [0])
    with pytest.raises(CursorMismatch, match="data: saved d, now e"):
        CrossNodeGramReduction.resume(CrossNodeCheckpoint.load(files), provenance=replace(PASS, data="e"))
    worker = NodeWorker(PARTITION, rank=0, provenance=PASS).checkpoint()
    with pytest.raises(CursorMismatch, match=r"rank 0 was saved for another pass .job: saved j, now k"):
        NodeWorker.resume(worker, provenance=replace(PASS, job="k"))


def test_a_worker_resumes_inside_a_span_to_the_bit(tmp_path):
    partition = CrossNodePartition(k=3, n_rows=300, chunk_size=1, n_ranks=1, span=256)
    rows = np.random.default_rng(5).standard_normal((300, 3))

    def shipped(worker: NodeWorker, stop: int = 10**9) -> list[bytes]:
        out = []
        while worker.next_chunk is not None and worker.next_chunk < stop:
            at = worker.next_chunk
            if (made := worker.compute(rows[at : at + 1])) is not None:
                out.append(made.gram.tobytes())
                worker.acknowledge(made)
        return out

    straight = shipped(NodeWorker(partition, rank=0))
    assert len(straight) == 2
    worker = NodeWorker(partition, rank=0)
    shipped(worker, stop=200)
    files = CheckpointFiles(tmp_path, "worker-0")
    worker.checkpoint().save(files)
    again = NodeWorker.resume(NodeWorkerCheckpoint.load(files))
    assert again.next_chunk == 200, "nothing of the open span is computed twice"
    assert shipped(again) == straight


@pytest.mark.parametrize("mean", [0.0, 100.0], ids=["gaussian", "large mean"])
def test_the_largest_error_of_an_entry_is_no_more_than_that_of_a_plain_product(mean):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((40_000, 24)) + mean).astype("f4")
    wide = x.astype("f8")
    worst = {"ours": 0.0, "plain": 0.0}
    ours, plain = chunk_gram(x), wide.T @ wide
    for i in range(0, 24, 3):
        for j in range(i, 24, 3):
            products = wide[:, i] * wide[:, j]  # exact: f32 times f32
            exact, unit = math.fsum(products.tolist()), 2.0**-53 * float(np.abs(products).sum())
            worst["ours"] = max(worst["ours"], abs(ours[i, j] - exact) / unit)
            worst["plain"] = max(worst["plain"], abs(plain[i, j] - exact) / unit)
    assert worst["ours"] <= min(worst["plain"], 20.0), worst


def test_what_is_parked_or_saved_does_not_change_with_what_comes_after():
    fold, buffer = StreamingBorderGram(entries=1, n_chunks=2), np.array([2.0])
    fold.submit_chunk_gram(1, buffer)
    buffer[0] = 99.0
    fold.submit_chunk_gram(0, np.array([1.0]))
    assert fold.finish().tolist() == [3.0]
    desk = reduction(window=99)
    for chunk in range(3):
        desk.receive(partial(chunk))
    early = desk.checkpoint()
    for chunk in range(3, 7):
        desk.receive(partial(chunk))
    again = CrossNodeGramReduction.resume(early)
    for chunk in range(3, 7):
        again.receive(partial(chunk))
    assert again.finish().tobytes() == desk.finish().tobytes()


@pytest.mark.parametrize(
    "nonsense",
    [
        {"partition": asdict(PARTITION) | {"k": -1}},
        {"partition": asdict(PARTITION) | {"span": 7}},
        {"entries": [5, 2]},
        {"pass": asdict(PASS) | {"rows": "zz"}},
        {"received_per_rank": []},
        {"digests": np.uint64(3).reshape(())},
        {"digests": np.zeros((2, 1), np.uint64)},
    ],
    ids=str,
)
def test_a_checkpoint_with_impossible_numbers_is_set_aside_like_a_torn_one(nonsense, tmp_path):
    files = saved(tmp_path, [0, 1])
    newest = open_container(files.path(files.numbers()[-1]))
    arrays = {**newest.arrays} | {n: v for n, v in nonsense.items() if n == "digests"}
    files.save(files.numbers()[-1] + 1, arrays, newest.meta | {n: v for n, v in nonsense.items() if n != "digests"})
    assert CrossNodeCheckpoint.load(files).received_per_rank == (1, 1, 0)


def test_a_checkpoint_with_fewer_digests_than_partials_is_refused():
    desk = reduction()
    desk.receive(partial(0))
    good = desk.checkpoint()
    for changes in ({"digests": (good.digests[1],) * 3}, {"received_per_rank": (1, 0)}, {"digests": good.digests[:1]}):
        with pytest.raises(FileCorrupt, match="does not add up: 3 ranks"):
            CrossNodeGramReduction.resume(replace(good, **changes))


def test_a_chunk_below_zero_is_refused_before_the_end_is_known():
    with pytest.raises(DataError, match="chunk -1 was submitted"):
        StreamingBorderGram(entries=1, n_chunks=None).submit_chunk_gram(-1, np.zeros(1))


def test_lists_and_tensors_are_rows_too():
    torch = pytest.importorskip("torch")
    expected = chunk_gram(ROWS[10:20])
    assert chunk_gram(ROWS[10:20].tolist()).tobytes() == expected.tobytes()
    assert chunk_gram(torch.tensor(ROWS[10:20])).tobytes() == expected.tobytes()
    worker = NodeWorker(PARTITION, rank=1, provenance=PASS)
    assert worker.compute(torch.tensor(ROWS[10:20])).gram.tobytes() == partial(1).gram.tobytes()


def test_rows_that_a_pass_cannot_use_are_named_with_their_chunk():
    columns = Columns(width=2, weighted=True)
    worker = NodeWorker(PARTITION, rank=1, provenance=PASS, compute=columns.gram)
    with pytest.raises(DataError, match=r"chunk 1 \(rows 10 to 20\): weights must be .* got -1.0 at row 0"):
        worker.compute(RowBatch(x=ROWS[10:20, :2], w=-np.ones(10)))


def test_the_sum_comes_packed_or_as_the_whole_square_matrix():
    whole = reduction(window=9)
    with pytest.raises(DataError, match="7 partials are still missing"):
        whole.finish(full=True)
    for chunk in range(7):
        whole.receive(partial(chunk))
    packed, square = whole.finish(), whole.finish(full=True)
    assert (packed.shape, square.shape) == ((6,), (3, 3))
    assert np.array_equal(square, square.T)
    assert square[np.triu_indices(3)].tobytes() == packed.tobytes()
    assert np.allclose(square, ROWS.T @ ROWS)
    fold = StreamingBorderGram(entries=6, n_chunks=1)
    fold.submit_chunk_gram(0, packed)
    assert fold.finish(full=True).tobytes() == square.tobytes()


def test_a_part_of_the_triangle_has_no_square_matrix():
    part = reduction(window=9, entries=(0, 3))
    for chunk in range(7):
        part.receive(partial(chunk).cut(0, 3))
    with pytest.raises(DataError, match="folds entries 0 to 3 of 6 only"):
        part.finish(full=True)
    fold = StreamingBorderGram(entries=5, n_chunks=0)
    with pytest.raises(DataError, match="5 entries are no whole triangle"):
        fold.finish(full=True)


@pytest.mark.parametrize("cut", [0, 3, 7])
def test_checkpoints_travel_as_bytes_and_resume_to_the_bit(cut):
    straight, first = reduction(window=9), reduction(window=9)
    for chunk in range(7):
        straight.receive(partial(chunk))
    order = [0, 2, 1, 5, 3, 4, 6]
    for chunk in order[:cut]:
        first.receive(partial(chunk))
    data = first.checkpoint().to_bytes()
    assert data == first.checkpoint().to_bytes()
    for form in (data, bytearray(data), memoryview(data)):
        second = CrossNodeGramReduction.resume(CrossNodeCheckpoint.from_bytes(form), provenance=PASS, window=9)
        assert second.received_per_rank == first.received_per_rank
        for chunk in order[cut:]:
            second.receive(partial(chunk))
        assert second.finish().tobytes() == straight.finish().tobytes()


def test_a_worker_travels_as_bytes_inside_a_span():
    partition = CrossNodePartition(k=3, n_rows=70, chunk_size=1, n_ranks=1, span=128)
    straight, first = (NodeWorker(partition, rank=0, provenance=PASS) for _ in range(2))
    for row in range(40):
        assert first.compute(ROWS[row : row + 1]) is None
    second = NodeWorker.resume(NodeWorkerCheckpoint.from_bytes(first.checkpoint().to_bytes()))
    assert second.next_rows == (40, 41)
    made = [worker.compute(ROWS[row : row + 1]) for worker in (straight, second) for row in range(70) if worker.next_rows == (row, row + 1)]  # fmt: skip
    ends = [m for m in made if m is not None]
    assert ends[0].gram.tobytes() == ends[1].gram.tobytes()


@pytest.mark.parametrize("kind", [CrossNodeCheckpoint, NodeWorkerCheckpoint])
def test_bytes_of_a_checkpoint_that_changed_on_the_way_are_refused(kind):
    begun = reduction()
    begun.receive(partial(0))
    saved = {
        CrossNodeCheckpoint: begun.checkpoint(),
        NodeWorkerCheckpoint: NodeWorker(PARTITION, rank=1, provenance=PASS).checkpoint(),
    }
    data = saved.pop(kind).to_bytes()
    (other,) = saved.values()
    for at in range(0, len(data), 7):
        bad = bytearray(data)
        bad[at] ^= 4
        with pytest.raises((FileCorrupt, DataError), match="the bytes of a checkpoint"):
            kind.from_bytes(bad)
    for wrong in (b"", data[:-1], data + b"\0", other.to_bytes()):
        with pytest.raises((FileCorrupt, DataError), match="the bytes of a checkpoint"):
            kind.from_bytes(wrong)
