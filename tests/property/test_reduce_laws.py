"""The sum depends on the rows and on where chunks are cut, on nothing else."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gram_reference import fused_gram, unfused_gram
from headrace.errors import DataError
from headrace.reduce import (
    BorderState,
    CheckpointFiles,
    ChunkAssembler,
    CrossNodeCheckpoint,
    CrossNodeGramReduction,
    CrossNodePartition,
    NodePartial,
    NodeWorker,
    NodeWorkerCheckpoint,
    Receipt,
    StreamingBorderGram,
    chunk_gram,
    kernel,
    pairwise_sum,
    unpack_upper,
)

K = 2
ENTRIES = 3


@pytest.fixture(scope="module", autouse=True)
def small_matrices_are_shared_too():
    """Left alone one thread does them, and threads would not be looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_WORTH_SHARING", 0)
        yield


def ugly(rng: np.random.Generator, shape) -> np.ndarray:
    """Numbers whose sums round at every step, with zeros of both signs."""
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-40, 40, shape))
    values[rng.random(shape) < 0.1] = -0.0
    return values


def partials(n_chunks: int, seed: int = 0) -> np.ndarray:
    return ugly(np.random.default_rng([seed, n_chunks]), (n_chunks, ENTRIES))


def folded(grams: np.ndarray, order=None, span: int = 1) -> np.ndarray:
    fold = StreamingBorderGram(entries=ENTRIES, n_chunks=len(grams))
    for chunk in order if order is not None else range(len(grams)):
        fold.submit_chunk_gram(chunk, grams[chunk])
    return fold.finish()


@given(
    n_chunks=st.one_of(
        st.integers(0, 40), st.integers(100, 1500), st.sampled_from([127, 128, 129, 255, 256, 257, 384, 1024])
    )
)
def test_the_fold_is_pairwise_sum_over_the_chunks_entry_by_entry(n_chunks):
    grams = partials(n_chunks)
    expected = np.array([pairwise_sum(column) for column in grams.T]) if n_chunks else np.zeros(ENTRIES)
    assert folded(grams).tobytes() == expected.tobytes()


@settings(max_examples=60)
@given(n_chunks=st.integers(0, 300), seed=st.integers(0, 2**32))
def test_any_arrival_order_gives_the_same_bits(n_chunks, seed):
    grams = partials(n_chunks)
    order = np.random.default_rng(seed).permutation(n_chunks)
    assert folded(grams, order).tobytes() == folded(grams).tobytes()


def test_a_thousand_arrival_orders_give_the_same_bits():
    grams = partials(70)
    expected = folded(grams).tobytes()
    rng = np.random.default_rng(1)
    assert {folded(grams, rng.permutation(70)).tobytes() for _ in range(1000)} == {expected}


@settings(max_examples=25)
@given(n_chunks=st.integers(1, 1700), span=st.sampled_from([128, 256, 512]), n_ranks=st.sampled_from([1, 2, 3, 7, 64]))
def test_shipping_whole_spans_gives_the_bits_of_shipping_every_chunk(n_chunks, span, n_ranks):
    grams = partials(n_chunks)
    partition = CrossNodePartition(k=K, n_rows=n_chunks, chunk_size=1, n_ranks=n_ranks, span=span)
    reduction = CrossNodeGramReduction(partition, window=10**6)
    for rank in reversed(range(n_ranks)):
        at: list[int] = []
        worker = NodeWorker(partition, rank=rank, compute=lambda rows, threads, at=at: grams[at[0]])
        while worker.next_rows is not None:
            at[:] = [worker.next_chunk]
            partial = worker.compute(np.zeros((1, K)))
            if partial is not None:
                assert reduction.receive(partial) is Receipt.TAKEN
                worker.acknowledge(partial)
    assert reduction.finish().tobytes() == folded(grams).tobytes()


