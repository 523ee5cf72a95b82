"""Metrics of a ledger, and how ranks combine them.

    ledger/evictions/{lru,stale}            groups forgotten at this step
    ledger/false_evictions/{lru,stale}      groups that came back although their stream had not ended: their state was still in use,
                                            and training went on without it. 0 in a healthy run
    ledger/refault_distance_max             how many steps after its eviction such a group came back: so much longer the threshold
                                            had to be

All are of the steps since the last drain. Counts are summed over ranks, with the worst rank beside the sum.
"""

from __future__ import annotations

from headrace.metrics import MetricSpec, Reduction, register

EVICTED = {"lru": "ledger/evictions/lru", "stale": "ledger/evictions/stale"}
FALSE = {"lru": "ledger/false_evictions/lru", "stale": "ledger/false_evictions/stale"}
PROTECTED = "ledger/evictions/protected"
WIPES = "ledger_wipe_count"
CONFLICTS = "ledger/conflicts"
DROPPED = "ledger/ghosts_dropped"
DISTANCE = "ledger/refault_distance_max"
OCCUPANCY = "ledger/occupancy"

_SUM, _MAX = Reduction.SUM, Reduction.MAX
LEDGER_SPECS = (
    MetricSpec(EVICTED["lru"], _SUM, True, "groups", None, "groups forgotten because there were more than the capacity; a spike: it is too small"),
    MetricSpec(EVICTED["stale"], _SUM, True, "groups", None, "groups forgotten because they were not stored for long; many at all times: the threshold is too low"),
    MetricSpec(FALSE["lru"], _SUM, True, "groups", (0, 0), "groups that LRU forgot while their stream was still read: the capacity is too small"),
    MetricSpec(FALSE["stale"], _SUM, True, "groups", (0, 0), "groups that a sweep forgot while their stream was still read: the threshold is too low"),
    MetricSpec(PROTECTED, _SUM, True, "groups", (0, 0), "groups of streams still read that LRU had to forget, because there was nothing else: the capacity is too small"),
    MetricSpec(WIPES, _SUM, True, "wipes", None, "times that all groups were forgotten (summed over ranks, which wipe together)"),
    MetricSpec(CONFLICTS, _SUM, True, "rows", None, "states of a group that another of the same step replaced: the last by (rank, row) stays"),
    MetricSpec(DROPPED, _SUM, True, "groups", None, "evicted groups no longer remembered for want of room: false evictions are then a lower bound"),
    MetricSpec(DISTANCE, _MAX, True, "steps", None, "steps from a false eviction to the group's return: so much longer the threshold had to be"),
    MetricSpec(OCCUPANCY, _MAX, True, "groups", None, "groups held, on the rank with the most"),
)  # fmt: skip
register(*LEDGER_SPECS)

LEDGER_SUM_KEYS = frozenset(spec.key for spec in LEDGER_SPECS if spec.reduction is _SUM)
"""What `reduce_loss_metrics(..., sum_keys=LEDGER_SUM_KEYS)` adds up over ranks."""
