"""Which source, row or stream comes next: pure arithmetic over row counts, weights and tokens.

Documents:
deal        which rows of a source a lane reads in an epoch, and in which order
interleave  which source gives a lane its next block
strata      which labelled row comes next, so that every class is served

Streams (files of cells, K open at a time):
streams     which streams there are, how many picks each lasts, which lane reads it
queue       in which order they wait for a place in the pool
pool        the state of a lane: its slices, how far each is read, how evenly they drain
pick        which slice gives the next batch
plan        all of it together: the next draw, and the state after the delivered draws
"""

from headrace.mix.deal import Deal, Span
from headrace.mix.interleave import LaneMix, fixed_point, lane_weight_factors, starting_credits
from headrace.mix.pick import PICK_MODES, PickMode
from headrace.mix.plan import BATCHING_MODES, BatchingMode, MixPlan, MixSettings, MixState, Reshard, worker_of
from headrace.mix.pool import Draw, LaneState, PlanStep, Slice, Snapshot
from headrace.mix.queue import QUEUES, Queue
from headrace.mix.strata import BALANCES, Balance, Strata, held_out
from headrace.mix.streams import StreamTable, rank_share

__all__ = [
    "BALANCES",
    "BATCHING_MODES",
    "PICK_MODES",
    "QUEUES",
    "Balance",
    "BatchingMode",
    "Deal",
    "Draw",
    "LaneMix",
    "LaneState",
    "MixPlan",
    "MixSettings",
    "MixState",
    "PickMode",
    "PlanStep",
    "Queue",
    "Reshard",
    "Slice",
    "Snapshot",
    "Span",
    "Strata",
    "StreamTable",
    "fixed_point",
    "held_out",
    "lane_weight_factors",
    "rank_share",
    "starting_credits",
    "worker_of",
]
