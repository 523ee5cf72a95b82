"""A step of rollouts to a batch file, beside plain code, and beside writing the same bytes.

    python benchmarks/rollouts.py                 both synthetic steps at a tenth of their size
    python benchmarks/rollouts.py --scale 1       1.16 GB of routed experts; 60 million ids
    python benchmarks/rollouts.py --steps 500     and the memory of a process after so many steps

Each figure comes from a process of its own. Lag is sampled every millisecond and shown as what it is above an idle stretch of the same
loop with the same tasks. "with a core" leaves out how long the loop's thread was ready and others had both cores. "gather" is what turns a step's rollouts
into samples; ours begins with the columns that ingest leaves, and is also shown with ingest counted in, for each form that rollouts come in. A run during which a virtual machine's host gave
more than 1 % of the time to others is made again, three times at most, and the least disturbed one is printed. Rollouts arrive in the binary form of the wire contract, as lists, or as lists in msgpack or JSON text. "plain" is what one would write first: lists joined turn by turn, np.concatenate of experts, one msgspec encode, one
write; it has no event loop, so its time is how long one would stand still. "floor" writes the very chunks that arrived with writev,
by turns with our own way in one process: fresh pages of the page cache cost up to nine times those just let go, and both get both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROUNDS, TRIES = 6, 4


def settled() -> None:
    """All of the step lies in memory here, which it does not where it arrives: the collector must not walk through it again and again."""
    gc.collect()
    gc.freeze()


def plain(dump: Path, folder: Path) -> dict[str, Any]:
    """The step by plain code, on no event loop: its wall time is how long a loop would stand still."""
    import msgspec
    import numpy as np
    import orjson

    from headrace.rollouts.dumps import read_dump

    rollouts = list(read_dump(dump))
    settled()
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
            mask = mask + [bool(m) for m in t["prompt_mask"][len(mask) :]] + [bool(m) for m in t["completion_mask"]]
            logprobs = logprobs + [0.0] * len(new) + t["completion_logprobs"]
            if "routed_experts" in t:
                rows = np.frombuffer(t["routed_experts"]["data"], np.uint8).reshape(t["routed_experts"]["shape"])
                experts = rows if experts is None else np.concatenate([experts, rows])
        samples.append(
            {"ids": ids, "mask": mask, "logprobs": logprobs, "experts": None if experts is None else experts.tobytes()}
        )
    gathered = time.perf_counter() - wall
    (folder / "batch.msgpack").write_bytes(msgspec.msgpack.encode(samples))
    lines = [{k: v for k, v in r.items() if k != "trajectory"} for r in rollouts]
    (folder / "rollouts.jsonl").write_bytes(b"\n".join(orjson.dumps(line) for line in lines))
    return {
        "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "gather": gathered,
        "bytes": (folder / "batch.msgpack").stat().st_size,
    }  # fmt: skip


def columns(dump: Path, folder: Path) -> dict[str, Any]:
    """Wall time of ingest and of interleave, rollout by rollout, and CPU of interleave and send beside writing the same chunks."""
    import msgspec

    from headrace.rollouts import (
        BatchWriter,
        interleave_rollout,
        pack_samples,
        rollout_from_verifiers,
    )
    from headrace.rollouts.batch_files import sidecar_path
    from headrace.rollouts.dumps import read_dump
    from headrace.rollouts.wire import decode_rollout, encode_rollout

    interleave = 0.0
    ingest: dict[str, float] = {}
    forms: dict[str, Callable[[], Iterator[Any]]] = {
        "binary": lambda: (encode_rollout(r) for r in read_dump(dump)),
        "lists": lambda: read_dump(dump),
        "msgpack": lambda: map(msgspec.msgpack.encode, read_dump(dump)),
        "json": lambda: (msgspec.json.encode(r) for r in read_dump(dump)),
    }
    for form, made in forms.items():
        ingest[form] = 0.0
        for raw in made():  # one by one, as they arrive
            start = time.thread_time()
            rollout = rollout_from_verifiers(decode_rollout(raw) if isinstance(raw, bytes) else raw)
            ingest[form] += time.thread_time() - start
            if form == "binary":
                start = time.thread_time()
                interleave_rollout(rollout)
                interleave += time.thread_time() - start
    plainly = 0.0
    for raw in forms["msgpack"]():
        start = time.thread_time()
        msgspec.msgpack.decode(raw)
        plainly += time.thread_time() - start
    rollouts = [rollout_from_verifiers(decode_rollout(r)) for r in forms["binary"]()]
    samples = [s for r in rollouts for s in interleave_rollout(r)]
    chunks = [[c.reshape(-1).data for c in s.experts.chunks] for s in samples if s.experts is not None]
    del samples

    def floor() -> None:
        fd = os.open(folder / "floor", os.O_WRONLY | os.O_CREAT)
        for some in chunks:
            os.writev(fd, some)
        os.close(fd)
        made.append(folder / "floor")

    def ours() -> None:
        writer = BatchWriter(folder, step=0)
        slots = [slot for r in rollouts for slot in writer.add(interleave_rollout(r))]
        packed = pack_samples([s.sample for s in slots], seq_len=32_768, ranks=2)
        path = writer.publish(packed, slots, seq_len=32_768, policy_version=0)
        made.extend((path, sidecar_path(path)))

    made: list[Path] = []

    def timed(work: Callable[[], None]) -> float:
        start = time.thread_time()
        work()
        took = time.thread_time() - start
        while made:
            with contextlib.suppress(FileNotFoundError):
                made.pop().unlink()
        return took

    tries: list[tuple[float, float]] = []
    if chunks:
        for number in range(ROUNDS):  # by turns, and by turns first
            a, b = (floor, ours) if number % 2 else (ours, floor)
            took = (timed(a), timed(b))
            tries.append(took if number % 2 else (took[1], took[0]))
    return {
        "ingest": ingest, "decoder": plainly, "interleave": interleave, "floor": [f for f, _ in tries], "ours": [o for _, o in tries],
    }  # fmt: skip


def many_steps(steps: int, folder: Path) -> dict[str, Any]:
    """Resident memory after so many steps of small rollouts with experts, in a process that reads and deletes every batch."""
    from headrace.rollouts import AdvantageConfig, RolloutPipeline, open_training_batch
    from headrace.rollouts.batch_files import sidecar_path
    from headrace.rollouts.dumps import synthetic_rollouts

    rollouts = [r for _, r in zip(range(32), synthetic_rollouts("r3", scale=0.05), strict=False)]
    seen = []

    async def go() -> None:
        async with RolloutPipeline(folder, seq_len=32_768, ranks=2, advantage=AdvantageConfig()) as pipeline:
            for step in range(steps):
                for number, rollout in enumerate(rollouts):
                    # Lists of its own, as from a socket.
                    fresh = json.loads(json.dumps(rollout["trajectory"][0]["tokens"]["prompt_ids"]))
                    turns = [dict(t, tokens=dict(t["tokens"])) for t in rollout["trajectory"]]
                    turns[0]["tokens"]["prompt_ids"] = fresh
                    pipeline.arrive({**rollout, "trajectory": turns}, step=step, key=(0, number))
                report = await pipeline.finish(step)
                assert report.path is not None
                for rank in range(2):
                    for _ in open_training_batch(report.path).micro_batches(rank):
                        continue
                sidecar_path(report.path).unlink()
                report.path.unlink()
                seen.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"))

    asyncio.run(go())
    return {"rss": seen}


def one(kind: str, dump: Path, folder: Path, traffic: int) -> dict[str, Any]:
    """In a process of its own: one way of doing the step."""
    if kind == "plain":
        return plain(dump, folder)
    if kind == "columns":
        return columns(dump, folder)
    if kind.startswith("steps:"):
        return many_steps(int(kind[6:]), folder)
    from headrace.rollouts.replay import replay

    processes = kind.partition("@")[0].partition(":")[2]
    # Idle for about as long as what it is compared with: the largest of more samples is larger.
    found = replay(
        dump,
        synthetic_traffic=traffic,
        folder=folder,
        processes=int(processes or 0),
        form=kind.partition("@")[2] or "binary",  # ty: ignore[invalid-argument-type]
        idle=4.0 if dump.stat().st_size > 2e8 else 1.0,
    )
    return asdict(found)


def run(kind: str, dump: Path, folder: Path, traffic: int = 0) -> dict[str, Any]:
    words = [sys.executable, __file__, "--one", kind, str(dump), str(folder), str(traffic)]
    return json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)


def stolen() -> float:
    """CPU seconds that a virtual machine's host gave to others so far; 0 where /proc does not tell."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0


