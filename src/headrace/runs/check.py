"""`headrace check` of a text run: opens its sources and tokenizer, reads a few chunks, and works out what it would deliver."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import StorageError
from headrace.loader import TextDataset
from headrace.loader.dataset import MOST_LANES
from headrace.runs.config.base import divisors
from headrace.runs.config.schema import RunConfig
from headrace.runs.job import Job
from headrace.text import Tokenizer


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
    """What a text run would read and deliver."""

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


def check_job(config: RunConfig, *, ranks: int = 1, full_check: bool = False) -> Plan:
    """Open the sources and the tokenizer of a config and work out what a run would deliver.

    Args:
        config: The run.
        ranks: Number of ranks that must be able to share the batch; ConfigError otherwise.
        full_check: Compare everything that was ever read with its recorded hash.
    """
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
        unwritten = sum(s.unwritten_hashes for s in data.sources)
        if unwritten:
            raise StorageError(
                f"{unwritten:,} hashes could not be written to {folder}: make room there, or choose another folder"
            )
        return {s.name: (compared[s.name], s.manifest.chunks - compared[s.name]) for s in data.sources}
    finally:
        data.close()


def plan_of(config: RunConfig, data: TextDataset) -> Plan:
    """The plan of a run over an open dataset."""
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
    return _plan(
        config, config.kind, data.tokenizer, sources, total_tokens=total, warnings=_warnings(config, sources, data.lanes), lanes=data.lanes,
        lane_bytes=2 * len(data.sources) * data.packing.budget * 4,
    )  # fmt: skip


def _plan(
    config: RunConfig, kind: str, tokenizer: Tokenizer, sources: Sequence[SourcePlan], *, total_tokens: int, warnings: Sequence[str],
    lanes: int = MOST_LANES, lane_bytes: int = 0,
) -> Plan:  # fmt: skip
    sizes = divisors(config.loader.global_batch_size)
    return Plan(
        kind=kind, config_hash=config.hash, steps=config.run.steps, global_batch_size=config.loader.global_batch_size, seq_len=config.text.seq_len,
        lanes=lanes, world_sizes=tuple(sizes), lanes_followed=tuple(lanes // math.gcd(lanes, n) for n in sizes), lane_bytes=lane_bytes,
        total_tokens=total_tokens, tokenizer=tokenizer.name, vocab_size=tokenizer.vocab_size, sources=tuple(sources), warnings=tuple(warnings),
    )  # fmt: skip


def _labelled_plan(config: RunConfig) -> Plan:
    """The plan of a spool of labelled rows. All rows are read, so their tokens are counted, not estimated."""
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
    warnings = [f"no row is labelled {name}" for name in examples.without_rows()]
    return _plan(config, config.spool.task, tokenizer, sources, total_tokens=total, warnings=warnings)


def _warnings(config: RunConfig, sources: tuple[SourcePlan, ...], lanes: int) -> list[str]:
    found = []
    stops = config.loader.exhausted == "stop_first"
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
            end = "the run ends there" if stops else "its share then goes to the others"
            end += ", or the run ends" if len(sources) == 1 and not stops else ""
            found.append(f"source {plan.name} is dry after {limit} epoch(s), the plan needs {plan.epochs:.1f}: {end}")
        elif plan.epochs > 4:
            found.append(
                f"source {plan.name} is read {plan.epochs:.1f} times: more than 4 epochs teach little, lower its weight"
            )
        if plan.rows < lanes:
            found.append(
                f"source {plan.name} has {plan.rows} rows for {lanes} lanes: some lanes see it only in some epochs. Lower loader.lanes, such as to {max(plan.rows // 8, 1)}"
            )
    return found
