"""How replies and rollouts of others enter: lists become columns once, and what is wrong is refused by name.

    step_from_reply(reply, prompt=messages)     an OpenAI-style reply (chat or completion) with vLLM's token ids
    rollout_from_verifiers(output)              a rollout of a `verifiers` environment, as the dict it returns
    rollout_from_json(raw)                      the same as JSON text
    rollout_from_msgpack(raw)                   the same in msgpack, as environments in other processes send it

Nothing here trusts its input. A missing field, a wrong type or length, a NaN, text that is no Unicode or that has 50 MB
raises RolloutRefused, which carries the cause it is counted under; nothing is half taken. Numbers become columns in `columns.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import ConfigError, RolloutRefused
from headrace.rollouts.columns import decoded_with_columns, ids_column, logprobs_column, mask_column
from headrace.rollouts.records import Rollout, RoutedExperts, Step, StepTokens

__all__ = [
    "CAUSES",
    "Limits",
    "experts_from",
    "rollout_from_json",
    "rollout_from_msgpack",
    "rollout_from_verifiers",
    "step_from_reply",
]

CAUSES = ("missing_field", "wrong_type", "wrong_length", "not_finite", "oversize", "not_unicode", "malformed", "routing", "no_tokens", "env_name", "tokenizer", "worker")  # fmt: skip
"""Every cause a rollout is refused for."""

_MULTIMODAL = ("pixel_values", "image_grid_thw", "mm_kwargs", "multimodal")
_KNOWN = frozenset(
    ("example_id", "env_name", "task", "reward", "metrics", "error", "is_truncated", "stop_condition", "sampling_args", "timing", "trajectory", "draw")
)  # fmt: skip
_TIMES = ("total", "setup", "generation", "model", "env", "scoring")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one rollout may bring along."""

    steps: int = 4096
    tokens: int = 4 << 20
    """In one step."""
    text: int = 32 << 20
    """Characters of one message or other value."""
    depth: int = 32

    def __post_init__(self) -> None:
        if min(self.steps, self.tokens, self.text, self.depth) < 1:
            raise ConfigError(f"limits of a rollout must be at least 1, got {self}")


# ------------------------------------------------------------------------------------------------ experts


def experts_from(value: Any) -> RoutedExperts | None:
    """`{"data", "shape"[, "start"]}` with raw bytes or base64 text, or an array of three dimensions."""
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        if value.ndim != 3 or value.dtype != np.uint8:
            raise RolloutRefused(
                "routing", f"routed experts are {value.dtype} of shape {list(value.shape)}, expected uint8 of three"
            )
        return RoutedExperts(data=np.ascontiguousarray(value), shape=value.shape)
    if not isinstance(value, Mapping):
        raise RolloutRefused("routing", f"routed experts are a {type(value).__name__}, expected data and shape")
    data, shape, start = value.get("data"), value.get("shape"), value.get("start", 0)
    if value.get("dtype", "uint8") != "uint8":
        raise RolloutRefused("routing", f"routed experts are {value['dtype']!r:.40}, expected uint8")
    if not isinstance(data, (bytes, bytearray, memoryview, str)):
        raise RolloutRefused(
            "routing", f"the data of routed experts is a {type(data).__name__}, expected bytes or base64"
        )
    numbers = list(shape) if isinstance(shape, (list, tuple)) else []
    if len(numbers) != 3 or any(type(n) is not int for n in [*numbers, start]):
        raise RolloutRefused("routing", f"routed experts have shape {shape!r:.80}, expected [rows, layers, topk]")
    if isinstance(data, str) and not data.isascii():
        raise RolloutRefused("routing", "routed experts are not base64: their text is not ASCII")
    return RoutedExperts(data=data, shape=(numbers[0], numbers[1], numbers[2]), start=start)


# --------------------------------------------------------------------------------------------- plain values


def _checked_text(value: Any, name: str, limits: Limits) -> Any:
    """The value, once it is known to be plain, to be Unicode and to be small enough to keep and to save."""
    pending: list[tuple[Any, int]] = [(value, 0)]
    room = limits.text
    while pending:
        item, depth = pending.pop()
        if isinstance(item, str):
            room -= len(item)
            # A lone surrogate passes through Python and fails only when somebody saves it.
            if not item.isascii() and room >= 0:
                try:
                    item.encode()
                except UnicodeEncodeError as error:
                    raise RolloutRefused("not_unicode", f"{name} holds a lone surrogate at character {error.start}") from error  # fmt: skip
        elif isinstance(item, (list, tuple)):
            pending += [(part, depth + 1) for part in item]
            room -= len(item)
        elif isinstance(
            item, (dict, Mapping)
        ):  # what is a dict is known at once, what is a Mapping only after a look through its bases
            pending += [(part, depth + 1) for pair in item.items() for part in pair]
            room -= len(item)
        elif isinstance(item, int):
            if not -(2**63) <= item < 2**64:
                raise RolloutRefused("wrong_type", f"{name} holds a whole number of more than 64 bits")
        elif not (item is None or isinstance(item, (float, np.ndarray, bytes))):
            raise RolloutRefused("wrong_type", f"{name} holds a {type(item).__name__}, expected plain values")
        if room < 0:
            raise RolloutRefused("oversize", f"{name} holds more than {limits.text:,} characters")
        if depth > limits.depth:
            raise RolloutRefused("malformed", f"{name} is nested more than {limits.depth} deep")
    return value


