"""Workers as the ranks of a torch.distributed group (torchrun, gloo).

Every rank computes its own chunks and sends the partials to rank 0, one travelling while the next is computed; rank 0 computes
its share too and folds in chunk order, so nothing is ever parked. A pass begins where rank 0's checkpoint is, on any number of
ranks. A rank that fails, is gone or does not answer within the group's timeout ends the pass with its name;
what was folded is saved first, and the same command goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from headrace.errors import DataError, HeadraceError, WorkerDied
from headrace.metrics import Wait
from headrace.reduce.coordinator import CrossNodeGramReduction
from headrace.reduce.orders import PartialMaker, WorkOrder
from headrace.reduce.partial import NodePartial
from headrace.reduce.partition import ROW_DTYPES, CrossNodePartition
from headrace.reduce.result import GramResult
from headrace.reduce.stream import GramStream, streams_result
from headrace.reduce.transports.transport import FoldProgress
from headrace.runtime.wire_errors import decode_error, encode_error

_DEADLINE = 1800.0
"""Of the waits here. The group's own timeout, which ends the calls themselves, should be shorter."""


def coordinate_group(
    reduction: CrossNodeGramReduction,
    order: WorkOrder,
    *,
    group: Any = None,
    save: Callable[[], object] = lambda: None,
    save_every: float = 30.0,
    progress: Callable[[FoldProgress], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Rank 0's part: broadcast where each rank begins, then fold until the sum is complete (True) or `stop()` is true (False).

    The arguments are those of `drive`. When stopped it saves and leaves, and the other ranks end with the group.
    """
    import torch
    import torch.distributed as dist

    partition = reduction.partition
    received = reduction.received_per_rank
    _all_ranks(lambda: dist.broadcast(torch.tensor(received, dtype=torch.int64), src=0, group=group), "begin")
    maker = PartialMaker(order, 0)
    saved = time.monotonic()
    for unit in range(reduction.frontier // partition.span, partition.n_units):
        rank, ordinal = unit % partition.n_ranks, unit // partition.n_ranks
        if reduction.received_per_rank[rank] > ordinal:
            continue  # it was parked when the pass was saved
        try:
            message = maker.make(ordinal) if rank == 0 else _received(rank, group)
        except WorkerDied:
            save()
            raise
        reduction.receive(NodePartial.from_bytes(message, sender=f"rank {rank}"))
        if stop():
            save()
            return False
        if time.monotonic() - saved >= save_every:
            save()
            saved = time.monotonic()
        progress(FoldProgress.of(reduction))
    return True


def nothing_to_do(partition: CrossNodePartition, *, group: Any = None) -> None:
    """Rank 0's part where the result is there already: broadcast that everything was received of every rank."""
    import torch
    import torch.distributed as dist

    owned = torch.tensor([partition.owned(rank) for rank in range(partition.n_ranks)], dtype=torch.int64)
    _all_ranks(lambda: dist.broadcast(owned, src=0, group=group), "begin")


def work_in_group(order: WorkOrder, rank: int, *, group: Any = None) -> int:
    """The part of every other rank: send its partials. Returns how many it sent."""
    import torch
    import torch.distributed as dist

    received = torch.zeros(order.partition.n_ranks, dtype=torch.int64)
    _all_ranks(lambda: dist.broadcast(received, src=0, group=group), "begin")
    first, last = int(received[rank]), order.partition.owned(rank)
    travelling: list[tuple[Any, torch.Tensor]] = []
    try:
        maker = PartialMaker(order, rank)
        for ordinal in range(first, last):
            message = torch.from_numpy(np.frombuffer(bytearray(maker.make(ordinal)), np.uint8))
            _landed(travelling)
            size = torch.tensor([len(message)], dtype=torch.int64)
            travelling = [(dist.isend(part, dst=0, group=group), part) for part in (size, message)]
    except HeadraceError as error:
        _landed(travelling)
        body = torch.from_numpy(np.frombuffer(bytearray(json.dumps(encode_error(error)).encode()), np.uint8))
        _landed([(dist.isend(part, dst=0, group=group), part) for part in (torch.tensor([-len(body)]), body)])
        raise
    _landed(travelling)
    return last - first


def summed_over_ranks(
    streams: Mapping[int, GramStream],
    packed: Mapping[int, np.ndarray],
    count: int,
    rank: int,
    ranks: int,
    problem: Exception | None = None,
) -> GramResult:
    """The result over the streams of all ranks, on every rank. Stream s belongs to rank s mod `ranks`.

    Args:
        streams: This rank's streams, by number.
        packed: The sum of each.
        count: Streams of all ranks.
        rank, ranks: This rank, and how many there are.
        problem: An error of this rank. The other ranks learn of it before it is raised here, so that they do not wait.
    """
    import torch
    import torch.distributed as dist

    on_gpu = "gloo" not in dist.get_backend() and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    mine = next(iter(streams.values())) if streams else None
    failed = problem is not None or mine is None
    head = (
        [int(failed), 0, 0, 0]
        if mine is None
        else [int(failed), mine.columns.width, mine.chunk_size, ROW_DTYPES.index(mine.about["rows"])]
    )
    ours = torch.tensor(head + [streams[s].n_rows if s in streams else 0 for s in range(count)], device=device)
    gathered = [torch.empty_like(ours) for _ in range(ranks)]
    _all_ranks(lambda: dist.all_gather(gathered, ours), "streams")
    if problem is not None:
        raise problem
    heads = [row[:4].tolist() for row in gathered]
    if bad := [r for r, h in enumerate(heads) if h[0]]:
        raise WorkerDied(f"rank {bad[0]} could not collect its activations; its own message says why")
    if differing := [r for r, h in enumerate(heads) if h != heads[rank]]:
        raise DataError(
            f"rank {differing[0]} has rows of width, chunk size and type {heads[differing[0]][1:]}, rank {rank} of {heads[rank][1:]}: all must agree"
        )
    assert mine is not None
    parts: list[np.ndarray] = []
    for number in range(count):
        part = torch.zeros(mine.columns.k * (mine.columns.k + 1) // 2, dtype=torch.float64)
        if number in streams:
            part = torch.from_numpy(packed[number])
        held = part.to(device)
        _all_ranks(lambda held=held, number=number: dist.broadcast(held, src=number % ranks), "streams")
        parts.append(held.cpu().numpy())
    n_rows = int(sum(row[4:].sum() for row in gathered))
    return streams_result(parts, mine.columns, n_rows, mine.about)


def _received(rank: int, group: Any) -> memoryview:
    import torch
    import torch.distributed as dist

    size = torch.zeros(1, dtype=torch.int64)
    try:
        with Wait("reduce.partial", deadline=_DEADLINE):
            dist.recv(size, src=rank, group=group)
            body = torch.empty(abs(int(size)), dtype=torch.uint8)
            dist.recv(body, src=rank, group=group)
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


def _all_ranks(collective: Callable[[], object], what: str) -> None:
    try:
        with Wait(f"reduce.{what}", deadline=_DEADLINE):
            collective()
    except RuntimeError as error:
        raise _gone("a rank", error) from error


def _gone(who: str, error: Exception) -> WorkerDied:
    reason = str(error).strip().splitlines()[0][:200]
    return WorkerDied(
        f"{who} of the group is gone or did not answer ({reason}). Start the same command again: it goes on from what was saved"
    )
