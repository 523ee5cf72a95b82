"""Work orders: everything a worker needs to know, and the maker of its partials.

    order = WorkOrder(partition=…, provenance=…, columns=…, shards=…)        JSON: goes to any process or host
    maker = PartialMaker(order, rank=3)
    maker.make(ordinal)                                                      the rank's partial of that number, as bytes

The caller decides which unit is next: a maker that is asked for another than the one after its last goes there. With spans it saves
the open span every 30 s, so that a replacement does not begin the span again.
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

    def __init__(self, order: WorkOrder, rank: int, *, by_unit: bool = False) -> None:
        """`by_unit`: any maker may be asked for any unit, so open spans are saved under the unit's number, not the rank's."""
        self.order, self.rank = order, rank
        self._shards = RowShards.of(order.shards)
        require_unchanged(self._shards, order.data)
        self._by_unit = by_unit
        self._files: CheckpointFiles | None = None
        self._worker: NodeWorker | None = None
        self._next = -1

    def make(self, ordinal: int) -> bytes:
        """The message for the rank's ordinal-th unit."""
        worker = self._at(ordinal)
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
                worker.acknowledge(partial)
                self._next = ordinal + 1
                if self._by_unit and self._files is not None:
                    self._files.remove()
                return partial.to_bytes()
            if self._files is not None and time.monotonic() - saved >= _SAVE_SPAN_EVERY:
                with contextlib.suppress(
                    FileExistsError
                ):  # another worker took the unit over and saved it a moment ago
                    worker.checkpoint().save(self._files)
                saved = time.monotonic()

    def _at(self, ordinal: int) -> NodeWorker:
        if self._worker is None or self._by_unit or self._next != ordinal:
            order = self.order
            if order.partition.span > 1 and order.folder is not None:
                name = f"unit-{ordinal:012d}" if self._by_unit else f"worker-{self.rank}"
                self._files = CheckpointFiles(Path(order.folder), name)
            held = None
            # What two takers of one unit did to each other's files is no error: the span is begun again.
            with contextlib.suppress(*((FileCorrupt,) if self._by_unit else ())):
                held = NodeWorkerCheckpoint.load(self._files) if self._files is not None else None
            same = held is not None and (held.partition, held.provenance, held.next_ordinal) == (
                order.partition, order.provenance, ordinal,
            )  # fmt: skip
            if held is not None and same:
                self._worker = NodeWorker.resume(held, threads=order.threads, compute=order.columns.gram)
            else:
                self._worker = NodeWorker(
                    order.partition, rank=self.rank, provenance=order.provenance, threads=order.threads,
                    next_ordinal=ordinal, compute=order.columns.gram,
                )  # fmt: skip
        return self._worker
