"""Packing beside a memcpy of the same tokens and beside plain lists; every installed engine beside the reference."""

from __future__ import annotations

import time

import numpy as np

from headrace.errors import TokenizerError
from headrace.loader.dataset import sample_tokenizer
from headrace.runtime.compiled import wait_for_kernels
from headrace.sources import Source, cache_folder, open_source
from headrace.text import ENGINES, PACK_KERNELS, Packing, TokenBatch, pack

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
    wait_for_kernels(*PACK_KERNELS)
    batch = documents()
    packing = Packing(seq_len=SEQ_LEN, blocks=64, eos_id=1)
    packed = pack([batch], packing, last=False, shuffle_key=3)
    tokens = int(packed.blocks.real.sum())
    seconds = best(lambda: pack([batch], packing, last=False, shuffle_key=3))
    copy = np.empty_like(packed.blocks.tokens)
    limit = best(lambda: np.copyto(copy, packed.blocks.tokens), 300)
    hand = best(lambda: concatenated(batch), 10) * tokens / len(batch.ids)
    padding = 1 - tokens / packed.blocks.tokens.size
    print(
        f"best_fit   {tokens / seconds / 1e6:7.0f} M tokens/s   memcpy {tokens / limit / 1e6:7.0f}   ratio {limit / seconds:.3f}   lists, concat {tokens / hand / 1e6:5.1f}   ratio {hand / seconds:.0f}   {seconds / packed.documents * 1e6:.2f} us a document, padding {padding:.2%}"
    )
    engines()


def engines() -> None:
    """The same documents through every engine, one call a time; an engine's own threads are its own."""
    source = open_source(Source("sample:code"))
    texts = [t for chunk in range(min(source.manifest.chunks, 8)) for t in source.read(chunk) if t]
    reference = sample_tokenizer(cache_folder(), "tokenizers")
    tokens = len(reference.encode(texts).ids)
    slow = best(lambda: reference.encode(texts), 3)
    print(f"tokenizers {tokens / slow / 1e6:7.2f} M tokens/s   the reference")
    for name in ENGINES:
        try:
            tokenizer = sample_tokenizer(cache_folder(), name)
        except TokenizerError as error:
            print(f"{name:<10} skipped: {error}")
            continue
        seconds = best(lambda encode=tokenizer.encode: encode(texts), 10)
        print(f"{name:<10} {tokens / seconds / 1e6:7.2f} M tokens/s   ratio to the reference {slow / seconds:.1f}")


if __name__ == "__main__":
    main()
