"""Hashes of chunks that were read: later reads must find the same bytes.

A chunk's hash is recorded when it is first read, in an append-only file that all ranks and later runs share:

    "\\n<chunk id> <hash> <check>"          16 + 16 + 8 hex digits, in one O_APPEND write

Each record begins with its own line feed, so one torn by a dying writer never damages the next. Records that do not parse or fail
their check are ignored. Of several records of a chunk the last holds: that is how a change is accepted.

A chunk's id is made of its file's path and size and its place in it, not of its content, so that the record is found
exactly when bytes changed in place, and a shard that is added or replaced does not orphan the records of the others.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path

import numpy as np
import xxhash

from headrace.errors import DataError, FileCorrupt, StorageError
from headrace.files import open_inside, open_regular, unreadable
from headrace.order import mix64_array
from headrace.sources.manifest import Manifest

_log = logging.getLogger("headrace.sources")
_RECORD = re.compile(rb"(?:\A|\n)([0-9a-f]{16}) ([0-9a-f]{16}) ([0-9a-f]{8})(?=\n|\Z)")
_RECORD_BYTES = 43
_RECORDS_PER_CHUNK = 64
"""Every rank that reads a chunk before it knows of another's record adds one, and so does every accepted change."""
_SMALL_FILE = 64 << 20
"""A file of this size is read whatever it describes: other sources of the same folder share it. That takes 1 s."""
_BLOCK = 1 << 20


class ChunkRecords:
    """The recorded hashes of chunks, by their place in `ids`."""

    def __init__(self, path: Path, ids: np.ndarray) -> None:
        self.path = path
        self._ids = ids
        self._known = np.zeros(len(ids), dtype=bool)
        self._hashes = np.zeros(len(ids), dtype=np.uint64)
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._closed = False
        self.unwritten = 0
        """Hashes that could not be written to the file."""
        self._load()

    def recorded(self, chunk: int) -> int | None:
        """Return the hash on record; None if the chunk was never read."""
        with self._lock:
            return int(self._hashes[chunk]) if self._known[chunk] else None

    def recorded_range(self, start: int, stop: int) -> list[int | None]:
        """Return what `recorded` returns for the chunks [start, stop)."""
        with self._lock:
            known, hashes = self._known[start:stop].tolist(), self._hashes[start:stop].tolist()
        return [value if there else None for there, value in zip(known, hashes, strict=True)]

    def known(self) -> np.ndarray:
        """Return the chunks with a record, ascending."""
        with self._lock:
            return np.flatnonzero(self._known)

    def add(self, chunk: int, value: int, *, on_disk: bool = True) -> None:
        """Record the hash `value` of a chunk. If the disk refuses, later runs cannot check the chunk, and this run goes on.

        `on_disk`: write it to the file too, not only to memory.
        """
        with self._lock:
            self._known[chunk] = True
            self._hashes[chunk] = value
            if self._closed or not on_disk:
                return
            try:
                if self._fd is None:
                    self._fd = open_inside(self.path.parent, self.path.name, os.O_WRONLY | os.O_APPEND)
                record = _record(int(self._ids[chunk]), value)
                if os.write(self._fd, record) != len(record):
                    raise OSError("short write")
            except (OSError, StorageError) as error:
                self.unwritten += 1
                if self.unwritten == 1:
                    _log.warning("chunk hashes are not being recorded in %s: %s", self.path, error)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._fd is not None:
                try:
                    os.fsync(self._fd)
                except OSError as error:
                    _log.warning(
                        "chunk hashes in %s may not survive a power cut: %s", self.path, error.strerror or error
                    )
                finally:
                    os.close(self._fd)
                    self._fd = None

    def _load(self) -> None:
        try:
            with open(open_regular(self.path), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                most = max(_SMALL_FILE, _RECORDS_PER_CHUNK * _RECORD_BYTES * len(self._ids))
                if size > most:
                    raise FileCorrupt(
                        f"{self.path} has {size:,} bytes; for {len(self._ids):,} chunks at most {most:,} are read"
                    )
                order = np.argsort(self._ids)
                rest = b""
                while block := file.read(_BLOCK):
                    records, line_feed, rest = (rest + block).rpartition(b"\n")
                    rest = line_feed + rest[:_BLOCK]
                    self._take(order, *_parse(records))
                self._take(order, *_parse(rest))
        except FileNotFoundError:
            return
        except FileCorrupt as error:
            raise DataError(f"chunk hashes cannot be read: {error}. Move the file aside and run again") from error
        except OSError as error:
            raise unreadable(self.path, error) from error

    def _take(self, order: np.ndarray, ids: np.ndarray, values: np.ndarray) -> None:
        """Take over the records of these chunk ids. `order` sorts the ids of this source."""
        if not ids.size or not self._ids.size:
            return
        place = np.minimum(np.searchsorted(self._ids, ids, sorter=order), self._ids.size - 1)
        chunks = order[place]
        ours = self._ids[chunks] == ids
        self._known[chunks[ours]] = True
        self._hashes[chunks[ours]] = values[ours]  # where an index repeats, numpy keeps the last: the later record


def chunk_ids(manifest: Manifest) -> np.ndarray:
    """Return 64 bits for (path, size, start, end) of every chunk."""
    files = np.array(
        [xxhash.xxh3_64_intdigest(f"{f.size}\0{f.path}".encode()) for f in manifest.files], dtype=np.uint64
    )
    ids = mix64_array(files[manifest.chunk_file] ^ mix64_array(manifest.chunk_start.astype(np.uint64)))
    return mix64_array(ids ^ manifest.chunk_end.astype(np.uint64))


def _check(ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    return mix64_array(ids ^ mix64_array(values)) >> np.uint64(32)


def _record(chunk_id: int, value: int) -> bytes:
    check = int(_check(np.array([chunk_id], dtype=np.uint64), np.array([value], dtype=np.uint64))[0])
    return f"\n{chunk_id:016x} {value:016x} {check:08x}".encode()


def _parse(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """(ids, hashes) of all whole records, in file order; a million take 0.7 s."""
    columns = [b"".join(column) for column in zip(*_RECORD.findall(data), strict=True)] or [b""] * 3
    ids, values, checks = (
        np.frombuffer(bytes.fromhex(column.decode()), dtype).astype(np.uint64)
        for column, dtype in zip(columns, (">u8", ">u8", ">u4"), strict=True)
    )
    sound = _check(ids, values) == checks
    return ids[sound], values[sound]
