"""Objects of a store: finding those that a URL names, and reading their bytes by ranges.

    s3://bucket/web/*.jsonl    gs://    az://        a prefix, a glob or one object      listed in bytewise order
    https://host/web.jsonl                           one object: the web has no listings

Stores are read through obstore (extra [s3]). Its settings come from the environment, like those of each store's own tools
(AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL, AWS_SKIP_SIGNATURE for public buckets, ...).

An object is read by ranges: the bytes of a chunk or of a parquet column, or 8 MiB at a time while rows are counted. Each answer must carry
the entity tag the object had when it was listed, so an object that is replaced during the run is refused. Requests are tried again until a
deadline after errors that may pass (no connection, 5xx, 429, a time-out); wrong names, credentials and regions are errors at once.
obstore's own retries are off: they would wait without a name.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from headrace.errors import ConfigError, DataChanged, DataError
from headrace.formats.byte_file import ByteFile
from headrace.metrics import Wait
from headrace.runtime.retry import retry

T = TypeVar("T")

STORES = ("s3", "gs", "az", "http", "https")
MAX_FILES = 1_000_000
"""Files or objects that one listing may hold."""
DEADLINE = 60.0
"""Seconds that a store may stay out of reach before a read gives up."""
_SILENCE = 2.0
"""Seconds of failing requests after which the log says so."""
_log = logging.getLogger("headrace.sources")
_AHEAD = 8 << 20
_PINNED = "pinned "
"""Begins the tag of an object whose URL names its content. The tags in answers differ between servers and are not compared."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]{1,80})</Code>")
_METADATA_SERVICE = ("169.254.169.254", "metadata.google.internal", "169.254.170.2")
_PASSES = frozenset({"408", "425", "429", "500", "502", "503", "504"})


class Store:
    """One bucket, container or web host. Safe to share between threads; not to be carried over a fork."""

    def __init__(self, root: str) -> None:
        """`root`: `s3://bucket` or `https://host`."""
        self.root = root
        try:
            import obstore
            import obstore.exceptions
            import obstore.store
        except ImportError as error:
            raise ConfigError(
                f"reading {root} needs obstore, which is not installed: pip install 'headrace[s3]', or copy the files to a disk"
            ) from error
        self._obstore: Any = obstore
        self._errors: Any = obstore.exceptions
        try:
            self._store: Any = obstore.store.from_url(
                root,
                client_options={"timeout": f"{DEADLINE:.0f}s", "connect_timeout": "10s", "allow_http": True},
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
            )
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise DataError(f"opening {root}: {_said(error)}") from error

    def below(self, prefix: str, what: str) -> list[Mapping[str, Any]]:
        """Return every object below a prefix (whole path parts), in the store's order. `what` begins errors."""

        def call() -> list[Mapping[str, Any]]:
            listed: list[Mapping[str, Any]] = []
            for batch in self._obstore.list(self._store, prefix=prefix or None, chunk_size=1000):
                listed += batch
                if len(listed) > MAX_FILES:
                    raise DataError(f"{what} lies among more than {MAX_FILES:,} objects; name a narrower place")
            return listed

        return self._patiently(f"{what}: listing {self.root}/{prefix}", call)

    def head(self, key: str, what: str) -> Mapping[str, Any] | None:
        """Return size, tag and time of one object; None if there is none. `what` begins errors."""

        def call() -> Mapping[str, Any] | None:
            try:
                return self._obstore.head(self._store, key)
            except FileNotFoundError:
                return None

        return self._patiently(f"{what}: looking at {self.root}/{key}", call)

    def read(self, key: str, start: int, end: int, tag: str) -> Any:
        """Return bytes [start, end) of an object, which must still carry its tag."""
        url = f"{self.root}/{key}"

        def call() -> Any:
            options: dict[str, Any] = {"range": (start, end)}
            if tag.startswith('"'):  # a weak tag never matches by the rules of HTTP, so it is compared below only
                options["if_match"] = tag
            try:
                result = self._obstore.get(self._store, key, options=options)
                found = _tag(result.meta)
                data = result.bytes()
            except self._errors.PreconditionError as error:
                raise _replaced(url) from error
            if found != tag and not tag.startswith(_PINNED):
                raise _replaced(url)
            if len(data) != end - start:
                raise DataChanged(
                    f"{url} gave {len(data):,} bytes for bytes {start:,} to {end:,}: it is shorter than it was when it was "
                    "listed. Restore it and run again."
                )
            return data

        return self._patiently(f"reading {url} at byte {start:,}", call)

    def _patiently(self, doing: str, call: Callable[[], T]) -> T:
        """Return `call()`. It is tried again until the deadline after errors that may pass; a DataError begins with `doing`."""
        _require_own_process(doing)

        def timed() -> T:
            with Wait("source.remote", hidden=True):
                return call()

        began, said = time.monotonic(), False

        def passes(error: BaseException) -> bool:
            nonlocal said
            found = self._passes(error)
            if found and not said and time.monotonic() - began > _SILENCE:
                said = True
                _log.warning("%s: %s; trying again for up to %.0f s", doing, _said(error), DEADLINE)
            return found

        def gave_up(error: Exception, tries: int, seconds: float) -> DataError:
            return DataError(
                f"{doing}: {_said(error)}, {tries} times in {seconds:.0f} s. Check that the store can be reached and run again."
            )

        try:
            return retry(
                timed, passes=passes, wait_name="source.retry", deadline=DEADLINE, doing=doing,
                first_pause=0.05, longest_pause=2.0, gave_up=gave_up,
            )  # fmt: skip
        except (self._errors.BaseError, OSError) as error:
            raise DataError(f"{doing}: {self._reason(error)}") from error

    def _passes(self, error: BaseException) -> bool:
        text = str(error)
        if not isinstance(error, self._errors.GenericError) or any(host in text for host in _METADATA_SERVICE):
            return False
        status = _STATUS.search(text)
        return status[1] in _PASSES if status else "HTTP error" in text or "timed out" in text or "timeout" in text

    def _reason(self, error: BaseException) -> str:
        text = str(error)
        status, code = _STATUS.search(text), _CODE.search(text)
        if any(host in text for host in _METADATA_SERVICE):
            return (
                "there are no credentials for it. Set the store's own variables (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "say), or AWS_SKIP_SIGNATURE=true for a public bucket"
            )
        if code is not None and code[1] == "NoSuchBucket":
            return "there is no such bucket. Check its name and the store's endpoint"
        if isinstance(error, FileNotFoundError):
            return "the object is gone. Restore it, or take it out of the source"
        if status is not None and status[1] in ("401", "403"):
            return f"access is denied ({code[1] if code else status[1]}). Check the credentials, and that they may list and read it"
        if status is not None and (status[1] in ("301", "307") or (code is not None and "Region" in code[1])):
            return f"it lies in another region or at another endpoint ({code[1] if code else status[1]}). Set AWS_REGION or AWS_ENDPOINT_URL"
        return _said(error)


