"""One run of a language model, from its config to its summary.

    folder ──► ranks ──► dataset, trainer ──► checkpoint? ──► step, step, … ──► checkpoint, summary

Step n is the same step whether it is reached in one go or after any number of kills: a checkpoint holds the model, the
optimiser and the loader's cursor, and all three are saved together. What is said on the way goes to a `Watcher`; this
module prints nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, CursorMismatch, HeadraceError
from headrace.files import Container
from headrace.jobs.flight_record import merge_flights
from headrace.jobs.folder import RunFolder
from headrace.jobs.running import Progress, RunSummary, Watcher, cpu_group, open_sinks, stop_on_signal, waits_by_name
from headrace.jobs.spooled import OwnProvider, SpoolData, SpoolLoader, exposed_seconds
from headrace.jobs.wiring import Job
from headrace.loader import Loader, TextDataset, merge_states
from headrace.loader.exchange import gather_json
from headrace.loader.state import joined_ranges
from headrace.loader.weight_text import read_weights, weights_in_force
from headrace.metrics import (
    Accumulator,
    JsonlSink,
    Mean,
    Reducer,
    Sink,
    default_meter,
    registered_specs,
)
from headrace.order import Digest

__all__ = ["Progress", "Summary", "Watcher", "run_lm"]

_TAIL = 10
"""The loss at the end is the mean over this many steps: one batch alone says little."""


@dataclass(slots=True, kw_only=True)
class Summary(RunSummary):
    """Of a run that learns from text."""

    tokens: int
    tokens_per_second: float
    padding: float
    documents: int
    mix: dict[str, dict[str, float]]
    digest: str
    left_out: dict[str, int] = field(default_factory=dict)
    """Empty documents, bad rows and bad shards, of all ranks, since this process began or resumed the run."""


@dataclass(slots=True)
class _Run:
    """Everything that is open while a run goes on."""

    job: Job
    folder: RunFolder
    loader: Loader | SpoolLoader
    trainer: Any
    rank: int
    world_size: int
    watcher: Watcher
    sinks: Sequence[Sink]
    journal: JsonlSink | None
    store: Any
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_TAIL))
    loss_first: float = float("nan")
    step_digests: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    started_tokens: int = 0
    exposed: float = 0.0
    saved: tuple[int, bool] = (-1, False)
    """Step of the newest checkpoint, and whether the data had ended."""
    asked_to_stop: int = 0
    """The signal that asked, if one did."""
    noted_step: int = 0
    """Data steps up to this one have had their changes journalled."""
    noted_holes: set[tuple[str, str, int]] = field(default_factory=set)
    """Those that this rank has told of."""
    journalled_holes: set[tuple[str, str, int]] = field(default_factory=set)
    """Those in the journal, of earlier processes too; rank 0 only."""


def run_lm(folder: RunFolder, watcher: Watcher, *, accept: Collection[str] = (), full_check: bool = False) -> Summary:
    """Run or continue the run in `folder` until its last step, or until it is asked to stop. Every rank calls it."""
    config = folder.text_config
    job = Job(config, folder.base)
    # Sources first: most of what can be wrong is wrong there, and torch takes longer to import than they to open.
    if not config.spool.enabled:
        watcher.waiting("sources, tokenizer")
        data = job.dataset(
            records=folder.make_folder("records"), meter=default_meter(), accept=accept, full_check=full_check
        )
        return _run_on(folder, job, data, watcher, accept)
    if config.spool.task != "lm":
        raise ConfigError(
            f'spool.task = "{config.spool.task}" makes batches for a trainer of your own: fill the spool with `headrace provide CONFIG` and read it with '
            'headrace.DatasetConsumer; `headrace run` trains on spool.task = "lm"'
        )
    own = OwnProvider(config, folder.base, folder.path / "provide.log")
    with own if int(os.environ.get("RANK", "0")) == 0 else contextlib.nullcontext():
        watcher.info(own.sentence)
        watcher.waiting("the spool")
        spool = SpoolData.open(config, folder.base, deadline=config.run.deadline, check=own.check)
        return _run_on(folder, job, spool, watcher, accept, check=own.check)


def _run_on(
    folder: RunFolder,
    job: Job,
    data: TextDataset | SpoolData,
    watcher: Watcher,
    accept: Collection[str],
    check: Callable[[], None] | None = None,
) -> Summary:
    config = job.config
    watcher.waiting("torch, ranks")
    from headrace.train import CheckpointStore, LMTrainer, init_distributed, shutdown_distributed

    ranks = init_distributed(config.train.device, timeout_seconds=config.run.deadline)
    try:
        trainer = LMTrainer(
            job.train_settings(),
            vocab_size=data.vocab_size,
            seq_len=data.seq_len,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        store = CheckpointStore(
            folder.make_folder("checkpoints"),
            config.run.keep_checkpoints,
            writer=ranks.rank == 0,
            report=watcher.notice,
        )
        device = trainer.device if trainer.device.type == "cuda" else None
        with contextlib.ExitStack() as stack:
            loader = stack.enter_context(
                SpoolLoader(
                    config,
                    data,
                    folder.base,
                    rank=ranks.rank,
                    world_size=ranks.world_size,
                    device=device,
                    check=check,
                    record=True,
                )
                if isinstance(data, SpoolData)
                else job.loader(data, device=device, record=True)
            )
            lead = ranks.rank == 0
            run = _Run(
                job=job, folder=folder, loader=loader, trainer=trainer, rank=ranks.rank, world_size=ranks.world_size,
                watcher=watcher, sinks=open_sinks(stack, folder) if lead else (),
                journal=stack.enter_context(JsonlSink(folder.path / "journal.jsonl")) if lead else None, store=store,
                journalled_holes=_holes_in(folder.path / "journal.jsonl") if lead else set(),
            )  # fmt: skip
            _restore(run, data, accept)
            stack.enter_context(stop_on_signal(run))
            return _go(run)
    finally:
        shutdown_distributed()


# ------------------------------------------------------------------------------------------------ restore


def _restore(run: _Run, data: TextDataset | SpoolData, accept: Collection[str]) -> None:
    """Go on from the newest checkpoint that verifies; all ranks from the same one."""
    chosen: int | None = None
    container: Container | None = None
    if run.rank == 0:
        _say_engine(run, data)
        found = run.store.latest(lambda c: _skips_fit(c.meta, run.folder))
        if found is not None:
            chosen, container = found
        elif run.store.steps():
            raise ConfigError(
                f"run.skip {run.folder.config.run.skip} begins before every checkpoint of {run.folder.path} (they are of steps "
                f"{', '.join(map(str, run.store.steps()))}), so that data is trained on already. Keep more with "
                "run.keep_checkpoints, or start a new run with this run.skip."
            )
    if run.world_size > 1:
        chosen = gather_json(chosen)[0]
    if chosen is None:
        _note(run, "started", step=0)
        return
    container = container if container is not None else run.store.open(chosen)
    meta = container.meta
    try:
        run.loader.load_state_dict(meta["data"], accept=accept, fixed=_fixed_by_model(meta["trainer"], data))
    except CursorMismatch as error:
        raise CursorMismatch(f"cannot resume {run.folder.path} at step {chosen}: {error}", error.differences) from error
    run.trainer.load_state_arrays(container.arrays, container.dtypes, meta["trainer"])
    if run.loader.delivered_steps != chosen or run.trainer.steps_taken != chosen:
        raise HeadraceError(
            f"checkpoint of step {chosen} holds data of step {run.loader.delivered_steps} and a model of step {run.trainer.steps_taken}; "
            "it was put together by hand, use another"
        )
    run.loss_first = float("nan") if meta["loss_first"] is None else meta["loss_first"]
    run.losses.extend(meta["losses"])
    run.saved = (chosen, run.loader.ended)
    if run.rank == 0:
        run.watcher.notice(f"resuming at step {chosen} of {run.folder.config.run.steps}")
        run.folder.keep_config()
    _note(run, "resumed", step=chosen, accepted=sorted(accept), config_hash=run.folder.config.hash)
    if isinstance(data, TextDataset):
        _note_other_weights(run, data, meta["data"])


def _fixed_by_model(saved: Mapping[str, Any], data: TextDataset | SpoolData) -> dict[str, str]:
    """What of the data cannot change at a resume, because the checkpoint's model was made for it, and why."""
    model = saved.get("model", {})
    fixed = {}
    if (seq_len := model.get("seq_len", data.seq_len)) != data.seq_len:
        fixed["config:seq_len"] = f"the model of the checkpoint has {seq_len:,} positions"
    if (ids := model.get("vocab_size", data.vocab_size)) != data.vocab_size:
        fixed["tokenizer"] = f"the model of the checkpoint has {ids:,} ids, this tokenizer {data.vocab_size:,}"
    return fixed


