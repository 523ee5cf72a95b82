"""Tokens and samples learned from by modality, since the last line and since the start of the run.

    stats = DataStatsCollector(["atac", "rna"], targets={"atac": 0.3, "rna": 0.7})
    stats.add("rna", tokens=64 * 200, rows=64, padding=120)          every step, on every rank
    line = stats.aggregate_distributed()                             at log cadence, all ranks together

Tokens are whatever the trainer learns from; a dataset of cells does not know them, so the collate function or the trainer counts.
A window is what was added since the last drain. `data/tokens_seen/<modality>` goes on over resumes: it is the collector's own
state, kept beside the dataset's cursor, which says nothing about tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from headrace.errors import ConfigError, CursorMismatch
from headrace.loader.stream_metrics import for_modalities
from headrace.metrics import Mean, Meter, MetricSpec, Reducer, Reduction, default_meter, register

_KIND, _VERSION = "data_stats", 1

_FAMILIES = (
    MetricSpec("data/modality_total_tokens/<modality>", Reduction.SUM, False, "tokens", None, "tokens of this modality in the window"),
    MetricSpec("data/modality_rows/<modality>", Reduction.SUM, False, "rows", None, "rows of this modality in the window"),
    MetricSpec("data/tokens_seen/<modality>", Reduction.SUM, False, "tokens", None, "tokens of this modality since the run began, resumes included"),
    MetricSpec("data/token_share/<modality>", Reduction.MEAN, False, "", (0, 1), "share of this modality in the tokens of the window"),
    MetricSpec("data/token_share_target/<modality>", Reduction.MAX, False, "", (0, 1), "the share that this modality should have"),
)  # fmt: skip
_SCALARS = (
    MetricSpec("data/padding_share", Reduction.MEAN, False, "", (0, 0.2), "padding, as a share of all positions of the window"),
    MetricSpec("data/documents_cut", Reduction.SUM, False, "", None, "documents or cells that were cut to fit, in the window"),
)  # fmt: skip
register(*_FAMILIES, *_SCALARS)


class DataStatsCollector:
    """Counts of one rank. The `modalities` are fixed, so that all ranks have the same keys.

    `targets` are the wanted shares by modality. `deadline`: seconds that a collective may take. `meter` counts the waits; the process's own unless given.
    """

    def __init__(
        self,
        modalities: Sequence[str],
        *,
        targets: Mapping[str, float] | None = None,
        meter: Meter | None = None,
        deadline: float = 300.0,
    ) -> None:
        self.modalities = tuple(sorted(set(modalities)))
        unknown = [m for m in targets or () if m not in self.modalities]
        if unknown:
            raise ConfigError(f"targets name {', '.join(unknown)}; the modalities are {', '.join(self.modalities)}")
        total = sum((targets or {}).values())
        if targets and not (min(targets.values()) >= 0 and 0 < total < float("inf")):
            raise ConfigError(f"targets are shares of 0 or more with a sum above 0, got {dict(targets)}")
        self._targets = {m: (targets.get(m, 0.0) / total) for m in self.modalities} if targets else {}
        self._seen = dict.fromkeys(self.modalities, 0)
        self._meter = meter if meter is not None else default_meter()
        self._deadline = deadline
        self._reducers: dict[str, Reducer] = {}
        self._clear()

    def _clear(self) -> None:
        self._tokens = dict.fromkeys(self.modalities, 0)
        self._rows = dict.fromkeys(self.modalities, 0)
        self._padding = self._cut = self._batches = 0

    def add(self, modality: str, *, tokens: int, rows: int = 0, padding: int = 0, documents_cut: int = 0) -> None:
        """Count one batch. A batch without a modality (a lane that has no streams) counts nothing."""
        if not modality:
            return
        if modality not in self._tokens:
            raise ConfigError(f"there is no modality {modality!r}; there are {', '.join(self.modalities)}")
        self._tokens[modality] += tokens
        self._rows[modality] += rows
        self._seen[modality] += tokens
        self._padding += padding
        self._cut += documents_cut
        self._batches += 1

    @property
    def tokens_seen(self) -> dict[str, int]:
        """Tokens of this rank since the run began."""
        return dict(self._seen)

    # -------------------------------------------------------------------------------------------- metrics

    def metric_specs(self) -> tuple[MetricSpec, ...]:
        """Every key of `drain`."""
        return (*_SCALARS, *for_modalities(_FAMILIES, self.modalities))

    def drain(self) -> dict[str, Any]:
        """This rank's window, cleared; {} if nothing was added since the last time."""
        if not self._batches:
            return {}
        total = sum(self._tokens.values())
        values: dict[str, Any] = {"data/documents_cut": self._cut}
        if total + self._padding:
            values["data/padding_share"] = Mean(self._padding, total + self._padding)
        for modality, tokens in self._tokens.items():
            values[f"data/modality_total_tokens/{modality}"] = tokens
            values[f"data/modality_rows/{modality}"] = self._rows[modality]
            values[f"data/tokens_seen/{modality}"] = self._seen[modality]
            if total:
                values[f"data/token_share/{modality}"] = Mean(tokens, total)
            if self._targets:
                values[f"data/token_share_target/{modality}"] = self._targets[modality]
        self._clear()
        return values

    drain_metrics = drain

    def aggregate_distributed(
        self,
        local: Mapping[str, Any] | None = None,
        *,
        collectives: Literal["all_gather", "all_reduce"] = "all_gather",
        group: Any = None,
        step: int | None = None,
    ) -> dict[str, float]:
        """The window of all ranks (`local`: one that was drained before). Collective where there is a process group.

        `step`: the trainer's; ranks that bring different ones are refused.
        """
        if collectives not in self._reducers:
            self._reducers[collectives] = Reducer(
                self.metric_specs(), group, deadline=self._deadline, collectives=collectives, meter=self._meter
            )
        return self._reducers[collectives].reduce(self.drain() if local is None else local, step=step)

    # ---------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """What this rank has seen since the run began."""
        return {"kind": _KIND, "version": _VERSION, "tokens_seen": dict(self._seen)}

    def load_state_dict(
        self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, rank: int = 0, world_size: int = 1
    ) -> None:
        """Go on counting. The states of all ranks of the saved run are shared out to the ranks there are now, so that
        their sum is what it was."""
        listed: list[Any] = list(states) if isinstance(states, list | tuple) else [states]
        for state in listed:
            if not isinstance(state, Mapping) or (state.get("kind"), state.get("version")) != (_KIND, _VERSION):
                raise CursorMismatch(
                    f"expected a state of DataStatsCollector, version {_VERSION}, found "
                    f"{state.get('kind') if isinstance(state, Mapping) else type(state).__name__!r}"
                )
            unknown = [m for m in state["tokens_seen"] if m not in self._seen]
            if unknown:
                raise CursorMismatch(
                    f"the saved counts are of {', '.join(unknown)}, which this run does not have; it has {', '.join(self.modalities)}"
                )
        mine = listed[rank::world_size]
        self._seen = {m: sum(int(state["tokens_seen"].get(m, 0)) for state in mine) for m in self.modalities}
        self._clear()
