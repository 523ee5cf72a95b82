"""Records that real programs wrote become rollouts: verifiers 0.4 episodes, live v0 rollouts, vLLM replies. See tests/data/rl/README.md."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import BaseModel

from headrace.errors import FileCorrupt, RolloutRefused
from headrace.rollouts import (
    AdvantageConfig,
    RolloutPipeline,
    dump_raw_rollouts,
    episode_from_deltas,
    interleave_rollout,
    open_training_batch,
    read_episodes,
    rollout_from_verifiers,
    rollouts_from_episode,
    step_from_reply,
)
from headrace.rollouts.dumps import read_dump

DATA = Path(__file__).resolve().parents[2] / "data" / "rl"
EPISODES = [json.loads(line) for line in (DATA / "eps_train_real.jsonl").read_bytes().splitlines()]
SCAFFOLD = [1, 321, 85, 288, 86, 354, 86, 201]


def framed():
    raw, found = (DATA / "eps_train_real.msgpack").read_bytes(), []
    while raw:
        size = int.from_bytes(raw[:4], "big")
        found.append(raw[4 : 4 + size])
        raw = raw[4 + size :]
    return found


def deltas_of(episode):
    """The stream that a server of environments sends: the header, then what each turn added, then the result."""
    for trace in episode["traces"]:
        yield {"trace": trace["id"], "open": {k: trace[k] for k in ("version", "id", "verifiers", "task")}}
        yield {"trace": trace["id"], "nodes": trace["nodes"][:1], "set": {"agent": trace["agent"]}, "pending": []}
        yield {"trace": trace["id"], "nodes": trace["nodes"][1:], "calls": trace["calls"]}
        yield {"trace": trace["id"], "set": {k: trace[k] for k in ("rewards", "metrics", "ok", "timing", "stop_condition", "is_completed")}}  # fmt: skip


def told(rollout):
    tokens = rollout.trajectory[0].tokens
    return (
        rollout.env_name, rollout.example_id, rollout.reward, rollout.error, rollout.is_truncated, rollout.stop_condition, rollout.temperature,
        rollout.metrics, tokens.prompt_ids.tolist(), tokens.completion_ids.tolist(), tokens.completion_mask.tolist(),
        tokens.completion_logprobs.tolist(), tokens.version_spans,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------- verifiers 0.4


@pytest.mark.parametrize("at", range(4))
def test_every_form_of_a_real_episode_is_the_same_rollout(at):
    episode = EPISODES[at]
    (trace,) = episode["traces"]
    user, assistant = trace["nodes"]
    rollout = rollout_from_verifiers(episode)
    (turn,) = rollout.trajectory
    assert turn.tokens is not None
    assert turn.tokens.prompt_ids.tolist() == [*user["token_ids"], *SCAFFOLD]
    assert turn.tokens.completion_ids.tolist() == assistant["token_ids"][8:]
    assert turn.tokens.completion_mask.tolist() == [1] * 8
    assert turn.tokens.completion_logprobs.tolist() == np.float32(assistant["logprobs"]).tolist()
    assert turn.tokens.version_spans == (("2", 0, 8),)
    assert (turn.prompt, turn.completion) == ([user["message"]], [assistant["message"]])
    assert (rollout.env_name, rollout.example_id, rollout.temperature) == ("sortdigits", episode["task"]["key"], 1.0)
    assert (rollout.error, rollout.is_truncated, rollout.stop_condition) == (None, True, "agent_completed")
    assert rollout.metrics == {"reply_length": trace["metrics"]["reply_length"]}
    assert rollout.timing["model"] == pytest.approx(trace["timing"]["agent"]["model"]["duration"])
    assert rollout.timing["total"] > rollout.timing["generation"] > rollout.timing["model"] > 0
    forms = [
        rollout_from_verifiers(json.dumps(episode)),
        rollout_from_verifiers(framed()[at]),
        rollout_from_verifiers(trace, env_name="sortdigits"),
        rollout_from_verifiers(episode_from_deltas(deltas_of(episode), episode)),
    ]
    assert [told(form) for form in forms] == [told(rollout)] * 4


def test_a_long_episode_is_the_same_from_bytes_as_from_its_values():
    episode = grown()
    node = episode["traces"][0]["nodes"][3]
    node |= {"token_ids": list(range(40_000)), "mask": [False] + [True] * 39_999, "logprobs": [-0.25] * 39_999}
    expected = rollout_from_verifiers(episode)
    binary = copy.deepcopy(episode)
    for each in binary["traces"][0]["nodes"]:
        for name, dtype in (("token_ids", "<i4"), ("mask", "u1"), ("logprobs", "<f4")):
            if each.get(name) is not None:
                each[name] = np.array(each[name], dtype).tobytes()
    forms = [
        rollout_from_verifiers(json.dumps(episode)),
        rollout_from_verifiers(msgspec.msgpack.encode(episode)),
        rollout_from_verifiers(msgspec.msgpack.encode(binary)),
    ]
    for form in forms:
        assert told(form) == told(expected)
        assert [s.ids.tolist() for s in interleave_rollout(form)] == [
            s.ids.tolist() for s in interleave_rollout(expected)
        ]


def test_files_of_episodes_are_read_as_json_lines_and_as_msgpack_behind_lengths():
    lines, packed = (list(read_episodes(str(DATA / f"eps_train_real.{kind}"))) for kind in ("jsonl", "msgpack"))
    assert lines == EPISODES
    assert [told(r) for e in packed for r in rollouts_from_episode(e)] == [
        told(r) for e in lines for r in rollouts_from_episode(e)
    ]


def test_a_file_of_episodes_that_is_cut_short_is_named(tmp_path):
    for kind in ("jsonl", "msgpack"):
        path = tmp_path / kind
        path.write_bytes((DATA / f"eps_train_real.{kind}").read_bytes()[:-3])
        with pytest.raises(FileCorrupt, match="record 3"):
            list(read_episodes(path))


@pytest.mark.parametrize("processes", [0, 1])
def test_a_pipeline_takes_episodes_in_every_form(tmp_path, processes):
    async def go():
        async with RolloutPipeline(
            tmp_path / "q", seq_len=64, save_to=str(tmp_path / "saved"), use_process_pool=processes
        ) as pipeline:
            raws = [EPISODES[0], json.dumps(EPISODES[1]), framed()[2], framed()[3]]
            for at, raw in enumerate(raws):
                pipeline.arrive(raw, step=0, key=(at // 2, at % 2))
            return await pipeline.finish(0)

    report = asyncio.run(go())
    assert (report.rollouts, report.refused) == (4, {})
    assert open_training_batch(report.path).tokens == 4 * 30
    lines = [json.loads(line) for line in (tmp_path / "saved" / "step_0.jsonl").read_bytes().splitlines()]
    assert [line["trajectory"][0]["weight_versions"] for line in lines] == [[["2", 0, 8]]] * 4


def grown(**more):
    """The first real trace with a second turn, and with a branch that begins again after the first user message."""
    episode = copy.deepcopy(EPISODES[0])
    (trace,) = episode["traces"]
    _, said = trace["nodes"]
    reply = {"parent": 1, "message": {"role": "user", "content": "again"}, "sampled": False, "token_ids": [2, 201, 9], "mask": [False] * 3, "logprobs": []}  # fmt: skip
    trace["nodes"] += [
        reply,
        {**said, "parent": 2, "token_ids": [1, 7, 8], "mask": [False, True, True], "logprobs": [-1.0, -2.0], "weight_versions": [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}]},
        {**said, "parent": 0, "token_ids": [1, 5, 6, 4], "mask": [False, True, False, True], "logprobs": [-3.0, -4.0], "weight_versions": [{"version": "3", "start": 1, "end": 2}]},
    ]  # fmt: skip
    trace |= more
    return episode


def test_a_sampled_node_is_a_turn_whose_context_is_the_path_to_the_root():
    rollout = rollout_from_verifiers(grown())
    first, second, branch = (turn.tokens for turn in rollout.trajectory)
    user, said = (node["token_ids"] for node in EPISODES[0]["traces"][0]["nodes"])
    assert second.prompt_ids.tolist() == [*user, *said, 2, 201, 9, 1]
    assert (second.completion_ids.tolist(), second.version_spans) == ([7, 8], (("2", 0, 1), ("3", 1, 2)))
    assert branch.prompt_ids.tolist() == [*user, 1]
    assert branch.completion_ids.tolist() == [5, 6, 4]
    assert branch.completion_mask.tolist() == [1, 0, 1]
    assert branch.completion_logprobs.tolist() == [-3.0, 0.0, -4.0]
    assert branch.version_spans == (("3", 2, 3),)
    whole, other = interleave_rollout(rollout)
    assert whole.ids.tolist() == [*user, *said, 2, 201, 9, 1, 7, 8]
    assert whole.mask.tolist() == [0] * 22 + [1] * 8 + [0] * 4 + [1, 1]
    assert other.mask.tolist() == [0] * 15 + [1, 0, 1]
    assert first.length == 30


def test_experts_of_nodes_are_those_of_their_tokens_along_every_path():
    episode = grown()
    nodes = episode["traces"][0]["nodes"]
    nodes.append({**nodes[3], "token_ids": [1, 9], "mask": [False, True], "logprobs": [-1.0], "weight_versions": []})
    for at, node in enumerate(nodes):
        rows = np.full((len(node["token_ids"]), 2, 3), at, np.uint8)
        node["routed_experts"] = {"__nd__": True, "dtype": "uint8", "shape": list(rows.shape), "data": rows.tobytes()}
    whole, other, second = interleave_rollout(rollout_from_verifiers(msgspec.msgpack.encode(episode), env_name="e"))
    assert whole.experts.joined()[:, 0, 0].tolist() == [0] * 14 + [1] * 16 + [2] * 3 + [3] * 3
    assert other.experts.joined()[:, 0, 0].tolist() == [0] * 14 + [4] * 4
    assert second.experts.joined()[:, 0, 0].tolist() == [0] * 14 + [1] * 16 + [2] * 3 + [5] * 2
    nodes[2].pop("routed_experts")
    with pytest.raises(RolloutRefused, match="left a turn out") as refused:
        interleave_rollout(rollout_from_verifiers(episode))
    assert refused.value.cause == "routing"


def test_a_failed_trace_is_a_rollout_with_its_errors_that_teaches_nothing():
    errors = [{"type": "TimeoutError", "message": "first"}, {"type": "ProviderError", "message": "second"}]
    rollout = rollout_from_verifiers(grown(ok=False, errors=errors, rewards={"reward": None}, stop_condition="error"))
    assert rollout.error == ("ProviderError: second", "TimeoutError: first")
    assert rollout.reward == 0.0
    assert not any(sample.mask.any() for sample in interleave_rollout(rollout))
    retried = rollout_from_verifiers(grown(ok=True, errors=errors[:1]))
    assert retried.error is None


def test_agents_that_are_not_trained_send_nothing_and_others_are_told_apart():
    episode = grown()
    (solver,) = episode["traces"]
    judge, critic = copy.deepcopy(solver), copy.deepcopy(solver)
    judge["agent"] |= {"name": "judge", "trainable": False}
    critic["agent"]["name"] = "critic"
    critic["rewards"] = {"a": {"score": 2.0, "weight": 0.5}, "b": {"score": 1.0}, "c": None}
    episode["traces"] = [judge, solver]
    assert rollout_from_verifiers(episode).env_name == "sortdigits"
    episode["traces"].append(critic)
    with pytest.raises(RolloutRefused, match=r"2 traces to train on.*rollouts_from_episode"):
        rollout_from_verifiers(episode)
    found = rollouts_from_episode(episode)
    assert [(r.env_name, r.reward) for r in found] == [("sortdigits.agent", 0.0), ("sortdigits.critic", 2.0)]
    assert rollouts_from_episode({**episode, "traces": [judge]}) == []
    with pytest.raises(RolloutRefused, match="no trace to train on") as refused:
        rollout_from_verifiers({**episode, "traces": [judge]})
    assert refused.value.cause == "no_traces"


def test_an_attempt_at_compaction_that_was_not_accepted_sends_nothing():
    episode = grown()
    nodes = episode["traces"][0]["nodes"]
    nodes[4]["semantic_parents"] = [{"node": 1, "type": "compaction_attempt"}]
    assert len(rollout_from_verifiers(episode).trajectory) == 2
    nodes[3]["semantic_parents"] = [{"node": 4, "type": "compaction"}]
    assert len(rollout_from_verifiers(episode).trajectory) == 3


def test_a_stream_of_deltas_drops_what_is_discarded_and_repairs_rows():
    episode = copy.deepcopy(EPISODES[0])
    retried = [{**d, "trace": "lost", **({"open": {**d["open"], "id": "lost"}} if "open" in d else {})} for d in deltas_of(episode)]  # fmt: skip
    stream = [*retried, {"trace": "lost", "discard": True}, *deltas_of(episode)]

    def array(rows):
        return {"__nd__": True, "dtype": "uint8", "shape": list(rows.shape), "data": rows.tobytes()}

    before = copy.deepcopy(stream)
    for delta in stream:
        for node in delta.get("nodes", ()):
            node["routed_experts"] = array(np.zeros((len(node["token_ids"]), 1, 1), np.uint8))
    stream.append({"trace": episode["traces"][0]["id"], "routing_repairs": {0: array(np.full((1, 1, 1), 7, np.uint8))}})
    found = episode_from_deltas(stream, episode)
    assert [t["id"] for t in found["traces"]] == [episode["traces"][0]["id"]]
    (sample,) = interleave_rollout(rollout_from_verifiers(found))
    assert sample.experts.joined()[:, 0, 0].tolist() == [0] * 13 + [7] + [0] * 16
    for delta in stream:
        for node in delta.get("nodes", ()):
            node.pop("routed_experts", None)
    assert stream[:-1] == before
    with pytest.raises(RolloutRefused, match="trace 'x' begins with"):
        episode_from_deltas([{"trace": "x", "nodes": []}], episode)


@pytest.mark.parametrize(
    ("change", "cause", "match"),
    [
        ({"nodes": None}, "wrong_type", "nodes"),
        ({"nodes": [{"parent": 0, "sampled": True, "token_ids": [1], "mask": [True], "logprobs": [0.0]}]}, "malformed", "node 0.*parent"),
        ({"nodes": [{"sampled": True, "token_ids": [1], "mask": [], "logprobs": []}]}, "wrong_length", "mask"),
        ({"nodes": [{"sampled": True, "token_ids": [1, 2], "mask": [True, True], "logprobs": [0.0]}]}, "wrong_length", "logprobs"),
        ({"nodes": [{"sampled": True, "token_ids": [1], "mask": [True], "logprobs": [0.0], "weight_versions": [{"version": "1", "start": 0, "end": 2}]}]}, "wrong_length", "weight_versions"),
        ({"rewards": {"a": {"score": float("nan")}}}, "not_finite", "reward"),
        ({"rewards": [1]}, "wrong_type", "rewards"),
        ({"task": {}}, "missing_field", "key"),
    ],
)  # fmt: skip
def test_a_malformed_trace_is_refused_under_its_cause(change, cause, match):
    with pytest.raises(RolloutRefused, match=match) as refused:
        rollout_from_verifiers(grown(**change))
    assert refused.value.cause == cause


# ----------------------------------------------------------------------------------------------- verifiers 0.3


class UserMessage(BaseModel):
    role: str = "user"
    content: str


class AssistantMessage(BaseModel):
    role: str = "assistant"
    content: str
    reasoning_content: str | None = None


def live(value: Any) -> Any:
    """The record as the environment returned it: message objects in the place of their names."""
    names = {"<<UserMessage>>": UserMessage(content="sort 6604"), "<<AssistantMessage>>": AssistantMessage(content="0466"), "<<Response>>": object()}  # fmt: skip
    if isinstance(value, dict):
        return {k: live(v) for k, v in value.items()}
    if isinstance(value, list):
        return [live(v) for v in value]
    return names.get(value, value) if isinstance(value, str) else value


V0 = json.loads((DATA / "vf0_openai_chat_completions.json").read_bytes())


@pytest.mark.parametrize("kind", ["single", "multi"])
def test_a_live_v0_rollout_has_message_objects_nested_times_and_its_environments_name_from_outside(kind):
    raw = live(V0[kind][0])
    rollout = rollout_from_verifiers(raw, env_name="sort")
    assert (rollout.env_name, len(rollout.trajectory)) == ("sort", 1 if kind == "single" else 3)
    turn = rollout.trajectory[0]
    assert turn.prompt == [{"role": "user", "content": "sort 6604"}]
    assert turn.completion == [{"role": "assistant", "content": "0466", "reasoning_content": None}]
    assert turn.tokens is not None
    assert turn.tokens.completion_ids.tolist() == V0[kind][0]["trajectory"][0]["tokens"]["completion_ids"]
    timing = V0[kind][0]["timing"]
    assert rollout.timing == {
        "total": timing["total"], **{n: timing[n]["duration"] for n in ("setup", "generation", "scoring", "model", "env")},
    }  # fmt: skip
    assert rollout.state["completion"][0]["content"] == "0466"


@pytest.mark.parametrize("processes", [0, 1])
def test_live_v0_rollouts_go_through_a_pipeline_and_a_dump(tmp_path, processes):
    raws = [live(raw) for kind in ("single", "multi") for raw in V0[kind]]

    async def go():
        async with RolloutPipeline(
            tmp_path / "q", seq_len=256, advantage=AdvantageConfig(), use_process_pool=processes
        ) as pipeline:
            for at, raw in enumerate(raws):
                pipeline.arrive(raw, step=0, key=(at // 2, at % 2), env_name="sort")
            return await pipeline.finish(0)

    report = asyncio.run(go())
    assert (report.rollouts, report.refused) == (4, {})
    assert dump_raw_rollouts(str(tmp_path / "step_0.dump"), raws) == 4
    again = [rollout_from_verifiers(raw, env_name="sort") for raw in read_dump(tmp_path / "step_0.dump")]
    assert again[0].trajectory[0].prompt == [{"role": "user", "content": "sort 6604"}]


# -------------------------------------------------------------------------------------------------------- vLLM


def reply(name):
    return json.loads((DATA / f"r_{name}.json").read_bytes())


def test_a_generate_reply_takes_its_prompt_from_the_caller_and_keeps_its_weight_versions():
    step = step_from_reply(reply("gen"), prompt_ids=[10, 20, 30, 40])
    assert step.tokens is not None
    assert step.tokens.prompt_ids.tolist() == [10, 20, 30, 40]
    assert step.tokens.completion_ids.tolist() == [493, 490, 425, 48, 161]
    assert step.tokens.completion_logprobs[0] == np.float32(-6.395238876342773)
    assert step.tokens.version_spans == (("default", 0, 5),)
    assert (step.completion, step.is_truncated) == ((), True)
    same = step_from_reply(reply("completion"))
    assert same.tokens is not None
    assert same.tokens.prompt_ids.tolist() == [10, 20, 30, 40]
    assert same.tokens.completion_logprobs.tolist() == step.tokens.completion_logprobs.tolist()


def test_a_reply_with_ids_of_a_prompt_that_nobody_gave_is_refused_by_name():
    with pytest.raises(RolloutRefused, match="prompt_ids="):
        step_from_reply(reply("gen"))
    with pytest.raises(RolloutRefused, match="other prompt"):
        step_from_reply(reply("chat"), prompt_ids=[1, 2, 3])
    chat = step_from_reply(reply("chat"), prompt_ids=np.array(reply("chat")["prompt_token_ids"]))
    assert chat.tokens is not None
    assert chat.tokens.length == 25
