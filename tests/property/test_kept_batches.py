"""A batch belongs to its receiver: what is kept of it never changes, in whatever form it is kept."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from headrace.loader import Loader, PreparedDataset, PreparedLoader, TextDataset
from headrace.loader.streams import StreamMixingDataset
from headrace.loader.torch_adapters import TorchDataset
from headrace.sources import Source
from headrace.text.shards import SHARD_FOLDER, PreparedManifest, PreparedSource, shard_name, write_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from stream_cells import write_streams

SEQ_LEN = 24
FORMS = {
    "tensor": lambda t: t,
    "view": lambda t: t[..., 1:],
    "row": lambda t: t[-1:],
    "alias": lambda t: t.detach().reshape(-1),
    "array": lambda t: t.numpy(),
    "part of an array": lambda t: t.numpy()[:1],
    "DLPack": np.from_dlpack,
    "DLPack of a view": lambda t: np.from_dlpack(t.reshape(-1)[1:]),
    "buffer": lambda t: memoryview(t.numpy()),
    "storage": lambda t: t.untyped_storage(),
}


def content(kept) -> bytes:
    if isinstance(kept, torch.UntypedStorage):
        return bytes(kept.tolist())
    return (kept.numpy() if isinstance(kept, torch.Tensor) else np.asarray(kept)).tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def text(folder):
    rng = np.random.default_rng(0)
    texts = [f"document {i} " + "x" * int(rng.integers(0, 90)) for i in range(200)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return TextDataset(
        [Source(f"jsonl:{folder}/a.jsonl")], seq_len=SEQ_LEN, seed=1, lanes=6, window_blocks=3, exhausted="repeat",
        cache=folder / "cache",
    )  # fmt: skip


@pytest.fixture(scope="module")
def prepared(folder):
    place = folder / "prepared" / SHARD_FOLDER / "web"
    place.mkdir(parents=True)
    lengths = np.random.default_rng(1).integers(1, 70, 300)
    tokens = np.random.default_rng(2).integers(0, 1000, lengths.sum()).astype(np.uint16)
    entry = write_shard(place / shard_name(0), tokens, lengths.astype(np.int64), first_row=0, bad=0, about={})
    source = PreparedSource(
        name="web",
        spec="x",
        weight=1.0,
        max_epochs=None,
        max_tokens=None,
        data="",
        files=(("a", 300),),
        shards=(entry,),
    )
    PreparedManifest(
        tokenizer="t", vocab_size=1000, dtype="uint16", bos_id=None, eos_id=None, pad_id=0, seq_len=SEQ_LEN, pack="best_fit",
        sources=(source,),
    ).write(folder / "prepared")  # fmt: skip
    return PreparedDataset(folder / "prepared", exhausted="repeat")


@pytest.fixture(scope="module")
def cells(folder):
    return write_streams(folder / "cells", {"atac": [40, 60], "rna": [50, 70, 30]})


@pytest.fixture(scope="module")
def doors(text, prepared, cells, folder):
    """Every way to batches, by name: a function that begins to iterate, and what to close afterwards."""

    def streams(**options):
        data = StreamMixingDataset(
            cells, batch_size=4, num_streams_mixed=3, seed=5, repeat=True, cache=folder / "cache", **options
        )
        return iter(data), data

    def loader(**options):
        made = Loader(text, global_batch_size=6, tokenizer_workers=0, segment_ids=True, **options)
        return iter(made), made

    def packed(**options):
        made = PreparedLoader(prepared, global_batch_size=6, **options)
        return iter(made), made

    def adapter(**options):
        made = TorchDataset(text, global_batch_size=6, tokenizer_workers=0, **options)
        return iter(DataLoader(made, batch_size=None if options.get("batched", True) else 2)), made

    return {
        "Loader": lambda: loader(prefetch_batches=0),
        "Loader ahead": lambda: loader(prefetch_batches=3),
        "Loader copy=True": lambda: loader(copy=True),
        "Loader copy=False": lambda: loader(copy=False, prefetch_batches=0),
        "PreparedLoader": lambda: packed(prefetch_batches=0),
        "PreparedLoader ahead": lambda: packed(prefetch_batches=3),
        "PreparedLoader, an uneven share": lambda: packed(dp_rank=3, dp_world_size=4),
        "PreparedLoader copy=True": lambda: packed(copy=True),
        "StreamMixingDataset": lambda: streams(prefetch_batches=0),
        "StreamMixingDataset ahead": lambda: streams(prefetch_batches=3),
        "TorchDataset": adapter,
        "TorchDataset by rows": lambda: adapter(batched=False, prefetch_batches=0),
    }


DOORS = (
    "Loader", "Loader ahead", "Loader copy=True", "Loader copy=False", "PreparedLoader", "PreparedLoader ahead",
    "PreparedLoader, an uneven share", "PreparedLoader copy=True", "StreamMixingDataset", "StreamMixingDataset ahead", "TorchDataset",
    "TorchDataset by rows",
)  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_batches_in_a_list_are_the_batches_that_were_delivered(doors, door):
    batches, opened = doors[door]()
    kept, copies = [], []
    with closing(opened):
        for _ in range(8):
            batch = next(batches)
            kept.append(batch)
            copies.append({n: t.clone() for n, t in batch.items() if isinstance(t, torch.Tensor)})
    for batch, copy in zip(kept, copies, strict=True):
        assert all(torch.equal(batch[name], tensor) for name, tensor in copy.items())


@pytest.mark.parametrize("door", DOORS)
@settings(max_examples=8)
@given(data=st.data())
def test_what_is_kept_of_a_batch_in_any_form_never_changes(doors, door, data):
    batches, opened = doors[door]()
    kept = []
    with closing(opened):
        for _ in range(10):
            batch = next(batches)
            tensors = [n for n, t in batch.items() if isinstance(t, torch.Tensor) and t.dim() and t.numel() > 1]
            for name in data.draw(st.lists(st.sampled_from(tensors), max_size=3)):
                form = data.draw(st.sampled_from(sorted(FORMS)))
                part = FORMS[form](batch[name])
                kept.append((name, form, part, content(part)))
            if data.draw(st.booleans()) and len(kept) > 3:
                kept.pop(data.draw(st.integers(0, len(kept) - 1)))
            del batch
            part = None
    for name, form, part, before in kept:
        assert content(part) == before, f"{name} kept as {form}"


@pytest.mark.parametrize("door", DOORS)
def test_writing_to_a_batch_changes_no_later_batch(doors, door):
    (plain, one), (written, other) = doors[door](), doors[door]()
    with closing(one), closing(other):
        for _ in range(60):
            expected, batch = next(plain), next(written)
            for name, value in expected.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(batch[name], value), name
                    batch[name].fill_(7)
