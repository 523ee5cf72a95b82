"""A compressed shard gives the rows of its text, from any place in it; a bad one is a sentence or a hole."""

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headrace.errors import DataChanged, DataError, StorageError
from headrace.sources import Source, open_source

ROWS = [f"row {i} " + "é\u2028x" * (i % 40) for i in range(4000)]
TEXT = "".join(f'{{"text":"{row}"}}\n' for row in ROWS).encode()
ZSTD = pa.Codec("zstd")


def zst(data: bytes) -> bytes:
    return ZSTD.compress(data, asbytes=True)


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def opened(tmp_path, name="d.jsonl.gz", **options):
    fields = {k: options.pop(k) for k in ("on_bad", "cache") if k in options}
    scheme = name.partition(".")[2].partition(".")[0]
    return open_source(
        Source(f"{scheme}:{name}", **({"split": "line"} if scheme == "txt" else {}), **fields),
        base=tmp_path,
        cache=tmp_path / "cache",
        **options,
    )


def copies(tmp_path):
    return list((tmp_path / "cache" / "unpacked").glob("*.zst"))


def texts_of(source):
    return [text for chunk in range(source.manifest.chunks) for text in source.read(chunk)]


FORMS = {
    "one gzip member": (".gz", gzip.compress(TEXT)),
    "many gzip members": (".gz", b"".join(map(gzip.compress, cut(TEXT, 7777)))),
    "an empty member between": (".gz", gzip.compress(TEXT[:99]) + gzip.compress(b"") + gzip.compress(TEXT[99:])),
    "one zstandard frame": (".zst", zst(TEXT)),
    "many zstandard frames": (".zst", b"".join(map(zst, cut(TEXT, 50_000)))),
    "skippable frames between": (
        ".zst",
        b"".join(b"\x52\x2a\x4d\x18\x05\0\0\0hello" + zst(part) for part in cut(TEXT, 90_001))
        + b"\x50\x2a\x4d\x18\0\0\0\0",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_shard_has_the_chunks_and_rows_of_its_text_however_it_was_packed(tmp_path, form):
    suffix, data = FORMS[form]
    (tmp_path / "plain.jsonl").write_bytes(TEXT)
    (tmp_path / f"d.jsonl{suffix}").write_bytes(data)
    plain = opened(tmp_path, "plain.jsonl", chunk_bytes=20_000)
    source = opened(tmp_path, f"d.jsonl{suffix}", chunk_bytes=20_000)
    assert len(copies(tmp_path)) == 1
    for column in ("chunk_start", "chunk_end", "chunk_rows", "chunk_line"):
        np.testing.assert_array_equal(getattr(source.manifest, column), getattr(plain.manifest, column))
    assert source.manifest.files[0].size == len(data)
    assert texts_of(source) == ROWS
    for chunk in (source.manifest.chunks - 1, 3, 0):
        assert source.read(chunk) == plain.read(chunk)


def test_a_folder_takes_packed_and_plain_shards_in_the_order_of_their_names(tmp_path):
    (tmp_path / "d").mkdir()
    for name, data in {
        "a.txt": b"1\n",
        "b.txt.gz": gzip.compress(b"2\r\n3"),
        "c.txt.zst": zst(b"\xef\xbb\xbf4\n"),
    }.items():
        (tmp_path / "d" / name).write_bytes(data)
    with open_source(Source("txt:d", split="line"), base=tmp_path, cache=tmp_path / "cache") as source:
        assert texts_of(source) == ["1", "2", "3", "4"]
        assert [file.rows for file in source.manifest.files] == [1, 2, 1]


@pytest.mark.parametrize(
    "data",
    [gzip.compress(b""), zst(b""), b"\x50\x2a\x4d\x18\x02\0\0\0hi"],
    ids=["gzip", "zstandard", "a skippable frame"],
)
def test_a_packed_shard_of_nothing_has_no_rows(tmp_path, data):
    name = "d.txt.gz" if data[:1] == b"\x1f" else "d.txt.zst"
    (tmp_path / name).write_bytes(data)
    source = opened(tmp_path, name)
    assert (source.manifest.rows, source.manifest.chunks) == (0, 0)


def test_a_shard_is_unpacked_once_into_the_cache_and_again_if_the_copy_is_gone(tmp_path):
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(TEXT))
    opened(tmp_path)
    [copy] = copies(tmp_path)
    assert texts_of(opened(tmp_path)) == ROWS
    assert copies(tmp_path) == [copy]
    copy.unlink()
    assert texts_of(opened(tmp_path)) == ROWS
    assert len(copies(tmp_path)) == 1


def test_the_option_cache_decides_where_the_copy_lies(tmp_path):
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(TEXT))
    with opened(tmp_path, cache="scratch") as source:
        assert texts_of(source) == ROWS
    assert len(list((tmp_path / "scratch" / "unpacked").glob("*.zst"))) == 1
    assert not (tmp_path / "cache").exists()


