"""Texts with labels, every class in its turn, out of any source that has columns.

    [[source]]
    spec = "jsonl:reviews/*.jsonl"       # {"text": "...", "label": "positive"} a line; label_key names another field
    [spool]
    task = "classify"                    # one label a text; "tag": a list of words and a list of as many labels

    consumer = DatasetConsumer("S")
    batch = consumer.get_batch("train")  # input_ids, attention_mask, labels, sample_index, origin
    batch = consumer.get_batch("val")    # with spool.val_fraction = 0.1: a tenth of each class, in turn, never trained on

Rows are read, judged and tokenised once, into a checked file in the cache; from then on a sample costs a lookup. Which row is
sample g follows from the manifests, the seed and g (mix.strata), so any provider makes any file, and several may join. A row whose
label is missing or unknown stops the provider, naming file and line, or with on_bad = "skip" is left out and counted.

A label is a name or a number. Names are numbered in the order of `spool.labels`, or sorted where none are given (numbers by value);
a number is the place in `spool.labels` where that is given. Of a word that becomes several tokens the first bears its label, the
others −100, as do padding and the tokens that begin and end a text.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from headrace.errors import ConfigError, DataError, FileCorrupt, StorageError, TokenizerError
from headrace.files import open_container, quarantine, write_container
from headrace.jobs.wiring import Job
from headrace.loader.dataset import sample_tokenizer
from headrace.mix import Strata, held_out
from headrace.order import fingerprint_json, key
from headrace.sources import OpenSource, RowShape, Source, cache_folder, open_source
from headrace.sources.spec import nearest
from headrace.spool import DataProviderBase, FieldSpec
from headrace.text import Tokenizer, load_tokenizer

__all__ = ["Examples", "LabelledTextProvider", "read_examples"]

_VERSION = 1
_IGNORED = -100
_IDLE = 86_400.0
"""Seconds a provider waits for somebody to read before it gives up: a day."""
_MAX_CLASSES = 1 << 16
_MAX_NAME = 200
_DEFAULT_KEY = {"classify": "label", "tag": "tags"}


# ----------------------------------------------------------------------------------------------- labels


@dataclass(frozen=True, slots=True, kw_only=True)
class _Labels:
    """What a row's label may be."""

    task: str
    """classify or tag."""
    text_key: str
    label_key: str
    names: tuple[str, ...]
    """The classes; empty where those that occur are taken."""

    def judge(self, row: Mapping[str, Any]) -> str:
        """Why a row cannot be used; nothing if it can."""
        text, label = row[self.text_key], row[self.label_key]
        if self.task == "classify":
            if not isinstance(text, str):
                return f"{self.text_key!r} is {_kind(text)}, expected text (set text_key to the one that holds it)"
            return self._wrong(label)
        for name, value in ((self.text_key, text), (self.label_key, label)):
            if not isinstance(value, list):
                return f"{name!r} is {_kind(value)}, expected a list with one entry a word"
        if len(text) != len(label):
            return f"it has {len(text):,} words in {self.text_key!r} and {len(label):,} labels in {self.label_key!r}"
        if not all(isinstance(word, str) for word in text):
            return f"{self.text_key!r} holds something that is no word"
        return next((why for one in label if one is not None and (why := self._wrong(one))), "")

    def name_of(self, label: Any) -> str:
        """The name of a label that was judged; that of no label is empty."""
        if label is None or label == _IGNORED:
            return ""
        if isinstance(label, bool):
            return "true" if label else "false"
        if isinstance(label, int) and self.names and str(label) not in self.names:
            return self.names[label]
        return str(label)

    def _wrong(self, label: Any) -> str:
        if self.task == "tag" and label == _IGNORED:
            return ""
        if isinstance(label, bool | str) and (self.names or isinstance(label, bool) or label):
            name = self.name_of(label)
            if self.names and name not in self.names:
                near = nearest(name, self.names)
                return f"its label {name[:40]!r} is none of spool.labels; did you mean {near[0]!r}? There are {', '.join(near[:8])}"
            return (
                ""
                if len(name) <= _MAX_NAME
                else f"its label has {len(name):,} characters, at most {_MAX_NAME} are taken"
            )
        if isinstance(label, int) and not isinstance(label, bool):
            if self.names and str(label) not in self.names and not 0 <= label < len(self.names):
                return f"its label is {label}, spool.labels has the numbers 0 to {len(self.names) - 1}"
            return ""
        return f"{self.label_key!r} is {_kind(label)}, expected a name or a whole number"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"the fraction {value}"
    return {str: "an empty text" if value == "" else "text", list: "a list", dict: "an object"}.get(
        type(value), f"{value!r:.40}"
    )


