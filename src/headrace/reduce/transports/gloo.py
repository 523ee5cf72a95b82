"""Workers as the ranks of a torch.distributed group (torchrun, gloo).

Every rank computes its own chunks and sends the partials to rank 0, one travelling while the next is computed; rank 0 computes
its share too and folds in chunk order, so nothing is ever parked. A pass begins where rank 0's checkpoint is, on any number of
ranks. A rank that fails, is gone or does not answer within the group's timeout ends the pass with its name;
what was folded is saved first, and the same command goes on.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.errors import HeadraceError, WorkerDied
from headrace.metrics import Wait
from headrace.reduce.orders import PartialMaker, WorkOrder
from headrace.reduce.transports.transport import Answer, Transport
from headrace.runtime.wire_errors import decode_error, encode_error

_DEADLINE = 1800.0
"""Of the waits here. The group's own timeout, which ends the calls themselves, should be shorter."""


class GroupTransport(Transport):
    """The ranks of a group, as rank 0 sees them. They push their partials without being asked; rank 0 makes its own."""

    def __init__(self, order: WorkOrder, received: Sequence[int]) -> None:
        """Broadcast where each rank begins: after the partials that were `received` of it."""
        share_received(received)
        ranks, units = order.partition.n_ranks, range(order.partition.n_units)
        self._maker = PartialMaker(order, 0)
        self._own: deque[bytes] = deque()
        self._senders = (unit % ranks for unit in units if unit // ranks >= received[unit % ranks])

    def ask(self, rank: int, ordinal: int) -> None:
        """Make a unit of rank 0, while the other ranks make theirs."""
        if rank == 0:
            self._own.append(self._maker.make(ordinal))

    def answer(self, timeout: float) -> Answer:
        """The next partial in the order of units, however long it takes: the group's own timeout ends a wait for a rank that is stopped."""
        rank = next(self._senders)
        return Answer(rank=rank, message=self._own.popleft() if rank == 0 else _received(rank))

    def replace(self, rank: int) -> None:
        """Never called: a rank that is lost ends the pass."""

    def close(self) -> None:
        """Nothing: the group belongs to the caller."""


def share_received(received: Sequence[int]) -> list[int]:
    """How many partials rank 0 has `received` of each rank: of all of them, where the result is there already. All ranks call this first."""
    import torch
    import torch.distributed as dist

    counts = torch.tensor(received, dtype=torch.int64)
    try:
        with Wait("reduce.begin", deadline=_DEADLINE):
            dist.broadcast(counts, src=0)
    except RuntimeError as error:
        raise _gone("a rank", error) from error
    return counts.tolist()


def work_in_group(order: WorkOrder, rank: int) -> None:
    """The part of every other rank: send its partials."""
    first = share_received([0] * order.partition.n_ranks)[rank]
    travelling: list[tuple[Any, Any]] = []
    try:
        maker = PartialMaker(order, rank)
        for ordinal in range(first, order.partition.owned(rank)):
            message = maker.make(ordinal)
            _landed(travelling)
            travelling = _sent(message)
    except HeadraceError as error:
        _landed(travelling)
        _landed(_sent(json.dumps(encode_error(error)).encode(), sign=-1))
        raise
    _landed(travelling)


def _sent(message: bytes, *, sign: int = 1) -> list[tuple[Any, Any]]:
    """A message on its way to rank 0: its length, below zero for an error, and its bytes. Their tensors are kept until they landed."""
    import torch
    import torch.distributed as dist

    body = torch.from_numpy(np.frombuffer(bytearray(message), np.uint8))
    return [(dist.isend(part, dst=0), part) for part in (torch.tensor([sign * len(body)]), body)]


def _received(rank: int) -> memoryview:
    import torch
    import torch.distributed as dist

    size = torch.zeros(1, dtype=torch.int64)
    try:
        dist.recv(size, src=rank)
        body = torch.empty(abs(int(size)), dtype=torch.uint8)
        dist.recv(body, src=rank)
    except RuntimeError as error:
        raise _gone(f"rank {rank}", error) from error
    if int(size) > 0:
        return body.numpy().data
    raise decode_error(json.loads(body.numpy().tobytes()), prefix=f"rank {rank}: ")


def _landed(travelling: list[tuple[Any, Any]]) -> None:
    try:
        with Wait("reduce.send", deadline=_DEADLINE):
            for work, _ in travelling:
                work.wait()
    except RuntimeError as error:
        raise _gone("rank 0", error) from error


def _gone(who: str, error: Exception) -> WorkerDied:
    reason = str(error).strip().splitlines()[0][:200]
    return WorkerDied(
        f"{who} of the group is gone or did not answer ({reason}). Start the same command again: it goes on from what was saved"
    )
