"""The workers as the coordinator sees them, and the loop that asks them for partials.

    transport.ask(rank, ordinal)       begin on that unit
    transport.answer(timeout)          the next answer of any rank: a message, an error, or a rank that is gone
    transport.replace(rank)            a new worker for a rank that is gone

The reduction needs nothing else of a transport: processes on this machine, ranks of torchrun, Ray actors, files in a folder, or one of a
user's own. The coordinator asks for what it can take, so memory is bounded by its window; a rank that died is replaced and asked again
from what was received of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import DataError, WorkerDied
from headrace.metrics import Wait
from headrace.reduce.coordinator import CrossNodeGramReduction, Receipt
from headrace.reduce.partial import NodePartial

_AHEAD = 2
"""Units a rank is asked for at once, so that it has the next one while the last travels."""
_REPLACEMENTS = 5
"""Times a rank may die without having sent anything in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer of a rank: a message, an error, or how its worker ended."""

    rank: int
    message: bytes | memoryview | None = None
    error: Exception | None = None
    lost: str | None = None


class Transport(Protocol):
    """Carries requests to workers and their answers back. The last four calls are for a transport that keeps partials itself."""

    def ask(self, rank: int, ordinal: int) -> None: ...
    def answer(self, timeout: float) -> Answer | None: ...
    def replace(self, rank: int) -> None: ...
    def close(self) -> None: ...

    def due(self) -> bool:
        """Whether it keeps so many partials that the sum should be saved now."""
        return False

    def saved(self, unit: int) -> None:
        """The sum of rank 0's units below this one was saved."""
        return

    def finish(self) -> None:
        """The result is published."""
        return

    def awaited(self) -> str | None:
        """What the sum waits for, in words, where the transport knows more than the rank."""
        return None


def drive(
    reduction: CrossNodeGramReduction,
    transport: Transport,
    *,
    save: Callable[[], object] = lambda: None,
    save_every: float = 30.0,
    progress: Callable[[CrossNodeGramReduction], object] = lambda _: None,
    notice: Callable[[str], object] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    deadline: float = 600.0,
) -> bool:
    """Ask for partials, receive and fold them until the sum is complete (True) or `stop()` is true (False).

    Args:
        reduction: The sum.
        transport: The workers.
        save: Saves the sum. Called every `save_every` seconds, when the transport is `due`, and when stopped.
        progress: Called with the sum after each partial.
        notice: Called with a sentence for each worker that is replaced.
        stop: Asked after each answer.
        deadline: Seconds without any answer after which DeadlineExceeded is raised.
    """
    partition = reduction.partition
    ranks = range(partition.n_ranks)
    asked = list(reduction.received_per_rank)
    deaths = [0] * partition.n_ranks
    saved = time.monotonic()
    unsaved = False
    while not reduction.complete:
        for rank in ranks:
            received = reduction.received_per_rank[rank]
            allowed = received + min(_AHEAD, reduction.credit(rank))
            while asked[rank] < allowed:
                transport.ask(rank, asked[rank])
                asked[rank] += 1
        with Wait("reduce.partial", deadline=deadline, remedy=_remedy(reduction, asked)) as wait:
            while (answer := transport.answer(min(0.2, wait.remaining()))) is None:
                if stop():
                    break
                wait.check()
        if stop():
            if unsaved:
                save()
            return False
        assert answer is not None
        if answer.error is not None:
            raise answer.error
        if answer.lost is not None:
            deaths[answer.rank] += 1
            if deaths[answer.rank] > _REPLACEMENTS:
                raise WorkerDied(
                    f"the worker of rank {answer.rank} died {deaths[answer.rank]} times in a row without an answer ({answer.lost}). Look at "
                    "its memory and its disk; what was received is kept, and the same command goes on"
                )
            notice(f"the worker of rank {answer.rank} is gone ({answer.lost}); a new one goes on where it was")
            transport.replace(answer.rank)
            asked[answer.rank] = reduction.received_per_rank[answer.rank]
            continue
        assert answer.message is not None
        partial = NodePartial.from_bytes(answer.message, sender=f"rank {answer.rank}")
        if partial.rank != answer.rank:
            raise DataError(f"the worker of rank {answer.rank} sent a partial of rank {partial.rank}")
        if reduction.receive(partial) is Receipt.WAIT:
            raise AssertionError("a rank was asked for more than the window holds")
        deaths[answer.rank] = 0
        unsaved = True
        if time.monotonic() - saved >= save_every or transport.due():
            save()
            saved, unsaved = time.monotonic(), False
        progress(reduction)
    return True


def _remedy(reduction: CrossNodeGramReduction, asked: list[int]) -> str:
    slow = [rank for rank, count in enumerate(reduction.received_per_rank) if asked[rank] > count]
    return f"Ranks {', '.join(map(str, slow[:8]))} have not answered: are they alive, and can they read their shards?"
