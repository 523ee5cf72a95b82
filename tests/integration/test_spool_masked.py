"""[spool] task = "mlm": BERT's batches over any text source, the same whoever makes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError
from headrace.runs.job import Job
from headrace.runs.provide import provide_text, provider_of
from headrace.spool import DatasetConsumer, read_meta
from spool_config import load_spool_config, write_spool_config


@pytest.fixture
def config(tmp_path):
    path = write_spool_config(
        tmp_path / "mlm.toml", spool={"task": "mlm", "batches_per_file": 2, "max_backlog_files": 6}
    )
    return lambda *more: load_spool_config(path, "--spool.dir", str(tmp_path / "S"), *more)


def batches(folder, count):
    with DatasetConsumer(folder, "cpu", ack="commit", deadline=30) as consumer:
        return [{k: v.clone() for k, v in consumer.get_batch("train").items()} for _ in range(count)]


def test_fifteen_percent_of_a_source_s_tokens_are_to_be_guessed_and_no_padding(config, tmp_path):
    checked = config()
    assert provide_text(checked, max_files=6) == 6
    meta = read_meta(tmp_path / "S")
    assert (meta["training_type"], meta["vocab_size"], meta["mask_token_id"]) == ("MLM", 260, 259)
    straight = Job(checked).loader(dp_rank=0, dp_world_size=1, segment_ids=True)
    chosen = real = 0
    for batch in batches(tmp_path / "S", 12):
        plain = next(straight)
        assert torch.equal(batch["sample_index"], plain["sample_index"])
        guessed = batch["labels"] != -100
        assert torch.equal(batch["labels"][guessed], plain["input_ids"][guessed])
        assert torch.equal(batch["input_ids"][~guessed], plain["input_ids"][~guessed])
        padding = plain["segment_ids"] == 0
        assert torch.equal(batch["attention_mask"] == 0, padding)
        assert not (guessed & padding).any()
        assert batch["attention_mask"].dtype == torch.int8
        chosen, real = chosen + int(guessed.sum()), real + int((~padding).sum())
    straight.close()
    assert abs(chosen / real - 0.15) < 0.015


def test_masks_are_the_same_whoever_makes_the_file(config, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    provide_text(config("--spool.dir", str(one)), max_files=4)
    checked = config("--spool.dir", str(two))
    data = Job(checked).dataset()
    for _ in range(4):
        provider_of(Job(checked), data).run(max_files=1)
    for path in sorted((one / "queue" / "train").iterdir()):
        assert path.read_bytes() == (two / "queue" / "train" / path.name).read_bytes()


def test_the_mask_and_the_share_are_the_config_s(config, tmp_path):
    provide_text(config("--spool.mask_id", "5", "--spool.mask_probability", "0.5"), max_files=1)
    meta = read_meta(tmp_path / "S")
    assert (meta["mask_token_id"], meta["vocab_size"], meta["mask_probability"]) == (5, 259, 0.5)
    (batch,) = batches(tmp_path / "S", 1)
    guessed = batch["labels"] != -100
    assert abs(float(guessed.float().mean()) - 0.5) < 0.1
    assert abs(float((batch["input_ids"][guessed] == 5).float().mean()) - 0.8) < 0.1
    with pytest.raises(ConfigError, match=r"spool.mask_id = 300, the tokenizer's ids end at 258"):
        provide_text(config("--spool.mask_id", "300"), max_files=1)
    with pytest.raises(ConfigError, match=r"was made for something else \(.*mask"):
        provide_text(config(), max_files=1)
    assert np.array_equal(sorted(batch), ["attention_mask", "input_ids", "labels", "sample_index"])


def test_headrace_run_says_that_it_trains_on_other_batches(config, headrace, tmp_path):
    config()
    done = headrace("run", "mlm.toml", "--spool.dir", "S", cwd=tmp_path)
    assert done.returncode == 1
    assert 'spool.task = "mlm" makes batches for a trainer of your own' in done.stderr
    assert "Traceback" not in done.stderr


def test_padding_is_not_guessed_where_the_tokenizer_has_no_token_for_it(config, tmp_path):
    job = Job(config())
    provider = provider_of(job, job.dataset())
    provider._special = []  # as of one whose padding is filled with a token that also occurs in text
    provider.run(max_files=6)
    padded = 0
    for batch in batches(tmp_path / "S", 12):
        padding = batch["attention_mask"] == 0
        assert not (padding & (batch["labels"] != -100)).any()
        padded += int(padding.sum())
    assert padded > 20
