"""Compressed text shards: .gz (gzip, one member or many) and .zst (zstandard, one frame or many).

A compressed shard cannot be read from the middle. So it is packed anew, once, into zstandard frames of 256 KiB of text in the cache:

    text     |--------|---------|--------|----|        text_at     where each frame begins in the text
    copy     |---|-----|---|------|--|                 packed_at   where it begins in the copy

The copy is about as large as the shard. To the formats above, its text is a file like any other (`UnpackedFile`). The shard itself is not
read again as long as its size, time of modification and sampled blocks stay the same.

Memory is taken piece by piece, whatever a header claims. A shard that unpacks to 200 times its size, or to a TiB, is refused as a
decompression bomb. All bytes are unpacked before the rows are counted, so a shard that is cut short or damaged is known then.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from headrace.errors import DataError, FileCorrupt, StorageError
from headrace.files import open_container, publish, write_container
from headrace.formats.byte_file import (
    MAX_RATIO,
    RATIO_COUNTS_FROM,
    ByteFile,
    FileObject,
    RawFile,
    Undecodable,
    first_line,
)
from headrace.metrics import Wait
from headrace.order import chunk_hash, fingerprint_json

PACKINGS = (".gz", ".zst")
_VERSION = 1
_FRAME_TEXT = 256 << 10
"""Bytes of text in a frame of the copy."""
_MAX_TEXT = 1 << 40
_FRAMES_HELD = 256
"""Unpacked frames that are kept in memory: 64 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """The frames of a copy. Frame i holds text [text_at[i], text_at[i + 1]) in bytes [packed_at[i], packed_at[i + 1])."""

    packed_at: np.ndarray
    text_at: np.ndarray
    sums: np.ndarray
    """Hash of each packed frame."""
    copy: str
    """File name of the copy."""


class Unpacker:
    """Makes and reads the copies of the compressed shards of one source. Every method may be called from many threads."""

    def __init__(self, cache: Path, *, fresh: bool = False) -> None:
        """Args:
        cache: Cache folder of the source; copies lie in its folder `unpacked`.
        fresh: Make every copy anew, also where the cache has one.
        """
        self._folder = cache / "unpacked"
        self._fresh = fresh
        self._indexes: dict[str, _Index] = {}
        self.frame = functools.lru_cache(_FRAMES_HELD)(self._frame)

    def index(self, key: str, shard: ByteFile) -> _Index:
        """Return the index of a shard's copy. The copy is made now if the cache has none."""
        if key in self._indexes:
            return self._indexes[key]
        path = self._folder / f"{key}.index"
        with Wait("source.unpack", hidden=True):
            index = None if self._fresh else self._cached(path)
            if index is None:
                index = self._made(path, shard)
        self._indexes[key] = index
        return index

    def _frame(self, key: str, number: int, shard: str) -> bytes:
        """Return the text of one frame, read from the copy. `shard` names the compressed file in errors."""
        import pyarrow as pa

        index = self._indexes[key]
        start, end = int(index.packed_at[number]), int(index.packed_at[number + 1])
        size = int(index.text_at[number + 1] - index.text_at[number])
        copy = RawFile(self._folder / index.copy, size=int(index.packed_at[-1]))
        with copy:
            packed = copy.read(start, end - start)
        if chunk_hash(memoryview(packed)) != int(index.sums[number]):
            raise DataError(
                f"{copy.path}, the unpacked copy of {shard}, is damaged at bytes {start:,} to {end:,}. Remove it and run "
                "again: it is made anew."
            )
        return pa.Codec("zstd").decompress(packed, decompressed_size=size, asbytes=True)

    def _cached(self, path: Path) -> _Index | None:
        """The index in the cache; None if there is none of use."""
        if not path.exists():
            return None
        try:
            container = open_container(path)
            index = _Index(
                **{name: np.array(container.arrays[name]) for name in ("packed_at", "text_at", "sums")},
                copy=str(container.meta["copy"]),
            )
            # Version 0.2 named no copy where it read a shard in place.
            is_whole = index.copy and (self._folder / index.copy).stat().st_size == int(index.packed_at[-1])
        except (FileCorrupt, KeyError, TypeError, ValueError, OSError):
            return None
        return index if is_whole else None

    def _made(self, path: Path, shard: ByteFile) -> _Index:
        """Make the copy of a shard, and its index. Ranks that do so at once write the same bytes; the last replace the others."""
        index = self._copied(path.stem, shard)
        arrays = {"packed_at": index.packed_at, "text_at": index.text_at, "sums": index.sums}
        with contextlib.suppress(OSError, StorageError):  # without an index the next start makes the copy again
            write_container(path, arrays, {"kind": "unpacked", "copy": index.copy}, replace=True, durable=False)
        return index

    def _copied(self, stem: str, shard: ByteFile) -> _Index:
        """Pack the text of a shard into frames that can be unpacked alone."""
        import pyarrow as pa

        codec = pa.Codec("zstd", compression_level=1)
        packed_at, text_at, sums = [0], [0], []

        def frames() -> Iterator[bytes]:
            for text in _pieces(shard):
                packed = codec.compress(text, asbytes=True)
                packed_at.append(packed_at[-1] + len(packed))
                text_at.append(text_at[-1] + len(text))
                sums.append(chunk_hash(packed))
                yield packed

        copy = f"{stem}.zst"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            publish(
                self._folder / copy, frames(), replace=True, durable=False
            )  # what a power cut damages fails its sums
        except (OSError, StorageError) as error:
            raise StorageError(
                f"{shard.path} cannot be read from the middle, so it is unpacked once into {self._folder}, which failed: "
                f"{error}. Make room there, or choose a folder with cache = ... in the source."
            ) from error
        return _Index(
            packed_at=np.array(packed_at, np.int64),
            text_at=np.array(text_at, np.int64),
            sums=np.array(sums, np.uint64),
            copy=copy,
        )


