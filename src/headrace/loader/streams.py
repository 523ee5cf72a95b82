"""Files of cells become mixed batches: K files open at a time, drained evenly, resumable on any shape.

    data = StreamMixingDataset("cells/", batch_size={"rna": 64, "atac": 32}, num_streams_mixed=8, seed=7)
    for batch in data:                      # dict of tensors; every cell with its group_id and stream_id
        ...
        metrics = data.aggregate_step_metrics(data.drain_step_metrics(), world_size, device)
    data.state_dict()                       # a few hundred bytes: what was delivered

    per_stream          one plan; all ranks draw the same stream at a step, each its share of the rows
    device_per_stream   L lanes with streams of their own; lane l belongs to rank l mod W, and none ever lacks a batch

What comes next is `mix.plan`, which reads nothing. One copy of it runs ahead and says what to read; another stands where batches
were handed over, and state and metrics come from that one: they are exact under any prefetch and any number of worker processes.
Handing over counts, and the second copy draws what was counted when somebody asks, or 64 at a time: between two reads of half a
megabyte each the processor has forgotten the plan's code, and one draw costs three times what it costs among others.
Imports torch, so only on request.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.utils.data import IterableDataset, get_worker_info

from headrace.batch import DEFAULT_PREFETCH_BATCHES
from headrace.errors import ConfigError, CursorMismatch, DataError, DeadlineExceeded, EndOfData
from headrace.loader.stream_metrics import PoolMetrics, stream_specs, without_counts
from headrace.metrics import Meter, MetricSpec, Reducer, Wait, default_meter
from headrace.mix import (
    BatchingMode,
    Draw,
    LanePool,
    MixPlan,
    MixSettings,
    PickMode,
    Queue,
    Reshard,
    StreamTable,
    rank_share,
    worker_of,
)
from headrace.order import Cursor, fingerprint_json
from headrace.runtime.background import BackgroundThread
from headrace.runtime.prefetch import Prefetch
from headrace.sources.cell_hashes import CellHashes, record_name
from headrace.sources.cell_readers import CellProcesses, CellReaders, rows_text
from headrace.sources.cells import CellOpener, Cells, registered_cells
from headrace.sources.opened import cache_folder
from headrace.sources.stream_files import Layout, StreamListing, kept_listing, list_streams

__all__ = ["StreamMixingDataset", "StreamReader", "cells_to_tensors"]

_log = logging.getLogger(__name__)

KIND, VERSION = "stream_mixing", 1
_AT_A_TIME = 64
"""Draws that a plan makes in one go."""
_ROWS_AT_A_TIME = 1 << 16
_READ_AT_ONCE, _KEPT = 1 << 20, 1 << 25
"""Bytes that are worth one read, and bytes that all open files may keep: 16 batches of 64 KiB cost two thirds of 16 reads."""
_RESERVED = ("stream_id", "row", "modality", "draw", "stream_epoch")

Collate = Callable[[Cells], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReader:
    """One slice of the pool, as it stands: the rows [slice_start, slice_end) of a stream, read up to `position`."""

    stream_id: int
    path: str
    slice_start: int
    slice_end: int
    position: int
    remaining_picks: int


def cells_to_tensors(cells: Cells) -> dict[str, Any]:
    """The default collator: arrays become tensors; strings and ragged lists stay lists."""
    batch: dict[str, Any] = {}
    for name, column in cells.items():
        if column.dtype == object:
            batch[name] = list(column)
        else:
            own = column if column.flags.writeable and column.flags.c_contiguous else np.array(column, order="C")
            batch[name] = torch.from_numpy(own)
    return batch


class StreamMixingDataset(IterableDataset):
    """Batches of cells from many files. Iterate it directly, or through `DataLoader(data, batch_size=None)`.

    A batch has the file's columns, `group_id` (int64; a column of that name, or a cell of its own each), `stream_id`, `row`,
    `modality`, `stream_epoch` and `draw`, the number of the batch over all ranks. A share may have no rows: take the loss as sum / count over
    all ranks, and take part in every collective.
    """

    def __init__(
        self,
        roots: str | Path | Sequence[str | Path],
        *,
        batch_size: int | Mapping[str, int],
        num_streams_mixed: int = 8,
        layout: Layout = "nested",
        batching_mode: BatchingMode = "per_stream",
        pick_mode: PickMode = "proportional",
        queue: Queue = "stratified",
        seed: int = 0,
        global_ranks: int = 1,
        lanes: int | None = None,
        repeat: bool = False,
        on_reshard: Literal["park", "drop"] = "park",
        columns: Sequence[str] | None = None,
        group_key: str = "group_id",
        collate: Collate | None = None,
        readers: Mapping[str, CellOpener] | None = None,
        num_workers: int = 0,
        prefetch_batches: int = DEFAULT_PREFETCH_BATCHES,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        allow_symlinks: bool = False,
        base: Path | None = None,
        cache: Path | None = None,
        records: Path | None = None,
        deadline: float = 300.0,
        meter: Meter | None = None,
        listing: StreamListing | None = None,
    ) -> None:
        """List the files and make the plan; nothing else is read yet.

        `roots` are folders of files in the given `layout`; relative ones are below `base`. `allow_symlinks` follows links. `listing` gives files that are listed
        already. `readers` adds formats by suffix.
        `num_streams_mixed` is K, the files that are open at a time. `batching_mode`, `pick_mode`, `queue` and `seed` decide the order (docs/guides/streams.md).
        `group_key` names the column of group ids. `collate` makes the batch from the columns. `dp_rank` and `dp_world_size` are this rank, from
        torch.distributed unless given. `deadline` is in seconds and holds for each wait; `meter` counts them.
        `batch_size` is in rows, for a rank, by modality or one for all. `global_ranks` belongs to the run: a pick of per_stream
        covers batch_size x global_ranks rows, shared out to however many ranks there are today. `lanes` (device_per_stream;
        default global_ranks) may change at a resume; the number of ranks must divide it. `repeat` begins the next epoch by
        itself (device_per_stream always does). `on_reshard="drop"` loses the rest of slices that a smaller pool has no slot
        for, as the log then says; by default they wait at the head of the queue. `columns` leaves out the others.
        `num_workers` are processes that read; `prefetch_batches` are made ahead by a thread. `records` is the folder of content hashes of
        the rows that were read, as a rule the run's own; without it they lie in the cache and hold for this place on this machine.
        """
        problems = [
            f"{name} must be {wanted}, got {value!r}"
            for name, value, wanted, holds in (
                ("on_reshard", on_reshard, "park or drop", on_reshard in ("park", "drop")),
                ("num_workers", num_workers, "between 0 and 256", 0 <= num_workers <= 256),
                ("prefetch_batches", prefetch_batches, "between 0 and 65,536", 0 <= prefetch_batches <= 1 << 16),
                ("deadline", deadline, "above 0 seconds", deadline > 0),
                ("batch_size", batch_size, "1 row or more", not isinstance(batch_size, int) or batch_size >= 1),
            )
            if not holds
        ]
        if problems:
            raise ConfigError(problems)
        self._readers = {**registered_cells(), **(readers or {})}
        self.listing = listing if listing is not None else list_streams(
            roots, layout=layout, base=base, readers=self._readers, allow_symlinks=allow_symlinks, cache=cache
        )  # fmt: skip
        self.layout = layout
        self.table = StreamTable(
            paths=tuple(f.name for f in self.listing.files),
            rows=tuple(f.rows for f in self.listing.files),
            modalities=tuple(f.modality for f in self.listing.files),
        )
        sizes = dict.fromkeys(self.table.kinds, batch_size) if isinstance(batch_size, int) else dict(batch_size)
        unknown = [m for m in sizes if m not in self.table.kinds]
        if unknown:
            raise ConfigError(
                f"batch_size names {', '.join(unknown)}, and there is no such modality; there are {', '.join(self.table.kinds)}"
            )
        rolls = batching_mode == "device_per_stream"
        self.settings = MixSettings(
            batch_size=sizes, slots=num_streams_mixed, seed=seed, queue=queue, pick_mode=pick_mode, batching_mode=batching_mode,
            global_ranks=global_ranks, lanes=(lanes or global_ranks) if rolls else lanes or 1,
        )  # fmt: skip
        self.stream_paths = [f.path for f in self.listing.files]
        self.stream_groups = list(self.table.modalities)
        self._repeat = repeat
        self._on_reshard = on_reshard
        self._columns = None if columns is None else list(dict.fromkeys(columns))
        self._group_key = group_key
        self._collate = collate if collate is not None else cells_to_tensors
        self._num_workers = num_workers
        self._prefetch = prefetch_batches
        self._given_rank = (dp_rank, dp_world_size)
        if (dp_rank is None) != (dp_world_size is None):
            raise ConfigError("dp_rank and dp_world_size belong together; give both or neither")
        self._cache = cache
        where = [] if records is not None else [str(Path(f.path).parent) for f in self.listing.files]
        self._records = (records if records is not None else (cache or cache_folder()) / "records") / record_name(
            self._columns, *dict.fromkeys(where)
        )
        self._accept_changes = False
        self._hashes: CellHashes | None = None
        self._deadline = deadline
        self._meter = meter if meter is not None else default_meter()
        self._watched = MixPlan(self.table, self.settings)
        self._behind = 0
        """Batches handed over that the watched plan has not drawn yet; the last of them is `_last`."""
        self._last: Draw | None = None
        self._shape = (0, 1)
        """The rank that iterates, and of how many; to ask costs a microsecond."""
        self._own: list[LanePool] | None = None
        """The lanes whose draws this rank delivers, once that is known."""
        self._metrics = PoolMetrics(self.table.kinds)
        self.resharded = Reshard(parked=0, dropped=0)
        """What the last `load_state_dict` did to readers that a smaller pool has no slot for."""
        self._ended = False
        self._pass: _Pass | None = None
        self._processes: CellProcesses | None = None
        self._reducers: dict[tuple[str, Any, str], Reducer] = {}

    # -------------------------------------------------------------------------------------------- iterating

    @property
    def rank(self) -> tuple[int, int]:
        """(rank, world size): as given, or torch.distributed's, or (0, 1)."""
        rank, world = self._given_rank
        if rank is None or world is None:
            joined = dist.is_available() and dist.is_initialized()
            rank, world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        if not 0 <= rank < world:
            raise ConfigError(f"rank {rank} of {world} ranks: expected 0 <= rank < world size")
        if self.settings.batching_mode == "device_per_stream" and self.settings.lanes % world:
            fitting = [n for n in range(1, self.settings.lanes + 1) if self.settings.lanes % n == 0]
            raise ConfigError(
                f"{world} ranks cannot share {self.settings.lanes} lanes, because the number of ranks must divide them; start "
                f"{', '.join(map(str, fitting))} ranks, or change lanes (that may be done at a resume)"
            )
        return rank, world

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise ConfigError(
                "StreamMixingDataset is iterated inside a DataLoader worker; its state and its metrics would stay there. Give "
                "num_workers to the dataset itself, and num_workers=0 to the DataLoader."
            )
        self._stop_pass()
        if self._ended:
            self._ended = False
            self._plan.next_epoch()
        recorded: dict[str, Any] = {"path": self._records, "files": self.listing.files, "accept": self._accept_changes}
        if self._num_workers and self._processes is None:
            self._processes = CellProcesses(
                self.stream_paths, workers=self._num_workers, columns=self._columns, readers=self._readers, rows=self.table.rows,
                hashes=recorded, meter=self._meter, deadline=self._deadline,
            )  # fmt: skip
        if not self._num_workers and self._hashes is None:
            self._hashes = CellHashes(**recorded)
        self._pass = _Pass(self)
        self._shape = self.rank
        self._own = self._plan.lanes_of(*self._shape)
        return self._pass

    @property
    def _plan(self) -> MixPlan:
        """The plan as it stands after the batches that were handed over."""
        if self._behind:
            self._catch_up()
        return self._watched

    def _follow(self, ahead: MixPlan) -> None:
        """Have the watched plan stand where `ahead` stands, if that is after what was delivered; before the next batch is made."""
        if self._behind and ahead.index == self._watched.index + self._behind and self._watched.follow(ahead):
            self._behind = 0

    def _catch_up(self) -> None:
        plan, (rank, world) = self._watched, self._shape
        pools = len(self._own or plan.lanes)  # the last draw of each is looked at
        for left in range(self._behind - 1, -1, -1):
            if plan.over:
                plan.next_epoch()
            here = plan.next_of_rank(rank, world, left < pools)
        self._behind = 0
        if here != self._last:
            raise AssertionError(f"delivered {self._last}, the plan stands at {here}")

    def _stop_pass(self) -> None:
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    def close(self) -> None:
        """Stop threads and processes. Iterating starts them again."""
        self._stop_pass()
        if self._processes is not None:
            self._processes.close()
            self._processes = None
        if self._hashes is not None:
            self._hashes.close()
            self._hashes = None

    def __enter__(self) -> StreamMixingDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_processes", None) is not None or getattr(self, "_pass", None) is not None:
            self.close()

    # ---------------------------------------------------------------------------------------------- looking

    @property
    def modalities(self) -> tuple[str, ...]:
        """The modalities there are, sorted."""
        return self.table.kinds

    @property
    def epoch(self) -> int:
        """The epoch of per_stream; of device_per_stream that of the lane furthest behind."""
        return min(pool.epoch for pool in self._plan.lanes)

    @property
    def delivered(self) -> int:
        """Batches delivered so far, over all ranks."""
        return self._plan.index

    @property
    def ended(self) -> bool:
        """Whether the epoch was delivered to its end; iterating begins the next."""
        return self._ended

    @property
    def active(self) -> list[StreamReader]:
        """The slices in the pools of this rank, slot by slot."""
        return [
            StreamReader(
                stream_id=one.stream, path=self.stream_paths[one.stream], slice_start=one.start, slice_end=one.end, position=one.position, remaining_picks=one.remaining,
            )
            for pool in self._plan.lanes_of(*self.rank)
            for one in pool.slots
        ]  # fmt: skip

    def active_streams(self) -> list[int]:
        """The stream_ids that any rank is still reading, after the batches delivered so far. The same on every rank."""
        return self._plan.active_streams()

    def _modality_for_reader(self, r: StreamReader) -> str:
        """The modality of a reader: of NESTED its group, of DIRECT the name of the folder that its file lies in."""
        if self.layout == "nested":
            return self.stream_groups[r.stream_id]
        return os.path.basename(os.path.dirname(self.table.paths[r.stream_id]))  # noqa: PTH119, PTH120

    # -------------------------------------------------------------------------------------------- metrics

    def metric_specs(self) -> tuple[MetricSpec, ...]:
        """Every key of `drain_step_metrics`, with its reduction."""
        return stream_specs(self.table.kinds)

    def drain_step_metrics(self) -> dict[str, float]:
        """The pool at the last pick, and what was counted since the last drain; {} if there was no pick since."""
        plan = self._plan
        if self._own is None:
            self._own = plan.lanes_of(*self.rank)
        return self._metrics.drain(self._own)

    drain_metrics = drain_step_metrics

    def aggregate_step_metrics(
        self,
        local: Mapping[str, float],
        world_size: int,
        device: torch.device | str | None = None,
        *,
        collectives: Literal["all_gather", "all_reduce"] = "all_gather",
        group: Any = None,
        deadline: float | None = None,
        step: int | None = None,
    ) -> dict[str, float]:
        """What the ranks say together, each metric by its own reduction. Collective, unless world_size is 1.

        Values travel as int64 and float64 through the memory of `device`, which `group` must reach; by default through CPU memory where
        the group reaches it. One packed all_gather by default, which also names the worst rank; `collectives="all_reduce"` is one
        all_reduce a kind of reduction. `step` (default: the batches that each rank was given) must be the same on every rank. In per_stream
        rank 0 of the group counts the draws, which are those of all ranks.
        """
        if world_size == 1:
            return dict(local)
        joined = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
        if joined != world_size:
            raise ConfigError(
                f"aggregate_step_metrics was asked for {world_size} ranks and the process group has {joined}; call "
                "torch.distributed.init_process_group first, and pass its world size"
            )
        kind = (collectives, group, str(device))
        reducer = self._reducers.get(kind)
        if reducer is None:
            reducer = self._reducers[kind] = Reducer(
                self.metric_specs(), group, deadline=deadline or self._deadline, collectives=collectives, meter=self._meter, device=device
            )  # fmt: skip
        rolls = self.settings.batching_mode == "device_per_stream"
        if not rolls and dist.get_rank(group) != 0:
            local = without_counts(local)
        return reducer.reduce(local, step=self.delivered // (world_size if rolls else 1) if step is None else step)

    # ---------------------------------------------------------------------------------------------- state

    def _fingerprint(self) -> dict[str, str]:
        chosen = self.settings
        sizes = ",".join(f"{m}={n}" for m, n in sorted(chosen.batch_size.items()))
        return {
            "data": self.listing.fingerprint,
            "config:batching_mode": chosen.batching_mode,
            "config:batch_size": sizes if len(sizes) <= 80 else fingerprint_json(sizes),
            "config:global_ranks": str(chosen.global_ranks),
            "config:pick_mode": chosen.pick_mode,
            "config:queue": chosen.queue,
            "config:seed": str(chosen.seed),
        }

    def state_dict(self) -> dict[str, Any]:
        """What was delivered, by all ranks together: any rank's state will do for all. Not a collective."""
        self.listing.keep(self._cache)
        body = self._plan.to_body()
        if self._ended:
            body["ended"] = True
        return Cursor(kind=KIND, version=VERSION, fingerprint=self._fingerprint(), body=body).to_dict()

    def load_state_dict(
        self,
        state: Mapping[str, Any] | Sequence[Any],
        *,
        accept: Collection[str] = (),
        saved_listing: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Go on from a saved state, on any num_streams_mixed, ranks, lanes and workers. A list of the ranks' states is fine.

        `accept={"data"}` goes on over files that changed, and takes their present content for the recorded one. `saved_listing`
        (`StreamListing.to_json`; default: the one in the cache) is what the state was saved on, for a refusal to name the files.
        """
        if isinstance(state, list | tuple):
            if not state:
                raise CursorMismatch("the list of states is empty")
            draws = {one["body"]["draw"] for one in state}
            if len(draws) > 1:
                raise CursorMismatch(
                    f"the ranks' states are of different places (after {', '.join(map(str, sorted(draws)))} batches); save them at "
                    "the same step"
                )
            state = state[0]
        cursor = Cursor.from_dict(state)
        try:
            cursor.require(kind=KIND, version=VERSION, fingerprint=self._fingerprint(), accept=accept)
        except CursorMismatch as error:
            if "data" not in error.differences:
                raise
            saved, now = error.differences["data"]
            changed = self.listing.changes_since(
                saved_listing or kept_listing(str(saved), self._cache) or self.listing.to_json()
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
        plan = MixPlan(self.table, self.settings)  # nothing is changed if the state does not fit
        moved = plan.load_body(cursor.body, drop=self._on_reshard == "drop")
        self._stop_pass()
        if self._accept_changes != ("data" in accept):
            self.close()  # processes and hashes that know the old answer
            self._accept_changes = not self._accept_changes
        self._watched, self._behind, self._last = plan, 0, None
        self._own = None
        self._ended = bool(cursor.body.get("ended", False))
        self._metrics.forget(plan.lanes)
        self.resharded = moved
        for line in moved.lines():
            _log.info(line)


class _Read(NamedTuple):
    """Rows to be read for a draw: this rank's share of them."""

    draw: Draw
    stream: int
    start: int
    stop: int
    soon: Sequence[int]
    """Streams that come into the pool next: their files are worth opening ahead."""
    run: list[int]
    """Where the rows end that draws drawn in one go take from this file, one after the other; the same list for all of them."""
    told: dict[str, np.ndarray]
    """What each row is told of itself: row, stream, and group where the file names none. Made for all that is drawn in one go."""
    tags: dict[str, Any]
    """What the batch is told."""


class _Pass:
    """One iteration: a copy of the plan that runs ahead, and batches in its order."""

    def __init__(self, data: StreamMixingDataset) -> None:
        self._data = data
        self._rank, self._world = data.rank
        self._ahead_of = max(2, min(data.settings.slots, 8))
        self._plan = MixPlan(data.table, data.settings, watch=False)
        self._plan.load_body(data._plan.to_body())
        self._processes = data._processes
        if self._processes is not None:
            self._processes.forget()
        self._files = CellReaders(
            data.stream_paths, columns=data._columns, readers=data._readers, rows=data.table.rows, hashes=data._hashes, meter=data._meter,
            deadline=data._deadline,
        )  # fmt: skip
        self._some_stream = next(s for s, n in enumerate(data.table.rows) if n)
        self._rolls = data.settings.batching_mode == "device_per_stream"
        self._first = True
        self._reading: _Read | None = None
        """What is being read, or was read last."""
        self._drawn: deque[_Read] = deque()
        self._kept: dict[int, tuple[int, int, Cells]] = {}
        """By stream, the rows [first, last) that were read in one go."""
        self._at_once: dict[int, int] = {}
        """By stream, how many rows are worth one read."""
        self._share = min(_READ_AT_ONCE, _KEPT // (data.settings.slots * len(self._plan.lanes)))
        self._asked: deque[_Read] = deque()
        # Requests are small and few enough to fit into a pipe whose reader is busy: asking never blocks.
        self._depth = min((data._prefetch + 1) * max(data._num_workers, 1), 256)
        self._checked: set[int] = set()
        self._inline = self._processes is None and not data._prefetch
        """Batches are made when they are asked for: what was drawn before has been delivered when more is drawn."""
        self._thread = BackgroundThread("streams", on_error=_log.error, meter=data._meter)
        # Files read in this process are read in the background thread only: a read that hangs there still has a deadline here.
        self._batches = Prefetch(
            self._thread,
            self._make_one,
            depth=data._prefetch,
            wait_name="streams.batch",
            take_makes=self._processes is not None,
            meter=data._meter,
        )
        self._wait = Wait("streams.next", meter=data._meter, deadline=data._deadline)
        self._closed = False

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        data = self._data
        try:
            with self._wait as wait:
                made = self._make_one() if self._inline else self._batches.take(wait.deadline)
        except EndOfData:
            made = None
        except DeadlineExceeded as error:
            raise self._with_rows(error) from error
        if made is None:
            data._ended = True
            self.close()
            raise StopIteration
        data._last, batch = made
        data._behind += 1
        if data._behind > _AT_A_TIME:
            data._catch_up()
        return batch

    def _with_rows(self, error: DeadlineExceeded) -> DeadlineExceeded:
        """The error with the file and rows that are being read, unless it names the file itself."""
        read = self._reading
        if read is None or (path := self._data.stream_paths[read.stream]) in str(error):
            return error
        return DeadlineExceeded(f"{error} It is reading {rows_text(path, read.start, read.stop)}.")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._batches.close()
        self._thread.close(2.0)
        self._files.close()

    # ------------------------------------------------------------------ called by the thread that makes the next batch

    def _make_one(self) -> tuple[Draw, Any] | None:
        if self._processes is None:
            if not self._drawn and not self._draw_ahead():
                return None
            read = self._reading = self._drawn.popleft()
            draw, stream, start, stop, soon = read[:5]
            if soon:
                self._files.expect(soon)
            alone = self._at_once.get(stream) == 0
            cells = self._files.read(stream, start, stop) if alone else self._cells(read)
            if draw.dry:
                self._files.release(stream)
                self._kept.pop(stream, None)
            return draw, self._batch(read, cells)
        while len(self._asked) < self._depth and (self._drawn or self._draw_ahead()):
            read = self._drawn.popleft()
            worker = worker_of(read.draw, self._data._num_workers)
            self._processes.ask(worker, read.stream, read.start, read.stop, dry=read.draw.dry)
            self._asked.append(read)
        if not self._asked:
            return None
        read = self._reading = self._asked.popleft()
        return read.draw, self._batch(read, self._processes.answer())

    def _cells(self, read: _Read) -> Cells:
        """The rows of a draw. Small ones are read together with those that follow them in their file, and cut."""
        stream, start, stop = read.stream, read.start, read.stop
        kept = self._kept.get(stream)
        if kept is not None and kept[0] <= start and stop <= kept[1]:
            first, last, held = kept
        else:
            first, last = start, min(read.run[0], start + self._at_once.get(stream, 0))
            if last <= stop:
                cells = self._files.read(stream, start, stop)
                if stream not in self._at_once:
                    self._at_once[stream] = _rows_at_once(cells, stop - start, self._share)
                return cells
            held = self._files.read(stream, start, last)
            self._kept[stream] = (start, last, held)
        return {name: column[start - first : stop - first] for name, column in held.items()}

    def _draw_ahead(self) -> int:
        """Have the plan say what comes next, many at a time; how many, 0 at the end."""
        plan, rank, world, kinds = self._plan, self._rank, self._world, self._data.table.modalities
        if self._inline:
            self._data._follow(plan)
        soon: Sequence[int] = plan.lanes[0].upcoming(self._ahead_of) if self._first else ()
        self._first = False
        drawn: list[_Read] = []
        runs: dict[int, list[int]] = {}
        rows = 0
        while len(drawn) < _AT_A_TIME and rows < _ROWS_AT_A_TIME:
            if plan.over:
                if not self._data._repeat:
                    break
                plan.next_epoch()
            draw = plan.next_of_rank(rank, world)
            stream, start, stop = draw.stream, draw.start, draw.stop
            if world > 1 and not self._rolls:
                start, stop = rank_share(start, stop, rank, world)
            if draw.dry:
                soon = plan.lanes[draw.lane].upcoming(self._ahead_of)
            run = runs.get(stream)
            if run is None or run[0] != start:
                run = runs[stream] = [stop]
            else:
                run[0] = stop
            tags = {"modality": kinds[stream] if stream >= 0 else "", "draw": draw.index, "stream_epoch": draw.epoch}
            drawn.append(_Read(draw, stream if stream >= 0 else self._some_stream, start, stop, soon, run, {}, tags))
            rows += stop - start
            soon = ()
        if drawn:
            streams, starts, ends = np.array([(r.draw.stream, r.start, r.stop) for r in drawn], dtype=np.int64).T
            sizes = ends - starts
            ids = np.repeat(streams, sizes)
            at = np.arange(rows, dtype=np.int64) + np.repeat(ends - np.cumsum(sizes), sizes)
            groups = (ids << 32) + at
            first = 0
            for read in drawn:
                last = first + read.stop - read.start
                told = read.told
                told["group_id"], told["stream_id"], told["row"] = groups[first:last], ids[first:last], at[first:last]
                first = last
            self._drawn.extend(drawn)
        return len(drawn)

    def _batch(self, read: _Read, cells: Cells) -> Any:
        data, draw = self._data, read.draw
        stream = draw.stream
        if stream not in self._checked:
            self._refuse_reserved(stream, cells)
        groups = cells.get(data._group_key)
        cells = {**cells, **read.told}  # a new dict: a reader may keep its own
        if groups is not None:
            cells["group_id"] = _group_ids(data, draw, groups)
        batch = data._collate(cells)
        if isinstance(batch, dict):
            batch.update(read.tags)
        return batch

    def _refuse_reserved(self, stream: int, cells: Cells) -> None:
        for name in _RESERVED:
            if name in cells:
                raise DataError(
                    f"{self._data.stream_paths[stream]} has a column {name!r}, which headrace adds itself. Rename it, or leave it out "
                    "with columns=."
                )
        self._checked.add(stream)


def _rows_at_once(cells: Cells, rows: int, share: int) -> int:
    """How many rows of a file make `share` bytes, judged by some of them; 0 if the size of a row is not known, or it would be a few times as many only."""
    if not rows or any(column.dtype == object for column in cells.values()):
        return 0
    worth = share * rows // max(1, sum(column.nbytes for column in cells.values()))
    return worth if worth >= 4 * rows else 0


def _group_ids(data: StreamMixingDataset, draw: Draw, column: np.ndarray) -> np.ndarray:
    """Whole numbers as they are; strings by a hash of 63 bits, the same on every machine."""
    if column.dtype == object and all(isinstance(item, str) for item in column):
        hashed = (xxhash.xxh3_64_intdigest(item.encode("utf-8", "surrogatepass")) >> 1 for item in column)
        return np.fromiter(hashed, dtype=np.int64, count=len(column))
    if column.dtype.kind not in "iu" or column.ndim != 1:
        raise DataError(
            f"column {data._group_key!r} of {data.stream_paths[draw.stream]} is {column.dtype} with shape {column.shape}; a group is "
            "one whole number or one string a cell. Set group_key to the column that holds it."
        )
    return column.astype(np.int64, copy=False)
