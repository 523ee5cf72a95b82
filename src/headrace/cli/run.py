"""headrace run CONFIG, headrace run --resume RUNDIR, DATASET_SPECS=... headrace run."""

from __future__ import annotations

import difflib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headrace import __version__
from headrace.cli.app import Settings, names_sources, no_config, overrides
from headrace.cli.terminal import (
    Silent,
    TerminalWatcher,
    announce,
    announce_streams,
    closing,
    closing_streams,
    console_for,
)
from headrace.errors import ConfigError
from headrace.jobs.config import check_world_size
from headrace.jobs.config_layers import AnyConfig, load_any_config
from headrace.jobs.folder import RunFolder
from headrace.jobs.streams_config import StreamsConfig, check_stream_ranks

__all__ = ["run"]

_ACCEPTED = ("data", "weights", "tokenizer", "config", "sources")


def run(
    config: Path | None = None,
    /,
    *,
    settings: Settings = (),
    resume: Annotated[Path | None, Parameter(help="Continue the run in this folder; give no CONFIG.")] = None,
    accept: Annotated[
        tuple[str, ...],
        Parameter(
            consume_multiple=False,
            negative=(),
            show_default=False,
            help="Resume although this changed since the checkpoint: data, weights, tokenizer, config, sources. May be repeated.",
        ),
    ] = (),
    full: Annotated[
        bool, Parameter(help="Check the content of everything read so far before starting.", negative=())
    ] = False,
    format: Annotated[
        Literal["text", "json"], Parameter(help="json: print the final summary as one JSON object.")
    ] = "text",
    quiet: Annotated[bool, Parameter(help="Print nothing but errors.", negative=())] = False,
) -> int:
    """Train on a described mix of sources, or of streams of cells; can be killed at any moment and continued to the bit.

    ```
    headrace run examples/quickstart.toml
    headrace run examples/quickstart.toml --run.dir A --run.steps 60 --train.lr 1e-3
    headrace run --resume A
    headrace run examples/stream_mixing/healthy.toml
    torchrun --nproc-per-node 2 -m headrace run examples/quickstart.toml
    DATASET_SPECS="jsonl:web/*.jsonl;hf:org/name?split=train" CONTEXT_LEN=2048 headrace run
    ```

    Without a CONFIG the sources come from DATASET_SPECS, all else from CONTEXT_LEN, TOKENIZER_WORKERS, DATA_LOADER_WORKERS,
    PREFETCH_BATCHES, `--section.key value` and defaults.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    changed = overrides(settings)
    if (config is not None and resume is not None) or (
        config is None and resume is None and not names_sources(changed)
    ):
        return no_config("run", ", or --resume RUNDIR")
    unknown = [a for a in accept if a not in _ACCEPTED]
    if unknown:
        near = difflib.get_close_matches(unknown[0], _ACCEPTED, 1)
        raise ConfigError(
            f"--accept {unknown[0]}: there is no such thing to accept"
            + (f", did you mean {near[0]}?" if near else "")
            + f" ({', '.join(_ACCEPTED)})"
        )
    if resume is not None:
        folder = RunFolder.reopen(resume, changed)
        _check_ranks(folder.config, world)
        if rank == 0:
            folder.lock()
    else:
        checked = load_any_config(config, changed)
        _check_ranks(checked, world)
        # Rank 0 claims the folder; the others meet it again in the first collective.
        folder = (
            RunFolder.create(checked, version=__version__)
            if rank == 0
            else RunFolder(Path(checked.run.dir), checked, {"base": os.getcwd()})
        )
    talks = rank == 0 and not quiet and format == "text"
    console = console_for()
    if talks and isinstance(folder.config, StreamsConfig):
        announce_streams(console, folder.config, folder=str(folder.path), ranks=world, resumed=resume is not None)
    elif talks:
        announce(console, folder.text_config, folder=str(folder.path), ranks=world, resumed=resume is not None)
    sys.stdout.flush()
    watcher = (
        TerminalWatcher(console, folder.config.run.steps)
        if talks
        else Silent(console_for(sys.stderr) if rank == 0 and not quiet else None)
    )
    # torch's threads share the cores with ours: one that spins long while it waits takes them from those who have work.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    try:
        with watcher:  # these bring torch: after the first lines are on the screen
            if isinstance(folder.config, StreamsConfig):
                from headrace.jobs.streams import run_streams

                if full:
                    raise ConfigError(
                        "--full compares what a text run has read with its recorded hashes; a stream run compares the fingerprints of "
                        "all its files at every start. Leave --full out"
                    )
                summary = run_streams(folder, watcher, accept=accept)
                close = partial(closing_streams, console, summary)
            else:
                from headrace.jobs.lm import run_lm

                summary = run_lm(folder, watcher, accept=accept, full_check=full)
                close = partial(closing, console, summary)
    finally:
        folder.release()
    if talks:
        close(str(folder.path))
    elif rank == 0 and format == "json":
        console.print_json(json.dumps(summary.to_dict()))
    return 128 + summary.signal if summary.signal else 0  # `headrace run ... && next` must not go on after Ctrl-C


def _check_ranks(config: AnyConfig, world: int) -> None:
    if isinstance(config, StreamsConfig):
        check_stream_ranks(config, world)
    else:
        check_world_size(config, world)
