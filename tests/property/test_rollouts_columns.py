"""Numbers become the same columns by every way: out of lists, msgpack and JSON text, by loops or by the decoder; damaged bytes too."""

from __future__ import annotations

import platform
import sysconfig
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RolloutRefused
from headrace.rollouts import (
    columns,
    interleave_rollout,
    rollout_from_json,
    rollout_from_msgpack,
    rollout_from_verifiers,
)

FIELDS = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask", "completion_logprobs")
GROUPS = (("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask", "completion_logprobs"))


@pytest.fixture(autouse=True, scope="module")
def loops_for_everything():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_LOOP_ITEMS", 1)
        patch.setattr(columns, "_LOOP_BYTES", 1)
        columns.kernels()
        yield


odd = st.sampled_from([None, -1, 2**30, 2**31 - 1, 2**31, 2**40, 1.5, "7", True, [1], {}, 300, 70_000, -0.25, 0, 2])


@st.composite
def lists(draw, plain):
    """Numbers of one kind, now and then with something else among them; often long enough for the loops."""
    length = draw(st.sampled_from([0, 3, 31, 32, 40, 70]))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
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
    return [tuple(getattr(s.tokens, name).tobytes() for name in FIELDS) for s in rollout.trajectory]


@given(rollouts())
@settings(max_examples=120)
def test_lists_msgpack_and_json_become_the_same_columns_or_are_refused_for_the_same_cause(value):
    expected = told(rollout_from_verifiers, value)
    assert told(rollout_from_msgpack, msgspec.msgpack.encode(value)) == expected
    assert told(rollout_from_json, msgspec.json.encode(value)) == expected
    spaced = msgspec.json.format(msgspec.json.encode(value), indent=1)
    assert told(rollout_from_json, spaced.decode()) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_LOOP_ITEMS", 1 << 40)
        assert told(rollout_from_verifiers, value) == expected


@given(rollouts())
@settings(max_examples=40)
def test_samples_do_not_depend_on_whether_contexts_are_kept_once(value):
    def samples(way, raw):
        try:
            return [(s.ids.tobytes(), s.mask.tobytes(), s.logprobs.tobytes()) for s in interleave_rollout(way(raw))]
        except RolloutRefused as error:
            return error.cause

    assert samples(rollout_from_msgpack, msgspec.msgpack.encode(value)) == samples(rollout_from_verifiers, value)


def plainly(value, name=""):
    """A decoded value with its columns as lists again, and logprobs as precise as columns are."""
    if isinstance(value, columns._Read):
        return plainly(value.column.tolist(), name)
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, dict):
        return {k: plainly(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [plainly(v, name) for v in value]
    if isinstance(value, float) and name == "completion_logprobs":
        with np.errstate(over="ignore"):
            return repr(np.float32(value))
    return int(value) if isinstance(value, bool) else value if not isinstance(value, float) else repr(value)


@given(rollouts(), st.data())
@settings(max_examples=200)
def test_damaged_bytes_mean_what_the_decoder_says_or_are_refused(value, data):
    for turn in value["trajectory"]:
        turn["tokens"]["routed_experts"] = {"data": bytes(range(64)), "shape": [4, 4, 4]}
    text = data.draw(st.booleans())
    encoded, decode = (msgspec.json.encode(value), msgspec.json.decode) if text else (msgspec.msgpack.encode(value), msgspec.msgpack.decode)  # fmt: skip
    raw = bytearray(encoded)
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(1, len(raw) - 1))] = data.draw(st.integers(0, 255) | st.sampled_from(list(b'[]{}",:0 \\\x93\xcd')))  # fmt: skip
    raw = raw[: data.draw(st.integers(1, len(raw)))] if data.draw(st.booleans()) else raw
    try:
        expected = plainly(decode(bytes(raw)))
    except (msgspec.DecodeError, UnicodeDecodeError):
        with pytest.raises(RolloutRefused, match="neither JSON nor msgpack") as refused:
            columns.decoded_with_columns(bytes(raw))
        assert refused.value.cause == "malformed"
        return
    assert plainly(columns.decoded_with_columns(bytes(raw))) == expected


def test_a_name_that_stands_there_twice_counts_as_the_decoder_says():
    ids = list(range(100, 140))
    first, last = msgspec.json.encode(ids), msgspec.json.encode(ids[::-1])
    for text in (
        b'{"trajectory":[{"tokens":{"prompt_ids":%b,"prompt_ids":%b}}]}' % (first, last),
        b'{"trajectory":[{"tokens":{"prompt_ids":%b,"prompt_\\u0069ds":null}}]}' % first,
        b'{"trajectory":[{"tokens":{"prompt_ids":%b},"tokens":7}]}' % first,
        b'{"trajectory":[{"tokens":{"prompt_ids":%b}}],"trajectory":[]}' % first,
    ):
        assert plainly(columns.decoded_with_columns(text)) == msgspec.json.decode(text)


