"""The message between worker and coordinator: the Gram of a chunk or of a span of chunks, never rows.

    NodeWorker.compute makes it, CrossNodeGramReduction.receive takes it

    magic, version, lengths │ xxh3-128 of what follows │ JSON: chunk, rank, partition, pass │ k(k+1)/2 doubles
             20 bytes               16 bytes                  padded to 64 bytes                   little-endian

A message names its pass and how its sums were rounded. Lengths are compared with what arrived before anything is allocated, and
the checksum before the header is parsed. The numbers are then used where they lie.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import xxhash

from headrace.errors import DataError
from headrace.reduce.partition import Provenance

_MAGIC = b"HRGP"
_VERSION = 1
_PREFIX = struct.Struct("<4sIIQ")  # magic, version, header bytes, payload bytes
_HEAD = _PREFIX.size + 16
_MAX_HEADER = 1 << 16


class _Header(msgspec.Struct, kw_only=True):
    """The JSON of a message."""

    chunk: int
    chunks: int
    rank: int
    partition: str
    first_entry: int
    provenance: Provenance = msgspec.field(name="pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePartial:
    """One shipped partial."""

    chunk: int
    """Index of its first chunk."""
    chunks: int
    """How many it sums: 1, or a span."""
    rank: int
    partition: str
    """Fingerprint of the partition it was made for."""
    provenance: Provenance
    gram: np.ndarray = field(repr=False)
    """The upper triangle, f64; or the part of it that one coordinator takes."""
    first_entry: int = 0
    """Where `gram` starts in the whole triangle."""

    @property
    def digest(self) -> int:
        """64 bits over the numbers: a retry has the same ones."""
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(self.gram, "<f8").view(np.uint8).data)

    def cut(self, start: int, end: int) -> NodePartial:
        """The entries [start, end) of it, for the coordinator that folds those."""
        at = self.first_entry
        if not at <= start <= end <= at + len(self.gram):
            raise DataError(f"entries {start} … {end} were asked of a partial that holds {at} … {at + len(self.gram)}")
        return replace(self, gram=self.gram[start - at : end - at], first_entry=start)

    def to_bytes(self) -> bytes:
        payload = np.ascontiguousarray(self.gram, "<f8").view(np.uint8).data
        header = msgspec.json.encode(msgspec.convert(self, _Header, from_attributes=True))
        header += b" " * (-(_HEAD + len(header)) % 64)
        check = xxhash.xxh3_128()
        prefix = _PREFIX.pack(_MAGIC, _VERSION, len(header), payload.nbytes)
        for part in (prefix, header, payload):
            check.update(part)
        return b"".join((prefix, check.digest(), header, payload))

    @classmethod
    def from_bytes(cls, message: bytes | bytearray | memoryview, *, sender: str = "a worker") -> NodePartial:
        """Check a message and read it in place."""
        view = memoryview(message).cast("B")
        what = f"a partial from {sender}"
        if len(view) < _HEAD:
            raise DataError(f"{what} is truncated: {len(view)} bytes arrived, its head alone has {_HEAD}")
        magic, version, header_len, payload_len = _PREFIX.unpack_from(view)
        if magic != _MAGIC or version != _VERSION:
            raise DataError(f"{what} is not a partial of version {_VERSION}: it begins with {bytes(view[:8])!r}")
        if header_len > _MAX_HEADER or payload_len % 8 or len(view) != _HEAD + header_len + payload_len:
            raise DataError(
                f"{what} is truncated or damaged: it announces {_HEAD + header_len + payload_len:,} bytes, {len(view):,} arrived"
            )
        check = xxhash.xxh3_128(view[: _PREFIX.size])
        check.update(view[_HEAD:])
        if check.digest() != bytes(view[_PREFIX.size : _HEAD]):
            raise DataError(f"{what} is damaged: it fails its checksum. Send it again")
        try:
            header = msgspec.json.decode(view[_HEAD : _HEAD + header_len], type=_Header)
        except (ValueError, RecursionError) as error:  # of msgspec too
            raise DataError(f"{what} has an unreadable header: {error}") from error
        return cls(gram=np.frombuffer(view[_HEAD + header_len :], "<f8"), **msgspec.structs.asdict(header))
