"""Packing and laying out blocks, beside a memcpy of the same tokens and beside concatenation in plain Python and numpy."""

from __future__ import annotations

import time

import numpy as np

from headrace.text import Packing, TokenBatch, expand_block, kernels, pack

SEQ_LEN = 2048


def documents(count: int = 300) -> TokenBatch:
    """Log-normal lengths, median 400."""
    lengths = np.maximum(np.random.default_rng(0).lognormal(np.log(400), 1.0, count).astype(np.int64), 1)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return TokenBatch(np.random.default_rng(1).integers(0, 30_000, offsets[-1]).astype(np.int32), offsets)


def best(call, rounds: int = 30) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def concatenated(batch: TokenBatch) -> np.ndarray:
    """What one writes: lists, extended and cut."""
    held: list[int] = []
    for d in range(len(batch)):
        held += batch.ids[batch.offsets[d] : batch.offsets[d + 1]].tolist()
        held.append(1)
    whole = len(held) // SEQ_LEN * SEQ_LEN
    return np.array(held[:whole], dtype=np.int64).reshape(-1, SEQ_LEN)


def main() -> None:
    kernels()
    batch = documents()
    packing = Packing(seq_len=SEQ_LEN, blocks=64, eos_id=1)
    packed = pack(batch, packing, last=False, shuffle_key=3)
    tokens = int(packed.blocks.real.sum())
    seconds = best(lambda: pack(batch, packing, last=False, shuffle_key=3))
    copy = np.empty_like(packed.blocks.tokens)
    limit = best(lambda: np.copyto(copy, packed.blocks.tokens), 300)
    hand = best(lambda: concatenated(batch), 10) * tokens / len(batch.ids)
    padding = 1 - tokens / packed.blocks.tokens.size
    print(
        f"best_fit   {tokens / seconds / 1e6:7.0f} M tokens/s   memcpy {tokens / limit / 1e6:7.0f}   ratio {limit / seconds:.3f}   lists, concat {tokens / hand / 1e6:5.1f}   ratio {hand / seconds:.0f}   {seconds / packed.documents * 1e6:.2f} us a document, padding {padding:.2%}"
    )
    ids, labels, positions = (np.empty(SEQ_LEN, np.int64) for _ in range(3))
    row = best(lambda: expand_block(packed.blocks, 5, 0, False, ids, labels, positions), 2000)
    source = ids.copy()
    three = best(lambda: (np.copyto(ids, source), np.copyto(labels, source), np.copyto(positions, source)), 2000)
    print(
        f"expand     {row * 1e6:7.2f} us a row of ids, labels, positions   memcpy of the three {three * 1e6:.2f} us   ratio {three / row:.2f}"
    )


if __name__ == "__main__":
    main()
