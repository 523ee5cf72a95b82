"""What a loader refuses, reports, and leaves behind."""

from __future__ import annotations

import gc
import json
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError, CursorMismatch, DataError, DeadlineExceeded, TokenizerError
from headrace.loader import Loader, MixChange, TextDataset, merge_states
from headrace.loader.ends import Share, StoreEnds
from headrace.metrics import Meter
from headrace.runs.config.base import RunSection
from headrace.sources import Source
from headrace.text import ByteTokenizer, TokenBatch


@pytest.fixture
def data(tmp_path, write_jsonl):
    path = write_jsonl("a.jsonl", [f"document {i} " + "word " * (i % 40) for i in range(300)])
    return TextDataset([f"jsonl:{path}"], seq_len=32, seed=3, lanes=12, window_blocks=4, cache=tmp_path / "cache")


def loader(data, **options) -> Loader:
    return Loader(data, **({"global_batch_size": 12, "tokenizer_workers": 1, "prefetch_batches": 1} | options))


def our_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("headrace-batches", "headrace-windows"))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size must be a positive integer, got 0"),
        ({"dp_rank": 0, "dp_world_size": 5}, r"12 cannot be shared by 5 ranks.*1, 2, 3, 4, 6, 12"),
        ({"dp_rank": 3}, "belong together"),
        ({"dp_rank": 3, "dp_world_size": 3}, r"dp_rank must be in \[0, dp_world_size\)"),
        ({"labels": "both"}, 'labels must be "shifted" or "hf"'),
        ({"prefetch_batches": -1}, "prefetch_batches must be 0 or more"),
    ],
)
def test_a_loader_that_cannot_work_is_refused(data, options, message):
    with pytest.raises(ConfigError, match=message):
        loader(data, **options)


def test_all_that_is_wrong_with_a_dataset_is_said_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        TextDataset(["sample:prose"], seq_len=1, lanes=0, pack="tight", seed=-1)  # ty: ignore[invalid-argument-type]
    assert len(caught.value.problems) == 4


def test_a_dataset_without_a_row_or_a_weight_is_refused(tmp_path, write_jsonl):
    empty = write_jsonl("empty.jsonl", [])
    with pytest.raises(DataError, match="no source has any rows"):
        TextDataset([f"jsonl:{empty}"], seq_len=8, cache=tmp_path / "c")
    with pytest.raises(ConfigError, match="all sources have weight 0"):
        TextDataset([Source(f"jsonl:{empty}", weight=0)], seq_len=8, cache=tmp_path / "c")


def test_leaving_early_stops_the_threads_and_iterating_again_goes_on_where_delivery_stopped(data):
    straight = [b["input_ids"].clone() for b in loader(data)]
    made = loader(data)
    for _ in range(3):
        next(made)
    made.close()
    assert our_threads() == []
    rest = [b["input_ids"].clone() for b in made]
    assert len(rest) == len(straight) - 3
    assert all((a == b).all() for a, b in zip(rest, straight[3:], strict=True))


def test_a_loader_that_is_forgotten_takes_its_threads_along(data):
    made = loader(data)
    next(made)
    assert our_threads() != []
    threads = [t for t in threading.enumerate() if t.name in our_threads()]
    del made
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert our_threads() == []


def test_a_tokenizer_that_fails_names_the_document_at_the_sample_that_needs_it(tmp_path, write_jsonl):
    class Picky(ByteTokenizer):
        name = "picky"

        def encode(self, texts):
            if any("poison" in t for t in texts):
                raise RuntimeError("cannot digest this")
            return super().encode(texts)

    path = write_jsonl("a.jsonl", [("poison" if i == 77 else "fine") + " text" * 5 for i in range(100)])
    delivered = set()
    for workers in (0, 2):
        data = TextDataset(
            [f"jsonl:{path}"], tokenizer=Picky(), seq_len=16, lanes=4, window_blocks=2, cache=tmp_path / "c"
        )
        made = loader(data, global_batch_size=4, tokenizer_workers=workers)
        with pytest.raises(TokenizerError, match=r"picky failed on row 77 of a\.jsonl .*cannot digest this"):
            list(made)
        delivered.add(made.step)
        assert our_threads() == []
    assert len(delivered) == 1, "the error comes at the same step for any number of threads"


