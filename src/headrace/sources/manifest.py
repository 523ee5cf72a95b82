"""Manifest: the files, chunks and rows of a source.

    files        sorted by the bytes of their paths, each with its size, rows and fingerprint
    chunks       file, [start, end), rows; in file order, then in the order of the file; none is empty
    first_row    prefix sums: row r of the source lies in chunk searchsorted(first_row, r)

A manifest is a pure function of the files' bytes, so every rank makes the same one. It is made once, at the speed of
reading (files side by side in threads), and cached under a key of (path, size, mtime) and of what the scan depends on.
On a cache hit only the sampled blocks of every file are read again, about a millisecond a file; a file that changed
behind an unchanged size and mtime is thereby noticed in most cases, and the rest when its chunks are read (records.py).
Objects of a store have entity tags in place of the mtime, and these are believed.

A shard that cannot be decoded stops the run, or with on_bad = "skip" is a hole: a file of no rows with a reason. The fingerprint covers it
like any file, so that a run that left it out is not resumed unnoticed over a mended shard.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import FileCorrupt, StorageError
from headrace.files import open_container, write_container
from headrace.formats.byte_file import Undecodable
from headrace.formats.chunks import FileScan, Reader
from headrace.order import fingerprint_json
from headrace.sources.access import Access
from headrace.sources.matching import Found, FoundFile

_VERSION = 2
_COLUMNS = {
    "chunk_file": np.int32,
    "chunk_start": np.int64,
    "chunk_end": np.int64,
    "chunk_rows": np.int64,
    "chunk_line": np.int64,
    "chunk_bytes": np.int64,
}
_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a source."""

    path: str
    """Relative to the manifest's root, with slashes."""
    size: int
    rows: int
    fingerprint: str
    """16 hex digits over the size and sampled blocks (order.file_fingerprint)."""
    hole: str = ""
    """Why the file is left out as a whole; empty for one that is read."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """The files and chunks of a source. Two manifests with equal fingerprints hold the same rows in the same chunks."""

    root: Path | str
    """The folder all paths are relative to, or the URL of one in a store."""
    files: tuple[FileEntry, ...]
    chunk_file: np.ndarray
    chunk_start: np.ndarray
    chunk_end: np.ndarray
    chunk_rows: np.ndarray
    chunk_line: np.ndarray
    """Line (or row) of its file at which a chunk begins, from 0. Differs from the row where lines are blank."""
    chunk_bytes: np.ndarray
    """Approximate bytes of text of a chunk."""
    first_row: np.ndarray
    """Row of the source at which each chunk begins; one more entry than chunks, the last is `rows`."""
    file_first_row: np.ndarray
    rows: int
    blank_lines: int
    fingerprint: str

    @property
    def chunks(self) -> int:
        return len(self.chunk_rows)

    def path_of(self, chunk: int) -> str:
        """Return the path of a chunk's file, with the root, for errors."""
        return f"{self.root}/{self.files[int(self.chunk_file[chunk])].path}"

    def locate(self, row: int) -> tuple[int, int]:
        """Return (index of the file, row within it) of a row of the source."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of a source of {self.rows} rows")
        file = int(np.searchsorted(self.file_first_row, row, side="right")) - 1
        return file, row - int(self.file_first_row[file])


def make_manifest(
    reader: Reader, access: Access, *, chunk_bytes: int | None, holes: bool, fresh: bool, cache: Path
) -> Manifest:
    """Return the manifest of the found files, from the cache or by scanning them.

    Args:
        reader: The format.
        access: The files.
        chunk_bytes: Size of a chunk; the reader's choice unless given.
        holes: Leave out files that cannot be decoded, instead of raising Undecodable.
        fresh: Scan also where the cache has a manifest.
        cache: The cache folder.
    """
    found = access.found
    target = reader.chunk_bytes(sum(f.size for f in found.files)) if chunk_bytes is None else chunk_bytes
    recipe = {"version": _VERSION, "format": reader.format, "parameters": reader.parameters(), "chunk_bytes": target}
    listing = [[f.path, f.size, f.version] for f in found.files]
    path = cache / "manifests" / f"{fingerprint_json({**recipe, 'root': str(found.root), 'files': listing})}.manifest"
    prints = None if access.vouched_for else _side_by_side(access.fingerprint, found.files)
    manifest = None if fresh else _from_cache(path, found, prints, recipe)
    if manifest is None:
        manifest = _scanned(reader, access, prints, recipe, path, holes)
    left_out = [file for file in manifest.files if file.hole]
    if left_out and not holes:
        raise Undecodable(f"{manifest.root}/{left_out[0].path}", left_out[0].hole)
    return manifest


def _scanned(
    reader: Reader, access: Access, prints: list[str] | None, recipe: dict[str, Any], path: Path, holes: bool
) -> Manifest:
    found = access.found
    prints = _side_by_side(access.fingerprint, found.files) if prints is None else prints
    print_of = {f.path: p for f, p in zip(found.files, prints, strict=True)}

    def scanned(file: FoundFile) -> FileScan | str:
        try:
            with access.open(file.path, file.size, print_of[file.path]) as bytes_:
                scan = reader.scan(bytes_, recipe["chunk_bytes"])
        except Undecodable as error:
            access.require_unchanged(file)  # a file that is still being written is no hole
            if not holes:
                raise
            return error.reason
        access.require_unchanged(file)
        return scan

    results = _side_by_side(scanned, found.files)
    scans = [_nothing() if isinstance(result, str) else result for result in results]
    reasons = {f.path: result for f, result in zip(found.files, results, strict=True) if isinstance(result, str)}
    columns = {"chunk_file": np.repeat(np.arange(len(scans), dtype=np.int32), [len(scan.rows) for scan in scans])}
    for name in ("start", "end", "rows", "line", "size"):
        parts = [np.zeros(0, dtype=np.int64), *(getattr(scan, name) for scan in scans)]
        columns["chunk_bytes" if name == "size" else f"chunk_{name}"] = np.concatenate(parts)
    blank = sum(scan.blank_lines for scan in scans)
    files = [[f.path, f.size, int(scan.rows.sum()), p] for f, scan, p in zip(found.files, scans, prints, strict=True)]
    _to_cache(path, columns, {"recipe": recipe, "files": files, "blank_lines": blank, "holes": reasons})
    return _manifest(found.root, files, columns, blank, reasons, recipe)


def _nothing() -> FileScan:
    none = np.zeros(0, dtype=np.int64)
    return FileScan(start=none, end=none, rows=none, line=none, size=none)


def _manifest(
    root: Path | str,
    files: list[list[Any]],
    columns: dict[str, np.ndarray],
    blank: int,
    holes: dict[str, str],
    recipe: dict[str, Any],
) -> Manifest:
    entries = tuple(FileEntry(path=p, size=s, rows=r, fingerprint=f, hole=holes.get(p, "")) for p, s, r, f in files)
    typed = {name: columns[name].astype(dtype, copy=False) for name, dtype in _COLUMNS.items()}
    first_row = np.concatenate(([0], np.cumsum(typed["chunk_rows"], dtype=np.int64))).astype(np.int64)
    file_first = np.concatenate(([0], np.cumsum([e.rows for e in entries], dtype=np.int64))).astype(np.int64)
    return Manifest(
        root=root,
        files=entries,
        **typed,
        first_row=first_row,
        file_first_row=file_first[:-1],
        rows=int(first_row[-1]),
        blank_lines=blank,
        fingerprint=fingerprint_json({**recipe, "files": files}),
    )


def _side_by_side(call: Any, items: tuple[FoundFile, ...]) -> list[Any]:
    """Return `call` of every item, in order. Reading and comparing release the GIL, so threads help."""
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), thread_name_prefix="headrace-scan") as pool:
        return list(pool.map(call, items))


# ------------------------------------------------------------------------------------------------ cache


def _from_cache(path: Path, found: Found, prints: list[str] | None, recipe: dict[str, Any]) -> Manifest | None:
    """The cached manifest, if it is whole and the fingerprints of the files, where known, are the same."""
    if not path.exists():
        return None
    try:
        container = open_container(path)
        meta = container.meta
        files = [[str(p), int(s), int(r), str(f)] for p, s, r, f in meta["files"]]
        columns = {name: np.array(container.arrays[name]) for name in _COLUMNS}
        lengths = {len(column) for column in columns.values()}
        if (
            meta["recipe"] != recipe
            or len(lengths) != 1
            or [f[:2] for f in files] != [[f.path, f.size] for f in found.files]
        ):
            raise FileCorrupt(f"{path} describes another source than its name says")
        blank = int(meta["blank_lines"])
        holes = {str(path): str(reason) for path, reason in meta.get("holes", {}).items()}
    except (FileCorrupt, KeyError, TypeError, ValueError, AttributeError):
        return None
    if prints is not None and [f[3] for f in files] != prints:
        return None
    return _manifest(found.root, files, columns, blank, holes, recipe)


def _to_cache(path: Path, columns: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    """Publish the manifest. Ranks that do so at once publish the same bytes; the last replaces the others."""
    with contextlib.suppress(OSError, StorageError):  # without it the next start scans again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_container(path, columns, meta, replace=True, durable=False)  # what a power cut damages is made again
