"""Containers summed by segments of rows: who needs some rows checks those, and all are checked on request."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy

from headrace.errors import FileCorrupt
from headrace.files import SEGMENT_SUMS, open_container, write_container


@pytest.fixture
def container(tmp_path):
    path = tmp_path / "c"
    arrays = {"rows": np.arange(24, dtype=np.int64).reshape(12, 2), "small": np.arange(3, dtype=np.int8)}
    write_container(path, arrays, {"a": 1}, segments={"rows": 3})
    return path


def flip(path, row):
    raw = bytearray(path.read_bytes())
    at = raw.find(np.arange(24, dtype=np.int64).tobytes()) + 16 * row
    raw[at] ^= 64
    path.write_bytes(raw)


def test_a_damaged_row_is_found_by_those_who_read_its_segment_and_by_nobody_else(container):
    flip(container, 4)
    opened = open_container(container, verify=False)
    opened.check_rows("rows", 0, 3)
    opened.check_rows("rows", 6, None, 1)
    opened.check_rows("rows", 0, None, 6)
    for start, stop, step in ((3, 6, 1), (4, 5, 1), (0, None, 1), (1, None, 4)):
        with pytest.raises(FileCorrupt, match="tensor 'rows' fails its checksum in rows 3 to 5"):
            opened.check_rows("rows", start, stop, step)
    with pytest.raises(FileCorrupt, match="in rows 3 to 5"):
        open_container(container)


def test_what_is_not_summed_by_segments_is_checked_when_the_container_is_opened(container):
    raw = bytearray(container.read_bytes())
    raw[-1] ^= 1
    container.write_bytes(raw)
    with pytest.raises(FileCorrupt, match="tensor 'small' fails its checksum"):
        open_container(container, verify=False)


def test_other_tools_see_the_sums_as_a_tensor(container):
    found = safetensors.numpy.load_file(container)
    assert set(found) == {"rows", "rows" + SEGMENT_SUMS, "small"}
    assert found["rows"].tolist() == np.arange(24).reshape(12, 2).tolist()
    assert found["rows" + SEGMENT_SUMS].shape == (4,)
