"""Trainer of a small recurrent model on streams of cells: it keeps a state for each group between steps, and predicts the group's next cell.

    ledger = Ledger(LedgerSettings(width=64, mode="periodic_stale", stale_threshold=64))
    trainer = RecurrentTrainer(settings, widths={"rna": 64}, dim=64, ledger=ledger)
    trainer.step([batch])                       trainer.encoder.last_extra_metrics: evictions, false evictions, …

                    ┌─────────── ledger, by group_id ───────────┐
    state before ───┴─► cell 1 ─► state ─► cell 2 ─► state ─► … ┴─► state after
                         ▲ predicted        ▲ predicted              from the state before the cell

The rows of a group in a batch are read in order. Each changes the state by a gate (h = a h + (1 - a) v, with a and v of the cell). The model
learns to predict a cell from the state before it. Gradients stay within the step: states are stored detached.

A step reads the ledger once and writes it once, for all its batches. If several ranks have rows of one group, each reads the same state and
the last write by (rank, row) is kept: `ledger/conflicts` counts these groups, and results depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.errors import ConfigError, DataError
from headrace.ledger.ranks import Ledger, Route
from headrace.metrics import phase
from headrace.train.cells import CellModel, CellStep, CellTrainer
from headrace.train.lm import TrainSettings


@dataclass(slots=True)
class _Visit:
    """The groups of one batch: the group of each row, and the groups' states."""

    of_row: Tensor
    """For each row, the index of its group within the batch."""
    turns: list[Tensor]
    """Rows that are read together: the first of every group, then the second, and so on."""
    states: Tensor


class RecurrentEncoder(CellModel):
    """A CellModel with a state for each group, which it reads from a ledger and writes back."""

    def __init__(self, widths: Mapping[str, int], *, dim: int, depth: int, ledger: Ledger) -> None:
        super().__init__(widths, dim=dim, depth=depth)
        if ledger.settings.width != dim:
            raise ConfigError(f"the encoder's states have {dim} numbers and the ledger's {ledger.settings.width}")
        self.gate = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.recall = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU())
        self.ledger = ledger
        self.last_extra_metrics: dict[str, int] = {}
        """Metrics of the ledger at the last step, on this rank."""
        self._route: Route | None = None
        self._visits: list[_Visit] = []

    def read_states(self, batches: Sequence[Mapping[str, Any]]) -> list[_Visit]:
        """Look up the groups of a step. Collective."""
        known = [np.unique(batch["group_id"].numpy(), return_inverse=True) for batch in batches]
        streams = [np.full(len(g), _one(b, "stream_id")) for b, (g, _) in zip(batches, known, strict=True)]
        epochs = [np.full(len(g), int(b.get("stream_epoch", 0))) for b, (g, _) in zip(batches, known, strict=True)]
        gids = [g for g, _ in known]
        self._route = self.ledger.route(np.concatenate(gids), np.concatenate(streams), np.concatenate(epochs))
        states, _ = self.ledger.lookup(self._route)
        device = self.gate.weight.device
        parts = states.to(device, self.gate.weight.dtype).split([len(g) for g in gids])
        self._visits = [
            _Visit(torch.from_numpy(rows).to(device), [t.to(device) for t in _turns(rows)], part)
            for (_, rows), part in zip(known, parts, strict=True)
        ]
        return self._visits

    def guess(self, modality: str, x: Tensor, visit: _Visit) -> Tensor:
        """Predict each cell from the state before it. `visit.states` are then the states after the batch."""
        e = self.encode(modality, x)
        keep, value = torch.sigmoid(self.gate(e) + 1.0), self.value(e)
        h, before = visit.states, []
        for rows in visit.turns:
            groups = visit.of_row[rows]
            old = h[groups]
            before.append(old)
            h = h.index_copy(0, groups, keep[rows] * old + (1 - keep[rows]) * value[rows])
        visit.states = h
        place = torch.empty(len(x), dtype=torch.int64, device=x.device)
        place[torch.cat(visit.turns)] = torch.arange(len(x), device=x.device)
        return self.decode(modality, self.recall(torch.cat(before)[place]))

    def write_states(self, step: int, active: Collection[int] | None = None) -> None:
        """Store the states after a step, and end the ledger's step. `active`: the streams that are still read. Collective."""
        assert self._route is not None, "read_states comes first"
        if active is not None:
            self.ledger.set_active(active)
        self.ledger.store(self._route, torch.cat([visit.states for visit in self._visits]), step=step)
        self.ledger.end_step(step)
        self.last_extra_metrics = self.ledger.drain_metrics()
        self._route, self._visits = None, []


def _one(batch: Mapping[str, Any], name: str) -> int:
    """The value that all rows of a batch share; -1 for a batch without rows."""
    return int(batch[name][0]) if len(batch[name]) else -1


def _turns(of_row: np.ndarray) -> list[Tensor]:
    """The rows that are the first of their group, then those that are the second, and so on."""
    if not len(of_row):
        return []
    order = np.argsort(of_row, kind="stable")
    counts = np.bincount(of_row)
    turn = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    together = np.split(order[np.argsort(turn, kind="stable")], np.cumsum(np.bincount(turn))[:-1])
    return [torch.from_numpy(rows) for rows in together]


class RecurrentTrainer(CellTrainer):
    """Trains a RecurrentEncoder. `active` returns the streams that are still read; it is called if the ledger protects them."""

    kind = "headrace.recurrent"

    def __init__(
        self,
        settings: TrainSettings,
        *,
        ledger: Ledger,
        active: Callable[[], Collection[int]] | None = None,
        **model: Any,
    ) -> None:
        """`ledger`: holds the states. `model`: the other arguments of `CellTrainer`."""
        self._ledger = ledger
        self._active = active if ledger.settings.protect_active else None
        self._turn: Iterator[_Visit] = iter(())
        super().__init__(settings, **model)

    def _make_model(self, widths: Mapping[str, int], dim: int, depth: int) -> RecurrentEncoder:
        self.encoder = RecurrentEncoder(widths, dim=dim, depth=depth, ledger=self._ledger)
        return self.encoder

    def step(self, batches: Sequence[Mapping[str, Any]]) -> CellStep:
        """Learn from this rank's batches of a step, and update the states of their groups. A collective."""
        with phase("ledger.read"):
            self._turn = iter(self.encoder.read_states(batches))
        result = super().step(batches)
        with phase("ledger.write"):
            self.encoder.write_states(self.steps_taken - 1, None if self._active is None else self._active())
        return result

    def extra_metrics(self) -> dict[str, int]:
        """Metrics of the ledger at the last step, on this rank."""
        return self.encoder.last_extra_metrics

    def _loss_of(self, modality: str, x: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        visit = next(self._turn)
        if len(visit.of_row) != len(x):
            raise DataError(f"step {self.steps_taken} got {len(x)} cells with {len(visit.of_row)} group ids")
        return (self.encoder.guess(modality, x, visit) - x).square().sum(), x.numel()

    def _nothing(self) -> None:
        next(self._turn)
