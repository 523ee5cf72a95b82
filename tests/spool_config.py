"""The config of a small run over a spool, for tests of runs and providers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.runs.config.loading import load_config
from headrace.runs.config.schema import RunConfig

CONFIG = """
[run]
seed = 3
checkpoint_every = 4
{run}
{sources}
[text]
seq_len = 64
[loader]
global_batch_size = 12
lanes = 12
exhausted = "repeat"
[spool]
{spool}
[train]
model = "gpt-tiny"
threads = 1
"""


def write_spool_config(
    path: Path,
    *,
    run: Mapping[str, Any] | None = None,
    sources: Sequence[Mapping[str, Any]] = ({"spec": "sample:prose"},),
    spool: Mapping[str, Any] | None = None,
) -> Path:
    """Write the config of a run over a few small files to `path`, and return `path`. `sources`: tables [[source]]. `run`, `spool`: more keys of
    [run], which has 12 steps, and of [spool]."""
    tables = "\n".join(_lines("[[source]]", source) for source in sources)
    keys = {"batches_per_file": 3, "max_backlog_files": 2, **(spool or {})}
    path.write_text(CONFIG.format(run=_lines("", {"steps": 12, **(run or {})}), sources=tables, spool=_lines("", keys)))
    return path


def load_spool_config(path: Path, *more: str) -> RunConfig:
    """The config at `path`, with its run and its spool in folders beside it."""
    folders = ("--run.dir", str(path.parent / "run"), "--spool.dir", str(path.parent / "spool"))
    return load_config(path, (*folders, *more))


def _lines(head: str, values: Mapping[str, Any]) -> str:
    return "\n".join([head, *(f"{key} = {value!r}" for key, value in values.items())])
