"""Which documents a step of a run delivered, and which steps delivered a document, worked out from the run's folder.

    with RunProvenance(recorded_run(Path("runs/quickstart"))) as provenance:
        provenance.step(120)                    the documents of step 120, and the proof by its digest
        provenance.find("prose", row=17)        the steps that delivered a document, and when it comes next

    sample ──► lane, source (flight.jsonl) ──► the window that was open ──► rebuilt ──► block ──► pieces, tokens, text

A window is a pure function of its start, so only the windows of the samples in question are rebuilt: as many for step a million as
for step one. The blocks must give the digest that the run recorded for the step. If they do not, the data, the
tokenizer or the config has changed since, and the step is refused.

Nothing in the run's folder is changed, and the run may continue meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import orjson

from headrace.errors import ConfigError, DataChanged, FileCorrupt, did_you_mean, found_text, number_text
from headrace.files import open_container, read_jsonl, read_lines
from headrace.loader import Piece, TextDataset
from headrace.loader.dataset import MOST_LANES
from headrace.loader.lanes import FILLER_HASH
from headrace.loader.pool import WindowKey
from headrace.loader.windows import Window
from headrace.metrics import Wait
from headrace.order import Digest, sample_term
from headrace.provenance.record import OpenedWindow, SamplePlace, SampleRecord
from headrace.train import CheckpointStore

_THREADS = 4
_MAX_RECORDS = 4 << 30
"""Bytes of a file of chunk hashes; a larger one is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The folder of a text run, its config, and how its dataset is opened."""

    path: Path
    version: str
    """The headrace version that made the run."""
    config: Mapping[str, Any]
    """Every key of the config with its value, as JSON values."""
    open_dataset: Callable[[Path], TextDataset]
    """Opens the run's dataset. The argument is a folder for hashes of chunks, which reading adds to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A piece of a document in a step."""

    sample: int
    rank: int
    position: int
    """Row of the rank's batch."""
    column: int
    source: str
    file: str
    row: int
    """Row in the file, from 0."""
    start: int
    """First token in the document."""
    length: int
    text: str | None
    """How the piece begins; None if it was not asked for."""
    shortened: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShare:
    """Counts of one source in a step."""

    samples: int
    documents: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDocuments:
    """The documents of one step, and whether the step's digest proves them."""

    step: int
    first_sample: int
    samples: int
    world_size: int
    documents: tuple[Document, ...]
    totals: Mapping[str, SourceShare]
    """Over all ranks, also when the documents are those of one."""
    fillers: int
    padding: int
    digest: str
    recorded: str | None
    """The digest in the run's folder. None: `unproven` says why there is none."""
    unproven: str | None
    """Why the documents are not proven: the file that is damaged, or that the run was stopped before it wrote the digest."""
    proven: bool
    windows: int
    seconds: float
    """Time it took to rebuild the windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """Some tokens of a document in a sample."""

    epoch: int
    step: int | None
    """None: the sample was skipped."""
    sample: int
    rank: int
    position: int
    column: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NextOccurrence:
    """Where a document comes next."""

    epoch: int
    lane: int
    position: int
    """In the lane's part of the epoch."""
    reached: int
    """How far the lane has opened this epoch. Beyond `position`: its window is open, and not all of it is delivered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentHistory:
    """The steps that delivered a document, and when it comes next."""

    source: str
    file: str
    row: int
    source_row: int
    seen: tuple[Occurrence, ...]
    upcoming: NextOccurrence | None
    never: str | None
    """Why it does not come (again), if it does not."""
    last_step: int
    windows: int
    seconds: float


class RebuiltSample(NamedTuple):
    """A sample whose window was rebuilt; a filler has none."""

    place: SamplePlace
    window: Window | None
    content: bytes


class RunProvenance:
    """Answers which documents the steps of a run delivered. `close` removes its temporary files."""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self.path = run.path
        self.names = tuple(str(source["name"]) for source in run.config["source"])
        self.windows_made = 0
        self.seconds = 0.0
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._resources.close()

    # ------------------------------------------------------------------------------------------ questions

    def step(
        self, step: int, *, world: int | None = None, rank: int | None = None, chars: int | None = 200
    ) -> StepDocuments:
        """The documents of a step, in the order of its samples. DataChanged if they do not give the recorded digest.

        Args:
            step: Number of the step, from 1.
            world: Number of ranks that ranks and rows are counted for; as many as the run had at this step unless given.
            rank: Only the documents of this rank.
            chars: How many characters of each text are given; None for no text.
        """
        if chars is not None and chars < 1:
            raise ConfigError(f"--chars must be at least 1, got {chars}; to leave the text out use --no-text")
        span = self.record.span(step)
        size = self._world(step, len(span), world, rank)
        rebuilt = self.rebuild(span)
        digest = Digest(sum(sample_term(t.place.sample, t.content) for t in rebuilt))
        recorded = self.digests.get(step)
        if recorded is not None and recorded != digest.value:
            raise DataChanged(
                f"cannot show step {step} of {self.path}: its documents, rebuilt, give digest {digest}, the run recorded "
                f"{Digest(recorded)}. The data, the tokenizer or the code changed since. {self._remedy()}"
            )
        documents: list[Document] = []
        totals: dict[str, list[int]] = {name: [0, 0, 0] for name in self.names}
        seen: set[tuple[str, str, int]] = set()
        fillers = padding = 0
        for sample in rebuilt:
            if sample.window is None:
                fillers += 1
                continue
            pieces = self._pieces(sample)
            tokens = sum(p.length for p in pieces)
            padding += self.data.seq_len - tokens
            share = totals[self.record.names[sample.place.source]]
            share[0] += 1
            share[2] += tokens
            at, position = _row(sample.place.sample, span.start, size)
            for piece in pieces:
                share[1] += (piece.source, piece.file, piece.row) not in seen
                seen.add((piece.source, piece.file, piece.row))
                if rank is not None and at != rank:
                    continue
                text, cut = self._excerpt(sample, piece, chars)
                documents.append(
                    Document(
                        sample=piece.sample_index, rank=at, position=position, column=piece.column, source=piece.source,
                        file=piece.file, row=piece.row, start=piece.start, length=piece.length, text=text, shortened=cut,
                    )
                )  # fmt: skip
        return StepDocuments(
            step=step,
            first_sample=span.start,
            samples=len(span),
            world_size=size,
            documents=tuple(documents),
            totals={n: SourceShare(samples=s, documents=d, tokens=t) for n, (s, d, t) in totals.items()},
            fillers=fillers,
            padding=padding,
            digest=str(digest),
            recorded=None if recorded is None else str(Digest(recorded)),
            unproven=None if recorded is not None else self._no_digest(),
            proven=recorded is not None,
            windows=self.windows_made,
            seconds=self.seconds,
        )

    def find(self, source: str, row: int, file: str | None = None) -> DocumentHistory:
        """The steps that delivered a document, and when it comes next.

        Args:
            source: Name of the source.
            row: Row of `file`, or of the whole source if no file is given; from 0.
            file: Path or name of one of the source's files.
        """
        if source not in self.names:
            near = did_you_mean(source, self.names)
            raise ConfigError(
                f"{self.path} has no source {found_text(source)}{near} (it has {', '.join(self.names[:20])})"
            )
        index = self.names.index(source)
        source_row, name, local = self._located(index, row, file)
        manifest, deal = self.data.sources[index].manifest, self.data.deals[index]
        chunk = int(np.searchsorted(manifest.first_row, source_row, side="right")) - 1
        in_chunk = source_row - int(manifest.first_row[chunk])
        seen: list[Occurrence] = []
        upcoming, never = None, self._why_never(index, chunk, in_chunk)
        if never is None:
            for epoch in self._epochs(index):
                lane, position = deal.find(epoch, chunk, in_chunk)
                found, complete, reached = self._occurrences(index, lane, epoch, position, (name, local))
                seen += found
                # Lanes advance independently: the next epoch's copy may belong to a lane that is ahead.
                if not complete and upcoming is None:
                    upcoming = NextOccurrence(epoch=epoch, lane=lane, position=position, reached=reached)
            limit = self.data.plan(0).epoch_limit(index)
            if upcoming is not None and limit is not None and upcoming.epoch >= limit:
                upcoming, never = None, f"the source is read {limit} time(s)"
        seen.sort(key=lambda s: s.sample)
        return DocumentHistory(
            source=source, file=name, row=local, source_row=source_row, seen=tuple(seen), upcoming=upcoming, never=never,
            last_step=self.record.last_step, windows=self.windows_made, seconds=self.seconds,
        )  # fmt: skip

    def rebuild(self, samples: Iterable[int]) -> list[RebuiltSample]:
        """The samples with their windows rebuilt, in the same order."""
        places = [self.record.place(g) for g in samples]
        keys: dict[WindowKey, None] = {}
        for place in places:
            if place.window is not None:
                keys[self._key(place.lane, place.source, place.window)] = None
        windows = self._rebuilt_windows(keys)
        rebuilt = []
        for place in places:
            if place.window is None:
                rebuilt.append(RebuiltSample(place, None, FILLER_HASH))
                continue
            window = windows[self._key(place.lane, place.source, place.window)]
            if place.block >= len(window.blocks):
                raise self._other_window(place, len(window.blocks))
            rebuilt.append(RebuiltSample(place, window, window.blocks.hashes[place.block].tobytes()))
        return rebuilt

    def pieces(self, rebuilt: RebuiltSample, chars: int | None = 200) -> list[tuple[Piece, str | None]]:
        """The pieces of a sample with the beginnings of their texts."""
        return [(piece, self._excerpt(rebuilt, piece, chars)[0]) for piece in self._pieces(rebuilt)]

    # ------------------------------------------------------------------------------- the run's records

    @cached_property
    def record(self) -> SampleRecord:
        lanes = self.run.config["loader"]["lanes"]
        lanes = MOST_LANES if lanes == "auto" else lanes
        return SampleRecord(self.path / "flight.jsonl", lanes=lanes, names=self.names)

    def _no_digest(self) -> str:
        """Why a step has no digest."""
        if self._damaged_digests:
            lines = ", ".join(map(str, self._damaged_digests[:8]))
            return f"{self.path / 'digests.jsonl'} is damaged (line {lines})"
        return "the run was stopped before it recorded this step's digest"

    @cached_property
    def digests(self) -> dict[int, int]:
        """The digest of every step, over all ranks; of a step that was taken twice the second."""
        found: dict[int, int] = {}
        self._damaged_digests: list[int] = []
        path = self.path / "digests.jsonl"
        for line in read_lines(path, follow=True) if os.path.lexists(path) else ():
            try:
                value = orjson.loads(line.text or b"")
                first, digests = int(value["first"]), [int(d, 16) for d in value["digests"]]
            except (KeyError, TypeError, ValueError):
                self._damaged_digests.append(line.number)
                continue
            # A line that begins at an earlier step replaces all steps from there on: they were taken again after a kill.
            step = first + len(digests)
            while step in found:
                del found[step]
                step += 1
            found |= {first + i: d for i, d in enumerate(digests)}
        return found

    @cached_property
    def worlds(self) -> list[tuple[int, int]]:
        """(steps taken before, ranks) of every start and resume; the last one before a step holds for it."""
        found: list[tuple[int, int]] = []
        for value in read_jsonl(self.path / "journal.jsonl"):
            step, ranks = value.get("step"), value.get("world_size")
            if value.get("event") in ("started", "resumed") and isinstance(step, int) and isinstance(ranks, int):
                found.append((step, ranks))
        return found

    @cached_property
    def fingerprint(self) -> dict[str, str] | None:
        """Fingerprint of the data at the newest readable checkpoint; None without one."""
        store = CheckpointStore(self.path / "checkpoints", writer=False, report=lambda _: None)
        for step in reversed(store.steps()):
            try:
                meta = open_container(store.path(step), verify=False).meta
                in_spool = meta["data"]["body"].get("data")  # of a run over a spool: that of the provider's dataset
                return {str(k): str(v) for k, v in (in_spool or meta["data"]["fingerprint"]).items()}
            except (FileCorrupt, KeyError, TypeError, AttributeError):
                continue
        return None

    @cached_property
    def data(self) -> TextDataset:
        """The run's dataset, opened again; refused if it is not what the newest checkpoint says it was."""
        # Reading a chunk records its hash. That must not happen in the folder of a run that may be going on.
        records = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="headrace-provenance-")))
        _copy_records(self.path / "records", records)
        data = self.run.open_dataset(records)
        self._resources.callback(data.close)
        data.keep_sizes(self.record.sizes)
        self._refuse_changes(data)
        return data

    def world_at(self, step: int) -> int:
        """How many ranks took a step; 1 if the journal does not say."""
        return next((ranks for before, ranks in reversed(self.worlds) if before < step), 1)

    # ------------------------------------------------------------------------------------------ details

    def _refuse_changes(self, data: TextDataset) -> None:
        saved = self.fingerprint
        if saved is None:
            return
        now = data.fingerprint()
        # Weights say which source is next, which the record knows; they are no part of a window.
        differing = [k for k in sorted(saved.keys() | now.keys()) if k != "weights" and saved.get(k) != now.get(k)]
        if not differing:
            return
        phrases = [phrase for source in data.sources for phrase in source.describe_change(saved)]
        phrases += [
            f"{k} was {saved.get(k, 'not there')}, is {now.get(k, 'not there')}"
            for k in differing
            if not k.startswith("data:")
        ]
        raise DataChanged(
            f"cannot show what {self.path} delivered, because its data changed: {'; '.join(phrases[:5] or differing[:5])}. "
            f"{self._remedy()}"
        )

    def _remedy(self) -> str:
        base, version = self.run.config["run"]["base"], self.run.version
        return f"Restore what the run read (paths start at {base}), and use headrace {version}, which made it."

    def _rebuilt_windows(self, keys: Mapping[WindowKey, None]) -> dict[WindowKey, Window]:
        data, began = self.data, time.perf_counter()
        threads = max(min(_THREADS, len(keys), os.cpu_count() or 1), 1)
        with Wait("provenance.windows", meter=data.meter), ThreadPoolExecutor(threads, "headrace-provenance") as pool:
            made = list(pool.map(self._make, keys))
        self.windows_made += len(made)
        self.seconds += time.perf_counter() - began
        return dict(zip(keys, made, strict=True))

    def _make(self, key: WindowKey) -> Window:
        index, lane, start = key
        if start.offset:  # a record that was tampered with must not reach the compiled loops
            tokens = 0
            for span in self.data.deals[index].spans(lane, start.epoch, start.position, 1):
                text = self.data.chunks.texts(index, self.data.sources[index], int(span.chunks[0]))[int(span.rows[0])]
                tokens = int(self.data.packing.lengths(self.data.tokenizer.encode([text or ""]).counts()).sum())
            if start.offset >= tokens:
                raise DataChanged(
                    f"{self.record.path} says that a window of source {self.names[index]} began after {start.offset:,} tokens of "
                    f"a document that has {tokens:,}. {self._remedy()}"
                )
        return self.data.make_window(key, None)[0]

    def _key(self, lane: int, source: int, window: OpenedWindow) -> WindowKey:
        if source >= len(self.names):
            raise ConfigError(
                f"{self.path} read source {self.record.names[source]} before it was taken out of its config: put it back into "
                "a copy of the folder's config.toml to show these steps"
            )
        return source, lane, window.start

    def _other_window(self, place: SamplePlace, blocks: int) -> DataChanged:
        assert place.window is not None
        epoch, position, _ = place.window.start
        return DataChanged(
            f"cannot show sample {place.sample} of {self.path}: it was block {place.block} of the window of source "
            f"{self.names[place.source]} at lane {place.lane}, epoch {epoch}, position {position:,}, which rebuilt has {blocks} "
            f"blocks. {self._remedy()}"
        )

    def _pieces(self, rebuilt: RebuiltSample) -> list[Piece]:
        if rebuilt.window is None:
            return []
        return self.data.makers[rebuilt.place.source].pieces(rebuilt.window, rebuilt.place.block, rebuilt.place.sample)

    def _excerpt(self, rebuilt: RebuiltSample, piece: Piece, chars: int | None) -> tuple[str | None, bool]:
        if chars is None or rebuilt.window is None:
            return None, False
        ids = rebuilt.window.blocks.tokens[rebuilt.place.block, piece.column : piece.column + piece.length]
        # No character takes more than four tokens, so this many tokens hold all characters that are shown.
        few = ids[: 4 * chars + 4]
        text = self.data.tokenizer.decode(few)
        return text[:chars], len(text) > chars or len(few) < len(ids)

    def _world(self, step: int, samples: int, world: int | None, rank: int | None) -> int:
        size = self.world_at(step) if world is None else world
        if size < 1 or samples % size:
            raise ConfigError(f"{size} ranks cannot share {samples} samples: give a --world that divides them")
        if rank is not None and not 0 <= rank < size:
            raise ConfigError(f"--rank {rank} is not one of the {size} rank(s) of step {step}: give 0 to {size - 1}")
        return size

    # --------------------------------------------------------------------------------------------- find

    def _located(self, index: int, row: int, file: str | None) -> tuple[int, str, int]:
        """(row of the source, file, row of the file)."""
        manifest, name = self.data.sources[index].manifest, self.names[index]
        if file is None:
            if not 0 <= row < manifest.rows:
                raise ConfigError(
                    f"source {name} has rows 0 to {manifest.rows - 1:,}, there is no row {number_text(row)}"
                )
            at, local = manifest.locate(row)
            return row, manifest.files[at].path, local
        paths = [f.path for f in manifest.files]
        fitting = [i for i, p in enumerate(paths) if p == file] or [
            i for i, p in enumerate(paths) if p.endswith(f"/{file}") or file.endswith(f"/{p}")
        ]
        if len(fitting) != 1:
            why = f"{len(fitting)} files of that name" if fitting else "no such file"
            raise ConfigError(f"source {name} has {why}: {found_text(file)}{did_you_mean(file, paths)}")
        entry = manifest.files[fitting[0]]
        if not 0 <= row < entry.rows:
            raise ConfigError(f"{entry.path} has rows 0 to {entry.rows - 1:,}, there is no row {number_text(row)}")
        return int(manifest.file_first_row[fitting[0]]) + row, entry.path, row

    def _why_never(self, index: int, chunk: int, row: int) -> str | None:
        """Why a document cannot be in any batch, if it cannot."""
        deal = self.data.deals[index]
        if row >= deal.chunk_rows[chunk]:
            return f"max_rows = {self.data.sources[index].source.max_rows} leaves it out"
        if not self.data.chunks.texts(index, self.data.sources[index], chunk)[row]:
            return "it has no text, or is a bad row that was skipped"
        return None

    def _epochs(self, index: int) -> Sequence[int]:
        """The epochs of a source that some lane has begun, and the next."""
        begun = {w.start.epoch for lane in range(self.record.lanes) for w in self.record.windows(lane, index)}
        return [*sorted(begun), max(begun, default=-1) + 1]

    def _occurrences(
        self, index: int, lane: int, epoch: int, position: int, document: tuple[str, int]
    ) -> tuple[list[Occurrence], bool, int]:
        """Where an epoch's copy of a document was delivered, whether all of it was, and how far the lane has opened."""
        windows = [w for w in self.record.windows(lane, index) if w.start.epoch == epoch]
        at = sum(w.start.position <= position for w in windows) - 1
        found: list[Occurrence] = []
        tokens, reached = 0, 0
        candidates: list[OpenedWindow] = []
        while at >= 0:  # a document that is cut between windows is also in the window before
            candidates.append(windows[at])
            if windows[at].start.position < position or not windows[at].start.offset:
                break
            at -= 1
        made = self._rebuilt_windows({self._key(lane, index, w): None for w in candidates})
        whole = True
        for window in candidates:
            blocks = made[self._key(lane, index, window)]
            reached = max(reached, blocks.end.position)
            for block in range(len(blocks.blocks)):
                pieces = [p for p in self.data.makers[index].pieces(blocks, block, 0) if (p.file, p.row) == document]
                if not pieces:
                    continue
                sample = self.record.sample_of(lane, index, window, block)
                if sample is None:
                    whole = False
                    continue
                for piece in pieces:
                    tokens += piece.length
                    found.append(self._occurrence(epoch, sample, piece))
            # The end of the document is in the next window, which is not open yet.
            whole &= not (blocks.end.position == position and blocks.end.offset and window is candidates[0])
        return found, whole and tokens > 0, reached

    def _occurrence(self, epoch: int, sample: int, piece: Piece) -> Occurrence:
        step = self.record.step_of(sample)
        rank = position = 0
        if step is not None:
            rank, position = _row(sample, self.record.span(step).start, self.world_at(step))
        return Occurrence(
            epoch=epoch, step=step, sample=sample, rank=rank, position=position, column=piece.column, start=piece.start,
            length=piece.length,
        )  # fmt: skip


def _row(sample: int, first: int, world: int) -> tuple[int, int]:
    """(rank, row of its batch) of a sample of the step that begins at `first`."""
    rank = sample % world
    return rank, (sample - first - (rank - first) % world) // world


def _copy_records(source: Path, target: Path) -> None:
    """The chunk hashes of a run, for the dataset to compare with and add to."""
    for path in source.glob("*.chunks"):
        if path.is_symlink() or not path.is_file():
            continue
        if path.stat().st_size > _MAX_RECORDS:
            raise FileCorrupt(f"{path} is no file of chunk hashes: it has more than {_MAX_RECORDS:,} bytes")
        shutil.copyfile(path, target / path.name)
