"""A run as pages: what is wrong is said first, nothing foreign gets in, the static report is whole."""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from headrace.errors import DataError
from headrace.ui import find_problems, page_html, pages, read_run, write_page
from headrace.ui.run_view import RunView, find_runs
from small_spool import make_spool

A = "stream_mixing/active"
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
TEXT = '[run]\nname = "q"\nsteps = 100\n[[source]]\nspec = "sample:prose"\nname = "web"\nweight = 0.7\n[[source]]\nspec = "sample:code"\nname = "code"\nweight = 0.3\n'


def a_run(
    folder: Path, lines: list[dict[str, Any]], config: str = "", journal: list[dict[str, Any]] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.toml").write_text(
        config or '[run]\nname = "r"\n[streams]\nroots = ["a"]\nnum_streams_mixed = 4\n'
    )
    (folder / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in journal or []))
    return folder


def stream_line(step: int, **changed: float) -> dict[str, Any]:
    return {
        "step": step, "train/loss": 1 / step, f"{A}/remaining_fraction_min": 0.4, f"{A}/remaining_fraction_max": 0.5,
        f"{A}/steps_since_pick_max": 3, f"{A}/overdue_max": 1.0, f"{A}/modalities/rna": 2, f"{A}/modalities/atac": 2,
        "stream_mixing/picks/rna": step % 2, "stream_mixing/picks/atac": (step + 1) % 2, "stream_mixing/refill/exhaust_events": 0, **changed,
    }  # fmt: skip


def text_line(step: int, **changed: Any) -> dict[str, Any]:
    return {
        "step": step, "time": 1e9 + step, "train/loss": 3.0 + 1 / step, "train/grad_norm": 1.0, "tokens_per_second": 5e5, "step/seconds": 0.2,
        "step/phase/train.forward/seconds": 0.15, "step/wait/loader.next/seconds": 0.001, "waits/exposed/seconds": 0.001, "steps_in_interval": 10,
        "data/source_tokens/web": 700, "data/source_tokens/code": 300, "data/tokens": 1000, "data/padding": 10, **changed,
    }  # fmt: skip


def rules(run: Path) -> dict[str, str]:
    view = read_run(run)
    return {f.rule: f"{f.title}. {f.sentence} {f.remedy}" for f in find_problems(view, view.status())}


