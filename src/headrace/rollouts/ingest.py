"""Ingest of replies and rollouts from other programs: lists become columns once, and wrong input is refused by a named cause.

    step_from_reply(reply, prompt=messages)     an OpenAI-style reply (chat or completion) with vLLM's token ids
    step_from_reply(reply, prompt_ids=ids)      a reply of vLLM's /inference/v1/generate, which repeats no prompt and has no text
    rollout_from_verifiers(output)              a rollout of a `verifiers` environment: a v0 dict, or an episode or trace of 0.4 and later
    rollout_from_verifiers(raw)                 the same as JSON text or msgpack, as environments in other processes send it

No input is trusted. A missing field, a wrong type or length, a NaN, text that is no Unicode or text of 50 MB raises RolloutRefused with the cause it is counted
under; a rollout is taken whole or not at all. The checks are in `checks.py`, episodes and traces in `episodes.py`, the forms of token columns in `wire.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.errors import RolloutRefused
from headrace.rollouts.checks import (
    Limits,
    error_chain,
    experts_from,
    mapping,
    number,
    plain_values,
    required,
    sampling_from,
    sequence,
    timing_from,
    version_spans_from,
)
from headrace.rollouts.episodes import rollout_from_record
from headrace.rollouts.records import Rollout, Step, StepTokens
from headrace.rollouts.values import model_values
from headrace.rollouts.wire import COLUMN_READERS, OPTIONAL_COLUMNS, decode_rollout, ids_column, logprobs_column

ENCODED = (bytes, bytearray, memoryview, str)
"""Types of rollouts that arrive as msgpack or JSON text."""
_MULTIMODAL = ("pixel_values", "image_grid_thw", "mm_kwargs", "multimodal")
_KNOWN = frozenset(
    ("example_id", "env_name", "task", "reward", "metrics", "error", "is_truncated", "stop_condition", "sampling_args", "timing", "trajectory", "draw")
)  # fmt: skip


# ------------------------------------------------------------------------------------------------- openai


def step_from_reply(
    reply: Mapping[str, Any], *, prompt: Any = (), prompt_ids: Any = None, choice: int = 0, limits: Limits | None = None
) -> Step:
    """The step of one choice of an OpenAI-style reply. The engine's `weight_versions` are kept.

    Args:
        reply: the JSON object that the server answered with. Without token ids in it the step has no tokens and needs `pretokenize`.
        prompt: the messages or the text that were sent.
        prompt_ids: the ids that were sent, for an engine that does not repeat them.
        choice: number of the choice.
        limits: the largest reply that is taken.
    """
    limits = limits or Limits()
    where = "the reply"
    if not isinstance(reply, Mapping):
        raise RolloutRefused("wrong_type", f"{where} is a {type(reply).__name__}, expected a JSON object")
    choices = required(reply, "choices", where)
    if not isinstance(choices, (list, tuple)) or not choice < len(choices) or not isinstance(choices[choice], Mapping):
        raise RolloutRefused("missing_field", f"{where} has no choice {choice}")
    said = choices[choice]
    ids = said.get("token_ids")
    if "message" in said:
        completion: Any = [plain_values(said["message"], "the message", limits)]
    elif ids is not None and "text" not in said:
        completion = ()
    else:
        completion = plain_values(required(said, "text", "the choice"), "the text", limits)
    asked = _prompt_column(said, reply, prompt_ids, limits)
    if asked is None and ids is not None and completion == ():
        raise RolloutRefused(
            "missing_field",
            "the reply has neither the prompt's ids nor a text: give the ids it was asked with (prompt_ids=...)",
        )
    tokens = None
    if asked is not None and ids is not None:
        logprobs = _reply_logprobs(said)
        column = ids_column(ids, "token_ids", limits.tokens)
        spans = version_spans_from(said.get("weight_versions"), np.arange(len(column)), "the choice", limits)
        tokens = StepTokens.answered(
            asked, column, logprobs_column(logprobs, "logprobs", limits.tokens),
            routed_experts=experts_from(said.get("routed_experts")), version_spans=spans,
        )  # fmt: skip
    return Step(
        prompt=plain_values(prompt, "the prompt", limits), completion=completion, tokens=tokens,
        is_truncated=said.get("finish_reason") == "length",
    )  # fmt: skip


def _prompt_column(said: Mapping[str, Any], reply: Mapping[str, Any], given: Any, limits: Limits) -> np.ndarray | None:
    """The prompt's ids from the reply, or from the caller; if both have them, they must be equal."""
    repeated = said.get("prompt_token_ids")
    repeated = reply.get("prompt_token_ids") if repeated is None else repeated
    column = None if repeated is None else ids_column(repeated, "prompt_token_ids", limits.tokens)
    if given is None:
        return column
    asked = ids_column(given, "prompt_ids", limits.tokens)
    if column is not None and not np.array_equal(column, asked):
        raise RolloutRefused(
            "malformed",
            f"the reply is to another prompt: it repeats {len(column)} ids, it was asked with {len(asked)} that are not the same",
        )
    return asked


