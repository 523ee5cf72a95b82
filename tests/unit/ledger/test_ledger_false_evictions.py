"""False evictions: counted once, for the right mode, in the right epoch, within bounds; and what a ledger refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError, CursorMismatch, DataError, HeadraceError
from headrace.ledger import LedgerSettings, LedgerShard, owner_of
from headrace.metrics import reduce_loss_metrics
from headrace.order.keys import mix64_array

FALSE_LRU, FALSE_STALE = "ledger/false_evictions/lru", "ledger/false_evictions/stale"


def put(shard: LedgerShard, step: int, *gids: int, stream: int = 0, epoch: int = 0) -> None:
    states = torch.full((len(gids), shard.settings.width), float(step))
    shard.store(np.array(gids, dtype=np.int64), states, step=step, streams=stream, epochs=epoch)


def lru(capacity: int, **more: object) -> LedgerShard:
    return LedgerShard(LedgerSettings(width=2, mode="lru", capacity=capacity, **more))  # ty: ignore


def stale(threshold: int, **more: object) -> LedgerShard:
    return LedgerShard(LedgerSettings(width=2, mode="periodic_stale", stale_threshold=threshold, **more))  # ty: ignore


def test_an_lru_eviction_of_a_group_that_never_returns_is_not_false():
    shard = lru(2)
    for step in range(6):
        put(shard, step, step)
    drained = shard.drain_metrics()
    assert (drained["ledger/evictions/lru"], drained[FALSE_LRU], shard.ghosts) == (4, 0, 4)


def test_an_lru_eviction_of_a_group_that_returns_is_counted_once():
    shard = lru(2)
    for step, gid in enumerate((1, 2, 3)):
        put(shard, step, gid)
    assert shard.drain_metrics()["ledger/evictions/lru"] == 1
    put(shard, 3, 1)
    drained = shard.drain_metrics()
    assert drained[FALSE_LRU] == 1
    assert drained["ledger/refault_distance_max"] == 1
    assert shard.ghosts == 1, "group 1 is no ghost any more, group 2 has become one"
    put(shard, 4, 1)
    assert shard.drain_metrics()[FALSE_LRU] == 0


def test_a_stale_eviction_of_a_group_that_returns_counts_for_stale():
    shard = stale(2)
    put(shard, 0, 7)
    for step in range(5):
        shard.end_step(step)
    put(shard, 5, 7)
    drained = shard.drain_metrics()
    assert (drained["ledger/evictions/stale"], drained[FALSE_STALE], drained[FALSE_LRU]) == (1, 1, 0)
    assert drained["ledger/refault_distance_max"] == 2


def test_a_lookup_neither_counts_a_false_eviction_nor_makes_a_group_younger():
    shard = lru(2)
    put(shard, 0, 1)
    put(shard, 1, 2)
    shard.lookup(np.array([1]))
    put(shard, 2, 3)
    shard.lookup(np.array([1]))
    drained = shard.drain_metrics()
    assert (drained["ledger/evictions/lru"], drained[FALSE_LRU]) == (1, 0)
    assert shard.order().tolist() == [2, 3]


def test_a_full_wipe_clears_the_ghosts_and_what_returns_after_it_is_not_false():
    shard = lru(1)
    put(shard, 0, 1)
    put(shard, 1, 2)
    assert shard.ghosts == 1
    shard.wipe()
    assert (len(shard), shard.ghosts) == (0, 0)
    put(shard, 2, 1)
    drained = shard.drain_metrics()
    assert (drained["ledger_wipe_count"], drained[FALSE_LRU]) == (1, 0)


def test_wipes_come_every_so_many_steps_and_evict_nothing():
    shard = LedgerShard(LedgerSettings(width=2, mode="full_wipe", wipe_every=3))
    held = []
    for step in range(7):
        put(shard, step, step)
        shard.end_step(step)
        held.append(len(shard))
    assert held == [1, 2, 3, 0, 1, 2, 0]
    drained = shard.drain_metrics()
    assert (drained["ledger_wipe_count"], drained["ledger/evictions/lru"], drained["ledger/evictions/stale"]) == (
        2,
        0,
        0,
    )


def test_a_second_epoch_reports_no_false_eviction_when_there_was_none():
    shard = stale(3)
    groups, false = 500, 0
    for epoch in range(2):
        for i in range(groups):
            put(shard, epoch * groups + i, i, stream=i % 5, epoch=epoch)
            shard.end_step(epoch * groups + i)
    drained = shard.drain_metrics()
    false = drained[FALSE_STALE]
    assert drained["ledger/evictions/stale"] > 900
    assert false == 0


def test_the_same_group_in_another_stream_is_no_false_eviction():
    shard = lru(1)
    put(shard, 0, 1, stream=0)
    put(shard, 1, 2, stream=0)
    put(shard, 2, 1, stream=1)
    assert shard.drain_metrics()[FALSE_LRU] == 0


def test_a_million_groups_stay_within_the_bounds_of_the_ghosts():
    shard = LedgerShard(LedgerSettings(width=1, mode="lru", capacity=10_000, ghost_capacity=5_000))
    for step in range(100):
        gids = np.arange(step * 10_000, (step + 1) * 10_000)
        shard.store(gids, torch.zeros(len(gids), 1), step=step, streams=0)
    drained = shard.drain_metrics()
    assert shard.ghosts == 5_000
    assert drained["ledger/evictions/lru"] == 990_000
    assert drained["ledger/ghosts_dropped"] == 985_000
    assert shard.index_nbytes <= 50 * 10_000 + 50 * 5_000 + 1024
    # Which they are is exact too, after hundreds of thousands came and went: the newest 5,000, and nobody else.
    back = np.arange(984_000, 990_000)
    shard.store(back, torch.zeros(len(back), 1), step=100, streams=0)
    assert shard.drain_metrics()[FALSE_LRU] == 5_000


def test_a_ghost_outlives_any_number_of_others_that_come_and_go():
    shard = LedgerShard(LedgerSettings(width=1, mode="lru", capacity=1, ghost_capacity=8))
    put(shard, 0, 77, stream=0)
    for step in range(1, 101):  # two that push each other out, and are known again each time
        put(shard, step, step % 2, stream=0)
    shard.drain_metrics()
    put(shard, 101, 77, stream=0)
    assert shard.drain_metrics()[FALSE_LRU] == 1


def test_groups_that_were_made_to_collide_are_found_and_forgotten_like_any_other():
    gids = np.arange(3_000_000)
    home = (mix64_array(gids.view(np.uint64)) >> np.uint64(32)) * np.uint64(2_048) >> np.uint64(32)
    crowd = gids[home >= 2_047][
        :700
    ]  # all at the last entry of a table of 2,048: they go round its end, and far past 255
    assert len(crowd) == 700
    shard = stale(4, ghost_capacity=300)
    held: dict[int, int] = {}
    rng = np.random.default_rng(1)
    for step in range(1, 25):
        chosen = rng.choice(crowd, 150, replace=False)
        put(shard, step, *chosen.tolist())
        shard.end_step(step)
        held = {gid: last for gid, last in (held | dict.fromkeys(chosen.tolist(), step)).items() if last >= step - 4}
        states, found = shard.lookup(crowd)
        assert found.tolist() == [gid in held for gid in crowd.tolist()]
        assert states[:, 0].tolist() == [held.get(gid, 0) for gid in crowd.tolist()]
        assert shard.order().tolist() == sorted(held, key=lambda gid: (held[gid], gid))
    assert shard.drain_metrics()[FALSE_STALE] > 100


def test_groups_of_active_streams_are_left_alone_until_nothing_else_is_left():
    shard = lru(2, protect_active=True)
    put(shard, 0, 1, stream=8)
    put(shard, 1, 2, stream=9)
    shard.set_active({8})
    put(shard, 2, 3, stream=8)
    assert shard.order().tolist() == [1, 3], "2 is younger than 1, but its stream has ended"
    assert shard.drain_metrics()["ledger/evictions/protected"] == 0
    put(shard, 3, 4, stream=8)
    drained = shard.drain_metrics()
    assert shard.order().tolist() == [3, 4]
    assert (drained["ledger/evictions/lru"], drained["ledger/evictions/protected"]) == (1, 1)


def test_a_sweep_skips_groups_of_active_streams():
    shard = stale(1, protect_active=True)
    put(shard, 0, 1, stream=8)
    put(shard, 0, 2, stream=9)
    shard.set_active([8])
    shard.end_step(5)
    assert shard.order().tolist() == [1]


def test_states_are_stored_detached_and_the_last_row_of_a_group_stays():
    shard = lru(4)
    states = torch.arange(6.0).view(3, 2).requires_grad_()
    shard.store(np.array([5, 6, 5]), states, step=0)
    kept, found = shard.lookup(torch.tensor([5, 6, 7]))
    assert not kept.requires_grad
    assert kept.tolist() == [[4, 5], [2, 3], [0, 0]]
    assert found.tolist() == [True, True, False]
    assert shard.drain_metrics()["ledger/conflicts"] == 1


def test_a_store_that_is_refused_changes_nothing():
    shard = lru(2)
    put(shard, 3, 1, 2)
    before = shard.state_arrays()[0]
    with pytest.raises(ConfigError, match=r"step 4 stores 3 groups.*capacity is 2.*Raise the capacity to 3"):
        put(shard, 4, 3, 4, 5)
    with pytest.raises(HeadraceError, match="at step 2 after step 3: steps of a ledger do not go back"):
        put(shard, 2, 1)
    with pytest.raises(DataError, match="group 9 at step 4 is not finite"):
        shard.store(np.array([1, 9]), torch.tensor([[0.0, 1.0], [float("nan"), 0.0]]), step=4)
    with pytest.raises(ConfigError, match=r"states of shape \[1, 2\]"):
        shard.store(np.array([1]), torch.zeros(1, 3), step=4)
    after = shard.state_arrays()[0]
    assert all((before[name] == after[name]).all() for name in before)


def test_large_finite_states_are_taken_although_their_sum_overflows():
    shard = lru(2)
    shard.store(np.array([1]), torch.full((1, 2), 3e38), step=0)
    assert len(shard) == 1


def test_only_the_owner_takes_a_group():
    gids = np.arange(100)
    owners = owner_of(gids, 4)
    shard = LedgerShard(LedgerSettings(width=1), rank=1, world_size=4)
    mine, theirs = gids[owners == 1], gids[owners == 3]
    shard.store(mine, torch.zeros(len(mine), 1), step=0)
    with pytest.raises(HeadraceError, match=f"group {theirs[0]} belongs to rank 3 of 4 and was stored on rank 1"):
        shard.store(theirs[:1], torch.zeros(1, 1), step=0)
    with pytest.raises(HeadraceError, match="belongs to rank 3 of 4 and was looked up on rank 1"):
        shard.lookup(theirs)


def test_settings_name_every_problem_at_once():
    with pytest.raises(ConfigError) as caught:
        LedgerSettings(width=0, mode="lru", stale_threshold=3, ghost_horizon=0)
    told = str(caught.value)
    assert len(caught.value.problems) == 4
    assert "width" in told
    assert "lru needs a capacity" in told
    assert "stale_threshold belongs to mode periodic_stale" in told
    with pytest.raises(ConfigError, match="mode must be one of none, full_wipe, lru, periodic_stale, got 'fifo'"):
        LedgerSettings(width=1, mode="fifo")


@pytest.mark.parametrize(
    "spoil",
    [
        {"ghosts/mode": np.array([7], np.uint8)},
        {"ledger/last": np.array([99], np.int32)},
        {"ledger/state": np.zeros((1, 3), np.float32)},
        {"ledger/gid": np.array([1, 2], np.int64)},
    ],
    ids=lambda spoil: next(iter(spoil)),
)
def test_a_saved_ledger_that_cannot_be_is_refused_before_anything_changes(spoil: dict[str, np.ndarray]):
    shard = lru(1)
    put(shard, 0, 1)
    put(shard, 1, 2)
    arrays, _, meta = shard.state_arrays()
    other = lru(1)
    put(other, 0, 5)
    with pytest.raises(CursorMismatch, match=r"does not fit this one .*(ghosts/mode|ledger/last|ledger/state): saved"):
        other.load_state_arrays([(arrays | spoil, meta)])
    twice = {name: np.repeat(array, 2) for name, array in arrays.items() if name.startswith("ghosts/")}
    with pytest.raises(CursorMismatch, match="remembers an evicted group twice"):
        other.load_state_arrays([(arrays | twice, meta)])
    with pytest.raises(CursorMismatch, match="width: saved 2, now 4"):
        LedgerShard(LedgerSettings(width=4)).load_state_arrays([(arrays, meta)])
    assert other.order().tolist() == [5]


def test_sums_on_one_rank_are_the_value_and_the_worst_rank_is_this_one():
    assert reduce_loss_metrics({"loss": 2.5, "a/b-c": 3}, counts={"loss": 10}, sum_keys={"a/b-c"}) == {
        "loss": 2.5,
        "a/b-c": 3,
        "a/b-c_max": 3,
    }