def test_a_cache_without_room_is_a_sentence_that_says_where_and_what_to_do(tmp_path):
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(TEXT))
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match=r"d.jsonl.gz cannot be read from the middle.*choose a folder with cache = "):
        opened(tmp_path)


def test_a_damaged_copy_is_refused_by_name_before_any_of_it_is_unpacked(tmp_path):
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(TEXT))
    opened(tmp_path)
    [copy] = (tmp_path / "cache" / "unpacked").glob("*.zst")
    data = bytearray(copy.read_bytes())
    data[len(data) // 2] ^= 1
    copy.write_bytes(data)
    with pytest.raises(DataError, match=r"the unpacked copy of .*d.jsonl.gz, is damaged at bytes .* it is made anew"):
        texts_of(opened(tmp_path))


BAD = {
    "cut gzip": (".gz", gzip.compress(TEXT)[:-9], r"is cut short: gzip cannot unpack it near byte [\d,]+"),
    "cut between members": (".gz", gzip.compress(TEXT[:500]) + gzip.compress(TEXT[500:])[:700], "is cut short"),
    "no bytes": (".gz", b"", "is cut short: it is empty, and a gzip file has a header"),
    "no bytes of zstandard": (".zst", b"", "is cut short: it is empty, and a zstd file has a header"),
    "cut header": (".gz", b"\x1f", "is cut short: .* of 1 "),
    "wrong checksum": (".gz", gzip.compress(TEXT)[:-8] + bytes(4) + gzip.compress(TEXT)[-4:], "incorrect data check"),
    "no gzip": (".gz", TEXT, "is damaged, or is no gzip file"),
    "something behind gzip": (".gz", gzip.compress(TEXT) + b"tail", "is damaged, or is no gzip file"),
    "cut zstandard": (".zst", zst(TEXT)[:-9], "is cut short"),
    "cut skippable": (".zst", zst(TEXT) + b"\x50\x2a\x4d\x18\xff\xff\xff\xff", "is cut short"),
    "no zstandard": (".zst", TEXT, "is damaged, or is no zstd file"),
    "something behind zstandard": (".zst", zst(TEXT) + b"tail", "is damaged, or is no zstd file"),
    "a flipped byte": (".zst", zst(TEXT)[:2000] + b"\xff\xff\xff" + zst(TEXT)[2003:], "is damaged|is cut short"),
    "a huge window": (".zst", b"\x28\xb5\x2f\xfd\x00\xf8\x01\0\0", "requires too much memory"),
    "a dictionary": (".zst", b"\x28\xb5\x2f\xfd\x21\x07\0\x01\0\0", "Dictionary mismatch"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_shard_that_cannot_be_unpacked_stops_the_run_or_is_a_hole_of_the_manifest(tmp_path, name):
    suffix, data, sentence = BAD[name]
    (tmp_path / f"d.jsonl{suffix}").write_bytes(data)
    (tmp_path / "e.jsonl").write_bytes(b'{"text":"here"}\n')
    with pytest.raises(DataError, match=rf"d.jsonl\{suffix} .*({sentence}).*on_bad = \"skip\"") as caught:
        opened(tmp_path, f"d.jsonl{suffix}")
    assert "\n" not in str(caught.value)
    skipped = open_source(Source("jsonl:*.jsonl*", on_bad="skip"), base=tmp_path, cache=tmp_path / "cache")
    assert texts_of(skipped) == ["here"]
    assert [file.rows for file in skipped.manifest.files] == [0, 1]
    [hole] = skipped.holes()
    assert {**hole, "reason": ""} == {"file": f"d.jsonl{suffix}", "row": 0, "rows": 0, "reason": ""}
    assert str(tmp_path) not in hole["reason"]
    # From the cache: the same holes under skip, and no less an error under fail.
    again = open_source(Source("jsonl:*.jsonl*", on_bad="skip"), base=tmp_path, cache=tmp_path / "cache")
    assert (again.holes(), again.fingerprint()) == (skipped.holes(), skipped.fingerprint())
    with pytest.raises(DataError, match=rf"d.jsonl\{suffix}"):
        open_source(Source("jsonl:*.jsonl*"), base=tmp_path, cache=tmp_path / "cache")


def test_a_hole_is_in_the_fingerprint_so_a_mended_shard_is_another_source(tmp_path):
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(TEXT)[:-9])
    saved = opened(tmp_path, on_bad="skip").fingerprint()
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(TEXT))
    mended = opened(tmp_path, on_bad="skip")
    assert mended.holes() == []
    assert mended.describe_change(saved)[0].startswith("d.jsonl.gz changed")


@pytest.mark.parametrize("on_bad", ["fail", "skip"])
def test_a_shard_that_vanished_is_never_a_hole(tmp_path, on_bad):
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(TEXT))
    source = opened(tmp_path, on_bad=on_bad)
    (tmp_path / "d.jsonl.gz").unlink()
    with pytest.raises(DataError, match=r"opening .*d.jsonl.gz: the file is gone"):
        source.read(0)


