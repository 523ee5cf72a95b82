"""Files of cells become mixed batches: K files open at a time, drained evenly, resumable on any shape.

    data = StreamMixingDataset("cells/", batch_size={"rna": 64, "atac": 32}, num_streams_mixed=8, seed=7)
    for batch in data:                      # dict of tensors; every cell with its group_id and stream_id
        ...
        metrics = data.aggregate_step_metrics(data.drain_step_metrics(), world_size, device)
    data.state_dict()                       # a few hundred bytes: what was delivered

    per_stream          one plan; all ranks draw the same stream at a step, each its share of the rows
    device_per_stream   L lanes with streams of their own; lane l belongs to rank l mod W, and none ever lacks a batch

`StreamDataset` is the files and how they are mixed; it holds no position. `Loader` delivers its batches (stream_plan.py), and `StreamMixingDataset` is both, as a
torch dataset. Imports torch, so only on request.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from headrace.errors import ConfigError
from headrace.loader.loader import Loader
from headrace.loader.loader_plan import Rank
from headrace.loader.stream_metrics import stream_specs, without_counts
from headrace.loader.stream_plan import StreamPlan
from headrace.metrics import Meter, MetricSpec, Reducer, default_meter
from headrace.mix import BatchingMode, MixSettings, PickMode, Queue, Reshard, StreamTable
from headrace.settings import LoaderSettings
from headrace.sources.cell_hashes import record_name
from headrace.sources.cells import CellOpener, Cells, cell_openers
from headrace.sources.opened import cache_folder
from headrace.sources.stream_files import Layout, StreamListing, list_streams

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


@dataclass(kw_only=True)
class StreamDataset:
    """Files of cells, how they are mixed and how they are read. Holds no position; several loaders may share one.

    The fields are the arguments of `StreamMixingDataset`, except `records`: the file of content hashes of the rows that were read.
    """

    listing: StreamListing
    mix: MixSettings
    repeat: bool
    on_reshard: Literal["park", "drop"]
    columns: Sequence[str] | None
    group_key: str
    collate: Collate
    readers: Mapping[str, CellOpener]
    num_workers: int
    cache: Path | None
    records: Path
    meter: Meter

    def __post_init__(self) -> None:
        problems = []
        if self.on_reshard not in ("park", "drop"):
            problems.append(f"on_reshard must be park or drop, got {self.on_reshard!r}")
        if not 0 <= self.num_workers <= 256:
            problems.append(f"num_workers must be between 0 and 256, got {self.num_workers!r}")
        if problems:
            raise ConfigError(problems)
        self.table = table_of(self.listing)
        self.stream_paths = [file.path for file in self.listing.files]

    def loader_plan(self, settings: LoaderSettings, rank: Rank) -> StreamPlan:
        """The plan of a `Loader` over these files."""
        return StreamPlan(self, settings, rank)


def table_of(listing: StreamListing) -> StreamTable:
    """The files as a plan sees them."""
    files = listing.files
    return StreamTable(
        paths=tuple(f.name for f in files),
        rows=tuple(f.rows for f in files),
        modalities=tuple(f.modality for f in files),
    )


_MIX = MixSettings()
"""The defaults."""


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
        num_streams_mixed: int = _MIX.slots,
        layout: Layout = "nested",
        batching_mode: BatchingMode = _MIX.batching_mode,
        pick_mode: PickMode = _MIX.pick_mode,
        queue: Queue = _MIX.queue,
        seed: int = _MIX.seed,
        global_ranks: int = _MIX.global_ranks,
        lanes: int | None = None,
        repeat: bool = False,
        on_reshard: Literal["park", "drop"] = "park",
        columns: Sequence[str] | None = None,
        group_key: str = "group_id",
        collate: Collate | None = None,
        readers: Mapping[str, CellOpener] | None = None,
        num_workers: int = 0,
        prefetch_batches: int = LoaderSettings().prefetch_batches,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        allow_symlinks: bool = False,
        base: Path | None = None,
        cache: Path | None = None,
        records: Path | None = None,
        deadline: float = LoaderSettings().deadline,
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
        found = listing if listing is not None else list_streams(
            roots, layout=layout, base=base, readers=readers, allow_symlinks=allow_symlinks, cache=cache
        )  # fmt: skip
        self.layout = layout
        kinds = table_of(found).kinds
        sizes = dict.fromkeys(kinds, batch_size) if isinstance(batch_size, int) else dict(batch_size)
        unknown = [m for m in sizes if m not in kinds]
        if unknown:
            raise ConfigError(
                f"batch_size names {', '.join(unknown)}, and there is no such modality; there are {', '.join(kinds)}"
            )
        rolls = batching_mode == "device_per_stream"
        mix = MixSettings(
            batch_size=sizes, slots=num_streams_mixed, seed=seed, queue=queue, pick_mode=pick_mode, batching_mode=batching_mode,
            global_ranks=global_ranks, lanes=(lanes or global_ranks) if rolls else lanes or 1,
        )  # fmt: skip
        wanted = None if columns is None else list(dict.fromkeys(columns))
        where = [] if records is not None else dict.fromkeys(str(Path(file.path).parent) for file in found.files)
        folder = records if records is not None else (cache or cache_folder()) / "records"
        self.streams = StreamDataset(
            listing=found, mix=mix, repeat=repeat, on_reshard=on_reshard, columns=wanted, group_key=group_key,
            collate=collate or cells_to_tensors, readers=cell_openers(readers), num_workers=num_workers, cache=cache,
            records=folder / record_name(wanted, *where), meter=meter or default_meter(),
        )  # fmt: skip
        self.listing, self.settings, self.table = found, mix, self.streams.table
        self.stream_paths = self.streams.stream_paths
        self.stream_groups = list(self.table.modalities)
        self._given_rank = (dp_rank, dp_world_size)
        self.loader = Loader(
            self.streams,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            prefetch_batches=prefetch_batches,
            deadline=deadline,
        )
        """Delivers the batches: `report()`, `drain_metrics()` and `len()` are its own."""
        self._reducers: dict[tuple[str, Any, str], Reducer] = {}

    def loader_plan(self, settings: LoaderSettings, rank: Rank) -> StreamPlan:
        """The plan of another `Loader` over the same files."""
        return self.streams.loader_plan(settings, rank)

    # -------------------------------------------------------------------------------------------- iterating

    @property
    def _plan(self) -> StreamPlan:
        assert isinstance(self.loader.plan, StreamPlan)
        return self.loader.plan

    @property
    def rank(self) -> tuple[int, int]:
        """(rank, world size): as given, or torch.distributed's, or (0, 1)."""
        found = Rank.find(*self._given_rank)
        self._plan.check_rank(found)
        return found.rank, found.world_size

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise ConfigError(
                "StreamMixingDataset is iterated inside a DataLoader worker; its state and its metrics would stay there. Give "
                "num_workers to the dataset itself, and num_workers=0 to the DataLoader."
            )
        found = Rank.find(*self._given_rank)  # ranks may have been joined after this dataset was made
        self._plan.check_rank(found)
        if found != self._plan.rank:
            self.loader.stop()
            self._plan.move_to(found)
        return iter(self.loader)

    def close(self) -> None:
        """Stop threads and processes. Iterating starts them again."""
        self.loader.close()

    def __enter__(self) -> StreamMixingDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------- looking

    @property
    def modalities(self) -> tuple[str, ...]:
        """The modalities there are, sorted."""
        return self.table.kinds

    @property
    def epoch(self) -> int:
        """The epoch of per_stream; of device_per_stream that of the lane furthest behind."""
        return min(lane.epoch for lane in self._plan.mix().lanes)

    @property
    def delivered(self) -> int:
        """Batches delivered so far, over all ranks."""
        return self._plan.state.mix.index

    @property
    def ended(self) -> bool:
        """Whether the epoch was delivered to its end; iterating begins the next."""
        return self.loader.ended

    @property
    def resharded(self) -> Reshard:
        """What the last `load_state_dict` did to readers that a smaller pool has no slot for."""
        return self._plan.resharded

    @property
    def active(self) -> list[StreamReader]:
        """The slices in the pools of this rank, slot by slot."""
        lanes = self._plan.mix().lanes
        return [
            StreamReader(
                stream_id=one.stream, path=self.stream_paths[one.stream], slice_start=0, slice_end=one.end, position=one.position,
                remaining_picks=one.remaining,
            )
            for lane in self._plan.ahead.lanes_of(*self.rank)
            for one in lanes[lane].slots
        ]  # fmt: skip

    def active_streams(self) -> list[int]:
        """The stream_ids that any rank is still reading, after the batches delivered so far. The same on every rank."""
        return self._plan.mix().active_streams()

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
        return self._plan.drain()

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
        the group reaches it. They travel in one packed all_gather; `collectives="all_reduce"` carries them by an all_reduce
        instead, with the same result. `step` (default: the batches that each rank was given) must be the same on every rank. In per_stream
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
                self.metric_specs(), group, deadline=deadline or self.loader.plan.settings.deadline, collectives=collectives, meter=self.loader.meter, device=device
            )  # fmt: skip
        rolls = self.settings.batching_mode == "device_per_stream"
        if not rolls and dist.get_rank(group) != 0:
            local = without_counts(local)
        return reducer.reduce(local, step=self.delivered // (world_size if rolls else 1) if step is None else step)

    # ---------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """What was delivered, by all ranks together: any rank's state will do for all. Not a collective."""
        return self.loader.state_dict()

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
        self.loader.stop()
        self._plan.load_state_dict(state, accept=accept, fixed={}, saved_listing=saved_listing)
