"""Fingerprints of files and values: equal fingerprints mean equal inputs.

At start a file is known by its size and a few sampled blocks (64 KiB at the head, at the tail and at keyed places
between: about a millisecond, whatever the size). When a chunk is read, all of its bytes are hashed (xxh3, ~10 GB/s on one
core) and compared with what was recorded the first time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from headrace.order.keys import derive, key

SAMPLED_BLOCK = 64 * 1024
_SAMPLES = 14


def chunk_hash(data: bytes | memoryview) -> int:
    """64 bits over all bytes of a chunk."""
    return xxhash.xxh3_64_intdigest(data)


def fingerprint_json(value: Any) -> str:
    """16 hex digits for a JSON-able value; equal values give equal text on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return f"{xxhash.xxh3_64_intdigest(text.encode()):016x}"


def file_fingerprint(path: Path, size: int) -> str:
    """16 hex digits over the size and up to 16 blocks of the file; files of at most 1 MiB are covered whole."""
    hasher = xxhash.xxh3_64()
    hasher.update(size.to_bytes(8, "little"))
    with open(path, "rb") as handle:
        for start in sampled_offsets(size):
            handle.seek(start)
            hasher.update(handle.read(SAMPLED_BLOCK))
    return hasher.hexdigest()


def sampled_offsets(size: int) -> list[int]:
    if size <= (_SAMPLES + 2) * SAMPLED_BLOCK:
        return list(range(0, size, SAMPLED_BLOCK))
    parent = key("fingerprint.blocks", size=size)
    blocks = size // SAMPLED_BLOCK
    between = {derive(parent, i) % blocks for i in range(_SAMPLES)}
    return sorted({0, size - SAMPLED_BLOCK, *(b * SAMPLED_BLOCK for b in between)})
