"""A small spool of integers in order, for tests of pages that show one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headrace.spool import DatasetConsumer, SequentialProvider
from headrace.spool.survey import set_aside


class Counted(SequentialProvider):
    """Integers in order."""

    def build_meta(self) -> dict[str, Any]:
        schema = [{"name": "g", "dtype": "int64", "shape": []}]
        return {"dataset_name": "counted", "training_type": "SEQUENCE_SCORING", "batch_schema": schema}

    def start_from(self, split, part, cursor) -> None:
        self.at = 0 if cursor is None else cursor["rows"]

    def next_batch(self, split, part):
        begin, self.at = self.at, min(self.at + self.batch_size, 24)
        return {"g": torch.arange(begin, self.at)} if self.at > begin else None

    def cursor(self, split, part):
        return {"rows": self.at}


def make_spool(folder: Path, reason: str) -> None:
    """A spool of three files, of which one was read and one is in the quarantine for `reason`."""
    Counted(folder, batch_size=4, batches_per_file=2, sleep_seconds=0.01, max_backlog_files=4).run(max_files=3)
    consumer = DatasetConsumer(folder, device_type="cpu", deadline=20.0)
    consumer.get_batch("train")
    consumer.close()
    set_aside(folder, 2, reason)
