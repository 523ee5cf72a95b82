"""For all trajectories: samples have the ids, masks, logprobs and experts that a slow, obviously right reading gives them."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RolloutRefused
from headrace.rollouts import interleave_rollout, rollout_from_verifiers

LAYERS, TOPK = 3, 2


# ------------------------------------------------------------------------------------------- the reference


@dataclass
class Slow:
    """A sample, token by token: (id, mask, logprob) and the row of its experts, or None while no turn had one."""

    tokens: list[tuple[int, int, float]] = field(default_factory=list)
    experts: list[bytes | None] = field(default_factory=list)
    prompt_length: int = 0
    multimodal: Any = None

    @property
    def ids(self) -> list[int]:
        return [t[0] for t in self.tokens]


def slow_interleave(output: dict[str, Any], rows_of: list[dict[int, bytes] | None]) -> list[Slow] | None:
    """Every turn looks at every sample, token by token. None where a token's experts are nowhere to be found."""
    samples: list[Slow] = []
    learnt = 0 if output["error"] is not None else 1
    for step, rows in zip(output["trajectory"], rows_of, strict=True):
        tokens = step["tokens"]
        prompt = tokens["prompt_ids"]
        fitting = [s for s in samples if prompt[: len(s.tokens)] == s.ids]
        if fitting:
            longest = max(len(s.tokens) for s in fitting)
            sample = next(s for s in fitting if len(s.tokens) == longest)
            sample.tokens += [(i, 0, 0.0) for i in prompt[len(sample.tokens) :]]
        else:
            sample = Slow(prompt_length=len(prompt))
            samples.append(sample)
            sample.tokens = [(i, learnt * m, 0.0) for i, m in zip(prompt, tokens["prompt_mask"], strict=True)]
        said = zip(tokens["completion_ids"], tokens["completion_mask"], tokens["completion_logprobs"], strict=True)
        sample.tokens += [(i, learnt * m, lp) for i, m, lp in said]
        sample.multimodal = tokens.get("pixel_values") or sample.multimodal
        sample.experts += [None] * (len(sample.tokens) - len(sample.experts))
        covered = next((at for at, row in enumerate(sample.experts) if row is None), len(sample.experts))
        if rows and min(rows) > covered:
            return None
        for at, row in (rows or {}).items():
            if sample.experts[at] is None:
                sample.experts[at] = row
    if any(rows is not None for rows in rows_of):
        for sample in samples:
            if None in sample.experts[:-1]:
                return None
            if sample.experts and sample.experts[-1] is None:
                sample.experts[-1] = bytes(LAYERS * TOPK)
    return samples


# ------------------------------------------------------------------------------------------- trajectories

ROUTING = ("usual", "every_row", "short", "missing", "tail")


@st.composite
def trajectories(draw, routings=ROUTING):
    """Turns that extend, branch off, come back to an older branch or start anew, over a small vocabulary so that prefixes meet."""
    token = st.integers(0, 3)
    some = st.lists(token, max_size=4)
    known: list[list[int]] = [[]]
    routed = draw(st.booleans())
    steps, rows_of = [], []
    for turn in range(draw(st.integers(0, 7))):
        prompt = [*draw(st.sampled_from(known)), *draw(some)]
        said = draw(some)
        whole = prompt + said
        known.append(whole)
        bits = st.lists(st.integers(0, 1), min_size=len(said), max_size=len(said))
        tokens: dict[str, Any] = {
            "prompt_ids": prompt,
            "prompt_mask": draw(st.lists(st.booleans(), min_size=len(prompt), max_size=len(prompt))),
            "completion_ids": said,
            "completion_mask": draw(bits),
            "completion_logprobs": [-(turn + at / 8) for at in range(len(said))],
        }
        if draw(st.booleans()):
            tokens["pixel_values"] = {"turn": turn}
        kind = draw(st.sampled_from(routings)) if routed else "missing"
        rows = None
        if kind != "missing":
            n = len(whole)
            stop = {"every_row": n, "short": draw(st.integers(0, n))}.get(kind, max(0, n - 1))
            start = draw(st.integers(0, min(stop, len(prompt)))) if kind == "tail" else 0
            # A row says which turn and which token it is, so that a row in the wrong place cannot pass for the right one.
            rows = {at: bytes([turn + 1, at, *([7] * (LAYERS * TOPK - 2))]) for at in range(start, stop)}
            raw: Any = b"".join(rows.values())
            raw = draw(st.sampled_from([raw, memoryview(raw), base64.b64encode(raw).decode()]))
            tokens["routed_experts"] = {"data": raw, "shape": [stop - start, LAYERS, TOPK], "start": start}
        rows_of.append(rows)
        steps.append({"prompt": [], "completion": [], "tokens": tokens})
    error = draw(st.sampled_from([None, None, {"error": "Timeout"}]))
    output = {"example_id": 1, "env_name": "game", "reward": 1.0, "error": error, "trajectory": steps}
    return output, rows_of


def same_as_slow(output, rows_of):
    expected = slow_interleave(output, rows_of)
    rollout = rollout_from_verifiers(output)
    if expected is None:
        with pytest.raises(RolloutRefused, match="routed experts") as refused:
            interleave_rollout(rollout)
        assert refused.value.cause == "routing"
        return
    samples = interleave_rollout(rollout, advantage=0.5)
    assert len(samples) == len(expected)
    for sample, slow in zip(samples, expected, strict=True):
        assert sample.ids.tobytes() == np.array(slow.ids, np.int32).tobytes()
        assert sample.mask.tobytes() == bytes(m for _, m, _ in slow.tokens)
        assert sample.logprobs.tobytes() == np.array([lp for _, _, lp in slow.tokens], np.float32).tobytes()
        assert sample.prompt_length == slow.prompt_length
        assert sample.multimodal == (None if slow.multimodal is None else {"pixel_values": slow.multimodal})
        if any(rows is not None for rows in rows_of):
            assert sample.experts is not None
            assert sample.experts.joined().tobytes() == b"".join(row or b"?" for row in slow.experts)
        else:
            assert sample.experts is None


@given(trajectories())
def test_samples_are_those_of_the_slow_reading_whatever_the_engine_did_with_its_rows(drawn):
    same_as_slow(*drawn)


@settings(max_examples=60)
@given(trajectories(routings=("usual",)))
def test_an_engine_with_a_row_for_every_token_but_the_last_is_never_refused(drawn):
    output, rows_of = drawn
    assert slow_interleave(output, rows_of) is not None
    same_as_slow(output, rows_of)


@settings(max_examples=60)
@given(data=st.binary(min_size=6, max_size=3000), cut=st.data())
def test_any_rows_of_base64_decode_to_the_bytes_of_the_whole(data, cut):
    from headrace.rollouts import RoutedExperts

    data = data[: len(data) // 6 * 6]
    rows = len(data) // 6
    text = RoutedExperts(data=base64.b64encode(data).decode(), shape=(rows, 3, 2))
    first = cut.draw(st.integers(0, rows))
    stop = cut.draw(st.integers(first, rows))
    assert text.rows(first, stop).tobytes() == data[first * 6 : stop * 6]
