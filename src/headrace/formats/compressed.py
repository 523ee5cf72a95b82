"""Compressed text shards, and reading a part of one without unpacking the rest.

    .gz     gzip, one or many members (bgzip)        .zst    zstandard, one or many frames, skippable ones among them

The text is a file like any other to the formats above it: chunks are cut, dealt and read as if it had never been packed.
What makes that cheap are restart points, found when the shard is first looked at:

    text     |--------|---------|--------|----|        text_at     unpacked offsets
    shard    |---|-----|---|------|--|                 packed_at   where unpacking can start afresh

Frames or members of at most 1 MiB of text are such points already, and the shard is read where it lies. One without
them (most are: `gzip` and `zstd` write a single member) is packed anew, once, into zstandard frames of 256 KiB in the
cache: about as large as the shard was, and read at 1 GB/s from anywhere, where the end of a gzip of 1 GB is 4.5 s away.
Making it costs 6 ns a byte of text besides the unpacking, once, shards side by side.

Whatever the header claims, memory is taken piece by piece; a shard that unpacks to 200 times its size, or to a TiB, is
taken for a bomb. All bytes are unpacked when the rows are counted, so a shard that is cut short or corrupt is known then.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import zlib
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from headrace.errors import DataChanged, DataError, FileCorrupt, StorageError
from headrace.files import TEMP_PREFIX, open_container, publish, write_container
from headrace.formats.byte_file import (
    ACCEPT_DATA,
    MAX_RATIO,
    RATIO_COUNTS_FROM,
    ByteFile,
    FileObject,
    RawFile,
    Tally,
    Undecodable,
    WholeReads,
    first_line,
)
from headrace.metrics import Wait
from headrace.order import chunk_hash, fingerprint_json

PACKINGS = (".gz", ".zst")
_VERSION = 1
_BLOCK = 1 << 20
_PIECE = 256 << 10
_LARGEST_UNIT = 1 << 20
_SMALLEST_UNIT = 128 << 10
_MAX_TEXT = 1 << 40
_HELD = 64 << 20
_MAX_WINDOW = 128 << 20
_ZSTD, _SKIPPABLE = 0xFD2FB528, 0x184D2A5
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """Where a shard's text can be entered. Unit i is text_at[i] to text_at[i + 1], packed in packed_at[i] to [i + 1]."""

    packed_at: np.ndarray
    text_at: np.ndarray
    sums: np.ndarray
    """Of a copy: the hash of each packed unit. The shard itself is guarded by the hashes of its chunks (records.py)."""
    text_sum: int
    copy: str
    """File name of the copy in the cache; empty where the shard is read itself."""

    @classmethod
    def of(
        cls, packed_at: list[int], text_at: list[int], text: xxhash.xxh3_64, sums: Sequence[int] = (), copy: str = ""
    ) -> Self:
        places = {"packed_at": np.array(packed_at, np.int64), "text_at": np.array(text_at, np.int64)}
        return cls(**places, sums=np.array(sums, np.uint64), text_sum=text.intdigest(), copy=copy)

    @property
    def text_size(self) -> int:
        return int(self.text_at[-1])


class _NoRestartPoints(Exception):
    """The shard has a member that is too long to be unpacked for a part of it."""


