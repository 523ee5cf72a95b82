"""The policy trainer: loss terms by hand, state to the bit, and a mix of environments by weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError, CursorMismatch
from headrace.rollouts import BatchWriter, open_training_batch, pack_samples
from headrace.rollouts.advantages import AdvantageConfig, AdvantageInputs, default_advantage
from headrace.rollouts.records import Rollout, Step, StepTokens, TrainingSample
from headrace.runs.orchestrator import environment_of_task
from headrace.train.gpt import GPTConfig
from headrace.train.policy import PolicySettings, PolicyTrainer
from headrace.train.rl import policy_terms

SHAPE = GPTConfig.preset("gpt-digits", vocab_size=12, seq_len=16)


def made_batch(folder, step: int = 0, ranks: int = 1):
    rng = np.random.default_rng(step)
    samples = []
    for n in range(9):
        length = int(rng.integers(4, 14))
        mask = np.r_[np.zeros(2, np.uint8), np.ones(length - 2, np.uint8)]
        samples.append(
            TrainingSample(
                env_name="game", example_id=n, ids=rng.integers(0, 12, length).astype(np.int32), mask=mask,
                logprobs=np.where(mask, -rng.random(length) * 3, 0).astype(np.float32), prompt_length=2, advantage=float(rng.standard_normal()),
            )
        )  # fmt: skip
    writer = BatchWriter(folder, step=step)
    slots = writer.add(samples)
    path = writer.publish(
        pack_samples([s.sample for s in slots], seq_len=32, ranks=ranks), slots, seq_len=32, policy_version=0
    )
    writer.close()
    return open_training_batch(path)


def test_a_saved_trainer_goes_on_to_the_bit(tmp_path):
    settings = PolicySettings(steps=6, decay=0.5, kl=0.1, entropy=0.01)
    whole, first, second = (PolicyTrainer(settings, SHAPE) for _ in range(3))
    for trainer in (whole, first, second):
        trainer.freeze_reference()
    batches = [made_batch(tmp_path, step) for step in range(6)]
    rates = [whole.step(batch).lr for batch in batches]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-3, 1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    for batch in batches[:3]:
        first.step(batch)
    second.load_state_arrays(*first.state_arrays())
    for batch in batches[3:]:
        second.step(batch)
    assert second.model_sha256() == whole.model_sha256() != first.model_sha256()
    other = PolicyTrainer(settings, GPTConfig.preset("gpt-tiny", vocab_size=12, seq_len=16))
    with pytest.raises(CursorMismatch):
        other.load_state_arrays(*first.state_arrays())


def test_the_loss_terms_are_those_of_their_formulas():
    logprobs = torch.tensor([-1.0, -0.5, -2.0])
    micro = {
        "ids": np.zeros(3, np.int32), "mask": np.array([0, 1, 1], np.uint8), "logprobs": np.array([0.0, -1.5, -1.0], np.float32),
        "advantages": np.array([1.0, 2.0, -1.0], np.float32), "mode": "rl",
    }  # fmt: skip
    ratio = np.exp([1.0, -1.0])
    clipped = -min(2 * ratio[0], 2 * 1.2) - min(-ratio[1], -0.8)
    assert float(policy_terms(logprobs, micro).loss_sum) == pytest.approx(clipped)
    truncated = -min(ratio[0], 1.5) * 2.0 * -0.5 - min(ratio[1], 1.5) * -1.0 * -2.0
    assert float(policy_terms(logprobs, micro, importance_cap=1.5).loss_sum) == pytest.approx(truncated)
    reference, entropy = torch.tensor([0.0, -1.0, -2.0]), torch.tensor([9.0, 0.3, 0.4])
    with_both = policy_terms(logprobs, micro, reference=reference, kl=0.5, entropy=entropy, entropy_bonus=0.1)
    divergence = np.exp(-0.5) + 0.5 - 1
    assert float(with_both.loss_sum) == pytest.approx(clipped + 0.5 * divergence - 0.1 * 0.7)
    by_token = micro | {"reference_logprobs": reference.numpy(), "loss_weights": np.array([9.0, 0.0, 2.0], np.float32)}
    second = -min(-ratio[1], -0.8)  # its reference is the policy itself
    assert float(policy_terms(logprobs, by_token, kl=0.5).loss_sum) == pytest.approx(2.0 * second)


def test_advantages_are_scaled_as_their_kind_says():
    tokens = StepTokens(
        prompt_ids=np.zeros(1, np.int32), prompt_mask=np.zeros(1, np.uint8), completion_ids=np.zeros(1, np.int32),
        completion_mask=np.ones(1, np.uint8), completion_logprobs=np.zeros(1, np.float32),
    )  # fmt: skip
    rewards = [0.0, 1.0, 1.0, 4.0]
    group = [Rollout(example_id=1, env_name="game", reward=r, trajectory=(Step(tokens=tokens),)) for r in rewards]
    inputs = AdvantageInputs(rollouts=group)
    spread = np.std(rewards)
    assert default_advantage(inputs, kind="std").advantages == pytest.approx([(r - 1.5) / spread for r in rewards])
    others = [r - (sum(rewards) - r) / 3 for r in rewards]
    assert default_advantage(inputs, kind="leave_one_out").advantages == pytest.approx(others)
    assert default_advantage(AdvantageInputs(rollouts=group[1:3]), kind="std").advantages == [0.0, 0.0]
    with pytest.raises(ConfigError, match="expected 'default', 'std'"):
        AdvantageConfig(kind="best")  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize("weights", [(1.0,), (0.5, 0.5), (0.7, 0.2, 0.1), (3.0, 0.0, 1.0)])
def test_groups_are_shared_by_weight_at_every_moment(weights):
    chosen = environment_of_task(weights, seed=3)
    again = environment_of_task(weights, seed=3)
    assert again(400) == chosen(400), "asked out of order it is the same"
    counts = np.zeros(len(weights))
    for task in range(600):
        counts[chosen(task)] += 1
        assert np.abs(counts - (task + 1) * np.array(weights) / sum(weights)).max() < 2
