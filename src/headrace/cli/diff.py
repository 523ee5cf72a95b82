"""headrace diff RUN_A RUN_B: the first step at which two runs saw different data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.terminal import TEXT, Line, Output, tokens_text
from headrace.errors import short_number

if TYPE_CHECKING:
    from headrace.provenance.diff import Difference, SeenSample
    from headrace.provenance.rollouts import RolloutDifference


_SHOWN_DIFFERENCES = 20


def diff(
    run_a: Path,
    run_b: Path,
    /,
    *,
    output: Output = TEXT,
) -> int:
    """Name the first step at which two runs saw different data, and what differed.

    The exit code is 0 if all the steps that both runs have are the same, and 1 if not (or on an error, which prints nothing
    to standard output). Runs with other batch sizes are compared by sample.

    ```
    headrace diff runs/monday runs/tuesday
    headrace diff runs/monday runs/tuesday --quiet && echo the same data
    ```
    """
    from headrace.provenance.diff import diff_runs
    from headrace.provenance.rollouts import diff_rollouts, has_rollouts
    from headrace.runs.recorded import recorded_run

    if has_rollouts(run_a) and has_rollouts(run_b):
        parts = diff_rollouts(run_a, run_b)
        output.answer(parts, _rollout_lines(parts))
        return 0 if parts.same else 1
    found = diff_runs(recorded_run(run_a), recorded_run(run_b))
    output.answer(found, _lines(found))
    return 0 if found.same else 1


def _rollout_lines(found: RolloutDifference) -> Iterator[Line]:
    if found.same:
        yield f"the same rollouts, {found.compared:,} of them, in all steps that both runs have", "bold"
        return
    yield (
        f"the runs part at step {found.step}, task {found.task}, member {found.member}, attempt {found.attempt}: {found.cause}; the "
        f"{found.compared:,} rollouts before are the same",
        "bold",
    )
    yield f"  {found.sentence}"


def _lines(found: Difference) -> Iterator[Line]:
    if found.same:
        both = min(found.steps_a, found.steps_b)
        extent = f"{both:,} steps" if found.steps_a == found.steps_b else f"{both:,} steps that both have"
        yield f"the same data for all {extent} ({found.samples_compared:,} samples)", "bold"
    else:
        a, b = found.step_a, found.step_b
        if a is None or b is None:
            where = f"at step {b} of B, which A skipped" if a is None else f"at step {a} of A, which B skipped"
        else:
            where = f"at step {a}" if a == b else f"at step {a} of A, step {b} of B"
        exact = f", sample {found.sample:,}" if found.sample is not None else ""
        yield f"the runs part {where}{exact}; the {found.samples_compared:,} samples before are the same", "bold"
        for name, seen in (("A", found.seen_a), ("B", found.seen_b)):
            if seen is not None:
                yield from _seen_lines(name, seen)
    for title, differing in (("order", found.order), ("config", found.config)):
        for i, (key, (one, other)) in enumerate(differing.items()):
            if i == _SHOWN_DIFFERENCES:
                yield f"  … and {short_number(len(differing) - i)} more; --format json has them all"
                break
            yield f"  {title} {key}: {one} in A, {other} in B"
    for note in found.notes:
        yield f"  note: {note}", "yellow"
    yield f"  A {found.a} ({found.steps_a:,} steps)   B {found.b} ({found.steps_b:,} steps)", "dim"


def _seen_lines(name: str, seen: SeenSample) -> Iterator[Line]:
    if seen.source is None:
        what = "nothing to learn"
    else:
        what = f"{seen.source}  {seen.file} row {seen.row}  {tokens_text(seen.start or 0, seen.length or 0)}"
    yield f"  {name}  {'skipped: ' if seen.step is None else ''}{what}"
    if seen.text:
        yield f"      {seen.text}", "dim"
