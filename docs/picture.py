"""Draw the README's picture: run the quickstart for real and turn what it printed into docs/img/run.svg.

python docs/picture.py
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


def main() -> None:
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
    target = ROOT / "docs" / "img" / "run.svg"
    target.parent.mkdir(exist_ok=True)
    drawn = console.export_svg(title="headrace", theme=MONOKAI)
    target.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))  # the reader's own fonts will do
    print(f"wrote {target.relative_to(ROOT)}")


def _is_bar(text: str) -> bool:
    return "━" in text or "\r" in text


if __name__ == "__main__":
    main()