def _field(source: Mapping[str, Any], name: str, where: str) -> Any:
    try:
        return source[name]
    except KeyError:
        raise RolloutRefused("missing_field", f"{where} has no {name!r}") from None


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise RolloutRefused("wrong_type", f"{name} is {value!r:.40}, expected a number")
    if not math.isfinite(value):
        raise RolloutRefused("not_finite", f"{name} is {value}")
    return float(value)


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise RolloutRefused("wrong_type", f"{name} is a {type(value).__name__}, expected names and values")
    return value


# ------------------------------------------------------------------------------------------------- openai


def step_from_reply(
    reply: Mapping[str, Any], *, prompt: Any = (), choice: int = 0, limits: Limits | None = None
) -> Step:
    """The step of one choice of an OpenAI-style reply. Without token ids in it, the step has none and wants pretokenising."""
    limits = limits or Limits()
    where = "the reply"
    if not isinstance(reply, Mapping):
        raise RolloutRefused("wrong_type", f"{where} is a {type(reply).__name__}, expected a JSON object")
    choices = _field(reply, "choices", where)
    if not isinstance(choices, (list, tuple)) or not choice < len(choices) or not isinstance(choices[choice], Mapping):
        raise RolloutRefused("missing_field", f"{where} has no choice {choice}")
    said = choices[choice]
    if "message" in said:
        completion: Any = [_checked_text(said["message"], "the message", limits)]
    else:
        completion = _checked_text(_field(said, "text", "the choice"), "the text", limits)
    prompt_ids = said.get("prompt_token_ids", reply.get("prompt_token_ids"))
    ids = said.get("token_ids")
    tokens = None
    if prompt_ids is not None and ids is not None:
        logprobs = _reply_logprobs(said)
        prompt_column = ids_column(prompt_ids, "prompt_token_ids", limits.tokens)
        column = ids_column(ids, "token_ids", limits.tokens)
        tokens = StepTokens.of_columns(
            prompt_ids=prompt_column, prompt_mask=np.zeros(len(prompt_column), np.uint8), completion_ids=column,
            completion_mask=np.ones(len(column), np.uint8),
            completion_logprobs=logprobs_column(logprobs, "logprobs", limits.tokens),
            routed_experts=experts_from(said.get("routed_experts")),
        )  # fmt: skip
    return Step(
        prompt=_checked_text(prompt, "the prompt", limits), completion=completion, tokens=tokens,
        is_truncated=said.get("finish_reason") == "length",
    )  # fmt: skip


def _reply_logprobs(said: Mapping[str, Any]) -> Any:
    logprobs = _field(said, "logprobs", "the choice")
    if isinstance(logprobs, Mapping):
        if isinstance(content := logprobs.get("content"), (list, tuple)):
            try:
                return [entry["logprob"] for entry in content]
            except (TypeError, KeyError) as error:
                raise RolloutRefused("missing_field", "an entry of logprobs.content has no 'logprob'") from error
        return _field(logprobs, "token_logprobs", "logprobs")
    return logprobs


# ---------------------------------------------------------------------------------------------- verifiers


def rollout_from_verifiers(
    output: Mapping[str, Any], *, env_name: str | None = None, policy_version: int = 0, run: str = "", draw: int = 0,
    limits: Limits | None = None, after_turn: Callable[[], None] | None = None,
) -> Rollout:  # fmt: skip
    """A rollout from the dict that a `verifiers` environment returns. `env_name` stands in for its own name of the task.
    `after_turn` is called after each turn, for whoever must not be busy for long at a time."""
    limits = limits or Limits()
    if not isinstance(output, Mapping):
        raise RolloutRefused("wrong_type", f"the rollout is a {type(output).__name__}, expected names and values")
    name = env_name if env_name is not None else output.get("env_name", output.get("task"))
    example = _field(output, "example_id", "the rollout")
    if isinstance(example, np.integer):
        example = int(example)
    if type(example) not in (int, str):
        raise RolloutRefused("wrong_type", f"example_id is {example!r:.40}, expected a number or a text")
    where = f"rollout of example {_checked_text(example, 'example_id', limits)!r:.80}"
    if name is None:
        raise RolloutRefused("missing_field", f"{where} has neither 'env_name' nor 'task'")
    trajectory = _field(output, "trajectory", where)
    if not isinstance(trajectory, (list, tuple)):
        raise RolloutRefused("wrong_type", f"the trajectory of the {where} is a {type(trajectory).__name__}")
    if len(trajectory) > limits.steps:
        raise RolloutRefused(
            "oversize", f"the {where} has {len(trajectory):,} turns, at most {limits.steps:,} are taken"
        )
    extra = {k: v for k, v in output.items() if k not in _KNOWN}
    try:
        return Rollout(
            example_id=example, env_name=_checked_text(name, "env_name", limits), reward=_number(_field(output, "reward", where), "reward"),
            trajectory=tuple(_verifiers_step(s, i, limits, after_turn) for i, s in enumerate(trajectory)),
            draw=int(_number(output.get("draw", draw), "draw")),
            metrics={k: _number(v, f"metric {k!r}") for k, v in _mapping(output.get("metrics"), "metrics").items()},
            error=_error_chain(output.get("error"), limits), is_truncated=bool(output.get("is_truncated", False)),
            stop_condition=_checked_text(output.get("stop_condition"), "stop_condition", limits),
            sampling_args=_sampling(output.get("sampling_args"), limits), timing=_timing(output.get("timing")),
            state=_checked_text(_mapping(extra, "the state"), "the state", limits), policy_version=policy_version, run=run,
        )  # fmt: skip
    except ConfigError as error:
        raise RolloutRefused("env_name", str(error)) from error


