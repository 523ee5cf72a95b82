"""What all tests share: a cache that outlives one test run, and settings for hypothesis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("HEADRACE_CACHE", str(ROOT / ".pytest_cache" / "headrace"))
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

settings.register_profile(
    "headrace", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("headrace")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write texts as a jsonl file below tmp_path."""

    def write(name: str, texts: Sequence[str]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        return path

    return write


@pytest.fixture(scope="session")
def headrace() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in a process of its own, as a user would."""

    def run(
        *words: str, cwd: Path | None = None, timeout: float = 110, env: dict[str, str] | None = None, **more: object
    ):
        return subprocess.run(
            [sys.executable, "-m", "headrace", *words],
            cwd=cwd, env=os.environ | {"NO_COLOR": "1"} | (env or {}), capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    return run
