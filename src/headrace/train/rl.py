"""Loss terms of a policy on packed rollouts: the loss per token of the global batch, and metrics by environment.

    terms = policy_terms(logprobs, micro)                     ratio, mismatch KL and loss of every token
    loss = global_token_mean(terms.loss_sum, terms.tokens)    a collective; the same mean however samples are dealt to ranks
    watch.add(micro, terms, entropy)                          then watch.metrics(): entropy/{all,env}/{mean,std,max}, mismatch_kl/…

Dividing a rank's sum by its own tokens and letting DDP or FSDP average gradients gives tokens of short ranks more weight. Here
the sum is divided by the tokens of all ranks (at least 1), and the gradient multiplied by what DDP will divide it by.
With several micro batches a step, add up `loss_sum` and `tokens` over them first, or give `global_token_mean` each micro batch's sum and
the step's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PolicyTerms:
    """The loss terms of one micro batch."""

    loss_sum: Tensor
    """Sum of the losses of learnt tokens; has the gradient."""
    tokens: Tensor
    """Number of learnt tokens, int64."""
    mask: Tensor
    """Which tokens are learnt."""
    ratio: Tensor
    """Probability under the trainer over probability under the engine, detached."""
    mismatch_kl: Tensor
    """ratio − log ratio − 1, detached: 0 where trainer and inference agree."""


def policy_terms(
    logprobs: Tensor, micro: Mapping[str, Any], *, clip_low: float = 0.2, clip_high: float = 0.2, importance_cap: float = 0.0,
    reference: Tensor | None = None, kl: float = 0.0, entropy: Tensor | None = None, entropy_bonus: float = 0.0,
) -> PolicyTerms:  # fmt: skip
    """The policy loss of a micro batch; for mode "sft" the negative log likelihood.

    Args:
        logprobs: the trainer's of the very tokens of `micro["ids"]`, one row. A token counts where its mask is 1.
        micro: a micro batch of `TrainingBatch.micro_batches`. Its `loss_weights`, if it has any, multiply the losses of its tokens.
        clip_low, clip_high: the ratio of probabilities counts within [1 − clip_low, 1 + clip_high] (PPO).
        importance_cap: above 0, truncated importance sampling in place of clipping: −min(ratio, cap) · advantage · log-prob.
        reference: log-probs of the same tokens by the reference policy, for `kl`; those of the batch unless given.
        kl: weight of the KL divergence to the reference policy (estimated as exp(d) − d − 1, d = reference − log-prob).
        entropy: of the policy at each token, with its gradient, for `entropy_bonus`.
        entropy_bonus: weight of the entropy, which is subtracted from the loss.
    """
    wanted = len(micro["ids"])
    if logprobs.shape != (wanted,):
        raise ConfigError(f"a micro batch of {wanted} tokens needs as many logprobs, got shape {list(logprobs.shape)}")
    device = logprobs.device
    mask = _tensor(micro["mask"], device).bool()
    old = _tensor(micro["logprobs"], device)
    # The log-prob of a token that is not learnt may be −inf: it must reach neither the sum nor, as 0 x inf, the gradient.
    log_ratio = torch.where(mask, logprobs - old, torch.zeros_like(logprobs))
    ratio = log_ratio.exp()
    if micro["mode"] == "sft":
        losses = -logprobs
    else:
        advantages = _tensor(micro["advantages"], device)
        if importance_cap > 0:
            losses = -ratio.detach().clamp(max=importance_cap) * advantages * logprobs
        else:
            losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
        if reference is None and "reference_logprobs" in micro:
            reference = _tensor(micro["reference_logprobs"], device)
        if reference is not None and kl:
            away = torch.where(mask, reference - logprobs, torch.zeros_like(logprobs))
            losses = losses + kl * (torch.expm1(away) - away)
        if entropy is not None and entropy_bonus:
            losses = losses - entropy_bonus * entropy
    losses = torch.where(mask, losses, torch.zeros_like(losses))
    if "loss_weights" in micro:
        losses = losses * _tensor(micro["loss_weights"], device)
    with torch.no_grad():
        # ratio − log ratio − 1 would be −7e-09 where both agree but for the last bit. expm1 is not rounded to nearest everywhere: hence the clamp.
        mismatch = (torch.expm1(log_ratio) - log_ratio).clamp_min(0)
    return PolicyTerms(
        loss_sum=losses.sum(), tokens=mask.sum(), mask=mask, ratio=ratio.detach(), mismatch_kl=mismatch.detach()
    )


def _tensor(array: Any, device: torch.device) -> Tensor:
    return (array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))).to(device)


class EnvWatch:
    """Collects metrics of tokens, over all environments and for each, until `metrics` is called."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, micro: Mapping[str, Any], terms: PolicyTerms, entropy: Tensor) -> None:
        """Count the learnt tokens of a micro batch. SFT tokens have no policy to mismatch: their KL is left out."""
        mask = terms.mask.cpu().numpy()
        measured = {"entropy": entropy}
        if micro["mode"] != "sft":
            measured["mismatch_kl"] = terms.mismatch_kl
        names = sorted(set(micro["env"]))
        numbers = [names.index(env) for env in micro["env"]]
        owner = np.repeat(numbers, np.diff(np.asarray(micro["cu_seqlens"])))
        owner = owner[mask[: len(owner)]]
        for measure, values in measured.items():
            learnt = values.detach().cpu().double().numpy()[mask]
            self._count(f"{measure}/all", learnt)
            for number, env in enumerate(names):
                self._count(f"{measure}/{env}", learnt[owner == number])

    def _count(self, key: str, values: np.ndarray) -> None:
        if values.size:
            cell = self._sums.setdefault(key, [0.0, 0.0, 0.0, float("-inf")])
            cell[0] += values.size
            cell[1] += float(values.sum())
            cell[2] += float(values.dot(values))
            cell[3] = max(cell[3], float(values.max()))

    def metrics(self) -> dict[str, float]:
        """mean, std and max of every key since the last call."""
        sums, self._sums = self._sums, {}
        found: dict[str, float] = {}
        for key, (n, total, squares, largest) in sums.items():
            mean = total / n
            found |= {
                f"{key}/mean": mean,
                f"{key}/std": max(0.0, squares / n - mean * mean) ** 0.5,
                f"{key}/max": largest,
            }
        return found
