"""Recurrent runs: what the two ledger configs show on 1 and on 4 ranks, and that a run goes on to the bit, ledger included.

Ranks are forked by the server of test_metrics_ranks.py, through that of test_stream_runs.py.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.files import open_container
from headrace.jobs.config_layers import load_any_config
from headrace.jobs.streams_check import check_streams

HERE = Path(__file__).resolve()


def _borrowed(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"{path.stem}_for_ledger_runs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


streams = _borrowed(HERE.with_name("test_stream_runs.py"))
ranks, server, desk, on_four = streams.ranks, streams.server, streams.desk, streams.on_four
run, lines = streams.run, streams.lines
DIAGNOSTIC, HEALTHY = (str(streams.EXAMPLES / name) for name in ("diag_stale_false_evict.toml", "ledger_healthy.toml"))
FALSE = ("ledger/false_evictions/stale", "ledger/false_evictions/lru")


def newest(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    container = open_container(max(folder.glob("checkpoints/step-*.safetensors")))
    return {name: np.array(a) for name, a in container.arrays.items()}, container.meta


def same(a: Path, b: Path) -> bool:
    first, second = newest(a)[0], newest(b)[0]
    return set(first) == set(second) and all(first[n].tobytes() == second[n].tobytes() for n in first)


def healthy(found: list[dict[str, Any]]) -> None:
    assert len(found) == 200
    assert all(line[key] == 0 for line in found for key in FALSE)
    assert sum(line["ledger/evictions/stale"] for line in found) > 100, "or nothing was at stake"
    losses = [line["train/loss"] for line in found]
    assert sum(losses[-20:]) < 0.9 * sum(losses[:20])


def test_a_healthy_run_evicts_nothing_falsely_on_one_rank_and_learns(desk: Path, tmp_path: Path):
    run(HEALTHY, str(tmp_path / "one"))
    healthy(lines(tmp_path / "one"))


def test_a_healthy_run_evicts_nothing_falsely_on_four_ranks(on_four: Callable[..., Any], tmp_path: Path):
    on_four(HEALTHY, tmp_path / "four")
    found = lines(tmp_path / "four")
    healthy(found)
    assert all(f"{key}_max" in found[-1] for key in FALSE)


def test_the_diagnostic_shows_false_evictions_within_20_steps_and_protection_prevents_them(
    on_four: Callable[..., Any], desk: Path, tmp_path: Path
):
    run(DIAGNOSTIC, str(tmp_path / "one"), "--run.steps", "40")
    on_four(DIAGNOSTIC, tmp_path / "four", "--run.steps", "40")
    run(DIAGNOSTIC, str(tmp_path / "safe"), "--run.steps", "40", "--ledger.protect_active", "true")
    for name in ("one", "four"):
        found = lines(tmp_path / name)
        assert sum(line[FALSE[0]] for line in found[:20]) > 0
        assert sum(line["ledger/evictions/stale"] for line in found) > sum(line[FALSE[0]] for line in found)
        assert max(line["ledger/refault_distance_max"] for line in found) > 0
    one, four = (lines(tmp_path / name) for name in ("one", "four"))
    for key in ("ledger/evictions/stale", FALSE[0]):
        assert [line[key] for line in one] == [line[key] for line in four], (
            "what goes stale does not depend on the ranks"
        )
    assert all(line[key] == 0 for line in lines(tmp_path / "safe") for key in FALSE)


@pytest.mark.parametrize("world", [1, 4])
def test_a_run_that_was_stopped_goes_on_to_the_bit_with_its_ledger(
    on_four: Callable[..., Any], desk: Path, tmp_path: Path, world: int
):
    def go(folder: Path, *more: str) -> None:
        given = ("--run.steps", "30", "--run.checkpoint_every", "100", *more)
        on_four(DIAGNOSTIC, folder, *given) if world == 4 else run(DIAGNOSTIC, str(folder), *given)

    go(tmp_path / "straight")
    go(tmp_path / "halting", "--run.stop_after", "11")
    go(tmp_path / "halting", "--run.stop_after", "17")
    go(tmp_path / "halting", "--run.stop_after", "30")
    assert newest(tmp_path / "halting")[1]["trainer"]["step"] == 30
    assert len(newest(tmp_path / "halting")[0]["ledger/gid"]) > 0
    assert same(tmp_path / "straight", tmp_path / "halting")


def test_check_warns_of_the_diagnostic_and_is_silent_on_its_healthy_twin(desk: Path):
    told = check_streams(load_any_config(Path(DIAGNOSTIC), (), env={})).warnings
    assert any("evicts falsely: a ledger with stale_threshold = 5" in warning for warning in told)
    assert check_streams(load_any_config(Path(HEALTHY), (), env={})).warnings == ()
    safe = load_any_config(Path(DIAGNOSTIC), ("--ledger.protect_active", "true"), env={})
    assert not any("evicts falsely" in warning for warning in check_streams(safe).warnings)


def test_the_report_draws_the_ledger_and_tells_of_false_evictions(desk: Path, tmp_path: Path, capsys):
    from headrace.cli.report import report

    run(DIAGNOSTIC, str(tmp_path / "run"), "--run.steps", "30")
    report(tmp_path / "run", format="json")
    told = json.loads(capsys.readouterr().out)
    curves = {curve for panel in told["panels"] for curve in panel["curves"]}
    assert {*FALSE, "ledger/evictions/stale", "ledger/occupancy", "ledger/refault_distance_max"} <= curves
    assert any("evicted while their files were still read" in f["sentence"] for f in told["findings"])
