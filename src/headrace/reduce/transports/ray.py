"""Workers as Ray actors: the engine for fleets.

Every rank is an actor on a node that Ray chooses; it opens the shards there (they must be reachable under the same
paths) and puts each partial into the object store, from which the coordinator reads it in place. An actor or a node that
dies is replaced, and its rank is asked again from what was received of it.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import numpy as np

from headrace.errors import ConfigError, HeadraceError
from headrace.reduce.orders import PartialMaker, WorkOrder
from headrace.reduce.transports.transport import Answer, Transport
from headrace.runtime.wire_errors import decode_error, encode_error


class _Rank:
    """The actor's side. An error a user can cause comes back as a value: Ray would wrap and pickle an exception."""

    def __init__(self, order: str, rank: int) -> None:
        self._maker = PartialMaker(WorkOrder.from_dict(json.loads(order)), rank)

    def make(self, ordinal: int) -> tuple[np.ndarray | None, dict[str, str] | None]:
        try:
            return np.frombuffer(self._maker.make(ordinal), np.uint8), None
        except HeadraceError as error:
            return None, encode_error(error)


class RayTransport(Transport):
    """One actor a rank. Uses the cluster that Ray is connected to, and starts one on this machine if there is none."""

    def __init__(self, order: WorkOrder, *, address: str | None = None) -> None:
        try:
            import ray.exceptions
        except ImportError:
            raise ConfigError("the ray engine needs Ray: pip install headrace[ray]") from None
        self._ray: Any = ray
        self._started = not self._ray.is_initialized()
        if self._started:
            ranks = order.partition.n_ranks
            options: dict[str, Any] = {"address": address} if address else {"num_cpus": max(ranks * order.threads, 1)}
            self._ray.init(include_dashboard=False, log_to_driver=False, logging_level="error", **options)
        self._order = json.dumps(order.to_dict())
        self._kind = self._ray.remote(num_cpus=order.threads)(_Rank)
        self._actors: dict[int, Any] = {}
        self._open: dict[int, deque[Any]] = {}
        for rank in range(order.partition.n_ranks):
            self._start(rank)

    def ask(self, rank: int, ordinal: int) -> None:
        self._open.setdefault(rank, deque()).append(self._actors[rank].make.remote(ordinal))

    def answer(self, timeout: float) -> Answer | None:
        ray = self._ray
        # Only the oldest answer of each rank: of several that are ready, Ray may give a later one first.
        oldest = {waiting[0]: rank for rank, waiting in self._open.items() if waiting}
        ready, _ = ray.wait(list(oldest), num_returns=1, timeout=timeout)
        if not ready:
            return None
        rank = oldest[ready[0]]
        self._open[rank].popleft()
        try:
            message, problem = ray.get(ready[0])
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            self._open.pop(rank)
            return Answer(rank=rank, lost=str(error).strip().splitlines()[0][:200])
        if problem is not None:
            return Answer(rank=rank, error=decode_error(problem, prefix=f"rank {rank}: "))
        return Answer(rank=rank, message=message.data)

    def replace(self, rank: int) -> None:
        self._open.pop(rank, None)
        self._start(rank)

    def close(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors, self._open = {}, {}
        if self._started:
            self._ray.shutdown()

    def _start(self, rank: int) -> None:
        self._actors[rank] = self._kind.remote(self._order, rank)
