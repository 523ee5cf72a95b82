"""Interleaving: the turns of a rollout become training samples (`interleave_rollout`).

    turn 1   prompt A            says b      sample 0:  A b
    turn 2   prompt A b c        says d      sample 0:  A b c d        its context starts with all of sample 0: extended
    turn 3   prompt X            says y      sample 1:  X y            it does not: a new sample (a branch, another agent)

A turn extends the sample with the longest sequence that its context starts with (the first of them if several are equal), and
what is new in its context is not learnt: mask 0, logprob 0. So the ids of a sample are those of its last turn, and one
comparison a turn is all that has to be done: joining pieces turn by turn would copy a 30-turn rollout 15 times.

Routed experts. An engine returns a row for every token it was fed: n − 1 rows for n tokens, because the last one was only
sampled. A sample that stands at p tokens therefore has p − 1 rows, and its next turn gives row p − 1 and those after it. The
rule is the same for every engine: *each token takes its row from the first turn that has one*. It also holds for engines that
return a row for every token, for turns whose rows were cut short or are missing as long as a later turn has them, and for
engines that send only the rows after the cached prefix. A turn whose rows leave a gap, or a token that no turn has a row for, is
refused by name, unless it is the last token, whose row is zeros. Chunks are views of what arrived and are never joined here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.errors import RolloutRefused
from headrace.rollouts.records import ExpertRows, Rollout, StepTokens, TrainingSample, common_prefix


@dataclass(slots=True)
class _Growing:
    """A sample whose turns are still being found."""

    turns: list[StepTokens] = field(default_factory=list)
    chunks: list[np.ndarray] = field(default_factory=list)
    rows: int = 0
    """Tokens from the start on that have their experts."""
    split_at: int | None = None

    @property
    def length(self) -> int:
        return self.turns[-1].length

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate([self.turns[-1].prompt_ids, self.turns[-1].completion_ids])

    def is_start_of(self, ids: np.ndarray) -> bool:
        last = self.turns[-1]
        middle, end = len(last.prompt_ids), last.length
        if len(ids) < end:
            return False
        return np.array_equal(ids[middle:end], last.completion_ids) and np.array_equal(ids[:middle], last.prompt_ids)

    def add(self, tokens: StepTokens, number: int, where: str) -> None:
        self.turns.append(tokens)
        routed = tokens.routed_experts
        if routed is None or not routed.shape[0] or routed.end <= self.rows:
            return
        if routed.start > self.rows:
            raise RolloutRefused(
                "routing",
                f"{where}, turn {number}: routed experts begin at token {routed.start}, those before end at {self.rows}; the tokens between have none",
            )
        self.chunks.append(routed.rows(self.rows, routed.end))
        self.rows = routed.end

    def experts(self, kind: tuple[int, int], where: str) -> ExpertRows:
        """The chunks of all its tokens; zeros for a last token that has none."""
        missing = self.length - self.rows
        if missing > 1:
            raise RolloutRefused(
                "routing",
                f"{where}: a sample of {self.length} tokens has routed experts for its first {self.rows} only, at least {self.length - 1} are needed; "
                "the engine cut them short or left a turn out. Let it return them for every turn, or for none",
            )
        rest = [np.zeros((missing, *kind), np.uint8)] if missing or not self.chunks else []
        return ExpertRows(chunks=(*self.chunks, *rest))


def interleave_rollout(rollout: Rollout, *, advantage: float = 0.0) -> list[TrainingSample]:
    """The samples of a rollout, in the order of their first turns. RolloutRefused if its experts do not fit its tokens."""
    where = f"rollout of example {rollout.example_id!r} in {rollout.env_name}"
    kinds = {s.tokens.routed_experts.shape[1:] for s in rollout.trajectory if s.tokens and s.tokens.routed_experts}
    if len(kinds) > 1:
        raise RolloutRefused(
            "routing", f"{where}: turns have routed experts of different layers and experts a token: {sorted(kinds)}"
        )
    growing: list[_Growing] = []
    for number, step in enumerate(rollout.trajectory):
        tokens = step.tokens
        if tokens is None:
            raise RolloutRefused("no_tokens", f"{where}: turn {number} has no tokens; pretokenize the rollout first")
        best: _Growing | None = None
        for sample in growing:
            if (best is None or sample.length > best.length) and sample.is_start_of(tokens.prompt_ids):
                best = sample
        if best is None:
            best = _Growing(split_at=common_prefix(growing[-1].ids, tokens.prompt_ids) if growing else None)
            growing.append(best)
        best.add(tokens, number, where)
    kind = next(iter(kinds), None)
    return [_finished(g, rollout, advantage, None if kind is None else g.experts(kind, where)) for g in growing]


def _finished(sample: _Growing, rollout: Rollout, advantage: float, experts: ExpertRows | None) -> TrainingSample:
    first = sample.turns[0]
    n, learnt = sample.length, rollout.error is None
    mask, logprobs = np.zeros(n, np.uint8), np.zeros(n, np.float32)
    if learnt:
        mask[: len(first.prompt_ids)] = first.prompt_mask
    for turn in sample.turns:
        said = slice(len(turn.prompt_ids), turn.length)
        logprobs[said] = turn.completion_logprobs
        if learnt:
            mask[said] = turn.completion_mask
    columns: dict[str, np.ndarray] = {}
    for name in {name for turn in sample.turns for name in turn.columns}:
        unset = {"advantages": np.full(n, np.nan, np.float32), "loss_weights": np.ones(n, np.float32)}
        columns[name] = unset.get(name, logprobs.copy())  # a reference that is not given is the policy itself
        for turn in sample.turns:
            if name in turn.columns:
                columns[name][len(turn.prompt_ids) : turn.length] = turn.columns[name]
    multimodal = next((t.multimodal for t in reversed(sample.turns) if t.multimodal), None)
    return TrainingSample(
        env_name=rollout.env_name, example_id=rollout.example_id, draw=rollout.draw, ids=sample.ids, mask=mask, logprobs=logprobs,
        prompt_length=len(first.prompt_ids), reward=rollout.reward, advantage=advantage, temperature=rollout.temperature,
        policy_version=rollout.policy_version, run=rollout.run, mode=rollout.mode, multimodal=multimodal, experts=experts,
        columns=columns, split_at=sample.split_at,
    )  # fmt: skip
