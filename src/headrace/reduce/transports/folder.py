"""Partial Grams through a folder: workers on any machine that sees it, coming and going as they like.

    DIR/gram.json                                what is computed, for whoever joins
    DIR/queue/partials/000000000007.partial      unit 7, as it would cross a wire
    DIR/claims/partials/000000000008             somebody is making this one (for speed only)
    DIR/state/wanted.json                        which units may be made now; or that the pass is over
    DIR/state/commit                             below this both saved generations of the sum are past: files may go
    DIR/state/shards.json                        how the coordinator's shards stood when the pass was begun

A unit is a function of its number, so nobody owns any: a worker takes the first one that is wanted, not there and not claimed. A
claim is a kernel lock that its holder renews; that of a dead process is free at once, that of a stopped one after `lease`
seconds by the clock of whoever looks. Exclusive links decide who was first; who comes second compares, and other bits end the
pass. The coordinator folds in order and parks nothing: what is early lies in the queue. It deletes only what both of its
checkpoints hold, so a coordinator that is killed finds every partial it had not saved.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Self

from headrace.errors import (
    ConfigError,
    DataChanged,
    DataError,
    DeadlineExceeded,
    FileCorrupt,
    HeadraceError,
    StorageError,
)
from headrace.files import publish, read_regular
from headrace.metrics import Wait
from headrace.reduce.orders import PartialMaker, WorkOrder
from headrace.reduce.partial import NodePartial
from headrace.reduce.shards import ShardSpec, require_unwritten, save_stamps, saved_stamps
from headrace.reduce.transports.transport import Answer, Transport
from headrace.runtime.locks import ExclusiveLock, lock_holder
from headrace.runtime.wire_errors import decode_error, encode_error
from headrace.runtime.workers import WorkerProcess
from headrace.spool.channel import Channel
from headrace.spool.folder import SpoolFolder, patiently
from headrace.spool.records import read_sealed, seal

_SPLIT = "partials"
_AHEAD_BYTES, _AHEAD_UNITS = 1 << 30, 256
"""Partials that may lie in the queue ahead of the sum, whichever is fewer: 64 at k = 2048. A worker looks at all of them."""
_KEPT_BYTES = 512 << 20
"""Folded partials after which the sum is saved, whatever the clock says: they go once two generations are past them."""
_MOST_WANTED = 1 << 20
_LEFT = ("queue", "claims", "verdicts", "quarantine", "spans")
"""Folders of a pass."""
_BAD_FILES = 5
"""Times one unit may come damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the coordinator asks of whoever is there."""

    first: int
    end: int
    """The units [first, end) may be made."""
    state: Literal["open", "finished", "failed"] = "open"
    sentence: str = ""
    """Why it failed."""

    def __post_init__(self) -> None:
        if (
            type(self.first) is not int
            or type(self.end) is not int
            or not 0 <= self.first <= self.end <= self.first + _MOST_WANTED
        ):
            raise ValueError(f"units {self.first} to {self.end} cannot be wanted")


class PartialSpool:
    """The folder of one pass."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = SpoolFolder(path)
        self.channel = Channel(self.folder, _SPLIT, suffix=".partial")
        self._order_file, self._wanted_file = path / "gram.json", self.folder.state / "wanted.json"
        self._refusal_file = self.folder.state / "refused.json"
        self._stamps_file = self.folder.state / "shards.json"

    # ------------------------------------------------------------------------------------- coordinator

    def lead(self) -> ExclusiveLock:
        """Be the only coordinator. A folder with something else in it is not touched."""
        try:
            strange = self.path.exists() and not self._order_file.exists() and not self.folder.state.exists()
            if strange and any(self.path.iterdir()):
                raise ConfigError(f"{self.path} is no spool of partials, and not empty: give another --spool")
        except NotADirectoryError:
            raise ConfigError(f"{self.path} is a file, not a folder: give another --spool") from None
        self.folder.prepare()
        self.channel.prepare()
        return self.folder.take_lock(
            "coordinator", "the coordinator of a Gram", "wait for it, stop it first, or give another --spool"
        )

    def begin(
        self, order: WorkOrder, lease: float, *, stamps: Mapping[str, Any] | None = None, anew: bool = False
    ) -> None:
        """Say what is computed. Only for who leads. The partials of another pass, and those of shards that were written since (by their
        `stamps`), are not touched; with `anew` they go."""
        stamps = dict(stamps or {})
        try:
            self._require_same(order, stamps)
        except (ConfigError, DataChanged, FileCorrupt):
            if not anew:
                raise
            self._clear()
        save_stamps(self._stamps_file, stamps)
        publish(self._order_file, seal({"order": order.to_dict(), "lease": lease, "version": 1}), replace=True)
        self._refusal_file.unlink(missing_ok=True)
        self.folder.sweep()

    def _require_same(self, order: WorkOrder, stamps: Mapping[str, Any]) -> None:
        held = self._told()
        if held is not None:
            now = _identity(order.to_dict())
            differing = [name for name, value in _identity(held["order"]).items() if value != now[name]]
            if differing:
                raise ConfigError(
                    f"{self.path} holds the partials of another pass ({', '.join(differing)} differ): finish that one with the command "
                    "it was begun with, give another --spool, or remove the folder"
                )
            require_unwritten(saved_stamps(self._stamps_file), stamps, self.path)

    def _clear(self) -> None:
        """Forget another pass, but not who leads."""
        self._order_file.unlink(missing_ok=True)
        for name in _LEFT:
            shutil.rmtree(self.path / name, ignore_errors=True)
        for path in self.folder.state.iterdir():
            if path.is_file() and path.suffix != ".lock":
                path.unlink(missing_ok=True)
        self.folder.prepare()
        self.channel.prepare()

    def want(self, wanted: Wanted) -> None:
        """Not durable: the next coordinator says it again."""
        publish(self._wanted_file, seal(asdict(wanted)), replace=True, durable=False)

    def commit(self, unit: int) -> None:
        """From now on units below this one are never asked for again. Durable first, then they go."""
        self.folder.write_commit_points({_SPLIT: {"g": unit, "start": [0], "at": [[unit, 0]]}})
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.channel.queue):
                number = name.partition(".")[0]
                if number.isdecimal() and int(number) < unit:
                    self.channel.delete(int(number))

    def remove(self) -> None:
        """Take away what a finished pass leaves, and nothing else."""
        for name in (*_LEFT, "state"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        self._order_file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody keeps other things there
            self.path.rmdir()

    # ----------------------------------------------------------------------------------------- workers

    def _told(self) -> dict[str, Any] | None:
        told = read_sealed(self._order_file)
        if told is not None and (not isinstance(told, dict) or told.get("version") != 1 or "order" not in told):
            raise FileCorrupt(f"{self._order_file} does not describe a pass of version 1: remove the folder")
        return told

    def order(self) -> tuple[WorkOrder, float] | None:
        """What is computed here, and the lease of a claim; None before a coordinator said so."""
        told = self._told()
        try:
            return None if told is None else (WorkOrder.from_dict(told["order"]), float(told["lease"]))
        except (KeyError, TypeError, ValueError) as error:
            raise FileCorrupt(
                f"{self._order_file} does not describe a pass ({error!r}): was it begun by another version?"
            ) from error

    def wanted(self) -> Wanted | None:
        """None while nobody said; a damaged one is not believed and not kept waiting for: it is written again and again."""
        try:
            told = read_sealed(self._wanted_file)
            return None if told is None else Wanted(**told)
        except (FileCorrupt, TypeError, ValueError):
            return None

    def over(self) -> bool:
        """Whether the folder of the pass was taken away."""
        return not self._order_file.exists()

    def coordinator(self) -> str | None:
        """Who holds the pass together now."""
        return lock_holder(self.folder.state / "coordinator.lock")

    def refuse(self, unit: int, error: HeadraceError, who: str) -> None:
        """End the pass with this error. The first one stands."""
        with contextlib.suppress(FileExistsError):
            publish(self._refusal_file, seal(encode_error(error, prefix=f"{who}, unit {unit}: ")))

    def refusal(self) -> Exception | None:
        told = read_sealed(self._refusal_file)
        return None if told is None else decode_error(told)

    def message(self, unit: int, most: int) -> bytes | None:
        """The bytes of a unit, None while it is not there. What is larger than a partial can be is not read."""
        try:
            return read_regular(self.channel.path(unit), most)
        except FileNotFoundError:
            return None
        except FileCorrupt as error:
            raise DataError(str(error)) from error


def _identity(order: dict[str, Any]) -> dict[str, Any]:
    """What two orders must share to be one pass; threads and paths may differ."""
    return {name: order.get(name) for name in ("partition", "pass", "columns", "data")}


def _largest(order: WorkOrder) -> int:
    return 8 * order.partition.entries + (1 << 16) + 64


# --------------------------------------------------------------------------------------------------- worker


def order_in(path: Path, *, patience: float) -> tuple[WorkOrder, float]:
    """What is computed in a folder and the lease of a claim there; waits for somebody to begin."""
    spool = PartialSpool(path)
    with Wait("gram.spool.order", deadline=patience, remedy=f"Nobody has begun a pass in {path}") as wait:
        pause = 0.005
        while (told := spool.order()) is None:
            wait.check()
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
    return told


class SpoolWorker:
    """Makes what is wanted, one unit at a time."""

    def __init__(
        self,
        path: Path,
        *,
        shards: ShardSpec | None = None,
        threads: int | None = None,
        patience: float = 600.0,
        made: Callable[[], object] = lambda: None,
    ) -> None:
        """`shards`: where the same rows lie here; as the order says unless given. Other rows are refused. `patience`: seconds to
        wait for a coordinator, and for a disk that is full. `made` is called after each partial."""
        self.spool = PartialSpool(path)
        self.patience = patience
        self._told_made = made
        order, self._lease = order_in(path, patience=patience)
        order = replace(
            order,
            shards=shards if shards is not None else order.shards,
            threads=threads if threads is not None else order.threads,
            folder=str(path / "spans"),
        )
        self.order = order
        self.made = self.duplicates = 0
        self._who = "a Gram worker"
        self._maker = PartialMaker(order, 0, by_unit=True)
        self._held: ExclusiveLock | None = None
        self._beating = threading.Lock()
        self._closed = threading.Event()
        self._beat = threading.Thread(target=self._renew, name="headrace-gram-claim", daemon=True)
        self._beat.start()

    def close(self) -> None:
        self._closed.set()
        self._beat.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self) -> int:
        """Work until the pass is over; how many partials were made."""
        idle_since, pause = time.monotonic(), 0.002
        while (step := self.step()) != "finished":
            if step == "made":
                idle_since, pause = time.monotonic(), 0.002
                continue
            # Without work a worker waits as long as somebody coordinates; without a coordinator, as long as its patience lasts.
            if time.monotonic() - idle_since > self.patience and self.spool.coordinator() is None:
                raise DeadlineExceeded(
                    f"nobody has coordinated the pass in {self.spool.path} for {self.patience:g} s: start its command again, then join again"
                )
            with Wait("gram.spool.idle", deadline=1.0):
                time.sleep(pause)
            pause = min(1.5 * pause, 0.1)
        return self.made

    def step(self) -> Literal["made", "idle", "finished"]:
        """Make the first unit that is wanted and free."""
        try:
            wanted = self.spool.wanted()
            if wanted is None:
                return "finished" if self.spool.over() else "idle"
            if wanted.state == "finished":
                return "finished"
            if wanted.state == "failed":
                raise DataError(f"the pass in {self.spool.path} failed: {wanted.sentence}")
            for unit in range(wanted.first, wanted.end):
                if self.spool.channel.find(unit) is None and self._take(unit):
                    return "made"
            return "idle"
        except (StorageError, FileNotFoundError):
            if self.spool.over():
                return "finished"
            raise

    def _take(self, unit: int) -> bool:
        channel = self.spool.channel
        claim = channel.claim(unit, self._who, self._lease)
        if claim == "expired":
            # Its holder is stopped, or out of reach. Its lock stays with the file that loses its name here.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(channel.claims / f"{unit:012d}")
            claim = channel.claim(unit, self._who, self._lease)
        if not isinstance(claim, ExclusiveLock):
            return False
        with self._beating:
            self._held = claim
        try:
            if channel.find(unit) is not None or unit < channel.commit_point():
                return False  # somebody finished it in between
            try:
                message = self._maker.make(unit)
            except HeadraceError as error:
                self.spool.refuse(unit, error, f"process {os.getpid()} on {os.uname().nodename}")
                raise
            self._publish(unit, message)
            return True
        finally:
            with self._beating:
                self._held = None
            claim.release(remove=True)

    def _publish(self, unit: int, message: bytes) -> None:
        channel = self.spool.channel
        # Without fsync: what a power cut leaves of it fails its checksum, is set aside and made again.
        how = patiently(
            f"partial {unit}",
            lambda: channel.publish(unit, lambda path: publish(path, message, durable=False)),
            deadline=self.patience,
            hidden=False,
        )
        if how == "published":
            self.made += 1
            self._told_made()
        elif how == "exists":
            self.duplicates += 1
            self._compare(unit, message)

    def _compare(self, unit: int, message: bytes) -> None:
        try:
            there = self.spool.message(unit, _largest(self.order))
            if there is None or there == message:
                return
            NodePartial.from_bytes(there)
        except DataError:
            return  # damaged: the coordinator sets it aside
        error = DataError(
            "two workers came to other bits for the same rows: the rows changed, or memory is failing on one of their machines. Find out which "
            "is right before you trust any sum"
        )
        self.spool.refuse(unit, error, f"process {os.getpid()} on {os.uname().nodename}")
        raise error

    def _renew(self) -> None:
        turn = 0
        while not self._closed.wait(self._lease / 5):
            turn += 1
            with self._beating, contextlib.suppress(OSError):
                if self._held is not None:
                    self._held.renew(f"{self._who}, beat {turn}")


