"""Files that a spec names.

    matches("web/*.jsonl", base, suffixes=(".jsonl",), ...)  ->  root folder, and the files below it in bytewise order

Files are listed in the order of their paths' bytes, which is the same on every machine. Names that start with a dot are left out of folders
and globs, as in a shell. A symbolic link, `..` and a file that is not regular are refused rather than left out: a shard that is
silently missing changes the data. Nothing is opened here.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from headrace.errors import ConfigError, DataError, nearest
from headrace.formats.byte_file import file_kind, patiently
from headrace.formats.compressed import PACKINGS
from headrace.formats.object_store import MAX_FILES, Store, find_objects, pinned_tag

COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".br", ".zip")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """A regular file (or an object of a store) below the root, as it was when it was listed."""

    path: str
    """Relative to the root, with slashes."""
    size: int
    version: int | str
    """Its time of modification in ns; of an object the entity tag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    root: Path | str
    """A folder, or the URL of one."""
    files: tuple[FoundFile, ...]
    follow: bool = False
    """Whether names may be links."""
    store: Store | None = None
    """The store of objects; None for files on disk."""


def matches(
    place: str,
    *,
    base: Path,
    suffixes: Sequence[str],
    packings: Sequence[str] = (),
    allow_symlinks: bool,
    what: str,
) -> Found:
    """Return the regular files that a place names.

    Args:
        place: A file, a folder or a glob.
        base: Folder in which a relative place begins.
        suffixes: Endings of the files taken from a folder.
        packings: Suffixes of compressed files that can be read; others are refused by name.
        allow_symlinks: Follow symbolic links and `..`.
        what: Begins errors, such as "source 'jsonl:web/'".
    """
    parts = PurePosixPath(place).parts
    if ".." in parts and not allow_symlinks:
        raise ConfigError(
            f"{what} goes through '..', which can leave the folder it starts in; write the path without it, or allow it "
            "with allow_symlinks = true"
        )
    walk = _Walk(packings, allow_symlinks, what)
    cut = len(parts)
    if _is_pattern(place) and walk.stat(base / place, follow=False) is None:
        cut = next(i for i, part in enumerate(parts) if _is_pattern(part))
    root, pattern = base.joinpath(*parts[:cut]), parts[cut:]
    walk.check_named(base, parts[:cut])
    status = walk.checked(root)
    if status is None:
        raise DataError(_nothing(what, place, root))
    if not pattern and not stat.S_ISDIR(status.st_mode):
        return Found(root=root.parent, files=(walk.file(root, root.name),), follow=allow_symlinks)
    # Of a folder also a.jsonl.xz is found, which `file` refuses by name: a shard that is silently missing changes the data.
    endings = ("",) if pattern else (*suffixes, *(own + packed for own in suffixes for packed in COMPRESSED))
    listed = walk.expand(root, "", pattern or ("**",), (walk.identity(root),), endings)
    found = sorted(set(listed), key=lambda f: os.fsencode(f.path))
    if not found and pattern:
        raise DataError(_nothing(what, place, root))
    if not found:
        raise DataError(
            f"{what}: no file ends in {' or '.join(suffixes)} below {root}. Name the files with a glob such as {place.rstrip('/')}/*"
        )
    return Found(root=root, files=tuple(found), follow=allow_symlinks)


def named_files(root: Path, paths: Sequence[str], *, allow_symlinks: bool, what: str) -> Found:
    """Return the regular files of these paths below a folder, by the rules of `matches`. They may be compressed."""
    walk = _Walk(PACKINGS, allow_symlinks, what)
    walk.check_named(root.parent, (root.name,))
    return Found(
        root=root,
        files=tuple(walk.file(root / path, path) for path in sorted(set(paths), key=os.fsencode)),
        follow=allow_symlinks,
    )


def stored_matches(place: str, *, suffixes: Sequence[str], packings: tuple[str, ...], what: str) -> Found:
    """Return the objects that a URL names."""
    store, root, objects = find_objects(place, suffixes=suffixes, packings=COMPRESSED, what=what)
    for path, _, _ in objects:
        _require_readable(f"{root}/{path}", packings, what)
    return Found(root=root, files=tuple(FoundFile(path=p, size=s, version=tag) for p, s, tag in objects), store=store)


def pinned_objects(root: str, sizes: Mapping[str, int], *, version: str) -> Found:
    """Return objects below a URL whose content never changes, by path and size. `version` names the content."""
    tag = pinned_tag(version)
    files = tuple(FoundFile(path=p, size=sizes[p], version=tag) for p in sorted(sizes, key=str.encode))
    return Found(root=root, files=files, store=Store("/".join(root.split("/")[:3])))


