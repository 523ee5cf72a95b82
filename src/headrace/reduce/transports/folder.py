"""Partial Grams through a folder: worker processes on any machine that sees the folder may join and leave at any time.

    DIR/gram.json                                the work order, for workers that join
    DIR/queue/partials/000000000007.partial      unit 7, in the bytes of `NodePartial`
    DIR/claims/partials/000000000008             lock of the worker that makes unit 8 (saves work, decides nothing)
    DIR/state/wanted.json                        which units may be made now
    DIR/state/refused.json                       the error that ended the pass
    DIR/state/commit                             units below this one are in both saved generations of the sum: their files may go

A unit is a function of its number, so no worker owns one: a worker takes the first unit that is wanted, not there and not claimed. A
claim is a kernel lock: that of a dead process is free at once. A worker that finds nothing unclaimed takes a unit that has been claimed for
`lease` seconds, because its holder may be stopped. An exclusive link decides which of two workers was first; the second one
compares its bytes, and other bits end the pass. The coordinator folds in order and parks nothing: early partials stay in the queue. It
deletes only what both of its checkpoints hold, so a coordinator that is killed finds every partial it had not saved. When the result is
published the folder is removed, which is how workers learn that the pass is over.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from headrace.errors import ConfigError, DataError, DeadlineExceeded, FileCorrupt, HeadraceError, StorageError
from headrace.files import publish, read_regular
from headrace.metrics import Wait
from headrace.reduce.columns import shift_of_hex
from headrace.reduce.orders import PartialMaker, WorkOrder
from headrace.reduce.partial import NodePartial
from headrace.reduce.shards import ShardSpec
from headrace.reduce.transports.transport import Answer, Transport
from headrace.runtime.locks import ExclusiveLock, lock_holder
from headrace.runtime.wire_errors import decode_error, encode_error
from headrace.runtime.workers import WorkerProcess
from headrace.spool.channel import Channel
from headrace.spool.folder import SpoolFolder, patiently, purge_spool
from headrace.spool.records import read_sealed, seal

_SPLIT = "partials"
_AHEAD_BYTES, _AHEAD_UNITS = 1 << 30, 256
"""Partials that may lie in the queue ahead of the sum, whichever is fewer: 64 at k = 2048. A worker looks at all of them."""
_KEPT_BYTES = 512 << 20
"""Folded partials after which the sum is saved, whatever the clock says: they go once two generations are past them."""
_MOST_WANTED = 1 << 20
_BAD_FILES = 5
"""Times one unit may come damaged."""


class Description(msgspec.Struct, kw_only=True):
    """What `gram.json` holds."""

    order: WorkOrder
    lease: float
    """Seconds after which the claim of a stopped worker expires."""
    version: Literal[1]


class PartialSpool:
    """The folder of one pass."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = SpoolFolder(path)
        self.channel = Channel(self.folder, _SPLIT, suffix=".partial")
        self._order_file = path / "gram.json"
        self._wanted_file, self._error_file = self.folder.state / "wanted.json", self.folder.state / "refused.json"

    # ------------------------------------------------------------------------------------- coordinator

    def lock(self) -> ExclusiveLock:
        """Become the only coordinator. A folder that is not empty and no spool is refused, and not touched."""
        try:
            is_spool = not self.path.exists() or self._order_file.exists() or self.folder.state.exists()
            if not is_spool and any(self.path.iterdir()):
                raise ConfigError(f"{self.path} is no spool of partials, and not empty: give another --spool")
        except NotADirectoryError:
            raise ConfigError(f"{self.path} is a file, not a folder: give another --spool") from None
        self.folder.prepare()
        return self.folder.take_lock(
            "coordinator", "the coordinator of a Gram", "wait for it, stop it first, or give another --spool"
        )

    def begin(self, order: WorkOrder, lease: float, *, fresh: bool = False, replace: bool = False) -> None:
        """Write down the order of the pass. The caller holds the lock.

        Partials of the same pass are kept, unless the pass is `fresh`: its coordinator has no record of them. The partials of another pass
        are refused, or removed with `replace`.
        """
        try:
            held = self.description()
            differing = [] if held is None else _differences(held.order, order)
        except FileCorrupt:
            if not replace:
                raise
            differing = ["all of it"]
        if differing and not replace:
            raise ConfigError(
                f"{self.path} holds the partials of another pass ({', '.join(differing)} differ): finish that one with the command "
                "it was begun with, give another --spool, or remove the folder"
            )
        if fresh or differing:
            self._clear()
            self.folder.prepare()
        self.channel.prepare()
        publish(self._order_file, seal({"order": order.to_dict(), "lease": lease, "version": 1}), replace=True)
        self._error_file.unlink(missing_ok=True)
        self.folder.sweep()

    def _clear(self) -> None:
        """Remove everything of a pass but the locks."""
        self._order_file.unlink(missing_ok=True)
        purge_spool(self.path)

    def want(self, first: int, end: int) -> None:
        """Let workers make the units [first, end). Not durable: the next coordinator writes it again."""
        publish(self._wanted_file, seal({"first": first, "end": end}), replace=True, durable=False)

    def commit(self, unit: int) -> None:
        """Units below this one are never asked for again: write that down durably, then delete their files."""
        before = self.channel.commit_point()
        self.folder.write_commit_points({_SPLIT: {"g": unit, "start": [0], "at": [[unit, 0]]}})
        for old in range(before, unit):
            self.channel.delete(old)

    def remove(self) -> None:
        """Remove what a finished pass leaves, and nothing else."""
        self._clear()
        shutil.rmtree(self.folder.state, ignore_errors=True)
        with contextlib.suppress(OSError):  # other files lie in the folder
            self.path.rmdir()

    # ----------------------------------------------------------------------------------------- workers

    def description(self) -> Description | None:
        """What the coordinator wrote down; None before it has begun."""
        held = read_sealed(self._order_file)
        try:
            return None if held is None else msgspec.convert(held, Description, dec_hook=shift_of_hex)
        except ValueError as error:  # of msgspec too
            raise FileCorrupt(
                f"{self._order_file} does not describe a pass of version 1 ({error}): was it begun by another version? Finish it with that, "
                "or remove the folder"
            ) from error

    def wanted(self) -> range:
        """The units that may be made now; none without a file, or with a damaged one, which the coordinator soon overwrites."""
        try:
            found = msgspec.convert(read_sealed(self._wanted_file), dict[str, int])
            first, end = found["first"], found["end"]
        except (FileCorrupt, KeyError, ValueError):
            return range(0)
        return range(first, end) if 0 <= first <= end <= first + _MOST_WANTED else range(0)

    def is_over(self) -> bool:
        """Whether the pass was removed from the folder."""
        return not self._order_file.exists()

    def coordinator(self) -> str | None:
        """The process that coordinates the pass now, as its lock names it."""
        return lock_holder(self.folder.state / "coordinator.lock")

    def refuse(self, unit: int, error: HeadraceError) -> None:
        """End the pass with this error of a worker. The first error stands."""
        worker = f"process {os.getpid()} on {os.uname().nodename}"
        with contextlib.suppress(FileExistsError):
            publish(self._error_file, seal(encode_error(error, prefix=f"{worker}, unit {unit}: ")))

    def error(self) -> Exception | None:
        """The error that ended the pass, if one did."""
        saved = read_sealed(self._error_file)
        return None if saved is None else decode_error(saved)

    def message(self, unit: int, most: int) -> bytes | None:
        """The bytes of a unit; None while it is not there. A file of more than `most` bytes is not read."""
        try:
            return read_regular(self.channel.path(unit), most)
        except FileNotFoundError:
            return None
        except FileCorrupt as error:
            raise DataError(str(error)) from error


