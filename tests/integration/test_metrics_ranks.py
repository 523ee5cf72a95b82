"""Metrics over real ranks: gloo groups of 2 and 4 processes, some of which are killed, stopped, late or wrong.

Run as a script this file is the fork server of its ranks (rank_server.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.metrics import Mean, Meter, MetricSpec, Reducer, Reduction, reduce_values

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import rank_server
from rank_server import SCENARIOS, Told, device_group

ranks = rank_server.ranks

SPECS = (
    MetricSpec("data/rows", Reduction.SUM, with_max=True),
    MetricSpec("data/seconds", Reduction.SUM, with_max=True),
    MetricSpec("depth/min", Reduction.MIN, with_max=True),
    MetricSpec("depth/max", Reduction.MAX, with_max=True),
    MetricSpec("never/said", Reduction.MIN),
    MetricSpec("loss", Reduction.MEAN, with_max=True),
    MetricSpec("picks/<modality>", Reduction.SUM),
    MetricSpec("mixed", Reduction.MAX),
    MetricSpec("grad/norm", Reduction.MAX),
)


def rows_of(rank: int) -> list[dict[str, Any]]:
    """What a rank says in four reductions: big counts, nothing at all, new family members, NaN."""
    return [
        {
            "data/rows": 2**24 + 1 + rank, "data/seconds": 0.5 * rank, "depth/min": 3 - rank, "depth/max": 2**53 + rank,
            "loss": Mean(3.0 * rank, rank), "mixed": 1 if rank % 2 else 0.5, "never/said": math.inf,
        },
        {} if rank == 1 else {"depth/min": 7 + rank, "loss": Mean(10.0, 4), "data/rows": 2**53 + 1},
        {f"picks/m{rank}": 2**60, "picks/all": 1, "depth/max": -5.0 - rank},
        {"grad/norm": math.nan if rank == 1 else 1.5, "depth/min": -0.25 * rank, "loss": 2},
    ]  # fmt: skip


# ------------------------------------------------------------------------------------ what a rank does in a scenario


def agree(rank: int, world: int, collectives: Any = "all_gather") -> Any:
    reducer = Reducer(SPECS, collectives=collectives, deadline=60.0)
    return [reducer.reduce(row) for row in rows_of(rank)]


def other_keys(rank: int, world: int) -> Any:
    extra = MetricSpec("only/here", Reduction.SUM) if rank == 1 else MetricSpec("mixed2", Reduction.MAX)
    return Reducer((*SPECS, extra), deadline=60.0).reduce({"data/rows": 1})


def other_reduction(rank: int, world: int) -> Any:
    return Reducer([MetricSpec("x", Reduction.SUM if rank else Reduction.MAX)], deadline=60.0).reduce({"x": 1})


def undeclared(rank: int, world: int) -> Any:
    return Reducer(SPECS, deadline=60.0).reduce({"data/row": 1} if rank == 1 else {"data/rows": 1})


def lost(rank: int, world: int, victim: int, how: int, deadline: float, collectives: Any = "all_gather") -> Any:
    reducer = Reducer(SPECS, deadline=deadline, collectives=collectives)
    reducer.reduce({"data/rows": 1})
    if rank == (victim + 1) % world:
        time.sleep(0.4)  # is late, so that the victim signs this roll, and must still be missing from the next
    reducer.reduce({"data/rows": 1})
    if rank == victim:
        os.kill(os.getpid(), how)
    with contextlib.suppress(HeadraceError):
        reducer.reduce({"data/rows": 1})
    return reducer.reduce({"data/rows": 1})  # a reducer that was given up says so again, at once


def late(rank: int, world: int) -> Any:
    meter = Meter()
    reducer = Reducer(SPECS, deadline=60.0, meter=meter)
    reducer.reduce({"data/rows": 1})
    if rank == 1:
        time.sleep(0.7)  # is late, past the point at which the others begin to ask who is missing
    result = [reducer.reduce({"data/rows": 1}), reducer.reduce({"data/rows": 2})]
    return [*result, meter.totals()["wait/metrics.reduce/seconds"]]


def half(rank: int, world: int) -> Any:
    import torch.distributed as dist

    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return Reducer(SPECS, group=groups[rank % 2], deadline=60.0).reduce({"depth/max": rank, "data/rows": rank})


def behind(rank: int, world: int, skipping: int) -> Any:
    """Ranks that reduce at every step; one of them leaves step 20 out."""
    reducer = Reducer(SPECS, deadline=60.0)
    at = -1
    try:
        for at in range(60):
            if not (rank == skipping and at == 20):
                reducer.reduce({"data/rows": 1}, step=at)
    except HeadraceError as error:
        return {"at": at, "message": str(error)}
    return {"at": at, "message": ""}


def stopped_while_another_leaves(rank: int, world: int) -> Any:
    """Rank 1 is stopped; rank 0 comes to its deadline and leaves, and with it the store, if it holds that."""
    reducer = Reducer(SPECS, deadline=1.5 if rank == 0 else 9.0)
    reducer.reduce({"data/rows": 1})
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return reducer.reduce({"data/rows": 1})


def killed_beside_a_stopped_one(rank: int, world: int) -> Any:
    """Rank 1 is stopped, and rank 0, which holds the store, is killed before it comes."""
    reducer = Reducer(SPECS, deadline=3.0)
    reducer.reduce({"data/rows": 1})
    if rank < 2:
        os.kill(os.getpid(), (signal.SIGKILL, signal.SIGSTOP)[rank])
    return reducer.reduce({"data/rows": 1})


def on_a_device(rank: int, world: int, collectives: Any, device: str | None = None) -> Any:
    reducer = Reducer(SPECS, device_group(world), device=device, collectives=collectives, deadline=60.0)
    return [reducer.reduce(row, step=i) for i, row in enumerate(rows_of(rank))]


SCENARIOS |= {
    f.__name__: f
    for f in (
        agree, other_keys, other_reduction, undeclared, lost, late, half, behind, stopped_while_another_leaves, killed_beside_a_stopped_one,
        on_a_device,
    )
}  # fmt: skip


if __name__ == "__main__":
    rank_server.serve()
    sys.exit(0)


# ------------------------------------------------------------------------------------------------- what must be true


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with rank_server.serving(__file__) as process:
        yield process


def same(a: Any, b: Any) -> bool:
    """Equal in value and type, NaN being equal to itself."""
    return repr(a) == repr(b)


@pytest.mark.parametrize(("world", "collectives"), [(4, "all_gather"), (4, "all_reduce")])
def test_ranks_agree_on_what_the_pure_reduction_says(ranks: Callable[..., Told], world: int, collectives: str) -> None:
    told = ranks(world, "agree", collectives=collectives)
    for turn in range(4):
        expected = reduce_values(SPECS, [rows_of(rank)[turn] for rank in range(world)])
        for said in told:
            assert same(dict(sorted(said["result"][turn].items())), dict(sorted(expected.items())))
    first, second, third, fourth = told[0]["result"]
    assert first["data/rows"] == sum(2**24 + 1 + r for r in range(world))  # float32 would lose the ones
    assert first["data/rows/worst_rank"] == world - 1
    assert first["depth/max"] == 2**53 + world - 1  # so would float64
    assert first["loss"] == pytest.approx(3.0)  # rank 0 said Mean(0, 0), which weighs nothing
    assert "never/said" not in first
    assert second["depth/min"] == 7  # rank 1 was empty: neither 0 nor +inf
    assert second["loss"] == pytest.approx(2.5)
    assert third["picks/all"] == world
    assert third["picks/m1"] == 2**60
    assert math.isnan(fourth["grad/norm"])


def test_ranks_that_declare_other_keys_are_refused_on_every_rank_by_key_and_rank(ranks: Callable[..., Told]) -> None:
    for said in ranks(4, "other_keys"):
        assert said["error"] == "ConfigError"
        assert "'only/here' (SUM) is declared on rank 1 only" in said["message"]
        assert "'mixed2' (MAX) is declared on ranks 0, 2, 3 only" in said["message"]
        assert "data/rows" not in said["message"]


def test_ranks_that_declare_another_reduction_are_refused(ranks: Callable[..., Told]) -> None:
    for said in ranks(2, "other_reduction"):
        assert said["error"] == "ConfigError"
        assert "'x' (MAX) is declared on rank 0 only; 'x' (SUM) is declared on rank 1 only" in said["message"]


def test_an_undeclared_key_on_one_rank_stops_all_of_them_with_its_sentence(ranks: Callable[..., Told]) -> None:
    for said in ranks(2, "undeclared", within=10):
        assert said["error"] == "ConfigError"
        assert said["message"].startswith("rank 1: metric 'data/row' was never declared")
        assert "did you mean data/rows?" in said["message"]


@pytest.mark.parametrize(("world", "victim", "collectives"), [(4, 2, "all_gather"), (2, 0, "all_reduce")])
def test_a_killed_rank_is_named_by_all_others_within_seconds(
    ranks: Callable[..., Told], world: int, victim: int, collectives: str
) -> None:
    how = {"victim": victim, "how": signal.SIGKILL, "deadline": 60.0, "collectives": collectives}
    told = ranks(world, "lost", lost=victim, within=4, **how)  # of which the victim's neighbour is late for 0.4
    for said in told:
        assert said["error"] == "WorkerDied"
        assert f"; rank {victim} did not come" in said["message"]


def test_a_stopped_rank_is_named_at_the_deadline(ranks: Callable[..., Told]) -> None:
    for said in ranks(4, "lost", lost=2, stopped=True, within=6, victim=2, how=signal.SIGSTOP, deadline=2.0):
        assert said["error"] == "DeadlineExceeded"
        assert "its deadline is 2 s: rank 2 did not come" in said["message"]
        assert said["seconds"] >= 2.0


def test_a_killed_holder_of_the_store_is_an_error_and_no_hang(ranks: Callable[..., Told]) -> None:
    for said in ranks(2, "lost", lost=0, tcp=True, within=6, victim=0, how=signal.SIGKILL, deadline=60.0):
        assert said["error"] == "WorkerDied"
        assert "rank 0" in said["message"]


def test_a_stopped_holder_of_the_store_is_an_error_and_no_hang(ranks: Callable[..., Told]) -> None:
    for said in ranks(2, "lost", lost=0, stopped=True, tcp=True, within=8, victim=0, how=signal.SIGSTOP, deadline=2.0):
        assert said["error"] == "DeadlineExceeded"
        assert "rank 0" in said["message"]


@pytest.mark.parametrize("tcp", [True, False])
def test_the_first_missing_rank_is_named_also_when_another_has_given_up_and_gone(
    ranks: Callable[..., Told], tcp: bool
) -> None:
    told = ranks(4, "stopped_while_another_leaves", lost=1, stopped=True, tcp=tcp, within=8)
    for said in told:
        assert "rank 1 did not come" in said["message"]
        assert "rank 0" not in said["message"].replace("on rank 0 after", "")
    assert {said["error"] for said in told} == {"DeadlineExceeded"}


def test_without_the_store_the_ranks_are_named_of_which_nothing_is_known(ranks: Callable[..., Told]) -> None:
    told = ranks(4, "killed_beside_a_stopped_one", lost=0, stopped=[1], tcp=True)
    for said, other in zip(told, (3, 2), strict=True):
        assert said["error"] in ("WorkerDied", "DeadlineExceeded"), "by whether it shares a connection with rank 0"
        assert f"stopped or gone; whether ranks 1, {other} came is not known" in said["message"]


def test_a_rank_that_is_a_step_off_is_refused_on_every_rank_with_both_steps(ranks: Callable[..., Told]) -> None:
    for rank, said in enumerate(ranks(4, "behind", skipping=1)):
        assert said["result"]["at"] == (21 if rank == 1 else 20)
        assert "different steps: rank 1 at step 21, ranks 0, 2, 3 at step 20" in said["result"]["message"]


@pytest.mark.parametrize(("collectives", "device"), [("all_gather", None), ("all_reduce", "lazy")])
def test_a_group_that_reaches_no_cpu_memory_is_reduced_on_its_device(
    ranks: Callable[..., Told], collectives: str, device: str | None
) -> None:
    told = ranks(2, "on_a_device", collectives=collectives, device=device)
    for turn in range(4):
        expected = reduce_values(SPECS, [rows_of(rank)[turn] for rank in range(2)])
        for said in told:
            assert same(dict(sorted(said["result"][turn].items())), dict(sorted(expected.items())))


def test_memory_that_a_group_does_not_reach_is_refused(ranks: Callable[..., Told]) -> None:
    for said in ranks(2, "on_a_device", collectives="all_gather", device="cpu"):
        assert said["error"] == "ConfigError"
        assert "CPU memory, which the process group (backend 'lazy:on_a_device') does not reach" in said["message"]


def test_a_late_rank_is_waited_for(ranks: Callable[..., Told]) -> None:
    told = ranks(2, "late")
    for said in told:
        assert [turn["data/rows"] for turn in said["result"][:2]] == [2, 4]
    assert told[0]["result"][2] > 0.5  # and the wait has a name


def test_a_subgroup_is_reduced_alone_and_names_global_ranks(ranks: Callable[..., Told]) -> None:
    told = ranks(4, "half")
    assert [said["result"]["data/rows"] for said in told] == [2, 4, 2, 4]
    assert [said["result"]["depth/max/worst_rank"] for said in told] == [2, 3, 2, 3]
