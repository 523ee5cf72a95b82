"""The checked arguments of a `DatasetConsumer`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import ConfigError

__all__ = ["ConsumerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """What a consumer was told. ConfigError names every argument that cannot be."""

    data_dir: Path
    """Folder of the spool."""
    device_type: str
    """"cuda": batches for no device in particular are pinned, where there is a CUDA device."""
    prefer_queue: bool
    """Read `queue/` where there is one; else the legacy files `{split}_batches_*.pt`."""
    cache_files: int
    """Files of a circular split, or of a legacy folder, that stay open."""
    high_watermark: int
    """Files ahead from which on `stats()` says that the backlog is high."""
    low_watermark: int
    """Files ahead up to which `stats()` says that the backlog is low."""
    ack: Literal["consume", "commit"]
    """When files may be deleted: once all rows were delivered, or below what `commit` was given."""
    dp_rank: int
    dp_world_size: int
    batch_size: int | None
    """Samples of a whole batch, over all ranks; None: the provider's."""
    deadline: float
    """The longest wait for a batch, in seconds."""
    verdict_patience: float
    """Seconds after which a rank judges a file itself, because the rank whose turn it is has not."""
    archive: int
    """How many files to keep in archives/ instead of deleting them."""
    copy: bool | None
    """Whose memory a batch is. Writing to one never changes the file or another batch.

    False   views of the mapped file, which stays on the disk as long as a batch of it is referred to. Those of one of several ranks are every
            W-th row of it, so they are not contiguous: `reshape`, not `view`
    True    rows that the background thread gathered in memory that is used again, and kept as long as a batch of it is referred to. Three files'
            shares are in memory at a time. Batches of a file lie side by side, as slices do: clone one to save or send it alone
    None    False for a single rank on a local disk; True for several ranks, and on a network file system, where a file can be taken away from
            under a view
    """

    def __post_init__(self) -> None:
        whole = (("cache_files", self.cache_files, 1), ("dp_rank", self.dp_rank, 0), ("dp_world_size", self.dp_world_size, 1), ("archive", self.archive, 0))  # fmt: skip
        problems = [
            f"{name} is {value!r}, expected a whole number of {least} or more"
            for name, value, least in whole
            if type(value) is not int or value < least
        ]
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
