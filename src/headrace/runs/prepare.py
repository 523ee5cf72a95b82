"""`headrace prepare`: tokenise every document of a config's sources once, into shards that are mapped from then on.

    rows ──► chunks, read and tokenised by threads ──► shards in row order ──► index ──► manifest

The bytes depend on the documents, the tokenizer and the size of a shard, never on the number of threads. A shard appears
whole or not at all, so the same command continues a job that was killed: finished shards are verified and kept, the unfinished one
is made again, and the folder ends up as after an undisturbed run. prepare.json records what the bytes depend on; a job that
continues with other inputs is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from headrace.errors import ConfigError, DataChanged, FileCorrupt, StorageError, short_number
from headrace.files import TEMP_PREFIX, make_inside, publish_json, quarantine, sweep_temporaries
from headrace.loader import TextDataset
from headrace.loader.windows import leave_out_too_long
from headrace.metrics import Wait
from headrace.runs.config.schema import RunConfig
from headrace.runs.folder import read_json
from headrace.runs.job import Job
from headrace.runtime.locks import ExclusiveLock
from headrace.runtime.processors import usable_processors
from headrace.runtime.signals import signal_asked
from headrace.sources import OpenSource
from headrace.text import LONGEST_PIECE, encode_named
from headrace.text.shards import (
    MANIFEST,
    SHARD_FOLDER,
    PreparedManifest,
    PreparedSource,
    ShardEntry,
    lay_documents,
    open_packed,
    open_shard,
    pack_shard,
    packed_name,
    shard_name,
    token_dtype,
    write_packed,
    write_packed_counts,
    write_shard,
)  # fmt: skip

_PLAN, _LOCK = "prepare.json", "prepare.lock"
_DOCUMENTS_AT_ONCE = 1024
_DEADLINE = 3600.0


@dataclass(slots=True, kw_only=True)
class PrepareSummary:
    """The prepared folder when the job ends."""

    folder: str
    state: str = "prepared"
    """prepared, complete (there was nothing to do), or stopped."""
    sources: dict[str, dict[str, int]] = field(default_factory=dict)
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    shards: int = 0
    kept: int = 0
    """Shards that were there already and verified."""
    remade: int = 0
    """Shards that were there, failed their check and were set aside."""
    new_tokens: int = 0
    bad_rows: int = 0
    seconds: float = 0.0
    signal: int = 0
    """Number of the signal that stopped the job; 0 if none did."""

    @property
    def tokens_per_second(self) -> float:
        return round(self.new_tokens / self.seconds, 1) if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


class PrepareWatcher(Protocol):
    """Receives what there is to tell; the command prints it."""

    def progress(self, line: str, done: int, total: int) -> None:
        """`done` of `total` rows are tokenised; `line` says how far the source is."""
        ...

    def notice(self, sentence: str) -> None: ...


class _Documents(NamedTuple):
    """Consecutive rows of a source, tokenised."""

    tokens: np.ndarray
    lengths: np.ndarray
    bad: np.ndarray
    """Which rows were left out."""


def prepare(
    config: RunConfig,
    folder: Path,
    watcher: PrepareWatcher,
    *,
    began: Callable[[TextDataset, int, bool], None] = lambda *_: None,
    workers: int | None = None,
    shard_bytes: int | None = None,
) -> PrepareSummary:
    """Write the prepared folder of a config, or continue it. Returns early on SIGINT and SIGTERM, with state `stopped`.

    Args:
        config: Sources, tokenizer and `seq_len`.
        folder: The folder to write: a new one, an empty one, or one that an earlier call began.
        watcher: Receives progress.
        began: Called once the folder is claimed, with the dataset, the number of threads, and whether an earlier call began the folder.
        workers: Threads that tokenise; one a processor unless given.
        shard_bytes: Size of a shard; 128 MiB unless given. Cannot change in a folder once begun.
    """
    workers = usable_processors() if workers is None else workers
    if not 1 <= workers <= 1024:
        raise ConfigError(f"--workers must be between 1 and 1,024, got {workers}")
    shard_bytes = 128 << 20 if shard_bytes is None else shard_bytes
    if not 1 << 10 <= shard_bytes <= 1 << 40:
        raise ConfigError(f"a shard must have between 1 KiB and 1 TiB, got {shard_bytes:,} bytes")
    with contextlib.ExitStack() as stack:
        resumed = _claim(folder, stack)
        data = Job(config).dataset(records=folder / "records")
        stack.callback(data.close)
        dtype = token_dtype(data.vocab_size)
        plan = _plan(data, dtype, shard_bytes // dtype.itemsize)
        _compare(folder, plan, data, resumed)
        began(data, workers, resumed)
        stop = stack.enter_context(signal_asked())
        summary = PrepareSummary(folder=str(folder))
        return _Preparation(folder, data, config, dtype, plan["shard_tokens"], workers, watcher, stop, summary).run()


@dataclass(slots=True)
class _Preparation:
    """One call of `prepare`."""

    folder: Path
    data: TextDataset
    config: RunConfig
    dtype: np.dtype
    shard_tokens: int
    workers: int
    watcher: PrepareWatcher
    stop: Callable[[], int]
    summary: PrepareSummary
    shards: list[ShardEntry] = field(default_factory=list)
    """Finished shards of the current source."""

    @property
    def rows(self) -> list[int]:
        """Rows of every source."""
        return [int(deal.rows) for deal in self.data.deals]

    def run(self) -> PrepareSummary:
        summary, text, data, started = self.summary, self.config.text, self.data, time.perf_counter()
        prepared: list[PreparedSource] = []
        counts: dict[str, list[int]] = {}
        with ThreadPoolExecutor(self.workers, thread_name_prefix="headrace-prepare") as pool:
            for index, source in enumerate(data.sources):
                counts[source.name] = self._source(index, source, pool)
                prepared.append(_described(source, self.shards))
                if summary.signal:
                    summary.state = "stopped"
                    break
        summary.seconds = time.perf_counter() - started
        for shard in itertools.chain.from_iterable(source.shards for source in prepared):
            summary.shards += 1
            summary.documents += shard.documents
            summary.tokens += shard.tokens
            summary.bytes += shard.size
            summary.bad_rows += shard.bad
        summary.sources = {
            s.name: {"documents": s.documents, "tokens": s.tokens, "shards": len(s.shards)} for s in prepared
        }
        if summary.signal:
            return summary
        manifest = PreparedManifest(
            tokenizer=data.tokenizer.fingerprint, vocab_size=data.vocab_size, dtype="uint16" if self.dtype.itemsize == 2 else "uint32",
            bos_id=data.packing.bos_id, eos_id=data.packing.eos_id, pad_id=data.packing.pad_id, seq_len=text.seq_len, pack=text.pack,
            sources=tuple(prepared),
        )  # fmt: skip
        if text.pack == "best_fit":
            write_packed_counts(self.folder, text.seq_len, manifest.data, counts)
        if not self._is_there(manifest):
            manifest.write(self.folder)  # last: from here on the folder is prepared
        elif summary.kept == summary.shards:
            summary.state = "complete"
        return summary

    def _is_there(self, manifest: PreparedManifest) -> bool:
        try:
            return (self.folder / MANIFEST).exists() and PreparedManifest.read(self.folder) == manifest
        except FileCorrupt as error:
            self.watcher.notice(f"{error} It is written anew.")
            return False

    # ------------------------------------------------------------------------------------- one source

    def _source(self, index: int, source: OpenSource, pool: ThreadPoolExecutor) -> list[int]:
        """Keep or make every shard of a source in `shards`; return the blocks in each."""
        folder = make_inside(self.folder, f"{SHARD_FOLDER}/{source.name}")
        sweep_temporaries(folder)
        self.shards = shards = []
        blocks: list[int] = []
        row, total = 0, self.rows[index]
        documents: Iterator[_Documents] | None = None
        while row < total:
            path = folder / shard_name(len(shards))
            entry = self._kept(path, row, total)
            if entry is not None:
                documents = None  # those of the next shard begin at another row
                self.summary.kept += 1
            else:
                if documents is None:
                    documents = self._cut(index, self._documents(source, row, total, pool))
                made = next(documents, None)
                if made is None:
                    break
                entry = self._write(path, source.name, row, made)
                self.summary.new_tokens += entry.tokens
            blocks.append(self._packed(folder, len(shards), entry))
            shards.append(entry)
            row += entry.rows
            self._report(index, [])
            if self.stop():
                break
        if row < total:
            self.summary.signal = self.stop()
        else:
            self._refuse_leftovers(folder, len(shards))
        return blocks

    def _report(self, index: int, pending: list[_Documents]) -> None:
        """Show how far a source is: its shards so far, and documents for the next one."""
        rows = sum(s.rows for s in self.shards) + sum(len(p.lengths) for p in pending)
        tokens = short_number(sum(s.tokens for s in self.shards) + sum(len(p.tokens) for p in pending))
        line = f"{self.data.sources[index].name}  {rows:,} of {self.rows[index]:,} rows  {tokens} tokens"
        self.watcher.progress(line, sum(self.rows[:index]) + rows, sum(self.rows))

    def _kept(self, path: Path, row: int, total: int) -> ShardEntry | None:
        """A shard that is there, read as a whole and compared; None if it has to be made."""
        if not path.exists():
            return None
        try:
            shard = open_shard(path, full=True)
            entry = shard.entry
            if entry.first_row != row or not 0 < entry.rows <= total - row or shard.tokens.dtype != self.dtype:
                raise FileCorrupt(f"{path} begins at row {entry.first_row:,}, expected {row:,}")
        except FileCorrupt as error:
            where = quarantine(path, str(error), self.folder / "quarantine")
            self.watcher.notice(f"{error}. Set aside as {where}; made again.")
            self.summary.remade += 1
            return None
        return entry

    def _cut(self, index: int, incoming: Iterator[_Documents]) -> Iterator[_Documents]:
        """The documents of source `index` in pieces of the size of a shard. Ends early when the job is asked to stop."""
        parts: list[_Documents] = []
        for part in incoming:
            while not self.stop():
                ends = np.cumsum(part.lengths)
                room = self.shard_tokens - sum(len(p.tokens) for p in parts)
                if not len(ends) or int(ends[-1]) < room:
                    break
                # The shard closes with the document that fills it: where it ends depends on the documents alone.
                count = int(np.searchsorted(ends, room, side="left")) + 1
                cut = int(ends[count - 1])
                yield _joined([*parts, _Documents(part.tokens[:cut], part.lengths[:count], part.bad[:count])])
                parts, part = [], _Documents(part.tokens[cut:], part.lengths[count:], part.bad[count:])
            if self.stop():
                return
            if len(part.lengths):
                parts.append(part)
                self._report(index, parts)
        if parts and not self.stop():
            yield _joined(parts)

    def _write(self, path: Path, name: str, row: int, documents: _Documents) -> ShardEntry:
        about = {"source": name, "tokenizer": self.data.tokenizer.fingerprint}
        try:
            with Wait("prepare.write", meter=self.data.meter, deadline=_DEADLINE):
                bad = int(documents.bad.sum())
                return write_shard(path, documents.tokens, documents.lengths, first_row=row, bad=bad, about=about)
        except StorageError as error:
            raise StorageError(
                f"{error} Finished shards in {self.folder} are kept: the same command continues from there."
            ) from error

    def _packed(self, folder: Path, number: int, entry: ShardEntry) -> int:
        """Write the packed index of a shard for the config's seq_len unless it is there; the number of its blocks."""
        seq_len = self.config.text.seq_len
        if self.config.text.pack == "concat":
            return -(-entry.tokens // seq_len)
        path = folder / packed_name(seq_len, number)
        if path.exists():
            try:
                return len(open_packed(path, seq_len=seq_len, of=entry))
            except FileCorrupt as error:
                self.watcher.notice(f"{error}. Made again.")
        packed = pack_shard(open_shard(folder / entry.file, entry).offsets, seq_len)
        write_packed(path, packed, seq_len=seq_len, of=entry)
        return len(packed)

    def _refuse_leftovers(self, folder: Path, count: int) -> None:
        """Quarantine a shard beyond the last row: it comes from another source and must not be read as part of this one."""
        extra = folder / shard_name(count)
        if extra.exists():
            where = quarantine(extra, "beyond the last row of its source", self.folder / "quarantine")
            self.watcher.notice(f"{extra} lies beyond the last row of its source. Set aside as {where}.")

    # ------------------------------------------------------------------------------------ tokenising

    def _documents(self, source: OpenSource, row: int, total: int, pool: ThreadPoolExecutor) -> Iterator[_Documents]:
        """The rows from `row` to `total`, tokenised by threads, in order. Reads at most 2 chunks a thread ahead."""
        first_rows = source.manifest.first_row
        begin = int(np.searchsorted(first_rows, row, side="right")) - 1
        chunks = iter(range(begin, int(np.searchsorted(first_rows, total, side="left"))))

        def submit(chunk: int) -> Future[list[_Documents]]:
            return pool.submit(self._chunk, source, chunk, row, total)

        waiting = deque(map(submit, itertools.islice(chunks, 2 * self.workers)))
        try:
            while waiting:
                with Wait("prepare.tokens", meter=self.data.meter, deadline=_DEADLINE) as wait:
                    done = waiting.popleft().result(timeout=wait.remaining())
                waiting.extend(map(submit, itertools.islice(chunks, 1)))
                yield from done
        finally:
            for future in waiting:
                future.cancel()

    def _chunk(self, source: OpenSource, chunk: int, row: int, total: int) -> list[_Documents]:
        """The rows of a chunk that are in [row, total), tokenised."""
        begin = int(source.manifest.first_row[chunk])
        first = max(row, begin)
        texts = source.read(chunk)[first - begin : total - begin]
        found = []
        for at in range(0, len(texts), _DOCUMENTS_AT_ONCE):
            if self.stop():
                return found
            part = texts[at : at + _DOCUMENTS_AT_ONCE]
            holes, given = np.array([t is None for t in part], bool), [t or "" for t in part]
            if max(map(len, given)) > LONGEST_PIECE:
                rows = range(first + at, first + at + len(part))
                holes[leave_out_too_long(source, self.data.tokenizer, given, rows)] = True
            begin = first + at
            batch = encode_named(self.data.tokenizer, given, lambda i, begin=begin: _place(source, begin + i))
            tokens, lengths = lay_documents(batch, self.data.packing, self.dtype)
            found.append(_Documents(tokens, lengths, holes))
        return found


def _described(source: OpenSource, shards: list[ShardEntry]) -> PreparedSource:
    limits = source.source
    return PreparedSource(
        name=source.name, spec=limits.spec, weight=limits.weight, max_epochs=limits.max_epochs, max_tokens=limits.max_tokens,
        data=source.fingerprint()[f"data:{source.name}"], files=tuple((file.path, file.rows) for file in source.manifest.files), shards=tuple(shards),
    )  # fmt: skip


def _place(source: OpenSource, row: int) -> str:
    file, local = source.manifest.locate(row)
    return f"row {local} of {source.manifest.files[file].path} (source {source.name})"


def _joined(parts: list[_Documents]) -> _Documents:
    if len(parts) == 1:
        return parts[0]
    return _Documents(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


# ------------------------------------------------------------------------------------------------- folder


def _claim(folder: Path, stack: contextlib.ExitStack) -> bool:
    """Lock the folder for writing, and return whether an earlier call began it. A folder of something else is refused."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give a folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = sorted(p.name for p in folder.iterdir() if not p.name.startswith(TEMP_PREFIX))
        if _PLAN not in held and held not in ([], [_LOCK]):
            raise ConfigError(
                f"{folder} holds {held[0]!r} and no prepared data: give an empty or a new folder with --out, so that nothing of "
                "yours is mixed with it"
            )
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror or error}. Give another folder with --out"
        ) from error
    in_use, advice = f"{folder} is being written by", "wait for it, or stop it first"
    lock = ExclusiveLock.acquire(folder / _LOCK, in_use=in_use, advice=advice, inside=folder)
    stack.callback(lock.release)
    sweep_temporaries(folder)
    return (folder / _PLAN).exists()


def _plan(data: TextDataset, dtype: np.dtype, shard_tokens: int) -> dict[str, Any]:
    """Everything that the bytes of the shards depend on."""
    return {
        "kind": "headrace-prepare",
        "version": 1,
        "tokenizer": data.tokenizer.fingerprint,
        "dtype": dtype.name,
        "bos_id": data.packing.bos_id,
        "eos_id": data.packing.eos_id,
        "shard_tokens": shard_tokens,
        "sources": {
            s.name: {"max_rows": s.source.max_rows, "on_bad": s.source.on_bad, "fingerprint": s.fingerprint()}
            for s in data.sources
        },
    }


def _compare(folder: Path, plan: dict[str, Any], data: TextDataset, resumed: bool) -> None:
    """Write prepare.json, or compare it with `plan`; DataChanged names what differs."""
    if not resumed:
        publish_json(folder / _PLAN, plan)
        return
    saved = read_json(folder / _PLAN)
    if saved == plan:
        return
    changes = [
        f"{name} was {saved.get(name)}, is {plan[name]}"
        for name in plan
        if name != "sources" and saved.get(name) != plan[name]
    ]
    before = saved.get("sources")
    before = before if isinstance(before, Mapping) else {}
    changes += [f"source {name} is gone" for name in before if name not in plan["sources"]]
    for source in data.sources:
        then, now = before.get(source.name), plan["sources"][source.name]
        if not isinstance(then, Mapping):
            changes.append(f"source {source.name} is new")
            continue
        changes += [
            f"{key} of source {source.name} was {then.get(key)}, is {now[key]}"
            for key in ("max_rows", "on_bad")
            if then.get(key) != now[key]
        ]
        if then.get("fingerprint") != now["fingerprint"]:
            changes += [
                f"source {source.name}: {phrase}" for phrase in source.describe_change(then.get("fingerprint") or {})
            ]
    raise DataChanged(
        f"{folder} was begun with something else: {'; '.join(changes) or 'the order of the sources'}. Going on would mix two data sets; "
        "restore what changed, or prepare into another folder with --out."
    )
