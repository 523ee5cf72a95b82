"""How long a start takes: from the import to the first batch, through every door, with nothing compiled yet and with everything cached.

    python benchmarks/start.py                  every door
    python benchmarks/start.py loader gram      some

Each start is a process of its own, ended after LIMIT seconds: a start that failed or took longer is printed as such, and the others go on. Cold: an empty folder for compiled code (NUMBA_CACHE_DIR) and the page cache as it is. `cpu` is what the process
computed until then: on a machine that others use, too, it says more than the seconds.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS, LIMIT = 3, 120

PREPARE = """
import json, sys
import numpy as np
from pathlib import Path
for name in ("a", "b"):
    Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{i} " * (i % 400 + 3)}) + "\\n" for i in range(3000)))
rng = np.random.default_rng(0)
for kind in ("rna", "atac"):
    Path("cells", kind).mkdir(parents=True)
    for i in range(8):
        np.save(f"cells/{kind}/{i}.npy", rng.standard_normal((4000, 16)).astype("f4"))
import subprocess
import headrace as hr
Path("prepare.toml").write_text('[[source]]\\nspec = "jsonl:*.jsonl"\\n[text]\\ntokenizer = "bytes"\\nseq_len = 512\\n')
subprocess.run([sys.executable, "-m", "headrace", "prepare", "prepare.toml", "--out", "prepared", "--quiet"], check=True)
import torch
class Squares(hr.DataProviderBase):
    def build_meta(self):
        fields = [{"name": "x", "dtype": "float32", "shape": [4]}, {"name": "y", "dtype": "float32", "shape": [4]}]
        return {"dataset_name": "squares", "training_type": "SEQUENCE_SCORING", "batch_schema": fields}
    def sample_batch(self, split, rng):
        x = torch.rand(self.batch_size, 4, generator=rng)
        return {"x": x, "y": x * x}
import threading
provider = Squares("squares", batch_size=8, batches_per_file=10)
provider.open()
thread = threading.Thread(target=provider.run)
thread.start()
consumer = hr.DatasetConsumer("squares", device_type="cpu", ack="commit")
consumer.get_batch("train", "cpu")
consumer.close()
provider.stop()
thread.join()
"""

CLOCK = """
import time
began, cpu = time.perf_counter(), time.process_time()
def first():
    print(f"first {time.perf_counter() - began:.3f} {time.process_time() - cpu:.3f}", flush=True)
import torch
print(f"torch {time.perf_counter() - began:.3f} {time.process_time() - cpu:.3f}", flush=True)
began, cpu = time.perf_counter(), time.process_time()
import headrace as hr
"""

TEXT = 'data = hr.TextDataset(["jsonl:*.jsonl"], tokenizer="bytes", seq_len=512, seed=1)\nloader = hr.Loader(data, global_batch_size=8)\n'
PREPARED = 'loader = hr.PreparedLoader(hr.PreparedDataset("prepared", seed=1), global_batch_size=8)\n'
STREAMS = 'loader = hr.StreamMixingDataset("cells", batch_size=64, num_streams_mixed=4, seed=7)\n'
SAVE = 'import json, pathlib; pathlib.Path("{0}.json").write_text(json.dumps(loader.state_dict()))\n'
LOAD = 'import json, pathlib; loader.load_state_dict(json.loads(pathlib.Path("{0}.json").read_text()))\n'
SPOOL = """
consumer = hr.DatasetConsumer("squares", device_type="cpu", ack="commit")
consumer.get_batch("train", "cpu")
first()
consumer.close()
"""
GRAM = """
import numpy as np
hr.reduce.gram(np.random.default_rng(0).standard_normal((20_000, 64)), threads=2)
first()
"""
ROLLOUTS = """
import asyncio
from headrace.rollouts import AdvantageConfig, RolloutPipeline, SpoolSender
def rollout(task, member):
    turn = {"prompt_ids": [1, 2, task], "prompt_mask": [0, 0, 0], "completion_ids": [3, member], "completion_mask": [1, 1], "completion_logprobs": [-0.5, -0.1]}
    return {"example_id": task, "env_name": "game", "reward": float(member % 2), "trajectory": [{"tokens": turn}]}
async def orchestrator():
    async with SpoolSender("rl") as sender, RolloutPipeline(sender.queue, seq_len=64, advantage=AdvantageConfig()) as pipeline:
        for task in range(2):
            for member in range(4):
                pipeline.arrive(rollout(task, member), step=0, key=(task, member))
        await pipeline.finish(0, policy_version=0)
        first()
