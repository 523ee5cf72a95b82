"""From raw text to packed batches: against the tokenizer alone, and against the loop one writes by hand.

tokens/s   jsonl → read, mix, tokenise, pack, batch       limit: the tokenizer on the same documents and cores
next()     with a consumer that works 20 ms a step        limit: a loader that returns the same tensor
restore    fresh object + state → first batch             at 1 % and at 99 % of an epoch
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from headrace.loader import Loader, TextDataset
from headrace.loader.dataset import sample_tokenizer
from headrace.sources import Source, cache_folder, open_source

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SEQ_LEN, BATCH = 512, 8


def corpus(folder: Path, copies: int = 3) -> tuple[list[Path], list[str]]:
    """The built-in corpora as four jsonl shards; every copy of a document is different."""
    texts: list[str] = []
    for name in ("sample:prose", "sample:code"):
        source = open_source(Source(name))
        for chunk in range(len(source.manifest.chunk_rows)):
            texts += [t for t in source.read(chunk) if t]
    texts = [f"{c} {t}" for c in range(copies) for t in texts]
    order = np.random.default_rng(0).permutation(len(texts))
    texts = [texts[i] for i in order]
    paths = []
    for shard in range(4):
        path = folder / f"part-{shard}.jsonl"
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[shard::4]))
        paths.append(path)
    return paths, texts


def tokenizer_alone(tokenizer, texts: list[str]) -> float:
    """Tokens/s of encode_batch_fast and nothing else, the better of its own threads and of ours."""
    results = []
    for own in (True, False):
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if own else "false"
        parts = [texts] if own else [texts[i::CORES] for i in range(CORES)]
        counts = [0] * len(parts)

        def encode(n: int, parts=parts, counts=counts) -> None:
            for at in range(0, len(parts[n]), 512):
                encodings = tokenizer._inner.encode_batch_fast(parts[n][at : at + 512], add_special_tokens=False)
                counts[n] += sum(len(e) for e in encodings)

        began = time.perf_counter()
        threads = [threading.Thread(target=encode, args=(n,)) for n in range(len(parts))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        results.append(sum(counts) / (time.perf_counter() - began))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return max(results)


class ByHand(IterableDataset):
    """What one writes: read lines, encode, concatenate, cut. No mixing, no resume, no packing, workers split files."""

    def __init__(self, paths: list[Path], tokenizer_path: Path) -> None:
        self.paths, self.tokenizer_path = paths, tokenizer_path

    def __iter__(self) -> Iterator[torch.Tensor]:
        from tokenizers import Tokenizer

        info = get_worker_info()
        paths = self.paths[info.id :: info.num_workers] if info else self.paths
        tokenizer = Tokenizer.from_file(str(self.tokenizer_path))
        held: list[int] = []
        for path in paths:
            with open(path) as handle:
                while lines := handle.readlines(1 << 18):
                    for encoding in tokenizer.encode_batch([json.loads(line)["text"] for line in lines]):
                        held += [*encoding.ids, 0]
                    whole = len(held) // SEQ_LEN * SEQ_LEN
                    yield from torch.tensor(held[:whole]).view(-1, SEQ_LEN)
                    held = held[whole:]


def by_hand(paths: list[Path], tokenizer_path: Path) -> float:
    loader = DataLoader(
        ByHand(paths, tokenizer_path), batch_size=BATCH, num_workers=CORES, multiprocessing_context="spawn"
    )
    tokens = 0
    iterator = iter(loader)
    tokens += next(iterator).numel()  # the workers' start is not part of the speed
    began, tokens = time.perf_counter(), 0
    for batch in iterator:
        tokens += batch.numel()
    return tokens / (time.perf_counter() - began)


def dataset(paths: list[Path], **options) -> TextDataset:
    return TextDataset(
        [Source(f"jsonl:{paths[0].parent}/part-*.jsonl")], tokenizer="sample", seq_len=SEQ_LEN, seed=1, **options
    )


def pipeline(paths: list[Path]) -> tuple[float, dict[str, float]]:
    data = dataset(paths)
    with Loader(data, global_batch_size=BATCH, tokenizer_workers=CORES) as loader:
        next(loader)
        began, before = time.perf_counter(), loader.report().tokens
        for _ in loader:
            continue
        report = loader.report()
        speed = (report.tokens - before) / (time.perf_counter() - began)
        totals = data.meter.totals()
    spent = {k.split("/")[1]: float(v) for k, v in totals.items() if k.startswith("phase/")}
    return speed, {"padding": report.padding, **spent}


def stalls(paths: list[Path], steps: int = 150, work: float = 0.02) -> tuple[list[float], list[float]]:
    """Times of next() with a consumer that works 20 ms, ours and of a loader that returns the same tensor."""

    def walk(iterator) -> list[float]:
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            next(iterator)
            times.append(time.perf_counter() - began)
            until = time.perf_counter() + work
            while time.perf_counter() < until:
                time.sleep(0.001)  # a GPU step: the host mostly waits
        return times

    same = {"input_ids": torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64)}
    with Loader(dataset(paths, exhausted="repeat"), global_batch_size=BATCH, tokenizer_workers=CORES) as loader:
        for _ in range(10):
            next(loader)
        ours = walk(loader)
    return ours, walk(iter(lambda: same, None))


def small_windows(paths: list[Path]) -> TextDataset:
    return dataset(paths, lanes=12, window_blocks=16, exhausted="repeat")


def data_tokens(paths: list[Path]) -> tuple[int, ...]:
    return dataset(paths).estimated_tokens(sample_chunks=40)


def restore(paths: list[Path], state: dict) -> float:
    """Seconds from nothing but a state to the first batch."""
    began = time.perf_counter()
    with Loader(small_windows(paths), global_batch_size=12, tokenizer_workers=CORES) as loader:
        loader.load_state_dict(state)
        next(loader)
    return time.perf_counter() - began


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        paths, texts = corpus(Path(name))
        tokenizer = sample_tokenizer(cache_folder())
        tokenizer_path = Path(name) / "tokenizer.json"
        tokenizer._inner.save(str(tokenizer_path))
        megabytes = sum(p.stat().st_size for p in paths) / 1e6
        print(f"{len(texts):,} documents, {megabytes:.0f} MB of jsonl, {CORES} cores, batches of {BATCH} x {SEQ_LEN}")
        pipeline(paths)  # kernels compiled, files in the page cache
        # Side by side, round by round: the machine is never the same twice.
        rounds = [(pipeline(paths), tokenizer_alone(tokenizer, texts)) for _ in range(5)]
        ratios = sorted(ours[0] / alone for ours, alone in rounds)
        (speed, spent), limit = sorted(rounds, key=lambda r: r[0][0] / r[1])[2]
        hand = by_hand(paths, tokenizer_path)
        print(
            f"tokens/s      headrace {speed / 1e6:.2f} M   tokenizer alone {limit / 1e6:.2f} M   ratio {ratios[2]:.2f} (of 5: {ratios[0]:.2f}–{ratios[-1]:.2f}; goal 0.85)"
        )
        print(
            f"              by hand, {CORES} worker processes, concat {hand / 1e6:.2f} M   headrace / by hand {speed / hand:.2f}"
        )
        print(
            f"              padding {spent.pop('padding'):.2%}; thread seconds "
            + ", ".join(f"{k} {v:.2f}" for k, v in sorted(spent.items(), key=lambda i: -i[1]))
        )
        ours, same = stalls(paths)
        p50, p99 = (np.percentile(ours, q) * 1e3 for q in (50, 99))
        floor = np.percentile(same, 99) * 1e3
        print(
            f"next()        p50 {p50:.3f} ms   p99 {p99:.3f} ms   max {max(ours) * 1e3:.2f} ms   (same tensor p99 {floor:.3f} ms), 20 ms of work a step"
        )
        # 12 lanes of some 67 windows each, repeated, so that no lane is dry at 99 % while others are not.
        epoch = sum(data_tokens(paths))
        states: dict[float, dict] = {}
        with Loader(small_windows(paths), global_batch_size=12, tokenizer_workers=CORES) as loader:
            for share in (0.01, 0.99):
                while loader.report().tokens < share * epoch:
                    next(loader)
                states[share] = loader.state_dict()
        early, late = (statistics.median(restore(paths, states[s]) for _ in range(5)) for s in (0.01, 0.99))
        print(
            f"restore       at 1 % {early * 1e3:.0f} ms   at 99 % {late * 1e3:.0f} ms   ratio {max(early, late) / min(early, late):.2f}  (goal 1.5); "
            f"state {len(json.dumps(states[0.99])):,} bytes"
        )


if __name__ == "__main__":
    multiprocessing.freeze_support()
    main()
