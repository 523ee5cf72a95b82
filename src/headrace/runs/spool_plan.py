"""The batches of a run read from a spool, as a plan of `Loader`.

    headrace provide run.toml --spool.dir S        TextProvider (spool/providers/lm.py): the run's loader, batch by batch, into files
    headrace run run.toml --spool.dir S            SpoolPlan: the same batches out of the files, for any number of ranks

Steps of `run.skip` are skipped by the reader: the files of a spool do not depend on it. A step in which no rank has anything to learn is
not in the spool; gaps in the numbers of the samples show where those steps were.
"""

from __future__ import annotations

import base64
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import ConfigError, CursorMismatch, EndOfData
from headrace.loader import MixChange
from headrace.loader.loader_plan import BatchMaker, Rank, States, TokenPlan
from headrace.loader.state import LoaderState, merge_rank_states
from headrace.loader.weight_text import weights_asked_for
from headrace.metrics import Meter, Wait, default_meter
from headrace.order import Cursor, Digest
from headrace.runs.config.schema import RunConfig
from headrace.runs.provide import batch_recipe
from headrace.settings import LoaderSettings
from headrace.spool import DatasetConsumer, read_meta
from headrace.spool.providers.lm import COUNTS, ORIGIN

_KIND, _VERSION = "spooled-text", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolData:
    """The dataset in a spool, as the provider described it in the spool's meta. No source is opened."""

    folder: Path
    keep_checkpoints: int
    """Checkpoints whose files stay in the spool."""
    check: Callable[[], None]
    """Called while there is no batch; raises if there will be none."""
    names: tuple[str, ...]
    weights: tuple[float, ...]
    vocab_size: int
    seq_len: int
    mix_changes: tuple[MixChange, ...]
    made_of: Mapping[str, str]
    """The fingerprint of the provider's dataset."""
    tokenizer: None = None
    meter: Meter = field(default_factory=default_meter)

    @classmethod
    def open(cls, config: RunConfig, *, deadline: float, check: Callable[[], None] = lambda: None) -> SpoolData:
        """Wait for the spool's meta, and compare it with the config; ConfigError if the spool holds other batches.

        Args:
            config: The run.
            deadline: Seconds to wait.
            check: Called about once a second while there is no meta or no batch; raises if there will be none.
        """
        folder = Path(config.run.base, config.spool_dir)
        remedy = f"Is a provider of {folder} running? Start one with `headrace provide CONFIG --spool.dir {config.spool_dir}`"
        with Wait("spool.meta", deadline=deadline, remedy=f"{remedy}.") as wait:
            while not (folder / "meta.json").exists():
                check()
                wait.check()
                time.sleep(min(0.02, wait.remaining()))
        meta = read_meta(folder)
        if meta.get("recipe") != batch_recipe(config):
            raise ConfigError(
                f"the spool {folder} was made for other batches than this config describes (sources, mix, text, seed, batch or lanes differ). Give "
                "another --spool.dir, or fill it anew with `headrace provide CONFIG --force-regenerate`"
            )
        info = meta["split_info"]["train"]
        changes = tuple(MixChange(c.step, c.weights) for c in config.mix.change)
        return cls(
            folder=folder, keep_checkpoints=config.run.keep_checkpoints, check=check, names=tuple(info["sources"]), weights=tuple(info["weights"]), vocab_size=meta["vocab_size"], seq_len=meta["block_size"], mix_changes=changes,
            made_of={str(k): str(v) for k, v in meta["data"].items()},
        )  # fmt: skip

    def holes(self) -> list[dict[str, Any]]:
        """Always empty: the provider reports rows that could not be used."""
        return []

    def mean_weights(self, steps: int) -> tuple[float, ...]:
        """The mean weight of every source over the first `steps` steps."""
        first = (0, dict(zip(self.names, self.weights, strict=True)))
        changes = [first, *((c.steps_before, c.weights) for c in self.mix_changes)]
        asked = weights_asked_for(changes, 0, max(steps, 1), ())
        return tuple(asked[name] / max(steps, 1) for name in self.names)

    def loader_plan(self, settings: LoaderSettings, rank: Rank) -> SpoolPlan:
        """The plan of a `Loader` over this spool."""
        return SpoolPlan(self, settings, rank)


class _ReadStep(NamedTuple):
    """A step of the run."""

    step: int
    """Steps before it, skipped ones included."""
    batch: dict[str, Any] | None = None
    """This rank's rows; None if they are not in the spool."""


