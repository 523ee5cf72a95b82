"""One run over streams of cells, from its config to its summary.

    folder ──► ranks ──► dataset, trainer ──► checkpoint? ──► step, step, … ──► checkpoint, summary

A step takes one draw (per_stream: every rank its share of the rows) or one draw of each lane (device_per_stream: every rank
those of its own lanes), so the steps of a run are the same on any number of ranks. A checkpoint holds the model, the optimiser, the
dataset's cursor and the counts of what was seen; of a recurrent model, which a [ledger] makes it, the ledger too. What is said on the way goes to a `Watcher`; this module prints nothing.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from headrace.errors import ConfigError, CursorMismatch, DataError, HeadraceError
from headrace.files import publish_json
from headrace.jobs.folder import RunFolder
from headrace.jobs.running import Progress, RunSummary, Watcher, cpu_group, open_sinks, stop_on_signal, waits_by_name
from headrace.jobs.streams_config import StreamsConfig
from headrace.loader.data_stats import DataStatsCollector
from headrace.loader.exchange import gather_json
from headrace.loader.extra_metrics import drained_metrics
from headrace.loader.stream_metrics import without_counts, without_states
from headrace.metrics import Accumulator, JsonlSink, Mean, Reducer, Sink, default_meter, registered_specs
from headrace.order.keys import mix64_array
from headrace.sources.stream_files import StreamListing, list_streams

__all__ = ["StreamSummary", "list_of", "open_dataset", "run_streams"]

_TAIL = 10


@dataclass(slots=True, kw_only=True)
class StreamSummary(RunSummary):
    """Of a run that learns from streams of cells."""

    cells: int
    cells_per_second: float
    epoch: int
    mix: dict[str, float]
    """Share of each modality in the values learned from, resumes included."""
    order_digest: str
    """A sum over (draw, stream, row) of every cell delivered: equal for equal orders, on any number of ranks."""
    false_evictions: int | None = None
    """Groups that the ledger forgot while their files were still read, and that came back, resumes included; None without a ledger."""


@dataclass(slots=True)
class _Run:
    config: StreamsConfig
    folder: RunFolder
    data: Any
    trainer: Any
    stats: DataStatsCollector
    rank: int
    world_size: int
    watcher: Watcher
    sinks: Sequence[Sink]
    journal: JsonlSink | None
    store: Any
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_TAIL))
    loss_first: float = float("nan")
    digest: int = 0
    """Of this rank's own cells, on top of what the checkpoint had (kept by rank 0)."""
    forgotten: int = 0
    """False evictions of this rank's own groups, on top of what the checkpoint had (kept by rank 0)."""
    cells: int = 0
    started: float = field(default_factory=time.perf_counter)
    exposed: float = 0.0
    saved: int = -1
    asked_to_stop: int = 0


def list_of(config: StreamsConfig, base: Path | None = None) -> StreamListing:
    """The stream files of a config, and their rows."""
    section = config.streams
    return list_streams(section.roots, layout=section.layout, base=base, allow_symlinks=section.allow_symlinks)


def sizes_of(config: StreamsConfig, modalities: Collection[str]) -> dict[str, int]:
    """Rows a batch, by modality."""
    section = config.streams
    unknown = [m for m in section.batch_sizes if m not in modalities]
    unknown += [m for m in section.targets if m not in modalities and m not in unknown]
    if unknown:
        raise ConfigError(
            f"streams.batch_sizes or streams.targets name {', '.join(unknown)}, and there is no such modality below "
            f"{', '.join(section.roots)}; there are {', '.join(sorted(modalities))}"
        )
    return {m: section.batch_sizes.get(m, section.batch_size) for m in modalities}