def stored(data: bytes) -> bytes:
    """One zstandard frame of raw blocks and no checksum: a letter can be changed in it and nothing else shows."""
    blocks = cut(data, 100_000)
    heads = [((len(b) << 3) | (i == len(blocks) - 1)).to_bytes(3, "little") for i, b in enumerate(blocks)]
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(h + b for h, b in zip(heads, blocks, strict=True))


def test_a_text_that_changed_in_a_packed_shard_of_equal_size_is_refused_when_read(tmp_path):
    path = tmp_path / "d.jsonl.zst"
    path.write_bytes(stored(TEXT))
    with opened(tmp_path, path.name, chunk_bytes=20_000) as source:
        assert texts_of(source) == ROWS
        saved = source.fingerprint()
    path.write_bytes(stored(TEXT.replace(b"row 7 ", b"ROW 7 ", 1)))
    changed = opened(tmp_path, path.name, chunk_bytes=20_000)
    changed.bind_records()
    assert changed.describe_change(saved)[0].startswith("d.jsonl.zst changed")
    with pytest.raises(DataChanged, match=r"d.jsonl.zst \(bytes 0 to [\d,]+ of its text\) of source 'd' changed"):
        changed.read(0)


BOMBS = """
import sys
from pathlib import Path
from headrace.errors import DataError
from headrace.sources import Source, open_source
folder = Path(sys.argv[1])
import pyarrow
def peak_mib():
    return int(next(row for row in open("/proc/self/status") if row.startswith("VmHWM")).split()[1]) // 1024
base = peak_mib()
for name in ("d.txt.gz", "d.txt.zst"):
    try:
        open_source(Source(f"txt:{name}", split="line"), base=folder, cache=folder / "cache")
    except DataError as error:
        print(error)
print(peak_mib() - base)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to read the peak of memory")
def test_bombs_are_refused_before_they_fill_memory_or_disk(tmp_path):
    zeros = bytes(128 << 20)
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(zeros, 1))
    (tmp_path / "d.txt.zst").write_bytes(zst(zeros) * 20)
    done = subprocess.run(
        [sys.executable, "-c", BOMBS, tmp_path], capture_output=True, text=True, timeout=60, check=True
    )
    *said, mib = done.stdout.strip().splitlines()
    assert [line.partition(" ")[0][-4:] for line in said] == ["t.gz", ".zst"]
    assert all("unpacks to more than 200 times its size" in line for line in said)
    assert int(mib) < 64
    assert sum(path.stat().st_size for path in tmp_path.glob("cache/unpacked/*")) == 0
