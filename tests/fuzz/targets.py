"""Fuzz targets: for every reader, files that it reads and the call that reads one."""

from __future__ import annotations

import asyncio
import gzip
import json
import pickle
import random
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


def tiktoken(path: Path) -> None:
    import base64

    tokens = [bytes([b]) for b in range(256)] + [b"so", b"me", b"some", b" w"]
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))


@target("tiktoken", "gpt2.tiktoken", tiktoken)
def read_tiktoken(path: Path) -> Any:
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


# ------------------------------------------------------------------------------------------ more readers of ours


def legacy_pt(path: Path) -> None:
    import torch

    torch.save({"x": torch.arange(24).reshape(8, 3), "y": torch.ones(8)}, path)


@target("spool legacy .pt", "train_batches_0.pt", legacy_pt)
def read_legacy(path: Path) -> Any:
    from headrace.spool.legacy import LegacyReader
    from headrace.spool.rows import Stripe

    reader = LegacyReader(path.parent, "train", Stripe(), 1)
    return {name: array.tobytes() for name, array in reader.read(4).items()}


def spool_record(path: Path) -> None:
    from headrace.spool.records import reserve_record, write_record

    reserve_record(path, {"splits": {"train": [[0, 4]]}})
    write_record(path, {"splits": {"train": [[0, 5]]}}, durable=False)


@target("spool record", "commit", spool_record)
def read_spool_record(path: Path) -> Any:
    from headrace.spool.records import read_record

    return read_record(path)


def sealed(path: Path) -> None:
    from headrace.spool.records import seal

    path.write_bytes(seal({"use": True, "reason": "é", "n": [1, 2.5, None]}))


@target("spool verdict", "verdict", sealed, exact=True)
def read_verdict(path: Path) -> Any:
    from headrace.spool.records import read_sealed

    return read_sealed(path)


def spool_folder(path: Path) -> None:
    from headrace.spool.folder import SpoolFolder
    from headrace.spool.meta import write_meta

    folder = path.parents[2]
    SpoolFolder(folder).prepare()
    write_meta(folder, META)
    for name in ("queue", "claims"):
        (folder / name / "train").mkdir(exist_ok=True)
    batch_file(folder / "queue" / "train" / "000000000001.safetensors")
    path.write_text("provider 1 on a machine\n")


@target("spool claim", "claims/train/000000000000", spool_folder)
def read_claims(path: Path) -> Any:
    from headrace.spool.survey import describe, list_files

    folder = path.parents[2]
    return describe(folder), list_files(folder)


def spool_reason(path: Path) -> None:
    spool_folder(path.parents[2] / "claims" / "train" / "000000000000")
    path.write_text(json.dumps({"file": "000000000000.safetensors", "reason": "it was damaged"}))
    path.with_name("000000000000.safetensors").write_bytes(b"damaged")


@target("spool reason", "quarantine/train/000000000000.safetensors.reason.json", spool_reason)
def read_reason(path: Path) -> Any:
    from headrace.spool.survey import quarantined

    return quarantined(path.parents[2])


def checked(path: Path) -> None:
    from headrace.text.shards import publish_checked

    publish_checked(path, {"kind": "headrace-prepared", "version": 2, "sources": [{"name": "a", "shards": []}]})


@target("prepared manifest", "manifest.json", checked, exact=True)
def read_manifest(path: Path) -> Any:
    from headrace.text.shards import read_checked

    return read_checked(path, "headrace-prepared")


def gram_result(path: Path) -> None:
    from headrace.reduce import Columns, GramResult

    rows = np.hstack([X, np.ones((20, 1))]).astype(np.float64)
    GramResult(columns=Columns(width=4), n_rows=20, full=rows.T @ rows, about={"data": "d"}).save(path)


@target("gram stamps", "stamps.json", lambda p: p.write_text(json.dumps({"a.npy": [1, 2], "b.npy": [3, 4]})))
def read_stamps(path: Path) -> Any:
    from headrace.reduce.shards import saved_stamps

    return saved_stamps(path)


