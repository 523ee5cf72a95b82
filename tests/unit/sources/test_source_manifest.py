"""A manifest is made once, cached, and never believed when it no longer fits."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from headrace.errors import DataChanged
from headrace.formats.lines import JsonLines
from headrace.sources import FileEntry, Source, cache_folder, open_source


@pytest.fixture
def shards(tmp_path):
    (tmp_path / "web").mkdir()
    for shard, rows in enumerate([3, 0, 5, 1]):
        (tmp_path / "web" / f"{shard}.jsonl").write_bytes(
            b"".join(b'{"text":"%d/%d"}\n' % (shard, i) for i in range(rows))
        )
    return tmp_path / "web"


def opened(tmp_path, **options):
    return open_source(Source("jsonl:web"), base=tmp_path, cache=tmp_path / "cache", **options)


def manifests(tmp_path):
    return list((tmp_path / "cache" / "manifests").glob("*.manifest"))


@contextmanager
def unscanned():
    """No file may be scanned inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JsonLines, "scan", lambda *_: pytest.fail("scanned"))
        yield


def test_columns_have_their_types_and_add_up(tmp_path, shards):
    manifest = opened(tmp_path, chunk_bytes=30).manifest
    assert manifest.root == shards
    assert [file.rows for file in manifest.files] == [3, 0, 5, 1]
    assert isinstance(manifest.files[0], FileEntry)
    assert manifest.chunk_file.dtype == np.int32
    for column in (manifest.chunk_start, manifest.chunk_end, manifest.chunk_rows, manifest.first_row):
        assert column.dtype == np.int64
    assert manifest.first_row.tolist() == [0, *np.cumsum(manifest.chunk_rows).tolist()]
    assert manifest.rows == 9 == manifest.first_row[-1]
    assert manifest.chunks == len(manifest.chunk_rows) == 6


def test_locate_is_the_inverse_of_counting_rows_file_by_file(tmp_path, shards):
    manifest = opened(tmp_path).manifest
    every = [(index, row) for index, file in enumerate(manifest.files) for row in range(file.rows)]
    assert [manifest.locate(row) for row in range(manifest.rows)] == every
    for row in (-1, manifest.rows):
        with pytest.raises(IndexError, match=f"row {row} of a source of 9 rows"):
            manifest.locate(row)


def test_the_second_opening_reads_the_manifest_from_the_cache(tmp_path, shards):
    first = opened(tmp_path)
    with unscanned():
        second = opened(tmp_path)
    assert first.manifest.fingerprint == second.manifest.fingerprint
    assert first.manifest.files == second.manifest.files
    for column in ("chunk_file", "chunk_start", "chunk_end", "chunk_rows", "chunk_line", "first_row"):
        np.testing.assert_array_equal(getattr(first.manifest, column), getattr(second.manifest, column))


