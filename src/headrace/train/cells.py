"""Trainer of a small model on cells: some features of each cell are hidden, and the model predicts them.

    trainer = CellTrainer(settings, widths={"atac": 48, "rna": 64}, dim=64, depth=2, mask=0.25)
    result = trainer.step([batch])                          result.loss, .values, .grad_norm, .lr

                 x, a quarter of it hidden                       what was hidden
    modality ──► Linear ──►  ┌ residual MLP blocks ┐  ──► Linear ──► squared error, hidden features only
    its own       in         └ shared by all       ┘       out         sum / count over all ranks

Which features are hidden follows from the cell's stream and row and the seed: no random generator, the same on any number
of ranks. A step may have several batches (the lanes of device_per_stream that a rank has), and a batch may have no rows. Gradients
are added over ranks as one flat array, so ranks may work on different modalities at a step, and the order of additions
never depends on the modalities.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.errors import DataError
from headrace.metrics import phase
from headrace.order import key
from headrace.order.keys import mix64_array
from headrace.train.gpt import fill_normal
from headrace.train.lm import (
    add_over_ranks,
    learning_rate,
    make_optimizer,
    require_equal,
    require_group,
    to_array,
    torch_device,
    update,
)
from headrace.train.settings import TrainSettings

_VERSION = 1
_MOMENTS = ("exp_avg", "exp_avg_sq")


class CellModel(nn.Module):
    """A linear map in and out for every modality, and residual blocks that they share."""

    def __init__(self, widths: Mapping[str, int], *, dim: int, depth: int) -> None:
        super().__init__()
        self.widths = dict(sorted(widths.items()))
        self.into = nn.ModuleDict({_name(m): nn.Linear(n, dim) for m, n in self.widths.items()})
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(depth)
        )
        self.out = nn.ModuleDict({_name(m): nn.Linear(dim, n) for m, n in self.widths.items()})

    def forward(self, modality: str, x: Tensor) -> Tensor:
        return self.decode(modality, self.encode(modality, x))

    def encode(self, modality: str, x: Tensor) -> Tensor:
        h = self.into[_name(modality)](x)
        for block in self.blocks:
            h = h + block(h)
        return h

    def decode(self, modality: str, h: Tensor) -> Tensor:
        return self.out[_name(modality)](h)


def _name(modality: str) -> str:
    """The module's name for a modality, whose own name may hold dots."""
    return "m_" + modality.replace("_", "__").replace(".", "_d")


def hidden_features(stream: np.ndarray, row: np.ndarray, width: int, *, share: float, salt: int) -> np.ndarray:
    """Which features of each cell are hidden: bool [cells, width], a function of (stream, row, salt)."""
    cells = mix64_array(stream.astype(np.uint64) * np.uint64(1 << 40) + row.astype(np.uint64) + np.uint64(salt))
    bits = mix64_array((cells[:, None] + np.arange(1, width + 1, dtype=np.uint64)[None, :]).reshape(-1))
    return (bits < np.uint64(min(int(share * 2**64), 2**64 - 1))).reshape(len(cells), width)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellStep:
    """The result of one step, over all ranks."""

    loss: float
    """Mean squared error of a hidden feature; 0 if there was none."""
    values: int
    """Hidden features learned from."""
    grad_norm: float
    lr: float


