"""AdamW of the reference trainers: torch's bits, without torch's compiler."""

from __future__ import annotations

import subprocess
import sys

import torch

from headrace.train.adamw import AdamW


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.GELU(), torch.nn.Linear(50, 7))


def groups(of: torch.nn.Module) -> list[dict]:
    matrices, vectors = ([p for p in of.parameters() if (p.ndim >= 2) == wanted] for wanted in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def trained(of: torch.nn.Module, optimizer) -> None:
    for step in range(20):
        x = torch.randn(9, 30, generator=torch.Generator().manual_seed(step))
        of.zero_grad(set_to_none=step % 2 == 0)
        (of(x) ** 2).sum().backward()
        optimizer.lr = 1e-3 * (step + 1)
        for group in optimizer.param_groups:  # where torch.optim has it
            group["lr"] = optimizer.lr
        optimizer.step()


def test_weights_and_moments_have_the_bits_of_torch_optim():
    ours, theirs = model(), model()
    mine = AdamW(groups(ours), lr=1e-3, betas=(0.9, 0.95))
    trained(ours, mine)
    reference = torch.optim.AdamW(groups(theirs), lr=1e-3, betas=(0.9, 0.95), fused=True)
    trained(theirs, reference)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)
        assert all(
            torch.equal(mine.state[p][name], reference.state[q][name]) for name in ("step", "exp_avg", "exp_avg_sq")
        )


def test_a_parameter_without_a_gradient_stays_as_it_is():
    learnt, left = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([{"params": [learnt, left], "weight_decay": 0.5}], lr=0.1, betas=(0.9, 0.95))
    learnt.grad = torch.ones(3)
    optimizer.step()
    assert learnt.detach().ne(1).all()
    assert torch.equal(left.detach(), torch.ones(3))
    assert left not in optimizer.state


def test_a_step_of_a_trainer_does_not_import_the_compiler_of_torch():
    code = """
import sys, torch
from headrace.train.adamw import AdamW
p = torch.nn.Parameter(torch.ones(3))
optimizer = AdamW([{"params": [p], "weight_decay": 0.0}], lr=0.1, betas=(0.9, 0.95))
p.sum().backward()
optimizer.step()
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
