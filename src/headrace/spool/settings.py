"""Settings of a spool's provider and consumer, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import ConfigError
from headrace.spool.batch_file import FORMATS


@dataclass(frozen=True, kw_only=True)
class ProviderSettings:
    """Settings of a provider."""

    data_dir: Path
    """Folder of the spool."""
    batch_size: int
    """Rows of a batch."""
    block_size: int | None = None
    """Length of an input, for the meta and for subclasses."""
    target_size: int | None = None
    """Length of a target, for the meta and for subclasses."""
    batches_per_file: int = 100
    """Batches of a file."""
    max_backlog_files: int = 2
    """Files that may lie ahead of the slowest consumer."""
    sleep_seconds: float = 2.0
    """The longest pause between two checks of the backlog."""
    seed: int = 1337
    """Seed of every draw."""
    verbose: bool = False
    """Also log what each file cost and what the provider waits for."""
    join: bool = False
    """Work beside providers that are running already."""
    force_regenerate: bool = False
    """Empty the queue first."""
    durable: bool = True
    """Sync each file before it appears. False: a thread syncs files afterwards, for data that can be made again (durability.py)."""
    file_format: str = "safetensors"
    """"pt": for scripts that torch.load."""
    max_retained: int = 1000
    """Files that may wait for a commit before the provider gives up."""
    val_files: int = 2
    """Files of a circular split."""
    lease_seconds: float = 60.0
    """Time after which the claim of a provider that is stuck is ignored."""
    deadline: float = 3600.0
    """Seconds in which no file is wanted, or the disk is full, after which `run` ends with an error."""

    def check(self, owner: str) -> None:
        """ConfigError names every invalid value. `owner`: the provider's class, for the message."""
        given = (name for name in ("block_size", "target_size") if getattr(self, name) is not None)
        problems = _not_whole(
            self, 1, "batch_size", "batches_per_file", "max_backlog_files", "max_retained", "val_files", *given
        )
        if type(self.seed) is not int:
            problems.append(f"seed is {self.seed!r}, expected a whole number")
        if self.file_format not in FORMATS:
            problems.append(f"file_format is {self.file_format!r}; it is {' or '.join(FORMATS)}")
        for name in ("sleep_seconds", "lease_seconds", "deadline"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and value > 0):
                problems.append(f"{name} is {value!r}, expected seconds, more than 0")
        if problems:
            raise ConfigError([f"{owner}: {problem}" for problem in problems])


@dataclass(frozen=True, kw_only=True)
class ConsumerSettings:
    """Settings of a consumer. ConfigError names every invalid value."""

    data_dir: Path
    """Folder of the spool."""
    device_type: str = "cuda"
    """"cuda": batches that no device was named for are pinned, if there is a CUDA device."""
    prefer_queue: bool = True
    """Read `queue/` if there is one, else the legacy files `{split}_batches_*.pt`."""
    cache_files: int = 1
    """Files of a circular split, or of a legacy folder, that stay open."""
    high_watermark: int = 2
    """`stats()` calls a backlog of this many files or more "high"."""
    low_watermark: int = 0
    """`stats()` calls a backlog of this many files or fewer "low"."""
    ack: Literal["consume", "commit"] = "consume"
    """When files may be deleted: once all rows were delivered, or below the state given to `commit`."""
    dp_rank: int = 0
    """Rank of this consumer."""
    dp_world_size: int = 1
    """Number of ranks that read the spool."""
    batch_size: int | None = None
    """Samples of a whole batch, over all ranks; None: the provider's."""
    deadline: float = 600.0
    """The longest wait for a batch, in seconds."""
    verdict_patience: float = 5.0
    """Seconds after which a rank judges a file itself, if the rank whose turn it is has not."""
    archive: int = 0
    """How many files to keep in archives/ instead of deleting them."""
    copy: bool | None = None
    """Which memory a batch lies in. Writing to a batch never changes the file or another batch.

    False   views of the mapped file, whose space on the disk is not freed as long as a batch of it is in use. With several ranks a view is every
            W-th row of the file, so it is not contiguous: use `reshape`, not `view`
    True    rows that the background thread gathers in memory of a pool, which is used again once no batch of it is in use. The rank's rows of
            three files are in memory at a time. Batches are slices of this memory: clone a batch to save or send it alone
    None    False for a single rank on a local disk; True for several ranks, and on a network file system, where another machine can take away
            a file that is mapped
    """

    def __post_init__(self) -> None:
        problems = _not_whole(self, 1, "cache_files", "dp_world_size") + _not_whole(self, 0, "dp_rank", "archive")
        if self.ack not in ("consume", "commit"):
            problems.append(f'ack is {self.ack!r}; it is "consume" or "commit"')
        if not problems and self.dp_rank >= self.dp_world_size:
            problems.append(f"dp_rank is {self.dp_rank}, with a dp_world_size of {self.dp_world_size} it is below that")
        if not problems and self.ack == "consume" and self.dp_world_size > 1:
            problems.append(
                f'ack is "consume" with {self.dp_world_size} ranks, of which one would delete what others still need; use ack="commit" and call commit()'
            )
        if not self.data_dir.is_dir():
            problems.append(
                f"{self.data_dir} is not a folder: start its provider first, or give the folder of one that ran"
            )
        if problems:
            raise ConfigError([f"DatasetConsumer: {problem}" for problem in problems])

    def check_share(self, batch_size: int) -> None:
        """ConfigError if a batch cannot be shared evenly by the ranks."""
        if batch_size % self.dp_world_size:
            raise ConfigError(
                f"DatasetConsumer: a batch of {batch_size} samples cannot be shared by {self.dp_world_size} ranks; choose a multiple"
            )


def _not_whole(settings: object, least: int, *names: str) -> list[str]:
    """A sentence for each of these fields that is not a whole number of `least` or more."""
    values = ((name, getattr(settings, name)) for name in names)
    return [
        f"{name} is {value!r}, expected a whole number of {least} or more"
        for name, value in values
        if type(value) is not int or value < least
    ]
