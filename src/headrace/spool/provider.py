"""Who makes the files: a loop that keeps the queue filled, and never too full.

    class Reviews(DataProviderBase):
        def build_meta(self):               what the spool holds, once
        def sample_batch(self, split, rng): one batch; all randomness from rng

    Reviews("data/reviews", batch_size=32).run()

File k is a function of (seed, split, k): the generator handed to sample_batch starts from a key of these three. So it does
not matter which provider makes a file, when, or how often; several may work on one spool (`join=True`), each taking the
lowest file that is wanted, missing and unclaimed. A file that went bad is simply missing again.

What is wanted: files from the commit point up to `max_backlog_files` beyond where the slowest rank reads. When all of
these are there the provider waits (`spool.backlog`). Splits in `circular_splits` have a fixed number of files, which are
made once and stay.

Producers whose file k depends on what came before are `SequentialProvider`s (sequential.py); both share this loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headrace.errors import ConfigError, DataError, StorageError
from headrace.metrics import Meter, MetricSpec, Reduction, Wait, default_meter, register
from headrace.order import fingerprint_json, key
from headrace.spool.batch_file import OFFSETS, FileHeader, check_arrays, numpy_dtype, tensor_array, write_batch_file
from headrace.spool.channel import Channel, Published
from headrace.spool.file_system import FileSystem, room
from headrace.spool.folder import HeldLock, SpoolFolder
from headrace.spool.meta import CIRCULAR_SPLITS, FieldSpec, check_meta, read_meta, schema_of, write_meta
from headrace.spool.syncing import BackgroundSync

if TYPE_CHECKING:
    import torch

__all__ = ["DataProviderBase", "purge_spool"]

_FEW_INODES = 64
"""Fewer than these are little room: each end needs a few for a moment, for claims, verdicts and positions."""
_INODES_OF_A_FILE = 2
"""A temporary, and on file systems that count links (tmpfs) its second name."""
_BLOCK = 4096
_log = logging.getLogger("headrace.spool.provider")

register(
    MetricSpec(
        "spool/little_room",
        Reduction.SUM,
        unit="",
        healthy=(0, 0),
        help="times the disk had no room for the files to be made ahead",
    ),
    MetricSpec("spool/files_published", Reduction.SUM, unit="files", help="files this provider put into the spool"),
    MetricSpec(
        "spool/files_remade", Reduction.SUM, unit="files", help="files made again after they went missing or bad"
    ),
    MetricSpec(
        "spool/files_late", Reduction.SUM, unit="files", help="files that were no longer wanted once they were made"
    ),
)


class DataProviderBase:
    """Makes the files of a spool. Override `build_meta` and `sample_batch`."""

    kind: ClassVar[str] = "random"

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        batch_size: int,
        block_size: int | None = None,
        target_size: int | None = None,
        batches_per_file: int = 100,
        max_backlog_files: int = 2,
        sleep_seconds: float = 2.0,
        seed: int = 1337,
        verbose: bool = False,
        *,
        join: bool = False,
        force_regenerate: bool = False,
        durable: bool = True,
        file_format: str = "safetensors",
        max_retained: int = 1000,
        val_files: int = 2,
        lease_seconds: float = 60.0,
        deadline: float = 3600.0,
        report: Callable[[str], None] | None = None,
        meter: Meter | None = None,
    ) -> None:
        """Check the settings. Nothing is opened before `open` or `run`.

        Args:
            data_dir: Folder of the spool.
            batch_size: Rows of a batch.
            block_size: Length of an input, for the meta and for subclasses.
            target_size: Length of a target, for the meta and for subclasses.
            batches_per_file: Batches of a file.
            max_backlog_files: Files that may lie ahead of the slowest consumer.
            sleep_seconds: The longest pause between two looks at the backlog.
            seed: Seed of every draw.
            verbose: Also log what each file cost and what the provider waits for.
            join: Work beside providers that are running already.
            force_regenerate: Empty the queue first.
            durable: Sync each file before it appears. False: a thread syncs files behind, for data that can be made again.
            file_format: "safetensors", or "pt" for scripts that torch.load.
            max_retained: Files that may wait for a commit before the provider gives up.
            val_files: Files of a circular split.
            lease_seconds: Time after which the claim of a provider that is stuck is passed over.
            deadline: Seconds without a need for a file, or without room on the disk, after which `run` ends with an error.
            report: Gets the log lines: one for each file, and warnings. Without it they go to the logger "headrace.spool.provider" at level INFO,
                and from `run` to standard error where the program has set up no logging.
            meter: Where metrics are counted.
        """
        problems = [
            f"{name} is {value!r}, expected a whole number of 1 or more"
            for name, value in (
                ("batch_size", batch_size), ("batches_per_file", batches_per_file), ("max_backlog_files", max_backlog_files),
                ("max_retained", max_retained), ("block_size", block_size), ("target_size", target_size), ("val_files", val_files),
            )
            if not (value is None and name in ("block_size", "target_size")) and (type(value) is not int or value < 1)
        ]  # fmt: skip
        if type(seed) is not int:
            problems.append(f"seed is {seed!r}, expected a whole number")
        if file_format not in ("safetensors", "pt"):
            problems.append(f"file_format is {file_format!r}; it is safetensors or pt")
        for name, value in (("sleep_seconds", sleep_seconds), ("lease_seconds", lease_seconds), ("deadline", deadline)):
            if not (isinstance(value, (int, float)) and value > 0):
                problems.append(f"{name} is {value!r}, expected seconds, more than 0")
        if problems:
            raise ConfigError([f"{type(self).__name__}: {p}" for p in problems])
        self.data_dir = Path(data_dir)
        self.batch_size, self.block_size, self.target_size = batch_size, block_size, target_size
        self.batches_per_file, self.max_backlog_files = batches_per_file, max_backlog_files
        self.sleep_seconds, self.seed, self.verbose = sleep_seconds, seed, verbose
        self.join, self.force_regenerate, self.durable = join, force_regenerate, durable
        self.file_format, self.max_retained, self.lease_seconds, self.deadline = (
            file_format,
            max_retained,
            lease_seconds,
            deadline,
        )
        self.val_files = val_files
        self.folder = SpoolFolder(self.data_dir)
        self.meta: dict[str, Any] = {}
        self._report, self._meter = report, meter if meter is not None else default_meter()
        self._stop = threading.Event()
        self._lock: HeldLock | None = None
        self._channels: dict[tuple[str, int], Channel] = {}
        self._made: dict[tuple[str, int], int] = {}
        self._unpublished: tuple[Channel, int, FileHeader, dict[str, np.ndarray]] | None = None
        """What was made and found no room on the disk: it is not made a second time."""
        self._no_room_since: float | None = None
        self._little_room = False
        self._sync: BackgroundSync | None = None

    # --------------------------------------------------------------------------------------------- hooks

    def build_meta(self) -> dict[str, Any]:
        """The facts of the spool: dataset_name, training_type, batch_schema and the other keys that `check_meta` requires."""
        raise NotImplementedError(f"{type(self).__name__} needs build_meta()")

    def sample_batch(self, split: str, rng: torch.Generator) -> Mapping[str, torch.Tensor | np.ndarray]:
        """One batch: a tensor [batch_size, …] for every field of the schema. Draw from `rng` only."""
        raise NotImplementedError(f"{type(self).__name__} needs sample_batch(split, rng)")

    def batches_of(self, split: str, seq: int, rng: torch.Generator) -> Iterator[Mapping[str, Any]]:
        """The `batches_per_file` batches of file `seq`. Override it in place of `sample_batch` where a batch follows from its number."""
        for _ in range(self.batches_per_file):
            yield self.sample_batch(split, rng)

    def on_start(self) -> None:
        """Called once before the first file."""
        return None

    def on_stop(self) -> None:
        """Called once after the last, whatever ended the loop."""
        return None

    # ----------------------------------------------------------------------------------------------- run

    def run(self, splits: Sequence[str] = ("train", "val"), *, max_files: int | None = None) -> int:
        """Keep the queue filled until `stop()`, or until `max_files` were made or nothing is left to make; how many were."""
        if self._report is None:
            _log_to_stderr()
        self.open(splits)
        made = 0
        try:
            self.on_start()
            try:
                while not self._stop.is_set() and (max_files is None or made < max_files):
                    try:
                        work = self._take(splits)
                        if work is None:
                            if self._complete(splits):
                                break
                            work = self._wait_for_work(splits)
                        made += work is not None and self._make(work)
                        self._no_room_since = None
                    except StorageError as error:
                        self._wait_for_room(error)
            finally:
                self.on_stop()
        finally:
            self.close()
        return made

    def stop(self) -> None:
        """End `run` after the file it is making. May be called from a signal handler or another thread."""
        self._stop.set()

    def open(self, splits: Sequence[str] = ("train", "val")) -> None:
        """Take the spool: folders, lock, meta. `run` does it by itself."""
        if self._lock is not None:
            return
        found = None if self.force_regenerate else self.load_meta_if_exists()
        if found is not None:
            self._require_own(
                found
            )  # before queue/ is made: with it a folder of the legacy .pt layout would be none any more
        self.folder.prepare(self.parts)
        self.folder.sweep()
        for sentence in FileSystem.of(self.data_dir).warnings if self.durable else ():
            self._tell(f"{self.data_dir}: {sentence}")
        who = f"{type(self).__name__} for {', '.join(splits)}"
        try:
            self._lock = self.folder.take_lock(
                "provider", who, "stop that provider first, or start this one with join=True (--join) to work beside it"
            )
        except ConfigError:
            if not self.join:
                raise
        try:
            if self.force_regenerate:
                if self._lock is None:
                    raise ConfigError(
                        f"{self.data_dir} is being filled by another provider: force_regenerate would empty it underneath"
                    )
                reader = self.folder.reader_at_work()
                if reader is not None:
                    raise ConfigError(
                        f"{self.data_dir} is being read by {reader}: stop that before force_regenerate empties it"
                    )
                purge_spool(self.data_dir)
            self.ensure_dirs(splits)
            self._settle_meta()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # ------------------------------------------------------------------------------------------- folders

    @property
    def parts(self) -> int:
        return 1

    def channels(self, split: str) -> list[Channel]:
        """The parts of a split this provider looks after."""
        return [self._channel(split, part) for part in range(self.parts_of(split))]

    def parts_of(self, split: str) -> int:
        return 1 if split in CIRCULAR_SPLITS else self.parts

    def _channel(self, split: str, part: int) -> Channel:
        if (split, part) not in self._channels:
            self._channels[split, part] = Channel(
                self.folder, split, part, self.parts_of(split), suffix=f".{self.file_format}"
            )
        return self._channels[split, part]

    def ensure_dirs(self, splits: Sequence[str] = ("train", "val")) -> None:
        """Make the folders of these splits."""
        self.folder.prepare(self.parts)
        for split in splits:
            for channel in self.channels(split):
                channel.prepare()

    # ---------------------------------------------------------------------------------------------- meta

    def validate_meta(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """The meta with what this provider knows filled in; ConfigError names everything missing or in disagreement."""
        if not isinstance(meta, Mapping):
            raise ConfigError(
                f"{type(self).__name__}.build_meta gave {type(meta).__name__}, expected a dict of the spool's facts"
            )
        full = {"batch_size": self.batch_size, "split_info": {"train": {}, "val": {}}, **meta}
        for name in ("block_size", "target_size"):
            own = getattr(self, name)
            if own is not None:
                full.setdefault(name, own)
        checked = check_meta(full, f"meta of {type(self).__name__}")
        wrong = [
            f"meta of {type(self).__name__}: {name} is {checked[name]!r}, the provider was made with {getattr(self, name)!r}"
            for name in ("batch_size", "block_size", "target_size")
            if getattr(self, name) is not None and checked.get(name) != getattr(self, name)
        ]
        if wrong:
            raise ConfigError(wrong)
        checked["batch_schema"] = [f.to_json() for f in schema_of(checked["batch_schema"])]
        recipe = {
            "kind": self.kind, "parts": self.parts, "rows_per_file": self.rows_per_file, "seed": self.seed,
            "circular": dict.fromkeys(CIRCULAR_SPLITS, self.val_files), "format": self.file_format,
        }  # fmt: skip
        try:
            job = fingerprint_json({"recipe": recipe, "meta": _jsonable(checked)})
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"meta of {type(self).__name__} cannot be written: {error}. It holds text, numbers, lists and mappings; turn anything else into one "
                "of these in build_meta"
            ) from error
        checked["headrace"] = {"version": 1, **recipe, "job": job}
        return checked

    def write_meta(self, meta: Mapping[str, Any]) -> None:
        """Publish a checked meta."""
        write_meta(self.data_dir, meta)

    def load_meta_if_exists(self) -> dict[str, Any] | None:
        """The spool's meta, if it has one. A meta.pkl alone is one too: somebody else's, or that of a provider that died before it wrote the other."""
        if not any(os.path.lexists(self.data_dir / name) for name in ("meta.json", "meta.pkl")):
            return None
        found = read_meta(self.data_dir)
        if not os.path.lexists(self.data_dir / "meta.json") and "headrace" in found:
            return None  # ours, half written: what it says is written again
        return found

    def _require_own(self, found: Mapping[str, Any]) -> None:
        """ConfigError if a meta is not one of headrace's providers."""
        if "headrace" not in found:
            raise ConfigError(
                f"{self.data_dir} has a meta that another program wrote (dataset_name {found.get('dataset_name')!r}). Files of both would be mixed: use "
                "another folder, or empty this one with force_regenerate=True (--force_regenerate)"
            )

    def _settle_meta(self) -> None:
        wanted = self.validate_meta(self.build_meta())
        found = self.load_meta_if_exists()
        if found is None:
            self.write_meta(wanted)
            found = read_meta(self.data_dir)
        self._require_own(found)
        if found["headrace"].get("job") != wanted["headrace"]["job"]:
            then = {**found, **found["headrace"]}
            now = {**wanted, **wanted["headrace"]}
            differences = [
                f"{name} is {then.get(name)!r:.80}, now {now.get(name)!r:.80}"
                for name in sorted((set(then) | set(now)) - {"headrace", "job"}, key=str)
                if _jsonable(then.get(name)) != _jsonable(now.get(name))
            ]
            raise ConfigError(
                f"{self.data_dir} was made for something else ({'; '.join(differences)}). Files of both would be mixed: use another folder, "
                "or empty this one with force_regenerate=True (--force_regenerate)"
            )
        self.meta = found

    @property
    def job(self) -> str:
        return self.meta["headrace"]["job"]

    @property
    def schema(self) -> tuple[FieldSpec, ...]:
        return schema_of(self.meta["batch_schema"])

    @property
    def rows_per_file(self) -> int:
        return self.batch_size * self.batches_per_file

    # ---------------------------------------------------------------------------------------------- need

    def backlog_size(self, split: str) -> int:
        """Files that are there and not read yet."""
        return sum(
            sum(1 for seq in c.present() if seq >= self._read_position(split, c.part)) for c in self.channels(split)
        )

    def _read_position(self, split: str, part: int) -> int:
        """The file the slowest rank is reading; what lies before it is read."""
        commit = self._channel(split, part).commit_point()
        read = [v["done"][split][part] for v in self.folder.read_positions() if part < len(v["done"].get(split, ()))]
        return max(commit, min(read, default=0))

    def _wanted(self, split: str, part: int) -> range:
        if split in CIRCULAR_SPLITS:
            return range(self.val_files)
        commit = self._channel(split, part).commit_point()
        return range(commit, self._read_position(split, part) + self.max_backlog_files)

    def _missing(self, splits: Sequence[str]) -> list[tuple[int, Channel, int]]:
        """(how far ahead it is wanted, channel, file) of what is wanted and not there, the most urgent first."""
        found: list[tuple[int, Channel, int]] = []
        for split in splits:
            for channel in self.channels(split):
                wanted = self._wanted(split, channel.part)
                missing = [seq for seq in wanted if channel.find(seq) is None]
                if split in CIRCULAR_SPLITS:
                    found += [(seq, channel, seq) for seq in missing]
                    continue
                # A commit comes before the deletion: what was deleted while we looked lies below the point we read now.
                commit = channel.commit_point() if missing else 0
                possible = [seq for seq in missing if seq - commit < self.max_retained]
                if missing and not possible:
                    raise ConfigError(
                        f"{self.data_dir} holds {self.max_retained:,} files of {split} since the last commit, and max_retained allows no more. "
                        "Call consumer.commit(state) after each checkpoint, or raise max_retained"
                    )
                read = wanted.stop - self.max_backlog_files
                found += [(seq - read, channel, seq) for seq in possible if seq >= commit]
        return sorted(found, key=lambda entry: (entry[0], entry[2]))

    def _take(self, splits: Sequence[str]) -> _Work | None:
        """The most urgent missing file that nobody else is making; None if there is none."""
        for _, channel, seq in self._missing(splits):
            claim = channel.claim(seq, type(self).__name__, self.lease_seconds)
            if claim is None:
                continue
            held = claim if isinstance(claim, HeldLock) else None
            if channel.find(seq) is None:
                return _Work(channel, seq, held)
            if held is not None:
                held.release(remove=True)  # somebody finished it in between
        return None

    def _complete(self, splits: Sequence[str]) -> bool:
        """Whether nothing will ever be wanted again."""
        return all(split in CIRCULAR_SPLITS for split in splits) and not self._missing(splits)

    def _wait_for_work(self, splits: Sequence[str]) -> _Work | None:
        """Wait until a file is wanted; None once asked to stop."""
        remedy = f"Is a consumer of {self.data_dir} running, and does it commit?"
        pause = min(0.01, self.sleep_seconds)
        if self.verbose:
            self._tell(
                f"waiting for consumers: {', '.join(f'{self.backlog_size(s)} files of {s}' for s in splits)} are ahead"
            )
        with Wait("spool.backlog", deadline=self.deadline, remedy=remedy, meter=self._meter) as wait:
            while not self._stop.wait(min(pause, wait.remaining())):
                work = self._take(splits)
                if work is not None:
                    return work
                wait.check()
                pause = min(2 * pause, self.sleep_seconds)
        return None

    def _wait_for_room(self, problem: StorageError) -> None:
        """Wait a moment for the disk or the system. No claim is held meanwhile, so that a consumer finds room to commit and delete."""
        now = time.monotonic()
        self._no_room_since = since = self._no_room_since or now
        if now - since > self.deadline:
            raise problem
        if now == since:
            self._tell(f"waiting until it is possible again: {problem}")
        pause = min(1.0, max(0.01, (now - since) / 4), self.sleep_seconds)
        with Wait("spool.disk", deadline=self.deadline, remedy=str(problem), meter=self._meter):
            self._stop.wait(pause)

    # ---------------------------------------------------------------------------------------------- make

    def produce_one_file(self, split: str, seq: int) -> Path:
        """Make and publish file `seq` of a split, whether or not it is wanted; where it lies."""
        if not self.meta:
            self.ensure_dirs((split,))
            self._settle_meta()
        channel = self._channel(split, 0)
        self._publish(channel, seq)
        return channel.path(seq)

    def _make(self, work: _Work) -> bool:
        channel, seq = work.channel, work.seq
        place = (channel.split, channel.part)
        remade = seq < self._made.get(place, 0)
        try:
            verdict = channel.verdict(seq)
            if verdict is not None and not verdict.good:
                remade = True
                channel.clear_verdict(seq)
            began = time.perf_counter()
            outcome = self._publish(channel, seq)
            seconds = time.perf_counter() - began
        finally:
            if work.claim is not None:
                work.claim.release(remove=True)
        self._made[place] = max(self._made.get(place, 0), seq + 1)
        self._meter.add(
            {"published": "spool/files_published", "exists": "spool/files_late", "late": "spool/files_late"}[outcome]
        )
        if remade:
            self._meter.add("spool/files_remade")
        with contextlib.suppress(StorageError):  # the file counts, whether or not the backlog can be looked at
            again = " again" if remade else ""
            backlog = self.backlog_size(channel.split)
            self._tell(f"{channel} {seq}: {outcome}{again} in {seconds:.3f} s, backlog {backlog}")
        return outcome == "published"

    def _require_room(self, channel: Channel, seq: int, size: int) -> None:
        """StorageError where a file of `size` bytes would take the room that consumers need. Tells once when the disk will not hold what is
        to be made ahead."""
        left, wanted = room(self.data_dir), self.max_backlog_files
        little = left.bytes < size * wanted or (left.inodes is not None and left.inodes < _FEW_INODES + wanted)
        if little and not self._little_room:
            self._meter.add("spool/little_room")
            inodes = "" if left.inodes is None else f" and {left.inodes:,} inodes"
            self._tell(
                f"{self.data_dir} is nearly full: {left.bytes:,} bytes{inodes} are left, up to {wanted} files of {size:,} bytes are made ahead. "
                "Free space, or the provider will wait for it (spool.disk)"
            )
        self._little_room = little
        if not left.kept_bytes:
            return  # a file system that does not say how large it is
        most = self.max_retained + wanted
        ample = left.inodes is None or left.inodes > left.kept_inodes + most + _INODES_OF_A_FILE
        if ample and left.bytes > left.kept_bytes + most * _BLOCK + size:
            return
        # Several ranks write a verdict on every file before they can commit one; a single rank writes none.
        single = any(v["world_size"] == 1 for v in self.folder.read_positions())
        verdicts = 0 if single else sum(c.unjudged() for c in self._channels.values()) + 1
        # What a consumer waits for comes first: without it the consumer frees nothing either.
        waited_for = channel.split in CIRCULAR_SPLITS or seq <= self._read_position(channel.split, channel.part)
        inodes = verdicts + _INODES_OF_A_FILE + (0 if waited_for else left.kept_inodes)
        space = verdicts * _BLOCK + size + (0 if waited_for else left.kept_bytes)
        if left.bytes < space or (left.inodes is not None and left.inodes < inodes):
            raise StorageError(
                f"no room for file {channel.path(seq).name} in {self.data_dir}: {left.bytes:,} bytes"
                + ("" if left.inodes is None else f" and {left.inodes:,} inodes")
                + f" are free, and {space - size:,} bytes and {inodes - _INODES_OF_A_FILE} inodes are left to consumers, "
                "which need them to read and to free room. Free space, or let a consumer read and commit"
            )

    def _tell(self, sentence: str) -> None:
        if self._report is not None:
            self._report(sentence)
        else:
            _log.info(sentence)

    def _publish(self, channel: Channel, seq: int) -> Published:
        began = time.perf_counter()
        if self._unpublished is None or self._unpublished[:2] != (channel, seq):
            self._unpublished = (channel, seq, *self._content(channel, seq))
        _, _, header, arrays = self._unpublished
        size = sum(array.nbytes for array in arrays.values())
        self._require_room(channel, seq, size)
        made = time.perf_counter()
        outcome = channel.publish(
            seq,
            lambda path: write_batch_file(path, header, arrays, durable=self.durable),
            ring=channel.split in CIRCULAR_SPLITS,
        )
        self._unpublished = None
        if self.verbose:
            written = time.perf_counter()
            self._tell(
                f"{channel} {seq}: {header.rows:,} rows, {size:,} bytes; {made - began:.3f} s to make, {written - made:.3f} s to write"
            )
        if outcome == "published" and not self.durable:
            self._sync = self._sync or BackgroundSync(self._tell, self._meter)
            self._sync.add(channel.path(seq))
        return outcome

    def rows_of(self, split: str, seq: int) -> int:
        """Rows of a file; all have `rows_per_file` unless the last of a circular split is shorter."""
        return self.rows_per_file

    def _content(self, channel: Channel, seq: int) -> tuple[FileHeader, dict[str, np.ndarray]]:
        """What file `seq` holds: a function of (seed, split, seq)."""
        import torch

        rng = torch.Generator()
        rng.manual_seed(key(f"spool.file.{channel.split}", seed=self.seed, seq=seq) >> 1)
        count = self.rows_of(channel.split, seq)
        rows = RowBuffer(self.schema, count)
        for batch, values in enumerate(self.batches_of(channel.split, seq, rng)):
            expected = min(self.batch_size, count - len(rows))
            added = rows.add(values)
            if added != expected:
                raise ConfigError(
                    f"{type(self).__name__}.sample_batch gave {added} rows for batch {batch} of {channel} {seq}; batch_size is {expected}"
                )
        header = FileHeader(
            split=channel.split, seq=seq, schema=self.schema, rows=count, first=seq * self.rows_per_file,
            batch_size=self.batch_size, job=self.job,
        )  # fmt: skip
        return header, rows.arrays()