asyncio.run(orchestrator())
"""


def _loader(made: str, name: str) -> str:
    return (
        made
        + "batch = next(iter(loader))\nfirst()\n"
        + SAVE.format(name)
        + "getattr(loader, 'close', lambda: None)()\n"
    )


def _restored(made: str, name: str) -> str:
    """From the moment all modules are imported: what a restore itself costs."""
    clock = "hr.Loader, hr.TextDataset, hr.PreparedLoader, hr.StreamMixingDataset\nbegan, cpu = time.perf_counter(), time.process_time()\n"
    return (
        clock
        + made
        + LOAD.format(name)
        + "batch = next(iter(loader))\nfirst()\ngetattr(loader, 'close', lambda: None)()\n"
    )


DOORS = {
    "loader": CLOCK + _loader(TEXT, "text"),
    "loader, restored": CLOCK + _restored(TEXT, "text"),
    "prepared": CLOCK + _loader(PREPARED, "prepared"),
    "prepared, restored": CLOCK + _restored(PREPARED, "prepared"),
    "streams": CLOCK + _loader(STREAMS, "streams"),
    "streams, restored": CLOCK + _restored(STREAMS, "streams"),
    "spool": CLOCK + SPOOL,
    "gram": CLOCK + GRAM,
    "rollouts": CLOCK + ROLLOUTS,
}
"""The figure printed is from `import headrace` on, torch imported before; of a restored loader, from the end of that import on."""
GOALS = {"headrace run": ("≤ 8", "≤ 4"), "restored": ("≤ 0.5", "≤ 0.5")}


class StartFailed(Exception):
    """A start ended without its first batch."""


def door(script: str, folder: Path, cache: Path) -> tuple[float, float, float]:
    """(seconds, CPU seconds, seconds of importing torch) to the first batch."""
    shutil.rmtree(folder / "rl", ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder, env=_environment(folder, cache), capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    if done.returncode:
        raise StartFailed(done.stderr)
    told = {line.split()[0]: [float(n) for n in line.split()[1:]] for line in done.stdout.splitlines() if line[:5] in ("torch", "first")}  # fmt: skip
    return told["first"][0], told["first"][1], told["torch"][0]


def quickstart(folder: Path, cache: Path) -> tuple[float, float, float]:
    """Seconds from the command to its first step, importing torch included, as a person waits for it; CPU seconds of the whole process."""
    shutil.rmtree(folder / "quickstart", ignore_errors=True)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "headrace", "run", str(ROOT / "examples" / "quickstart.toml"), "--run.dir", str(folder / "quickstart"), "--run.steps", "5"]  # fmt: skip
    seconds = 0.0
    with subprocess.Popen(command, cwd=folder, env=_environment(folder, cache), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:  # fmt: skip
        limit = threading.Timer(LIMIT, run.kill)
        limit.start()
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            lines.append(line)
            if not seconds and "step" in line and "loss" in line:
                seconds = time.perf_counter() - began
        limit.cancel()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if run.returncode:
        raise StartFailed("".join(lines))
    return seconds or time.perf_counter() - began, after.ru_utime - before.ru_utime, 0.0


def _environment(folder: Path, cache: Path) -> dict[str, str]:
    return os.environ | {"NUMBA_CACHE_DIR": str(cache), "HEADRACE_CACHE": str(folder / "cache"), "NO_COLOR": "1"}


def main() -> int:
    wanted = sys.argv[1:]
    doors = {name: script for name, script in DOORS.items() if not wanted or name.partition(",")[0] in wanted}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-c", PREPARE], cwd=folder, env=_environment(folder, folder / "made"), check=True)  # fmt: skip
        starts = {each: lambda cache, script=script: door(script, folder, cache) for each, script in doors.items()}
        if not wanted or "quickstart" in wanted:
            starts["headrace run, first step"] = lambda cache: quickstart(folder, cache)
        print(
            f"{'seconds to the first batch':<28}{'cold':>8}{'cpu':>8}   goal {'warm':>8}{'cpu':>8}   goal {'torch':>8}"
        )
        failed = 0
        for each, start in starts.items():
            cold, warm = [], []
            for round_ in range(ROUNDS):
                cache = folder / f"compiled-{each}-{round_}"
                try:
                    cold.append(start(cache))
                    warm.append(start(cache))
                except subprocess.TimeoutExpired:
                    print(f"{each}: a start took longer than {LIMIT} s", flush=True)
                    failed += 1
                except StartFailed as error:
                    print(f"{each}: a start failed:\n{str(error)[-2000:]}", flush=True)
                    failed += 1
            if not warm:
                continue
            goals = next((goals for words, goals in GOALS.items() if words in each), ("≤ 5", "≤ 2"))
            (a, b, _), (c, d, torch) = (map(statistics.median, zip(*taken, strict=True)) for taken in (cold, warm))
            print(f"{each:<28}{a:8.2f}{b:8.2f}   {goals[0]:<5}{c:8.2f}{d:8.2f}   {goals[1]:<5}{torch:8.2f}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