def open_dataset(
    config: StreamsConfig, base: Path | None = None, *, listing: StreamListing | None = None, **options: Any
) -> Any:
    """The StreamMixingDataset of a config. Brings torch."""
    from headrace.loader.streams import StreamMixingDataset

    section = config.streams
    listing = listing if listing is not None else list_of(config, base)
    modalities = sorted({file.modality for file in listing.files})
    rolls = section.batching_mode == "device_per_stream"
    settings: dict[str, Any] = {
        "batch_size": sizes_of(config, modalities), "num_streams_mixed": section.num_streams_mixed, "layout": section.layout,
        "batching_mode": section.batching_mode, "pick_mode": section.pick_mode, "queue": section.queue, "seed": config.run.seed,
        "global_ranks": section.global_ranks, "lanes": section.lane_count if rolls else None, "repeat": True, "on_reshard": section.on_reshard,
        "columns": section.columns or None, "group_key": section.group_key, "num_workers": section.num_workers,
        "prefetch_batches": section.prefetch_batches, "deadline": config.run.deadline, "base": base, "listing": listing,
    }  # fmt: skip
    return StreamMixingDataset(list(section.roots), **(settings | options))


def run_streams(folder: RunFolder, watcher: Watcher, *, accept: Collection[str] = ()) -> StreamSummary:
    """Run or continue the run in `folder` until its last step, or until it is asked to stop. Every rank calls it."""
    config = folder.config
    if not isinstance(config, StreamsConfig):
        raise ConfigError(f"{folder.path} holds a run of kind {config.kind!r}, expected streams")
    watcher.waiting("stream files")
    listing = list_of(config, folder.base)
    watcher.waiting("torch, ranks")
    from headrace.train import CheckpointStore, init_distributed, shutdown_distributed

    ranks = init_distributed(config.train.device, timeout_seconds=config.run.deadline)
    try:
        with contextlib.ExitStack() as stack:
            data = stack.enter_context(
                open_dataset(config, folder.base, listing=listing, records=folder.records, meter=default_meter())
            )
            trainer = _trainer(config, data, ranks)
            lead = ranks.rank == 0
            run = _Run(
                config=config, folder=folder, data=data, trainer=trainer, stats=DataStatsCollector(data.modalities, targets=config.streams.targets or None),
                rank=ranks.rank, world_size=ranks.world_size, watcher=watcher, sinks=open_sinks(stack, folder) if lead else (),
                journal=stack.enter_context(JsonlSink(folder.path / "journal.jsonl")) if lead else None,
                store=CheckpointStore(folder.make_folder("checkpoints"), config.run.keep_checkpoints, writer=lead, report=watcher.notice),
            )  # fmt: skip
            _restore(run, listing, accept)
            stack.enter_context(stop_on_signal(run))
            return _go(run)
    finally:
        shutdown_distributed()


