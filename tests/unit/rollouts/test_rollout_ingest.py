"""What enters is checked, made columns, or refused under a cause that can be counted."""

from __future__ import annotations

import base64
import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import RolloutRefused
from headrace.rollouts import (
    Limits,
    RoutedExperts,
    needs_tokens,
    pretokenize,
    rollout_from_verifiers,
    step_from_reply,
)


def output(**more):
    tokens = {
        "prompt_ids": [1, 2, 3], "prompt_mask": [0, 0, 0], "completion_ids": [4, 5], "completion_mask": [1, 1],
        "completion_logprobs": [-0.5, -0.25],
    }  # fmt: skip
    step = {
        "prompt": [{"role": "user", "content": "1 + 1"}], "completion": [{"role": "assistant", "content": "2"}], "tokens": tokens,
        "response": object(),
    }  # fmt: skip
    return {
        "example_id": 7, "task": "sums", "reward": 1.0, "metrics": {"exact": 1}, "trajectory": [step],
        "sampling_args": {"temperature": 0.7}, "timing": {"generation_ms": 250.0, "total": 2, "start_time": "x"}, "answer": "2", **more,
    }  # fmt: skip


def with_tokens(**changes):
    value = output()
    value["trajectory"][0]["tokens"].update(changes)
    return value


def test_a_verifiers_rollout_becomes_columns_and_keeps_what_it_brought():
    rollout = rollout_from_verifiers(output(), policy_version=3)
    tokens = rollout.trajectory[0].tokens
    assert tokens is not None
    assert (tokens.prompt_ids.dtype, tokens.completion_mask.dtype, tokens.completion_logprobs.dtype) == (
        "int32",
        "uint8",
        "float32",
    )
    assert tokens.completion_ids.tolist() == [4, 5]
    assert (rollout.env_name, rollout.temperature, rollout.policy_version) == ("sums", 0.7, 3)
    assert rollout.timing == {"generation": 0.25, "total": 2.0}
    assert rollout.state == {"answer": "2"}
    assert rollout.metrics == {"exact": 1.0}


def deep(levels):
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("bad", "cause", "told"),
    [
        ({k: v for k, v in output().items() if k != "reward"}, "missing_field", "'reward'"),
        ({k: v for k, v in output().items() if k != "trajectory"}, "missing_field", "'trajectory'"),
        ({k: v for k, v in output().items() if k != "task"}, "missing_field", "env_name"),
        (with_tokens(completion_mask=[1]), "wrong_length", "2 completion tokens and a completion_mask of 1"),
        (with_tokens(completion_logprobs=[0.0] * 3), "wrong_length", "completion_logprobs of 3"),
        (with_tokens(completion_logprobs=[float("nan"), 0.0]), "not_finite", "completion token 0 is nan"),
        (with_tokens(completion_logprobs=[None, 0.0]), "wrong_type", "completion_logprobs of turn 0"),
        (with_tokens(completion_ids=[1.5, 2]), "wrong_type", "completion_ids of turn 0"),
        (with_tokens(completion_ids=[2**31, 2]), "wrong_type", "completion_ids"),
        (with_tokens(completion_ids=np.array([2**31, 2])), "wrong_type", "other than token ids"),
        (with_tokens(completion_ids=[-1, 2]), "wrong_type", "completion_ids"),
        (with_tokens(completion_ids=np.array([-1, 2])), "wrong_type", "other than token ids"),
        (with_tokens(completion_ids=[2**32, 2]), "wrong_type", "completion_ids"),
        (with_tokens(completion_ids="45"), "wrong_type", "is a str"),
        (with_tokens(completion_mask=[1, 2]), "wrong_type", "other than 0 and 1"),
        (with_tokens(completion_mask=[1, 0xC4]), "wrong_type", "other than 0 and 1"),
        (with_tokens(completion_mask=[1, None]), "wrong_type", "other than 0 and 1"),
        (with_tokens(completion_logprobs=[-1e300, 0.0]), "not_finite", "completion token 0 is -inf"),
        (with_tokens(completion_logprobs=["x" * 8, 0.0]), "wrong_type", "completion_logprobs of turn 0"),
        (with_tokens(completion_mask=np.array([256, 1])), "wrong_type", "other than 0 and 1"),
        (with_tokens(prompt_ids=[1] * 100, prompt_mask=[0] * 100), "oversize", "100 entries"),
        (output(reward=float("inf")), "not_finite", "reward is inf"),
        (output(reward=True), "wrong_type", "reward is True"),
        (output(metrics={"x": "1"}), "wrong_type", "metric 'x'"),
        (output(sampling_args={"temperature": "hot"}), "wrong_type", "temperature"),
        (output(answer="x" * 5000), "oversize", "more than 2,000 characters"),
        (output(answer=deep(50)), "malformed", "nested more than 32"),
        (output(answer=object()), "wrong_type", "holds a object"),
        (output(answer=2**64), "wrong_type", "more than 64 bits"),
        (output(answer="ok \ud800"), "not_unicode", "lone surrogate at character 3"),
        (output(task="all"), "env_name", "stands for"),
        (output(trajectory=[None]), "wrong_type", "turn 0 is a NoneType"),
        ([], "wrong_type", "is a list"),
        (with_tokens(routed_experts={"data": b"12", "shape": [4, 1, 1]}), "routing", "need 4 bytes, got 2"),
        (with_tokens(routed_experts={"data": b"123456", "shape": [6, 1, 1]}), "routing", "5 tokens and routed experts up to token 6"),
        (with_tokens(routed_experts={"data": b"1234", "shape": [4, 2**62, 2**62]}), "routing", "got 4"),
        (with_tokens(routed_experts={"data": "AAA=", "shape": [4, 1, 1]}), "routing", "8 characters"),
        (with_tokens(routed_experts={"data": b"1234", "shape": [4, 1, 1], "dtype": "int16"}), "routing", "of uint8. Invalid enum value .int16."),
        (with_tokens(routed_experts=[[1]]), "routing", "expected data and shape"),
    ],
)  # fmt: skip
def test_a_malformed_rollout_is_refused_under_its_cause(bad, cause, told):
    with pytest.raises(RolloutRefused, match=told) as refused:
        rollout_from_verifiers(bad, limits=Limits(tokens=64, text=2000))
    assert refused.value.cause == cause


