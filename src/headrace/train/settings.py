"""Settings of the reference trainers; their defaults are also those of [train]. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Settings of the trainer, without those of the data."""

    steps: int
    """Length of the run; the schedule ends here."""
    model: str = "gpt-tiny"
    lr: float = 3e-3
    min_lr_ratio: float = 0.1
    """The schedule ends at lr x min_lr_ratio."""
    warmup_steps: int = 20
    weight_decay: float = 0.1
    """On matrices only; norms do not decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0 leaves it as it is."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    threads: int = 0
    """CPU threads of this rank; 0 takes its share of the node (`cpu_threads`)."""
    compile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        from headrace.train.gpt import PRESETS  # brings torch, which a config does not need

        problems = [
            f"train.{name} must be {wanted}, got {getattr(self, name)!r}"
            for name, wanted, holds in (
                ("steps", "1 or more", self.steps >= 1),
                ("model", f"one of {', '.join(sorted(PRESETS))}", self.model in PRESETS),
                ("lr", "a finite number above 0", 0 < self.lr < math.inf),
                ("min_lr_ratio", "between 0 and 1", 0 <= self.min_lr_ratio <= 1),
                ("warmup_steps", "0 or more", self.warmup_steps >= 0),
                ("weight_decay", "a finite number, 0 or more", 0 <= self.weight_decay < math.inf),
                ("betas", "two numbers in [0, 1)", len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas)),
                ("grad_clip", "0 (off) or more", self.grad_clip >= 0),
                ("device", "auto, cpu or cuda", self.device in ("auto", "cpu", "cuda")),
                ("threads", "0 (share of the node) or more", self.threads >= 0),
            )
            if not holds
        ]
        if problems:
            raise ConfigError(problems)
