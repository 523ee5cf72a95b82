"""headrace step, headrace find, headrace diff: what a run saw, and when.

Texts and names come from the data, which nobody has vetted: whatever a terminal would not simply print is shown as an
escape, and JSON is printed in ASCII.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from headrace.cli.terminal import console_for, short

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.jobs.flight import Sightings, StepStory
    from headrace.jobs.flight_diff import Difference, SeenSample

__all__ = ["diff", "find", "step"]

Format = Annotated[Literal["text", "json"], Parameter(help="json: one object for machines.")]
_SHOWN_DIFFERENCES = 20


def step(
    run: Path,
    number: int,
    /,
    *,
    rank: Annotated[int | None, Parameter(help="Only the documents of this rank.")] = None,
    world: Annotated[
        int | None, Parameter(help="Count ranks and rows for this many ranks, rather than for as many as the run had.")
    ] = None,
    text: Annotated[bool, Parameter(help="Show how each document begins.")] = True,
    chars: Annotated[int, Parameter(help="How much of each text is shown.")] = 200,
    format: Format = "text",
    quiet: Annotated[bool, Parameter(help="Only the exit code: 0 if the step can be told.", negative=())] = False,
) -> int:
    """List the documents that a run learned from in step NUMBER: source, file, row, tokens, rank, place in the batch, text.

    Only the windows in question are made again, so any step takes seconds. Their digest must be the one that the run wrote
    down, which proves that these were the documents.

    ```
    headrace step runs/quickstart 120
    headrace step runs/quickstart 120 --world 4 --rank 1 --no-text
    headrace step runs/quickstart 120 --format json | jq '.documents[].file'
    ```
    """
    from headrace.jobs.flight import RunFlight

    with RunFlight(run) as flight:
        story = flight.step(number, world=world, rank=rank, chars=chars if text else None)
    if not quiet:
        _answer(format, story.to_dict(), lambda console: _print_step(console, run, story, rank))
    return 0


def find(
    run: Path,
    /,
    *,
    source: Annotated[str, Parameter(help="Name of the source.")],
    row: Annotated[int, Parameter(help="Row of the source, from 0; with --file, row of the file.")],
    file: Annotated[str | None, Parameter(help="The file the row is in.")] = None,
    format: Format = "text",
    quiet: Annotated[bool, Parameter(help="Only the exit code.", negative=())] = False,
) -> int:
    """Say which steps of a run saw a document, and when it comes next.

    ```
    headrace find runs/quickstart --source prose --row 17
    headrace find runs/quickstart --source web --file web-003.jsonl --row 17 --format json
    ```
    """
    from headrace.jobs.flight import RunFlight

    with RunFlight(run) as flight:
        found = flight.find(source, row, file)
    if not quiet:
        _answer(format, found.to_dict(), lambda console: _print_find(console, found))
    return 0


def diff(
    run_a: Path,
    run_b: Path,
    /,
    *,
    format: Format = "text",
    quiet: Annotated[bool, Parameter(help="Only the exit code.", negative=())] = False,
) -> int:
    """Name the first step at which two runs saw different data, and what differed.

    The exit code is 0 if all the steps that both runs have are the same, and 1 if not (or on an error, which prints nothing
    to standard output). Runs with other batch sizes are compared by sample.

    ```
    headrace diff runs/monday runs/tuesday
    headrace diff runs/monday runs/tuesday --quiet && echo the same data
    ```
    """
    from headrace.jobs.flight_diff import diff_runs

    found = diff_runs(run_a, run_b)
    if not quiet:
        _answer(format, found.to_dict(), lambda console: _print_diff(console, found))
    return 0 if found.same else 1


# ------------------------------------------------------------------------------------------------ printing


def visible(text: str) -> str:
    """The text in which nothing can break a line or move the cursor of a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _answer(format: str, value: dict[str, Any], show: Any) -> None:
    console = console_for()
    if format == "json":
        console.print_json(json.dumps(value), ensure_ascii=True, highlight=console.is_terminal)
    else:
        show(console)


def _line(console: Console, text: str, style: str | None = None) -> None:
    console.print(visible(text), style=style, markup=False, highlight=False, soft_wrap=True)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _tokens(start: int, length: int) -> str:
    return f"tokens [{start:,}, {start + length:,})"