class _Walk:
    """One listing, with its rules and its count."""

    def __init__(self, packings: Sequence[str], allow_symlinks: bool, what: str) -> None:
        self.packings = tuple(packings)
        self.allow_symlinks = allow_symlinks
        self.what = what
        self.count = 0

    def stat(self, path: Path, *, follow: bool) -> os.stat_result | None:
        def call() -> os.stat_result | None:
            try:
                return path.stat(follow_symlinks=follow)
            except (FileNotFoundError, NotADirectoryError):
                return None

        return patiently(f"{self.what}: looking at {path}", call)

    def checked(self, path: Path) -> os.stat_result | None:
        """The status of a path; None if there is nothing. A symbolic link is followed where that is allowed, and refused otherwise."""
        status = self.stat(path, follow=self.allow_symlinks)
        if status is not None and stat.S_ISLNK(status.st_mode):
            raise DataError(
                f"{self.what}: {path} is a symbolic link to {path.readlink()}. Links can change what a source holds "
                "without a trace; name the place itself, or allow it with allow_symlinks = true."
            )
        return status

    def identity(self, path: Path) -> tuple[int, int]:
        status = self.stat(path, follow=True)
        return (status.st_dev, status.st_ino) if status is not None else (-1, -1)

    def check_named(self, base: Path, parts: Sequence[str]) -> None:
        """Refuse links among the folders that the spec names below `base`; of an absolute path only the last part is checked."""
        named = [base.joinpath(*parts[: i + 1]) for i in range(len(parts))]
        absolute = bool(parts) and parts[0] == "/"
        for path in named[-1:] if absolute else named:
            self.checked(path)

    def file(self, path: Path, relative: str) -> FoundFile:
        status = self.checked(path)
        if status is None:
            raise DataError(
                f"{self.what}: {path} is a link to nothing, or vanished while it was listed. Restore or remove it."
            )
        if not stat.S_ISREG(status.st_mode):
            raise DataError(
                f"{self.what}: {path} is {file_kind(status.st_mode)}; a source reads regular files only. Take it out of the "
                "folder, or name the files with a narrower glob."
            )
        _require_readable(str(path), self.packings, self.what)
        try:
            relative.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{self.what}: the file name {os.fsencode(path)!r} is not valid UTF-8, so a cursor could not name it. "
                "Rename the file."
            ) from None
        self.count += 1
        if self.count > MAX_FILES:
            raise DataError(f"{self.what} names more than {MAX_FILES:,} files; join them into fewer shards")
        return FoundFile(path=relative, size=status.st_size, version=status.st_mtime_ns)

    def expand(
        self,
        folder: Path,
        prefix: str,
        pattern: Sequence[str],
        above: tuple[tuple[int, int], ...],
        endings: tuple[str, ...],
    ) -> Iterator[FoundFile]:
        """All files below a folder that match the parts of a glob and have one of these endings."""
        head, rest = pattern[0], pattern[1:]
        fits = re.compile(fnmatch.translate("*" if head == "**" else head)).match
        if head == "**":
            yield from self.expand(folder, prefix, rest or ("*",), above, endings)
            rest = pattern
        for entry in patiently(f"{self.what}: listing {folder}", lambda: _scandir(folder)):
            name, inner, is_folder = entry.name, folder / entry.name, entry.is_dir()
            if (name.startswith(".") and not head.startswith(".")) or not fits(name):
                continue
            if is_folder and entry.is_symlink():
                self.checked(inner)
                if self.identity(inner) in above:
                    raise DataError(
                        f"{self.what}: {inner} links back to a folder above it, so the listing would never end. Remove the link "
                        "or name the files with a narrower glob."
                    )
            if rest and is_folder:
                yield from self.expand(inner, f"{prefix}{name}/", rest, (*above, self.identity(inner)), endings)
            elif not rest and not is_folder and name.endswith(endings):
                yield self.file(inner, f"{prefix}{name}")


def _require_readable(path: str, packings: tuple[str, ...], what: str) -> None:
    """Refuse a compressed file that the scheme does not read."""
    if path.endswith(COMPRESSED) and not path.endswith(packings):
        readable = f" (it reads {' and '.join(packings)})" if packings else ""
        raise DataError(
            f"{what}: {path} is compressed, which this scheme does not read{readable}. Unpack it, or take it out of the source."
        )


def _scandir(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda e: os.fsencode(e.name))


def _is_pattern(text: str) -> bool:
    return any(c in text for c in "*?[")


def _nothing(what: str, place: str, wanted: Path) -> str:
    """The message that no file matches. It names the nearest folder that exists and similar names in it."""
    missing = wanted.name
    folder = wanted
    while not folder.is_dir() and folder != folder.parent:
        missing = folder.name
        folder = folder.parent
    try:
        names = [e.name + ("/" if e.is_dir() else "") for e in _scandir(folder)]
    except OSError:
        names = []
    holds = ", ".join(nearest(missing, names)[:3]) if names else "nothing"
    return f"{what}: no file matches {place!r}. The nearest folder that exists is {folder}, which holds {holds}."