def test_a_hanging_tokenizer_is_an_error_at_its_deadline(tmp_path, write_jsonl):
    released = threading.Event()

    class Stuck(ByteTokenizer):
        def encode(self, texts):
            released.wait(30)
            return super().encode(texts)

    path = write_jsonl("a.jsonl", ["text"] * 20)
    data = TextDataset([f"jsonl:{path}"], tokenizer=Stuck(), seq_len=16, lanes=4, cache=tmp_path / "c")
    made = loader(data, global_batch_size=4, deadline=0.3)
    try:
        with pytest.raises(DeadlineExceeded, match=r"loader\.window.*deadline is 0\.3 s.*tokenizer thread"):
            next(made)
    finally:
        released.set()
        made.close()


def test_states_that_do_not_belong_together_are_refused(data):
    two = [loader(data, dp_rank=r, dp_world_size=2) for r in range(2)]
    for made in two:
        next(made)
    states = [made.state_dict() for made in two]
    with pytest.raises(CursorMismatch, match="rank 0 is in two of the states"):
        merge_states([states[0], states[0]])
    next(two[1])
    with pytest.raises(CursorMismatch, match="step is 1, 2"):
        merge_states([states[0], two[1].state_dict()])
    with pytest.raises(CursorMismatch, match=r"Pass the list of all ranks' states"):
        loader(data).load_state_dict(states[0])
    with pytest.raises(CursorMismatch, match="no state was given"):
        loader(data).load_state_dict([])


@pytest.mark.parametrize(
    "damage",
    [
        {"body": {}},
        {"kind": "other"},
        {"version": 99},
        {"fingerprint": 3},
        {"body": {"entries": 5}},
        {"share": 5},
        {"share": [3, 2]},
    ],
)
def test_a_damaged_state_is_refused_with_a_sentence(data, damage):
    state = loader(data).state_dict()
    state = state | {"body": state["body"] | damage} if "share" in damage else state | damage
    with pytest.raises(CursorMismatch):
        loader(data).load_state_dict(state)


def test_a_rank_may_go_on_from_its_own_state_alone(data):
    whole = loader(data)
    straight = [b["input_ids"].clone() for b in whole]
    rank = loader(data, dp_rank=1, dp_world_size=2)
    next(rank)
    again = loader(data, dp_rank=1, dp_world_size=2)
    again.load_state_dict(json.loads(json.dumps(rank.state_dict())))
    assert (next(again)["input_ids"] == straight[1][1::2]).all()


def test_weights_may_be_changed_at_a_resume_when_accepted(tmp_path, write_jsonl):
    paths = [write_jsonl(f"{n}.jsonl", [f"{n} {i}" + " word" * 9 for i in range(200)]) for n in "ab"]

    def make(weight: float) -> Loader:
        sources = [Source(f"jsonl:{paths[0]}", weight=weight), Source(f"jsonl:{paths[1]}", weight=1.0)]
        data = TextDataset(sources, seq_len=32, lanes=4, exhausted="repeat", cache=tmp_path / "c")
        return loader(data, global_batch_size=4)

    first = make(1.0)
    for _ in range(20):
        next(first)
    state = first.state_dict()
    other = make(3.0)
    with pytest.raises(CursorMismatch, match=r"weights: saved 1\.0, 1\.0, now 3\.0, 1\.0.*--accept weights"):
        other.load_state_dict(state)
    other.load_state_dict(state, accept={"weights"})
    before = list(other.plan.state.source_tokens)
    for _ in range(100):
        next(other)
    gained = np.array(other.plan.state.source_tokens) - before
    assert abs(gained[0] / gained.sum() - 0.75) < 0.02


def test_the_report_and_the_metrics_add_up(data):
    made = loader(data)
    rows = sum(int(b["row_count"].sum()) for b in made)
    drained = made.drain_metrics()
    report = made.report()
    assert drained["data/rows"] == rows == 300 == report.documents
    assert drained["data/tokens"] == report.tokens == drained["data/source_tokens/a"]
    assert drained["data/tokens"] + drained["data/padding"] == drained["data/samples"] * 32
    assert made.drain_metrics() == {}
    assert "loader.next" in str(report)
    assert report.mix["a"] == (1.0, 1.0)


