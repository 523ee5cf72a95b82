"""What the documents from a given row on look like as blocks.

A window is a pure function of (source, lane, start): the rows that the deal puts there, tokenised, packed and shuffled
as one unit. So any thread may make it, ahead of need, and a resumed run makes it again from four integers.

    start ──► rows of the lane's part ──► texts ──► ids ──► blocks          end: where the next window starts

Two things here only save time and never change a result: decoded chunks are kept for a while, because lanes and
successive windows share them, and documents that were encoded but did not fit are handed to the next window.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from headrace.errors import DataError, TokenizerError
from headrace.metrics import Meter, Wait, phase
from headrace.mix import Deal
from headrace.order import derive, mix64_array
from headrace.sources import OpenSource
from headrace.text import (
    LONGEST_PIECE,
    SPOT_CHECK_EVERY,
    Blocks,
    Encode,
    Packing,
    TokenBatch,
    Tokenizer,
    encode_named,
    join_batches,
    pack,
)

_ROWS_AT_ONCE = 4096
_AHEAD = 1.04
"""How many more characters are encoded than a window will need, as it seems: what is over waits for the next, what is missing takes a
second visit to the encoder."""


class WindowStart(NamedTuple):
    """The first row of a window in a lane's part of an epoch, and how many of its tokens are already delivered."""

    epoch: int
    position: int
    offset: int


class Piece(NamedTuple):
    """Where some tokens of a batch come from."""

    sample_index: int
    column: int
    source: str
    file: str
    row: int
    """Row in the file, from 0."""
    start: int
    """First token in the document."""
    length: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """Documents that were encoded: a part of a window, or what lies beyond its end."""

    texts: TokenBatch
    chunks: np.ndarray
    rows: np.ndarray
    """int64: the chunk of each document, and its row in the chunk."""
    holes: np.ndarray
    """bool: which of them are rows that cannot be used."""


