"""Draw the README's pictures, from runs that happen now.

python docs/picture.py               all of them
python docs/picture.py run           the quickstart, as it was printed: docs/img/run.svg
python docs/picture.py streams       the panels of the stream examples: docs/img/streams-<config>.png
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "img"
STREAMS = {
    "healthy": ("stream_mixing/active", "picks_so_far", "exhaust_events", "train/loss"),
    "diag_imbalanced_bs": (
        "remaining_fraction",
        "active/modalities",
        "steps_since_pick",
        "overdue",
        "picks",
        "train/loss",
    ),
    "diag_exhaust_spike": ("remaining_fraction", "active/modalities", "exhaust_events", "picks_so_far", "train/loss"),
    "diag_stale_false_evict": ("evictions/stale", "refault_distance", "occupancy", "steps_since_pick", "train/loss"),
}
"""Config of examples/stream_mixing, and the panels that show what it is for."""


def main() -> None:
    asked = sys.argv[1:] or ["run", "streams"]
    if "run" in asked:
        draw_run()
    if "streams" in asked:
        draw_streams()


def draw_streams() -> None:
    with tempfile.TemporaryDirectory() as folder:
        examples = Path(folder) / "examples" / "stream_mixing"
        examples.mkdir(parents=True)

        def headrace(*words: str) -> None:
            subprocess.run([sys.executable, "-m", "headrace", *words], cwd=folder, check=True)

        make = ROOT / "examples" / "stream_mixing" / "make_data.py"
        subprocess.run([sys.executable, str(make), "--out", str(examples / "data")], check=True)
        for name, panels in STREAMS.items():
            headrace("run", str(make.with_name(f"{name}.toml")), "--run.dir", name, "--quiet")
            only = [word for panel in panels for word in ("--only", panel)]
            headrace("report", name, "--png", str(IMAGES / f"streams-{name}.png"), *only)


def draw_run() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = ["headrace", "run", "examples/quickstart.toml", "--run.dir", "runs/quickstart"]
        done = subprocess.run(
            [sys.executable, "-m", *command[:-1], f"{folder}/quickstart"],
            cwd=ROOT, env=os.environ | {"FORCE_COLOR": "1", "COLUMNS": "110"}, capture_output=True, text=True, check=True,
        )  # fmt: skip
    printed = done.stdout.replace(f"{folder}/quickstart", "runs/quickstart")
    lines = [line for line in Text.from_ansi(printed).split("\n") if not _is_bar(line.plain)]
    # The middle of the run looks like the rest of it.
    steps = [i for i, line in enumerate(lines) if line.plain.startswith("step")]
    hidden = set(steps[5:-3])
    console = Console(record=True, width=110, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print("[bold]$ " + " ".join(command[:3]) + "[/]")
    for i, line in enumerate(lines):
        if i not in hidden:
            console.print(line)
        elif i == steps[5]:
            console.print("  …")
    target = IMAGES / "run.svg"
    target.parent.mkdir(exist_ok=True)
    drawn = console.export_svg(title="headrace", theme=MONOKAI)
    target.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))  # the reader's own fonts will do
    print(f"wrote {target.relative_to(ROOT)}")


def _is_bar(text: str) -> bool:
    return "━" in text or "\r" in text


if __name__ == "__main__":
    main()
