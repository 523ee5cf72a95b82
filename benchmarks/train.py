"""How far is a step of gpt-tiny from the speed of the bare matmuls in it?

    python benchmarks/train.py [STEPS]

Prints the time of one training step (forward, backward, optimiser; 24 x 256 tokens, 4,096 words) beside the time that
the same number of floating-point operations takes as one large matmul on the same threads, and the loss beside
F.cross_entropy on whole logits. Rounds alternate between the two sides and the fastest of each counts, because other
processes can only make a round slower.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from headrace.train import GPTConfig, LMTrainer, TrainSettings
from headrace.train.gpt import _LossSum

ROWS, SEQ, VOCAB = 24, 256, 4096


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(0))
    positions = torch.cat((torch.arange(100), torch.arange(SEQ - 100))).expand(ROWS, SEQ).contiguous()
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous(), "position_ids": positions}


def step_flops(config: GPTConfig) -> float:
    """Matmuls of one step: forward once, backward twice; attention counted over the whole square."""
    per_token = 2 * (config.layers * 12 * config.width**2 + config.vocab_size * config.width)
    attention = config.layers * 2 * 2 * config.seq_len * config.width
    return 3.0 * ROWS * SEQ * (per_token + attention)


def fastest(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main(rounds: int) -> None:
    trainer = LMTrainer(TrainSettings(steps=10_000, device="cpu"), vocab_size=VOCAB, seq_len=SEQ)
    data, config = batch(), trainer.model.config
    side = 1024
    a, b, out = torch.randn(side, side), torch.randn(side, side), torch.empty(side, side)
    times = fastest({"step": lambda: trainer.step(data), "matmul": lambda: torch.mm(a, b, out=out)}, rounds)
    limit = step_flops(config) * times["matmul"] / (2 * side**3)
    print(
        f"step gpt-tiny {ROWS}x{SEQ}, {trainer.threads} threads   ours {1e3 * times['step']:.0f} ms   "
        f"matmul limit {1e3 * limit:.0f} ms ({2 * side**3 / times['matmul'] / 1e9:.0f} GFLOP/s)   "
        f"ratio {times['step'] / limit:.2f}"
    )
    hidden = torch.randn(ROWS * SEQ, config.width, requires_grad=True)
    weight = (0.02 * torch.randn(VOCAB, config.width)).requires_grad_()
    labels = data["labels"].flatten()
    times = fastest(
        {
            "ours": lambda: _LossSum.apply(hidden, weight, labels).backward(),
            "plain": lambda: F.cross_entropy(hidden @ weight.T, labels, reduction="sum").backward(),
        },
        rounds,
    )
    print(
        f"loss over {VOCAB} words, forward and backward   ours {1e3 * times['ours']:.0f} ms   "
        f"F.cross_entropy {1e3 * times['plain']:.0f} ms   ratio {times['ours'] / times['plain']:.2f}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