class UnpackedFile(ByteFile):
    """The text of a compressed shard, as a ByteFile."""

    def __init__(self, unpacker: Unpacker, shard: ByteFile, *, identity: Sequence[object]) -> None:
        """Args:
        unpacker: Makes and reads the copy.
        shard: The compressed file.
        identity: Values that tell this shard, as it was when it was listed, from any other.
        """
        self.path: Path | str = shard.path
        self.size = 0
        self.version: int | str = 0
        self._unpacker = unpacker
        self._shard = shard
        self._key = fingerprint_json([_VERSION, *identity])

    def __enter__(self) -> Self:
        with self._shard as shard:  # refuses a shard that changed since it was listed
            self.version = shard.version
            self._index = self._unpacker.index(self._key, shard)
        self.size = int(self._index.text_at[-1])
        return self

    def read_into(self, view: memoryview, offset: int) -> None:
        text_at = self._index.text_at
        number = int(np.searchsorted(text_at, offset, side="right")) - 1
        filled = 0
        while filled < len(view):
            text = self._unpacker.frame(self._key, number, str(self.path))
            start = offset + filled - int(text_at[number])
            taken = min(len(text) - start, len(view) - filled)
            view[filled : filled + taken] = memoryview(text)[start : start + taken]
            filled += taken
            number += 1


def _pieces(shard: ByteFile) -> Iterator[bytes]:
    """Yield the text of a shard in pieces of 256 KiB. Undecodable as soon as something is wrong."""
    import pyarrow as pa

    packing = "gzip" if str(shard.path).endswith(".gz") else "zstd"
    if not shard.size:
        raise Undecodable(shard.path, f"is cut short: it is empty, and a {packing} file has a header at least")
    packed = FileObject(shard.read, shard.size)
    total = 0
    try:
        with pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), packing) as stream:
            while text := stream.read(_FRAME_TEXT):
                total += len(text)
                _check_size(shard, total, packed.at)
                yield text
    except (pa.ArrowException, OSError) as error:
        reason = first_line(error)
        what = "is cut short" if reason.startswith("Truncated") else f"is damaged, or is no {packing} file"
        raise Undecodable(
            shard.path, f"{what}: {packing} cannot unpack it near byte {packed.at:,} of {shard.size:,} ({reason})"
        ) from error


def _check_size(shard: ByteFile, total: int, consumed: int) -> None:
    """Refuse a shard of which `consumed` bytes unpacked to `total` bytes of text, if that is too much."""
    if total > RATIO_COUNTS_FROM and total > MAX_RATIO * consumed:
        raise Undecodable(
            shard.path,
            f"unpacks to more than {MAX_RATIO} times its size ({total:,} bytes of text from the first {consumed:,})",
            "That is how a decompression bomb looks; if the text is meant, unpack it yourself",
        )
    if total > _MAX_TEXT:
        raise Undecodable(shard.path, f"unpacks to more than {_MAX_TEXT:,} bytes", "Cut it into smaller shards")
