"""Small folders of stream files in every format, whose cells say who they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

WIDTH = 3


def cells(file: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(x, group_id): the first feature of a cell is file * 10,000 + row."""
    x = np.zeros((rows, WIDTH), dtype=np.float32)
    x[:, 0] = file * 10_000 + np.arange(rows)
    return x, np.arange(rows, dtype=np.int64) // 4 + file * 1000


def write_stream(path: Path, file: int, rows: int, *, more: float = 0.0) -> None:
    """One file in the format of its suffix; parquet and arrow in pieces of 7 rows. `more` is added to the last cell's first feature."""
    x, group = cells(file, rows)
    x[-1:, 0] += more
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, x)
    elif path.suffix == ".npz":
        (np.savez if file % 2 else np.savez_compressed)(path, x=x, group_id=group)
    elif path.suffix == ".jsonl":
        lines = (json.dumps({"x": x[i].tolist(), "group_id": int(group[i])}) for i in range(rows))
        path.write_text("".join(line + "\n" for line in lines))
    else:
        flat = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), WIDTH)
        table = pa.table({"x": flat, "group_id": group})
        if path.suffix == ".parquet":
            pq.write_table(table, path, row_group_size=7)
        else:
            with pyarrow.ipc.new_file(path, table.schema) as sink:
                sink.write_table(table, max_chunksize=7)


def change_stream(path: Path, file: int, rows: int) -> None:
    """Give the last cell another value, and the file its old time of modification."""
    before = path.stat()
    write_stream(path, file, rows, more=1.0)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


SUFFIXES = (".parquet", ".arrow", ".npz", ".npy", ".jsonl")


def write_streams(root: Path, sizes: dict[str, list[int]], suffixes: tuple[str, ...] = SUFFIXES) -> Path:
    """root/<modality>/<file>, with so many rows each."""
    file = 0
    for modality, rows in sizes.items():
        for count in rows:
            write_stream(root / modality / f"{file:03d}{suffixes[file % len(suffixes)]}", file, count)
            file += 1
    return root