# ------------------------------------------------------------------------------------------------ processes


class LocalWorkers:
    """Worker processes of this machine. They end when this process does."""

    def __init__(
        self,
        path: Path,
        count: int,
        *,
        threads: int,
        shards: ShardSpec | None = None,
        patience: float = 600.0,
        speak: bool = False,
    ) -> None:
        """`speak`: what keeps one of them from opening its rows ends the pass, with its sentence."""
        self._told = {
            "path": str(path.absolute()), "threads": threads, "shards": None if shards is None else shards.to_dict(),
            "patience": patience, "speak": speak,
        }  # fmt: skip
        self._processes: list[WorkerProcess] = []
        self.made = 0
        try:
            for _ in range(count):
                self._processes.append(self._start())
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self._processes]

    def dead(self) -> str | None:
        """How one of them ended that should not have; it is replaced by `replace`."""
        for process in self._processes:
            if process.exit_code() not in (None, 0):
                return f"process {process.pid} {process.how_it_ended()}"
        return None

    def replace(self) -> None:
        """New ones for those that died."""
        for at, process in enumerate(self._processes):
            if process.exit_code() not in (None, 0):
                process.end()
                self._processes[at] = self._start()

    def count(self) -> int:
        """Partials they made so far: each worker sends how many it made since it sent last."""
        for process in self._processes:
            with contextlib.suppress(EOFError, OSError):
                while process.pipe.poll():
                    self.made += int(process.pipe.recv_bytes())
        return self.made

    def finished(self) -> bool:
        return all(process.exit_code() == 0 for process in self._processes)

    def close(self, patience: float = 0.0) -> None:
        """End them; after `patience` seconds, in which they may see by themselves that the pass is over."""
        with Wait("gram.spool.workers", deadline=patience + 60) as wait:
            until = time.monotonic() + patience
            for process in self._processes:
                process.exit_code(max(0.0, until - time.monotonic()))
            self.count()
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.end(wait.remaining())
        self._processes = []

    def _start(self) -> WorkerProcess:
        return WorkerProcess("headrace-gram-spool", _serve, self._told, imports_main=False)