def _note_other_weights(run: _Run, data: TextDataset, saved: Mapping[str, Any]) -> None:
    """Journal weights that were changed at this resume: they hold from the next step on, as those of a mix change do."""
    step = run.loader.step
    before = weights_in_force(read_weights(saved["fingerprint"]["weights"], saved["body"]["sources"]), step)
    now = weights_in_force(read_weights(data.fingerprint(step)["weights"], data.names), step)
    if before != now:
        _note(run, "weights", step=run.trainer.steps_taken + 1, data_step=step + 1, weights=now, weights_before=before)
        run.watcher.info(
            f"from step {run.trainer.steps_taken + 1} on: weights are {_listed(now)}, they were {_listed(before)}"
        )


def _skips_fit(meta: Any, folder: RunFolder) -> bool:
    """Whether a checkpoint lies on the way of a run that passes over these steps: it skipped all of them that lie before it.

    CursorMismatch if it skipped others as well: what was passed over belongs to the order, and is not forgotten.
    """
    body = meta["data"]["body"]
    saved = joined_ranges(body.get("skipped", ()), body["step"])
    wanted = joined_ranges(((a - 1, b - 1) for a, b in folder.config.run.skips), body["step"])
    if not all(any(a <= start and end <= b for a, b in wanted) for start, end in saved):
        was, now = (",".join(f"{a + 1}:{b + 1}" for a, b in ranges) for ranges in (saved, wanted))
        raise CursorMismatch(
            f"cannot resume {folder.path}: it passed over the data of steps {was}, and run.skip is {now or 'empty'} before step "
            f"{body['step'] + 1}. Give --run.skip {was} again, with any further ranges after a comma.",
            {"skip": (was, now)},
        )
    return saved == wanted


