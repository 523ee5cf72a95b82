"""Smoke test of an installed wheel: the command trains, is resumed, and a loader continues a saved state.

Run by `make release` in a venv that holds the wheel and its dependencies, from a folder outside the checkout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import headrace as hr

CONFIG = """
[run]
steps = 6
checkpoint_every = 3
[[source]]
spec = "sample:prose"
[text]
tokenizer = "sample"
seq_len = 64
[loader]
global_batch_size = 4
"""


def headrace(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "headrace", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"headrace {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    source = Path(hr.__file__).resolve()
    if "site-packages" not in source.parts:
        sys.exit(f"headrace comes from {source}, not from an installed wheel")
    Path("smoke.toml").write_text(CONFIG)
    headrace("check", "smoke.toml")
    headrace("run", "smoke.toml", "--run.dir", "straight")
    headrace("run", "smoke.toml", "--run.dir", "stopped", "--run.stop_after", "3")
    headrace("run", "--resume", "stopped", "--set", "run.stop_after=6")
    straight, resumed = (json.loads(headrace("inspect", run, "--format", "json")) for run in ("straight", "stopped"))
    if (straight["digest"], straight["model_sha256"]) != (resumed["digest"], resumed["model_sha256"]):
        sys.exit("a resumed run differs from a straight one")
    loader = hr.load("smoke.toml").loader()
    next(loader)
    saved, expected = loader.state_dict(), next(loader)["input_ids"]
    again = hr.load("smoke.toml").loader()
    again.load_state_dict(saved)
    if not (next(again)["input_ids"] == expected).all():
        sys.exit("a loader does not continue its own state")
    print(f"headrace {hr.__version__}: the wheel works")


if __name__ == "__main__":
    main()