def _differences(one: WorkOrder, other: WorkOrder) -> list[str]:
    """What two orders must share to be one pass, and do not; threads and paths may differ."""
    a, b = one.to_dict(), other.to_dict()
    return [name for name in ("partition", "pass", "columns", "data") if a[name] != b[name]]


def _largest(order: WorkOrder) -> int:
    """Bytes that a partial of the pass has at most."""
    return 8 * order.partition.entries + (1 << 16) + 64


def wait_for_pass(path: Path, *, patience: float) -> Description:
    """The description of the pass in a folder. Waits up to `patience` seconds for a coordinator to begin."""
    spool = PartialSpool(path)
    with Wait("gram.spool.order", deadline=patience, remedy=f"No coordinator has begun a pass in {path}") as wait:
        pause = 0.005
        while (found := spool.description()) is None:
            wait.check()
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
    return found


# --------------------------------------------------------------------------------------------------- worker


class SpoolWorker:
    """Makes wanted units, one at a time."""

    def __init__(
        self,
        path: Path,
        *,
        shards: ShardSpec | None = None,
        threads: int | None = None,
        patience: float = 600.0,
        on_made: Callable[[], object] = lambda: None,
    ) -> None:
        """Wait for the order in the folder `path`, and open the rows.

        Args:
            path: The folder of the pass.
            shards: Where the same rows lie on this machine; the paths of the order unless given. Other rows are refused.
            threads: Threads for a chunk; as the order says unless given.
            patience: Seconds to wait for a coordinator, and for a disk that is full.
            on_made: Called after each partial.
        """
        self.spool = PartialSpool(path)
        self.patience = patience
        self.made = 0
        self._on_made = on_made
        found = wait_for_pass(path, patience=patience)
        self._lease, order = found.lease, found.order
        self.order = replace(order, shards=shards or order.shards, threads=threads or order.threads)
        self._maker = PartialMaker(self.order, 0)

    def run(self) -> int:
        """Work until the pass is over; the number of partials made."""
        idle_since, pause = time.monotonic(), 0.002
        while (step := self.step()) != "finished":
            if step == "made":
                idle_since, pause = time.monotonic(), 0.002
                continue
            # Without work a worker waits as long as there is a coordinator; without a coordinator, as long as its patience lasts.
            if time.monotonic() - idle_since > self.patience and self.spool.coordinator() is None:
                raise DeadlineExceeded(
                    f"no process has coordinated the pass in {self.spool.path} for {self.patience:g} s: start its command again, then join again"
                )
            with Wait("gram.spool.idle", deadline=1.0):
                time.sleep(pause)
            pause = min(1.5 * pause, 0.1)
        return self.made

    def step(self) -> Literal["made", "idle", "finished"]:
        """Make the first unit that is wanted and free, or else the first whose claim has expired."""
        channel = self.spool.channel
        try:
            if (error := self.spool.error()) is not None:
                raise DataError(f"the pass in {self.spool.path} failed: {error}")
            expired: list[int] = []
            for unit in self.spool.wanted():
                claim = channel.claim(unit, "a Gram worker", self._lease) if channel.find(unit) is None else None
                if isinstance(claim, ExclusiveLock):
                    try:
                        if self._make(unit):
                            return "made"
                    finally:
                        claim.release(remove=True)
                elif claim == "expired":
                    expired.append(unit)
            if any(map(self._make, expired)):
                return "made"
            return "finished" if self.spool.is_over() else "idle"
        except (StorageError, FileNotFoundError):
            if self.spool.is_over():
                return "finished"
            raise

    def _make(self, unit: int) -> bool:
        """Make and publish a unit; False if another worker finished it in between."""
        channel = self.spool.channel
        if channel.find(unit) is not None or unit < channel.commit_point():
            return False
        try:
            message = self._maker.make(unit)
        except HeadraceError as error:
            self.spool.refuse(unit, error)
            raise
        self._publish(unit, message)
        return True

    def _publish(self, unit: int, message: bytes) -> None:
        def write(path: Path) -> None:
            if self.spool.is_over():
                raise FileNotFoundError(path)
            # Without fsync: what a power cut leaves of it fails its checksum, is set aside and made again.
            publish(path, message, durable=False)

        outcome = patiently(
            f"partial {unit}",
            lambda: self.spool.channel.publish(unit, write),
            deadline=self.patience,
            hidden=False,
        )
        if outcome == "published":
            self.made += 1
            self._on_made()
        elif outcome == "exists":
            self._compare(unit, message)

    def _compare(self, unit: int, message: bytes) -> None:
        """End the pass if the partial that is there is whole and has other bits."""
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
        self.spool.refuse(unit, error)
        raise error