_threads_of: int | None = None
"""The id of the process in which obstore has started its threads."""


def _require_own_process(doing: str) -> None:
    global _threads_of
    if _threads_of is None:
        _threads_of = os.getpid()
    elif _threads_of != os.getpid():
        # A fork does not copy its threads: the call would wait for them forever.
        raise DataError(
            f"{doing}: this process was forked from one that had read a store, which obstore does not survive. Start worker "
            'processes with the method "spawn" or "forkserver".'
        )


class StoredObject(ByteFile):
    """One object of a store, as a ByteFile. Not to be shared between threads: it keeps the last answer."""

    def __init__(self, store: Store, key: str, *, size: int, tag: str) -> None:
        self.path: Path | str = f"{store.root}/{key}"
        self.size = size
        self.version: int | str = tag
        self._store = store
        self._key = key
        self._window: tuple[int, Any] = (0, b"")

    def __exit__(self, *_: object) -> None:
        self._window = (0, b"")

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from the last answer if it holds the bytes. A read that goes on where the last answer ended reads 8 MiB ahead."""
        if not len(view):
            return
        start, held = self._window
        if not start <= offset <= offset + len(view) <= start + len(held):
            is_sequential = len(held) > 0 and start <= offset <= start + len(held)
            end = min(self.size, offset + max(len(view), _AHEAD if is_sequential else 0))
            start, held = offset, memoryview(self._store.read(self._key, offset, end, str(self.version)))
            self._window = (start, held)
        view[:] = held[offset - start : offset - start + len(view)]


def store_of(place: str) -> str | None:
    """Return `s3` for `s3://bucket/web/*.jsonl`; None for a path, also with `file://`."""
    scheme, separator, _ = place.partition("://")
    return scheme if separator and scheme != "file" and re.fullmatch(r"[A-Za-z][\w+.-]*", scheme) else None


def open_object(url: str) -> StoredObject:
    """Open one object in its present version."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    store = Store(f"{scheme}://{bucket}")
    meta = store.head(key, f"opening {url}")
    if meta is None:
        raise DataError(f"opening {url}: the object is gone. Restore it, or take it out of the list")
    return StoredObject(store, key, size=int(meta["size"]), tag=_tag(meta))


