"""Recurrent runs: what the two ledger configs show on 1 and on 4 ranks, and that a run goes on to the bit, ledger included.

Run as a script this file is the fork server of its ranks (rank_server.py), with the compiled loops loaded once.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.files import open_container
from headrace.ledger import Ledger, LedgerSettings
from headrace.runs.config.loading import load_any_config
from headrace.runs.streams_check import check_streams

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import rank_server
import stream_runs
from stream_runs import CONFIGS, lines, run

ranks, desk, on_four = rank_server.ranks, stream_runs.desk, stream_runs.on_four
DIAGNOSTIC, HEALTHY = (str(CONFIGS / name) for name in ("diag_stale_false_evict.toml", "ledger_healthy.toml"))
FALSE = ("ledger/false_evictions/stale", "ledger/false_evictions/lru")
EVICTED = ("ledger/evictions/stale", "ledger/evictions/lru")
FORGOTTEN = ("ledger/evictions/stale", *FALSE)


def newest(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    container = open_container(max(folder.glob("checkpoints/step-*.safetensors")))
    return {name: np.array(a) for name, a in container.arrays.items()}, container.meta


def same(a: Path, b: Path) -> bool:
    first, second = newest(a)[0], newest(b)[0]
    return set(first) == set(second) and all(first[n].tobytes() == second[n].tobytes() for n in first)


def reloaded(rank: int, world: int, folder: str, width: int) -> Any:
    """Whether the ledger of a run's checkpoint, loaded on these ranks and gathered, is what the file holds; how much of it is here."""
    ledger = Ledger(LedgerSettings(width=width, mode="periodic_stale", stale_threshold=5), deadline=60.0)
    arrays, meta = newest(Path(folder))
    ledger.load_state_arrays([(arrays, meta["ledger"])])
    told = {"held": len(ledger), "ghosts": ledger.ghosts}
    state = ledger.gather_state()
    if state is not None:
        told |= {"meta": state[2] == meta["ledger"], "equal": by_group(state[0]) == by_group(arrays)}
    return told


def by_group(arrays: dict[str, np.ndarray], *, states: bool = True) -> dict[str, bytes]:
    """What is kept of each group and each ghost, in the order of gids."""
    kept = [name for name in arrays if name.startswith(("ledger/", "ghosts/")) and (states or name != "ledger/state")]
    order = {part: np.argsort(arrays[f"{part}/gid"], kind="stable") for part in ("ledger", "ghosts")}
    return {name: arrays[name][order[name.partition("/")[0]]].tobytes() for name in sorted(kept)}


rank_server.SCENARIOS |= {"reloaded": reloaded}

if __name__ == "__main__":
    import headrace.runs.streams
    import headrace.train.recurrent  # noqa: F401  (once, for all ranks to come)

    Ledger(LedgerSettings(width=1)).lookup(np.arange(2))
    rank_server.serve()
    sys.exit(0)


@pytest.fixture(scope="module")
def server(desk) -> Iterator[subprocess.Popen[str]]:
    with rank_server.serving(__file__, desk) as process:
        yield process


STEPS, HALT = 40, 11
SMALL = ("--train.dim", "16", "--train.depth", "0")
"""A model that costs little: what is evicted does not depend on it."""


@pytest.fixture
def go(on_four: Callable[..., Any], desk: Path, tmp_path: Path) -> Callable[..., None]:
    def diagnostic(folder: Path, world: int, *more: str) -> None:
        """Some steps of the diagnostic, or on with them."""
        (tmp_path / "store").unlink(missing_ok=True)  # of the ranks before, whose group has ended
        given = ("--run.steps", str(STEPS), "--run.checkpoint_every", "100", *SMALL, *more)
        on_four(DIAGNOSTIC, folder, *given) if world == 4 else run(DIAGNOSTIC, str(folder), *given)

    return diagnostic


@pytest.fixture
def straight(go: Callable[..., None], desk: Path) -> Callable[[int], Path]:
    def made_once(world: int) -> Path:
        """The folder of a run of the diagnostic that nobody stopped."""
        folder = desk / f"straight-{world}"
        if not folder.exists():
            go(folder, world)
        return folder

    return made_once


