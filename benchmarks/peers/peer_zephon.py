"""Zephon: StaticMixtureWorkSource → decode_text → tokenize → pack_flat(wrap) → batch, resumable, shards shuffled.

    option threads   its default runner: the stages are threads of this process, two of them tokenise
    option mtp       the same in one other process, batches come over a queue (mtp_mode)
    option process   two worker processes (runner="process")

chunk_size is 1,024 documents rather than 16,384: a restore replays chunks, and the default holds most of the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from measure import BATCH, SEQ_LEN, Feed, Task, run
from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import MixtureSpec, StaticMixtureWorkSource

RUNNERS = {"threads": {"runner": "threads"}, "process": {"runner": "process"}, "mtp": {"mtp_mode": True}}


class FastTokenizer:
    """fastokens behind the interface of a Hugging Face tokenizer that Zephon asks for."""

    name_or_path, pad_token, eos_token, bos_token = "fastokens", None, "<|endoftext|>", None
    pad_token_id = bos_token_id = None

    def __init__(self, path: str) -> None:
        self.path, self.inner = path, None
        self.eos_token_id = self._open().token_to_id("<|endoftext|>")

    def _open(self) -> Any:
        import fastokens

        if self.inner is None:
            self.inner = fastokens.Tokenizer.from_file(self.path)
        return self.inner

    def __call__(self, texts: Any, **_: Any) -> dict[str, list[np.ndarray]]:
        ids, offsets = self._open().encode_batch_flat([texts] if isinstance(texts, str) else list(texts))
        ends = np.frombuffer(offsets, np.uint64)[1:-1].astype(np.int64)
        return {"input_ids": np.split(np.frombuffer(ids, np.uint32).astype(np.int64), ends)}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"inner": None}


def tokenizer(task: Task) -> Any:
    if task.encoder == "fastokens":
        return FastTokenizer(str(task.tokenizer))
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(task.tokenizer), eos_token="<|endoftext|>")


def open_loader(task: Task, state: Any) -> Feed:
    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path("corpus", str(task.corpus))],
        mixture=MixtureSpec({"corpus": 1.0}),
        chunk_size=1024,
        seed=1,
        exhausted_policy="repeat",
    )
    pipeline = (
        Pipeline(source)
        .decode_text()
        .tokenize(tokenizer(task), field="text", add_attention_mask=False, return_tensors="np", special_tokens="eos",
                  parallelism=task.workers)
        .pack_flat(SEQ_LEN, algorithm="wrap", emit_positions=False)
        .batch(microbatch_size=BATCH)
        .options(**RUNNERS[task.option])
    )  # fmt: skip
    if state is not None:
        pipeline.restore(state)

    def batches() -> Iterator[torch.Tensor]:
        for batch in pipeline:
            yield batch.to_training()["input_ids"]

    return Feed(batches=batches(), state=pipeline.checkpoint)


if __name__ == "__main__":
    run(open_loader, versions=("zephon", "torch"))
