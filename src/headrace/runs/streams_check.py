"""`headrace check` of a stream run: plays its plan through without reading a row, and warns.

A plan needs row counts only, so the whole run can be seen before it starts: how often each modality is drawn, when slices
run dry, the longest wait from pick to pick. Three things go wrong in such runs, and each shows here first:

    starving    a modality is not in the pool for long, or gets nearly no picks
    spiking     slices run dry at nearly every step: the run opens files instead of reading them
    evicting    a ledger of recurrent state forgets groups that the pool still reads: its threshold is below the longest wait
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from headrace.mix import MixPlan, MixState, StreamTable
from headrace.runs.config.streams import StreamsConfig
from headrace.runs.streams import list_of, mix_plan

_MAX_DRAWS = 200_000
"""Draws that are played, which takes some seconds; of a longer run, the first ones."""


@dataclass(slots=True, kw_only=True)
class ModalityPlan:
    """One modality in the plan."""

    name: str
    files: int
    rows: int
    batch_size: int
    picks: int = 0
    """Batches drawn from it in the steps that were played."""
    share: float = 0.0
    """Of all picks."""
    absent: float = 0.0
    """Share of the steps in which no pool held a file of it."""
    longest_absence: int = 0
    """Steps in a row."""


@dataclass(slots=True, kw_only=True)
class StreamForecast:
    """A stream run, played through."""

    kind: str
    config_hash: str
    steps: int
    played: int
    """Steps that were played through."""
    files: int
    rows: int
    picks_an_epoch: int
    epochs: float
    pool: int
    lanes: int
    exhaust_rate: float = 0.0
    """Share of the steps at which at least one slice runs dry."""
    exhausts_a_step: float = 0.0
    spread_mean: float = 0.0
    """Mean of remaining_fraction_max - remaining_fraction_min."""
    worst_pick_gap: int = 0
    """The most steps that a slice waits from one pick to the next."""
    worst_gap_stream: str = ""
    overdue_max: float = 0.0
    modalities: list[ModalityPlan]
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0


def check_streams(config: StreamsConfig, *, ranks: int = 1, stale_threshold: int | None = None) -> StreamForecast:
    """List the stream files and play the plan.

    Args:
        config: The run.
        ranks: Number of ranks that must be able to share the lanes; ConfigError otherwise.
        stale_threshold: That of a ledger, to warn of false evictions; that of the config's ledger unless given. A ledger that protects groups
            of open files evicts none of them.
    """
    began = time.perf_counter()
    if config.ledger is not None and stale_threshold is None and not config.ledger.protect_active:
        stale_threshold = config.ledger.stale_threshold
    config.check_world_size(ranks)
    listing = list_of(config)
    table = StreamTable(
        paths=tuple(f.name for f in listing.files),
        rows=tuple(f.rows for f in listing.files),
        modalities=tuple(f.modality for f in listing.files),
    )
    plan = mix_plan(config, table)
    lanes, pool, an_epoch = len(plan.lanes), plan.settings.slots, sum(plan.picks)
    modalities = [
        ModalityPlan(
            name=kind, files=sum(m == kind for m in table.modalities), batch_size=plan.settings.batch_size[kind],
            rows=sum(n for n, m in zip(table.rows, table.modalities, strict=True) if m == kind),
        )
        for kind in table.kinds
    ]  # fmt: skip
    found = StreamForecast(
        kind=config.kind, config_hash=config.hash, steps=config.run.steps, played=max(min(config.run.steps, _MAX_DRAWS // (lanes * max(pool // 32, 1))), 1),
        files=len(table), rows=sum(table.rows), picks_an_epoch=an_epoch, epochs=config.run.steps * lanes / an_epoch, pool=pool, lanes=lanes,
        modalities=modalities,
    )  # fmt: skip
    _play(plan, found)
    found.warnings = _warnings(config, plan, found, stale_threshold)
    found.seconds = time.perf_counter() - began
    return found


def _play(plan: MixPlan, found: StreamForecast) -> None:
    """Draw the steps of the plan and count what happens."""
    played, steps, table = MixState(plan), found.played, plan.table
    away = [0] * len(found.modalities)
    last: dict[int, int] = {}
    """Step of the last pick of each slice in a pool."""
    for step in range(steps):
        if plan.over:
            plan.next_epoch()
        dry = 0
        for _ in plan.lanes:
            drawn = plan.next_step()
            played.add(drawn)
            draw = drawn.draw
            if draw.stream < 0:
                continue
            found.modalities[table.kind_of[draw.stream]].picks += 1
            if draw.start and draw.stream in last and step - last[draw.stream] > found.worst_pick_gap:
                found.worst_pick_gap, found.worst_gap_stream = step - last[draw.stream], table.paths[draw.stream]
            last[draw.stream] = step
            dry += draw.dry
        found.exhausts_a_step += dry / steps
        found.exhaust_rate += (dry > 0) / steps
        shots = list(played.snapshots().values())
        found.spread_mean += (max(s.fraction_max for s in shots) - min(s.fraction_min for s in shots)) / steps
        found.overdue_max = max(found.overdue_max, *(s.overdue_max for s in shots))
        for kind, modality in enumerate(found.modalities):
            away[kind] = 0 if any(s.kinds[kind] for s in shots) else away[kind] + 1
            modality.absent += (away[kind] > 0) / steps
            modality.longest_absence = max(modality.longest_absence, away[kind])
    total = sum(m.picks for m in found.modalities) or 1
    for modality in found.modalities:
        modality.share = modality.picks / total


def _warnings(config: StreamsConfig, plan: MixPlan, found: StreamForecast, stale_threshold: int | None) -> list[str]:
    section = config.streams
    remarks = []
    for m in found.modalities:
        if m.picks == 0:
            remarks.append(
                f'starves: no batch of {m.name} in {found.played:,} steps; raise num_streams_mixed or use queue = "stratified"'
            )
        elif m.longest_absence > max(0.25 * found.played, 4 * found.pool):
            remarks.append(
                f"starves: no file of {m.name} is in the pool for {m.longest_absence:,} steps in a row; raise num_streams_mixed above "
                f'{found.pool} or use queue = "stratified"'
            )
        elif len(found.modalities) > 1 and m.share < 0.1 / len(found.modalities):
            remarks.append(f"lopsided: {m.name} gets {m.share:.1%} of the batches, {m.picks:,} of {sum(o.picks for o in found.modalities):,}; its batch_size of {m.batch_size} is large beside the others")  # fmt: skip
    if found.exhaust_rate > 0.5:
        remarks.append(
            f"spikes: slices run dry at {found.exhaust_rate:.0%} of the steps ({found.exhausts_a_step:.2f} a step); a file lasts too few "
            "batches, so the run opens files instead of reading them: lower batch_size, or join files"
        )
    elif found.spread_mean > 0.3 and section.pick_mode != "sequential":  # of slices of a batch or two it says nothing
        remarks.append(
            f"drains unevenly: what is left of the slices differs by {found.spread_mean:.2f} on average; "
            + ('queue = "banded" puts files of a size together' if section.pick_mode == "proportional" else 'pick_mode = "proportional" drains evenly')
        )  # fmt: skip
    if section.pick_mode in ("weighted", "uniform") and found.worst_pick_gap > 5 * found.pool:
        remarks.append(
            f"waits: {found.worst_gap_stream} is not picked for {found.worst_pick_gap:,} steps, {found.worst_pick_gap / found.pool:.0f} times the pool; "
            'pick_mode = "proportional" spaces picks evenly'
        )
    empty = sum(not streams for streams in plan.dealt)
    if empty:
        remarks.append(
            f"{empty} of {found.lanes} lanes have no stream, and deliver batches without rows: there are {found.files} files; use fewer lanes"
        )
    if found.epochs > 4:
        remarks.append(f"every file is read {found.epochs:.1f} times: more than 4 epochs teach little")
    if stale_threshold is not None and stale_threshold < found.worst_pick_gap:
        remarks.append(
            f"evicts falsely: a ledger with stale_threshold = {stale_threshold} forgets groups of {found.worst_gap_stream}, which is not "
            f"picked for {found.worst_pick_gap:,} steps; set it to {found.worst_pick_gap} or more"
        )
    capacity = config.ledger.capacity if config.ledger is not None and config.ledger.mode == "lru" else None
    needed = found.pool * found.lanes * max(plan.per_pick)
    if capacity is not None and capacity < needed:
        remarks.append(
            f"may evict falsely: a ledger of {capacity:,} groups is smaller than a pool's batches can hold together, {needed:,}"
        )
    return remarks
