"""Work orders: everything a worker needs to know, and the maker of its partials.

    order = WorkOrder(partition=…, provenance=…, columns=…, shards=…)        JSON: goes to any process or host
    maker = PartialMaker(order, rank=3)
    maker.make(ordinal)                                                      the rank's partial of that number, as bytes

The caller decides which unit is next. With spans the maker saves the open span every 30 s, so that a replacement does not begin the
span again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import DataError, FileCorrupt
from headrace.reduce.checkpoints import CheckpointFiles
from headrace.reduce.columns import Columns
from headrace.reduce.partition import CrossNodePartition, Provenance
from headrace.reduce.shards import RowShards, ShardSpec, require_unchanged
from headrace.reduce.worker import NodeWorker, NodeWorkerCheckpoint

_SAVE_SPAN_EVERY = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOrder:
    """One pass, described so that any process can take part in it."""

    partition: CrossNodePartition
    provenance: Provenance
    columns: Columns
    shards: ShardSpec
    data: str
    """Fingerprint of the shards alone; a worker that sees other files refuses."""
    threads: int = 1
    folder: str | None = None
    """Where open spans are saved; nowhere unless given."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "partition": self.partition.to_dict(), "pass": self.provenance.to_dict(), "columns": self.columns.to_dict(),
            "shards": self.shards.to_dict(), "data": self.data, "threads": self.threads, "folder": self.folder,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> WorkOrder:
        return cls(
            partition=CrossNodePartition.from_dict(value["partition"], what="the order"),
            provenance=Provenance.from_dict(value["pass"], what="the order"),
            columns=Columns.from_dict(value["columns"]),
            shards=ShardSpec.from_dict(value["shards"]),
            data=value["data"],
            threads=value["threads"],
            folder=value["folder"],
        )


class PartialMaker:
    """One rank of a pass over shards."""

    def __init__(self, order: WorkOrder, rank: int) -> None:
        """Open the shards of the order. DataChanged if they are not those that the pass was begun with."""
        self.order, self.rank = order, rank
        self._shards = RowShards.of(order.shards)
        require_unchanged(self._shards, order.data)

    def make(self, ordinal: int) -> bytes:
        """The message for the rank's ordinal-th unit. An open span is saved under the unit's number, so any worker may continue it."""
        order, files = self.order, None
        if order.partition.span > 1 and order.folder is not None:
            unit = order.partition.unit_of(self.rank, ordinal)
            files = CheckpointFiles(Path(order.folder), f"unit-{unit:012d}")
        worker = self._worker(ordinal, files)
        saved = time.monotonic()
        while True:
            rows = worker.next_rows
            assert rows is not None
            try:
                partial = worker.compute(self._shards.read(*rows))
            except DataError as error:
                where = self._shards.first_unusable(*rows)
                raise (DataError(f"{error}. The first is {where}") if where is not None else error) from None
            if partial is not None:
                if files is not None:
                    files.remove()
                return partial.to_bytes()
            if files is not None and time.monotonic() - saved >= _SAVE_SPAN_EVERY:
                # FileExistsError: another worker took the unit over and saved it a moment ago.
                with contextlib.suppress(FileExistsError):
                    worker.checkpoint().save(files)
                saved = time.monotonic()

    def _worker(self, ordinal: int, files: CheckpointFiles | None) -> NodeWorker:
        """A worker at the beginning of the unit, or where its span was saved."""
        order = self.order
        if files is not None:
            # Two workers that took one unit may have damaged each other's files: then the span is begun again.
            with contextlib.suppress(FileCorrupt):
                held = NodeWorkerCheckpoint.load(files)
                wanted = (order.partition, order.provenance, ordinal)
                if held is not None and (held.partition, held.provenance, held.next_ordinal) == wanted:
                    return NodeWorker.resume(held, threads=order.threads, compute=order.columns.gram)
        return NodeWorker(
            order.partition, rank=self.rank, provenance=order.provenance, threads=order.threads, next_ordinal=ordinal, compute=order.columns.gram
        )  # fmt: skip
