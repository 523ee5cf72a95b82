"""Ledger over ranks: each row goes to the rank that owns its group, and its state comes back.

    ledger = Ledger(LedgerSettings(width=256))          rank and world size of torch.distributed, if it is initialised
    route = ledger.route(gids, streams, epochs)         who owns which row: two small exchanges
    states, found = ledger.lookup(route)                one more; a miss is a miss of the owner's
    ledger.store(route, states, step=step)              and one
    ledger.end_step(step)

`lookup` and `store` take a route, or gids and make the route themselves. With more than one rank all of these but end_step are
collectives: every rank calls them the same number of times, with whatever rows it has, none included. On one rank nothing is sent.

Rows reach their owner in the order of (rank, row), so of two states of a group the last by that order stays. Rows travel through CPU
memory (gloo), wherever the arena is, unless `device_group` reaches it (nccl): then states and ids stay on the device, and only the
counts do not. A rank that is lost or stopped ends the exchange on the others with its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import ConfigError, HeadraceError
from headrace.ledger.owners import owner_of
from headrace.ledger.settings import LedgerSettings
from headrace.ledger.shard import LedgerShard, as_gids, as_tags
from headrace.metrics import Meter, Wait
from headrace.metrics.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Rows on their way: which of this rank's go where, and which came here."""

    rows: int
    """Rows of this rank."""
    order: np.ndarray
    """This rank's rows, by owner."""
    sent: tuple[int, ...]
    """How many go to each rank."""
    received: tuple[int, ...]
    gids: np.ndarray
    """Of the rows that came here, by (rank, row)."""
    streams: np.ndarray
    epochs: np.ndarray


