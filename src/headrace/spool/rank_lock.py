"""Exclusive lock that lets one consumer per rank read a spool, and only ranks of the same world size.

It is a kernel lock on `state/consumer-<rank>.lock`, so it is free at once when its holder dies. An operator who removes the file lets
another consumer in. The consumer that lost its lock must neither deliver nor delete: `require` is called at the end of every `get_batch` and
before every deletion.
"""

from __future__ import annotations

import os
import re
import time

from headrace.errors import ConfigError, HeadraceError
from headrace.metrics import Meter, Wait
from headrace.runtime.locks import ExclusiveLock, lock_holder
from headrace.spool.folder import SpoolFolder

_QUICK_LOOK = 0.0005
"""Seconds within which no other consumer can take a lock and read a batch: that takes at least 1.2 ms."""
_MOST_LOOKS = 3
"""Most looks in one `require`: on a network file system every look may take longer than `_QUICK_LOOK`."""


class RankLock:
    """The lock of one rank among the consumers of a spool."""

    def __init__(self, folder: SpoolFolder, rank: int, world_size: int, meter: Meter) -> None:
        self._folder, self.rank, self.world_size, self._meter = folder, rank, world_size, meter
        self._lock: ExclusiveLock | None = None
        """None before `acquire` and after `release`."""

    def acquire(self) -> None:
        """Take the lock; ConfigError within a second if another consumer of this rank, or one of another world size, is reading."""
        who = f"rank {self.rank} of {self.world_size}"
        advice = "a spool has one consumer per rank. Stop that one first, or give this one another dp_rank"
        self._lock = self._folder.take_lock(f"consumer-{self.rank}", who, advice)
        try:
            with Wait("spool.lock", deadline=1.0, meter=self._meter) as wait:
                # A consumer that has just started holds its lock a moment before its line is in the file: look again before refusing.
                while (other := self._reader_of_another_world()) is not None:
                    if wait.expired():
                        raise ConfigError(
                            f"{self._folder.path} is being read by {other}, this is {who}: all ranks need the same world size. Stop the others first"
                        )
                    time.sleep(0.02)
        except BaseException:
            self.release()
            raise

    def _reader_of_another_world(self) -> str | None:
        """A living consumer of this spool with another world size."""
        for name in os.listdir(self._folder.state):
            match = re.fullmatch(r"consumer-(\d{1,9})\.lock", name)
            holder = lock_holder(self._folder.state / name) if match and int(match[1]) != self.rank else None
            world = re.match(r"rank \d+ of (\d+)", holder) if holder else None
            if world and int(world[1]) != self.world_size:
                return holder
        return None

    def require(self) -> None:
        """HeadraceError if this consumer has lost its lock. A look is two system calls, 5 us.

        A process that is suspended (SIGSTOP) mostly stops inside a system call, here after the kernel has answered. So the answer of a look that
        took longer than a takeover may be out of date, and the look is repeated.
        """
        for _ in range(_MOST_LOOKS):
            began = time.monotonic()
            self._look()
            if time.monotonic() - began < _QUICK_LOOK:
                return

    def _look(self) -> None:
        if self._lock is None:
            raise HeadraceError(f"this consumer of {self._folder.path} was closed")
        if not self._lock.valid():
            holder = lock_holder(self._lock.path) or "no process"
            raise HeadraceError(
                f"this consumer of {self._folder.path} lost its rank lock: {self._lock.path.name} was removed and is now held by {holder}. Start again"
            )

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