@given(
    ids=st.lists(st.integers(0, 2**31 - 1), max_size=40),
    mask=st.one_of(st.lists(st.integers(0, 1), max_size=40), st.lists(st.booleans(), max_size=40)),
    logprobs=st.lists(st.floats(-1e6, 0.0) | st.integers(-9, 0), max_size=40),
    uniform=st.sampled_from([None, 0, 1]),
)
def test_lists_of_numbers_become_the_columns_that_numpy_would_make_of_them(ids, mask, logprobs, uniform):
    n = min(map(len, (ids, mask, logprobs)))
    ids, mask, logprobs = ids[:n], mask[:n] if uniform is None else [uniform] * n, logprobs[:n]
    value = with_tokens(completion_ids=ids, completion_mask=mask, completion_logprobs=logprobs)
    tokens = rollout_from_verifiers(value).trajectory[0].tokens
    assert tokens is not None
    assert tokens.completion_ids.tobytes() == np.array(ids, np.int32).tobytes()
    assert tokens.completion_mask.tobytes() == np.array(mask, np.uint8).tobytes()
    assert tokens.completion_logprobs.tobytes() == np.array(logprobs, np.float64).astype(np.float32).tobytes()


@pytest.mark.parametrize("many", [3, 20, 70_000])
def test_a_column_of_any_length_is_read_behind_its_lists_own_mark(many):
    mask = [n % 3 == 0 for n in range(many)]
    logprobs = [-n / 7 for n in range(many)]
    value = with_tokens(completion_ids=[1] * many, completion_mask=mask, completion_logprobs=logprobs)
    tokens = rollout_from_verifiers(value).trajectory[0].tokens
    assert tokens is not None
    assert tokens.completion_mask.tolist() == [int(m) for m in mask]
    assert tokens.completion_logprobs.tolist() == np.array(logprobs, np.float32).tolist()


def test_a_50_mb_string_is_refused_by_default():
    with pytest.raises(RolloutRefused, match="more than 33,554,432 characters"):
        rollout_from_verifiers(output(answer="x" * 50_000_000))


@pytest.mark.parametrize("raw", [b"{", b"[1]", b'{"answer": "\\ud800"}', b"\xff", b"[" * 100_000])
def test_what_is_no_json_rollout_is_refused(raw):
    with pytest.raises(RolloutRefused):
        rollout_from_verifiers(raw)


