"""A model learns, and a run stopped to disk goes on as if it had not been."""

from __future__ import annotations

import pytest
import torch

from headrace.train import CheckpointStore, LMTrainer, TrainSettings

VOCAB, SEQ, ROWS = 64, 32, 8


def copy_task(step: int) -> dict[str, torch.Tensor]:
    """Two documents a row, each two random tokens in turn, a b a b …: from the third on, copy the one before the last."""
    tokens = torch.randint(0, VOCAB, (ROWS, 4), generator=torch.Generator().manual_seed(step))
    ids = torch.cat((tokens[:, :2].repeat(1, SEQ // 4), tokens[:, 2:].repeat(1, SEQ // 4)), dim=1)
    labels = ids.roll(-1, dims=1)
    labels[:, SEQ // 2 - 1 :: SEQ // 2] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(SEQ // 2).repeat(2).expand(ROWS, SEQ)}


def make_trainer(steps: int, seed: int = 1) -> LMTrainer:
    settings = TrainSettings(steps=steps, lr=5e-3, warmup_steps=5, threads=1, device="cpu", seed=seed)
    return LMTrainer(settings, vocab_size=VOCAB, seq_len=SEQ)


def test_the_loss_falls_on_a_task_of_copying():
    trainer = make_trainer(150)
    losses = [trainer.step(copy_task(i)).loss for i in range(150)]
    assert losses[0] == pytest.approx(4.2, abs=0.3)
    assert losses[-1] < 1.0
    assert trainer.step(copy_task(1000)).loss < 1.0


def test_a_run_that_goes_on_from_the_disk_ends_with_the_bits_of_the_run_that_never_stopped(tmp_path):
    straight = make_trainer(12)
    for i in range(12):
        straight.step(copy_task(i))
    for stop in (3, 7, 12):
        store = CheckpointStore(tmp_path)
        trainer = make_trainer(12, seed=1 if store.latest() is None else 100 + stop)
        if (found := store.latest()) is not None:
            trainer.load_state_arrays(found[1].arrays, found[1].dtypes, found[1].meta)
        while trainer.steps_taken < stop:
            trainer.step(copy_task(trainer.steps_taken))
        store.save(trainer.steps_taken, *trainer.state_arrays())
    expected = straight.state_arrays()[0]
    step, found = CheckpointStore(tmp_path).latest()
    assert step == 12
    assert {name: array.tobytes() for name, array in found.arrays.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }
