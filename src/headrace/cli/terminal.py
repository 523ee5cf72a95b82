"""What a person sees while a run goes on.

On a terminal: lines that scroll and a bar that stays. Elsewhere: plain lines, nothing else. NO_COLOR is respected, and
machines read the run's own files rather than this.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from cyclopts import Parameter
from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from headrace.rollouts.arrival_log import Arrival
    from headrace.runs.config.rl import RLConfig
    from headrace.runs.config.schema import RunConfig
    from headrace.runs.config.streams import LedgerSection, StreamsConfig
    from headrace.runs.lm import Summary
    from headrace.runs.rl import RLSummary
    from headrace.runs.run_loop import Progress
    from headrace.runs.streams import StreamSummary

__all__ = [
    "Format",
    "LongWork",
    "Silent",
    "TerminalWatcher",
    "announce",
    "announce_rl",
    "announce_streams",
    "closing",
    "closing_rl",
    "closing_streams",
    "console_for",
    "count_text",
    "facts",
    "fitted",
    "print_answer",
    "print_plain",
    "print_rollouts",
    "short",
    "tokens_text",
    "visible",
]

Format = Annotated[Literal["text", "json"], Parameter(help="json: one object for machines.")]


def short(number: float) -> str:
    """210,000 as 210k."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def facts(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """A name and what it is, a line each."""
    for name, text in rows:
        console.print(f"  [dim]{name:<8}[/] {text}", highlight=False, soft_wrap=True)


def announce(console: Console, config: RunConfig, *, folder: str, ranks: int, resumed: bool) -> None:
    """The summary at the start: what is about to happen."""
    run, total = config.run, sum(s.weight for s in config.source) or 1.0
    console.print(
        f"[bold]headrace[/] {'resumes' if resumed else 'runs'} [bold]{run.name}[/]  in {folder}", highlight=False
    )
    rows = [
        ("sources", "  ".join(f"{s.name} {s.weight / total:.3g} ({s.spec})" for s in config.source)),
        (
            "text",
            f"{config.text.tokenizer or 'bytes'} tokenizer, seq_len {config.text.seq_len}, pack {config.text.pack}",
        ),
        (
            "batches",
            f"{config.loader.global_batch_size} x {config.text.seq_len} tokens, {run.steps} steps",
        ),
        ("model", f"{config.train.model}, lr {config.train.lr:g}"),
        ("seed", f"{run.seed}   ranks {ranks}   config {config.hash}"),
    ]
    facts(console, rows)


def announce_streams(console: Console, config: StreamsConfig, *, folder: str, ranks: int, resumed: bool) -> None:
    """The summary at the start of a stream run."""
    run, streams, train = config.run, config.streams, config.train
    console.print(
        f"[bold]headrace[/] {'resumes' if resumed else 'runs'} [bold]{run.name}[/]  in {folder}", highlight=False
    )
    sizes = ", ".join([f"{streams.batch_size} rows", *(f"{m} {n}" for m, n in streams.batch_sizes.items())])
    shape = (
        f"{streams.lane_count} lanes" if streams.batching_mode == "device_per_stream" else f"x {streams.global_ranks}"
    )
    ledger = config.ledger
    what = "recurrent, the next cell of a group guessed" if ledger else f"{train.mask:.0%} of the features hidden"
    rows = [
        ("streams", f"{'  '.join(streams.roots)} ({streams.layout})"),
        ("mixing", f"{streams.num_streams_mixed} at a time, {streams.pick_mode}, {streams.queue}"),
        ("batches", f"{sizes}; {streams.batching_mode} {shape}, {run.steps} steps"),
        ("model", f"{train.depth} blocks of {train.dim}, {what}, lr {train.lr:g}"),
        *([("ledger", _ledger_line(ledger))] if ledger is not None else []),
        ("seed", f"{run.seed}   ranks {ranks}   config {config.hash}"),
    ]
    facts(console, rows)


def print_rollouts(
    arrivals: Sequence[Arrival], title: str, *, format: Format, quiet: bool, text: bool = True, chars: int = 200
) -> int:
    """Show rollouts by group, each turn as a line of a chat; exit code 0."""
    if quiet:
        return 0
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
    print_answer(format, answer, lambda console: _print_groups(console, arrivals, title, text, chars))
    return 0


def _print_groups(console: Console, arrivals: Sequence[Arrival], title: str, text: bool, chars: int) -> None:
    done = [a for a in arrivals if not a.failed]
    mean = sum(a.reward for a in done) / len(done) if done else float("nan")
    print_plain(
        console,
        f"{title}: {len(done):,} rollouts, mean reward {mean:.3f}, {len(arrivals) - len(done):,} failures",
        "bold",
    )
    task = None
    for a in arrivals:
        if a.task != task:
            task = a.task
            rewards = [b.reward for b in done if b.task == task]
            shown = f"{sum(rewards) / len(rewards):.3f}" if rewards else "–"
            print_plain(
                console, f"  task {task} ({a.env}, step {a.step + 1}, version {a.version}): mean reward {shown}"
            )
        again = f" attempt {a.attempt}" if a.attempt else ""
        print_plain(
            console, f"    member {a.member}{again}: " + (f"failed, {a.failed}" if a.failed else f"reward {a.reward:g}")
        )
        for turn in a.turns if text else ():
            print_plain(console, f"      env     {turn.prompt[:chars]}", "dim")
            print_plain(console, f"      policy  {turn.completion[:chars]}")


def announce_rl(console: Console, config: RLConfig, *, folder: str, ranks: int, resumed: bool) -> None:
    """The summary at the start of an RL run."""
    run, policy, rollouts = config.run, config.policy, config.rollouts
    console.print(
        f"[bold]headrace[/] {'resumes' if resumed else 'runs'} [bold]{run.name}[/]  in {folder}", highlight=False
    )
    total = sum(env.weight for env in config.env)
    engine = "in this process" if config.engine.kind == "embedded" else ", ".join(config.engine.url)
    rows = [
        ("envs", "  ".join(f"{e.name} {e.weight / total:.3g} ({e.spec})" for e in config.env)),
        (
            "rollouts",
            f"{rollouts.groups_per_step} groups of {' / '.join(str(e.group_size) for e in config.env)} a step, lag {rollouts.lag}, {run.steps} steps",
        ),
        ("policy", f"{policy.model}, lr {policy.lr:g}, advantage {policy.advantage}"),
        ("engine", f"{config.engine.kind}, {engine}"),
        ("eval", f"{config.eval.tasks} held-out tasks every {config.eval.every} steps"),
        ("seed", f"{run.seed}   ranks {ranks}   config {config.hash}"),
    ]
    facts(console, rows)


def closing_rl(console: Console, summary: RLSummary, folder: str) -> None:
    """The summary at the end of an RL run."""
    console.print(f"\n[bold]{summary.state}[/] at step {summary.step} of {summary.steps}", highlight=False)
    failed = ", ".join(f"{n:,} {reason}" for reason, n in summary.failed.items()) or "none"
    rows: Sequence[tuple[str, str]] = [
        ("held out", f"{summary.accuracy_first:.1%} -> [bold]{summary.accuracy:.1%}[/] of the tasks solved"),
        ("reward", f"{summary.reward_first:.3f} -> {summary.reward_last:.3f}  (first step, mean of the last 10)"),
        ("speed", f"{summary.rollouts:,} rollouts, {summary.tokens:,} tokens; {summary.seconds:.1f} s"),
        ("wait", f"{summary.exposed_wait_seconds:.2f} s for rollouts ({summary.exposed_wait_share:.1%})"),
        ("failed", failed + (f"   from the arrival log {summary.recorded:,}" if summary.recorded else "")),
        ("model", f"sha256 {summary.model_sha256[:16]}…"),
        ("folder", folder),
        ("look", f"headrace report {folder}   headrace step {folder} {max(summary.step, 1)}"),
        ("resume", _go_on(summary))
        if summary.step < summary.steps
        else ("extend", _go_on(summary) + (" --accept config" if summary.decays else "")),
    ]
    facts(console, rows)


def _ledger_line(ledger: LedgerSection) -> str:
    words: list[str] = [ledger.mode]
    if ledger.capacity is not None:
        words.append(f"{ledger.capacity:,} groups a rank")
    if ledger.stale_threshold is not None:
        words.append(f"after {ledger.stale_threshold:,} steps")
    if ledger.wipe_every is not None:
        words.append(f"every {ledger.wipe_every:,} steps")
    return ", ".join(words) + ("; what is still read is protected" if ledger.protect_active else "")


class Silent:
    """Says nothing (`--quiet`, and every rank but the first); with a console, notices only (`--format json`)."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def waiting(self, what: str) -> None:
        return None

    def first_batch(self, seconds: float, waits: Mapping[str, float]) -> None:
        return None

    def progress(self, progress: Progress) -> None:
        return None

    def info(self, sentence: str) -> None:
        return None

    def notice(self, sentence: str) -> None:
        if self._console is not None:
            self._console.print(sentence, highlight=False, soft_wrap=True, markup=False)


