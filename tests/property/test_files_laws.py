"""A file appears whole and checked, or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.errors import FileCorrupt
from headrace.files import open_container, write_container

dtypes = st.sampled_from(["<f4", "<f8", "<i8", "<i4", "<u2", "u1", "?", "<f2"])
arrays = dtypes.flatmap(
    lambda d: hnp.arrays(np.dtype(d), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)
contents = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8).filter(
        lambda n: n != "__metadata__"
    ),
    arrays,
    max_size=4,
)


@given(content=contents, meta=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9), max_size=3))
def test_a_container_gives_back_what_was_written(content, meta):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.safetensors"
        write_container(path, content, meta, durable=False)
        opened = open_container(path)
        assert opened.meta == meta
        assert set(opened.arrays) == set(content)
        for name, array in content.items():
            assert opened.arrays[name].dtype == array.dtype
            assert opened.arrays[name].shape == array.shape
            assert opened.arrays[name].tobytes() == array.tobytes()
            assert not opened.arrays[name].flags.writeable
        assert os.listdir(folder) == ["c.safetensors"]


@given(data=st.data())
def test_every_flipped_bit_of_a_container_is_found(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.safetensors"
        write_container(
            path, {"w": np.arange(40, dtype=np.float32), "i": np.arange(7)}, {"step": 3, "who": "me"}, durable=False
        )
        raw = bytearray(path.read_bytes())
        bit = data.draw(st.integers(0, 8 * len(raw) - 1))
        raw[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(raw)
        with pytest.raises(FileCorrupt, match=str(path)):
            open_container(path)


@given(data=st.data())
def test_every_truncation_of_a_container_is_found(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.safetensors"
        write_container(path, {"w": np.arange(40, dtype=np.float32)}, {"step": 3}, durable=False)
        raw = path.read_bytes()
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
        with pytest.raises(FileCorrupt):
            open_container(path)
