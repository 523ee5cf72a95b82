"""Shuffle quality: how far apart in the files the documents lie that a model sees together.

    file     the files as they are
    full     a full shuffle of all documents: the best there is
    buffer   a shuffle buffer of 10,000 documents over the files in order (tf.data, Hugging Face streaming)
    py1e     MosaicML's py1e: shards in random order, each document moved by up to half of 2^18 documents
    grain    Grain's index shuffle: a permutation of all documents, read one by one. It equals `full`
    headrace chunks in random order, rows of 16 chunks in random order, 48 lanes, windows of 64 blocks; and the same with other settings

Three distances, each as a share of the corpus; 1/3 is what a full shuffle has on average:

    next     between a document and the one that is delivered next
    row      between documents that are packed into one row of tokens
    batch    between documents of different rows of a batch

A small share of `row` means that a row holds documents from one place of the files. The documents are sorted by topic in the worst way: neighbours in a
file are alike, as in a crawl that is sorted by host. `near` is the share of pairs that lie within 0.1 % of the corpus of each other.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import numpy as np

from headrace.loader import Loader, TextDataset

DOCUMENTS = 60_000
FILES = 12
SEQ_LEN = 512
BATCH = 16
STEPS = 150


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus = _written(Path(folder))
        print(f"{DOCUMENTS:,} documents in {FILES} files, seq_len {SEQ_LEN}, batch {BATCH}, {STEPS} steps\n")
        print(f"{'order':<46} {'next':>6} {'near':>6} {'row':>6} {'near':>6} {'batch':>6} {'near':>6}")
        rng = np.random.default_rng(0)
        everything = np.arange(DOCUMENTS)
        for name, order in (
            ("file", everything),
            ("full, grain", rng.permutation(DOCUMENTS)),
            ("buffer of 10,000", _buffered(rng, 10_000)),
            ("py1e (MosaicML), blocks of 2^18", _py1e(rng, 1 << 18)),
            ("py1e, blocks of 2^13", _py1e(rng, 1 << 13)),
        ):
            _line(name, [list(map(list, batch)) for batch in _rows_of(order)])
        for settings in ({}, {"shuffle_chunks": 4}, {"shuffle_chunks": 1}, {"lanes": 8}, {"lanes": 192}):
            named = (
                ", ".join(f"{key} {value}" for key, value in settings.items())
                or "defaults (48 lanes, 16 chunks together)"
            )
            _line(f"headrace, {named}", _headrace(corpus, Path(folder), settings))


def _written(folder: Path) -> Path:
    """Documents of 40 to 400 bytes whose text begins with their number."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(40, 400, DOCUMENTS)
    for number, part in enumerate(np.array_split(np.arange(DOCUMENTS), FILES)):
        lines = (json.dumps({"text": f"{i:06d}" + "x" * int(lengths[i])}) for i in part.tolist())
        (folder / f"{number:02d}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def _rows_of(order: np.ndarray, per_row: int = 2) -> list[np.ndarray]:
    """Batches of rows of documents in a given order: about as many to a row as headrace packs."""
    count = STEPS * BATCH * per_row
    return list(np.asarray(order[:count]).reshape(STEPS, BATCH, per_row))


def _buffered(rng: np.random.Generator, size: int) -> np.ndarray:
    """The order of a shuffle buffer over documents in file order."""
    buffer, out = list(range(size)), []
    for i in range(size, DOCUMENTS):
        at = int(rng.integers(size))
        out.append(buffer[at])
        buffer[at] = i
    rng.shuffle(buffer)
    return np.array(out + buffer)


def _py1e(rng: np.random.Generator, block: int) -> np.ndarray:
    """MosaicML Streaming's py1e: shards (here of 1,000 documents) in random order, then each document moved within a range of `block`."""
    shards = np.array_split(np.arange(DOCUMENTS), DOCUMENTS // 1_000)
    joined = np.concatenate([shards[i] for i in rng.permutation(len(shards))])
    return joined[np.argsort(np.arange(DOCUMENTS) + rng.uniform(-block / 2, block / 2, DOCUMENTS), kind="stable")]


def _headrace(corpus: Path, folder: Path, settings: dict[str, int]) -> list[list[list[int]]]:
    data = TextDataset([f"jsonl:{corpus}/*.jsonl"], seq_len=SEQ_LEN, seed=3, cache=folder / "cache", **settings)
    batches = []
    with Loader(data, global_batch_size=BATCH) as loader:
        for _ in range(STEPS):
            rows: list[list[int]] = [[] for _ in range(BATCH)]
            for piece in loader.pieces(next(loader)):
                rows[piece.sample_index % BATCH].append(int(piece.file[:2]) * (DOCUMENTS // FILES) + piece.row)
            batches.append(rows)
    return batches


def _line(name: str, batches: list[list[list[int]]]) -> None:
    following, within, between = [], [], []
    for rows in batches:
        flat = [document for row in rows for document in row]
        following += itertools.pairwise(flat)
        within += [(a, b) for row in rows for a, b in itertools.pairwise(row)]
        firsts = [row[0] for row in rows if row]
        between += zip(firsts, firsts[1:] + firsts[:1], strict=True)
    cells = []
    for pairs in (following, within, between):
        found = np.abs(np.diff(np.array(pairs, np.int64), axis=1)) / DOCUMENTS
        cells.append(f"{found.mean():6.3f} {(found < 0.001).mean():6.1%}")
    print(f"{name:<46} {' '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
