"""headrace: jsonl → packed batches, shuffled, mixed and resumable; or the same blocks from prepared tokens.

    option whole, ids                      the whole batch contract; input_ids only
    option anew                            whole, and the files are read anew in every epoch, as those of a large corpus are; chunk by
                                           chunk, because shuffled in groups of 16 all chunks of this small corpus are open at once
    option prepared-whole, prepared-ids    the same two from what `headrace prepare` wrote

The encoder of the task is its engine: auto (the fastest that is installed and proves itself), or tokenizers (what a
default install has).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - headrace imports it when it is first used; the peers do at once, before the clock of the opening
from measure import BATCH, SEQ_LEN, Feed, Task, run

import headrace as hr

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def text_loader(task: Task, fields: dict[str, Any]) -> Any:
    data = hr.TextDataset(
        [f"jsonl:{task.corpus}/*.jsonl"], tokenizer=str(task.tokenizer), seq_len=SEQ_LEN, seed=1, exhausted="repeat",
        engine=task.encoder, **({"chunk_memory": 32 << 20, "shuffle_chunks": 1} if task.option == "anew" else {}),
    )  # fmt: skip
    return hr.Loader(data, global_batch_size=BATCH, tokenizer_workers=CORES, **fields)


def prepared_loader(task: Task, fields: dict[str, Any]) -> Any:
    data = hr.PreparedDataset(folder(task), seed=1, exhausted="repeat")
    return hr.PreparedLoader(data, global_batch_size=BATCH, **fields)


def folder(task: Task) -> Path:
    return task.prepared / "headrace"


def prepare(task: Task) -> None:
    config = task.prepared / "headrace.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(
        f'[[source]]\nspec = "jsonl:{task.corpus}/*.jsonl"\n[text]\ntokenizer = "{task.tokenizer}"\nseq_len = {SEQ_LEN}\n'
    )
    subprocess.run([sys.executable, "-m", "headrace", "prepare", str(config), "--out", str(folder(task)), "--quiet"], check=True)  # fmt: skip


def open_loader(task: Task, state: Any) -> Feed:
    fields = {"fields": ("input_ids",)} if task.option.endswith("ids") else {}
    loader = (prepared_loader if task.option.startswith("prepared") else text_loader)(task, fields)
    if state is not None:
        loader.load_state_dict(state)

    def batches() -> Iterator[Any]:
        for batch in loader:
            yield batch["input_ids"]

    engine = getattr(getattr(loader.data, "tokenizer", None), "engine", None)
    return Feed(
        batches=batches(), state=loader.state_dict, tokens=lambda: loader.report().tokens,
        note=f"engine {engine}" if engine else "",
    )  # fmt: skip


if __name__ == "__main__":
    run(open_loader, versions=("headrace", "torch"), prepare=prepare)
