"""The live page: time to first paint of a run of a million lines, memory, and what the open page costs the run beside it.

open      `headrace ui` on a metrics file of a million lines: first answer, first paint in a browser, whole index, memory of the server
step      seconds per step of a training run alone, and with the page started beside it and followed by a client
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINES = 1_000_000
STEPS = "200"
BROWSER = shutil.which("chromium")


def _live_page() -> Any:
    spec = importlib.util.spec_from_file_location("live_page", ROOT / "tests" / "live_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.live_page


def long_run(folder: Path) -> int:
    """A run of a million lines with the keys of a text run; its size in bytes."""
    folder.mkdir()
    (folder / "config.toml").write_text('[run]\nname = "million"\nsteps = 1000000\n')
    with open(folder / "metrics.jsonl", "w") as out:
        for step in range(1, LINES + 1):
            loss = 3 + math.exp(-step / 1e5) + (9 if step == 777_123 else 0)
            out.write(
                f'{{"step":{step},"time":{1e9 + step},"seconds":0.02,"tokens_per_second":500000,"train/loss":{loss:.5f},"train/grad_norm":1.0,"train/lr":0.001,'
                '"steps_in_interval":1,"data/tokens":4096,"data/source_tokens/web":2800,"data/source_tokens/code":1296,"step/seconds":0.02,"waits/exposed/seconds":0.0001,'
                '"step/wait/loader.next/seconds":0.0001,"step/phase/train.forward/seconds":0.012,"step/phase/train.backward/seconds":0.007}\n'
            )
    return (folder / "metrics.jsonl").stat().st_size


def first_paint(address: str) -> float | None:
    """Seconds from the request to the drawn curve of the loss, in a browser that is open already."""
    if BROWSER is None or importlib.util.find_spec("playwright") is None:
        return None
    from playwright.sync_api import sync_playwright

    flags = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
    ]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=flags)
        page = browser.new_page()
        page.goto("about:blank")
        began = time.perf_counter()
        page.goto(address)
        page.wait_for_selector('.card[data-key="train/loss"] path.curve', state="attached")
        took = time.perf_counter() - began
        browser.close()
        return took


def open_million() -> None:
    live_page = _live_page()
    with tempfile.TemporaryDirectory() as folder:
        size = long_run(Path(folder) / "million")
        with live_page(Path(folder) / "million") as page:
            idle = page.memory
            painted = first_paint(page.address)
            began = time.perf_counter()
            told = page.api("overview", run="million")
            again = time.perf_counter() - began
            begun = time.perf_counter()
            while page.api("overview", run="million")["status"]["progress"] < 1:
                time.sleep(0.2)
            whole = time.perf_counter() - begun
            peak = page.memory
            spike = max(page.api("curves", run="million", key="train/loss")["curves"]["train/loss"]["values"])
        with live_page(Path(folder) / "million") as page:
            began = time.perf_counter()
            page.api("overview", run="million")
            answer = time.perf_counter() - began
    print(f"a run of {LINES:,} lines ({size / 1e6:.0f} MB of metrics.jsonl)")
    print(f"  first answer          {answer:6.2f} s")
    print(
        f"  first paint           {painted:6.2f} s"
        if painted is not None
        else "  first paint           (no browser here)"
    )
    print(f"  next answer           {again:6.2f} s   {len(told['charts'][0]['curves'][0]['steps'])} points a curve")
    print(f"  index complete after  {whole:6.2f} s   spike of {spike:.1f} kept")
    print(f"  memory of the server  {idle / 1e6:6.0f} MB idle, {peak / 1e6:.0f} MB with the index")


def step_time() -> None:
    """Median seconds a step, over pairs of runs: alone, and with a page beside it that a client follows. The processor time of the page
    bounds what it can take from the run, also on a machine that is too busy for a ratio of step times to say anything."""
    live_page = _live_page()
    ratios, shares = [], []
    for pair in range(int(os.environ.get("PAIRS", "3"))):
        took: dict[bool, float] = {}
        for beside in (False, True) if pair % 2 == 0 else (True, False):
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                config = str(ROOT / "examples" / "quickstart.toml")
                small = ("--text.seq_len", "128", "--loader.global_batch_size", "12", "--loader.lanes", "12")
                command = [
                    sys.executable,
                    "-m",
                    "headrace",
                    "run",
                    config,
                    "--run.dir",
                    str(run),
                    "--run.steps",
                    STEPS,
                    "--quiet",
                    *small,
                ]
                process = subprocess.Popen(command)
                if beside:
                    while not (run / "metrics.jsonl").exists():
                        time.sleep(0.05)
                    with live_page(Path(folder), "--beside", str(os.getpid())) as page:
                        page.api("overview", run="run")
                        threading.Thread(target=_follow, args=(page,), daemon=True).start()
                        before, began = page.cpu_seconds, time.perf_counter()
                        process.wait()
                        shares.append((page.cpu_seconds - before) / (time.perf_counter() - began))
                else:
                    process.wait()
                lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
                seconds = [
                    line["step/seconds"] / line["steps_in_interval"] for line in lines if line["step"] > int(STEPS) // 3
                ]
                took[beside] = statistics.median(seconds)
        ratios.append(took[True] / took[False])
        print(
            f"  step alone {1e3 * took[False]:7.1f} ms, with the page {1e3 * took[True]:7.1f} ms: {ratios[-1]:.3f}; processor time of the page {shares[-1]:.2%} of one core",
            flush=True,
        )
    print(f"  median ratio {statistics.median(ratios):.3f}, median share of one core {statistics.median(shares):.2%}")


def _follow(page: Any) -> None:
    """Read the events of a run as a page does, until the server ends."""
    import http.client

    status = page.api("overview", run="run")["status"]
    connection = http.client.HTTPConnection(page.host, page.port, timeout=600)
    connection.request(
        "GET",
        f"/api/events?run=run&line={status['lines']}&generation={status['generation']}&key=train/loss&key=tokens_per_second",
    )
    answer = connection.getresponse()
    try:
        while answer.readline():
            pass
    except (OSError, http.client.HTTPException):
        pass


if __name__ == "__main__":
    asked = sys.argv[1:] or ["open", "step"]
    if "open" in asked:
        open_million()
    if "step" in asked:
        print("a training run with the page beside it")
        step_time()
