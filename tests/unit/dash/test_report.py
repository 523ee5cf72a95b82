"""A run as one page: nothing is lost that matters, nothing foreign gets in, and what stands out is said."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace.jobs.running
import headrace.loader.stream_metrics  # noqa: F401  (their specs)
from headrace.dash import read_report, read_series, write_page, write_picture
from headrace.errors import ConfigError, DataError

A = "stream_mixing/active"
EVIL = "</script><script>alert(1)</script>"


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
        f"{A}/steps_since_pick_max": 3, f"{A}/steps_since_pick_max/worst_rank": 2, f"{A}/overdue_max": 1.0, f"{A}/modalities/rna": 2,
        f"{A}/modalities/atac": 2, "stream_mixing/picks/rna": step % 2, "stream_mixing/picks/atac": (step + 1) % 2,
        "stream_mixing/refill/exhaust_events": 0, **changed,
    }  # fmt: skip


def page_data(page: str) -> dict[str, Any]:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_a_page_is_whole_asks_for_nothing_and_holds_every_curve(tmp_path):
    run = a_run(tmp_path / "run", [stream_line(s) for s in range(1, 50)], journal=[{"event": "resumed", "step": 20}])
    report = read_report(run)
    size = write_page(report, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert size > 4_000_000, "plotly is in it"
    assert "default-src 'none'" in page
    outside = page[: page.index("<script>")] + page[page.index('<script type="application/json"') :]
    assert not re.findall(r"(?:src|href)\s*=", outside)
    data = page_data(page)
    titles = {p["title"]: p for p in data["panels"]}
    assert titles[f"{A}/remaining_fraction"]["healthy"] == [0, 1]
    assert [c["name"] for c in titles[f"{A}/remaining_fraction"]["curves"]] == ["max", "min"]
    assert titles[f"{A}/steps_since_pick_max"]["healthy"] == [0.0, 20.0], "five times this run's pool"
    assert titles[f"{A}/steps_since_pick_max"]["curves"][0]["worst"] == [2] * 49
    assert [c["name"] for c in titles["stream_mixing/picks/<modality>"]["curves"]] == ["atac", "rna"]
    assert titles["stream_mixing/picks_so_far/<modality>"]["curves"][0]["y"][-1] == pytest.approx(24 / 49)
    assert data["marks"] == [[20, "resumed"]]
    assert data["findings"] == []


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({f"{A}/remaining_fraction_max": 0.9}, r"remaining_fraction_spread is outside 0 to 0.3 in 100% of the lines"),
        ({f"{A}/steps_since_pick_max": 77}, r"steps_since_pick_max is outside 0 to 20 .* with 77"),
        ({"stream_mixing/refill/exhaust_events": 2}, r"slices run dry in 100% of the lines, 2.00 of them a line"),
        ({f"{A}/modalities/atac": 0}, r"no file of atac is in the pool in 100% of the lines: it starves"),
        ({"stream_mixing/picks/atac": 0, "stream_mixing/picks/rna": 1}, r"atac gets 0.0% of the batches, 0 of 49"),
        (
            {"stream_mixing/picks/atac": 0, "stream_mixing/picks/rna": 1},
            r"active/modalities/\* stays flat \(2 atac, 2 rna\) while rna gets 100% of the batches: it counts open files.*picks/\* shows the mix",
        ),
        ({f"{A}/overdue_max": 9.0}, r"overdue_max is outside 0 to 3"),
    ],
)
def test_what_is_wrong_with_a_run_is_said_in_words(tmp_path, changed, sentence):
    found = read_report(a_run(tmp_path / "run", [stream_line(s, **changed) for s in range(1, 50)])).findings
    assert any(re.search(sentence, f.sentence) for f in found), found


@pytest.mark.parametrize("lopsided", [False, True])
def test_counts_of_open_files_are_explained_only_where_they_are_flat_and_the_picks_are_not(tmp_path, lopsided):
    changed = {"stream_mixing/picks/atac": 0, "stream_mixing/picks/rna": 1} if lopsided else {}
    lines = [
        stream_line(s, **changed) | ({f"{A}/modalities/atac": s % 2 + 1} if lopsided else {}) for s in range(1, 50)
    ]
    found = read_report(a_run(tmp_path / "run", lines)).findings
    assert not any("counts open files" in f.sentence for f in found), found


def test_names_from_files_cannot_become_part_of_the_page(tmp_path):
    lines = [{"step": s, f"x/{EVIL}": s, "a<b>&c": 1} for s in range(1, 5)]
    config = f"[run]\nname = {json.dumps(EVIL)}\n[[source]]\nspec = {json.dumps('jsonl:' + EVIL)}\n"
    write_page(read_report(a_run(tmp_path / "run", lines, config)), tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text()
    assert EVIL not in page
    assert "alert(1)" in json.dumps(page_data(page)), "it is there, as text"


def test_a_metric_that_is_no_number_or_not_finite_leaves_a_gap(tmp_path):
    run = a_run(tmp_path / "run", [stream_line(1), stream_line(2)])
    with open(run / "metrics.jsonl", "a") as out:
        out.write(
            '{"step": 3, "train/loss": null, "odd": "text", "flag": true}\n{"step": 4, "train/loss": 1e999}\n{"torn'
        )
    series = read_series(run / "metrics.jsonl")
    assert series.steps.tolist() == [1, 2, 3]  # 1e999 is no JSON number that fits
    assert math.isnan(series["train/loss"][2])
    assert "odd" not in series
    assert "flag" not in series
    write_page(read_report(run), tmp_path / "p.html")


def test_of_steps_that_were_trained_twice_the_later_line_counts(tmp_path):
    lines = [{"step": s, "train/loss": 1.0} for s in (1, 2, 3, 4)] + [{"step": s, "train/loss": 2.0} for s in (3, 4, 5)]
    series = read_series(a_run(tmp_path / "run", lines) / "metrics.jsonl")
    assert series.steps.tolist() == [1, 2, 3, 4, 5]
    assert series["train/loss"].tolist() == [1, 1, 2, 2, 2]


def test_thinning_keeps_every_spike_and_the_page_small(tmp_path):
    values = np.zeros(100_000)
    values[77_123], values[3] = 9.0, -4.0
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(f'{{"step":{i},"train/loss":{v}}}\n' for i, v in enumerate(values)))
    series = read_series(run / "metrics.jsonl")
    steps, found = series.thinned("train/loss", 2000)
    assert len(steps) <= 2002
    assert {3, 77_123, 0, 99_999} <= set(steps.tolist())
    assert (found.max(), found.min()) == (9.0, -4.0)
    assert write_page(read_report(run), tmp_path / "p.html") < 5_500_000


def test_a_language_model_run_is_drawn_too(tmp_path):
    lines = [
        {"step": s, "train/loss": 3.0, "tokens_per_second": 5e5, "data/source_tokens/web": 7, "data/source_tokens/code": 3, "wait/loader.next/seconds": 0.01,
         "wait/loader.next/seconds_max": 0.02, "wait/loader.next/seconds/worst_rank": 1}
        for s in range(10, 100, 10)
    ]  # fmt: skip
    report = read_report(a_run(tmp_path / "run", lines, '[run]\nname = "q"\n[[source]]\nspec = "sample:prose"\n'))
    assert report.kind == "lm"
    titles = [p.title for p in report.panels]
    assert "wait/<name>/seconds" in titles
    assert "wait/loader.next/seconds_max" not in titles
    assert dict(report.facts)["speed"] == "500,000 tokens/s (median line)"


def test_a_picture_has_the_panels_asked_for(tmp_path):
    report = read_report(a_run(tmp_path / "run", [stream_line(s) for s in range(1, 30)]))
    assert write_picture(report, tmp_path / "p.png", keys=["remaining_fraction", "train/loss"]) == 3
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    wrong = {"stream_mixing/picks/atac": 0, "stream_mixing/picks/rna": 1}
    told = read_report(a_run(tmp_path / "told", [stream_line(s, **wrong) for s in range(1, 30)]))
    plain = replace(told, findings=())
    heights = []
    for report in (plain, told):
        write_picture(report, tmp_path / "p.png", keys=["modalities"])
        heights.append(int.from_bytes((tmp_path / "p.png").read_bytes()[20:24]))
    assert heights[0] < heights[1], "what stands out is below the panels"
    with pytest.raises(ConfigError, match=r"no panel of .* contains 'nonsense'"):
        write_picture(report, tmp_path / "p.png", keys=["nonsense"])


def test_what_is_no_run_is_a_sentence(tmp_path):
    with pytest.raises(DataError, match="is no run folder"):
        read_report(tmp_path / "nowhere")
    with pytest.raises(DataError, match="does not exist: the run has written no metrics yet"):
        read_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("[]\n7\n")
    with pytest.raises(DataError, match="holds no line yet"):
        read_report(tmp_path)


_BROWSER = """
const fs = require('fs');
const page = fs.readFileSync(process.argv[2], 'utf8');
const data = /id="data">([\\s\\S]*?)<\\/script>/.exec(page)[1];
const script = page.slice(page.lastIndexOf('<script>') + 8, page.lastIndexOf('</script>'));
const element = () => ({ textContent: '', className: '', style: {}, children: [], append(...c) { this.children.push(...c); }, addEventListener(k, f) { this['on' + k] = f; }, on() {} });
const known = {data: {textContent: data}};
global.document = { createElement: element, getElementById: id => known[id] = known[id] || element(), querySelector: q => known[q] = known[q] || element() };
global.matchMedia = () => ({ matches: false });
let drawn = 0, names = new Set();
global.Plotly = { newPlot: (e, traces, layout) => { drawn++; for (const t of traces) names.add(t.name); }, relayout: () => null };
eval(script);
known['search'].oninput({target: {value: 'loss'}});
known['log'].onchange({target: {checked: true}});
const shown = known['main'].children.filter(c => c.className === 'grid').flatMap(g => g.children).filter(c => c.style.display !== 'none').length;
console.log(JSON.stringify({ drawn, shown, names: [...names], title: known['h1'].textContent, found: known['findings'].children.length }));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's own script")
def test_the_script_of_the_page_draws_every_panel_and_filters_them(tmp_path):
    report = read_report(a_run(tmp_path / "run", [stream_line(s) for s in range(1, 30)]))
    write_page(report, tmp_path / "p.html")
    (tmp_path / "browser.js").write_text(_BROWSER)
    done = subprocess.run(
        ["node", "browser.js", "p.html"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["drawn"] == len(report.panels)
    assert told["shown"] == 1
    assert {"rna", "atac", "max", "min", "loss"} <= set(told["names"])
    assert told["title"] == "r  (streams)"
