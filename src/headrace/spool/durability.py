"""The table of what is fsynced in a spool, and when. No other module decides it.

file                              fsynced                  after a power cut
batch file, durable=True          before it appears        it is there
batch file, durable=False         shortly after            the last ones may be torn: they fail their checksum and are made again
meta, commit point, bad verdict   before they count        they are there: deletion and quarantine depend on them
good verdict                      by the kernel, in time   the file is judged again
read position, begun files        by the kernel, in time   an older record is as good
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from headrace.files import Durability, open_regular, sync_folder
from headrace.metrics import Meter, MetricSpec, Reduction, register
from headrace.runtime.background import BackgroundThread

META = COMMIT_POINT = BAD_VERDICT = Durability.SYNCED
GOOD_VERDICT = READ_POSITION = BEGUN_FILES = Durability.UNSYNCED

register(
    MetricSpec("spool/files_synced", Reduction.SUM, unit="files", help="files synced in the background"),
    MetricSpec("spool/sync_failures", Reduction.SUM, unit="files", healthy=(0, 0), help="files whose sync in the background failed"),
)  # fmt: skip


def batch_files(durable: bool) -> Durability:
    """The durability of batch files whose provider was made with `durable`."""
    return Durability.SYNCED if durable else Durability.DEFERRED


class BackgroundSync:
    """Syncs files that were published without fsync, in the order they were added.

    The kernel would write them within half a minute by itself. No thread waits for the sync, and it may fail: a failed fsync is reported and
    not repeated, for the reason given in files.py.
    """

    def __init__(self, report: Callable[[str], None], meter: Meter) -> None:
        """`report`: gets a sentence for every file that could not be synced. `meter`: counts files and failures."""
        self._report, self._meter = report, meter
        self._thread = BackgroundThread("spool-sync", on_error=report, meter=meter)

    def add(self, path: Path) -> None:
        """Sync a file and its folder soon. Returns at once."""
        self._thread.post(partial(self._sync, path))

    def close(self, timeout: float = 10.0) -> bool:
        """Finish and stop; False if that took longer than `timeout` seconds."""
        finished = self._thread.drain(timeout)
        self._thread.close()
        return finished

    def _sync(self, path: Path) -> None:
        try:
            fd = open_regular(path)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            sync_folder(path.parent)
        except FileNotFoundError:
            return  # read and deleted already
        except OSError as error:
            self._meter.add("spool/sync_failures")
            self._report(f"{path} could not be synced ({error.strerror or error}): check the disk")
            return
        self._meter.add("spool/files_synced")
