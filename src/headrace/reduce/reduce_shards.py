"""The Gram matrix of rows in shards, by any number of workers. Worker and coordinator may be killed at any moment.

    shards ──► partition ──► engine: processes here │ ranks of torchrun │ Ray actors │ a spool ──► one fold ──► OUT.safetensors

While a pass is under way, OUT.work/ beside the result holds the coordinator's lock, size and time of writing of the shards, and two
generations of the sum so far. The same command continues from there, on any number of workers, and removes the folder when the result is
published. Before that it compares what the sum depends on (the files, the columns, the chunk size); a difference is refused by name. So is
a file that was written since the pass was begun, by its size and time of writing, because a fingerprint covers samples of a large file only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.errors import (
    ConfigError,
    CursorMismatch,
    DataChanged,
    DataError,
    DeadlineExceeded,
    FileCorrupt,
    WorkerDied,
)
from headrace.files import publish_json, sweep_temporaries
from headrace.formats.byte_file import RawFile
from headrace.formats.numpy_arrays import NpyRows
from headrace.metrics import Wait
from headrace.order import fingerprint_json
from headrace.reduce.checkpoints import CheckpointFiles
from headrace.reduce.columns import Columns
from headrace.reduce.coordinator import DEFAULT_WINDOW, CrossNodeCheckpoint, CrossNodeGramReduction
from headrace.reduce.orders import WorkOrder
from headrace.reduce.partition import CrossNodePartition, Provenance, default_chunk_size
from headrace.reduce.result import GramResult
from headrace.reduce.shards import (
    RowShards,
    first_written,
    require_unchanged,
    require_unwritten,
    saved_stamps,
)
from headrace.reduce.transports.transport import Transport, drive
from headrace.runtime.locks import ExclusiveLock
from headrace.runtime.processors import usable_processors
from headrace.runtime.signals import signal_asked

ENGINES = ("local", "torchrun", "ray", "spool")
_RECORD = "shards.json"
"""Size and time of writing of the shards when the pass was begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GramPlan:
    """The options of `headrace gram`."""

    shards: Sequence[str]
    out: Path
    field: str | None = None
    targets: str | None = None
    weights: str | None = None
    rows: str | None = None
    shift: Path | None = None
    """A .npy vector that is subtracted from every row."""
    chunk: int | None = None
    span: int = 1
    workers: int | None = None
    threads: int = 1
    engine: str | None = None
    """local, torchrun, ray or spool; torchrun where its environment is found, spool where one is named, else local."""
    spool: Path | None = None
    """Folder that partials go through, for workers on other machines too; OUT.work/spool unless given."""
    window: int = DEFAULT_WINDOW
    save_every: float = 30.0
    deadline: float = 600.0
    replace: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"--{name} must be between 1 and {most:,}, got {value}"
            for name, value, most in (
                ("chunk", self.chunk, 1 << 40), ("workers", self.workers, 65536), ("threads", self.threads, 1024), ("window", self.window, 1 << 20),
            )
            if value is not None and not 1 <= value <= most and not (name == "workers" and value == 0 and self.spooled)
        ]  # fmt: skip
        if not 0 <= self.save_every < 1e9 or not 0 < self.deadline < 1e9:
            problems.append(f"--save-every and --deadline are seconds, got {self.save_every} and {self.deadline}")
        if self.engine is not None and self.engine not in ENGINES:
            problems.append(f"--engine must be one of {', '.join(ENGINES)}, got {self.engine!r}")
        if self.spool is not None and not self.spooled:
            problems.append(f"--spool is for --engine spool, not for {self.engine}")
        try:
            str(self.out).encode()
        except UnicodeEncodeError:
            problems.append(f"--out must be a name in UTF-8, got {str(self.out)!r}")
        if problems:
            raise ConfigError(problems)

    @property
    def spooled(self) -> bool:
        return self.engine == "spool" or (self.engine is None and self.spool is not None)

    @property
    def work(self) -> Path:
        """What stands beside the result while a pass is under way."""
        return self.out.with_name(self.out.name + ".work")

    @property
    def spool_folder(self) -> Path:
        return self.spool if self.spool is not None else self.work / "spool"


