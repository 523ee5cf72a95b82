"""`SpoolLoader`: the batches of a run read from a spool, with the interface of a `Loader`.

    headrace provide run.toml --spool.dir S        TextProvider (spool/providers/lm.py): the run's loader, batch by batch, into files
    headrace run run.toml --spool.dir S            SpoolLoader: the same batches out of the files, for any number of ranks

Steps of `run.skip` are skipped by the reader: the files of a spool do not depend on it. A step in which no rank has anything to learn is
not in the spool; gaps in the numbers of the samples show where those steps were.
"""

from __future__ import annotations

import base64
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from headrace.errors import ConfigError, CursorMismatch, EndOfData
from headrace.loader import LoaderReport, MixChange
from headrace.loader.weight_text import weights_asked_for
from headrace.metrics import Wait, default_meter
from headrace.order import Cursor, Digest
from headrace.runs.config.schema import RunConfig
from headrace.runs.provide import batch_recipe
from headrace.spool import DatasetConsumer, read_meta
from headrace.spool.providers.lm import COUNTS, ORIGIN

_KIND, _VERSION = "spooled-text", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolData:
    """The facts about a dataset that a trainer needs, from the spool's meta. No source is opened."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    vocab_size: int
    seq_len: int
    mix_changes: tuple[MixChange, ...]
    made_of: Mapping[str, str]
    """The fingerprint of the provider's dataset."""
    tokenizer: None = None

    @classmethod
    def open(
        cls, config: RunConfig, base: Path, *, deadline: float, check: Callable[[], None] = lambda: None
    ) -> SpoolData:
        """Wait for the spool's meta, and compare it with the config; ConfigError if the spool holds other batches.

        Args:
            config: The run.
            base: Where a relative `spool.dir` starts.
            deadline: Seconds to wait.
            check: Called while waiting; raises if no provider will write the meta.
        """
        folder = base / config.spool_dir
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
            names=tuple(info["sources"]), weights=tuple(info["weights"]), vocab_size=meta["vocab_size"], seq_len=meta["block_size"], mix_changes=changes,
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


@dataclass(frozen=True, slots=True)
class _RecordedStep:
    """Where the samples of one step came from."""

    trained: int
    """Number of the training step, from 1; 0 if the step was skipped."""
    step: int
    """Steps before it, skipped ones included."""
    samples: np.ndarray
    origin: np.ndarray


def _picks(steps: Sequence[_RecordedStep]) -> str:
    """The source of every sample of the steps, as in flight.jsonl."""
    return base64.b64encode(np.concatenate([f.origin[:, 0] for f in steps]).astype("<i2").tobytes()).decode()