@dataclass(slots=True)
class _Work:
    channel: Channel
    seq: int
    claim: HeldLock | None
    """None where the claim of somebody stuck was passed over."""


class RowBuffer:
    """Batches on their way into one file: each field is one array, filled from the front."""

    def __init__(self, schema: tuple[FieldSpec, ...], rows: int) -> None:
        self._schema, self._rows = schema, 0
        self._fixed = {f.name: np.empty((rows, *f.shape), numpy_dtype(f.dtype)) for f in schema if not f.ragged}
        self._ragged: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {
            f.name: ([], []) for f in schema if f.ragged
        }

    def add(self, batch: Mapping[str, Any]) -> int:
        """Take a batch over; how many rows it has. DataError if it does not fit the schema."""
        if not isinstance(batch, Mapping):
            raise DataError(
                f"a batch is {type(batch).__name__}, expected a dict with an array or tensor for every field"
            )
        arrays = {
            name: np.asarray(v) if isinstance(v, (np.ndarray, list)) else tensor_array(v) for name, v in batch.items()
        }
        rows = check_arrays(self._schema, arrays)
        for name, array in self._fixed.items():
            array[self._rows : self._rows + rows] = arrays[name]
        for name, (values, lengths) in self._ragged.items():
            values.append(arrays[name].copy())
            lengths.append(np.diff(arrays[name + OFFSETS]))
        self._rows += rows
        return rows

    def __len__(self) -> int:
        return self._rows

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything added so far."""
        whole = {name: array[: self._rows] for name, array in self._fixed.items()}
        for field in self._schema:
            if field.ragged:
                values, lengths = self._ragged[field.name]
                offsets = np.zeros(self._rows + 1, np.int64)
                if lengths:
                    np.cumsum(np.concatenate(lengths), out=offsets[1:])
                whole[field.name] = np.concatenate(values) if values else np.empty(0, numpy_dtype(field.dtype))
                whole[field.name + OFFSETS] = offsets
        return whole


def purge_spool(path: Path, *, keep_meta: bool = False) -> None:
    """Empty a spool: queue, claims, verdicts, quarantine, archives, state, and its meta. Locks stay, because they are held."""
    try:
        _purge(path, keep_meta)
    except OSError as error:
        raise StorageError(
            f"{path} could not be emptied: {error.filename or path}: {error.strerror or error}. What is left can be removed once that is allowed: run again"
        ) from error


def _purge(path: Path, keep_meta: bool) -> None:
    folder = SpoolFolder(path)
    for name in ("queue", "claims", "verdicts", "quarantine", "archives"):
        below = path / name
        if below.is_symlink():
            raise ConfigError(f"{below} is a symbolic link; nothing behind it is deleted. Remove the link by hand")
        shutil.rmtree(below, ignore_errors=False) if below.exists() else None
    # The state goes last: while it stands, a half-emptied spool refuses to start over from file 0.
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder.state):
            if not name.endswith(".lock"):
                os.unlink(folder.state / name)
    if not keep_meta:
        for name in ("meta.json", "meta.pkl"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path / name)


def _log_to_stderr() -> None:
    """Show what providers log on standard error, unless the program has set up logging."""
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)


def _jsonable(value: Any) -> Any:
    """A form in which two metas can be compared: keys as text, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    return value
