"""One loader over three kinds of data: the same contract for packed text, prepared blocks and streams."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError, CursorMismatch
from headrace.loader import Loader, PreparedDataset, PreparedLoader, TextDataset
from headrace.loader.streams import StreamMixingDataset
from headrace.settings import LoaderSettings
from headrace.text.shards import SHARD_FOLDER, PreparedManifest, PreparedSource, shard_name, write_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from stream_cells import write_streams

KINDS = ("text", "prepared", "streams")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("one")


@pytest.fixture(scope="module")
def datasets(folder):
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"document {i} " + "x" * (7 * i % 90)}) + "\n" for i in range(60))
    )
    text = TextDataset([f"jsonl:{folder}/a.jsonl"], seq_len=16, seed=1, lanes=2, window_blocks=3, exhausted="drop", cache=folder / "c")  # fmt: skip
    place = folder / "prepared" / SHARD_FOLDER / "web"
    place.mkdir(parents=True)
    lengths = np.random.default_rng(1).integers(1, 70, 80)
    tokens = np.random.default_rng(2).integers(0, 1000, lengths.sum()).astype(np.uint16)
    entry = write_shard(place / shard_name(0), tokens, lengths.astype(np.int64), first_row=0, bad=0, about={})
    source = PreparedSource(name="web", spec="x", weight=1.0, max_epochs=None, max_tokens=None, data="", files=(("a", 80),), shards=(entry,))  # fmt: skip
    PreparedManifest(tokenizer="t", vocab_size=1000, dtype="uint16", bos_id=None, eos_id=None, pad_id=0, seq_len=16, pack="best_fit", sources=(source,)).write(folder / "prepared")  # fmt: skip
    cells = write_streams(folder / "cells", {"atac": [21, 30], "rna": [25, 35, 10]})
    streams = StreamMixingDataset(cells, batch_size=4, num_streams_mixed=3, seed=5, cache=folder / "c")
    return {"text": text, "prepared": PreparedDataset(folder / "prepared"), "streams": streams}


def make(datasets, kind: str, **options) -> Loader:
    sized = {} if kind == "streams" else {"global_batch_size": 4}
    return Loader(datasets[kind], **(sized | options))


def content(batch) -> dict:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in batch.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_saved_anywhere_goes_on_with_the_next_batch_whatever_is_prefetched(datasets, kind):
    with make(datasets, kind, prefetch_batches=0) as straight:
        expected, states = [], [straight.state_dict()]
        for batch in straight:
            expected.append(content(batch))
            states.append(json.loads(json.dumps(straight.state_dict())))
        assert straight.ended
        assert straight.delivered_steps == len(expected) > 8
    with make(datasets, kind, prefetch_batches=3) as ahead:
        for at in (3, len(expected) - 2, 0):
            ahead.load_state_dict(states[at])
            for offset in range(2):
                assert content(next(ahead)) == expected[at + offset]
            assert ahead.state_dict() == states[at + 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_follows_the_last_and_set_epoch_names_it(datasets, kind):
    def plain(batch) -> dict:  # without the position in the run
        return {name: value for name, value in content(batch).items() if name not in ("sample_index", "draw")}

    with make(datasets, kind) as loader, make(datasets, kind) as other:
        passes = []
        for number in range(3):
            loader.set_epoch(number)  # comes next anyway
            passes.append([plain(batch) for batch in loader])
        assert passes[0] != passes[1] != passes[2] != passes[0]
        other.set_epoch(2)
        got = [plain(next(iter(other)))]
        other.set_epoch(4)  # a pass is under way
        got += [plain(batch) for batch in other]
        assert got == passes[2]
        with pytest.raises(ConfigError, match="integer of 0 or more"):
            other.set_epoch(-1)


def test_a_loader_has_a_length_where_its_pass_has_one(datasets, folder):
    for kind in ("prepared", "streams"):
        with make(datasets, kind) as loader:
            assert len(loader) == sum(1 for _ in loader) > 5
    with pytest.raises(TypeError, match="known only once it has been tokenised"):
        len(make(datasets, "text"))
    with pytest.raises(TypeError, match="have no length"):
        len(StreamMixingDataset(folder / "cells", batch_size=4, repeat=True, cache=folder / "c").loader)
    assert make(datasets, "text"), "a loader without a length is still true"


@pytest.mark.parametrize("kind", KINDS)
def test_every_loader_reports_and_drains_by_the_specs_it_names(datasets, kind):
    with make(datasets, kind) as loader:
        assert loader.drain_metrics() == {}
        for _ in range(3):
            next(loader)
        known = {spec.key for spec in loader.metric_specs()}
        drained = loader.drain_metrics()
        families = {key.partition("<")[0] for key in known if "<" in key}
        assert drained
        assert all(key in known or any(key.startswith(f) for f in families) for key in drained)
        report = loader.report()
        assert report.steps == loader.step == 3
        assert report.tokens > 0
        assert sum(realised for realised, _ in report.mix.values()) == pytest.approx(1)
        assert f"{report.tokens:,} {'cells' if kind == 'streams' else 'tokens'}" in str(report)
        assert loader.gather_state() == loader.state_dict()


def test_the_loader_of_a_stream_dataset_has_a_position_of_its_own(datasets):
    data = datasets["streams"]
    before = data.state_dict()
    with make(datasets, "streams") as loader:
        assert [int(b["draw"]) for _, b in zip(range(3), loader, strict=False)] == [0, 1, 2]
        assert data.state_dict() == before != loader.state_dict()


def test_a_prepared_loader_is_the_loader_by_another_name(datasets):
    data = datasets["prepared"]
    with PreparedLoader(data, global_batch_size=4) as named, Loader(data, global_batch_size=4) as loader:
        assert [content(b) for b in named] == [content(b) for b in loader]
        assert named.digest == loader.digest
        assert isinstance(named, Loader)
    other, fixed = (
        Loader(PreparedDataset(data.folders, seed=3), global_batch_size=4),
        {"config:order": "the seed is the run's"},
    )
    with pytest.raises(CursorMismatch, match="cannot be accepted"):
        other.load_state_dict(loader.state_dict(), accept={"config:order"}, fixed=fixed)


def test_settings_are_given_whole_or_by_name_and_refused_by_name(datasets):
    chosen = LoaderSettings(global_batch_size=6, prefetch_batches=0)
    loader = Loader(datasets["text"], chosen, global_batch_size=8)
    assert (loader.global_batch_size, loader.plan.settings.prefetch_batches) == (8, 0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'batch_size'"):
        Loader(datasets["text"], batch_size=8)
    with pytest.raises(ConfigError, match=r"global_batch_size is for batches of tokens[^;]*leave it out"):
        Loader(datasets["streams"], global_batch_size=8)
    with pytest.raises(
        ConfigError, match="takes a TextDataset, a PreparedDataset or a StreamMixingDataset, got a list"
    ):
        Loader([1, 2], global_batch_size=8)
