"""Printing for people and for machines: options that all verbs share, consoles, answers, and what a long job shows.

On a terminal a job shows lines that scroll and a bar that stays; elsewhere plain lines only. NO_COLOR is respected.
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
    from rich.table import Table

    from headrace.runs.run_loop import Progress

Format = Annotated[Literal["text", "json"], Parameter(help="json: one object for machines.")]
Quiet = Annotated[bool, Parameter(help="Print nothing but errors.")]


# ------------------------------------------------------------------------------------------------- printing


def console_for(stream: Any = None) -> Console:
    """A console on `stream` (default: standard output) that respects NO_COLOR and pipes, and leaves long lines whole."""
    return Console(file=stream if stream is not None else sys.stdout, soft_wrap=True, highlight=False)


def print_json(value: Any) -> None:
    """Print a JSON value on standard output, in ASCII: texts and names come from the data and are not trusted."""
    console = console_for()
    console.print_json(json.dumps(value), ensure_ascii=True, highlight=console.is_terminal)


def print_answer(value: Any, show: Callable[[Console], None], *, format: str, quiet: bool) -> None:
    """Print `value` as JSON, or let `show` print it as text; print nothing if `quiet`."""
    if quiet:
        return
    if format == "json":
        print_json(value)
    else:
        show(console_for())


def print_plain(console: Console, text: str, style: str | None = None) -> None:
    """Print untrusted text: no markup, and an escape for every character that a terminal would not simply print."""
    console.print(visible(text), style=style, markup=False)


def visible(text: str) -> str:
    """The text in which nothing can break a line or move the cursor of a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def facts(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Print names and what they are, a line each. The texts may hold markup."""
    for name, text in rows:
        console.print(f"  [dim]{name:<8}[/] {text}")


def notes(console: Console, warnings: Sequence[str]) -> None:
    """Print warnings, a line each. They may hold markup."""
    for warning in warnings:
        console.print(f"[yellow]note[/] {warning}")


def table_of(*columns: str) -> Table:
    """An empty table without borders; the first column is names, the others are numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    return table


def fitted(line: str, width: int) -> str:
    """A line that is not broken by a terminal of `width` columns: whole words, and … for the rest."""
    if len(line) <= width:
        return line
    words = line[: width - 1].rsplit(" ", 1)
    return f"{words[0].rstrip() if len(words) > 1 else words[0]} …"[:width]


def short(number: float) -> str:
    """210,000 as 210k."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def count_text(number: int, what: str) -> str:
    """A number of things: `1 window`, `2 windows`."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def tokens_text(start: int, length: int) -> str:
    """A range of tokens of a document."""
    return f"tokens [{start:,}, {start + length:,})"


# ----------------------------------------------------------------------------------- what a long job shows


def _bar(console: Console, count: str) -> Bar:
    """A progress bar; shows nothing where there is no terminal. `count` is how far it is, as rich's markup."""
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn(count), TimeRemainingColumn()
    return Bar(*columns, console=console, transient=True, disable=not console.is_terminal)


class Silent:
    """A watcher that prints nothing (`--quiet`, and every rank but the first); with a console, notices only (`--format json`)."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def waiting(self, what: str) -> None: ...
    def first_batch(self, seconds: float, waits: Mapping[str, float]) -> None: ...
    def progress(self, progress: Progress) -> None: ...
    def info(self, sentence: str) -> None: ...

    def notice(self, sentence: str) -> None:
        if self._console is not None:
            print_plain(self._console, sentence)


class TerminalWatcher:
    """A watcher that prints a line for every event, and keeps a bar where there is a terminal."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._bar = _bar(console, "{task.completed}/{task.total}")
        self._task = self._bar.add_task("starting", total=steps)
        self._began = time.perf_counter()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def waiting(self, what: str) -> None:
        if self._console.is_terminal:
            self._bar.update(self._task, description=f"waiting: {what}")
        else:
            self.notice(f"waiting: {what}")

    def first_batch(self, seconds: float, waits: Mapping[str, float]) -> None:
        longest = ", ".join(f"{name} {s:.1f} s" for name, s in list(waits.items())[:4] if s >= 0.05)
        since = time.perf_counter() - self._began
        self.notice(f"first step after {since:.1f} s" + (f" ({longest})" if longest else ""))
        self._bar.update(self._task, description="training")

    def progress(self, progress: Progress) -> None:
        text = progress.text
        if not text:
            text = f"loss {progress.loss:.3f}  {progress.unit}/s {short(progress.tokens_per_second):>5}"
        mix = " ".join(f"{name} {share:.2f}".replace("0.", ".") for name, share in progress.mix.items())
        line = f"step {progress.step:>{len(str(progress.steps))}}  {text}  wait {progress.wait_ms:.1f} ms ({progress.wait_share:.0%})"
        line += "" if progress.text else f"  mix {mix}"
        print_plain(self._console, fitted(line, self._console.width) if self._console.is_terminal else line)
        self._bar.update(self._task, completed=progress.step)

    def info(self, sentence: str) -> None:
        self.notice(sentence)

    def notice(self, sentence: str) -> None:
        print_plain(self._console, f"  {sentence}")


class LongWork:
    """Progress of work that has no steps: a headline and facts, then how far it is, as a bar or as a line now and then.

    `console` is None where nothing is to be shown; `errors` takes notices.
    """

    EVERY = 10.0
    """Seconds between two lines where there is no terminal."""

    def __init__(self, console: Console | None, errors: Console | None) -> None:
        self._console, self._errors = console, errors
        self._bar = _bar(console, "{task.percentage:>3.0f}%") if console is not None else None
        self._last_line = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def opened(
        self, headline: str, rows: Sequence[tuple[str, str]], *, total: int | None = None, done: int = 0
    ) -> None:
        """Print the first lines and start the bar. `headline` may hold markup."""
        if self._console is None or self._bar is None:
            return
        self._console.print(headline)
        facts(self._console, rows)
        self._bar.add_task("starting", total=total, completed=done)
        self._bar.start()

    def went_on(self, line: str, *, done: int, total: int | None = None) -> None:
        """Show how far it is; `total` is that of `opened` unless given."""
        if self._console is None or self._bar is None:
            return
        for task in self._bar.task_ids:
            self._bar.update(task, description=line, completed=done, total=total)
        if not self._console.is_terminal and time.perf_counter() - self._last_line >= self.EVERY:
            self._last_line = time.perf_counter()
            print_plain(self._console, f"  {line}")

    def notice(self, sentence: str) -> None:
        if self._errors is not None:
            print_plain(self._errors, f"  {sentence}")