# --------------------------------------------------------------------------------------------- examples


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """All labelled rows of a config, tokenised: example e is ids[offsets[e]:offsets[e + 1]]."""

    ids: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    """int64: one an example, or, where words are tagged, one a token."""
    tagged: bool
    origin: np.ndarray
    """int64 [examples, 2]: which source, and which row of it."""
    names: tuple[str, ...]
    files: tuple[int, ...]
    """How many files each source has."""
    left_out: int
    """Bad rows, with on_bad = "skip"."""
    fingerprint: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def strata(self) -> np.ndarray:
        """The class each example is drawn for: its label, or the rarest of its words' labels; −100 where it has none."""
        return self._rarest() if self.tagged else self.labels

    def counts(self) -> dict[str, int]:
        """Examples that are drawn for each class."""
        strata = self.strata
        found = np.bincount(strata[strata != _IGNORED], minlength=len(self.names))
        return dict(zip(self.names, found.tolist(), strict=True))

    def without_rows(self) -> list[str]:
        """Classes that occur nowhere."""
        found = np.bincount(self.labels[self.labels != _IGNORED], minlength=len(self.names))
        return [name for name, count in zip(self.names, found.tolist(), strict=True) if not count]

    def _rarest(self) -> np.ndarray:
        kept = self.labels != _IGNORED
        counts = np.bincount(self.labels[kept], minlength=len(self.names))
        rank = np.empty(len(self.names), np.int64)
        rank[np.argsort(counts, kind="stable")] = np.arange(len(self.names))
        example = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        best = np.full(len(self), len(self.names), np.int64)
        np.minimum.at(best, example[kept], rank[self.labels[kept]])
        by_rank = np.append(np.argsort(rank), _IGNORED)
        return by_rank[best]


def read_examples(job: Job, report: Callable[[str], None] = lambda _: None) -> tuple[Examples, Tokenizer]:
    """The labelled rows of a config: out of the cache, or read and tokenised now."""
    config, cache = job.config, cache_folder().absolute()
    tokenizer = _tokenizer(job, cache)
    begins, ends = _special(tokenizer, config.text.bos, config.text.eos)
    sources = [Source(**section.model_dump()) for section in config.source]
    labels = [_labels_of(config.spool.task, source, config.spool.labels) for source in sources]
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(
                open_source(
                    source, base=job.base, rows=RowShape(columns=(own.text_key, own.label_key), judge=own.judge)
                )
            )
            for source, own in zip(sources, labels, strict=True)
        ]
        fingerprint = fingerprint_json(
            {
                "version": _VERSION, "task": config.spool.task, "labels": config.spool.labels, "seq_len": config.text.seq_len,
                "tokenizer": tokenizer.fingerprint, "ends": [begins, ends],
                "sources": [
                    [o.manifest.fingerprint, own.text_key, own.label_key, source.max_rows, source.on_bad]
                    for o, source, own in zip(opened, sources, labels, strict=True)
                ],
            }
        )  # fmt: skip
        path = cache / "labelled" / f"{fingerprint}.examples"
        found = _from_cache(path, fingerprint)
        if found is None:
            maker = _Maker(tokenizer, config.spool.task, config.text.seq_len, begins, ends, report)
            for number, (source, own) in enumerate(zip(opened, labels, strict=True)):
                maker.add(number, source, own)
            found = maker.examples(config.spool.labels, fingerprint)
            _to_cache(path, found, report)
    _tell(found, report)
    return found, tokenizer


def _labels_of(task: str, source: Source, names: tuple[str, ...]) -> _Labels:
    own = source.label_key or _DEFAULT_KEY[task]
    if own == source.text_key:
        raise ConfigError(
            f"source {source.name!r}: text_key and label_key are both {own!r}; a text is not its own label"
        )
    return _Labels(task=task, text_key=source.text_key, label_key=own, names=names)


def _tokenizer(job: Job, cache: Path) -> Tokenizer:
    text = job.config.text
    if text.tokenizer == "sample":
        return sample_tokenizer(cache, text.engine)
    return load_tokenizer(job.tokenizer, eos=text.eos_token, bos=text.bos_token, engine=text.engine)


