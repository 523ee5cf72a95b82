"""Makes the description of a run's folder that `provenance` works on."""

from __future__ import annotations

from pathlib import Path

from headrace.provenance.steps import RecordedRun
from headrace.runs.folder import RunFolder
from headrace.runs.job import Job


def recorded_run(path: Path) -> RecordedRun:
    """The `RecordedRun` of a text run's folder. Nothing in the folder is changed, and the run may continue."""
    folder = RunFolder.reopen(path)
    config = folder.text_config
    return RecordedRun(
        path=path,
        version=str(folder.about.get("headrace")),
        config=config.resolved(),
        open_dataset=lambda records: Job(config).dataset(records=records),
    )
