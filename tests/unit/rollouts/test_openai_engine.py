"""Engines by URL: recorded vLLM replies, servers that reset connections, and the probe that refuses other weights."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.openai_server import ServedPolicy, openai_server

from headrace.errors import ConfigError, EngineDied, WeightsNotTaken
from headrace.rollouts.engine import CharacterCodec
from headrace.rollouts.openai_engine import OpenAIEngine
from headrace.rollouts.weights import check_probe, probe_ids, publish_weights, read_probe
from headrace.train.gpt import GPT, GPTConfig, init_parameters
from headrace.train.policy import logprobs_of

DATA = Path(__file__).parents[2] / "data" / "rl"
RECORDED = json.loads((DATA / "r_completion.json").read_text())
CODEC = CharacterCodec("0123456789>")


def made_model(seed: int) -> GPT:
    model = GPT(GPTConfig.preset("gpt-digits", vocab_size=CODEC.vocab_size, seq_len=16))
    init_parameters(model, seed)
    return model


def published(folder: Path, version: int, model: GPT) -> Path:
    ids = probe_ids(CODEC.vocab_size, 16)
    arrays = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return publish_weights(folder, version, arrays, ids, logprobs_of(model, ids))


async def asked(engine: OpenAIEngine, sessions: list[str]):
    calls = [
        engine.complete(
            np.array([10, 20, 30, 40], np.int32), max_tokens=5, temperature=1.0, seed=7, version=3, session=s
        )
        for s in sessions
    ]
    try:
        return await asyncio.gather(*calls)
    finally:
        await engine.close()


def test_a_recorded_vllm_reply_becomes_a_completion():
    seen = []

    def app(path, body):
        seen.append((path, body["prompt"], body["return_token_ids"]))
        return 200, RECORDED

    with openai_server(app) as url:
        (said,) = asyncio.run(asked(OpenAIEngine([f"{url}/v1"]), ["a"]))
    assert seen == [("/v1/completions", [10, 20, 30, 40], True)]
    assert said.ids.tolist() == RECORDED["choices"][0]["token_ids"]
    assert said.logprobs == pytest.approx(RECORDED["choices"][0]["logprobs"]["token_logprobs"])
    assert said.text == RECORDED["choices"][0]["text"]


def test_reset_connections_and_busy_servers_are_tried_again_elsewhere():
    first, second = [], []

    def broken(path, body):
        first.append(path)
        return None if len(first) % 2 else (503, {"error": "busy"})

    def works(path, body):
        second.append(path)
        return 200, RECORDED

    with openai_server(broken) as one, openai_server(works) as other:
        engine = OpenAIEngine([f"{one}/v1", f"{other}/v1"])
        replies = asyncio.run(asked(engine, [f"session-{n}" for n in range(12)]))
        assert len(replies) == len(second) == 12
        assert first, "some sessions belong to the broken server"
    with (
        openai_server(lambda path, body: None) as url,
        pytest.raises(EngineDied, match=r"did not answer for 0.1 s, at [23] tries .*resume the run"),
    ):
        asyncio.run(asked(OpenAIEngine([url], patience=0.1), ["a"]))
    with (
        openai_server(lambda path, body: (404, {"error": "no such model"})) as url,
        pytest.raises(ConfigError, match=r"refused a request with 404.*no such model"),
    ):
        asyncio.run(asked(OpenAIEngine([url]), ["a"]))


def test_turns_of_a_session_go_to_one_server():
    seen = {"a": set(), "b": set()}

    def server(name):
        def app(path, body):
            seen[name].add(body["prompt"][0])
            return 200, {**RECORDED, "choices": [{**RECORDED["choices"][0], "prompt_token_ids": body["prompt"]}]}

        return app

    async def main(urls):
        engine = OpenAIEngine(urls)
        for _ in range(3):
            for session in range(16):
                ids = np.array([session, 1], np.int32)
                await engine.complete(
                    ids, max_tokens=1, temperature=1.0, seed=1, version=0, session=f"rollout-{session}"
                )
        await engine.close()

    with openai_server(server("a")) as one, openai_server(server("b")) as other:
        asyncio.run(main([one, other]))
    assert seen["a"] | seen["b"] == set(range(16))
    assert not seen["a"] & seen["b"]


def test_weights_are_taken_between_requests_so_that_a_completion_has_one_version(tmp_path):
    served, arrived, answer = ServedPolicy(made_model(2), CODEC), threading.Event(), threading.Event()
    folder = published(tmp_path, 12, made_model(1))

    def app(path, body):
        if path == "/v1/completions" and "prompt_logprobs" not in body and not answer.is_set():
            arrived.set()
            assert answer.wait(20)
        return served(path, body)

    async def main(url):
        engine = OpenAIEngine([f"{url}/v1"])
        ask = {"max_tokens": 2, "temperature": 1.0, "seed": 1, "version": 0, "session": "a"}
        under_way = asyncio.create_task(engine.complete(np.array([1, 2], np.int32), **ask))
        await asyncio.to_thread(arrived.wait, 20)
        taking = asyncio.create_task(engine.take_weights(12, folder, tolerance=1e-4))
        later = asyncio.create_task(engine.complete(np.array([1, 2], np.int32), **ask))
        done, _ = await asyncio.wait([taking], timeout=0.3)
        assert not done
        assert served.asked == []
        answer.set()
        completions = await asyncio.gather(under_way, later)
        await taking
        await engine.close()
        return [c.spans[0].version for c in completions]

    with openai_server(app) as url:
        assert asyncio.run(main(url)) == ["-1", "12"]
    assert served.asked == ["/v1/completions", "/collective_rpc", "probe", "/v1/completions"]


def test_an_engine_with_other_weights_is_refused(tmp_path):
    trained = made_model(1)
    folder = published(tmp_path, 12, trained)
    ids, expected = read_probe(folder)
    assert len(ids) == len(expected) + 1

    async def take(url):
        engine = OpenAIEngine([f"{url}/v1"])
        try:
            await engine.take_weights(12, folder, tolerance=1e-4)
            return engine.version
        finally:
            await engine.close()

    with openai_server(ServedPolicy(made_model(2), CODEC)) as url:
        assert asyncio.run(take(url)) == 12
    with (
        openai_server(ServedPolicy(made_model(2), CODEC, takes_weights=False)) as url,
        pytest.raises(
            WeightsNotTaken, match="does not have version 12 of the weights: its log-probs of the probe are up to"
        ),
    ):
        asyncio.run(take(url))
    with pytest.raises(WeightsNotTaken, match="does not serve this policy"):
        check_probe(1, "an engine", [0.0, 1.0], [0.0], tolerance=1.0)
