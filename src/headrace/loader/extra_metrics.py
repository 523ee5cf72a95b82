"""Metrics of the data at a step, for the trainer's log line.

    extra = extra_metrics(loader, world_size=world, device=device)       in a training loop, once a step
    processor.log(step, loss, extra_metrics=extra)

The one place where a trainer asks. A dataset that has step metrics (StreamMixingDataset, bare or inside a DataLoader) is drained
and its ranks are put together; anything else has none, and gets no collective either.
"""

from __future__ import annotations

from typing import Any


def _source(data: Any) -> Any:
    """The dataset itself, or the one inside a DataLoader."""
    return data if hasattr(data, "drain_step_metrics") else getattr(data, "dataset", None)


def drained_metrics(data: Any) -> dict[str, float]:
    """This rank's step metrics, drained; {} for data that has none."""
    source = _source(data)
    return source.drain_step_metrics() if hasattr(source, "drain_step_metrics") else {}


def extra_metrics(data: Any, *, world_size: int = 1, device: Any = None) -> dict[str, float]:
    """The step metrics of all ranks: a collective for data that has them, {} for other data.

    `data` is a loader or dataset, `world_size` the number of ranks, `device` where the values are reduced (the CPU unless given).
    """
    source = _source(data)
    if not (hasattr(source, "drain_step_metrics") and hasattr(source, "aggregate_step_metrics")):
        return {}
    return source.aggregate_step_metrics(source.drain_step_metrics(), world_size, device)
