"""Discovery of stream files: their rows and modalities.

    nested    root/<modality>/<file>     the modality is the folder
    direct    root/<file>                the modality is the root's own name, so there may be several roots

The listing is in bytewise order of `modality/file`; a file's place in it is its stream_id, the same on every machine. Rows and fingerprints
are cached by the file's size, time of modification, and time of the last change of its inode, which no program can set back. Listings of
saved states are cached too, to say later which file changed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import orjson

from headrace.errors import ConfigError, DataError, FileCorrupt, StorageError
from headrace.files import publish, read_json
from headrace.formats.byte_file import patiently
from headrace.order import file_fingerprint, fingerprint_json
from headrace.sources.cells import CellOpener, cell_openers, open_cells
from headrace.sources.matching import matches
from headrace.sources.opened import cache_folder

Layout = Literal["nested", "direct"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

T = TypeVar("T")

_MODALITY = re.compile(r"[A-Za-z0-9_.\-]+")
_VERSION = 2
_MAX_LISTING = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFile:
    """One stream file as it was when it was listed."""

    name: str
    """`modality/file`, the same on every machine."""
    path: str
    """Absolute path on this machine."""
    modality: str
    size: int
    rows: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class StreamListing:
    """All stream files, in the order of their names."""

    files: tuple[StreamFile, ...]

    def __len__(self) -> int:
        return len(self.files)

    @property
    def fingerprint(self) -> str:
        """16 hex digits over names, rows, modalities, sizes and fingerprints of the files."""
        return fingerprint_json([[f.name, f.rows, f.modality, f.size, f.fingerprint] for f in self.files])

    def to_json(self) -> list[dict[str, Any]]:
        """Return the listing as JSON, for `changes_since`."""
        return [{"name": f.name, "rows": f.rows, "size": f.size, "fingerprint": f.fingerprint} for f in self.files]

    def keep(self, cache: Path | None) -> None:
        """Keep the listing in the cache, under its fingerprint."""
        path = _listing_path(self.fingerprint, cache)
        if not path.exists():
            _write_cache(path, self.to_json())

    def changes_since(self, saved: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the differences from a kept listing, one line a file."""
        before = {str(f["name"]): f for f in saved}
        now = {f.name: f for f in self.files}
        lines = [f"{name} is gone" for name in before if name not in now]
        lines += [f"{name} is new" for name in now if name not in before]
        for name, file in now.items():
            old = before.get(name)
            if old is not None and old["rows"] != file.rows:
                lines.append(f"{name} had {old['rows']:,} rows and has {file.rows:,}")
            elif old is not None and (old["size"], old["fingerprint"]) != (file.size, file.fingerprint):
                lines.append(f"{name} has other content")
        return lines


def kept_listing(fingerprint: str, cache: Path | None) -> list[dict[str, Any]]:
    """Return a kept listing in the form of `to_json`; [] if there is none."""
    return _read_cache(_listing_path(fingerprint, cache), [])


def _listing_path(fingerprint: str, cache: Path | None) -> Path:
    return (cache or cache_folder()) / "streams" / "listings" / f"{fingerprint}.json"


def list_streams(
    roots: str | Path | Sequence[str | Path],
    *,
    layout: Layout = "nested",
    base: Path | None = None,
    readers: Mapping[str, CellOpener] | None = None,
    allow_symlinks: bool = False,
    cache: Path | None = None,
) -> StreamListing:
    """List the stream files below one or several folders and count their rows.

    Args:
        roots: The folders.
        layout: "nested" or "direct", as above.
        base: Folder in which relative roots begin; the working folder unless given.
        readers: Openers of further formats, by suffix.
        allow_symlinks: Follow symbolic links.
        cache: Cache folder; `cache_folder()` unless given.
    """
    places = [roots] if isinstance(roots, str | Path) else list(roots)
    if layout not in LAYOUTS:
        raise ConfigError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if not places:
        raise ConfigError("stream mixing needs at least one folder of stream files, got none")
    files: list[StreamFile] = []
    for place in places:
        files += _below(Path(place), layout, base or Path.cwd(), readers, allow_symlinks, cache)
    files.sort(key=lambda f: os.fsencode(f.name))
    for a, b in itertools.pairwise(files):
        if a.name == b.name:
            raise ConfigError(
                f"{a.path} and {b.path} are both called {a.name}; in layout {layout!r} the folder's name is the modality, so "
                "rename one of the folders or files"
            )
    if not any(f.rows for f in files):
        raise DataError(f"none of the {len(files)} stream files below {', '.join(map(str, places))} has a row")
    return StreamListing(files=tuple(files))


