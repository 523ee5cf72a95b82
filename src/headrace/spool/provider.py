"""Provider of a spool: a loop that keeps a bounded number of files ahead of the consumers.

    class Reviews(DataProviderBase):
        def build_meta(self):               the facts of the spool, once
        def sample_batch(self, split, rng): one batch; all randomness from rng

    Reviews("data/reviews", batch_size=32).run()

File k is a function of (seed, split, k): the generator handed to sample_batch starts from a key of these three. So it does
not matter which provider makes a file, when, or how often; several may work on one spool (`join=True`), each taking the
lowest file that is wanted, missing and unclaimed. A file that went bad is missing again.

Wanted are the files from the commit point up to `max_backlog_files` beyond the read position of the slowest rank. When all of
them are there the provider waits (`spool.backlog`). Circular splits have a fixed number of files, which are made once and stay.

Producers whose file k depends on what came before are `SequentialProvider`s (sequential.py); both share this loop.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from headrace.batch import BatchSpec, numpy_dtype
from headrace.errors import ConfigError, StorageError
from headrace.metrics import Meter, MetricSpec, Reduction, Wait, default_meter, register
from headrace.order import key
from headrace.runtime.background import BackgroundThread
from headrace.runtime.locks import ExclusiveLock
from headrace.spool.batch_file import FileHeader, RowBuffer, write_batch_file
from headrace.spool.channel import Channel, Published
from headrace.spool.durability import sync_file
from headrace.spool.file_system import FileSystem, room
from headrace.spool.folder import SpoolFolder, purge_spool
from headrace.spool.meta import (
    CIRCULAR_SPLITS,
    check_meta,
    read_meta,
    require_own,
    require_same_job,
    with_job,
    write_meta,
)
from headrace.spool.settings import ProviderSettings

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("headrace.spool.provider")

register(
    MetricSpec("spool/files_published", Reduction.SUM, unit="files", help="files this provider put into the spool"),
    MetricSpec("spool/files_remade", Reduction.SUM, unit="files", help="bad files that were made again"),
    MetricSpec("spool/files_late", Reduction.SUM, unit="files", help="files no longer wanted when they were done"),
)


class DataProviderBase:
    """Makes the files of a spool. Override `build_meta` and `sample_batch`."""

    kind: ClassVar[str] = "random"
    splits: Sequence[str] = ("train", "val")
    """The splits that `open` and `run` fill unless others are given."""
    parts: int = 1
    """Parts of every split that is not circular."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        batch_size: int,
        block_size: int | None = None,
        target_size: int | None = None,
        batches_per_file: int = ProviderSettings.batches_per_file,
        max_backlog_files: int = ProviderSettings.max_backlog_files,
        sleep_seconds: float = ProviderSettings.sleep_seconds,
        seed: int = ProviderSettings.seed,
        verbose: bool = False,
        *,
        join: bool = False,
        force_regenerate: bool = False,
        durable: bool = ProviderSettings.durable,
        file_format: str = ProviderSettings.file_format,
        max_retained: int = ProviderSettings.max_retained,
        val_files: int = ProviderSettings.val_files,
        lease_seconds: float = ProviderSettings.lease_seconds,
        deadline: float = ProviderSettings.deadline,
        report: Callable[[str], None] | None = None,
        meter: Meter | None = None,
    ) -> None:
        """Check the settings. Nothing is opened before `open` or `run`.

        Args:
            data_dir … deadline: The fields of `ProviderSettings`, which explains them.
            report: Gets the log lines: one for each file, and warnings. Without it they go to the logger "headrace.spool.provider" at level INFO,
                and from `run` to standard error where the program has set up no logging.
            meter: Counts files and waits; the process's own unless given.
        """
        self.settings = ProviderSettings(
            data_dir=Path(data_dir), batch_size=batch_size, block_size=block_size, target_size=target_size, batches_per_file=batches_per_file,
            max_backlog_files=max_backlog_files, sleep_seconds=sleep_seconds, seed=seed, verbose=verbose,
            join=join, force_regenerate=force_regenerate, durable=durable, file_format=file_format, max_retained=max_retained,
            val_files=val_files, lease_seconds=lease_seconds, deadline=deadline,
        )  # fmt: skip
        self.settings.check(type(self).__name__)
        self.data_dir, self.seed, self.val_files = self.settings.data_dir, seed, self.settings.val_files
        self.batch_size, self.block_size, self.target_size = batch_size, block_size, target_size
        self.batches_per_file = batches_per_file
        self.folder = SpoolFolder(self.data_dir)
        self.meta: dict[str, Any] = {}
        self._report, self._meter = report, meter if meter is not None else default_meter()
        self._stop = threading.Event()
        self._lock: ExclusiveLock | None = None
        self._channels: dict[tuple[str, int], Channel] = {}
        self._no_room_since: float | None = None
        self._sync: BackgroundThread | None = None
        """Syncs files that were published without fsync, in their order."""

    # --------------------------------------------------------------------------------------------- hooks

    def build_meta(self) -> dict[str, Any]:
        """The facts of the spool: dataset_name, training_type, batch_schema and the other keys that `check_meta` requires."""
        raise NotImplementedError(f"{type(self).__name__} needs build_meta()")

    def sample_batch(self, split: str, rng: torch.Generator) -> Mapping[str, torch.Tensor | np.ndarray]:
        """One batch of a split: a tensor [batch_size, …] for every field of the schema. All randomness comes from `rng`."""
        raise NotImplementedError(f"{type(self).__name__} needs sample_batch(split, rng)")

    def batches_of(self, split: str, seq: int, rng: torch.Generator) -> Iterator[Mapping[str, Any]]:
        """The `batches_per_file` batches of file `seq`. Override it in place of `sample_batch` if a batch follows from its number."""
        for _ in range(self.batches_per_file):
            yield self.sample_batch(split, rng)

    def on_start(self) -> None:
        """Called once before the first file."""
        return

    def on_stop(self) -> None:
        """Called once after the last file, also after an error."""
        return

    # ----------------------------------------------------------------------------------------------- run

    def run(self, splits: Sequence[str] | None = None, *, max_files: int | None = None) -> int:
        """Make files until `stop()` is called or no file will be wanted again; returns how many were made.

        Args:
            splits: The splits to fill; those of the provider unless given.
            max_files: Most files to make; unlimited unless given.
        """
        splits = self.splits if splits is None else splits
        if self._report is None:
            _log_to_stderr()
        self.open(splits)
        made = 0
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self.on_start()
            stack.callback(self.on_stop)
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
        return made

    def stop(self) -> None:
        """End `run` after the file it is making. May be called from a signal handler or another thread."""
        self._stop.set()

    def open(self, splits: Sequence[str] | None = None) -> None:
        """Make the folders of these splits (those of the provider unless given), take the lock, write or check the meta. `run` calls it."""
        splits = self.splits if splits is None else splits
        if self._lock is not None:
            return
        found = None if self.settings.force_regenerate else self.load_meta_if_exists()
        if found is not None:
            # Before queue/ is made: a folder with queue/ is no longer read as the legacy .pt layout.
            require_own(found, self.data_dir)
        self.folder.prepare(self.parts)
        self.folder.sweep()
        for sentence in FileSystem.of(self.data_dir).warnings if self.settings.durable else ():
            self._notify(f"{self.data_dir}: {sentence}")
        who = f"{type(self).__name__} for {', '.join(splits)}"
        try:
            self._lock = self.folder.take_lock(
                "provider", who, "stop that provider first, or start this one with join=True (--join) to work beside it"
            )
        except ConfigError:
            if not self.settings.join:
                raise
        try:
            if self.settings.force_regenerate:
                if self._lock is None:
                    raise ConfigError(
                        f"{self.data_dir} is being filled by another provider: stop that before force_regenerate empties it"
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
        """Finish syncing files and release the lock."""
        if self._sync is not None:
            self._sync.drain(10.0)
            self._sync.close()
            self._sync = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # ------------------------------------------------------------------------------------------- folders

    def channels(self, split: str) -> list[Channel]:
        """The parts of a split that this provider fills."""
        return [self._channel(split, part) for part in range(self.parts_of(split))]

    def parts_of(self, split: str) -> int:
        return 1 if split in CIRCULAR_SPLITS else self.parts

    def _channel(self, split: str, part: int) -> Channel:
        if (split, part) not in self._channels:
            self._channels[split, part] = Channel(
                self.folder, split, part, self.parts_of(split), suffix=f".{self.settings.file_format}"
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
        """The meta, completed by this provider's settings; ConfigError names every missing or contradictory key."""
        if not isinstance(meta, Mapping):
            raise ConfigError(
                f"{type(self).__name__}.build_meta returned {type(meta).__name__}, expected a dict of the spool's facts"
            )
        where = f"meta of {type(self).__name__}"
        own = {"batch_size": self.batch_size, "block_size": self.block_size, "target_size": self.target_size}
        own = {name: value for name, value in own.items() if value is not None}
        checked = check_meta({**own, "split_info": {"train": {}, "val": {}}, **meta}, where)
        wrong = [
            f"{where}: {name} is {checked[name]!r}, the provider was made with {value!r}"
            for name, value in own.items()
            if checked[name] != value
        ]
        if wrong:
            raise ConfigError(wrong)
        recipe = {
            "kind": self.kind, "parts": self.parts, "rows_per_file": self.rows_per_file, "seed": self.seed,
            "circular": dict.fromkeys(CIRCULAR_SPLITS, self.val_files), "format": self.settings.file_format,
        }  # fmt: skip
        return with_job(checked, recipe, where)

    def write_meta(self, meta: Mapping[str, Any]) -> None:
        """Publish a checked meta."""
        write_meta(self.data_dir, meta)

    def load_meta_if_exists(self) -> dict[str, Any] | None:
        """The spool's meta; None if there is none."""
        there = any(os.path.lexists(self.data_dir / name) for name in ("meta.json", "meta.pkl"))
        return read_meta(self.data_dir) if there else None

    def _settle_meta(self) -> None:
        """Write the meta, or check that the meta in the folder has the same job."""
        wanted = self.validate_meta(self.build_meta())
        found = self.load_meta_if_exists()
        if found is None:
            self.write_meta(wanted)
            found = read_meta(self.data_dir)
        require_own(found, self.data_dir)
        require_same_job(found, wanted, self.data_dir)
        self.meta = found

    @property
    def job(self) -> str:
        return self.meta["headrace"]["job"]

    @property
    def schema(self) -> BatchSpec:
        return BatchSpec.from_json(self.meta["batch_schema"])

    @property
    def rows_per_file(self) -> int:
        return self.batch_size * self.batches_per_file

    # ---------------------------------------------------------------------------------------------- need

    def backlog_size(self, split: str) -> int:
        """Files of a split that are there and not read yet."""
        return sum(channel.files_from(channel.read_position()) for channel in self.channels(split))

    def _wanted(self, channel: Channel) -> range:
        if channel.circular:
            return range(self.val_files)
        return range(channel.commit_point(), channel.read_position() + self.settings.max_backlog_files)

    def _missing(self, splits: Sequence[str]) -> list[tuple[int, Channel, int]]:
        """(files ahead of the slowest rank, channel, number) of each file that is wanted and not there, the most urgent first."""
        found: list[tuple[int, Channel, int]] = []
        for channel in (channel for split in splits for channel in self.channels(split)):
            wanted = self._wanted(channel)
            missing = [seq for seq in wanted if channel.find(seq) is None]
            if channel.circular:
                found += [(seq, channel, seq) for seq in missing]
                continue
            # A commit comes before the deletion: a file that was deleted since the listing lies below the commit point read now.
            commit = channel.commit_point() if missing else 0
            possible = [seq for seq in missing if seq - commit < self.settings.max_retained]
            if missing and not possible:
                raise ConfigError(
                    f"{self.data_dir} holds {self.settings.max_retained:,} files of {channel.split} since the last commit, and max_retained allows no "
                    "more. Call consumer.commit(state) after each checkpoint, or raise max_retained"
                )
            read = wanted.stop - self.settings.max_backlog_files
            found += [(seq - read, channel, seq) for seq in possible if seq >= commit]
        return sorted(found, key=lambda entry: (entry[0], entry[2]))

    def _take(self, splits: Sequence[str]) -> _Work | None:
        """The most urgent missing file that no other provider is making; None if there is none."""
        for _, channel, seq in self._missing(splits):
            claim = channel.claim(seq, type(self).__name__, self.settings.lease_seconds)
            if claim is None:
                continue
            held = claim if isinstance(claim, ExclusiveLock) else None
            if channel.find(seq) is None:
                return _Work(channel, seq, held)
            if held is not None:
                held.release(remove=True)  # another provider finished it in between
        return None

    def _complete(self, splits: Sequence[str]) -> bool:
        """Whether no file will ever be wanted again."""
        return all(split in CIRCULAR_SPLITS for split in splits) and not self._missing(splits)

    def _wait_for_work(self, splits: Sequence[str]) -> _Work | None:
        """Wait until a file is wanted; None after `stop()`."""
        remedy = f"Is a consumer of {self.data_dir} running, and does it commit?"
        pause = min(0.01, self.settings.sleep_seconds)
        if self.settings.verbose:
            self._notify(
                f"waiting for consumers: {', '.join(f'{self.backlog_size(s)} files of {s}' for s in splits)} are ahead"
            )
        with Wait("spool.backlog", deadline=self.settings.deadline, remedy=remedy, meter=self._meter) as wait:
            while not self._stop.wait(min(pause, wait.remaining())):
                work = self._take(splits)
                if work is not None:
                    return work
                wait.check()
                pause = min(2 * pause, self.settings.sleep_seconds)
        return None

    def _wait_for_room(self, problem: StorageError) -> None:
        """Pause until the disk may have space again. No claim is held meanwhile, so that a consumer has space to commit and delete."""
        now = time.monotonic()
        self._no_room_since = since = self._no_room_since or now
        if now - since > self.settings.deadline:
            raise problem
        if now == since:
            self._notify(f"waiting to try again: {problem}")
        pause = min(1.0, max(0.01, (now - since) / 4), self.settings.sleep_seconds)
        with Wait("spool.disk", deadline=self.settings.deadline, remedy=str(problem), meter=self._meter):
            self._stop.wait(pause)

    # ---------------------------------------------------------------------------------------------- make

    def produce_one_file(self, split: str, seq: int) -> Path:
        """Make and publish file `seq` of a split, whether or not it is wanted; returns its path."""
        if not self.meta:
            self.ensure_dirs((split,))
            self._settle_meta()
        channel = self._channel(split, 0)
        self._publish(channel, seq)
        return channel.path(seq)

    def _make(self, work: _Work) -> bool:
        channel, seq, again = work.channel, work.seq, ""
        try:
            verdict = channel.verdict(seq)
            if verdict is not None and not verdict.good:
                again = " again"
                channel.clear_verdict(seq)
            began = time.perf_counter()
            outcome = self._publish(channel, seq)
            seconds = time.perf_counter() - began
        finally:
            if work.claim is not None:
                work.claim.release(remove=True)
        self._meter.add("spool/files_published" if outcome == "published" else "spool/files_late")
        if again:
            self._meter.add("spool/files_remade")
        with contextlib.suppress(StorageError):  # the file counts, even if the backlog cannot be read
            backlog = self.backlog_size(channel.split)
            self._notify(f"{channel} {seq}: {outcome}{again} in {seconds:.3f} s, backlog {backlog}")
        return outcome == "published"

    def _require_room(self, channel: Channel, seq: int) -> None:
        """StorageError if file `seq` would take space that consumers need. Called before the file is made; ragged fields count as empty."""
        row = sum(math.prod(f.shape) * numpy_dtype(f.dtype).itemsize for f in self.schema if not f.ragged)
        size = row * self.rows_of(channel.split, seq)
        # Ranks write a verdict on every file before they can commit one.
        verdicts = sum(c.unjudged() for c in self._channels.values()) + 1
        # A file that a consumer waits for may use the kept space: without it the consumer frees none either.
        waited_for = channel.circular or seq <= channel.read_position()
        sentence = f"no room for file {channel.path(seq).name} in {self.data_dir}"
        room(self.data_dir).require(size, verdicts, waited_for, sentence)

    def _notify(self, sentence: str) -> None:
        if self._report is not None:
            self._report(sentence)
        else:
            _log.info(sentence)

    def _publish(self, channel: Channel, seq: int) -> Published:
        self._require_room(channel, seq)
        began = time.perf_counter()
        header, arrays = self._content(channel, seq)
        made = time.perf_counter()
        durable = self.settings.durable
        outcome = channel.publish(seq, lambda path: write_batch_file(path, header, arrays, durable=durable))
        if self.settings.verbose:
            written, size = time.perf_counter(), sum(array.nbytes for array in arrays.values())
            self._notify(
                f"{channel} {seq}: {header.rows:,} rows, {size:,} bytes; {made - began:.3f} s to make, {written - made:.3f} s to write"
            )
        if outcome == "published" and not durable:
            self._sync = self._sync or BackgroundThread("spool-sync", on_error=self._notify, meter=self._meter)
            self._sync.later(partial(sync_file, channel.path(seq), self._notify, self._meter))
        return outcome

    def rows_of(self, split: str, seq: int) -> int:
        """Rows of file `seq`: `rows_per_file`, unless a subclass has a shorter last file of a circular split."""
        return self.rows_per_file

    def _content(self, channel: Channel, seq: int) -> tuple[FileHeader, dict[str, np.ndarray]]:
        """Header and arrays of file `seq`: a function of (seed, split, seq)."""
        import torch

        rng = torch.Generator()
        rng.manual_seed(key(f"spool.file.{channel.split}", seed=self.seed, seq=seq) >> 1)
        count = self.rows_of(channel.split, seq)
        rows = RowBuffer(self.schema)
        for batch, values in enumerate(self.batches_of(channel.split, seq, rng)):
            expected = min(self.batch_size, count - len(rows))
            added = rows.add(values)
            if added != expected:
                raise ConfigError(
                    f"{type(self).__name__}.sample_batch returned {added} rows for batch {batch} of {channel} {seq}; batch_size is {expected}"
                )
        header = FileHeader(
            split=channel.split, seq=seq, schema=self.schema, rows=count, first=seq * self.rows_per_file,
            batch_size=self.batch_size, job=self.job,
        )  # fmt: skip
        return header, rows.arrays()


@dataclass(slots=True)
class _Work:
    """A file to be made."""

    channel: Channel
    seq: int
    claim: ExclusiveLock | None
    """None if another provider's claim had expired."""


def _log_to_stderr() -> None:
    """Send the log of providers to standard error, unless the program has set up logging."""
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
