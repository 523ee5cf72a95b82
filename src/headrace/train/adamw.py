"""AdamW for trainers that are not compiled.

    optimizer = AdamW([{"params": weights, "weight_decay": 0.1}], lr=3e-4, betas=(0.9, 0.95))
    loss.backward()
    optimizer.lr = 1e-4
    optimizer.step()

`torch.optim.AdamW` imports torch's compiler (`torch._dynamo`) as soon as it is made: 2 of the 8 seconds before the first step of a run. This class keeps
the groups and the moments and calls torch's own update, `torch.optim.adamw.adamw`, so the weights have the same bits. In a training loop of your own, take `torch.optim.AdamW`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class AdamW:
    """Groups of parameters and their moments, under the names that `torch.optim.AdamW` has for them."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        """`groups`: each has `params`, and `weight_decay` for them. `lr` is that of all groups."""
        self.param_groups: list[dict[str, Any]] = [{**group, "params": list(group["params"])} for group in groups]
        self.lr = lr
        """Learning rate of the next step."""
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        """Of each parameter: `step`, `exp_avg` and `exp_avg_sq`."""
        self._betas = betas

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            learnt = [p for p in group["params"] if p.grad is not None]
            if not learnt:
                continue
            states = [self.state.get(p) or self._start(p) for p in learnt]
            adamw(
                learnt, [p.grad for p in learnt], [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [],
                [s["step"] for s in states], fused=True, amsgrad=False, beta1=self._betas[0], beta2=self._betas[1], lr=self.lr,
                weight_decay=group["weight_decay"], eps=1e-8, maximize=False,
            )  # fmt: skip

    def _start(self, parameter: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), device=parameter.device)
        self.state[parameter] = {
            "step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)
        }  # fmt: skip
        return self.state[parameter]