def _special(tokenizer: Tokenizer, bos: bool, eos: bool) -> tuple[list[int], list[int]]:
    """The tokens before and after every text."""
    missing = [
        role
        for role, wanted, found in (("bos", bos, tokenizer.bos_id), ("eos", eos, tokenizer.eos_id))
        if wanted and found is None
    ]
    if missing:
        raise TokenizerError(
            f'tokenizer {tokenizer.name} has no {missing[0]} token under any usual name: name it with text.{missing[0]}_token = "...", or set '
            f"text.{missing[0]} = false"
        )
    begins = [tokenizer.bos_id] if bos and tokenizer.bos_id is not None else []
    return begins, [tokenizer.eos_id] if eos and tokenizer.eos_id is not None else []


class _Maker:
    """Reads labelled rows, chunk by chunk."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        task: str,
        seq_len: int,
        begins: list[int],
        ends: list[int],
        report: Callable[[str], None],
    ) -> None:
        self._tokenizer, self._task, self._report = tokenizer, task, report
        self._begins, self._ends = np.array(begins, np.int32), np.array(ends, np.int32)
        self._room = seq_len - len(begins) - len(ends)
        if self._room < 1:
            raise ConfigError(
                f"text.seq_len = {seq_len} leaves no room for a token beside those that begin and end a text"
            )
        self._ids: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []
        self._origin: list[np.ndarray] = []
        self._names: dict[str, int] = {}
        self._bad = 0
        self._files: list[int] = []
        self._told = time.monotonic()

    def add(self, number: int, source: OpenSource, labels: _Labels) -> None:
        """All rows of a source, or as many as it may give."""
        manifest = source.manifest
        self._files.append(len(manifest.files))
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
                (self._add_words if self._task == "tag" else self._add_texts)(texts, marks, labels)
                self._origin.append(np.stack([np.full(len(kept), number), first + kept], axis=1))
            if time.monotonic() - self._told > 5:
                self._told = time.monotonic()
                self._report(f"{source.name}: {first + len(rows):,} of {min(most, manifest.rows):,} rows read")

    def _add_texts(self, texts: list[str], marks: list[Any], labels: _Labels) -> None:
        batch = self._encode(texts)
        self._lay(batch.ids, batch.offsets)
        self._labels.append(np.array([self._number(labels.name_of(m)) for m in marks], np.int64))

    def _add_words(self, texts: list[list[str]], marks: list[list[Any]], labels: _Labels) -> None:
        # A word after another begins with the blank between them, as it would in running text.
        words = [word if i == 0 else f" {word}" for text in texts for i, word in enumerate(text)]
        counts = np.array([len(text) for text in texts], np.int64)
        batch = self._encode(words)
        numbers = np.array([self._number(labels.name_of(m)) for mark in marks for m in mark], np.int64)
        tags = np.full(len(batch.ids), _IGNORED, np.int64)
        spoken = np.flatnonzero(batch.counts() > 0)
        tags[batch.offsets[spoken]] = numbers[spoken]
        borders = batch.offsets[np.concatenate([[0], np.cumsum(counts)])]
        self._labels.append(self._lay(batch.ids, borders, tags))

    def _lay(self, ids: np.ndarray, offsets: np.ndarray, tags: np.ndarray | None = None) -> np.ndarray:
        """Take over texts, each cut to the room there is and between its tokens of begin and end; `tags` cut in the same way."""
        lengths = np.minimum(np.diff(offsets), self._room)
        whole = lengths + len(self._begins) + len(self._ends)
        starts = np.cumsum(whole) - whole
        place = np.repeat(starts + len(self._begins), lengths) + _ramps(lengths)
        taken = np.repeat(offsets[:-1], lengths) + _ramps(lengths)
        laid = np.empty(int(whole.sum()), np.int32)
        marks = np.full(len(laid), _IGNORED, np.int64)
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

    def _encode(self, texts: Sequence[str]) -> Any:
        batch = self._tokenizer.encode(texts)
        if len(batch) != len(texts) or (
            batch.ids.size and not 0 <= batch.ids.min() <= batch.ids.max() < self._tokenizer.vocab_size
        ):
            raise TokenizerError(
                f"tokenizer {self._tokenizer.name} gave ids outside its vocabulary of {self._tokenizer.vocab_size:,}, or too few texts"
            )
        return batch

    def _number(self, name: str) -> int:
        if not name:
            return _IGNORED
        number = self._names.setdefault(name, len(self._names))
        if number >= _MAX_CLASSES:
            raise DataError(
                f"there are more than {_MAX_CLASSES:,} different labels, which are no classes. Set label_key to the column that holds the class"
            )
        return number

    def examples(self, names: tuple[str, ...], fingerprint: str) -> Examples:
        """Everything that was added, its labels numbered for good."""
        final = names or tuple(sorted(self._names, key=_by_value(self._names)))
        if not final or not self._ids:
            raise DataError(f"no row of the sources has a label ({self._bad:,} were left out). Check label_key")
        place = {name: i for i, name in enumerate(final)}
        numbers = np.array([place[name] for name in self._names] + [_IGNORED], np.int64)  # −1, below, is the last
        labels = np.concatenate(self._labels)
        labels = numbers[np.where(labels == _IGNORED, -1, labels)]
        lengths = np.concatenate(self._lengths)
        return Examples(
            tagged=self._task == "tag", ids=np.concatenate(self._ids), offsets=np.concatenate([[0], np.cumsum(lengths)]), labels=labels,
            origin=np.concatenate(self._origin).astype(np.int64), names=final, files=tuple(self._files), left_out=self._bad, fingerprint=fingerprint,
        )  # fmt: skip


def _ramps(lengths: np.ndarray) -> np.ndarray:
    """0 … n − 1 for each n, one after the other."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _by_value(names: Mapping[str, int]) -> Callable[[str], Any]:
    """How names are sorted: as numbers if all are."""
    numeric = all(name.removeprefix("-").isdecimal() and name.isascii() for name in names)
    return int if numeric else str


