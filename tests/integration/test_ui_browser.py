"""The live page and the static report in a real browser: a run in progress updates by itself, a click on the curve opens its documents."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from headrace.ui import read_run, write_page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium"),
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="needs playwright: pip install playwright"
    ),
]
READY = 'main[data-ready^="#"]'


class Tab:
    """A page of the browser that notes what its console says and where its requests go."""

    def __init__(self, browser: Any, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, address: str) -> Any:
        self.page.goto(address)
        self.page.wait_for_selector(READY)
        return self.page

    def close(self, host: str) -> None:
        """Nothing went wrong, and nothing was asked of another host."""
        self.context.close()
        assert self.said == []
        assert all(url.startswith((host, "data:")) for url in self.asked), self.asked


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, headless=True, args=list(FLAGS))
        yield opened
        opened.close()


def synthetic(folder: Path, name: str, loss: float) -> Path:
    folder.mkdir(parents=True)
    evil = "<b>web</b>"
    (folder / "config.toml").write_text(
        f'[run]\nname = "{name}"\nsteps = 400\nseed = {int(loss)}\n[[source]]\nname = "{evil}"\nspec = "x"\nweight = 0.6\n[[source]]\nname = "code"\nspec = "y"\nweight = 0.4\n'
    )
    (folder / "journal.jsonl").write_text(json.dumps({"event": "resumed", "step": 90, "world_size": 4}) + "\n")
    with open(folder / "metrics.jsonl", "w") as out:
        for step in range(10, 310, 10):
            out.write(json.dumps({
                "step": step, "time": 1e9 + step, "train/loss": loss + 4 / step, "train/grad_norm": 1.0, "tokens_per_second": 4e5, "steps_in_interval": 10, "step/seconds": 8.0,
                "step/phase/train.forward/seconds": 5.0, "step/phase/train.backward/seconds": 1.4, "step/wait/loader.next/seconds": 1.6, "waits/exposed/seconds": 1.6,
                "waits/exposed/seconds/by_rank": [0.1, 0.2, 1.2, 0.1], f"data/source_tokens/{evil}": 600, "data/source_tokens/code": 400, "data/tokens": 1000,
            }) + "\n")  # fmt: skip
    return folder


def rl_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[run]\nname = "sort"\nsteps = 50\n[policy]\nlr = 1e-3\n')
    lines = [
        {
            "step": s,
            "reward/all/mean": s / 10,
            "reward/sort/mean": s / 10,
            "reward/sort/std": 0.1,
            "event_loop_lag/p99": 0.001,
        }
        for s in range(1, 9)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "arrivals").mkdir()
    with open(folder / "arrivals" / "step_000000000007.log", "wb") as out:
        for member in range(3):
            turn = {
                "prompt": "3142>",
                "completion": "12<4",
                "kept": 0,
                "prompt_ids": b"",
                "ids": np.arange(4, dtype="<i4").tobytes(),
                "logprobs": np.array([-0.1, -3, -0.2, -5], "<f4").tobytes(),
            }
            payload = msgspec.msgpack.encode(
                {
                    "task": 7,
                    "member": member,
                    "attempt": 0,
                    "step": 7,
                    "env": "sort",
                    "version": 6,
                    "time": 1.0,
                    "reward": member / 2,
                    "turns": [turn],
                }
            )
            out.write(
                len(payload).to_bytes(4, "little") + xxhash.xxh3_64_intdigest(payload).to_bytes(8, "little") + payload
            )
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[Any]:
    root = tmp_path_factory.mktemp("runs")
    synthetic(root / "a", "first", 2.0)
    synthetic(root / "b", "second", 3.0)
    rl_run(root / "sort")
    spec = importlib.util.spec_from_file_location("live_page", repository / "tests" / "live_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.live_page(root) as page:
        yield page


def test_a_run_in_progress_updates_itself_and_a_click_on_its_curve_opens_the_documents(browser, tmp_path, repository):
    """`headrace run --ui`: the address is printed, the page follows the run, and ends with it."""
    words = ["run", str(repository / "examples" / "quickstart.toml"), "--ui", "--run.dir", str(tmp_path / "run"), "--run.steps", "4000", "--run.log_every", "1",
             "--text.seq_len", "64", "--loader.global_batch_size", "6", "--loader.lanes", "6", "--run.checkpoint_every", "5"]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"NO_COLOR": "1"},
    )
    try:
        assert process.stderr is not None
        address = next(line for line in process.stderr if line.startswith("page")).split()[1]
        tab = Tab(browser)
        here = tab.open(address)
        here.wait_for_selector(".state.running")
        here.wait_for_selector('.card[data-key="train/loss"] svg circle')
        before = here.inner_text("#progress-text")
        here.wait_for_selector(f'#progress-text:not(:text-is("{before}"))')
        here.locator("svg.plot").first.scroll_into_view_if_needed()
        plot = here.locator('.card[data-key="train/loss"] svg')
        box = plot.bounding_box()
        # The first points: their digests are in the folder already.
        here.wait_for_selector('.card[data-key="train/loss"] svg circle >> nth=3')
        plot.click(position={"x": 60, "y": box["height"] / 2})
        here.wait_for_selector(".doc")
        assert re.search(r"^Step \d+$", here.inner_text("h1"))
        assert here.locator(".doc").count() >= 6
        assert "prose" in here.inner_text("main")
        here.locator(".doc >> nth=0").get_by_role("button").click()
        here.wait_for_selector(".doc .tok")
        assert here.locator(".doc .tok").count() > 5, "token by token"
        here.locator(".doc a").first.click()
        here.wait_for_selector("table td a")
        tab.close(address)
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_the_overview_says_what_is_wrong_and_shows_the_worst_rank(browser, page):
    tab = Tab(browser)
    here = tab.open(page.address + "#/run/a/overview")
    finding = here.locator(".finding").first
    assert "waiting for loader.next" in finding.inner_text()
    assert finding.bounding_box()["y"] < 300, "on the first screen"
    assert here.locator(".card h3").first.bounding_box()["y"] < 800
    assert here.locator('.card[data-key="waits/exposed/seconds"] rect').count() > 60, "four ranks by thirty lines"
    assert "<b>web</b>" in here.inner_text("main"), "a name is text"
    finding.get_by_text("Show the curve").click()
    here.wait_for_selector(".card.marked")
    assert here.locator(".card.marked").is_visible()
    here.fill("input[type=search]", "gradient")
    assert here.locator(".card:visible").count() == 1
    tab.close(page.address)


def test_a_drag_zooms_into_a_curve(browser, page):
    tab = Tab(browser)
    here = tab.open(page.address + "#/run/a/overview")
    plot = here.locator('.card[data-key="train/loss"] svg')
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    here.mouse.move(box["x"] + 200, box["y"] + 60)
    here.mouse.down()
    here.mouse.move(box["x"] + 320, box["y"] + 60, steps=4)
    here.mouse.up()
    here.get_by_text("whole run").click()
    assert any("first=" in url for url in tab.asked)
    tab.close(page.address)


def test_two_runs_are_compared(browser, page):
    tab = Tab(browser)
    here = tab.open(page.address + "#/")
    for name in ("first", "second"):
        here.get_by_label(f"choose {name} for a comparison").check()
    here.get_by_text("Compare two runs").click()
    here.wait_for_selector(".card[data-key='train/loss'] path >> nth=1", state="attached")
    assert "run.seed" in here.inner_text("main")
    tab.close(page.address)


def test_rollouts_are_read_as_a_conversation(browser, page):
    tab = Tab(browser)
    here = tab.open(page.address + "#/run/sort/rl")
    here.get_by_text("Read the rollouts of step 8").click()
    here.wait_for_selector(".turn")
    here.locator(".list tr.link").nth(2).click()
    here.wait_for_selector(".list tr.link.chosen:nth-child(3)")
    assert "3142>" in here.inner_text(".chat")
    assert [t.inner_text() for t in here.locator(".chat .tok").all()] == list("12<4")
    assert "+0.5" in here.inner_text(".legend")
    tab.close(page.address)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone(browser, page, scheme):
    tab = Tab(browser, width=390, scheme=scheme)
    for address in ("#/", "#/run/a/overview", "#/run/a/metrics", "#/run/a/config", "#/run/sort/rl/8", "#/compare/a/b"):
        here = tab.open(page.address + address)
        assert here.evaluate("document.documentElement.scrollWidth") <= 390, address
        shade = here.evaluate("getComputedStyle(document.body).backgroundColor")
        assert shade == ("rgb(16, 21, 27)" if scheme == "dark" else "rgb(251, 252, 253)")
    tab.close(page.address)


def test_the_static_report_is_the_same_page_and_asks_nothing(browser, tmp_path):
    run = synthetic(tmp_path / "run", "saved", 2.0)
    write_page(read_run(run), tmp_path / "page.html")
    tab = Tab(browser)
    here = tab.open((tmp_path / "page.html").as_uri())
    assert "waiting for loader.next" in here.inner_text(".finding")
    assert here.locator('.card[data-key="train/loss"] path.curve').count() == 1
    here.get_by_role("link", name="Metrics").click()
    here.wait_for_selector('.card[data-key="train/grad_norm"] path.curve', state="attached")
    assert not here.locator("a", has_text="Open step").count()
    tab.close("file://")


def test_a_page_that_broke_says_so_in_the_console(browser, tmp_path):
    run = synthetic(tmp_path / "run", "saved", 2.0)
    write_page(read_run(run), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    (tmp_path / "page.html").write_text(page.replace('id="data">{', 'id="data">{,', 1))
    tab = Tab(browser)
    tab.page.goto((tmp_path / "page.html").as_uri())
    with pytest.raises(AssertionError, match="in JSON at position"):
        tab.close("file://")
