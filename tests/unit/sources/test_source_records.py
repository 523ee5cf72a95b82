"""What was read once is what is read again, or the run is told."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.errors import DataChanged, DataError
from headrace.order import file_fingerprint
from headrace.sources import Source, open_source, records

ROWS = 40


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "d.txt"
    path.write_bytes(b"".join(b"row %03d\n" % i for i in range(ROWS)))
    return path


def opened(tmp_path, **options):
    return opened_large(tmp_path, chunk_bytes=80, **options)


def opened_large(tmp_path, **options):
    """As a run that goes on opens it: what is on record holds."""
    source = open_source(Source("txt:d.txt", split="line"), base=tmp_path, cache=tmp_path / "cache", **options)
    source.bind_records()
    return source


def read_all(source):
    return [text for chunk in range(source.manifest.chunks) for text in source.read(chunk)]


def change(path, row=12):
    """One byte at equal size, and the same mtime as before."""
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b"row %03d" % row, b"Row %03d" % row))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def record_file(tmp_path):
    [record] = (tmp_path / "cache" / "records").glob("*.chunks")
    return record


def test_a_chunk_that_changed_between_runs_is_refused_before_any_of_it_is_delivered(tmp_path, path):
    with opened(tmp_path) as source:
        read_all(source)
    change(path)
    source = opened(tmp_path)
    assert source.read(0)
    with pytest.raises(
        DataChanged,
        match=r"d.txt \(bytes 80 to 160\) of source 'd' changed since .* \(command: --accept data\)",
    ):
        source.read(1)


def test_a_chunk_that_changed_within_a_run_is_refused(tmp_path, path):
    source = opened(tmp_path)
    read_all(source)
    change(path)
    with pytest.raises(DataChanged, match=r"bytes 80 to 160"):
        source.read(1)


def test_a_chunk_that_was_never_read_has_nothing_to_differ_from(tmp_path, path):
    with opened(tmp_path) as source:
        source.read(0)
    change(path)
    assert opened(tmp_path).read(1)[2] == "Row 012"


def test_a_changed_chunk_is_refused_before_its_rows_are_judged(tmp_path, path):
    with opened(tmp_path) as source:
        read_all(source)
    path.write_bytes(path.read_bytes().replace(b"row 012", b"row 0\xff2"))
    with pytest.raises(DataChanged):
        opened(tmp_path).read(1)


def test_an_accepted_change_is_the_truth_from_then_on(tmp_path, path):
    with opened(tmp_path) as source:
        read_all(source)
    original = path.read_bytes()
    change(path)
    with opened(tmp_path, accept_changes=True) as source:
        assert "Row 012" in read_all(source)
    with opened(tmp_path) as source:
        assert "Row 012" in read_all(source)
    path.write_bytes(original)
    with pytest.raises(DataChanged):
        read_all(opened(tmp_path))


def test_a_change_that_moves_line_ends_behind_an_unchanged_cache_key_can_be_accepted(tmp_path, path):
    with opened(tmp_path) as source:
        read_all(source)
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b"row 012", b"row\n012"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with opened(tmp_path, accept_changes=True) as source:
        assert len(read_all(source)) == ROWS + 1


def test_a_change_that_size_mtime_and_sampled_blocks_do_not_show_is_found_when_read_and_can_be_accepted(tmp_path):
    path = tmp_path / "d.txt"
    path.write_bytes(b"".join(b"row %05d\n" % i for i in range(300_000)))
    before, status = path.read_bytes(), path.stat()
    with opened_large(tmp_path) as source:
        saved = source.fingerprint()
        read_all(source)
    for row in range(50_000, 250_000, 9_000):  # a place between the sampled blocks
        path.write_bytes(before.replace(b"row %05d\n" % row, b"row\n%05d\n" % row, 1))
        if file_fingerprint(path, status.st_size) == saved["data:d/d.txt"][:16]:
            break
    else:
        pytest.fail("every place tried lies in a sampled block")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with opened_large(tmp_path) as source:
        assert source.fingerprint() == saved
        with pytest.raises(DataChanged, match=r"d.txt \(bytes .*changed since it was first read"):
            read_all(source)
    with pytest.raises(DataChanged, match=r"1 of \d+ recorded chunks"):
        opened_large(tmp_path, full_check=True)
    with opened_large(tmp_path, accept_changes=True) as source:
        assert len(read_all(source)) == 300_001


def test_a_full_check_finds_the_change_at_the_start_and_names_all_of_it(tmp_path, path):
    with opened(tmp_path) as source:
        read_all(source)
    with opened(tmp_path, full_check=True) as source:
        assert source.check_recorded() == source.manifest.chunks == 4
    change(path, 12)
    change(path, 33)
    with pytest.raises(DataChanged, match=r"2 of 4 recorded chunks .*bytes 80 to 160\); .*bytes 240 to 320"):
        opened(tmp_path, full_check=True)
    opened(tmp_path, full_check=True, accept_changes=True).close()
    with opened(tmp_path, full_check=True) as source:
        assert "Row 033" in read_all(source)


def test_torn_and_foreign_lines_in_the_record_are_ignored_and_spoil_no_neighbour(tmp_path, path):
    with opened(tmp_path) as source:
        read_all(source)
    record = record_file(tmp_path)
    whole = record.read_bytes()
    assert len(whole) == 4 * 43
    first, *rest = whole.split(b"\n")[1:]
    flipped = first[:20] + (b"0" if first[20:21] != b"0" else b"1") + first[21:]
    torn = b"\n".join([b"", rest[0][:30], first, flipped, b"hello", first.upper()[:41] + b"x", *rest, rest[2][:41]])
    record.write_bytes(torn)
    with opened(tmp_path) as source:
        assert len(read_all(source)) == ROWS
    assert record.read_bytes() == torn  # every chunk was still known: nothing was added
    change(path)
    with pytest.raises(DataChanged):
        opened(tmp_path, full_check=True)


def test_records_are_found_wherever_the_blocks_end_in_which_the_file_is_read(tmp_path, path, monkeypatch):
    with opened(tmp_path) as source:
        read_all(source)
        chunks = source.manifest.chunks
    record = record_file(tmp_path)
    record.write_bytes(b"x" * 300 + record.read_bytes() + b"\n" + b"y" * 300 + b"\n")
    for block in (50, 64, 100, 1000):
        monkeypatch.setattr(records, "_BLOCK", block)
        with opened(tmp_path) as again:
            assert again._records.known().tolist() == list(range(chunks))


def test_a_file_of_hashes_that_is_far_too_large_for_its_source_is_refused_by_name(tmp_path, path):
    with opened(tmp_path) as source:
        read_all(source)
    os.truncate(record_file(tmp_path), (64 << 20) + 1)
    with pytest.raises(
        DataError, match=r"\.chunks has 67,108,865 bytes; for 4 chunks at most 67,108,864 are read. Move"
    ):
        opened(tmp_path)


def test_a_record_after_a_torn_one_is_whole(tmp_path, path):
    with opened(tmp_path) as source:
        source.read(0)
        record = record_file(tmp_path)
        with record.open("ab") as file:
            file.write(b"\n0123")
        source.read(1)
    change(path)
    with pytest.raises(DataChanged, match="1 of 2 recorded"):
        opened(tmp_path, full_check=True)


def test_the_records_of_a_run_travel_with_it_when_the_data_lies_elsewhere(tmp_path, path):
    with opened(tmp_path, records=tmp_path / "run") as source:
        read_all(source)
    assert not (tmp_path / "cache" / "records").exists()
    other = tmp_path / "mount" / "d.txt"
    other.parent.mkdir()
    other.write_bytes(path.read_bytes().replace(b"row 012", b"Row 012"))
    moved = open_source(
        Source("txt:d.txt", split="line"),
        base=other.parent,
        cache=tmp_path / "cache2",
        records=tmp_path / "run",
        chunk_bytes=80,
    )
    with pytest.raises(DataChanged, match=r"mount/d.txt \(bytes 80 to 160\)"):
        read_all(moved)


def test_a_new_shard_does_not_orphan_the_records_of_the_others(tmp_path, path):
    def folder():
        return open_source(Source("txt:*.txt", split="line"), base=tmp_path, cache=tmp_path / "cache", chunk_bytes=80)

    with folder() as source:
        read_all(source)
    (tmp_path / "c.txt").write_text("new\n")
    change(path)
    with pytest.raises(DataChanged, match=r"1 of 4 recorded"):
        folder().check_recorded()


def test_a_record_that_cannot_be_written_is_counted_and_the_text_still_comes(tmp_path, path, caplog):
    source = opened(tmp_path)
    (tmp_path / "cache" / "records").write_text("a file where the folder should be")
    assert len(read_all(source)) == ROWS
    assert source.unwritten_hashes == 4
    assert [r.message for r in caplog.records if "not being recorded" in r.message] != []
    assert len(caplog.records) == 1


def test_reading_from_many_threads_gives_each_chunk_its_own_text(tmp_path, path):
    source = opened(tmp_path)
    chunks = [i % source.manifest.chunks for i in range(400)]
    straight = [opened(tmp_path, records=tmp_path / "other").read(chunk) for chunk in range(source.manifest.chunks)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(source.read, chunks)) == [straight[chunk] for chunk in chunks]
