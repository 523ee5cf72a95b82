"""Episodes and traces of `verifiers` 0.4 and later: records, files of them, and streams of deltas.

    rollouts_from_episode(record)               one rollout for each trace to train on
    read_episodes(path)                         records of a file: JSON lines, or msgpack behind lengths (big-endian u32)
    episode_from_deltas(deltas, head)           the record that a stream of deltas adds up to

An episode has a trace for each agent. A trace is a graph of nodes, one a message. Each node names its parent and holds the tokens that its message adds, so the
tokens along the path from the root are the sequence that the model saw. Every sampled node is a turn; its context is that path and the template's
tokens before its first sampled token.

    node 0  user         a b c            mask 0 0 0
    node 1  assistant    <s> d e          mask 0 1 1, logprobs of d e        turn: context a b c <s>, completion d e

Agents that are not trainable give no rollout. A trace that failed gives a rollout with its errors, whose masks are 0. A turn on a path that ends in a compaction
attempt which the harness did not continue from is left out.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.errors import FileCorrupt, RolloutRefused, StorageError
from headrace.files import open_regular
from headrace.rollouts.checks import (
    Limits,
    duration_of,
    experts_from,
    mapping,
    number,
    plain_values,
    required,
    sampling_from,
    sequence,
    version_spans_from,
)
from headrace.rollouts.records import Rollout, RoutedExperts, Step, StepTokens
from headrace.rollouts.values import model_values
from headrace.rollouts.wire import ids_column, logprobs_column, mask_column

_LISTS = ("nodes", "calls", "payload", "errors", "extra_usage", "request_rewrites", "response_rewrites")
"""Lists of a trace that deltas append to."""
_CUT_SHORT = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
"""Stop conditions of a trace that was not finished."""


def rollouts_from_episode(
    record: Any, *, env_name: str | None = None, policy_version: int = 0, run: str = "", draw: int | str | None = None,
    limits: Limits | None = None,
) -> list[Rollout]:  # fmt: skip
    """A rollout for each trace to train on, in the record's order; [] if there is none.

    Where traces of several agents are trained on, each agent's rollouts have an environment name of their own (`env.agent`), because their rewards have
    no common baseline.

    Args:
        record: an episode, or one trace with `env_name`.
        env_name: name of the environment; the episode's own unless given.
        policy_version, run: as for `rollout_from_verifiers`.
        draw: which draw of the example, where the episode names no group.
        limits: the largest rollout that is taken.
    """
    limits = limits or Limits()
    record = model_values(record)
    if not isinstance(record, Mapping):
        raise RolloutRefused("wrong_type", f"an episode is a {type(record).__name__}, expected names and values")
    episode = mapping(record, "an episode")
    traces = required(episode, "traces", "an episode") if "nodes" not in episode else [episode]
    traces = sequence(traces, "the traces of an episode")
    if env_name is None:
        env = mapping(episode.get("env"), "env of an episode")
        env_name = env.get("name") or env.get("id")
    if not env_name:
        raise RolloutRefused("missing_field", "the record does not name its environment: give env_name")
    group = mapping(episode.get("group"), "group of an episode").get("id")
    trained = [t for t in (mapping(t, "a trace") for t in traces) if _agent(t).get("trainable", True)]
    several = len({_agent(t).get("name") for t in trained}) > 1
    return [
        _rollout(
            trace, limits, env_name=f"{env_name}.{_agent(trace).get('name')}" if several else env_name,
            policy_version=policy_version, run=run, draw=draw if group is None else str(group),
        )
        for trace in trained
    ]  # fmt: skip


def rollout_from_record(record: Mapping[str, Any], **more: Any) -> Rollout:
    """The only rollout of an episode or a trace; refused if there is none or more than one."""
    found = rollouts_from_episode(record, **more)
    if not found:
        errors = "; ".join(_errors(record)) or "its agents are not trainable"
        raise RolloutRefused("no_traces", f"an episode has no trace to train on: {errors}")
    if len(found) > 1:
        raise RolloutRefused(
            "malformed",
            f"an episode has {len(found)} traces to train on, which are as many rollouts: split it with rollouts_from_episode and send each",
        )
    return found[0]


def _agent(trace: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(trace.get("agent"), "agent of a trace")


def _errors(record: Mapping[str, Any]) -> list[str]:
    """The errors of a record, newest first."""
    told = [mapping(e, "an error") for e in sequence(record.get("errors") or (), "the errors of a trace")]
    return [f"{e.get('type', 'Error')}: {e.get('message', '')}" for e in reversed(told)]


def _rollout(
    trace: Mapping[str, Any], limits: Limits, *, env_name: str, policy_version: int, run: str, draw: int | str | None,
) -> Rollout:  # fmt: skip
    task = mapping(trace.get("task"), "task of a trace")
    data = mapping(task.get("data"), "data of a task")
    example = next((e for e in (task.get("key"), task.get("hash"), data.get("idx")) if isinstance(e, (int, str))), None)
    if example is None:
        raise RolloutRefused("missing_field", "the task of a trace has no 'key'")
    where = f"trace of example {plain_values(example, 'the key of a task', limits)!r:.80}"
    calls = _calls(trace)
    truncated = trace.get("stop_condition") in _CUT_SHORT
    if not truncated and calls:
        truncated = calls[-1].get("finish_reason") == "length"
    errors = None
    if not trace.get("ok", not trace.get("errors")):
        errors = tuple(_errors(trace)) or (f"the trace failed ({trace.get('stop_condition')})",)
    rewards = mapping(trace.get("rewards"), "rewards of a trace")
    kept = {
        "trace_id": trace.get("id"), "agent": _agent(trace).get("name"), "task": task, "rewards": rewards, "info": trace.get("info"),
    }  # fmt: skip
    return Rollout(
        example_id=example, env_name=plain_values(env_name, "env_name", limits), reward=_reward(rewards),
        trajectory=_turns(trace, where, limits), draw=draw,
        metrics={k: number(v, f"metric {k!r}") for k, v in mapping(trace.get("metrics"), "metrics").items() if v is not None},
        error=plain_values(errors, "the errors", limits), is_truncated=truncated,
        stop_condition=plain_values(trace.get("stop_condition"), "stop_condition", limits), sampling_args=_sampling(trace, calls, limits),
        timing=_timing(trace.get("timing")), state=plain_values(kept, "the state", limits), policy_version=policy_version, run=run,
    )  # fmt: skip


def _calls(trace: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The model calls of a trace that gave an answer."""
    calls = [mapping(call, "a call") for call in sequence(trace.get("calls") or (), "the calls of a trace")]
    return [call for call in calls if call.get("error") is None]


