"""Several ranks train one model: real processes over gloo, joined by the environment that torchrun would give them.

Run as a script, this file is the process that the ranks are forked from:  test_train_ranks.py FOLDER
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.errors import WorkerDied
from headrace.train import (
    LMTrainer,
    StepResult,
    TrainSettings,
    global_token_mean,
    init_distributed,
    shutdown_distributed,
)

VOCAB, SEQ, STEPS = 600, 24, 4
LEARNED = {2: ((40, 9), (0, 33), (21, 0), (48, 1)), 3: ((40, 9, 3), (5, 33, 7), (21, 4, 40), (48, 1, 17))}
"""Tokens to learn, by world size, step and rank."""


def share(world_size: int, step: int, rank: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(100 * step + rank))
    labels = ids[:, 1:].flatten()
    labels[LEARNED[world_size][step][rank] :] = -100
    positions = torch.arange(SEQ).expand(2, SEQ)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels.view(2, SEQ), "position_ids": positions}


def make_trainer(rank: int = 0, world_size: int = 1, seed: int = 2) -> LMTrainer:
    settings = TrainSettings(steps=10, warmup_steps=2, lr=1e-3, grad_clip=0, threads=1, device="cpu", seed=seed)
    return LMTrainer(settings, vocab_size=VOCAB, seq_len=SEQ, rank=rank, world_size=world_size)


def whole(step: int) -> dict[str, torch.Tensor]:
    """The global batch that two ranks share."""
    shares = [share(2, step, rank) for rank in range(2)]
    return {name: torch.cat([s[name] for s in shares]) for name in shares[0]}


def one_step(
    trainer: LMTrainer, state: tuple, batch: dict[str, torch.Tensor]
) -> tuple[StepResult, dict[str, np.ndarray]]:
    """A step from a given state; its gradients and the parameters it left."""
    trainer.load_state_arrays(*state)
    result = trainer.step(batch)
    grads = {f"grad/{name}": p.grad.numpy().copy() for name, p in trainer.model.named_parameters()}
    return result, grads | trainer.state_arrays()[0]


def furthest(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], kind: str) -> float:
    return max(float(np.abs(found[name] - array).max()) for name, array in expected.items() if name.startswith(kind))


# ------------------------------------------------------------------------------------------------ the ranks


def train_and_then_lose_a_peer(folder: Path) -> None:
    # Compared from one state, step by step: over several steps Adam makes 1e-5 of the rounding of a gradient below its
    # eps. The state is warm (moments of several steps) for the same reason.
    alone = make_trainer()
    for step in range(STEPS):
        alone.step(whole(step))
    warm = alone.state_arrays()
    ranks = init_distributed("cpu", timeout_seconds=30)
    trainer = make_trainer(ranks.rank, ranks.world_size)
    facts: dict[str, object] = {"start": trainer.model_sha256()}
    expected = [one_step(alone, warm, whole(step)) for step in range(STEPS)]
    found = [one_step(trainer, warm, share(2, step, ranks.rank)) for step in range(STEPS)]
    pairs = [(mine, theirs) for (_, mine), (_, theirs) in zip(found, expected, strict=True)]
    facts |= {
        "end": trainer.model_sha256(),
        "losses": [result.loss for result, _ in found],
        "losses_alone": [result.loss for result, _ in expected],
        "tokens": [result.tokens for result, _ in found],
        "gradients_off": [furthest(mine, theirs, "grad/") for mine, theirs in pairs],
        "largest_gradient": [
            max(float(np.abs(a).max()) for n, a in e.items() if n.startswith("grad/")) for _, e in pairs
        ],
        "weights_off": [furthest(mine, theirs, "model/") for mine, theirs in pairs],
        "weights_moved": [furthest(theirs, warm[0], "model/") for _, theirs in pairs],
        "mean": global_token_mean(torch.tensor(float(ranks.rank)), ranks.rank).item(),
    }
    if ranks.rank == 1:
        (folder / "rank1.json").write_text(json.dumps(facts | {"left": time.monotonic()}))
        os._exit(0)
    try:
        trainer.step(share(2, 0, 0))
        facts["lost"] = "nothing was noticed"
    except WorkerDied as error:
        facts["lost"] = str(error)
    facts["noticed"] = time.monotonic()
    (folder / "rank0.json").write_text(json.dumps(facts))
    shutdown_distributed()


def train_straight_and_resumed(folder: Path) -> None:
    ranks = init_distributed("cpu", timeout_seconds=30)
    straight = make_trainer(ranks.rank, ranks.world_size)
    for step in range(STEPS):
        straight.step(share(3, step, ranks.rank))
    first = make_trainer(ranks.rank, ranks.world_size)
    for step in range(2):
        first.step(share(3, step, ranks.rank))
    second = make_trainer(ranks.rank, ranks.world_size, seed=77)
    second.load_state_arrays(*first.state_arrays())
    for step in range(2, STEPS):
        second.step(share(3, step, ranks.rank))
    facts: dict[str, object] = {"bits": [straight.model_sha256(), second.model_sha256()], "threads": gloo_threads()}
    shutdown_distributed()
    facts["threads_left"] = gloo_threads()
    try:
        straight.step(share(3, 0, ranks.rank))
    except RuntimeError as error:
        facts["stepping_on"] = str(error)
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(facts))


def gloo_threads() -> int:
    return sum("gloo_runloop" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir())


def fork_ranks(role: Callable[[Path], None], world_size: int, folder: Path) -> None:
    """Run a role in processes that find themselves in torchrun's environment; all of them must end well."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    children = []
    for rank in range(world_size):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        children.append(os.fork())
        if children[-1] == 0:
            try:
                role(folder)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert statuses == [0] * world_size, f"{role.__name__}: {statuses}"