@dataclass(slots=True, kw_only=True)
class GramSummary:
    """How a pass ended."""

    out: str
    state: str
    """reduced, complete (there was nothing to do), stopped, or worker (a rank that only sent)."""
    sha256: str = ""
    n_rows: int = 0
    width: int = 0
    rows: str = ""
    chunk_size: int = 0
    n_chunks: int = 0
    workers: int = 0
    engine: str = ""
    resumed_at: int = 0
    """Chunks that were folded already."""
    folded: int = 0
    """Chunks that are folded now."""
    replaced: int = 0
    seconds: float = 0.0
    signal: int = 0


class GramWatcher(Protocol):
    """Receives progress; the command prints it."""

    def began(self, order: WorkOrder, shards: RowShards, engine: str, workers: int, resumed_at: int) -> None: ...
    def progress(self, reduction: CrossNodeGramReduction) -> None: ...
    def notice(self, sentence: str) -> None: ...


def reduce_shards(plan: GramPlan, watcher: GramWatcher) -> GramSummary:
    """Reduce, or continue a pass that was stopped. Returns early, and cleanly, on SIGINT and SIGTERM."""
    began = time.perf_counter()
    world = os.environ.get("WORLD_SIZE", "1")
    if not world.strip().isdecimal():
        raise ConfigError(f"WORLD_SIZE must be a whole number, got {world!r}: torchrun sets it, unset it without one")
    engine = plan.engine or ("spool" if plan.spooled else "torchrun" if int(world) > 1 else "local")
    with contextlib.ExitStack() as stack:
        group = _join_group(stack, plan.deadline) if engine == "torchrun" else None
        shards = RowShards.open(
            plan.shards, field=plan.field, targets=plan.targets, weights=plan.weights, rows=plan.rows, out=plan.out
        )
        stamps = shards.stamps()  # before anything is read: what is written from now on is noticed
        columns = Columns(
            width=shards.width,
            targets=shards.n_targets,
            weighted=shards.weighted,
            shift=_shift(plan.shift, shards.width),
        )
        chunk = plan.chunk or default_chunk_size(columns.k)
        if group is not None:
            workers = group[1]
        else:  # more workers than there are units would only start and end
            units = -(-shards.n_rows // (chunk * plan.span))
            workers = min(usable_processors() if plan.workers is None else plan.workers, max(units, 1))
        ranks = 1 if engine == "spool" else workers
        data = shards.fingerprint()
        order = WorkOrder(
            partition=CrossNodePartition(
                k=columns.k, n_rows=shards.n_rows, chunk_size=chunk, n_ranks=ranks, span=plan.span
            ),
            provenance=Provenance(
                job=plan.out.name[-200:], data=fingerprint_json([data, columns.fingerprint]), rows=shards.dtype
            ),
            columns=columns,
            shards=shards.spec,
            data=data,
            threads=plan.threads,
        )
        summary = GramSummary(
            out=str(plan.out), state="reduced", n_rows=shards.n_rows, width=shards.width, rows=shards.dtype, chunk_size=chunk,
            n_chunks=order.partition.n_chunks, workers=workers, engine=engine,
        )  # fmt: skip
        if group is not None and group[0] > 0:
            from headrace.reduce.transports.gloo import work_in_group

            work_in_group(order, group[0])
            summary.state = "worker"
        elif _Pass(plan, watcher, stack, shards, stamps, order, summary).run():
            summary.seconds = time.perf_counter() - began
        return summary


@dataclass
class _Pass:
    """The coordinator's part of `reduce_shards`, once it is known what is computed and by which workers."""

    plan: GramPlan
    watcher: GramWatcher
    stack: contextlib.ExitStack
    shards: RowShards
    stamps: Mapping[str, Sequence[int | str]]
    order: WorkOrder
    summary: GramSummary

    def run(self) -> bool:
        """Whether something was left to fold."""
        plan, summary = self.plan, self.summary
        self.stopped = self.stack.enter_context(signal_asked())
        done = self._finished()
        if done is not None:
            self._complete(done)
            return False
        _lock(plan.work, self.stack)
        self.files = CheckpointFiles(plan.work, "coordinator", report=self.watcher.notice)
        self.reduction, fresh = self._begun()
        summary.resumed_at = self.reduction.frontier
        self.watcher.began(self.order, self.shards, summary.engine, summary.workers, summary.resumed_at)
        self.transport = self._transport(fresh)
        self.stack.callback(self.transport.close)
        is_complete = self._fold()
        summary.folded = self.reduction.frontier
        if is_complete:
            self._publish()
        else:
            summary.state, summary.signal = "stopped", self.stopped()
        return True

    @property
    def _about(self) -> dict[str, Any]:
        """What the bits depend on, for the result."""
        pass_ = self.order.provenance
        return self.order.partition.order | {"rows": pass_.rows, "data": pass_.data, "arithmetic": pass_.arithmetic}

    def _finished(self) -> GramResult | None:
        """The result, if it is there already. A result of something else is refused."""
        plan, now = self.plan, self._about
        folder = plan.out.absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder} to write the result to; make it, or give another --out")
        if plan.replace or not plan.out.exists():
            return None
        done = GramResult.load(plan.out)
        differing = [
            f"{name} was {done.about.get(name)}, is {now[name]}" for name in now if done.about.get(name) != now[name]
        ]
        if differing:
            raise ConfigError(
                f"{plan.out} holds the sum of something else ({'; '.join(differing)}): give another --out, or --replace to overwrite it"
            )
        if (path := first_written(done.files, self.stamps)) is not None:
            raise DataChanged(
                f"{path} was written since {plan.out} was summed, so the sum may be of other rows: give --replace to sum again, or another --out"
            )
        return done

    def _begun(self) -> tuple[CrossNodeGramReduction, bool]:
        """The sum of this pass as far as it is folded, and whether the record in OUT.work was missing or of other shards.

        A saved sum of something else, or of shards that were written since, is refused; with --replace it is removed.
        """
        work, record = self.plan.work, self.plan.work / _RECORD
        try:
            then = saved_stamps(record)
            # Where nothing was saved there is nothing to mix: a pass that ended at a bad row begins with the mended one.
            if any(p.name not in ("lock", _RECORD) for p in work.iterdir()):
                require_unwritten(then, self.stamps, work)
            reduction = self._resumed()
        except (DataChanged, CursorMismatch, FileCorrupt):
            if not self.plan.replace:
                raise
            for path in work.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name != "lock":
                    path.unlink()
            then = {}
            reduction = self._resumed()
        fresh = then != self.stamps
        if fresh:
            publish_json(record, self.stamps, replace=True)
        return reduction, fresh

    def _resumed(self) -> CrossNodeGramReduction:
        partition, provenance, window = self.order.partition, self.order.provenance, self.plan.window
        saved = CrossNodeCheckpoint.load(self.files)
        if saved is None:
            return CrossNodeGramReduction(partition, provenance=provenance, window=window)
        then, now = saved.partition.order | {"span": saved.partition.span}, partition.order | {"span": partition.span}
        differences: dict[str, tuple[Any, Any]] = {n: (then[n], now[n]) for n in now if then[n] != now[n]}
        differences |= provenance.differences(saved.provenance)
        if differences:
            listed = "; ".join(f"{name} was {a}, is {b}" for name, (a, b) in differences.items())
            raise CursorMismatch(
                f"{self.files.folder} holds a pass over something else, or one that was cut otherwise ({listed}). Restore that, remove the folder "
                "or give --replace to begin again, or give another --out",
                differences,
            )
        return CrossNodeGramReduction.resume(saved, window=window, n_ranks=partition.n_ranks)

    def _complete(self, done: GramResult) -> None:
        """The result is there already: release the other ranks, and remove what a killed coordinator left."""
        plan, summary = self.plan, self.summary
        if summary.engine == "torchrun":
            from headrace.reduce.transports.gloo import share_received

            partition = self.order.partition
            share_received([partition.owned(rank) for rank in range(partition.n_ranks)])
        summary.state, summary.sha256 = "complete", done.sha256
        summary.resumed_at = summary.folded = self.order.partition.n_chunks
        if plan.work.is_dir():
            _lock(plan.work, self.stack)
            shutil.rmtree(plan.work, ignore_errors=True)
        if plan.spooled:
            from headrace.reduce.transports.folder import remove_finished_pass

            remove_finished_pass(plan.spool_folder, self.order)

    def _transport(self, fresh: bool) -> Transport:
        plan, order, received = self.plan, self.order, self.reduction.received_per_rank
        match self.summary.engine:
            case "torchrun":
                from headrace.reduce.transports.gloo import GroupTransport

                return GroupTransport(order, received)
            case "ray":
                from headrace.reduce.transports.ray import RayTransport

                return RayTransport(order, address=os.environ.get("RAY_ADDRESS"))
            case "spool":
                from headrace.reduce.transports.folder import FolderTransport

                return FolderTransport(
                    plan.spool_folder, order, workers=self.summary.workers, first_unit=received[0], window=plan.window,
                    patience=plan.deadline, notice=self.watcher.notice, fresh=fresh, replace=plan.replace,
                )  # fmt: skip
            case _:
                from headrace.reduce.transports.processes import ProcessTransport

                return ProcessTransport(order)

    def _fold(self) -> bool:
        """Fold until everything is there (True), or until a signal asks to stop (False)."""
        plan = self.plan
        try:
            return drive(
                self.reduction,
                self.transport,
                save=self._save,
                save_every=plan.save_every,
                progress=self.watcher.progress,
                notice=self._replaced,
                stop=lambda: self.stopped() != 0,
                deadline=plan.deadline,
            )
        except (DeadlineExceeded, WorkerDied) as error:
            self._save()
            awaited = self.transport.awaited() if isinstance(error, DeadlineExceeded) else None
            if awaited is None:
                raise
            raise DeadlineExceeded(
                f"nothing came for {plan.deadline:g} s: {awaited}. The same command goes on"
            ) from None

    def _save(self) -> None:
        self.reduction.checkpoint().save(self.files)
        self.transport.saved(self.reduction.received_per_rank[0])

    def _replaced(self, sentence: str) -> None:
        self.summary.replaced += 1
        self.watcher.notice(sentence)

    def _publish(self) -> None:
        require_unwritten(self.stamps, self.shards.stamps(), self.plan.work)
        packed, n_rows = self.reduction.finish(), self.shards.n_rows
        result = GramResult.of(packed, self.order.columns, n_rows, self._about, self.stamps)
        result.save(self.plan.out, replace=self.plan.replace)
        self.summary.sha256 = result.sha256
        self.transport.finish()
        shutil.rmtree(self.plan.work, ignore_errors=True)