def page_data(page: str) -> dict[str, Any]:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.mark.parametrize(
    ("changed", "rule", "sentence"),
    [
        ({f"{A}/remaining_fraction_max": 0.9}, "uneven", r"more than 30% apart in 100% of the lines"),
        ({f"{A}/steps_since_pick_max": 77}, "range", r"steps_since_pick_max is outside 0 to 20 .* with 77"),
        ({"stream_mixing/refill/exhaust_events": 2}, "exhausts", r"run dry in 100% of the lines, 2.00 of them a step"),
        ({f"{A}/modalities/atac": 0}, "absent", r"No file of atac is in the pool in 100% of the lines"),
        ({"stream_mixing/picks/atac": 0, "stream_mixing/picks/rna": 1}, "starved", r"atac gets 0.0% of the batches, 0 of 49"),
        ({"stream_mixing/picks/atac": 0, "stream_mixing/picks/rna": 1}, "lopsided", r"rna gets 100% of the batches while the counts of open files stay flat"),
        ({"ledger/false_evictions/stale": 1, "ledger/refault_distance_max": 9}, "false_evictions", r"49 groups were evicted .* up to 9 steps"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_stream_run_is_said_in_words(tmp_path, changed, rule, sentence):
    assert rules(a_run(tmp_path / "good", [stream_line(s) for s in range(1, 50)])) == {}
    found = rules(a_run(tmp_path / "bad", [stream_line(s, **changed) for s in range(1, 50)]))
    assert re.search(sentence, found[rule]), found


@pytest.mark.parametrize(
    ("changed", "rule", "sentence"),
    [
        (lambda s: {"step/wait/loader.next/seconds": 0.024}, "wait", r"^12% of the time is waiting for loader.next.*tokenizer_workers"),
        (lambda s: {"train/loss": None if s > 380 else 3.0}, "nan", r"NaN or infinite in 2 lines, first at step 390"),
        (lambda s: {"train/loss": 9.0 if s == 300 else 3.0}, "spike", r"At step 300 the loss is 9; .* median is 3"),
        (lambda s: {"train/grad_norm": 90.0 if s == 300 else 1.0}, "grad_norm", r"At step 300 the gradient norm is 90"),
        (lambda s: {"data/source_tokens/code": 500}, "mix", r"has 41.7% of the tokens, its weight promises 30.0%"),
        (lambda s: {"text/bad_rows": 1}, "left_out", r"40 rows could not be read"),
        (lambda s: {"tokens_per_second": 5e5 if s < 300 else 1e5}, "slower", r"100,000 tokens/s over the last lines; the median of the run is 500,000"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_text_run_is_said_in_words(tmp_path, changed, rule, sentence):
    steps = range(10, 410, 10)
    assert rules(a_run(tmp_path / "good", [text_line(s) for s in steps], TEXT)) == {}
    found = rules(a_run(tmp_path / "bad", [text_line(s, **changed(s)) for s in steps], TEXT))
    assert re.search(sentence, found[rule]), found


def test_the_worst_finding_comes_first(tmp_path):
    lines = [text_line(s, **{"step/wait/loader.next/seconds": 0.1, "text/bad_rows": 1}) for s in range(10, 400, 10)]
    view = read_run(a_run(tmp_path / "run", lines, TEXT))
    assert [f.rule for f in find_problems(view, view.status())][:2] == ["wait", "left_out"]
    assert pages.overview(view)["verdict"] == {"level": "bad", "text": "50% of the time is waiting for loader.next"}


def test_the_state_of_a_run_comes_from_its_lock(tmp_path):
    run = a_run(tmp_path / "run", [text_line(s) for s in range(10, 60, 10)], TEXT)
    (run / "run.lock").write_text("process 7 on node\n")
    view = RunView("run", run)
    view.refresh()
    assert view.status()["state"] == "dead"
    assert find_problems(view, view.status())[0].rule == "dead"
    with open(run / "run.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert view.status()["state"] == "running"
        assert view.status()["holder"] == "process 7 on node"
    (run / "summary.json").write_text('{"state": "completed", "step": 50}')
    assert view.status()["state"] == "completed"
    (run / "summary.json").write_text('{"state": "stopped", "step": 20}')
    assert view.status()["state"] == "dead", "a summary of an earlier stop says nothing about lines after it"


def test_the_pool_that_is_worked_out_has_the_picks_that_the_run_counted(tmp_path):
    section = 'roots = ["a"]\nlayout = "nested"\nbatch_size = 4\nbatch_sizes = {}\nnum_streams_mixed = 2\npick_mode = "proportional"\nqueue = "stratified"\nbatching_mode = "per_stream"\nglobal_ranks = 1\n'
    from headrace.mix import MixPlan, MixSettings, StreamTable

    names = ("atac/0.npz", "atac/1.npz", "rna/0.npz", "rna/1.npz")
    table = StreamTable(paths=names, rows=(20, 12, 40, 9), modalities=("atac", "atac", "rna", "rna"))
    plan = MixPlan(table, MixSettings(batch_size={"atac": 4, "rna": 4}, slots=2, seed=5))
    lines = []
    for step in range(1, 16):
        kind = table.modalities[plan.next().stream]
        lines.append(
            {
                "step": step,
                "stream_mixing/picks/atac": int(kind == "atac"),
                "stream_mixing/picks/rna": int(kind == "rna"),
            }
        )
    run = a_run(tmp_path / "run", lines, f'[run]\nname = "s"\nseed = 5\n[streams]\n{section}')
    (run / "streams.json").write_text(
        json.dumps([{"name": n, "rows": r} for n, r in zip(names, table.rows, strict=True)])
    )
    told = pages.streams(read_run(run))
    slices = told["pool"]["slices"]
    for kind in ("atac", "rna"):
        assert sum(s["picks"] for s in slices if s["modality"] == kind) == told["picks"][kind] > 0
    assert all(s["from"] <= s["to"] <= 15 and s["read"] <= s["rows"] for s in slices)
    (run / "streams.json").write_text('[{"name": "x"}]')
    assert "cannot be worked out" in pages.streams(read_run(run))["pool"]["refused"]


def arrival(**changed: Any) -> bytes:
    turn = {
        "prompt": "3142>",
        "completion": "1234",
        "kept": 0,
        "prompt_ids": b"",
        "ids": np.arange(4, dtype="<i4").tobytes(),
        "logprobs": np.full(4, -0.5, "<f4").tobytes(),
    }
    payload = msgspec.msgpack.encode(
        {
            "task": 7,
            "member": 0,
            "attempt": 0,
            "step": 2,
            "env": "sort",
            "version": 1,
            "time": 1.0,
            "reward": 1.0,
            "turns": [turn],
            **changed,
        }
    )
    return len(payload).to_bytes(4, "little") + xxhash.xxh3_64_intdigest(payload).to_bytes(8, "little") + payload


def test_rollouts_are_read_from_the_arrival_log_up_to_damage(tmp_path):
    run = a_run(
        tmp_path / "run",
        [{"step": 3, "reward/all/mean": 0.5, "reward/sort/mean": 0.5, "reward/sort/std": 0.1}],
        '[run]\nname = "rl"\n[policy]\nlr = 1\n',
    )
    (run / "arrivals").mkdir()
    whole = arrival() + arrival(member=1, reward=0.0) + arrival(member=2, failed=EVIL)
    (run / "arrivals" / "step_000000000002.log").write_bytes(whole + b"\x05\x00\x00\x00junkjunkbroke" + arrival())
    view = read_run(run)
    told = pages.rollouts(view, 3)
    assert [(r["reward"], r.get("advantage")) for r in told["rollouts"]] == [(1.0, 0.5), (0.0, -0.5), (1.0, None)]
    assert told["rollouts"][0]["turns"][0]["tokens"] == list("1234")
    assert told["rollouts"][2]["error"] == EVIL
    assert "damaged" in told["damaged"]
    assert [(p["key"], p["band"]) for p in pages.rl(view)["rewards"]] == [("reward/sort/mean", [[3, 0.4, 0.6]])]
    (run / "arrivals" / "step_000000000003.log").write_bytes(arrival() + arrival(task=["unhashable"]))
    assert "does not parse" in pages.rollouts(view, 4)["damaged"]
    newest, older = pages.rl(view)["groups"]
    assert (newest["step"], newest["trained"], newest["rollouts"], newest["damaged"]) == (4, False, 1, True)
    assert (older["step"], older["trained"], older["rollouts"], older["failed"]) == (3, True, 2, {EVIL: 1})
    with pytest.raises(DataError, match="no rollouts of step 9"):
        pages.rollouts(view, 9)


def test_the_spool_of_a_run_is_described_and_a_missing_or_damaged_one_is_said(tmp_path):
    run = a_run(tmp_path / "run", [text_line(10)], TEXT + "[spool]\nenabled = true\n")
    view = read_run(run)
    assert "spool" not in pages.tabs(view)
    assert "is not there" in pages.spool(view)["refused"]
    make_spool(run / "spool", f"looked odd {EVIL}")
    told = pages.spool(view)
    assert "spool" in pages.tabs(view)
    assert [f["seq"] for f in told["files"]] == [0, 1]
    assert told["spool"]["splits"]["train"][0]["gaps"] == [2]
    assert any(EVIL in entry["reason"] for entry in told["quarantine"])
    (run / "spool" / "meta.json").write_text("{")
    assert "cannot be read" in pages.spool(view)["refused"]


def test_a_question_that_passes_its_deadline_is_given_up_and_the_next_is_answered(tmp_path):
    from headrace.errors import DeadlineExceeded, HeadraceError
    from headrace.ui.questions import Questions, token_texts

    questions = Questions(deadline=0.001)
    try:
        with pytest.raises(DeadlineExceeded, match=r"took longer than 0\.001 s"):
            questions.ask("step", path=tmp_path, number=1)
        questions._deadline = 60.0
        with pytest.raises(HeadraceError, match="config"):
            questions.ask("step", path=tmp_path, number=1)
    finally:
        questions.close()
    parts = {1: b"a", 2: "ä".encode()[:1], 3: "ä".encode()[1:], 4: b"b"}
    texts = token_texts(lambda ids: b"".join(parts[i] for i in ids).decode(errors="replace"), [1, 2, 3, 4])
    assert texts == ["a", "", "ä", "b"], "a character of two tokens belongs to the last"


def test_a_static_page_is_whole_small_and_asks_for_nothing(tmp_path):
    run = a_run(tmp_path / "run", [stream_line(s) for s in range(1, 50)], journal=[{"event": "resumed", "step": 20}])
    size = write_page(read_run(run), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert size < 400_000
    assert "default-src 'none'" in page
    assert "unsafe-inline" not in page
    assert re.findall(r'(?:src|href)\s*=\s*["\']?([^"\'>\s]+)', page.split("<script>")[0]) == ["data:,"]
    data = page_data(page)
    assert data["pages"]["overview"]["marks"] == [[20, "resumed"]]
    assert data["pages"]["overview"]["verdict"]["level"] == "good"
    assert {"overview", "metrics", "config", "streams"} <= data["pages"].keys()
    assert len(data["curves"]["train/loss"]["steps"]) == 49
    assert "stream_mixing/refill/exhaust_events" in data["pages"]["metrics"]["zero"], "no panel for a constant zero"


def test_names_from_files_cannot_become_part_of_the_page(tmp_path):
    lines = [{"step": s, f"x/{EVIL}": s, f"data/source_tokens/{EVIL}": 1, "a<b>&c": 1} for s in range(1, 5)]
    config = f"[run]\nname = {json.dumps(EVIL)}\n[[source]]\nname = {json.dumps(EVIL)}\nspec = {json.dumps('jsonl:' + EVIL)}\n"
    page = page_html(read_run(a_run(tmp_path / "run", lines, config, [{"event": EVIL, "step": 3}])))
    assert EVIL not in page
    assert "<img" not in page
    assert page.count("<script") == 2
    assert "alert(1)" in json.dumps(page_data(page)), "it is there, as text"


def test_a_folder_of_damaged_runs_is_listed_and_shown(tmp_path):
    good = a_run(tmp_path / "good", [text_line(10)], TEXT)
    bad = tmp_path / "deep" / "bad"
    bad.mkdir(parents=True)
    names = (
        "config.toml",
        "summary.json",
        "run.json",
        "journal.jsonl",
        "metrics.jsonl",
        "flight.jsonl",
        "streams.json",
    )
    for name in names:
        (bad / name).write_bytes(b"\xff\x00[[[{{{" + b"[" * 5000 + b"\n\n\x80")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert find_runs(tmp_path) == {"good": good, "deep/bad": bad}
    listed = {run["run"]: run for run in pages.runs(tmp_path)["runs"]}
    assert listed["good"]["value"] == pytest.approx(3.1)
    assert listed["deep/bad"]["verdict"]["text"] == "No line of metrics yet"
    view = RunView("deep/bad", bad)
    view.refresh()
    for make in (pages.overview, pages.metrics, pages.config, pages.streams, pages.spool, pages.rl):
        json.dumps(make(view))
    assert listed["deep/bad"]["step"] == 0


def test_what_is_no_run_is_a_sentence(tmp_path):
    with pytest.raises(DataError, match="is not a run folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(DataError, match="does not exist: the run has written no metrics yet"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("[]\n7\n")
    with pytest.raises(DataError, match="holds no line yet"):
        read_run(tmp_path)
