"""GRPO in plain torch: a policy learns from one training batch of rollouts a step.

    trainer = PolicyTrainer(settings, config, rank=0, world_size=1)
    result = trainer.step(open_training_batch(path))           loss, gradient norm, entropy, mismatch KL by environment
    arrays, dtypes, meta = trainer.state_arrays()              model + optimiser + step, bit for bit

One optimiser step a batch. The loss is the sum over learnt tokens of all ranks divided by their number, so a token's weight does not depend on which rank
has it. Gradients of all micro batches are added up in order, then over ranks with one all-reduce. With a fixed number of
threads a step is deterministic on a CPU. A trainer with FSDP uses `SpoolReceiver` and `policy_terms` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.metrics import phase
from headrace.rollouts.batch_files import TrainingBatch
from headrace.train.adamw import AdamW
from headrace.train.gpt import GPT, GPTConfig, init_parameters
from headrace.train.lm import (
    add_over_ranks,
    described,
    load_arrays,
    model_sha256,
    require_equal,
    saved_arrays,
    sum_gradients,
    to_array,
    to_tensor,
    update,
)
from headrace.train.policy_models import HFConfig, HFPolicy, make_model
from headrace.train.rl import EnvWatch, policy_terms

_KIND, _VERSION = "headrace.policy", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Settings of the trainer, without those of the rollouts; [policy] of a config checks them."""

    steps: int = 1
    """Length of the run; the learning rate falls towards its end."""
    lr: float = 1e-3
    warmup_steps: int = 0
    decay: float = 0.0
    """Last share of the steps over which the learning rate falls to 0 in a line."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Largest norm of the gradient."""
    clip: tuple[float, float] = (0.2, 0.2)
    """The ratio of probabilities counts within [1 − low, 1 + high]."""
    importance_cap: float = 0.0
    """Above 0: truncated importance sampling at this ratio, in place of the clip."""
    kl: float = 0.0
    """Weight of the KL divergence to the initial policy, or to the reference log-probs of the batch where it has some."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    threads: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStep:
    """The result of one step."""

    loss: float
    """Mean over the learnt tokens of all ranks."""
    tokens: int
    grad_norm: float
    lr: float
    metrics: Mapping[str, float]
    """Entropy and mismatch KL of this rank's tokens."""


