"""The model: packed documents are strangers, the loss is cross entropy, weights start from the seed alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.train import GPT, PRESETS, GPTConfig
from headrace.train.gpt import _LossSum, document_mask, init_parameters


def make_model(seq_len: int = 32, vocab_size: int = 50) -> GPT:
    model = GPT(GPTConfig.preset("gpt-tiny", vocab_size=vocab_size, seq_len=seq_len))
    init_parameters(model, seed=5)
    return model


def packed(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


@pytest.mark.parametrize("lengths", [(12, 20), (600, 300)], ids=["short", "longer than one tile of the kernel"])
@torch.no_grad()
def test_changing_one_document_of_a_row_leaves_the_logits_of_the_other_bit_equal(lengths):
    first, second = lengths
    model = make_model(seq_len=first + second)
    ids = torch.randint(0, 50, (1, first + second), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[:, :first] = (changed[:, :first] + 7) % 50
    before, after = (model(x, packed(first, second)) for x in (ids, changed))
    assert torch.equal(before[:, first:], after[:, first:])
    assert not torch.allclose(before[:, :first], after[:, :first])


@torch.no_grad()
def test_a_token_does_not_see_what_follows_it_and_does_see_what_precedes_it():
    model, ids = make_model(), torch.arange(32)[None] % 50
    changed = ids.clone()
    changed[0, 20] = 49
    before, after = model(ids, packed(32)), model(changed, packed(32))
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.isclose(before[:, 31], after[:, 31]).all()


@torch.no_grad()
def test_a_document_gets_the_logits_it_would_get_alone_wherever_it_is_packed():
    model = make_model()
    ids = torch.randint(0, 50, (1, 32), generator=torch.Generator().manual_seed(2))
    alone = model(ids[:, 12:25], packed(13))
    among = model(ids, packed(12, 13, 7))[:, 12:25]
    torch.testing.assert_close(among, alone, rtol=0, atol=1e-6)


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_the_mask_is_causal_inside_every_piece_and_closed_between_pieces(lengths):
    piece = np.repeat(np.arange(len(lengths)), lengths)
    index = np.arange(len(piece))
    expected = (piece[:, None] == piece[None, :]) & (index[:, None] >= index[None, :])
    assert np.array_equal(document_mask(packed(*lengths))[0, 0].numpy(), expected)


@given(rows=st.integers(1, 9), words=st.integers(2, 9), at_once=st.integers(1, 40), data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_loss_and_its_gradients_are_those_of_cross_entropy_however_it_is_cut(rows, words, at_once, data):
    labels = torch.tensor(data.draw(st.lists(st.sampled_from([-100, *range(words)]), min_size=rows, max_size=rows)))
    generator = torch.Generator().manual_seed(rows * 100 + words)
    hidden = torch.randn(rows, 4, generator=generator, dtype=torch.float64) * 3
    weight = torch.randn(words, 4, generator=generator, dtype=torch.float64)

    def gradients(loss_of):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = loss_of(h, w)
        (loss * 0.37).backward()
        return loss.detach(), h.grad, w.grad

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.train.gpt._LOGITS_AT_ONCE", at_once)
        ours = gradients(lambda h, w: _LossSum.apply(h, w, labels))
    plain = gradients(lambda h, w: F.cross_entropy(h @ w.T, labels, reduction="sum", ignore_index=-100))
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_the_loss_of_the_model_is_the_cross_entropy_of_its_logits():
    model = make_model()
    generator = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(0, 50, (3, 32), generator=generator) for _ in range(2))
    labels[1] = -100
    positions = packed(20, 12).expand(3, 32)
    logits = model(ids, positions)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    torch.testing.assert_close(model(ids, positions, labels), expected)


def test_weights_start_with_the_spread_that_was_asked_for():
    model = make_model(vocab_size=2000)
    deviation = {name: float(p.detach().std()) for name, p in model.named_parameters() if p.ndim == 2}
    assert deviation["embed.weight"] == pytest.approx(0.02, rel=0.02)
    assert deviation["blocks.0.down.weight"] == pytest.approx(0.02 / math.sqrt(2 * len(model.blocks)), rel=0.05)
    assert all(bool((p == 1).all()) for p in model.parameters() if p.ndim == 1)


def test_making_a_model_does_not_disturb_the_global_generator():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    make_model()
    assert torch.equal(torch.rand(3), expected)


def test_gpt_small_has_the_size_of_gpt2_small():
    assert PRESETS["gpt-small"] == (12, 12, 768)
    with torch.device("meta"):
        model = GPT(GPTConfig.preset("gpt-small", vocab_size=50257, seq_len=1024))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(124e6, rel=0.01)


def test_an_unknown_model_is_refused_with_the_names_that_exist():
    with pytest.raises(ConfigError, match=r"unknown model 'gpt-tin'; the models are gpt-digits, gpt-small, gpt-tiny"):
        GPTConfig.preset("gpt-tin", vocab_size=10, seq_len=8)


def test_a_width_that_the_heads_do_not_divide_is_refused_with_one_they_do():
    with pytest.raises(ConfigError, match=r"width=100, heads=8; take width=96"):
        GPTConfig(vocab_size=10, seq_len=8, layers=1, heads=8, width=100)
