"""Activations are reduced while a model runs, and the model is left as it was."""

from __future__ import annotations

import runpy

import numpy as np
import pytest
import torch
from torch import nn

from headrace.errors import ConfigError
from headrace.reduce import activations, gram


def parts() -> tuple[nn.Sequential, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 4), nn.Tanh())
    batches = [{"input_ids": torch.randint(0, 11, (3, 7)), "labels": torch.randint(-1, 2, (3, 7))} for _ in range(5)]
    return model, batches


def call(model, batch):
    return model(batch["input_ids"])


def test_the_sums_are_those_of_the_modules_outputs_in_order():
    model, batches = parts()
    result = activations(model, batches, module="1", forward=call, chunk_size=16)
    with torch.no_grad():
        rows = torch.cat([model[1](model[0](b["input_ids"])).reshape(-1, 4) for b in batches])
    assert result.n_rows == 5 * 3 * 7
    assert result.full.tobytes() == gram(rows, chunk_size=16).full.tobytes()
    kept = activations(model, batches, module=model[1], forward=call, steps=2, keep=lambda b: b["labels"] >= 0)
    mask = torch.cat([b["labels"].reshape(-1) >= 0 for b in batches[:2]])
    np.testing.assert_allclose(kept.gram, gram(rows[:42][mask]).gram, rtol=1e-12)
    assert model.training
    assert not model[1]._forward_hooks


def test_what_cannot_be_collected_is_named():
    model, batches = parts()
    with pytest.raises(ConfigError, match=r"no module '3'"):
        activations(model, batches, module="3", forward=call)
    with pytest.raises(ConfigError, match="is not part of the model"):
        activations(model, batches, module=nn.Linear(2, 2), forward=call)
    with pytest.raises(ConfigError, match=r"say how with forward="):
        activations(model, batches, module="1")
    with pytest.raises(ConfigError, match=r"keep.. gave 20 positions for 21 rows"):
        activations(model, batches, module="1", forward=call, keep=lambda b: torch.ones(20))
    with pytest.raises(ConfigError, match="was not called"):
        activations(model, batches, module="1", forward=lambda m, b: m[0](b["input_ids"]))
    with pytest.raises(ConfigError, match="no batch"):
        activations(model, [], module="1", forward=call)
    assert not model[1]._forward_hooks


def test_the_example_reduces_the_quickstarts_model(write_jsonl, repository, capsys):
    texts = [f"page {i}. " + "the race carries water to the wheel. " * (i % 23) for i in range(300)]
    spec = f"jsonl:{write_jsonl('pages.jsonl', texts)}"
    main = runpy.run_path(str(repository / "examples" / "activations.py"))["main"]
    main(["--steps", "2", "--data", spec])
    first = capsys.readouterr().out
    main(["--steps", "2", "--data", spec])
    assert capsys.readouterr().out == first
    assert "rows of 48 activations, sha256" in first
