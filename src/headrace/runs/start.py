"""Start or continue a run: claim its folder, choose its task, train.

folder = claim_folder(Path("run.toml"))         or claim_folder(resume=Path("runs/first"))
summary = train(folder, watcher)
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import __version__
from headrace.errors import ConfigError, did_you_mean
from headrace.runs.config.loading import load_any_config
from headrace.runs.folder import RunFolder

if TYPE_CHECKING:
    from headrace.runs.run_loop import RunSummary, Watcher

ACCEPTED = ("data", "weights", "tokenizer", "config", "sources")
"""Kinds of changes since the checkpoint that a resume can accept."""


def claim_folder(
    config: Path | None = None,
    *,
    resume: Path | None = None,
    overrides: Sequence[str] = (),
    rank: int = 0,
    world_size: int = 1,
) -> RunFolder:
    """The folder of a new run, or of the run to continue; rank 0 holds its lock until `release`.

    Args:
        config: TOML file of a new run; None takes the sources from the environment.
        resume: Folder of the run to continue, in place of a config.
        overrides: As on the command line: ["--train.lr", "3e-4"].
        rank: Rank of this process.
        world_size: Number of ranks; one that cannot share the run's batches is refused with ConfigError.
    """
    if resume is not None:
        folder = RunFolder.reopen(resume, tuple(overrides))
        folder.config.check_world_size(world_size)
        if rank == 0:
            folder.lock()
        return folder
    checked = load_any_config(config, overrides)
    checked.check_world_size(world_size)
    # Rank 0 claims the folder; every other rank meets it in the first collective.
    if rank == 0:
        return RunFolder.create(checked, version=__version__)
    return RunFolder(Path(checked.run.dir), checked, {"base": checked.run.base or os.getcwd()})


def train(folder: RunFolder, watcher: Watcher, *, accept: Collection[str] = (), full_check: bool = False) -> RunSummary:
    """Run the task of `folder` until its last step, or until a signal stops it. Every rank calls this.

    Args:
        folder: From `claim_folder`.
        watcher: Receives progress.
        accept: Kinds of changes since the checkpoint to accept, of `ACCEPTED`.
        full_check: Compare everything a text run read so far with its recorded hashes before the first step.
    """
    for name in accept:
        if name not in ACCEPTED:
            raise ConfigError(
                f"--accept {name}: there is no such thing to accept{did_you_mean(name, ACCEPTED)} ({', '.join(ACCEPTED)})"
            )
    # torch's threads share the cores with ours: one that spins long while it waits takes them from threads that have work.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    kind = folder.config.kind
    if full_check and kind != "lm":
        raise ConfigError(
            f"--full compares what a text run has read with its recorded hashes; this is a run of kind {kind!r}. Leave --full out"
        )
    # Imported here: these modules import torch.
    if kind == "streams":
        from headrace.runs.streams import run_streams

        return run_streams(folder, watcher, accept=accept)
    if kind == "rl":
        from headrace.runs.rl import run_rl

        return run_rl(folder, watcher, accept=accept)
    from headrace.runs.lm import run_lm

    return run_lm(folder, watcher, accept=accept, full_check=full_check)
