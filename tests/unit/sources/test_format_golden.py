"""Files of earlier versions give the same fingerprints, chunk hashes, rows and cells, bit for bit."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from headrace.reduce.shards import RowShards
from headrace.sources import Source, open_source
from headrace.sources.cell_hashes import unit_hashes
from headrace.sources.cells import open_cells
from headrace.sources.rows import RowShape
from headrace.sources.stream_files import list_streams

DATA = Path(__file__).resolve().parents[2] / "data" / "formats"
GOLDEN = json.loads((DATA / "golden.json").read_text())


def text_of(name: str, folder: Path, *, rows: bool) -> dict[str, object]:
    """What a run records of one text file."""
    scheme = name.split(".")[1]
    shape = (
        RowShape(columns=("text", "n"), judge=lambda row: "" if row["text"] else "its text is null") if rows else None
    )
    source = Source(f"{scheme}:{name}", on_bad="skip", name="golden", **({"split": "line"} if scheme == "txt" else {}))
    with open_source(source, base=folder, cache=folder / "cache", rows=shape) as opened:
        texts = [opened.read(chunk) for chunk in range(opened.manifest.chunks)]
        return {
            "fingerprint": opened.fingerprint(),
            "chunks": [f"{opened._records.recorded(c):016x}" for c in range(opened.manifest.chunks)],
            "texts": hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
            "holes": [
                (hole["row"] + i + 1, hole["reason"].split(" (")[0])
                for hole in opened.holes()
                for i in range(hole["rows"])
            ],
        }


def cells_of(path: Path) -> dict[str, object]:
    file = open_cells(path)
    try:
        (whole,), (part,) = (unit_hashes(file.read(*rows), 1 << 20) for rows in ((0, file.rows), (3, 11)))
        return {"rows": file.rows, "hash": f"{whole:016x}", "part": f"{part:016x}"}
    finally:
        file.close()


def rows_of(path: Path) -> dict[str, object]:
    more = {} if path.suffix == ".npy" else {"field": "x", "targets": "y", "weights": "w"}
    shards = RowShards.open([path], **more)
    batch = shards.read(0, shards.n_rows)
    told = [hashlib.sha256(v.tobytes()).hexdigest() for v in (batch.x, batch.y, batch.w) if v is not None]
    return {"fingerprint": shards.fingerprint(), "dtype": shards.dtype, "rows": told}


def measured(case: str, tmp_path: Path) -> object:
    kind, _, name = case.partition("/")
    if kind in ("text", "labelled"):
        shutil.copy(DATA / "text" / name, tmp_path / name)
        return json.loads(json.dumps(text_of(name, tmp_path, rows=kind == "labelled")))
    if kind == "listing":
        shutil.copytree(DATA / "cells", tmp_path / "all" / "rna")
        return list_streams(tmp_path / "all", cache=tmp_path / "c").fingerprint
    return (cells_of if kind == "cells" else rows_of)(DATA / kind / name)


@pytest.mark.parametrize("case", GOLDEN)
def test_a_file_is_known_and_read_as_it_was_by_the_version_that_wrote_the_record(case, tmp_path):
    assert measured(case, tmp_path) == GOLDEN[case]
