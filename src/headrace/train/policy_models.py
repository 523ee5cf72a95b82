"""Models of a policy: a built-in GPT with random weights, the model of an earlier run, or a model of transformers.

policy.model           model and tokenizer
gpt-digits             a preset of `train.gpt`, one id a character of policy.alphabet
runs/sort              the newest checkpoint of `headrace run`, a text or an RL run, with that run's tokenizer
hf:models/tiny-qwen    a folder with config.json, model.safetensors and tokenizer.json (transformers), nothing is downloaded
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.files import read_json
from headrace.text import Tokenizer
from headrace.train.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class HFConfig:
    """The shape of a model of transformers: its folder's config.json."""

    folder: Path

    def __post_init__(self) -> None:
        if not (self.folder / "config.json").is_file():
            raise ConfigError(
                f"policy.model: {self.folder} has no config.json, expected a folder as transformers saves a model"
            )

    def to_json(self) -> dict[str, Any]:
        """The shape that a checkpoint must have."""
        return {"hf": read_json(self.folder / "config.json", follow=True)}

    def weights(self) -> dict[str, np.ndarray]:
        """The parameters that the folder holds, in float32."""
        model = _transformers().AutoModelForCausalLM.from_pretrained(
            self.folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
        return {f"hf.{name}": p.detach().numpy() for name, p in model.named_parameters()}


class HFPolicy(nn.Module):
    """A causal language model of transformers, called like `GPT`. Its parameters have no useful values until they are loaded."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        library = _transformers()
        self.config = config
        self.hf = library.AutoModelForCausalLM.from_config(
            library.AutoConfig.from_pretrained(config.folder, local_files_only=True), dtype=torch.float32
        )

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Logits [b, T, vocab]. Rows are padded on the right, so a causal model needs no mask."""
        return self.hf(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits


@functools.cache
def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError('policy.model "hf:..." needs transformers: pip install "headrace[trainer]"') from error
    return transformers


def make_model(config: GPTConfig | HFConfig) -> GPT | HFPolicy:
    """A model of this shape, without values."""
    return GPT(config) if isinstance(config, GPTConfig) else HFPolicy(config)


def parameters_of(model: GPT | HFPolicy) -> Mapping[str, nn.Parameter]:
    """Parameters by the names that inference engines know them under."""
    return dict((model.hf if isinstance(model, HFPolicy) else model).named_parameters())


class TokenizerCodec:
    """A tokenizer as the codec of a policy; its end-of-text token ends an answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.eos_id is None:
            raise ConfigError(
                f"policy.model: the tokenizer {tokenizer.name} has no end-of-text token, so no answer could end"
            )
        self._tokenizer = tokenizer
        self.end_id, self.vocab_size = tokenizer.eos_id, tokenizer.vocab_size

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode([text]).ids, np.int32)

    def decode(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode(ids[ids != self.end_id])