class Ledger(LedgerShard):
    """A ledger over all ranks: the shard of the groups that this rank owns, and the exchange of rows with the other ranks.

    `lookup`, `store`, `route` and `gather_state` are collectives; what the shard does alone (`end_step`, `set_active`, `wipe`, metrics, state) is not,
    and every rank does it at the same step.
    """

    def __init__(
        self,
        settings: LedgerSettings,
        *,
        group: ProcessGroup | None = None,
        device_group: ProcessGroup | None = None,
        deadline: float = 300.0,
        meter: Meter | None = None,
    ) -> None:
        """`settings` are equal on all ranks. `group` reaches CPU memory; `device_group`, of the same ranks, the memory of the states.

        `deadline`: seconds that a collective may take. `meter` counts the waits; the process's own unless given.
        """
        if not deadline > 0:
            raise ConfigError(f"a ledger needs a deadline above 0 seconds for its exchanges, got {deadline!r}")
        joined = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if joined else (0, 1)
        super().__init__(settings, rank=rank, world_size=world_size)
        self._ranks = (
            Ranks(group, doing="ledger exchange", asker="the Ledger", device="cpu") if world_size > 1 else None
        )
        self._carriers, self._wire = self._ranks, torch.device("cpu")
        if device_group is not None and world_size > 1:
            if dist.get_process_group_ranks(device_group) != (self._ranks.names if self._ranks else []):
                raise ConfigError("a ledger's device_group must have the ranks of its group, in the same order")
            self._wire = self.device
            self._carriers = Ranks(
                device_group, doing="ledger exchange", asker="the Ledger", device=self._wire, asks=True
            )
        self._deadline, self._meter = deadline, meter

    # ------------------------------------------------------------------------------------------------- rows

    def route(
        self,
        gids: Tensor | np.ndarray,
        streams: Tensor | np.ndarray | int = -1,
        epochs: Tensor | np.ndarray | int = 0,
    ) -> Route:
        """Tell every owner which groups this rank has rows of, with the rows' streams and epochs."""
        here = as_gids(gids)
        stream, epoch = as_tags(streams, len(here), "streams"), as_tags(epochs, len(here), "epochs")
        if self._ranks is None:
            everything = (len(here),)
            return Route(
                rows=len(here), order=np.arange(len(here)), sent=everything, received=everything, gids=here, streams=stream, epochs=epoch
            )  # fmt: skip
        world = self.world_size
        owner = owner_of(here, world)
        order = np.argsort(owner, kind="stable")
        sent = np.bincount(owner, minlength=world)
        marked = np.stack([here, stream.astype(np.int64), epoch.astype(np.int64)], axis=1)[order]
        with Wait("ledger.exchange", meter=self._meter, deadline=self._deadline) as wait:
            self._ranks.begin()
            received = self._ranks.gather(sent.astype(np.int64), wait)[:, self.rank]
            came = self._exchange(torch.from_numpy(marked), sent.tolist(), received.tolist(), wait).cpu().numpy()
        return Route(
            rows=len(here),
            order=order,
            sent=tuple(sent.tolist()),
            received=tuple(received.tolist()),
            gids=np.ascontiguousarray(came[:, 0]),
            streams=came[:, 1].astype(np.int32),
            epochs=came[:, 2].astype(np.int32),
        )

    def _exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], wait: Wait) -> Tensor:
        assert self._carriers is not None
        return self._carriers.all_to_all(rows.to(self._wire), sent, received, wait)

    def lookup(self, gids: Route | Tensor | np.ndarray) -> tuple[Tensor, Tensor]:
        """(states [n, width], found bool [n]) for this rank's rows; zeros where the owner has none."""
        route = gids if isinstance(gids, Route) else self.route(gids)
        states, found = super().lookup(route.gids)
        if self._ranks is None:
            return states, found
        # The flag rides along as one more number of the state: one exchange less.
        packed = torch.cat([states, found.to(states.dtype)[:, None]], dim=1)
        back = torch.empty((route.rows, packed.shape[1]), dtype=packed.dtype, device=self._wire)
        with Wait("ledger.exchange", meter=self._meter, deadline=self._deadline) as wait:
            self._ranks.begin()
            came = self._exchange(packed, route.received, route.sent, wait)
            back[torch.from_numpy(route.order).to(self._wire)] = came
        back = back.to(self.device)
        return back[:, :-1].contiguous(), back[:, -1] != 0

    def store(
        self,
        gids: Route | Tensor | np.ndarray,
        states: Tensor,
        *,
        step: int,
        streams: Tensor | np.ndarray | int = -1,
        epochs: Tensor | np.ndarray | int = 0,
    ) -> None:
        """Keep the states of this rank's rows, each at its owner. A Route brings streams and epochs of its own."""
        route = gids if isinstance(gids, Route) else self.route(gids, streams, epochs)
        states = states.detach()
        if states.shape != (route.rows, self.settings.width):
            raise ConfigError(
                f"store at step {step} needs states of shape [{route.rows}, {self.settings.width}], one for each row; got {list(states.shape)}"
            )
        if self._ranks is not None:
            given = states.to(self._wire, self.dtype)[torch.from_numpy(route.order).to(self._wire)]
            with Wait("ledger.exchange", meter=self._meter, deadline=self._deadline) as wait:
                self._ranks.begin()
                states = self._exchange(given, route.sent, route.received, wait)
        super().store(route.gids, states, step=step, streams=route.streams, epochs=route.epochs)

    # ------------------------------------------------------------------------------------------------ state

    def gather_state(self) -> tuple[dict[str, np.ndarray], dict[str, str], dict[str, Any]] | None:
        """The whole ledger, on rank 0; None on the others. Collective."""
        arrays, dtypes, meta = self.state_arrays()
        if self._ranks is None:
            return arrays, dtypes, meta
        lead, world = self.rank == 0, self.world_size
        with Wait("ledger.exchange", meter=self._meter, deadline=self._deadline) as wait:
            self._ranks.begin()
            lengths = self._ranks.gather(
                np.array([self.step, len(arrays["ledger/gid"]), len(arrays["ghosts/gid"])], np.int64), wait
            )
            if len({int(n) for n in lengths[:, 0]}) > 1:
                raise HeadraceError(
                    f"the ranks' ledgers stand at different steps ({lengths[:, 0].tolist()}): every rank ends every step"
                )
            whole: dict[str, np.ndarray] = {}
            for name in sorted(arrays):
                counts = lengths[:, 1 if name.startswith("ledger/") else 2].tolist()
                sent = [len(arrays[name])] + [0] * (world - 1)
                rows = torch.from_numpy(arrays[name])
                flat = rows if rows.ndim > 1 else rows[:, None]
                came = self._ranks.all_to_all(flat, sent, counts if lead else [0] * world, wait).numpy()
                whole[name] = came if rows.ndim > 1 else came[:, 0].copy()
        return (whole, dtypes, meta) if lead else None