def test_max_rows_and_max_tokens_cap_a_source(tmp_path, write_jsonl):
    path = write_jsonl("a.jsonl", [f"{i:03d}" * 10 for i in range(200)])
    capped = TextDataset([Source(f"jsonl:{path}", max_rows=50)], seq_len=32, lanes=4, cache=tmp_path / "c")
    made = loader(capped, global_batch_size=4)
    rows = {p.row for b in made for p in made.pieces(b)}
    assert rows == set(range(50))
    few = TextDataset([Source(f"jsonl:{path}", max_tokens=640)], seq_len=32, lanes=4, cache=tmp_path / "c")
    made = loader(few, global_batch_size=4)
    tokens = sum(int((b["labels"] != -100).sum()) + int(b["row_count"].sum()) for b in made)
    assert abs(tokens - 640) <= 4 * 16
    tiny = TextDataset([Source(f"jsonl:{path}", max_tokens=40)], seq_len=32, lanes=4, cache=tmp_path / "c")
    assert sum(int(b["row_count"].sum()) for b in loader(tiny, global_batch_size=4)) * 31 <= 64


def test_bad_rows_are_skipped_and_counted_when_asked(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join('{"text": "good document"}\n' if i % 10 else "{broken\n" for i in range(100)))
    data = TextDataset([Source(f"jsonl:{path}", on_bad="skip")], seq_len=32, lanes=4, cache=tmp_path / "c")
    assert sum(int(b["row_count"].sum()) for b in loader(data, global_batch_size=4)) == 90
    assert len(data.sources[0].holes()) == 10
    strict = TextDataset([Source(f"jsonl:{path}")], seq_len=32, lanes=4, cache=tmp_path / "c")
    with pytest.raises(DataError, match=r"a\.jsonl.*line 1\b"):
        list(loader(strict, global_batch_size=4))


def test_a_state_stays_small_and_quick_to_take(tmp_path, write_jsonl):
    sources = [
        Source(f"jsonl:{write_jsonl(f's{i}.jsonl', [f'source {i} row {j} ' + 'w ' * 30 for j in range(60)])}")
        for i in range(20)
    ]
    data = TextDataset(sources, seq_len=32, lanes=48, window_blocks=4, exhausted="repeat", cache=tmp_path / "c")
    made = loader(data, global_batch_size=48)
    for _ in range(30):
        next(made)
    assert len(json.dumps(made.state_dict(), separators=(",", ":"))) < 64 << 10


def test_metrics_after_a_resume_count_only_what_came_after_it(data):
    first = loader(data)
    for _ in range(5):
        next(first)
    again = loader(data)
    again.load_state_dict(first.state_dict())
    next(again)
    assert again.drain_metrics()["data/samples"] == 12


def test_one_source_may_be_given_without_a_list(tmp_path, write_jsonl):
    path = write_jsonl("a.jsonl", ["text"] * 20)
    assert TextDataset(f"jsonl:{path}", seq_len=8, cache=tmp_path / "c").names == ("a",)


def two_sources(tmp_path, write_jsonl, weights, names="ab") -> TextDataset:
    texts = {n: [f"{n}{i:03d}" + " word" * 9 for i in range(200)] for n in "abc"}
    sources = [
        Source(f"jsonl:{tmp_path / n}.jsonl" if (tmp_path / f"{n}.jsonl").exists() else f"jsonl:{write_jsonl(f'{n}.jsonl', texts[n])}", weight=w, name=n)
        for n, w in zip(names, weights, strict=True)
    ]  # fmt: skip
    return TextDataset(sources, seq_len=32, lanes=4, window_blocks=4, cache=tmp_path / "c")


def test_a_source_raised_from_weight_zero_at_a_resume_is_read(tmp_path, write_jsonl):
    before = loader(two_sources(tmp_path, write_jsonl, (1.0, 0.0)), global_batch_size=4)
    for _ in range(5):
        next(before)
    after = loader(two_sources(tmp_path, write_jsonl, (1.0, 1.0)), global_batch_size=4)
    after.load_state_dict(before.state_dict(), accept={"weights"})
    for _ in range(60):
        next(after)
    assert after.plan.state.source_tokens[1] > 0.3 * sum(after.plan.state.source_tokens)