# ------------------------------------------------------------------------------------------------ processes


class LocalWorkers:
    """Worker processes of this machine. They end when this process does."""

    def __init__(
        self, path: Path, count: int, *, threads: int, shards: ShardSpec | None = None, patience: float = 600.0
    ) -> None:
        """Start `count` processes, each a `SpoolWorker` with these arguments."""
        self._arguments = (str(path.absolute()), threads, msgspec.to_builtins(shards), patience)
        self._processes: list[WorkerProcess] = []
        self.made = 0
        """Partials they made, as of the last `count`."""
        try:
            for _ in range(count):
                self._processes.append(self._start())
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def replace_dead(self) -> str | None:
        """Start a process in the place of each that ended and should not have; how one of them ended, None if all are well."""
        lost = None
        for at, process in enumerate(self._processes):
            if process.exit_code() not in (None, 0):
                lost = f"process {process.pid} {process.how_it_ended()}"
                process.end()
                self._processes[at] = self._start()
        return lost

    def count(self) -> int:
        """The number of partials made so far: a worker sends one byte for each."""
        for process in self._processes:
            with contextlib.suppress(EOFError, OSError):
                while process.pipe.poll():
                    self.made += len(process.pipe.recv_bytes())
        return self.made

    def finished(self) -> bool:
        return all(process.exit_code() == 0 for process in self._processes)

    def close(self) -> None:
        """End them. A killed worker loses the unit it was making."""
        self.count()
        with Wait("gram.spool.workers", deadline=60) as wait:
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.end(wait.remaining())
        self._processes = []

    def _start(self) -> WorkerProcess:
        return WorkerProcess("headrace-gram-spool", _serve, *self._arguments, imports_main=False)


