"""Counts and log lines of what a consumer does with the files of a spool.

The logger `headrace.spool` gets a line for every file that was read (INFO), and for every bad file and every write that has to be tried
again (WARNING). A consumer's `report` gets the same lines without the folder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from headrace.metrics import Meter, MetricSpec, Reduction, register

_log = logging.getLogger("headrace.spool")

register(
    MetricSpec("spool/files_read", Reduction.SUM, unit="files", help="files read to their end"),
    MetricSpec("spool/files_bad", Reduction.SUM, unit="files", healthy=(0, 0), help="files that were judged bad and set aside"),
    MetricSpec("spool/retries", Reduction.SUM, unit="", healthy=(0, 0), help="deletions and state writes that had to be tried again"),
)  # fmt: skip


class FileJournal:
    """Counts and logs what one consumer does with files. Used by the background thread; any thread may read the counts."""

    def __init__(self, data_dir: Path, report: Callable[[str], None] | None, meter: Meter) -> None:
        self._data_dir, self._report, self._meter = data_dir, report, meter
        self.counts = {"bad_files": 0, "files_read": 0, "retries": 0}
        self.last_problem = ""

    def file_read(self, sentence: str) -> None:
        """All rows of a file were delivered."""
        self.counts["files_read"] += 1
        self._meter.add("spool/files_read")
        self._notify(logging.INFO, sentence)

    def file_bad(self, sentence: str) -> None:
        """A file was judged bad and set aside."""
        self.counts["bad_files"] += 1
        self._meter.add("spool/files_bad")
        self._notify(logging.WARNING, sentence)

    def task_failed(self, problem: str) -> None:
        """A deletion or a state write failed and will be tried again. Equal problems in a row are logged once."""
        self.counts["retries"] += 1
        self._meter.add("spool/retries")
        if problem != self.last_problem:
            self.last_problem = problem
            self._notify(logging.WARNING, f"{problem}; trying again")

    def disk_warning(self, sentence: str) -> None:
        """The file system lacks a guarantee that a spool needs."""
        self._notify(logging.WARNING, sentence)

    def _notify(self, level: int, sentence: str) -> None:
        _log.log(level, "%s: %s", self._data_dir, sentence)
        if self._report is not None:
            self._report(sentence)
