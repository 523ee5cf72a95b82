"""Reference trainers in plain torch, small enough to read.

gpt.py              the model: a GPT whose packed documents do not see each other
lm.py               trainer of a language model: global token mean, schedule, exact state
policy.py           trainer of a policy on rollouts (GRPO); rl.py: its loss terms; policy_models.py: its models
embedded_engine.py  an inference engine in the trainer's process
cells.py            trainer of a small model on cells of several modalities; recurrent.py: with a state for each group
settings.py         settings of a trainer, without those of the data
checkpoint.py       checkpoints of a run
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
    """Import a name when it is first used: code that only opens checkpoints does not import torch."""
    if name not in __all__:
        raise AttributeError(f"module 'headrace.train' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headrace.train.{_HOME.get(name, 'lm')}"), name)