class Unpacker:
    """The compressed shards of one source. Every method may be called from many threads."""

    def __init__(self, cache: Path, tally: Tally, *, fresh: bool = False) -> None:
        """`fresh` looks at every shard again, whatever the cache says."""
        self._folder = cache / "unpacked"
        self._tally = tally
        self._fresh = fresh
        self._lock = threading.Lock()
        self._indexes: dict[str, _Index] = {}
        self._busy: dict[str, threading.Lock] = {}
        self._held: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._held_bytes = 0

    def index(self, key: str, file: ByteFile) -> _Index:
        """The restart points of a shard: known, cached, or found now."""
        with self._lock:
            if key in self._indexes:
                return self._indexes[key]
            busy = self._busy.setdefault(key, threading.Lock())
        with Wait("source.unpack", hidden=True), busy:  # of two threads that want the same shard one looks at it
            with self._lock:
                if key in self._indexes:
                    return self._indexes[key]
            path = self._folder / f"{key}.index"
            index = None if self._fresh else self._cached(path)
            if index is None:
                index = self._made(path, file)
            with self._lock:
                self._indexes[key] = index
                self._busy.pop(key, None)
        return index

    def copy_of(self, index: _Index) -> RawFile:
        return RawFile(self._folder / index.copy, size=int(index.packed_at[-1]), tally=self._tally)

    def verify(self, key: str, file: ByteFile) -> None:
        """Unpack a shard from end to end and compare its text with what was found the first time."""
        index = self.index(key, file)
        hasher = xxhash.xxh3_64()
        try:
            for _, data in _pieces(file):
                hasher.update(data)
        except Undecodable as error:
            raise _changed(file, error.reason) from error
        if hasher.intdigest() != index.text_sum:
            raise _changed(file, "unpacks to another text")

    def unit(self, key: str, index: _Index, number: int, file: ByteFile, shard: ByteFile) -> bytes:
        """The text of one unit, read from `file` (the shard, or its copy). The last 64 MiB are kept."""
        held_as = (key, number)
        with self._lock:
            if held_as in self._held:
                self._held.move_to_end(held_as)
                return self._held[held_as]
        start, end = int(index.packed_at[number]), int(index.packed_at[number + 1])
        size = int(index.text_at[number + 1] - index.text_at[number])
        packed = file.read(start, end - start)
        if index.copy and chunk_hash(memoryview(packed)) != int(index.sums[number]):
            raise DataError(
                f"{file.path}, the unpacked copy of {shard.path}, is damaged at bytes {start:,} to {end:,}. Remove it and run "
                "again: it is made anew."
            )
        text = _unpacked(packed, size, gzip=not index.copy and _packing(shard) == ".gz")
        if text is None:
            raise _changed(shard, f"no longer unpacks at bytes {start:,} to {end:,}")
        with self._lock:
            if held_as not in self._held:
                self._held[held_as] = text
                self._held_bytes += len(text)
                while self._held_bytes > _HELD and len(self._held) > 1:
                    self._held_bytes -= len(self._held.popitem(last=False)[1])
        return text

    # ------------------------------------------------------------------------------- finding restart points

    def _cached(self, path: Path) -> _Index | None:
        if not path.exists():
            return None
        try:
            container = open_container(path)
            meta = container.meta
            index = _Index(
                **{name: np.array(container.arrays[name]) for name in ("packed_at", "text_at", "sums")},
                text_sum=int(meta["text_sum"]),
                copy=str(meta["copy"]),
            )
            if index.copy and (self._folder / index.copy).stat().st_size != int(index.packed_at[-1]):
                return None
        except (FileCorrupt, KeyError, TypeError, ValueError, OSError):
            self._tally.add(cache_damaged=1)
            return None
        return index

    def _made(self, path: Path, file: ByteFile) -> _Index:
        with self._at_hand(file) as local:
            try:
                index = _own_restart_points(local)
            except _NoRestartPoints:
                index = self._copied(path.stem, local)
        arrays = {"packed_at": index.packed_at, "text_at": index.text_at, "sums": index.sums}
        meta = {"kind": "unpacked", "text_sum": index.text_sum, "copy": index.copy}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_container(path, arrays, meta, replace=self._fresh, durable=False)
        except FileExistsError:  # another rank was first, or the one there is of no use: then ours takes its place
            cached = self._cached(path)
            if cached is None:
                write_container(path, arrays, meta, replace=True, durable=False)
            elif index.copy:
                with contextlib.suppress(OSError):
                    os.unlink(self._folder / index.copy)
                index = cached
        except (OSError, StorageError):
            # Without the index the next start finds the points again; a copy without one would only fill the disk.
            self._tally.add(cache_unwritable=1)
        return index

    @contextlib.contextmanager
    def _at_hand(self, file: ByteFile) -> Generator[ByteFile]:
        """A file on disk as it is; an object of a store fetched for the while, because it is walked over twice."""
        if isinstance(file, RawFile):
            yield file
            return
        fetched = self._folder / f"{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with fetched.open("xb") as target:
                for offset in range(0, file.size, 8 << 20):
                    target.write(file.read(offset, min(8 << 20, file.size - offset)))
            with RawFile(fetched, size=file.size, tally=self._tally) as local:
                local.path = file.path  # what an error calls it; it is open already
                yield local
        except OSError as error:
            raise StorageError(
                f"{file.path} is fetched into {self._folder} to be unpacked, which failed: {error.strerror or error}. Make room "
                "there, or choose a folder with cache = ... in the source."
            ) from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(fetched)

    def _copied(self, stem: str, file: ByteFile) -> _Index:
        """Pack the text anew, in units that can be unpacked alone."""
        import pyarrow as pa

        codec = pa.Codec("zstd", compression_level=1)
        packed_at, text_at, sums = [0], [0], []
        hasher = xxhash.xxh3_64()

        def units() -> Iterator[bytes]:
            for text in _even(_pieces(file)):
                packed = codec.compress(text, asbytes=True)
                hasher.update(text)
                packed_at.append(packed_at[-1] + len(packed))
                text_at.append(text_at[-1] + len(text))
                sums.append(chunk_hash(packed))
                yield packed

        copy = f"{stem}-{os.getpid()}-{secrets.token_hex(4)}.zst"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            publish(self._folder / copy, units())
        except (OSError, StorageError) as error:
            raise StorageError(
                f"{file.path} cannot be read from the middle, so it is unpacked once into {self._folder}, which failed: "
                f"{error}. Make room there, or choose a folder with cache = ... in the source."
            ) from error
        self._tally.add(shards_unpacked=1)
        return _Index.of(packed_at, text_at, hasher, sums, copy)


