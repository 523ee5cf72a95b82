"""Checks of untrusted input: plain values, numbers, names, routed experts. Each raises RolloutRefused with the cause it is counted under."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from headrace.errors import ConfigError, RolloutRefused
from headrace.rollouts.records import RoutedExperts, VersionSpan
from headrace.rollouts.values import model_values

_TIMES = ("total", "setup", "generation", "model", "env", "scoring")
"""Times that a rollout keeps, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest rollout that is taken."""

    steps: int = 4096
    """Turns."""
    tokens: int = 4 << 20
    """Tokens of one turn."""
    text: int = 32 << 20
    """Characters of one message or other value."""
    depth: int = 32
    """Levels of nesting."""

    def __post_init__(self) -> None:
        if min(self.steps, self.tokens, self.text, self.depth) < 1:
            raise ConfigError(f"limits of a rollout must be at least 1, got {self}")


# ------------------------------------------------------------------------------------------------ experts


def experts_from(value: Any) -> RoutedExperts | None:
    """`{"data", "shape"[, "start"]}` with raw bytes or base64 text, or an array of three dimensions."""
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        value = {"data": np.ascontiguousarray(value), "shape": value.shape, "dtype": value.dtype.name}
    try:
        return msgspec.convert(value, RoutedExperts)
    except msgspec.ValidationError as error:
        raise RolloutRefused(
            "routing", f"routed experts: expected data and shape [rows, layers, topk] of uint8. {error}"
        ) from error


# --------------------------------------------------------------------------------------------- plain values


def plain_values(value: Any, name: str, limits: Limits) -> Any:
    """The value, if it is plain, Unicode and within the limits. Message objects become dicts."""
    pending: list[tuple[Any, int]] = [(value, 0)]
    room = limits.text
    while pending:
        item, depth = pending.pop()
        if isinstance(item, str):
            room -= len(item)
            # A lone surrogate passes through Python and fails only when the rollout is saved.
            if not item.isascii() and room >= 0:
                try:
                    item.encode()
                except UnicodeEncodeError as error:
                    raise RolloutRefused("not_unicode", f"{name} holds a lone surrogate at character {error.start}") from error  # fmt: skip
        elif isinstance(item, (list, tuple)):
            pending += [(part, depth + 1) for part in item]
            room -= len(item)
        elif isinstance(item, (dict, Mapping)):  # dict first: the check against the abstract Mapping is slow
            pending += [(part, depth + 1) for pair in item.items() for part in pair]
            room -= len(item)
        elif isinstance(item, int):
            if not -(2**63) <= item < 2**64:
                raise RolloutRefused("wrong_type", f"{name} holds a whole number of more than 64 bits")
        elif not (item is None or isinstance(item, (float, np.ndarray, bytes))):
            if hasattr(item, "model_dump") and not isinstance(item, type):
                try:
                    value = _without_models(value)
                except Exception as error:  # raised by the user's model
                    raise RolloutRefused("wrong_type", f"{name} holds a {type(item).__name__} whose model_dump failed: {error}") from error  # fmt: skip
                return plain_values(value, name, limits)
            raise RolloutRefused("wrong_type", f"{name} holds a {type(item).__name__}, expected plain values")
        if room < 0:
            raise RolloutRefused("oversize", f"{name} holds more than {limits.text:,} characters")
        if depth > limits.depth:
            raise RolloutRefused("malformed", f"{name} is nested more than {limits.depth} deep")
    return value


def _without_models(value: Any) -> Any:
    """The value with every pydantic model replaced by a dict: live environments hold messages and tools as models."""
    value = model_values(value)
    if isinstance(value, (list, tuple)):
        return [_without_models(part) for part in value]
    if isinstance(value, Mapping):
        return {key: _without_models(part) for key, part in value.items()}
    return value


def required(source: Mapping[str, Any], name: str, where: str) -> Any:
    """The field called `name`; refused as `missing_field` if it is not there."""
    try:
        return source[name]
    except KeyError:
        raise RolloutRefused("missing_field", f"{where} has no {name!r}") from None


def number(value: Any, name: str) -> float:
    """A finite number as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise RolloutRefused("wrong_type", f"{name} is {value!r:.40}, expected a number")
    if not math.isfinite(value):
        raise RolloutRefused("not_finite", f"{name} is {value}")
    return float(value)


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Names and values; None becomes {}."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise RolloutRefused("wrong_type", f"{name} is a {type(value).__name__}, expected names and values")
    return value