@pytest.mark.parametrize("blank", [b"", b" "])
@pytest.mark.parametrize(
    "more", [b"", b" ", b",5", b" , 5", b"5", b"5,6", b" 5", b",", b",,5", b".5", b"e3", b",true", b"]", b",0,05"]
)
def test_a_context_told_in_the_bytes_of_the_one_before_is_read_to_its_end_and_no_further(blank, more):
    for name, numbers in (("prompt_ids", range(300, 340)), ("prompt_mask", [0, 1] * 20)):
        items = b", ".join(b"%d" % n for n in numbers) + blank
        text = b'{"trajectory":[{"tokens":{"%b":[%b]}},{"tokens":{"%b":[%b]}}]}' % (name.encode(), items, name.encode(), items + more)  # fmt: skip
        try:
            expected = plainly(msgspec.json.decode(text))
        except msgspec.DecodeError:
            with pytest.raises(RolloutRefused, match="neither JSON nor msgpack"):
                columns.decoded_with_columns(text)
            continue
        found = columns.decoded_with_columns(text)
        assert plainly(found) == expected
        if more in (b"", b" ", b",5"[: 3 * (name == "prompt_ids")]):
            first, second = (turn["tokens"][name].column for turn in found["trajectory"])
            assert np.shares_memory(first, second)


def test_what_was_read_stays_when_the_next_rollout_is():
    def rollout(n):
        tokens = {"prompt_ids": [n] * 50, "prompt_mask": [1] * 50, "completion_ids": [n + 1] * 40, "completion_logprobs": [-n / 8] * 40}  # fmt: skip
        return {"trajectory": [{"tokens": tokens}]}

    found = [columns.decoded_with_columns(msgspec.msgpack.encode(rollout(n))) for n in range(3)]
    assert [plainly(value) for value in found] == [plainly(rollout(n)) for n in range(3)]


def test_a_list_that_begins_with_a_comma_is_no_list():
    items = b", ".join(b"%d" % n for n in range(300, 340))
    with pytest.raises(RolloutRefused, match="neither JSON nor msgpack"):
        columns.decoded_with_columns(b'{"trajectory":[{"tokens":{"prompt_ids":[,%b]}}]}' % items)


@given(st.integers(32, 60), st.integers(0, 60), st.integers(0, 2**32 - 1))
def test_contexts_that_share_bytes_are_the_numbers_the_decoder_reads(shared, more, seed):
    """Also where the one before was longer, or where only the first bytes of a number agree."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, int(rng.choice([100, 300, 70_000])), 130).tolist()
    lengths = [shared, shared + more, shared, int(rng.integers(1, 130)), 130]
    contexts = [ids[:n] for n in lengths]
    contexts[int(rng.integers(5))] = [*ids[: shared - 1], ids[shared - 1] + int(rng.integers(-1, 2)) % 70_000]
    turns = [{"tokens": {"prompt_ids": c, "prompt_mask": [n % 2 for n in c]}} for c in contexts]
    for raw in (msgspec.msgpack.encode({"trajectory": turns}), msgspec.json.encode({"trajectory": turns})):
        assert plainly(columns.decoded_with_columns(raw)) == {"trajectory": turns}


def test_loops_take_long_lists_out_of_bytes_and_leave_experts_where_they_lie():
    value = {"trajectory": [{"tokens": {"prompt_ids": list(range(50)), "prompt_mask": [0] * 50, "completion_logprobs": [-0.5] * 50,
                                        "routed_experts": {"data": bytes(600), "shape": [50, 4, 3]}}},
                            {"tokens": {"prompt_ids": list(range(60)), "prompt_mask": [0] * 60}}]}  # fmt: skip
    raw = msgspec.msgpack.encode(value)
    first, second = (turn["tokens"] for turn in columns.decoded_with_columns(raw)["trajectory"])
    assert all(type(first[name]) is columns._Read for name in ("prompt_ids", "prompt_mask", "completion_logprobs"))
    assert np.shares_memory(first["prompt_ids"].column, second["prompt_ids"].column)
    assert np.shares_memory(np.frombuffer(first["routed_experts"]["data"], np.uint8), np.frombuffer(raw, np.uint8))
    assert plainly(columns.decoded_with_columns(raw)) == plainly(value)


def test_more_numbers_than_the_first_arrays_hold_are_read_all_the_same(monkeypatch):
    monkeypatch.setattr(columns, "_ROOM", 40)
    monkeypatch.setattr(columns, "_of_thread", threading.local())
    value = {"trajectory": [{"tokens": {"prompt_ids": list(range(100)), "completion_mask": [1] * 90}}]}
    for raw in (msgspec.msgpack.encode(value), msgspec.json.encode(value)):
        tokens = columns.decoded_with_columns(raw)["trajectory"][0]["tokens"]
        assert tokens["prompt_ids"].column.tolist() == list(range(100))
        assert tokens["completion_mask"].column.tolist() == [1] * 90


@pytest.mark.skipif(
    platform.python_implementation() != "CPython" or bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="reads CPython's objects where they lie, under its one lock",
)
def test_lists_are_read_where_they_lie_on_this_interpreter():
    assert columns._layout() is not None
