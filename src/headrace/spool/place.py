"""Who may read: one consumer a rank, and all of one world.

A place is a kernel lock on a file in state/, so it is free at once when its holder is gone. A consumer whose lock file was
removed and taken by another, or that was stopped and wakes up, can neither deliver nor delete.
"""

from __future__ import annotations

import os
import re
import time

from headrace.errors import ConfigError, HeadraceError
from headrace.metrics import Meter, Wait
from headrace.spool.folder import HeldLock, SpoolFolder, lock_holder

__all__ = ["Place"]

_MOMENT = 0.1
"""Seconds for which a consumer that had its place is taken to have it."""


class Place:
    """The place of one rank among the consumers of a spool."""

    def __init__(self, folder: SpoolFolder, rank: int, world_size: int, meter: Meter) -> None:
        self._folder, self.rank, self.world_size, self._meter = folder, rank, world_size, meter
        self._lock: HeldLock | None = None
        self._seen = 0.0
        """When it was last seen that it is still ours."""
        self._left = False

    def claim(self) -> None:
        """Be the only consumer of this rank, among ranks of one world."""
        who = f"rank {self.rank} of {self.world_size}"
        advice = "a spool has one consumer per rank. Stop that one first, or give this one another dp_rank"
        self._lock = self._folder.take_lock(f"consumer-{self.rank}", who, advice)
        try:
            with Wait("spool.lock", deadline=1.0, meter=self._meter) as wait:
                # One that has just come holds its lock a moment before it has written its name: look again before refusing.
                while (other := self._of_another_world()) is not None:
                    if wait.expired():
                        raise ConfigError(
                            f"{self._folder.path} is being read by {other}, this is {who}: all ranks need the same world size. Stop the others first"
                        )
                    time.sleep(0.02)
        except BaseException:
            self.release()
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

    def require(self) -> None:
        """HeadraceError if the place is no longer ours."""
        if self._left:
            raise HeadraceError(f"this consumer of {self._folder.path} was closed")
        if self._lock is not None and not self._lock.valid():
            holder = lock_holder(self._lock.path) or "nobody"
            raise HeadraceError(
                f"this consumer of {self._folder.path} lost its place: {self._lock.path.name} was removed and is now held by {holder}. Start again"
            )
        self._seen = time.monotonic()

    def require_lately(self) -> None:
        """The same, unless it was seen a moment ago: two system calls take 50 us of a trainer's time.
        A process that was stopped and wakes up finds that its moment has passed."""
        if time.monotonic() - self._seen > _MOMENT:
            self.require()

    def release(self) -> None:
        """Give it free, for good."""
        self._left = True
        if self._lock is not None:
            self._lock.release()
            self._lock = None
