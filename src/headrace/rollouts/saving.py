"""JSON lines for people: `save_rollouts` (one line a rollout) and `export_tokens` (one line a packed sequence).

A line holds fixed fields, then `trajectory` and `sampling_args`, then the environment's `state_columns` in their order,
each once. orjson holds the GIL for the whole of a call, so a line is made turn by turn: one call for a rollout of
30 turns and 15k tokens would stall the event loop. Call these functions off the loop. Routed experts are not saved, only their shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from headrace.errors import ConfigError
from headrace.files import publish
from headrace.rollouts.records import STEP_COLUMNS, Rollout, Step

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def save_rollouts(
    path: Path | str, rollouts: Iterable[Rollout], *, advantages: Sequence[float] | None = None,
    state_columns: Mapping[str, Sequence[str]] | None = None, tokens: bool = False, durable: bool = True,
) -> int:  # fmt: skip
    """Publish one JSON line a rollout at `path`; how many bytes.

    Args:
        path: the file to write.
        rollouts: written in their order.
        advantages: one for each rollout (ValueError otherwise); None leaves them out.
        state_columns: fields of the environment's state that are saved, by environment.
        tokens: save ids, masks and log-probs too.
        durable: sync the file.
    """
    path = Path(path)

    def lines() -> Iterator[bytes]:
        for rollout, advantage in zip(
            rollouts, itertools.repeat(None) if advantages is None else advantages, strict=advantages is not None
        ):
            yield _line(rollout, advantage, (state_columns or {}).get(rollout.env_name, ()), tokens)

    path.parent.mkdir(parents=True, exist_ok=True)
    publish(path, lines(), replace=True, durable=durable)
    return path.stat().st_size


def _line(rollout: Rollout, advantage: float | None, columns: Sequence[str], tokens: bool) -> bytes:
    line: dict[str, Any] = {
        "example_id": rollout.example_id, "env_name": rollout.env_name, "draw": rollout.draw, "reward": rollout.reward,
        "metrics": rollout.metrics, "error": rollout.error, "is_truncated": rollout.is_truncated,
        "stop_condition": rollout.stop_condition, "timing": rollout.timing, "policy_version": rollout.policy_version,
    }  # fmt: skip
    if rollout.split_at:
        line["split_at"] = rollout.split_at
    if advantage is not None:
        line["advantage"] = advantage
    line["trajectory"] = [orjson.Fragment(_json(_step(step, tokens))) for step in rollout.trajectory]
    line["sampling_args"] = rollout.sampling_args
    for column in columns:
        line.setdefault(column, orjson.Fragment(_json(rollout.state.get(column))))
    return _json(line) + b"\n"


def _step(step: Step, tokens: bool) -> dict[str, Any]:
    told: dict[str, Any] = {"prompt": step.prompt, "completion": step.completion, "is_truncated": step.is_truncated}
    if (columns := step.tokens) is None:
        return told
    told["prompt_tokens"], told["completion_tokens"] = len(columns.prompt_ids), len(columns.completion_ids)
    if columns.routed_experts is not None:
        told["routed_experts"] = columns.routed_experts.shape
    if columns.version_spans:
        told["weight_versions"] = [list(span) for span in columns.version_spans]
    if tokens:
        told |= {name: getattr(columns, name) for name in STEP_COLUMNS}
    return told


def _json(value: Any) -> bytes:
    return orjson.dumps(value, default=_told, option=_OPTIONS)


def _told(value: Any) -> Any:
    """JSON values for objects that orjson cannot encode."""
    if isinstance(value, np.ndarray):  # orjson takes contiguous ones of the usual types itself
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": len(value)}
    raise TypeError(f"a {type(value).__name__} cannot be saved as JSON")


def export_tokens(
    path: Path | str, batches: Sequence[Mapping[str, Any]], *, logprobs: Sequence[np.ndarray], entropy: Sequence[np.ndarray],
    durable: bool = True,
) -> int:  # fmt: skip
    """Publish one JSON line a packed sequence at `path`, with the trainer's inputs and results for each token; how many lines.

    Args:
        path: the file to write.
        batches: micro batches of `TrainingBatch.micro_batches(rank)`.
        logprobs, entropy: the trainer's own, one row a micro batch. Numbers that are not finite become null.
        durable: sync the file.
    """
    path = Path(path)

    def lines() -> Iterator[bytes]:
        for micro, ours, spread in zip(batches, logprobs, entropy, strict=True):
            tokens = len(micro["ids"])
            if len(ours) != tokens or len(spread) != tokens:
                raise ConfigError(
                    f"a packed sequence of {tokens} tokens has {len(ours)} logprobs and {len(spread)} entropies of the trainer"
                )
            with np.errstate(over="ignore", invalid="ignore"):
                log_ratio = np.asarray(ours, np.float32) - micro["logprobs"]
                ratio = np.exp(log_ratio)
                kl = np.maximum(np.expm1(log_ratio) - log_ratio, 0)  # as in headrace.train.rl
            value = {
                "run": micro["run"], "mode": micro["mode"], "env": micro["env"], "ids": micro["ids"], "positions": micro["positions"],
                "mask": micro["mask"], "advantages": micro["advantages"], "inference_logprobs": micro["logprobs"],
                "trainer_logprobs": np.asarray(ours, np.float32), "entropy": np.asarray(spread, np.float32),
                "mismatch_kl": kl, "importance_ratio": ratio,
            }  # fmt: skip
            yield _json(value) + b"\n"

    path.parent.mkdir(parents=True, exist_ok=True)
    publish(path, lines(), replace=True, durable=durable)
    return len(batches)
