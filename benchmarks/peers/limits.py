"""What nothing can be faster than: the encoder alone, and memcpy.

option ours     `workers` threads call the encoder on the corpus's texts in memory: no reading, packing or batching
option own      one caller; the encoder's own threads are the parallelism
option memcpy   int64 [8, 2048] batches copied from a region larger than the caches into one reused buffer
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
from measure import BATCH, SEQ_LEN, TOKENS, Feed, Task, run

GROUP = 512
MEMCPY_BATCHES = 2048  # 256 MB


def encoder_alone(task: Task) -> Feed:
    if task.option == "one":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    threads = 2 if task.option == "ours" else 1
    encode = counting_encoder(task, inner=2 if task.option == "own" else 1)
    texts = [json.loads(line)["text"] for path in task.shards for line in path.open()]
    groups = [texts[at : at + GROUP] for at in range(0, len(texts), GROUP)]
    done = [0] * threads

    def work(n: int) -> None:
        while True:
            for group in groups[n::threads]:
                done[n] += encode(group)

    def paced() -> Iterator[np.ndarray]:
        """A batch for every [8, 2048] tokens encoded, so that the clock is the one of the loaders."""
        same, given = np.zeros((BATCH, SEQ_LEN), np.int64), 0
        while True:
            while sum(done) < given + TOKENS:
                time.sleep(0.002)
            given += TOKENS
            yield same

    for n in range(threads):
        threading.Thread(target=work, args=(n,), daemon=True).start()
    return Feed(batches=paced())


def counting_encoder(task: Task, inner: int) -> Callable[[list[str]], int]:
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if inner > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(inner)
    if task.encoder == "fastokens":
        import fastokens

        fast = fastokens.Tokenizer.from_file(str(task.tokenizer))
        return lambda texts: len(fast.encode_batch_flat(texts)[0]) // 4
    if task.encoder == "gigatoken":
        import gigatoken

        giga = gigatoken.Tokenizer(str(task.tokenizer))
        return lambda texts: len(giga.encode_batch(texts, parallel=inner > 1).layout.content)
    from tokenizers import Tokenizer

    reference = Tokenizer.from_file(str(task.tokenizer))
    return lambda texts: sum(len(e) for e in reference.encode_batch_fast(texts, add_special_tokens=False))


def memcpy() -> Feed:
    region = np.random.default_rng(0).integers(0, 32_000, (MEMCPY_BATCHES, BATCH, SEQ_LEN))
    reused = np.empty((BATCH, SEQ_LEN), np.int64)

    def copies() -> Iterator[np.ndarray]:
        while True:
            for batch in region:
                np.copyto(reused, batch)
                yield reused

    return Feed(batches=copies())


def open_loader(task: Task, state: object) -> Feed:
    return memcpy() if task.option == "memcpy" else encoder_alone(task)


if __name__ == "__main__":
    run(open_loader, versions=("numpy",))
