"""Makes the description of a run's folder that `provenance` works on."""

from __future__ import annotations

from pathlib import Path

from headrace.loader.dataset import MOST_LANES
from headrace.provenance.steps import RecordedRun
from headrace.runs.folder import RunFolder
from headrace.runs.job import Job


def recorded_run(path: Path) -> RecordedRun:
    """The `RecordedRun` of a text run's folder. Nothing in the folder is changed, and the run may continue."""
    folder = RunFolder.reopen(path)
    config = folder.text_config
    return RecordedRun(
        path=path,
        base=folder.base,
        version=str(folder.about.get("headrace")),
        sources=tuple(source.name for source in config.source),
        lanes=MOST_LANES if config.loader.lanes == "auto" else config.loader.lanes,
        global_batch_size=config.loader.global_batch_size,
        config=config.resolved(),
        open_dataset=lambda records: Job(config).dataset(records=records),
    )
