"""Processing of one rollout, from the form it arrived in to training samples: `process_rollout`, in the pipeline's thread or in a worker process.

raw ──► decode (wire.py) ──► check (ingest.py) ──► pretokenize, if the engine returned no tokens ──► interleave ──► samples of at most seq_len
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.rollouts.checks import Limits
from headrace.rollouts.ingest import ENCODED, rollout_from_verifiers
from headrace.rollouts.interleave import interleave_rollout
from headrace.rollouts.loop_yield import LoopYield
from headrace.rollouts.pretokenize import Render, needs_tokens, pretokenize
from headrace.rollouts.records import Rollout, TrainingSample
from headrace.rollouts.wire import decode_rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Processed:
    """A rollout that became samples."""

    rollout: Rollout
    """The rollout without its contexts and experts."""
    samples: list[TrainingSample]
    """At most seq_len tokens each."""
    truncated: int
    """Samples that lost their end."""


def process_rollout(
    raw: Any, about: Mapping[str, Any], *, seq_len: int, limits: Limits, render: Render | None = None,
    measure: Callable[[str], AbstractContextManager[None]] | None = None, pause: LoopYield | None = None,
) -> Processed:  # fmt: skip
    """Check a rollout and make samples of it, in the calling thread. Raises RolloutRefused.

    Args:
        raw: a record, JSON text, msgpack or a Rollout.
        about: further arguments of `rollout_from_verifiers`.
        seq_len: tokens of a sample; a longer sample loses its end.
        limits: the largest rollout that is taken.
        render: tokenises turns without tokens.
        measure: times the phase pretokenize.
        pause: lets the event loop run between turns.
    """
    if isinstance(raw, Rollout):
        rollout = raw
    else:
        record = decode_rollout(raw) if isinstance(raw, ENCODED) else raw
        if pause is not None and isinstance(record, dict) and isinstance(record.get("trajectory"), list):
            record = {**record, "trajectory": pause.between(record["trajectory"])}
        rollout = rollout_from_verifiers(record, limits=limits, **about)
    if render is not None and needs_tokens((rollout,)):
        with measure("pretokenize") if measure is not None else contextlib.nullcontext():
            rollout = pretokenize(rollout, render)
    whole = interleave_rollout(rollout)
    split_at = tuple(s.split_at for s in whole if s.split_at is not None)
    return Processed(
        rollout=msgspec.structs.replace(rollout.slim(), split_at=split_at),
        samples=[s.truncated(seq_len) for s in whole],
        truncated=sum(len(s) > seq_len for s in whole),
    )
