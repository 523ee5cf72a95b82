"""Opened sources: the text of a chunk's rows.

    source = open_source(Source("jsonl:web/*.jsonl"))
    source.manifest.chunk_rows          the number of rows of each chunk, from which the order is made
    source.read(17)                     the texts of chunk 17, None where a row is bad and on_bad = "skip"

Opening lists, counts and fingerprints the files, and holds none of them open. Reading opens one file, reads one chunk, compares its hash
with the one recorded when it was first read, and only then decodes it. `holes()` lists the rows and files that on_bad = "skip" left out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from headrace.errors import DataChanged, DataError, FileCorrupt, StorageError
from headrace.files import make_inside, publish, read_json
from headrace.formats.byte_file import ACCEPT_DATA, ByteFile
from headrace.formats.chunks import BadRow, Reader
from headrace.formats.compressed import Unpacker
from headrace.formats.object_store import store_of
from headrace.order import fingerprint_json
from headrace.sources.access import Access
from headrace.sources.hub import find_dataset
from headrace.sources.manifest import Manifest, make_manifest
from headrace.sources.matching import Found, matches, stored_matches
from headrace.sources.records import ChunkRecords, chunk_ids
from headrace.sources.rows import RowShape
from headrace.sources.samples import sample_folder
from headrace.sources.spec import Source
from headrace.sources.text_formats import TEXT_FORMATS

_log = logging.getLogger("headrace.sources")
_MAX_LISTING = 256 << 20
_HOLES_KEPT = 1000
_FILES_IN_CURSOR = 64
_COMBINED = re.compile(r"([0-9a-f]{16}) \(")


def cache_folder() -> Path:
    """Return $HEADRACE_CACHE, or headrace in $XDG_CACHE_HOME, or ~/.cache/headrace."""
    if own := os.environ.get("HEADRACE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "headrace"
    return Path.home() / ".cache" / "headrace"


def open_source(
    source: Source,
    *,
    base: Path | None = None,
    cache: Path | None = None,
    records: Path | None = None,
    full_check: bool = False,
    accept_changes: bool = False,
    chunk_bytes: int | None = None,
    rows: RowShape | None = None,
) -> OpenSource:
    """List, count and fingerprint the files of a source.

    Args:
        source: What to read.
        base: Folder in which relative specs begin; the working folder unless given.
        cache: Folder of manifests, copies and downloads; `cache_folder()` unless given. `source.cache` comes before it.
        records: Folder of the chunk hashes of one run. A chunk that differs from its hash there is refused. Without it the hashes
            of all runs of this machine lie in the cache: a chunk that differs from what an earlier run read is logged, recorded
            anew and delivered, unless `bind_records` was called.
        full_check: Compare every recorded chunk now rather than when it is read.
        accept_changes: Record changed bytes anew instead of refusing them.
        chunk_bytes: Size of a chunk of lines; by the size of the source unless given.
        rows: Columns of every row, which are delivered as JSON in place of its text.
    """
    base = (base if base is not None else Path.cwd()).absolute()
    if source.cache is not None:
        cache = base / Path(source.cache).expanduser()
    cache = (cache if cache is not None else cache_folder()).absolute()
    found, reader = _find(source, base, cache, rows)
    access = Access(found=found, packings=reader.packings, unpacker=Unpacker(cache, fresh=accept_changes))
    manifest = make_manifest(
        reader, access, chunk_bytes=chunk_bytes, holes=source.on_bad == "skip", fresh=accept_changes, cache=cache
    )
    family: dict[str, Any] = {"format": reader.format, "parameters": reader.parameters()}
    if records is None:
        folder = cache / "records"
        stem = fingerprint_json({**family, "root": str(manifest.root)})
    else:
        folder = records.absolute()
        stem = f"{source.name}-{fingerprint_json(family)[:8]}"
    opened = OpenSource(
        source=source,
        manifest=manifest,
        _reader=reader,
        _access=access,
        _records=ChunkRecords(folder / f"{stem}.chunks", chunk_ids(manifest)),
        _listings=folder / "listings",
        _accept=accept_changes,
        _bound=records is not None,
    )
    if full_check:
        opened.check_recorded()
    return opened


def _find(source: Source, base: Path, cache: Path, rows: RowShape | None) -> tuple[Found, Reader]:
    """The files of a source, and their reader."""
    what, place, scheme, follow = f"source {source.spec!r}", source.place, source.scheme, source.allow_symlinks
    if scheme == "hf":
        columns = rows.columns if rows is not None else None
        found, scheme, text_key = find_dataset(source, base=base, cache=cache, what=what, columns=columns)
        return found, TEXT_FORMATS[scheme].reader(text_key, rows, None)
    if scheme == "sample":
        scheme, place, follow = "jsonl", str(sample_folder(place, cache)), True
    reader = TEXT_FORMATS[scheme].reader(source.text_key, rows, source.document)
    suffixes, packings = reader.suffixes, reader.packings
    if store_of(place) is not None:
        return stored_matches(place, suffixes=suffixes, packings=packings, what=what), reader
    place = str(Path(place).expanduser())
    found = matches(place, base=base, suffixes=suffixes, packings=packings, allow_symlinks=follow, what=what)
    return found, reader


@dataclass(kw_only=True, eq=False, repr=False)
class OpenSource:
    """A source whose rows are known. Every method may be called from many threads."""

    source: Source
    manifest: Manifest
    _reader: Reader
    _access: Access
    _records: ChunkRecords
    _listings: Path
    """Folder of the lists of files that are too long for a cursor."""
    _accept: bool
    """Whether changed bytes are recorded anew."""
    _bound: bool
    """Whether a chunk that differs from its record is refused."""

    def __post_init__(self) -> None:
        self.name: str = self.source.name or self.source.scheme
        self._lock = threading.Lock()
        self._noted: set[str] = set()
        self._looked_at = np.zeros(self.manifest.chunks, dtype=bool)
        self._holes: list[tuple[int, int, int, str]] = []

    def __enter__(self) -> OpenSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, chunk: int) -> list[str | None]:
        """Return the texts of a chunk's rows, in order: `manifest.chunk_rows[chunk]` of them, None for a hole."""
        manifest = self.manifest
        if not 0 <= chunk < manifest.chunks:
            raise IndexError(f"chunk {chunk} of source {self.name!r}, which has {manifest.chunks}")
        rows = int(manifest.chunk_rows[chunk])
        with self._open(chunk) as file:
            loaded = self._reader.load(file, int(manifest.chunk_start[chunk]), int(manifest.chunk_end[chunk]))
            recorded = self._records.recorded(chunk)
            changed = recorded is not None and recorded != loaded.hash
            if changed and not self._accept and (self._bound or self._looked_at[chunk]):
                raise DataChanged(
                    f"{self._where(chunk)} of source {self.name!r} changed since it was first read (hash "
                    f"{recorded or 0:016x} then, {loaded.hash:016x} now). The run would train on other "
                    f"text than it says; restore the file, or {ACCEPT_DATA}."
                )
            texts, bad = self._reader.decode(file, loaded, rows)
        if bad and self.source.on_bad == "fail":
            raise DataError(self._sentence(chunk, bad))
        if changed or recorded is None:
            self._records.add(chunk, loaded.hash)
        if changed and not self._accept:
            self._note_change(chunk)
        self._note_holes(chunk, bad)
        return texts

    def bind_records(self) -> None:
        """Refuse chunks that differ from their record from now on, also where another run made the record. For resumed runs."""
        self._bound = True

    def fingerprint(self) -> dict[str, str]:
        """Return the entries of a cursor: the source under `data:<name>`, and each of up to 64 files under `data:<name>/<path>`."""
        manifest = self.manifest
        whole = fingerprint_json({"manifest": manifest.fingerprint, "text_key": self._text_key()})
        cut = f", split={self.source.document}" if self._reader.parameters().get("split") else ""
        entries = {f"data:{self.name}": f"{whole} ({len(manifest.files):,} files, {manifest.rows:,} rows{cut})"}
        if len(manifest.files) <= _FILES_IN_CURSOR:
            return entries | {f"data:{self.name}/{path}": value for path, value in self._listing().items()}
        self._publish_listing(whole)
        return entries

    def describe_change(self, saved: Mapping[str, str]) -> list[str]:
        """Describe the differences from a saved `fingerprint()`: a phrase per file, or one for the source if no list of files is left."""
        own = f"data:{self.name}"
        now = self.fingerprint()
        if saved.get(own) == now[own]:
            return []
        if own not in saved:
            return [f"source {self.name!r} is new"]
        before = {k.removeprefix(f"{own}/"): v for k, v in saved.items() if k.startswith(f"{own}/")}
        if not before:
            before = self._read_listing(saved[own])
        if before is None:
            return [f"source {self.name!r}: saved {saved[own]}, now {now[own]}"]
        after = self._listing()
        phrases = [
            f"{path} changed (saved {before[path]}, now {after[path]})"
            for path in after
            if before.get(path, after[path]) != after[path]
        ]
        phrases += [f"{path} is missing" for path in before if path not in after]
        phrases += [f"{path} is new" for path in after if path not in before]
        return phrases or [f"source {self.name!r} is read differently (text_key, chunk size or format)"]

    def check_recorded(self, *, record_others: bool = False) -> int:
        """Compare every chunk that has a record with it, and return how many these are. DataChanged names chunks that differ.

        `record_others`: also read the chunks without a record, and record them.
        """
        known = [int(chunk) for chunk in self._records.known()]
        others = sorted(set(range(self.manifest.chunks)) - set(known)) if record_others else []
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="headrace-check") as pool:
            hashes = list(pool.map(self._hash, known))
            for chunk, value in zip(others, pool.map(self._hash, others), strict=True):
                self._records.add(chunk, value)
        remedy = (
            "record them anew elsewhere"
            if record_others
            else "accept the change with accept_changes=True (command: --accept data)"
        )
        changed = [(c, value) for c, value in zip(known, hashes, strict=True) if self._records.recorded(c) != value]
        if changed and not self._accept:
            listed = "; ".join(self._where(chunk) for chunk, _ in changed[:5])
            more = f"; and {len(changed) - 5:,} more" if len(changed) > 5 else ""
            raise DataChanged(
                f"{len(changed):,} of {len(known):,} recorded chunks of source {self.name!r} changed since they were first "
                f"read: {listed}{more}. Restore the files, or {remedy}."
            )
        for chunk, value in changed:
            self._records.add(chunk, value)
        return len(known)

    def holes(self) -> list[dict[str, Any]]:
        """Return what was left out: `file`, `row` (the first, in that file, from 0), `rows` and `reason`, in the order of the source.

        A whole shard has `rows` 0 and is listed from the start; rows and chunks are listed once their chunk was read, at most
        1,000 of them. Each is a pure function of the bytes: every reading of the chunk finds the same.
        """
        files = self.manifest.files
        shards = [(index, 0, 0, file.hole) for index, file in enumerate(files) if file.hole]
        with self._lock:
            found = sorted(shards + self._holes)
        return [{"file": files[f].path, "row": row, "rows": rows, "reason": why} for f, row, rows, why in found]

    def add_hole(self, row: int, reason: str) -> None:
        """Record, once, a row of the source that a later stage cannot use."""
        hole = (*self.manifest.locate(row), 1, reason)
        with self._lock:
            if hole not in self._holes and len(self._holes) < _HOLES_KEPT:
                self._holes.append(hole)

    @property
    def unwritten_hashes(self) -> int:
        """How many chunk hashes could not be written to disk."""
        return self._records.unwritten

    def close(self) -> None:
        self._records.close()

    def _text_key(self) -> str:
        return "" if self._reader.format == "txt" else self.source.text_key

    def _open(self, chunk: int) -> ByteFile:
        entry = self.manifest.files[int(self.manifest.chunk_file[chunk])]
        return self._access.open(entry.path, entry.size, entry.fingerprint)

    def _hash(self, chunk: int) -> int:
        with self._open(chunk) as file:
            start, end = int(self.manifest.chunk_start[chunk]), int(self.manifest.chunk_end[chunk])
            return self._reader.load(file, start, end).hash

    def _note_change(self, chunk: int) -> None:
        """Log, once for each file, that this run reads other bytes than an earlier run."""
        path = self.manifest.path_of(chunk)
        with self._lock:
            if path in self._noted:
                return
            self._noted.add(path)
        _log.warning(
            "%s of source %r changed since an earlier run read it; this run reads it as it is now",
            self._where(chunk),
            self.name,
        )

    def _where(self, chunk: int) -> str:
        path = self.manifest.path_of(chunk)
        start, end = int(self.manifest.chunk_start[chunk]), int(self.manifest.chunk_end[chunk])
        if self._reader.span == "row groups":
            return f"{path} (row group {start})"
        text = " of its text" if self._access.is_packed(path) else ""
        return f"{path} ({self._reader.span} {start:,} to {end:,}{text})"

    def _sentence(self, chunk: int, bad: list[BadRow]) -> str:
        path = self.manifest.path_of(chunk)
        number = int(self.manifest.chunk_line[chunk]) + bad[0].line + 1
        count = sum(b.rows for b in bad)
        others = f" ({count:,} bad rows in this chunk)" if count > 1 else ""
        return (
            f"{path}, {self._reader.unit} {number:,}: {bad[0].reason}{others}. Fix it, or leave such rows out of source "
            f'{self.name!r} with on_bad = "skip".'
        )

    def _note_holes(self, chunk: int, bad: list[BadRow]) -> None:
        with self._lock:
            if self._looked_at[chunk]:
                return
            self._looked_at[chunk] = True
            index = int(self.manifest.chunk_file[chunk])
            first = int(self.manifest.first_row[chunk] - self.manifest.file_first_row[index])
            left = _HOLES_KEPT - len(self._holes)
            self._holes += [(index, first + b.row, b.rows, b.reason) for b in bad[:left]]

    def _listing(self) -> dict[str, str]:
        """Fingerprint and rows of each file."""
        return {file.path: f"{file.fingerprint} ({file.rows:,} rows)" for file in self.manifest.files}

    def _publish_listing(self, whole: str) -> None:
        """Keep the fingerprints of files that are too many for a cursor beside the records, under the fingerprint of the source."""
        path = self._listings / f"{whole}.json"
        with contextlib.suppress(OSError, StorageError):
            if not path.exists():
                make_inside(path.parent.parent, path.parent.name)
                publish(path, orjson.dumps(self._listing()))

    def _read_listing(self, saved: str) -> dict[str, str] | None:
        match = _COMBINED.match(saved)
        if match is None:
            return None
        try:
            listing = read_json(self._listings / f"{match[1]}.json", _MAX_LISTING)
        except (OSError, FileCorrupt):
            return None
        return {str(k): str(v) for k, v in listing.items()} if isinstance(listing, dict) else None