def _say_engine(run: _Run, data: TextDataset | SpoolData) -> None:
    """Which encoder is at work, and why no faster one."""
    engine = getattr(data.tokenizer, "engine", None)
    if engine is not None:
        _note(run, "engine", name=engine.name, version=engine.version, passed_over=list(engine.passed_over))
        run.watcher.info(f"tokenizer engine: {engine}")


# --------------------------------------------------------------------------------------------------- loop


def _go(run: _Run) -> Summary:
    config = run.folder.config.run
    meter = default_meter()
    last = min(config.steps, config.stop_after or config.steps)
    specs = registered_specs()
    interval, reducer = Accumulator(specs), Reducer(specs, cpu_group(run.world_size), deadline=config.deadline)
    meter.drain()
    run.started = time.perf_counter()
    run.started_tokens = run.loader.report().tokens
    state = "completed"
    if run.loader.ended:  # iterating would begin another pass, which nobody asked for
        return _finish(run, "data_ended")
    run.noted_step = run.loader.step
    batches = iter(run.loader)
    if run.trainer.steps_taken < last:
        run.watcher.waiting("the first batch")
    first, since = True, time.perf_counter()
    while run.trainer.steps_taken < last:
        with meter.step():
            batch = next(batches, None)
            if batch is not None:
                result = run.trainer.step(batch)
        if batch is None:
            state = "data_ended"
            break
        if first:
            run.watcher.first_batch(time.perf_counter() - run.started, waits_by_name(meter.totals()))
            first = False
        loss, tokens = result.loss, result.tokens
        if tokens:  # a step of fillers teaches nothing and has no loss
            run.loss_first = loss if math.isnan(run.loss_first) else run.loss_first
            run.losses.append(loss)
        run.step_digests.append(run.loader.step_digest)
        _note_changes(run)
        values: dict[str, Any] = {**meter.drain(), **run.loader.drain_metrics()}
        run.exposed += exposed_seconds(values)
        # The loss is the same on every rank; a rank's own share of the tokens is its weight in the mean.
        values |= {
            "train/loss": Mean(loss * tokens, tokens),
            "train/grad_norm": result.grad_norm,
            "train/lr": result.lr,
        }
        values |= {"train/tokens": tokens if run.rank == 0 else 0, "run/stop": run.asked_to_stop}
        interval.add(values)
        step = run.trainer.steps_taken
        stop = bool(run.asked_to_stop) and run.world_size == 1
        if step % config.log_every == 0 or step == last or step == 1 or stop:
            line = reducer.reduce(interval.drain(), step=step)
            _log(run, step, line, time.perf_counter() - since)
            since = time.perf_counter()
            agreed = int(line["run/stop"])
            # A signal may have come since the line was summed up: it must not be forgotten. Several ranks stop by what they agreed.
            run.asked_to_stop = run.asked_to_stop or agreed
            stop = bool(run.asked_to_stop if run.world_size == 1 else agreed)
        if stop:
            state = "stopped"
            break
        if step % config.checkpoint_every == 0 and step < last:
            _save(run)
    if interval.steps:
        _log(
            run,
            run.trainer.steps_taken,
            reducer.reduce(interval.drain(), step=run.trainer.steps_taken),
            time.perf_counter() - since,
        )
    if state == "completed" and run.trainer.steps_taken < config.steps:
        state = "stopped"
    _save(run)
    return _finish(run, state)


