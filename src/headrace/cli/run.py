"""headrace run CONFIG, headrace run --resume RUNDIR, DATASET_SPECS=... headrace run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from headrace.cli.app import Settings, names_sources, no_config, overrides
from headrace.cli.terminal import (
    Silent,
    TerminalWatcher,
    announce,
    announce_rl,
    announce_streams,
    closing,
    closing_rl,
    closing_streams,
    console_for,
)
from headrace.cli.ui import start_page
from headrace.runs.start import claim_folder, train

__all__ = ["run"]

_FIRST_AND_LAST_LINES: dict[str, tuple[Any, Any]] = {
    "lm": (announce, closing),
    "rl": (announce_rl, closing_rl),
    "streams": (announce_streams, closing_streams),
}


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
    ui: Annotated[
        bool, Parameter(help="Open the live page of this run beside it, and print its address.", negative=())
    ] = False,
    format: Annotated[
        Literal["text", "json"], Parameter(help="json: print the final summary as one JSON object.")
    ] = "text",
    quiet: Annotated[bool, Parameter(help="Print nothing but errors.", negative=())] = False,
) -> int:
    """Train on a described mix of sources, or of streams of cells; can be killed at any moment and continued to the bit.

    ```
    headrace run quickstart
    headrace run run.toml --run.dir A --run.steps 60 --train.lr 1e-3
    headrace run --resume A --ui
    headrace run examples/stream_mixing/healthy.toml
    headrace run examples/rl/sort.toml
    torchrun --nproc-per-node 2 -m headrace run quickstart
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
    folder = claim_folder(config, resume=resume, overrides=changed, rank=rank, world_size=world)
    shows = rank == 0 and not quiet and format == "text"
    console = console_for()
    opening, ending = _FIRST_AND_LAST_LINES[folder.config.kind]
    if shows:
        opening(console, folder.config, folder=str(folder.path), ranks=world, resumed=resume is not None)
    if ui and rank == 0:
        start_page(folder.path, console_for(sys.stderr))
    sys.stdout.flush()
    watcher = (
        TerminalWatcher(console, folder.config.run.steps)
        if shows
        else Silent(console_for(sys.stderr) if rank == 0 and not quiet else None)
    )
    try:
        with watcher:  # imports torch: the first lines are on the screen by now
            summary = train(folder, watcher, accept=accept, full_check=full)
    finally:
        folder.release()
    if shows:
        ending(console, summary, str(folder.path))
    elif rank == 0 and format == "json":
        console.print_json(json.dumps(summary.to_dict()))
    return 128 + summary.signal if summary.signal else 0  # `headrace run ... && next` must not go on after Ctrl-C