def _reward(rewards: Mapping[str, Any]) -> float:
    """The sum of score times weight. A reward of None was not scored and adds 0."""
    total = 0.0
    for name, reward in rewards.items():
        if isinstance(reward, (int, float)) and not isinstance(reward, bool):
            total += number(reward, f"reward {name!r}")
        elif reward is not None:
            fields = mapping(reward, f"reward {name!r}")
            score = number(required(fields, "score", f"reward {name!r}"), f"the score of reward {name!r}")
            total += score * number(fields.get("weight", 1.0), f"the weight of reward {name!r}")
    return total


def _sampling(trace: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], limits: Limits) -> dict[str, Any]:
    """The agent's sampling settings, overridden by those of its calls."""
    settings = mapping(
        mapping(_agent(trace).get("config"), "config of an agent").get("sampling"), "sampling of an agent"
    )
    made = [mapping(call.get("sampling"), "sampling of a call") for call in calls]
    return {k: v for part in (settings, *made) for k, v in sampling_from(part, limits).items() if v is not None}


def _timing(value: Any) -> dict[str, float]:
    """Seconds by the names that rollouts use: the agent's span is `generation`, its harness is `env`."""
    spans = mapping(value, "timing")
    agent = mapping(spans.get("agent"), "timing of the agent")
    named = {
        "setup": spans.get("setup"), "generation": agent, "model": agent.get("model"), "env": agent.get("harness"), "scoring": spans.get("scoring"),
    }  # fmt: skip
    ends = [s["end"] for s in spans.values() if isinstance(s, Mapping) and isinstance(s.get("end"), (int, float))]
    named["total"] = {"start": spans.get("start"), "end": max(ends, default=None)}
    times = {name: duration_of(mapping(span, f"timing of {name}")) for name, span in named.items()}
    return {name: number(seconds, f"timing of {name}") for name, seconds in times.items() if seconds is not None}


# ---------------------------------------------------------------------------------------------------- turns


def _numbers(fields: Mapping[str, Any], name: str) -> Any:
    """A column of a node; empty where the field is missing or None."""
    value = fields.get(name)
    return () if value is None else value


