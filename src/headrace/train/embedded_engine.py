"""An inference engine in this process: a GPT with a KV cache that serves the last few versions of its weights.

    engine = EmbeddedEngine(model, end_id=17, context=64, slots=128, versions=2)
    engine.take(3, model)                                       a copy of the weights becomes version 3
    completion = await engine.complete(ids, max_tokens=4, temperature=1.0, seed=key, version=3)

Every request has a slot, and each tick moves every slot of a version one token on: first through the prompt, then through the answer. Requests
join and leave between ticks (continuous batching). A tick always has the same shape, `slots` rows of one token over a cache of `context` positions,
so the numbers of a row do not depend on the other rows, to the bit; nor does the sampled token, which is chosen by a draw of
the request's own seed. A test checks this. A model of transformers has no such cache here: each tick computes its whole rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.errors import ConfigError, RolloutRefused
from headrace.order import draws
from headrace.rollouts.engine import Completion
from headrace.rollouts.records import VersionSpan
from headrace.train.gpt import GPT, Block, rotate
from headrace.train.policy_models import HFPolicy

_TICKS_A_CALL = 32


@dataclass(slots=True, eq=False)
class _Request:
    """A request and the tokens that were sampled for it so far."""

    ids: np.ndarray
    max_tokens: int
    temperature: float
    seed: int
    future: asyncio.Future[Completion]
    version: int
    said: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position after the last token that may be sampled."""
        return len(self.ids) + self.max_tokens


