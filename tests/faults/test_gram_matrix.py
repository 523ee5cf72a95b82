"""One sha256 for any number of workers, threads, order of arrival, engine and processor. Long sweeps only: minutes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from headrace.reduce import gram

pytestmark = [
    pytest.mark.skipif(os.environ.get("HEADRACE_FAULTS", "long") != "long", reason="long fault sweeps only"),
    pytest.mark.timeout(900),
]
CHUNK = 9
"""145 chunks: a block of 128 and a part of the next."""
PROCESSORS = ("host", "generic", "haswell")
ORDERS = 1000
ARRIVALS = """
import sys
import numpy as np
from headrace.reduce import Columns, CrossNodeGramReduction, CrossNodePartition, GramResult, NodePartial, NodeWorker, Provenance, Receipt, RowBatch

x, chunk, orders = np.load(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
columns, provenance, found = Columns(width=x.shape[1]), Provenance(rows="f32"), set()
for n_ranks in (1, 2, 3, 7, 64):
    for threads in (1, 2):
        partition = CrossNodePartition(k=columns.k, n_rows=len(x), chunk_size=chunk, n_ranks=n_ranks)
        sent = []
        for rank in range(n_ranks):
            worker = NodeWorker(partition, rank=rank, provenance=provenance, threads=threads, compute=columns.gram)
            messages = []
            while worker.next_rows is not None:
                messages.append(NodePartial.from_bytes(worker.compute(RowBatch(x=x[slice(*worker.next_rows)])).to_bytes()))
            sent.append(messages)
        ranks = np.concatenate([np.full(len(m), rank) for rank, m in enumerate(sent)])
        rng = np.random.default_rng([n_ranks, threads])
        for _ in range(orders):
            reduction, at = CrossNodeGramReduction(partition, provenance=provenance, window=10**6), [0] * n_ranks
            for rank in rng.permutation(ranks):
                assert reduction.receive(sent[rank][at[rank]]) is Receipt.TAKEN
                at[rank] += 1
            found.add(GramResult.of(reduction.finish(), columns, len(x), {}).sha256)
print(*found)
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(11)
    x = (rng.standard_normal((1301, 9)) * np.exp2(rng.integers(-20, 20, (1301, 9)))).astype("f4")
    np.save(folder / "a.npy", x)
    return folder / "a.npy", gram(x, chunk_size=CHUNK).sha256


def environment(processor: str) -> dict[str, str]:
    env = os.environ | {"NO_COLOR": "1", "OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    env.pop("NUMBA_CPU_NAME", None)
    return env if processor == "host" else env | {"NUMBA_CPU_NAME": processor}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_thousand_orders_of_arrival_for_each_number_of_workers_and_threads_give_one_sum(rows, processor):
    path, expected = rows
    done = subprocess.run(
        [sys.executable, "-c", ARRIVALS, str(path), str(CHUNK), str(ORDERS)],
        env=environment(processor), capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [expected]


@pytest.mark.parametrize("engine", ["local", "spool", "torchrun", "ray"])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_every_engine_gives_that_sum_with_any_number_of_workers_and_threads(rows, tmp_path, processor, engine):
    path, expected = rows
    if engine == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    for workers in (1, 2, 3, 7):
        for threads in (1, 2):
            words = [
                "-m",
                "headrace",
                "gram",
                str(path),
                "--chunk",
                str(CHUNK),
                "--threads",
                str(threads),
                "--engine",
                engine,
            ]
            words += ["--out", f"{workers}-{threads}.safetensors", "--format", "json"]
            if engine == "torchrun":
                words = ["-m", "torch.distributed.run", "--nproc-per-node", str(workers), *words]
            else:
                words += ["--workers", str(workers)]
            done = subprocess.run(
                [sys.executable, *words], cwd=tmp_path, env=environment(processor), capture_output=True, text=True, timeout=200, check=False
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-2000:]
            told = json.loads(done.stdout)
            assert (told["sha256"], told["engine"]) == (expected, engine), (workers, threads)