def _print_step(console: Console, run: Path, story: StepStory, rank: int | None) -> None:
    last = story.first_sample + story.samples - 1
    whose = f"rank {rank} of {story.world_size}" if rank is not None else _count(story.world_size, "rank")
    _line(console, f"step {story.step} of {run}: samples {story.first_sample:,} to {last:,}, {whose}", "bold")
    for d in story.documents:
        place = f"rank {d.rank} row {d.position:>3} column {d.column:>5}"
        _line(console, f"  {place}  {d.source}  {d.file} row {d.row:,}  {_tokens(d.start, d.length)}")
        if d.text is not None:
            before, after = "…" if d.start else "", "…" if d.shortened else ""
            _line(console, f"      {before}{d.text}{after}", "dim")
    total = sum(share.tokens for share in story.totals.values()) or 1
    for name, share in story.totals.items():
        _line(
            console,
            f"  {name}: {_count(share.samples, 'block')}, {_count(share.documents, 'document')}, {_count(share.tokens, 'token')} "
            f"({share.tokens / total:.1%})",
        )
    if story.fillers or story.padding:
        _line(console, f"  {story.padding:,} tokens of padding, {story.fillers:,} blocks with nothing to learn")
    effort = f"{_count(story.windows, 'window')} made again in {story.seconds:.1f} s"
    if story.recorded is None:
        _line(console, f"not proven: the run was stopped before it recorded this step's digest ({effort})", "yellow")
    else:
        _line(console, f"proven: these blocks give digest {story.digest}, as the run recorded ({effort})")


def _print_find(console: Console, found: Sightings) -> None:
    _line(console, f"{found.source} row {found.source_row:,} ({found.file} row {found.row:,})", "bold")
    for s in found.seen:
        where = f"step {s.step}" if s.step is not None else "skipped"
        place = f"rank {s.rank} row {s.position} column {s.column}" if s.step is not None else f"column {s.column}"
        _line(console, f"  epoch {s.epoch}  {where}  sample {s.sample:,}  {place}  {_tokens(s.start, s.length)}")
    if not found.seen and found.never is None:
        _line(console, f"  not seen yet, at step {found.last_step}")
    if found.never is not None:
        _line(console, f"  {'does not come again' if found.seen else 'never seen'}: {found.never}")
    if found.upcoming is not None:
        u = found.upcoming
        stands = "its window is open" if u.reached > u.position else f"the lane has opened the first {u.reached:,}"
        _line(console, f"  comes next in epoch {u.epoch}, lane {u.lane}, at position {u.position:,} ({stands})")
    _line(console, f"{_count(found.windows, 'window')} made again in {found.seconds:.1f} s", "dim")


def _print_diff(console: Console, found: Difference) -> None:
    if found.same:
        both = min(found.steps_a, found.steps_b)
        extent = f"{both:,} steps" if found.steps_a == found.steps_b else f"{both:,} steps that both have"
        _line(console, f"the same data for all {extent} ({found.samples_compared:,} samples)", "bold")
    else:
        a, b = found.step_a, found.step_b
        if a is None or b is None:
            where = f"at step {b} of B, which A skipped" if a is None else f"at step {a} of A, which B skipped"
        else:
            where = f"at step {a}" if a == b else f"at step {a} of A, step {b} of B"
        exact = f", sample {found.sample:,}" if found.sample is not None else ""
        _line(
            console, f"the runs part {where}{exact}; the {found.samples_compared:,} samples before are the same", "bold"
        )
        for name, seen in (("A", found.seen_a), ("B", found.seen_b)):
            if seen is not None:
                _print_seen(console, name, seen)
    for title, differing in (("order", found.order), ("config", found.config)):
        for i, (key, (one, other)) in enumerate(differing.items()):
            if i == _SHOWN_DIFFERENCES:
                _line(console, f"  … and {short(len(differing) - i)} more; --format json has them all")
                break
            _line(console, f"  {title} {key}: {one} in A, {other} in B")
    for note in found.notes:
        _line(console, f"  note: {note}", "yellow")
    _line(console, f"  A {found.a} ({found.steps_a:,} steps)   B {found.b} ({found.steps_b:,} steps)", "dim")


def _print_seen(console: Console, name: str, seen: SeenSample) -> None:
    if seen.source is None:
        what = "nothing to learn"
    else:
        what = f"{seen.source}  {seen.file} row {seen.row}  {_tokens(seen.start or 0, seen.length or 0)}"
    _line(console, f"  {name}  {'skipped: ' if seen.step is None else ''}{what}")
    if seen.text:
        _line(console, f"      {seen.text}", "dim")
