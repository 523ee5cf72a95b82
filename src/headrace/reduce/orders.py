"""Work orders: everything a worker needs to know, and the maker of its partials.

    order = WorkOrder(partition=…, provenance=…, columns=…, shards=…)        JSON: goes to any process or host
    maker = PartialMaker(order, rank=3)
    maker.make(ordinal)                                                      the rank's partial of that number, as bytes

The caller decides which unit is next.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from headrace.errors import DataError
from headrace.reduce.columns import Columns, hex_of_shift, shift_of_hex
from headrace.reduce.partition import CrossNodePartition, Provenance
from headrace.reduce.shards import RowShards, ShardSpec, require_unchanged
from headrace.reduce.worker import NodeWorker


class WorkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One pass, described so that any process can take part in it."""

    partition: CrossNodePartition
    provenance: Provenance = msgspec.field(name="pass")
    columns: Columns
    shards: ShardSpec
    data: str
    """Fingerprint of the shards alone; a worker that sees other files refuses."""
    threads: int = 1

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self, enc_hook=hex_of_shift)

    @classmethod
    def from_dict(cls, value: Any) -> WorkOrder:
        """The order that `to_dict` described. ValueError if it is none."""
        return msgspec.convert(value, cls, dec_hook=shift_of_hex)


class PartialMaker:
    """One rank of a pass over shards."""

    def __init__(self, order: WorkOrder, rank: int) -> None:
        self._order, self._rank = order, rank

    @functools.cached_property
    def _shards(self) -> RowShards:
        shards = RowShards.of(self._order.shards)
        require_unchanged(shards, self._order.data)
        return shards

    def make(self, ordinal: int) -> bytes:
        """The message for the rank's ordinal-th unit. The first call opens the shards: DataChanged if they are not those that the pass was begun with."""
        order = self._order
        worker = NodeWorker(
            order.partition, rank=self._rank, provenance=order.provenance, threads=order.threads, next_ordinal=ordinal, compute=order.columns.gram
        )  # fmt: skip
        partial = None
        while partial is None:
            rows = worker.next_rows
            assert rows is not None
            try:
                partial = worker.compute(self._shards.read(*rows))
            except DataError as error:
                where = self._shards.first_unusable(*rows)
                raise (DataError(f"{error}. The first is {where}") if where is not None else error) from None
        return partial.to_bytes()