def _serve(pipe: Connection, path: str, threads: int, shards: dict[str, Any] | None, patience: float) -> None:
    """The whole life of a worker process. It ends when the process that started it does."""
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    rows = msgspec.convert(shards, ShardSpec | None)
    try:
        count = functools.partial(pipe.send_bytes, b"1")
        SpoolWorker(Path(path), shards=rows, threads=threads, patience=patience, on_made=count).run()
    except HeadraceError as error:
        sys.exit(f"a Gram worker: {error}")


def _end_with_parent(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    os._exit(0)


# ---------------------------------------------------------------------------------------------- coordinator


class FolderTransport(Transport):
    """The coordinator's end of the folder. It has one logical rank, because units are claimed and not dealt by number."""

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
        fresh: bool = False,
        replace: bool = False,
    ) -> None:
        """Lock the folder, begin or continue the pass and start worker processes.

        Args:
            path: The folder.
            order: The pass.
            workers: Processes to start here; others may join.
            first_unit: The first unit that the sum still lacks.
            window: Partials that a worker may be ahead of the sum.
            patience: Seconds for which workers wait for a coordinator.
            lease: Seconds after which the claim of a stopped worker expires; a quarter of `patience` and at most 30 unless given.
            notice: Receives a sentence for each file that was set aside.
            fresh: Use no partial that lies in the folder.
            replace: Remove another pass that lies in the folder, instead of refusing it.
        """
        if order.partition.n_ranks != 1:
            raise ConfigError(f"the spool engine has one rank; the order has {order.partition.n_ranks}")
        self.spool = PartialSpool(path)
        self._order, self._notice, self._largest = order, notice, _largest(order)
        self._ahead = max(min(window * max(workers, 1), _MOST_WANTED), min(_AHEAD_BYTES // self._largest, _AHEAD_UNITS))
        self._next = self._asked = self._saved = first_unit
        self._bad: Counter[int] = Counter()
        """Times that each unit came damaged."""
        self._lock = self.spool.lock()
        try:
            self.spool.begin(order, lease or min(30.0, patience / 4), fresh=fresh, replace=replace)
            if self.spool.channel.commit_point() > first_unit:  # the sum's own checkpoints are lost: all is made again
                self.spool.commit(first_unit)
            self._want()
            self._workers = LocalWorkers(path, workers, threads=order.threads, patience=patience)
        except BaseException:
            self._lock.release()
            raise

    @property
    def pids(self) -> list[int]:
        return self._workers.pids

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
            if (error := self.spool.error()) is not None:
                return Answer(rank=0, error=error)
            self._workers.count()  # empties the pipes
            if (lost := self._workers.replace_dead()) is not None:
                return Answer(rank=0, lost=lost)
            left = until - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(1.5 * pause, 0.02)

    def replace(self, rank: int) -> None:
        """Nothing: `answer` has replaced the process that it reports."""

    def due(self) -> bool:
        """Whether so many folded partials lie here that the sum should be saved."""
        return (self._next - self._saved) * self._largest >= _KEPT_BYTES

    def saved(self, unit: int) -> None:
        """The sum of the units below this one was saved: what the generation before held may go."""
        self.spool.commit(self._saved)
        self._saved = unit

    def awaited(self) -> str:
        """The unit that the sum waits for, and the worker that has claimed it."""
        holder = lock_holder(self.spool.channel.claims / f"{self._next:012d}")
        if holder is None:
            return f"no worker makes unit {self._next} of {self.spool.path}. Let a worker join: headrace gram --join {self.spool.path.absolute()}"
        return (
            f"unit {self._next} of {self.spool.path} is claimed by {holder}; is it alive, and can it read its shards?"
        )

    def finish(self) -> None:
        """The result is published: end the workers and remove the folder."""
        self._workers.close()
        self.spool.remove()

    def close(self) -> None:
        self._workers.close()
        self._lock.release()

    def _want(self) -> None:
        self.spool.want(self._next, min(self._order.partition.n_units, self._next + self._ahead))

    def _checked(self, unit: int) -> bytes | None:
        """A unit's message, if it is there and is what it should be; a bad one is set aside and made again."""
        partition, provenance = self._order.partition, self._order.provenance
        try:
            message = self.spool.message(unit, self._largest)
            if message is None:
                return None
            found = NodePartial.from_bytes(message, sender=f"the file of unit {unit}")
            expected = (partition.fingerprint, provenance, unit * partition.span)
            if (found.partition, found.provenance, found.chunk) != expected:
                raise DataError(f"the file of unit {unit} holds chunk {found.chunk} of another pass, or another chunk")
            return message
        except DataError as error:
            self._bad[unit] += 1
            where = self.spool.channel.set_aside(unit, str(error))
            if self._bad[unit] > _BAD_FILES:
                raise DataError(
                    f"{error}, the {self._bad[unit]}th time: look after the disk of {self.spool.path}"
                ) from None
            self._notice(f"{error}. It was set aside as {where} and is made again")
            return None


def remove_finished_pass(path: Path, order: WorkOrder) -> None:
    """Remove the folder of a pass whose result is published: its coordinator was killed before it could do so."""
    spool = PartialSpool(path)
    held = spool.description()
    if held is None or _differences(held.order, order):
        return
    lock = spool.lock()
    try:
        spool.remove()
    finally:
        lock.release()
