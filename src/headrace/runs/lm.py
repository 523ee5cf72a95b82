"""The text task of `headrace run`: a language model trained on packed text, read directly or from a spool.

A text run also records the digest and the samples of every step (digests.jsonl, flight.jsonl), and journals
changes of the order of its data: other weights, skipped steps, rows that could not be read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError, CursorMismatch
from headrace.files import Container, read_jsonl
from headrace.loader import TextDataset
from headrace.loader.state import joined_ranges
from headrace.loader.weight_text import read_weights, weights_in_force
from headrace.metrics import JsonlSink, default_meter
from headrace.order import Digest
from headrace.provenance.record import merge_rank_records
from headrace.runs.folder import RunFolder
from headrace.runs.job import Job
from headrace.runs.own_provider import OwnProvider
from headrace.runs.run_loop import Run, RunSummary, StepOutcome, Task, TaskState, Watcher, run_task
from headrace.runs.spool_plan import SpoolData, SpoolPlan

if TYPE_CHECKING:
    from headrace.train import CheckpointStore, LMTrainer


@dataclass(slots=True, kw_only=True)
class Summary(RunSummary):
    """Summary of a run that learns from text."""

    tokens: int
    tokens_per_second: float
    padding: float
    documents: int
    mix: dict[str, dict[str, float]]
    digest: str
    left_out: dict[str, int] = field(default_factory=dict)
    """Empty documents, bad rows and bad shards, of all ranks, since this process began or resumed the run."""

    @property
    def data_digest(self) -> str:
        return self.digest


def run_lm(folder: RunFolder, watcher: Watcher, *, accept: Collection[str] = (), full_check: bool = False) -> Summary:
    """Run or continue the run in `folder` until its last step, or until a signal stops it. Every rank calls this."""
    config = folder.text_config
    job = Job(config)
    # Sources before torch: most errors are there, and torch takes longer to import than they take to open.
    if not config.spool.enabled:
        watcher.waiting("sources, tokenizer")
        data = job.dataset(
            records=folder.make_folder("records"),
            meter=default_meter(),
            accept_changes="data" in accept,
            full_check=full_check,
        )
        return run_task(folder, watcher, lambda run: LMTask(run, job, data), device=config.train.device, accept=accept)
    if config.spool.task != "lm":
        raise ConfigError(
            f'spool.task = "{config.spool.task}" makes batches for a trainer of your own: fill the spool with `headrace provide CONFIG` and read it with '
            'headrace.DatasetConsumer; `headrace run` trains on spool.task = "lm"'
        )
    own = OwnProvider(config, folder.path / "provide.log")
    with own if int(os.environ.get("RANK", "0")) == 0 else contextlib.nullcontext():
        watcher.info(own.sentence)
        watcher.waiting("the spool")
        spool = SpoolData.open(config, deadline=config.run.deadline, check=own.check)
        return run_task(folder, watcher, lambda run: LMTask(run, job, spool), device=config.train.device, accept=accept)


class LMTask(Task[Summary]):
    """Trains on the batches of a text loader or of a spool."""

    kind = "lm"
    unit = "tok"
    rate_key = "tokens_per_second"
    amount_metric = "data/tokens"
    wait = "loader.next"
    exposed_waits = ("loader.next", "spool.empty", "spool.verdict", "spool.remake", "spool.open", "spool.disk")

    trainer: LMTrainer

    def __init__(self, run: Run, job: Job, data: TextDataset | SpoolData) -> None:
        from headrace.train import LMTrainer

        self.run, self.data = run, data
        self.trainer = LMTrainer(
            job.train_settings(), vocab_size=data.vocab_size, seq_len=data.seq_len, rank=run.rank, world_size=run.world_size
        )  # fmt: skip
        device = self.trainer.device if self.trainer.device.type == "cuda" else None
        self.loader = run.resources.enter_context(job.loader(data, device=device, record=True))
        self._step_digests: list[str] = []
        """Digests of the steps that are not recorded yet."""
        self._tokens_before = 0
        self._noted_step = 0
        """Data steps up to this one have had their changes journalled."""
        self._noted_holes: set[tuple[str, str, int]] = set()
        """Holes that this rank has reported to rank 0."""
        journal = read_jsonl(run.folder.path / "journal.jsonl") if run.is_lead else ()
        self._journalled_holes = {_place(event) for event in journal if event.get("event") == "hole"}
        """Holes in the journal, those of earlier processes too; rank 0 only."""
        engine = getattr(data.tokenizer, "engine", None)
        if engine is not None and run.is_lead:
            run.note("engine", name=engine.name, version=engine.version, passed_over=list(engine.passed_over))
            if not engine.is_fallback:  # which `choose_engine` has logged
                run.watcher.info(f"tokenizer engine: {engine}")

    # ------------------------------------------------------------------------------------------ restore

    def select_checkpoint(self, store: CheckpointStore) -> tuple[int, Container] | None:
        found = store.latest(lambda container: _skips_fit(container.meta, self.run.folder))
        if found is None and store.steps():
            raise ConfigError(
                f"run.skip {self.run.folder.config.run.skip} begins before every checkpoint of {self.run.folder.path} (they are of steps "
                f"{', '.join(map(str, store.steps()))}), so that data is trained on already. Keep more with "
                "run.keep_checkpoints, or start a new run with this run.skip."
            )
        return found

    def restore(self, container: Container, step: int) -> Mapping[str, Any]:
        meta = container.meta
        fixed = _fixed_by_model(meta["trainer"], self.data)
        self.loader.load_state_dict(meta["data"], accept=self.run.accept, fixed=fixed)
        return {}

    def begin(self, resumed: Mapping[str, Any] | None) -> None:
        self._tokens_before = self.loader.report().tokens
        self._noted_step = self.loader.step
        if resumed is not None and isinstance(self.data, TextDataset):
            self._note_other_weights(self.data, resumed["data"])

    def _note_other_weights(self, data: TextDataset, saved: Mapping[str, Any]) -> None:
        """Journal weights that were changed at this resume; they hold from the next step on."""
        data_step, step = self.loader.step, self.trainer.steps_taken + 1
        before = weights_in_force(read_weights(saved["fingerprint"]["weights"], saved["body"]["sources"]), data_step)
        now = weights_in_force(read_weights(data.fingerprint(data_step)["weights"], data.names), data_step)
        if before != now:
            self.run.note("weights", step=step, data_step=data_step + 1, weights=now, weights_before=before)
            self.run.watcher.info(f"from step {step} on: weights are {_listed(now)}, they were {_listed(before)}")

    # --------------------------------------------------------------------------------------------- steps

    @property
    def data_ended(self) -> bool:
        return self.loader.ended

    def step(self) -> StepOutcome | None:
        batch = next(self.loader, None)
        if batch is None:
            return None
        result = self.trainer.step(batch)
        return StepOutcome(loss=result.loss, learned=result.tokens, grad_norm=result.grad_norm, lr=result.lr)

    def step_metrics(self) -> Mapping[str, Any]:
        self._step_digests.append(self.loader.step_digest)
        self._note_changes()
        return self.loader.drain_metrics()

    def mix(self, line: Mapping[str, Any]) -> dict[str, float]:
        tokens = {name: float(line.get(f"data/source_tokens/{name}", 0)) for name in self.loader.data.names}
        total = sum(tokens.values()) or 1.0
        return {name: count / total for name, count in tokens.items()}

    def _note_changes(self) -> None:
        """Journal what changed the order of the data in this step: other weights, skipped steps."""
        run, step = self.run, self.trainer.steps_taken
        for change in self.loader.data.mix_changes:
            if self._noted_step < change.step <= self.loader.step:
                run.note("weights", step=step, data_step=change.step, weights=dict(change.weights))
                run.watcher.info(f"step {step}: weights are now {_listed(change.weights)}")
        for a, b in self.loader.skipped:
            if b > self._noted_step + 1:
                run.note("skipped", step=step, data_steps=[a, b])
                run.watcher.info(f"step {step}: the data of steps {a} to {b - 1} was passed over")
        self._noted_step = self.loader.step

    # ------------------------------------------------------------------------------------------- records

    def write_records(self) -> None:
        """Append the steps since the last call to digests.jsonl and flight.jsonl, and new holes to the journal. Collective.

        After a kill steps are recorded again; a later line for a step wins.
        """
        own, self._step_digests = self._step_digests, []
        if not own:
            return
        facts = {"digests": own, "flight": self.loader.drain_flight(), "holes": self._new_holes()}
        everyone = self.run.gather(facts)
        if not self.run.is_lead:
            return
        digests = [
            str(Digest(sum(int(d, 16) for d in step))) for step in zip(*(rank["digests"] for rank in everyone), strict=True)
        ]  # fmt: skip
        with JsonlSink(self.run.folder.path / "digests.jsonl") as sink:
            sink.write({"first": self.trainer.steps_taken - len(digests) + 1, "digests": digests})
        if all(rank["flight"] is not None for rank in everyone):
            with JsonlSink(self.run.folder.path / "flight.jsonl") as sink:
                sink.write(merge_rank_records([rank["flight"] for rank in everyone]))
        # Whether a row is a hole depends on its bytes alone: all ranks and later processes find the same holes.
        holes = {_place(hole): hole for rank in everyone for hole in rank["holes"]}
        for place in sorted(holes.keys() - self._journalled_holes):
            self.run.note("hole", **holes[place])
            self._journalled_holes.add(place)

    def _new_holes(self) -> list[dict[str, Any]]:
        """Rows and shards that this rank could not read and skipped (on_bad = "skip"), each once."""
        found = [hole for hole in self.loader.data.holes() if _place(hole) not in self._noted_holes]
        self._noted_holes.update(map(_place, found))
        return found

    # ------------------------------------------------------------------------------- checkpoint, summary

    def state(self) -> TaskState:
        state = self.loader.gather_state()
        return TaskState(meta={"data": state}, digest=state["body"]["digest"])

    def saved(self, state: TaskState, oldest: int) -> None:
        if isinstance(self.loader.plan, SpoolPlan):
            self.loader.plan.saved(state.meta["data"])

    def summarise(self, common: Mapping[str, Any]) -> Summary:
        body = self.loader.gather_state()["body"]
        delivered, seconds = body["delivered"], common["seconds"]
        tokens, padding = delivered["tokens"], delivered["padding"]
        total = sum(body["source_tokens"]) or 1
        return Summary(
            **common,
            tokens=tokens,
            tokens_per_second=(tokens - self._tokens_before) / seconds if seconds else 0.0,
            padding=padding / (tokens + padding) if tokens + padding else 0.0,
            documents=delivered["rows"],
            mix={
                name: {"realised": count / total, "target": target}
                for count, (name, (_, target)) in zip(body["source_tokens"], self.loader.report().mix.items(), strict=True)
            },
            digest=body["digest"],
            left_out=self._left_out(),
        )  # fmt: skip

    def _left_out(self) -> dict[str, int]:
        """Counts of what all ranks left out. Collective."""
        own = self.loader.report().left_out
        everyone = self.run.gather(own)
        total = {name: sum(counts[name] for counts in everyone) for name in own}
        return total | {name: own[name] for name in ("bad_shards",) if name in own}  # every rank counts the same shards


def _fixed_by_model(saved: Mapping[str, Any], data: TextDataset | SpoolData) -> dict[str, str]:
    """Properties of the data that cannot change at a resume because the checkpoint's model depends on them, with the reason."""
    model = saved.get("model", {})
    fixed = {}
    if (seq_len := model.get("seq_len", data.seq_len)) != data.seq_len:
        fixed["config:seq_len"] = f"the model of the checkpoint has {seq_len:,} positions"
    if (ids := model.get("vocab_size", data.vocab_size)) != data.vocab_size:
        fixed["tokenizer"] = f"the model of the checkpoint has {ids:,} ids, this tokenizer {data.vocab_size:,}"
    return fixed


def _skips_fit(meta: Any, folder: RunFolder) -> bool:
    """Whether a checkpoint skipped every step of `run.skip` before its own step. CursorMismatch if it skipped others as well."""
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


def _place(hole: Mapping[str, Any]) -> tuple[str, str, int]:
    """The identity of a hole: source, file and row."""
    return hole["source"], hole["file"], hole["row"]


def _listed(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
