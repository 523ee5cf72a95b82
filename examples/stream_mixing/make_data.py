"""Make a small set of cells in four modalities, each in a file format of its own.

    python examples/stream_mixing/make_data.py                 writes examples/stream_mixing/data/
    headrace run examples/stream_mixing/healthy.toml

    data/cells/<modality>/<file>      8 files of 300 to 700 cells each: a file lasts 10 to 22 batches of 32
    data/short/<modality>/<file>      24 files of 20 to 64 cells each: a file lasts 1 or 2 batches

A cell is a vector x that follows from a hidden state of its group (a donor, a tissue) and some noise, so there is
something to learn. The same seed gives the same bytes of x on every machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

WIDTHS = {"atac": 48, "morphology": 12, "protein": 24, "rna": 64}
SUFFIX = {"atac": ".npz", "morphology": ".jsonl", "protein": ".arrow", "rna": ".parquet"}
LATENT = 6


def cells(modality: str, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(x, group_id) of one file: runs of cells of a group."""
    width = WIDTHS[modality]
    basis = np.random.default_rng(sorted(WIDTHS).index(modality)).normal(size=(LATENT, width)) / np.sqrt(LATENT)
    groups = np.cumsum(rng.random(rows) < 0.1) + int(rng.integers(1 << 30)) * 1000
    states = {g: np.random.default_rng(int(g)).normal(size=LATENT) for g in np.unique(groups)}
    hidden = np.stack([states[g] for g in groups]) + 0.3 * rng.normal(size=(rows, LATENT))
    return (hidden @ basis + 0.1 * rng.normal(size=(rows, width))).astype(np.float32), groups.astype(np.int64)


def write(path: Path, x: np.ndarray, group_id: np.ndarray) -> None:
    """One stream file in the format of its suffix."""
    if path.suffix == ".npz":
        np.savez(path, x=x, group_id=group_id)
    elif path.suffix == ".jsonl":
        rows = (
            {"x": [round(float(v), 4) for v in row], "group_id": int(g)} for row, g in zip(x, group_id, strict=True)
        )
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        table = pa.table(
            {"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1]), "group_id": group_id}
        )
        if path.suffix == ".parquet":
            pq.write_table(table, path, row_group_size=128)
        else:
            with pyarrow.ipc.new_file(path, table.schema) as sink:
                sink.write_table(table, max_chunksize=128)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    for name, files, low, high in (("cells", 8, 300, 700), ("short", 24, 20, 64)):
        total = 0
        for modality in WIDTHS:
            folder = options.out / name / modality
            folder.mkdir(parents=True, exist_ok=True)
            for file in range(files):
                rows = int(rng.integers(low, high + 1))
                write(folder / f"{file:03d}{SUFFIX[modality]}", *cells(modality, rows, rng))
                total += rows
        print(f"{options.out / name}: {len(WIDTHS)} modalities, {files} files each, {total:,} cells")


if __name__ == "__main__":
    main()