def test_taking_a_source_away_leaves_the_order_of_the_others_as_it_was(tmp_path, write_jsonl):
    before = loader(two_sources(tmp_path, write_jsonl, (1.0, 1.0)), global_batch_size=4)
    seen = []
    for _ in range(10):
        batch = next(before)
        seen += [(p.row, p.start) for p in before.pieces(batch) if p.source == "b"]
    after = loader(two_sources(tmp_path, write_jsonl, (1.0,), names="b"), global_batch_size=4)
    after.load_state_dict(before.state_dict(), accept={"sources", "weights", "data", "config"})
    rest = [(p.row, p.start) for batch in after for p in after.pieces(batch)]
    assert {row for row, _ in seen + rest} == set(range(200))
    assert set(Counter(seen + rest).values()) == {1}, "nothing is lost and nothing comes twice"


@pytest.mark.parametrize(("saved", "now"), [(0.3333331, 0.3333334)])
def test_weights_that_differ_in_the_seventh_digit_are_other_weights(tmp_path, write_jsonl, saved, now):
    state = loader(two_sources(tmp_path, write_jsonl, (saved, 1.0)), global_batch_size=4).state_dict()
    with pytest.raises(CursorMismatch, match="weights"):
        loader(two_sources(tmp_path, write_jsonl, (now, 1.0)), global_batch_size=4).load_state_dict(state)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda n: TokenBatch(np.full(n, 9999, np.int32), np.arange(n + 1)), "gave id 9999 for row .* of a.jsonl"),
        (lambda n: TokenBatch(np.zeros(n, np.int32), np.arange(n + 1) * 5), "do not cover its ids"),
        (lambda n: TokenBatch(np.zeros(n + 1, np.int32), np.arange(n + 2)), "documents for"),
        (lambda n: TokenBatch(np.zeros(n, np.int64), np.arange(n + 1)), "ids of int64"),
    ],
)
def test_a_tokenizer_that_answers_nonsense_is_refused_before_it_does_harm(tmp_path, write_jsonl, answer, message):
    class Odd(ByteTokenizer):
        name = "odd"

        def encode(self, texts):
            return answer(len(texts))

    path = write_jsonl("a.jsonl", ["text"] * 20)
    data = TextDataset(f"jsonl:{path}", tokenizer=Odd(), seq_len=8, lanes=2, cache=tmp_path / "c")
    with pytest.raises(TokenizerError, match=message):
        next(loader(data, global_batch_size=2))


class Store(dict):
    """What ends.py asks of a process group's store."""

    def set(self, name, value):
        self[name] = value

    def check(self, names):
        return all(n in self for n in names)


def test_a_rank_that_ran_ahead_into_the_end_does_not_end_the_others_early():
    store, meter = Store(), Meter()
    ahead, behind = (StoreEnds(store, "run", rank, 2, meter) for rank in (1, 0))
    some, empty, none = Share(True, True), Share(False, True), Share(False, False)

    def asked(ends: StoreEnds, step: int, own: Share) -> Share:
        return ends.others(step, range(0), own, lambda: False)

    asked(ahead, 300, some)
    asked(ahead, 301, some)
    asked(behind, 299, some)
    store["run/0"] = "303"  # rank 0 as it will be: a rank that asks is answered
    store["run/0/302"] = "1"
    assert asked(ahead, 302, empty) == empty, "neither has anything at 302, and both have more"
    assert asked(ahead, 303, none) == some
    del store["run/0"], store["run/0/302"]
    assert asked(behind, 300, empty) == some, "rank 1 had data at 300"
    assert asked(behind, 301, none) == some
    assert asked(behind, 302, none) == empty
    assert asked(behind, 303, none) == none
    assert asked(ahead, 304, none) == none


