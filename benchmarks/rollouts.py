"""A step of rollouts to a batch file, beside the boundary mode, beside plain code, and beside writing the same bytes.

    python benchmarks/rollouts.py                 both synthetic steps at a tenth of their size
    python benchmarks/rollouts.py --scale 1       1.16 GB of routed experts; 60 million ids

Each figure comes from a process of its own. Lag is sampled every millisecond and shown beside an idle stretch of the same loop.
"plain" is what one would write first: lists joined turn by turn, np.concatenate of experts, one msgspec encode, one write.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHUNK = 16 << 20


def plain(dump: Path, folder: Path) -> dict[str, Any]:
    """The step by plain code, on no event loop: its wall time is how long a loop would stand still."""
    import msgspec
    import numpy as np

    from headrace.rollouts.dumps import read_dump

    rollouts = list(read_dump(dump))
    wall, cpu = time.perf_counter(), time.process_time()
    samples = []
    for rollout in rollouts:
        ids: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        experts = None
        for step in rollout["trajectory"]:
            t = step["tokens"]
            assert t["prompt_ids"][: len(ids)] == ids
            new = t["prompt_ids"][len(ids) :]
            ids = ids + new + t["completion_ids"]
            mask = mask + [False] * len(new) + [bool(m) for m in t["completion_mask"]]
            logprobs = logprobs + [0.0] * len(new) + t["completion_logprobs"]
            if "routed_experts" in t:
                rows = np.frombuffer(t["routed_experts"]["data"], np.uint8).reshape(t["routed_experts"]["shape"])
                experts = rows if experts is None else np.concatenate([experts, rows])
        samples.append(
            {"ids": ids, "mask": mask, "logprobs": logprobs, "experts": None if experts is None else experts.tobytes()}
        )
    gathered = time.perf_counter() - wall
    (folder / "batch.msgpack").write_bytes(msgspec.msgpack.encode(samples))
    return {
        "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "gather": gathered,
        "bytes": (folder / "batch.msgpack").stat().st_size,
    }  # fmt: skip


def floor(size: int, folder: Path) -> dict[str, float]:
    """Writing as many bytes into the page cache from warm memory: the best of three tries with each of three sizes of a write."""
    block = memoryview(bytearray(os.urandom(1 << 20) * (CHUNK >> 20)))
    tries = []
    for number in range(9):
        chunk = (CHUNK >> 6, CHUNK >> 4, CHUNK)[number % 3]
        wall, cpu = time.perf_counter(), time.process_time()
        fd = os.open(folder / f"floor-{number}", os.O_WRONLY | os.O_CREAT)
        left = size
        while left > 0:
            left -= os.write(fd, block[: min(left, chunk)])
        os.close(fd)
        tries.append((time.perf_counter() - wall, time.process_time() - cpu))
        (folder / f"floor-{number}").unlink()
    return {"wall": min(w for w, _ in tries), "cpu": min(c for _, c in tries)}


def one(kind: str, dump: Path, folder: Path, traffic: int) -> dict[str, Any]:
    """In a process of its own: one way of doing the step."""
    if kind == "plain":
        return plain(dump, folder)
    if kind.startswith("floor:"):
        return floor(int(kind[6:]), folder)
    from headrace.jobs.replay import replay

    chunk = 128 if kind == "boundary" else None
    found = replay(dump, mode=kind, synthetic_traffic=traffic, gather_chunk_size=chunk, folder=folder)  # ty: ignore[invalid-argument-type]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**found.to_dict(), "rss": peak}


def run(kind: str, dump: Path, folder: Path, traffic: int = 0) -> dict[str, Any]:
    words = [sys.executable, __file__, "--one", kind, str(dump), str(folder), str(traffic)]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def compare(step: str, scale: float, folder: Path) -> None:
    from headrace.rollouts.dumps import dump_raw_rollouts, synthetic_rollouts

    dump = folder / f"{step}.dump"
    dump_raw_rollouts(dump, synthetic_rollouts(step, scale=scale))  # ty: ignore[invalid-argument-type]
    print(f"-- {step}, scale {scale:g}: {dump.stat().st_size / 1e6:,.0f} MB arrive", flush=True)
    simple = run("plain", dump, folder)
    for traffic in (0, 200):
        for mode in ("arrival", "boundary"):
            found = run(mode, dump, folder, traffic)
            phases = {p["phase"]: p for p in found["phases"]}
            work = {key: phases["arrival"][key] + phases["boundary"][key] for key in ("wall", "cpu")}
            lags = ", ".join(
                f"{name} p99 {1e3 * p['lag_p99']:.1f} max {1e3 * p['lag_max']:.1f}" for name, p in phases.items()
            )
            print(f"{mode:<9} {traffic:>3} tasks   lag, ms: {lags}", flush=True)
            if traffic:
                continue
            limit = run(f"floor:{found['bytes']}", dump, folder)
            print(
                f"          wall {work['wall']:.2f} s (plain {simple['wall']:.2f}, ratio {work['wall'] / simple['wall']:.2f}; write floor {limit['wall']:.2f}, ratio {work['wall'] / limit['wall']:.1f})"
                f"   CPU {work['cpu']:.2f} s (plain {simple['cpu']:.2f}; floor {limit['cpu']:.2f}, ratio {work['cpu'] / limit['cpu']:.1f})"
            )
            print(
                f"          boundary {1e3 * phases['boundary']['wall']:.0f} ms until the batch is visible   {found['bytes'] / found['tokens']:.2f} bytes a token"
                f" (plain {simple['bytes'] / found['tokens']:.2f})   {found['breakdown'].partition(': ')[2]}"
            )
    dump.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--step", choices=["r3", "text"])
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        kind, dump, folder, traffic = args.one
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            print(json.dumps(one(kind, Path(dump), Path(scratch), int(traffic))))
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        for step in [args.step] if args.step else ["r3", "text"]:
            compare(step, args.scale, Path(name))


if __name__ == "__main__":
    main()
