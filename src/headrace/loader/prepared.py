"""Blocks of tokens that were prepared beforehand: block i is known without reading the ones before it.

    data = PreparedDataset("prepared/web-mix", seed=7)            what `headrace prepare` wrote
    data.block(123_456)                                           a pure function of the data, the seed and i

    sample g ──► source, its k-th block        schedule: from the weights alone
             ──► epoch, block                  a keyed permutation of all blocks of the source, another one each epoch
             ──► shard, pieces                 prefix sums, the packed index
             ──► row of a batch                gathered from the mapped file, one compiled call for each shard of a batch

There are no lanes, no windows and nothing to tokenise. Tokens are compared with their checksums the first time a block touches
them; a flipped bit is an error that names the shard, before anything of it is handed out.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from headrace.batch import LM_FIELDS, lm_field_problems
from headrace.errors import ConfigError, DataError, FileCorrupt, StorageError
from headrace.loader.batch_fill import FILL_KERNELS, BatchFill, BatchRows
from headrace.loader.dataset import unique_names
from headrace.loader.schedule import Schedule
from headrace.loader.shard_gather import CHECKED, TO_CHECK, gather_packed, gather_runs
from headrace.loader.windows import Piece
from headrace.metrics import Meter, Wait
from headrace.order import Permutation, fingerprint_json, key, mix64_array
from headrace.runtime.compiled import warm_kernels
from headrace.settings import Exhausted, TextSettings
from headrace.text.shards import (
    SEGMENT,
    SHARD_FOLDER,
    PackedShard,
    PreparedManifest,
    PreparedSource,
    TokenShard,
    open_packed,
    open_shard,
    pack_shard,
    packed_name,
    read_packed_counts,
    segment_sum,
    write_packed,
    write_packed_counts,
)

_FILLER_SUM = key("prepared.filler")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class PreparedBlock(NamedTuple):
    """One block, as `PreparedDataset.block` gives it."""

    source: str
    epoch: int
    block: int
    """Which block of its source, from 0."""
    arrays: dict[str, np.ndarray]


class Planned(NamedTuple):
    """What many samples are made of; one entry a sample. Source and shard are -1 beyond the end of the data."""

    sample: np.ndarray
    source: np.ndarray
    epoch: np.ndarray
    block: np.ndarray
    """Block of the source."""
    shard: np.ndarray
    """Shard of the dataset, all sources counted through."""
    local: np.ndarray
    """Block of the shard."""
    low: np.ndarray
    high: np.ndarray
    """What the sample adds to the digest: two halves of 64 bits."""


class _MappedShard(NamedTuple):
    """A shard that is open."""

    shard: TokenShard
    packed: PackedShard | None
    checked: np.ndarray
    """uint8: the mark of each segment, as in shard_gather."""
    arrays: tuple[np.ndarray, ...]
    """The first arguments of the gather."""


class PreparedDataset:
    """Blocks of prepared sources. Holds no position; several loaders may share one.

    - `paths`: folders that `headrace prepare` wrote.
    - `weights`: shares of the sources, by name or in their order. `seq_len`, `pack`: as for `TextDataset`. All three are those of the prepared config unless given.
      A seq_len that was not prepared is indexed when it is first asked for, about a second for a million documents.
    - `seed`, `shuffle`: the order of the blocks.
    - `exhausted`: what happens when a source has no more blocks: `"drop"`, `"repeat"` or `"stop_first"`.
    - `full_check`: check the checksums of all files now, and not only those of the segments that are read.
    - `meter`: counts waits; the process's own unless given.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        seq_len: int | None = None,
        pack: Literal["best_fit", "concat"] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        exhausted: Exhausted = "drop",
        full_check: bool = False,
        meter: Meter | None = None,
    ) -> None:
        self._arguments = {
            "paths": paths, "weights": weights, "seq_len": seq_len, "pack": pack, "seed": seed, "shuffle": shuffle,
            "exhausted": exhausted,
        }  # fmt: skip
        self.meter = meter if meter is not None else Meter()
        self.folders = tuple(Path(p) for p in ([paths] if isinstance(paths, str | Path) else paths))
        if not self.folders:
            raise ConfigError("a prepared dataset needs at least one folder that `headrace prepare` wrote")
        with Wait("prepared.open", meter=self.meter):
            manifests = tuple(PreparedManifest.read(folder) for folder in self.folders)
            first = manifests[0]
            _check_alike(self.folders, manifests)
            self.seq_len = first.seq_len if seq_len is None else seq_len
            self.pack = first.pack if pack is None else pack
            self.seed, self.shuffle, self.exhausted = seed, shuffle, exhausted
            chosen = TextSettings(seq_len=self.seq_len, pack=self.pack, seed=seed, exhausted=exhausted)
            if problems := chosen.problems():
                raise ConfigError(problems)
            self.vocab_size, self.pad_id, self.tokenizer = first.vocab_size, first.pad_id, first.tokenizer
            self._item = np.dtype(first.dtype).itemsize
            self.sources: tuple[PreparedSource, ...] = tuple(s for m in manifests for s in m.sources)
            self.names = tuple(unique_names(s.name for s in self.sources))
            self._files = [
                (folder / SHARD_FOLDER / s.name, number, entry, s)
                for folder, m in zip(self.folders, manifests, strict=True)
                for s in m.sources
                for number, entry in enumerate(s.shards)
            ]
            self._check_files()
            self._lock = threading.Lock()
            self._mapped: dict[int, _MappedShard] = {}
            self._unsaved: dict[int, PackedShard] = {}
            self._gather = (gather_runs if self.pack == "concat" else gather_packed)[self._item]
            warm_kernels(self._gather, *FILL_KERNELS)
            counts = self._block_counts(manifests)
        self._count_blocks(counts)
        self._given = self._weights_given(weights)
        self._data = fingerprint_json([m.data for m in manifests])
        self._orders: dict[tuple[int, int], Permutation] = {}
        self._file_ends: dict[int, np.ndarray] = {}
        self.schedule = Schedule(self._block_weights(), limits=self._limits(), stop_first=exhausted == "stop_first")
        if full_check:
            self.check()

    # ------------------------------------------------------------------------------------------ public

    @property
    def weights(self) -> tuple[float, ...]:
        """The sources' shares of the tokens, adding up to 1. Sources without tokens have none."""
        return tuple(w / sum(self._given) for w in self._given)

    def __len__(self) -> int:
        """How many samples one pass has; TypeError if it never ends."""
        total = self.schedule.total
        if total is None:
            raise TypeError('a dataset that repeats for ever has no length: give exhausted="drop"')
        return total

    def block(self, i: int, fields: Sequence[str] = LM_FIELDS[:3]) -> PreparedBlock:
        """Sample i of the first pass: a pure function of the prepared data, the seed and i."""
        planned = self.plan(np.array([i], np.int64))
        source = int(planned.source[0])
        if source < 0:
            raise IndexError(f"sample {i} of a dataset of {len(self)}")
        if problems := lm_field_problems(fields):
            raise ConfigError(problems)
        fill = BatchFill(self.seq_len, fields, pad=self.pad_id, unshifted=False)
        rows = fill.rows(1)
        self.gather(planned, 0, 1, rows)
        batch = fill.batch(rows, range(i, i + 1))
        batch.pop("max_seqlen", None)
        arrays = {name: array[0] if array.ndim == 2 else array for name, array in batch.items()}
        return PreparedBlock(self.names[source], int(planned.epoch[0]), int(planned.block[0]), arrays)

    def plan(self, samples: np.ndarray, number: int = 0, begun: int = 0) -> Planned:
        """What the given samples are made of, in pass `number` that began at sample `begun`; maps the shards they need."""
        source, pick = self.schedule.at(samples - begun)
        epoch, block = np.zeros_like(pick), np.zeros_like(pick)
        for s in np.flatnonzero(np.bincount(source + 1)[1:]).tolist():
            mine = np.flatnonzero(source == s)
            turn_of, place = np.divmod(pick[mine], self._blocks[s])
            epochs = turn_of + number * self._epochs_a_pass(s)
            epoch[mine] = epochs
            for e in range(int(epochs.min()), int(epochs.max()) + 1):
                those = epochs == e
                block[mine[those]] = self._order(s, e).take(place[those]) if self.shuffle else place[those]
        filler = source < 0
        through = self._first_block_of[source] + block
        shard = np.searchsorted(self._first_block, through, side="right") - 1
        shard[filler] = -1
        local = through - self._first_block[shard]
        # As `sample_term(g, content)`: the content of a block is given by the checksum of its shard and its place in it.
        at, which = samples.astype(np.uint64) * _GOLDEN, (local + 1).astype(np.uint64) * _GOLDEN
        low = mix64_array(mix64_array(self._sum_low[shard] + which) + at)
        high = mix64_array(mix64_array(self._sum_high[shard] + which) ^ at)
        self._map(np.unique(shard[~filler]).tolist())
        return Planned(samples, source, epoch, block, shard, local, low, high)

    def gather(self, planned: Planned, begin: int, end: int, rows: BatchRows) -> None:
        """Copy the blocks of planned samples [begin, end) into the rows of a batch, every token compared with its checksum."""
        shards, blocks = planned.shard[begin:end], planned.local[begin:end]
        for s in set(shards.tolist()):
            if s < 0:
                rows.facts[shards < 0] = 0
                continue
            mapped = self._mapped[s]
            marked = self._gather(
                *mapped.arrays, s, shards, blocks, rows.tokens, rows.lengths, rows.following, rows.facts
            )
            if marked < 0:
                raise FileCorrupt(
                    f"{self._path(s)} or its index is damaged: block {blocks[-1 - marked]:,} points outside the shard. {_REMEDY}"
                )
            if marked:
                self._check_marked(s, mapped)

    def pieces(self, sample: int, source: int, shard: int, local: int) -> list[Piece]:
        """Where the tokens of a planned sample come from."""
        if shard < 0:
            return []
        mapped, packed, *_ = self._mapped[shard]
        offsets, entry = mapped.offsets, mapped.entry
        if packed is None:
            start, stop = local * self.seq_len, min((local + 1) * self.seq_len, entry.tokens)
            inside = slice(np.searchsorted(offsets, start, side="right"), np.searchsorted(offsets, stop, side="left"))
            edges = np.unique(np.concatenate([[start], offsets[inside], [stop]]))
            spans = list(zip(edges[:-1].tolist(), np.diff(edges).tolist(), strict=True))
        else:
            own = slice(int(packed.block_ptr[local]), int(packed.block_ptr[local + 1]))
            spans = list(zip(packed.piece_at[own].tolist(), np.abs(packed.piece_len[own]).tolist(), strict=True))
        found, column = [], 0
        for at, length in spans:
            document = int(np.searchsorted(offsets, at, side="right")) - 1
            file, row = self._locate(source, entry.first_row + document)
            found.append(Piece(sample, column, self.names[source], file, row, at - int(offsets[document]), length))
            column += length
        return found

    def fingerprint(self) -> dict[str, str]:
        """What the order depends on, by name. Short, whatever the number of sources: it is in every cursor."""
        tokens = sum(s.tokens for s in self.sources)
        limits = [[s.max_epochs, s.max_tokens] for s in self.sources]
        return {
            "data": f"{self._data} ({len(self.sources):,} sources, {tokens:,} tokens)",
            "tokenizer": self.tokenizer,
            "sources": _shortened(", ".join(self.names)),
            "weights": _shortened(", ".join(f"{w:.6g}" for w in self._given)),
            "config:packing": f"{self.pack} {self.seq_len}",
            "config:order": f"seed {self.seed}, {'shuffled' if self.shuffle else 'in order'}, {self.exhausted}",
            "config:limits": fingerprint_json(limits),
        }

    def check(self) -> int:
        """Read every shard and compare it with its checksums, now; how many bytes were read."""
        for folder, _, entry, _ in self._files:
            with Wait("prepared.check", meter=self.meter):
                open_shard(folder / entry.file, entry, full=True)
        return sum(entry.size for _, _, entry, _ in self._files)

    def __reduce__(self) -> tuple[Any, ...]:
        """A process that was spawned opens the folder itself: mapped files do not travel."""
        return functools.partial(type(self), **self._arguments), ()

    def close(self) -> None:
        """Let go of the mapped files. Loaders over this dataset must be closed first."""
        with self._lock:
            self._mapped.clear()

    # ----------------------------------------------------------------------------------------- blocks

    def _block_counts(self, manifests: Sequence[PreparedManifest]) -> list[int]:
        if self.pack == "concat":
            return [-(-entry.tokens // self.seq_len) for _, _, entry, _ in self._files]
        counts: list[int] = []
        for folder, manifest in zip(self.folders, manifests, strict=True):
            known = read_packed_counts(folder, self.seq_len, manifest)
            if known is None:
                known = self._index(folder, manifest, len(counts))
            counts += [n for s in manifest.sources for n in known[s.name]]
        return counts

    def _index(self, folder: Path, manifest: PreparedManifest, first: int) -> dict[str, list[int]]:
        """Pack a seq_len that was not prepared for. Kept in the folder if that can be written, else in memory.

        `first`: number of the manifest's first shard. Returns the blocks of each shard, by source.
        """
        counts: dict[str, list[int]] = {source.name: [] for source in manifest.sources}
        saved, shards = True, sum(len(source.shards) for source in manifest.sources)
        for n, (place, number, entry, source) in enumerate(self._files[first : first + shards], first):
            with Wait("prepared.index", meter=self.meter):
                packed = pack_shard(open_shard(place / entry.file, entry).offsets, self.seq_len)
            try:
                write_packed(place / packed_name(self.seq_len, number), packed, seq_len=self.seq_len, of=entry)
            except StorageError:
                saved = False  # a read-only folder costs the next start the same time again, nothing else
                self._unsaved[n] = packed
            counts[source.name].append(len(packed))
        if saved:
            with contextlib.suppress(StorageError):
                write_packed_counts(folder, self.seq_len, manifest.data, counts)
        return counts

    def _count_blocks(self, counts: Sequence[int]) -> None:
        """Prefix sums of blocks, over all shards and by source, and what each shard adds to a digest."""
        self._first_block = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(np.asarray(counts, np.int64), out=self._first_block[1:])
        ends = np.cumsum([0, *(len(s.shards) for s in self.sources)])
        edges = self._first_block[ends]
        self._first_block_of, self._blocks = edges[:-1], np.diff(edges)
        if not self._blocks.any():
            raise DataError(
                f"{', '.join(map(str, self.folders))}: no source has a single token. Check the files that were prepared, or text_key."
            )
        salt = key("prepared.block", seq_len=self.seq_len, best_fit=int(self.pack == "best_fit"))
        sums = [int(entry.sum, 16) for _, _, entry, _ in self._files] + [_FILLER_SUM]  # the last: index -1, filler
        mask = (1 << 64) - 1
        self._sum_low = mix64_array(np.array([(s ^ salt) & mask for s in sums], np.uint64))
        self._sum_high = mix64_array(np.array([(s >> 64) ^ salt for s in sums], np.uint64))

    def _order(self, source: int, epoch: int) -> Permutation:
        found = self._orders.get((source, epoch))
        if found is None:
            name = f"prepared.blocks/{self.names[source]}"
            found = Permutation(int(self._blocks[source]), key(name, seed=self.seed, epoch=epoch))
            if len(self._orders) > 4 * len(self.sources):
                self._orders.clear()
            self._orders[source, epoch] = found
        return found

    def _weights_given(self, weights: Mapping[str, float] | Sequence[float] | None) -> list[float]:
        given = [s.weight for s in self.sources]
        if isinstance(weights, Mapping):
            unknown = sorted(str(name) for name in weights if name not in self.names)
            if unknown:
                raise ConfigError(
                    f"weights name {', '.join(unknown)}; the prepared sources are {', '.join(self.names)}"
                )
            given = [float(weights.get(name, 0.0)) for name in self.names]
        elif weights is not None:
            given = [float(w) for w in weights]
            if len(given) != len(self.sources):
                raise ConfigError(f"{len(given)} weights for {len(self.sources)} sources ({', '.join(self.names)})")
        if any(not 0 <= w < float("inf") for w in given):
            raise ConfigError(f"weights must be finite and at least 0, got {given}")
        given = [w if n else 0.0 for w, n in zip(given, self._blocks.tolist(), strict=True)]
        if not any(given):
            raise ConfigError(
                "all prepared sources with tokens have weight 0: give at least one of them a positive weight"
            )
        return given

    def _block_weights(self) -> list[float]:
        """Turns in proportion to weight / tokens a block: the weights are shares of tokens, and padding differs by source."""
        if self.pack == "concat":
            return self._given
        return [
            w * n / s.tokens if w else 0.0
            for w, n, s in zip(self._given, self._blocks.tolist(), self.sources, strict=True)
        ]

    def _limits(self) -> list[int | None]:
        limits: list[int | None] = []
        for source, blocks in zip(self.sources, self._blocks.tolist(), strict=True):
            epochs = source.max_epochs if self.exhausted == "repeat" else source.max_epochs or 1
            limit = None if epochs is None else blocks * epochs
            if source.max_tokens is not None and blocks:
                capped = -(-source.max_tokens * blocks // source.tokens)
                limit = capped if limit is None else min(limit, capped)
            limits.append(limit)
        return limits

    def _epochs_a_pass(self, source: int) -> int:
        limit = self.schedule.limits[source]
        return 0 if limit is None else -(-limit // int(self._blocks[source]))

    # ------------------------------------------------------------------------------------------ files

    def _check_files(self) -> None:
        """Sizes now, so that a shard that was cut short is a sentence and not a signal in the middle of a run."""
        wrong = []
        for folder, _, entry, _ in self._files:
            try:
                size = (folder / entry.file).stat().st_size
            except OSError as error:
                wrong.append(f"{folder / entry.file}: {error.strerror or error}")
                continue
            if size != entry.size:
                wrong.append(f"{folder / entry.file} has {size:,} bytes, expected {entry.size:,}")
        if wrong:
            more = f"; and {len(wrong) - 3:,} more" if len(wrong) > 3 else ""
            raise FileCorrupt(
                f"{len(wrong):,} of {len(self._files):,} shards are not whole: {'; '.join(wrong[:3])}{more}. The others remain; run "
                "`headrace prepare` again with the same config and only the damaged ones are made anew."
            )
        _allow_open_files(2 * len(self._files))

    def _map(self, wanted: Sequence[int]) -> None:
        for s in wanted:
            if s not in self._mapped:
                with Wait("prepared.map", meter=self.meter, hidden=True), self._lock:
                    if s not in self._mapped:
                        self._mapped[s] = self._open(s)

    def _open(self, s: int) -> _MappedShard:
        folder, number, entry, _ = self._files[s]
        shard = open_shard(folder / entry.file, entry)
        if shard.tokens.dtype.itemsize != self._item:
            raise FileCorrupt(
                f"{folder / entry.file} holds {shard.tokens.dtype}, the manifest says {8 * self._item} bits"
            )
        checked = np.zeros(len(shard.segment_sums), np.uint8)
        if self.pack == "concat":
            return _MappedShard(shard, None, checked, (shard.tokens, checked, shard.offsets, shard.segment_docs))
        packed = self._unsaved.get(s)
        if packed is None:
            path = folder / packed_name(self.seq_len, number)
            packed = open_packed(path, seq_len=self.seq_len, of=entry)
        if len(packed) != self._first_block[s + 1] - self._first_block[s]:
            raise FileCorrupt(
                f"{folder / packed_name(self.seq_len, number)} has {len(packed):,} blocks, another number was counted"
            )
        return _MappedShard(
            shard, packed, checked, (shard.tokens, checked, packed.block_ptr, packed.piece_at, packed.piece_len)
        )

    def _check_marked(self, s: int, mapped: _MappedShard) -> None:
        """Compare the segments that are marked with their checksums."""
        shard, checked = mapped.shard, mapped.checked
        for n in np.flatnonzero(checked == TO_CHECK).tolist():
            if segment_sum(shard.tokens, n) != shard.segment_sums[n]:
                raise FileCorrupt(
                    f"{self._path(s)} is damaged: tokens {n * SEGMENT:,} to {min((n + 1) * SEGMENT, shard.entry.tokens):,} of source "
                    f"{self._files[s][3].name} fail their checksum. Nothing of them was delivered. {_REMEDY}"
                )
            checked[n] = CHECKED

    def _path(self, s: int) -> Path:
        folder, _, entry, _ = self._files[s]
        return folder / entry.file

    def _locate(self, source: int, row: int) -> tuple[str, int]:
        files = self.sources[source].files
        if source not in self._file_ends:
            self._file_ends[source] = np.cumsum([rows for _, rows in files])
        ends = self._file_ends[source]
        file = int(np.searchsorted(ends, row, side="right"))
        if file == len(files):
            raise FileCorrupt(
                f"row {row:,} lies beyond the files that the manifest names for source {self.names[source]}"
            )
        return files[file][0], row - int(ends[file] - files[file][1])


# ------------------------------------------------------------------------------------------------- checks


_REMEDY = "Run `headrace prepare` again with the same config: it checks every shard, keeps the whole ones and makes this one anew."


def _check_alike(folders: Sequence[Path], manifests: Sequence[PreparedManifest]) -> None:
    first = manifests[0]
    for folder, other in zip(folders[1:], manifests[1:], strict=True):
        for name in ("tokenizer", "vocab_size", "dtype", "bos_id", "eos_id", "pad_id"):
            mine, theirs = getattr(first, name), getattr(other, name)
            if mine != theirs:
                raise ConfigError(
                    f"{folder} and {folders[0]} were prepared differently: {name} is {theirs} there, {mine} here. Prepare both with "
                    "the same tokenizer."
                )


def _shortened(text: str) -> str:
    return text if len(text) <= 160 else f"{fingerprint_json(text)} ({text[:40]}…)"


def _allow_open_files(wanted: int) -> None:
    """A mapped file holds a descriptor. Take as many as the system lets us have; say so beforehand if that is too few."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + 256
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise StorageError(
            f"{wanted:,} files have to be mapped and this process may open {hard:,}: raise the limit (ulimit -Hn), or prepare again "
            "with a larger --shard-mb"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
