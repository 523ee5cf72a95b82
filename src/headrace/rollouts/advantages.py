"""Advantages: how much better a rollout was than its group (`compute_advantages`).

    group (env_name, example_id, draw)   rewards 1, 0, 1   ->   advantages 1/3, -2/3, 1/3

An advantage function is called once per group, whatever the group's size, and returns one float a rollout. A group of equal rewards,
and so every group of one, gets exactly 0: subtracting a rounded mean would leave 1e-17, which the zero-advantage filter does not catch.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from headrace.errors import ConfigError, found_text
from headrace.rollouts.records import Group, Rollout, rollouts_by_group

AdvantageKind = Literal["default", "std", "leave_one_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """One group."""

    rollouts: Sequence[Rollout]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOutputs:
    """One number for each rollout of the group, in its order."""

    advantages: list[float]


AdvantageFn = Callable[[AdvantageInputs], AdvantageOutputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """Which advantage function, and its arguments."""

    kind: AdvantageKind | Literal["custom"] = "default"
    """default: r − mean(r). std: that, divided by the group's standard deviation. leave_one_out: r − mean of the others. custom: `import_path`."""
    length_penalty: float = 0.0
    """α: a reward counts r / (1 + α · length / mean length of the group). 0 leaves rewards alone. Not for custom."""
    import_path: str = ""
    """`package.module:function` or `package.module.function`, for custom."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the custom function."""

    def __post_init__(self) -> None:
        if self.kind not in ("default", "std", "leave_one_out", "custom"):
            raise ConfigError(
                f"advantage kind is {self.kind!r}, expected 'default', 'std', 'leave_one_out' or 'custom'"
            )
        if not 0 <= self.length_penalty < math.inf:
            raise ConfigError(f"length_penalty is {self.length_penalty}, expected 0 or more")
        if (self.kind == "custom") != bool(self.import_path):
            raise ConfigError("a custom advantage needs an import_path, and only a custom one takes it")


def advantage_named(name: str) -> AdvantageConfig:
    """Return the advantage that a config names: `mean` (the default kind), another kind, or `package.module:function`. ValueError for any other name."""
    if ":" in name:
        return AdvantageConfig(kind="custom", import_path=name)
    kinds: dict[str, AdvantageKind] = {"mean" if kind == "default" else kind: kind for kind in get_args(AdvantageKind)}
    if name not in kinds:
        expected = ", ".join(f'"{known}"' for known in kinds)
        raise ValueError(f'expected {expected} or "package.module:function", found {found_text(name)}')
    return AdvantageConfig(kind=kinds[name])


def default_advantage(
    inputs: AdvantageInputs, *, length_penalty: float = 0.0, kind: AdvantageKind = "default"
) -> AdvantageOutputs:  # fmt: skip
    """The advantages of a group by one of the built-in kinds; `length_penalty` and `kind` as in AdvantageConfig."""
    rewards = [r.reward for r in inputs.rollouts]
    if length_penalty:
        lengths = [r.completion_length for r in inputs.rollouts]
        mean_length = sum(lengths) / len(lengths)
        if mean_length:
            rewards = [r / (1 + length_penalty * n / mean_length) for r, n in zip(rewards, lengths, strict=True)]
    if min(rewards) == max(rewards):
        return AdvantageOutputs(advantages=[0.0] * len(rewards))
    mean = math.fsum(rewards) / len(rewards)
    advantages = [r - mean for r in rewards]
    if kind == "std":
        deviation = math.sqrt(math.fsum(a * a for a in advantages) / len(advantages))
        advantages = [a / deviation for a in advantages]
    elif kind == "leave_one_out":  # r − (sum − r) / (n − 1) = (r − mean) n / (n − 1)
        advantages = [a * len(advantages) / (len(advantages) - 1) for a in advantages]
    return AdvantageOutputs(advantages=advantages)


def compute_advantages(rollouts: Sequence[Rollout], advantage: AdvantageConfig | AdvantageFn | None) -> list[float]:
    """One advantage for each rollout. `advantage` None: the reward itself."""
    if advantage is None:
        return [r.reward for r in rollouts]
    function, name = _resolved(advantage)
    advantages = [0.0] * len(rollouts)
    for group, members in rollouts_by_group(rollouts).items():
        outputs = function(AdvantageInputs(rollouts=[rollouts[at] for at in members]))
        for at, value in zip(members, _checked(outputs, len(members), name, group), strict=True):
            advantages[at] = value
    return advantages


def _checked(outputs: Any, wanted: int, name: str, group: Group) -> list[float]:
    told = f"the advantage function {name} was given a group of {wanted} (example {group[1]!r} in {group[0]})"
    values = getattr(outputs, "advantages", None)
    if not isinstance(values, list):
        raise ConfigError(f"{told} and returned {outputs!r:.80}, expected AdvantageOutputs(advantages=[...])")
    if len(values) != wanted:
        raise ConfigError(f"{told} and returned {len(values)} advantages, expected one for each")
    try:
        floats = [float(v) for v in values]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{told} and returned something that is no number: {error}") from error
    if not all(map(math.isfinite, floats)):
        raise ConfigError(f"{told} and returned {floats}: an advantage must be finite")
    return floats


def _resolved(advantage: AdvantageConfig | AdvantageFn) -> tuple[AdvantageFn, str]:
    if not isinstance(advantage, AdvantageConfig):
        return advantage, getattr(advantage, "__qualname__", repr(advantage))
    if advantage.kind != "custom":
        penalty, kind = advantage.length_penalty, advantage.kind
        return (lambda inputs: default_advantage(inputs, length_penalty=penalty, kind=kind)), kind
    path = advantage.import_path
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"the advantage function {path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ConfigError(f"{path!r} is a {type(function).__name__}, expected a function")
    kwargs = dict(advantage.kwargs)
    return (lambda inputs: function(inputs, **kwargs)), path