class LongWork:
    """Work without steps: what is about to happen, then how far it is; a bar where there is a terminal, else a line now and then."""

    EVERY = 10.0
    """Seconds between two lines where there is no terminal."""

    def __init__(self, console: Console | None, errors: Console | None) -> None:
        self._console, self._errors = console, errors
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._said = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def opened(
        self, headline: str, rows: Sequence[tuple[str, str]], *, total: int | None = None, done: int = 0
    ) -> None:
        """`headline` may hold markup."""
        if self._console is None:
            return
        self._console.print(headline, highlight=False)
        facts(self._console, rows)
        if self._console.is_terminal:
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
                console=self._console, transient=True,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("starting", total=total, completed=done)

    def went_on(self, line: str, *, done: int, total: int) -> None:
        if self._console is None:
            return
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=line, completed=done, total=total)
        elif time.perf_counter() - self._said >= self.EVERY:
            self._said = time.perf_counter()
            self._console.print(f"  {line}", highlight=False, soft_wrap=True, markup=False)

    def notice(self, sentence: str) -> None:
        if self._errors is not None:
            self._errors.print(f"  {sentence}", highlight=False, soft_wrap=True, markup=False)


class TerminalWatcher:
    """Lines, and a bar where there is a terminal."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._began = time.perf_counter()

    def __enter__(self) -> TerminalWatcher:
        if self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                console=self._console, transient=True,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("starting", total=self._steps)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def waiting(self, what: str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=f"waiting: {what}")
        else:
            self._line(f"  waiting: {what}")

    def first_batch(self, seconds: float, waits: Mapping[str, float]) -> None:
        longest = ", ".join(f"{name} {s:.1f} s" for name, s in list(waits.items())[:4] if s >= 0.05)
        self._line(
            f"  first step after {time.perf_counter() - self._began:.1f} s" + (f" ({longest})" if longest else "")
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description="training")

    def progress(self, progress: Progress) -> None:
        mix = " ".join(f"{name} {share:.2f}".replace("0.", ".") for name, share in progress.mix.items())
        width = len(str(progress.steps))
        wait = f"wait {progress.wait_ms:.1f} ms ({progress.wait_share:.0%})"
        line = (
            f"step {progress.step:>{width}}  {progress.text}  {wait}"
            if progress.text
            else f"step {progress.step:>{width}}  loss {progress.loss:.3f}  {progress.unit}/s {short(progress.tokens_per_second):>5}  {wait}  mix {mix}"
        )
        self._line(fitted(line, self._console.width) if self._console.is_terminal else line)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=progress.step)

    def info(self, sentence: str) -> None:
        self._line(f"  {sentence}")

    def notice(self, sentence: str) -> None:
        self._line(f"  {sentence}")

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)


def closing(console: Console, summary: Summary, folder: str) -> None:
    """The summary at the end: what happened, and how to go on."""
    from headrace.loader.report import left_out_text

    done = {"completed": "completed", "stopped": "stopped", "data_ended": "ran out of data"}[summary.state]
    console.print(f"\n[bold]{done}[/] at step {summary.step} of {summary.steps}", highlight=False)
    mix = "  ".join(f"{n} {m['realised']:.3f} (target {m['target']:.3f})" for n, m in summary.mix.items())
    rows: Sequence[tuple[str, str]] = [
        ("loss", f"{summary.loss_first:.3f} -> {summary.loss_last:.3f}  (first step, mean of the last 10)"),
        ("speed", f"{short(summary.tokens_per_second)} tokens/s over {summary.seconds:.1f} s"),
        ("wait", f"{summary.exposed_wait_seconds:.2f} s exposed ({summary.exposed_wait_share:.1%})"),
        ("padding", f"{summary.padding:.2%}   documents {summary.documents:,}   tokens {summary.tokens:,}"),
        ("mix", mix),
        *(
            [("left out", f"{said} (since this process took it up)")]
            if (said := left_out_text(summary.left_out))
            else []
        ),
        ("digest", summary.digest),
        ("model", f"sha256 {summary.model_sha256[:16]}…"),
        ("folder", folder),
        ("resume" if summary.step < summary.steps else "extend", _go_on(summary)),
    ]
    facts(console, rows)


def closing_streams(console: Console, summary: StreamSummary, folder: str) -> None:
    """The summary at the end of a stream run."""
    console.print(f"\n[bold]{summary.state}[/] at step {summary.step} of {summary.steps}", highlight=False)
    rows: Sequence[tuple[str, str]] = [
        ("loss", f"{summary.loss_first:.3f} -> {summary.loss_last:.3f}  (first step, mean of the last 10)"),
        ("speed", f"{short(summary.cells_per_second)} cells/s over {summary.seconds:.1f} s"),
        ("wait", f"{summary.exposed_wait_seconds:.2f} s exposed ({summary.exposed_wait_share:.1%})"),
        ("mix", "  ".join(f"{m} {share:.3f}" for m, share in summary.mix.items()) + f"   epoch {summary.epoch}"),
        *_forgotten(summary),
        ("order", summary.order_digest),
        ("model", f"sha256 {summary.model_sha256[:16]}…"),
        ("folder", folder),
        ("look", f"headrace report {folder}"),
        ("resume" if summary.step < summary.steps else "extend", _go_on(summary)),
    ]
    facts(console, rows)


def _forgotten(summary: StreamSummary) -> Sequence[tuple[str, str]]:
    """What a run with a ledger has to say of it: states that were lost would otherwise be lost without a word."""
    if summary.false_evictions is None:
        return []
    count = summary.false_evictions
    words = f"[bold]{count:,} times a group was forgotten while its file was still read[/]: its state was lost"
    return [("ledger", words if count else "no group was forgotten too early")]


def _go_on(summary: Summary | StreamSummary | RLSummary) -> str:
    if summary.step < summary.steps:
        return summary.resume
    return f"{summary.resume} --run.steps {summary.steps * 2}"


def console_for(stream: Any = None) -> Console:
    """A console that respects NO_COLOR and pipes; plain output is as wide as its lines."""
    return Console(file=stream if stream is not None else sys.stdout, soft_wrap=True)


# ---------------------------------------------------------------------- answers about a run's data
# Texts and names come from the data and are not trusted: what a terminal would not simply print is shown as an escape,
# and JSON is printed in ASCII.


def visible(text: str) -> str:
    """The text in which nothing can break a line or move the cursor of a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def print_answer(format: str, value: dict[str, Any], show: Callable[[Console], None]) -> None:
    """Print `value` as JSON, or let `show` print it as text."""
    console = console_for()
    if format == "json":
        console.print_json(json.dumps(value), ensure_ascii=True, highlight=console.is_terminal)
    else:
        show(console)


def print_plain(console: Console, text: str, style: str | None = None) -> None:
    console.print(visible(text), style=style, markup=False, highlight=False, soft_wrap=True)


def fitted(line: str, width: int) -> str:
    """A line that is not broken by a terminal of `width` columns: whole words, and … for the rest."""
    if len(line) <= width:
        return line
    words = line[: width - 1].rsplit(" ", 1)
    return f"{words[0].rstrip() if len(words) > 1 else words[0]} …"[:width]


def count_text(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def tokens_text(start: int, length: int) -> str:
    return f"tokens [{start:,}, {start + length:,})"
