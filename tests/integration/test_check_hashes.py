"""Hashes that are recorded once find damage that the format itself cannot show."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import DataChanged
from headrace.loader import Loader, TextDataset

CONFIG = '[[source]]\nspec = "parquet:d.parquet"\n[text]\nseq_len = 32\n[loader]\nlanes = 4\nglobal_batch_size = 4\n'


def test_a_flipped_bit_in_a_parquet_file_without_checksums_is_found_by_hashes_that_were_recorded_before(
    tmp_path, headrace
):
    path = tmp_path / "d.parquet"
    pq.write_table(
        pa.table({"text": [f"needle {i}" for i in range(200)]}), path, row_group_size=50, compression="none", use_dictionary=False
    )  # fmt: skip
    (tmp_path / "run.toml").write_text(CONFIG)
    first = headrace("check", "run.toml", "--hashes", "h", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "source d: 0 chunks compared, 4 recorded in h" in first.stdout
    again = headrace("check", "run.toml", "--hashes", "h", cwd=tmp_path)
    assert "source d: 4 chunks compared, 0 recorded in h" in again.stdout
    data = bytearray(path.read_bytes())
    data[data.index(b"needle 77")] ^= 1
    path.write_bytes(data)
    done = headrace("check", "run.toml", "--hashes", "h", cwd=tmp_path)
    assert done.returncode == 1
    assert "1 of 4 recorded chunks of source 'd' changed" in done.stderr
    assert "d.parquet (row group 1). Restore the files, or record them anew elsewhere" in done.stderr
    held = TextDataset(
        ["parquet:d.parquet"], seq_len=32, lanes=4, base=tmp_path, cache=tmp_path / "c", records=tmp_path / "h"
    )
    with pytest.raises(DataChanged, match=r"d.parquet \(row group 1\)"), Loader(held, global_batch_size=4) as batches:
        list(batches)