# ------------------------------------------------------------------------------------------------ the tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory, warm) -> Path:
    """Both roles, run by ranks that are forked from one process."""
    folder = tmp_path_factory.mktemp("ranks")
    done = warm.run([sys.executable, "-W", "error", __file__, str(folder)], timeout=100)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def two_ranks(folder):
    role = folder / "train_and_then_lose_a_peer"
    return [json.loads((role / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_two_ranks_with_unequal_token_counts_and_sometimes_none_get_the_gradients_of_one_process(two_ranks):
    for facts in two_ranks:
        assert max(facts["gradients_off"]) < 1e-7
        assert min(facts["largest_gradient"]) > 1e-3


def test_two_ranks_with_unequal_token_counts_get_the_parameters_of_one_process(two_ranks):
    for facts in two_ranks:
        assert max(facts["weights_off"]) < 1e-6
        assert min(facts["weights_moved"]) > 1e-4


def test_both_ranks_report_the_global_loss_and_count_and_hold_the_same_bits(two_ranks):
    first, second = two_ranks
    assert first["tokens"] == second["tokens"] == [sum(step) for step in LEARNED[2]]
    assert first["losses"] == second["losses"] == pytest.approx(first["losses_alone"], rel=1e-6)
    assert first["mean"] == second["mean"] == 1.0
    assert first["start"] == second["start"] == make_trainer().model_sha256()
    assert first["end"] == second["end"] != first["start"]


def test_a_rank_whose_peer_is_gone_says_so_within_two_seconds_instead_of_hanging(two_ranks):
    survivor, gone = two_ranks
    assert "rank 0 lost another rank while" in survivor["lost"]
    assert "resume from the last checkpoint" in survivor["lost"]
    assert survivor["noticed"] - gone["left"] < 2.0


@pytest.fixture(scope="module")
def three_ranks(folder):
    role = folder / "train_straight_and_resumed"
    return [json.loads((role / f"rank{rank}.json").read_text()) for rank in range(3)]


def test_three_ranks_that_resume_end_with_the_bits_of_three_that_never_stopped(three_ranks):
    assert len({digest for facts in three_ranks for digest in facts["bits"]}) == 1


def test_leaving_the_group_ends_its_threads_while_trainers_are_still_alive(three_ranks):
    # Left to the destructor of a trainer, their end can wait for the GIL for ever.
    for facts in three_ranks:
        assert facts["threads"] > 0
        assert facts["threads_left"] == 0
        assert "comes after shutdown_distributed()" in facts["stepping_on"]


if __name__ == "__main__":
    make_trainer()  # what it imports at its first use is imported once, before the forks
    for role, world_size in ((train_and_then_lose_a_peer, 2), (train_straight_and_resumed, 3)):
        fork_ranks(role, world_size, Path(sys.argv[1]) / role.__name__)