def _trainer(config: StreamsConfig, data: Any, ranks: Any) -> Any:
    """With a [ledger] a recurrent model, else one that looks at each cell alone."""
    from headrace.train import TrainSettings
    from headrace.train.cells import CellTrainer, device_for

    train = config.train
    settings = TrainSettings(
        steps=config.run.steps, lr=train.lr, min_lr_ratio=train.min_lr_ratio, warmup_steps=train.warmup_steps, weight_decay=train.weight_decay,
        betas=train.betas, grad_clip=train.grad_clip, device=train.device, threads=train.threads or 0, seed=config.run.seed,
    )  # fmt: skip
    given: dict[str, Any] = {
        "widths": _widths(data, config.streams.feature), "dim": train.dim, "depth": train.depth, "feature": config.streams.feature,
        "rank": ranks.rank, "world_size": ranks.world_size,
    }  # fmt: skip
    if config.ledger is None:
        return CellTrainer(settings, mask=train.mask, **given)
    from headrace.ledger import Ledger
    from headrace.train.recurrent import RecurrentTrainer

    device = device_for(train.device if config.ledger.device == "auto" else config.ledger.device)
    ledger = Ledger(
        config.ledger.settings(train.dim, str(device)), group=cpu_group(ranks.world_size),
        device_group=_device_group(device, ranks.world_size), deadline=config.run.deadline, meter=default_meter(),
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
        opened = open_cells(path, [feature] if path.suffix != ".npy" else None)
        try:
            found = opened.read(0, 1).get(feature)
        finally:
            opened.close()
        if found is None or found.ndim != 2 or found.dtype.kind not in "fiu":
            shown = "nothing" if found is None else f"{found.dtype} of shape {list(found.shape[1:])} a cell"
            raise DataError(
                f"column {feature!r} of {path} holds {shown}; the reference trainer learns from one list of numbers of a fixed "
                "length. Set streams.feature to such a column."
            )
        widths[modality] = found.shape[1]
    return widths


# ------------------------------------------------------------------------------------------------ restore


def _restore(run: _Run, listing: StreamListing, accept: Collection[str]) -> None:
    """Go on from the newest checkpoint that verifies; all ranks from the same one."""
    chosen: int | None = None
    if run.rank == 0:
        found = run.store.latest()
        chosen = found[0] if found is not None else None
    if run.world_size > 1:
        chosen = gather_json(chosen)[0]
    kept = run.folder.path / "streams.json"
    if chosen is None:
        if run.rank == 0:
            publish_json(kept, listing.to_json(), replace=True)
        _note(run, "started", step=0)
        return
    container = run.store.open(chosen)
    meta = container.meta
    saved_listing = orjson.loads(kept.read_bytes()) if kept.exists() else None
    try:
        run.data.load_state_dict(meta["data"], accept=accept, saved_listing=saved_listing)
    except CursorMismatch as error:
        raise CursorMismatch(f"cannot resume {run.folder.path} at step {chosen}: {error}", error.differences) from error
    run.trainer.load_state_arrays(container.arrays, container.dtypes, meta["trainer"])
    if run.config.ledger is not None:
        if "ledger" not in meta:
            raise CursorMismatch(
                f"cannot resume {run.folder.path} at step {chosen}: it was saved without a ledger, and now has a [ledger]; take the table out, or "
                "start a new run"
            )
        run.trainer.encoder.ledger.load_state_arrays([(container.arrays, meta["ledger"])])
    run.stats.load_state_dict(meta["stats"], rank=run.rank, world_size=run.world_size)
    if run.trainer.steps_taken != chosen:
        raise HeadraceError(
            f"checkpoint of step {chosen} holds a model of step {run.trainer.steps_taken}; it was put together by hand, use another"
        )
    run.loss_first = float("nan") if meta["loss_first"] is None else meta["loss_first"]
    run.losses.extend(meta["losses"])
    run.digest = int(meta["order_digest"], 16) if run.rank == 0 else 0
    run.forgotten = int(meta.get("false_evictions", 0)) if run.rank == 0 else 0
    run.saved = chosen
    moved = run.data.resharded
    if run.rank == 0:
        run.watcher.notice(f"resuming at step {chosen} of {run.config.run.steps}")
        for line in moved.lines():
            run.watcher.notice(line)
        run.folder.keep_config()
        publish_json(kept, listing.to_json(), replace=True)
    _note(
        run, "resumed", step=chosen, accepted=sorted(accept), config_hash=run.config.hash, dropped=moved.dropped, parked=moved.parked
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------- loop


def _go(run: _Run) -> StreamSummary:
    config = run.config.run
    meter = default_meter()
    last = min(config.steps, config.stop_after or config.steps)
    specs = registered_specs()
    interval, reducer = Accumulator(specs), Reducer(specs, cpu_group(run.world_size), deadline=config.deadline)
    lanes = run.config.streams.lane_count
    rolls = run.config.streams.batching_mode == "device_per_stream"
    draws_a_step = lanes // run.world_size if rolls else 1
    counts_draws = rolls or run.rank == 0
    meter.drain()
    run.started = time.perf_counter()
    state = "completed"
    batches = iter(run.data)
    if run.trainer.steps_taken < last:
        run.watcher.waiting("the first batch")
    first, since = True, time.perf_counter()
    while run.trainer.steps_taken < last:
        with meter.step():
            taken = [next(batches) for _ in range(draws_a_step)]
            result = run.trainer.step(taken)
        if first:
            run.watcher.first_batch(time.perf_counter() - run.started, waits_by_name(meter.totals()))
            first = False
        if result.values:
            run.loss_first = result.loss if math.isnan(run.loss_first) else run.loss_first
            run.losses.append(result.loss)
        cells = _count(run, taken)
        drained = drained_metrics(run.data)
        events, states = without_states(drained if counts_draws else without_counts(drained))
        extra = run.trainer.extra_metrics()
        run.forgotten += sum(n for key, n in extra.items() if key.startswith("ledger/false_evictions/"))
        values: dict[str, Any] = {**meter.drain(), **events, **extra}
        run.exposed += float(values.get("wait/streams.next/seconds", 0.0))
        values |= {
            "train/loss": Mean(result.loss * result.values, result.values),
            "train/grad_norm": result.grad_norm,
            "train/lr": result.lr,
            "train/tokens": result.values if run.rank == 0 else 0,
            "data/rows": cells,
            "run/stop": run.asked_to_stop,
        }
        interval.add(values)
        step = run.trainer.steps_taken
        stop = bool(run.asked_to_stop) and run.world_size == 1
        if step % config.log_every == 0 or step == last or step == 1 or stop:
            # Statistics are of the window and go in whole: what was seen so far must not be added up step by step.
            line = reducer.reduce({**interval.drain(), **states, **run.stats.drain()}, step=step)
            _log(run, step, line, time.perf_counter() - since)
            since = time.perf_counter()
            agreed = int(line["run/stop"])
            run.asked_to_stop = run.asked_to_stop or agreed
            stop = bool(run.asked_to_stop if run.world_size == 1 else agreed)
        if stop:
            state = "stopped"
            break
        if step % config.checkpoint_every == 0 and step < last:
            _save(run)
    if state == "completed" and run.trainer.steps_taken < config.steps:
        state = "stopped"
    _save(run)
    return _finish(run, state)


def _count(run: _Run, taken: Sequence[Mapping[str, Any]]) -> int:
    """Count a step's cells, by modality and into the order's digest; how many there were."""
    cells = 0
    for batch in taken:
        stream, row = batch["stream_id"].numpy().view(np.uint64), batch["row"].numpy().view(np.uint64)
        draw = mix64_array(np.full(1, batch["draw"] + 1, dtype=np.uint64))[0]
        run.digest = (run.digest + int(mix64_array(mix64_array(stream + np.uint64(1)) + row + draw).sum())) % (1 << 64)
        run.stats.add(batch["modality"], tokens=batch[run.config.streams.feature].numel(), rows=len(row))
        cells += len(row)
    run.cells += cells
    return cells


def _log(run: _Run, step: int, line: Mapping[str, Any], seconds: float) -> None:
    if run.rank != 0:
        return
    steps = max(int(line["steps_in_interval"]), 1)
    wait = float(line.get("wait/streams.next/seconds_max", line.get("wait/streams.next/seconds", 0.0)))
    cells = float(line.get("data/rows", 0))
    progress = Progress(
        step=step,
        steps=run.config.run.steps,
        loss=float(line.get("train/loss", "nan")),
        lr=float(line["train/lr"]),
        tokens_per_second=cells / seconds if seconds else 0.0,
        wait_ms=1e3 * wait / steps,
        wait_share=wait / seconds if seconds else 0.0,
        mix={m: float(line.get(f"data/token_share/{m}", 0.0)) for m in run.data.modalities},
        unit="cells",
    )
    record = {
        "step": step,
        "time": time.time(),
        "seconds": seconds,
        "cells_per_second": progress.tokens_per_second,
        **line,
    }
    for sink in run.sinks:
        sink.write(record)
    run.watcher.progress(progress)


def _gathered(run: _Run) -> tuple[list[dict[str, Any]], int, int]:
    """The counts of every rank; the digest and the false evictions of them all. Collective."""
    told = {
        "stats": run.stats.state_dict(), "digest": run.digest, "draws": run.data.delivered, "forgotten": run.forgotten
    }  # fmt: skip
    everyone = gather_json(told) if run.world_size > 1 else [told]
    if len({t["draws"] for t in everyone}) > 1:
        raise HeadraceError(f"the ranks stand at different draws: {[t['draws'] for t in everyone]}")
    digest = sum(t["digest"] for t in everyone) % (1 << 64)
    return [t["stats"] for t in everyone], digest, sum(t["forgotten"] for t in everyone)


def _save(run: _Run) -> None:
    """Model, optimiser, cursor and counts of this step, as one file. Collective."""
    step = run.trainer.steps_taken
    if step == run.saved or step == 0:
        return
    stats, digest, forgotten = _gathered(run)
    ledger = None if run.config.ledger is None else run.trainer.encoder.ledger.gather_state()
    if run.rank == 0:
        arrays, dtypes, meta = run.trainer.state_arrays()
        more: dict[str, Any] = {}
        if ledger is not None:
            arrays, dtypes, more = (
                arrays | ledger[0],
                dtypes | ledger[1],
                {"ledger": ledger[2], "false_evictions": forgotten},
            )
        run.store.save(
            step, arrays, dtypes,
            {
                **more,
                "kind": "streams", "trainer": meta, "data": run.data.state_dict(), "stats": stats, "order_digest": f"{digest:016x}", "digest": f"{digest:016x}",
                "loss_first": None if math.isnan(run.loss_first) else run.loss_first, "losses": list(run.losses), "world_size": run.world_size,
                "model_sha256": run.trainer.model_sha256(), "config_hash": run.config.hash,
            },
        )  # fmt: skip
        _note(run, "saved", step=step, digest=f"{digest:016x}")
    run.saved = step


def _finish(run: _Run, state: str) -> StreamSummary:
    stats, digest, forgotten = _gathered(run)
    seconds = time.perf_counter() - run.started
    seen = {m: sum(s["tokens_seen"][m] for s in stats) for m in run.data.modalities}
    total = sum(seen.values()) or 1
    counts = gather_json(run.cells) if run.world_size > 1 else [run.cells]
    summary = StreamSummary(
        state=state,
        step=run.trainer.steps_taken,
        steps=run.config.run.steps,
        world_size=run.world_size,
        loss_first=run.loss_first,
        loss_last=sum(run.losses) / len(run.losses) if run.losses else float("nan"),
        cells=sum(counts),
        cells_per_second=sum(counts) / seconds if seconds else 0.0,
        seconds=seconds,
        exposed_wait_seconds=run.exposed,
        exposed_wait_share=run.exposed / seconds if seconds else 0.0,
        epoch=run.data.epoch,
        mix={m: n / total for m, n in seen.items()},
        order_digest=f"{digest:016x}",
        model_sha256=run.trainer.model_sha256(),
        config_hash=run.config.hash,
        resume=f"headrace run --resume {run.folder.path}",
        signal=run.asked_to_stop if state == "stopped" else 0,
        false_evictions=None if run.config.ledger is None else forgotten,
    )
    if run.rank == 0:
        _note(run, state, step=summary.step, digest=summary.order_digest)
        run.folder.finish(summary.to_dict())
    return summary


def _note(run: _Run, event: str, **facts: Any) -> None:
    """A fact for the journal."""
    if run.journal is not None:
        run.journal.write({"event": event, "time": time.time(), "world_size": run.world_size, **facts})