class _RecordedStep(NamedTuple):
    """Where the samples of a step came from."""

    trained: int
    """Number of the training step, from 1; 0 if the step was passed over."""
    step: int
    samples: np.ndarray
    origin: np.ndarray


class SpoolPlan(TokenPlan):
    """Reads a spool. Nothing is made ahead here: the consumer reads files ahead, and its position is part of the state."""

    data: SpoolData

    def __init__(self, data: SpoolData, settings: LoaderSettings, rank: Rank) -> None:
        super().__init__(data, replace(settings, prefetch_batches=0), rank)
        self.consumer = DatasetConsumer(
            data.folder, ack="commit", dp_rank=rank.rank, dp_world_size=rank.world_size, deadline=settings.deadline, meter=data.meter
        )  # fmt: skip
        self.size = settings.global_batch_size or 0
        self.skip = tuple((a - 1, b - 1) for a, b in settings.skip)
        self.state = LoaderState(source_tokens=np.zeros(len(data.names), np.int64))
        sizes = ("lanes", "window_blocks", "shuffle_chunks")
        self._sizes = {name: int(data.made_of.get(f"config:{name}", 1)) for name in sizes}
        self._kept: deque[Mapping[str, Any]] = deque(maxlen=data.keep_checkpoints)
        self._flight: list[_RecordedStep] = []

    # -------------------------------------------------------------------------------------- delivery

    def start(self) -> _SpoolMaker:
        return _SpoolMaker(self)

    def is_skipped(self, step: int) -> bool:
        """Whether the step, counted from 0, is one of `run.skip`."""
        return any(a <= step < b for a, b in self.skip)

    def deliver(self, ready: Sequence[_ReadStep]) -> dict[str, Any]:
        """The batch of the last step; those before it are passed over."""
        *passed, last = ready
        for one in passed:
            self._pass_over(one)
        assert last.batch is not None
        state, batch = self.state, dict(last.batch)
        digests, totals = batch.pop("digest").numpy(), batch.pop("counts").numpy().sum(axis=0)
        term = sum((int(high) << 64) + int(low) for high, low in digests[digests.any(axis=1)])
        state.count(totals[: len(COUNTS)], totals[len(COUNTS) :], term)
        state.step = last.step + 1
        self._note(state.delivered_steps, last)
        del batch["origin"]
        return _as_loader_batch(batch)

    def _pass_over(self, one: _ReadStep) -> None:
        """Count a step that is not delivered: a step of `run.skip`, or one in which no rank had anything to learn."""
        state = self.state
        if not self.is_skipped(one.step):
            state.empty_steps += 1
        else:
            state.pass_over(one.step, self.size // self.rank.world_size)
        state.step = one.step + 1
        self._note(0, one)

    def _note(self, trained: int, one: _ReadStep) -> None:
        samples, origin = np.zeros(0, np.int64), np.full((self.size // self.rank.world_size, len(ORIGIN)), -1)
        if one.batch is not None:
            samples, origin = one.batch["sample_index"].numpy().copy(), one.batch["origin"].numpy().copy()
        self._flight.append(_RecordedStep(trained, one.step, samples, origin))

    def next_pass(self) -> None:
        raise ConfigError("a spool is read once: its files are deleted behind its readers")

    def skip_to_pass(self, number: int) -> None:
        """Has no effect: a spool has one pass."""

    def close(self) -> None:
        self.consumer.close()

    # ------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        spool, state = self.consumer.state_dict(), self.state
        body = {
            "step": state.step, "ended": state.ended, "skipped": [list(pair) for pair in state.skipped], "digest": str(state.digest),
            "delivered": state.delivered, "source_tokens": state.tokens_by_source, "sources": list(self.data.names), "spool": spool,
            "data": dict(self.data.made_of),
        }  # fmt: skip
        if self.rank.world_size > 1:
            body["share"] = [self.rank.rank, self.rank.world_size]
        if state.empty_steps:
            body["empty_steps"] = state.empty_steps
        return Cursor(kind=_KIND, version=_VERSION, fingerprint=spool["fingerprint"], body=body).to_dict()

    def load_state_dict(self, state: States, *, accept: Collection[str], fixed: Mapping[str, str]) -> None:
        saved = state if isinstance(state, Mapping) else self.merge(state)
        cursor = Cursor.from_dict(saved)
        if cursor.kind == "text":
            raise CursorMismatch(
                "the checkpoint was saved by a run without a spool; resume it with --spool.enabled false"
            )
        cursor.require(
            kind=_KIND, version=_VERSION, fingerprint=self.consumer._fingerprint(), accept=accept, fixed=fixed
        )
        body = cursor.body
        self.consumer.load_state_dict(body["spool"])
        self.state = LoaderState(
            step=int(body["step"]), ended=bool(body["ended"]), empty_steps=int(body.get("empty_steps", 0)),
            skipped=[list(map(int, pair)) for pair in body["skipped"]], source_tokens=np.zeros(len(self.data.names), np.int64),
        )  # fmt: skip
        if self.rank.rank == 0:  # what earlier ranks delivered is added up once
            self.state.digest = Digest(body["digest"])
            self.state.counts[:] = [int(body["delivered"][name]) for name in COUNTS]
            self.state.source_tokens[:] = body["source_tokens"]
        self._flight = []
        self._drained = self.totals()
        self._kept.append(dict(saved))

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        same = ("step", "sources", "skipped", "empty_steps", "data")
        return merge_rank_states(states, same=same, combine=lambda bodies: {"ended": all(b["ended"] for b in bodies)})

    def saved(self, state: Mapping[str, Any]) -> None:
        """Delete the files that no kept checkpoint needs. Called on rank 0 when a checkpoint with `state` is durable."""
        self._kept.append(dict(state))
        if len(self._kept) == self._kept.maxlen:
            self.consumer.commit(self._kept[0]["body"]["spool"])

    # ---------------------------------------------------------------------------------------- insight

    def targets(self) -> Sequence[float]:
        return self.data.mean_weights(self.state.step)

    def drain_flight(self) -> dict[str, Any] | None:
        steps, self._flight, size = self._flight, [], self.size
        delivered, passed = [s for s in steps if s.trained], [s for s in steps if not s.trained]
        if not delivered:
            return None
        opened = [
            [int(g), int(g) % self._sizes["lanes"], int(row[0]), *map(int, row[2:])]
            for s in steps
            for g, row in zip(s.samples, s.origin, strict=False)  # an empty step has no samples here
            if row[1] > 0
        ]
        line: dict[str, Any] = {
            "first": delivered[0].trained,
            "sources": list(self.data.names),
            **self._sizes,
            "samples": [*(s.step * size for s in delivered), (delivered[-1].step + 1) * size],
            "picks": _picks(delivered),
            "opened": sorted(opened),
        }
        if passed:
            line["skipped"] = [[s.step * size, (s.step + 1) * size] for s in passed]
            line["skipped_picks"] = _picks(passed)
        return line


class _SpoolMaker(BatchMaker):
    """Reads the steps that follow what was delivered."""

    def __init__(self, plan: SpoolPlan) -> None:
        self._plan, self._step = plan, plan.state.step

    def make_next(self) -> list[_ReadStep] | None:
        """The next step that is delivered, after those that are passed over on the way; None at the end."""
        steps: list[_ReadStep] = []
        while (batch := self._next_batch()) is not None:
            # The spool holds delivered steps only; the number of a step follows from its samples.
            number = int(batch["sample_index"][0]) // self._plan.size
            steps += [*map(_ReadStep, range(self._step, number)), _ReadStep(number, batch)]
            self._step = number + 1
            if not self._plan.is_skipped(number):
                return steps
        return None

    def _next_batch(self) -> dict[str, Any] | None:
        consumer, deadline = self._plan.consumer, self._plan.settings.deadline
        remedy = f"Is a provider of {self._plan.data.folder} running?"
        with Wait("spool.next", meter=self._plan.meter, deadline=deadline, remedy=remedy) as wait:
            while not consumer.wait_for_data("train", 1.0) and not consumer.has_ended("train"):
                self._plan.data.check()
                wait.check()
        try:
            return consumer.get_batch("train")
        except EndOfData:
            return None


def _as_loader_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with the types of a `Loader` and the borders of the pieces: a piece begins wherever a position is 0."""
    import torch

    made = {name: tensor.to(torch.int64) for name, tensor in batch.items()}
    positions = made["position_ids"].reshape(-1)
    begins = torch.nonzero(positions == 0).reshape(-1)
    borders = torch.cat([begins, torch.tensor([len(positions)])]).to(torch.int32)
    made["cu_seqlens"] = borders
    made["max_seqlen"] = int(torch.diff(borders).max()) if len(borders) > 1 else 0
    return made


def _picks(steps: Sequence[_RecordedStep]) -> str:
    """The source of every sample of the steps, as in flight.jsonl."""
    return base64.b64encode(np.concatenate([s.origin[:, 0] for s in steps]).astype("<i2").tobytes()).decode()
