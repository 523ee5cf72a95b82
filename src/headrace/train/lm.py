"""Trainer of a language model whose step is the same for any number of ranks.

    ranks = init_distributed()                                  torchrun's environment, or one process
    trainer = LMTrainer(settings, vocab_size=4096, seq_len=256, rank=ranks.rank, world_size=ranks.world_size)
    for batch in loader:
        result = trainer.step(batch)                            result.loss, .tokens, .grad_norm, .lr
    arrays, dtypes, meta = trainer.state_arrays()               model + optimiser + step, bit for bit
    shutdown_distributed()

The loss is the mean over all tokens of the global batch: sum of token losses / global count. A mean of the ranks' means
would weigh a token by how few of them its rank has, so results would change with the number of ranks. A rank with
nothing to learn (labels all -100) takes part with a sum of 0.

On a CPU a step is deterministic: fixed threads, deterministic kernels, no dropout, no random generator. Saving after k steps,
loading into a fresh trainer and continuing gives the parameters of the uninterrupted run, to the bit, on the same
number of ranks and threads. Other numbers of them round differently: from equal parameters the gradients of one and of
two ranks differ by 2e-8, but Adam divides a gradient by its own size, so where that is below its eps of 1e-8 (1 weight in
40,000) rounding alone moved weights 2e-5 apart in the first step. Over a run they drift; the data never does.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import Tensor, nn

from headrace.errors import ConfigError, CursorMismatch, DataError, DeadlineExceeded, HeadraceError, WorkerDied
from headrace.metrics import Wait, phase
from headrace.runtime.processors import usable_processors
from headrace.train.adamw import AdamW
from headrace.train.gpt import GPT, IGNORED, GPTConfig, init_parameters
from headrace.train.settings import TrainSettings

_KIND, _VERSION = "headrace.lm", 1
_MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(step: int, settings: TrainSettings) -> float:
    """The rate of step number `step` (from 0): up in a line over warmup_steps, then down a cosine to the last step.

    Step warmup_steps - 1 is the top of both, so they meet; the last step, and any after it, has lr x min_lr_ratio.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    past = (step + 1 - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    floor = settings.lr * settings.min_lr_ratio
    return floor + (settings.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, past)))


# ----------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one step."""

    step: int
    """Steps taken before this batch."""
    loss: float
    """Mean over the global batch's tokens, the same on every rank; 0 if no rank had any."""
    tokens: int
    """Tokens learned from, over all ranks."""
    grad_norm: float
    """Norm of the whole gradient before it was clipped."""
    lr: float