def _tell(examples: Examples, report: Callable[[str], None]) -> None:
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
        meta, arrays = container.meta, container.arrays
        if meta["fingerprint"] != fingerprint:
            raise FileCorrupt(f"{path} holds other examples than its name says")
        return Examples(
            **{name: arrays[name] for name in ("ids", "offsets", "labels", "origin")},
            names=tuple(map(str, meta["names"])), tagged=bool(meta["tagged"]), files=tuple(map(int, meta["files"])), left_out=int(meta["left_out"]), fingerprint=fingerprint,
        )  # fmt: skip
    except (FileCorrupt, KeyError, TypeError, ValueError) as error:
        with contextlib.suppress(OSError, StorageError):  # another provider may have moved it aside already
            quarantine(path, str(error))
        return None


def _to_cache(path: Path, examples: Examples, report: Callable[[str], None]) -> None:
    arrays = {name: getattr(examples, name) for name in ("ids", "offsets", "labels", "origin")}
    meta = {
        "fingerprint": examples.fingerprint,
        "names": list(examples.names),
        "tagged": examples.tagged,
        "files": list(examples.files),
        "left_out": examples.left_out,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_container(path, arrays, meta, replace=True, durable=False)  # what a power cut damages is made again
    except (OSError, StorageError) as error:
        report(f"the tokenised examples are not kept for the next start: {error}")


# --------------------------------------------------------------------------------------------- provider


class LabelledTextProvider(DataProviderBase):
    """The labelled rows of a config as the producer of a spool."""

    def __init__(self, job: Job, **more: Any) -> None:
        """`more` as for `DataProviderBase`."""
        more.pop("take", None)  # there are no parts to take: whoever joins makes the next file that is missing
        spool, loader = job.config.spool, job.config.loader
        settings: dict[str, Any] = {
            "batch_size": loader.global_batch_size, "block_size": job.config.text.seq_len, "batches_per_file": spool.batches_per_file,
            "max_backlog_files": spool.max_backlog_files, "durable": spool.durable, "seed": job.config.run.seed, "sleep_seconds": 0.05,
            "deadline": _IDLE,
        }  # fmt: skip
        super().__init__((job.base or Path()) / job.config.spool_dir, **(settings | more))
        self._job = job
        self.examples, self._tokenizer = read_examples(job, self._tell)
        strata = self.examples.strata
        drawn = np.flatnonzero(strata != _IGNORED)  # those that have a label
        if not len(drawn):
            raise DataError("no row of the sources has a label. Check label_key")
        kept = held_out(strata[drawn], spool.val_fraction, key=key("spool.val", seed=self.seed))
        self._drawn = {"train": drawn[~kept], "val": drawn[kept]}
        self._plan = {
            "train": Strata(strata[drawn[~kept]], key=key("spool.strata", seed=self.seed), balance=spool.balance)
        }
        if spool.val_fraction:
            if not kept.any():
                raise DataError(
                    f"spool.val_fraction = {spool.val_fraction:g} leaves nothing to validate on: no class has a second row. Give more rows, or leave it out"
                )
            # Every row once, whatever is trained on: a pass over all of them measures the data as it is.
            self._plan["val"] = Strata(
                strata[drawn[kept]], key=key("spool.strata.val", seed=self.seed), balance="natural"
            )
            self.val_files = -(-int(kept.sum()) // self.rows_per_file)
            alone = np.setdiff1d(np.unique(strata[drawn]), np.unique(strata[drawn[kept]]))
            names = ", ".join(self.examples.names[int(i)] for i in alone[:8])
            self._tell(
                f"{int(kept.sum()):,} examples are held out as split val"
                + (f"; none of {names}, which have one row" if names else "")
            )

    def build_meta(self) -> dict[str, Any]:
        config, examples, width = self._job.config, self.examples, (self._job.config.text.seq_len,)
        tag, names = examples.tagged, [s.name for s in config.source]
        fields = [
            FieldSpec("input_ids", "int64", width, "input"), FieldSpec("attention_mask", "int8", width, "mask"),
            FieldSpec("labels", "int64", width if tag else (), "target"), FieldSpec("sample_index", "int64", (), "meta"),
            FieldSpec("origin", "int64", (2,), "meta"),
        ]  # fmt: skip
        return {
            "dataset_name": "+".join(names), "training_type": "TOKEN_CLASSIFICATION" if tag else "CLASSIFICATION",
            "vocab_size": self._tokenizer.vocab_size, "target_size": len(examples.names), "pad_token_id": self._pad, "batch_schema": fields,
            "label_map": {name: i for i, name in enumerate(examples.names)}, "balance": config.spool.balance, "val_fraction": config.spool.val_fraction,
            "split_info": {
                "train": {"sources": names, "samples": len(self._drawn["train"]), "left_out": examples.left_out, "fingerprint": examples.fingerprint},
                "val": {"samples": len(self._drawn["val"])},
            },
        }  # fmt: skip

    @property
    def splits(self) -> tuple[str, ...]:
        """What it makes."""
        return tuple(self._plan)

    def rows_of(self, split: str, seq: int) -> int:
        if split != "val":
            return self.rows_per_file
        return max(0, min(self.rows_per_file, len(self._drawn["val"]) - seq * self.rows_per_file))

    @property
    def _pad(self) -> int:
        return 0 if self._tokenizer.pad_id is None else self._tokenizer.pad_id

    def open(self, splits: Sequence[str] | None = None) -> None:
        super().open(self.splits if splits is None else splits)

    def run(self, splits: Sequence[str] | None = None, *, max_files: int | None = None) -> int:
        return super().run(self.splits if splits is None else splits, max_files=max_files)

    def batches_of(self, split: str, seq: int, rng: Any) -> Iterator[Mapping[str, Any]]:
        """The batches of file `seq`: a function of the examples, the seed and the samples' numbers alone."""
        begin = seq * self.rows_per_file
        end = begin + self.rows_of(split, seq)
        for first in range(begin, end, self.batch_size):
            yield self._batch(split, first, min(self.batch_size, end - first))

    def _batch(self, split: str, first: int, count: int) -> dict[str, np.ndarray]:
        examples, places = self.examples, np.arange(self._job.config.text.seq_len)
        chosen = self._drawn[split][self._plan[split].rows(first, count)]
        starts, lengths = examples.offsets[chosen], examples.offsets[chosen + 1] - examples.offsets[chosen]
        there = places < lengths[:, None]
        at = np.where(there, starts[:, None] + places, 0)
        ids = np.where(there, examples.ids[at], self._pad).astype(np.int64)
        return {
            "input_ids": ids,
            "attention_mask": there.astype(np.int8),
            "labels": np.where(there, examples.labels[at], _IGNORED) if examples.tagged else examples.labels[chosen],
            "sample_index": np.arange(first, first + count),
            "origin": examples.origin[chosen],
        }
