"""Batches at rest: prepared in one process or on other machines while training runs.

provider ─► queue/train/000000000007.safetensors ─► consumer, any number of ranks
            claim, publish          verdict, read, commit, delete

both ends
  settings.py    settings of both, with their defaults
  meta.py        what a spool holds: meta.json, and meta.pkl without unpickling code
  batch_file.py  one file: rows, header, checksums; the `.pt` layout
  folder.py      layout of the folder, and locks
  durability.py  what is fsynced when
  records.py     small state that is overwritten in place
  file_system.py guarantees of the file system, and free space
  channel.py     one part of one split: publish, claim, verdict, quarantine, delete
  survey.py      list, describe, verify: for people and for CI
provider
  provider.py    keeps a number of files ahead of the consumers: DataProviderBase
  sequential.py  producers whose next file depends on all files before it: SequentialProvider
  providers/     language model, masked, labelled, and the usual ways to sample
consumer, from the trainer inward
  consumer.py    the trainer's end: DatasetConsumer
  rank_queue.py  the queue as one rank reads it: opens readers, retires files that were read
  rank_lock.py   one consumer per rank
  reader.py      files two ahead, batches as slices of their rows
  rows.py        which rows of which file make a batch
  verdicts.py    opens and checks a file; one verdict for all ranks
  retention.py   read positions, commit point, deletion
  journal.py     counts and logs what happened to files
  legacy.py      folders of `{split}_batches_*.pt`
"""

from headrace.batch import BatchSpec, FieldSpec
from headrace.spool.batch_file import BatchFile, FileHeader, open_batch_file, write_batch_file
from headrace.spool.consumer import DatasetConsumer
from headrace.spool.folder import purge_spool
from headrace.spool.meta import TRAINING_TYPES, read_meta
from headrace.spool.provider import DataProviderBase
from headrace.spool.sequential import SequentialProvider
from headrace.spool.settings import ConsumerSettings, ProviderSettings

__all__ = [
    "TRAINING_TYPES",
    "BatchFile",
    "BatchSpec",
    "ConsumerSettings",
    "DataProviderBase",
    "DatasetConsumer",
    "FieldSpec",
    "FileHeader",
    "ProviderSettings",
    "SequentialProvider",
    "open_batch_file",
    "purge_spool",
    "read_meta",
    "write_batch_file",
]