@dataclass(slots=True, kw_only=True)
class JoinSummary:
    """What workers that joined a pass did."""

    spool: str
    state: str
    """finished (the pass is over) or stopped."""
    workers: int
    partials: int = 0
    replaced: int = 0
    seconds: float = 0.0
    signal: int = 0


def join_spool(
    spool: Path,
    *,
    shards: Sequence[str] = (),
    workers: int | None = None,
    threads: int | None = None,
    deadline: float = 600.0,
    began: Callable[[WorkOrder, int], None] = lambda _, __: None,
    progress: Callable[[int], None] = lambda _: None,
    notice: Callable[[str], None] = lambda _: None,
) -> JoinSummary:
    """Work for the pass in a folder until it is over.

    Args:
        spool: The folder.
        shards: Where the same files lie on this machine; the paths of the pass unless given.
        workers: Processes to start; one a processor unless given.
        threads: Threads for a chunk in each; as the pass says unless given.
        deadline: Seconds to wait for a coordinator.
        began, progress, notice: Called with the order and the number of workers, with the number of partials made, and with sentences.
    """
    from headrace.reduce.transports.folder import LocalWorkers, wait_for_pass

    start = time.perf_counter()
    if workers is not None and not 1 <= workers <= 65536:
        raise ConfigError(f"--workers must be between 1 and 65,536, got {workers}")
    with signal_asked() as stopped, contextlib.ExitStack() as stack:
        order = wait_for_pass(spool, patience=deadline).order
        spec = order.shards
        # Opened here once, so that an error is printed once and not by every process.
        if shards:
            here = RowShards.open(shards, field=spec.field, targets=spec.targets, weights=spec.weights, rows=spec.rows)
        else:
            here = RowShards.of(spec)
        require_unchanged(here, order.data)
        count = usable_processors() if workers is None else workers
        summary = JoinSummary(spool=str(spool), state="finished", workers=count)
        began(order, count)
        crew = LocalWorkers(spool, count, threads=threads or order.threads, shards=here.spec, patience=deadline)
        stack.callback(crew.close)
        deaths = made = 0
        with Wait("gram.spool.join"):
            while not crew.finished():
                time.sleep(0.05)
                if crew.count() > made:
                    made, deaths = crew.made, 0
                    progress(made)
                if stopped():
                    summary.state, summary.signal = "stopped", stopped()
                    break
                if (lost := crew.replace_dead()) is not None:
                    deaths += 1
                    if deaths > 5:
                        raise WorkerDied(
                            f"workers of {spool} died {deaths} times without making anything, the last one: {lost}"
                        )
                    notice(f"{lost}; a new one takes its place")
                    summary.replaced += 1
        summary.partials = crew.count()
        summary.seconds = time.perf_counter() - start
        return summary


