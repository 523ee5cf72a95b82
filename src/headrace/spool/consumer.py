"""The trainer's end of a spool.

    consumer = DatasetConsumer("data/web", device_type="cpu")
    x, y = consumer.get_batch("train", "cpu")            # or a dict, where the schema has other fields than x and y

    consumer = DatasetConsumer("data/web", ack="commit", dp_rank=rank, dp_world_size=world)
    state = consumer.state_dict()                        # goes into the checkpoint: (sample, file, row)
    consumer.commit(oldest_state_still_kept)             # rank 0, after all ranks have saved: files below it may go

How often is a sample delivered? With the state in the checkpoint and `ack="commit"`: exactly once with respect to the model,
whatever is killed, on any number of ranks from one day to the next. Without a checkpoint: `ack="commit"` starts again at the
last commit (at least once), `ack="consume"` starts at the first file that was not begun (at most once), and deletes a file as
soon as all of it was delivered.

A background thread opens, checks and judges files two ahead, gathers a rank's rows, writes positions and deletes files. The trainer's thread
slices rows that are in memory (reader.py). Every wait has a name and a deadline.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from headrace.errors import ConfigError, CursorMismatch, DeadlineExceeded, EndOfData, HeadraceError
from headrace.metrics import Meter, MetricSpec, Reduction, default_meter, register
from headrace.order import Cursor
from headrace.runtime.background import BackgroundThread
from headrace.runtime.prefetch import Prefetch
from headrace.spool.batch_file import BatchFile
from headrace.spool.channel import Channel
from headrace.spool.file_system import FileSystem
from headrace.spool.folder import SpoolFolder
from headrace.spool.journal import FileJournal
from headrace.spool.legacy import LegacyReader, legacy_fingerprint
from headrace.spool.meta import CIRCULAR_SPLITS, FieldSpec, read_meta, schema_of
from headrace.spool.rank_lock import RankLock
from headrace.spool.reader import OpenFile, PartFiles, PartReader, SplitReader, checked_position
from headrace.spool.retention import Retention
from headrace.spool.rows import BufferPool, Stripe
from headrace.spool.settings import ConsumerSettings
from headrace.spool.verdicts import FileChecker

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["DatasetConsumer"]

_KIND, _VERSION = "spool", 1
_FILES_AHEAD = 2
"""With one, the background thread waited for the trainer whenever the trainer had waited for it."""

register(
    MetricSpec("spool/batches", Reduction.SUM, unit="batches", help="batches delivered"),
    MetricSpec("spool/bytes", Reduction.SUM, unit="B", help="bytes of delivered batches"),
)


class DatasetConsumer:
    """Delivers the batches of a spool, in order, to one rank. Used by one thread."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        device_type: str = "cuda",
        prefer_queue: bool = True,
        cache_files: int = 1,
        high_watermark: int = 2,
        low_watermark: int = 0,
        *,
        ack: Literal["consume", "commit"] = "consume",
        dp_rank: int = 0,
        dp_world_size: int = 1,
        batch_size: int | None = None,
        deadline: float = 600.0,
        verdict_patience: float = 5.0,
        archive: int = 0,
        copy: bool | None = None,
        report: Callable[[str], None] | None = None,
        meter: Meter | None = None,
    ) -> None:
        """The arguments are explained in `ConsumerSettings`. `report`: gets one line a file, which the logger `headrace.spool` gets at INFO
        too. `meter`: counts waits, batches and files; the process's own unless given."""
        self.settings = ConsumerSettings(
            data_dir=Path(data_dir), device_type=device_type, prefer_queue=prefer_queue, cache_files=cache_files,
            high_watermark=high_watermark, low_watermark=low_watermark, ack=ack, dp_rank=dp_rank, dp_world_size=dp_world_size,
            batch_size=batch_size, deadline=deadline, verdict_patience=verdict_patience, archive=archive, copy=copy,
        )  # fmt: skip
        self.data_dir = self.settings.data_dir
        self._meter = meter if meter is not None else default_meter()
        self._journal = FileJournal(self.data_dir, report, self._meter)
        self._folder = SpoolFolder(self.data_dir)
        self.meta: dict[str, Any] = read_meta(self.data_dir)
        self._ours: dict[str, Any] = self.meta.get("headrace") or {}
        """What a provider of headrace wrote about the spool; nothing for the timestamped `.pt` layout and for legacy folders."""
        self._queued = prefer_queue and (self.data_dir / "queue").is_dir()
        self.batch_size: int = self.meta["batch_size"]
        if batch_size is not None:
            self.set_batch_size(batch_size)
        self.settings.check_share(self.batch_size)
        disk = FileSystem.of(self.data_dir)
        self.copy = copy if copy is not None else not disk.local or dp_world_size > 1
        self._stripe = Stripe(rank=dp_rank, world_size=dp_world_size)
        self._readers: dict[str, SplitReader | LegacyReader] = {}
        self._channels: dict[tuple[str, int], Channel] = {}
        self._last_state: dict[str, Any] | None = None
        """Once closed."""
        self._reset: set[str] = set()
        """Splits that this consumer began before, and reads again."""
        self._retired: list[BatchFile] = []
        """Files read to their end, of which a batch is still in use."""
        self._gathered = BufferPool(4 * len(self.meta["batch_schema"]))
        """Memory of gathered rows: of the file that is read, two ahead, and one of which a batch is still in use."""
        self._pins: bool | None = None
        """Whether batches for no device in particular are pinned."""
        self._background = BackgroundThread("spool", on_error=self._journal.task_failed, meter=self._meter)
        self._lock = RankLock(self._folder, dp_rank, dp_world_size, self._meter)
        self._checker = FileChecker(
            self.meta, self._stripe, self._lock, patience=verdict_patience, deadline=deadline, on_bad=self._journal.file_bad, writable=not self.copy
        )  # fmt: skip
        self._retention = Retention(
            self._folder, self._lock, self._background, self._channel, self._positions, ack=ack, archive=archive,
            kept_below=1 if self._ours.get("kind") == "sequential" else 0, deadline=deadline, meter=self._meter,
        )  # fmt: skip
        if self._queued:
            for sentence in disk.warnings:
                self._journal.disk_warning(sentence)
            self._folder.prepare()
            self._lock.acquire()
            if dp_rank == 0:
                try:
                    self._retention.recover()
                except BaseException:
                    self._lock.release()
                    raise

    # ----------------------------------------------------------------------------------------- batches

    def get_batch(self, split: str = "train", device: str | torch.device | None = None) -> Any:
        """The next batch of a split, on `device`: (X, Y) where the schema is x and y, else a dict of tensors by field."""
        reader = self._readers.get(split) or self._reader(split)
        arrays = reader.read(self.batch_size)
        tensors = self._tensors(reader.schema, arrays, device)
        batch = (tensors["x"], tensors["y"]) if tensors.keys() == {"x", "y"} else tensors
        self._meter.add_both("spool/batches", 1, "spool/bytes", sum(array.nbytes for array in arrays.values()))
        # Last of all: a process that was stopped, while another consumer took its lock, finds out here. The state counts only what is handed out.
        self._lock.require_recent()
        reader.advance()
        return batch

    def _tensors(
        self, schema: Sequence[FieldSpec], arrays: Mapping[str, np.ndarray], device: str | torch.device | None
    ) -> dict[str, torch.Tensor]:
        """The arrays as tensors on `device`. To CUDA through pinned memory, so that the copy runs beside the step."""
        import torch

        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        tensors |= {f.name: tensors[f.name].view(torch.bfloat16) for f in schema if f.dtype == "bfloat16"}
        if device == "cpu":
            return tensors
        if device is None:
            if self._pins is None:  # to ask takes 4 us
                self._pins = self.settings.device_type == "cuda" and torch.cuda.is_available()
            return {name: tensor.pin_memory() for name, tensor in tensors.items()} if self._pins else tensors
        if torch.device(device).type == "cuda":
            return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    def wait_for_data(self, split: str = "train", timeout: float | None = None) -> bool:
        """Whether the next batch is there within `timeout` seconds; False at once where nothing comes any more. Without a timeout: DeadlineExceeded
        at the consumer's deadline."""
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout >= 0):
            raise ConfigError(f"wait_for_data: timeout is {timeout!r}, expected seconds, 0 or more")
        reader = self._reader(split)
        if isinstance(reader, LegacyReader):
            return True
        try:
            reader.cover(self.batch_size, self.settings.deadline if timeout is None else timeout)
        except EndOfData:
            return False
        except DeadlineExceeded:
            if timeout is None:
                raise
            return False
        return True

    def set_batch_size(self, new_bs: int) -> None:
        """Samples of a whole batch, over all ranks, from the next batch on. Warns where the provider used another number."""
        if type(new_bs) is not int or new_bs < 1:
            raise ConfigError(f"DatasetConsumer: batch_size is {new_bs!r}, expected a whole number of 1 or more")
        self.settings.check_share(new_bs)
        if new_bs != self.meta["batch_size"]:
            warnings.warn(
                f"{self.data_dir} was made with batch_size {self.meta['batch_size']}, batches now have {new_bs}: the same samples in the same order, cut "
                "differently", stacklevel=2,
            )  # fmt: skip
        self.batch_size = new_bs

    def schema(self, split: str = "train") -> list[FieldSpec]:
        """The fields of a batch."""
        reader = self._reader(split) if not self._queued else None
        if isinstance(reader, LegacyReader):
            reader.prefetch()
            return list(reader.schema)
        return list(schema_of(self.meta["batch_schema"]))

    def stats(self) -> dict[str, Any]:
        """Counters, and per split where reading stands and how many files lie ahead."""
        splits: dict[str, Any] = {}
        for split, reader in self._readers.items():
            state = reader.state()
            file, row = state["at"][0]
            entry = {
                "samples": state["g"],
                "batches": reader.batches,
                "file": file,
                "row": row,
                "batch": row // self.batch_size,
            }
            if isinstance(reader, SplitReader) and not reader.circular:
                present = [(part, seq) for part in reader.parts for seq in self._channel(split, part.number).present()]
                entry["backlog_files"] = ahead = sum(seq >= part.seq for part, seq in present)
                low, high = self.settings.low_watermark, self.settings.high_watermark
                entry["backlog"] = "low" if ahead <= low else "high" if ahead >= high else "normal"
            splits[split] = entry
        return {
            "splits": splits, "batch_size": self.batch_size, "rank": self._stripe.rank, "world_size": self._stripe.world_size, **self._journal.counts,
            "files_deleted": self._retention.deleted, "last_problem": self._journal.last_problem,
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Where reading stands: of what was delivered, the same on every rank. After close(), where it stood then."""
        if self._last_state is not None:
            return deepcopy(self._last_state)
        splits = {name: reader.state() for name, reader in sorted(self._readers.items())}
        body = {"splits": splits, "batch_size": self.batch_size}
        return Cursor(kind=_KIND, version=_VERSION, fingerprint=self._fingerprint(), body=body).to_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, rewind: bool = False) -> None:
        """Go on where `state` was taken, with any number of ranks. `rewind`: also below the commit point, where the provider makes files again."""
        positions = self._positions_in(state)
        for split, position in positions.items():
            if self._queued and split not in CIRCULAR_SPLITS:
                self._allow_position(split, position, rewind)
        self.reset_state()
        for split, position in positions.items():
            self._readers[split] = self._make_reader(split, position)
        self._retention.tell_position()

    def reset_state(self, split: str | None = None) -> None:
        """Read a split (or all) again: a circular one from its beginning, a queue from the commit point. With `ack="consume"` that is the file that is
        being read: those before it are deleted."""
        for name in [split] if split is not None else list(self._readers):
            reader = self._readers.pop(name, None)
            self._reset.add(name)
            if isinstance(reader, SplitReader):
                reader.close()

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        """Let go of what lies before `state` (before what was delivered until now, if none is given).

        For `ack="commit"`. Call it after all ranks have saved, with the oldest state among the checkpoints still kept. Rank 0
        writes the point, durably, before anything is deleted; on other ranks, and in legacy folders, it does nothing.
        """
        if self._stripe.rank == 0 and self._queued:
            positions = self._positions_in(state if state is not None else self.state_dict())
            self._retention.move_commit({s: p for s, p in positions.items() if s not in CIRCULAR_SPLITS})

    def _positions_in(self, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The position of every split in a state of this spool; CursorMismatch if it is of another one."""
        cursor = Cursor.from_dict(state, what="spool state")
        cursor.require(kind=_KIND, version=_VERSION, fingerprint=self._fingerprint(), what="spool state")
        splits = cursor.body.get("splits")
        if not isinstance(splits, Mapping):
            raise CursorMismatch("spool state has no splits: it was not made by state_dict()")
        return {str(s): checked_position(str(s), value, self._parts_of(str(s))) for s, value in splits.items()}

    def _allow_position(self, split: str, position: Mapping[str, Any], rewind: bool) -> None:
        """CursorMismatch if files from the position on were deleted, unless they are made again (`rewind`)."""
        points = self._folder.commit_points()
        point = points.get(split)
        if point is None or all(a[0] >= c[0] for a, c in zip(position["at"], point["at"], strict=True)):
            return
        if not rewind:
            raise CursorMismatch(
                f"{self.data_dir}: the state stands at file {position['at'][0][0]} of {split}, and files below {point['at'][0][0]} were committed and deleted. "
                "Load a newer state, or, where the provider can make files again, load with rewind=True",
                {"file": (position["at"][0][0], point["at"][0][0])},
            )
        if self._stripe.rank == 0:
            self._lock.require()
            self._folder.write_commit_points({**points, split: dict(position)})

    def _fingerprint(self) -> dict[str, str]:
        # "document" is what saved states of the timestamped `.pt` layout say.
        job = self._ours.get("job", "document") if self._queued else f"legacy {legacy_fingerprint(self.data_dir)}"
        return {"job": job}

    # ----------------------------------------------------------------------------------------- readers

    def _reader(self, split: str) -> SplitReader | LegacyReader:
        if self._last_state is not None:
            raise HeadraceError(f"this consumer of {self.data_dir} was closed")
        if split not in self._readers:
            self._readers[split] = self._make_reader(split, None)
            self._retention.tell_position()
        return self._readers[split]

    def _make_reader(self, split: str, position: dict[str, Any] | None) -> SplitReader | LegacyReader:
        if not self._queued:
            legacy = LegacyReader(self.data_dir, split, self._stripe, self.settings.cache_files)
            if position is not None:
                legacy.load(position)
            return legacy
        channels, circular = [self._channel(split, part) for part in range(self._parts_of(split))], 0
        if self.settings.ack == "consume" and len(channels) > 1:
            raise ConfigError(f'{self.data_dir} has {len(channels)} parts; a consumer of parts needs ack="commit"')
        if split in CIRCULAR_SPLITS:
            circular = int(self._ours.get("circular", {}).get(split) or max(1, len(channels[0].present())))
            position = position or {"g": 0, "at": [[0, 0]]}
            position = {
                **position,
                "start": [position["g"] - position["at"][0][1]],
            }  # rows are counted on from pass to pass
        elif position is None:
            if split in self._reset:  # files that were read count first: they move the commit point
                self._background.drain(self.settings.deadline)
            position = self._retention.starting_point(split, len(channels), again=split in self._reset)
        readers = []
        for channel, (seq, _), start in zip(channels, position["at"], position["start"], strict=True):
            files = PartFiles(
                channel, self._checker, self._stripe, self._gathered if self.copy or circular else None,
                seq=seq, start=start, circular=circular, keep=self.settings.cache_files,
            )  # fmt: skip
            prefetch = Prefetch(
                self._background, files.open_next, depth=_FILES_AHEAD, wait_name="spool.open", while_waiting=self._lock.require,
                meter=self._meter,
            )  # fmt: skip
            readers.append(PartReader(channel.part, prefetch, seq, start))
        return SplitReader(
            split, schema_of(self.meta["batch_schema"]), self._stripe, readers, position["g"], circular=circular,
            deadline=self.settings.deadline, pool=BufferPool(8), entered=self._retention.entered, finished=self._finished,
        )  # fmt: skip

    def _parts_of(self, split: str) -> int:
        return 1 if not self._queued or split in CIRCULAR_SPLITS else int(self._ours.get("parts", 1))

    def _channel(self, split: str, part: int) -> Channel:
        if (split, part) not in self._channels:
            suffix = f".{self._ours['format']}" if self._ours else ".pt"
            try:
                channel = Channel(
                    self._folder, split, part, self._parts_of(split), suffix=suffix, foreign=not self._ours
                )
            except ValueError as error:
                raise ConfigError(f"DatasetConsumer: {error}") from error
            channel.verdicts.mkdir(parents=True, exist_ok=True)
            self._channels[split, part] = channel
        return self._channels[split, part]

    def _positions(self) -> dict[str, list[int]]:
        """Per split that is read once: the file each part is read in."""
        readers = [(split, reader) for split, reader in list(self._readers.items()) if isinstance(reader, SplitReader)]
        return {split: [part.seq for part in reader.parts] for split, reader in readers if not reader.circular}

    # -------------------------------------------------------------------------------- what follows a file

    def _finished(self, reader: SplitReader, part: PartReader, opened: OpenFile) -> None:
        """All rows of a file were delivered. What follows from it is done in the background."""
        follow = (
            self._retire
            if reader.circular
            else partial(self._settle, reader.split, part.number, opened.seq, opened.end)
        )
        self._background.post(partial(follow, opened.file))

    def _settle(self, split: str, part: int, seq: int, end: int, file: BatchFile) -> None:
        """Tell the provider, or delete the file. In the background thread."""
        self._retention.finished([(split, seq, end)])
        self._journal.file_read(f"{self._channel(split, part)} {seq}: read, {file.rows:,} rows")
        self._retire(file)

    def _retire(self, file: BatchFile) -> None:
        """Unmap files that are no longer used: here, because a trainer that drops the last batch of 32 MiB would do it in its step (1 to 3 ms)."""
        self._retired = [file for file in (*self._retired, file) if file.held]

    def close(self) -> None:
        """Finish what is left to delete (for at most 5 s), stop the thread, let go of the rank lock."""
        if self._last_state is not None:
            return
        self._background.drain(5.0)
        self._last_state = self.state_dict()
        self._background.close()
        self.reset_state()  # lets go of the mapped files
        self._retired.clear()
        self._retention.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
