"""How a model learns from the batches: reference trainers in plain torch, small enough to read.

gpt.py          what is trained: a GPT whose packed documents do not see each other
lm.py           how it takes a step: global token mean, schedule, DDP, exact state
settings.py     settings of a trainer, without those of the data
cells.py        how a small model learns from cells of several modalities
checkpoint.py   which state a run goes on from, whatever happened to the last one
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.train.checkpoint import CheckpointStore
    from headrace.train.gpt import GPT, PRESETS, GPTConfig
    from headrace.train.lm import (
        LMTrainer,
        Ranks,
        StepResult,
        TokenLoss,
        cpu_threads,
        global_token_mean,
        init_distributed,
        learning_rate,
        shutdown_distributed,
    )
    from headrace.train.settings import TrainSettings

__all__ = [
    "GPT",
    "PRESETS",
    "CheckpointStore",
    "GPTConfig",
    "LMTrainer",
    "Ranks",
    "StepResult",
    "TokenLoss",
    "TrainSettings",
    "cpu_threads",
    "global_token_mean",
    "init_distributed",
    "learning_rate",
    "shutdown_distributed",
]

_HOME = {
    "CheckpointStore": "checkpoint", "GPT": "gpt", "PRESETS": "gpt", "GPTConfig": "gpt", "TrainSettings": "settings",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imported when first used: code that only opens checkpoints does not import torch."""
    if name not in __all__:
        raise AttributeError(f"module 'headrace.train' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headrace.train.{_HOME.get(name, 'lm')}"), name)
