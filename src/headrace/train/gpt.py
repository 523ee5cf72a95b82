"""A small GPT whose packed documents do not see each other.

    ids, positions ──► embed ──► n × [ x += attn(norm(x)), x += mlp(norm(x)) ] ──► norm ──► embedᵀ ──► logits or loss

A packed row holds several documents whose position_ids restart at 0, so the positions alone define the attention mask:
a token attends to itself and to earlier tokens of its own piece. Positions enter by rotation of queries and keys; the result does not
depend on where in the row a document lies.

    positions 0 1 2 0 1   ->   piece 1 1 1 2 2   ->   attends   1 . . . .
                                                                1 1 . . .
                                                                1 1 1 . .
                                                                . . . 1 .
                                                                . . . 1 1

Weights start as a pure function of (seed, name of the parameter): integer arithmetic up to one multiplication, so every
rank and every machine starts from the same bits. No random generator is used.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.order import draws, key

_LOGITS_AT_ONCE = 1 << 20
IGNORED = -100
"""A label that is not learned: the last token of a document, and padding."""

PRESETS: dict[str, tuple[int, int, int]] = {
    "gpt-tiny": (2, 2, 48),
    "gpt-small": (12, 12, 768),
    "gpt-digits": (2, 2, 48),
}
"""name -> (layers, heads, width). gpt-tiny is for two CPU cores: a step of 6,144 tokens over 4,096 words, the fastest of 16
taken in turn, was 0.12 s at width 32, 0.16 s at 48 and 0.21 s at 64; 200 steps of the sample corpora end at a loss of
5.7, 5.1 and 4.8, from 8.3. gpt-small has the shape of GPT-2 small. gpt-digits has learned positions and larger initial weights: a policy that
starts from nothing sorts 95 % of four digits after 160 steps with them, and 40 % with rotary positions."""
_LEARNED_POSITIONS = frozenset({"gpt-digits"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a model."""

    vocab_size: int
    seq_len: int
    layers: int
    heads: int
    width: int
    learned_positions: bool = False
    """Add a learned vector of each position to the embedding, in place of rotating queries and keys."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "seq_len", "layers", "heads", "width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a model needs {name} >= 1, got {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"a model needs a width that its heads divide into even parts, got width={self.width}, "
                f"heads={self.heads}; take width={2 * self.heads * max(1, round(self.width / (2 * self.heads)))}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a checkpoint holds them. Rotary positions are left out: checkpoints of version 0.1 know no others."""
        return {name: value for name, value in asdict(self).items() if name != "learned_positions" or value}

    @classmethod
    def preset(cls, name: str, *, vocab_size: int, seq_len: int) -> GPTConfig:
        """One of `PRESETS` for a given tokenizer and context."""
        if name not in PRESETS:
            raise ConfigError(f"unknown model {name!r}; the models are {', '.join(sorted(PRESETS))}")
        layers, heads, width = PRESETS[name]
        return cls(
            vocab_size=vocab_size, seq_len=seq_len, layers=layers, heads=heads, width=width, learned_positions=name in _LEARNED_POSITIONS
        )  # fmt: skip