def _join_group(stack: contextlib.ExitStack, deadline: float) -> tuple[int, int]:
    """(rank, size) of this process among the ranks that torchrun started."""
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            "--engine torchrun is for ranks that torchrun started: torchrun --nproc-per-node 2 -m headrace gram SHARDS... "
            "(or leave --engine out for processes of this machine)"
        )
    import torch.distributed as dist

    if not dist.is_initialized():
        # The timeout is what ends a receive from a rank that is stopped; one that is dead is noticed at once.
        dist.init_process_group("gloo", timeout=timedelta(seconds=deadline))
        stack.callback(dist.destroy_process_group)
    return dist.get_rank(), dist.get_world_size()


def _lock(work: Path, stack: contextlib.ExitStack) -> None:
    """Become the only coordinator of this result."""
    try:
        work.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{work} cannot be written: {error.strerror or error}. Give another --out") from error
    in_use, advice = f"{work} is being written by", "wait for it, or stop it first"
    lock = ExclusiveLock.acquire(work / "lock", in_use=in_use, advice=advice, inside=work.parent)
    stack.callback(lock.release)
    sweep_temporaries(work)


def _shift(path: Path | None, width: int) -> np.ndarray | None:
    if path is None:
        return None
    try:
        with RawFile(path, follow=True) as file:
            array = NpyRows(file, ["x"])
            shift = np.asarray(array.read(0, array.rows, ["x"])["x"])
    except DataError as error:
        raise ConfigError(f"--shift {path} cannot be read as .npy: {error}") from error
    if shift.shape != (width,):
        raise ConfigError(f"--shift {path} has shape {shift.shape}; rows have {width} columns")
    return shift
