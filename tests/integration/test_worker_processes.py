"""Worker processes and rank processes: the same order as one process, a dead one is named, a hung one has a deadline."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import DeadlineExceeded, TokenizerError, WorkerDied
from headrace.loader import Loader, TextDataset, merge_states
from headrace.sources import Source
from headrace.text import ByteTokenizer

LANES, BATCH = 12, 12
FORBIDDEN = "a document that the tokenizer does not like"


class Fussy(ByteTokenizer):
    """A tokenizer written in Python, at module scope so that it can be sent to another process."""

    name = "fussy"
    fingerprint = "fussy-v1"

    def encode(self, texts):
        if FORBIDDEN in texts:
            raise ValueError("no")
        return super().encode(texts)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    rng = np.random.default_rng(2)
    for name, rows in (("web", 300), ("books", 40), ("few", 3)):
        lines = [json.dumps({"text": f"{name} {i} " + "y" * int(rng.integers(0, 200))}) for i in range(rows)]
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def dataset(folder: Path, **options) -> TextDataset:
    sources = [
        Source(f"jsonl:{folder}/{n}.jsonl", weight=w, name=n) for n, w in (("web", 0.6), ("books", 0.3), ("few", 0.1))
    ]
    settings = {"seq_len": 64, "seed": 3, "lanes": LANES, "window_blocks": 4, "cache": folder / "cache"}
    return TextDataset(sources, **(settings | options))


def raiser(error: Exception):
    def refuse(*_):
        raise error

    return refuse


def take_many(loader: Loader) -> None:
    for _ in range(10_000):
        next(loader)


def test_order_digest_and_state_are_the_same_for_threads_and_any_number_of_processes(corpus):
    data = dataset(corpus, tokenizer=Fussy())
    seen = {}
    for workers in (0, 1, 2, 4):
        with Loader(data, global_batch_size=BATCH, tokenizer_workers=0, data_loader_workers=workers) as loader:
            order = [int(g) for batch in loader for g in batch["sample_index"]]
            seen[workers] = (order, loader.digest, loader.state_dict())
    assert all(found == seen[0] for found in seen.values())


def test_a_killed_worker_is_an_error_that_names_it(corpus):
    data = dataset(corpus, exhausted="repeat")
    with Loader(data, global_batch_size=BATCH, data_loader_workers=2) as loader:
        next(loader)
        victim = loader._running.maker._supply._processes[1].worker
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=rf"headrace-worker-1 \(pid {victim.pid}\) was killed by SIGKILL"):
            take_many(loader)


def test_a_hung_worker_is_an_error_at_the_deadline(corpus):
    data = dataset(corpus, exhausted="repeat")
    with Loader(data, global_batch_size=BATCH, data_loader_workers=1, prefetch_batches=0) as loader:
        next(loader)  # starting takes longer than the deadline of this test
        supply = loader._running.maker._supply
        supply._pools[0]._deadline, victim = 1.0, supply._processes[0].worker
        os.kill(victim.pid, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match=rf"loader\.window.*headrace-worker-0 \(pid {victim.pid}\) hangs"):
            take_many(loader)
        assert not victim.is_alive()  # a stopped process goes only when it is killed


def test_a_tokenizer_that_fails_in_a_worker_names_the_document(corpus, tmp_path):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ["fine", "fine too", FORBIDDEN]))
    data = TextDataset(f"jsonl:{tmp_path}/d.jsonl", tokenizer=Fussy(), seq_len=16, lanes=1, cache=tmp_path / "c")
    with (
        Loader(data, global_batch_size=1, data_loader_workers=1) as loader,
        pytest.raises(TokenizerError, match=r"tokenizer fussy failed on row 2 of d\.jsonl"),
    ):
        list(loader)


def test_workers_leave_with_the_loader(corpus):
    data = dataset(corpus, exhausted="repeat")
    loader = Loader(data, global_batch_size=BATCH, data_loader_workers=2)
    next(loader)
    processes = loader._running.maker._supply._processes
    loader.close()
    assert [p.worker.is_alive() for p in processes] == [False, False]


# ------------------------------------------------------------------------------------------- real ranks


def serve_rank(pipe, folder: Path) -> None:
    """A process that becomes one rank after the other, as it is told."""
    while (order := pipe.recv()) is not None:
        rank, world, state, steps, options = order
        data = dataset(folder)  # nothing of an earlier life is left but the files
        with Loader(data, global_batch_size=BATCH, dp_rank=rank, dp_world_size=world, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            got = {}
            taken = 0
            while taken < steps and (batch := next(loader, None)) is not None:
                for i, g in enumerate(batch["sample_index"].tolist()):
                    got[g] = batch["input_ids"][i].numpy().tobytes() + batch["position_ids"][i].numpy().tobytes()
                taken += 1
            pipe.send((taken, got, loader.state_dict()))
        data.close()


@pytest.mark.timeout(180)
def test_chains_of_resumes_in_real_processes_deliver_the_order_of_one_run(corpus):
    data = dataset(corpus)
    straight: dict[int, bytes] = {}
    loader = Loader(data, global_batch_size=BATCH)
    for batch in loader:
        for i, g in enumerate(batch["sample_index"].tolist()):
            straight[g] = batch["input_ids"][i].numpy().tobytes() + batch["position_ids"][i].numpy().tobytes()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "headrace.loader.loader", "headrace.text"])
    pipes, processes = [], []
    for _ in range(4):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve_rank, args=(theirs, corpus), daemon=False))
        processes[-1].start()
        pipes.append(ours)
    resumes = 0
    try:
        for chain, first in enumerate((0, 2, 5)):
            state, got = None, {}
            worlds = [1, 2, 4, 1, 2, 4]
            for link, world in enumerate(worlds):
                steps = first if link == 0 else 3 if link < len(worlds) - 1 else 10**6
                options = [
                    {"tokenizer_workers": (0, 1, 2, 4)[(chain + link) % 4], "prefetch_batches": (link + chain) % 3},
                    {"data_loader_workers": 1 + (link + chain) % 2},
                ][link == 3]  # once in each chain, with worker processes
                for rank in range(world):
                    pipes[rank].send((rank, world, state, steps, options))
                answers = []
                for rank in range(world):
                    assert pipes[rank].poll(90), f"rank {rank} of {world} does not answer"
                    answers.append(pipes[rank].recv())
                resumes += world
                assert len({taken for taken, _, _ in answers}) == 1, "ranks end together"
                for _, rows, _ in answers:
                    assert not got.keys() & rows.keys()
                    got |= rows
                state = merge_states([s for _, _, s in answers])
            assert got == straight
            assert state["body"]["digest"] == loader.digest
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join(20)
    assert resumes >= 30


def test_a_script_without_a_main_guard_is_told_to_have_one(tmp_path):
    (tmp_path / "a.txt").write_text("a line of text\n" * 100)
    script = tmp_path / "train.py"
    script.write_text(
        "import headrace as hr\n"
        "data = hr.TextDataset(['txt:a.txt'], seq_len=16, lanes=2, cache='cache')\n"
        "print(next(hr.Loader(data, global_batch_size=2, data_loader_workers=1)))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("headrace.errors.WorkerDied: worker process headrace-worker-0")
    assert 'under `if __name__ == "__main__":`' in last
    assert "headrace.errors.ConfigError: a worker process imported this script" in done.stderr
