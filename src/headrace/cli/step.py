"""headrace step RUN NUMBER: the documents of one step of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headrace.cli.terminal import TEXT, Line, Output, tokens_text
from headrace.errors import count_text

if TYPE_CHECKING:
    from headrace.provenance.steps import StepDocuments
    from headrace.rollouts.arrival_log import Arrival


def step(
    run: Path,
    number: int,
    /,
    *,
    rank: Annotated[int | None, Parameter(help="Only the documents of this rank.")] = None,
    world: Annotated[
        int | None, Parameter(help="Count ranks and rows for this many ranks, rather than for as many as the run had.")
    ] = None,
    text: Annotated[bool, Parameter(help="Show how each document begins.", negative="--no-text")] = True,
    chars: Annotated[int, Parameter(help="How much of each text is shown.")] = 200,
    output: Output = TEXT,
) -> int:
    """List the documents that a run learned from in step NUMBER: source, file, row, tokens, rank, place in the batch, text. Of an RL run: its rollouts.

    Only the windows in question are made again, so any step takes seconds. Their digest must be the one that the run wrote
    down, which proves that these were the documents.

    ```
    headrace step runs/quickstart 120
    headrace step runs/quickstart 120 --world 4 --rank 1 --no-text
    headrace step runs/quickstart 120 --format json | jq '.documents[].file'
    headrace step runs/sort 20
    ```
    """
    from headrace.provenance.rollouts import has_rollouts, read_step
    from headrace.provenance.steps import RunProvenance
    from headrace.runs.recorded import recorded_run

    if has_rollouts(run):
        shown = chars if text else 0
        print_rollouts(output, read_step(run, number), f"step {number} of {run}", chars=shown)
        return 0
    with RunProvenance(recorded_run(run)) as provenance:
        found = provenance.step(number, world=world, rank=rank, chars=chars if text else None)
    output.answer(found, _step_lines(run, found, rank))
    return 0


def _step_lines(run: Path, found: StepDocuments, rank: int | None) -> Iterator[Line]:
    last = found.first_sample + found.samples - 1
    whose = f"rank {rank} of {found.world_size}" if rank is not None else count_text(found.world_size, "rank")
    yield f"step {found.step} of {run}: samples {found.first_sample:,} to {last:,}, {whose}", "bold"
    for d in found.documents:
        place = f"rank {d.rank} row {d.position:>3} column {d.column:>5}"
        yield f"  {place}  {d.source}  {d.file} row {d.row:,}  {tokens_text(d.start, d.length)}"
        if d.text is not None:
            before, after = "…" if d.start else "", "…" if d.shortened else ""
            yield f"      {before}{d.text}{after}", "dim"
    total = sum(share.tokens for share in found.totals.values()) or 1
    for name, share in found.totals.items():
        yield (
            f"  {name}: {count_text(share.samples, 'block')}, {count_text(share.documents, 'document')}, {count_text(share.tokens, 'token')} "
            f"({share.tokens / total:.1%})"
        )
    if found.fillers or found.padding:
        yield f"  {found.padding:,} tokens of padding, {found.fillers:,} blocks with nothing to learn"
    effort = f"{count_text(found.windows, 'window')} made again in {found.seconds:.1f} s"
    if found.recorded is None:
        yield f"not proven: {found.unproven} ({effort})", "yellow"
    else:
        yield f"proven: these blocks give digest {found.digest}, as the run recorded ({effort})"


def print_rollouts(output: Output, arrivals: Sequence[Arrival], title: str, *, chars: int = 200) -> None:
    """Print rollouts by task, each turn as a line of a chat with at most `chars` characters; 0: without the turns."""
    answer = {
        "rollouts": [
            {
                "task": a.task, "member": a.member, "attempt": a.attempt, "step": a.step + 1, "env": a.env, "version": a.version, "failed": a.failed or None,
                "reward": None if a.failed else a.reward, "metrics": a.metrics, "timing": a.timing,
                "turns": [{"prompt": turn.prompt, "completion": turn.completion, "spans": turn.spans} for turn in a.turns],
            }
            for a in arrivals
        ]
    }  # fmt: skip
    output.answer(answer, _task_lines(arrivals, title, chars))


def _task_lines(arrivals: Sequence[Arrival], title: str, chars: int) -> Iterator[Line]:
    done = [a for a in arrivals if not a.failed]
    mean = sum(a.reward for a in done) / len(done) if done else float("nan")
    failures = f"{len(arrivals) - len(done):,} failures"
    yield f"{title}: {len(done):,} rollouts, mean reward {mean:.3f}, {failures}", "bold"
    task = None
    for a in arrivals:
        if a.task != task:
            task = a.task
            rewards = [b.reward for b in done if b.task == task]
            reward = f"{sum(rewards) / len(rewards):.3f}" if rewards else "–"
            yield f"  task {task} ({a.env}, step {a.step + 1}, version {a.version}): mean reward {reward}"
        again = f" attempt {a.attempt}" if a.attempt else ""
        result = f"failed, {a.failed}" if a.failed else f"reward {a.reward:g}"
        yield f"    member {a.member}{again}: {result}"
        for turn in a.turns if chars else ():
            yield f"      env     {turn.prompt[:chars]}", "dim"
            yield f"      policy  {turn.completion[:chars]}"
