"""The wire contract: binary columns, arrays, lists, msgpack and JSON text mean the same rollout, or are refused for the same cause."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import RolloutRefused
from headrace.rollouts import (
    Limits,
    binary_rollout,
    encode_rollout,
    interleave_rollout,
    rollout_from_verifiers,
)
from headrace.rollouts.wire import decode_rollout

DTYPES = {"prompt_ids": "<i4", "completion_ids": "<i4", "prompt_mask": "u1", "completion_mask": "u1", "completion_logprobs": "<f4"}  # fmt: skip
FIELDS = tuple(DTYPES)
GROUPS = (("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask", "completion_logprobs"))

odd = st.sampled_from([None, -1, 2**30, 2**31 - 1, 2**31, 2**40, 1.5, "7", True, [1], {}, 300, 70_000, -0.25, 0, 2])


@st.composite
def lists(draw, plain):
    """Numbers of one kind, now and then with something else among them."""
    length = draw(st.sampled_from([0, 1, 3, 40]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if plain == "ids":
        value = rng.integers(0, int(rng.choice([2, 128, 300, 70_000, 2**31])), length).tolist()
    elif plain == "mask":
        value = rng.integers(0, 2, length).tolist()
        value = [bool(v) for v in value] if draw(st.booleans()) else value
    else:
        value = (-rng.random(length) * 10.0 ** rng.integers(-9, 9)).tolist()
    if length and draw(st.integers(0, 5)) == 0:
        value[draw(st.integers(0, length - 1))] = draw(odd)
    return value


@st.composite
def rollouts(draw):
    turns, context = [], []
    for _ in range(draw(st.integers(0, 3))):
        tokens = {name: draw(lists("ids" if "ids" in name else "mask" if "mask" in name else "logprobs")) for name in FIELDS}  # fmt: skip
        if draw(st.booleans()):  # a context that goes on where the one before ended, as most do
            tokens["prompt_ids"] = context + tokens["prompt_ids"]
        for ids, *others in GROUPS:
            if draw(st.integers(0, 5)):  # lengths that agree
                for name in others:
                    fill = tokens[name] or [0.0 if name == "completion_logprobs" else 1]
                    tokens[name] = (fill * (len(tokens[ids]) // len(fill) + 1))[: len(tokens[ids])]
        context = [*tokens["prompt_ids"], *tokens["completion_ids"]]
        names = draw(st.permutations(FIELDS))
        tokens = {name: tokens[name] for name in names}
        if draw(st.integers(0, 5)) == 0:
            tokens.pop(names[0])
        turns.append({"prompt": [{"role": "user", "content": 'é \\" ]}'}], "completion": [], "tokens": tokens})
    value = {"example_id": 1, "reward": 0.5, "trajectory": turns, "task": "game", "answer": {"trajectory": [{"tokens": [1, 2]}]}}  # fmt: skip
    return {name: value[name] for name in draw(st.permutations(tuple(value)))}


def told(way, raw):
    """What a way makes of a rollout, or the cause it refuses it under."""
    try:
        rollout = way(raw)
    except RolloutRefused as error:
        return error.cause
    columns = [tuple(getattr(s.tokens, name).tobytes() for name in FIELDS) for s in rollout.trajectory]
    samples = [(s.ids.tobytes(), s.mask.tobytes(), s.logprobs.tobytes()) for s in interleave_rollout(rollout)]
    return columns, samples, rollout.state, [s.prompt for s in rollout.trajectory]


@given(rollouts())
def test_every_form_becomes_the_same_columns_or_is_refused_for_the_same_cause(value):
    expected = told(rollout_from_verifiers, value)
    assert told(rollout_from_verifiers, msgspec.msgpack.encode(value)) == expected
    assert told(rollout_from_verifiers, msgspec.json.encode(value)) == expected
    spaced = msgspec.json.format(msgspec.json.encode(value), indent=1)
    assert told(rollout_from_verifiers, spaced.decode()) == expected
    binary = [told(lambda raw: rollout_from_verifiers(encode_rollout(raw)), value), told(lambda raw: rollout_from_verifiers(binary_rollout(raw)), value)]  # fmt: skip
    if isinstance(expected, str):  # of two faults the client may meet the other one first
        assert all(isinstance(found, str) for found in binary)
        return
    assert binary == [expected, expected]
    arrays = [{**t, "tokens": {k: np.array(v, DTYPES[k]) for k, v in t["tokens"].items()}} for t in value["trajectory"]]
    assert told(rollout_from_verifiers, {**value, "trajectory": arrays}) == expected
    for turn, array in zip(binary_rollout(value)["trajectory"], arrays, strict=True):
        assert turn["tokens"] == {k: v.tobytes() for k, v in array["tokens"].items()}


def turn(**changes):
    plain = {
        "prompt_ids": [1, 2, 3], "prompt_mask": [0, 0, 0], "completion_ids": [4, 5], "completion_mask": [1, 1], "completion_logprobs": [-0.5, -0.25],
    }  # fmt: skip
    tokens = {k: np.array(v, DTYPES[k]).tobytes() for k, v in plain.items()} | changes
    return {"example_id": 1, "task": "game", "reward": 0.5, "trajectory": [{"tokens": tokens}]}


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"prompt_ids": bytes(11)}, "wrong_length"),
        ({"prompt_ids": bytes(8)}, "wrong_length"),
        ({"prompt_ids": np.array([1, -2, 3], "<i4").tobytes()}, "wrong_type"),
        ({"prompt_mask": bytes([0, 2, 0])}, "wrong_type"),
        ({"completion_mask": bytes(3)}, "wrong_length"),
        ({"completion_logprobs": np.array([0.5, np.nan], "<f4").tobytes()}, "not_finite"),
        ({"completion_logprobs": bytes(7)}, "wrong_length"),
        ({"completion_ids": bytes(4 * 101), "completion_mask": bytes(101), "completion_logprobs": bytes(4 * 101)}, "oversize"),
        ({"prompt_ids": "AQAAAAIAAAADAAAA"}, "wrong_type"),
        ({"prompt_ids": np.array([1.0, 2.0, 3.0])}, "wrong_type"),
        ({"prompt_ids": np.array([[1, 2, 3]])}, "wrong_type"),
        ({"prompt_ids": np.array([1, 2, 2**31])}, "wrong_type"),
        ({"prompt_mask": np.array([0, -1, 1], np.int8)}, "wrong_type"),
    ],
)  # fmt: skip
def test_a_binary_column_that_breaks_the_contract_is_refused_by_its_cause(changes, cause):
    value, limits = turn(**changes), Limits(tokens=100)
    forms = [lambda: rollout_from_verifiers(value, limits=limits)]
    if not any(isinstance(v, np.ndarray) for v in changes.values()):
        forms.append(lambda: rollout_from_verifiers(msgspec.msgpack.encode(value), limits=limits))
    for form in forms:
        with pytest.raises(RolloutRefused) as refused:
            form()
        assert refused.value.cause == cause


def test_columns_of_a_message_are_its_own_memory_and_experts_are_views():
    """Completions are kept until the step ends; the message with its experts is not."""
    routed = {"data": bytes(4 * 6), "shape": [4, 2, 3], "start": 0}
    raw = np.frombuffer(msgspec.msgpack.encode(turn(routed_experts=routed)), np.uint8)
    tokens = rollout_from_verifiers(raw.data).trajectory[0].tokens
    assert tokens.prompt_ids.flags.aligned
    assert not any(np.shares_memory(getattr(tokens, name), raw) for name in FIELDS)
    assert np.shares_memory(tokens.routed_experts.rows(0, 4), raw)


def plainly(value):
    """A decoded value with views as bytes, and only those fields of a turn that ingest reads."""
    if isinstance(value, memoryview):
        return repr(bytes(value))
    if isinstance(value, dict):
        return {k: plainly(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plainly(v) for v in value]
    return repr(value)


@given(rollouts(), st.data())
def test_damaged_bytes_mean_what_the_decoder_says_or_are_refused(value, data):
    for step in value["trajectory"]:
        step["tokens"]["routed_experts"] = {"data": bytes(range(64)), "shape": [4, 4, 4]}
    text = data.draw(st.booleans())
    encoded, decode = (msgspec.json.encode(value), msgspec.json.decode) if text else (msgspec.msgpack.encode(value), msgspec.msgpack.decode)  # fmt: skip
    raw = bytearray(encoded)
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(1, len(raw) - 1))] = data.draw(st.integers(0, 255) | st.sampled_from(list(b'[]{}",:0 \\\x93\xcd')))  # fmt: skip
    raw = raw[: data.draw(st.integers(1, len(raw)))] if data.draw(st.booleans()) else raw
    try:
        expected = decode(bytes(raw))
    except (msgspec.DecodeError, UnicodeDecodeError):
        expected = None
    try:
        found = decode_rollout(bytes(raw))
    except RolloutRefused as error:
        found = error.cause
    if (
        found == "malformed" or expected is None
    ):  # in msgpack the damage may lie in a field of a turn that nothing reads
        assert expected is None
        assert found == "malformed" or not text
        return
    for turns in (expected.get("trajectory"), found.get("trajectory")) if isinstance(expected, dict) else ():
        for step in turns if isinstance(turns, list) else ():
            for name in (
                set(step) - {"prompt", "completion", "tokens", "is_truncated"} if isinstance(step, dict) else ()
            ):
                del step[name]
    assert plainly(found) == plainly(expected)


def test_the_pipeline_imports_no_numba():
    code = "import sys, headrace.rollouts.pipeline, headrace.rollouts.scheduler; print('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
