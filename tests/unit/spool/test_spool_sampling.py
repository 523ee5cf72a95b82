"""The ready samplers: what is drawn, in which shares, and always the same from the same generator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError
from headrace.spool import open_batch_file
from headrace.spool.providers.sampling import (
    ClassificationProvider,
    MLMProvider,
    NextTokenProvider,
    mask_tokens,
    next_span,
    stratified,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_span_is_followed_by_itself_moved_by_one():
    tokens = np.arange(1000, dtype=np.uint16)
    x, y = next_span(tokens, 50, 16, generator())
    assert torch.equal(x + 1, y)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert x.dtype == torch.int64
    with pytest.raises(ConfigError, match="a span of 16 tokens and the one after it need 17, the text has 16"):
        next_span(tokens[:16], 1, 16, generator())


def test_every_span_of_a_text_can_come_up():
    x, _ = next_span(np.arange(6), 2000, 4, generator())
    assert sorted(x[:, 0].unique().tolist()) == [0, 1]


def test_fifteen_percent_are_to_be_guessed_and_are_masked_by_the_rule():
    ids = torch.randint(10, 1000, (400, 128), generator=generator(1))
    inputs, labels = mask_tokens(ids, generator(2), mask_id=4, vocab_size=1000)
    chosen = labels != -100
    assert abs(chosen.float().mean().item() - 0.15) < 0.005
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(inputs[~chosen], ids[~chosen]), "what is not to be guessed is shown"
    masked, same = (inputs[chosen] == 4).float().mean().item(), (inputs[chosen] == ids[chosen]).float().mean().item()
    assert abs(masked - 0.8) < 0.02
    assert abs(same - 0.1) < 0.02


def test_protected_tokens_are_never_masked():
    ids = torch.zeros(50, 50, dtype=torch.int64)
    inputs, labels = mask_tokens(ids, generator(), mask_id=4, vocab_size=9, protected=ids == 0)
    assert (labels == -100).all()
    assert torch.equal(inputs, ids)


def test_classes_come_up_equally_often_however_rare_they_are():
    labels = np.array([0] * 990 + [1] * 9 + [7])
    rows = np.concatenate([stratified(labels, 30, generator(seed)) for seed in range(40)])
    counts = {k: int((labels[rows] == k).sum()) for k in (0, 1, 7)}
    assert counts == {0: 400, 1: 400, 7: 400}
    assert len(set(rows[labels[rows] == 1])) == 9
    uneven = [
        np.bincount(labels[stratified(labels, 31, generator(seed))], minlength=8)[[0, 1, 7]] for seed in range(40)
    ]
    assert all(sorted(u) == [10, 10, 11] for u in uneven)
    with pytest.raises(ConfigError, match="at least one labelled row"):
        stratified(np.empty(0, np.int64), 3, generator())


def first_file(provider, folder):
    provider.run(("train",), max_files=1)
    file = open_batch_file(folder / "queue" / "train" / "000000000000.safetensors")
    file.check()
    return file


def test_the_mlm_provider_writes_the_document_s_schema(tmp_path):
    tokens = {"train": np.random.default_rng(0).integers(5, 50, 5000), "val": np.arange(5, 50)}
    tokens["train"][::7] = 0
    made = MLMProvider(
        tmp_path,
        8,
        32,
        batches_per_file=3,
        dataset_name="toy",
        tokens=tokens,
        vocab_size=50,
        mask_token_id=4,
        pad_token_id=0,
        special_ids=(1, 2),
    )
    file = first_file(made, tmp_path)
    assert [(f.name, f.dtype, f.shape) for f in file.header.schema] == [
        ("input_ids", "int64", (32,)), ("attention_mask", "int8", (32,)), ("labels", "int64", (32,)),
    ]  # fmt: skip
    ids, mask, labels = (file.arrays[n] for n in ("input_ids", "attention_mask", "labels"))
    assert ((labels == -100) | (labels >= 5)).all(), "padding is never to be guessed"
    assert (mask[ids == 0] == 0).mean() > 0.9
    assert made.meta["mask_token_id"] == 4
    assert made.meta["training_type"] == "MLM"


def test_the_next_token_provider_is_what_a_language_model_needs(tmp_path):
    made = NextTokenProvider(
        tmp_path, 4, 8, batches_per_file=2, dataset_name="toy", tokens={"train": np.arange(500)}, vocab_size=500
    )
    file = first_file(made, tmp_path)
    assert np.array_equal(file.arrays["x"] + 1, file.arrays["y"])
    with pytest.raises(ConfigError, match="block_size is missing"):
        NextTokenProvider(tmp_path / "b", 4, dataset_name="toy", tokens={"train": np.arange(500)}, vocab_size=500).run(
            ("train",)
        )


def test_other_data_of_the_same_size_is_another_job(tmp_path):
    def made(first):
        return NextTokenProvider(
            tmp_path, 4, 8, dataset_name="toy", tokens={"train": np.arange(first, first + 500)}, vocab_size=600
        )

    made(0).run(("train",), max_files=1)
    with pytest.raises(ConfigError, match=r"was made for something else .split_info"):
        made(1).run(("train",), max_files=1)


def test_the_classification_provider_balances_sequences_and_tokens(tmp_path):
    ids = np.random.default_rng(0).integers(1, 50, (200, 6))
    ids[:, 4:] = 0
    labels = (np.arange(200) >= 196).astype(np.int64)
    file = first_file(
        ClassificationProvider(
            tmp_path / "a",
            10,
            dataset_name="toy",
            examples={"train": (ids, labels)},
            classes=2,
            label_map={"no": 0, "yes": 1},
        ),
        tmp_path / "a",
    )
    assert file.arrays["labels"].reshape(-1, 10).sum(axis=1).tolist() == [5] * 100
    assert (file.arrays["attention_mask"][:, 4:] == 0).all()
    per_token = np.zeros((200, 6), np.int64)
    per_token[:3, 2] = 1
    per_token[:, 4:] = -100
    made = ClassificationProvider(
        tmp_path / "b", 10, dataset_name="toy", examples={"train": (ids, per_token)}, classes=2, vocab_size=50
    )
    file = first_file(made, tmp_path / "b")
    assert made.meta["training_type"] == "TOKEN_CLASSIFICATION"
    assert ((file.arrays["labels"] == 1).any(axis=1).reshape(-1, 10).sum(axis=1) == 5).all()


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (np.zeros((3, 2, 2), np.int64), "one number a sample or one a token"),
        (np.zeros(4, np.int64), r"ids \[3, 2\] and labels \[4\], which do not fit"),
        (np.array([0, 1, 5]), "labels from 0 to 5; there are 2 classes"),
        (np.array([0, -1, 1]), "labels from -1 to 1; there are 2 classes"),
    ],
)
def test_labels_that_do_not_fit_are_refused(tmp_path, labels, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ClassificationProvider(
            tmp_path, 2, dataset_name="toy", examples={"train": (np.ones((3, 2), np.int64), labels)}, classes=2
        )
