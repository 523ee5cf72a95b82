"""Reader of the legacy layout: a folder of `{split}_batches_*.pt` with x and y, and no queue.

The files are read in numeric order, over and over, and never deleted. A batch lies in one file. If the last batch of a file is short, it is
filled by repeating its own samples, as the scripts that wrote this layout do.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.batch import BatchSpec, FieldSpec
from headrace.errors import ConfigError, DataError, FileCorrupt
from headrace.order import fingerprint_json
from headrace.spool.batch_file import check_pt_records, load_pt, pt_array, pt_size
from headrace.spool.rows import Stripe


def legacy_files(folder: Path, split: str) -> list[Path]:
    """The files of a split in the order of their numbers."""
    pattern = re.compile(re.escape(split) + r"_batches_(\d{1,18})\.pt")
    found = [(int(m[1]), p) for p in folder.iterdir() if (m := pattern.fullmatch(p.name))] if folder.is_dir() else []
    return [path for _, path in sorted(found)]


def legacy_fingerprint(folder: Path) -> str:
    """Fingerprint of the names and sizes of all legacy files."""
    return fingerprint_json(sorted([p.name, p.lstat().st_size] for p in folder.glob("*_batches_*.pt")))


def legacy_batch_size(folder: Path) -> int | None:
    """The batch size in the metadata of the first file; None if there is none."""
    path = min(folder.glob("*_batches_*.pt"))
    about = load_pt(path, pt_size(path)).get("metadata")
    size = about.get("batch_size") if isinstance(about, dict) else None
    return size if type(size) is int and size > 0 else None


class LegacyReader:
    """Reads the legacy files of one split."""

    def __init__(self, folder: Path, split: str, stripe: Stripe, keep: int) -> None:
        """Find the files. `stripe`: the samples of this rank. `keep`: how many files stay open."""
        self.split, self.stripe = split, stripe
        self.paths = legacy_files(folder, split)
        if not self.paths:
            raise ConfigError(
                f"{folder} has neither a queue nor files named {split}_batches_*.pt: give the folder of a spool"
            )
        self._keep = keep
        self._kept: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()
        self.schema: BatchSpec = BatchSpec(())
        self.seq = self.row = self.batches = self.position = 0
        self._read = (0, 0)
        """Rows of the file in the batch that was read last, and samples of the batch."""

    def cover(self, batch_size: int, deadline: float) -> None:
        """Open the file that the next batch lies in: as `SplitReader.cover`, without a wait and without an end."""
        self._file(self.seq)

    def read(self, batch_size: int) -> dict[str, np.ndarray]:
        """The rank's share of the next batch of `batch_size` samples. `advance` counts it as delivered."""
        arrays = self._file(self.seq)
        have = min(batch_size, len(arrays["x"]) - self.row)
        own = [self.row + i % have for i in range(self.stripe.rank, batch_size, self.stripe.world_size)]
        self._read = (have, batch_size)
        return {name: array[own] for name, array in arrays.items()}

    def advance(self) -> None:
        """Count the batch that was read last as delivered."""
        rows, samples = self._read
        self.row += rows
        if self.row >= len(self._file(self.seq)["x"]):
            self.seq, self.row = (self.seq + 1) % len(self.paths), 0
        self.position += samples
        self.batches += 1

    def _file(self, seq: int) -> dict[str, np.ndarray]:
        if seq not in self._kept:
            self._kept[seq] = self._load(self.paths[seq])
            while len(self._kept) > self._keep:
                self._kept.popitem(last=False)
        return self._kept[seq]

    def _load(self, path: Path) -> dict[str, np.ndarray]:
        size = pt_size(path)
        loaded = load_pt(path, size)
        check_pt_records(path)
        try:
            arrays = {name: pt_array(loaded[name], size) for name in ("x", "y")}
        except (KeyError, ValueError) as error:
            raise FileCorrupt(f"{path} is not a legacy batch file with x and y: {error}") from error
        if len(arrays["x"]) != len(arrays["y"]) or not len(arrays["x"]):
            raise DataError(
                f"{path} has {len(arrays['x'])} rows of x and {len(arrays['y'])} of y; both need the same, and at least one"
            )
        schema = BatchSpec(
            FieldSpec(name, str(loaded[name].dtype).removeprefix("torch."), tuple(arrays[name].shape[1:]), role)
            for name, role in (("x", "input"), ("y", "target"))
        )
        if self.schema and schema != self.schema:
            raise DataError(
                f"{path} holds {schema}, the files before it {self.schema}: one folder holds one kind of sample"
            )
        self.schema = schema
        return arrays

    def state(self) -> dict[str, Any]:
        return {"g": self.position, "at": [[self.seq, self.row]], "start": [0]}

    def load(self, state: Mapping[str, Any]) -> None:
        (self.seq, self.row), self.position = state["at"][0], state["g"]
