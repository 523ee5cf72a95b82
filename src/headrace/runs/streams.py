"""The stream task of `headrace run`: a small model trained on streams of cells.

A step takes one draw (per_stream: every rank takes its share of the rows) or one draw of each lane (device_per_stream: every
rank takes those of its own lanes), so the steps of a run are the same on any number of ranks. A checkpoint also holds the counts of
what was seen and, with a [ledger], which makes the model recurrent, the whole ledger.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ConfigError, CursorMismatch, DataError, HeadraceError
from headrace.files import Container, publish_json, read_json
from headrace.loader.data_stats import DataStatsCollector
from headrace.loader.stream_metrics import drained_metrics, without_counts, without_states
from headrace.metrics import default_meter
from headrace.mix import MixPlan, MixSettings, StreamTable
from headrace.order.keys import mix64_array
from headrace.runs.config.streams import StreamsConfig
from headrace.runs.folder import RunFolder
from headrace.runs.run_loop import Run, RunSummary, StepOutcome, Task, TaskState, Watcher, cpu_group, run_task
from headrace.sources.stream_files import StreamListing, list_streams


@dataclass(slots=True, kw_only=True)
class StreamSummary(RunSummary):
    """Summary of a run that learns from streams of cells."""

    cells: int
    cells_per_second: float
    epoch: int
    mix: dict[str, float]
    """Share of each modality in the values learned from, resumes included."""
    order_digest: str
    """A sum over (draw, stream, row) of every cell delivered: equal for equal orders, on any number of ranks."""
    false_evictions: int | None = None
    """Groups that the ledger forgot while their files were still read, and that came back, resumes included; None without a ledger."""

    @property
    def data_digest(self) -> str:
        return self.order_digest


def list_of(config: StreamsConfig) -> StreamListing:
    """The stream files of a config, and their rows."""
    section = config.streams
    return list_streams(
        section.roots, layout=section.layout, base=Path(config.run.base), allow_symlinks=section.allow_symlinks
    )


def sizes_of(config: StreamsConfig, modalities: Collection[str]) -> dict[str, int]:
    """Rows a batch, by modality. ConfigError names modalities of the config that `modalities` lacks."""
    section = config.streams
    unknown = [m for m in section.batch_sizes if m not in modalities]
    unknown += [m for m in section.targets if m not in modalities and m not in unknown]
    if unknown:
        raise ConfigError(
            f"streams.batch_sizes or streams.targets name {', '.join(unknown)}, and there is no such modality below "
            f"{', '.join(section.roots)}; there are {', '.join(sorted(modalities))}"
        )
    return {m: section.batch_sizes.get(m, section.batch_size) for m in modalities}


def mix_plan(config: StreamsConfig, table: StreamTable) -> MixPlan:
    """The plan of a config at its first step, over the files in `table`."""
    section = config.streams
    settings = MixSettings(
        batch_size=sizes_of(config, table.kinds), slots=section.num_streams_mixed, seed=config.run.seed, queue=section.queue, pick_mode=section.pick_mode,
        batching_mode=section.batching_mode, global_ranks=section.global_ranks, lanes=section.lane_count,
    )  # fmt: skip
    return MixPlan(table, settings)


def open_dataset(config: StreamsConfig, *, listing: StreamListing | None = None, **options: Any) -> Any:
    """The StreamMixingDataset of a config; lists the stream files unless `listing` has them. Options are its own and win over the config. Imports torch."""
    from headrace.loader.streams import StreamMixingDataset

    section = config.streams
    listing = listing if listing is not None else list_of(config)
    modalities = sorted({file.modality for file in listing.files})
    per_lane = section.batching_mode == "device_per_stream"
    settings: dict[str, Any] = section.model_dump(
        include={
            "num_streams_mixed", "layout", "batching_mode", "pick_mode", "queue", "global_ranks", "on_reshard", "group_key", "num_workers", "prefetch_batches",
        }
    )  # fmt: skip
    settings |= {
        "batch_size": sizes_of(config, modalities), "lanes": section.lane_count if per_lane else None, "columns": section.columns or None,
        "seed": config.run.seed, "repeat": True, "deadline": config.run.deadline, "base": Path(config.run.base), "listing": listing,
    }  # fmt: skip
    return StreamMixingDataset(list(section.roots), **(settings | options))


def run_streams(folder: RunFolder, watcher: Watcher, *, accept: Collection[str] = ()) -> StreamSummary:
    """Run or continue the run in `folder` until its last step, or until a signal stops it. Every rank calls this."""
    config = folder.config
    assert isinstance(config, StreamsConfig)
    watcher.waiting("stream files")
    listing = list_of(config)
    return run_task(
        folder, watcher, lambda run: StreamTask(run, config, listing), device=config.train.device, accept=accept
    )


class StreamTask(Task[StreamSummary]):
    """Trains on the draws of a `StreamMixingDataset`."""

    kind = "streams"
    unit = "cells"
    rate_key = "cells_per_second"
    amount_metric = "data/rows"
    wait = "streams.next"
    exposed_waits = ("streams.next",)

    trainer: Any

    def __init__(self, run: Run, config: StreamsConfig, listing: StreamListing) -> None:
        self.run, self.config, self.listing = run, config, listing
        section = config.streams
        self.data = run.resources.enter_context(
            open_dataset(config, listing=listing, records=run.folder.records, meter=default_meter())
        )
        self.trainer = _trainer(config, self.data, run)
        self.stats = DataStatsCollector(self.data.modalities, targets=section.targets or None)
        per_lane = section.batching_mode == "device_per_stream"
        self._draws_per_step = section.lane_count // run.world_size if per_lane else 1
        self._counts_draws = per_lane or run.is_lead
        """Whether this rank's draws are its own: per_stream makes the same draws on every rank."""
        self._batches: Iterator[Mapping[str, Any]] | None = None
        self._taken: list[Mapping[str, Any]] = []
        """Batches of the step just taken."""
        self._snapshot: Mapping[str, Any] = {}
        """Metrics that describe the pool as it is; only the latest goes into a line."""
        self._cells = 0
        self._digest = 0
        """Digest of this rank's own cells; rank 0 adds what the checkpoint had."""
        self._false_evictions = 0
        """False evictions of this rank's own groups; rank 0 adds what the checkpoint had."""

    # ------------------------------------------------------------------------------------------ restore

    def restore(self, container: Container, step: int) -> Mapping[str, Any]:
        run, meta = self.run, container.meta
        saved = run.folder.path / "streams.json"
        saved_listing = read_json(saved, 256 << 20) if saved.is_symlink() or saved.exists() else None
        self.data.load_state_dict(meta["data"], accept=run.accept, saved_listing=saved_listing)
        if self.config.ledger is not None:
            if "ledger" not in meta:
                raise CursorMismatch(
                    "it was saved without a ledger, and now has a [ledger]; take the table out, or start a new run"
                )
            self.trainer.encoder.ledger.load_state_arrays([(container.arrays, meta["ledger"])])
        self.stats.load_state_dict(meta["stats"], rank=run.rank, world_size=run.world_size)
        if run.is_lead:
            self._digest = int(meta["order_digest"], 16)
            self._false_evictions = int(meta.get("false_evictions", 0))
        return {"dropped": self.data.resharded.dropped, "parked": self.data.resharded.parked}

    def begin(self, resumed: Mapping[str, Any] | None) -> None:
        if not self.run.is_lead:
            return
        for line in self.data.resharded.lines() if resumed is not None else ():
            self.run.watcher.notice(line)
        publish_json(self.run.folder.path / "streams.json", self.listing.to_json(), replace=True)

    # --------------------------------------------------------------------------------------------- steps

    def step(self) -> StepOutcome:
        if self._batches is None:
            self._batches = iter(self.data)
        self._taken = [next(self._batches) for _ in range(self._draws_per_step)]
        result = self.trainer.step(self._taken)
        return StepOutcome(loss=result.loss, learned=result.values, grad_norm=result.grad_norm, lr=result.lr)

    def step_metrics(self) -> Mapping[str, Any]:
        cells = self._count_cells()
        drained = drained_metrics(self.data)
        events, self._snapshot = without_states(drained if self._counts_draws else without_counts(drained))
        ledger = self.trainer.extra_metrics()
        self._false_evictions += sum(n for key, n in ledger.items() if key.startswith("ledger/false_evictions/"))
        return {**events, **ledger, "data/rows": cells}

    def interval_metrics(self) -> Mapping[str, Any]:
        return {**self._snapshot, **self.stats.drain()}

    def mix(self, line: Mapping[str, Any]) -> dict[str, float]:
        return {m: float(line.get(f"data/token_share/{m}", 0.0)) for m in self.data.modalities}

    def _count_cells(self) -> int:
        """Count the cells of the step just taken, by modality and into the order's digest; returns their number."""
        cells = 0
        for batch in self._taken:
            stream, row = batch["stream_id"].numpy().view(np.uint64), batch["row"].numpy().view(np.uint64)
            draw = mix64_array(np.full(1, batch["draw"] + 1, dtype=np.uint64))[0]
            terms = mix64_array(mix64_array(stream + np.uint64(1)) + row + draw)
            self._digest = (self._digest + int(terms.sum())) % (1 << 64)
            self.stats.add(batch["modality"], tokens=batch[self.config.streams.feature].numel(), rows=len(row))
            cells += len(row)
        self._cells += cells
        return cells

    # ------------------------------------------------------------------------------- checkpoint, summary

    def _gather_counts(self) -> _Counts:
        """The counts of all ranks. Collective."""
        own = {
            "stats": self.stats.state_dict(), "digest": self._digest, "draws": self.data.delivered, "cells": self._cells,
            "false_evictions": self._false_evictions,
        }  # fmt: skip
        ranks = self.run.gather(own)
        if len({rank["draws"] for rank in ranks}) > 1:
            raise HeadraceError(f"the ranks are at different draws: {[rank['draws'] for rank in ranks]}")
        return _Counts(
            stats=[rank["stats"] for rank in ranks],
            digest=f"{sum(rank['digest'] for rank in ranks) % (1 << 64):016x}",
            cells=sum(rank["cells"] for rank in ranks),
            false_evictions=sum(rank["false_evictions"] for rank in ranks),
        )

    def state(self) -> TaskState:
        counts = self._gather_counts()
        meta = {"data": self.data.state_dict(), "stats": counts.stats, "order_digest": counts.digest}
        if self.config.ledger is None:
            return TaskState(meta=meta, digest=counts.digest)
        arrays, dtypes, ledger = self.trainer.encoder.ledger.gather_state() or ({}, {}, {})  # on rank 0 only
        meta |= {"ledger": ledger, "false_evictions": counts.false_evictions}
        return TaskState(meta=meta, digest=counts.digest, arrays=arrays, dtypes=dtypes)

    def summarise(self, common: Mapping[str, Any]) -> StreamSummary:
        counts, seconds = self._gather_counts(), common["seconds"]
        seen = {m: sum(rank["tokens_seen"][m] for rank in counts.stats) for m in self.data.modalities}
        total = sum(seen.values()) or 1
        return StreamSummary(
            **common,
            cells=counts.cells,
            cells_per_second=counts.cells / seconds if seconds else 0.0,
            epoch=self.data.epoch,
            mix={m: n / total for m, n in seen.items()},
            order_digest=counts.digest,
            false_evictions=None if self.config.ledger is None else counts.false_evictions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Counts of all ranks."""

    stats: list[dict[str, Any]]
    """State of every rank's `DataStatsCollector`."""
    digest: str
    cells: int
    """Cells delivered by this process and its peers since they started."""
    false_evictions: int


def _trainer(config: StreamsConfig, data: Any, run: Run) -> Any:
    """Trainer of a recurrent model with a [ledger], else of a model that looks at each cell alone."""
    from headrace.train import TrainSettings
    from headrace.train.cells import CellTrainer
    from headrace.train.lm import torch_device

    train = config.train
    settings = TrainSettings(
        **train.model_dump(exclude={"dim", "depth", "mask", "threads"}),
        threads=train.threads or 0,
        steps=config.run.steps,
        seed=config.run.seed,
    )
    given: dict[str, Any] = {
        "widths": _widths(data, config.streams.feature), "dim": train.dim, "depth": train.depth, "feature": config.streams.feature,
        "rank": run.rank, "world_size": run.world_size,
    }  # fmt: skip
    if config.ledger is None:
        return CellTrainer(settings, mask=train.mask, **given)
    from headrace.ledger import Ledger
    from headrace.train.recurrent import RecurrentTrainer

    device = torch_device(train.device if config.ledger.device == "auto" else config.ledger.device)
    ledger = Ledger(
        config.ledger.settings(train.dim, str(device)), group=cpu_group(run.world_size),
        device_group=_device_group(device, run.world_size), deadline=config.run.deadline, meter=default_meter(),
    )  # fmt: skip
    return RecurrentTrainer(settings, ledger=ledger, active=data.active_streams, **given)


def _device_group(device: Any, world_size: int) -> Any:
    """The group that carries rows of states on their device; None: they go through CPU memory."""
    if world_size == 1 or device.type != "cuda":
        return None
    import torch.distributed as dist

    return dist.group.WORLD if dist.get_backend() == "nccl" else None


def _widths(data: Any, feature: str) -> dict[str, int]:
    """How many features the cells of each modality have, from the first file of each that has rows."""
    from headrace.sources.cells import open_cells

    widths: dict[str, int] = {}
    for stream, modality in enumerate(data.table.modalities):
        if modality in widths or not data.table.rows[stream]:
            continue
        path = Path(data.stream_paths[stream])
        with contextlib.closing(open_cells(path, [feature] if path.suffix != ".npy" else None)) as opened:
            found = opened.read(0, 1).get(feature)
        if found is None or found.ndim != 2 or found.dtype.kind not in "fiu":
            shown = "nothing" if found is None else f"{found.dtype} of shape {list(found.shape[1:])} a cell"
            raise DataError(
                f"column {feature!r} of {path} holds {shown}; the reference trainer learns from one list of numbers of a fixed "
                "length. Set streams.feature to such a column."
            )
        widths[modality] = found.shape[1]
    return widths
