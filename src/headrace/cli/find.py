"""headrace find RUN --source NAME --row N: the steps that delivered a document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headrace.cli.step import print_rollouts
from headrace.cli.terminal import TEXT, Line, Output, tokens_text
from headrace.errors import ConfigError, count_text

if TYPE_CHECKING:
    from headrace.provenance.steps import DocumentHistory


def find(
    run: Path,
    /,
    *,
    source: Annotated[str | None, Parameter(help="Name of the source.")] = None,
    row: Annotated[int | None, Parameter(help="Row of the source, from 0; with --file, row of the file.")] = None,
    file: Annotated[str | None, Parameter(help="The file the row is in.")] = None,
    task: Annotated[
        int | None, Parameter(help="Of an RL run: the task whose rollouts to show, counted from 0.")
    ] = None,
    output: Output = TEXT,
) -> int:
    """Say which steps of a run saw a document, and when it comes next; of an RL run, show the rollouts of a task.

    ```
    headrace find runs/quickstart --source prose --row 17
    headrace find runs/quickstart --source web --file web-003.jsonl --row 17 --format json
    headrace find runs/sort --task 640
    ```
    """
    from headrace.provenance.rollouts import has_rollouts, read_task
    from headrace.provenance.steps import RunProvenance
    from headrace.runs.recorded import recorded_run

    if has_rollouts(run):
        if task is None:
            raise ConfigError(f"{run} holds an RL run: say which task with --task N")
        print_rollouts(output, read_task(run, task), f"task {task} of {run}")
        return 0
    if source is None or row is None:
        raise ConfigError("say which document with --source NAME --row N")
    with RunProvenance(recorded_run(run)) as provenance:
        found = provenance.find(source, row, file)
    output.answer(found, _lines(found))
    return 0


def _lines(found: DocumentHistory) -> Iterator[Line]:
    yield f"{found.source} row {found.source_row:,} ({found.file} row {found.row:,})", "bold"
    for s in found.seen:
        where = f"step {s.step}" if s.step is not None else "skipped"
        place = f"rank {s.rank} row {s.position} column {s.column}" if s.step is not None else f"column {s.column}"
        yield f"  epoch {s.epoch}  {where}  sample {s.sample:,}  {place}  {tokens_text(s.start, s.length)}"
    if not found.seen and found.never is None:
        yield f"  not seen yet, at step {found.last_step}"
    if found.never is not None:
        yield f"  {'does not come again' if found.seen else 'never seen'}: {found.never}"
    if found.upcoming is not None:
        u = found.upcoming
        state = "its window is open" if u.reached > u.position else f"the lane has opened the first {u.reached:,}"
        yield f"  comes next in epoch {u.epoch}, lane {u.lane}, at position {u.position:,} ({state})"
    yield f"{count_text(found.windows, 'window')} made again in {found.seconds:.1f} s", "dim"