_NO_ROWS = np.empty(0, np.int64)
_NO_DOCUMENTS = Encoded(TokenBatch.of_counts(np.empty(0, np.int32), ()), _NO_ROWS, _NO_ROWS, np.empty(0, np.bool_))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One made window."""

    source: int
    lane: int
    start: WindowStart
    end: WindowStart
    blocks: Blocks
    doc_chunk: np.ndarray
    doc_row: np.ndarray
    """Row in the chunk."""
    empty: int
    """Documents without a token, of those that end here."""
    bad: int
    """Rows that cannot be used (on_bad = "skip") and were left out here."""


class ChunkCache:
    """Decoded chunks, the least recently used leave first. Two threads that want the same chunk decode it once."""

    def __init__(self, meter: Meter, limit_bytes: int = 512 << 20) -> None:
        self._meter = meter
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[int, int], Sequence[str | None]] = OrderedDict()
        self._busy: dict[tuple[int, int], threading.Lock] = {}
        self._bytes = 0
        self.misses = 0

    def texts(self, source_index: int, source: OpenSource, chunk: int) -> Sequence[str | None]:
        """The rows of a chunk; None for one that cannot be used."""
        key = (source_index, chunk)
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
                return found
            busy = self._busy.setdefault(key, threading.Lock())
        with Wait("source.chunk", meter=self._meter, hidden=True), busy:
            with self._lock:
                found = self._held.get(key)
            if found is not None:
                return found
            try:
                with phase("read", meter=self._meter):
                    found = source.read(chunk)
                size = _memory(found)
                with self._lock:
                    self._bytes += size
                    self._held[key] = found
                    self.misses += 1
                    while self._bytes > self._limit and len(self._held) > 1:
                        self._bytes -= _memory(self._held.popitem(last=False)[1])
            finally:
                with self._lock:
                    self._busy.pop(key, None)
        return found


def _memory(texts: Sequence[str | None]) -> int:
    return sum(len(text) for text in texts if text) + 72 * len(texts)


class WindowMaker:
    """Makes the windows of one source."""

    def __init__(
        self,
        index: int,
        source: OpenSource,
        deal: Deal,
        tokenizer: Tokenizer,
        packing: Packing,
        *,
        key: int,
        shuffle: bool,
        cache: ChunkCache,
        meter: Meter,
    ) -> None:
        self.index = index
        self.source = source
        self.deal = deal
        self._tokenizer = tokenizer
        self._reference: Encode | None = getattr(tokenizer, "reference", None)
        self._check_key = derive(key, 0)
        self._packing = packing
        self._key = key
        self._shuffle = shuffle
        self._cache = cache
        self._meter = meter
        # Guesses, corrected as documents are seen: they decide only how many are read and encoded at once.
        self._chars_per_token = 3.0
        self._rows_per_char = source.manifest.rows / max(int(source.manifest.chunk_bytes.sum()), 1)

    def make(self, lane: int, start: WindowStart, carry: Encoded | None = None) -> tuple[Window, Encoded | None]:
        """The window that starts at `start`, and what was encoded beyond it."""
        total_rows = self.deal.lane_rows(lane, start.epoch)
        wanted = self._packing.budget + start.offset
        parts = [_NO_DOCUMENTS if carry is None else carry]
        at, tokens = start.position + len(parts[0].texts), self._packing.total(parts[0].texts)
        while tokens <= wanted and at < total_rows:
            texts, chunk_of, row_of, holes = self._texts(lane, start.epoch, at, total_rows, wanted + 1 - tokens)
            batch = self._encode(texts, chunk_of, row_of)
            parts.append(Encoded(batch, chunk_of, row_of, holes))
            at += len(texts)
            tokens += self._packing.total(batch)
        batches = [part.texts for part in parts]
        with phase("pack", meter=self._meter):
            packed = pack(
                batches,
                self._packing,
                offset=start.offset,
                last=at >= total_rows,
                shuffle_key=self._shuffle_key(lane, start),
            )
        used = packed.documents
        if not len(packed.blocks) and start.position == 0 and used == total_rows:
            self._require_text()  # a lane's whole part without a token: is it the lane, or the source?
        seen = used + (1 if packed.offset else 0)
        chunk_of, row_of = np.concatenate([p.chunks for p in parts]), np.concatenate([p.rows for p in parts])
        holes = np.concatenate([p.holes for p in parts])
        left = None
        if used < len(chunk_of):  # a copy: what is left is a few per cent of the window, and must not keep all of it
            left = Encoded(_documents_from(batches, used), chunk_of[used:], row_of[used:], holes[used:])
        bad = int(np.count_nonzero(holes[:used]))
        window = Window(
            source=self.index,
            lane=lane,
            start=start,
            end=WindowStart(start.epoch, start.position + used, packed.offset),
            blocks=packed.blocks,
            doc_chunk=chunk_of[:seen],
            doc_row=row_of[:seen],
            empty=packed.empty - bad,
            bad=bad,
        )
        return window, left

    def _require_text(self) -> None:
        """Refuse a source of which no document has a token: its share of the mix would be 0 without a word."""
        for chunk in np.flatnonzero(self.deal.chunk_rows).tolist():
            rows = int(self.deal.chunk_rows[chunk])
            texts = [text for text in self._cache.texts(self.index, self.source, chunk)[:rows] if text]
            if texts and len(self._tokenizer.encode(texts).ids):
                return
        described, left_out = self.source.source, sum(hole["rows"] for hole in self.source.holes())
        bad = f" ({left_out:,} of them cannot be decoded)" if left_out else ""
        key = (
            ""
            if described.scheme == "txt"
            else f"set text_key, now {described.text_key!r}, to the field that holds the text; "
        )
        raise DataError(
            f"source {self.source.name!r} ({described.spec}) has {self.deal.rows:,} rows and none with text{bad}: {key}mend its files, "
            "or take it out."
        )

    def first_chunks(self, lane: int, start: WindowStart) -> list[int]:
        """The chunks that a window will likely need."""
        chars = self._packing.budget * self._chars_per_token
        left = self.deal.lane_rows(lane, start.epoch) - start.position
        likely = min(int(chars * self._rows_per_char) + 8, _ROWS_AT_ONCE, left)
        return self.deal.chunks(lane, start.epoch, start.position, likely)

    def pieces(self, window: Window, block: int, sample_index: int) -> list[Piece]:
        """The pieces of one block."""
        blocks, manifest = window.blocks, self.source.manifest
        found, column = [], 0
        for p in range(int(blocks.piece_ptr[block]), int(blocks.piece_ptr[block + 1])):
            doc, length = int(blocks.piece_doc[p]), int(blocks.piece_len[p])
            row = int(manifest.first_row[int(window.doc_chunk[doc])]) + int(window.doc_row[doc])
            file, local = manifest.locate(row)
            found.append(
                Piece(
                    sample_index,
                    column,
                    self.source.name,
                    manifest.files[file].path,
                    local,
                    int(blocks.piece_start[p]),
                    length,
                )
            )
            column += length
        return found

    def _shuffle_key(self, lane: int, start: WindowStart) -> int | None:
        if not self._shuffle:
            return None
        return derive(derive(derive(derive(self._key, lane), start.epoch), start.position), start.offset)

    def _texts(
        self, lane: int, epoch: int, at: int, total_rows: int, tokens: int
    ) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
        """About as many documents as make `tokens` tokens, at least one; their chunks and rows, and which of them are holes."""
        chars = int(tokens * self._chars_per_token * _AHEAD) + 1
        texts: list[str] = []
        chunks: list[np.ndarray] = []
        rows: list[np.ndarray] = []
        missing: list[int] = []
        while chars > 0 and at < total_rows:
            likely = min(int(chars * self._rows_per_char * 1.2) + 8, _ROWS_AT_ONCE, total_rows - at)
            for span in self.deal.spans(lane, epoch, at, likely):
                drawn = span.chunks.tolist()
                held = {c: self._cache.texts(self.index, self.source, c) for c in dict.fromkeys(drawn)}
                found = [held[c][row] for c, row in zip(drawn, span.rows.tolist(), strict=True)]
                missing += [place for place, text in enumerate(found, len(texts)) if text is None]
                known = [text or "" for text in found]
                if max(map(len, known)) > LONGEST_PIECE:
                    numbers = (self.source.manifest.first_row[span.chunks] + span.rows).tolist()
                    long = leave_out_too_long(self.source, self._tokenizer, known, numbers)
                    missing += [len(texts) + i for i in long]
                size = sum(map(len, known))
                if size >= chars:  # the window ends in here: no more than it needs
                    upto = next(i for i, length in enumerate(accumulate(map(len, known)), 1) if length >= chars)
                    known = known[:upto]
                chars -= size
                at += len(known)
                texts += known
                chunks.append(span.chunks[: len(known)])
                rows.append(span.rows[: len(known)])
                if chars <= 0:
                    break
        holes = np.zeros(len(texts), np.bool_)
        holes[[place for place in missing if place < len(texts)]] = True
        return texts, np.concatenate(chunks), np.concatenate(rows), holes

    def _encode(self, texts: list[str], chunks: np.ndarray, rows: np.ndarray) -> TokenBatch:
        with phase("tokenize", meter=self._meter):
            batch = encode_named(self._tokenizer, texts, lambda i: self._place(int(chunks[i]), int(rows[i])))
        if self._reference is not None:
            self._spot_check(batch, texts, chunks, rows)
        tokens = len(batch.ids)
        if tokens > 1000:
            self._chars_per_token = 0.5 * self._chars_per_token + 0.5 * sum(map(len, texts)) / tokens
        return batch

    def _spot_check(self, batch: TokenBatch, texts: list[str], chunks: np.ndarray, rows: np.ndarray) -> None:
        """Some documents, the same in every run, are encoded by the reference too."""
        assert self._reference is not None
        numbers = (self.source.manifest.first_row[chunks] + rows).astype(np.uint64)
        drawn = mix64_array(numbers ^ np.uint64(self._check_key)) % np.uint64(SPOT_CHECK_EVERY) == 0
        for i in np.flatnonzero(drawn).tolist():
            found, expected = batch.documents(i, i + 1).ids, self._reference([texts[i]]).ids
            self._meter.add("text/spot_checks")
            if not np.array_equal(found, expected):
                at = (
                    int(np.argmax(found[: len(expected)] != expected[: len(found)]))
                    if min(len(found), len(expected))
                    else 0
                )
                raise TokenizerError(
                    f"the engine of tokenizer {self._tokenizer.name} does not agree with `tokenizers` on "
                    f"{self._place(int(chunks[i]), int(rows[i]))}: {len(found)} ids, expected {len(expected)}; the first that differs is "
                    f'number {at}. Set engine = "tokenizers", and report the document to the makers of the engine.'
                )

    def _place(self, chunk: int, row: int) -> str:
        file, local = self.source.manifest.locate(int(self.source.manifest.first_row[chunk]) + row)
        return f"row {local} of {self.source.manifest.files[file].path} (source {self.source.name})"


def leave_out_too_long(source: OpenSource, tokenizer: Tokenizer, texts: list[str], rows: Sequence[int]) -> list[int]:
    """Empty the texts that would take too much memory to encode, as holes of the source, and return their indices.

    `rows` are the texts' rows in the source. DataError names the first of them unless the source has on_bad = "skip".
    """
    refusal = getattr(tokenizer, "refusal", None)
    reasons = {} if refusal is None else {i: why for i, text in enumerate(texts) if (why := refusal(text)) is not None}
    for i, why in reasons.items():
        if source.source.on_bad == "fail":
            file, local = source.manifest.locate(rows[i])
            raise DataError(
                f"row {local} of {source.manifest.files[file].path} (source {source.name}) is too long for tokenizer {tokenizer.name}: "
                f'{why}. Split the document, or leave such rows out of source {source.name!r} with on_bad = "skip".'
            )
        source.add_hole(rows[i], f"too long for the tokenizer: {why}")
        texts[i] = ""
    return list(reasons)


def _documents_from(batches: Sequence[TokenBatch], first: int) -> TokenBatch:
    """The documents from number `first` on."""
    left = []
    for batch in batches:
        if first < len(batch):
            left.append(batch.documents(first))
        first = max(first - len(batch), 0)
    return join_batches(left)
