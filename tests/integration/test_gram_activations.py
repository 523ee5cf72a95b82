"""Activations are reduced while a model runs, and the model is left as it was."""

from __future__ import annotations

import json
import runpy
import sys

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


RANKS = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
import headrace as hr
from headrace.errors import HeadraceError

dist.init_process_group("gloo")
data = hr.TextDataset(sys.argv[1], tokenizer="sample", seq_len=32, seed=3, lanes=4)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(data.vocab_size, 6))
told = {}
for streams in (None, 4):
    with hr.Loader(data, global_batch_size=8) as loader:
        result = hr.reduce.activations(
            model, loader, module="0", steps=5, forward=lambda m, b: m(b["input_ids"]), chunk_size=48, streams=streams,
            keep=lambda b: b["labels"] != -100,
        )
    told[str(streams)] = [result.sha256, result.n_rows, result.about["streams"]]
try:  # one rank fails: the other must not wait for it
    hr.reduce.activations(model, [] if dist.get_rank() else [{"input_ids": torch.zeros(2, 3, dtype=int)}], module="0", forward=lambda m, b: m(b["input_ids"]))
except HeadraceError as error:
    told["failed"] = str(error)
print("\\n" + json.dumps(told) + "\\n", flush=True)
dist.destroy_process_group()
"""


def test_ranks_sum_the_rows_of_their_samples_to_the_bits_of_one_process(write_jsonl, warm, tmp_path):
    import headrace as hr

    texts = [f"page {i}. " + "the race carries water to the wheel. " * (i % 23) for i in range(300)]
    spec = f"jsonl:{write_jsonl('pages.jsonl', texts)}"
    (tmp_path / "ranks.py").write_text(RANKS)
    done = warm.ranks(2, [sys.executable, str(tmp_path / "ranks.py"), spec])
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(told) == 2
    data = hr.TextDataset(spec, tokenizer="sample", seq_len=32, seed=3, lanes=4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(data.vocab_size, 6))
    for name, streams in (("None", 2), ("4", 4)):
        with hr.Loader(data, global_batch_size=8) as loader:
            alone = activations(
                model, loader, module="0", steps=5, forward=call, chunk_size=48, streams=streams, keep=lambda b: b["labels"] != -100
            )  # fmt: skip
        assert [t[name] for t in told] == [[alone.sha256, alone.n_rows, streams]] * 2
    assert sorted(t["failed"] for t in told) == [
        "rank 1 could not collect its activations; its own message says why", "the loader gave no batch: there is nothing to reduce",
    ]  # fmt: skip


def test_streams_need_samples_and_a_multiple_of_the_ranks():
    model, batches = parts()
    with pytest.raises(ConfigError, match="multiple of the 1 ranks"):
        activations(model, batches, module="1", forward=call, streams=0)
    with pytest.raises(ConfigError, match="leave streams out"):
        activations(model, batches, module="1", forward=call, streams=2)


def test_the_example_reduces_the_quickstarts_model(write_jsonl, repository, capsys):
    texts = [f"page {i}. " + "the race carries water to the wheel. " * (i % 23) for i in range(300)]
    spec = f"jsonl:{write_jsonl('pages.jsonl', texts)}"
    main = runpy.run_path(str(repository / "examples" / "activations.py"))["main"]
    main(["--steps", "2", "--data", spec])
    first = capsys.readouterr().out
    main(["--steps", "2", "--data", spec])
    assert capsys.readouterr().out == first
    assert "rows of 48 activations, sha256" in first


def test_parts_that_were_frozen_stay_frozen():
    model, batches = parts()
    model[2].eval()
    activations(model, batches, module="1", forward=call)
    assert [part.training for part in model] == [True, True, False]


def test_an_output_without_rows_is_refused():
    class Loss(nn.Module):
        def forward(self, x):
            return x.mean()

    model, batches = parts()
    model.append(Loss())
    with pytest.raises(ConfigError, match=r"puts out a tensor of shape \(\), which holds no rows"):
        activations(model, batches, module="3", forward=call)
    with pytest.raises(ConfigError, match="chunk_size must be a whole number"):
        activations(model, batches, module="1", forward=call, chunk_size=0)