def _serve(pipe: Connection, told: dict[str, Any]) -> None:
    """A worker process's whole life. The end of its pipe is the end of the process that started it."""
    unsent = 0

    def count(made: int = 1) -> None:
        nonlocal unsent
        unsent += made
        if unsent and select.select([], [pipe], [], 0)[1]:  # a parent that does not read holds no worker up
            pipe.send_bytes(str(unsent).encode())
            unsent = 0

    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    path, shards = Path(told["path"]), None if told["shards"] is None else ShardSpec.from_dict(told["shards"])
    worker = None
    try:
        worker = SpoolWorker(path, shards=shards, threads=told["threads"], patience=told["patience"], made=count)
        with worker:
            worker.run()
        count(0)
    except HeadraceError as error:
        if told["speak"] and worker is None:
            PartialSpool(path).refuse(0, error, f"process {os.getpid()}")
            sys.exit(1)
        sys.exit(f"a Gram worker: {error}")


def _end_with_parent(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    os._exit(0)


# ---------------------------------------------------------------------------------------------- coordinator


class FolderTransport(Transport):
    """The coordinator's end of the folder. One logical rank: units are dealt by claims, not by number."""

    def __init__(
        self,
        path: Path,
        order: WorkOrder,
        *,
        workers: int,
        first_unit: int,
        window: int,
        patience: float = 600.0,
        lease: float | None = None,
        notice: Callable[[str], None] = lambda _: None,
        stamps: Mapping[str, Any] | None = None,
        anew: bool = False,
    ) -> None:
        """`workers`: processes to start here; others may join. `first_unit`: the first that the sum still lacks. `stamps`: of the shards, to
        notice what is written to them. `anew`: another pass in the folder goes."""
        if order.partition.n_ranks != 1:
            raise ConfigError(f"the spool engine has one rank, whoever works; the order has {order.partition.n_ranks}")
        self.spool = PartialSpool(path)
        self._notice, self._units, self._largest = notice, order.partition.n_units, _largest(order)
        self._expected = (order.partition.fingerprint, order.provenance, order.partition.span)
        self._ahead = max(min(window * max(workers, 1), _MOST_WANTED), min(_AHEAD_BYTES // self._largest, _AHEAD_UNITS))
        self._next = self._asked = self._saved = first_unit
        self._bad: dict[int, int] = {}
        self._failed = ""
        self._workers: LocalWorkers | None = None
        self._lock = self.spool.lead()
        try:
            lease = min(30.0, patience / 4) if lease is None else lease
            self.spool.begin(order, lease, stamps=stamps, anew=anew)
            if self.spool.channel.commit_point() > first_unit:  # the sum's own checkpoints are lost: all is made again
                self.spool.commit(first_unit)
            self._want()
            self._workers = LocalWorkers(path, workers, threads=order.threads, patience=patience, speak=True)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return self._workers.pids if self._workers is not None else []

    def ask(self, rank: int, ordinal: int) -> None:
        self._asked = max(self._asked, ordinal + 1)

    def answer(self, timeout: float) -> Answer | None:
        until, pause = time.monotonic() + timeout, 0.0005
        while True:
            message = self._checked(self._next) if self._next < self._asked else None
            if message is not None:
                self._next += 1
                self._want()
                return Answer(rank=0, message=message)
            if (error := self.spool.refusal()) is not None:
                self._failed = str(error)
                return Answer(rank=0, error=error)
            assert self._workers is not None
            self._workers.count()
            if (lost := self._workers.dead()) is not None:
                return Answer(rank=0, lost=lost)
            left = until - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(1.5 * pause, 0.02)

    def replace(self, rank: int) -> None:
        assert self._workers is not None
        self._workers.replace()

    def due(self) -> bool:
        """Whether so many folded partials lie here that the sum should be saved."""
        return (self._next - self._saved) * self._largest >= _KEPT_BYTES

    def saved(self, unit: int) -> None:
        """The sum of the units below this one was saved: what the generation before held may go."""
        self.spool.commit(self._saved)
        self._saved = unit

    def awaited(self) -> str:
        """What the sum waits for, and whose work it is."""
        holder = lock_holder(self.spool.channel.claims / f"{self._next:012d}")
        if holder is None:
            return f"nobody is making unit {self._next} of {self.spool.path}. Let a worker join: headrace gram --join {self.spool.path.absolute()}"
        return (
            f"unit {self._next} of {self.spool.path} is claimed by {holder}; is it alive, and can it read its shards?"
        )

    def finish(self) -> None:
        """The result is safe: send everybody home and take the folder away."""
        self.spool.want(Wanted(first=self._units, end=self._units, state="finished"))
        if self._workers is not None:
            self._workers.close(patience=2.0)
            self._workers = None
        self.spool.remove()

    def close(self) -> None:
        if self._failed and not self.spool.over():
            self.spool.want(Wanted(first=self._next, end=self._next, state="failed", sentence=self._failed))
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        self._lock.release()

    def _want(self) -> None:
        self.spool.want(Wanted(first=self._next, end=min(self._units, self._next + self._ahead)))

    def _checked(self, unit: int) -> bytes | None:
        """A unit's message, if it is there and is what it should be; a bad one is set aside and made again."""
        try:
            message = self.spool.message(unit, self._largest)
            if message is None:
                return None
            partial = NodePartial.from_bytes(message, sender=f"the file of unit {unit}")
            if (partial.partition, partial.provenance, partial.chunk) != (
                *self._expected[:2],
                unit * self._expected[2],
            ):
                raise DataError(
                    f"the file of unit {unit} holds chunk {partial.chunk} of another pass, or another chunk"
                )
            return message
        except DataError as error:
            self._bad[unit] = self._bad.get(unit, 0) + 1
            where = self.spool.channel.set_aside(unit, str(error))
            if self._bad[unit] > _BAD_FILES:
                raise DataError(
                    f"{error}, the {self._bad[unit]}th time: look after the disk of {self.spool.path}"
                ) from None
            self._notice(f"{error}. It was set aside as {where} and is made again")
            return None


def dissolve(path: Path, order: WorkOrder) -> None:
    """Take away the folder of a pass whose result is there: its coordinator was killed before it could."""
    spool = PartialSpool(path)
    held = spool.order()
    if held is None or _identity(held[0].to_dict()) != _identity(order.to_dict()):
        return
    lock = spool.lead()
    try:
        spool.want(Wanted(first=order.partition.n_units, end=order.partition.n_units, state="finished"))
        spool.remove()
    finally:
        lock.release()
