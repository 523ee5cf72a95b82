"""Hugging Face datasets, streaming.

option docs    as its documentation writes it: load_dataset(streaming=True), map(tokenise), map(group_texts), DataLoader
option tuned   batches of texts straight through the encoder into numpy, one step from texts to blocks
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset, disable_progress_bars, load_dataset
from measure import BATCH, SEQ_LEN, Encode, Feed, Task, encoder, run
from torchdata.stateful_dataloader import StatefulDataLoader

Rows = dict[str, Any]


def documented(stream: IterableDataset, task: Task) -> IterableDataset:
    """The page on streaming, and group_texts of run_clm.py. In place of its tokenizer, where the task gives a fast one."""
    tokenise = fast_tokenise(task) if task.encoder == "fastokens" else transformers_tokenise(task)

    def group_texts(examples: Rows) -> Rows:
        concatenated = {k: list(chain(*examples[k])) for k in examples}
        total = len(concatenated["input_ids"]) // SEQ_LEN * SEQ_LEN
        return {k: [t[i : i + SEQ_LEN] for i in range(0, total, SEQ_LEN)] for k, t in concatenated.items()}

    stream = stream.map(tokenise, batched=True, remove_columns=["text"])
    return stream.map(group_texts, batched=True).with_format("torch")


def transformers_tokenise(task: Task) -> Callable[[Rows], Rows]:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(task.tokenizer), eos_token="<|endoftext|>")

    def tokenise(examples: Rows) -> Rows:
        ids = tokenizer(examples["text"], return_attention_mask=False)["input_ids"]
        return {"input_ids": [[*i, tokenizer.eos_token_id] for i in ids]}

    return tokenise


def fast_tokenise(task: Task) -> Callable[[Rows], Rows]:
    import fastokens

    tokenizer = fastokens.Tokenizer.from_file(str(task.tokenizer))
    eos = tokenizer.token_to_id("<|endoftext|>")

    def tokenise(examples: Rows) -> Rows:
        ids, offsets = tokenizer.encode_batch_flat(examples["text"])
        rows = np.split(np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64)[1:-1].astype(np.int64))
        return {"input_ids": [[*row.tolist(), eos] for row in rows]}

    return tokenise


class Blocks:
    """Texts of a batch → blocks; made in the worker, because encoders do not pickle."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.encode: Encode | None = None

    def __call__(self, examples: Rows) -> Rows:
        if self.encode is None:
            self.encode = encoder(self.task, threads=1 if self.task.workers else 2)
        ids = self.encode(examples["text"])
        whole = len(ids) // SEQ_LEN * SEQ_LEN
        return {"input_ids": list(ids[:whole].astype(np.int64).reshape(-1, SEQ_LEN))}

    def __getstate__(self) -> dict[str, Any]:
        return {"task": self.task, "encode": None}


def open_loader(task: Task, state: Any) -> Feed:
    disable_progress_bars()
    files = [str(path) for path in task.shards]
    stream = load_dataset("json", data_files=files, split="train", streaming=True).repeat(None)
    if task.option == "docs":
        data = documented(stream, task)
    else:
        data = stream.map(Blocks(task), batched=True, batch_size=256, remove_columns=["text"]).with_format("numpy")
    loader = StatefulDataLoader(
        data,
        batch_size=BATCH,
        num_workers=task.workers,
        collate_fn=None if task.option == "docs" else stacked,
        **({"prefetch_factor": 4, "multiprocessing_context": "fork"} if task.workers else {}),
    )
    if state is not None:
        loader.load_state_dict(state)
    return Feed(batches=(batch["input_ids"] for batch in loader), state=loader.state_dict)


def stacked(rows: list[Rows]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.from_numpy(np.stack([row["input_ids"] for row in rows]))}


if __name__ == "__main__":
    run(open_loader, versions=("datasets", "torch", "torchdata", "transformers"))