def test_a_damaged_cache_file_is_made_again(tmp_path, shards):
    first = opened(tmp_path)
    [path] = manifests(tmp_path)
    data = bytearray(path.read_bytes())
    for place in (0, len(data) // 2, len(data) - 1):
        damaged = bytearray(data)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert opened(tmp_path).manifest.fingerprint == first.manifest.fingerprint
        with unscanned():
            opened(tmp_path)


def test_a_file_that_changed_behind_its_size_and_mtime_makes_the_cached_manifest_stale(tmp_path, shards):
    before = opened(tmp_path)
    path = shards / "2.jsonl"
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b"2/4", b"2/\n"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = opened(tmp_path)
    assert after.manifest.fingerprint != before.manifest.fingerprint
    assert after.manifest.files[2].rows == 6


def test_a_touched_file_is_counted_again_and_has_the_same_fingerprint(tmp_path, shards):
    before = opened(tmp_path)
    os.utime(shards / "0.jsonl", (1, 1))
    after = opened(tmp_path)
    assert after.fingerprint() == before.fingerprint()


def test_a_folder_that_moved_as_a_whole_has_the_same_fingerprint(tmp_path, shards):
    before = opened(tmp_path).fingerprint()
    (tmp_path / "elsewhere").mkdir()
    shards.rename(tmp_path / "elsewhere" / "web")
    with open_source(Source("jsonl:web"), base=tmp_path / "elsewhere", cache=tmp_path / "cache") as source:
        assert source.fingerprint() == before


def test_ranks_that_arrive_together_make_the_same_manifest(tmp_path, shards):
    with ThreadPoolExecutor(8) as pool:
        prints = {f.result().manifest.fingerprint for f in [pool.submit(opened, tmp_path) for _ in range(16)]}
    assert len(prints) == 1
    assert len(manifests(tmp_path)) == 1
    assert not list((tmp_path / "cache" / "manifests").glob(".tmp-*"))


def test_a_cache_that_cannot_be_written_does_not_stop_the_run(tmp_path, shards):
    (tmp_path / "cache").write_text("a file where the folder should be")
    source = opened(tmp_path, records=tmp_path / "records")
    assert source.read(0) == ["0/0", "0/1", "0/2"]


def test_the_fingerprint_names_each_file_and_a_change_is_described_by_file(tmp_path, shards):
    source = opened(tmp_path)
    saved = source.fingerprint()
    assert set(saved) == {"data:web", *(f"data:web/{i}.jsonl" for i in range(4))}
    assert saved["data:web"].endswith(" (4 files, 9 rows)")
    assert source.describe_change(saved) == []
    (shards / "2.jsonl").write_bytes((shards / "2.jsonl").read_bytes().replace(b"2/3", b"2/X"))
    (shards / "3.jsonl").unlink()
    (shards / "4.jsonl").write_bytes(b"")
    phrases = opened(tmp_path).describe_change(saved)
    assert [phrase.split(" (")[0] for phrase in phrases] == ["2.jsonl changed", "3.jsonl is missing", "4.jsonl is new"]


def test_another_text_key_is_another_source(tmp_path, shards):
    saved = opened(tmp_path).fingerprint()
    other = open_source(Source("jsonl:web", text_key="body"), base=tmp_path, cache=tmp_path / "cache")
    assert other.fingerprint()["data:web"] != saved["data:web"]
    assert other.describe_change(saved) == ["source 'web' is read differently (text_key, chunk size or format)"]


def test_above_64_files_the_cursor_holds_one_entry_and_a_change_still_names_its_file(tmp_path):
    (tmp_path / "web").mkdir()
    for shard in range(65):
        (tmp_path / "web" / f"{shard:02}.txt").write_text(f"{shard}\n")

    def opened_txt():
        return open_source(
            Source("txt:web", split="line"), base=tmp_path, cache=tmp_path / "cache", records=tmp_path / "run"
        )

    saved = opened_txt().fingerprint()
    assert list(saved) == ["data:web"]
    (tmp_path / "web" / "40.txt").write_text("xx\n")
    [phrase] = opened_txt().describe_change(saved)
    assert phrase.startswith("40.txt changed (saved ")
    for listing in (tmp_path / "run" / "listings").iterdir():
        listing.unlink()
    [phrase] = opened_txt().describe_change(saved)
    assert phrase.startswith("source 'web': saved ")


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "headrace"
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "h"))
    assert cache_folder() == tmp_path / "h"


def test_a_file_of_another_size_than_was_counted_is_refused_when_read(tmp_path, shards):
    source = opened(tmp_path)
    with (shards / "0.jsonl").open("ab") as file:
        file.write(b'{"text":"more"}\n')
    with pytest.raises(DataChanged, match=r"0.jsonl has 61 bytes; it had 45 when its rows were counted"):
        source.read(0)


def test_a_file_written_to_while_its_rows_are_counted_is_refused(tmp_path, shards, monkeypatch):
    counted = JsonLines.scan

    def scan(self, file, chunk_bytes):
        os.utime(file.path, (1, 1))
        return counted(self, file, chunk_bytes)

    monkeypatch.setattr(JsonLines, "scan", scan)
    with pytest.raises(
        DataChanged, match=r"0.jsonl was written to while its rows were counted. Wait until it is complete"
    ):
        opened(tmp_path)
