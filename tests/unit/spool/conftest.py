"""Providers small enough to see through: rows that are their own number, and rows drawn from the generator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.spool import DataProviderBase, DatasetConsumer, SequentialProvider

XY = [{"name": "x", "dtype": "int64", "shape": [3], "role": "input"}, {"name": "y", "dtype": "int64", "shape": [3]}]


class Drawn(DataProviderBase):
    """x is drawn, y is x + 1."""

    def build_meta(self) -> dict[str, Any]:
        return {"dataset_name": "drawn", "training_type": "LM", "vocab_size": 1000, "batch_schema": XY}

    def sample_batch(self, split: str, rng: torch.Generator) -> dict[str, torch.Tensor]:
        x = torch.randint(0, 1000, (self.batch_size, 3), generator=rng)
        return {"x": x, "y": x + 1}


class Counted(SequentialProvider):
    """Sample g is g, up to `total`."""

    def __init__(self, *args: Any, total: int = 1 << 40, **more: Any) -> None:
        super().__init__(*args, **more)
        self.total = total
        self._at: dict[int, int] = {}

    def build_meta(self) -> dict[str, Any]:
        return {
            "dataset_name": "counted",
            "training_type": "SEQUENCE_SCORING",
            "batch_schema": [{"name": "g", "dtype": "int64", "shape": []}],
        }

    def start_from(self, split, part, cursor) -> None:
        self._at[part] = 0 if cursor is None else cursor["rows"]

    def next_batch(self, split, part):
        own = self._at[part]
        end = min(own + self.batch_size, -(-(self.total - part) // self.parts))
        self._at[part] = max(own, end)
        return {"g": torch.arange(own, end) * self.parts + part} if end > own else None

    def cursor(self, split, part):
        return {"rows": self._at[part]}


@pytest.fixture
def drawn(tmp_path: Path) -> Callable[..., Drawn]:
    def make(**more: Any) -> Drawn:
        return Drawn(tmp_path / "spool", **({"batch_size": 4, "batches_per_file": 2, "sleep_seconds": 0.01} | more))

    return make


@pytest.fixture
def counted(tmp_path: Path) -> Callable[..., Counted]:
    def make(**more: Any) -> Counted:
        return Counted(tmp_path / "spool", **({"batch_size": 4, "batches_per_file": 2, "sleep_seconds": 0.01} | more))

    return make


@pytest.fixture
def consumer(tmp_path: Path):
    """Consumers that are closed when the test ends."""
    opened: list[DatasetConsumer] = []

    def make(path: Path | None = None, **more: Any) -> DatasetConsumer:
        opened.append(DatasetConsumer(path or tmp_path / "spool", **({"device_type": "cpu", "deadline": 20.0} | more)))
        return opened[-1]

    yield make
    for one in opened:
        one.close()