@target("gram shift", "shift.npy", lambda p: np.save(p, X[0]))
def read_shift(path: Path) -> Any:
    from headrace.reduce.reduce_shards import _shift

    return _shift(path, 4)


def partial(path: Path) -> None:
    from headrace.reduce import NodePartial, Provenance

    made = NodePartial(
        chunk=0,
        chunks=1,
        rank=0,
        partition="p",
        provenance=Provenance(job="j", data="d", rows="f64"),
        gram=np.arange(6.0),
    )
    path.write_bytes(made.to_bytes())


@target("gram partial", "000000000000", partial, exact=True)
def read_partial(path: Path) -> Any:
    from headrace.reduce.partial import NodePartial

    found = NodePartial.from_bytes(path.read_bytes(), sender=path.name)
    return found.gram.tobytes(), found.chunk


def hub(path: Path) -> Any:
    from headrace.sources import Source, open_source

    cache = path.parents[1] / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    with open_source(Source(f"hf:{path.parent}"), cache=cache) as source:
        return source.read(0)


def hub_readme(path: Path) -> None:
    (path.parent / "train.jsonl").write_bytes(lines())
    path.write_text("---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n# Data\n")  # fmt: skip


target("hub: README.md", "readme/README.md", hub_readme)(hub)


def chunk_hashes(path: Path) -> None:
    from headrace.sources.records import ChunkRecords

    records = ChunkRecords(path, np.arange(40, dtype=np.uint64))
    for chunk in range(40):
        records.add(chunk, chunk * 977)
    records.close()


@target("chunk hashes", "a.chunks", chunk_hashes)
def read_chunk_hashes(path: Path) -> Any:
    from headrace.sources.records import ChunkRecords

    return ChunkRecords(path, np.arange(40, dtype=np.uint64)).known().tolist()


def cached_manifest(path: Path) -> None:
    from headrace.sources import Source, open_source

    (path.parent / "a.jsonl").write_bytes(lines())
    with open_source(Source("jsonl:a.jsonl"), base=path.parent, cache=path.parent / "cache"):
        pass
    (made,) = (path.parent / "cache").rglob("*.manifest")
    (path.parent / "where").write_text(str(made))
    shutil.copyfile(made, path)


@target("cached manifest", "manifest.safetensors", cached_manifest, exact=True)
def read_cached_manifest(path: Path) -> Any:
    from headrace.sources import Source, open_source

    shutil.copyfile(path, (path.parent / "where").read_text())
    with open_source(Source("jsonl:a.jsonl"), base=path.parent, cache=path.parent / "cache") as source:
        return source.read(0), source.manifest.fingerprint


def cursor(path: Path) -> None:
    from headrace.order import Cursor

    path.write_text(
        Cursor(kind="loader", version=1, fingerprint={"data": "f"}, body={"entries": {"0": [1, 2]}}).to_json()
    )


@target("cursor", "state.json", cursor)
def read_cursor(path: Path) -> Any:
    from headrace.runs.inspection import inspect_path

    return inspect_path(path)


target("inspect: .pt", "a.pt", batch_file)(read_cursor)
target("inspect: container", "a.safetensors", container, exact=True)(read_cursor)


def weights(path: Path) -> None:
    from headrace.rollouts.weights import publish_weights

    publish_weights(path.parents[1], 1, {"w": X}, np.arange(9), np.linspace(-1, 0, 8))


@target("weights probe", "v000001/probe.json", weights)
def read_weights(path: Path) -> Any:
    from headrace.rollouts.weights import read_probe

    return read_probe(path.parent)


FLIGHT = [
    {"first": 1, "samples": [0, 4, 8], "picks": "AAAAAAAAAAAAAAAAAAAAAA==", "opened": [[n, n, 0, 0, 9 * n, 0] for n in range(4)]},
    {"first": 3, "samples": [8, 12], "picks": "AAAAAAAAAAA=", "opened": [], "skipped": []},
]  # fmt: skip


