"""A spec names files: which ones, in which order, and what is refused."""

import os
import re

import pytest

from headrace.errors import ConfigError, DataError
from headrace.sources import Source, open_source


def lines(folder, *paths):
    for path in paths:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f'{{"text":"{path}"}}\n')


def listed(tmp_path, spec, **fields):
    with open_source(Source(spec, **fields), base=tmp_path / "base", cache=tmp_path / "cache") as source:
        return [file.path for file in source.manifest.files]


@pytest.fixture
def base(tmp_path):
    (tmp_path / "base").mkdir()
    return tmp_path / "base"


def test_a_folder_gives_all_files_of_its_suffixes_below_it_in_bytewise_order(tmp_path, base):
    lines(base, "d/b.jsonl", "d/a/z.jsonl", "d/B.jsonl", "d/é.jsonl", "d/z.ndjson", "d/README.md", "d/.hidden.jsonl")
    assert listed(tmp_path, "jsonl:d") == ["B.jsonl", "a/z.jsonl", "b.jsonl", "z.ndjson", "é.jsonl"]
    assert listed(tmp_path, "jsonl:d/") == listed(tmp_path, f"jsonl:{base}/d")


def test_a_file_is_listed_under_its_own_name_whatever_its_suffix(tmp_path, base):
    lines(base, "d/rows.data")
    assert listed(tmp_path, "jsonl:d/rows.data") == ["rows.data"]


def test_globs_match_within_a_part_and_double_stars_over_parts(tmp_path, base):
    lines(base, "d/1.jsonl", "d/2.jsonl", "d/x/1.jsonl", "d/x/y/1.jsonl", "d/x/y/1.txt")
    assert listed(tmp_path, "jsonl:d/*.jsonl") == ["1.jsonl", "2.jsonl"]
    assert listed(tmp_path, "jsonl:d/?.jsonl") == ["1.jsonl", "2.jsonl"]
    assert listed(tmp_path, "jsonl:d/[2-9].jsonl") == ["2.jsonl"]
    assert listed(tmp_path, "jsonl:d/**/1.jsonl") == ["1.jsonl", "x/1.jsonl", "x/y/1.jsonl"]
    assert listed(tmp_path, "jsonl:d/**/y/*.jsonl") == ["x/y/1.jsonl"]
    assert listed(tmp_path, "jsonl:d/*/*/*.jsonl") == ["x/y/1.jsonl"]
    assert listed(tmp_path, "jsonl:**/**/2.jsonl") == ["d/2.jsonl"]


def test_a_file_whose_name_looks_like_a_glob_is_taken_by_its_name(tmp_path, base):
    lines(base, "a[1].jsonl", "a1.jsonl")
    assert listed(tmp_path, "jsonl:a[1].jsonl") == ["a[1].jsonl"]


def test_no_match_names_the_pattern_the_nearest_folder_and_what_it_holds(tmp_path, base):
    lines(base, "webtext/a.jsonl")
    for spec in ("jsonl:web/x/*.jsonl", "jsonl:web/a.jsonl"):
        pattern = re.escape(spec.partition(":")[2])
        with pytest.raises(DataError, match=rf"no file matches '{pattern}'.*{base}, which holds webtext/"):
            listed(tmp_path, spec)
    with pytest.raises(DataError, match=r"no file matches 'webtext/\*.json'.*webtext, which holds a.jsonl"):
        listed(tmp_path, "jsonl:webtext/*.json")


def test_a_folder_without_such_files_says_which_suffixes_were_looked_for(tmp_path, base):
    lines(base, "d/a.json")
    with pytest.raises(DataError, match=r"no file ends in .jsonl or .ndjson below .*/d"):
        listed(tmp_path, "jsonl:d")


