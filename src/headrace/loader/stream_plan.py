"""Streams as a plan of the loader: K files of cells are open, and a pick says which of them gives the next batch.

What comes next is `mix.plan`, which reads nothing. It runs ahead and says what to read. The state after a draw travels with its batch, and counts when the
batch is handed over (`mix.MixState`): state and metrics are exact under any prefetch and any number of worker processes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from headrace.batch import BatchSpec
from headrace.errors import ConfigError, CursorMismatch, DataError, DeadlineExceeded
from headrace.loader.batch_fill import COUNTS
from headrace.loader.loader_plan import BatchMaker, LoaderPlan, Rank, States
from headrace.loader.stream_metrics import PoolMetrics, stream_specs
from headrace.metrics import Histogram, MetricSpec
from headrace.mix import MixPlan, MixState, PlanStep, Reshard, rank_share, worker_of
from headrace.order import Cursor, fingerprint_json
from headrace.settings import LoaderSettings
from headrace.sources.cell_hashes import CellHashes
from headrace.sources.cell_readers import CellProcesses, CellReaders, rows_text
from headrace.sources.cells import Cells
from headrace.sources.stream_files import kept_listing

if TYPE_CHECKING:
    from headrace.loader.streams import StreamDataset

_log = logging.getLogger(__name__)
KIND, VERSION = "stream_mixing", 1
_UNITS_AT_ONCE, _UNITS_HELD = 8, 256
"""Units of 64 to 128 KiB (sources.cell_hashes) that are worth one read, and that all open files may hold."""
_RESERVED = ("stream_id", "row", "modality", "draw", "stream_epoch")


@dataclass(slots=True)
class StreamState:
    """What was delivered. `mix` is what is saved; rows are those of this rank, since it began or loaded a state."""

    mix: MixState
    world_size: int
    rows: list[int]
    """By modality."""
    ended: bool = False

    @property
    def step(self) -> int:
        """Batches that each rank was given."""
        return self.mix.index // (self.world_size if self.mix.settings.batching_mode == "device_per_stream" else 1)

    @property
    def delivered(self) -> dict[str, int]:
        return dict.fromkeys(COUNTS, 0) | dict.fromkeys(("tokens", "rows", "samples"), sum(self.rows))

    @property
    def tokens_by_source(self) -> list[int]:
        return self.rows


class StreamPlan(LoaderPlan[StreamState]):
    """Files of cells. The state is where the delivered draws have brought every lane: any rank's state will do for all."""

    room = "streams"
    next_wait = "streams.next"
    batch_wait = "streams.batch"
    unit = "cells"
    data: StreamDataset

    def __init__(self, data: StreamDataset, settings: LoaderSettings, rank: Rank) -> None:
        super().__init__(data, settings, rank)
        plain = LoaderSettings()
        problems = settings.problems() + [
            f"{name} is for batches of tokens, and these are batches of cells: leave it out"
            for name in ("global_batch_size", "fields", "segment_ids", "labels", "tokenizer_workers", "data_loader_workers", "skip")
            if getattr(settings, name) != getattr(plain, name)
        ]  # fmt: skip
        if problems:
            raise ConfigError(problems)
        # Files read in this process are read in the background thread: a read that hangs there still has a deadline in `next()`.
        self.take_makes = data.num_workers > 0
        self.ahead = MixPlan(data.table, data.mix)
        """Runs ahead. The lanes of other ranks stay behind until the state is asked for."""
        self.resharded = Reshard(parked=0, dropped=0)
        self._accept_changes = False
        self._hashes: CellHashes | None = None
        self.processes: CellProcesses | None = None
        self._own: list[int] = []
        """The lanes whose draws this rank delivers."""
        self._new_state()

    def _new_state(self) -> None:
        self.state = StreamState(MixState(self.ahead), self.rank.world_size, [0] * len(self.data.table.kinds))
        self._metrics = PoolMetrics(self.data.table.kinds)

    # -------------------------------------------------------------------------------------- delivery

    def check_rank(self, rank: Rank) -> None:
        """Refuse a number of ranks that cannot share the lanes."""
        mix = self.data.mix
        if mix.batching_mode == "device_per_stream" and mix.lanes % rank.world_size:
            fitting = [n for n in range(1, mix.lanes + 1) if mix.lanes % n == 0]
            raise ConfigError(
                f"{rank.world_size} ranks cannot share {mix.lanes} lanes, because the number of ranks must divide them; start "
                f"{', '.join(map(str, fitting))} ranks, or change lanes (that may be done at a resume)"
            )

    def move_to(self, rank: Rank) -> None:
        """Be another rank from the next batch on; nothing may be in the making."""
        self.check_rank(rank)
        self.mix()  # the lanes that were those of other ranks catch up
        self.rank, self.state.world_size = rank, rank.world_size
        self._own = self.ahead.lanes_of(rank.rank, rank.world_size)

    def start(self) -> StreamMaker:
        self.move_to(self.rank)
        self.ahead.load(self.state.mix)
        data, files, world = self.data, self.data.listing.files, self.rank.world_size
        # The rows after a rank's share of a draw are those of another rank.
        shared = world > 1 and data.mix.batching_mode == "per_stream"
        open_files = data.mix.slots * len(self._own)
        options: dict[str, Any] = {
            "columns": data.columns, "readers": data.readers,
            "units_at_once": 1 if shared else max(1, min(_UNITS_AT_ONCE, _UNITS_HELD // open_files)),
        }  # fmt: skip
        recorded = {"path": data.records, "accept": self._accept_changes}
        waits: dict[str, Any] = {"meter": self.meter, "deadline": self.settings.deadline}
        if data.num_workers:
            if self.processes is None:
                self.processes = CellProcesses(files, workers=data.num_workers, hashes=recorded, **waits, **options)
            self.processes.forget()
            return StreamMaker(self, None)
        if self._hashes is None:
            self._hashes = CellHashes(files=files, **recorded)
        return StreamMaker(self, CellReaders(files, hashes=self._hashes, **waits, **options))

    def deliver(self, ready: tuple[_Read, Any]) -> Any:
        read, batch = ready
        self.state.mix.add(read.step)
        if read.step.draw.stream >= 0:
            self.state.rows[self.data.table.kind_of[read.stream]] += read.stop - read.start
        return batch

    def next_pass(self) -> None:
        self.state.mix.next_epoch(self.ahead)
        self.state.ended = False

    def skip_to_pass(self, number: int) -> None:
        """Only per_stream has passes: lanes of device_per_stream begin their next epoch by themselves."""
        if self.data.mix.batching_mode != "per_stream":
            return
        state, epoch = self.state, self.state.mix.lanes[0].epoch
        if number > epoch + 1 if state.ended else state.mix.index == 0 and number > epoch:
            over = {"epoch": number - 1, "queue_index": len(self.ahead.dealt[0]), "streams": [], "positions": []}
            self.ahead.load_body(state.mix.to_body() | {"lanes": [over]})
            self._new_state()
            self.state.ended = True

    def __len__(self) -> int:
        if self.data.repeat or self.data.mix.batching_mode == "device_per_stream":
            raise TypeError("streams that begin the next epoch by themselves have no length")
        return sum(self.ahead.picks)

    def close(self) -> None:
        for held in (self.processes, self._hashes):
            if held is not None:
                held.close()
        self.processes = self._hashes = None

    # ------------------------------------------------------------------------------------------ state

    def mix(self) -> MixState:
        """Where all lanes stand, those of other ranks too."""
        self.state.mix.catch_up(self.ahead, self._own)
        return self.state.mix

    def state_dict(self) -> dict[str, Any]:
        self.data.listing.keep(self.data.cache)
        body = self.mix().to_body()
        if self.state.ended:
            body["ended"] = True
        return Cursor(kind=KIND, version=VERSION, fingerprint=self._fingerprint(), body=body).to_dict()

    def load_state_dict(
        self,
        state: States,
        *,
        accept: Collection[str],
        fixed: Mapping[str, str],
        saved_listing: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """`saved_listing` (`StreamListing.to_json`; default: the one in the cache) is what the state was saved on, for a refusal to name the files."""
        data = self.data
        cursor = Cursor.from_dict(self.merge(state if isinstance(state, Sequence) else [state]))
        try:
            cursor.require(kind=KIND, version=VERSION, fingerprint=self._fingerprint(), accept=accept, fixed=fixed)
        except CursorMismatch as error:
            if "data" not in error.differences:
                raise
            saved, now = error.differences["data"]
            changed = data.listing.changes_since(
                saved_listing or kept_listing(str(saved), data.cache) or data.listing.to_json()
            )
            more = f"; and {len(changed) - 5} more" if len(changed) > 5 else ""
            named = (
                f"data: {'; '.join(changed[:5])}{more}"
                if changed
                else "data: the stream files changed, which of them is not known here"
            )
            raise CursorMismatch(
                str(error).replace(f"data: saved {saved}, now {now}", named), error.differences
            ) from error
        plan = MixPlan(data.table, data.mix)  # nothing is changed if the state does not fit
        self.resharded = plan.load_body(cursor.body, drop=data.on_reshard == "drop")
        if self._accept_changes != ("data" in accept):
            self.close()  # processes and hashes that know the old answer
            self._accept_changes = not self._accept_changes
        self.ahead = plan
        self._new_state()
        self.state.ended = bool(cursor.body.get("ended", False))
        for line in self.resharded.lines():
            _log.info(line)

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not states:
            raise CursorMismatch("the list of states is empty")
        draws = {one["body"]["draw"] for one in states} if len(states) > 1 else ()
        if len(draws) > 1:
            raise CursorMismatch(
                f"the ranks' states are of different places (after {', '.join(map(str, sorted(draws)))} batches); save them at "
                "the same step"
            )
        return dict(states[0])

    def _fingerprint(self) -> dict[str, str]:
        chosen = self.data.mix
        sizes = ",".join(f"{m}={n}" for m, n in sorted(chosen.batch_size.items()))
        return {
            "data": self.data.listing.fingerprint,
            "config:batching_mode": chosen.batching_mode,
            "config:batch_size": sizes if len(sizes) <= 80 else fingerprint_json(sizes),
            "config:global_ranks": str(chosen.global_ranks),
            "config:pick_mode": chosen.pick_mode,
            "config:queue": chosen.queue,
            "config:seed": str(chosen.seed),
        }

    # ---------------------------------------------------------------------------------------- insight

    @property
    def spec(self) -> BatchSpec:
        raise TypeError("the fields of these batches are those of the files, and of the collator")

    @property
    def names(self) -> Sequence[str]:
        return self.data.table.kinds

    def targets(self) -> Sequence[float]:
        """The modalities' shares of all rows."""
        table = self.data.table
        rows = [
            sum(n for n, k in zip(table.rows, table.kind_of, strict=True) if k == i) for i in range(len(table.kinds))
        ]
        return [n / (sum(rows) or 1) for n in rows]

    def metric_specs(self) -> tuple[MetricSpec, ...]:
        return (*stream_specs(self.data.table.kinds), *Histogram("loader/next").metric_specs())

    def drain(self) -> dict[str, int | float]:
        return self._metrics.drain(self.state.mix)


class _Read(NamedTuple):
    """Rows to be read for a draw: this rank's share of them."""

    step: PlanStep
    stream: int
    start: int
    stop: int


class StreamMaker(BatchMaker):
    """Batches in the order of the plan that runs ahead."""

    def __init__(self, plan: StreamPlan, files: CellReaders | None) -> None:
        """`files` are read in this process; None: by the plan's worker processes."""
        data = plan.data
        self._data, self._rank, self._plan = data, plan.rank, plan.ahead
        self._files, self._processes = files, plan.processes
        self._ahead_of = max(2, min(data.mix.slots, 8))
        """How many of the files that come into a lane's pool next are opened ahead."""
        self._some_stream = next(s for s, n in enumerate(data.table.rows) if n)
        self._shares = data.mix.batching_mode == "per_stream"
        self._reading: _Read | None = None
        """What is being read, or was read last."""
        self._asked: deque[_Read] = deque()
        # Requests are small and few enough to fit into the pipe of a busy reader: asking never blocks.
        self._depth = min((plan.settings.prefetch_batches + 1) * data.num_workers, 256) if files is None else 1
        self._checked: set[int] = set()
        if files is not None:
            for lane in self._plan.lanes_of(plan.rank.rank, plan.rank.world_size):
                files.expect(self._plan.lanes[lane].upcoming(self._ahead_of))

    def explained(self, error: DeadlineExceeded) -> DeadlineExceeded:
        """The error with the file and rows that are being read, unless it names the file itself."""
        read = self._reading
        if read is None or (path := self._data.stream_paths[read.stream]) in str(error):
            return error
        return DeadlineExceeded(f"{error} It is reading {rows_text(path, read.start, read.stop)}.")

    def close(self) -> None:
        if self._files is not None:
            self._files.close()

    def make_next(self) -> tuple[_Read, Any] | None:
        while len(self._asked) < self._depth and (read := self._next_read()) is not None:
            self._asked.append(read)
        if not self._asked:
            return None
        read = self._reading = self._asked.popleft()
        if self._files is not None:
            cells = self._files.read(read.stream, read.start, read.stop, dry=read.step.draw.dry)
        else:
            assert self._processes is not None
            cells = self._processes.answer()
        return read, self._batch(read, cells)

    def _next_read(self) -> _Read | None:
        """What the plan says comes next, asked of the worker processes if there are any; None at the end."""
        plan, rank = self._plan, self._rank
        if plan.over:
            if not self._data.repeat:
                return None
            plan.next_epoch()
        step = plan.next_step(rank.rank, rank.world_size)
        draw = step.draw
        start, stop = draw.start, draw.stop
        if self._shares:
            start, stop = rank_share(start, stop, rank.rank, rank.world_size)
        read = _Read(step, draw.stream if draw.stream >= 0 else self._some_stream, start, stop)
        if self._files is None:
            assert self._processes is not None
            self._processes.ask(
                worker_of(draw, self._data.num_workers), read.stream, read.start, read.stop, dry=draw.dry
            )
        elif draw.dry:
            self._files.expect(plan.lanes[draw.lane].upcoming(self._ahead_of))
        return read

    def _batch(self, read: _Read, cells: Cells) -> Any:
        data, draw = self._data, read.step.draw
        stream = draw.stream
        if stream not in self._checked:
            self._refuse_reserved(stream, cells)
        rows = np.arange(read.start, read.stop, dtype=np.int64)
        groups = cells.get(data.group_key)
        cells = {
            **cells,
            "group_id": (stream << 32) + rows if groups is None else _group_ids(data, stream, groups),
            "stream_id": np.full(len(rows), stream, dtype=np.int64),
            "row": rows,
        }
        batch = data.collate(cells)
        if isinstance(batch, dict):
            modality = data.table.modalities[stream] if stream >= 0 else ""
            batch.update(modality=modality, draw=draw.index, stream_epoch=draw.epoch)
        return batch

    def _refuse_reserved(self, stream: int, cells: Cells) -> None:
        for name in _RESERVED:
            if name in cells:
                raise DataError(
                    f"{self._data.stream_paths[stream]} has a column {name!r}, which headrace adds itself. Rename it, or leave it out "
                    "with columns=."
                )
        self._checked.add(stream)


def _group_ids(data: StreamDataset, stream: int, column: np.ndarray) -> np.ndarray:
    """Whole numbers as they are; strings by a hash of 63 bits, the same on every machine."""
    if column.dtype == object and all(isinstance(item, str) for item in column):
        hashed = (xxhash.xxh3_64_intdigest(item.encode("utf-8", "surrogatepass")) >> 1 for item in column)
        return np.fromiter(hashed, dtype=np.int64, count=len(column))
    if column.dtype.kind not in "iu" or column.ndim != 1:
        raise DataError(
            f"column {data.group_key!r} of {data.stream_paths[stream]} is {column.dtype} with shape {column.shape}; a group is "
            "one whole number or one string a cell. Set group_key to the column that holds it."
        )
    return column.astype(np.int64, copy=False)
