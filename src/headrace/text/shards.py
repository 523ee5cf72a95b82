"""Prepared tokens on disk: shards that are mapped, an index of blocks, and a manifest.

    prepared/web-mix/
      manifest.json                        sources, shards, counts, checksums, tokenizer; published last
      best_fit-2048.json                   blocks per shard for one seq_len, published after the files it counts
      tokens/web/tokens-00000.safetensors  tokens, document offsets, a checksum for every 4,096 tokens
      tokens/web/best_fit-2048-00000.…     the pieces of every block of that shard

Documents are in row order with their BOS and EOS, and none is divided between shards. So a shard serves every seq_len
and both ways of packing: a `concat` block is a run of tokens, a `best_fit` block is a few runs found through the index.
Tokens in packed order would make every block one run, but for one seq_len only; reading the runs of a
block costs little more than reading one (benchmarks/prepared.py).

Everything is checked before it is used: the header and the small arrays when a shard is mapped, every segment of tokens
the first time a block needs it. A file that is cut short while it is mapped ends the process (SIGBUS); sizes are
compared when a folder is opened, and nothing here shortens a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import xxhash

from headrace.errors import DataError, FileCorrupt
from headrace.files import open_container, publish, read_json, write_container
from headrace.order import fingerprint_json
from headrace.runtime.compiled import wait_for_kernels
from headrace.text.block_layout import best_fit
from headrace.text.pack import Packing, place_best_fit, token_stream
from headrace.text.token_batch import TokenBatch

MANIFEST = "manifest.json"
SHARD_FOLDER = "tokens"
"""Holds a folder for every source, so that the name of a source cannot be that of another file."""
WINDOW_BLOCKS = 2048
"""Documents are packed in runs of this many blocks. Long runs leave less padding: 0.04 % where runs of 64 blocks leave 1.1 %
(seq_len 2,048, log-normal documents, median 400)."""
SEGMENT = 4096
"""Tokens that share a checksum. 8 KiB of uint16: a block of 2,048 tokens touches one or two."""
_KIND, _VERSION = "headrace-prepared", 2
"""Version 1 had checksums of its own; version 2 has xxh3_64."""
_MAX_JSON = 256 << 20
# What `msgspec.convert` checks when a manifest or the header of a shard is read.
Name = Annotated[str, msgspec.Meta(pattern=r"\A(?!\.+\Z)[\w.+-]{1,128}\Z")]
"""The plain name of a file or folder; the names of sources are such."""
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


def token_dtype(vocab_size: int) -> np.dtype:
    """Return uint16 if every id fits, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def lay_documents(batch: TokenBatch, packing: Packing, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return documents joined end to end, with BOS and EOS as the packing says, and the token count of each."""
    return token_stream([batch], packing).astype(dtype), packing.lengths(batch.counts())


# ------------------------------------------------------------------------------------------------ shards


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """The entry of a shard in the manifest."""

    file: Name
    first_row: Count
    """Row of the source at which the shard begins; it holds `rows` rows from there on, in order."""
    rows: Count
    documents: Count
    """Rows that have tokens."""
    bad: Count
    """Rows that were left out because on_bad = "skip"."""
    tokens: Count
    size: Count
    """Bytes of the file."""
    sum: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    """32 hex digits over tokens and offsets."""


@dataclass(frozen=True, slots=True)
class TokenShard:
    """A mapped shard. Its tokens are checked segment by segment as they are read; the other arrays when it is mapped."""

    entry: ShardEntry
    tokens: np.ndarray
    offsets: np.ndarray
    """int64 [rows + 1]: row d holds tokens [offsets[d], offsets[d + 1])."""
    segment_sums: np.ndarray
    segment_docs: np.ndarray
    """int64: the row that holds each segment's first token."""


def shard_name(number: int) -> str:
    return f"tokens-{number:05d}.safetensors"


def write_shard(
    path: Path, tokens: np.ndarray, lengths: np.ndarray, *, first_row: int, bad: int, about: Mapping[str, Any]
) -> ShardEntry:
    """Publish a shard and return its entry for the manifest. The same documents always give the same bytes.

    Args:
        path: The file.
        tokens, lengths: As `lay_documents` returns them.
        first_row: Row of the source at which the shard begins.
        bad: Rows that were left out.
        about: More values for the header.
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    starts = np.arange(0, len(tokens), SEGMENT, dtype=np.int64)
    tokens = np.ascontiguousarray(tokens)
    sums = np.array([segment_sum(tokens, n) for n in range(len(starts))], np.uint64)
    docs = np.searchsorted(offsets, starts, side="right").astype(np.int64) - 1
    content = xxhash.xxh3_128(tokens.dtype.str.encode())
    content.update(tokens.data)
    content.update(offsets.data)
    counts = {
        "first_row": first_row, "rows": len(lengths), "documents": int(np.count_nonzero(lengths)), "bad": bad,
        "tokens": len(tokens), "sum": content.hexdigest(),
    }  # fmt: skip
    arrays = {"tokens": tokens, "offsets": offsets, "segment_sums": sums, "segment_docs": docs}
    meta = {
        "kind": "tokens", "version": _VERSION, "segment": SEGMENT, **counts, "index": _sum_of(offsets, sums, docs), **about,
    }  # fmt: skip
    write_container(path, arrays, meta)
    return ShardEntry(file=path.name, size=path.stat().st_size, **counts)


def open_shard(path: Path, expected: ShardEntry | None = None, *, full: bool = False) -> TokenShard:
    """Map a shard. `expected`: its entry in the manifest. `full`: read and check all of it now."""
    container = open_container(path, verify=full)
    try:
        meta, arrays = container.meta, container.arrays
        entry = msgspec.convert({**meta, "file": path.name, "size": path.stat().st_size}, ShardEntry)
        tokens, offsets = arrays["tokens"], arrays["offsets"]
        sums, docs = arrays["segment_sums"], arrays["segment_docs"]
        parts = -(-len(tokens) // SEGMENT)
        sound = (
            (meta["kind"], meta["version"], meta["segment"]) == ("tokens", _VERSION, SEGMENT)
            and (len(tokens), len(offsets), len(sums), len(docs)) == (entry.tokens, entry.rows + 1, parts, parts)
            and tokens.dtype in (np.dtype("<u2"), np.dtype("<u4"))
            and (offsets.dtype, sums.dtype, docs.dtype) == (np.int64, np.uint64, np.int64)
            and _sum_of(offsets, sums, docs) == meta["index"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FileCorrupt(f"{path} is not a shard of tokens: {type(error).__name__} {error}. {_REMEDY}") from error
    if not sound:
        raise FileCorrupt(f"{path} is damaged: its counts, types or document offsets do not fit its header. {_REMEDY}")
    if expected is not None and entry != expected:
        raise FileCorrupt(
            f"{path} is not the shard that the manifest names: expected {expected.tokens:,} tokens with checksum {expected.sum}, "
            f"found {entry.tokens:,} with {entry.sum}. {_REMEDY}"
        )
    return TokenShard(entry, tokens, offsets, sums, docs)


_REMEDY = (
    "Run `headrace prepare` again with the same config: it keeps the shards that are whole and makes this one anew"
)


def segment_sum(tokens: np.ndarray, number: int) -> int:
    """The checksum of a segment: xxh3_64 over its bytes."""
    return xxhash.xxh3_64_intdigest(tokens[number * SEGMENT : (number + 1) * SEGMENT].data)


def _sum_of(*arrays: np.ndarray) -> str:
    hasher = xxhash.xxh3_128()
    for array in arrays:
        hasher.update(np.ascontiguousarray(array).data)
    return hasher.hexdigest()


# ------------------------------------------------------------------------------------------ packed index


@dataclass(frozen=True, slots=True)
class PackedShard:
    """The blocks of one shard: block b is pieces [block_ptr[b], block_ptr[b + 1])."""

    block_ptr: np.ndarray
    piece_at: np.ndarray
    """int64: the piece's first token in the shard."""
    piece_len: np.ndarray
    """int32: how many tokens; negative where the document ends with this piece."""

    def __len__(self) -> int:
        return len(self.block_ptr) - 1


def pack_shard(offsets: np.ndarray, seq_len: int) -> PackedShard:
    """Pack a shard's documents by best fit decreasing, in runs that fill 2,048 blocks. A pure function of the documents' lengths."""
    wait_for_kernels(best_fit)
    lengths = np.diff(offsets).astype(np.int64)
    ptrs: list[np.ndarray] = [np.zeros(1, np.int64)]
    ats: list[np.ndarray] = [np.empty(0, np.int64)]
    lens: list[np.ndarray] = [np.empty(0, np.int32)]
    first, pieces_before, budget = 0, 0, WINDOW_BLOCKS * seq_len
    while first < len(lengths):
        stop = int(np.searchsorted(offsets, offsets[first] + budget, side="right")) - 1
        stop = max(stop, first + 1)
        window = np.ascontiguousarray(lengths[first:stop])
        placed = place_best_fit(window, seq_len)
        order = np.argsort(placed.bin_of * (len(window) + 1) + placed.doc)
        doc, start, length = placed.doc[order], placed.start[order], placed.length[order]
        ptr = np.cumsum(np.bincount(placed.bin_of, minlength=placed.bins))
        closes = start + length == window[doc]
        ats.append(offsets[first + doc] + start)
        lens.append(np.where(closes, -length, length).astype(np.int32))
        ptrs.append(ptr + pieces_before)
        pieces_before += len(doc)
        first = stop
    return PackedShard(np.concatenate(ptrs), np.concatenate(ats), np.concatenate(lens))


def packed_name(seq_len: int, number: int) -> str:
    return f"best_fit-{seq_len}-{number:05d}.safetensors"


def write_packed(path: Path, packed: PackedShard, *, seq_len: int, of: ShardEntry) -> None:
    """Publish the index of one shard."""
    arrays = {"block_ptr": packed.block_ptr, "piece_at": packed.piece_at, "piece_len": packed.piece_len}
    write_container(path, arrays, _packed_meta(seq_len, of), replace=True)


def open_packed(path: Path, *, seq_len: int, of: ShardEntry) -> PackedShard:
    """Map the index of one shard and check all of it: it is a fiftieth of the tokens' size."""
    container = open_container(path)
    arrays = container.arrays
    if container.meta != _packed_meta(seq_len, of):
        raise FileCorrupt(f"{path} is an index of other tokens, or of another packing, than {of.file}. {_REMEDY}")
    types = {"block_ptr": np.int64, "piece_at": np.int64, "piece_len": np.int32}
    if {n: a.dtype for n, a in arrays.items()} != types or any(a.ndim != 1 for a in arrays.values()):
        raise FileCorrupt(f"{path} is damaged: its arrays are not those of an index. {_REMEDY}")
    packed = PackedShard(**arrays)
    if not len(packed.block_ptr) or len(packed.piece_at) != len(packed.piece_len):
        raise FileCorrupt(f"{path} is damaged: its arrays do not fit each other. {_REMEDY}")
    return packed


def _packed_meta(seq_len: int, of: ShardEntry) -> dict[str, Any]:
    return {
        "kind": "packed", "version": _VERSION, "strategy": "best_fit", "seq_len": seq_len, "window": WINDOW_BLOCKS,
        "tokens": of.tokens, "sum": of.sum,
    }  # fmt: skip


def write_packed_counts(folder: Path, seq_len: int, data: str, blocks: Mapping[str, Sequence[int]]) -> None:
    """Publish the number of blocks of each shard. It is the last file of an index: from here on the index is complete."""
    body = {"kind": "headrace-packed", "version": _VERSION, "seq_len": seq_len, "window": WINDOW_BLOCKS, "data": data,
            "blocks": {name: [int(n) for n in counts] for name, counts in blocks.items()}}  # fmt: skip
    publish_checked(folder / f"best_fit-{seq_len}.json", body)


def read_packed_counts(folder: Path, seq_len: int, manifest: PreparedManifest) -> dict[str, tuple[int, ...]] | None:
    """Blocks per shard of every source, or None if this packing was not made yet (or was made of other tokens)."""
    path = folder / f"best_fit-{seq_len}.json"
    if not path.exists():
        return None
    body = read_checked(path, "headrace-packed")
    if (body.get("data"), body.get("seq_len"), body.get("window")) != (manifest.data, seq_len, WINDOW_BLOCKS):
        return None
    try:
        found = {str(name): tuple(int(n) for n in counts) for name, counts in body["blocks"].items()}
        if any(len(found[s.name]) != len(s.shards) or min(found[s.name], default=0) < 0 for s in manifest.sources):
            raise ValueError("another number of shards than the manifest")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileCorrupt(f"{path} is damaged: {error}. Delete it: it is made again when it is needed.") from error
    return found


# --------------------------------------------------------------------------------------------- manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSource:
    """One source of a prepared folder."""

    name: Name
    spec: str
    weight: Annotated[float, msgspec.Meta(ge=0)]
    max_epochs: int | None
    max_tokens: int | None
    data: str
    """Fingerprint of the files that were read."""
    files: tuple[tuple[str, int], ...]
    """(path, rows) in row order: where a row came from."""
    shards: tuple[ShardEntry, ...]

    def __post_init__(self) -> None:
        at = 0
        for shard in self.shards:
            if shard.first_row != at:
                raise ValueError(f"shard {shard.file} of {self.name!r} begins at row {shard.first_row}, expected {at}")
            at += shard.rows

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.shards)

    @property
    def documents(self) -> int:
        return sum(s.documents for s in self.shards)

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedManifest:
    """What a prepared folder holds."""

    tokenizer: str
    """Fingerprint."""
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    bos_id: int | None
    eos_id: int | None
    pad_id: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    seq_len: Annotated[int, msgspec.Meta(ge=2)]
    pack: Literal["best_fit", "concat"]
    """The config's packing, which readers use unless they choose another."""
    sources: tuple[PreparedSource, ...]

    def __post_init__(self) -> None:
        names = [s.name for s in self.sources]
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"a prepared folder needs sources of different names, got {names}")

    @property
    def data(self) -> str:
        """16 hex digits over the tokens alone: weights and limits may change, the blocks stay."""
        return fingerprint_json([[s.name, [e.sum for e in s.shards]] for s in self.sources])

    def write(self, folder: Path) -> None:
        publish_checked(folder / MANIFEST, {"kind": _KIND, "version": _VERSION, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> PreparedManifest:
        """Read and check the manifest of a folder. No entry can name a file outside it."""
        path = folder / MANIFEST
        if not path.exists():
            raise DataError(
                f"{folder} holds no prepared data (it has no {MANIFEST}): make it with `headrace prepare CONFIG --out {folder}`"
            )
        body = read_checked(path, _KIND)
        try:
            return msgspec.convert(body, cls)
        except ValueError as error:  # of msgspec too
            raise FileCorrupt(f"{path} does not describe prepared data: {error}. {_REMEDY}.") from error


def publish_checked(path: Path, body: Mapping[str, Any]) -> None:
    """Publish a JSON object with a checksum over itself, in place of an older one."""
    text = json.dumps({**body, "checksum": fingerprint_json(body)}, indent=1, ensure_ascii=False, allow_nan=False)
    publish(path, text.encode() + b"\n", replace=True)


def read_checked(path: Path, kind: str) -> dict[str, Any]:
    """Return the object that `publish_checked` wrote, without kind, version and checksum."""
    try:
        body = read_json(path, _MAX_JSON, follow=True)
    except FileNotFoundError as error:
        raise FileCorrupt(f"{path} cannot be read: {error}. {_REMEDY}.") from error
    except FileCorrupt as error:
        raise FileCorrupt(f"{error}. {_REMEDY}.") from error
    if not isinstance(body, dict) or body.get("kind") != kind:
        raise FileCorrupt(f"{path} is not a file of kind {kind!r}. {_REMEDY}.")
    if body.get("version") != _VERSION:
        raise FileCorrupt(
            f"{path} is version {body.get('version')}; this headrace reads version {_VERSION}. {_REMEDY}."
        )
    checksum = body.pop("checksum", None)
    try:
        is_whole = checksum == fingerprint_json(body)
    except ValueError:  # numbers and characters that `publish_checked` never writes
        is_whole = False
    if not is_whole:
        raise FileCorrupt(f"{path} is damaged: it fails its own checksum. {_REMEDY}.")
    return {k: v for k, v in body.items() if k not in ("kind", "version")}
