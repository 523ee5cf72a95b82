"""What the flight recorder tells, and what it refuses to tell."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from headrace.cli.diff import diff
from headrace.cli.terminal import visible
from headrace.errors import ConfigError, DataChanged, FileCorrupt
from headrace.files import write_container
from headrace.loader.windows import WindowStart
from headrace.provenance.diff import diff_runs
from headrace.provenance.record import SampleRecord, merge_rank_records
from headrace.provenance.steps import RunProvenance
from headrace.runs.config.loading import load_config
from headrace.runs.folder import RunFolder
from headrace.runs.job import Job
from headrace.runs.recorded import recorded_run

TEXTS = [f"document {i} " + "word " * (i % 17) for i in range(40)]


def coded(*picks: int) -> str:
    return base64.b64encode(np.array(picks, "<u2").tobytes()).decode()


def line(first: int, samples: list[int], picks: list[int], opened=(), **more) -> dict:
    return {"first": first, "samples": samples, "picks": coded(*picks), "opened": list(opened), **more}


@pytest.fixture
def record(tmp_path):
    """A record of two lanes and two sources, made of the given lines."""

    def make(*lines: dict | str, names=("a", "b")) -> SampleRecord:
        path = tmp_path / "flight.jsonl"
        path.write_text("".join((ln if isinstance(ln, str) else json.dumps(ln)) + "\n" for ln in lines))
        return SampleRecord(path, lanes=2, names=names)

    return make


# --------------------------------------------------------------------------------------------- the record


def test_the_block_of_a_sample_is_the_number_of_picks_since_its_window_was_opened(record):
    found = record(
        line(1, [0, 4], [0, 1, 1, 1], [[0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 5, 0], [2, 0, 1, 0, 0, 0]]),
        line(2, [4, 8], [0, 1, 0, 0xFFFF], [[6, 0, 0, 0, 9, 0]]),
    )
    places = {g: found.place(g) for g in range(8)}
    assert [(p.lane, p.source, p.block) for p in places.values()] == [
        (0, 0, 0), (1, 1, 0), (0, 1, 0), (1, 1, 1), (0, 0, 1), (1, 1, 2), (0, 0, 0), (1, -1, 0),
    ]  # fmt: skip
    assert places[6].window.start == WindowStart(0, 9, 0)
    assert found.sample_of(1, 1, places[1].window, 2) == 5
    assert found.sample_of(1, 1, places[1].window, 3) is None, "not delivered yet"
    assert [found.step_of(g) for g in (0, 3, 4, 8)] == [1, 1, 2, None]


def test_a_line_that_begins_again_takes_the_place_of_everything_after_it(record):
    found = record(
        line(1, [0, 2, 4, 6], [0, 0, 0, 0, 0, 0], [[0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 7, 0], [4, 0, 0, 0, 3, 0]]),
        line(4, [6, 8], [1, 1], [[6, 0, 1, 0, 0, 0], [7, 1, 1, 0, 0, 0]]),
        line(3, [4, 6], [1, 1], [[4, 0, 1, 0, 8, 0], [5, 1, 1, 0, 8, 0]]),
    )
    assert found.last_step == 3
    assert list(found.steps()) == [(1, 0, 2), (2, 2, 4), (3, 4, 6)]
    assert found.place(4).source == 1
    assert [w.sample for w in found.windows(0, 0)] == [0], "the window of the future that did not happen is forgotten"
    with pytest.raises(ConfigError, match=r"step 4 is not recorded yet: the last step in .* is 3"):
        found.span(4)


def test_skipped_samples_count_for_blocks_and_belong_to_no_step(record):
    opened = [[0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 4, 0]]
    skips = {"skipped": [[2, 4], [4, 6]], "skipped_picks": coded(0, 0, 0, 0)}
    for lines in (
        [line(1, [0, 6, 8], [0, 0, 0, 0], opened, **skips)],
        [line(1, [0, 2], [0, 0], opened), line(2, [6, 8], [0, 0], **skips)],
        [line(1, [0, 2], [0, 0], opened, **skips), line(2, [6, 8], [0, 0])],
        [line(1, [0, 2], [0, 0], opened), line(2, [6, 8], [0, 0], skipped_picks=coded(0, 0, 0, 0))],
    ):
        found = record(*lines)
        assert not found.damaged
        assert list(found.steps()) == [(1, 0, 2), (2, 6, 8)]
        assert found.place(6).block == 3
        assert (found.place(4).skipped, found.step_of(4)) == (True, None)


def test_what_crosses_a_damaged_line_is_refused_and_the_rest_is_told(record):
    windows = [[0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 3, 0]]
    found = record(
        line(1, [0, 2], [0, 0], windows), '{"first": 2, "samp', line(3, [4, 6], [0, 1], [[5, 1, 1, 0, 0, 0]])
    )
    assert found.place(5).block == 0, "its window was opened after the hole"
    with pytest.raises(FileCorrupt, match=r"Line 2 of .* is damaged.*Sample 2 is not recorded.*steps 1–1, 3–3 can be"):
        found.place(4)
    with pytest.raises(FileCorrupt, match="Step 2 cannot be shown; steps 1–1, 3–3 can"):
        found.span(2)


def test_lines_may_name_their_sources_when_the_config_has_others_now(record):
    found = record(
        line(1, [0, 2], [0, 1], [[0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]], sources=["gone", "b"]),
        line(2, [2, 4], [0, 1], [[2, 0, 0, 0, 0, 0]]),
    )
    assert [found.names[found.place(g).source] for g in range(4)] == ["gone", "b", "a", "b"]
    assert found.place(3).block == 1


@pytest.mark.parametrize(
    "bad",
    [
        "[]",
        "7",
        "\x00",
        '{"first": 1}',
        "[" * 100_000,
        line(0, [0, 2], [0, 0]),
        line(True, [0, 2], [0, 0]),  # ty: ignore[invalid-argument-type]
        line(1, [2, 0], [0, 0]),
        line(1, [0, 1 << 63], [0, 0]),
        line(1, [0, 1 << 61], [0, 0]),
        line(1, [0, 2], [0, 0, 0]),
        line(1, [0, 2.5], [0, 0]),
        line(1, [0, 2], [0, 0]) | {"picks": "///"},
        line(1, [0, 2], [0, 0]) | {"picks": 5},
        line(1, [0, 2], [0, 0], [[0, 1, 0, 0, 0, 0]]),
        line(1, [0, 2], [0, 0], [[2, 0, 0, 0, 0, 0]]),
        line(1, [0, 2], [0, 0], [[0, 0, 9, 0, 0, 0]]),
        line(1, [0, 2], [0, 0], [[0, 0, 0, 0, -1, 0]]),
        line(1, [0, 2], [0, 0], [[0, 0]]),
        line(1, [0, 2], [0, 0], skipped=[[1, 2]], skipped_picks=coded(0)) | {"picks": coded()},
        line(1, [0, 4], [0, 0], skipped=[[1, 3]], skipped_picks=coded(0, 0)),
        line(1, [0, 2], [0, 0], sources=[1, 2]),
    ],
    ids=lambda bad: str(bad)[:60],
)
def test_a_line_that_makes_no_sense_is_a_hole_and_nothing_worse(record, bad):
    found = record(bad, line(2, [2, 4], [0, 0], [[2, 0, 0, 0, 0, 0]]))
    assert [number for number, _ in found.damaged] == [1]
    assert found.last_step == 2


@pytest.mark.parametrize("picks", [coded(0, 7), "AAA*AA=="])
def test_a_line_whose_picks_make_no_sense_is_a_hole(record, picks):
    windows = [[0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]
    found = record(line(1, [0, 2], [0, 0], windows) | {"picks": picks}, line(2, [2, 4], [1, 0], [[2, 0, 1, 0, 0, 0]]))
    assert found.place(2).block == 0
    for sample in (0, 3):
        with pytest.raises(
            FileCorrupt, match=r"Line 1 of .* is damaged: (a pick or a window names no source|Invalid base64)"
        ):
            found.place(sample)


def test_a_record_that_is_missing_or_a_pipe_is_refused_by_name(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileCorrupt, match="not a regular file"):
        SampleRecord(tmp_path / "pipe", lanes=2, names=["a"])
    with pytest.raises(FileCorrupt, match="is missing: the run did not record it"):
        SampleRecord(tmp_path / "nothing", lanes=2, names=["a"])


def test_lines_of_ranks_are_put_together_by_their_samples():
    ranks = [
        line(1, [0, 4], [0, 1], [[2, 2, 1, 0, 0, 0]]),
        line(1, [0, 4], [2, 3], [[1, 1, 2, 0, 0, 0]]),
    ]
    assert merge_rank_records(ranks) == line(1, [0, 4], [0, 2, 1, 3], [[1, 1, 2, 0, 0, 0], [2, 2, 1, 0, 0, 0]])
    alone = line(1, [0, 2], [0, 1], [[0, 0, 0, 0, 0, 0]])
    assert merge_rank_records([alone]) == alone
    odd = [line(1, [1, 5, 7], [5, 6], skipped=[[3, 5]], skipped_picks=coded(r)) for r in (8, 9)]
    assert merge_rank_records(odd)["skipped_picks"] == coded(9, 8), "sample 3 is rank 1's"
    with pytest.raises(ValueError, match="other steps: first is 2 and 1"):
        merge_rank_records([line(1, [0, 2], [0]), line(2, [0, 2], [0])])


# ------------------------------------------------------------------------------------------------ the run


@pytest.fixture
def fly(tmp_path, write_jsonl):
    """A run without a trainer: steps taken by hand, with the files that `headrace run` leaves."""
    write_jsonl("a.jsonl", TEXTS)
    write_jsonl("deep/b.jsonl", [f"other {i} " + "text " * (i % 5) for i in range(30)])

    def make(name: str, *overrides: str, steps: int = 6, skip=(), checkpoint: bool = False) -> Path:
        (tmp_path / "c.toml").write_text(
            f'[run]\nlog_every = 2\n[[source]]\nspec = "jsonl:{tmp_path}/a.jsonl"\nweight = 2\n'
            f'[[source]]\nspec = "jsonl:{tmp_path}/deep"\nname = "b"\n[text]\nseq_len = 32\nwindow_blocks = 3\n'
            '[loader]\nglobal_batch_size = 4\nlanes = 4\nexhausted = "repeat"\n[train]\n'
        )
        config = load_config(tmp_path / "c.toml", ["--run.dir", str(tmp_path / name), *overrides], env={})
        folder = RunFolder.create(config, version="0")
        folder.release()
        job = Job(config)
        data = job.dataset(records=folder.records)
        with job.loader(data, record=True, skip=skip, prefetch_batches=0, tokenizer_workers=0) as loader:
            for n in range(1, steps + 1):
                if next(loader, None) is None:
                    break
                with open(folder.path / "digests.jsonl", "a") as handle:
                    handle.write(json.dumps({"first": n, "digests": [loader.step_digest]}) + "\n")
            flown = loader.drain_flight()
            (folder.path / "flight.jsonl").write_text(json.dumps(flown) + "\n")
            if checkpoint:
                checkpoints = folder.make_folder("checkpoints")
                path = checkpoints / f"step-{steps:08d}.safetensors"
                write_container(path, {}, {"data": loader.state_dict()})
        data.close()
        return folder.path

    return make


def test_a_step_is_told_with_its_documents_their_places_and_a_proof(fly):
    run = fly("r")
    with RunProvenance(recorded_run(run)) as provenance:
        story = provenance.step(3, world=2, chars=12)
        alone = provenance.step(3, world=2, rank=1)
    assert story.recorded == story.digest
    assert (story.first_sample, story.samples, story.world_size) == (8, 4, 2)
    assert sum(share.tokens for share in story.totals.values()) + story.padding + 32 * story.fillers == 4 * 32
    assert sum(share.samples for share in story.totals.values()) == 4
    for d in story.documents:
        assert (d.rank, d.position) == (d.sample % 2, (d.sample - 8) // 2)
        text = (TEXTS[d.row] if d.source == "a" else "").encode()[d.start : d.start + d.length].decode()
        if d.source == "a":
            assert d.text == text[:12]
            assert d.shortened == (len(text) > 12)
        else:
            assert d.file == "b.jsonl"
    assert alone.documents
    assert {d.rank for d in alone.documents} == {1}
    assert alone.totals == story.totals, "of all ranks"


def test_only_the_windows_in_question_are_made_again(fly):
    run = fly("r", steps=30)
    with RunProvenance(recorded_run(run)) as provenance:
        assert provenance.step(30).windows <= 4


def test_the_world_size_is_the_one_that_took_the_step(fly):
    run = fly("r")
    events = [("started", 0, 1), ("saved", 2, 1), ("resumed", 4, 4), ("resumed", 2, 2)]
    with open(run / "journal.jsonl", "w") as handle:
        for event, step, world in events:
            handle.write(json.dumps({"event": event, "step": step, "world_size": world}) + "\n")
        handle.write('{"event": "resu')
    with RunProvenance(recorded_run(run)) as provenance:
        assert [provenance.world_at(n) for n in (1, 2, 3, 6)] == [1, 1, 2, 2]


def test_the_digests_of_a_future_that_did_not_happen_are_forgotten(fly):
    run = fly("r")
    with open(run / "digests.jsonl", "a") as handle:
        handle.write('{"first": 3, "digests": ["0a"]}\n{"first": 4, "dig\n{"digests": 7}\n[]\n')
    with RunProvenance(recorded_run(run)) as provenance:
        assert sorted(provenance.digests) == [1, 2, 3]
        assert provenance.digests[3] == 10
        assert provenance.step(2).recorded is not None
        assert provenance.step(4).recorded is None, "told, and said to be unproven"
        with pytest.raises(DataChanged, match=r"cannot show step 3 .* the run recorded 0{30}0a"):
            provenance.step(3)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda f: f.step(0), "steps count from 1"),
        (lambda f: f.step(7), "step 7 is not recorded yet: the last step in .*flight.jsonl is 6"),
        (lambda f: f.step(1, world=3), "3 ranks cannot share 4 samples"),
        (lambda f: f.step(1, world=0), "0 ranks cannot share"),
        (lambda f: f.step(1, world=2, rank=2), r"--rank 2 is not one of the 2 rank\(s\) of step 1"),
        (lambda f: f.step(1, chars=0), "--chars must be at least 1"),
        (lambda f: f.find("aa", 0), r'no source "aa", did you mean a\? \(it has a, b\)'),
        (lambda f: f.find("a", 40), "source a has rows 0 to 39, there is no row 40"),
        (lambda f: f.find("a", -1), "there is no row -1"),
        (lambda f: f.find("a", 10**30), "there is no row an integer of 100 bits"),
        (lambda f: f.find("b", 0, "c.jsonl"), 'source b has no such file: "c.jsonl", did you mean b.jsonl\\?'),
        (lambda f: f.find("b", 30, "b.jsonl"), "b.jsonl has rows 0 to 29, there is no row 30"),
    ],
)
def test_a_question_that_has_no_answer_is_refused(fly, ask, message):
    with RunProvenance(recorded_run(fly("r"))) as provenance, pytest.raises(ConfigError, match=message):
        ask(provenance)


def test_a_folder_that_is_no_run_is_refused(tmp_path, fly):
    with pytest.raises(ConfigError, match="there is no run folder"):
        recorded_run(tmp_path / "nowhere")
    run = fly("r")
    (run / "flight.jsonl").unlink()
    with (
        RunProvenance(recorded_run(run)) as provenance,
        pytest.raises(FileCorrupt, match=r"flight\.jsonl is missing"),
    ):
        provenance.step(1)
    (run / "run.json").unlink()
    os.mkfifo(run / "run.json")
    with pytest.raises(FileCorrupt, match=r"run\.json is not a regular file"):
        RunProvenance(recorded_run(run))


def test_a_byte_that_changed_since_is_named_and_nothing_is_told(tmp_path, fly):
    run = fly("r")
    raw = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl").write_bytes(raw.replace(b"document", b"dokument"))
    with (
        RunProvenance(recorded_run(run)) as provenance,
        pytest.raises(DataChanged, match=r"a\.jsonl \(bytes .* changed since it was first read"),
    ):
        provenance.step(2)


@pytest.mark.parametrize("checkpoint", [True, False])
def test_rows_that_were_added_since_are_noticed(tmp_path, fly, checkpoint):
    run = fly("r", checkpoint=checkpoint)
    with open(tmp_path / "a.jsonl", "a") as handle:
        handle.write('{"text": "one more"}\n' * 40)
    with RunProvenance(recorded_run(run)) as provenance, pytest.raises(DataChanged) as caught:
        provenance.step(5)
    expected = r"a\.jsonl changed \(saved .* \(40 rows\), now .* \(80 rows\)\)" if checkpoint else "rebuilt"
    assert re.search(expected, str(caught.value))
    assert "use headrace 0" in str(caught.value)


def test_a_config_that_was_changed_by_hand_is_named(fly):
    run = fly("r", checkpoint=True)
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("window_blocks = 3", "window_blocks = 5"))
    with (
        RunProvenance(recorded_run(run)) as provenance,
        pytest.raises(DataChanged, match="config:window_blocks was 3, is 5"),
    ):
        provenance.step(1)


def test_other_weights_at_a_resume_do_not_hide_what_was_seen(fly):
    run = fly("r", checkpoint=True)
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("weight = 2.0", "weight = 9.0"))
    with RunProvenance(recorded_run(run)) as provenance:
        assert provenance.step(4).recorded is not None


@pytest.mark.parametrize("offset", [1, 5000])
def test_a_record_that_was_tampered_with_does_not_reach_the_packer(fly, offset):
    run = fly("r", "--text.pack", "concat")
    flown = json.loads((run / "flight.jsonl").read_text())
    for window in flown["opened"]:
        window[4:] = [0, offset + window[5]]
    (run / "flight.jsonl").write_text(json.dumps(flown))
    with (
        RunProvenance(recorded_run(run)) as provenance,
        pytest.raises(DataChanged, match=r"tokens of a document that has|rebuilt"),
    ):
        provenance.step(1)


def test_asking_changes_nothing_in_the_run(fly):
    run = fly("r", checkpoint=True)
    shutil.rmtree(run / "records")  # what was read before must not be written down again, either
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(run.rglob("*")) if p.is_file()}
    with RunProvenance(recorded_run(run)) as provenance:
        provenance.step(6)
        for row in range(30):
            provenance.find("b", row)
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(run.rglob("*")) if p.is_file()} == before


def test_a_document_is_found_by_file_or_by_row_of_the_source_and_what_is_left_out_is_said(fly):
    run = fly("r", "--source.0.max_rows", "39", "--source.1.max_epochs", "1", steps=40)
    with RunProvenance(recorded_run(run)) as provenance:
        assert provenance.find("b", 3, "b.jsonl").seen == provenance.find("b", 3).seen != ()
        assert provenance.find("b", 3).never == "the source is read 1 time(s)"
        assert provenance.find("a", 39).never == "max_rows = 39 leaves it out"
        seen = provenance.find("a", 1)
        assert len({s.epoch for s in seen.seen}) > 1
        assert seen.upcoming is not None
        step = provenance.step(seen.seen[0].step)
        assert any((d.sample, d.column, d.row) == (seen.seen[0].sample, seen.seen[0].column, 1) for d in step.documents)


# ----------------------------------------------------------------------------------------------- the diff


def test_runs_of_the_same_data_are_the_same_however_far_they_went(fly):
    found = diff_runs(recorded_run(fly("x")), recorded_run(fly("y", "--train.lr", "0.1", steps=9)))
    assert found.same
    assert (found.steps_a, found.steps_b, found.samples_compared) == (6, 9, 24)
    assert found.config == {"train.lr": (0.003, 0.1)}


def test_runs_with_another_seed_part_at_their_first_sample(fly):
    found = diff_runs(
        recorded_run(fly("x", checkpoint=True)), recorded_run(fly("y", "--run.seed", "5", checkpoint=True))
    )
    assert not found.same
    assert (found.step_a, found.step_b, found.sample, found.samples_compared) == (1, 1, 0, 0)
    assert found.config == {"run.seed": (0, 5)}
    assert found.order == {"config:seed": ("0", "5")}
    assert (found.seen_a.source, found.seen_a.row, found.seen_a.start) != (
        found.seen_b.source,
        found.seen_b.row,
        found.seen_b.start,
    )
    assert found.seen_a.text


def test_batch_sizes_do_not_hide_that_the_data_is_the_same(fly):
    found = diff_runs(recorded_run(fly("x")), recorded_run(fly("y", "--loader.global_batch_size", "6", steps=3)))
    assert found.same
    assert found.samples_compared == 12, "samples 12 to 17 lie in a step of B that ends where none of A does"
    assert any("other batch sizes" in note for note in found.notes)


def test_samples_with_nothing_to_learn_are_the_same_delivered_or_passed_over(fly):
    """Batches of 4 hold whole steps of nothing where batches of 12 hold some rows of it."""
    few = ("--loader.exhausted", "drop", "--loader.lanes", "12")
    runs = [
        fly(name, *few, "--loader.global_batch_size", size, steps=10**6) for name, size in (("x", "4"), ("y", "12"))
    ]
    lines = [json.loads((run / "flight.jsonl").read_text()) for run in runs]
    assert "skipped" in lines[0]
    assert "skipped" not in lines[1]
    found = diff_runs(*map(recorded_run, runs))
    assert found.same
    assert found.samples_compared == lines[0]["samples"][-1] // 12 * 12
    with RunProvenance(recorded_run(runs[0])) as provenance:
        last = provenance.record.last_step
        for step in range(last - 9, last + 1):
            story = provenance.step(step)
            assert story.recorded == story.digest
            assert story.documents


def test_a_skipped_step_is_where_a_run_parts_from_one_that_took_it(fly):
    found = diff_runs(recorded_run(fly("x")), recorded_run(fly("y", skip=[(3, 4)])))
    assert (found.sample, found.step_a) == (8, 3)
    assert (found.seen_a.step, found.seen_b.step) == (3, None)


def test_a_run_that_changed_its_data_is_still_compared_but_not_told(tmp_path, fly):
    one = fly("x")
    raw = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl").write_bytes(raw.replace(b"document", b"dokument"))
    found = diff_runs(recorded_run(one), recorded_run(fly("y")))
    assert not found.same
    assert found.sample is None
    assert found.step_a == 1
    assert any("cannot be rebuilt" in note for note in found.notes)


def test_runs_without_a_flight_record_are_compared_by_their_digests(fly):
    one, other = fly("x"), fly("y", "--run.seed", "5")
    (one / "flight.jsonl").unlink()
    found = diff_runs(recorded_run(one), recorded_run(other))
    assert (found.same, found.step_a, found.sample) == (False, 1, None)
    assert any("flight.jsonl is missing" in note for note in found.notes)
    (one / "digests.jsonl").unlink()
    with pytest.raises(FileCorrupt, match="no digest of any step"):
        diff_runs(recorded_run(one), recorded_run(other))


def test_text_cannot_move_the_cursor_of_a_terminal():
    hostile = "a\x1b[2J\r\n\x9b\u202e\u2028\ud800\x00 é 漢"
    assert visible(hostile) == "a\\x1b[2J\\r\\n\\x9b\\u202e\\u2028\\ud800\\x00 é 漢"


@pytest.mark.parametrize(
    ("skips", "said"), [(((3, 4), ()), "step 3 of B, which A skipped"), (((), (3, 4)), "step 3 of A, which B skipped")]
)
def test_diff_says_which_run_skipped_the_step_where_they_part(fly, capsys, skips, said):
    one, other = (fly(name, skip=[skip] if skip else ()) for name, skip in zip("xy", skips, strict=True))
    diff(one, other)
    assert said in capsys.readouterr().out


def test_diff_counts_the_steps_of_mix_changes_as_the_config_does(fly):
    change = ("--mix.change", "[{step = 3, weights = {b = 5.0}}]")
    found = diff_runs(recorded_run(fly("x", checkpoint=True)), recorded_run(fly("y", *change, checkpoint=True)))
    assert found.order["weights"] == ("2.0, 1.0", "2.0, 1.0; from step 3 on: b 5.0")
