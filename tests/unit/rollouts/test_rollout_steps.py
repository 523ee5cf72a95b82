"""Advantages, filters, packing and saved lines: what a step makes of its rollouts."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.rollouts import (
    AdvantageConfig,
    AdvantageInputs,
    AdvantageOutputs,
    BatchWriter,
    ExpertRows,
    GibberishFilter,
    RepetitionFilter,
    Rollout,
    Step,
    StepTokens,
    TrainingSample,
    ZeroAdvantageFilter,
    apply_filters,
    batch_path,
    compute_advantages,
    export_tokens,
    interleave_rollout,
    open_training_batch,
    pack_samples,
    save_rollouts,
    solve_rates,
)


def turn(logprobs, ids=None, prompt=(1,)):
    n = len(logprobs)
    return Step(
        tokens=StepTokens(
            prompt_ids=np.array(prompt, np.int32), prompt_mask=np.zeros(len(prompt), np.uint8),
            completion_ids=np.array(ids if ids is not None else range(n), np.int32), completion_mask=np.ones(n, np.uint8),
            completion_logprobs=np.array(logprobs, np.float32),
        )
    )  # fmt: skip


def rollout(reward=1.0, example=1, env="a", draw=0, turns=(), **more):
    return Rollout(example_id=example, env_name=env, reward=reward, draw=draw, trajectory=tuple(turns), **more)


def half(inputs: AdvantageInputs, *, scale: float = 0.5) -> AdvantageOutputs:
    return AdvantageOutputs(advantages=[scale * r.reward + len(inputs.rollouts) for r in inputs.rollouts])


# ----------------------------------------------------------------------------------------------- advantages


def test_groups_are_by_env_example_and_draw_wherever_their_members_stand():
    rollouts = [
        rollout(1),
        rollout(4, env="b"),
        rollout(0),
        rollout(5, draw=1),
        rollout(2, example=2),
        rollout(3, draw=1),
    ]
    assert compute_advantages(rollouts, AdvantageConfig()) == [0.5, 0.0, -0.5, 1.0, 0.0, -1.0]


def test_equal_rewards_have_an_advantage_of_exactly_zero():
    for reward in (0.1, 1 / 3, 1e-30, 0.7):
        for size in (1, 3, 7, 10):
            assert compute_advantages([rollout(reward)] * size, AdvantageConfig()) == [0.0] * size


def test_without_a_function_the_reward_is_the_advantage():
    assert compute_advantages([rollout(3), rollout(1)], None) == [3.0, 1.0]


def test_a_length_penalty_prefers_the_shorter_of_two_right_answers():
    short, long = rollout(1, turns=[turn([0.0] * 10)]), rollout(1, turns=[turn([0.0] * 30)])
    advantages = compute_advantages([long, short], AdvantageConfig(length_penalty=0.5))
    expected = [1 / 1.75, 1 / 1.25]
    assert advantages == pytest.approx([e - sum(expected) / 2 for e in expected])


def test_a_custom_function_is_called_once_a_group_with_its_arguments(monkeypatch):
    import sys
    import types

    module = types.ModuleType("custom_advantage")
    module.half = half
    monkeypatch.setitem(sys.modules, "custom_advantage", module)
    config = AdvantageConfig(kind="custom", import_path="custom_advantage:half", kwargs={"scale": 2.0})
    assert compute_advantages([rollout(1), rollout(2), rollout(3, example=2)], config) == [4.0, 6.0, 7.0]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda inputs: AdvantageOutputs(advantages=[1.0]), "group of 2 .*returned 1 advantages"),
        (lambda inputs: AdvantageOutputs(advantages=[1.0, math.nan]), "must be finite"),
        (lambda inputs: AdvantageOutputs(advantages=[1.0, "x"]), "no number"),
        (lambda inputs: [1.0, 2.0], "expected AdvantageOutputs"),
    ],
)
def test_a_function_that_returns_something_else_is_named(function, told):
    with pytest.raises(ConfigError, match=told):
        compute_advantages([rollout(), rollout()], function)


@pytest.mark.parametrize("path", ["nowhere:f", "math:nothing", "math.pi", "x"])
def test_an_import_path_that_leads_nowhere_is_named(path):
    with pytest.raises(ConfigError, match=path):
        compute_advantages([rollout()], AdvantageConfig(kind="custom", import_path=path))


def test_solve_all_is_by_the_groups_own_size():
    assert solve_rates({1: [1.0, 1.0], 2: [1.0, 0.0, 1.0], 3: [0.0], 4: [1.0]}) == (0.5, 0.25)


# -------------------------------------------------------------------------------------------------- filters


def test_the_first_detection_names_a_rollout_and_only_an_enforcing_filter_keeps_it_back():
    odd = rollout(turns=[turn([-20.0], ids=[150_000])])
    filters = [GibberishFilter(vocab_size=160_000), ZeroAdvantageFilter()]
    found = apply_filters(filters, [odd, odd, rollout(), rollout()], [1.0, 0.0, 0.0, 1.0])
    assert found.detected == ("gibberish", "gibberish", "zero_advantage", None)
    assert found.sends == (True, True, False, True)
    assert found.counts == {"gibberish": 2, "zero_advantage": 1}


def test_gibberish_needs_a_rare_id_and_an_unlikely_one_at_the_same_token():
    gibberish = GibberishFilter(vocab_size=1000)
    floor = -math.log(1000) - 2
    assert gibberish.detects(rollout(turns=[turn([-0.1]), turn([0.0, floor - 0.01], ids=[1, 100_001])]), 1.0)
    assert not gibberish.detects(rollout(turns=[turn([floor - 1, -0.1], ids=[100_000, 100_001])]), 1.0)
    assert not gibberish.detects(rollout(turns=[turn([floor + 0.01], ids=[100_001])]), 1.0)


def longest_run(turns, threshold):
    best = run = 0
    for logprob in (lp for t in turns for lp in t):
        run = run + 1 if np.float32(logprob) > np.float32(threshold) else 0
        best = max(best, run)
    return best


def test_repetition_counts_runs_across_turns_like_a_loop_over_tokens():
    rng = np.random.default_rng(3)
    filter_, seen = RepetitionFilter(window=6), set()
    for _ in range(400):
        turns = [
            rng.choice([0.0, -0.001, -1.0], rng.integers(0, 9), p=[0.45, 0.35, 0.2]).tolist()
            for _ in range(rng.integers(0, 5))
        ]
        expected = longest_run(turns, math.log(0.99)) >= 6
        seen.add(expected)
        assert filter_.detects(rollout(turns=[turn(t) for t in turns]), 1.0) == expected
    assert seen == {True, False}


# -------------------------------------------------------------------------------------------------- packing


def sample(n, run="", mode="rl", experts=None, start=0, **more):
    return TrainingSample(
        env_name="a", example_id=1, ids=np.arange(start, start + n, dtype=np.int32), mask=np.ones(n, np.uint8),
        logprobs=np.zeros(n, np.float32), prompt_length=0, run=run, mode=mode,
        experts=None if experts is None else ExpertRows(chunks=(np.full((n, *experts), 5, np.uint8),)), **more,
    )  # fmt: skip


def test_every_rank_has_the_same_number_of_micro_batches_of_the_same_class():
    rng = np.random.default_rng(0)
    for _ in range(60):
        ranks, seq_len = int(rng.integers(1, 5)), 64
        samples = [
            sample(int(n), run=str(rng.integers(2)), mode=("rl", "sft")[rng.integers(2)], start=1000 * i)
            for i, n in enumerate(rng.integers(0, 80, int(rng.integers(0, 30))))
        ]
        packed = pack_samples(samples, seq_len=seq_len, ranks=ranks)
        assert len({len(r) for r in packed.ranks}) == 1
        for together in zip(*packed.ranks, strict=True):
            assert len({(m.run, m.mode) for m in together}) == 1
        real = [m for r in packed.ranks for m in r if not m.dummy]
        assert all({(s.run, s.mode) for s in m.samples} == {(m.run, m.mode)} and m.tokens <= seq_len for m in real)
        assert sorted(int(i) for m in real for s in m.samples for i in s.ids) == sorted(
            int(i) for s in samples for i in s.ids[:seq_len]
        )
        assert packed.truncated == sum(len(s) > seq_len for s in samples)
        dummies = [m for r in packed.ranks for m in r if m.dummy]
        assert len(dummies) == packed.dummies
        assert not any(s.mask.any() for m in dummies for s in m.samples)


def test_first_fit_decreasing_fills_holes_before_it_opens_a_bin():
    packed = pack_samples([sample(n) for n in (3, 6, 4, 7, 2)], seq_len=10)
    assert [[len(s) for s in m.samples] for m in packed.ranks[0]] == [[7, 3], [6, 4], [2]]


def test_no_samples_still_give_every_rank_a_micro_batch_that_teaches_nothing():
    packed = pack_samples([], seq_len=8, ranks=3)
    assert packed.micro_batches == 1
    assert all(not s.mask.any() for r in packed.ranks for m in r for s in m.samples)


def test_a_long_sample_is_cut_with_its_experts_and_kinds_of_experts_are_never_mixed():
    packed = pack_samples([sample(3, experts=(2, 1)), sample(9, experts=(2, 1), advantage=0.5)], seq_len=8, ranks=2)
    assert packed.truncated == 1
    for rank in packed.ranks:
        for micro in rank:
            assert sum(s.experts.shape[0] for s in micro.samples) == micro.tokens
    assert [(len(s), s.advantage) for s in packed.ranks[0][0].samples] == [(8, 0.5)]
    with pytest.raises(ConfigError, match="different kinds"):
        pack_samples([sample(3, experts=(2, 1)), sample(3)], seq_len=8)


def test_a_sample_with_images_is_alone_in_its_micro_batch():
    packed = pack_samples([sample(2), sample(2, multimodal={"pixel_values": [1]}), sample(2)], seq_len=100)
    assert [len(m.samples) for m in packed.ranks[0]] == [2, 1]


# --------------------------------------------------------------------------------------------------- saving


def test_a_saved_line_has_the_always_saved_columns_first_and_the_envs_own_once(tmp_path):
    first = rollout(
        turns=[turn([-1.0, -2.0])], state={"answer": "2", "board": np.arange(3), "raw": b"123"}, sampling_args={"temperature": 1.0}
    )  # fmt: skip
    second = rollout(env="b", error=("Timeout", "Cause"))
    path = tmp_path / "rollouts" / "step_3.jsonl"
    columns = {"a": ["board", "trajectory", "answer", "board", "raw", "nothing"]}
    size = save_rollouts(path, [first, second], advantages=[0.5, -0.5], state_columns=columns, tokens=True)
    assert size == path.stat().st_size
    one, two = [json.loads(line) for line in path.read_text().splitlines()]
    assert list(one)[-6:] == ["trajectory", "sampling_args", "board", "answer", "raw", "nothing"]
    assert (one["board"], one["raw"], one["nothing"]) == ([0, 1, 2], {"bytes": 3}, None)
    assert one["trajectory"][0]["completion_logprobs"] == [-1.0, -2.0]
    assert list(two)[-2:] == ["trajectory", "sampling_args"]
    assert (two["error"], two["advantage"]) == (["Timeout", "Cause"], -0.5)


def test_more_than_a_megabyte_is_saved_whole(tmp_path):
    rollouts = [rollout(example=i, state={"text": "é" * 100_000}) for i in range(20)]
    size = save_rollouts(tmp_path / "r.jsonl", rollouts, state_columns={"a": ["text"]})
    lines = (tmp_path / "r.jsonl").read_bytes().splitlines()
    assert size > 4_000_000
    assert [json.loads(line)["example_id"] for line in lines] == list(range(20))


def received(folder, samples):
    """The micro batches of a trainer of one rank."""
    writer = BatchWriter(str(folder), step=0)
    writer.publish(pack_samples(samples, seq_len=8), writer.add(samples), seq_len=8, policy_version=0)
    return list(open_training_batch(str(batch_path(str(folder), 0))).micro_batches(0))


def test_paths_may_be_texts(tmp_path):
    assert save_rollouts(str(tmp_path / "saved.jsonl"), [rollout()]) == (tmp_path / "saved.jsonl").stat().st_size


def test_exported_tokens_name_every_token_and_turn_what_is_not_finite_into_null(tmp_path):
    batches = received(tmp_path, interleave_rollout(rollout(turns=[turn([-1.0, -2.0], ids=[5, 6])]), advantage=0.5))
    trainer = [np.array([0.0, -1.0, -np.inf], np.float32)]
    assert export_tokens(tmp_path / "t.jsonl", batches, logprobs=trainer, entropy=[np.full(3, np.nan, np.float32)]) == 1
    line = json.loads((tmp_path / "t.jsonl").read_text())
    assert (line["ids"], line["positions"], line["mask"]) == ([1, 5, 6], [0, 1, 2], [0, 1, 1])
    assert line["importance_ratio"] == [1.0, 1.0, 0.0]
    assert line["mismatch_kl"] == [0.0, 0.0, None]
    assert line["entropy"] == [None] * 3
    with pytest.raises(ConfigError, match="3 tokens has 1 logprobs"):
        export_tokens(tmp_path / "u.jsonl", batches, logprobs=[trainer[0][:1]], entropy=[trainer[0]])
    assert not (tmp_path / "u.jsonl").exists()


@pytest.mark.parametrize("size", [1e-7, 1e-4, 1e-2, 3.0])
def test_the_mismatch_kl_is_never_below_zero_and_exact_where_policies_almost_agree(tmp_path, size):
    import torch

    from headrace.train.rl import policy_terms

    rng = np.random.default_rng(3)
    old = -rng.random(4096).astype(np.float32) * 10
    new = old + (size * rng.standard_normal(4096)).astype(np.float32)
    micro = {"ids": np.zeros(4096, np.int32), "mask": np.ones(4096, np.uint8), "logprobs": old, "mode": "rl", "advantages": np.ones(4096, np.float32)}  # fmt: skip
    found = policy_terms(torch.from_numpy(new), micro).mismatch_kl.numpy().astype(np.float64)
    x = (new - old).astype(np.float64)
    assert (found >= 0).all()
    np.testing.assert_allclose(found, np.expm1(x) - x, rtol=1e-3, atol=2e-7 * size)
    told = {"run": "", "env": ["a"], "positions": np.arange(4096), **micro}
    export_tokens(tmp_path / "t.jsonl", [told], logprobs=[new], entropy=[old])
    exported = np.array(json.loads((tmp_path / "t.jsonl").read_bytes())["mismatch_kl"])
    assert (exported >= 0).all()
