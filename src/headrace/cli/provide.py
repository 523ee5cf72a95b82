"""headrace provide CONFIG: make a run's batches in a process of their own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from headrace.cli.app import Settings, overrides
from headrace.cli.terminal import TEXT, Output
from headrace.errors import ConfigError, count_text
from headrace.runs.config.loading import load_config

if TYPE_CHECKING:
    from headrace.spool import DataProviderBase


_KINDS = {"lm": "", "mlm": "masked ", "classify": "labelled ", "tag": "tagged "}


def provide(
    config: Path,
    /,
    *,
    settings: Settings = (),
    join: Annotated[bool, Parameter(help="Work beside providers that are running already.")] = False,
    take: Annotated[int | None, Parameter(help="The most parts to take; all that are free unless given.")] = None,
    files: Annotated[int | None, Parameter(help="Stop after this many files.")] = None,
    until_eof: Annotated[bool, Parameter(help="Also stop when standard input ends.")] = False,
    force_regenerate: Annotated[bool, Parameter(help="Empty the spool first.")] = False,
    engine: Annotated[
        Literal["local", "ray"], Parameter(help="ray: one actor for each part, on a Ray cluster.")
    ] = "local",
    output: Output = TEXT,
) -> int:
    """Fill a spool with the batches of a config, ahead of the trainers that read it, until stopped.

    May be killed and started again at any moment: it continues after the last file. More than one provider needs a spool of parts.

    ```
    headrace provide examples/quickstart.toml --spool.dir S          in one terminal
    headrace run examples/quickstart.toml --spool.dir S              in another
    headrace provide run.toml --spool.parts 4 --take 2               and, on another machine, the same with --join
    headrace provide run.toml --spool.task mlm                       tokens to guess, for a trainer of your own
    headrace provide examples/labelled/classify.toml --spool.dir S            labelled texts, every class equally often
    ```
    """
    for name, value in (("--take", take), ("--files", files)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, expected 1 or more")
    checked = load_config(config, overrides(settings))
    display = output.display()

    def announce() -> None:
        """Print the batches that are made. Called once this provider holds the spool: before that it may be refused."""
        spool = checked.spool
        display.opened(f"[bold]headrace[/] fills the spool [bold]{checked.spool_dir}[/]", [])
        display.info(
            f"{_KINDS[spool.task]}batches of {checked.loader.global_batch_size} x {checked.text.seq_len}, {spool.batches_per_file} a file, up to {spool.max_backlog_files} files ahead, "
            f"{count_text(spool.parts, 'part')}"
        )

    def ready(provider: DataProviderBase) -> None:
        announce()
        display.info(f"its parts: {', '.join(str(c.part) for c in provider.channels('train'))}")
        sys.stdout.flush()

    began = time.perf_counter()
    if engine == "ray":
        from headrace.runs.provide_ray import provide_on_ray

        made = provide_on_ray(checked, max_files=files, report=display.info, ready=announce)
    else:
        from headrace.runs.provide import provide_text

        made = provide_text(
            checked, join=join, until_eof=until_eof, force_regenerate=force_regenerate, take=take, max_files=files, report=display.info, ready=ready,
        )  # fmt: skip
    seconds = time.perf_counter() - began
    answer = {"spool": checked.spool_dir, "files": made, "seconds": seconds}
    output.answer(answer, [f"  made {made:,} files in {seconds:.1f} s"])
    return 0