def test_borders_that_were_seen_before_are_those_of_this_batch(data):
    lengths = Counter()
    for batch in loader(data, segment_ids=True):
        borders, positions = batch["cu_seqlens"].tolist(), batch["position_ids"].reshape(-1)
        assert borders == [*(positions == 0).nonzero().reshape(-1).tolist(), positions.numel()]
        lengths[len(borders)] += 1
    assert len(lengths) > 3
    assert max(lengths.values()) > 3


def test_a_state_with_steps_passed_over_that_this_loader_forgets_or_adds_is_refused(data):
    skipping = loader(data, skip=[(3, 5)])
    for _ in range(4):
        next(skipping)
    state = skipping.state_dict()
    with pytest.raises(CursorMismatch, match=r"with skip=\[\(3, 5\)\]; this loader has skip=\[\] up to"):
        loader(data).load_state_dict(state)
    with pytest.raises(CursorMismatch, match=r"this loader has skip=\[\(2, 5\)\] up to .* accept=\{\"skip\"\}\.$"):
        loader(data, skip=[(2, 5)]).load_state_dict(state)
    loader(data).load_state_dict(state, accept={"skip"})
    again = loader(data, skip=[(3, 4), (4, 5), (10, 11)])
    again.load_state_dict(state)
    assert again.skipped == [[3, 5]]


def test_a_change_that_leaves_weight_only_on_sources_without_rows_is_refused(tmp_path, write_jsonl):
    sources = [Source(f"jsonl:{write_jsonl(f'{n}.jsonl', texts)}") for n, texts in (("a", ["text"] * 9), ("none", []))]
    with pytest.raises(ConfigError, match=r"the mix change at step 4 .*sources without rows \(none\)"):
        TextDataset(
            sources, seq_len=8, lanes=2, mix_changes=[MixChange(4, {"a": 0.0})], cache=tmp_path / "c"
        )  # fmt: skip


def test_steps_are_counted_from_1_in_skips_as_in_the_command(data):
    with loader(data) as plain, loader(data, skip=[(5, 8)]) as skipping:
        order = [next(plain)["input_ids"] for _ in range(9)]
        got = [next(skipping)["input_ids"] for _ in range(6)]
    kept = [order[n - 1] for n in (1, 2, 3, 4, 8, 9)]
    assert all((a == b).all() for a, b in zip(got, kept, strict=True))
    assert (skipping.step, skipping.skipped, skipping.delivered_steps) == (9, [[5, 8]], 6)
    assert RunSection(skip="5:8").skips == ((5, 8),)
    with pytest.raises(ConfigError, match=r"1 <= from < to, counted from 1, got \(0, 3\)"):
        loader(data, skip=[(0, 3)])


def test_a_state_whose_skips_were_counted_from_0_is_refused_with_the_ranges_to_give(data):
    """Earlier versions took skip=[(2, 4)] for steps 3 and 4, and saved that as it is saved today."""
    with loader(data, skip=[(3, 5)]) as saved:
        for _ in range(4):
            next(saved)
        state = saved.state_dict()
    assert state["body"]["skipped"] == [[2, 4]], "the form that earlier versions wrote"
    with pytest.raises(
        CursorMismatch, match=r"Make the loader with skip=\[\(3, 5\)\].*counted the steps of `skip` from 0"
    ):
        loader(data, skip=[(2, 4)]).load_state_dict(state)
    loader(data, skip=[(3, 5)]).load_state_dict(state)


def test_a_mix_change_is_counted_as_in_a_config_and_a_state_counted_from_0_is_refused_with_the_step_to_give(
    tmp_path, write_jsonl
):
    paths = [write_jsonl(f"{n}.jsonl", [f"{n} {i} " + "word " * (i % 9) for i in range(200)]) for n in "ab"]

    def made(*changes: MixChange) -> Loader:
        sources = [Source(f"jsonl:{path}", name=path.stem) for path in paths]
        data = TextDataset(sources, seq_len=8, lanes=2, exhausted="repeat", mix_changes=changes, cache=tmp_path / "c")
        return loader(data, global_batch_size=2)

    with made(MixChange(4, {"a": 0.0})) as changed:
        seen = [{p.source for p in changed.pieces(next(changed))} for _ in range(6)]
        state = changed.state_dict()
    assert "a" in set().union(*seen[:3])
    assert seen[3:] == [{"b"}] * 3, "the weights hold from step 4 on"
    assert state["fingerprint"]["weights"].endswith("from step 3: a 0.0"), "the form that earlier versions wrote"
    with pytest.raises(
        CursorMismatch,
        match=r"saved .*from step 4 on: a 0\.0, now .*from step 3 on.*counted from 1; earlier versions counted it from 0",
    ):
        made(MixChange(3, {"a": 0.0})).load_state_dict(state)
    made(MixChange(4, {"a": 0.0})).load_state_dict(state)
    with pytest.raises(ConfigError, match="the mix change at step 0: steps are counted from 1"):
        made(MixChange(0, {"a": 0.5}))


