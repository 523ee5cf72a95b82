"""Take the screenshots of the live page, from runs that happen now: docs/img/ui-<page>-<width>-<scheme>.png.

python docs/screenshots.py                make the runs, take all pictures
python docs/screenshots.py --runs DIR     use the runs below DIR: text, other, streams, spooled, and rl if it is there
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "img"
LARGEST = 150_000
SHOTS = (
    ("runs", "#/", (1280, 390), ("light",)),
    ("overview", "#/run/text/overview", (1280, 390), ("light", "dark")),
    ("step", "#/run/text/step/120", (1280, 390), ("light", "dark")),
    ("compare", "#/compare/text/other", (1280,), ("light",)),
    ("streams", "#/run/streams/streams", (1280, 390), ("light", "dark")),
    ("spool", "#/run/spooled/spool", (1280,), ("light",)),
    ("metrics", "#/run/streams/metrics", (1280,), ("dark",)),
    ("rl", "#/run/rl/rl", (1280,), ("light",)),
    ("rollouts", "#/run/rl/rl/{rollouts}", (1280, 390), ("light", "dark")),
)


def make_runs(folder: Path) -> None:
    """A text run, the same with another seed and through a spool, a stream run whose ledger forgets too early, and an RL run."""
    subprocess.run([sys.executable, str(ROOT / "examples" / "stream_mixing" / "make_data.py")], cwd=ROOT, check=True)
    runs = [
        ("text", "examples/quickstart.toml", ()),
        ("other", "examples/quickstart.toml", ("--run.seed", "8", "--run.name", "other-seed")),
        ("streams", "examples/stream_mixing/diag_stale_false_evict.toml", ()),
        ("spooled", "examples/quickstart.toml", ("--run.name", "spooled", "--spool.enabled", "true")),
    ]
    if (ROOT / "examples" / "rl" / "sort.toml").exists():
        runs.append(("rl", "examples/rl/sort.toml", ("--run.stop_after", "30")))
    for name, config, options in runs:
        subprocess.run(
            [sys.executable, "-m", "headrace", "run", config, "--run.dir", str(folder / name), "--quiet", *options],
            cwd=ROOT,
            check=True,
        )


def take(folder: Path) -> None:
    """Every picture of SHOTS, as small as a palette makes it."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    spec = importlib.util.spec_from_file_location("live_page", ROOT / "tests" / "live_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    flags = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    # A relative path, as a reader would give it: it is part of the picture.
    with (
        contextlib.chdir(folder.resolve().parent),
        module.live_page(Path(folder.name)) as live,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        steps = live.api("rl", run="rl")["steps"] if Path(folder.name, "rl").exists() else []
        for name, address, widths, schemes in SHOTS:
            if "/rl" in address and not steps:
                print(f"{name}: no RL run")
                continue
            for width in widths:
                for scheme in schemes:
                    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
                    page.goto(live.address + address.format(rollouts=steps[-1] if steps else 0))
                    page.wait_for_selector('main[data-ready^="#"]', timeout=120_000)
                    page.wait_for_selector(".loading", state="detached", timeout=120_000)
                    page.wait_for_timeout(500)  # curves that come into view are asked for
                    picture = Image.open(io.BytesIO(page.screenshot())).convert(
                        "P", palette=Image.Palette.ADAPTIVE, colors=128
                    )
                    path = IMAGES / f"ui-{name}-{width}-{scheme}.png"
                    picture.save(path, optimize=True)
                    page.close()
                    size = path.stat().st_size
                    print(f"{path.name}: {size:,} bytes")
                    if size > LARGEST:
                        raise SystemExit(f"{path} has {size:,} bytes, more than {LARGEST:,}")
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="a folder of runs that are there")
    given = parser.parse_args().runs
    if given is not None:
        take(given)
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        make_runs(runs)
        take(runs)


if __name__ == "__main__":
    main()
