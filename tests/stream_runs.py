"""The example configs of stream mixing as runs, for tests: their data in a folder, a run of one rank, and runs on four."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.terminal import Display
from headrace.files import read_jsonl
from headrace.runs.config.loading import load_any_config
from headrace.runs.folder import RunFolder
from rank_server import SCENARIOS

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "stream_mixing"
CONFIGS = Path("examples", "stream_mixing")
"""The example configs below a desk, with the data that they name beside them."""


def make_desk(folder: Path) -> Path:
    """Fill a folder with the example configs and the data that they name."""
    configs = folder / CONFIGS
    configs.mkdir(parents=True)
    for config in EXAMPLES.glob("*.toml"):
        shutil.copy(config, configs)
    command = [sys.executable, str(EXAMPLES / "make_data.py"), "--out", str(configs / "data")]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Iterator[Path]:
    """A folder in which the examples' relative paths lead somewhere; the working folder of this module's tests."""
    folder = make_desk(tmp_path_factory.mktemp("desk"))
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def run(config: str, folder: str, *overrides: str, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """One rank of a run; what it came to."""
    from headrace.runs.streams import run_streams

    changed = ("--run.dir", folder, *overrides)
    if (Path(folder) / "config.toml").exists() and "--fresh" not in overrides:
        opened = RunFolder.reopen(Path(folder), overrides)
    elif rank == 0:
        opened = RunFolder.create(load_any_config(Path(config), changed, env={}), version="test")
    else:
        opened = RunFolder(Path(folder), load_any_config(Path(config), changed, env={}), {"base": os.getcwd()})
    try:
        return run_streams(opened, Display()).to_dict()
    finally:
        opened.release()


def trained(rank: int, world: int, config: str, folder: str, overrides: Sequence[str], exists: bool) -> Any:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    return run(config, folder, *overrides, rank=rank, world=world)  # which ends the process group


SCENARIOS["trained"] = trained


@pytest.fixture
def on_four(ranks: Callable[..., Any], desk: Path) -> Callable[..., Any]:
    def run_on_four(config: str, folder: Path, *overrides: str) -> dict[str, Any]:
        told = ranks(4, "trained", config=config, folder=str(folder), overrides=overrides, exists=folder.exists())
        assert "result" in told[0], told[0]
        return told[0]["result"]

    return run_on_four


def lines(folder: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(folder / "metrics.jsonl"))