def find_objects(
    place: str, *, suffixes: Sequence[str], packings: Sequence[str] = (), what: str
) -> tuple[Store, str, list[tuple[str, int, str]]]:
    """Return the store of a URL, the URL that the paths of objects are relative to, and the objects in bytewise order.

    Of each object: its path, its size, and its entity tag (where the store gives none, its time of modification).

    Args:
        place: The URL of one object, of a prefix, or with a glob.
        suffixes: Endings of the objects taken below a prefix. Names that start with a dot are left out.
        packings: Endings that may follow a suffix.
        what: Begins errors, such as "source 'jsonl:s3://b/web'".
    """
    scheme, _, rest = place.partition("://")
    bucket, _, path = rest.partition("/")
    store = Store(f"{scheme}://{bucket}")
    web = scheme in ("http", "https")
    parts = [unquote(part) if web else part for part in path.split("/") if part]
    patterns = [i for i, part in enumerate(parts) if any(c in part for c in "*?[")]
    if web and (patterns or path.endswith("/")):
        raise ConfigError(f"{what}: the web cannot be listed, so {place!r} must be one file; give a source for each")
    if not patterns:
        meta = store.head("/".join(parts), what) if parts and not path.endswith("/") else None
        if meta is not None:
            return _listed(store, parts[:-1], [(parts[-1], meta)])
        if web:
            raise DataError(f"{what}: there is nothing at {place}")
        taken = tuple(suffixes) + tuple(own + packed for own in suffixes for packed in packings)
        listed = [
            (relative, meta)
            for relative, meta in _below(store, parts, what)
            if relative.endswith(taken) and not any(part.startswith(".") for part in relative.split("/"))
        ]
        if not listed:
            raise DataError(
                f"{what}: no object ends in {' or '.join(suffixes)} below {place}. Name the objects with a glob such as "
                f"{place.rstrip('/')}/*"
            )
        return _listed(store, parts, listed)
    literal, pattern = parts[: patterns[0]], parts[patterns[0] :]
    listed = [(r, meta) for r, meta in _below(store, literal, what) if fits(r.split("/"), pattern)]
    if not listed:
        raise DataError(f"{what}: no object matches {place!r}. Check the bucket, the prefix and the pattern.")
    return _listed(store, literal, listed)


def pinned_tag(version: str) -> str:
    """Return the tag of objects that never change, because their URL names the `version` of their content."""
    return f'{_PINNED}"{version}"'


def _below(store: Store, parts: Sequence[str], what: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    prefix = "/".join(parts)
    for meta in store.below(prefix, what):
        relative = str(meta["path"]).removeprefix(f"{prefix}/") if prefix else str(meta["path"])
        if relative and not (int(meta["size"]) == 0 and "." not in relative.rpartition("/")[2]):  # a folder's marker
            yield relative, meta


def _listed(
    store: Store, parts: Sequence[str], found: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[Store, str, list[tuple[str, int, str]]]:
    ordered = sorted(found, key=lambda item: item[0].encode())
    objects = [(relative, int(meta["size"]), _tag(meta)) for relative, meta in ordered]
    return store, "/".join([store.root, *parts]), objects


def fits(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the parts of a path match those of a glob. `**` is any number of folders; a leading dot must be in the pattern."""
    ends = {0}  # numbers of names that the pattern may have taken so far: no backtracking, however many `**` there are
    for part in [*pattern, "*"] if pattern and pattern[-1] == "**" else pattern:
        if part == "**":
            for end in range(min(ends), len(names) - 1):
                if end in ends and not names[end].startswith("."):
                    ends.add(end + 1)
        else:
            dots = part.startswith(".")
            ends = {
                end + 1
                for end in ends
                if end < len(names) and (dots or names[end][:1] != ".") and fnmatch.fnmatchcase(names[end], part)
            }
        if not ends:
            return False
    return len(names) in ends


def _tag(meta: Mapping[str, Any]) -> str:
    """The entity tag, or the time of modification where the store gives none."""
    return str(meta.get("e_tag") or meta.get("last_modified") or "")


def _replaced(url: str) -> DataChanged:
    return DataChanged(
        f"{url} was replaced since it was listed: its entity tag is another. Restore the object, or start again with the "
        "new one."
    )


def _said(error: BaseException) -> str:
    """The first line of an error, without the debugging output that obstore appends."""
    text = str(error).split("\n\nDebug source")[0]
    code = _CODE.search(text)
    line = text.splitlines()[0].split(": <?xml")[0] if text else type(error).__name__
    return f"{line[:300]} ({code[1]})" if code else line[:300]
