"""The ledger over 1 and 4 real gloo ranks: rows go to their owners and back, and sums find the worst rank.

Run as a script this file is the fork server of its ranks (rank_server.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.ledger import LEDGER_SUM_KEYS, Ledger, LedgerSettings, LedgerShard, owner_of
from headrace.metrics import reduce_loss_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import rank_server

ranks = rank_server.ranks
WIDTH, STEPS = 3, 12


def rows_of(step: int, rank: int, world: int) -> np.ndarray:
    """What a rank brings at a step: its part of rows that are the same on any number of ranks; some have none."""
    gids = (np.arange(24) * 37 + step * 21) % 61  # a group comes back after three steps, and is stale after two
    return np.array_split(gids[: 24 if step % 3 else 2], world)[rank]


def states_of(gids: np.ndarray, step: int) -> torch.Tensor:
    return torch.from_numpy(gids * 100 + step).float()[:, None] + torch.arange(WIDTH) / 4


def played(
    rank: int, world: int, dtype: str = "float32", start: int = 0, load: Any = None, apart: bool = False
) -> dict[str, Any]:
    """Store and look up for some steps; what was found on the way, and the whole ledger in the end (rank 0)."""
    own = dist.new_group(backend="gloo") if apart else None
    ledger = Ledger(
        LedgerSettings(width=WIDTH, mode="periodic_stale", stale_threshold=1, dtype=dtype),
        device_group=own,
        deadline=60.0,  # ty: ignore
    )
    if load is not None:
        saved = np.load(load)
        ledger.load_state_arrays([(dict(saved), {"kind": "headrace.ledger", "version": 1, "step": start - 1, "width": WIDTH, "dtype": dtype})])  # fmt: skip
    seen, sums = [], []
    for step in range(start, start + STEPS):
        gids = rows_of(step, rank, world)
        route = ledger.route(gids, 0, 0)
        states, found = ledger.lookup(route)
        seen.append([states.float()[:, 0].tolist(), found.tolist()])
        ledger.store(route, states_of(gids, step), step=step)
        ledger.end_step(step)
        sums.append(reduce_loss_metrics(ledger.drain_metrics(), sum_keys=LEDGER_SUM_KEYS))
    after = ledger.lookup(rows_of(start + STEPS - 1, rank, world))[1].tolist()
    state = ledger.gather_state()
    told = {"seen": seen, "sums": sums, "after": after, "held": len(ledger)}
    if state is not None:
        arrays, _, meta = state
        order = np.lexsort([arrays["ledger/gid"], arrays["ledger/last"]])
        told["whole"] = {name: arrays[name][order].tolist() for name in arrays if name.startswith("ledger/")}
        told["step"] = meta["step"]
        if load is None and os.environ.get("SAVE_LEDGER"):
            np.savez(os.environ["SAVE_LEDGER"], **arrays)
    return told


def sums(rank: int, world: int) -> Any:
    values = {"loss": 1.0 + rank, "weighted": 10.0 * rank, "ledger/evictions/lru": rank * rank, "only/here": 5}
    if rank:
        del values["only/here"]
    first = reduce_loss_metrics(values, counts={"weighted": rank}, sum_keys={"ledger/evictions/lru", "only/here"})
    again = reduce_loss_metrics({"late-key/x": rank} if rank == 2 else {}, sum_keys={"late-key/x"})
    return [first, again]


def listed(rank: int, world: int) -> dict[str, list[list[int]]]:
    """What FR15 lists, each as the counts of its steps over all ranks. Every step is brought by another rank; the last of four owns all."""
    a, b, c = [g for g in range(200) if owner_of(np.array([g]), 4)[0] == 3][:3]

    def counts(
        steps: list[list[int]], epochs: list[int] | None = None, wipe_before: int = -1, **chosen: Any
    ) -> list[list[int]]:
        ledger, told = Ledger(LedgerSettings(width=1, **chosen), deadline=60.0), []
        for step, gids in enumerate(steps):
            if step == wipe_before:
                ledger.wipe()
            here = np.array(gids if rank == step % world else [], dtype=np.int64)
            ledger.store(here, torch.ones(len(here), 1), step=step, streams=0, epochs=epochs[step] if epochs else 0)
            ledger.end_step(step)
            said = reduce_loss_metrics(ledger.drain_metrics(), sum_keys=LEDGER_SUM_KEYS)
            told.append(
                [
                    said[f"ledger/{what}/{mode}"]
                    for what in ("evictions", "false_evictions")
                    for mode in ("lru", "stale")
                ]
            )
        return told

    lru = {"mode": "lru", "capacity": 2}
    return {
        "never comes back": counts([[a], [b], [c], [b], [c]], **lru),
        "comes back": counts([[a], [b], [c], [a], [a]], **lru),
        "stale, comes back": counts([[a], [], [], [a], [a]], mode="periodic_stale", stale_threshold=1),
        "wiped before it comes back": counts([[a], [b], [c], [a]], wipe_before=3, **lru),
        "comes back in the next epoch": counts(
            [[a], [], [], [a]], epochs=[0, 0, 0, 1], mode="periodic_stale", stale_threshold=1
        ),
    }


def not_the_owner(rank: int, world: int) -> Any:
    ledger = Ledger(LedgerSettings(width=1), deadline=60.0)
    gid = next(g for g in range(100) if owner_of(np.array([g]), world)[0] == (rank + 1) % world)
    try:
        LedgerShard.store(ledger, np.array([gid]), torch.zeros(1, 1), step=0)
    finally:
        ledger.route(np.arange(8))  # nobody leaves while another is still joining


def bereft(rank: int, world: int) -> Any:
    ledger = Ledger(LedgerSettings(width=1), deadline=30.0)
    ledger.route(np.arange(8))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    ledger.route(np.arange(8))


rank_server.SCENARIOS |= {f.__name__: f for f in (played, sums, listed, not_the_owner, bereft)}

if __name__ == "__main__":
    Ledger(LedgerSettings(width=1)).lookup(np.arange(2))  # compiled once, for all ranks to come
    rank_server.serve()
    sys.exit(0)


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with rank_server.serving(__file__) as process:
        yield process


@pytest.mark.parametrize(("dtype", "apart"), [("float32", False), ("bfloat16", True)])
def test_four_ranks_find_what_one_rank_finds_and_hold_it_together(ranks: Callable[..., Any], dtype: str, apart: bool):
    # Rows in a group of their own is how they travel where the arena is on a device.
    told = [t["result"] for t in ranks(4, "played", dtype=dtype, apart=apart)]
    alone = played(0, 1, dtype)
    for step in range(STEPS):
        states, found = zip(*(t["seen"][step] for t in told), strict=True)
        assert [list(chain(*states)), list(chain(*found))] == alone["seen"][step]
        for t in told:
            assert t["sums"][step] == told[0]["sums"][step]
        for key in LEDGER_SUM_KEYS:
            assert told[0]["sums"][step][key] == alone["sums"][step][key], key
    assert told[0]["whole"] == alone["whole"]
    assert told[0]["step"] == STEPS - 1
    assert all(all(t["after"]) for t in told)
    assert sum(t["held"] for t in told) == alone["held"]
    assert sum(line["ledger/evictions/stale"] for line in alone["sums"]) > 0
    assert sum(line["ledger/false_evictions/stale"] for line in alone["sums"]) > 0, "or nothing was compared"


def test_a_ledger_of_one_rank_goes_on_on_four(ranks: Callable[..., Any], tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SAVE_LEDGER", str(tmp_path / "ledger.npz"))
    played(0, 1)
    alone = played(0, 1, start=STEPS, load=str(tmp_path / "ledger.npz"))
    told = [t["result"] for t in ranks(4, "played", start=STEPS, load=str(tmp_path / "ledger.npz"))]
    assert told[0]["whole"] == alone["whole"]
    for step in range(STEPS):
        for key in ("ledger/evictions/stale", "ledger/false_evictions/stale"):
            assert told[0]["sums"][step][key] == alone["sums"][step][key]


def test_false_evictions_are_told_from_true_ones_on_one_and_on_four_ranks(ranks: Callable[..., Any]):
    nothing = [0, 0, 0, 0]
    expected = {  # evictions by lru, by sweeps; of these false ones
        "never comes back": [nothing, nothing, [1, 0, 0, 0], nothing, nothing],
        "comes back": [nothing, nothing, [1, 0, 0, 0], [1, 0, 1, 0], nothing],
        "stale, comes back": [nothing, nothing, [0, 1, 0, 0], [0, 0, 0, 1], nothing],
        "wiped before it comes back": [nothing, nothing, [1, 0, 0, 0], nothing],
        "comes back in the next epoch": [nothing, nothing, [0, 1, 0, 0], nothing],
    }
    assert listed(0, 1) == expected
    for told in ranks(4, "listed"):
        assert told["result"] == expected


def test_sum_keys_give_the_total_and_the_worst_rank_and_other_keys_their_mean(ranks: Callable[..., Any]):
    for told in ranks(4, "sums"):
        assert told["result"] == [
            {
                "loss": 2.5, "weighted": (10 + 40 + 90) / 6, "ledger/evictions/lru": 0 + 1 + 4 + 9, "ledger/evictions/lru_max": 9,
                "only/here": 5, "only/here_max": 5,
            },
            {"late-key/x": 2, "late-key/x_max": 2},
        ]  # fmt: skip


def test_a_rank_that_does_not_own_a_group_cannot_store_it(ranks: Callable[..., Any]):
    for rank, told in enumerate(ranks(4, "not_the_owner")):
        assert told["error"] == "HeadraceError"
        assert f"belongs to rank {(rank + 1) % 4} of 4 and was stored on rank {rank}" in told["message"]


def test_a_lost_rank_ends_the_exchange_on_the_others_with_its_name(ranks: Callable[..., Any]):
    for rank, told in enumerate(ranks(4, "bereft", lost=2)):
        if rank != 2:
            assert told["error"] == "WorkerDied", told
            assert "ledger exchange 2 over 4 ranks" in told["message"]
            assert "rank 2 did not come" in told["message"]