@pytest.mark.parametrize("stop", [0, 3])
def test_empty_documents_bad_rows_and_bad_shards_are_counted_once_however_often_a_run_is_resumed(tmp_path, stop):
    folder = tmp_path / "web"
    folder.mkdir()
    rows = [
        "{broken" if i % 10 == 0 else json.dumps({"text": "" if i % 7 == 0 else f"document {i}"}) for i in range(200)
    ]
    (folder / "a.jsonl").write_text("\n".join(rows))
    (folder / "b.jsonl.gz").write_bytes(b"\x1f\x8b cut short")
    data = TextDataset(
        [Source(f"jsonl:{folder}", on_bad="skip")], seq_len=16, lanes=4, window_blocks=2, cache=tmp_path / "c"
    )
    first, second = loader(data, global_batch_size=4), loader(data, global_batch_size=4)
    for _ in range(stop):
        next(first)
    second.load_state_dict(first.state_dict())
    for _ in second:
        pass
    counts = [made.left_out() for made in (first, second)]
    assert sum(c["empty_documents"] for c in counts) == sum('""' in row for row in rows)
    assert sum(c["bad_rows"] for c in counts) == 20
    assert counts[1]["bad_shards"] == 1
    drained = second.drain_metrics()
    assert {f"text/{name}": count for name, count in counts[1].items()}.items() <= drained.items()
    assert "1 bad shard" in str(second.report())
    assert second.report().left_out == counts[1]


def test_the_target_is_that_of_all_steps_when_weights_were_changed_at_a_resume(tmp_path, write_jsonl):
    first = loader(two_sources(tmp_path, write_jsonl, (3.0, 1.0)), global_batch_size=4)
    for _ in range(10):
        next(first)
    second = loader(two_sources(tmp_path, write_jsonl, (1.0, 3.0)), global_batch_size=4)
    second.load_state_dict(first.state_dict(), accept={"weights"})
    for _ in range(10):
        next(second)
    third = loader(two_sources(tmp_path, write_jsonl, (1.0, 3.0)), global_batch_size=4)
    third.load_state_dict(json.loads(json.dumps(second.state_dict())))
    for made in (second, third):
        assert [target for _, target in made.report().mix.values()] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    "change",
    [
        lambda state: 4,
        lambda state: [state | {"body": {"step": 0}}] * 2,
        lambda state: state | {"body": state["body"] | {"pass": 10**30}},
        lambda state: state | {"body": state["body"] | {"pass": -1}},
        lambda state: state | {"body": state["body"] | {"step": -1}},
        lambda state: state | {"body": state["body"] | {"sample": -12}},
    ],
)
def test_a_state_that_cannot_be_is_refused_as_damaged(data, change):
    with pytest.raises(CursorMismatch, match=r"state is damaged|state 0 of 1 is not a headrace cursor"):
        loader(data).load_state_dict(change(loader(data).state_dict()))


