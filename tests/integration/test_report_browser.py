"""A report, opened in a real browser: its script runs, every curve is drawn, and nothing is asked of any network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import headrace.loader.stream_metrics  # noqa: F401  (its specs)
from headrace.dash import read_report, write_page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
A = "stream_mixing/active"

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")


def opened(page: Path, profile: Path) -> tuple[str, str]:
    """The document as it stands after its scripts, and what the console said."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}", "--no-first-run",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--virtual-time-budget=20000", "--window-size=1400,2000",
            "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def a_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text('[run]\nname = "mixed"\n[streams]\nroots = ["a"]\nnum_streams_mixed = 4\n')
    (folder / "journal.jsonl").write_text(json.dumps({"event": "resumed", "step": 20}) + "\n")
    with open(folder / "metrics.jsonl", "w") as lines:
        for step in range(1, 200):
            line = {
                "step": step, "train/loss": 1 / step, f"{A}/remaining_fraction_min": 0.4, f"{A}/remaining_fraction_max": 0.5,
                f"{A}/steps_since_pick_max": 3, f"{A}/modalities/rna": 2, f"{A}/modalities/</script><b>atac": 2,
                "stream_mixing/picks/rna": step % 2, "stream_mixing/refill/exhaust_events": 0,
            }  # fmt: skip
            lines.write(json.dumps(line) + "\n")
    return folder


def test_a_browser_draws_every_curve_and_asks_nobody_for_anything(tmp_path):
    report = read_report(a_run(tmp_path / "run"))
    write_page(report, tmp_path / "page.html")
    document, console = opened(tmp_path / "page.html", tmp_path / "profile")
    assert console == ""
    drawn = document.count('class="trace scatter')
    wanted = sum(len(panel.curves) for panel in report.panels)
    assert drawn >= wanted > 5, "each curve, and the healthy bands behind some"
    assert len(re.findall(r'<svg class="main-svg"', document)) >= len(report.panels)
    assert "mixed" in re.search(r"<h1[^>]*>(.*?)</h1>", document, re.DOTALL)[1]
    assert not re.search(r"<b>atac", document), "a name is text, never a tag"


def test_a_page_that_broke_says_so_in_the_console(tmp_path):
    write_page(read_report(a_run(tmp_path / "run")), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    (tmp_path / "page.html").write_text(page.replace('id="data">{', 'id="data">{,', 1))
    document, console = opened(tmp_path / "page.html", tmp_path / "profile")
    assert "SyntaxError" in console
    assert 'class="trace scatter' not in document
