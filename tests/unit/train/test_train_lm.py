"""The trainer in one process: schedule, exact state, refusals."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headrace.train
from headrace.errors import ConfigError, CursorMismatch, DataError, HeadraceError
from headrace.train import (
    LMTrainer,
    Ranks,
    TrainSettings,
    cpu_threads,
    global_token_mean,
    init_distributed,
    learning_rate,
)
from headrace.train.lm import _cgroup_cpus

VOCAB, SEQ = 64, 32


def make_trainer(**changes) -> LMTrainer:
    settings = TrainSettings(**{"steps": 20, "warmup_steps": 4, "threads": 1, "device": "cpu", "seed": 3, **changes})
    return LMTrainer(settings, vocab_size=VOCAB, seq_len=SEQ)


def make_batch(index: int, rows: int = 3) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (rows, SEQ + 1), generator=torch.Generator().manual_seed(index))
    labels = ids[:, 1:].clone()
    labels[:, 19] = labels[:, -1] = -100
    positions = torch.cat((torch.arange(20), torch.arange(SEQ - 20))).expand(rows, SEQ)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels, "position_ids": positions}


def bits(trainer: LMTrainer) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in trainer.state_arrays()[0].items()}


# ---------------------------------------------------------------------------------------------- schedule

schedules = st.builds(
    TrainSettings,
    steps=st.integers(1, 500),
    warmup_steps=st.integers(0, 100),
    lr=st.floats(1e-5, 1.0),
    min_lr_ratio=st.just(0.0) | st.floats(1e-6, 1.0),
)


@given(settings=schedules, step=st.integers(0, 1000))
def test_the_rate_is_positive_up_to_the_last_step_and_never_above_the_top(settings, step):
    rate = learning_rate(step, settings)
    assert 0 <= rate <= settings.lr * (1 + 1e-12)
    assert rate == learning_rate(step, settings)
    assert rate > 0 or (settings.min_lr_ratio == 0 and step >= settings.steps - 1)


@given(settings=schedules)
def test_no_two_neighbouring_steps_are_further_apart_than_the_steepest_slope_of_their_part(settings):
    rates = [learning_rate(step, settings) for step in range(settings.warmup_steps + settings.steps + 3)]
    rise = settings.lr / max(1, settings.warmup_steps)
    fall = settings.lr * (1 - settings.min_lr_ratio) * math.pi / 2 / max(1, settings.steps - settings.warmup_steps)
    for step, (left, right) in enumerate(itertools.pairwise(rates)):
        limit = rise if step + 1 < settings.warmup_steps else fall
        assert abs(right - left) <= limit * (1 + 1e-9) + 1e-15


def test_the_rate_is_at_the_top_when_warm_up_ends_and_at_the_floor_at_the_last_step():
    settings = TrainSettings(steps=100, warmup_steps=10, lr=2e-3, min_lr_ratio=0.25)
    assert learning_rate(0, settings) == pytest.approx(2e-4)
    assert learning_rate(9, settings) == 2e-3
    assert learning_rate(10, settings) == pytest.approx(2e-3, rel=1e-3)
    assert learning_rate(99, settings) == learning_rate(5000, settings) == pytest.approx(5e-4)


def test_a_step_uses_the_rate_of_its_own_number():
    trainer = make_trainer()
    results = [trainer.step(make_batch(i)) for i in range(3)]
    assert [r.lr for r in results] == [learning_rate(i, trainer.settings) for i in range(3)]
    assert [r.step for r in results] == [0, 1, 2]
    assert trainer.optimizer.lr == results[-1].lr


# ------------------------------------------------------------------------------------------------- state


def test_a_fresh_trainer_has_the_same_bits_on_every_machine():
    digest = "4f5f65536aea54be8b16c716a6e290915f8b5aca7ca85a35d053fa2b535b40e1"
    assert make_trainer().model_sha256() == digest
    assert make_trainer(seed=4).model_sha256() != digest


def test_saving_after_five_steps_and_going_on_in_a_fresh_trainer_gives_the_bits_of_ten_steps():
    straight = make_trainer()
    losses = [straight.step(make_batch(i)).loss for i in range(10)]
    first = make_trainer()
    for i in range(5):
        first.step(make_batch(i))
    second = make_trainer(seed=99)
    second.load_state_arrays(*first.state_arrays())
    assert second.steps_taken == 5
    assert bits(second) == bits(first)
    assert [second.step(make_batch(i)).loss for i in range(5, 10)] == losses[5:]
    assert bits(second) == bits(straight)
    assert second.model_sha256() == straight.model_sha256()


def test_a_state_saved_before_the_first_step_resumes_exactly_even_in_a_trainer_that_has_moved_on():
    straight, moved = make_trainer(), make_trainer()
    fresh = make_trainer().state_arrays()
    for i in range(2):
        straight.step(make_batch(i))
        moved.step(make_batch(i + 50))
    moved.load_state_arrays(*fresh)
    for i in range(2):
        moved.step(make_batch(i))
    assert bits(moved) == bits(straight)


def test_a_state_is_a_copy_that_later_steps_do_not_change():
    trainer = make_trainer()
    trainer.step(make_batch(0))
    arrays, _, meta = trainer.state_arrays()
    before = {name: array.copy() for name, array in arrays.items()}
    trainer.step(make_batch(1))
    assert meta["step"] == 1
    assert all(np.array_equal(arrays[name], before[name]) for name in arrays)
    assert all(array.flags.c_contiguous for array in arrays.values())
    assert {"model/blocks.0.attn.qkv.weight", "optim/exp_avg/embed.weight", "optim/exp_avg_sq/norm.weight"} <= set(
        arrays
    )


def test_a_state_of_another_model_is_refused_with_both_sides_and_changes_nothing():
    other = LMTrainer(TrainSettings(steps=5, threads=1), vocab_size=VOCAB + 1, seq_len=SEQ)
    trainer = make_trainer()
    before = bits(trainer)
    with pytest.raises(CursorMismatch, match=r"'vocab_size': 65.*now.*'vocab_size': 64.*start a new run") as caught:
        trainer.load_state_arrays(*other.state_arrays())
    assert set(caught.value.differences) == {"model"}
    assert bits(trainer) == before


def test_a_state_with_an_array_missing_or_misshapen_is_refused_by_name():
    trainer = make_trainer()
    trainer.step(make_batch(0))
    arrays, dtypes, meta = trainer.state_arrays()
    without = {name: array for name, array in arrays.items() if name != "optim/exp_avg/norm.weight"}
    with pytest.raises(CursorMismatch, match=r"optim/exp_avg/norm\.weight: saved absent, now float32 \[48\]"):
        trainer.load_state_arrays(without, dtypes, meta)
    with pytest.raises(CursorMismatch, match=r"model/norm\.weight: saved float32 \[3\], now float32 \[48\]"):
        trainer.load_state_arrays({**arrays, "model/norm.weight": np.ones(3, np.float32)}, dtypes, meta)


# -------------------------------------------------------------------------------------------------- step


def test_matrices_decay_and_norms_do_not():
    groups = make_trainer(weight_decay=0.2).optimizer.param_groups
    assert {g["weight_decay"]: {p.ndim for p in g["params"]} for g in groups} == {0.2: {2}, 0.0: {1}}


def test_the_result_counts_the_labelled_tokens_and_its_loss_is_their_mean():
    trainer, batch = make_trainer(), make_batch(0)
    learned = int((batch["labels"] != -100).sum())
    with torch.no_grad():
        total = trainer.model(batch["input_ids"], batch["position_ids"], batch["labels"])
    result = trainer.step(batch)
    assert result.tokens == learned == 3 * (SEQ - 2)
    assert result.loss == pytest.approx(float(total) / learned, rel=1e-6)
    assert trainer.step(batch).loss < result.loss


def test_a_batch_with_nothing_to_learn_gives_a_loss_of_zero_and_a_gradient_of_zero():
    batch = make_batch(0)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    result = make_trainer().step(batch)
    assert (result.loss, result.tokens, result.grad_norm) == (0.0, 0, 0.0)


def test_the_gradient_is_clipped_to_the_norm_asked_for_and_left_alone_at_zero():
    def norm_after(clip: float) -> tuple[float, float]:
        trainer = make_trainer(grad_clip=clip)
        result = trainer.step(make_batch(0))
        left = torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm()
        return float(left), result.grad_norm

    after, reported = norm_after(0.01)
    assert after == pytest.approx(0.01, rel=1e-3)
    assert reported > 0.1
    assert norm_after(0)[0] == pytest.approx(reported, rel=1e-6)


def test_a_loss_that_is_not_finite_stops_the_run_naming_the_step_and_leaves_the_parameters_as_they_were():
    trainer = make_trainer()
    trainer.step(make_batch(0))
    with torch.no_grad():
        trainer.model.norm.weight.fill_(float("inf"))
    before = bits(trainer)
    with pytest.raises(HeadraceError, match=r"step 1 diverged.*got loss nan.*lower train\.lr"):
        trainer.step(make_batch(1))
    assert bits(trainer) == before


def test_a_batch_that_lacks_a_field_or_mixes_shapes_is_refused():
    trainer, batch = make_trainer(), make_batch(0)
    with pytest.raises(DataError, match=r"step 0 got a batch without position_ids, labels \(it has input_ids\)"):
        trainer.step({"input_ids": batch["input_ids"]})
    with pytest.raises(DataError, match=r"labels \[3, 31\]; all three must have one shape"):
        trainer.step({**batch, "labels": batch["labels"][:, 1:]})


def test_in_one_process_the_global_mean_is_sum_over_count_and_so_is_its_gradient():
    loss_sum = torch.tensor(6.0, requires_grad=True)
    mean = global_token_mean(loss_sum, 4)
    mean.backward()
    assert mean.item() == 1.5
    assert loss_sum.grad.item() == 0.25


# ---------------------------------------------------------------------------------- settings, ranks, threads


def test_settings_report_all_their_problems_at_once():
    with pytest.raises(ConfigError) as caught:
        TrainSettings(steps=0, lr=float("nan"), model="gpt", betas=(0.9, 1.0), device="tpu")
    assert [p.split()[0] for p in caught.value.problems] == [
        "train.steps",
        "train.model",
        "train.lr",
        "train.betas",
        "train.device",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"train\.device is cuda and torch finds no CUDA device"):
        make_trainer(device="cuda")


def test_a_trainer_of_many_ranks_without_a_process_group_is_refused():
    with pytest.raises(ConfigError, match=r"rank 1 of 2 needs a process group.*init_distributed"):
        LMTrainer(TrainSettings(steps=1), vocab_size=8, seq_len=8, rank=1, world_size=2)


def test_without_torchrun_there_is_one_rank_and_no_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert init_distributed() == Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)
    assert not torch.distributed.is_initialized()


def test_half_an_environment_of_torchrun_is_refused(monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(
        ConfigError, match=r"RANK='', LOCAL_RANK='', LOCAL_WORLD_SIZE='two' is not a number; start with"
    ):
        init_distributed()


def test_ranks_of_a_node_share_its_cpus_and_each_has_at_least_one():
    whole = cpu_threads(1)
    assert whole >= 1
    assert cpu_threads(whole) == 1
    assert cpu_threads(1000) == 1


def test_a_cgroup_quota_anywhere_above_the_process_limits_it(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("0::/pod/box\n")
    root = tmp_path / "fs"
    (root / "pod" / "box").mkdir(parents=True)
    (root / "pod" / "box" / "cpu.max").write_text("max 100000\n")
    assert _cgroup_cpus(own, root) == math.inf
    (root / "pod" / "cpu.max").write_text("250000 100000\n")
    assert _cgroup_cpus(own, root) == 2.5
    own.write_text("4:cpu,cpuacct:/old\n0::/pod/box\n")
    (root / "cpu" / "old").mkdir(parents=True)
    (root / "cpu" / "old" / "cpu.cfs_quota_us").write_text("150000\n")
    (root / "cpu" / "old" / "cpu.cfs_period_us").write_text("100000\n")
    assert _cgroup_cpus(own, root) == 1.5
    assert _cgroup_cpus(tmp_path / "absent", root) == math.inf


def test_the_names_the_room_offers_all_exist():
    assert all(hasattr(headrace.train, name) for name in headrace.train.__all__)


def test_a_checkpoint_says_of_rotary_positions_what_version_0_1_said():
    _, _, meta = make_trainer().state_arrays()
    assert set(meta["model"]) == {"vocab_size", "seq_len", "layers", "heads", "width"}