class SpoolLoader:
    """Reads a spool with the interface of a `Loader`: batches, digest, state, report."""

    def __init__(
        self, config: RunConfig, data: SpoolData, base: Path, *, rank: int, world_size: int, device: Any = None,
        check: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            config: The run.
            data: The spool's facts.
            base: Where a relative `spool.dir` starts.
            rank: Rank of this process.
            world_size: Number of ranks.
            device: CUDA device that batches are copied to; None for CPU memory.
            check: Called about once a second while there is no batch; raises if there will be none.
        """
        self.data, self.rank, self.world_size = data, rank, world_size
        self.meter = default_meter()
        self._device, self._deadline, self._check = device, config.run.deadline, check
        self.consumer = DatasetConsumer(
            base / config.spool_dir, "cpu" if device is None else "cuda", ack="commit", dp_rank=rank, dp_world_size=world_size,
            deadline=config.run.deadline, meter=self.meter,
        )  # fmt: skip
        self._kept: deque[dict[str, Any]] = deque(maxlen=config.run.keep_checkpoints)
        self._size = config.loader.global_batch_size
        self._sizes = {
            name: int(data.made_of.get(f"config:{name}", 1)) for name in ("lanes", "window_blocks", "shuffle_chunks")
        }
        self._skip = tuple((a - 1, b - 1) for a, b in config.run.skips)
        self._flight: list[_RecordedStep] = []
        self._skipped: list[list[int]] = []
        """Ranges of steps, counted from 0, as in the state."""
        self.step = self.empty_steps = 0
        self.ended = False
        self._digest, self._step_digest = Digest(), Digest()
        self._delivered = dict.fromkeys(COUNTS, 0)
        self._source_tokens = [0] * len(data.names)
        self._drained: dict[str, int] = {}
        self._started: float | None = None
        self._begun_tokens = 0

    # -------------------------------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.ended:
            raise StopIteration
        if self._started is None:
            self._started, self._begun_tokens = time.perf_counter(), self._delivered["tokens"]
        while True:
            batch = self._next_batch()
            # The spool holds delivered steps only; the number of a step follows from its samples.
            for _ in range(self.step, int(batch["sample_index"][0]) // self._size):
                self._pass_over(None)
            if not any(a <= self.step < b for a, b in self._skip):
                break
            self._pass_over(batch)
        digests, counts = batch.pop("digest").numpy(), batch.pop("counts").numpy()
        term = sum((int(high) << 64) + int(low) for high, low in digests[digests.any(axis=1)])
        self._step_digest = Digest(term)
        self._digest.add(term)
        totals = counts.sum(axis=0).tolist()
        for name, value in zip(COUNTS, totals, strict=False):
            self._delivered[name] += value
        self._source_tokens = [a + b for a, b in zip(self._source_tokens, totals[len(COUNTS) :], strict=True)]
        self.step += 1
        origin = batch.pop("origin").numpy()
        samples = batch["sample_index"].numpy().copy()
        self._flight.append(_RecordedStep(self.delivered_steps, self.step - 1, samples, origin.copy()))
        return self._as_loader_batch(batch)

    def _next_batch(self) -> dict[str, Any]:
        with Wait("loader.next", meter=self.meter, deadline=self._deadline) as wait:
            try:
                while self._check is not None and not self.consumer.wait_for_data("train", 1.0):
                    if self.consumer.has_ended("train"):
                        break  # get_batch raises EndOfData
                    self._check()
                    wait.check()
                return self.consumer.get_batch("train")
            except EndOfData:
                self.ended = True
                raise StopIteration from None

    def _pass_over(self, batch: Mapping[str, Any] | None) -> None:
        """Count a step that is not delivered: a step of `run.skip`, or, without a batch, one in which no rank had anything to learn."""
        rows = self._size // self.world_size
        samples, origin = np.zeros(0, np.int64), np.full((rows, len(ORIGIN)), -1)
        if batch is not None:
            samples, origin = batch["sample_index"].numpy().copy(), batch["origin"].numpy().copy()
        if any(a <= self.step < b for a, b in self._skip):
            self._delivered["skipped"] += rows
            if self._skipped and self._skipped[-1][1] == self.step:
                self._skipped[-1][1] += 1
            else:
                self._skipped.append([self.step, self.step + 1])
        else:
            self.empty_steps += 1
        self._flight.append(_RecordedStep(0, self.step, samples, origin))
        self.step += 1

    def _as_loader_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with the types of a `Loader` and the borders of the pieces: a piece begins wherever a position is 0."""
        import torch

        made = {name: tensor.to(torch.int64) for name, tensor in batch.items()}
        positions = made["position_ids"].reshape(-1)
        begins = torch.nonzero(positions == 0).reshape(-1)
        borders = torch.cat([begins, torch.tensor([len(positions)])]).to(torch.int32)
        made["cu_seqlens"] = borders
        if self._device is not None:
            made = {name: t.pin_memory().to(self._device, non_blocking=True) for name, t in made.items()}
        made["max_seqlen"] = int(torch.diff(borders).max()) if len(borders) > 1 else 0
        return made

    # ------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        spool = self.consumer.state_dict()
        body = {
            "step": self.step, "ended": self.ended, "skipped": [list(pair) for pair in self._skipped], "digest": str(self._digest), "delivered": dict(self._delivered),
            "source_tokens": list(self._source_tokens), "sources": list(self.data.names), "spool": spool, "data": dict(self.data.made_of),
        }  # fmt: skip
        if self.empty_steps:
            body["empty_steps"] = self.empty_steps
        return Cursor(kind=_KIND, version=_VERSION, fingerprint=spool["fingerprint"], body=body).to_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], *, accept: Collection[str] = (), fixed: Mapping[str, str] | None = None
    ) -> None:
        cursor = Cursor.from_dict(state)
        if cursor.kind == "text":
            raise CursorMismatch(
                "the checkpoint was saved by a run without a spool; resume it with --spool.enabled false"
            )
        cursor.require(
            kind=_KIND, version=_VERSION, fingerprint=self.consumer._fingerprint(), accept=accept, fixed=fixed
        )
        body = cursor.body
        self.consumer.load_state_dict(body["spool"])
        self.step, self.ended = int(body["step"]), bool(body["ended"])
        self.empty_steps = int(body.get("empty_steps", 0))
        self._skipped, self._flight = [list(map(int, pair)) for pair in body["skipped"]], []
        if self.rank == 0:  # what earlier ranks delivered is added up once
            self._digest = Digest(body["digest"])
            self._delivered |= {k: int(v) for k, v in body["delivered"].items()}
            self._source_tokens = [int(t) for t in body["source_tokens"]]
        self._drained = self._totals()
        self._kept.append(dict(state))

    def gather_state(self) -> dict[str, Any]:
        """The states of all ranks as one. Collective where there are several."""
        own = self.state_dict()
        if self.world_size == 1:
            return own
        from headrace.loader.exchange import gather_json

        bodies = [state["body"] for state in gather_json(own)]
        body = own["body"] | {
            "digest": str(Digest(sum(int(b["digest"], 16) for b in bodies))),
            "delivered": {k: sum(b["delivered"][k] for b in bodies) for k in COUNTS},
            "source_tokens": [sum(t) for t in zip(*(b["source_tokens"] for b in bodies), strict=True)],
            "ended": all(b["ended"] for b in bodies),
        }
        return own | {"body": body}

    def saved(self, state: Mapping[str, Any]) -> None:
        """Delete the files that no kept checkpoint needs. Called on rank 0 when a checkpoint with `state` is durable."""
        self._kept.append(dict(state))
        if len(self._kept) == self._kept.maxlen:
            self.consumer.commit(self._kept[0]["body"]["spool"])

    # ---------------------------------------------------------------------------------------- insight

    @property
    def skipped(self) -> list[list[int]]:
        """Ranges [from, to) of skipped steps, counted from 1."""
        return [[a + 1, b + 1] for a, b in self._skipped]

    @property
    def delivered_steps(self) -> int:
        """How many steps were delivered: `step` without skipped and empty ones."""
        return self.step - sum(b - a for a, b in self._skipped) - self.empty_steps

    @property
    def digest(self) -> str:
        return str(self._digest)

    @property
    def step_digest(self) -> str:
        return str(self._step_digest)

    def drain_flight(self) -> dict[str, Any] | None:
        """The record of what was delivered since the last call, as `Loader.drain_flight` makes it; None if nothing was."""
        steps = self._flight
        while steps and not steps[-1].trained:  # skipped, and nothing delivered after them yet
            steps = steps[:-1]
        self._flight = self._flight[len(steps) :]
        if not steps:
            return None
        delivered, skipped = [f for f in steps if f.trained], [f for f in steps if not f.trained]
        opened = [
            [int(g), int(g) % self._sizes["lanes"], int(row[0]), *map(int, row[2:])]
            for f in steps
            for g, row in zip(f.samples, f.origin, strict=False)  # an empty step has no samples here
            if row[1] > 0
        ]
        size = self._size
        line: dict[str, Any] = {
            "first": delivered[0].trained,
            "sources": list(self.data.names),
            **self._sizes,
            "samples": [*(f.step * size for f in delivered), (delivered[-1].step + 1) * size],
            "picks": _picks(delivered),
            "opened": sorted(opened),
        }
        if skipped:
            line["skipped"] = [[f.step * size, (f.step + 1) * size] for f in skipped]
            line["skipped_picks"] = _picks(skipped)
        return line

    def drain_metrics(self) -> dict[str, int | float]:
        totals = self._totals()
        changed: dict[str, int | float] = {k: v - self._drained.get(k, 0) for k, v in totals.items()}
        self._drained = totals
        return changed if any(changed.values()) else {}

    def _totals(self) -> dict[str, int]:
        totals = {f"data/{k}": v for k, v in self._delivered.items()}
        return totals | {
            f"data/source_tokens/{n}": t for n, t in zip(self.data.names, self._source_tokens, strict=True)
        }

    def report(self) -> LoaderReport:
        seconds = time.perf_counter() - self._started if self._started is not None else 0.0
        return LoaderReport.of(
            names=self.data.names, targets=self.data.mean_weights(self.step), source_tokens=self._source_tokens, delivered=self._delivered,
            new_tokens=self._delivered["tokens"] - self._begun_tokens, seconds=seconds, waits=self.meter.totals(), digest=self.digest, steps=self.delivered_steps,
        )  # fmt: skip

    def close(self) -> None:
        self.consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
