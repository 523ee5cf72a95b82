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
from pathlib import Path

from headrace.files import open_regular, sync_folder
from headrace.metrics import Meter, MetricSpec, Reduction, register

META = COMMIT_POINT = BAD_VERDICT = True
GOOD_VERDICT = READ_POSITION = BEGUN_FILES = False
"""The argument `durable` of `files.publish` and `records.write_record`."""

register(
    MetricSpec("spool/sync_failures", Reduction.SUM, unit="files", healthy=(0, 0), help="files whose sync in the background failed"),
)  # fmt: skip


def sync_file(path: Path, report: Callable[[str], None], meter: Meter) -> None:
    """Sync a file that was published without fsync, and its folder. For a background thread: no other thread waits for it.

    The kernel would write the file within half a minute by itself. A failed fsync is reported and not repeated, for the reason given in files.py.
    """
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
        meter.add("spool/sync_failures")
        report(f"{path} could not be synced ({error.strerror or error}): check the disk")
