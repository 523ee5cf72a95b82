"""Files of a spool as its mapper and its conveyor meet them: alike but for their numbers and rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace.spool import FieldSpec, FileHeader, write_batch_file
from headrace.spool.channel import Channel
from headrace.spool.folder import SpoolFolder

SCHEMA = (FieldSpec("a", "int64", (300,)), FieldSpec("b", "int8", (50,)))
ROWS = 12


def channel_in(folder: Path) -> Channel:
    made = Channel(SpoolFolder(folder), "train")
    made.prepare()
    return made


def arrays_of(seq: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seq)
    return {
        "a": rng.integers(0, 1 << 60, (ROWS, 300)),
        "b": rng.integers(-100, 100, (ROWS, 50)).astype(np.int8),
    }


def write(channel: Channel, seq: int, **more: Any) -> Path:
    known = {"split": "train", "schema": SCHEMA, "rows": ROWS, "first": ROWS * seq, "batch_size": 3, "job": "j"}
    header = FileHeader(seq=seq, **(known | more))
    path = channel.path(seq)
    path.unlink(missing_ok=True)
    write_batch_file(path, header, arrays_of(seq), durable=False)
    return path


def flipped(raw: bytes) -> Iterator[bytes]:
    """A file with one bit wrong: every fifth of its header and of the sums behind it, and many of its rows."""
    sums = 8 + int.from_bytes(raw[:8], "little") + 8 * ROWS
    rows = np.random.default_rng(1).integers(8 * sums, 8 * len(raw), 300)
    for bit in (*range(0, 8 * sums, 5), *rows.tolist()):
        bad = bytearray(raw)
        bad[bit // 8] ^= 1 << (bit % 8)
        yield bytes(bad)


def in_memory(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()