def _below(
    root: Path,
    layout: Layout,
    base: Path,
    readers: Mapping[str, CellOpener] | None,
    allow_symlinks: bool,
    cache: Path | None,
) -> list[StreamFile]:
    what = f"streams {str(root)!r}"
    suffixes = tuple(cell_openers(readers))
    found = matches(str(root), base=base, suffixes=suffixes, allow_symlinks=allow_symlinks, what=what)
    folder = Path(found.root)
    if not (base / root).is_dir():
        raise ConfigError(f"{what} is a file; give the folder that holds the stream files")
    # Rows and fingerprints of files whose size and times have not changed.
    cached = (
        (cache or cache_folder())
        / "streams"
        / f"{fingerprint_json(['stream rows', _VERSION, str(folder.resolve())])}.json"
    )
    before: dict[str, Any] = _read_cache(cached, {})
    now: dict[str, list[Any]] = {}
    files = []
    for entry in found.files:
        depth = entry.path.count("/")
        if depth != (layout == "nested"):
            expected = "<modality>/<file>" if layout == "nested" else "<file>"
            hint = "direct" if layout == "nested" and depth == 0 else "nested" if depth == 1 else None
            raise DataError(
                f"{what}: {entry.path} does not lie at {expected}, as layout {layout!r} has it."
                + (f" Use layout = {hint!r}, or move the file." if hint else " Move the file.")
            )
        # Resolved, because "." has no name.
        modality = entry.path.partition("/")[0] if layout == "nested" else folder.resolve().name
        if not _MODALITY.fullmatch(modality):
            raise DataError(
                f"{what}: the folder name {modality!r} becomes a modality and part of metric keys; it may have letters, "
                "digits, _ . and - only. Rename it."
            )
        # The readers follow no links, so allowed links are resolved here.
        path = (folder / entry.path).resolve() if allow_symlinks else folder / entry.path
        version = [entry.size, entry.version, patiently(f"looking at {path}", path.stat).st_ctime_ns]
        match before.get(entry.path):
            case [*kept, int() as rows, str() as fingerprint] if kept == version:
                pass
            case _:
                rows, fingerprint = _counted(path, entry.size, readers)
        now[entry.path] = [*version, rows, fingerprint]
        files.append(
            StreamFile(
                name=f"{modality}/{entry.path.rpartition('/')[2]}",
                path=str(path.absolute()),
                modality=modality,
                size=entry.size,
                rows=rows,
                fingerprint=fingerprint,
            )
        )
    if now != before:
        _write_cache(cached, now)
    return files


def _counted(path: Path, size: int, readers: Mapping[str, CellOpener] | None) -> tuple[int, str]:
    """Rows and fingerprint of a file, from the file itself."""
    opened = open_cells(path, readers=readers)
    try:
        rows = opened.rows
    finally:
        opened.close()
    return rows, patiently(f"reading {path}", lambda: file_fingerprint(path, size))


def _read_cache(path: Path, default: T) -> T:
    """A JSON value of the cache; `default` if there is none of its type. A damaged one is made anew."""
    try:
        read = read_json(path, _MAX_LISTING)
    except (OSError, FileCorrupt):
        return default
    return read if isinstance(read, type(default)) else default


def _write_cache(path: Path, value: Any) -> None:
    """Write a JSON value. On failure the next start counts rows again, or a refusal cannot name the file that changed."""
    with contextlib.suppress(OSError, StorageError):
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, orjson.dumps(value), replace=True, durable=False)