@settings(max_examples=40)
@given(
    n=st.one_of(st.integers(0, 300), st.integers(300, 3000)), k=st.integers(1, 21), threads=st.sampled_from([1, 2, 3]),
    dtype=st.sampled_from(["f4", "f2", "bf16"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_kernel_gives_the_bits_of_the_unfused_reference_for_rows_whose_products_are_exact(
    n, k, threads, dtype, seed
):
    values = ugly(np.random.default_rng([n, k, seed]), (n, k))
    values = np.clip(values, -100, 100)
    if dtype == "bf16":
        rows = (values.astype("f4").view(np.uint32) >> 16).astype(np.uint16)
        wide = (rows.astype(np.uint32) << 16).view("f4")
    else:
        rows = wide = values.astype(dtype)
    assert chunk_gram(rows, threads=threads).tobytes() == unfused_gram(wide).tobytes()


@settings(max_examples=15)
@given(n=st.integers(1, 300), k=st.integers(1, 5), threads=st.sampled_from([1, 2]), seed=st.integers(0, 99))
def test_the_kernel_gives_the_bits_of_exact_fractions_rounded_once_a_step_for_f64_rows(n, k, threads, seed):
    rows = ugly(np.random.default_rng([n, k, seed]), (n, k))
    rows[np.random.default_rng(seed).random((n, k)) < 0.05] = 5e-324
    assert chunk_gram(rows, threads=threads).tobytes() == fused_gram(rows).tobytes()


@settings(max_examples=6)
@given(
    n=st.integers(1, 5000), k=st.integers(257, 560), threads=st.sampled_from([1, 2, 3, 5]),
    dtype=st.sampled_from(["f8", "f4", "f2"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_entry_of_a_wide_matrix_is_that_of_its_two_columns_alone(n, k, threads, dtype, seed):
    rows = np.clip(ugly(np.random.default_rng([n, k, seed]), (n, k)), -100, 100).astype(dtype)
    picked = np.sort(np.random.default_rng(seed).choice(k, 40, replace=False))
    wide = chunk_gram(rows, threads=threads)
    assert wide[np.ix_(picked, picked)].tobytes() == chunk_gram(np.ascontiguousarray(rows[:, picked])).tobytes()
    assert wide.tobytes() == wide.T.copy().tobytes()


@settings(max_examples=8)
@given(
    n_rows=st.integers(0, 120), chunk_size=st.integers(1, 17), n_ranks=st.integers(1, 5), data=st.data(),
)  # fmt: skip
def test_the_assembler_gives_out_the_partitions_chunks_however_batches_are_cut(n_rows, chunk_size, n_ranks, data):
    partition = CrossNodePartition(k=3, n_rows=n_rows, chunk_size=chunk_size, n_ranks=n_ranks)
    rows = np.arange(n_rows * 3, dtype="f8").reshape(n_rows, 3)
    rank = data.draw(st.integers(0, n_ranks - 1))
    own = [partition.chunk_rows(partition.unit_of(rank, o)) for o in range(partition.owned(rank))]
    stream = np.concatenate([rows[a:b] for a, b in own] or [rows[:0]])
    assembler, given_out, at = ChunkAssembler.of(partition, rank=rank), [], 0
    while at < len(stream):
        take = data.draw(st.integers(0, 40))
        given_out += [(c, np.array(r)) for c, r in assembler.push(stream[at : at + take])]
        at += take
    assert assembler.finish() is None
    assert [c for c, _ in given_out] == [partition.unit_of(rank, o) for o in range(len(own))]
    assert all((r == rows[a:b]).all() for (_, r), (a, b) in zip(given_out, own, strict=True))


def test_any_number_of_ranks_and_threads_gives_one_sum():
    rows = np.random.default_rng(6).standard_normal((1301, 9))
    sums = set()
    for n_ranks in (1, 2, 3, 7, 64):
        for threads in (1, 2):
            partition = CrossNodePartition(k=9, n_rows=1301, chunk_size=8, n_ranks=n_ranks)
            workers = [NodeWorker(partition, rank=r, threads=threads) for r in range(n_ranks)]
            reduction, rng = CrossNodeGramReduction(partition, window=3), np.random.default_rng(n_ranks)
            while not reduction.complete:
                worker = workers[rng.integers(n_ranks)]
                if reduction.credit(worker.rank) > 0:
                    assert reduction.receive(worker.compute(rows[slice(*worker.next_rows)])) is Receipt.TAKEN
            sums.add(reduction.finish().tobytes())
    assert len(sums) == 1


class Fleet(RuleBasedStateMachine):
    """Ranks that die, retry and are re-dealt; a coordinator that dies; and one number that none of it may change."""

    @initialize(
        n_chunks=st.integers(1, 400),
        n_ranks=st.integers(1, 5),
        span=st.sampled_from([1, 1, 128]),
        window=st.integers(1, 4),
    )
    def begin(self, n_chunks, n_ranks, span, window):
        self.grams = partials(n_chunks)
        self.window = window
        self.partition = CrossNodePartition(k=K, n_rows=n_chunks, chunk_size=1, n_ranks=n_ranks, span=span)
        self.reduction = CrossNodeGramReduction(self.partition, window=window)
        self.folder = tempfile.TemporaryDirectory()
        self.files = CheckpointFiles(Path(self.folder.name), "coordinator")
        self.workers: dict[int, NodeWorker] = {}
        self.saved: dict[int, NodeWorkerCheckpoint] = {}
        self.sent: list[NodePartial] = []

    def worker(self, rank: int) -> NodeWorker:
        if rank not in self.workers:  # a new process asks the coordinator where receipts stopped
            ordinal = self.reduction.received_per_rank[rank]
            self.workers[rank] = NodeWorker(self.partition, rank=rank, next_ordinal=ordinal, compute=self.next_gram)
        return self.workers[rank]

    def next_gram(self, rows, threads):
        return self.grams[self.asked]

    @rule(pick=st.integers(0, 10**6), count=st.integers(1, 300))
    def work(self, pick, count):
        rank = pick % self.partition.n_ranks
        worker = self.worker(rank)
        for _ in range(count):
            if worker.next_chunk is None:
                return
            self.asked = worker.next_chunk
            partial = worker.compute(np.zeros((1, K)))
            if partial is None:
                continue
            receipt = self.reduction.receive(NodePartial.from_bytes(partial.to_bytes()))
            if receipt is Receipt.WAIT:
                del self.workers[rank]  # gives up; comes back later
                return
            worker.acknowledge(partial)
            self.sent = [*self.sent[-20:], partial]

    @precondition(lambda self: self.sent)
    @rule(pick=st.integers(0, 10**6))
    def retry(self, pick):
        partial = self.sent[pick % len(self.sent)]
        if partial.partition != self.partition.fingerprint:
            return
        if self.partition.ordinal_of(partial.chunk) < self.reduction.received_per_rank[partial.rank]:
            assert self.reduction.receive(partial) is Receipt.DUPLICATE

    @rule(pick=st.integers(0, 10**6))
    def save_worker(self, pick):
        rank = pick % self.partition.n_ranks
        self.saved[rank] = self.worker(rank).checkpoint()
        files = CheckpointFiles(Path(self.folder.name), f"worker-{rank}")
        self.saved[rank].save(files)

    @rule(pick=st.integers(0, 10**6))
    def kill_worker(self, pick):
        rank = pick % self.partition.n_ranks
        self.workers.pop(rank, None)
        saved = NodeWorkerCheckpoint.load(CheckpointFiles(Path(self.folder.name), f"worker-{rank}"))
        if saved is None or saved.partition != self.partition:
            return
        if saved.next_ordinal == self.reduction.received_per_rank[rank]:
            self.workers[rank] = NodeWorker.resume(saved, compute=self.next_gram)

    @rule()
    def save_coordinator(self):
        self.reduction.checkpoint().save(self.files)

    @rule(n_ranks=st.one_of(st.none(), st.integers(1, 6)))
    def kill_coordinator(self, n_ranks):
        saved = CrossNodeCheckpoint.load(self.files)
        if saved is None:
            return
        self.reduction = CrossNodeGramReduction.resume(saved, window=self.window, n_ranks=n_ranks)
        self.partition = self.reduction.partition
        self.workers, self.sent = {}, []

    @invariant()
    def pending_stays_within_the_window(self):
        if hasattr(self, "reduction"):
            assert self.reduction.pending <= self.window * self.partition.n_ranks

    def teardown(self):
        if not hasattr(self, "reduction"):
            return
        while not self.reduction.complete:
            for rank in range(self.partition.n_ranks):
                self.work(rank, 10**6)
        assert self.reduction.finish().tobytes() == folded(self.grams).tobytes()
        self.folder.cleanup()


Fleet.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
test_no_crash_retry_or_re_deal_reaches_the_sum = Fleet.TestCase


@settings(max_examples=60)
@given(n_chunks=st.integers(2, 300), seed=st.integers(0, 999), change=st.integers(0, 6))
def test_a_state_whose_numbers_do_not_add_up_is_refused(n_chunks, seed, change):
    rng = np.random.default_rng(seed)
    fold = StreamingBorderGram(entries=ENTRIES, n_chunks=n_chunks)
    order = rng.permutation(n_chunks)[: max(1, n_chunks // 2)]
    for chunk in [0, *order[order > 0]]:
        fold.submit_chunk_gram(chunk, partials(n_chunks)[chunk])
    good = fold.state()
    fields = {
        name: getattr(good, name) for name in ("frontier", "block_len", "block_partial", "forest", "pending", "tail")
    }
    one = np.ones(ENTRIES)
    broken = [
        {"frontier": good.frontier + 1},
        {"block_len": good.block_len + 1},
        {"forest": (*good.forest, (1, one))},
        {"forest": ((3, one), *good.forest)},
        {"pending": ((n_chunks, one), *good.pending)},
        {"tail": one},
        {"pending": tuple((c, np.array([np.nan] * ENTRIES)) for c, _ in good.pending) or ((-1, one),)},
    ][change]
    from headrace.errors import FileCorrupt

    with pytest.raises(FileCorrupt, match="does not add up"):
        StreamingBorderGram.resume(BorderState(**(fields | broken)), entries=ENTRIES, n_chunks=n_chunks)
    again = StreamingBorderGram.resume(BorderState(**fields), entries=ENTRIES, n_chunks=n_chunks)
    for chunk in range(n_chunks):
        if not again.has(chunk):
            again.submit_chunk_gram(chunk, partials(n_chunks)[chunk])
    assert again.finish().tobytes() == folded(partials(n_chunks)).tobytes()


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.booleans())
def test_a_flipped_bit_or_a_missing_end_of_a_message_is_always_noticed(at, bit, cut):
    partition = CrossNodePartition(k=3, n_rows=10, chunk_size=10, n_ranks=1)
    message = bytearray(NodeWorker(partition, rank=0).compute(np.ones((10, 3))).to_bytes())
    if cut:
        message = message[: at % len(message)]
    else:
        message[at % len(message)] ^= 1 << bit
    with pytest.raises(DataError, match=r"truncated|damaged|not a partial"):
        NodePartial.from_bytes(message)


@pytest.mark.parametrize("k", [1, 2, 65, 200])
def test_a_mirrored_triangle_holds_every_entry_on_both_sides_of_the_diagonal(k):
    packed = np.arange(k * (k + 1) // 2, dtype=np.float64) + 1
    above = np.zeros((k, k))
    above[np.triu_indices(k)] = packed
    assert np.array_equal(unpack_upper(packed, k), np.where(above > 0, above, above.T))
