"""Recurrent-state ledger: one state a group, kept between steps, with eviction and the detection of false evictions.

    settings.py    settings of a ledger
    owners.py      which rank owns a group
    slot_index.py  the index from gid to slot, compiled
    slots.py       slots by gid, and the order in which they are evicted: groups and ghosts
    shard.py       the groups of one rank: lookup, store, eviction, ghosts, state
    ranks.py       all ranks together: rows go to their owners and back
    gauges.py      the metrics

    ledger = Ledger(LedgerSettings(width=256, mode="periodic_stale", stale_threshold=64))
    states, found = ledger.lookup(batch["group_id"])
    ledger.store(batch["group_id"], new_states, step=step, streams=batch["stream_id"], epochs=batch["stream_epoch"])
    ledger.end_step(step)
    ledger.drain_metrics()          ledger/false_evictions/stale above 0: a state was forgotten that was still in use

Importing this imports no torch: it comes with the first ledger.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.ledger.gauges import LEDGER_SPECS, LEDGER_SUM_KEYS
    from headrace.ledger.owners import BUCKETS, bucket_of, owner_of
    from headrace.ledger.ranks import Ledger, Route
    from headrace.ledger.settings import EvictionMode, LedgerSettings
    from headrace.ledger.shard import LedgerShard

__all__ = [
    "BUCKETS",
    "LEDGER_SPECS",
    "LEDGER_SUM_KEYS",
    "EvictionMode",
    "Ledger",
    "LedgerSettings",
    "LedgerShard",
    "Route",
    "bucket_of",
    "owner_of",
]

_HOME = {
    "BUCKETS": "owners", "bucket_of": "owners", "owner_of": "owners", "EvictionMode": "settings", "LedgerSettings": "settings",
    "LEDGER_SPECS": "gauges", "LEDGER_SUM_KEYS": "gauges", "Ledger": "ranks", "Route": "ranks", "LedgerShard": "shard",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'headrace.ledger' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headrace.ledger.{_HOME[name]}"), name)