class _Node:
    """One message of a trace and the tokens that it adds."""

    def __init__(self, value: Any, index: int, limits: Limits) -> None:
        name = f"node {index}"
        fields = mapping(value, name)
        parent = fields.get("parent")
        if parent is not None and (type(parent) is not int or not 0 <= parent < index):
            raise RolloutRefused("malformed", f"{name} has the parent {parent!r:.40}, expected a node before it")
        self.parent: int | None = parent
        self.name, self.message, self.sampled = name, fields.get("message"), bool(fields.get("sampled", False))
        self.ids = ids_column(_numbers(fields, "token_ids"), f"token_ids of {name}", limits.tokens)
        self.mask = mask_column(_numbers(fields, "mask"), f"mask of {name}", limits.tokens)
        if len(self.mask) != len(self.ids):
            raise RolloutRefused("wrong_length", f"{name} has {len(self.ids)} tokens and a mask of {len(self.mask)}")
        self.images = fields.get("multi_modal_data")
        self.rows = experts_from(fields.get("routed_experts"))
        if self.rows is not None and self.rows.shape[0] != len(self.ids):
            raise RolloutRefused("routing", f"{name} has {len(self.ids)} tokens and experts for {self.rows.shape[0]}")
        links = [mapping(link, f"links of {name}") for link in fields.get("semantic_parents") or ()]
        self.links = [(link.get("type", link.get("kind")), link.get("node")) for link in links]
        self._fields, self._limits = fields, limits

    @functools.cached_property
    def first(self) -> int:
        """Index of its first sampled token; the tokens before it are the template's."""
        sampled = np.flatnonzero(self.mask)
        return int(sampled[0]) if len(sampled) else len(self.ids)

    def completion(self) -> dict[str, Any]:
        """The sampled part, as columns of a turn."""
        ids, mask = self.ids[self.first :], self.mask[self.first :]
        places = np.flatnonzero(mask)
        told = logprobs_column(_numbers(self._fields, "logprobs"), f"logprobs of {self.name}", self._limits.tokens)
        if len(told) != len(places):
            raise RolloutRefused(
                "wrong_length", f"{self.name} has {len(places)} sampled tokens and {len(told)} logprobs"
            )
        logprobs = np.zeros(len(ids), np.float32)
        logprobs[places] = told
        spans = version_spans_from(self._fields.get("weight_versions"), places, self.name, self._limits)
        return {"completion_ids": ids, "completion_mask": mask, "completion_logprobs": logprobs, "version_spans": spans}


def _turns(trace: Mapping[str, Any], where: str, limits: Limits) -> tuple[Step, ...]:
    values = sequence(required(trace, "nodes", where), f"the nodes of the {where}", limits.steps)
    nodes = [_Node(value, at, limits) for at, value in enumerate(values)]
    ends_of_calls = {c.get("node"): c.get("finish_reason") == "length" for c in _calls(trace)}
    extended: set[int] = set()
    turns = []
    for at in sorted(_trained_nodes(nodes)):
        node = nodes[at]
        if not node.sampled:
            continue
        path = _path(nodes, at)[:-1]
        tokens = None
        if len(node.ids):
            # Rows of experts continue those of the turn before, unless another turn has continued it: then this turn begins a sample of its own.
            before = next((n for n in reversed(path) if nodes[n].sampled and len(nodes[n].ids)), None)
            new = path[path.index(before) + 1 :] if before is not None and before not in extended else path
            if before is not None:
                extended.add(before)
            tokens = _turn_tokens([nodes[n] for n in path], node, len(path) - len(new))
        turns.append(
            Step(
                prompt=plain_values([nodes[n].message for n in path], f"the messages before {node.name}", limits),
                completion=[plain_values(node.message, f"the message of {node.name}", limits)],
                tokens=tokens, is_truncated=ends_of_calls.get(at, False),
            )
        )  # fmt: skip
    return tuple(turns)


def _path(nodes: Sequence[_Node], at: int) -> list[int]:
    path = [at]
    while (parent := nodes[path[-1]].parent) is not None:
        path.append(parent)
    return path[::-1]


def _trained_nodes(nodes: Sequence[_Node]) -> set[int]:
    """The nodes on paths that do not end in a compaction attempt, or in one that the harness continued from."""
    accepted = {node for n in nodes for kind, node in n.links if kind == "compaction"}
    parents = {n.parent for n in nodes}
    ends = [at for at in range(len(nodes)) if at not in parents]
    tried = {at for at in ends if any(kind == "compaction_attempt" for kind, _ in nodes[at].links)}
    return {n for end in ends if end not in tried or end in accepted for n in _path(nodes, end)}


def _turn_tokens(path: Sequence[_Node], node: _Node, known: int) -> StepTokens:
    """The tokens of a turn after `path`; the first `known` nodes of the path have their experts from earlier turns."""
    scaffold = node.first
    context = [n.ids for n in path]
    images = [n.images for n in (*path, node) if n.images is not None]
    prompt_ids = np.concatenate([*context, node.ids[:scaffold]])
    return StepTokens(
        prompt_ids=prompt_ids, prompt_mask=np.zeros(len(prompt_ids), np.uint8),
        routed_experts=_rows(path, node, known), multimodal={"multimodal": images} if images else None, **node.completion(),
    )  # fmt: skip