def _log(run: _Run, step: int, line: Mapping[str, Any], seconds: float) -> None:
    _write_digests(run)
    if run.rank != 0:
        return
    steps = max(int(line["steps_in_interval"]), 1)
    names = run.loader.data.names
    tokens = [float(line.get(f"data/source_tokens/{n}", 0)) for n in names]
    total = sum(tokens) or 1.0
    wait = float(line.get("wait/loader.next/seconds_max", line.get("wait/loader.next/seconds", 0.0)))
    progress = Progress(
        step=step,
        steps=run.folder.config.run.steps,
        loss=float(line.get("train/loss", "nan")),  # no token to learn in the whole interval
        lr=float(line["train/lr"]),
        tokens_per_second=float(line["data/tokens"]) / seconds if seconds else 0.0,
        wait_ms=1e3 * wait / steps,
        wait_share=wait / seconds if seconds else 0.0,
        mix={n: t / total for n, t in zip(names, tokens, strict=True)},
    )
    record = {
        "step": step,
        "time": time.time(),
        "seconds": seconds,
        "tokens_per_second": progress.tokens_per_second,
        **line,
    }
    for sink in run.sinks:
        sink.write(record)
    run.watcher.progress(progress)


def _write_digests(run: _Run) -> None:
    """The digests of the steps since the last time, summed over ranks, and where their samples came from. Collective.

    A later line for a step wins.
    """
    own, run.step_digests = run.step_digests, []
    if not own:
        return
    everyone = gather_json(own) if run.world_size > 1 else [own]
    if run.rank == 0:
        digests = [str(Digest(sum(int(d, 16) for d in step))) for step in zip(*everyone, strict=True)]
        with JsonlSink(run.folder.path / "digests.jsonl") as sink:
            sink.write({"first": run.trainer.steps_taken - len(digests) + 1, "digests": digests})
    told = {"flight": run.loader.drain_flight(), "holes": _new_holes(run)}
    everyone = gather_json(told) if run.world_size > 1 else [told]
    if run.rank == 0:
        if all(t["flight"] is not None for t in everyone):
            with JsonlSink(run.folder.path / "flight.jsonl") as sink:
                sink.write(merge_flights([t["flight"] for t in everyone]))
        holes = {(h["source"], h["file"], h["row"]): h for t in everyone for h in t["holes"]}
        for place, hole in sorted(
            holes.items()
        ):  # what a hole is follows from the bytes: ranks and re-runs find the same
            if place not in run.journalled_holes:
                _note(run, "hole", **hole)
                run.journalled_holes.add(place)


# ---------------------------------------------------------------------------------------------- checkpoint


def _note_changes(run: _Run) -> None:
    """Journal what changed the order in this step: other weights, steps passed over."""
    step, skipped = run.trainer.steps_taken, run.loader.skipped
    for change in run.loader.data.mix_changes:
        if run.noted_step < change.step <= run.loader.step:
            _note(run, "weights", step=step, data_step=change.step, weights=dict(change.weights))
            run.watcher.info(f"step {step}: weights are now {_listed(change.weights)}")
    for a, b in skipped:
        if b > run.noted_step + 1:
            _note(run, "skipped", step=step, data_steps=[a, b])
            run.watcher.info(f"step {step}: the data of steps {a} to {b - 1} was passed over")
    run.noted_step = run.loader.step


