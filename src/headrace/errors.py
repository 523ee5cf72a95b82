"""Everything a user can cause, in one tree.

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
    ├── StepFailed         every rollout of a training step failed, at every try
    ├── EndOfData          a finite spool was read to its end
    └── DeadlineExceeded   a named wait took longer than it may

The command prints `str(error)` as one sentence and exits with 1; it shows a traceback only with `--debug`. A bug is
never one of these: it stays an ordinary exception, so that it is not mistaken for the user's fault.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

__all__ = [
    "ConfigError",
    "CursorMismatch",
    "DataChanged",
    "DataError",
    "DeadlineExceeded",
    "EndOfData",
    "FileCorrupt",
    "HeadraceError",
    "RolloutRefused",
    "StepFailed",
    "StorageError",
    "TokenizerError",
    "WorkerDied",
]


class HeadraceError(Exception):
    """The root: an error with a sentence for the user."""


class ConfigError(HeadraceError):
    """A config, a spec or an argument is wrong. Holds every problem found, one line each."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class DataError(HeadraceError):
    """A file, a shard or a row cannot be used. The message names it."""


class DataChanged(DataError):
    """Bytes differ from what was recorded when they were first read."""


class RolloutRefused(DataError):
    """A rollout cannot become training samples. `cause` is the short name it is counted under."""

    def __init__(self, cause: str, message: str) -> None:
        self.cause = cause
        super().__init__(message)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.cause, str(self))


class TokenizerError(HeadraceError):
    """The tokenizer does not load, does not fit the data, or failed on a document."""


class CursorMismatch(HeadraceError):
    """A saved state was made for something else. `differences` maps what differs to (saved, now)."""

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


class StepFailed(HeadraceError):
    """Every rollout of a training step failed, at every try: the environments or the engine do not work."""


def how_it_ended(code: int | None) -> str:
    """A process's exit code in words, for a WorkerDied."""
    return f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"


class EndOfData(HeadraceError):
    """A finite spool was read to its end; there is no further batch."""


class DeadlineExceeded(HeadraceError):
    """A named wait took longer than it may."""
