"""Filters: which rollouts send no sample, and why (`apply_filters`).

Filters are applied in their order, and the first detection counts. A filter that only monitors is counted;
one that enforces withholds the rollout's samples. A filtered rollout stays in metrics and baselines.

    gibberish       a rare token (id > 100,000) that the policy itself found less likely than chance: logprob < −ln V − 2
    repetition      3,000 completion tokens in a row with p > 0.99, counted across turns
    zero_advantage  an advantage of 0, which teaches nothing: enforced
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.errors import ConfigError
from headrace.rollouts.records import Rollout


class Filter(Protocol):
    """A filter. `name` is its metric key; `enforce` withholds the samples of detected rollouts."""

    @property
    def name(self) -> str: ...
    @property
    def enforce(self) -> bool: ...
    def detects(self, rollout: Rollout, advantage: float) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GibberishFilter:
    """Detects rare tokens that were less likely than chance."""

    vocab_size: int
    id_above: int = 100_000
    margin: float = 2.0
    enforce: bool = False
    name: str = "gibberish"

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ConfigError(f"the gibberish filter needs the size of the vocabulary, got {self.vocab_size}")

    def detects(self, rollout: Rollout, advantage: float) -> bool:
        floor = -math.log(self.vocab_size) - self.margin
        return any(
            bool(((t.completion_ids > self.id_above) & (t.completion_logprobs < floor)).any())
            for s in rollout.trajectory
            if (t := s.tokens) is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionFilter:
    """Detects long runs of tokens that the policy was sure of."""

    window: int = 3_000
    probability: float = 0.99
    enforce: bool = False
    name: str = "repetition"

    def __post_init__(self) -> None:
        if self.window < 1 or not 0 < self.probability < 1:
            raise ConfigError(
                f"the repetition filter needs a window of at least 1 and a probability in (0, 1), got {self.window} and {self.probability}"
            )

    def detects(self, rollout: Rollout, advantage: float) -> bool:
        logprobs = [step.tokens.completion_logprobs for step in rollout.trajectory if step.tokens is not None]
        unsure = ~(np.concatenate([*logprobs, [-np.inf]], dtype=np.float32) > np.float32(math.log(self.probability)))
        runs = np.diff(np.flatnonzero(unsure), prepend=-1) - 1
        return int(runs.max()) >= self.window


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroAdvantageFilter:
    """Detects an advantage of exactly 0."""

    enforce: bool = True
    name: str = "zero_advantage"

    def detects(self, rollout: Rollout, advantage: float) -> bool:
        return advantage == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """The results of the filters, by rollout."""

    detected: tuple[str | None, ...]
    """Name of the first filter that detected something; None without a detection."""
    sends: tuple[bool, ...]
    """Whether the rollout's samples go to the trainer."""
    counts: dict[str, int]
    """Detections by filter."""


def apply_filters(filters: Sequence[Filter], rollouts: Sequence[Rollout], advantages: Sequence[float]) -> Filtered:
    """Apply the filters to every rollout."""
    names = [f.name for f in filters]
    if len(set(names)) != len(names):
        raise ConfigError(f"filters must have different names, got {names}")
    detected: list[str | None] = []
    sends: list[bool] = []
    counts = dict.fromkeys(names, 0)
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        found = next((f for f in filters if f.detects(rollout, advantage)), None)
        detected.append(None if found is None else found.name)
        sends.append(found is None or not found.enforce)
        if found is not None:
            counts[found.name] += 1
    return Filtered(detected=tuple(detected), sends=tuple(sends), counts=counts)
