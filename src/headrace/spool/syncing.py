"""When does a file that nobody waited for reach the disk?

A provider with `durable=False` publishes without fsync: data that can be made again is not worth 10 ms a file. Left alone the
kernel writes it within half a minute or so. Here a thread syncs each file and its folder shortly after it was published, so
that a power cut costs the last moments rather than the last half minute, and a disk that fails is heard of.

    sync = BackgroundSync(report, meter)
    sync.add(path)                      returns at once
    sync.close()                        what was added is on the disk, or 10 s have passed

Nobody waits for it and nothing is promised: a file that is torn after a power cut fails its checksum and is made again. A
failed fsync is told and not repeated, for the reason given in files.py.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from headrace.files import sync_folder
from headrace.metrics import Meter, MetricSpec, Reduction, Wait, register

__all__ = ["BackgroundSync"]

register(
    MetricSpec("spool/files_synced", Reduction.SUM, unit="files", help="files synced in the background"),
    MetricSpec(
        "spool/sync_failures", Reduction.SUM, unit="files", healthy=(0, 0), help="files whose sync in the background failed"
    ),
)  # fmt: skip


class BackgroundSync:
    """Syncs files in the order they were added."""

    def __init__(self, report: Callable[[str], None], meter: Meter) -> None:
        self._report, self._meter = report, meter
        self._changed = threading.Condition()
        self._waiting: deque[Path] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, path: Path) -> None:
        with self._changed:
            self._waiting.append(path)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="headrace-spool-sync", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, timeout: float = 10.0) -> bool:
        """Finish and stop; False if that took longer than `timeout` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is None:
            return True
        with Wait("spool.sync", deadline=timeout + 1, meter=self._meter):
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while True:
            with Wait("spool.sync_idle", deadline=60.0, hidden=True, meter=self._meter), self._changed:
                if not self._waiting and not self._closed:
                    self._changed.wait(10.0)
                if not self._waiting and self._closed:
                    return
                paths = list(self._waiting)
                self._waiting.clear()
            for path in paths:
                self._sync(path, lambda path=path: _sync_file(path))
            # One sync of a folder covers every name that was linked before it.
            for folder in dict.fromkeys(path.parent for path in paths):
                self._sync(folder, lambda folder=folder: sync_folder(folder))

    def _sync(self, path: Path, call: Callable[[], None]) -> None:
        try:
            call()
        except FileNotFoundError:
            return  # read and deleted already
        except OSError as error:
            self._meter.add("spool/sync_failures")
            self._report(f"{path} could not be synced ({error.strerror or error}): look after the disk")
            return
        if path.suffix:
            self._meter.add("spool/files_synced")


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
