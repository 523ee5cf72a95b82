"""Labelled rows as token ids: read, judged and tokenised once, into a checked file in the cache.

A row whose label is missing or unknown is an error that names file and line; with on_bad = "skip" the row is left out and counted. If a word
becomes several tokens, the first has the word's label. The other tokens, padding and the tokens that begin and end a text have −100.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from headrace.errors import ConfigError, DataError, FileCorrupt, StorageError, TokenizerError
from headrace.files import open_container, quarantine, write_container
from headrace.order import fingerprint_json
from headrace.sources import OpenSource, RowShape, Source, cache_folder, open_source
from headrace.spool.providers.labels import LabelRules, Task
from headrace.spool.providers.sampling import IGNORED
from headrace.text import Tokenizer, encode_named

_VERSION = 1
_MAX_CLASSES = 1 << 16
_DEFAULT_KEY = {"classify": "label", "tag": "tags"}
_ARRAYS = ("ids", "offsets", "labels", "origin")
_FACTS = ("fingerprint", "names", "tagged", "files", "left_out")
"""Fields of `Examples` in the cache: its tensors, and its JSON."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """Labelled rows, tokenised: example e is ids[offsets[e]:offsets[e + 1]]."""

    ids: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    """int64: one label for each example, or, if words are tagged, one for each token."""
    tagged: bool
    origin: np.ndarray
    """int64 [examples, 2]: number of the source, and row in it."""
    names: tuple[str, ...]
    """Names of the classes."""
    files: tuple[int, ...]
    """How many files each source has."""
    left_out: int
    """Number of bad rows, with on_bad = "skip"."""
    fingerprint: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def strata(self) -> np.ndarray:
        """The class that each example is drawn for: its label, or the rarest label of its words; −100 if it has none."""
        return self._rarest() if self.tagged else self.labels

    def counts(self) -> dict[str, int]:
        """Number of examples that are drawn for each class."""
        strata = self.strata
        found = np.bincount(strata[strata != IGNORED], minlength=len(self.names))
        return dict(zip(self.names, found.tolist(), strict=True))

    def without_rows(self) -> list[str]:
        """Names of the classes without examples."""
        found = np.bincount(self.labels[self.labels != IGNORED], minlength=len(self.names))
        return [name for name, count in zip(self.names, found.tolist(), strict=True) if not count]

    def _rarest(self) -> np.ndarray:
        kept = self.labels != IGNORED
        counts = np.bincount(self.labels[kept], minlength=len(self.names))
        rank = np.empty(len(self.names), np.int64)
        rank[np.argsort(counts, kind="stable")] = np.arange(len(self.names))
        example = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        best = np.full(len(self), len(self.names), np.int64)
        np.minimum.at(best, example[kept], rank[self.labels[kept]])
        by_rank = np.append(np.argsort(rank), IGNORED)
        return by_rank[best]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSettings:
    """How rows become examples."""

    task: Task
    labels: tuple[str, ...] = ()
    """Names of the classes, in the order of their numbers; empty: the labels that occur, sorted."""
    seq_len: int
    """Most tokens of an example."""
    bos: bool = False
    eos: bool = False
    """Whether every text begins with the bos token, and ends with the eos token."""


def read_examples(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    settings: ExampleSettings,
    *,
    base: Path | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Examples:
    """The labelled rows of some sources: from the cache, or read and tokenised now.

    Args:
        sources: The sources of the rows.
        tokenizer: Encodes the texts.
        settings: How rows become examples.
        base: Where relative paths start; the working folder unless given.
        report: Gets sentences about progress, classes and bad rows.
    """
    begins, ends = _special(tokenizer, settings.bos, settings.eos)
    rules = [_rules_of(settings, source) for source in sources]
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(
                open_source(source, base=base, rows=RowShape(columns=(own.text_key, own.label_key), judge=own.judge))
            )
            for source, own in zip(sources, rules, strict=True)
        ]
        fingerprint = fingerprint_json(
            {
                "version": _VERSION, "task": settings.task, "labels": settings.labels, "seq_len": settings.seq_len,
                "tokenizer": tokenizer.fingerprint, "ends": [begins, ends],
                "sources": [
                    [o.manifest.fingerprint, own.text_key, own.label_key, source.max_rows, source.on_bad]
                    for o, source, own in zip(opened, sources, rules, strict=True)
                ],
            }
        )  # fmt: skip
        path = cache_folder().absolute() / "labelled" / f"{fingerprint}.examples"
        found = _from_cache(path, fingerprint)
        if found is None:
            reader = _RowReader(tokenizer, settings, begins, ends, report)
            for number, (source, own) in enumerate(zip(opened, rules, strict=True)):
                reader.add(number, source, own)
            found = reader.examples(fingerprint)
            _to_cache(path, found, report)
    _report_counts(found, report)
    return found


def _rules_of(settings: ExampleSettings, source: Source) -> LabelRules:
    own = source.label_key or _DEFAULT_KEY[settings.task]
    if own == source.text_key:
        raise ConfigError(
            f"source {source.name!r}: text_key and label_key are both {own!r}; a text is not its own label"
        )
    return LabelRules(task=settings.task, text_key=source.text_key, label_key=own, names=settings.labels)


def _special(tokenizer: Tokenizer, bos: bool, eos: bool) -> tuple[list[int], list[int]]:
    """The tokens before and after every text."""
    tokens: list[list[int]] = []
    for role, wanted, token in (("bos", bos, tokenizer.bos_id), ("eos", eos, tokenizer.eos_id)):
        if wanted and token is None:
            raise TokenizerError(
                f'tokenizer {tokenizer.name} has no {role} token under any usual name: name it with text.{role}_token = "...", or set '
                f"text.{role} = false"
            )
        tokens.append([token] if wanted and token is not None else [])
    return tokens[0], tokens[1]


class _RowReader:
    """Reads and tokenises labelled rows, chunk by chunk."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: ExampleSettings,
        begins: list[int],
        ends: list[int],
        report: Callable[[str], None],
    ) -> None:
        self._tokenizer, self._settings, self._report = tokenizer, settings, report
        self._begins, self._ends = np.array(begins, np.int32), np.array(ends, np.int32)
        self._room = settings.seq_len - len(begins) - len(ends)
        if self._room < 1:
            raise ConfigError(
                f"text.seq_len = {settings.seq_len} leaves no room for a token beside those that begin and end a text"
            )
        self._ids: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []
        self._origin: list[np.ndarray] = []
        self._names: dict[str, int] = {}
        self._bad = 0
        self._files: list[int] = []
        self._reported = time.monotonic()
        self._reading = ""
        """Name of the source that is being read."""

    def add(self, number: int, source: OpenSource, labels: LabelRules) -> None:
        """Read all rows of source `number`, or its first `max_rows`."""
        manifest = source.manifest
        self._files.append(len(manifest.files))
        self._reading = source.name
        most = source.source.max_rows if source.source.max_rows is not None else manifest.rows
        for chunk in range(manifest.chunks):
            first = int(manifest.first_row[chunk])
            if first >= most:
                break
            rows = source.read(chunk)[: most - first]
            kept = np.array([i for i, row in enumerate(rows) if row is not None], np.int64)
            self._bad += len(rows) - len(kept)
            if len(kept):
                found = [orjson.loads(row) for row in rows if row is not None]
                texts, marks = [r[labels.text_key] for r in found], [r[labels.label_key] for r in found]
                add = self._add_words if self._settings.task == "tag" else self._add_texts
                add(texts, marks, labels)
                self._origin.append(np.stack([np.full(len(kept), number), first + kept], axis=1))
            if time.monotonic() - self._reported > 5:
                self._reported = time.monotonic()
                self._report(f"{source.name}: {first + len(rows):,} of {min(most, manifest.rows):,} rows read")

    def _add_texts(self, texts: list[str], marks: list[Any], labels: LabelRules) -> None:
        batch = encode_named(self._tokenizer, texts, self._row)
        self._append(batch.ids, batch.offsets)
        self._labels.append(np.array([self._number(labels.name_of(m)) for m in marks], np.int64))

    def _add_words(self, texts: list[list[str]], marks: list[list[Any]], labels: LabelRules) -> None:
        # Every word but the first begins with a space, as in running text.
        words = [word if i == 0 else f" {word}" for text in texts for i, word in enumerate(text)]
        counts = np.array([len(text) for text in texts], np.int64)
        batch = encode_named(self._tokenizer, words, self._row)
        numbers = np.array([self._number(labels.name_of(m)) for mark in marks for m in mark], np.int64)
        tags = np.full(len(batch.ids), IGNORED, np.int64)
        spoken = np.flatnonzero(batch.counts() > 0)
        tags[batch.offsets[spoken]] = numbers[spoken]
        borders = batch.offsets[np.concatenate([[0], np.cumsum(counts)])]
        self._labels.append(self._append(batch.ids, borders, tags))

    def _append(self, ids: np.ndarray, offsets: np.ndarray, tags: np.ndarray | None = None) -> np.ndarray:
        """Append texts, each cut to fit and put between its bos and eos tokens; returns `tags`, cut in the same way."""
        lengths = np.minimum(np.diff(offsets), self._room)
        whole = lengths + len(self._begins) + len(self._ends)
        starts = np.cumsum(whole) - whole
        place = np.repeat(starts + len(self._begins), lengths) + _ramps(lengths)
        taken = np.repeat(offsets[:-1], lengths) + _ramps(lengths)
        laid = np.empty(int(whole.sum()), np.int32)
        marks = np.full(len(laid), IGNORED, np.int64)
        laid[place] = ids[taken]
        for i, token in enumerate(self._begins):
            laid[starts + i] = token
        for i, token in enumerate(self._ends):
            laid[starts + len(self._begins) + lengths + i] = token
        if tags is not None:
            marks[place] = tags[taken]
        self._ids.append(laid)
        self._lengths.append(whole)
        return marks

    def _row(self, _: int) -> str:
        return f"a row of source {self._reading}"

    def _number(self, name: str) -> int:
        if not name:
            return IGNORED
        number = self._names.setdefault(name, len(self._names))
        if number >= _MAX_CLASSES:
            raise DataError(
                f"there are more than {_MAX_CLASSES:,} different labels, too many for classes. Set label_key to the column that holds the class"
            )
        return number

    def examples(self, fingerprint: str) -> Examples:
        """All rows that were added, with the final numbers of their labels."""
        final = self._settings.labels or tuple(sorted(self._names, key=_by_value(self._names)))
        if not final or not self._ids:
            raise DataError(f"no row of the sources has a label ({self._bad:,} were left out). Check label_key")
        place = {name: i for i, name in enumerate(final)}
        numbers = np.array([place[name] for name in self._names] + [IGNORED], np.int64)  # −1, below, is the last
        labels = np.concatenate(self._labels)
        labels = numbers[np.where(labels == IGNORED, -1, labels)]
        lengths = np.concatenate(self._lengths)
        return Examples(
            tagged=self._settings.task == "tag", ids=np.concatenate(self._ids), offsets=np.concatenate([[0], np.cumsum(lengths)]), labels=labels,
            origin=np.concatenate(self._origin).astype(np.int64), names=final, files=tuple(self._files), left_out=self._bad, fingerprint=fingerprint,
        )  # fmt: skip