def _reply_logprobs(said: Mapping[str, Any]) -> Any:
    logprobs = required(said, "logprobs", "the choice")
    if isinstance(logprobs, Mapping):
        if isinstance(content := logprobs.get("content"), (list, tuple)):
            try:
                return [entry["logprob"] for entry in content]
            except (TypeError, KeyError) as error:
                raise RolloutRefused("missing_field", "an entry of logprobs.content has no 'logprob'") from error
        return required(logprobs, "token_logprobs", "logprobs")
    return logprobs


# ---------------------------------------------------------------------------------------------- verifiers


def rollout_from_verifiers(
    output: Any, *, env_name: str | None = None, policy_version: int = 0, run: str = "", draw: int | str | None = None,
    limits: Limits | None = None,
) -> Rollout:  # fmt: skip
    """A rollout from the output of a `verifiers` environment.

    Args:
        output: a v0 dict, or a trace or an episode with one trace to train on, as a record or as the live object. JSON text and msgpack are decoded;
            experts of msgpack are views of its bytes: do not write over them.
        env_name: name of the environment; takes precedence over the rollout's own `env_name` and `task`.
        policy_version: version of the weights that the request was pinned to.
        run: name of the run, which keeps its samples apart in micro batches.
        draw: which draw of the example, where the rollout has none of its own.
        limits: the largest rollout that is taken.
    """
    limits = limits or Limits()
    output = decode_rollout(output) if isinstance(output, ENCODED) else model_values(output)
    if not isinstance(output, Mapping):
        raise RolloutRefused("wrong_type", f"the rollout is a {type(output).__name__}, expected names and values")
    if "traces" in output or ("nodes" in output and "trajectory" not in output):
        return rollout_from_record(
            output, env_name=env_name, policy_version=policy_version, run=run, draw=draw, limits=limits
        )
    name = env_name if env_name is not None else output.get("env_name", output.get("task"))
    example = required(output, "example_id", "the rollout")
    if isinstance(example, np.integer):
        example = int(example)
    if type(example) not in (int, str):
        raise RolloutRefused("wrong_type", f"example_id is {example!r:.40}, expected a number or a text")
    where = f"rollout of example {plain_values(example, 'example_id', limits)!r:.80}"
    if name is None:
        raise RolloutRefused("missing_field", f"{where} has neither 'env_name' nor 'task'")
    own_draw = output.get("draw")
    trajectory = sequence(required(output, "trajectory", where), f"the turns of the {where}", limits.steps)
    extra = {k: v for k, v in output.items() if k not in _KNOWN}
    return Rollout(
        example_id=example, env_name=plain_values(name, "env_name", limits), reward=number(required(output, "reward", where), "reward"),
        trajectory=tuple(_verifiers_step(s, i, limits) for i, s in enumerate(trajectory)),
        draw=draw if own_draw is None else int(number(own_draw, "draw")),
        metrics={k: number(v, f"metric {k!r}") for k, v in mapping(output.get("metrics"), "metrics").items()},
        error=error_chain(output.get("error"), limits), is_truncated=bool(output.get("is_truncated", False)),
        stop_condition=plain_values(output.get("stop_condition"), "stop_condition", limits),
        sampling_args=sampling_from(output.get("sampling_args"), limits), timing=timing_from(output.get("timing")),
        state=plain_values(mapping(extra, "the state"), "the state", limits), policy_version=policy_version, run=run,
    )  # fmt: skip


def _verifiers_step(step: Any, number: int, limits: Limits) -> Step:
    name = f"turn {number}"
    if not isinstance(step, Mapping):
        raise RolloutRefused("wrong_type", f"{name} is a {type(step).__name__}, expected names and values")
    tokens = step.get("tokens")
    columns = None
    if tokens is not None:
        if not isinstance(tokens, Mapping):
            raise RolloutRefused("wrong_type", f"the tokens of {name} are a {type(tokens).__name__}")
        images = {k: tokens[k] for k in _MULTIMODAL if tokens.get(k) is not None}
        read: dict[str, Any] = {
            column: reader(required(tokens, column, name), f"{column} of {name}", limits.tokens)
            for column, reader in COLUMN_READERS.items()
        }
        extra = {
            column: logprobs_column(tokens[field], f"{field} of {name}", limits.tokens)
            for field, column in OPTIONAL_COLUMNS.items()
            if tokens.get(field) is not None
        }
        columns = StepTokens(
            **read, routed_experts=experts_from(tokens.get("routed_experts")), multimodal=images or None, columns=extra
        )
    return Step(
        prompt=plain_values(step.get("prompt", ()), f"the prompt of {name}", limits),
        completion=plain_values(step.get("completion", ()), f"the completion of {name}", limits),
        tokens=columns, is_truncated=bool(step.get("is_truncated", False)),
    )  # fmt: skip
