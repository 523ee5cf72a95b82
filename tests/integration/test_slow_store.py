"""A store that is slow to open an object: it is opened ahead of need, and the order is that of a disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import slow_server
from headrace.loader import Loader, TextDataset
from headrace.sources import Source

pytest.importorskip("obstore", reason="pip install 'headrace[s3]'")


@pytest.fixture
def shards(tmp_path) -> Path:
    folder = tmp_path / "bucket" / "web"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(5)
    for shard in range(6):
        lines = [json.dumps({"text": f"{shard} {i} " + "z" * int(rng.integers(50, 400))}) for i in range(150)]
        (folder / f"s{shard}.jsonl").write_text("".join(line + "\n" for line in lines))
    return tmp_path


def loader_over(spec: str, tmp_path: Path) -> Loader:
    data = TextDataset(
        Source(spec), seq_len=128, seed=1, lanes=4, window_blocks=8, cache=tmp_path / "cache", exhausted="repeat"
    )
    return Loader(data, global_batch_size=4, tokenizer_workers=2)


def test_objects_are_opened_before_their_rows_are_due_and_the_order_is_that_of_the_disk(shards, tmp_path, monkeypatch):
    with slow_server.serving(shards) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        local = loader_over(f"jsonl:{shards}/bucket/web/*.jsonl", tmp_path)
        for _ in range(260):
            next(local)
        remote = loader_over("jsonl:s3://bucket/web/*.jsonl", tmp_path)
        before = server.counts()
        server.slow(first=0.2)
        delivered: set[str] = set()
        ahead = []
        for _ in range(260):
            opened = {name.rpartition("/")[2] for name, n in server.counts().items() if n > before.get(name, 0)}
            delivered |= {piece.file for piece in remote.pieces(next(remote))}
            ahead.append(len(opened - delivered))
        assert remote.digest == local.digest
        assert delivered == {f"s{i}.jsonl" for i in range(6)}
        assert max(ahead) >= 1, "an object is opened while others are still being delivered"
        remote.close()
        local.close()