def halted(go: Callable[..., None], desk: Path, into: Path, world: int) -> Path:
    """A copy of a run that was stopped at step 11."""
    folder = desk / f"halted-{world}"
    if not folder.exists():
        go(folder, world, "--run.stop_after", str(HALT))
    return Path(shutil.copytree(folder, into))


def healthy(found: list[dict[str, Any]]) -> None:
    assert len(found) == 200
    assert all(line[key] == 0 for line in found for key in FALSE)
    assert sum(line["ledger/evictions/stale"] for line in found) > 100, "or nothing was at stake"
    assert all(f"{key}_max" in line for line in found for key in (*FALSE, *EVICTED)), "on any number of ranks"


def test_a_healthy_run_evicts_nothing_falsely_on_one_rank_and_learns(desk: Path, tmp_path: Path):
    run(HEALTHY, str(tmp_path / "one"))
    found = lines(tmp_path / "one")
    healthy(found)
    losses = [line["train/loss"] for line in found]
    assert sum(losses[-20:]) < 0.9 * sum(losses[:20])


def test_a_healthy_run_evicts_nothing_falsely_on_four_ranks(on_four: Callable[..., Any], tmp_path: Path):
    on_four(HEALTHY, tmp_path / "four", *SMALL)
    healthy(lines(tmp_path / "four"))


def test_the_diagnostic_shows_false_evictions_within_20_steps_and_protection_prevents_them(
    straight: Callable[[int], Path], desk: Path, tmp_path: Path
):
    one, four = (lines(straight(world)) for world in (1, 4))
    for found in (one, four):
        assert sum(line[FALSE[0]] for line in found[:20]) > 0
        assert sum(line["ledger/evictions/stale"] for line in found) > sum(line[FALSE[0]] for line in found)
        assert max(line["ledger/refault_distance_max"] for line in found) > 0
    for key in FORGOTTEN:
        assert [line[key] for line in one] == [line[key] for line in four], "what goes stale does not depend on ranks"
    run(DIAGNOSTIC, str(tmp_path / "safe"), "--run.steps", "40", *SMALL, "--ledger.protect_active", "true")
    assert all(line[key] == 0 for line in lines(tmp_path / "safe") for key in FALSE)


@pytest.mark.parametrize("world", [1, 4])
def test_a_run_that_was_stopped_goes_on_to_the_bit_with_its_ledger(
    go: Callable[..., None], straight: Callable[[int], Path], desk: Path, tmp_path: Path, world: int
):
    folder = halted(go, desk, tmp_path / "run", world)
    if world == 1:  # and once more on the way
        go(folder, world, "--run.stop_after", "17")
    go(folder, world, "--run.stop_after", str(STEPS))
    assert newest(folder)[1]["trainer"]["step"] == STEPS
    told = json.loads((folder / "summary.json").read_text())["false_evictions"]
    assert told == sum(line[key] for line in lines(straight(world)) for key in FALSE) > 0, "of all its lives"
    assert len(newest(folder)[0]["ledger/gid"]) > 0
    assert same(straight(world), folder)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1)])
def test_a_run_goes_on_on_other_ranks_with_the_same_groups_and_forgets_the_same_ones(
    go: Callable[..., None], straight: Callable[[int], Path], ranks: Callable[..., Any], desk: Path, tmp_path: Path, before: int, after: int
):  # fmt: skip
    folder = halted(go, desk, tmp_path / "run", before)
    saved, _ = newest(folder)
    (tmp_path / "store").unlink(missing_ok=True)
    told = (
        [t["result"] for t in ranks(4, "reloaded", folder=str(folder), width=16)] if after == 4 else [reloaded(0, 1, str(folder), 16)]
    )  # fmt: skip
    assert told[0]["meta"]
    assert told[0]["equal"], "the groups of the file, state by state"
    assert sum(t["held"] for t in told) == len(saved["ledger/gid"]) > 0
    assert sum(t["ghosts"] for t in told) == len(saved["ghosts/gid"]) > 0
    assert len(told) == after
    if after > 1:
        assert all(0 < t["held"] < len(saved["ledger/gid"]) for t in told), "every rank holds some of them"
    go(folder, after, "--run.stop_after", str(STEPS))
    expected = {line["step"]: line for line in lines(straight(1))}
    later = [line for line in lines(folder) if line["step"] > HALT]
    assert [line["step"] for line in later] == list(range(HALT + 1, STEPS + 1))
    for line in later:
        assert [line[key] for key in FORGOTTEN] == [expected[line["step"]][key] for key in FORGOTTEN], line["step"]
    assert sum(line[FALSE[0]] for line in later) > 0
    # The states themselves differ: rows of a group that are shared out over ranks are read from the same state.
    assert by_group(newest(folder)[0], states=False) == by_group(newest(straight(1))[0], states=False)