class UnpackedFile(WholeReads):
    """The text of a compressed shard, as a ByteFile."""

    def __init__(self, unpacker: Unpacker, shard: ByteFile, *, identity: Sequence[object]) -> None:
        """`identity`: what tells this shard, as it was when it was listed, from any other."""
        self.path: Path | str = shard.path
        self.size = 0
        self.version: int | str = 0
        self._unpacker = unpacker
        self._shard = shard
        self._key = fingerprint_json([_VERSION, *identity])
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            shard: ByteFile = stack.enter_context(self._shard)
            self.version = shard.version
            self._index = self._unpacker.index(self._key, shard)
            self.size = self._index.text_size
            self._file: ByteFile = (
                stack.enter_context(self._unpacker.copy_of(self._index)) if self._index.copy else shard
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read_into(self, view: memoryview, offset: int) -> None:
        text_at = self._index.text_at
        number = int(np.searchsorted(text_at, offset, side="right")) - 1
        filled = 0
        while filled < len(view):
            text = self._unpacker.unit(self._key, self._index, number, self._file, self._shard)
            start = offset + filled - int(text_at[number])
            taken = min(len(text) - start, len(view) - filled)
            view[filled : filled + taken] = memoryview(text)[start : start + taken]
            filled += taken
            number += 1

    def verify(self) -> None:
        """Compare the shard itself with the text its copy was made of."""
        if self._index.copy:
            self._unpacker.verify(self._key, self._shard)


# ------------------------------------------------------------------------------------------ streams of text


def _packing(file: ByteFile) -> str:
    return next(p for p in PACKINGS if str(file.path).endswith(p))


def _changed(file: ByteFile, how: str) -> DataChanged:
    return DataChanged(
        f"{file.path} {how}: it was written to since its rows were counted. Restore it, or {ACCEPT_DATA}."
    )


def _pieces(file: ByteFile) -> Iterator[tuple[int, bytes]]:
    """(where its member begins in the shard, text) piece by piece; Undecodable as soon as something is wrong."""
    stream = _gzip_pieces if _packing(file) == ".gz" else _zstd_pieces
    total = 0
    for start, consumed, data in stream(file):
        total += len(data)
        if total > RATIO_COUNTS_FROM and total > MAX_RATIO * consumed:
            raise Undecodable(
                file.path,
                f"unpacks to more than {MAX_RATIO} times its size ({total:,} bytes of text from the first {consumed:,})",
                "That is how a decompression bomb looks; if the text is meant, unpack it yourself",
            )
        if total > _MAX_TEXT:
            raise Undecodable(
                file.path, f"unpacks to more than {_MAX_TEXT:,} bytes", "Cut it into smaller shards"
            )  # fmt: skip
        yield start, data


def _even(pieces: Iterator[tuple[int, bytes]]) -> Iterator[bytes]:
    """The same text in pieces of 256 KiB."""
    held = bytearray()
    for _, data in pieces:
        held += data
        while len(held) >= _PIECE:
            yield bytes(held[:_PIECE])
            del held[:_PIECE]
    if held:
        yield bytes(held)


def _own_restart_points(file: ByteFile) -> _Index:
    """Members or frames as they are, small ones joined. _NoRestartPoints as soon as one is too long."""
    packed_at, text_at = [0], [0]
    hasher = xxhash.xxh3_64()
    total, member = 0, 0
    for start, data in _pieces(file):
        if start != member:
            member = start
            if total - text_at[-1] >= _SMALLEST_UNIT:
                packed_at.append(start)
                text_at.append(total)
        total += len(data)
        hasher.update(data)
        if total - text_at[-1] > _LARGEST_UNIT:
            raise _NoRestartPoints
    if total > text_at[-1]:
        packed_at.append(file.size)
        text_at.append(total)
    return _Index.of(packed_at, text_at, hasher)


def _unpacked(packed: bytearray, size: int, *, gzip: bool) -> bytes | None:
    """Exactly `size` bytes of text, or None. Never takes more memory than that."""
    if not gzip:
        import pyarrow as pa

        try:
            return pa.Codec("zstd").decompress(packed, decompressed_size=size, asbytes=True)
        except (pa.ArrowException, OSError):
            return None
    parts: list[bytes] = []
    left: bytes | bytearray = packed
    while left and size >= 0:
        member = zlib.decompressobj(31)
        try:
            parts.append(member.decompress(left, size + 1))
        except zlib.error:
            return None
        size -= len(parts[-1])
        if not member.eof:
            return None
        left = member.unused_data if member.unused_data.strip(b"\0") else b""
    return b"".join(parts) if size == 0 else None


def _gzip_pieces(file: ByteFile) -> Iterator[tuple[int, int, bytes]]:
    """(start of the member, bytes of the shard used so far, text)."""
    at, held = 0, b""

    def more() -> bool:
        nonlocal at, held
        if not held and at < file.size:
            held = bytes(file.read(at, min(_BLOCK, file.size - at)))
            at += len(held)
        return bool(held)

    while more():
        start = at - len(held)
        if start and not held.strip(b"\0"):  # what tapes and block devices leave behind the last member
            held = b""
            continue
        if not held.startswith(_GZIP[: len(held)]):
            what = "is no gzip file" if start == 0 else f"is damaged: at byte {start:,} no gzip member begins"
            raise Undecodable(file.path, what)
        member = zlib.decompressobj(31)
        while not member.eof:
            ended = not more()
            try:
                data = member.decompress(held, _PIECE)
            except zlib.error as error:
                raise Undecodable(
                    file.path, f"is damaged: gzip fails near byte {at - len(held):,} ({first_line(error)})"
                ) from error
            held = member.unused_data if member.eof else member.unconsumed_tail
            if ended and not data and not member.eof:
                raise Undecodable(
                    file.path,
                    f"is cut short: it ends at byte {file.size:,} within the gzip member that begins at {start:,}",
                )
            yield start, at - len(held), data


def _zstd_pieces(file: ByteFile) -> Iterator[tuple[int, int, bytes]]:
    """As above. The frames' ends are read off their block headers, so each is handed to the decoder alone."""
    import pyarrow as pa

    at = 0
    while at < file.size:
        end, skippable = _zstd_frame(file, at)
        if not skippable:
            inside = FileObject(file.read, file.size, at, end)
            try:
                with pa.CompressedInputStream(pa.PythonFile(inside, mode="r"), "zstd") as stream:
                    while data := stream.read(_PIECE):
                        yield at, inside.at, data
            except (pa.ArrowException, OSError) as error:
                raise Undecodable(
                    file.path,
                    f"is damaged: the zstandard frame at bytes {at:,} to {end:,} cannot be unpacked ({first_line(error)})",
                ) from error
        at = end


def _zstd_frame(file: ByteFile, at: int) -> tuple[int, bool]:
    """(where the frame that begins at `at` ends, whether it holds no text), from its header and its blocks' headers."""

    def number(offset: int, size: int) -> int:
        if offset + size > file.size:
            raise Undecodable(
                file.path,
                f"is cut short: it ends at byte {file.size:,} within the zstandard frame that begins at {at:,}",
            )
        return int.from_bytes(file.read(offset, size), "little")

    magic = number(at, 4)
    if magic >> 4 == _SKIPPABLE:
        end = at + 8 + number(at + 4, 4)
        number(end, 0)
        return end, True
    if magic != _ZSTD:
        what = "is no zstandard file" if at == 0 else f"is damaged: at byte {at:,} no zstandard frame begins"
        raise Undecodable(file.path, what)
    descriptor = number(at + 4, 1)
    single, checked = descriptor >> 5 & 1, descriptor >> 2 & 1
    dictionary = (0, 1, 2, 4)[descriptor & 3]
    content = (single, 2, 4, 8)[descriptor >> 6]
    here = at + 5
    if not single:
        window = number(here, 1)
        here += 1
        if (1 << 10 + (window >> 3)) * (8 + (window & 7)) // 8 > _MAX_WINDOW:
            raise Undecodable(
                file.path,
                f"needs a window of more than {_MAX_WINDOW:,} bytes to be unpacked",
                "Pack it again without --long or --ultra",
            )
    if dictionary and number(here, dictionary):
        raise Undecodable(file.path, "was packed with a zstandard dictionary", "Pack it again without one")
    here += dictionary + content
    last = False
    while not last:
        header = number(here, 3)
        last, kind = bool(header & 1), header >> 1 & 3
        here += 3 + (1 if kind == 1 else header >> 3)
    here += 4 * checked
    number(here, 0)
    return here, False
