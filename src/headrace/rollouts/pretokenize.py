"""Tokens for turns whose engine returned none: `pretokenize`.

    render(prompt, generation prompt on)   a b c <assistant>
    render(prompt + completion)            a b c <assistant> d e </s>
    prompt_ids = their longest common prefix; completion_ids = the rest of the second

`needs_tokens` is a cheap check, so a rollout whose engine returned ids costs nothing. A completion that is tokenised here has no log-probs of its
engine: they are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.errors import RolloutRefused
from headrace.rollouts.records import Rollout, Step, StepTokens, common_prefix

Render = Callable[[Sequence[Any], bool], Sequence[int]]
"""Converts messages to ids; the second argument says whether the generation prompt follows."""


def needs_tokens(rollouts: Iterable[Rollout]) -> bool:
    """Whether any turn of any of them has no tokens."""
    return any(step.tokens is None for rollout in rollouts for step in rollout.trajectory)


def pretokenize(rollout: Rollout, render: Render) -> Rollout:
    """The rollout with tokens in every turn; the same object if none was missing."""
    if not needs_tokens((rollout,)):
        return rollout
    steps = [
        step if step.tokens is not None else msgspec.structs.replace(step, tokens=_tokens(step, number, rollout, render))
        for number, step in enumerate(rollout.trajectory)
    ]  # fmt: skip
    return msgspec.structs.replace(rollout, trajectory=tuple(steps))


def _tokens(step: Step, number: int, rollout: Rollout, render: Render) -> StepTokens:
    where = f"turn {number} of the rollout of example {rollout.example_id!r} in {rollout.env_name}"
    prompt, completion = _messages(step.prompt, "user", where), _messages(step.completion, "assistant", where)
    try:
        asked = np.asarray(render(prompt, True), np.int32)
        whole = np.asarray(render([*prompt, *completion], False), np.int32)
    except Exception as error:  # raised by the user's template or tokenizer
        raise RolloutRefused(
            "tokenizer",
            f"{where} could not be rendered: {type(error).__name__}: {error}. Mend the template, or let the engine return token ids",
        ) from error
    cut = common_prefix(asked, whole)
    return StepTokens.answered(whole[:cut], whole[cut:], np.zeros(len(whole) - cut, np.float32))


def _messages(value: Any, role: str, where: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, (list, tuple)):
        return list(value)
    raise RolloutRefused("wrong_type", f"{where} has a {role} part of type {type(value).__name__}, expected messages")