def _rows(path: Sequence[_Node], node: _Node, known: int) -> RoutedExperts | None:
    new = [n for n in (*path[known:], node) if len(n.ids)]
    rows = [n.rows for n in new if n.rows is not None]
    if len(rows) < len(new):
        return None
    start = sum(len(n.ids) for n in path[:known])
    if len({r.shape[1:] for r in rows}) > 1:
        raise RolloutRefused("routing", f"{node.name}: its path has experts of different layers and experts a token")
    joined = np.concatenate([r.rows(0, r.shape[0]) for r in rows])
    return RoutedExperts(data=joined, shape=joined.shape, start=start)


# ----------------------------------------------------------------------------------------- files and streams


def read_episodes(path: Path | str) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of JSON lines, or of msgpack behind lengths. FileCorrupt names the first record that cannot be read."""
    path = Path(path)
    try:
        with open(open_regular(path, follow=True), "rb") as file:
            size_of_file = os.fstat(file.fileno()).st_size
            packed = file.read(1) == b"\0"  # the first byte of a length below 16 MiB; JSON begins with a bracket
            file.seek(0)
            count = 0
            while raw := file.read(4) if packed else file.readline():
                if packed:
                    size = int.from_bytes(raw, "big")
                    raw = file.read(min(size, size_of_file))
                    if len(raw) < size:
                        raise FileCorrupt(f"{path} was cut short: record {count} has {len(raw):,} of {size:,} bytes")
                if packed or raw.strip():
                    try:
                        yield msgspec.msgpack.decode(raw) if packed else msgspec.json.decode(raw)
                    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                        raise FileCorrupt(f"{path}: record {count} cannot be decoded: {error}") from error
                    count += 1
    except OSError as error:
        raise StorageError(f"the episodes {path} cannot be read: {error.strerror or error}") from error


def episode_from_deltas(deltas: Iterable[Mapping[str, Any]], head: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The episode that a stream of deltas adds up to.

    A delta names its trace. The first delta of a trace has its header (`open`). Later ones append nodes, calls and errors, and `set` fields that changed.
    `discard` drops a trace that was restarted; `links` and `routing_repairs` complete nodes that were sent before.

    Args:
        deltas: the deltas in the order they were sent.
        head: the episode's record without its traces (id, env, task, ok, errors).
    """
    traces: dict[str, dict[str, Any]] = {}
    for delta in deltas:
        fields = mapping(delta, "a delta")
        name = required(fields, "trace", "a delta")
        if fields.get("discard"):
            traces.pop(name, None)
            continue
        if name not in traces:
            if "open" not in fields:
                raise RolloutRefused(
                    "missing_field",
                    f"trace {name!r:.80} begins with a delta that has no 'open': deltas before it are missing",
                )
            traces[name] = {**mapping(fields["open"], "open of a delta"), **{key: [] for key in _LISTS}}
        trace = traces[name]
        for at, links in _updates(fields, "links", trace):
            trace["nodes"][at] = {
                **trace["nodes"][at],
                "semantic_parents": [*(trace["nodes"][at].get("semantic_parents") or ()), *links],
            }
        for at, row in _updates(fields, "routing_repairs", trace):
            trace["nodes"][at] = _with_last_row(trace["nodes"][at], row, f"node {at} of trace {name!r:.80}")
        for key in _LISTS:
            trace[key] += fields.get(key) or ()
        trace |= mapping(fields.get("set"), "set of a delta")
    return {**(head or {}), "traces": list(traces.values())}


def _updates(delta: Mapping[str, Any], key: str, trace: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """A delta's updates of nodes that were sent before, by node number."""
    for at, update in (delta.get(key) or {}).items():
        if not str(at).isdecimal() or not int(at) < len(trace["nodes"]):
            raise RolloutRefused("malformed", f"{key} of a delta are for node {at!r:.40}, which was not sent")
        yield int(at), update


def _with_last_row(node: Mapping[str, Any], row: Any, name: str) -> dict[str, Any]:
    """The node with another row of experts for its last token, which an engine sends with the next turn."""
    old, new = experts_from(node.get("routed_experts")), experts_from(row)
    if old is None or new is None or new.shape != (1, *old.shape[1:]) or not old.shape[0]:
        raise RolloutRefused("routing", f"{name} cannot have its last row of experts replaced: the shapes do not fit")
    return {**node, "routed_experts": np.concatenate([old.rows(0, old.shape[0] - 1), new.rows(0, 1)])}