def undisturbed(way: str, dump: Path, folder: Path, traffic: int) -> tuple[dict[str, Any], float]:
    """The run from whose phases the machine's host took least, of four at most; and how large a share of them that was."""
    best: tuple[dict[str, Any], float] | None = None
    for _ in range(TRIES):
        before = stolen()
        found = run(way, dump, folder, traffic)
        share = (stolen() - before) / sum(p["wall"] for p in found["phases"])
        best = (found, share) if best is None or share < best[1] else best
        if share <= 0.01:
            break
    assert best is not None
    return best


def compare(step: str, scale: float, folder: Path) -> None:
    from headrace.rollouts.dumps import dump_raw_rollouts, synthetic_rollouts

    dump = folder / f"{step}.dump"
    dump_raw_rollouts(dump, synthetic_rollouts(step, scale=scale))  # ty: ignore[invalid-argument-type]
    payload = dump.stat().st_size
    print(f"-- {step}, scale {scale:g}: {payload / 1e6:,.0f} MB arrive", flush=True)
    simple = run("plain", dump, folder)
    ways = ("arrival@binary", "arrival@lists", "arrival@msgpack", "arrival@json", "arrival:1")
    for traffic in (0, 200):
        for way in ways:
            found, share = undisturbed(way, dump, folder, traffic)
            phases = {p["phase"]: p for p in found["phases"]}
            idle = phases.pop("idle")
            lags = ", ".join(
                f"{name} p99 {1e3 * (p['lag_p99'] - idle['lag_p99']):+.1f} max {1e3 * (p['lag_max'] - idle['lag_max']):+.1f}"
                for name, p in phases.items()
            )
            told = {"arrival:1": "processes"}.get(way, way.removeprefix("arrival@"))
            print(
                f"{told:<9} {traffic:>3} tasks   loop lag above idle, ms: {lags}   (idle p99 {1e3 * idle['lag_p99']:.1f} max {1e3 * idle['lag_max']:.1f}; {100 * share:.0f} % of the CPU was others')",
                flush=True,
            )
            if traffic:
                continue
            wall = phases["arrival"]["wall"] + phases["boundary"]["wall"]
            # Without what the sampler and the tasks take of the thread in as long an idle stretch.
            loop = phases["boundary"]["loop"] - idle["loop"] * phases["boundary"]["wall"] / idle["wall"]
            print(
                f"          whole step {wall:.2f} s (plain {simple['wall']:.2f}, ratio {wall / simple['wall']:.2f})   boundary: {1e3 * loop:.1f} ms of the loop's"
                f" thread, visible after {1e3 * phases['boundary']['wall']:.0f} ms"
                f"   {found['bytes'] / found['tokens']:.2f} bytes a token (plain {simple['bytes'] / found['tokens']:.2f})"
            )
            print(f"          {found['breakdown'].partition(': ')[2]}", flush=True)
    alone = run("columns", dump, folder)
    gather, ingest = alone["interleave"], alone["ingest"]
    print(f"gather    CPU of interleave {gather:.3f} s from ingested rollouts   plain {simple['gather']:.2f} s")
    for form, seconds in ingest.items():
        print(
            f"          {form:<8} ingest {seconds:.3f} s, {seconds / ingest['binary']:.1f}x binary   with interleave {seconds + gather:.3f} s"
        )
    print(f"          msgspec alone makes lists of the msgpack in {alone['decoder']:.3f} s")
    if alone["floor"]:
        each = [o / f for o, f in zip(alone["ours"], alone["floor"], strict=True)]
        print(
            f"send      CPU of interleave + send {min(alone['ours']):.2f} s   writing the chunks {min(alone['floor']):.2f} s   ratio of the best {min(alone['ours']) / min(alone['floor']):.2f},"
            f" median of {ROUNDS} pairs {statistics.median(each):.2f}   (pairs {', '.join(f'{e:.2f}' for e in each)})",
            flush=True,
        )
    dump.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--step", choices=["r3", "text", "none"])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        kind, dump, folder, traffic = args.one
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            print(json.dumps(one(kind, Path(dump), Path(scratch), int(traffic))))
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        for step in {"none": [], None: ["r3", "text"]}.get(args.step, [args.step]):
            compare(step, args.scale, Path(name))
        if args.steps:
            rss = run(f"steps:{args.steps}", Path(name), Path(name))["rss"]
            tenth = max(1, len(rss) // 10)
            print(
                f"{args.steps} steps: {max(rss[tenth : 2 * tenth]) / 1e6:.0f} MB resident at most in the second tenth of them, {max(rss[-tenth:]) / 1e6:.0f} MB in the last,"
                f" ratio {max(rss[-tenth:]) / max(rss[tenth : 2 * tenth]):.3f}"
            )


if __name__ == "__main__":
    main()
