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

import contextlib
import math
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from headrace.errors import ConfigError, CursorMismatch, DeadlineExceeded, HeadraceError
from headrace.metrics import Meter, MetricSpec, Reduction, Wait, default_meter, register
from headrace.order import Cursor
from headrace.spool.ahead import Ahead
from headrace.spool.batch_file import BatchFile, numpy_dtype
from headrace.spool.channel import Channel
from headrace.spool.checker import FileChecker
from headrace.spool.file_system import FileSystem
from headrace.spool.folder import HeldLock, SpoolFolder, lock_holder, patiently, sweep_dead_temporaries
from headrace.spool.legacy import LegacyReader, legacy_fingerprint
from headrace.spool.meta import FieldSpec, read_meta, schema_of
from headrace.spool.provider import CIRCULAR_SPLITS
from headrace.spool.reader import BufferPool, Part, QueueReader, RingReader, Stripe

if TYPE_CHECKING:
    import torch

__all__ = ["DatasetConsumer"]

_KIND, _VERSION = "spool", 1
_MOMENT = 0.1
"""Seconds for which a consumer that had its place is taken to have it."""
_FILES_AHEAD = 2
"""Files prepared beyond the one that is read. With one, the background thread waits for the trainer whenever the trainer waited for it."""
_POSITION_EVERY = 0.005
"""Seconds between two positions told to the provider: to write one takes 1 ms where a file of small batches lasts less."""