def test_base64_that_is_none_is_refused_when_its_rows_are_needed():
    experts = RoutedExperts(data="****", shape=(3, 1, 1))
    with pytest.raises(RolloutRefused, match="not base64"):
        experts.rows(0, 3)
    with pytest.raises(RolloutRefused, match="ends at byte 1"):
        RoutedExperts(data="AA==", shape=(3, 1, 1)).rows(0, 3)


def test_json_and_dict_give_the_same_rollout():
    raw = base64.b64encode(bytes(range(4))).decode()
    value = with_tokens(routed_experts={"data": raw, "shape": [4, 1, 1]})
    del value["trajectory"][0]["response"]
    import json

    one, two = rollout_from_verifiers(value), rollout_from_verifiers(json.dumps(value))
    assert one.trajectory[0].tokens is not None
    assert two.trajectory[0].tokens is not None
    assert one.trajectory[0].tokens.routed_experts is not None
    assert two.trajectory[0].tokens.routed_experts is not None
    assert one.trajectory[0].tokens.routed_experts.rows(1, 4).reshape(-1).tolist() == [1, 2, 3]
    assert two.trajectory[0].tokens.routed_experts.data == raw
    assert two.trajectory[0].tokens.prompt_ids.tolist() == one.trajectory[0].tokens.prompt_ids.tolist()


def chat_reply(**choice):
    return {
        "prompt_token_ids": [1, 2],
        "choices": [
            {
                "message": {"role": "assistant", "content": "hi"}, "token_ids": [3, 4], "finish_reason": "length",
                "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}, **choice,
            }
        ],
    }  # fmt: skip


def test_a_chat_reply_with_token_ids_becomes_a_step():
    step = step_from_reply(
        chat_reply(routed_experts={"data": bytes(6), "shape": [3, 2, 1]}), prompt=[{"role": "user", "content": "?"}]
    )
    assert step.tokens is not None
    assert step.tokens.prompt_ids.tolist() == [1, 2]
    assert step.tokens.completion_mask.tolist() == [1, 1]
    assert step.tokens.completion_logprobs.tolist() == [-1.0, -2.0]
    assert step.tokens.routed_experts is not None
    assert step.tokens.routed_experts.end == 3
    assert step.is_truncated


def test_a_completion_reply_has_its_logprobs_elsewhere():
    reply = {
        "choices": [{"text": "x", "prompt_token_ids": [1], "token_ids": [5], "logprobs": {"token_logprobs": [-3.0]}}]
    }
    step = step_from_reply(reply)
    assert step.completion == "x"
    assert step.tokens is not None
    assert step.tokens.completion_logprobs.tolist() == [-3.0]


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        ({}, "missing_field"),
        ({"choices": []}, "missing_field"),
        ({"choices": [{}]}, "missing_field"),
        ("no", "wrong_type"),
        (chat_reply(logprobs={"content": [{}]}), "missing_field"),
        (chat_reply(logprobs={"content": [{"logprob": -1.0}]}), "wrong_length"),
    ],
)
def test_a_malformed_reply_is_refused_under_its_cause(reply, cause):
    with pytest.raises(RolloutRefused) as refused:
        step_from_reply(reply)
    assert refused.value.cause == cause


def render(messages, generation):
    ids = [i for m in messages for i in (9 if m["role"] == "user" else 8, *map(ord, m["content"]), 0)]
    return [*ids, 8] if generation else ids


def test_pretokenize_splits_at_the_longest_common_prefix_and_touches_nothing_else():
    value = output()
    second = copy.deepcopy({**value["trajectory"][0], "response": None})
    value["trajectory"].append({**second, "tokens": None})
    rollout = rollout_from_verifiers(value)
    assert needs_tokens([rollout])
    done = pretokenize(rollout, render)
    assert not needs_tokens([done])
    assert pretokenize(done, render) is done
    assert done.trajectory[0] is rollout.trajectory[0]
    tokens = done.trajectory[1].tokens
    assert tokens is not None
    assert tokens.prompt_ids.tolist() == [9, *map(ord, "1 + 1"), 0, 8]
    assert tokens.completion_ids.tolist() == [ord("2"), 0]
    assert tokens.completion_mask.tolist() == [1, 1]


def test_a_template_that_fails_is_named_with_its_turn():
    rollout = rollout_from_verifiers(output(trajectory=[{"prompt": [{"content": "no role"}], "completion": "x"}]))
    with pytest.raises(RolloutRefused, match=r"turn 0 of the rollout of example 7 in sums.*KeyError"):
        pretokenize(rollout, render)
