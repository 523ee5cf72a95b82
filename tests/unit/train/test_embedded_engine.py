"""The embedded engine: completions are a function of the request and the version, to the bit."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError, RolloutRefused
from headrace.train.embedded_engine import EmbeddedEngine
from headrace.train.gpt import GPT, GPTConfig, init_parameters

END, CONTEXT = 11, 24


def made_model(seed: int = 0, preset: str = "gpt-digits") -> GPT:
    model = GPT(GPTConfig.preset(preset, vocab_size=12, seq_len=CONTEXT))
    init_parameters(model, seed)
    return model


def asked(rng: np.random.Generator) -> dict:
    ids = rng.integers(0, 11, rng.integers(1, 12)).astype(np.int32)
    return {
        "ids": ids,
        "max_tokens": int(rng.integers(1, 9)),
        "temperature": float(rng.choice([0.0, 0.7, 1.0])),
        "seed": int(rng.integers(1 << 62)),
    }


async def answered(engine: EmbeddedEngine, requests: list[dict], version: int = 0):
    calls = [engine.complete(r["ids"], version=version, **{k: v for k, v in r.items() if k != "ids"}) for r in requests]
    return await asyncio.gather(*calls)


@pytest.mark.parametrize("preset", ["gpt-digits", "gpt-tiny"])
def test_a_completion_does_not_depend_on_its_batch_mates(preset):
    rng = np.random.default_rng(3)
    requests = [asked(rng) for _ in range(60)]

    async def main():
        engine = EmbeddedEngine(end_id=END, context=CONTEXT, slots=16)
        engine.take(0, made_model(preset=preset))
        crowd = await answered(engine, requests)
        backwards = (await answered(engine, requests[::-1]))[::-1]
        alone = [(await answered(engine, [r]))[0] for r in requests[:20]]
        await engine.close()
        return crowd, backwards, alone

    crowd, backwards, alone = asyncio.run(main())
    for one, other in [*zip(crowd, backwards, strict=True), *zip(crowd[:20], alone, strict=True)]:
        assert one.ids.tobytes() == other.ids.tobytes()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


@pytest.mark.parametrize("preset", ["gpt-digits", "gpt-tiny"])
def test_the_cache_gives_the_logprobs_of_the_whole_model(preset):
    model, rng = made_model(5, preset), np.random.default_rng(4)
    requests = [{**asked(rng), "temperature": t} for t in (1.0, 0.7, 0.0) for _ in range(6)]

    async def main():
        engine = EmbeddedEngine(end_id=END, context=CONTEXT, slots=8)
        engine.take(0, model)
        try:
            return await answered(engine, requests)
        finally:
            await engine.close()

    for request, said in zip(requests, asyncio.run(main()), strict=True):
        ids = torch.from_numpy(np.concatenate([request["ids"], said.ids]).astype(np.int64))[None]
        logits = model(ids, torch.arange(ids.shape[1])[None])[0, len(request["ids"]) - 1 : -1]
        expected = (
            (logits / (request["temperature"] or 1.0))
            .log_softmax(-1)
            .gather(1, ids[0, len(request["ids"]) :, None])[:, 0]
        )
        assert np.abs(expected.detach().numpy() - said.logprobs).max() < 1e-5
        assert len(said.ids) == request["max_tokens"] or said.ids[-1] == END
        if request["temperature"] == 0:
            assert logits.argmax(-1).tolist() == said.ids.tolist()


def test_requests_are_answered_by_the_version_they_name():
    request = {"ids": np.array([1, 2, 3], np.int32), "max_tokens": 4, "temperature": 1.0, "seed": 9}

    async def main():
        engine = EmbeddedEngine(end_id=END, context=CONTEXT, slots=4, versions=2)
        before = {}
        for version in range(4):
            engine.take(version, made_model(version))
            before[version] = (await answered(engine, [request], version))[0]
        kept = engine.versions
        after = {version: (await answered(engine, [request], version))[0] for version in kept}
        with pytest.raises(ConfigError, match=r"has versions \(2, 3\) of the policy and was asked for 1"):
            await answered(engine, [request], 1)
        with pytest.raises(RolloutRefused, match="do not fit a context of 24"):
            await answered(engine, [{**request, "max_tokens": 22}], 3)
        await engine.close()
        return before, after

    before, after = asyncio.run(main())
    assert sorted(after) == [2, 3]
    for version, said in after.items():
        assert said.logprobs.tobytes() == before[version].logprobs.tobytes()
        assert said.spans == ((str(version), 0, len(said.ids)),)
    assert before[2].logprobs.tobytes() != before[3].logprobs.tobytes()


def test_a_cancelled_request_frees_its_slot():
    async def main():
        engine = EmbeddedEngine(end_id=END, context=CONTEXT, slots=1)
        engine.take(0, made_model())
        request = {"ids": np.array([1], np.int32), "max_tokens": 20, "temperature": 1.0, "seed": 1}
        for _ in range(3):
            task = asyncio.ensure_future(answered(engine, [request]))
            await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        (said,) = await asyncio.wait_for(answered(engine, [request]), 20)
        await engine.close()
        return said

    assert len(asyncio.run(main()).ids) >= 1
