"""The ready samplers: what is drawn, in which shares, and always the same from the same generator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError
from headrace.spool.providers.sampling import mask_tokens, next_span, stratified


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
