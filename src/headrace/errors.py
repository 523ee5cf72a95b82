"""The errors that a user can cause.

    HeadraceError
    ├── ConfigError        a config, a spec or an argument is wrong           (all problems at once)
    ├── DataError          a file, a shard or a row cannot be used
    │   ├── DataChanged    bytes differ from what a cursor or a manifest recorded
    │   └── RolloutRefused a rollout cannot become samples; carries the cause it is counted under
    ├── TokenizerError     the tokenizer does not load, does not fit, or failed on a document
    ├── CursorMismatch     a saved state belongs to other data, another tokenizer or another config
    ├── FileCorrupt        one of our own files fails its checksum or does not parse
    ├── StorageError       the disk or the system refused (full, read-only, failing, out of descriptors or memory)
    ├── WorkerDied         a thread, process or rank is gone; carries its name
    ├── EnvironmentFailed  an environment raised in its process; carries the kind of its error
    ├── WeightsNotTaken    an inference engine serves other weights than the trainer published
    ├── StepFailed         every rollout of a training step failed, at every try
    ├── EndOfData          a finite spool was read to its end
    └── DeadlineExceeded   a named wait took longer than it may

The command prints `str(error)` as one sentence and exits with 1; it shows a traceback only with `--debug`. A bug is
never one of these: it stays an ordinary exception.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence


class HeadraceError(Exception):
    """Base of all errors that a user can cause. The message is a sentence for the user."""


class ConfigError(HeadraceError):
    """A config, a spec or an argument is wrong. Holds every problem found, one line each."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class _Counted(Exception):
    """Adds to an error the short name it is counted under, its `cause`."""

    def __init__(self, cause: str, message: str) -> None:
        self.cause = cause
        super().__init__(message)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.cause, str(self))


class DataError(HeadraceError):
    """A file, a shard or a row cannot be used. The message names it."""


class DataChanged(DataError):
    """Bytes differ from what was recorded when they were first read."""


class RolloutRefused(_Counted, DataError):
    """A rollout cannot become training samples."""


class TokenizerError(HeadraceError):
    """The tokenizer does not load, does not fit the data, or failed on a document."""


class CursorMismatch(HeadraceError):
    """A saved state belongs to other data, another tokenizer or another config. `differences`: by name, (saved, now)."""

    def __init__(self, message: str, differences: Mapping[str, tuple[object, object]] | None = None) -> None:
        self.differences = dict(differences or {})
        super().__init__(message)

    def __reduce__(self) -> tuple[type, tuple[str, dict[str, tuple[object, object]]]]:
        return type(self), (str(self), self.differences)


class FileCorrupt(HeadraceError):
    """One of headrace's own files fails its checksum or does not parse."""


class StorageError(HeadraceError):
    """The disk or the system refused a read or a write: full, read-only, failing, out of descriptors or memory."""


class WorkerDied(HeadraceError):
    """A thread, process or rank is gone."""


class EngineDied(WorkerDied):
    """An inference engine does not answer: no fault of the rollouts that asked it, so the run ends and can be resumed."""


class EnvironmentFailed(_Counted, HeadraceError):
    """An environment raised in a process of its own. `cause` is the name of its error."""


class WeightsNotTaken(HeadraceError):
    """An inference engine serves other weights than the trainer published."""


class StepFailed(HeadraceError):
    """Every rollout of a training step failed, at every try: the environments or the engine do not work."""


def nearest(word: str, valid: Iterable[str]) -> list[str]:
    """Return up to 1,000 of `valid`, those most like `word` first, for "did you mean"."""

    def unlikeness(name: str) -> tuple[float, str]:
        return -difflib.SequenceMatcher(None, word[:80].lower(), name[:80].lower()).ratio(), name

    return sorted(itertools.islice(valid, 1000), key=unlikeness)


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return ", did you mean NAME?" with the name that is most like the word; "" if none is similar."""
    near = difflib.get_close_matches(word[:80], list(itertools.islice(valid, 1000)), 1)
    return f", did you mean {near[0] if near[0].isprintable() else found_text(near[0])}?" if near else ""


class EndOfData(HeadraceError):
    """A finite spool was read to its end; there is no further batch."""


class DeadlineExceeded(HeadraceError):
    """A named wait took longer than it may."""


# ------------------------------------------------------------------------- values in the text of a message

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def quoted(text: str) -> str:
    """Return a text as a TOML string, without characters that break a line or move a terminal's cursor."""
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else _escaped(c)) for c in text) + '"'


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def found_text(text: str) -> str:
    """Return a text quoted and shortened."""
    return quoted(shortened(text))


def number_text(value: int | float) -> str:
    """Return a number in at most a few words: large powers of two as 2**n, huge integers by their size."""
    if isinstance(value, int) and value >= 1 << 16 and value & (value - 1) == 0:
        return f"2**{value.bit_length() - 1}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"  # str() refuses more than 4,300 digits
    return repr(value)


def shortened(text: str) -> str:
    """Return at most 60 characters of a text."""
    return text if len(text) <= 60 else text[:57] + "..."


def short_number(number: float) -> str:
    """Return 210,000 as 210k."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def count_text(number: int, what: str) -> str:
    """Return a number of things: `1 window`, `2 windows`."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")