ROLLING = (
    "--streams.batching_mode", "device_per_stream", "--streams.lanes", "4", "--streams.batch_size", "256", "--run.steps", "26",
    "--run.checkpoint_every", "100", *SMALL,
)  # fmt: skip


def test_rolling_lanes_come_to_a_second_epoch_each_at_its_own_time_without_a_false_eviction(desk: Path, tmp_path: Path):
    run(HEALTHY, str(tmp_path / "run"), *ROLLING, "--ledger.stale_threshold", "12")
    found = lines(tmp_path / "run")
    assert max(line["ledger/evictions/stale"] for line in found) > 0
    assert newest(tmp_path / "run")[0]["ledger/epoch"].max() > 0, "or no group came back by right"
    assert all(line[key] == 0 for line in found for key in FALSE)


def test_every_rank_knows_what_all_lanes_still_read_and_protects_it(
    on_four: Callable[..., Any], desk: Path, tmp_path: Path
):
    hasty = (*ROLLING, "--streams.pick_mode", "weighted", "--ledger.stale_threshold", "1")
    safe = (*hasty, "--ledger.protect_active", "true")
    run(HEALTHY, str(tmp_path / "hasty"), *hasty, "--run.stop_after", "10")
    assert sum(line[FALSE[0]] for line in lines(tmp_path / "hasty")) > 0
    run(HEALTHY, str(tmp_path / "one"), *safe, "--run.stop_after", "9")
    run("", str(tmp_path / "one"), "--run.stop_after", "26")
    on_four(HEALTHY, tmp_path / "four", *safe)
    one, four = (lines(tmp_path / name) for name in ("one", "four"))
    assert [[line[key] for key in FORGOTTEN] for line in one] == [[line[key] for key in FORGOTTEN] for line in four]
    assert sum(line["ledger/evictions/stale"] for line in four) > 0
    assert all(line[key] == 0 for line in four for key in FALSE)
    assert by_group(newest(tmp_path / "one")[0], states=False) == by_group(newest(tmp_path / "four")[0], states=False)


def test_check_warns_of_the_diagnostic_and_is_silent_on_its_healthy_twin(desk: Path):
    told = check_streams(load_any_config(Path(DIAGNOSTIC), (), env={})).warnings
    assert any("evicts falsely: a ledger with stale_threshold = 5" in warning for warning in told)
    assert check_streams(load_any_config(Path(HEALTHY), (), env={})).warnings == []
    safe = load_any_config(Path(DIAGNOSTIC), ("--ledger.protect_active", "true"), env={})
    assert not any("evicts falsely" in warning for warning in check_streams(safe).warnings)


def test_the_report_draws_the_ledger_and_tells_of_false_evictions(straight: Callable[[int], Path], capsys):
    from headrace.cli.report import report
    from headrace.cli.terminal import Output

    report(straight(1), output=Output(format="json"))
    told = json.loads(capsys.readouterr().out)
    curves = {curve for panel in told["panels"] for curve in panel["curves"]}
    moving = {*FALSE, "ledger/evictions/stale", "ledger/occupancy", "ledger/refault_distance_max"}
    assert moving - {"ledger/false_evictions/lru"} <= curves, "a curve that is always 0 is not drawn"
    assert any("evicted while their files were still read" in f["sentence"] for f in told["findings"])
