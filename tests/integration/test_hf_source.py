"""A dataset of the hub is read from its files where they lie, and through `datasets` only where it must be."""

import gc
import gzip
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import ConfigError, DataError
from headrace.sources import Source, hub, open_source


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """A hub's cache of this test's own, and no network."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")


def write(folder: Path, files: dict[str, list[str]]) -> Path:
    """Texts in the format that each name says."""
    for name, texts in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"n": range(len(texts)), "text": texts}), path)
        elif name.endswith(".gz"):
            path.write_bytes(gzip.compress(lines))
        elif name.endswith(".csv"):
            path.write_text("n,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(texts)))
        else:
            path.write_bytes(lines if ".json" in name else "".join(f"{text}\n" for text in texts).encode())
    return folder


def opened(tmp_path, place="d", **fields):
    return open_source(Source(f"hf:{place}", **fields), base=tmp_path, cache=tmp_path / "cache")


def texts_of(source):
    return [text for chunk in range(source.manifest.chunks) for text in source.read(chunk)]


LAYOUTS = {
    "data/SPLIT-0000i-of-0000n": (
        {
            "data/train-00000-of-00002.parquet": ["a"],
            "data/train-00001-of-00002.parquet": ["b"],
            "data/test-00000-of-00001.parquet": ["t"],
            "data/extra.parquet": ["no"],
        },
        {"train": ["a", "b"], "test": ["t"]},
    ),
    "file names": (
        {"train.jsonl": ["a"], "x_train-1.jsonl.gz": ["b"], "dev.jsonl": ["v"], "my-eval.jsonl": ["t"], "other.jsonl": ["no"]},
        {"train": ["a", "b"], "validation": ["v"], "test": ["t"]},
    ),
    "folder names": (
        {"train/1.jsonl": ["a"], "x/training/2.jsonl": ["b"], "val/1.jsonl": ["v"], ".git/train/3.jsonl": ["no"]},
        {"train": ["a", "b"], "validation": ["v"]},
    ),
    "no names at all": ({"1.jsonl": ["a"], "b/2.jsonl": ["b"], "trains.jsonl": ["c"], "README.md": []}, {"train": ["a", "b", "c"]}),
    "lines of text": ({"train.txt": ["a", "b"]}, {"train": ["a", "b"]}),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits_follow_from_names_as_the_hub_sees_them(tmp_path, layout):
    files, splits = LAYOUTS[layout]
    write(tmp_path / "d", files)
    for split, texts in splits.items():
        assert texts_of(opened(tmp_path, split=split)) == texts
    assert texts_of(opened(tmp_path)) == splits["train"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_datasets_itself_sees_the_same_splits(tmp_path, layout):
    datasets = pytest.importorskip("datasets", reason="needs the extra [hf]")
    files, splits = LAYOUTS[layout]
    folder = write(tmp_path / "d", {name: texts for name, texts in files.items() if not name.startswith(".git")})
    theirs = datasets.load_dataset(str(folder), streaming=True)
    assert {name: [row["text"] for row in split] for name, split in theirs.items()} == splits


README = """---
license: mit
configs:
- config_name: en
  default: true
  data_files:
  - split: train
    path: [en/*.jsonl, "more/**/en.jsonl"]
  - split: test
    path: en/held/t.jsonl
- config_name: de
  data_dir: de
- config_name: all
  data_files: "**/*.jsonl"
- config_name: gone
  data_files: {train: gone/*.jsonl}
---
# A dataset
"""
CONFIGURED = {
    "en/1.jsonl": ["a"], "en/2.jsonl": ["b"], "en/held/t.jsonl": ["t"], "more/x/y/en.jsonl": ["c"], "de/train.jsonl": ["d"],
    "de/test.jsonl": ["e"],
}  # fmt: skip


def test_the_configurations_of_a_readme_decide(tmp_path):
    write(tmp_path / "d", CONFIGURED)
    (tmp_path / "d" / "README.md").write_text(README)
    assert texts_of(opened(tmp_path)) == ["a", "b", "c"]
    assert texts_of(opened(tmp_path, config="en", split="test")) == ["t"]
    assert texts_of(opened(tmp_path, config="de")) == ["d"]
    assert texts_of(opened(tmp_path, config="de", split="test")) == ["e"]
    assert sorted(texts_of(opened(tmp_path, config="all"))) == ["a", "b", "c", "d", "e", "t"]
    with pytest.raises(DataError, match=r"there is no configuration 'fr'; there are .*en"):
        opened(tmp_path, config="fr")
    with pytest.raises(DataError, match=r"d has no split 'valid'; it has train, test. Set split"):
        opened(tmp_path, split="valid")
    with pytest.raises(DataError, match=r"no file in .*d belongs to split 'train', which it declares"):
        opened(tmp_path, config="gone")


def test_without_a_readme_there_is_no_configuration(tmp_path):
    write(tmp_path / "d", {"en/train.jsonl": ["a"]})
    with pytest.raises(
        DataError, match=r"no configuration 'en': .*d has no README that declares any. Leave config out"
    ):
        opened(tmp_path, config="en")


@pytest.mark.parametrize("header", ["---\nconfigs: [\n---\n", "---\nconfigs: !!python/object:os.system {}\n---\n"])
def test_a_readme_that_is_no_plain_yaml_is_a_sentence_and_runs_nothing(tmp_path, header):
    write(tmp_path / "d", {"train.jsonl": ["a"]})
    (tmp_path / "d" / "README.md").write_text(header)
    with pytest.raises(DataError, match=r"the header of .*README.md is no YAML"):
        opened(tmp_path)


@pytest.fixture
def snapshot(tmp_path):
    """A dataset as the hub's client leaves it in its cache: links from a snapshot into blobs."""
    folder = tmp_path / "home" / "hub" / "datasets--org--name"
    for revision, texts in {"1111aaaa": ["old"], "2222bbbb": ["a", "b"]}.items():
        blob = write(folder / "blobs", {f"{revision}.jsonl": texts}) / f"{revision}.jsonl"
        place = folder / "snapshots" / revision / "data"
        place.mkdir(parents=True)
        (place / "train-00000-of-00001.jsonl").symlink_to(os.path.relpath(blob, place))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("2222bbbb")
    return folder


def test_a_dataset_in_the_hubs_cache_is_read_there_without_importing_datasets(tmp_path, snapshot):
    script = (
        "import sys; from pathlib import Path; from headrace.sources import Source, open_source\n"
        "source = open_source(Source.parse('hf:org/name?split=train'), cache=Path(sys.argv[1]))\n"
        "print(source.read(0), source.name, 'datasets' in sys.modules, 'huggingface_hub' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "cache"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "['a', 'b'] name False False\n"


def test_of_several_revisions_without_a_main_one_none_is_guessed(tmp_path, snapshot):
    (snapshot / "refs" / "main").unlink()
    with pytest.raises(DataError, match=r"holds 2 revisions \(1111aaaa, 2222bbbb\) and refs/main names none"):
        opened(tmp_path, "org/name")


def test_a_shard_that_was_not_downloaded_is_missed_by_name(tmp_path):
    write(tmp_path / "d", {f"data/train-{i:05}-of-00004.parquet": ["x"] for i in (0, 1, 3)})
    with pytest.raises(
        DataError, match=r"1 of 4 shards are not in .*d, the first is data/train-00002-of-00004.parquet"
    ):
        opened(tmp_path)


def test_files_of_two_formats_in_a_split_are_not_mixed_in_silence(tmp_path):
    write(tmp_path / "d", {"train.jsonl": ["a"], "train.parquet": ["b"]})
    with pytest.raises(DataError, match=r"files of several formats \(jsonl, parquet\); name the files to read"):
        opened(tmp_path)


def test_a_part_of_a_split_and_a_place_that_is_nothing_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"split 'train\[:10%\]' is a part of a split; .* max_rows"):
        opened(tmp_path, split="train[:10%]")
    with pytest.raises(DataError, match=r"a/b/c is no folder, and 'a/b/c' is no name of a dataset \(org/name\)"):
        opened(tmp_path, "a/b/c")


def test_folders_of_save_to_disk_are_read_batch_by_batch(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the extra [hf]")
    whole = datasets.Dataset.from_dict({"n": range(2500), "text": [f"row {i}" for i in range(2500)]})
    expected = [f"row {i}" for i in range(2500)]
    whole.save_to_disk(str(tmp_path / "one"), num_shards=3)
    assert texts_of(opened(tmp_path, "one")) == expected
    datasets.DatasetDict({"train": whole, "test": whole.select(range(5))}).save_to_disk(str(tmp_path / "two"))
    assert texts_of(opened(tmp_path, "two")) == expected
    assert texts_of(opened(tmp_path, "two", split="test")) == expected[:5]
    with pytest.raises(DataError, match=r"two has no split 'dev'; it has"):
        opened(tmp_path, "two", split="dev")
    with pytest.raises(ConfigError, match="has no configurations; leave config out"):
        opened(tmp_path, "two", config="en")
    (tmp_path / "one" / "indices.arrow").touch()
    with pytest.raises(DataError, match=r"one/ is a selection of rows .* flatten_indices"):
        opened(tmp_path, "one")


def test_other_formats_come_through_datasets_once_and_are_frozen(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="needs the extra [hf]")
    write(tmp_path / "d", {f"train-{i}.csv": [f"{i}/{j}" for j in range(20)] for i in range(3)})
    expected = [f"{i}/{j}" for i in range(3) for j in range(20)]
    first = opened(tmp_path)
    assert texts_of(first) == expected
    assert len(first.manifest.files) == 3
    monkeypatch.setattr(hub, "_stream", lambda *_: pytest.fail("it was streamed before"))
    (tmp_path / "d" / "train-1.csv").write_text("n,text\n0,changed\n")
    again = opened(tmp_path)
    assert texts_of(again) == expected
    assert again.fingerprint() == first.fingerprint()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_max_rows_bounds_what_is_streamed(tmp_path):
    """datasets leaves the file open in whose middle it is stopped; it is collected here, where that is no news."""
    pytest.importorskip("datasets", reason="needs the extra [hf]")
    write(tmp_path / "d", {f"train-{i}.csv": [f"{i}/{j}" for j in range(20)] for i in range(3)})
    assert texts_of(opened(tmp_path, max_rows=25)) == [f"{i}/{j}" for i in range(3) for j in range(20)][:25]
    gc.collect()


class Shards:
    """A stream as datasets gives them, that breaks once."""

    def __init__(self, shards, broken="nothing", log=None):
        self.num_shards = len(shards)
        self._shards, self._broken, self.log = shards, broken, log if log is not None else []

    def __iter__(self):
        return self.shard(num_shards=1, index=0)

    def shard(self, *, num_shards, index):
        assert num_shards == self.num_shards
        self.log.append(index)
        for row in self._shards[index]:
            if row == self._broken:
                raise ConnectionError("the line is dead")
            yield {"text": row}


def test_a_stream_that_breaks_goes_on_at_the_first_unfinished_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_PART_BYTES", 40)
    rows = [[f"{i}/{j}" for j in range(8)] for i in range(4)]
    stream = Shards(rows, broken="2/6")
    monkeypatch.setattr(hub, "_stream", lambda *_: stream)
    with pytest.raises(DataError, match=r"ConnectionError: the line is dead"):
        opened(tmp_path, "org/name")
    resumed = Shards(rows)
    monkeypatch.setattr(hub, "_stream", lambda *_: resumed)
    source = opened(tmp_path, "org/name")
    assert texts_of(source) == [text for shard in rows for text in shard]
    assert (stream.log, resumed.log) == ([0, 1, 2], [2, 3])
    assert not list((tmp_path / "cache" / "hf").glob("*.partial"))


def test_ranks_that_arrive_together_stream_once(tmp_path, monkeypatch):
    log = []
    monkeypatch.setattr(hub, "_stream", lambda *_: Shards([["a"], ["b"]], log=log))
    with ThreadPoolExecutor(4) as pool:
        prints = {
            f.result().manifest.fingerprint for f in [pool.submit(opened, tmp_path, "org/name") for _ in range(4)]
        }
    assert len(prints) == 1
    assert log == [0, 1]


def test_a_row_without_text_is_a_bad_row_and_one_without_the_key_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_stream", lambda *_: Shards([["a", None, 7]]))
    source = opened(tmp_path, "org/name", on_bad="skip")
    assert texts_of(source) == ["a", None, None]
    monkeypatch.setattr(hub, "_stream", lambda *_: Shards([["a"]]))
    with pytest.raises(DataError, match=r"a row has no key 'body'; it has 'text'. Set text_key"):
        opened(tmp_path, "org/name", text_key="body")


def test_a_dataset_that_is_not_here_is_a_sentence_without_a_network_and_without_datasets(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="needs the extra [hf]")
    with pytest.raises(
        DataError, match=r"datasets could not read 'org/nowhere' .*hf download --repo-type dataset org/nowhere"
    ) as caught:
        opened(tmp_path, "org/nowhere")
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"'org/nowhere' are not on this machine .*pip install 'headrace\[hf\]'"):
        opened(tmp_path, "org/nowhere")
