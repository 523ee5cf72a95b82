"""From a config to the provider that fills its spool.

provider_of(job, data)      the provider that makes what [spool] asks for
provide_text(config)        headrace provide CONFIG, here and in every actor of a fleet
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from headrace.loader import TextDataset
from headrace.loader.dataset import sample_tokenizer
from headrace.metrics import default_meter
from headrace.order import fingerprint_json
from headrace.runs.config.schema import RunConfig, hashed_source
from headrace.runs.job import Job
from headrace.runtime.signals import stop_signals
from headrace.sources import Source, cache_folder
from headrace.spool import DataProviderBase
from headrace.spool.providers.examples import Examples, ExampleSettings, read_examples
from headrace.spool.providers.labelled import LabelledTextProvider
from headrace.spool.providers.lm import TextProvider
from headrace.spool.providers.mlm import MaskedTextProvider
from headrace.text import Tokenizer, load_tokenizer

_IDLE = 86_400.0
"""Seconds for which a provider waits for a consumer before it gives up: a day."""
_log = logging.getLogger("headrace.spool.provider")


def batch_recipe(config: RunConfig) -> str:
    """Fingerprint of what decides the batches, so that a trainer knows a spool without opening the sources."""
    tables = config.model_dump(mode="json", exclude_none=True)
    loader = {key: tables["loader"][key] for key in ("global_batch_size", "lanes", "exhausted")}
    text = {key: value for key, value in tables["text"].items() if key != "engine"}
    # Automatic sizes follow from the sources. They are written as the fixed sizes of version 0.1, whose spools stay readable.
    for table, name, fixed in ((loader, "lanes", 48), (text, "window_blocks", 64)):
        if table[name] == "auto":
            table[name] = fixed
    if text["shuffle_chunks"] == "auto":
        del text["shuffle_chunks"]
    sources = [hashed_source(source) for source in tables["source"]]
    spool = {key: tables["spool"].get(key) for key in ("task", "mask_probability", "mask_id")}
    recipe = {"source": sources, "mix": tables["mix"], "text": text, "loader": loader, "seed": config.run.seed}
    return fingerprint_json(recipe | {"spool": spool})


def provider_of(job: Job, data: TextDataset | None = None, **more: Any) -> DataProviderBase:
    """The provider that makes what a config's [spool] asks for.

    Args:
        job: The config.
        data: The packed text of a language model, masked or not; a new dataset unless given.
        more: Options of `DataProviderBase` and, for packed text, of `SequentialProvider`; they win over the config.
    """
    config = job.config
    spool, folder = config.spool, Path(config.run.base, config.spool_dir)
    options: dict[str, Any] = {
        "batch_size": config.loader.global_batch_size, "batches_per_file": spool.batches_per_file, "durable": spool.durable,
        "max_backlog_files": spool.max_backlog_files, "seed": config.run.seed, "sleep_seconds": 0.05, "deadline": _IDLE,
    } | more  # fmt: skip
    if spool.labelled:
        options.pop("take", None)  # there are no parts: a provider that joins makes the next file that is missing
        examples, tokenizer = examples_of(job, options.get("report") or _log.info)
        return LabelledTextProvider(
            folder, examples, tokenizer, sources=[s.name for s in config.source], seq_len=config.text.seq_len, balance=spool.balance,
            val_fraction=spool.val_fraction, **options,
        )  # fmt: skip
    data = data if data is not None else job.dataset(meter=default_meter())
    options = {"parts": spool.parts, "recipe": batch_recipe(config), "segment_ids": config.text.segment_ids} | options
    open_loader = partial(job.loader, data, skip=())
    if spool.task == "mlm":
        masking = {"mask_id": spool.mask_id, "mask_probability": spool.mask_probability}
        return MaskedTextProvider(folder, data, open_loader, **masking, **options)
    return TextProvider(folder, data, open_loader, **options)


def examples_of(job: Job, report: Callable[[str], None] = lambda _: None) -> tuple[Examples, Tokenizer]:
    """The labelled rows of a config and the tokenizer that made their ids."""
    text, spool, base = job.config.text, job.config.spool, Path(job.config.run.base)
    if text.tokenizer == "sample":
        tokenizer: Tokenizer = sample_tokenizer(cache_folder().absolute(), text.engine)
    else:
        tokenizer = load_tokenizer(
            text.tokenizer, eos=text.eos_token, bos=text.bos_token, engine=text.engine, base=base
        )
    settings = ExampleSettings(
        task="tag" if spool.task == "tag" else "classify", labels=spool.labels, seq_len=text.seq_len, bos=text.bos, eos=text.eos
    )  # fmt: skip
    sources = [Source(**section.model_dump()) for section in job.config.source]
    return read_examples(sources, tokenizer, settings, base=base, report=report), tokenizer


def provide_text(
    config: RunConfig,
    *,
    join: bool = False,
    force_regenerate: bool = False,
    take: int | None = None,
    max_files: int | None = None,
    until_eof: bool = False,
    report: Callable[[str], None] | None = None,
    ready: Callable[[DataProviderBase], None] | None = None,
) -> int:
    """Fill the spool of a config until SIGINT, SIGTERM or the end of its sources; the number of files made.

    Args:
        config: The run and its [spool].
        join: Work beside providers that are running.
        force_regenerate: Empty the spool first.
        take: The most parts to take; all that are free unless given.
        max_files: Stop after this many files.
        until_eof: Also stop when standard input ends, as it does when the process that holds its other end is killed.
        report: Takes sentences about what happens.
        ready: Called once this provider holds the spool.
    """
    provider = provider_of(Job(config), join=join, force_regenerate=force_regenerate, take=take, report=report)
    if until_eof:
        threading.Thread(target=_stop_at_eof, args=(provider.stop,), daemon=True, name="headrace-parent").start()
    with stop_signals(lambda _: provider.stop()):
        provider.open()
        if ready is not None:
            ready(provider)
        return provider.run(max_files=max_files)


def _stop_at_eof(stop: Callable[[], None]) -> None:
    while os.read(0, 4096):
        continue
    stop()
