"""Batches at rest: prepared in one process or on other machines while training runs.

    provider ─► queue/train/000000000007.safetensors ─► consumer, any number of ranks
                claim, publish          verdict, read, commit, delete

    meta.py        what a spool holds; meta.json, meta.pkl without running anything
    batch_file.py  one file: rows, header, checksums; the legacy .pt layout
    folder.py      where files lie, locks, sealed state
    file_system.py what can be expected of the disk
    channel.py     one part of one split: publish, claim, verdict, quarantine, delete
    checker.py     may a file be read: one answer for all ranks
    provider.py    who makes files, and how many ahead: DataProviderBase
    sequential.py  producers whose next file depends on all before: SequentialProvider
    syncing.py     files nobody waited for reach the disk as well
    sampling.py    next spans, BERT masks, balanced classes
    reader.py      which rows make the next batch
    ahead.py       a thread that looks ahead and tidies up behind
    supply.py      which files are made ready before they are asked for
    place.py       who may read
    retention.py   how far has been read, and what may go
    records.py     small state that is overwritten in place
    legacy.py      folders from before the queue
    consumer.py    the trainer's end: DatasetConsumer
    survey.py      what is in a spool, for people and for CI

Lose nothing, repeat nothing, block nothing, whatever dies.
"""

from headrace.spool.batch_file import BatchFile, FileHeader, open_batch_file, write_batch_file
from headrace.spool.consumer import DatasetConsumer
from headrace.spool.meta import TRAINING_TYPES, FieldSpec, read_meta, schema_of
from headrace.spool.provider import DataProviderBase, purge_spool
from headrace.spool.sequential import SequentialProvider

__all__ = [
    "TRAINING_TYPES",
    "BatchFile",
    "DataProviderBase",
    "DatasetConsumer",
    "FieldSpec",
    "FileHeader",
    "SequentialProvider",
    "open_batch_file",
    "purge_spool",
    "read_meta",
    "schema_of",
    "write_batch_file",
]
