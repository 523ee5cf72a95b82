"""The live page and the static report in a real browser: a run in progress updates by itself, a click on the curve opens its documents."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
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
from live_page import live_page
from small_spool import make_spool

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
EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"
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
        assert "[object " not in self.page.inner_text("body"), address
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
    (folder / "config.toml").write_text(
        '[run]\nname = "sort"\nsteps = 50\n[policy]\nlr = 1e-3\n[rollouts]\ngroups_per_step = 2\ndrop_equal = true\n[[env]]\nname = "sort"\ngroup_size = 2\n'
    )
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
    members = [record(member, reward=member / 2) for member in range(3)]
    members += [record(member, task=8, reward=1.0) for member in range(2)]
    (folder / "arrivals" / "step_000000000007.log").write_bytes(b"".join(members))
    unfinished = [record(0, task=9), record(0, task=10, failed="timeout")]
    (folder / "arrivals" / "step_000000000008.log").write_bytes(b"".join(unfinished))
    return folder


def record(member: int, *, prompt: str = "3142>", completion: str = "12<4", **changed: Any) -> bytes:
    """A rollout of four tokens as it stands in an arrival log."""
    turn = {
        "prompt": prompt, "completion": completion, "kept": 0, "prompt_ids": b"", "ids": np.arange(4, dtype="<i4").tobytes(),
        "logprobs": np.array([-0.1, -3, -0.2, -5], "<f4").tobytes(), "spans": [["6", 0, 4]],
    }  # fmt: skip
    fields = {
        "task": 7,
        "member": member,
        "attempt": 0,
        "step": 7,
        "env": "sort",
        "version": 6,
        "time": 1.0,
        "reward": 0.5,
        "turns": [turn],
    }
    payload = msgspec.msgpack.encode(fields | changed)
    return len(payload).to_bytes(4, "little") + xxhash.xxh3_64_intdigest(payload).to_bytes(8, "little") + payload


def stream_run(folder: Path) -> Path:
    """Four files in a pool of two, and a ledger that forgets 3 steps too early."""
    folder.mkdir(parents=True)
    files = {"atac/0.npz": 20, "atac/1.npz": 12, "rna/0.npz": 40, "rna/1.npz": 9}
    (folder / "config.toml").write_text(
        '[run]\nname = "cells"\nseed = 5\nsteps = 15\n[streams]\nroots = ["cells"]\nbatch_size = 4\nbatch_sizes = {}\nnum_streams_mixed = 2\npick_mode = "proportional"\n'
        'queue = "stratified"\nbatching_mode = "per_stream"\nglobal_ranks = 1\n[ledger]\nmode = "periodic_stale"\nstale_threshold = 8\n'
    )
    (folder / "streams.json").write_text(json.dumps([{"name": n, "rows": r} for n, r in files.items()]))
    lines = [
        {"step": s, "train/loss": 1 / s, "stream_mixing/picks/atac": s % 2, "stream_mixing/picks/rna": (s + 1) % 2,
         "ledger/evictions/stale": 2, "ledger/false_evictions/stale": int(s > 10), "ledger/refault_distance_max": 3}
        for s in range(1, 16)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def spool_run(folder: Path, reason: str) -> Path:
    """A run with a spool of three files, one read, one in the quarantine."""
    synthetic(folder, "spooled", 2.0)
    with open(folder / "config.toml", "a") as out:
        out.write("[spool]\nenabled = true\n")
    make_spool(folder / "spool", reason)
    return folder


def evil_runs(root: Path) -> None:
    """Runs in which every name and text is a tag: of the run, sources, metrics, events, environments, rollouts, modalities, files."""
    quoted = json.dumps(EVIL)
    text = root / "evil-text"
    text.mkdir()
    (text / "config.toml").write_text(
        f'[run]\nname = {quoted}\nsteps = 40\n{quoted} = {quoted}\n[[source]]\nname = {quoted}\nspec = {quoted}\nweight = 0.5\n[[source]]\nname = "b"\nspec = "x"\nweight = 0.5\n'
    )
    (text / "flight.jsonl").write_text(quoted + "\n")
    (text / "journal.jsonl").write_text(
        json.dumps({"event": EVIL, "step": 3, EVIL: EVIL})
        + "\n"
        + json.dumps({"event": "resumed", "step": 3})
        + "\n{torn"
    )
    with open(text / "metrics.jsonl", "w") as out:
        for step in range(1, 40):
            line = {"step": step, "train/loss": float("nan") if step > 30 else 1 / step, EVIL: step, f"step/wait/{EVIL}/seconds": 0.5, f"step/phase/{EVIL}/seconds": 0.5,
                    "step/seconds": 1.0, "steps_in_interval": 1, f"data/source_tokens/{EVIL}": 10, "data/source_tokens/b": 1, "data/tokens": 11}  # fmt: skip
            out.write(json.dumps(line) + "\n")
    streams = stream_run(root / "evil-streams")
    for name in ("config.toml", "streams.json", "metrics.jsonl"):
        path = streams / name
        path.write_text(path.read_text().replace("atac", EVIL.replace("/", "")).replace('"cells"', quoted))
    rl = root / "evil-rl"
    rl.mkdir()
    (rl / "config.toml").write_text(f"[run]\nname = {quoted}\nsteps = 9\n[policy]\nlr = 1\n[[env]]\nname = {quoted}\n")
    (rl / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": s, "reward/all/mean": s, f"reward/{EVIL}/mean": s, f"rollouts/failed/{EVIL}": 1}) + "\n"
            for s in (1, 2)
        )
    )
    (rl / "answers.jsonl").write_text(
        json.dumps({"step": 1, "env": EVIL, "task": EVIL, "prompt": EVIL, "answer": EVIL, "reward": 1}) + "\n"
    )
    (rl / "arrivals").mkdir()
    env = EVIL.replace("/", "")  # no environment has a slash in its name
    records = [record(0, env=env, prompt=EVIL, completion=EVIL, metrics={EVIL: 1.0}), record(1, env=env, failed=EVIL)]
    (rl / "arrivals" / "step_000000000001.log").write_bytes(b"".join(records))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    root = tmp_path_factory.mktemp("runs")
    synthetic(root / "a", "first", 2.0)
    synthetic(root / "b", "second", 3.0)
    rl_run(root / "sort")
    stream_run(root / "cells")
    spool_run(root / "spooled", f"looked odd {EVIL}")
    evil_runs(root)
    with live_page(root) as page:
        yield page


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, repository: Path, headrace: Any) -> Iterator[Any]:
    """Two runs that recorded their documents: the second has another seed from its first step on. And a copy of the first."""
    root = tmp_path_factory.mktemp("recorded")
    for name, seed in (("one", "1"), ("two", "2")):
        done = headrace(
            "run", str(repository / "examples" / "quickstart.toml"), "--run.dir", str(root / name), "--run.steps", "4", "--run.log_every", "1", "--run.seed", seed,
            "--text.seq_len", "64", "--loader.global_batch_size", "6", "--loader.lanes", "6", "--quiet",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    shutil.copytree(root / "one", root / "copy")
    with live_page(root) as page:
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
        # Points are circles only while they are few, and a fast run has many before the page is open: wait for the curve.
        here.wait_for_selector('.card[data-key="train/loss"] svg path.curve[d*="L"]', state="attached")
        before = here.inner_text("#progress-text")
        here.wait_for_selector(f'#progress-text:not(:text-is("{before}"))')
        process.send_signal(signal.SIGSTOP)  # it has shown what it should, and leaves the processors to the browser
        here.locator("svg.plot").first.scroll_into_view_if_needed()
        plot = here.locator('.card[data-key="train/loss"] svg')
        box = plot.bounding_box()
        # The first points: their digests are in the folder already.
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
    groups = [row.inner_text().split("\t") for row in here.locator("#groups tbody tr").all()]
    assert groups == [["9", "collecting", "1", "0", "2", "timeout: 1"], ["8", "trained", "5", "2", "0", "–"]]
    here.locator("#groups a").nth(1).click()
    here.wait_for_selector(".turn")
    here.locator(".list tr.link").nth(2).click()
    here.wait_for_selector(".list tr.link.chosen:nth-child(3)")
    assert "3142>" in here.inner_text(".chat")
    assert [t.inner_text() for t in here.locator(".chat .tok").all()] == list("12<4")
    assert "+0.5" in here.inner_text(".legend")
    token = here.locator(".chat .tok").nth(2)
    assert "sampled by policy 6" in str(token.get_attribute("title"))
    by_logprob = token.get_attribute("style")
    here.get_by_label("colour tokens by").select_option("advantage")
    here.wait_for_selector(".turn .role:has-text('above its group')")
    shades = {t.get_attribute("style") for t in here.locator(".chat .tok").all()}
    assert len(shades) == 1, "an advantage is the same for all tokens of a rollout"
    assert by_logprob not in shades
    assert "trained in step" in here.inner_text(".legend")
    here.locator(".list tr.link").nth(4).click()
    here.wait_for_selector("[data-filter=zero_advantage]")
    assert "trained in step" not in here.inner_text(".legend")
    tab.close(page.address)


def test_the_pool_is_shown_as_files_over_time_and_a_false_eviction_names_the_threshold(browser, page):
    tab = Tab(browser)
    here = tab.open(page.address + "#/run/cells/streams")
    assert "11 would have been enough (it is 8)" in here.inner_text(".finding")
    lanes = here.locator(".card", has_text="Open files over time")
    assert lanes.locator("svg rect").count() >= 8, "four files, each with how far it was read"
    lanes.locator("svg rect").nth(1).hover()
    here.wait_for_selector(".tip")
    assert re.search(r"steps \d+ to \d+, \d+ picks", here.inner_text(".tip"))
    assert here.inner_text(".mix").split("\n") == ["atac", "53.3 %", "rna", "46.7 %"], "of 15 picks"
    tab.close(page.address)


def test_the_spool_page_shows_files_ranks_and_the_quarantine(browser, page):
    tab = Tab(browser)
    here = tab.open(page.address + "#/run/spooled/spool")
    text = here.inner_text("main")
    assert "1 missing, 1 in quarantine" in here.inner_text(".verdict.bad")
    assert "looked odd" in text
    assert "0 of 1" in text, "the rank that has read"
    assert here.locator(".pill.bad", has_text="1: 2").count() == 1, "file 2 is missing"
    assert here.locator("td .pill", has_text="none yet").count() >= 1, "a verdict"
    tab.close(page.address)


def test_names_that_are_tags_are_text_on_every_page(browser, page, tmp_path):
    tab = Tab(browser)
    tab.page.on("dialog", lambda dialog: tab.said.append(dialog.message))
    addresses = [
        "#/",
        "#/run/evil-rl/rl/2/0",
        "#/run/evil-rl/rl/2/1",
        "#/run/spooled/spool",
        "#/compare/evil-text/evil-streams",
    ]
    addresses += [
        f"#/run/{run}/{name}"
        for run in ("evil-text", "evil-streams", "evil-rl")
        for name in ("overview", "metrics", "config")
    ]
    addresses += ["#/run/evil-streams/streams", "#/run/evil-rl/rl", "#/run/evil-text/find"]
    for address in addresses:
        here = tab.open(page.address + address)
        here.wait_for_selector(".loading", state="detached")
        assert here.locator("img, main script, #top script").count() == 0, address
        assert "<img src=x" in here.inner_text("body"), address
    here = tab.open(page.address + "#/run/evil-text/overview")
    assert "not a number" in here.inner_text(".findings"), "NaN is said"
    tab.close(page.address)


def test_runs_that_recorded_their_documents_are_told_apart_and_searched(browser, recorded):
    tab = Tab(browser)
    here = tab.open(recorded.address + "#/compare/one/copy")
    here.wait_for_selector(".verdict.good")
    assert "The same data for all 4 steps" in here.inner_text(".verdict")
    here = tab.open(recorded.address + "#/compare/one/two")
    here.wait_for_selector(".verdict.warn")
    assert "The data parts at step 1" in here.inner_text(".verdict")
    assert here.locator(".doc").count() == 2, "what each of them saw there"
    here = tab.open(recorded.address + "#/run/one/step/2")
    here.wait_for_selector(".doc")
    assert here.locator(".pill.good", has_text="proven").count() == 1
    here.get_by_text("Skip this step in a later run").click()
    assert "--run.skip 2:3" in here.inner_text(".command >> nth=0")
    words = max(re.findall(r"[a-z]{5,}", here.inner_text(".doc .text >> nth=0")), key=len)
    here = tab.open(recorded.address + "#/run/one/find")
    here.get_by_label("text").fill(words)
    here.get_by_label("around step").fill("2")
    here.get_by_role("button", name="Search").click()
    here.wait_for_selector(".doc a >> text=step 2")
    tab.close(recorded.address)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone(browser, page, scheme):
    tab = Tab(browser, width=390, scheme=scheme)
    addresses = ["#/", "#/run/a/overview"]
    if scheme == "light":  # a scheme changes colours, not sizes
        addresses += ["#/run/a/metrics", "#/run/a/config", "#/run/sort/rl", "#/run/sort/rl/8", "#/run/cells/streams"]
        addresses += ["#/run/spooled/spool", "#/compare/a/b"]
    for address in addresses:
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
