"""For all shapes: parts, ranks, batch sizes, files, resumes and damage never change which samples come in which order."""

from __future__ import annotations

import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.batch import OFFSETS
from headrace.errors import DataError, EndOfData, FileCorrupt
from headrace.spool import DatasetConsumer, FieldSpec, FileHeader, SequentialProvider, open_batch_file, write_batch_file
from headrace.spool.rows import Stripe


class Counted(SequentialProvider):
    """Sample g holds g, g² and a ragged row of g mod 5 numbers."""

    def __init__(self, *args: Any, total: int, **more: Any) -> None:
        super().__init__(*args, **more)
        self.total, self.at = total, {}

    def build_meta(self) -> dict[str, Any]:
        schema = [
            FieldSpec("g", "int64"),
            FieldSpec("squares", "int32", (2,)),
            FieldSpec("pieces", "int64", ragged=True),
        ]
        return {"dataset_name": "counted", "training_type": "SEQUENCE_SCORING", "batch_schema": schema}

    def start_from(self, split, part, cursor) -> None:
        self.at[part] = cursor["rows"] if cursor else 0

    def next_batch(self, split, part):
        own = self.at[part]
        end = min(own + self.batch_size, max(0, -(-(self.total - part) // self.parts)))
        if end <= own:
            return None
        self.at[part] = end
        g = np.arange(own, end) * self.parts + part
        return {"g": g, "squares": np.stack([g**2 % 1000, g], 1).astype(np.int32), **ragged(g)}

    def cursor(self, split, part):
        return {"rows": self.at[part]}


class Even(Counted):
    """The same without the ragged row."""

    def build_meta(self) -> dict[str, Any]:
        meta = super().build_meta()
        return meta | {"batch_schema": meta["batch_schema"][:2]}

    def next_batch(self, split, part):
        batch = super().next_batch(split, part)
        return None if batch is None else {name: batch[name] for name in ("g", "squares")}


def ragged(g):
    lengths = g % 5
    return {"pieces": np.repeat(g, lengths), "pieces" + OFFSETS: np.concatenate([[0], np.cumsum(lengths)])}


def open_ranks(folder, world, **more):
    return [
        DatasetConsumer(
            folder, ack="commit", dp_rank=r, dp_world_size=world, deadline=60.0, verdict_patience=60.0, **more
        )
        for r in range(world)
    ]


def together(call, ranks):
    """Ranks ask at the same time, as in a run: one judges what the other waits for."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(call, ranks))


ACTIONS = st.one_of(
    st.tuples(st.just("get"), st.integers(1, 12)),
    st.tuples(st.just("size"), st.integers(1, 9)),
    st.sampled_from([("wait", 0), ("save", 0), ("go back", 0), ("begin again", 0)]),
)


@settings(max_examples=25)
@given(
    actions=st.lists(ACTIONS, min_size=1, max_size=14), per_file=st.integers(1, 6), total=st.integers(1, 150),
    damaged=st.none() | st.integers(0, 20),
)  # fmt: skip
@example(actions=[("get", 60)], per_file=2, total=150, damaged=None)
@example(actions=[("get", 5), ("save", 0), ("get", 7), ("go back", 0), ("get", 40)], per_file=2, total=150, damaged=5)
@example(actions=[("get", 18), ("size", 2), ("get", 30)], per_file=3, total=150, damaged=None)
@pytest.mark.filterwarnings("ignore:.*cut differently")
def test_whatever_a_single_trainer_does_samples_come_in_order(actions, per_file, total, damaged):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def provide() -> None:
            Even(folder, 3, batches_per_file=per_file, max_backlog_files=1000, total=total, durable=False).run()

        provide()
        path = folder / "queue" / "train" / f"{damaged or 0:012d}.safetensors"
        if damaged is not None and path.exists():  # in the middle of its rows
            raw = bytearray(path.read_bytes())
            raw[len(raw) * 2 // 3] ^= 16
            path.write_bytes(raw)
        (rank,) = open_ranks(folder, 1)
        at, saved, size = 0, (0, rank.state_dict()), rank.batch_size
        for action, number in actions:
            if action == "size":
                rank.set_batch_size(size := number)
            elif action == "save":
                saved = at, rank.state_dict()
            elif action == "go back":
                at, state = saved
                rank.load_state_dict(state)
            elif action == "begin again":
                at = 0
                rank.reset_state()
            elif action == "wait":
                rank.wait_for_data("train", 0.0)
            for _ in range(number if action == "get" and at < total else 0):
                wanted = np.arange(size) % min(size, total - at) + at
                found = rank.get_batch("train") if damaged is None else got(rank, provide)
                assert found["g"].tolist() == wanted.tolist()
                assert found["squares"][:, 0].tolist() == (wanted**2 % 1000).tolist()
                at = min(total, at + size)
                if at == total:
                    break
        rank.close()


def got(rank, provide):
    """A batch, of a spool whose provider makes again what was damaged."""
    for _ in range(20):
        if rank.wait_for_data("train", 0.2):
            return rank.get_batch("train")
        provide()
    raise AssertionError("the provider does not make the damaged file again")


@settings(max_examples=10)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), per_file=st.integers(1, 6), total=st.integers(1, 60))
@pytest.mark.filterwarnings("ignore:.*cut differently")
def test_views_hold_what_copies_hold_as_long_as_anybody_holds_them(sizes, per_file, total):
    with tempfile.TemporaryDirectory() as name:
        Counted(Path(name), 3, batches_per_file=per_file, max_backlog_files=1000, total=total, durable=False).run()
        held = {}
        for copy in (False, True):
            (rank,) = open_ranks(Path(name), 1, copy=copy)
            held[copy] = []
            for size in sizes:
                rank.set_batch_size(size)
                try:
                    held[copy].append(rank.get_batch("train"))
                except EndOfData:
                    break
            rank.close()
        at = 0
        for view, copied, size in zip(held[False], held[True], sizes, strict=False):
            g = np.arange(size) % min(size, total - at) + at  # a short last batch repeats its own samples
            at += size
            assert view["g"].tolist() == g.tolist()
            assert {k: v.tolist() for k, v in ragged(g).items()} == {k: view[k].tolist() for k in ragged(g)}
            assert {k: v.tolist() for k, v in view.items()} == {k: v.tolist() for k, v in copied.items()}
        assert len(held[False]) == len(held[True])


@settings(max_examples=10)
@given(
    world=st.sampled_from([1, 2, 3, 6]), size=st.sampled_from([6, 12]), per_file=st.integers(1, 5), total=st.integers(1, 90),
    other=st.integers(0, 8),
)  # fmt: skip
@example(world=1, size=6, per_file=5, total=90, other=7)
@example(world=2, size=6, per_file=5, total=90, other=7)
@pytest.mark.filterwarnings("ignore:.*cut differently")
def test_ranks_see_the_same_rows_and_states_whosever_memory_they_lie_in(world, size, per_file, total, other):
    with tempfile.TemporaryDirectory() as name:
        Even(Path(name), 6, batches_per_file=per_file, max_backlog_files=1000, total=total, durable=False).run()
        seen = {}
        for copy in (False, True, None):
            ranks = open_ranks(Path(name), world, copy=copy)
            for rank in ranks:
                rank.set_batch_size(size)
            seen[copy], states = [], []
            for turn in range(-(-total // size)):
                if turn == other:  # a batch of another size in between
                    for rank in ranks:
                        rank.set_batch_size(size + world)
                try:
                    seen[copy].append([b["g"] for b in together(lambda r: r.get_batch("train", "cpu"), ranks)])
                except EndOfData:
                    break
                states.append([r.state_dict()["body"]["splits"] for r in ranks])
                for rank in ranks:
                    rank.set_batch_size(size)
            seen[copy].append(states)
            for rank in ranks:
                rank.close()
        *copies, copy_states = seen[True]
        for copy in (False, None):
            *rows, states = seen[copy]
            assert [[r.tolist() for r in b] for b in rows] == [[r.tolist() for r in b] for b in copies]
            assert states == copy_states
        assert all(state == states[0] for states in copy_states for state in states)


@settings(max_examples=15)
@given(
    parts=st.integers(1, 4),
    worlds=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4),
    batch=st.sampled_from([12, 24]),
    own_batch=st.integers(1, 7),
    per_file=st.integers(1, 4),
    total=st.integers(0, 150),
    data=st.data(),
)
def test_any_parts_ranks_and_resumes_deliver_the_samples_in_global_order_once(
    parts, worlds, batch, own_batch, per_file, total, data
):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Counted(folder, own_batch, batches_per_file=per_file, max_backlog_files=1000, total=total, parts=parts).run()
        state, seen, ended = None, [], False
        for turn, world in enumerate(worlds):
            with (
                pytest.warns(UserWarning, match="cut differently")
                if batch != own_batch
                else tempfile.SpooledTemporaryFile()
            ):
                ranks = open_ranks(folder, world, batch_size=batch)
            try:
                if state is not None:
                    for rank in ranks:
                        rank.load_state_dict(state)
                steps = 1000 if turn == len(worlds) - 1 else data.draw(st.integers(0, 4))
                for _ in range(steps):
                    try:
                        shares = together(lambda rank: rank.get_batch("train"), ranks)
                    except EndOfData:
                        ended = True
                        break
                    step = {}
                    for share in shares:
                        g = share["g"].numpy()
                        assert np.array_equal(share["squares"].numpy(), np.stack([g**2 % 1000, g], 1))
                        assert {k: v.tolist() for k, v in ragged(g).items()} == {
                            k: share[k].tolist() for k in ragged(g)
                        }
                        step |= dict.fromkeys(g.tolist())
                        assert len(g) == batch // world
                    seen += sorted(step)
                states = [rank.state_dict() for rank in ranks]
                assert all(s == states[0] for s in states), "the cursor is global"
                state = states[0]
                ranks[0].commit(state)
            finally:
                for rank in ranks:
                    rank.close()
        assert ended
        assert seen == list(range(total))


@given(world=st.integers(1, 9), parts=st.integers(1, 9), first=st.integers(0, 200))
def test_the_ranks_own_rows_of_a_file_are_disjoint_and_all(world, parts, first):
    for part in range(parts):
        owners: dict[int, list[int]] = {}
        for rank in range(world):
            own = Stripe(rank=rank, world_size=world).rows_of(part, parts, first)
            for row in range(own[0], 60, own[1]) if own else ():
                owners.setdefault(row, []).append(rank)
        assert owners == {row: [((first + row) * parts + part) % world] for row in range(60)}


def arrays_of(draw, schema, rows):
    out: dict[str, np.ndarray] = {}
    for k, field in enumerate(schema):
        dtype = np.dtype("uint16" if field.dtype == "bfloat16" else field.dtype)
        rng = np.random.default_rng(draw(st.integers(0, 100)) + k)
        if field.ragged:
            lengths = rng.integers(0, 4, rows)
            out[field.name + OFFSETS] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            out[field.name] = rng.integers(0, 2, int(lengths.sum())).astype(dtype)
        else:
            out[field.name] = rng.integers(0, 2, (rows, *field.shape)).astype(dtype)
    return out


FIELDS = st.lists(
    st.builds(
        lambda dtype, shape, rag: (dtype, () if rag else tuple(shape), rag),
        st.sampled_from(["int64", "int32", "int8", "uint8", "float32", "float16", "bfloat16", "bool", "float64"]),
        st.lists(st.integers(0, 5), max_size=2), st.booleans(),
    ), min_size=1, max_size=4,
).map(lambda kinds: tuple(FieldSpec(f"f{i}", d, s, None, r) for i, (d, s, r) in enumerate(kinds)))  # fmt: skip


@settings(max_examples=60)
@given(
    schema=FIELDS,
    rows=st.integers(0, 40),
    suffix=st.sampled_from([".safetensors", ".safetensors", ".pt"]),
    data=st.data(),
)
def test_a_file_gives_back_what_was_written(schema, rows, suffix, data):
    arrays = arrays_of(data.draw, schema, rows)
    header = FileHeader(
        split="train",
        seq=data.draw(st.integers(0, 10**9)),
        schema=schema,
        rows=rows,
        first=0,
        batch_size=3,
        job="j",
        cursor={"cursor": {"a": [1, None]}, "end": 3},
    )
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / f"f{suffix}"
        write_batch_file(path, header, arrays, durable=False)
        with pytest.raises(FileExistsError):
            write_batch_file(path, header, arrays, durable=False)
        file = open_batch_file(path)
        file.check()
        assert file.header == header
        for key, array in arrays.items():
            assert np.array_equal(file.arrays[key], array)
            assert file.arrays[key].dtype == array.dtype


@given(bit=st.integers(0, 1 << 30), world=st.integers(1, 4), suffix=st.sampled_from([".safetensors", ".pt"]))
def test_a_flipped_bit_is_found_by_the_checker_and_by_every_rank_that_reads_it(bit, world, suffix):
    schema = (FieldSpec("a", "int64", (700,)), FieldSpec("b", "int8", (3,)), FieldSpec("r", "int32", ragged=True))
    rows = 9
    arrays = {
        "a": np.arange(rows * 700).reshape(rows, 700), "b": np.ones((rows, 3), np.int8), "r": np.arange(4, dtype=np.int32),
        "r" + OFFSETS: np.array([0, 1, 1, 1, 1, 1, 1, 1, 1, 4]),
    }  # fmt: skip
    header = FileHeader(split="train", seq=3, schema=schema, rows=rows, first=27, batch_size=3, job="j")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / f"f{suffix}"
        write_batch_file(path, header, arrays, durable=False)
        raw = bytearray(path.read_bytes())
        bit %= 8 * len(raw)
        raw[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(raw)
        delivered = []
        for rank in range(world):
            own = Stripe(rank=rank, world_size=world).rows_of(0, 1, header.first)
            try:
                file = open_batch_file(path)
                file.check(own[0], None, own[1])
            except FileCorrupt:
                continue
            assert file.header == header
            delivered.append(
                all(np.array_equal(file.arrays[k][own[0] :: own[1]], arrays[k][own[0] :: own[1]]) for k in "ab")
            )
            assert np.array_equal(file.arrays["r"], arrays["r"])
        assert all(delivered), "no rank was given a changed value"


@given(noise=st.binary(max_size=400), suffix=st.sampled_from([".safetensors", ".pt"]), keep=st.integers(0, 2000))
def test_noise_and_torn_files_are_refused_with_a_sentence(noise, suffix, keep):
    schema = (FieldSpec("a", "int64", (4,)),)
    header = FileHeader(split="train", seq=3, schema=schema, rows=9, first=27, batch_size=3, job="j")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / f"f{suffix}"
        write_batch_file(path, header, {"a": np.arange(36).reshape(9, 4)}, durable=False)
        whole = path.read_bytes()
        torn = whole[: min(keep, len(whole) - 1)] + noise
        path.write_bytes(torn)
        if torn[: len(whole)] == whole:
            return
        with pytest.raises((FileCorrupt, DataError), match=re.escape(str(path))):
            open_batch_file(path).check()
