"""The peer benchmark's own arithmetic: what is read from its tables must not depend on the order or luck of its rows.

No contestant runs here; benchmarks/bench_text.py does that.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest


def module(repository: Path, name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, repository / path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded  # dataclasses look their module up
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def bench(repository: Path) -> Iterator[ModuleType]:
    yield module(repository, "bench_text_under_test", "benchmarks/bench_text.py")
    del sys.modules["bench_text_under_test"]


@pytest.fixture(scope="module")
def measure(repository: Path) -> Iterator[ModuleType]:
    yield module(repository, "measure_under_test", "benchmarks/peers/measure.py")
    del sys.modules["measure_under_test"]


def row(
    bench: ModuleType, name: str, role: str, speeds: tuple[float, ...], table: str = "online", **figures: Any
) -> Any:
    group = {"ours": "headrace", "ids": "headrace", "default": "headrace", "limit": "limit"}.get(role, "hf")
    who = bench.Contestant(name=name, table=table, group=group, script="x", role=role)
    return bench.Row(who=who, speeds=speeds, **figures)


def test_a_ratio_is_taken_within_a_round_so_that_a_slow_minute_cancels_out(bench):
    rows = [row(bench, "headrace", "ours", (20e6, 5e6, 40e6)), row(bench, "peer", "peer", (2e6, 0.5e6, 4e6))]
    (found,) = bench.ratios(rows)
    assert found.values == pytest.approx((10, 10, 10))
    assert str(found) == "headrace / best hand-tuned peer (peer): 10 (of 3: 10–10)"


def test_ratios_are_against_the_fastest_of_each_kind(bench):
    rows = [
        row(bench, "headrace", "ours", (30e6,)),
        row(bench, "slow", "peer", (1e6,)),
        row(bench, "fast", "peer", (3e6,)),
        row(bench, "docs", "docs", (0.2e6,)),
        row(bench, "encoder", "limit", (40e6,)),
    ]
    found = {r.over: statistics.median(r.values) for r in bench.ratios(rows)}
    assert found == pytest.approx(
        {
            "best hand-tuned peer (fast)": 10,
            "best as HF documents it (docs)": 150,
            "fast encoder alone (encoder)": 0.75,
        }
    )


def test_the_same_encoder_table_is_held_against_the_encoder_measured_in_the_first(bench):
    rows = [row(bench, "encoder", "limit", (40e6,)), row(bench, "headrace", "ours", (30e6,), table="same encoder")]
    assert [(r.table, r.values) for r in bench.ratios(rows)] == [("same encoder", (0.75,))]


def test_a_default_install_is_not_held_against_an_encoder_that_it_does_not_have(bench):
    rows = [row(bench, "default", "default", (1e6,)), row(bench, "encoder", "limit", (40e6,))]
    assert bench.ratios(rows) == []


def test_a_row_without_a_state_says_so_and_one_that_resumes_elsewhere_is_called_inexact(bench):
    text = bench.table(
        [
            row(bench, "none", "peer", (1e6,)),
            row(bench, "exact", "peer", (1e6,), restore=0.25, exact=True, position=0.5, state_bytes=1500),
            row(bench, "wrong", "peer", (1e6,), restore=2.0, exact=False, position=0.2, state_bytes=999),
        ]
    )
    head, none, exact, wrong = text.splitlines()
    assert none.split()[1:] == ["1.00", "1.00–1.00", *"–" * 10]
    assert "2.0 s at 20% (not exact)" in wrong
    ends = [head.index("restore") + len("restore"), exact.index("250 ms") + 6, wrong.index("(not exact)") + 11]
    assert len(set(ends)) == 1, "a column's cells end where its head ends"


def test_an_absent_environment_is_a_reason_and_not_a_failure(bench, tmp_path):
    corpus = bench.Corpus(folder=tmp_path, tokenizer=tmp_path, documents=1, bytes=1, tokens=1, digest="0")
    arena = bench.Arena(corpus=corpus, envs=tmp_path / "envs", work=tmp_path, seconds=1)
    everyone = [w for w in bench.contestants() if w.env == "grain" and w.table == "online"]
    said: list[str] = []
    answers, skipped = bench.run_all(arena, everyone, rounds=2, say=said.append)
    assert answers == {}
    assert set(skipped) == {w.key for w in everyone}
    assert all("--make-envs" in why for why in skipped.values())
    assert len(said) == len(everyone), "a contestant that is absent is asked once"


def test_every_contestant_has_a_script_a_known_environment_and_a_name_of_its_own(bench, repository):
    everyone = bench.contestants()
    assert len({w.key for w in everyone}) == len(everyone)
    assert all((repository / "benchmarks/peers" / f"{w.script}.py").exists() for w in everyone)
    assert {w.group for w in everyone} == {*bench.ENVIRONMENTS, "headrace", "limit", "by-hand", "memmap"}


def test_no_peer_script_imports_headrace(repository):
    for path in (repository / "benchmarks/peers").glob("*.py"):
        if path.name != "peer_headrace.py":
            assert "import headrace" not in path.read_text(), path.name


def test_documents_are_whole_lines_never_twice_and_the_same_on_every_run(bench):
    texts = ["".join(f"line {i} of {n}\n" for i in range(800)) for n in (1, 2, 1)]
    texts += ["short\n", "short\n"]
    found = list(bench.cut_documents(texts))
    assert found == list(bench.cut_documents(texts))
    assert len(set(found)) == len(found) > 4
    assert all(document.endswith("\n") for document in found)
    assert set("".join(texts).splitlines()) == set("".join(found).splitlines())


def test_the_json_holds_every_row_ratio_and_reason(bench):
    rows = [row(bench, "headrace", "ours", (2e6, 4e6)), row(bench, "peer", "peer", (1e6, 1e6), versions={"grain": "1"})]
    body = json.loads(json.dumps(bench.as_json(rows, {"online: x": "absent"}, {"CPU": "some"})))
    assert [r["speed"] for r in body["rows"]] == [3e6, 1e6]
    assert body["ratios"][0]["values"] == [2.0, 4.0]
    assert body["skipped"] == {"online: x": "absent"}
    assert "grain 1" in bench.report(rows, {"online: x": "absent"}, {"CPU": "some"})


@pytest.mark.parametrize("bursts", [4, 5, 9])
@pytest.mark.parametrize("phase", [0, 7, 39])
def test_a_loader_that_delivers_in_bursts_gets_the_speed_of_its_bursts(measure, bursts, phase):
    """40 batches at once every 2 s are 20 a second, wherever in a burst the clock was started."""
    ends = [2.0 * (n // 40) + 1e-4 * (n % 40) for n in range(phase, 40 * (bursts + 1))]
    rate, uneven = measure.steady_rate(ends, 1.0)
    assert rate == pytest.approx(20, rel=0.2)
    assert uneven == pytest.approx(0.5 / bursts, rel=0.35)


def test_a_single_burst_is_called_too_uneven_to_tell(measure):
    _, uneven = measure.steady_rate([0.0, *(10 + n * 1e-4 for n in range(40))], 1.0)
    assert uneven > measure.UNEVEN


def test_a_smooth_loader_gets_its_mean_speed(measure):
    ends = np.cumsum(np.random.default_rng(0).uniform(0.5, 1.5, 500))
    mean = 16384 * (len(ends) - 1) / (ends[-1] - ends[0])
    rate, uneven = measure.steady_rate(ends, 16384)
    assert rate == pytest.approx(mean, rel=0.02)
    assert uneven < measure.UNEVEN / 4


def test_processor_time_counts_the_living_children_too(measure):
    """A child that has worked for .2 s of processor time is in the sum before anybody waits for it."""
    code = "import time; t = time.process_time()\nwhile time.process_time() - t < .2: pass\nprint(flush=True); input()"
    before = measure.cpu_seconds()
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    assert measure.cpu_seconds() - before >= 0.15
    child.communicate(b"\n")