def global_token_mean(loss_sum: Tensor, tokens: Tensor | int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The mean loss per token over all ranks of `group`, for `backward()` under DDP. A collective: every rank calls it.

    `loss_sum` is this rank's sum of token losses, `tokens` how many there were (0 is fine). The value is the global
    mean on every rank; its gradient is scaled by the number of ranks, because DDP (like FSDP) divides by it.
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    both = torch.stack((loss_sum.detach().double(), torch.as_tensor(tokens, device=loss_sum.device).double()))
    total, count = add_over_ranks(both, ranks, "adding up the loss", group)
    divisor = count.clamp(min=1.0)
    share = loss_sum * (ranks / divisor).to(loss_sum.dtype)
    # The difference is 0: the value is that of the mean, the gradient that of the share.
    return (total / divisor).to(loss_sum.dtype) + (share - share.detach())


def add_over_ranks(values: Tensor, world_size: int, doing: str, group: dist.ProcessGroup | None = None) -> Tensor:
    """Add a tensor of every rank to those of the others, in place; return it. Collective. `doing` is for the error that a lost rank causes."""
    if world_size > 1:
        with Wait("train.reduce"), naming_lost_peers(doing):
            dist.all_reduce(values, group=group)
    return values


def sum_gradients(model: nn.Module, world_size: int, doing: str) -> None:
    """Add the gradients of every rank to those of the others, as one flat array: the order of additions never depends on a batch. Collective."""
    if world_size == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = add_over_ranks(torch.cat([g.reshape(-1) for g in gradients]), world_size, doing)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def update(model: nn.Module, optimizer: AdamW, lr: float, grad_clip: float, loss: float, step: int) -> float:
    """Clip the gradients to a norm of `grad_clip` (0 leaves them) and move the parameters. Returns the norm before. HeadraceError, and no parameter has
    moved, if the norm or the loss is not finite."""
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise HeadraceError(
            f"step {step} diverged: expected a finite loss and gradient, got loss {loss}, gradient norm {norm}; lower train.lr or raise "
            "train.warmup_steps, and resume from the last checkpoint"
        )
    optimizer.lr = lr
    optimizer.step()
    return norm


# ----------------------------------------------------------------------------------------------- trainer


class LMTrainer:
    """A GPT, its optimiser and the number of steps it has taken.

    With world_size > 1 the process group exists already (`init_distributed`), and every rank makes a trainer, steps and
    loads at the same time. Sets the process-wide thread count of torch, and on a CPU its deterministic mode.
    """

    def __init__(
        self, settings: TrainSettings, *, vocab_size: int, seq_len: int, rank: int = 0, world_size: int = 1
    ) -> None:
        require_group(rank, world_size)
        self.settings = settings
        self.rank, self.world_size = rank, world_size
        self.device = torch_device(settings.device)
        self.threads = settings.threads or cpu_threads(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
        torch.set_num_threads(self.threads)
        if self.device.type == "cpu":
            # The same switch as use_deterministic_algorithms(True), which also imports the compiler: 1.4 s.
            torch.set_deterministic_debug_mode("error")
            # Filling every fresh tensor with NaN would find reads of unwritten memory; it costs 2 to 8 % of a step.
            torch.utils.deterministic.fill_uninitialized_memory = False  # ty: ignore[missing-attribute]
        self.model = GPT(GPTConfig.preset(settings.model, vocab_size=vocab_size, seq_len=seq_len))
        init_parameters(self.model, settings.seed)
        self.model.to(self.device)
        self.steps_taken = 0
        self.optimizer = make_optimizer(self.model.parameters(), settings)
        self._net: nn.Module = torch.compile(self.model) if settings.compile else self.model  # ty: ignore[invalid-assignment]

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Learn from this rank's share of a global batch. A collective."""
        if self.world_size > 1 and not dist.is_initialized():
            raise RuntimeError(f"step {self.steps_taken} of rank {self.rank} comes after shutdown_distributed()")
        ids, positions, labels = self._inputs(batch)
        lr = learning_rate(self.steps_taken, self.settings)
        loss, tokens = self._backward(ids, positions, labels)
        with phase("train.optimizer"):
            norm = update(self.model, self.optimizer, lr, self.settings.grad_clip, loss, self.steps_taken)
        self.steps_taken += 1
        return StepResult(step=self.steps_taken - 1, loss=loss, tokens=tokens, grad_norm=norm, lr=lr)

    def _inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        missing = [name for name in ("input_ids", "position_ids", "labels") if name not in batch]
        if missing:
            raise DataError(
                f"step {self.steps_taken} got a batch without {', '.join(missing)} (it has {', '.join(batch) or 'nothing'}); "
                "the trainer takes the batches of headrace's text loader"
            )
        ids, positions, labels = (batch[name] for name in ("input_ids", "position_ids", "labels"))
        if not ids.shape == positions.shape == labels.shape or ids.ndim != 2:
            raise DataError(
                f"step {self.steps_taken} got input_ids {list(ids.shape)}, position_ids {list(positions.shape)} and labels "
                f"{list(labels.shape)}; all three must have one shape [rows, seq_len]"
            )
        return tuple(t.to(self.device, non_blocking=True) for t in (ids, positions, labels))  # ty: ignore[invalid-return-type]

    def _backward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> tuple[float, int]:
        """Gradients of the global mean on every rank; the mean and the global token count."""
        doing = f"step {self.steps_taken}"
        self.model.zero_grad()
        with phase("train.forward"):
            loss_sum = self._net(ids, positions, labels)
        sums = torch.stack((loss_sum.detach().double(), (labels != IGNORED).sum().double()))
        total, tokens = add_over_ranks(sums, self.world_size, doing)
        with phase("train.backward"):
            (loss_sum / tokens.clamp(min=1.0)).backward()
        sum_gradients(self.model, self.world_size, doing)
        return float((total / tokens.clamp(min=1.0)).to(loss_sum.dtype)), int(tokens)

    # ----------------------------------------------------------------------------------------------- state

    def state_arrays(self) -> tuple[dict[str, np.ndarray], dict[str, str], dict[str, Any]]:
        """Copies of everything the next step depends on: (arrays, stored dtypes where numpy has none, meta).

        Arrays are named model/<parameter>, optim/exp_avg/<parameter> and optim/exp_avg_sq/<parameter>.
        """
        arrays = saved_arrays(self.model, self.optimizer)
        meta = {"kind": _KIND, "version": _VERSION, "step": self.steps_taken, "model": self.model.config.to_json()}
        return arrays, {}, meta

    def load_state_arrays(
        self, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str], meta: Mapping[str, Any]
    ) -> None:
        """Restore the trainer from this state, on every rank. CursorMismatch, without any change, if the state does not fit."""
        require_equal(
            "the saved state", meta, {"kind": _KIND, "version": _VERSION, "model": self.model.config.to_json()}
        )
        step = int(meta["step"])
        targets = {
            f"{kind}{name}": parameter
            for name, parameter in self.model.named_parameters()
            for kind in ("model/", *(f"optim/{moment}/" for moment in _MOMENTS if step))
        }
        ours = {name: array for name, array in arrays.items() if name.startswith(("model/", "optim/"))}
        require_equal(
            "the saved state",
            described(ours),
            described({name: to_array(p) for name, p in targets.items()}),
        )
        load_arrays(self.model, self.optimizer, ours, step)
        self.steps_taken = step

    def model_sha256(self) -> str:
        return model_sha256(self.model)


def saved_arrays(model: nn.Module, optimizer: AdamW) -> dict[str, np.ndarray]:
    """Copies of the parameters, and of the moments of those that the optimiser has stepped, by their names in a checkpoint."""
    arrays: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        arrays[f"model/{name}"] = to_array(parameter)
        if state := optimizer.state.get(parameter):
            arrays |= {f"optim/{moment}/{name}": to_array(state[moment]) for moment in _MOMENTS}
    return arrays


@torch.no_grad()
def load_arrays(model: nn.Module, optimizer: AdamW, arrays: Mapping[str, np.ndarray], steps: int) -> None:
    """Restore what `saved_arrays` returned, after the optimiser had taken so many steps."""
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        parameter.copy_(to_tensor(arrays[f"model/{name}"], parameter))
        if steps:
            moments = {moment: to_tensor(arrays[f"optim/{moment}/{name}"], parameter) for moment in _MOMENTS}
            count = torch.tensor(float(steps), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": count, **moments}


def model_sha256(model: nn.Module) -> str:
    """SHA-256 of a model: names, dtypes, shapes and bytes of its parameters, in the order of their names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}\n".encode())
        digest.update(to_array(parameter).tobytes())
    return digest.hexdigest()


def make_optimizer(parameters: Iterable[nn.Parameter], settings: TrainSettings) -> AdamW:
    """AdamW; matrices decay, norms do not."""
    parameters = list(parameters)
    decayed = {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay}
    others = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}
    return AdamW([decayed, others], lr=settings.lr, betas=settings.betas)


def require_group(rank: int, world_size: int) -> None:
    """ConfigError if several ranks have no process group."""
    if world_size > 1 and not dist.is_initialized():
        raise ConfigError(
            f"a trainer for rank {rank} of {world_size} needs a process group and there is none; call init_distributed() first, under torchrun"
        )


def to_array(tensor: Tensor) -> np.ndarray:
    """A contiguous copy in the host's memory."""
    return np.array(tensor.detach().cpu().numpy(), order="C")


def to_tensor(array: np.ndarray, like: Tensor) -> Tensor:
    """A copy of the array (containers return read-only maps) with the dtype, device and layout of `like`."""
    return torch.empty_like(like, requires_grad=False).copy_(torch.from_numpy(np.array(array, order="C")))


def described(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Dtype and shape of arrays, for `require_equal`."""
    return {name: f"{array.dtype} {list(array.shape)}" for name, array in arrays.items()}


def require_equal(what: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """CursorMismatch with both sides of every difference (the first three in the sentence), unless `saved` equals `now`."""
    names = sorted(set(now) | (set(saved) - {"step"}))
    differences = {
        name: (saved.get(name, "absent"), now.get(name, "absent")) for name in names if saved.get(name) != now.get(name)
    }
    if differences:
        first = "; ".join(f"{name}: saved {was}, now {is_}" for name, (was, is_) in list(differences.items())[:3])
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CursorMismatch(
            f"{what} belongs to another run ({first}{more}). Resuming would train another model than the one saved; "
            "restore the settings of the model and of its data (tokenizer and seq_len, or modalities), or start a new run.",
            differences,
        )


# ------------------------------------------------------------------------------------------ ranks and threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Rank of this process, and number of ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def init_distributed(device: str = "auto", *, timeout_seconds: float = 300.0) -> Ranks:
    """Join the process group that torchrun's environment describes; without one, this is rank 0 of 1 and has no group.

    gloo on CPU, nccl on CUDA. A collective that takes longer than `timeout_seconds` fails, on every rank.
    """
    if "WORLD_SIZE" not in os.environ:
        return Ranks()
    found = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    unusable = [f"{name}={value!r}" for name, value in found.items() if not value.isdigit()]
    if unusable:
        raise ConfigError(
            f"WORLD_SIZE is set, so ranks are expected, but {', '.join(unusable)} is not a number; start with torchrun, "
            "or unset WORLD_SIZE to run one process"
        )
    ranks = Ranks(**{name.lower(): int(value) for name, value in found.items()})
    on_cuda = torch_device(device).type == "cuda"
    if on_cuda:
        torch.cuda.set_device(ranks.local_rank)
    if ranks.world_size > 1 and not dist.is_initialized():
        with Wait("train.start", deadline=timeout_seconds), naming_lost_peers("joining the process group"):
            dist.init_process_group("nccl" if on_cuda else "gloo", timeout=timedelta(seconds=timeout_seconds))
    return ranks


def shutdown_distributed() -> None:
    """Leave the process group, if there is one. Trainers that still exist cannot step any more. There is no barrier: a peer may be gone."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def naming_lost_peers(doing: str) -> Generator[None]:
    """Convert errors of the transport to WorkerDied or DeadlineExceeded with the rank, the action `doing` and the remedy. Other errors pass."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not (isinstance(error, dist.DistError) or "gloo" in text.lower()):
            raise
        rank, late = os.environ.get("RANK", "?"), "timed out" in text.lower() or "timeout" in text.lower()
        first_line = text.splitlines()[0][:200]
        raise (DeadlineExceeded if late else WorkerDied)(
            f"rank {rank} {'waited too long for' if late else 'lost'} another rank while {doing} ({first_line}); look at "
            "the log of the rank that failed first, and resume from the last checkpoint"
        ) from error


def torch_device(wanted: str) -> torch.device:
    """The device that `train.device` names."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device is cuda and torch finds no CUDA device; use device = 'cpu' or 'auto'")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def cpu_threads(ranks_on_node: int = 1) -> int:
    """Threads for each rank of this node: the CPUs that affinity and cgroup allow, divided by the ranks; at least 1."""
    allowed = usable_processors()
    budget = min(float(allowed), _cgroup_cpus(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")))
    return max(1, int(budget) // max(1, ranks_on_node))


def _cgroup_cpus(membership: Path, root: Path) -> float:
    """The smallest CPU quota between this process's cgroup and the root (v2, then v1); inf without one."""
    if not membership.exists():
        return math.inf
    limits = [math.inf]
    for line in membership.read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "cpu" if controllers else root
        folder = mount / own.lstrip("/")
        limits += [_quota(at) for at in (folder, *folder.parents) if at.is_relative_to(mount)]
    return min(limits)


def _quota(folder: Path) -> float:
    """Quota / period of one cgroup, in CPUs."""
    v2, v1 = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if v2.exists():
        quota, period = v2.read_text().split()
    elif v1.exists():
        quota, period = v1.read_text().strip(), (folder / "cpu.cfs_period_us").read_text().strip()
    else:
        return math.inf
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)
