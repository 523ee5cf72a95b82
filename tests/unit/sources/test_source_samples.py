"""The built-in corpora are made once, whole, and stay."""

import subprocess
import sys

import orjson
import pytest

from headrace.errors import DataChanged, StorageError
from headrace.sources import Source, open_source, samples


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def texts_of(source):
    return [text for chunk in range(source.manifest.chunks) for text in source.read(chunk)]


@pytest.mark.parametrize(("name", "least", "most"), [("prose", 2e6, 6.5e6), ("code", 4e6, 8e6)])
def test_a_sample_has_its_size_its_shards_and_no_document_twice(cache, name, least, most):
    with open_source(Source(f"sample:{name}"), cache=cache) as source:
        texts = texts_of(source)
    assert least < sum(file.size for file in source.manifest.files) < most
    assert [file.path for file in source.manifest.files] == [f"{name}-{i}.jsonl" for i in range(4)]
    assert len(set(texts)) == len(texts) > 1000
    assert max(map(len, texts)) <= 8000
    assert len({len(text) for text in texts}) > 500
    assert source.name == name


def test_each_document_says_where_it_comes_from_and_names_no_path_of_the_machine(cache):
    with open_source(Source("sample:code"), cache=cache) as source:
        lines = (source.manifest.root / "code-0.jsonl").read_bytes().splitlines()
    rows = [orjson.loads(line) for line in lines]
    assert all(set(row) == {"text", "origin"} and not row["origin"].startswith("/") for row in rows)


def test_two_builders_that_meet_leave_one_corpus_and_both_use_it(tmp_path):
    script = (
        "import sys; from pathlib import Path; from headrace.sources import Source, open_source, samples\n"
        "samples._MOST_BYTES = 200_000\n"
        "print(open_source(Source('sample:code'), cache=Path(sys.argv[1])).manifest.fingerprint)"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    prints = {process.communicate(timeout=60)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(prints) == 1
    assert len(list((tmp_path / "samples").iterdir())) == 1


def test_a_corpus_is_the_same_bytes_each_time_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "_MOST_BYTES", 200_000)
    with (
        open_source(Source("sample:code"), cache=tmp_path / "a") as again,
        open_source(Source("sample:code"), cache=tmp_path / "b") as first,
    ):
        assert again.fingerprint() == first.fingerprint()


def test_a_corpus_that_lost_a_shard_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "_MOST_BYTES", 20_000)
    with open_source(Source("sample:code"), cache=tmp_path) as source:
        (source.manifest.root / "code-2.jsonl").unlink()
    with pytest.raises(DataChanged, match=r"was changed\. Remove the folder"):
        open_source(Source("sample:code"), cache=tmp_path)


def test_a_builder_that_died_leaves_nothing_that_is_taken_for_a_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "_MOST_BYTES", 20_000)
    with monkeypatch.context() as broken:

        def fail(*_, **__):
            raise KeyboardInterrupt

        broken.setattr(samples, "publish_json", fail)
        with pytest.raises(KeyboardInterrupt):
            open_source(Source("sample:code"), cache=tmp_path)
    assert list((tmp_path / "samples").iterdir()) == []
    with open_source(Source("sample:code"), cache=tmp_path) as source:
        assert source.manifest.rows > 0


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"could not make the sample corpus in .* Point HEADRACE_CACHE at a folder"):
        open_source(Source("sample:code"), cache=tmp_path / "file")