def test_shards_compressed_in_a_way_that_is_not_read_are_refused_by_name_not_left_out(tmp_path, base):
    lines(base, "d/a.jsonl", "d/b.jsonl.xz", "e/c.parquet.gz")
    for spec in ("jsonl:d", "jsonl:d/*", "jsonl:d/b.jsonl.xz"):
        with pytest.raises(
            DataError, match=r"b.jsonl.xz is compressed, which this scheme does not read .it reads .gz and .zst"
        ):
            listed(tmp_path, spec)
    with pytest.raises(DataError, match=r"c.parquet.gz is compressed, which this scheme does not read. Unpack it"):
        listed(tmp_path, "parquet:e")


def test_dot_dot_is_refused_unless_allowed(tmp_path, base):
    lines(tmp_path, "outside/a.jsonl")
    with pytest.raises(ConfigError, match=r"goes through '\.\.'"):
        listed(tmp_path, "jsonl:../outside/*.jsonl")
    assert listed(tmp_path, "jsonl:../outside/*.jsonl", allow_symlinks=True) == ["a.jsonl"]


@pytest.mark.parametrize("spec", ["jsonl:d", "jsonl:d/*.jsonl", "jsonl:d/link.jsonl", "jsonl:**/*.jsonl"])
def test_a_linked_file_is_refused_unless_allowed(tmp_path, base, spec):
    lines(tmp_path, "outside.jsonl")
    (base / "d").mkdir()
    (base / "d" / "link.jsonl").symlink_to(tmp_path / "outside.jsonl")
    with pytest.raises(DataError, match=r"link.jsonl is a symbolic link to .*outside.jsonl.*allow_symlinks = true"):
        listed(tmp_path, spec)
    with open_source(Source(spec, allow_symlinks=True), base=base, cache=tmp_path / "cache") as source:
        assert source.read(0) == ["outside.jsonl"]


@pytest.mark.parametrize(
    "spec", ["jsonl:d", "jsonl:d/*/*.jsonl", "jsonl:d/sub/a.jsonl", "jsonl:d/sub/", "jsonl:d/**/a.jsonl"]
)
def test_a_linked_folder_is_refused_unless_allowed(tmp_path, base, spec):
    lines(tmp_path, "outside/a.jsonl")
    (base / "d").mkdir()
    (base / "d" / "sub").symlink_to(tmp_path / "outside")
    with pytest.raises(DataError, match=r"d/sub is a symbolic link"):
        listed(tmp_path, spec)
    assert [path.rpartition("/")[2] for path in listed(tmp_path, spec, allow_symlinks=True)] == ["a.jsonl"]


def test_a_link_to_nothing_and_a_link_to_a_folder_above_are_refused_even_when_links_are_allowed(tmp_path, base):
    lines(base, "d/a.jsonl", "e/a.jsonl")
    (base / "d" / "up").symlink_to(base / "d")
    with pytest.raises(DataError, match="links back to a folder above it"):
        listed(tmp_path, "jsonl:d", allow_symlinks=True)
    (base / "e" / "b.jsonl").symlink_to("nowhere")
    with pytest.raises(DataError, match="is a link to nothing"):
        listed(tmp_path, "jsonl:e", allow_symlinks=True)


@pytest.mark.parametrize("spec", ["jsonl:d", "jsonl:d/*", "jsonl:d/pipe.jsonl"])
def test_a_named_pipe_is_refused_without_blocking(tmp_path, base, spec):
    (base / "d").mkdir()
    os.mkfifo(base / "d" / "pipe.jsonl")
    with pytest.raises(DataError, match=r"pipe.jsonl is a named pipe; a source reads regular files only"):
        listed(tmp_path, spec)


def test_a_device_is_refused(tmp_path, base):
    with pytest.raises(DataError, match="/dev/zero is a device"):
        listed(tmp_path, "txt:/dev/zero")


def test_a_file_name_that_is_not_utf8_is_refused_because_a_cursor_could_not_name_it(tmp_path, base):
    (base / "d").mkdir()
    try:
        with open(os.fsencode(base / "d") + b"/\xff.jsonl", "wb") as file:
            file.write(b"{}\n")
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    with pytest.raises(DataError, match="not valid UTF-8, so a cursor could not name it"):
        listed(tmp_path, "jsonl:d")