class _Slots:
    """The slots of one version: a copy of the model, a KV cache, and the request of each slot."""

    def __init__(self, model: GPT | HFPolicy, slots: int, context: int) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.rows = torch.zeros(slots, context, dtype=torch.long)
        """Tokens of each slot, for a model of transformers."""
        if isinstance(model, GPT):
            config = model.config
            shape = (config.layers, slots, config.heads, context, config.width // config.heads)
            device = next(model.parameters()).device
            self.keys, self.values = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        self.requests: list[_Request | None] = [None] * slots
        self.free = list(range(slots - 1, -1, -1))
        self.token, self.position = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        # The prompt of each slot, its length, and what its answer is drawn with: one gather a tick in place of a loop over slots.
        self.prompt, self.prompt_length = np.zeros((slots, context), np.int64), np.ones(slots, np.int64)
        self.draw, self.temperature = np.zeros((slots, context)), np.ones(slots)
        self.pending: deque[_Request] = deque()
        self.users = 0
        """Evaluations that use this version."""

    @property
    def busy(self) -> int:
        return len(self.requests) - len(self.free)

    def logits(self) -> Tensor:
        """Logits of the token after the newest one, for every slot."""
        if isinstance(self.model, GPT):
            return _decode(self.model, self.keys, self.values, self.token, self.position)
        each, at = torch.arange(len(self.rows)), torch.from_numpy(self.position)
        self.rows[each, at] = torch.from_numpy(self.token)
        return self.model(self.rows, torch.arange(self.rows.shape[1]).expand_as(self.rows))[each, at]

    def admit(self) -> None:
        """Give free slots to waiting requests."""
        while self.pending and self.free:
            request = self.pending.popleft()
            if request.future.done():  # cancelled while it waited
                continue
            slot, n = self.free.pop(), len(request.ids)
            self.requests[slot] = request
            self.token[slot], self.position[slot] = request.ids[0], 0
            self.prompt[slot, :n], self.prompt_length[slot] = request.ids, n
            self.temperature[slot] = request.temperature
            if request.temperature:
                # 53 bits of a draw make a double in [0, 1).
                uniform = (draws(request.seed, request.max_tokens) >> np.uint64(11)).astype(np.float64) * 2.0**-53
                self.draw[slot, n : request.end] = uniform

    def release(self, slot: int) -> None:
        self.requests[slot] = None
        self.free.append(slot)
        self.token[slot] = self.position[slot] = 0
        self.temperature[slot] = 1.0


class EmbeddedEngine:
    """Samples from the versions of a policy that it was given last."""

    def __init__(self, *, end_id: int, context: int, slots: int = 128, versions: int = 2) -> None:
        """`end_id`: the token that ends an answer. `context`: longest prompt and answer together, in tokens. `slots`: requests per tick. `versions`: versions
        that are kept; one more than the lag of the run."""
        if slots < 1 or versions < 1 or context < 2:
            raise ConfigError(
                f"the engine needs slots >= 1, versions >= 1, context >= 2; got {slots}, {versions}, {context}"
            )
        self.end_id, self.context, self._slots, self._kept = end_id, context, slots, versions
        self._versions: dict[int, _Slots] = {}
        self._thread = ThreadPoolExecutor(1, "headrace-engine")
        self._work: asyncio.Task[None] | None = None

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that can be asked for, oldest first."""
        return tuple(self._versions)

    def take(self, version: int, model: GPT | HFPolicy) -> None:
        """Keep a copy of the weights as `version`; the oldest versions that no request or evaluation uses are dropped."""
        self._versions[version] = _Slots(model, self._slots, self.context)
        for old in sorted(self._versions)[: -self._kept]:
            slots = self._versions[old]
            if not (slots.busy or slots.pending or slots.users):
                del self._versions[old]

    @contextlib.contextmanager
    def keep(self, version: int) -> Generator[None]:
        """Keep a version during the body, for an evaluation."""
        slots = self._versions[version]
        slots.users += 1
        try:
            yield
        finally:
            slots.users -= 1

    async def complete(
        self, ids: np.ndarray, *, max_tokens: int, temperature: float, seed: int, version: int, session: str = ""
    ) -> Completion:
        slots = self._versions.get(version)
        if slots is None:
            raise ConfigError(f"the engine has versions {self.versions} of the policy and was asked for {version}")
        if not len(ids) or max_tokens < 1 or len(ids) + max_tokens > self.context:
            raise RolloutRefused(
                "context",
                f"a prompt of {len(ids)} tokens and an answer of {max_tokens} do not fit a context of {self.context}: raise policy.context, or ask for less",
            )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        slots.pending.append(_Request(np.asarray(ids, np.int64), max_tokens, temperature, seed, future, version))
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._serve(), name="headrace-engine")
        return await future

    async def _serve(self) -> None:
        """While there are requests: admit them, tick in the engine's thread, return the finished ones."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await asyncio.sleep(0)  # environments that got an answer send their next turn before the next ticks
                active = [slots for slots in self._versions.values() if slots.pending or slots.busy]
                if not active:
                    return
                for slots in active:
                    slots.admit()
                for request in await loop.run_in_executor(self._thread, self._tick_until_finished, active):
                    if not request.future.done():
                        spans = (VersionSpan(str(request.version), 0, len(request.said)),)
                        ids, logprobs = np.array(request.said, np.int32), np.array(request.logprobs, np.float32)
                        request.future.set_result(Completion(ids, logprobs, spans))
        except Exception as error:  # all requests wait for this task: none may wait for ever
            for slots in self._versions.values():
                waiting = [*slots.pending, *(r for r in slots.requests if r is not None)]
                slots.pending.clear()
                for slot in [at for at, r in enumerate(slots.requests) if r is not None]:
                    slots.release(slot)
                for request in waiting:
                    if not request.future.done():
                        request.future.set_exception(error)

    def _tick_until_finished(self, active: Sequence[_Slots]) -> list[_Request]:
        """Tick until a request is finished, or a few ticks have passed and new ones may have come."""
        finished: list[_Request] = []
        for _ in range(_TICKS_A_CALL):
            for slots in active:
                if slots.busy:
                    finished += self._tick(slots)
            if finished:
                break
        return finished

    @torch.inference_mode()
    def _tick(self, slots: _Slots) -> list[_Request]:
        position = slots.position
        logits = slots.logits()
        following = position + 1
        answers = following >= slots.prompt_length
        rows = np.arange(len(position))
        token = slots.prompt[rows, np.minimum(following, self.context - 1)]
        finished: list[_Request] = []
        if answers.any():
            greedy = slots.temperature == 0
            scaled = logits.double() / torch.from_numpy(np.where(greedy, 1.0, slots.temperature))[:, None]
            logprob = scaled.log_softmax(-1)
            cumulative = logprob.exp().cumsum(-1).numpy()
            drawn = slots.draw[rows, np.minimum(following, self.context - 1)]
            chosen = np.minimum((cumulative <= drawn[:, None]).sum(1), cumulative.shape[1] - 1)
            chosen = np.where(greedy, logits.argmax(-1).numpy(), chosen)
            said = logprob.numpy()[rows, chosen].astype(np.float32)
            token = np.where(answers, chosen, token)
            for slot in np.flatnonzero(answers).tolist():
                request = slots.requests[slot]
                if request is None:
                    continue
                request.said.append(int(chosen[slot]))
                request.logprobs.append(float(said[slot]))
                if chosen[slot] == self.end_id or following[slot] + 1 >= request.end:
                    finished.append(request)
                    slots.release(slot)
        following[slots.free] = 0
        slots.token, slots.position = token, following
        for slot in [at for at, r in enumerate(slots.requests) if r is not None and r.future.cancelled()]:
            slots.release(slot)
        return finished

    async def close(self) -> None:
        """Stop ticking; requests that wait are cancelled."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        self._thread.shutdown()


def _decode(model: GPT, keys: Tensor, values: Tensor, token: np.ndarray, position: np.ndarray) -> Tensor:
    """The logits after one token of every slot, whose keys and values enter the cache at its position."""
    ids, at = torch.from_numpy(token).to(keys.device), torch.from_numpy(position).to(keys.device)
    slots, context = len(token), keys.shape[3]
    rows = torch.arange(slots, device=keys.device)
    seen = (torch.arange(context, device=keys.device) <= at[:, None])[:, None]
    rotation = model.rotation(at[:, None])
    x = model.embedded(ids, at)
    for block, block_keys, block_values in zip(model.blocks, keys, values, strict=True):
        assert isinstance(block, Block)
        heads = block.attn.heads
        q, k, v = block.attn.qkv(block.norm1(x)).view(slots, 3, heads, 1, -1).unbind(1)
        q, k = rotate(q, rotation), rotate(k, rotation)
        block_keys[rows, :, at] = k[:, :, 0]
        block_values[rows, :, at] = v[:, :, 0]
        scores = (q * block_keys).sum(-1) * (q.shape[-1] ** -0.5)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        attended = (weights[..., None] * block_values).sum(-2)
        x = x + block.attn.out(attended.reshape(slots, -1))
        x = x + block.down(F.gelu(block.up(block.norm2(x)), approximate="tanh"))
    return F.linear(model.norm(x), model.embed.weight)
