"""The ledger beside a model that keeps everything and sorts it anew each time: same contents, same evictions in the same order, same counts."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.errors import ConfigError
from headrace.ledger import LEDGER_SPECS, EvictionMode, LedgerSettings, LedgerShard, bucket_of, owner_of

WIDTH = 2
KEYS = [spec.key for spec in LEDGER_SPECS]


class Model:
    """Full history, no arrays: a dict of groups, a dict of ghosts, and sorting."""

    def __init__(self, chosen: LedgerSettings) -> None:
        self.chosen = chosen
        self.groups: dict[int, tuple[float, int, int, int]] = {}
        """gid -> (state, last step, stream, epoch)."""
        self.ghosts: OrderedDict[int, tuple[str, int, int, int]] = OrderedDict()
        """gid -> (mode, step, stream, epoch), the oldest first."""
        self.evicted: list[tuple[int, str, int]] = []
        self.active: set[int] = set()
        self.step = -1
        self.counts = dict.fromkeys(KEYS, 0)

    def order(self) -> list[int]:
        return sorted(self.groups, key=lambda gid: (self.groups[gid][1], gid))

    def needs(self, step: int, gids: list[int]) -> int:
        """Groups that must be held together."""
        if self.chosen.mode is EvictionMode.LRU:
            return len({*gids, *(gid for gid, held in self.groups.items() if held[1] == step)})
        return len({*gids, *self.groups})

    def store(self, step: int, rows: list[tuple[int, float, int, int]]) -> None:
        fresh = sorted({gid for gid, *_ in rows} - set(self.groups))
        final = {gid: (stream, epoch) for gid, _, stream, epoch in rows}
        for gid in fresh:
            if gid not in self.ghosts:
                continue
            mode, when, stream, epoch = self.ghosts.pop(gid)
            if (stream, epoch) == final[gid] and step - when <= self.chosen.ghost_horizon:
                self.counts[f"ledger/false_evictions/{mode}"] += 1
                self.counts["ledger/refault_distance_max"] = max(
                    self.counts["ledger/refault_distance_max"], step - when
                )
        for gid, state, stream, epoch in rows:
            if gid in self.groups and self.groups[gid][1] == step:
                self.counts["ledger/conflicts"] += 1
            self.groups[gid] = (state, step, stream, epoch)
        self.step = step
        while self.chosen.mode is EvictionMode.LRU and len(self.groups) > (self.chosen.capacity or 0):
            old = [gid for gid in self.order() if self.groups[gid][1] < step]
            free = [gid for gid in old if not self.protected(gid)]
            if not free:
                self.counts["ledger/evictions/protected"] += 1
            self.evict((free or old)[0], "lru")

    def protected(self, gid: int) -> bool:
        return self.chosen.protect_active and self.groups[gid][2] in self.active

    def evict(self, gid: int, mode: str) -> None:
        _, _, stream, epoch = self.groups.pop(gid)
        self.counts[f"ledger/evictions/{mode}"] += 1
        self.evicted.append((gid, mode, self.step))
        if self.chosen.ghost_capacity:
            if len(self.ghosts) == self.chosen.ghost_capacity:
                self.ghosts.popitem(last=False)
                self.counts["ledger/ghosts_dropped"] += 1
            self.ghosts[gid] = (mode, self.step, stream, epoch)

    def end_step(self, step: int) -> None:
        self.step = step
        chosen = self.chosen
        if chosen.stale_threshold is not None and step and step % chosen.sweep_every == 0:
            for gid in self.order():
                if self.groups[gid][1] < step - chosen.stale_threshold and not self.protected(gid):
                    self.evict(gid, "stale")
        if chosen.wipe_every is not None and step and step % chosen.wipe_every == 0:
            self.groups.clear()
            self.ghosts.clear()
            self.counts["ledger_wipe_count"] += 1
        for gid in [g for g, ghost in self.ghosts.items() if step - ghost[1] > chosen.ghost_horizon]:
            del self.ghosts[gid]


def chosen_settings() -> st.SearchStrategy[LedgerSettings]:
    ghosts = {
        "ghost_capacity": st.integers(0, 6),
        "ghost_horizon": st.integers(1, 6),
        "protect_active": st.booleans(),
    }
    modes = [
        {"mode": st.just("none"), "capacity": st.none() | st.integers(3, 9)},
        {"mode": st.just("full_wipe"), "wipe_every": st.integers(1, 5)},
        {"mode": st.just("lru"), "capacity": st.integers(2, 7)},
        {"mode": st.just("periodic_stale"), "stale_threshold": st.integers(0, 4), "sweep_every": st.integers(1, 3)},
    ]
    return st.one_of(
        st.fixed_dictionaries({"width": st.just(WIDTH), **ghosts, **mode}).map(lambda given: LedgerSettings(**given))
        for mode in modes
    )


GIDS = st.integers(-3, 9)
ROW = st.tuples(GIDS, st.integers(0, 1 << 20).map(float), st.integers(-1, 2), st.integers(0, 1))


def put(shard: LedgerShard, rows: list[tuple[int, float, int, int]], step: int) -> None:
    gids, states, streams, epochs = (np.array(column) for column in zip(*rows, strict=True))
    kept = torch.from_numpy(states).float()[:, None].repeat(1, WIDTH)
    shard.store(gids.astype(np.int64), kept, step=step, streams=streams, epochs=epochs)


class LedgerMachine(RuleBasedStateMachine):
    @initialize(chosen=chosen_settings())
    def begin(self, chosen: LedgerSettings) -> None:
        self.shard, self.model, self.step = LedgerShard(chosen), Model(chosen), 0

    @rule(rows=st.lists(ROW, min_size=1, max_size=6), later=st.sampled_from([0, 1, 1, 1, 2, 5]))
    def store(self, rows: list[tuple[int, float, int, int]], later: int) -> None:
        step = self.step + later
        needed, capacity = self.model.needs(step, [gid for gid, *_ in rows]), self.model.chosen.capacity
        if capacity is not None and needed > capacity:
            with pytest.raises(ConfigError, match=f"{needed:,} groups.*capacity is {capacity}"):
                put(self.shard, rows, step)
            return
        self.step = step
        put(self.shard, rows, step)
        self.model.store(step, rows)

    @rule(later=st.integers(0, 2))
    def end_step(self, later: int) -> None:
        self.step += later
        self.shard.end_step(self.step)
        self.model.end_step(self.step)

    @rule(streams=st.sets(st.integers(0, 2)))
    def set_active(self, streams: set[int]) -> None:
        self.shard.set_active(streams)
        self.model.active = streams

    @rule()
    def drain(self) -> None:
        drained = self.shard.drain_metrics()
        if drained:
            assert drained == {**self.model.counts, "ledger/occupancy": len(self.model.groups)}
        self.model.counts = dict.fromkeys(KEYS, 0)

    @rule()
    def save_and_load(self) -> None:
        self.drain()
        arrays, _, meta = self.shard.state_arrays()
        loaded = LedgerShard(self.model.chosen)
        loaded.load_state_arrays([(arrays, meta)])
        loaded.set_active(self.model.active)
        self.shard = loaded

    @invariant()
    def everything_is_equal(self) -> None:
        if not hasattr(self, "shard"):
            return
        shard, model = self.shard, self.model
        assert shard.order().tolist() == model.order()
        arrays, _, meta = shard.state_arrays()
        assert meta["step"] == model.step
        held = zip(*(arrays[f"ledger/{n}"].tolist() for n in ("gid", "last", "stream", "epoch", "state")), strict=True)
        assert [(gid, last, stream, epoch, state) for gid, last, stream, epoch, state in held] == [
            (gid, *model.groups[gid][1:], [model.groups[gid][0]] * WIDTH) for gid in model.order()
        ]
        ghosts = zip(*(arrays[f"ghosts/{n}"].tolist() for n in ("gid", "mode", "when", "stream", "epoch")), strict=True)
        assert [(g, {1: "lru", 2: "stale"}[mode], *rest) for g, mode, *rest in ghosts] == [
            (gid, *ghost) for gid, ghost in model.ghosts.items()
        ]
        states, found = shard.lookup(np.arange(-4, 11))
        assert found.tolist() == [gid in model.groups for gid in range(-4, 11)]
        assert states[:, 0].tolist() == [model.groups[gid][0] if gid in model.groups else 0 for gid in range(-4, 11)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", [{"mode": "lru", "capacity": 40}, {"mode": "periodic_stale", "stale_threshold": 3}])
def test_a_long_life_of_many_returns_is_the_models(mode: dict[str, Any], seed: int) -> None:
    """Hypothesis finds short lives. In a long one the index of ghosts turns over hundreds of times, and gids come back from each of its halves."""
    rng = np.random.default_rng(seed)
    chosen = LedgerSettings(
        width=WIDTH, ghost_capacity=int(rng.choice([1, 7, 30, 200])), ghost_horizon=int(rng.integers(2, 30)), **mode
    )
    shard, model = LedgerShard(chosen), Model(chosen)
    crowd = rng.integers(-(1 << 62), 1 << 62, 150)
    for step in range(1, 400):
        gids = rng.choice(crowd, int(rng.integers(1, 20)))
        rows = [(int(gid), float(step), int(rng.integers(0, 2)), 0) for gid in gids]
        put(shard, rows, step)
        model.store(step, rows)
        if rng.random() < 0.7:
            shard.end_step(step)
            model.end_step(step)
        assert shard.drain_metrics() == {**model.counts, "ledger/occupancy": len(model.groups)}, f"step {step}"
        model.counts = dict.fromkeys(KEYS, 0)
        assert shard.ghosts == len(model.ghosts)
        assert shard.lookup(crowd)[1].tolist() == [gid in model.groups for gid in crowd.tolist()]
    assert shard.order().tolist() == model.order()


LedgerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestTheLedgerIsTheModel = LedgerMachine.TestCase


@given(
    worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    steps=st.lists(st.lists(st.integers(-1000, 1000), min_size=1, max_size=12), min_size=1, max_size=6),
    after=st.lists(st.lists(st.integers(-1000, 1000), max_size=12), max_size=6),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
@settings(max_examples=60)
def test_a_ledger_loaded_on_other_ranks_holds_the_same_groups_and_goes_stale_alike(
    worlds: tuple[int, int], steps: list[list[int]], after: list[list[int]], dtype: Any
) -> None:
    chosen = LedgerSettings(width=WIDTH, mode="periodic_stale", stale_threshold=2, dtype=dtype)

    def play(shards: list[LedgerShard], batches: list[list[int]], start: int) -> tuple[list[Any], dict[str, int]]:
        totals = dict.fromkeys(KEYS, 0)
        for step, batch in enumerate(batches, start):
            gids = np.array(batch, dtype=np.int64)
            for shard in shards:
                own = gids[owner_of(gids, len(shards)) == shard.rank]
                states = torch.from_numpy(own % 97 + step).float()[:, None].repeat(1, WIDTH)
                shard.store(own, states, step=step, streams=0)
                shard.end_step(step)
                for key, value in shard.drain_metrics().items():
                    totals[key] += value
        held = []
        for shard in shards:
            arrays, _, _ = shard.state_arrays()
            held += zip(
                arrays["ledger/gid"].tolist(), arrays["ledger/last"].tolist(), arrays["ledger/state"].tolist(), strict=True
            )  # fmt: skip
        return sorted(held), {k: v for k, v in totals.items() if not k.endswith(("occupancy", "_max"))}

    before, now = ([LedgerShard(chosen, rank=r, world_size=world) for r in range(world)] for world in worlds)
    held, _ = play(before, steps, 0)
    parts = [(arrays, meta) for arrays, _, meta in (shard.state_arrays() for shard in before)]
    for shard in now:
        shard.load_state_arrays(parts)
    assert play(now, [], 0)[0] == held
    assert play(now, after, len(steps)) == play(before, after, len(steps))


@given(gids=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=50), world=st.integers(1, 4096))
def test_every_group_has_one_owner_and_buckets_never_split(gids: list[int], world: int) -> None:
    array = np.array(gids, dtype=np.int64)
    owner, bucket = owner_of(array, world), bucket_of(array)
    assert ((owner >= 0) & (owner < world)).all()
    assert ((bucket >= 0) & (bucket < 4096)).all()
    by_bucket = owner_of(array[np.argsort(bucket, kind="stable")], world)
    assert (np.diff(by_bucket) >= 0).all(), "ranges of buckets are contiguous"
    assert len({(b, o) for b, o in zip(bucket.tolist(), owner.tolist(), strict=True)}) == len(set(bucket.tolist()))
