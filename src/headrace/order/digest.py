"""Digest of delivered samples: equal digests mean that two runs saw the same data.

    digest = Σ over delivered samples of hash128(content, sample index)    (mod 2**128)

A sum does not depend on which rank delivered a sample, so one process, three ranks and a run that was killed and resumed on
another shape all end with the same number. Per step it tells where two runs parted. It guards against accidents, not
against forgery.
"""

from __future__ import annotations

import numpy as np
import xxhash

_MASK = (1 << 128) - 1


def content_hash(*parts: np.ndarray | bytes) -> bytes:
    """16 bytes for the content of one sample; the boundaries between parts count."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        view = memoryview(part if isinstance(part, bytes) else part.tobytes())
        hasher.update(len(view).to_bytes(8, "little"))
        hasher.update(view)
    return hasher.digest()


def sample_term(sample_index: int, content: bytes) -> int:
    """What one delivered sample adds to the digest."""
    return xxhash.xxh3_128_intdigest(content + sample_index.to_bytes(8, "little"))


class Digest:
    """A running 128-bit sum, starting at `value`: an integer, or 32 hexadecimal digits."""

    __slots__ = ("value",)

    def __init__(self, value: int | str = 0) -> None:
        self.value = (int(value, 16) if isinstance(value, str) else value) & _MASK

    def add(self, term: int) -> None:
        self.value = (self.value + term) & _MASK

    def __add__(self, other: Digest) -> Digest:
        return Digest(self.value + other.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digest) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __str__(self) -> str:
        return f"{self.value:032x}"

    def __repr__(self) -> str:
        return f"Digest({str(self)!r})"