class GPT(nn.Module):
    """The model. Its parameters are uninitialised until `init_parameters` or a checkpoint fills them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width, _weight=torch.empty(config.vocab_size, config.width))
        if config.learned_positions:
            self.positions = nn.Parameter(torch.empty(config.seq_len, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits [b, T, vocab]; with labels, the sum of the losses of the tokens that have one (a scalar)."""
        mask = document_mask(position_ids)
        rotation, x = self.rotation(position_ids), self.embedded(input_ids, position_ids)
        for block in self.blocks:
            x = block(x, mask, rotation)
        x = self.norm(x)
        if labels is None:
            return F.linear(x, self.embed.weight)
        weight = self.embed.weight if torch.is_grad_enabled() else self.embed.weight.detach()
        return _LossSum.apply(x.flatten(0, 1), weight, labels.flatten())

    def rotation(self, position_ids: Tensor) -> Rotation | None:
        """The rotation of queries and keys at these positions; None with learned positions."""
        config = self.config
        return None if config.learned_positions else _rotation(position_ids, config.width // config.heads)

    def embedded(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """The embedding of tokens, with their positions where those are learned."""
        x = self.embed(input_ids)
        return x + self.positions[position_ids] if self.config.learned_positions else x


Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of every position at every frequency."""


class Block(nn.Module):
    """Attention, then a perceptron of two layers, each added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, bias=False)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, bias=False)
        self.up = _Linear(config.width, 4 * config.width)
        self.down = _Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor, rotation: Rotation | None) -> Tensor:
        x = x + self.attn(self.norm1(x), mask, rotation)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Attention(nn.Module):
    """Causal self attention inside each document of a row."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = _Linear(config.width, 3 * config.width)
        self.out = _Linear(config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor, rotation: Rotation | None) -> Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, width))


def document_mask(position_ids: Tensor) -> Tensor:
    """The attention mask: bool [b, 1, T, T], causal inside each piece and false between pieces."""
    piece = (position_ids == 0).cumsum(1)
    t = position_ids.shape[1]
    causal = torch.ones(t, t, dtype=torch.bool, device=position_ids.device).tril()
    return ((piece[:, :, None] == piece[:, None, :]) & causal)[:, None]


def _rotation(position_ids: Tensor, head_width: int) -> Rotation:
    """Cosine and sine of every position at every frequency: [b, 1, T, head_width / 2] each, shared by all layers."""
    half = torch.arange(head_width // 2, dtype=torch.float32, device=position_ids.device)
    angle = position_ids[:, None, :, None].float() * torch.exp(half * (-math.log(10_000.0) / (head_width // 2)))
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Queries or keys rotated to their positions; unchanged where positions are learned."""
    if rotation is None:
        return x
    cos, sin = (part.to(x.dtype) for part in rotation)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class _LossSum(torch.autograd.Function):
    """Sum of the cross entropies of rows of hidden state against the tied embedding, a piece of the rows at a time.

    The gradient of a sum is known as soon as the logits are, so one small buffer holds the logits of a piece, then their
    exponentials, then the gradient, and no logits are kept for the backward pass. 6,144 tokens over 4,096 words make 100 MB of
    logits, which malloc requests from the kernel and returns at every step: at width 64, 0.24 s through F.cross_entropy and
    0.10 s here, of which the three matmuls are about 0.08 s.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        rows = max(1, _LOGITS_AT_ONCE // weight.shape[0])
        buffer = hidden.new_empty(min(rows, len(hidden)), weight.shape[0])
        total = hidden.new_zeros(())
        to_hidden, to_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), rows):
            h, y = hidden[start : start + rows], labels[start : start + rows]
            learned = (y != IGNORED).to(h.dtype)[:, None]
            target = y.clamp(min=0)[:, None]
            e = torch.mm(h, weight.T, out=buffer[: len(h)])
            top, aimed = e.amax(1, keepdim=True), e.gather(1, target)
            mass = e.sub_(top).exp_().sum(1, keepdim=True)
            total += ((mass.log() + top - aimed) * learned).sum()
            if not any(ctx.needs_input_grad):
                continue
            # d loss / d logits = e / mass - [target]; the division is left to the narrow side of both products.
            slope, scale = e.scatter_add_(1, target, -mass), learned / mass
            to_hidden[start : start + rows] = (slope @ weight) * scale
            to_weight.addmm_(slope.T, h * scale)
        ctx.save_for_backward(to_hidden, to_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        to_hidden, to_weight = ctx.saved_tensors
        return to_hidden * grads[0], to_weight * grads[0], None


class _Linear(nn.Module):
    """nn.Linear without a bias and without its own initialisation (torch's way to skip that costs 0.7 s of imports)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@torch.no_grad()
def init_parameters(model: GPT, seed: int) -> None:
    """Fill the parameters: matrices about normal, smaller where they add to the residual; norms 1. The deviation is 0.02, or with learned
    positions 1 / sqrt(inputs)."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
            continue
        adds_to_residual = name.endswith(("attn.out.weight", "down.weight"))
        deviation = parameter.shape[1] ** -0.5 if model.config.learned_positions else 0.02
        fill_normal(
            name, parameter, deviation / math.sqrt(2 * model.config.layers) if adds_to_residual else deviation, seed
        )


def fill_normal(name: str, parameter: Tensor, deviation: float, seed: int) -> None:
    """Fill a parameter about normally with this standard deviation, as a function of its name and the seed.

    The sum of the four 16-bit parts of a 64-bit draw approximates a normal. It is an integer, so it is the same on every machine; log and cos of a vectorised
    library are not.
    """
    deviation_of_sum = math.sqrt(4 * (2**32 - 1) / 12)
    parts = draws(key(f"train.init:{name}", seed=seed), parameter.numel()).view(np.uint16).reshape(-1, 4)
    centred = parts.sum(axis=1, dtype=np.int32) - 2 * (2**16 - 1)
    values = centred.astype(np.float32) * np.float32(deviation / deviation_of_sum)
    parameter.copy_(torch.from_numpy(values).view(parameter.shape))