def _ramps(lengths: np.ndarray) -> np.ndarray:
    """The numbers 0 … n − 1 for each n in `lengths`, concatenated."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _by_value(names: Mapping[str, int]) -> Callable[[str], Any]:
    """The sort key of class names: numbers if all of them are, else text."""
    numeric = all(name.removeprefix("-").isdecimal() and name.isascii() for name in names)
    return int if numeric else str


def _report_counts(examples: Examples, report: Callable[[str], None]) -> None:
    counts = examples.counts()
    shown = ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:12]) + (
        ", …" if len(counts) > 12 else ""
    )
    report(f"{len(examples):,} examples of {len(examples.names)} classes: {shown}")
    if examples.left_out:
        report(f'{examples.left_out:,} bad rows were left out (on_bad = "skip")')
    if empty := examples.without_rows():
        report(f"no row is labelled {', '.join(empty[:8])}")


def _from_cache(path: Path, fingerprint: str) -> Examples | None:
    if not path.exists():
        return None
    try:
        container = open_container(path)
        found: dict[str, Any] = {name: container.meta[name] for name in _FACTS}
        if found["fingerprint"] != fingerprint:
            raise FileCorrupt(f"{path} holds other examples than its name says")
        found |= {name: container.arrays[name] for name in _ARRAYS}
        found |= {name: tuple(found[name]) for name in ("names", "files")}
        return Examples(**found)
    except (FileCorrupt, KeyError, TypeError, ValueError) as error:
        with contextlib.suppress(OSError, StorageError):  # another provider may have moved it aside already
            quarantine(path, str(error))
        return None


def _to_cache(path: Path, examples: Examples, report: Callable[[str], None]) -> None:
    arrays, facts = ({name: getattr(examples, name) for name in names} for names in (_ARRAYS, _FACTS))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_container(path, arrays, facts, replace=True, durable=False)  # a damaged file is made again
    except (OSError, StorageError) as error:
        report(f"the tokenised examples are not cached for the next start: {error}")