class CellTrainer:
    """A model, its optimiser and the number of steps it has taken. Every rank steps and loads at the same time."""

    kind = "headrace.cells"

    def __init__(
        self,
        settings: TrainSettings,
        *,
        widths: Mapping[str, int],
        dim: int = 64,
        depth: int = 2,
        mask: float = 0.25,
        feature: str = "x",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        require_group(rank, world_size)
        self.settings = settings
        self.rank, self.world_size = rank, world_size
        self.device = torch_device(settings.device)
        # A step is about a millisecond of work in small pieces: two threads that synchronise at every piece took 70 ms on a busy machine, one takes 3.
        torch.set_num_threads(settings.threads or 1)
        self.model = self._make_model(widths, dim, depth)
        self._shape = {"widths": self.model.widths, "dim": dim, "depth": depth}
        self._mask, self._feature = mask, feature
        self._salt = key("train.hidden", seed=settings.seed) >> 1
        _fill(self.model, settings.seed)
        # One flat tensor holds all gradients, so that they are added over ranks as one; two more hold the optimiser's moments.
        self.model.to(self.device)
        parameters = [parameter for _, parameter in sorted(self.model.named_parameters())]
        self._grad = torch.zeros(sum(p.numel() for p in parameters), device=self.device)
        self._moments = {name: torch.zeros_like(self._grad) for name in _MOMENTS}
        self._optimizer = make_optimizer(parameters, settings)
        sizes = [p.numel() for p in parameters]
        columns = zip(
            parameters, self._grad.split(sizes), *(m.split(sizes) for m in self._moments.values()), strict=True
        )
        for parameter, grad, *moments in columns:
            parameter.grad = grad.view_as(parameter)
            state = {name: moment.view_as(parameter) for name, moment in zip(_MOMENTS, moments, strict=True)}
            self._optimizer.state[parameter] = {"step": torch.zeros((), device=self.device), **state}
        self.steps_taken = 0

    def _make_model(self, widths: Mapping[str, int], dim: int, depth: int) -> CellModel:
        return CellModel(widths, dim=dim, depth=depth)

    def extra_metrics(self) -> dict[str, int]:
        """Further metrics of the last step, on this rank."""
        return {}

    def step(self, batches: Sequence[Mapping[str, Any]]) -> CellStep:
        """Learn from this rank's batches of a step. A collective."""
        self._grad.zero_()
        loss, count = torch.zeros((), device=self.device), 0
        with phase("train.forward"):
            for batch in batches:
                more, hidden = self._loss_sum(batch)
                loss, count = loss + more, count + hidden
        with phase("train.backward"):
            if loss.requires_grad:
                loss.backward()
        sums = torch.tensor([float(loss.detach()), float(count)], dtype=torch.float64, device=self.device)
        both = torch.cat([self._grad.double(), sums])
        add_over_ranks(both, self.world_size, f"step {self.steps_taken}")
        total = max(float(both[-1]), 1.0)
        mean, lr = float(both[-2]) / total, learning_rate(self.steps_taken, self.settings)
        with phase("train.optimizer"):
            self._grad.copy_(both[:-2] / total)
            norm = update(self.model, self._optimizer, lr, self.settings.grad_clip, mean, self.steps_taken)
        self.steps_taken += 1
        return CellStep(loss=mean, values=int(both[-1]), grad_norm=norm, lr=lr)

    def _loss_sum(self, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        x, modality = batch.get(self._feature), batch.get("modality")
        if not isinstance(x, Tensor) or x.ndim != 2:
            raise DataError(
                f"step {self.steps_taken} got a batch whose {self._feature!r} is not [cells, features]; the trainer learns from one "
                "fixed-size column, named by streams.feature"
            )
        if not modality or not len(x):
            self._nothing()
            return torch.zeros((), device=self.device), 0
        if modality not in self.model.widths or x.shape[1] != self.model.widths[modality]:
            raise DataError(
                f"step {self.steps_taken} got {x.shape[1]} features of {modality!r}; the model was made for {self.model.widths}. All "
                "files of a modality have the same features."
            )
        return self._loss_of(modality, x.to(self.device, torch.float32), batch)

    def _nothing(self) -> None:
        """Called for a batch without rows."""

    def _loss_of(self, modality: str, x: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        """(sum of the losses, how many values were learned from) of a batch that has rows."""
        hidden = torch.from_numpy(
            hidden_features(
                batch["stream_id"].numpy(), batch["row"].numpy(), x.shape[1], share=self._mask, salt=self._salt
            )
        ).to(self.device)
        guess = self.model(modality, x.masked_fill(hidden, 0.0))
        return ((guess - x).square() * hidden).sum(), int(hidden.sum())

    # ----------------------------------------------------------------------------------------------- state

    def state_arrays(self) -> tuple[dict[str, np.ndarray], dict[str, str], dict[str, Any]]:
        """Copies of everything the next step depends on: (arrays, stored dtypes, meta), as CheckpointStore takes them."""
        arrays = {f"model/{n}": to_array(p) for n, p in self.model.named_parameters()}
        arrays |= {f"optim/{name}": to_array(moment) for name, moment in self._moments.items()}
        return arrays, {}, {"kind": self.kind, "version": _VERSION, "step": self.steps_taken, "model": self._shape}

    @torch.no_grad()
    def load_state_arrays(
        self, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str], meta: Mapping[str, Any]
    ) -> None:
        """Restore the trainer from this state. CursorMismatch, without any change, if it does not fit."""
        targets: dict[str, Tensor] = {f"model/{n}": p for n, p in self.model.named_parameters()}
        targets |= {f"optim/{n}": moment for n, moment in self._moments.items()}
        ours = {n: a for n, a in arrays.items() if n.startswith(("model/", "optim/"))}
        require_equal(
            "the saved model",
            {n: meta.get(n, "absent") for n in ("kind", "version", "model")} | {n: list(a.shape) for n, a in ours.items()},
            {"kind": self.kind, "version": _VERSION, "model": self._shape} | {n: list(t.shape) for n, t in targets.items()},
        )  # fmt: skip
        for name, target in targets.items():
            target.copy_(torch.from_numpy(np.array(ours[name])))
        self.steps_taken = int(meta["step"])
        for state in self._optimizer.state.values():
            state["step"].fill_(self.steps_taken)

    def model_sha256(self) -> str:
        """SHA-256 of the model: names, shapes and bytes of its parameters, in the order of their names."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            digest.update(f"{name} {list(parameter.shape)}\n".encode())
            digest.update(to_array(parameter).tobytes())
        return digest.hexdigest()


@torch.no_grad()
def _fill(model: nn.Module, seed: int) -> None:
    """Fill matrices about normally with variance 1 / fan-in, biases with 0 and norms with 1."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0 if name.endswith("0.weight") else 0.0)
            continue
        fill_normal(name, parameter, 1.0 / math.sqrt(parameter.shape[1]), seed)
