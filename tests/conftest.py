"""What all tests share: a cache that outlives one test run, and settings for hypothesis."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("HEADRACE_CACHE", str(ROOT / ".pytest_cache" / "headrace"))
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
# The hub's client reads these when it is first imported, whichever test that happens in; no test needs a network.
for offline in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
    os.environ[offline] = "1"

settings.register_profile(
    "headrace",
    deadline=None,
    derandomize=True,
    print_blob=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
# The same laws with other examples every time: HEADRACE_HYPOTHESIS=long, or `make test-faults`. A failure prints how to repeat it.
settings.register_profile("long", settings.get_profile("headrace"), derandomize=False, max_examples=1000)
settings.load_profile("long" if os.environ.get("HEADRACE_HYPOTHESIS") == "long" else "headrace")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that workers which take a file at a time end together."""
    folders = ("integration", "property", "unit", "faults")
    items.sort(key=lambda item: next((i for i, name in enumerate(folders) if name in item.path.parts), len(folders)))


@pytest.fixture(scope="session")
def interpreted() -> Callable[..., AbstractContextManager[None]]:
    """Kernels run as plain Python inside."""

    @contextmanager
    def plain(*kernels: Any) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for kernel in kernels:
                patch.setattr(kernel, "_compiled", None)
                patch.setattr(kernel, "_requested", True)
            yield

    return plain


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
def warm() -> Iterator[Any]:
    """Python processes that begin where the imports are done: `warm.run`, `warm.Popen`, `warm.ranks`."""
    spec = importlib.util.spec_from_file_location("warm_python", ROOT / "tests" / "warm_python.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.warm_python() as python:
        yield python


@pytest.fixture(scope="session")
def headrace(warm: Any) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in a process of its own, on one rank or on several; `fresh` is an interpreter that imports all anew."""

    def run(
        *words: str,
        cwd: Path | None = None,
        timeout: float = 110,
        env: dict[str, str] | None = None,
        ranks: int = 1,
        fresh: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "headrace", *words]
        how: dict[str, Any] = {"cwd": cwd, "timeout": timeout, "env": os.environ | {"NO_COLOR": "1"} | (env or {})}
        if ranks > 1:
            return warm.ranks(ranks, command, **how)
        start = subprocess.run if fresh else warm.run
        return start(command, capture_output=True, text=True, check=False, **how)

    return run


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Wait for something to be true."""

    def wait(condition: Callable[[], object], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"it did not happen within {seconds} s"
            time.sleep(0.002)

    return wait