def sequence(value: Any, name: str, most: int | None = None) -> list[Any] | tuple[Any, ...]:
    """A list of at most `most` entries."""
    if not isinstance(value, (list, tuple)):
        raise RolloutRefused("wrong_type", f"{name} are a {type(value).__name__}, expected a list")
    if most is not None and len(value) > most:
        raise RolloutRefused("oversize", f"{name} are {len(value):,}, at most {most:,} are taken")
    return value


def error_chain(error: Any, limits: Limits) -> tuple[str, ...] | None:
    """Messages of a chain of errors, outermost first; None without an error. `error` is an exception, a text, a list of texts, or a record with a chain."""
    if error is None:
        return None
    if isinstance(error, BaseException):
        chain: list[str] = []
        cause: BaseException | None = error
        while cause is not None and len(chain) < limits.depth:
            chain.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__
        error = chain
    error = plain_values(error, "the error", limits)
    if isinstance(error, Mapping):
        error = error.get("error_chain_str") or error.get("error") or str(dict(error))
    if isinstance(error, (list, tuple)):
        return tuple(str(e) for e in error) or ("an error without a name",)
    return tuple(part.strip() for part in str(error).split(" -> ")) or ("an error without a name",)


def sampling_from(value: Any, limits: Limits) -> Mapping[str, Any]:
    """Sampling arguments by name; the temperature is checked to be a number."""
    args = mapping(plain_values(value, "sampling_args", limits), "sampling_args")
    if args.get("temperature") is not None:
        number(args["temperature"], "temperature")
    return args


def timing_from(value: Any) -> dict[str, float]:
    """Seconds by name. `generation_ms` is in milliseconds; a record has a `duration`, or a `start` and an `end`. Other names are left out."""
    times: dict[str, float] = {}
    for key, raw in mapping(value, "timing").items():
        base, scale = (key[:-3], 1e-3) if key.endswith("_ms") else (key, 1.0)
        if isinstance(raw, Mapping):
            raw = duration_of(raw)
        if base in _TIMES and isinstance(raw, (int, float)) and not isinstance(raw, bool):
            times[base] = number(raw, f"timing {key!r}") * scale
    return times


def duration_of(span: Mapping[str, Any]) -> float | None:
    """Seconds of a span: its `duration`, or its `end` less its `start`. None without either, or if it has not ended."""
    start, end, told = span.get("start"), span.get("end"), span.get("duration")
    if isinstance(told, (int, float)):
        return told
    return max(0.0, end - start) if isinstance(start, (int, float)) and isinstance(end, (int, float)) and end else None


def version_spans_from(value: Any, places: np.ndarray, name: str, limits: Limits) -> tuple[VersionSpan, ...]:
    """Which weights sampled which completion tokens, from `[{"version", "start", "end"}, ...]` as vLLM and verifiers write it. `start` and `end` count
    sampled tokens; `places` is where those are in the completion."""
    spans, what = [], f"weight_versions of {name}"
    for span in plain_values(sequence(() if value is None else value, what), what, limits):
        fields = mapping(span, what)
        version, start, end = (required(fields, key, what) for key in ("version", "start", "end"))
        if not isinstance(version, (str, int)) or type(start) is not int or type(end) is not int:
            raise RolloutRefused("wrong_type", f"{what} hold {dict(fields)!r:.80}")
        if not 0 <= start <= end <= len(places):
            raise RolloutRefused("wrong_length", f"{what} tell of tokens {start} to {end}; {len(places)} were sampled")
        if start < end:
            spans.append(VersionSpan(str(version), int(places[start]), int(places[end - 1]) + 1))
    return tuple(spans)
