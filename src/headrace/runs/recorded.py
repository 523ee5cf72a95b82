"""A run's folder as provenance reads it."""

from __future__ import annotations

import stat
from pathlib import Path

from headrace.errors import FileCorrupt
from headrace.provenance.steps import RecordedRun
from headrace.runs.folder import RunFolder
from headrace.runs.job import Job

__all__ = ["recorded_run"]

_MAX_ABOUT = 1 << 20
"""Bytes of run.json."""


def recorded_run(path: Path) -> RecordedRun:
    """What the folder of a text run says about its data. Nothing in the folder is changed, and the run may continue."""
    _require_small(path / "run.json")
    folder = RunFolder.reopen(path)
    config = folder.text_config
    return RecordedRun(
        path=path,
        base=folder.base,
        version=str(folder.about.get("headrace")),
        sources=tuple(source.name for source in config.source),
        lanes=config.loader.lanes,
        global_batch_size=config.loader.global_batch_size,
        config=config.resolved(),
        open_dataset=lambda records: Job(config, folder.base).dataset(records=records),
    )


def _require_small(path: Path) -> None:
    """Refuse a file that reading could block on or fill the memory with; a missing one is refused by its reader."""
    try:
        status = path.stat()
    except OSError:
        return
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_ABOUT:
        raise FileCorrupt(f"{path} is not a small file, as a run folder has it: give the folder of a run")