@target("provenance: flight.jsonl", "flight.jsonl", lambda p: p.write_text("".join(json.dumps(f) + "\n" for f in FLIGHT)))  # fmt: skip
def read_flight(path: Path) -> Any:
    from headrace.provenance.record import SampleRecord

    record = SampleRecord(path, lanes=4, names=["a"])
    return record.last_step, [record.place(sample) for step in range(1, min(record.last_step, 9) + 1) for sample in record.span(step)[:20]]  # fmt: skip


STREAMS = '[run]\nsteps = 8\n[streams]\nroots = ["data"]\nnum_streams_mixed = 2\nbatch_size = 4\n[train]\ndim = 8\n'
RL_CONFIG = """
[run]
steps = 5
[policy]
model = "gpt-tiny"
alphabet = "0123456789 abc"
context = 64
[[env]]
spec = "python:game.py:play"
group_size = 4
[rollouts]
groups_per_step = 2
"""
target("config: streams", "streams.toml", lambda p: p.write_text(STREAMS))(read_config)
target("config: rl", "rl.toml", lambda p: p.write_text(RL_CONFIG))(read_config)


def arrivals(path: Path) -> None:
    from headrace.rollouts.arrival_log import ArrivalLog
    from headrace.rollouts.groups import Request
    from headrace.rollouts.records import Rollout, Step, StepTokens

    ids, ones = np.arange(4, dtype=np.int32), np.ones(4, np.uint8)
    tokens = StepTokens(prompt_ids=ids, prompt_mask=0 * ones, completion_ids=ids, completion_mask=ones, completion_logprobs=-np.ones(4, np.float32))  # fmt: skip
    log = ArrivalLog(path.parent)
    for member in range(3):
        rollout = Rollout(example_id=7, env_name="game", reward=0.5, trajectory=(Step(prompt="p", completion="c", tokens=tokens),), policy_version=2)  # fmt: skip
        log.append(Request(task=7, member=member, attempt=0, env_name="game", step=3, policy_version=2), rollout)
    log.close()


def read_arrival_log(path: Path) -> Any:
    from headrace.rollouts.arrival_log import read_arrivals
    from headrace.ui import pages
    from headrace.ui import read_run as read_view

    run_folder(path.parents[1] / "run.json")
    rollouts = [arrival.rollout() for arrival in read_arrivals(path) if not arrival.failed]
    return len(rollouts), len(pages.rollouts(read_view(path.parents[1]), 4)["rollouts"])


target("arrival log", "arrivals/step_000000000003.log", arrivals)(read_arrival_log)


def sidecar(path: Path) -> None:
    rollout_batch(path.parent / "batch.safetensors")


def read_sidecar(path: Path) -> Any:
    return read_rollouts(path.parent / "batch.safetensors")


target("rollout experts", "batch.experts.safetensors", sidecar)(read_sidecar)


# ------------------------------------------------------------------------------- right sums, wrong content

ODD = (None, True, -1, 0, 1, 2**31, 2**53, 2**63, 2**64 - 1, 0.5, 1e300, "", "a", "é" * 50, [], [0], [[]], {}, {"a": 1}, "../../etc", "0" * 32)  # fmt: skip
DTYPES = ("<i8", "<i4", "<u2", "u1", "?", "<f4", "<f8")


