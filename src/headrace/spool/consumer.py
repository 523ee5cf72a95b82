"""The trainer's end of a spool.

    consumer = DatasetConsumer("data/web", device_type="cpu")
    x, y = consumer.get_batch("train", "cpu")            # or a dict, where the schema has other fields than x and y

    consumer = DatasetConsumer("data/web", ack="commit", dp_rank=rank, dp_world_size=world)
    state = consumer.state_dict()                        # goes into the checkpoint: (sample, file, row)
    consumer.commit(oldest_state_still_kept)             # rank 0, after all ranks have saved: files below it may go

How often is a sample delivered? With the state in the checkpoint and `ack="commit"`: exactly once with respect to the model,
whatever is killed, on any number of ranks from one day to the next. Without a checkpoint: `ack="commit"` starts again at the
last commit (at least once), `ack="consume"` starts at the first file that was not begun (at most once), and deletes a file as
soon as it is used up, as the document says.

Before anybody reads file k, rank k mod W checks all of it and links the verdict; the others wait for that (`spool.verdict`),
and check the rows they copy. A bad file is moved to the quarantine and everybody waits for the provider to make it again
(`spool.remake`). A rank that is slow to judge is overtaken after `verdict_patience` seconds: the link decides who was first.

Every wait has a deadline. Files are opened, judged and deleted by one background thread (ahead.py); the trainer's thread copies.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy as copy_of
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from headrace.buffers import BufferPool
from headrace.errors import ConfigError, CursorMismatch, DeadlineExceeded, EndOfData, HeadraceError
from headrace.metrics import Meter, MetricSpec, Reduction, default_meter, register
from headrace.order import Cursor
from headrace.spool.ahead import Ahead
from headrace.spool.batch_file import AlikeFile, BatchFile
from headrace.spool.channel import Channel
from headrace.spool.checker import FileChecker
from headrace.spool.file_system import FileSystem
from headrace.spool.folder import SpoolFolder
from headrace.spool.legacy import LegacyReader, legacy_fingerprint
from headrace.spool.meta import FieldSpec, read_meta, schema_of
from headrace.spool.place import Place
from headrace.spool.provider import CIRCULAR_SPLITS
from headrace.spool.reader import Part, QueueReader, RingReader, Stripe
from headrace.spool.retention import Retention
from headrace.spool.supply import SplitFiles, Supply

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["DatasetConsumer"]

_KIND, _VERSION = "spool", 1

register(
    MetricSpec("spool/batches", Reduction.SUM, unit="batches", help="batches delivered"),
    MetricSpec("spool/bytes", Reduction.SUM, unit="B", help="bytes of delivered batches"),
    MetricSpec("spool/files_read", Reduction.SUM, unit="files", help="files read to their end"),
    MetricSpec(
        "spool/files_bad", Reduction.SUM, unit="files", healthy=(0, 0), help="files that were judged bad and set aside"
    ),
    MetricSpec(
        "spool/retries",
        Reduction.SUM,
        unit="",
        healthy=(0, 0),
        help="deletions and state writes that had to be tried again",
    ),
)


class DatasetConsumer:
    """Delivers the batches of a spool, in order, to one rank."""

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
        """`device_type` … `low_watermark` as in the document; the watermarks only colour `stats()`.

        `batch_size`: samples of a whole batch, over all ranks; the provider's unless given. `deadline`: the longest wait for a batch.
        `archive`: how many used-up files to keep in archives/ instead of deleting them. `report`: gets one line a file.
        `copy`: whose memory a batch is. Writing to one never changes the file or another batch.
            False   views of the mapped file, which stays on the disk as long as a batch of it is referred to. Those of one of several
                    ranks are every W-th row of it, so they are not contiguous: `reshape`, not `view`
            True    each batch is copied when it is asked for, into memory of its own
            None    views for a single rank on a local disk. For several ranks, and on a network file system, where a file can be taken
                    away from under a view, the background thread gathers the rank's rows of a file in memory that is used again; it is
                    kept as long as a batch of it is referred to. Three files' shares are in memory at a time. Batches of a file lie in
                    one storage, as slices do: clone one to save or send it alone
        """
        problems = [
            f"{name} is {value!r}, expected a whole number of {least} or more"
            for name, value, least in (
                ("cache_files", cache_files, 1), ("dp_rank", dp_rank, 0), ("dp_world_size", dp_world_size, 1), ("archive", archive, 0),
            )
            if type(value) is not int or value < least
        ]  # fmt: skip
        if ack not in ("consume", "commit"):
            problems.append(f'ack is {ack!r}; it is "consume" or "commit"')
        if not problems and dp_rank >= dp_world_size:
            problems.append(f"dp_rank is {dp_rank}, with a dp_world_size of {dp_world_size} it is below that")
        if not problems and ack == "consume" and dp_world_size > 1:
            problems.append(
                f'ack is "consume" with {dp_world_size} ranks, of which one would delete what others still need; use ack="commit" and call commit()'
            )
        self.data_dir = Path(data_dir)
        if not self.data_dir.is_dir():
            problems.append(
                f"{self.data_dir} is not a folder: start its provider first, or give the folder of one that ran"
            )
        if problems:
            raise ConfigError([f"DatasetConsumer: {p}" for p in problems])
        self.device_type, self.prefer_queue, self.cache_files = device_type, prefer_queue, cache_files
        self.high_watermark, self.low_watermark = high_watermark, low_watermark
        self.ack, self.deadline, self.verdict_patience, self.archive = ack, deadline, verdict_patience, archive
        self.rank, self.world_size = dp_rank, dp_world_size
        self._stripe = Stripe(rank=dp_rank, world_size=dp_world_size)
        self._report, self._meter = report, meter if meter is not None else default_meter()
        self._folder = SpoolFolder(self.data_dir)
        self._meta: dict[str, Any] | None = None
        self._pool = BufferPool()
        self._ahead: Ahead[BatchFile] = Ahead(self._meter, self._on_failure)
        self._readers: dict[str, QueueReader | RingReader | LegacyReader] = {}
        self._files: dict[str, SplitFiles] = {}
        self._channels: dict[tuple[str, int], Channel] = {}
        self._read: deque[tuple[str, int, int, int, BatchFile | None, float]] = deque()
        """Files read to their end of which nobody was told: split, part, number, where it ends, the file unless it is let go of otherwise, and when."""
        self._counts = {"bad_files": 0, "files_read": 0, "retries": 0}
        self._last_problem = ""
        self._closed = False
        self._last_state: dict[str, Any] | None = None
        """Once closed."""
        self._reset: set[str] = set()
        """Splits that were begun by this consumer before, and are read again."""
        self._pins: bool | None = None
        """Whether batches for no device in particular are pinned: there is a CUDA device to copy them to."""
        self._plain: Callable[[np.ndarray], torch.Tensor] | Literal[False] | None = None
        """What makes a tensor of an array, where nothing else is to be done to it. None until the first batch has told."""
        self._pair = False
        """Whether a batch is (X, Y)."""
        self._quick: dict[tuple[str, str | torch.device | None], Iterator[Any]] = {}
        """By split and device: the rest of the file that is being read."""
        self._queued = prefer_queue and (self.data_dir / "queue").is_dir()
        self.batch_size = self.meta["batch_size"]
        if batch_size is not None:
            self.set_batch_size(batch_size)
        else:
            self._check_share(self.batch_size)
        disk = FileSystem.of(self.data_dir)
        self.copy = copy if copy is not None else not disk.local or dp_world_size > 1
        checker = FileChecker(
            self.meta,
            self._stripe,
            patience=verdict_patience,
            deadline=deadline,
            on_bad=self._set_aside,
            private=not self.copy,
        )
        self._place = Place(self._folder, dp_rank, dp_world_size, self._meter)
        self._supply = Supply(
            self._ahead,
            checker,
            self._place,
            self._stripe,
            lambda: self.batch_size,
            cuts=copy is not True,
            gathers=self.copy,
            meter=self._meter,
        )
        sequential = self.meta.get("headrace", {}).get("kind") == "sequential"
        self._retention = Retention(
            self._folder,
            self._place,
            self._ahead,
            self._channel,
            self._positions,
            ack=ack,
            archive=archive,
            kept_below=1 if sequential else 0,
            deadline=deadline,
            meter=self._meter,
        )
        if self._queued:
            for sentence in disk.warnings:
                self._tell(f"{self.data_dir}: {sentence}")
            self._folder.prepare()
            self._place.claim()
            if dp_rank == 0:
                try:
                    self._retention.recover()
                except BaseException:
                    self._place.release()
                    raise

    # ------------------------------------------------------------------------------------------- facts

    @property
    def meta(self) -> dict[str, Any]:
        """The spool's meta, read once."""
        if self._meta is None:
            self._meta = read_meta(self.data_dir)
        return self._meta

    def schema(self, split: str = "train") -> list[FieldSpec]:
        """The fields of a batch."""
        if not self._queued:
            reader = self._reader(split)
            reader.prefetch()
            return list(reader.schema)
        return list(schema_of(self.meta["batch_schema"]))

    def stats(self) -> dict[str, Any]:
        """Counters, and per split where reading stands and how much lies ahead."""
        splits: dict[str, Any] = {}
        for split, reader in self._readers.items():
            state = reader.state()
            entry: dict[str, Any] = {
                "samples": state["g"],
                "batches": reader.batches,
                "file": state["at"][0][0],
                "row": state["at"][0][1],
            }
            entry["batch"] = entry["row"] // self.batch_size
            if isinstance(reader, QueueReader):
                ahead = sum(
                    1 for part in reader.parts for seq in self._channel(split, part.number).present() if seq >= part.seq
                )
                entry["backlog_files"] = ahead
                entry["backlog"] = (
                    "low" if ahead <= self.low_watermark else "high" if ahead >= self.high_watermark else "normal"
                )
            splits[split] = entry
        return {
            "splits": splits,
            "batch_size": self.batch_size,
            "rank": self.rank,
            "world_size": self.world_size,
            **self._counts,
            "files_deleted": self._retention.deleted,
            "last_problem": self._last_problem,
        }

    # ----------------------------------------------------------------------------------------- batches

    def get_batch(self, split: str = "train", device: str | torch.device | None = None) -> Any:
        """The next batch of a split, on `device`: (X, Y) where the schema is x and y, else a dict of tensors by field."""
        quick = self._quick.get((split, device))
        if quick is not None and (batch := next(quick, None)) is not None:  # most batches
            return batch
        reader = self._readers.get(split) or self._reader(split)
        arrays: dict[str, np.ndarray] | None = None
        if (
            self._plain
            and type(reader) is QueueReader
            and (device == "cpu" or (device is None and self._pins is False))
        ):
            if reader.cut == self.batch_size or reader.begin_cut(self.batch_size):
                quick = self._quick[split, device] = self._batches_of(reader, None if reader.made else self._plain)
                return next(quick)
            arrays = reader.uncut(self.batch_size)
        import torch

        arrays = reader.next(self.batch_size) if arrays is None else arrays
        tensors: dict[str, Any] = {}
        size = 0
        for name, array in arrays.items():
            tensors[name] = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
            size += array.nbytes
        for field in reader.schema:
            if field.dtype == "bfloat16":
                tensors[field.name] = tensors[field.name].view(torch.bfloat16)
        if self._plain is None and isinstance(reader, QueueReader):
            self._learn_torch(reader.schema)
        if device is not None and device != "cpu":
            tensors = _moved(tensors, torch.device(device))
        elif device is None:
            if self._pins is None:  # to ask takes 4 us, a third of a small batch
                self._pins = self.device_type == "cuda" and torch.cuda.is_available()
            tensors = {n: t.pin_memory() for n, t in tensors.items()} if self._pins else tensors
        self._meter.add_both("spool/batches", 1, "spool/bytes", size)
        return (tensors["x"], tensors["y"]) if len(tensors) == 2 and "x" in tensors and "y" in tensors else tensors

    def _learn_torch(self, schema: Sequence[FieldSpec]) -> None:
        """How tensors are made of these fields. Only where torch is in use: a reader of arrays does not bring it."""
        import torch

        names = tuple(f.name for f in schema)
        self._pair = names == ("x", "y")
        odd = any(f.dtype == "bfloat16" or f.ragged for f in schema) or names == ("y", "x")
        self._plain = False if odd else torch.from_numpy
        # All of a file by one call, which gives each batch a life of its own: writing to one is no change of another, for autograd either.
        self._supply.make = None if odd else lambda rows, many: torch.from_numpy(rows).unsafe_split(many)

    def _batches_of(self, reader: QueueReader, plain: Callable[[np.ndarray], torch.Tensor] | None) -> Iterator[Any]:
        """Batches of the file that is being read, as long as it is. `plain`: makes a tensor of an array, unless they are made."""
        # Every line shows here: after a step of the trainer's its code is no longer in the cache.
        names, pair, size, add, turn = reader.names, self._pair, reader.cut_bytes, self._meter.add_both, reader.turn
        while reader.cut and reader.turn == turn:
            add("spool/batches", 1, "spool/bytes", size)
            if plain is None:
                yield reader.next_cut() if pair else dict(zip(names, reader.next_cut(), strict=True))
            else:
                tensors = map(plain, reader.next_cut())  # which holds none of them once they are used up
                yield tuple(tensors) if pair else dict(zip(names, tensors, strict=True))

    def wait_for_data(self, split: str = "train", timeout: float | None = None) -> bool:
        """Whether the next batch is there within `timeout` seconds; False at once where nothing comes any more. Without a timeout: DeadlineExceeded
        at the consumer's deadline."""
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout >= 0):
            raise ConfigError(f"wait_for_data: timeout is {timeout!r}, expected seconds, 0 or more")
        reader = self._reader(split)
        if isinstance(reader, LegacyReader):
            return True
        files = self._files[split]
        until = time.monotonic() + (self.deadline if timeout is None else timeout)

        def hold(part: int, seq: int, start: int) -> None:
            files.hold(part, seq, start, max(0.0, until - time.monotonic()))

        try:
            if not isinstance(reader, QueueReader):
                hold(0, reader.seq, 0)
                return True
            while (place := reader.missing(self.batch_size)) is not None:
                hold(*place)
                reader.open_file(place[0])
        except EndOfData:
            return False
        except DeadlineExceeded:
            if timeout is None:
                raise
            return False
        return not reader.ended

    def set_batch_size(self, new_bs: int) -> None:
        """Samples of a whole batch from now on. Warns where the provider used another number."""
        if type(new_bs) is not int or new_bs < 1:
            raise ConfigError(f"DatasetConsumer: batch_size is {new_bs!r}, expected a whole number of 1 or more")
        self._check_share(new_bs)
        if new_bs != self.meta["batch_size"]:
            warnings.warn(
                f"{self.data_dir} was made with batch_size {self.meta['batch_size']}, batches now have {new_bs}: the same samples in the same order, cut "
                "differently", stacklevel=2,
            )  # fmt: skip
        self.batch_size = new_bs
        self._quick.clear()

    def _check_share(self, size: int) -> None:
        if size % self.world_size:
            raise ConfigError(
                f"DatasetConsumer: a batch of {size} samples cannot be shared by {self.world_size} ranks; choose a multiple"
            )

    # ------------------------------------------------------------------------------------------- state

    def reset_state(self, split: str | None = None) -> None:
        """Read a split (or all) again: a circular one from its beginning, a queue from the commit point. With `ack="consume"` that is the file that is
        being read: those before it are used up."""
        self._quick.clear()
        for name in [split] if split is not None else list(self._readers):
            self._readers.pop(name, None)
            self._reset.add(name)
            if name in self._files:
                self._files.pop(name).drop()

    def state_dict(self) -> dict[str, Any]:
        """Where reading stands: of what was delivered, the same on every rank. After close(), where it stood then."""
        if self._last_state is not None:
            return copy_of(self._last_state)
        splits = {name: reader.state() for name, reader in sorted(self._readers.items())}
        body = {"splits": splits, "batch_size": self.batch_size}
        return Cursor(kind=_KIND, version=_VERSION, fingerprint=self._fingerprint(), body=body).to_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, rewind: bool = False) -> None:
        """Go on where `state` was taken, with any number of ranks. `rewind`: also below the commit point, where the provider makes files again."""
        cursor = Cursor.from_dict(state, what="spool state")
        cursor.require(kind=_KIND, version=_VERSION, fingerprint=self._fingerprint(), what="spool state")
        splits = cursor.body.get("splits")
        if not isinstance(splits, Mapping):
            raise CursorMismatch("spool state has no splits: it was not made by state_dict()")
        positions = {str(split): self._checked_position(str(split), value) for split, value in splits.items()}
        for split, position in positions.items():
            if self._queued and split not in CIRCULAR_SPLITS:
                self._allow_position(split, position, rewind)
        self.reset_state()
        for split, position in positions.items():
            self._readers[split] = self._make_reader(split, position)
        self._retention.tell_position()

    def _checked_position(self, split: str, value: Any) -> dict[str, Any]:
        try:
            g, at, start = value["g"], [list(map(int, pair)) for pair in value["at"]], list(map(int, value["start"]))
            if (
                type(g) is not int
                or min(g, *start, *(n for pair in at for n in pair)) < 0
                or any(len(p) != 2 for p in at)
            ):
                raise ValueError("a negative number")
            if len(at) != self._parts_of(split) or len(start) != len(at):
                raise ValueError(f"{len(at)} parts")
        except (KeyError, TypeError, ValueError) as error:
            raise CursorMismatch(
                f"spool state of {split!r} is malformed ({error}): it was not made by state_dict()"
            ) from error
        return {"g": g, "at": at, "start": start}

    def _allow_position(self, split: str, position: Mapping[str, Any], rewind: bool) -> None:
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
        if self.rank == 0:
            self._place.require()
            self._folder.write_commit_points({**points, split: dict(position)})

    def _fingerprint(self) -> dict[str, str]:
        if self._queued:
            return {"job": self.meta.get("headrace", {}).get("job", "document")}
        return {"job": f"legacy {legacy_fingerprint(self.data_dir)}"}

    # ------------------------------------------------------------------------------------------ commit

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        """Let go of what lies before `state` (before what was delivered until now, if none is given).

        For `ack="commit"`. Call it after all ranks have saved, with the oldest state among the checkpoints still kept. Rank 0
        writes the point, durably, before anything is deleted; on other ranks, and in legacy folders, it does nothing.
        """
        if self.rank != 0 or not self._queued:
            return
        cursor = Cursor.from_dict(state if state is not None else self.state_dict(), what="spool state")
        cursor.require(kind=_KIND, version=_VERSION, fingerprint=self._fingerprint(), what="spool state")
        moved = {
            str(split): self._checked_position(str(split), value)
            for split, value in cursor.body["splits"].items()
            if split not in CIRCULAR_SPLITS
        }
        self._retention.move_commit(moved)

    # ----------------------------------------------------------------------------------------- readers

    def _parts_of(self, split: str) -> int:
        return 1 if not self._queued or split in CIRCULAR_SPLITS else int(self.meta.get("headrace", {}).get("parts", 1))

    def _channel(self, split: str, part: int) -> Channel:
        if (split, part) not in self._channels:
            ours = self.meta.get("headrace")
            suffix = f".{ours['format']}" if ours else ".pt"
            try:
                channel = Channel(self._folder, split, part, self._parts_of(split), suffix=suffix, foreign=ours is None)
            except ValueError as error:
                raise ConfigError(f"DatasetConsumer: {error}") from error
            channel.verdicts.mkdir(parents=True, exist_ok=True)
            self._channels[split, part] = channel
        return self._channels[split, part]

    def _reader(self, split: str) -> QueueReader | RingReader | LegacyReader:
        if self._closed:
            raise HeadraceError(f"this consumer of {self.data_dir} was closed")
        if split not in self._readers:
            self._readers[split] = self._make_reader(split, None)
            self._retention.tell_position()
        return self._readers[split]

    def _make_reader(self, split: str, position: Mapping[str, Any] | None) -> QueueReader | RingReader | LegacyReader:
        if not self._queued:
            legacy = LegacyReader(self.data_dir, split, self._stripe, self.cache_files)
            if position is not None:
                legacy.load(position)
            return legacy
        self._channel(split, 0)
        schema = schema_of(self.meta["batch_schema"])
        files = self._files[split] = SplitFiles(
            split,
            self._supply,
            self._channel,
            deadline=self.deadline,
            entered=self._retention.entered,
            finished=self._finished,
        )
        if split in CIRCULAR_SPLITS:
            count = self.meta.get("headrace", {}).get("circular", {}).get(split) or max(
                1, len(self._channel(split, 0).present())
            )
            ring = RingReader(split, schema, self._stripe, self._pool, files, int(count), self.cache_files)
            if position is not None:
                ring.load(position)
            return ring
        count = self._parts_of(split)
        if self.ack == "consume" and count > 1:
            raise ConfigError(f'{self.data_dir} has {count} parts; a consumer of parts needs ack="commit"')
        if position is None:
            if split in self._reset:  # what was said of files that were read counts first: it moves the commit point
                self._ahead.drain(self.deadline)
            position = self._retention.starting_point(split, count, again=split in self._reset)
        parts = [
            Part(part, files, seq, row, start)
            for part, ((seq, row), start) in enumerate(zip(position["at"], position["start"], strict=True))
        ]
        reader = QueueReader(split, schema, self._stripe, self._pool, parts, position["g"], views=not self.copy)
        if self._plain is None and "torch" in sys.modules:
            self._learn_torch(schema)
        reader.prefetch()
        return reader

    # ------------------------------------------------------------------------------------------- files

    def _positions(self) -> dict[str, list[int]]:
        """Per split: the file each part is read in."""
        readers = list(self._readers.items()) if self._queued else []
        return {split: [p.seq for p in reader.parts] for split, reader in readers if isinstance(reader, QueueReader)}

    def _finished(self, split: str, part: int, seq: int, end: int, file: BatchFile | None) -> None:
        """All rows of a file were delivered. What follows from it is done in the background."""
        self._counts["files_read"] += 1
        held = None if isinstance(file, AlikeFile) else file  # nobody has to look whether that is still in use
        self._read.append((split, part, seq, end, held, time.monotonic()))
        self._ahead.soon(self._settle)

    def _settle(self) -> None:
        """Say what was read, of all files at once: of small ones several are, between two looks."""
        read = [self._read.popleft() for _ in range(len(self._read))]
        if not read:
            return
        self._meter.add("spool/files_read", len(read))
        self._retention.finished([(split, seq, end) for split, _, seq, end, _, _ in read])
        for split, part, seq, _, file, at in read:
            self._supply.retire(file, at)
            if self._report is not None:
                self._report(f"{self._channel(split, part)} {seq}: read")

    def _set_aside(self, sentence: str) -> None:
        self._counts["bad_files"] += 1
        self._meter.add("spool/files_bad")
        self._tell(sentence)

    # --------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Finish what is left to delete (for at most 5 s), stop the thread, give the place free."""
        if self._closed:
            return
        self._ahead.drain(5.0)
        self._last_state = self.state_dict()
        self._closed = True
        self._ahead.close()
        self._ahead.forget()
        self._quick.clear()
        self._readers.clear()  # and with them the mapped files
        self._files.clear()
        self._supply.clear()
        self._retention.close()
        self._place.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _on_failure(self, problem: str) -> None:
        self._counts["retries"] += 1
        self._meter.add("spool/retries")
        if problem != self._last_problem:
            self._last_problem = problem
            self._tell(f"{self.data_dir}: {problem}; trying again")

    def _tell(self, sentence: str) -> None:
        if self._report is not None:
            self._report(sentence)


def _moved(tensors: Mapping[str, torch.Tensor], target: torch.device) -> dict[str, torch.Tensor]:
    """On the device. To CUDA through pinned memory, so that the copy runs beside the step."""
    if target.type == "cuda":
        return {n: t.pin_memory().to(target, non_blocking=True) for n, t in tensors.items()}
    return {n: t.to(target) for n, t in tensors.items()}
