"""headrace run CONFIG, headrace run --resume RUNDIR, DATASET_SPECS=... headrace run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headrace.cli.app import Settings, names_sources, no_config, overrides
from headrace.cli.run_text import conclude, opening
from headrace.cli.terminal import TEXT, Output, console_for
from headrace.cli.ui import start_page
from headrace.runs.start import ACCEPTED, claim_folder, train

_ACCEPT_HELP = f"Resume although this changed since the checkpoint: {', '.join(ACCEPTED)}. May be repeated."


def run(
    config: Path | None = None,
    /,
    *,
    settings: Settings = (),
    resume: Annotated[Path | None, Parameter(help="Continue the run in this folder; give no CONFIG.")] = None,
    accept: Annotated[tuple[str, ...], Parameter(consume_multiple=False, show_default=False, help=_ACCEPT_HELP)] = (),
    full: Annotated[bool, Parameter(help="Check the content of everything read so far before starting.")] = False,
    ui: Annotated[bool, Parameter(help="Open the live page of this run beside it, and print its address.")] = False,
    output: Output = TEXT,
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
    described = config is not None or names_sources(changed)
    if (config is not None and resume is not None) or (resume is None and not described):
        return no_config("run", ", or --resume RUNDIR")
    folder = claim_folder(config, resume=resume, overrides=changed, rank=rank, world_size=world)
    if rank != 0:
        output = Output(quiet=True)
    display = output.display()
    display.opened(*opening(folder.config, folder=str(folder.path), ranks=world, resumed=resume is not None))
    if ui and rank == 0:
        start_page(folder.path, console_for(sys.stderr))
    sys.stdout.flush()
    try:
        with display:  # imports torch: the first lines are on the screen by now
            summary = train(folder, display, accept=accept, full_check=full)
    finally:
        folder.release()
    output.answer(summary.to_dict(), conclude(folder.config.kind, summary, str(folder.path)))
    return 128 + summary.signal if summary.signal else 0  # `headrace run ... && next` must not go on after Ctrl-C
