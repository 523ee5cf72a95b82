"""Printing for people and for machines: the options that all verbs share, consoles, and what a long job shows.

On a terminal a job shows lines that scroll and a bar that stays; elsewhere plain lines only. NO_COLOR is respected.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from cyclopts import Parameter
from rich.console import Console, RenderableType
from rich.text import Text

if TYPE_CHECKING:
    from rich.table import Table

Line = RenderableType | tuple[str, str]
"""A line for people: untrusted text, such text with its style, text with markup (`marked`), or a whole table."""


# ------------------------------------------------------------------------------------------------- printing


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Output:
    """Options of every verb: text for people, one JSON value for machines, or nothing."""

    format: Annotated[Literal["text", "json"], Parameter(help="json: one object for machines.")] = "text"
    quiet: Annotated[bool, Parameter(help="Print nothing but errors.")] = False

    @property
    def talks(self) -> bool:
        """Whether text for people is printed."""
        return self.format == "text" and not self.quiet

    def answer(self, value: Any, lines: Iterable[Line] = ()) -> None:
        """Print `value`, a dataclass or a JSON value, as JSON, or `lines` for people."""
        if self.format == "json" and not self.quiet:
            print_json(asdict(value) if is_dataclass(value) and not isinstance(value, type) else value)
        if self.talks:
            console = console_for()
            for line in lines:
                if isinstance(line, tuple):
                    print_plain(console, *line)
                elif isinstance(line, str):
                    print_plain(console, line)
                else:
                    console.print(line)

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line for people."""
        if self.talks:
            print_plain(console_for(), text, style)

    def display(self) -> Display:
        """What a long job shows; where there is no text for people, notices on standard error, unless `quiet`."""
        if self.talks:
            return Display(console_for())
        return Display() if self.quiet else Display(notices=console_for(sys.stderr))


TEXT = Output()
"""The options of a call that gives none."""


def console_for(stream: Any = None) -> Console:
    """A console on `stream` (default: standard output) that respects NO_COLOR and pipes, and leaves long lines whole."""
    return Console(file=stream if stream is not None else sys.stdout, soft_wrap=True, highlight=False)


def print_json(value: Any) -> None:
    """Print a JSON value on standard output, in ASCII: texts and names come from the data and are not trusted."""
    console = console_for()
    console.print_json(json.dumps(value), ensure_ascii=True, highlight=console.is_terminal)


def print_plain(console: Console, text: str, style: str | None = None) -> None:
    """Print untrusted text: no markup, and an escape for every character that a terminal would not simply print."""
    console.print(visible(text), style=style, markup=False)


def visible(text: str) -> str:
    """The text in which nothing can break a line or move the cursor of a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def marked(text: str) -> Text:
    """A line whose markup is shown as styles."""
    return Text.from_markup(text)


def facts(rows: Iterable[tuple[str, str]]) -> Iterator[Text]:
    """Names and what they are, a line each. The texts may hold markup."""
    return (marked(f"  [dim]{name:<8}[/] {text}") for name, text in rows)


def notes(warnings: Iterable[str]) -> Iterator[Text]:
    """Warnings, a line each. They may hold markup."""
    return (marked(f"[yellow]note[/] {warning}") for warning in warnings)


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


def tokens_text(start: int, length: int) -> str:
    """A range of tokens of a document."""
    return f"tokens [{start:,}, {start + length:,})"


# ----------------------------------------------------------------------------------- what a long job shows


class Display:
    """Lines that scroll and, on a terminal, a bar that stays: the watcher of runs and of other long jobs."""

    EVERY = 10.0
    """Seconds between two lines of `progress` where there is no terminal."""

    def __init__(self, console: Console | None = None, *, notices: Console | None = None) -> None:
        """
        Args:
            console: Where everything goes; None to show notices only.
            notices: Where notices go if there is no console; None for nowhere.
        """
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._console, self._notices = console, console or notices
        self._on_terminal = console is not None and console.is_terminal
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._bar = Bar(*columns, console=console, transient=True)
        self._task = self._bar.add_task("starting", total=None)
        self._last_line = time.perf_counter()

    def __enter__(self) -> Self:
        if self._on_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_terminal:
            self._bar.stop()

    def opened(self, headline: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print the first lines of a job. The texts may hold markup."""
        if self._console is not None:
            self._console.print(headline, *facts(rows), sep="\n")

    def waiting(self, what: str) -> None:
        self._bar.update(self._task, description=f"waiting: {what}")
        if not self._on_terminal:
            self.info(f"waiting: {what}")

    def step(self, line: str, done: int, total: int) -> None:
        """Print a line, and move the bar to `done` of `total`."""
        if self._console is not None:
            print_plain(self._console, fitted(line, self._console.width) if self._on_terminal else line)
        self._bar.update(self._task, description="training", completed=done, total=total)

    def progress(self, line: str, done: int, total: int | None = None) -> None:
        """Show how far a job without steps is: beside the bar, or as a line now and then."""
        self._bar.update(self._task, description=line, completed=done, total=total)
        if not self._on_terminal and time.perf_counter() - self._last_line >= self.EVERY:
            self._last_line = time.perf_counter()
            self.info(line)

    def info(self, sentence: str) -> None:
        """Print a sentence, unless standard output is for machines."""
        if self._console is not None:
            print_plain(self._console, f"  {sentence}")

    def notice(self, sentence: str) -> None:
        """Print a sentence, also where standard output is for machines."""
        if self._notices is not None:
            print_plain(self._notices, f"  {sentence}")
