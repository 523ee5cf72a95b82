"""Four ranks with unequal tokens learn what one process with all of them would: real processes over gloo.

Run as a script, this file is the process that the ranks are forked from:  test_rl_loss_ranks.py FOLDER
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.errors import ConfigError
from headrace.train import global_token_mean
from headrace.train.rl import EnvWatch, policy_terms

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rank_server import fork_ranks

RANKS, VOCAB = 4, 11
LEARNT = (40, 3, 0, 17)
"""Tokens that each rank learns from."""


def micro_batch(rank, mode="rl"):
    rng = np.random.default_rng(rank)
    n = 50
    mask = np.zeros(n, np.uint8)
    mask[rng.permutation(n)[: LEARNT[rank]]] = 1
    return {
        "ids": rng.integers(0, VOCAB, n).astype(np.int32), "mask": mask, "logprobs": (-rng.random(n) * 3).astype(np.float32),
        "advantages": np.repeat(rng.normal(size=2), 25).astype(np.float32), "cu_seqlens": np.array([0, 25, 50], np.int32),
        "env": ["a", "b"], "mode": mode,
    }  # fmt: skip


def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB)).double()


def logprobs_of(net, micro):
    ids = torch.from_numpy(micro["ids"]).long()
    return net(ids.roll(1)).log_softmax(-1).gather(1, ids[:, None])[:, 0]


def gradient(net):
    return torch.cat([p.grad.flatten() for p in net.parameters()]).tolist()


def one_rank(folder, rank):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )
    found = {}
    for kind in ("global", "local"):
        net = model()
        parallel = torch.nn.parallel.DistributedDataParallel(net)
        micro = micro_batch(rank)
        terms = policy_terms(logprobs_of(parallel, micro), micro)
        loss = (
            global_token_mean(terms.loss_sum, terms.tokens)
            if kind == "global"
            else terms.loss_sum / terms.tokens.clamp(min=1)
        )
        loss.backward()
        found[kind] = (float(loss.detach()), gradient(net))
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    # Not destroyed: the last DDP would then end the group with the interpreter's lock held, for which its thread may be waiting.
    dist.barrier()


def main(folder):
    torch.set_num_threads(1)
    sys.exit(fork_ranks(RANKS, lambda rank: one_rank(folder, rank)))


def test_the_gradient_of_four_unequal_ranks_is_the_per_token_mean_of_one_process(tmp_path, warm):
    done = warm.run([sys.executable, __file__, str(tmp_path)], timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    net = model()
    terms = [policy_terms(logprobs_of(net, m), m) for m in map(micro_batch, range(RANKS))]
    assert [int(t.tokens) for t in terms] == list(LEARNT)
    loss = sum(t.loss_sum for t in terms) / sum(LEARNT)
    loss.backward()
    expected = gradient(net)
    value, ranks_gradient = found["global"]
    assert value == pytest.approx(float(loss.detach()), abs=1e-9)
    assert np.abs(np.array(ranks_gradient) - expected).max() < 1e-6
    # Each rank's own mean, averaged by DDP, is another gradient: the test would notice.
    assert np.abs(np.array(found["local"][1]) - expected).max() > 1e-3


@pytest.mark.parametrize("mode", ["rl", "sft"])
def test_what_is_not_learnt_reaches_neither_loss_nor_gradient(mode):
    micro = micro_batch(1, mode)
    learnt = torch.from_numpy(micro["mask"]).bool()
    logprobs = torch.where(learnt, -1.0, float("-inf")).double().requires_grad_()
    terms = policy_terms(logprobs, micro)
    terms.loss_sum.backward()
    assert torch.isfinite(terms.loss_sum)
    assert int(terms.tokens) == 3
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert not logprobs.grad[~learnt].any()
    with pytest.raises(ConfigError, match=r"50 tokens needs as many logprobs, got shape \[49\]"):
        policy_terms(logprobs[:49], micro)


def test_entropy_and_mismatch_are_told_for_all_and_for_each_environment():
    watch = EnvWatch()
    kl, entropies, envs = [], [], []
    for rank in range(RANKS):
        micro = micro_batch(rank)
        terms = policy_terms(torch.linspace(-2, -0.1, 50).double(), micro)
        entropy = torch.arange(50).double()
        watch.add(micro, terms, entropy)
        learnt = micro["mask"].astype(bool)
        log_ratio = np.linspace(-2, -0.1, 50, dtype=np.float32).astype(float) - micro["logprobs"]
        kl.append((np.exp(log_ratio) - log_ratio - 1)[learnt])
        entropies.append(np.arange(50)[learnt])
        envs.append(np.repeat(["a", "b"], 25)[learnt])
    metrics = watch.metrics()
    kl, entropies, envs = map(np.concatenate, (kl, entropies, envs))
    for who, chosen in (("all", slice(None)), ("a", envs == "a"), ("b", envs == "b")):
        for name, values in (("mismatch_kl", kl), ("entropy", entropies)):
            told = [metrics[f"{name}/{who}/{s}"] for s in ("mean", "std", "max")]
            assert told == pytest.approx([values[chosen].mean(), values[chosen].std(), values[chosen].max()], rel=1e-5)
    assert watch.metrics() == {}
    sft = micro_batch(0, mode="sft")
    watch.add(sft, policy_terms(torch.zeros(50).double(), sft), torch.zeros(50))
    assert not [key for key in watch.metrics() if key.startswith("mismatch_kl")]


if __name__ == "__main__":
    main(sys.argv[1])
