"""A config file gives the objects that a run of it would use."""

from __future__ import annotations

import numpy as np
import pytest

import headrace as hr
from headrace.errors import ConfigError


def test_a_text_job_gives_the_loader_that_its_tables_describe(tmp_path, write_jsonl):
    path = write_jsonl("a.jsonl", [f"document {i} of a few words" for i in range(200)])
    (tmp_path / "run.toml").write_text(
        f'[run]\nseed = 5\n[[source]]\nspec = "jsonl:{path}"\n[text]\nseq_len = 32\n[loader]\nglobal_batch_size = 12\nlanes = 12\n'
    )
    job = hr.load(tmp_path / "run.toml", ["--loader.global_batch_size", "6"])
    by_hand = hr.TextDataset(
        [hr.Source(f"jsonl:{path}")], tokenizer=job.config.text.tokenizer, seq_len=32, seed=5, lanes=12
    )
    with job.loader() as loaded, hr.Loader(by_hand, global_batch_size=6) as made:
        for ours, theirs, _ in zip(loaded, made, range(5), strict=False):
            assert ours["input_ids"].shape == (6, 32)
            assert np.array_equal(ours["input_ids"], theirs["input_ids"])
        assert loaded.digest == made.digest


def test_a_stream_job_gives_the_dataset_that_its_tables_describe(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(6):
        path = tmp_path / "cells" / "ab"[i % 2] / f"{i}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, rng.normal(size=(50, 4)).astype("f4"))
    (tmp_path / "run.toml").write_text(
        f'[run]\nseed = 5\n[streams]\nroots = ["{tmp_path / "cells"}"]\nnum_streams_mixed = 3\nbatch_size = 8\n[streams.batch_sizes]\nb = 4\n'
    )
    job = hr.load(tmp_path / "run.toml")
    by_hand = hr.StreamMixingDataset(
        tmp_path / "cells", batch_size={"a": 8, "b": 4}, num_streams_mixed=3, seed=5, repeat=True
    )
    with job.dataset(prefetch_batches=0) as loaded, by_hand as made:
        for ours, theirs, _ in zip(loaded, made, range(60), strict=False):
            assert (ours["modality"], ours["draw"]) == (theirs["modality"], theirs["draw"])
            assert np.array_equal(ours["x"], theirs["x"])
        assert loaded.epoch == 1, "a run goes on into the next epoch"


def test_a_config_that_is_wrong_is_refused_when_it_is_loaded(tmp_path):
    (tmp_path / "run.toml").write_text('[run]\nseed = "x"\n[streams]\nroots = ["a"]\n')
    with pytest.raises(ConfigError, match=r"run\.toml:2: run\.seed"):
        hr.load(tmp_path / "run.toml")