def _verifiers_step(step: Any, number: int, limits: Limits, after_turn: Callable[[], None] | None) -> Step:
    name = f"turn {number}"
    if not isinstance(step, Mapping):
        raise RolloutRefused("wrong_type", f"{name} is a {type(step).__name__}, expected names and values")
    tokens = step.get("tokens")
    columns = None
    if tokens is not None:
        if not isinstance(tokens, Mapping):
            raise RolloutRefused("wrong_type", f"the tokens of {name} are a {type(tokens).__name__}")
        ids = ("prompt_ids", "completion_ids")
        masks = ("prompt_mask", "completion_mask")
        extra = {k: tokens[k] for k in _MULTIMODAL if tokens.get(k) is not None}
        columns = StepTokens.of_columns(
            **{n: ids_column(_field(tokens, n, name), f"{n} of {name}", limits.tokens) for n in ids},
            **{n: mask_column(_field(tokens, n, name), f"{n} of {name}", limits.tokens) for n in masks},
            completion_logprobs=logprobs_column(_field(tokens, "completion_logprobs", name), f"completion_logprobs of {name}", limits.tokens),
            routed_experts=experts_from(tokens.get("routed_experts")),
            multimodal=extra or None,
        )  # fmt: skip
    if after_turn is not None:
        after_turn()
    return Step(
        prompt=_checked_text(step.get("prompt", ()), f"the prompt of {name}", limits),
        completion=_checked_text(step.get("completion", ()), f"the completion of {name}", limits),
        tokens=columns, is_truncated=bool(step.get("is_truncated", False)),
    )  # fmt: skip


def _error_chain(error: Any, limits: Limits) -> tuple[str, ...] | None:
    if error is None:
        return None
    _checked_text(error, "the error", limits)
    if isinstance(error, Mapping):
        error = error.get("error_chain_str") or error.get("error") or str(dict(error))
    if isinstance(error, (list, tuple)):
        return tuple(str(e) for e in error) or ("an error without a name",)
    return tuple(part.strip() for part in str(error).split(" -> ")) or ("an error without a name",)


def _sampling(value: Any, limits: Limits) -> Mapping[str, Any]:
    args = _mapping(_checked_text(value, "sampling_args", limits), "sampling_args")
    if args.get("temperature") is not None:
        _number(args["temperature"], "temperature")
    return args


def _timing(value: Any) -> dict[str, float]:
    """Seconds by name; `generation_ms` is generation in milliseconds. What is no time we know stays out."""
    times: dict[str, float] = {}
    for key, raw in _mapping(value, "timing").items():
        base, scale = (key[:-3], 1e-3) if key.endswith("_ms") else (key, 1.0)
        if base in _TIMES and isinstance(raw, (int, float)) and not isinstance(raw, bool):
            times[base] = _number(raw, f"timing {key!r}") * scale
    return times


def rollout_from_json(raw: bytes | str, **more: Any) -> Rollout:
    """A `verifiers` rollout from JSON text. Experts are base64 there."""
    return rollout_from_verifiers(decoded_with_columns(raw), **more)


def rollout_from_msgpack(raw: bytes | bytearray | memoryview, **more: Any) -> Rollout:
    """A `verifiers` rollout from msgpack. Its experts are views of these bytes: do not write over them."""
    return rollout_from_verifiers(decoded_with_columns(raw), **more)


def refused_counts(refusals: Sequence[RolloutRefused]) -> dict[str, int]:
    """How many rollouts were refused, by cause."""
    counts = dict.fromkeys(CAUSES, 0)
    for refusal in refusals:
        counts[refusal.cause] += 1
    return counts