class PolicyTrainer:
    """A model that is a policy, its optimiser and the number of steps it has taken. Every rank makes one and steps at the same time."""

    def __init__(
        self, settings: PolicySettings, config: GPTConfig | HFConfig, *, rank: int = 0, world_size: int = 1
    ) -> None:
        """`config`: shape of the model. A GPT begins with random weights; a model of transformers needs `start_from`."""
        self.settings, self.rank, self.world_size = settings, rank, world_size
        torch.set_num_threads(settings.threads)
        torch.set_deterministic_debug_mode("error")
        torch.utils.deterministic.fill_uninitialized_memory = False  # ty: ignore[missing-attribute]
        self.model = make_model(config)
        if isinstance(self.model, GPT):
            init_parameters(self.model, settings.seed)
        self._reference: GPT | HFPolicy | None = None
        group = {"params": self.model.parameters(), "weight_decay": settings.weight_decay}
        self.optimizer = AdamW([group], lr=settings.lr, betas=settings.betas)
        self.steps_taken = 0

    def start_from(self, weights: Mapping[str, np.ndarray]) -> None:
        """Begin with these parameters, by name. CursorMismatch if they belong to another model."""
        require_equal(
            "the policy's checkpoint",
            described(weights),
            described(self.weights()),
        )
        _fill(self.model, weights)

    def model_with(self, weights: Mapping[str, np.ndarray]) -> GPT | HFPolicy:
        """A model of the policy's shape with other parameters."""
        model = make_model(self.model.config)
        _fill(model, weights)
        return model

    def freeze_reference(self) -> None:
        """Make a copy of the current policy the reference of the KL term; nothing if `kl` is 0. Called before the first step."""
        if self.settings.kl:
            self._reference = self.model_with(self.weights()).requires_grad_(False)

    # ------------------------------------------------------------------------------------------------ step

    def step(self, batch: TrainingBatch) -> PolicyStep:
        """Learn from this rank's micro batches of a batch. A collective."""
        s, watch = self.settings, EnvWatch()
        micros = list(batch.micro_batches(self.rank))
        doing, ranks = f"step {self.steps_taken}", self.world_size
        own = sum(int(micro["mask"].sum()) for micro in micros)
        tokens = add_over_ranks(torch.tensor(own, dtype=torch.float64), ranks, doing)
        loss_sum = torch.zeros((), dtype=torch.float64)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for micro in micros:
            with phase("train.forward"):
                logprobs, entropy = _logprobs(self.model, micro)
                reference = None
                if self._reference is not None and "reference_logprobs" not in micro:
                    with torch.no_grad():
                        reference, _ = _logprobs(self._reference, micro)
                terms = policy_terms(
                    logprobs, micro, clip_low=s.clip[0], clip_high=s.clip[1], importance_cap=s.importance_cap, reference=reference, kl=s.kl,
                    entropy=entropy, entropy_bonus=s.entropy,
                )  # fmt: skip
            with phase("train.backward"):
                (terms.loss_sum / tokens.clamp(min=1.0)).backward()
            loss_sum += terms.loss_sum.detach().double()
            watch.add(micro, terms, entropy)
        loss = float(add_over_ranks(loss_sum, ranks, doing) / tokens.clamp(min=1.0))
        sum_gradients(self.model, ranks, doing)
        with phase("train.optimizer"):
            lr = self.learning_rate()
            norm = update(self.model, self.optimizer, lr, s.grad_clip, loss, self.steps_taken)
        self.steps_taken += 1
        return PolicyStep(loss=loss, tokens=int(tokens), grad_norm=norm, lr=lr, metrics=watch.metrics())

    def learning_rate(self) -> float:
        """The rate of the next step."""
        s = self.settings
        up = min(1.0, (self.steps_taken + 1) / max(1, s.warmup_steps))
        down = min(1.0, max(0, s.steps - self.steps_taken) / (s.decay * s.steps)) if s.decay else 1.0
        return s.lr * min(up, down)

    def skip(self) -> None:
        """Count a step whose batch had nothing to learn from: the next version equals this one."""
        self.steps_taken += 1

    # ----------------------------------------------------------------------------------------------- state

    def weights(self) -> dict[str, np.ndarray]:
        """Copies of the parameters by name."""
        return {name: to_array(p) for name, p in self.model.named_parameters()}

    def state_arrays(self) -> tuple[dict[str, np.ndarray], dict[str, str], dict[str, Any]]:
        """Copies of everything the next step depends on: (arrays, stored dtypes where numpy has none, meta)."""
        arrays = saved_arrays(self.model, self.optimizer)
        count = next((int(state["step"]) for state in self.optimizer.state.values()), 0)
        meta = {"kind": _KIND, "version": _VERSION, "step": self.steps_taken, "optimizer_steps": count}
        return arrays, {}, meta | {"model": self.model.config.to_json()}

    def load_state_arrays(
        self, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str], meta: Mapping[str, Any], /
    ) -> None:
        """Restore the trainer from this state. CursorMismatch if it belongs to another model."""
        found = {name: meta.get(name) for name in ("kind", "version", "model")}
        require_equal(
            "the saved state", found, {"kind": _KIND, "version": _VERSION, "model": self.model.config.to_json()}
        )
        load_arrays(self.model, self.optimizer, arrays, meta["optimizer_steps"])
        self.steps_taken = int(meta["step"])

    def model_sha256(self) -> str:
        return model_sha256(self.model)


@torch.no_grad()
def _fill(model: nn.Module, weights: Mapping[str, np.ndarray]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(to_tensor(weights[name], parameter))


@torch.no_grad()
def logprobs_of(model: GPT | HFPolicy, ids: np.ndarray) -> np.ndarray:
    """The model's log-prob of every id after the first, given those before it."""
    row = torch.from_numpy(ids.astype(np.int64))[None]
    said = model(row, torch.arange(len(ids))[None])[0, :-1].log_softmax(-1)
    return said.gather(1, row[0, 1:, None])[:, 0].numpy()


def _logprobs(model: GPT | HFPolicy, micro: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Log-prob of every token of a micro batch and the entropy of its distribution; both are 0 for the first token of a sample.

    Samples are rows padded to the longest, not one packed row: attention over a packed row costs its length squared.
    """
    borders = np.asarray(micro["cu_seqlens"])
    lengths = np.diff(borders)
    rows, width = len(lengths), int(lengths.max())
    inside = torch.from_numpy(np.arange(width) < lengths[:, None])
    ids = torch.zeros(rows, width, dtype=torch.long)
    ids[inside] = torch.from_numpy(np.asarray(micro["ids"]).astype(np.int64))
    temperature = torch.ones(rows, width)
    temperature[inside] = torch.from_numpy(np.asarray(micro["temperatures"], np.float32))
    said = (model(ids, torch.arange(width).expand(rows, width))[:, :-1] / temperature[:, 1:, None]).log_softmax(-1)
    own = said.gather(2, ids[:, 1:, None])[..., 0]
    spread = -(said.exp() * said).sum(-1)
    return nn.functional.pad(own, (1, 0))[inside], nn.functional.pad(spread, (1, 0))[inside]