def test_a_name_to_accept_that_means_nothing_is_refused(data):
    with pytest.raises(ConfigError, match=r"'wieghts'.*did you mean 'weights'\?.*data, weights, tokenizer"):
        loader(data).load_state_dict(loader(data).state_dict(), accept={"wieghts"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "nonsense"}, "device='nonsense' cannot be used"),
        ({"device": "cuda:99"}, "device='cuda:99' cannot be used: torch sees"),
        ({"skip": "3:5"}, r"skip takes ranges of steps.*got '3:5'"),
        ({"skip": [5]}, r"skip takes ranges of steps.*got \[5\]"),
    ],
)
def test_devices_that_are_not_there_and_skips_that_are_no_ranges_are_refused(data, options, message):
    with pytest.raises(ConfigError, match=message):
        loader(data, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": [{"spec": "sample:prose"}]}, r"a source is a Source.*got \{'spec'"),
        ({"sources": [Path("web")]}, "such as 'jsonl:web'"),
        ({"mix_changes": [{"step": 3, "weights": {"prose": 1}}]}, "mix_changes takes changes such as MixChange"),
        ({"tokenizer": 5}, "tokenizer must be a path.*5 has no encode"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_with_a_sentence(options, message):
    with pytest.raises(ConfigError, match=message):
        TextDataset(**({"sources": ["sample:prose"], "seq_len": 8} | options))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_tokenizer_that_calls_for_an_exit_is_an_error_with_the_name_of_the_document(tmp_path, write_jsonl, workers):
    class Leaving(ByteTokenizer):
        name = "leaving"

        def encode(self, texts):
            if any("17" in text for text in texts):
                raise SystemExit(3)
            return super().encode(texts)

    path = write_jsonl("a.jsonl", [f"document {i}" for i in range(40)])
    data = TextDataset([f"jsonl:{path}"], tokenizer=Leaving(), seq_len=8, lanes=2, cache=tmp_path / "c")
    with pytest.raises(TokenizerError, match=r"leaving failed on row 17 of .*a\.jsonl.*SystemExit\(3\)"):
        list(loader(data, global_batch_size=2, tokenizer_workers=workers))


@pytest.mark.parametrize("exhausted", ["drop", "repeat", "stop_first"])
@pytest.mark.parametrize("beside", [[], ["jsonl:text.jsonl"]])
def test_a_source_of_nothing_but_empty_documents_is_named(tmp_path, write_jsonl, exhausted, beside):
    write_jsonl("text.jsonl", ["a document"] * 50)
    write_jsonl("empty.jsonl", [""] * 50)
    data = TextDataset(
        [*beside, "jsonl:empty.jsonl"], seq_len=32, lanes=4, exhausted=exhausted, base=tmp_path, cache=tmp_path / "c"
    )
    with pytest.raises(DataError, match=r"'empty' \(jsonl:empty.jsonl\) has 50 rows and none with text: set text_key"):
        for _ in zip(range(100), loader(data, global_batch_size=4), strict=False):
            pass


def test_empty_documents_among_others_are_left_out_even_where_a_lane_has_no_other(tmp_path, write_jsonl):
    path = write_jsonl("few.jsonl", ["", "", "", "one document with text"])
    data = TextDataset([f"jsonl:{path}"], seq_len=32, lanes=4, cache=tmp_path / "c")
    with loader(data, global_batch_size=4) as batches:
        assert sum(int(batch["row_count"].sum()) for batch in batches) == 1


def containers_in(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers_in, value.values()))
    return 1 + sum(map(containers_in, value)) if isinstance(value, list | tuple) else 0


def test_a_state_of_many_sources_makes_one_container_a_lane_so_that_saving_never_fills_the_garbage_collector(tmp_path, write_jsonl):  # fmt: skip
    paths = [write_jsonl(f"{n}.jsonl", ["a document of words"] * 20) for n in range(30)]
    data = TextDataset([f"jsonl:{path}" for path in paths], seq_len=16, lanes=12, cache=tmp_path / "c")
    with loader(data) as batches:
        next(batches)
        assert containers_in(batches.state_dict()["body"]) < 12 + 10


def test_a_state_with_a_list_a_source_as_it_used_to_be_is_still_read(data):
    before = loader(data)
    next(before)
    state = before.state_dict()
    entries = state["body"]["entries"]
    nested = {lane: [flat[i : i + 6] for i in range(0, len(flat), 6)] for lane, flat in entries.items()}
    after = loader(data)
    after.load_state_dict({**state, "body": {**state["body"], "entries": nested}})
    assert (next(after)["input_ids"] == next(before)["input_ids"]).all()
    short = {lane: flat[:-1] for lane, flat in entries.items()}
    with pytest.raises(CursorMismatch, match="damaged"):
        after.load_state_dict({**state, "body": {**state["body"], "entries": short}})
