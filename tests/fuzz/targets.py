"""Fuzz targets: for every reader, files that it reads and the call that reads one."""

from __future__ import annotations

import asyncio
import gzip
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RL = Path(__file__).resolve().parents[1] / "data" / "rl"
TEXTS = ["alpha", "", "beta " * 40, "gamma \u2028 delta", "é" * 9] * 4
X = np.arange(80, dtype=np.float32).reshape(20, 4)
META = {"dataset_name": "d", "training_type": "SEQUENCE_SCORING", "batch_size": 2, "split_info": {}, "batch_schema": [{"name": "x", "dtype": "int64", "shape": []}]}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One reader."""

    name: str
    """What the fuzzed file is called; it may lie in a folder."""
    make: Callable[[Path], None]
    """Write a whole file (and what it needs beside it) where the path says."""
    read: Callable[[Path], Any]
    exact: bool = False
    """Whether the file carries checksums: then it is read as it was or not at all."""


TARGETS: dict[str, Target] = {}


def target(title: str, name: str, make: Callable[[Path], None], *, exact: bool = False):
    def add(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
        TARGETS[title] = Target(name=name, make=make, read=read, exact=exact)
        return read

    return add


# ---------------------------------------------------------------------------------------------- files


def table() -> pa.Table:
    lists = pa.array([[1.0, 2.0]] * 20, pa.list_(pa.float32()))
    return pa.table({"text": TEXTS, "n": range(20), "x": pa.array(X.tolist(), pa.list_(pa.float32(), 4)), "r": lists, "d": pa.array(["a", "b"] * 10).dictionary_encode()})  # fmt: skip


def parquet(path: Path) -> None:
    pq.write_table(table().drop_columns(["d"]), path, row_group_size=7)


def plain_parquet(path: Path) -> None:
    pq.write_table(table().select(["text", "n"]), path, row_group_size=7, compression="none", use_dictionary=False)


def arrow(path: Path, rows: pa.Table | None = None) -> None:
    rows = table() if rows is None else rows
    with pa.ipc.new_file(path, rows.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as sink:
        sink.write_table(rows, max_chunksize=7)


def stream(path: Path) -> None:
    with pa.ipc.new_stream(path, table().schema) as sink:
        sink.write_table(table(), max_chunksize=7)


def lines() -> bytes:
    return "".join(json.dumps({"text": t, "n": i, "x": [1.5, i]}) + "\n" for i, t in enumerate(TEXTS)).encode()


def text(path: Path, rows: Any = None) -> list[Any]:
    from headrace.sources import Source, open_source

    scheme = {"gz": "jsonl", "zst": "jsonl"}.get(path.suffix[1:], path.suffix[1:])
    cache = path.parent / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    with open_source(Source(f"{scheme}:{path.name}"), base=path.parent, cache=cache, rows=rows) as source:
        return [source.read(chunk) for chunk in range(source.manifest.chunks)]


def labelled(path: Path) -> list[Any]:
    from headrace.sources import RowShape

    return text(path, RowShape(columns=("text", "n"), judge=lambda row: ""))


def cells(path: Path) -> Any:
    from headrace.sources.cells import open_cells

    file = open_cells(path)
    try:
        return [file.read(0, min(file.rows, 1000)), file.read(min(3, file.rows), min(9, file.rows))]
    finally:
        file.close()


def gram(path: Path) -> Any:
    from headrace.reduce.shards import RowShards

    shards = RowShards.open([path], field=None if path.suffix == ".npy" else "x")
    return shards.read(0, min(shards.n_rows, 1000)).x.sum()


for title, name, make in (
    ("parquet", "a.parquet", parquet),
    ("plain parquet", "a.parquet", plain_parquet),
    ("arrow file", "a.arrow", arrow),
    ("arrow stream", "a.arrow", stream),
    ("jsonl", "a.jsonl", lambda p: p.write_bytes(lines())),
):
    target(f"text: {title}", name, make)(text)
    if name != "a.arrow":  # a dictionary among the columns of a batch is refused
        target(f"labelled: {title}", name, make)(labelled)
target("labelled: arrow", "a.arrow", lambda p: arrow(p, table().drop_columns(["d"])))(labelled)
target("text: txt", "a.txt", lambda p: p.write_bytes("\n".join(TEXTS).encode()))(text)
target("text: gz", "a.jsonl.gz", lambda p: p.write_bytes(gzip.compress(lines())), exact=True)(text)
target("text: zst", "a.jsonl.zst", lambda p: p.write_bytes(pa.Codec("zstd").compress(lines(), asbytes=True)))(text)
target("cells: parquet", "a.parquet", lambda p: pq.write_table(table(), p, row_group_size=7))(cells)
target("cells: arrow file", "a.arrow", arrow)(cells)
target("cells: arrow stream", "a.arrow", stream)(cells)
target("cells: npy", "a.npy", lambda p: np.save(p, X))(cells)
target("cells: structured npy", "a.npy", lambda p: np.save(p, np.zeros(9, [("a", "<f4"), ("b", ">i8", (2,))])))(cells)
target("cells: npz", "a.npz", lambda p: np.savez(p, x=X, n=np.arange(20)))(cells)
target("cells: deflated npz", "a.npz", lambda p: np.savez_compressed(p, x=X, n=np.arange(20)))(cells)
target("cells: jsonl", "a.jsonl", lambda p: p.write_bytes(lines()))(cells)
target("gram: parquet", "a.parquet", parquet)(gram)
target("gram: npy", "a.npy", lambda p: np.save(p, X))(gram)


def safetensors(path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"x": X, "y": X[:, 0].copy()}, path)


target("gram: safetensors", "a.safetensors", safetensors)(gram)


# ---------------------------------------------------------------------------------------------- ours


def container(path: Path) -> None:
    from headrace.files import write_container

    write_container(path, {"a": X, "b": np.arange(5)}, {"k": [1, {"l": "m"}]}, segments={"a": 3})


@target("container", "a.safetensors", container, exact=True)
def read_container(path: Path) -> Any:
    from headrace.files import open_container

    found = open_container(path)
    return {n: a.tobytes() for n, a in found.arrays.items()}, found.meta


def shard(path: Path) -> None:
    from headrace.text.shards import write_shard

    write_shard(path, np.arange(60, dtype=np.uint16), np.array([20, 0, 40]), first_row=0, bad=0, about={})


@target("prepared shard", "a.tokens", shard, exact=True)
def read_shard(path: Path) -> Any:
    from headrace.text.shards import open_shard

    return str(open_shard(path, full=True).entry)


def batch_file(path: Path) -> None:
    from headrace.batch import BatchSpec
    from headrace.spool.batch_file import FileHeader, write_batch_file

    schema = BatchSpec.from_json([{"name": "x", "dtype": "int64", "shape": [3]}])
    header = FileHeader(split="train", seq=0, schema=schema, rows=8, first=0, batch_size=2)
    write_batch_file(path, header, {"x": np.arange(24).reshape(8, 3)})


def read_batch_file(path: Path) -> Any:
    from headrace.spool import open_batch_file

    file = open_batch_file(path, split="train", seq=0)
    file.check()
    return file.arrays["x"].tobytes()


target("spool file", "a.safetensors", batch_file, exact=True)(read_batch_file)
target("spool .pt", "a.pt", batch_file)(read_batch_file)


def meta_json(path: Path) -> None:
    from headrace.spool.meta import write_meta

    write_meta(path.parent, META)


def read_meta(path: Path) -> Any:
    from headrace.spool import read_meta as read

    return read(path.parent)


target("spool meta.json", "json/meta.json", meta_json, exact=True)(read_meta)
target("spool meta.pkl", "pkl/meta.pkl", lambda p: p.write_bytes(pickle.dumps(META, protocol=4)))(read_meta)


def rollout_batch(path: Path) -> None:
    from headrace.rollouts import AdvantageConfig, RolloutPipeline
    from rollout_outputs import output

    async def go() -> Path:
        async with RolloutPipeline(path.parent / "made", seq_len=64, ranks=2, advantage=AdvantageConfig()) as pipeline:
            for key in [(task, member) for task in range(2) for member in range(2)]:
                pipeline.arrive(output(*key), step=0, key=key, policy_version=4)
            return (await pipeline.finish(0, policy_version=5)).path

    made = asyncio.run(go())
    for file in made.parent.iterdir():
        if file.is_file() and file.name.startswith(made.stem):
            shutil.copy(file, path.parent / file.name.replace(made.stem, path.stem, 1))


@target("rollout batch", "batch.safetensors", rollout_batch, exact=True)
def read_rollouts(path: Path) -> Any:
    from headrace.rollouts import open_training_batch

    batch = open_training_batch(path)
    return [{k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in m.items()} for r in range(batch.ranks) for m in batch.micro_batches(r)]  # fmt: skip


def dump(path: Path) -> None:
    from headrace.rollouts.dumps import dump_raw_rollouts

    dump_raw_rollouts(path, [{"a": [1, 2, {"b": b"x" * 40}], "n": i} for i in range(4)])


@target("rollout dump", "a.dump", dump, exact=True)
def read_dump(path: Path) -> Any:
    from headrace.rollouts.dumps import read_dump as read

    return list(read(path))


def read_episodes(path: Path) -> Any:
    from headrace.rollouts.episodes import read_episodes as read

    return sum(1 for _ in read(path))


for kind in ("jsonl", "msgpack"):
    source = RL / f"eps_train_real.{kind}"
    target(f"episodes: {kind}", f"a.{kind}", lambda p, s=source: p.write_bytes(s.read_bytes()[: 1 << 16]))(
        read_episodes
    )


# ------------------------------------------------------------------------------------ configs and run folders


def tokenizer(path: Path) -> None:
    from headrace.text.tokenizer import train_bpe

    path.write_bytes(train_bpe(["some words and some more words"], 280))


@target("tokenizer.json", "tok/tokenizer.json", tokenizer)
def read_tokenizer(path: Path) -> Any:
    from headrace.text.tokenizer import load_tokenizer

    return load_tokenizer(path, engine="tokenizers").encode(["some words"]).ids.tolist()


CONFIG = """
[run]
steps = 8
[[source]]
spec = "jsonl:rows.jsonl"
weight = 0.5
[text]
seq_len = 16
[loader]
global_batch_size = 4
[train]
warmup_steps = 1
"""


@target("config", "run.toml", lambda p: p.write_text(CONFIG))
def read_config(path: Path) -> Any:
    from headrace.runs.config.loading import load_any_config

    return load_any_config(path, env={}).hash


def run_folder(path: Path) -> None:
    folder = path.parent
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "config.toml").write_text(CONFIG)
    (folder / "run.json").write_text(json.dumps({"config_hash": "0" * 16, "base": ".", "headrace": "0.2"}))
    (folder / "summary.json").write_text(json.dumps({"state": "finished", "step": 8}))
    rows = [{"step": i, "train.loss": 2.0 / (i + 1), "loader.tokens": i * 64} for i in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    events = [{"event": "started", "step": 0}, {"event": "saved", "step": 4}]
    (folder / "journal.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))


def read_run(path: Path) -> Any:
    from headrace.runs.inspection import inspect_path
    from headrace.ui import find_problems, pages
    from headrace.ui import read_run as read_view

    inspect_path(path.parent)
    view = read_view(path.parent)
    found = find_problems(view, view.status())
    return len(found), len(pages.metrics(view)["panels"])


for name in ("run.json", "summary.json", "metrics.jsonl", "journal.jsonl", "config.toml"):
    target(f"run folder: {name}", f"run-{name.partition('.')[0]}/{name}", run_folder)(read_run)
