"""The trainer's end of a spool.

    consumer = DatasetConsumer("data/web", device_type="cpu")
    x, y = consumer.get_batch("train", "cpu")            # or a dict, where the schema has other fields than x and y

    consumer = DatasetConsumer("data/web", ack="commit", dp_rank=rank, dp_world_size=world)
    state = consumer.state_dict()                        # goes into the checkpoint: (sample, file, row)
    consumer.commit(oldest_state_still_kept)             # rank 0, after all ranks have saved: files below it may go

Delivery guarantees, whatever process is killed:

    ack="commit", state in the checkpoint    each sample exactly once with respect to the model; the number of ranks may change
    ack="commit", no checkpoint              at least once: starts again at the last commit
    ack="consume"                            at most once: starts at the first file that was not begun; a file is deleted once it was delivered

A background thread opens, checks and judges files two ahead, gathers a rank's rows, writes positions and deletes files. The trainer's thread
slices rows that are in memory (reader.py). Every wait has a name and a deadline.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from headrace.batch import BatchSpec
from headrace.errors import ConfigError, CursorMismatch, DeadlineExceeded, EndOfData, HeadraceError
from headrace.metrics import Meter, MetricSpec, Reduction, default_meter, register
from headrace.order import Cursor
from headrace.spool.file_system import FileSystem
from headrace.spool.journal import FileJournal
from headrace.spool.legacy import LegacyReader, legacy_fingerprint
from headrace.spool.meta import CIRCULAR_SPLITS, read_meta
from headrace.spool.rank_queue import RankQueue
from headrace.spool.reader import SplitReader, checked_position
from headrace.spool.rows import Stripe
from headrace.spool.settings import ConsumerSettings

if TYPE_CHECKING:
    import numpy as np
    import torch

_KIND, _VERSION = "spool", 1

register(
    MetricSpec("spool/batches", Reduction.SUM, unit="batches", help="batches delivered"),
    MetricSpec("spool/bytes", Reduction.SUM, unit="B", help="bytes of delivered batches"),
)


class DatasetConsumer:
    """Delivers the batches of a spool, in order, to one rank. Used by one thread."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        device_type: str = ConsumerSettings.device_type,
        prefer_queue: bool = ConsumerSettings.prefer_queue,
        cache_files: int = ConsumerSettings.cache_files,
        high_watermark: int = ConsumerSettings.high_watermark,
        low_watermark: int = ConsumerSettings.low_watermark,
        *,
        ack: Literal["consume", "commit"] = ConsumerSettings.ack,
        dp_rank: int = ConsumerSettings.dp_rank,
        dp_world_size: int = ConsumerSettings.dp_world_size,
        batch_size: int | None = None,
        deadline: float = ConsumerSettings.deadline,
        verdict_patience: float = ConsumerSettings.verdict_patience,
        archive: int = ConsumerSettings.archive,
        copy: bool | None = None,
        report: Callable[[str], None] | None = None,
        meter: Meter | None = None,
    ) -> None:
        """Open a spool, or a folder of the legacy `.pt` layout, for one rank.

        Args:
            data_dir … copy: The fields of `ConsumerSettings`, which explains them.
            report: Gets one line a file, which the logger `headrace.spool` gets at INFO too.
            meter: Counts waits, batches and files; the process's own unless given.
        """
        self.settings = settings = ConsumerSettings(
            data_dir=Path(data_dir), device_type=device_type, prefer_queue=prefer_queue, cache_files=cache_files,
            high_watermark=high_watermark, low_watermark=low_watermark, ack=ack, dp_rank=dp_rank, dp_world_size=dp_world_size,
            batch_size=batch_size, deadline=deadline, verdict_patience=verdict_patience, archive=archive, copy=copy,
        )  # fmt: skip
        self.data_dir = self.settings.data_dir
        self._meter = meter if meter is not None else default_meter()
        if settings.batch_size is not None:
            self.set_batch_size(settings.batch_size)
        elif "batch_size" in self.meta:
            self.batch_size: int = self.meta["batch_size"]
            self.settings.check_share(self.batch_size)
        else:
            raise ConfigError(
                f"DatasetConsumer: neither meta.pkl nor the batch files of {self.data_dir} say how large a batch is: give batch_size"
            )
        disk = FileSystem.of(self.data_dir)
        self.copy = settings.copy if settings.copy is not None else not disk.local or settings.dp_world_size > 1
        self._stripe = Stripe(rank=settings.dp_rank, world_size=settings.dp_world_size)
        self._readers: dict[str, SplitReader | LegacyReader] = {}
        self._last_state: dict[str, Any] | None = None
        """The state when the consumer was closed."""
        self._journal = FileJournal(self.data_dir, report, self._meter)
        self._queue: RankQueue | None = None
        """None for a folder of legacy files."""
        if prefer_queue and (self.data_dir / "queue").is_dir():
            for sentence in disk.warnings:
                self._journal.disk_warning(sentence)
            self._queue = RankQueue(settings, self.meta, self._journal, self._meter, copy=self.copy)

    @cached_property
    def meta(self) -> dict[str, Any]:
        """What the spool holds: the checked meta.json, or the meta.pkl of a folder that has no meta.json."""
        return read_meta(self.data_dir)

    # ----------------------------------------------------------------------------------------- batches

    def get_batch(self, split: str = "train", device: str | torch.device | None = None) -> Any:
        """The next batch: (X, Y) where the schema is x and y, else a dict of tensors by field.

        Args:
            split: The split to read.
            device: Where the tensors go. None: they stay in host memory, pinned if `device_type` is "cuda" and there is a CUDA device.

        Raises:
            EndOfData: The split was delivered to its end.
            DeadlineExceeded: The batch was not there within `deadline` seconds. The message names what was waited for.
        """
        reader = self._readers.get(split) or self._reader(split)
        arrays = reader.read(self.batch_size)
        tensors = self._tensors(reader.schema, arrays, device)
        batch = (tensors["x"], tensors["y"]) if tensors.keys() == {"x", "y"} else tensors
        self._meter.add("spool/batches")
        self._meter.add("spool/bytes", sum(array.nbytes for array in arrays.values()))
        # Last of all: while this process was suspended, another consumer may have taken the lock. The state counts only batches that are returned.
        if self._queue is not None:
            self._queue.lock.require()
        reader.advance()
        return batch

    def _tensors(
        self, schema: BatchSpec, arrays: Mapping[str, np.ndarray], device: str | torch.device | None
    ) -> dict[str, torch.Tensor]:
        """The arrays as tensors on `device`. To CUDA through pinned memory, so that the copy runs beside the step."""
        import torch

        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        tensors |= {f.name: tensors[f.name].view(torch.bfloat16) for f in schema if f.dtype == "bfloat16"}
        if device == "cpu":
            return tensors
        if device is None:
            pins = self.settings.device_type == "cuda" and torch.cuda.is_available()
            return {name: tensor.pin_memory() for name, tensor in tensors.items()} if pins else tensors
        if torch.device(device).type == "cuda":
            return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    def wait_for_data(self, split: str = "train", timeout: float | None = None) -> bool:
        """Whether the next batch is there within `timeout` seconds; False at once after the end of the split.

        `timeout`: None waits for the consumer's deadline and raises DeadlineExceeded then.
        """
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout >= 0):
            raise ConfigError(f"wait_for_data: timeout is {timeout!r}, expected seconds, 0 or more")
        try:
            self._reader(split).cover(self.batch_size, self.settings.deadline if timeout is None else timeout)
        except EndOfData:
            return False
        except DeadlineExceeded:
            if timeout is None:
                raise
            return False
        return True

    def has_ended(self, split: str = "train") -> bool:
        """Whether a finite split was delivered to its end, by the files that are there now."""
        try:
            self._reader(split).cover(self.batch_size, 0.0)
        except EndOfData:
            return True
        except DeadlineExceeded:
            pass
        return False

    def set_batch_size(self, new_bs: int) -> None:
        """Set the samples of a batch over all ranks, from the next batch on. Warns if the provider used another number."""
        if type(new_bs) is not int or new_bs < 1:
            raise ConfigError(f"DatasetConsumer: batch_size is {new_bs!r}, expected a whole number of 1 or more")
        self.settings.check_share(new_bs)
        if new_bs != self.meta.get("batch_size", new_bs):
            warnings.warn(
                f"{self.data_dir} was made with batch_size {self.meta['batch_size']}, batches now have {new_bs}: the same samples in the same order, cut "
                "differently", stacklevel=2,
            )  # fmt: skip
        self.batch_size = new_bs

    def schema(self, split: str = "train") -> BatchSpec:
        """Return the fields of a batch."""
        if self._queue is not None:
            return BatchSpec.from_json(self.meta["batch_schema"])
        reader = self._reader(split)
        reader.cover(self.batch_size, 0.0)  # the schema of a legacy folder is known once a file is open
        return reader.schema

    def stats(self) -> dict[str, Any]:
        """Counters, and per split where reading stands and how many files lie ahead."""
        splits: dict[str, Any] = {}
        for split, reader in self._readers.items():
            state = reader.state()
            file, row = state["at"][0]
            entry = splits[split] = {"samples": state["g"], "batches": reader.batches, "file": file, "row": row, "batch": row // self.batch_size}  # fmt: skip
            if self._queue is not None and split not in CIRCULAR_SPLITS:
                entry["backlog_files"] = ahead = self._queue.files_ahead(split)
                low, high = self.settings.low_watermark, self.settings.high_watermark
                entry["backlog"] = "low" if ahead <= low else "high" if ahead >= high else "normal"
        return {
            "splits": splits, "batch_size": self.batch_size, "rank": self._stripe.rank, "world_size": self._stripe.world_size,
            **self._journal.counts, "last_problem": self._journal.last_problem,
            "files_deleted": 0 if self._queue is None else self._queue.retention.deleted,
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The position after the last delivered batch, the same on every rank. After close(), the position at that time."""
        if self._last_state is not None:
            return deepcopy(self._last_state)
        splits = {name: reader.state() for name, reader in sorted(self._readers.items())}
        body = {"splits": splits, "batch_size": self.batch_size}
        return Cursor(kind=_KIND, version=_VERSION, fingerprint=self._fingerprint(), body=body).to_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, rewind: bool = False) -> None:
        """Continue from a state, with any number of ranks.

        Args:
            state: What `state_dict` returned. CursorMismatch if it is of another spool or its files were deleted.
            rewind: Accept a state below the commit point: the provider makes the deleted files again.
        """
        positions = self._positions_in(state)
        if self._queue is not None:
            for split, position in positions.items():
                self._queue.require_position(split, position, rewind=rewind)
        self.reset_state()
        for split, position in positions.items():
            self._readers[split] = self._make_reader(split, position)

    def reset_state(self, split: str | None = None) -> None:
        """Read a split, or all splits, again: a circular split from its beginning, any other from the commit point.

        With `ack="consume"` the commit point is the file that is being read, because the files before it are deleted.
        """
        for name in [split] if split is not None else list(self._readers):
            self._readers.pop(name, None)
            if self._queue is not None:
                self._queue.drop(name)

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        """Allow files before `state` to be deleted; None: before the last delivered batch.

        For `ack="commit"`. Call it after all ranks have saved, with the oldest state among the checkpoints still kept. Rank 0
        writes the commit point, durably, before it deletes files. On other ranks, and for legacy folders, the call does nothing.
        """
        if self._stripe.rank == 0 and self._queue is not None:
            positions = self._positions_in(state if state is not None else self.state_dict())
            self._queue.retention.move_commit({s: p for s, p in positions.items() if s not in CIRCULAR_SPLITS})

    def _positions_in(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The position of every split in a state of this spool; CursorMismatch if it is of another one."""
        cursor = Cursor.from_dict(state, what="spool state")
        cursor.require(kind=_KIND, version=_VERSION, fingerprint=self._fingerprint(), what="spool state")
        splits = cursor.body.get("splits")
        if not isinstance(splits, Mapping):
            raise CursorMismatch("spool state has no splits: it was not made by state_dict()")
        parts = {str(split): 1 if self._queue is None else self._queue.parts_of(str(split)) for split in splits}
        return {str(split): checked_position(str(split), value, parts[str(split)]) for split, value in splits.items()}

    def _fingerprint(self) -> dict[str, str]:
        return {"job": self._queue.job if self._queue is not None else f"legacy {legacy_fingerprint(self.data_dir)}"}

    def _reader(self, split: str) -> SplitReader | LegacyReader:
        if self._last_state is not None:
            raise HeadraceError(f"this consumer of {self.data_dir} was closed")
        if split not in self._readers:
            self._readers[split] = self._make_reader(split, None)
        return self._readers[split]

    def _make_reader(self, split: str, position: dict[str, Any] | None) -> SplitReader | LegacyReader:
        if self._queue is not None:
            return self._queue.open(split, position)
        legacy = LegacyReader(self.data_dir, split, self._stripe, self.settings.cache_files)
        if position is not None:
            legacy.load(position)
        return legacy

    # --------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Finish pending deletions (for at most 5 s), stop the background thread, release the rank lock."""
        if self._last_state is not None:
            return
        if self._queue is not None:
            self._queue.background.drain(5.0)
        self._last_state = self.state_dict()
        self._readers.clear()
        if self._queue is not None:
            self._queue.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