def odd(value: Any, rng: random.Random) -> Any:
    """A JSON value with one part of it replaced, left out or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != name}
        return value | {name: odd(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        if rng.random() < 0.3:
            return value[:at] + value[at + rng.randrange(3) :] + value[:1]
        return [*value[:at], odd(value[at], rng), *value[at + 1 :]]
    return rng.choice(ODD)


def odd_array(array: np.ndarray, rng: random.Random) -> np.ndarray:
    """An array with other values, another length, shape or dtype."""
    array = array.copy()
    match rng.randrange(5):
        case 0:
            return array.astype(rng.choice(DTYPES))
        case 1:
            return array[: rng.randrange(len(array) + 1)] if array.ndim else array
        case 2:
            return np.concatenate([array, array]) if array.ndim else array
        case 3:
            return array.reshape(rng.choice(((-1, 1), (1, -1), (-1,))))
    if array.size:
        kind = np.iinfo(array.dtype) if array.dtype.kind in "iu" else None
        array.reshape(-1)[rng.randrange(array.size)] = rng.choice(
            [kind.min, kind.max, 1, 0] if kind else [0, 1, 1e30, -1]
        )
    return array


def resealed(title: str, name: str, make: Callable[[Path], None], read: Callable[[Path], Any]) -> None:
    """A container whose content is changed under checksums that hold. The fuzzed bytes only choose the change."""

    def read_changed(path: Path) -> Any:
        from headrace.files import open_container, write_container

        rng = random.Random(path.read_bytes())
        file = path.parent / "sealed" / name
        whole = path.parent / "whole" / name
        if not whole.exists():
            for folder in (file.parent, whole.parent):
                folder.mkdir()
            make(whole)
            shutil.copytree(whole.parent, file.parent, dirs_exist_ok=True)
        found = open_container(whole)
        arrays, meta = {n: np.array(a) for n, a in found.arrays.items() if not n.endswith("!sums")}, found.meta
        if path.read_bytes() != SEED:
            for _ in range(rng.choice((1, 1, 2))):
                if arrays and rng.random() < 0.6:
                    changed = rng.choice(list(arrays))
                    arrays[changed] = odd_array(arrays[changed], rng)
                else:
                    meta = odd(meta, rng)
        write_container(file, arrays, meta, replace=True, durable=False)
        return read(file)

    target(title, "seed", lambda p: p.write_bytes(SEED))(read_changed)


SEED = bytes(range(64))


def packed_index(path: Path) -> None:
    from headrace.text.shards import PackedShard, write_packed

    shard(path.with_name("a.tokens"))
    write_packed(path, PackedShard(np.array([1, 2]), np.array([0, 20]), np.array([20, 40], np.int32)), seq_len=64, of=entry(path))  # fmt: skip


def entry(path: Path) -> Any:
    from headrace.text.shards import open_shard

    return open_shard(path.with_name("a.tokens")).entry


def read_packed(path: Path) -> Any:
    from headrace.text.shards import open_packed

    return len(open_packed(path, seq_len=64, of=entry(path)).piece_at)


def read_gram(path: Path) -> Any:
    from headrace.reduce import GramResult

    return GramResult.load(path).full.sum()


target("gram result", "g.safetensors", gram_result, exact=True)(read_gram)
resealed("resealed: rollout batch", "batch.safetensors", rollout_batch, read_rollouts)
resealed("resealed: prepared shard", "a.tokens", shard, read_shard)
resealed("resealed: packed index", "a.safetensors", packed_index, read_packed)
resealed("resealed: spool file", "a.safetensors", batch_file, read_batch_file)
resealed("resealed: gram result", "g.safetensors", gram_result, read_gram)
resealed("resealed: inspect", "a.safetensors", container, read_cursor)


@target("resealed: arrival log", "seed", lambda p: p.write_bytes(SEED))
def read_resealed_arrivals(path: Path) -> Any:
    import msgspec
    import xxhash

    rng = random.Random(path.read_bytes())
    log = path.parent / "arrivals" / "step_000000000003.log"
    log.parent.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    arrivals(log)
    raw = log.read_bytes()
    size = int.from_bytes(raw[:4], "little")
    record = msgspec.msgpack.decode(raw[12 : 12 + size])
    changed = msgspec.msgpack.encode(record if path.read_bytes() == SEED else odd(record, rng), enc_hook=str)
    log.write_bytes(len(changed).to_bytes(4, "little") + xxhash.xxh3_64_intdigest(changed).to_bytes(8, "little") + changed)  # fmt: skip
    return read_arrival_log(log)


@target("resealed: spool meta", "seed", lambda p: p.write_bytes(SEED))
def read_resealed_meta(path: Path) -> Any:
    from headrace.spool.meta import write_meta

    try:
        write_meta(path.parent, META if path.read_bytes() == SEED else odd(META, random.Random(path.read_bytes())))
    except (OverflowError, ValueError):
        return None
    return read_meta(path)
