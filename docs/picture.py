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
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from headrace.ui import RunView, pages, read_run

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
_COLOURS = ("#1f66b0", "#d9730d", "#138a72", "#a3437f", "#6a5fb5", "#8a7410", "#3fa0c4", "#7a4a2b")


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
            draw_panels(read_run(Path(folder) / name), IMAGES / f"streams-{name}.png", panels)


def draw_panels(view: RunView, path: Path, keys: Sequence[str], columns: int = 3) -> None:
    """Draw the panels whose key contains one of `keys`, with the findings about them below."""
    page = pages.metrics(view)
    chosen = [p for p in page["panels"] if any(k in p["key"] for k in keys)]
    rows = -(-len(chosen) // columns)
    shown = {curve["key"] for panel in chosen for curve in panel["curves"]}
    sentences = [f"• {f['sentence']}" for f in page["findings"] if f["key"] in shown]
    words = [line for sentence in sentences for line in textwrap.wrap(sentence, 62 * columns, subsequent_indent="   ")]
    figure = Figure(figsize=(4.3 * columns, 2.5 * rows + 0.17 * len(words)), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    for i, panel in enumerate(chosen):
        _draw(figure.add_subplot(rows, columns, i + 1), view, panel)
    figure.suptitle(f"{view.name}: {view.index.lines:,} lines", fontsize=11)
    if words:
        figure.supxlabel("\n".join(words).replace("$", r"\$"), x=0.01, ha="left", fontsize=8, linespacing=1.35)
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw(axes: Any, view: RunView, panel: Mapping[str, Any]) -> None:
    for i, curve in enumerate(panel["curves"]):
        drawn = view.index.curve(curve["key"], points=2000)
        values = [float("nan") if v is None else v for v in drawn["values"]]
        axes.plot(drawn["steps"], values, linewidth=0.9, color=_COLOURS[i % len(_COLOURS)], label=curve["name"])
    low, high = axes.get_ylim()  # from zero on: a flat curve then looks flat
    axes.set_ylim(
        min(low, 0.0) if axes.dataLim.y0 < 0 else 0.0, high if axes.dataLim.y1 > 0 or axes.dataLim.y0 < 0 else 1.0
    )
    if panel["healthy"] is not None and any(v is not None for v in panel["healthy"]):
        low, high = panel["healthy"]
        bottom, top = axes.get_ylim()
        axes.axhspan(
            bottom if low is None else low, top if high is None else high, color="#6e9682", alpha=0.16, linewidth=0
        )
    axes.set_title(panel["key"].replace("$", r"\$") + (f" [{panel['unit']}]" if panel["unit"] else ""), fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    if len(panel["curves"]) > 1:
        axes.legend(fontsize=6, ncols=2, frameon=False)


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
