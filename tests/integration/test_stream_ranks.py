"""Stream metrics over real ranks: gloo groups of 4 processes, with an empty pool, other keys, large counts, a lost rank.

Run as a script this file is the fork server of its ranks (rank_server.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.loader.data_stats import DataStatsCollector
from headrace.metrics import reduce_values

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import rank_server
from rank_server import SCENARIOS, Told, device_group
from stream_cells import write_streams

A = "stream_mixing/active"
EXHAUSTED = "stream_mixing/refill/exhaust_events"


ranks = rank_server.ranks


# ------------------------------------------------------------------------------------ what a rank does in a scenario


def dataset(root: str, **options: Any) -> Any:
    from headrace.loader.streams import StreamMixingDataset

    given = {"batch_size": 2, "num_streams_mixed": 2, "repeat": True, "prefetch_batches": 0, "global_ranks": 4}
    return StreamMixingDataset(root, cache=Path(root).parent / "cache", **(given | options))


def mixed(rank: int, world: int, root: str, mode: str) -> Any:
    """Six steps: what this rank drained, and what all of them came to."""
    data = dataset(root, batching_mode=mode)
    told = []
    for batch in itertools.islice(data, 6):
        local = data.drain_step_metrics()
        together = data.aggregate_step_metrics(local, world, "cpu", deadline=60.0)
        told.append({"local": local, "together": together, "rows": len(batch["row"]), "draw": batch["draw"]})
    return told


def large(rank: int, world: int, root: str, collectives: Any) -> Any:
    data = dataset(root, batching_mode="device_per_stream")
    local = {EXHAUSTED: 2**24 + 1 + rank, f"{A}/modalities/rna": 2**53 + 1, f"{A}/remaining_max": 2**40 + rank}
    return data.aggregate_step_metrics(local, world, "cpu", collectives=collectives, deadline=60.0)


def other_modality(rank: int, world: int, root: str, other: str) -> Any:
    data = dataset(other if rank == 2 else root)
    next(iter(data))
    return data.aggregate_step_metrics(data.drain_step_metrics(), world, "cpu", deadline=60.0)


def lost_stream_rank(rank: int, world: int, root: str, victim: int, how: int, deadline: float) -> Any:
    data = dataset(root, deadline=deadline)
    for step, _ in enumerate(data):
        if step == 3 and rank == victim:
            os.kill(os.getpid(), how)
        if step == 3:
            break
        data.aggregate_step_metrics(data.drain_step_metrics(), world, "cpu")
    with contextlib.suppress(HeadraceError):
        data.aggregate_step_metrics(data.drain_step_metrics(), world, "cpu")
    return data.aggregate_step_metrics({}, world, "cpu")


def on_the_groups_device(rank: int, world: int, root: str, device: str | None) -> Any:
    data, group = dataset(root, batching_mode="device_per_stream"), device_group(world)
    told = []
    for _ in itertools.islice(data, 3):
        local = data.drain_step_metrics()
        together = data.aggregate_step_metrics(local, world, device, group=group, deadline=60.0)
        told.append({"local": local, "together": together})
    return told


def behind(rank: int, world: int, root: str, mode: str, skipping: int) -> Any:
    """A loop over batches in which one rank leaves the aggregation of step 20 out."""
    data = dataset(root, batching_mode=mode)
    at = -1
    try:
        for at, _ in enumerate(itertools.islice(data, 60)):
            if not (rank == skipping and at == 20):
                data.aggregate_step_metrics(data.drain_step_metrics(), world, "cpu", deadline=60.0)
    except HeadraceError as error:
        return {"at": at, "message": str(error)}
    return {"at": at, "message": ""}


def statistics(rank: int, world: int) -> Any:
    stats = DataStatsCollector(["rna", "atac"])
    if rank != 1:
        stats.add("rna" if rank else "atac", tokens=2**24 + 1, rows=rank, padding=2**24 + 1)
    return stats.aggregate_distributed()


SCENARIOS |= {
    f.__name__: f for f in (mixed, large, other_modality, lost_stream_rank, on_the_groups_device, behind, statistics)
}

if __name__ == "__main__":
    import headrace.loader.streams  # noqa: F401  (once, for all ranks to come)

    rank_server.serve()
    sys.exit(0)


# ------------------------------------------------------------------------------------------------- what must be true


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with rank_server.serving(__file__) as process:
        yield process


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    return str(
        write_streams(tmp_path_factory.mktemp("ranks") / "cells", {"atac": [9, 14, 21, 5], "rna": [8, 30, 12, 16]})
    )


def test_device_per_stream_ranks_come_to_what_the_reductions_say(ranks: Callable[..., Told], root: str) -> None:
    told = ranks(4, "mixed", root=root, mode="device_per_stream")
    specs = dataset(root).metric_specs()
    for step in range(6):
        locals_ = [said["result"][step]["local"] for said in told]
        assert len({said["result"][step]["draw"] for said in told}) == 4, "each rank has a draw of its own"
        for said in told:
            together = said["result"][step]["together"]
            for key in locals_[0]:
                values = [local[key] for local in locals_]
                expected = min(values) if key.endswith("_min") else max(values) if key.endswith("_max") else sum(values)
                assert together[key] == expected, key
            assert together == reduce_values(specs, locals_)
            widest = together[f"{A}/steps_since_pick_max/worst_rank"]
            assert locals_[widest][f"{A}/steps_since_pick_max"] == together[f"{A}/steps_since_pick_max"]


def test_per_stream_ranks_share_every_draw_and_agree(ranks: Callable[..., Told], root: str) -> None:
    told = ranks(4, "mixed", root=root, mode="per_stream")
    for step in range(6):
        here = [said["result"][step] for said in told]
        assert len({h["draw"] for h in here}) == 1
        assert sum(h["rows"] for h in here) in range(1, 9)
        assert all(h["local"] == here[0]["local"] for h in here), "one plan, the same on all ranks"
        assert here[0]["together"][f"{A}/remaining_max"] == here[0]["local"][f"{A}/remaining_max"]
        for key in here[0]["local"]:
            assert here[0]["together"][key] == here[0]["local"][key], (
                "one draw is one pick, however many ranks share it"
            )


def test_a_rank_with_an_empty_pool_biases_nothing(ranks: Callable[..., Told], tmp_path: Path) -> None:
    root = write_streams(tmp_path / "few" / "cells", {"atac": [40], "rna": [60, 50]})
    told = ranks(4, "mixed", root=str(root), mode="device_per_stream")
    for step in range(6):
        here = [said["result"][step] for said in told]
        empty = [h for h in here if not h["local"]]
        assert len(empty) == 1, "three streams leave one of four lanes without any"
        assert empty[0]["rows"] == 0
        assert empty[0]["draw"] % 4 == here.index(empty[0])
        full = [h["local"] for h in here if h["local"]]
        for h in here:
            assert h["together"][f"{A}/remaining_min"] == min(f[f"{A}/remaining_min"] for f in full) > 0
            assert h["together"][f"{A}/remaining_fraction_max"] == max(f[f"{A}/remaining_fraction_max"] for f in full)
            assert h["together"][f"{A}/modalities/rna"] == 2


@pytest.mark.parametrize("collectives", ["all_gather", "all_reduce"])
def test_counts_above_what_a_float_holds_are_exact(ranks: Callable[..., Told], root: str, collectives: str) -> None:
    for said in ranks(4, "large", root=root, collectives=collectives):
        assert said["result"][EXHAUSTED] == sum(2**24 + 1 + r for r in range(4))
        assert said["result"][f"{A}/modalities/rna"] == 4 * (2**53 + 1)
        assert said["result"][f"{A}/remaining_max"] == 2**40 + 3
        assert f"{A}/remaining_min" not in said["result"], "nobody said anything: the identity is not a value"


def test_a_rank_with_another_key_set_is_refused_on_all_of_them(ranks: Callable[..., Told], root: str, tmp_path) -> None:
    other = write_streams(tmp_path / "o" / "cells", {"atac": [9], "protein": [9]})
    for said in ranks(4, "other_modality", root=root, other=str(other)):
        assert said["error"] == "ConfigError"
        assert f"'{A}/modalities/protein' (SUM) is declared on rank 2 only" in said["message"]
        assert f"'{A}/modalities/rna' (SUM) is declared on ranks 0, 1, 3 only" in said["message"]


@pytest.mark.parametrize("device", ["lazy", None])
def test_a_group_without_cpu_memory_aggregates_on_the_device_it_is_given(
    ranks: Callable[..., Told], root: str, device: str | None
) -> None:
    told = ranks(2, "on_the_groups_device", root=root, device=device)
    specs = dataset(root).metric_specs()
    for step in range(3):
        expected = reduce_values(specs, [said["result"][step]["local"] for said in told])
        assert all(said["result"][step]["together"] == expected for said in told)


def test_an_aggregation_on_a_device_that_the_group_does_not_reach_is_refused(
    ranks: Callable[..., Told], root: str
) -> None:
    for said in ranks(2, "on_the_groups_device", root=root, device="cpu"):
        assert said["error"] == "ConfigError"
        assert "CPU memory, which the process group" in said["message"]


@pytest.mark.parametrize("mode", ["per_stream", "device_per_stream"])
def test_a_rank_that_leaves_a_step_out_is_refused_with_both_steps(
    ranks: Callable[..., Told], root: str, mode: str
) -> None:
    for rank, said in enumerate(ranks(4, "behind", root=root, mode=mode, skipping=1)):
        assert said["result"]["at"] == (21 if rank == 1 else 20)
        assert "rank 1 at step 22, ranks 0, 2, 3 at step 21" in said["result"]["message"]


def test_a_killed_rank_is_named_within_seconds(ranks: Callable[..., Told], root: str) -> None:
    told = ranks(4, "lost_stream_rank", lost=2, within=5, root=root, victim=2, how=signal.SIGKILL, deadline=60.0)
    for said in told:
        assert said["error"] == "WorkerDied"
        assert "rank 2" in said["message"]


def test_a_stopped_rank_is_named_at_the_deadline(ranks: Callable[..., Told], root: str) -> None:
    for said in ranks(
        4, "lost_stream_rank", lost=1, stopped=True, within=7, root=root, victim=1, how=signal.SIGSTOP, deadline=2.0
    ):
        assert said["error"] == "DeadlineExceeded"
        assert "rank 1 did not come" in said["message"]
        assert said["seconds"] >= 2.0


def test_statistics_of_all_ranks_are_one_line(ranks: Callable[..., Told]) -> None:
    for said in ranks(4, "statistics"):
        line = said["result"]
        assert line["data/modality_total_tokens/rna"] == 2 * (2**24 + 1)
        assert line["data/tokens_seen/atac"] == 2**24 + 1
        assert line["data/token_share/rna"] == pytest.approx(2 / 3)
        assert line["data/padding_share"] == pytest.approx(0.5)
        assert line["data/modality_rows/rna"] == 5
