"""Inference servers by URL: anything that completes token ids and returns ids and log-probs (vLLM with `return_token_ids`).

    engine = OpenAIEngine(["http://gpu1:8000/v1", "http://gpu2:8000/v1"], model="policy")
    completion = await engine.complete(ids, max_tokens=64, temperature=1.0, seed=7, version=12, session="sort-640-3")
    await engine.take_weights(12, Path("weights/v000012"), tolerance=1e-4)      on every server, then the probe; WeightsNotTaken

Requests of one session go to one server, which has their context cached. A request whose connection is reset or refused, or that is answered with 5xx, is tried again,
on the next server from the second retry on, without using up a refill of the group. The version of a completion is the one that the servers took last, or the one in the
reply (`weight_versions`). Weights are taken when every request under way has been answered, and new requests wait meanwhile: a completion has one version.
A server that does not come back within `patience` seconds raises `EngineDied`, which ends the run. No rollout is recorded as failed, and the run can be resumed.

Weights are taken with `POST /collective_rpc` {"method": "load_weights_from_folder"}, which vllm_worker.py adds to a vLLM server.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from headrace.errors import ConfigError, EngineDied
from headrace.metrics import Wait
from headrace.rollouts.engine import Completion
from headrace.rollouts.ingest import step_from_reply
from headrace.rollouts.records import VersionSpan
from headrace.rollouts.weights import check_probe, read_probe

_FIRST_RETRY, _LONGEST_RETRY = 0.05, 2.0


class OpenAIEngine:
    """Asks servers by URL. Used on one event loop."""

    def __init__(
        self, urls: Sequence[str], *, model: str = "policy", deadline: float = 120.0, patience: float = 30.0
    ) -> None:
        """`urls`: the servers. `model`: the name that they serve the policy under. `deadline`: seconds that one reply may take. `patience`: seconds for which
        a request is tried again after the connection failed."""
        try:
            self._httpx = importlib.import_module("httpx")
        except ImportError as error:
            raise ConfigError('engine.kind = "openai" needs httpx: pip install "headrace[rl]"') from error
        if not urls:
            raise ConfigError("an OpenAI-compatible engine needs at least one URL")
        self.urls, self.model, self.patience = [url.rstrip("/") for url in urls], model, patience
        limits = self._httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = self._httpx.AsyncClient(timeout=deadline, limits=limits, trust_env=False)
        self.version = -1
        """The version that all servers took last."""
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._asking = 0

    def _server(self, session: str, attempt: int) -> str:
        """The server of a session; the next one from the second try on."""
        return self.urls[(xxhash.xxh3_64_intdigest(session.encode()) + max(0, attempt - 1)) % len(self.urls)]

    async def _post(self, path: str, body: Mapping[str, Any], *, session: str = "", url: str = "") -> Any:
        """The JSON reply of a server; tried again while the connection fails. EngineDied if that lasts `patience` seconds."""
        until = asyncio.get_running_loop().time() + self.patience
        attempt = 0
        while True:
            where = url or self._server(session, attempt)
            try:
                reply = await self._client.post(f"{where}{path}", json=body)
                if reply.status_code < 500:
                    if reply.status_code >= 400:
                        raise ConfigError(
                            f"{where}{path} refused a request with {reply.status_code}: {reply.text[:300]}"
                        )
                    return reply.json()
                error: Exception = RuntimeError(f"{reply.status_code}: {reply.text[:200]}")
            except (self._httpx.TransportError, ValueError) as failed:  # ValueError: a reply that was cut short
                error = failed
            if asyncio.get_running_loop().time() >= until:
                raise EngineDied(
                    f"the engine {url or ', '.join(self.urls)} did not answer for {self.patience:g} s, at {attempt + 1} tries ({type(error).__name__}: {error}): "
                    "look at its log, start it again and resume the run"
                ) from error
            await asyncio.sleep(min(_FIRST_RETRY * 2**attempt, _LONGEST_RETRY))
            attempt += 1

    async def complete(
        self, ids: np.ndarray, *, max_tokens: int, temperature: float, seed: int, version: int, session: str = ""
    ) -> Completion:
        await self._open.wait()
        body = {
            "model": self.model, "prompt": [int(i) for i in ids], "max_tokens": max_tokens, "temperature": temperature, "seed": seed >> 1,
            "logprobs": 1, "return_token_ids": True,
        }  # fmt: skip
        taken = self.version
        self._asking += 1
        self._idle.clear()
        try:
            reply = await self._post("/completions", body, session=session)
        finally:
            self._asking -= 1
            if not self._asking:
                self._idle.set()
        step = step_from_reply(reply, prompt_ids=ids)
        tokens = step.tokens
        if tokens is None:
            raise ConfigError(
                f"{', '.join(self.urls)} returns no token ids: start it so that `return_token_ids` is honoured (vLLM 0.10 and later)"
            )
        spans = tokens.version_spans or (VersionSpan(str(taken), 0, len(tokens.completion_ids)),)
        text = step.completion if isinstance(step.completion, str) else None
        return Completion(tokens.completion_ids, tokens.completion_logprobs, spans, text)

    async def take_weights(self, version: int, folder: Path, *, tolerance: float) -> None:
        """Let every server load a version and check the probe, between requests."""
        self._open.clear()
        try:
            with Wait("rollouts.engine"):
                await self._idle.wait()
            await asyncio.gather(*(self._take(url, version, folder, tolerance) for url in self.urls))
            self.version = version
        finally:
            self._open.set()

    async def _take(self, url: str, version: int, folder: Path, tolerance: float) -> None:
        """Let a server load a version, and compare its log-probs of the probe with the trainer's."""
        body = {"method": "load_weights_from_folder", "args": [str(folder.resolve())]}
        await self._post("/collective_rpc", body, url=url.removesuffix("/v1"))
        ids, expected = read_probe(folder)
        body = {"model": self.model, "prompt": ids.tolist(), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        reply = await self._post("/completions", body, url=url)
        check_probe(version, url, expected, _prompt_logprobs(reply, ids), tolerance=tolerance)

    async def close(self) -> None:
        await self._client.aclose()


def _prompt_logprobs(reply: Any, ids: np.ndarray) -> list[float]:
    """The log-prob of every id of a prompt after the first, from vLLM's `prompt_logprobs`: one {id: {"logprob": …}} a position."""
    try:
        said = reply["choices"][0].get("prompt_logprobs") or reply["prompt_logprobs"]
        return [float(said[at][str(token)]["logprob"]) for at, token in enumerate(ids.tolist()) if at]
    except (KeyError, IndexError, TypeError, ValueError):
        return []