register(
    MetricSpec("spool/batches", Reduction.SUM, unit="batches", help="batches delivered"),
    MetricSpec("spool/bytes", Reduction.SUM, unit="B", help="bytes of delivered batches"),
    MetricSpec("spool/files_read", Reduction.SUM, unit="files", help="files read to their end"),
    MetricSpec(
        "spool/files_bad", Reduction.SUM, unit="files", healthy=(0, 0), help="files that were judged bad and set aside"
    ),
    MetricSpec(
        "spool/files_deleted", Reduction.SUM, unit="files", help="files deleted or archived below the commit point"
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
        `copy`: whether batches are copies. Without, they are views of the mapped file: writing to one changes neither the file nor
        another batch, and a file stays on the disk as long as a batch of it is referred to. Those of one of several ranks are every
        W-th row of it, so they are not contiguous: `reshape`, not `view`. Unless given, batches of a single rank on a local disk
        are views; those of several ranks are copies, and so are all on a network file system, where a file can be taken away from under a view.
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
        self._channels: dict[tuple[str, int], Channel] = {}
        self._lock: HeldLock | None = None
        self._counts = {"bad_files": 0, "files_read": 0, "files_deleted": 0, "retries": 0}
        self._taken: dict[str, list[int]] = {}
        """Per split: the first file that was not begun, and its first row. Only where a file is used up by reading it."""
        self._writing, self._committing = threading.Lock(), threading.Lock()
        self._last_problem = ""
        self._closed = False
        self._pins: bool | None = None
        """Whether batches for no device in particular are pinned: there is a CUDA device to copy them to."""
        self._batch_bytes = 0
        """Of a rank's share of a batch, where no field is ragged."""
        self._placed = 0.0
        """When it was last seen that this consumer's place is still its own."""
        self._position_written = 0.0
        self._queued = prefer_queue and (self.data_dir / "queue").is_dir()
        self.batch_size = self.meta["batch_size"]
        if batch_size is not None:
            self.set_batch_size(batch_size)
        else:
            self._check_share(self.batch_size)
        disk = FileSystem.of(self.data_dir)
        self.copy = copy if copy is not None else not disk.local or dp_world_size > 1
        self._retired: list[BatchFile] = []
        """Files read to their end of which a batch is still in use."""
        self._checker = FileChecker(
            self.meta,
            self._stripe,
            patience=verdict_patience,
            deadline=deadline,
            on_bad=self._set_aside,
            private=not self.copy,
        )
        if self._queued:
            for sentence in disk.warnings:
                self._tell(f"{self.data_dir}: {sentence}")
            self._claim_place()

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
            "last_problem": self._last_problem,
        }

    # ----------------------------------------------------------------------------------------- batches

    def get_batch(self, split: str = "train", device: str | torch.device | None = None) -> Any:
        """The next batch of a split, on `device`: (X, Y) where the schema is x and y, else a dict of tensors by field."""
        reader = self._readers.get(split) or self._reader(split)
        if type(reader) is QueueReader and (device == "cpu" or (device is None and self._pins is False)):
            ready = reader.from_stock(self.batch_size)
            if ready is not None:
                self._meter.add("spool/batches")
                self._meter.add("spool/bytes", self._batch_bytes or self._bytes_of_a_batch())
                return ready
        import torch

        arrays = reader.next(self.batch_size)
        tensors: dict[str, Any] = {}
        size = 0
        for name, array in arrays.items():
            tensors[name] = torch.from_numpy(array)
            size += array.nbytes
        for field in reader.schema:
            if field.dtype == "bfloat16":
                tensors[field.name] = tensors[field.name].view(torch.bfloat16)
        if device is not None and device != "cpu":
            tensors = _moved(tensors, torch.device(device))
        elif device is None:
            if self._pins is None:  # to ask takes 4 us, a third of a small batch
                self._pins = self.device_type == "cuda" and torch.cuda.is_available()
            tensors = {n: t.pin_memory() for n, t in tensors.items()} if self._pins else tensors
        self._meter.add("spool/batches")
        self._meter.add("spool/bytes", size)
        return (tensors["x"], tensors["y"]) if len(tensors) == 2 and "x" in tensors and "y" in tensors else tensors

    def wait_for_data(self, split: str = "train", timeout: float | None = None) -> bool:
        """Whether the next file is there within `timeout` seconds. Without a timeout: DeadlineExceeded at the consumer's deadline."""
        reader = self._reader(split)
        if isinstance(reader, LegacyReader):
            return True
        files = _SplitFiles(self, split)
        if isinstance(reader, QueueReader):
            wanted = [(part.number, part.seq, part.start) for part in reader.parts if not part.is_open]
        else:
            wanted = [(0, reader.seq, 0)]
        for place in wanted:
            files.want(*place)
        until = time.monotonic() + (self.deadline if timeout is None else timeout)
        try:
            for part, seq, _ in wanted:
                self._ahead.hold((split, part, seq), max(0.0, until - time.monotonic()))
        except DeadlineExceeded:
            if timeout is None:
                raise
            return False
        return True

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
        self.batch_size, self._batch_bytes = new_bs, 0

    def _bytes_of_a_batch(self) -> int:
        each = sum(math.prod(f.shape) * numpy_dtype(f.dtype).itemsize for f in self.schema())
        self._batch_bytes = each * self.batch_size // self.world_size
        return self._batch_bytes

    def _check_share(self, size: int) -> None:
        if size % self.world_size:
            raise ConfigError(
                f"DatasetConsumer: a batch of {size} samples cannot be shared by {self.world_size} ranks; choose a multiple"
            )

    # ------------------------------------------------------------------------------------------- state

    def reset_state(self, split: str | None = None) -> None:
        """Read a split (or all) again: a circular one from its beginning, a queue from the commit point."""
        for name in [split] if split is not None else list(self._readers):
            self._readers.pop(name, None)
            self._ahead.forget(lambda key, name=name: key[0] == name)

    def state_dict(self) -> dict[str, Any]:
        """Where reading stands: of what was delivered, the same on every rank."""
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
        self._ahead.later(self._write_read_position, "read position")

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
            self._require_place()
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
        self._move_commit(moved)

    def _move_commit(self, moved: Mapping[str, Mapping[str, Any]]) -> None:
        with self._committing:  # what is used up is committed by the background thread, what was saved by the trainer's
            self._move_commit_now(moved)

    def _move_commit_now(self, moved: Mapping[str, Mapping[str, Any]]) -> None:
        self._require_place()
        points = self._folder.commit_points()
        before = {
            split: [pair[0] for pair in points[split]["at"]] if split in points else [0] * len(moved[split]["at"])
            for split in moved
        }
        ahead = {
            split: dict(point)
            for split, point in moved.items()
            if split not in points or point["g"] >= points[split]["g"]
        }
        if any(split not in points or point != points[split] for split, point in ahead.items()):
            patiently(
                f"committing {self.data_dir}",
                lambda: self._folder.write_commit_points({**points, **ahead}),
                deadline=self.deadline,
                hidden=True,
            )
        for split, point in ahead.items():
            for part, (seq, _) in enumerate(point["at"]):
                self._delete_later(split, part, range(max(0, before[split][part] - 1), seq - self._kept_below))

    @property
    def _kept_below(self) -> int:
        """Files kept below the commit point: a sequential producer starts from the last one."""
        return 1 if self.meta.get("headrace", {}).get("kind") == "sequential" else 0

    def _delete_later(self, split: str, part: int, seqs: range) -> None:
        channel = self._channel(split, part)

        def job(seq: int) -> None:
            self._require_place()
            there = channel.find(seq) is not None
            channel.delete(seq, self.archive)
            if there:
                self._counts["files_deleted"] += 1
                self._meter.add("spool/files_deleted")

        for seq in seqs:
            self._ahead.later(lambda seq=seq: job(seq))

    # ------------------------------------------------------------------------------------------- place

    def _claim_place(self) -> None:
        """Be the only consumer of this rank, among ranks of one world."""
        self._folder.prepare()
        who = f"rank {self.rank} of {self.world_size}"
        advice = "a spool has one consumer per rank. Stop that one first, or give this one another dp_rank"
        self._lock = self._folder.take_lock(f"consumer-{self.rank}", who, advice)
        try:
            with Wait("spool.lock", deadline=1.0, meter=self._meter) as wait:
                # One that has just come holds its lock a moment before it has written its name: look again before refusing.
                while (other := self._of_another_world()) is not None:
                    if wait.expired():
                        raise ConfigError(
                            f"{self.data_dir} is being read by {other}, this is {who}: all ranks need the same world size. Stop the others first"
                        )
                    time.sleep(0.02)
            if self.rank == 0:
                self._taken = self._folder.taken_files() if self.ack == "consume" else {}
                self._tidy()
        except BaseException:
            self._lock.release()
            self._lock = None
            raise

    def _of_another_world(self) -> str | None:
        """A living consumer of this spool that counts another number of ranks."""
        for name in os.listdir(self._folder.state):
            match = re.fullmatch(r"consumer-(\d{1,9})\.lock", name)
            holder = lock_holder(self._folder.state / name) if match and int(match[1]) != self.rank else None
            world = re.match(r"rank \d+ of (\d+)", holder) if holder else None
            if world and int(world[1]) != self.world_size:
                return holder
        return None

    def _tidy(self) -> None:
        """What a crash may have left: half-done temporaries, files below the commit point, read positions of ranks that are no more."""
        sweep_dead_temporaries(self._folder.state)
        for name in os.listdir(self._folder.state):
            match = re.fullmatch(r"read-(\d{1,9})\.json", name)
            if match and int(match[1]) >= self.world_size:
                with contextlib.suppress(OSError):
                    os.unlink(self._folder.state / name)
        for split, point in self._folder.commit_points().items():
            for part, (seq, _) in enumerate(point["at"]):
                channel = self._channel(split, part)
                sweep_dead_temporaries(channel.verdicts)
                for old in channel.leftovers(seq - self._kept_below):
                    self._delete_later(split, part, range(old, old + 1))

    def _require_place(self) -> None:
        """A consumer that was replaced (its lock file was removed and taken by another) can neither deliver nor delete."""
        if self._closed:
            raise HeadraceError(f"this consumer of {self.data_dir} was closed")
        if self._lock is not None and not self._lock.valid():
            holder = lock_holder(self._lock.path) or "nobody"
            raise HeadraceError(
                f"this consumer of {self.data_dir} lost its place: {self._lock.path.name} was removed and is now held by {holder}. Start again"
            )
        self._placed = time.monotonic()

    def _require_place_lately(self) -> None:
        """The same, unless it was seen when the file was prepared a moment ago: two system calls take 50 us of a trainer's time.
        A process that was stopped and wakes up finds that its moment has passed."""
        if time.monotonic() - self._placed > _MOMENT:
            self._require_place()

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
            self._ahead.later(self._write_read_position, "read position")
        return self._readers[split]

    def _make_reader(self, split: str, position: Mapping[str, Any] | None) -> QueueReader | RingReader | LegacyReader:
        if not self._queued:
            legacy = LegacyReader(self.data_dir, split, self._stripe, self.cache_files)
            if position is not None:
                legacy.load(position)
            return legacy
        self._channel(split, 0)
        schema = schema_of(self.meta["batch_schema"])
        files = _SplitFiles(self, split)
        if split in CIRCULAR_SPLITS:
            count = self.meta.get("headrace", {}).get("circular", {}).get(split) or max(
                1, len(self._channel(split, 0).present())
            )
            ring = RingReader(split, schema, self._stripe, self._pool, files, int(count), self.cache_files)
            if position is not None:
                ring.load(position)
            return ring
        position = position if position is not None else self._starting_point(split)
        parts = [
            Part(part, files, seq, row, start)
            for part, ((seq, row), start) in enumerate(zip(position["at"], position["start"], strict=True))
        ]
        reader = QueueReader(split, schema, self._stripe, self._pool, parts, position["g"], views=not self.copy)
        reader.prefetch()
        return reader

    def _starting_point(self, split: str) -> dict[str, Any]:
        """Where a consumer without a state begins: at the commit point, or behind every file that was begun."""
        parts = self._parts_of(split)
        point: dict[str, Any] = self._folder.commit_points().get(split) or {
            "g": 0,
            "at": [[0, 0]] * parts,
            "start": [0] * parts,
        }
        if self.ack == "consume":
            seq, row = self._taken.get(split, (0, 0))
            if seq > point["at"][0][0]:
                point = {"g": row, "at": [[seq, 0]], "start": [row]}
            if parts > 1:
                raise ConfigError(f'{self.data_dir} has {parts} parts; a consumer of parts needs ack="commit"')
            self._move_commit({split: point})
        return {"g": point["g"], "at": [list(pair) for pair in point["at"]], "start": list(point["start"])}

    # ------------------------------------------------------------------------------------------- files

    def _prepare(self, split: str, part: int, seq: int, start: int) -> BatchFile:
        file = self._checker.prepare(self._channel(split, part), seq, start)
        queued = split not in CIRCULAR_SPLITS and self._parts_of(split) == 1
        # Whoever trains has imported torch. To do it here, a second of work, would keep a first file waiting.
        if not self.copy and queued and "torch" in sys.modules and not any(f.ragged for f in file.header.schema):
            file.cut(self.batch_size, start, self.rank, self.world_size)
        self._require_place()
        return file

    def _set_aside(self, sentence: str) -> None:
        self._counts["bad_files"] += 1
        self._meter.add("spool/files_bad")
        self._tell(sentence)

    def _entered(self, split: str, part: int, seq: int, end: int) -> None:
        """In the consume mode a file counts as taken before its first row is delivered: after a crash it is not read again."""
        self._require_place()
        self._taken = {**self._taken, split: [seq + 1, end]}
        patiently(
            f"writing the position of {self.data_dir}", self._write_read_position, deadline=self.deadline, hidden=False
        )

    def _finished(self, split: str, part: int, seq: int, end: int, file: BatchFile | None) -> None:
        """All rows of a file were delivered. In the background thread."""
        self._meter.add("spool/files_read")
        if self.ack == "commit":
            self._ahead.later(self._write_read_position, "read position", at=self._position_written + _POSITION_EVERY)
        else:
            self._ahead.later(lambda: self._used_up(split, seq, end))
        if file is not None:
            file.stock.clear()  # what was not used of it would hold the file
            self._retired.append(file)
            self._ahead.later(self._let_go, "let go")
        self._tell(f"{self._channel(split, part)} {seq}: read")

    def _let_go(self) -> None:
        """Unmap files nobody uses any more. In the background: the trainer's own last reference would do it in its step."""
        self._retired = [f for f in self._retired if f.held]

    def _used_up(self, split: str, seq: int, end: int) -> None:
        """Commit a file that was delivered to its end, then delete it."""
        self._move_commit({split: {"g": end, "at": [[seq + 1, 0]], "start": [end]}})
        self._write_read_position()

    def _write_read_position(self) -> None:
        with self._writing:  # both threads do: the one that looked first must not write last
            self._write_read_position_now()
        self._position_written = time.monotonic()

    def _write_read_position_now(self) -> None:
        splits: dict[str, Any] = {}
        for split, reader in list(self._readers.items()):
            if isinstance(reader, QueueReader):
                splits[split] = {"done": [part.seq for part in reader.parts]}
        if splits and self._queued:
            self._folder.write_read_position(self.rank, self.world_size, splits, self._taken)

    # --------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Finish what is left to delete (for at most 5 s), stop the thread, give the place free."""
        if self._closed:
            return
        self._ahead.drain(5.0)
        self._closed = True
        self._ahead.close()
        self._ahead.forget()
        self._readers.clear()  # and with them the mapped files
        self._retired.clear()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

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


class _SplitFiles:
    """What a reader asks its consumer for."""

    def __init__(self, consumer: DatasetConsumer, split: str) -> None:
        self._consumer, self._split = consumer, split
        self._entered: dict[int, int] = {}
        self._ends: dict[tuple[int, int], int] = {}
        self._reading: dict[int, int] = {}
        """The file of each part before the one that is wanted next."""
        self._following: dict[int, tuple[int, int]] = {}
        """The first file of each part that is not prepared, and its first row."""

    def want(self, part: int, seq: int, start: int) -> None:
        """Have this file prepared, and those behind it: where each begins is known once the one before it is open."""
        if self._split in CIRCULAR_SPLITS:  # there each file is asked for by itself
            self._consumer._ahead.want(
                (self._split, part, seq), lambda: self._consumer._prepare(self._split, part, seq, start)
            )
            return
        following = self._following.get(part)
        if following is None or following[0] <= seq:
            following = self._following[part] = (seq, start)
        self._reading[part] = seq - 1
        if following[0] < seq + _FILES_AHEAD:
            self._prepare(part, *following)

    def _prepare(self, part: int, seq: int, start: int) -> None:
        def prepare() -> BatchFile:
            file = self._consumer._prepare(self._split, part, seq, start)
            following = (seq + 1, start + file.header.rows)
            if not file.header.last and self._following.get(part) == (seq, start):
                self._following[part] = following
                if following[0] <= self._reading[part] + _FILES_AHEAD:
                    self._prepare(part, *following)
            return file

        self._consumer._ahead.want((self._split, part, seq), prepare)

    def ready(self, part: int, seq: int, start: int) -> BatchFile | None:
        file = self._consumer._ahead.ready((self._split, part, seq))
        if file is not None:
            self._ends[part, seq] = start + file.header.rows
        return file

    def take(self, part: int, seq: int, start: int) -> BatchFile:
        self.want(part, seq, start)
        file = self._consumer._ahead.take((self._split, part, seq), self._consumer.deadline)
        self._ends[part, seq] = start + file.header.rows
        return file

    def entered(self, part: int, seq: int) -> None:
        if seq > self._entered.get(part, -1):
            self._entered[part] = seq
            if self._consumer.ack == "consume":
                self._consumer._entered(self._split, part, seq, self._ends[part, seq])
            else:
                self._consumer._require_place_lately()

    def finished(self, part: int, seq: int, file: BatchFile | None) -> None:
        end = self._ends.pop((part, seq), None)
        if end is not None:
            self._consumer._counts["files_read"] += 1
            self._consumer._ahead.soon(lambda: self._consumer._finished(self._split, part, seq, end, file))
