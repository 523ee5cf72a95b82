"""Ugly input keeps its counts and its memory, packed or not; only what the bytes say makes a hole."""

import errno
import gzip
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import DataError
from headrace.sources import Source, open_source

ZSTD = pa.Codec("zstd")


def packed(suffix, data):
    return {"": lambda: data, ".gz": lambda: gzip.compress(data, 0), ".zst": lambda: ZSTD.compress(data, asbytes=True)}[
        suffix
    ]()


def opened(tmp_path, spec, **fields):
    return open_source(Source(spec, **fields), base=tmp_path, cache=tmp_path / "cache")


def texts_of(source):
    return [text for chunk in range(source.manifest.chunks) for text in source.read(chunk)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_million_empty_documents_are_a_million_rows(tmp_path, suffix):
    (tmp_path / f"d.txt{suffix}").write_bytes(packed(suffix, b"\r\n" * 500_000 + b"\n" * 500_000))
    source = opened(tmp_path, f"txt:d.txt{suffix}", split="line")
    assert source.manifest.rows == 1_000_000
    assert sum(source.read(chunk).count("") for chunk in range(source.manifest.chunks)) == 1_000_000


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_every_kind_of_ugly_line_has_its_text_or_its_place_among_the_holes(tmp_path, suffix):
    rows = {
        b'{"text":"a\\u0000b"}\r': "a\0b",
        '{"text":"x\u2028y\x85z"}'.encode(): "x\u2028y\x85z",
        b'{"text":"\xff"}': None,
        b'{"text":"\\ud800"}': None,
        b'{"text":"a\0b"}': None,
        b'{"text":' + b"[" * 3000: None,
        b"\x00": None,
        b'{"text":""}': "",
        "\ufeff".encode() + b'{"text":"bom"}': None,
        b'{"text":"last"}': "last",
    }
    (tmp_path / f"d.jsonl{suffix}").write_bytes(packed(suffix, b"\xef\xbb\xbf" + b"\n \n".join(rows)))
    source = opened(tmp_path, f"jsonl:d.jsonl{suffix}", on_bad="skip")
    assert texts_of(source) == list(rows.values())
    wanted = [i for i, text in enumerate(rows.values()) if text is None]
    assert [hole["row"] for hole in source.holes()] == wanted
    assert source.manifest.blank_lines == len(rows) - 1
    with pytest.raises(DataError, match=rf"d.jsonl{suffix}, line 5: it is not valid UTF-8"):
        texts_of(opened(tmp_path, f"jsonl:d.jsonl{suffix}"))


LONG_LINE = """
import sys
from pathlib import Path
import msgspec, numpy, pyarrow
from headrace.formats import compressed, lines
from headrace.sources import Source, open_source
compressed._FRAMES_HELD = 32
lines.TextLines.max_line_bytes = 8 << 20
def peak_mib():
    # Not ru_maxrss: that one is inherited from the parent over fork and exec.
    return int(next(row for row in open("/proc/self/status") if row.startswith("VmHWM")).split()[1]) // 1024
folder = Path(sys.argv[1])
base = peak_mib()
source = open_source(Source(sys.argv[2], on_bad="skip"), base=folder, cache=folder / "cache")
lengths = [-1 if t is None else len(t) for c in range(source.manifest.chunks) for t in source.read(c)]
print(*lengths, peak_mib() - base)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to read the peak of memory")
def test_a_packed_line_of_60_mb_above_the_limit_is_a_bad_row_that_is_never_held(tmp_path):
    # Noise: sixty million times the same letter would be taken for a bomb.
    line = b'{"text":"' + os.urandom(30_000_000).hex().encode() + b'"}\n'
    (tmp_path / "d.jsonl.zst").write_bytes(packed(".zst", b'{"text":"a"}\n' + line + b'{"text":"b"}\n'))
    done = subprocess.run(
        [sys.executable, "-c", LONG_LINE, tmp_path, "jsonl:d.jsonl.zst"], capture_output=True, text=True, timeout=60, check=True
    )  # fmt: skip
    *lengths, mib = map(int, done.stdout.split())
    assert lengths == [1, -1, 1]
    assert mib < 50  # 8 MiB of unpacked text are kept; the line itself has 57


def test_a_shard_of_each_format_that_was_cut_short_is_a_hole_and_the_rest_is_read(tmp_path):
    lines = b"".join(b'{"text":"%d"}\n' % i for i in range(500))
    pq.write_table(pa.table({"text": ["x"] * 500}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "c.parquet")
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r'b.parquet is not a parquet file, or was cut short.*on_bad = "skip"'):
        opened(tmp_path, "parquet:*.parquet")
    source = opened(tmp_path, "parquet:*.parquet", on_bad="skip")
    assert texts_of(source) == ["x"]
    assert [(hole["file"], hole["rows"]) for hole in source.holes()] == [("b.parquet", 0)]
    assert source.manifest.locate(0) == (1, 0)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines)[:300])
    (tmp_path / "c.jsonl").write_bytes(lines)
    source = opened(tmp_path, "jsonl:*.jsonl*", on_bad="skip")
    assert len(texts_of(source)) == 500
    assert "cut short" in source.holes()[0]["reason"]


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.jsonl.zst", "d.jsonl", "d.parquet", "d.arrow"])
@pytest.mark.parametrize("when", ["counting", "reading"])
def test_a_disk_that_fails_is_an_error_and_never_a_hole(tmp_path, name, when, monkeypatch):
    lines = b'{"text":"a"}\n' * 100
    table = pa.table({"text": ["a"] * 100})
    if name == "d.parquet":
        pq.write_table(table, tmp_path / name)
    elif name == "d.arrow":
        with pa.ipc.new_file(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    else:
        (tmp_path / name).write_bytes(packed(Path(name).suffix if name.count(".") > 1 else "", lines))
    spec = f"{name.split('.')[1]}:{name}"
    real = os.preadv

    def sick(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    if when == "reading":
        opened(tmp_path, spec, on_bad="skip")
    source = opened(tmp_path, spec, on_bad="skip") if when == "reading" else None
    monkeypatch.setattr(os, "preadv", sick)
    with pytest.raises(DataError, match=rf"reading .*({name}|unpacked/.*) at byte \d+: Input/output error, 3 times in"):
        _ = source.read(0) if source else opened(tmp_path, spec, on_bad="skip")
    monkeypatch.setattr(os, "preadv", real)
    assert texts_of(source or opened(tmp_path, spec, on_bad="skip")) == ["a"] * 100
