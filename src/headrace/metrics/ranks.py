"""Collectives that end: with a result, or with an error that names the missing ranks.

gloo alone raises `Connection closed by peer [10.0.0.7]:21652` on some of the ranks, and nothing on the others for 30 minutes. Here

    killed     the neighbours see a broken connection at once and note it in the process group's store; the others look
               there every quarter of a second. WorkerDied on all of them, within about 2 s
    stopped    no rank sees anything until the deadline. DeadlineExceeded on all of them, within a second of it
    late       is waited for

and in both errors the missing are named by roll call: every rank in trouble signs the store with the number of its
collective, and a rank that has not signed did not come. The first rank that gives up writes its verdict, the missing ranks, to the store; the
other waiting ranks give up with the same verdict. A rank stays until they have read it, because it may hold the store, and its exit
breaks their connections. The store is used only in trouble, so the good case pays nothing; a rank that is merely late while another
dies is therefore named with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from headrace.errors import ConfigError, DeadlineExceeded, HeadraceError, WorkerDied
from headrace.metrics.wait import Wait

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

_SLICE = 0.25
"""Seconds between looks at whether another rank has reported trouble."""
_GRACE = 1.25
"""Seconds a rank that is fine has to sign the roll once a connection broke, and to read the verdict: it looks every _SLICE."""
_GRACE_AT_DEADLINE = 0.5
"""Seconds it has at a deadline: less, because every rank that waits has signed long before."""


class Ranks:
    """The collectives of one user of a process group. All ranks call the same methods in the same order."""

    def __init__(
        self,
        group: ProcessGroup | None,
        *,
        doing: str = "metrics reduction",
        asker: str = "the Reducer",
        device: torch.device | str | None = None,
        asks: bool | None = None,
    ) -> None:
        """Prepare collectives over `group`.

        Args:
            group: The process group; the whole world if None.
            doing: Name of the work in errors.
            asker: The object whose deadline a user would change, in errors.
            device: The memory that values travel through; CPU memory, or the only kind that the group reaches, if None.
            asks: Whether to poll if work is done, because nccl ends the communicator at a timeout of wait(); on every device but the CPU if None.
        """
        import torch
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        chosen = group if group is not None else dist.group.WORLD
        assert chosen is not None  # torch.distributed is initialised, or this function is not called
        self._group: ProcessGroup = chosen
        backends = dist.get_backend_config(self._group)
        reached = [part.partition(":")[0] for part in backends.split(",")]
        if device is None:
            device = "cpu" if "cpu" in reached else reached[0]
        self._device = torch.device(device)
        if self._device.type not in reached:
            raise ConfigError(
                f"a {doing} is to be done in {self._device.type.upper()} memory, which the process group (backend {backends!r}) does not reach. "
                f"Initialise it with backend='cpu:gloo,cuda:nccl', or give {asker} a group of the same ranks that does (gloo for CPU memory)."
            )
        self._asks = self._device.type != "cpu" if asks is None else asks
        self.names: list[int] = dist.get_process_group_ranks(self._group)
        self._me = dist.get_rank()
        self._doing, self._asker = doing, asker
        base = self._group.group_name
        # Ranks make their first reductions in the same order, or gloo could not match them: a number of its own for each.
        _made[base] = _made.get(base, 0) + 1
        self._prefix = f"headrace/reduce/{base}/{_made[base]}"
        self._store = _get_default_store()
        self._given_up: HeadraceError | None = None
        self._reductions = 0
        self._number = 0
        """Collectives so far. Every rank runs the same ones in the same order, so the number says how far a rank came."""

    def begin(self) -> None:
        self._reductions += 1

    def gather(self, row: np.ndarray, wait: Wait) -> np.ndarray:
        """The rows of all ranks, [ranks, length], in the order of `names`."""
        import torch
        from torch.distributed.distributed_c10d import AllgatherOptions

        rows = [torch.empty(len(row), dtype=torch.int64, device=self._device) for _ in self.names]
        ours = torch.from_numpy(row).to(self._device)
        options = AllgatherOptions()
        options.timeout = self._op_timeout(wait)
        self._finish(lambda: self._group.allgather([rows], [ours], options), wait)
        return torch.stack(rows).cpu().numpy()

    def gather_by_sum(self, row: np.ndarray, wait: Wait) -> np.ndarray:
        """What `gather` returns, by one all_reduce: each rank adds a matrix that is zero but for its own row."""
        import torch
        from torch.distributed.distributed_c10d import AllreduceOptions

        rows = torch.zeros((len(self.names), len(row)), dtype=torch.int64, device=self._device)
        rows[self.names.index(self._me)] = torch.from_numpy(row).to(self._device)
        options = AllreduceOptions()
        options.timeout = self._op_timeout(wait)
        self._finish(lambda: self._group.allreduce([rows], options), wait)
        return rows.cpu().numpy()

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], wait: Wait) -> Tensor:
        """What the ranks have for this one, in the order of ranks: the first sent[0] of `rows` go to rank 0, and so on."""
        import torch
        from torch.distributed.distributed_c10d import AllToAllOptions

        # As bytes: not every backend knows every dtype, and none has to add them up. No rows have no strides to view by.
        width = rows[0].nbytes if len(rows) else rows.new_empty(rows.shape[1:]).nbytes
        none = torch.empty((0, width), dtype=torch.uint8, device=rows.device)
        given = rows.contiguous().view(torch.uint8) if len(rows) else none
        out = torch.empty((sum(received), width), dtype=torch.uint8, device=rows.device)
        options = AllToAllOptions()
        options.timeout = self._op_timeout(wait)
        self._finish(lambda: self._group.alltoall_base(out, given, list(received), list(sent), options), wait)
        return out.view(rows.dtype) if len(out) else rows.new_empty((0, *rows.shape[1:]))

    def exchange(self, value: Mapping[str, Any], wait: Wait) -> list[dict[str, Any]]:
        """The values of all ranks, sent as JSON (all_gather_object would unpickle what comes from the wire)."""
        text = orjson.dumps(value)
        lengths = self.gather(np.array([len(text)], dtype=np.int64), wait)[:, 0]
        padded = np.zeros(-(-int(lengths.max()) // 8), dtype=np.int64)
        padded.view(np.uint8)[: len(text)] = np.frombuffer(text, dtype=np.uint8)
        rows = self.gather(padded, wait).view(np.uint8)
        return [orjson.loads(rows[i, : int(n)].tobytes()) for i, n in enumerate(lengths)]

    def _op_timeout(self, wait: Wait) -> timedelta:
        """Past our own deadline, so that we judge; but not for ever, or the process could not exit afterwards.

        nccl's watchdog ends the process when the timeout has passed, so it comes after the roll call too.
        """
        return timedelta(seconds=min(wait.remaining() + (0.75 if not self._asks else 0.75 + 4 * _GRACE), 10.0**8))

    def _finish(self, start: Callable[[], Any], wait: Wait) -> None:
        if self._given_up is not None:
            # The lost collective is still under way inside gloo: the next one would be matched with the wrong data.
            raise type(self._given_up)(str(self._given_up))
        self._number += 1
        roll: _RollCall | None = None
        failure: RuntimeError | None = None
        try:
            try:
                work = start()
                # At least 1 ms, because torch takes 0 for "for ever".
                while not self._done_within(work, max(0.001, min(_SLICE, wait.remaining()))):
                    roll = roll or self._roll_call()
                    if wait.expired() or roll.trouble.is_set():
                        break
                else:
                    return
            except RuntimeError as error:  # the connection broke
                failure = error
            roll = roll or self._roll_call()
            self._given_up = self._verdict(roll, failure, wait)
            raise self._given_up from failure
        finally:
            if roll is not None:
                roll.stop()

    def _done_within(self, work: Work, seconds: float) -> bool:
        """Whether a collective ends within so many seconds. RuntimeError if it failed."""
        if self._asks:
            end, pause = time.monotonic() + seconds, 20e-6
            while not work.is_completed():
                if time.monotonic() > end:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)
        else:
            try:
                work.wait(timedelta(seconds=seconds))
                return True
            except RuntimeError:
                if not work.is_completed():
                    return False
        work.wait()  # what is done next on the device comes after it
        return True

    def _roll_call(self) -> _RollCall:
        return _RollCall(self._store, self._prefix, self._number, self.names, self._me)

    def _verdict(self, roll: _RollCall, failure: RuntimeError | None, wait: Wait) -> HeadraceError:
        # gloo's own timeout is set past ours, so an error of its own that comes first is a broken connection
        broken = failure is not None and "imed out" not in str(failure)
        answered = roll.call(broken=broken)
        doing = f"{self._doing} {self._reductions} over {len(self.names)} ranks"
        why = str(failure).partition("\n")[0] if failure is not None else ""
        if not answered:
            unknown = [n for n in self.names if n not in (0, self._me)]
            missing = (
                "the store of the process group does not answer, so rank 0 (or the launcher, if that holds the store) is "
                "stopped or gone"
            ) + (f"; whether {ranks_text(unknown)} came is not known" if unknown else "")
        elif self._me in roll.missing:
            missing = f"this rank came after the others had given up; {ranks_text(roll.missing)} did not come in time"
        elif roll.missing:
            missing = f"{ranks_text(roll.missing)} did not come"
        else:
            missing = "every rank came, but their connections broke" + (f" ({why})" if why else "")
        if roll.broken:
            return WorkerDied(
                f"{doing} failed on rank {self._me} after {wait.elapsed:.1f} s: a rank is gone; {missing}. Look at its log "
                "for why it ended, and resume from the last checkpoint."
            )
        why = f"its deadline is {wait.deadline:g} s" if wait.expired() else "another rank's deadline has passed"
        return DeadlineExceeded(
            f"{doing} was given up on rank {self._me} after {wait.elapsed:.1f} s; {why}: "
            f"{missing}. It is stopped, hangs, or is busy for longer than that: look at what it does, or give {self._asker} a "
            "longer deadline."
        )


_made: dict[str, int] = {}


class _RollCall:
    """Finds the missing ranks: every rank in trouble signs the store with the number of its collective, and a rank that has not is missing.

    A thread of its own talks to the store, because a store whose holder is stopped never answers.
    """

    def __init__(self, store: Any, prefix: str, number: int, names: Sequence[int], me: int) -> None:
        self._store = store
        self._prefix = prefix
        self._number = number
        self._names = names
        self._me = me
        self._called = threading.Event()
        self._stopped = threading.Event()
        self._answered = threading.Event()
        self.trouble = threading.Event()
        self.broken = False
        self.missing: list[int] = []
        self._decided = False
        self._verdict = f"{prefix}/verdict"
        """Key of the first verdict: also for a rank that was a collective further when the others gave up."""
        threading.Thread(target=self._run, name="headrace-roll-call", daemon=True).start()

    def call(self, *, broken: bool) -> bool:
        """Wait for the verdict, and until the other ranks have read it; False if the store does not answer."""
        self.broken = self.broken or broken
        self._called.set()
        self._answered.wait(2 * _GRACE + 1.0)
        return self._decided

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        try:
            self._store.set(f"{self._prefix}/here/{self._me}", str(self._number))
            while not self._called.wait(_SLICE):
                if self._stopped.is_set():
                    return
                if self._store.check([self._verdict]) or self._signed("broken", self._number):
                    self.trouble.set()
            # Another rank's verdict stands if it came first.
            verdict = orjson.loads(self._store.compare_set(self._verdict, "", orjson.dumps(self._judge()).decode()))
            self.missing, self.broken, self._decided = verdict["missing"], verdict["broken"], True
            self._store.set(f"{self._prefix}/left/{self._me}", str(self._number))
            here = [n for n in self._names if n not in self.missing]
            self._until(lambda: all(self._signed(f"left/{n}", self._number) for n in here), _GRACE)
        except Exception:  # the store is gone: `call` returns False, unless there was a verdict before
            self._stopped.set()
        self._answered.set()

    def _judge(self) -> dict[str, Any]:
        """The missing ranks, after those that are there had time to sign, or another rank's verdict if that comes first."""
        if self.broken or self._signed("broken", self._number):
            self.broken = True
            self._store.set(f"{self._prefix}/broken", str(self._number))

        def all_signed() -> bool:
            missing[:] = [n for n in missing if not self._signed(f"here/{n}", self._number)]
            return not missing or bool(self._store.check([self._verdict]))

        missing = list(self._names)
        self._until(all_signed, _GRACE if self.broken else _GRACE_AT_DEADLINE)
        return {"missing": missing, "broken": self.broken or self._signed("broken", self._number)}

    def _until(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done() and time.monotonic() <= end and not self._stopped.wait(0.05):
            pass

    def _signed(self, what: str, number: int) -> bool:
        key = f"{self._prefix}/{what}"
        return bool(self._store.check([key])) and int(self._store.get(key)) >= number


def ranks_text(names: Iterable[int]) -> str:
    """`rank 3`, or `ranks 1, 2`."""
    listed = sorted(names)
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed))