def _new_holes(run: _Run) -> list[dict[str, Any]]:
    """Rows and shards that this rank could not use and passed over (on_bad = "skip"), each once."""
    found = [h for h in run.loader.data.holes() if (h["source"], h["file"], h["row"]) not in run.noted_holes]
    run.noted_holes |= {(h["source"], h["file"], h["row"]) for h in found}
    return found


def _holes_in(journal: Path) -> set[tuple[str, str, int]]:
    """Source, file and row of the holes that a journal tells of."""
    found = set()
    with contextlib.suppress(FileNotFoundError), journal.open("rb") as lines:
        for line in lines:
            if b'"hole"' not in line:
                continue
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that a kill cut short
                event = json.loads(line)
                if event["event"] == "hole":
                    found.add((event["source"], event["file"], event["row"]))
    return found


def _save(run: _Run) -> None:
    """Model, optimiser and cursor of this step, as one file. Collective."""
    step = run.trainer.steps_taken
    _write_digests(run)  # no step of a checkpoint may be missing there
    if (step, run.loader.ended) == run.saved or step == 0:
        return
    state = run.loader.gather_state()
    if run.rank == 0:
        arrays, dtypes, meta = run.trainer.state_arrays()
        run.store.save(
            step, arrays, dtypes,
            {
                "kind": "lm", "trainer": meta, "data": state, "loss_first": None if math.isnan(run.loss_first) else run.loss_first, "losses": list(run.losses),
                "world_size": run.world_size, "digest": state["body"]["digest"], "model_sha256": run.trainer.model_sha256(),
                "config_hash": run.folder.config.hash,
            },
        )  # fmt: skip
        _note(run, "saved", step=step, digest=state["body"]["digest"])
        if isinstance(run.loader, SpoolLoader):
            run.loader.saved(state)
    run.saved = (step, run.loader.ended)


def _left_out(run: _Run) -> dict[str, int]:
    """What all ranks left out. Collective."""
    own = run.loader.report().left_out
    everyone = gather_json(own) if run.world_size > 1 else [own]
    total = {name: sum(counts[name] for counts in everyone) for name in own}
    return total | {name: own[name] for name in ("bad_shards",) if name in own}  # every rank knows of the same


def _finish(run: _Run, state: str) -> Summary:
    merged = run.loader.gather_state() if run.world_size > 1 else run.loader.state_dict()
    body = merge_states([merged])["body"]
    delivered, seconds = body["delivered"], time.perf_counter() - run.started
    tokens = delivered["tokens"]
    positions = tokens + delivered["padding"]
    total = sum(body["source_tokens"]) or 1
    config, folder = run.folder.config, run.folder
    summary = Summary(
        state=state,
        step=run.trainer.steps_taken,
        steps=config.run.steps,
        world_size=run.world_size,
        loss_first=run.loss_first,
        loss_last=sum(run.losses) / len(run.losses) if run.losses else float("nan"),
        tokens=tokens,
        tokens_per_second=(tokens - run.started_tokens) / seconds if seconds else 0.0,
        seconds=seconds,
        exposed_wait_seconds=run.exposed,
        exposed_wait_share=run.exposed / seconds if seconds else 0.0,
        padding=delivered["padding"] / positions if positions else 0.0,
        documents=delivered["rows"],
        mix={
            n: {"realised": t / total, "target": target}
            for t, (n, (_, target)) in zip(body["source_tokens"], run.loader.report().mix.items(), strict=True)
        },
        digest=body["digest"],
        left_out=_left_out(run),
        model_sha256=run.trainer.model_sha256(),
        config_hash=config.hash,
        resume=f"headrace run --resume {folder.path}",
        signal=run.asked_to_stop if state == "stopped" else 0,
    )
    if run.rank == 0:
        _note(run, state, step=summary.step, digest=summary.digest)
        folder.finish(summary.to_dict())
    return summary


# ------------------------------------------------------------------------------------------------- details


def _listed(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {weight:g}" for name, weight in weights.items())


def _note(run: _Run, event: str, **facts: Any) -> None:
    """A fact for the journal."""
    if run.journal is not None:
        run.journal.write({"event": event, "time": time.time(), "world_size": run.world_size, **facts})
