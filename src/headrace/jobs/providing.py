"""Fill the spool of a config until asked to stop.

provider_of(job, data)      who makes what [spool] asks for
provide_text(config)        headrace provide CONFIG, here and in every actor of a fleet
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from headrace.jobs.config import RunConfig
from headrace.jobs.labelled_text import LabelledTextProvider
from headrace.jobs.masked_text import MaskedTextProvider
from headrace.jobs.spooled import TextProvider
from headrace.jobs.wiring import Job
from headrace.loader import TextDataset
from headrace.metrics import default_meter
from headrace.spool import DataProviderBase

__all__ = ["provide_text", "provider_of", "stopped_by_signals"]


def provider_of(job: Job, data: TextDataset | None = None, **more: Any) -> DataProviderBase:
    """The provider that makes what a config's [spool] asks for; over `data` where that is packed text, a new dataset unless given."""
    if job.config.spool.labelled:
        return LabelledTextProvider(job, **more)
    kind = MaskedTextProvider if job.config.spool.task == "mlm" else TextProvider
    return kind(job, data if data is not None else job.dataset(meter=default_meter()), **more)


def provide_text(
    config: RunConfig,
    *,
    base: Path | None = None,
    join: bool = False,
    force_regenerate: bool = False,
    take: int | None = None,
    max_files: int | None = None,
    until_eof: bool = False,
    report: Callable[[str], None] | None = None,
    ready: Callable[[DataProviderBase], None] | None = None,
) -> int:
    """Fill the spool of a config until asked to stop (SIGINT, SIGTERM), or until its sources end; how many files were made.

    `until_eof`: also stop when standard input ends, as it does when the process that holds its other end is killed.
    """
    job = Job(config, base)
    provider = provider_of(job, join=join, force_regenerate=force_regenerate, take=take, report=report)
    if until_eof:
        threading.Thread(target=_stop_at_eof, args=(provider.stop,), daemon=True, name="headrace-parent").start()
    splits = provider.splits if isinstance(provider, LabelledTextProvider) else ("train",)
    with stopped_by_signals(provider.stop):
        provider.open(splits)
        if ready is not None:
            ready(provider)
        return provider.run(splits, max_files=max_files)


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Generator[None]:
    """SIGINT and SIGTERM call `stop` while the body runs."""
    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda *_: stop())
    except ValueError:  # not the main thread: whoever runs us there handles signals
        before.clear()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_at_eof(stop: Callable[[], None]) -> None:
    while os.read(0, 4096):
        continue
    stop()
