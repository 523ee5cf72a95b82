"""What would this run do? Opens everything it needs, reads a little, trains nothing."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path
from typing import Any

from headrace.errors import StorageError
from headrace.loader import TextDataset
from headrace.loader.dataset import MOST_LANES
from headrace.runs.config.base import divisors
from headrace.runs.config.schema import RunConfig
from headrace.runs.job import Job

__all__ = ["Plan", "SourcePlan", "check_hashes", "check_job", "ends_with", "plan_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """One source in the plan. Tokens are estimated from a few chunks."""

    name: str
    spec: str
    files: int
    chunks: int
    rows: int
    tokens: int
    weight: float
    delivered: float
    epochs: float
    median_tokens: int = 0
    """Of the documents in the sampled chunks."""
    first_document: str = ""
    """The beginning of the first document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run on paper."""

    kind: str
    config_hash: str
    steps: int
    global_batch_size: int
    seq_len: int
    lanes: int
    world_sizes: tuple[int, ...]
    """Numbers of ranks that can share the global batch."""
    lanes_followed: tuple[int, ...]
    """How many of the lanes each rank follows, for each of `world_sizes`: a rank makes the windows of these lanes."""
    lane_bytes: int = 0
    """About how many bytes of windows a lane holds: of each source one that is open, and the next."""
    total_tokens: int
    tokenizer: str
    vocab_size: int
    sources: tuple[SourcePlan, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_job(config: RunConfig, *, ranks: int = 1, full_check: bool = False) -> Plan:
    """Open the sources and the tokenizer of a config and work out what a run would deliver."""
    config.check_world_size(ranks)
    if config.spool.labelled:
        return _labelled_plan(config)
    data = Job(config).dataset(full_check=full_check)
    try:
        return plan_of(config, data)
    finally:
        data.close()


def check_hashes(config: RunConfig, folder: Path) -> dict[str, tuple[int, int]]:
    """Compare every chunk of every source with its hash in a folder, and record there those that have none.

    Returns how many chunks of each source were compared and recorded. DataChanged names what differs.
    """
    data = Job(config).dataset(records=folder)
    try:
        compared = {s.name: s.check_recorded(record_others=True) for s in data.sources}
        unwritten = sum(s.counters()["unrecorded_chunks"] for s in data.sources)
        if unwritten:
            raise StorageError(
                f"{unwritten:,} hashes could not be written to {folder}: make room there, or choose another folder"
            )
        return {s.name: (compared[s.name], s.manifest.chunks - compared[s.name]) for s in data.sources}
    finally:
        data.close()


def plan_of(config: RunConfig, data: TextDataset, *, note_end: bool = True) -> Plan:
    """What a run over an open dataset would deliver. `note_end`: guess where exhausted = "stop_first" ends it."""
    total = config.run.steps * config.loader.global_batch_size * config.text.seq_len
    estimates = data.estimates()
    sources = tuple(
        SourcePlan(
            name=s.name, spec=s.source.spec, files=len(s.manifest.files), chunks=len(s.manifest.chunk_rows), rows=deal.rows,
            tokens=e.tokens, weight=w, delivered=total * w, epochs=total * w / e.tokens if e.tokens else 0.0,
            median_tokens=e.median_tokens, first_document=e.first_document,
        )
        for s, deal, e, w in zip(data.sources, data.deals, estimates, data.weights, strict=True)
    )  # fmt: skip
    return Plan(
        kind=config.kind,
        config_hash=config.hash,
        steps=config.run.steps,
        global_batch_size=config.loader.global_batch_size,
        seq_len=config.text.seq_len,
        lanes=data.lanes,
        **_world_sizes(config, data.lanes),
        lane_bytes=2 * len(data.sources) * data.packing.budget * 4,
        total_tokens=total,
        tokenizer=data.tokenizer.name,
        vocab_size=data.vocab_size,
        sources=sources,
        warnings=tuple(_warnings(config, sources, data.lanes, note_end)),
    )


def _world_sizes(config: RunConfig, lanes: int) -> dict[str, Any]:
    sizes = tuple(divisors(config.loader.global_batch_size))
    return {"world_sizes": sizes, "lanes_followed": tuple(lanes // gcd(lanes, n) for n in sizes)}


def _labelled_plan(config: RunConfig) -> Plan:
    """What a spool of labelled rows would hold: everything is read, so its tokens are counted, not estimated."""
    import numpy as np

    from headrace.runs.provide import examples_of

    examples, tokenizer = examples_of(Job(config))
    samples = config.run.steps * config.loader.global_batch_size
    lengths, owner = np.diff(examples.offsets), examples.origin[:, 0]
    total = round(samples * float(lengths.mean()))
    sources = []
    for number, section in enumerate(config.source):
        own = owner == number
        share = float(own.mean())
        sources.append(
            SourcePlan(
                name=section.name, spec=section.spec, files=examples.files[number], chunks=0, rows=int(own.sum()), tokens=int(lengths[own].sum()),
                weight=share, delivered=total * share, epochs=samples / len(examples), median_tokens=int(np.median(lengths[own])) if own.any() else 0,
            )
        )  # fmt: skip
    return Plan(
        kind=config.spool.task, config_hash=config.hash, steps=config.run.steps, global_batch_size=config.loader.global_batch_size,
        seq_len=config.text.seq_len, lanes=MOST_LANES, **_world_sizes(config, MOST_LANES),
        total_tokens=total, tokenizer=tokenizer.name, vocab_size=tokenizer.vocab_size, sources=tuple(sources),
        warnings=tuple(f"no row is labelled {name}" for name in examples.without_rows()),
    )  # fmt: skip


def _warnings(config: RunConfig, sources: tuple[SourcePlan, ...], lanes: int, note_end: bool) -> list[str]:
    found = []
    stops = config.loader.exhausted == "stop_first"
    if stops and note_end and (end := _first_dry(config, sources)) is not None:
        found.append(ends_with(*end, about=True))
    for section, plan in zip(config.source, sources, strict=True):
        if plan.rows == 0:
            found.append(f"source {plan.name} has no rows: the others share its weight")
            continue
        if plan.tokens == 0:
            found.append(
                f"source {plan.name}: no sampled row has text; a run refuses a source without any, so check its text_key"
            )
        if plan.weight == 0:
            found.append(f"source {plan.name} has weight 0 and is never read")
        limit = section.max_epochs if config.loader.exhausted == "repeat" else section.max_epochs or 1
        if limit is not None and plan.epochs > limit:
            if not stops:  # else one note says where the run ends
                found.append(
                    f"source {plan.name} is dry after {limit} epoch(s), the plan needs {plan.epochs:.1f}: its share then goes to the others"
                    + (", or the run ends" if len(sources) == 1 else "")
                )
        elif plan.epochs > 4:
            found.append(
                f"source {plan.name} is read {plan.epochs:.1f} times: more than 4 epochs teach little, lower its weight"
            )
        if plan.rows < lanes:
            found.append(
                f"source {plan.name} has {plan.rows} rows for {lanes} lanes: some lanes see it only in some epochs. Lower loader.lanes, such as to {max(plan.rows // 8, 1)}"
            )
    return found


def ends_with(name: str, step: int, *, about: bool = False) -> str:
    """The note of a run that ends with its first dry source."""
    return f'source {name} is the first to run dry: the run ends {"at about" if about else "at"} step {step:,} (exhausted = "stop_first")'


def _first_dry(config: RunConfig, sources: tuple[SourcePlan, ...]) -> tuple[str, int] | None:
    """The source that ends the run, and about the step; None if the steps end first."""
    ends: list[tuple[float, str]] = []
    for section, plan in zip(config.source, sources, strict=True):
        supply = min((section.max_epochs or 1) * plan.tokens, section.max_tokens or math.inf)
        if plan.rows and plan.weight and supply < plan.delivered:
            ends.append((supply / plan.delivered, plan.name))
    if not ends:
        return None
    part, name = min(ends)
    return name, max(math.ceil(part * config.run.steps), 1)
