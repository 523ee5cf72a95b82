"""Prepared blocks as a plan of the loader; one integer says where a run stands.

Every rank works out any sample by itself, so the end of the data is known to all without a word between them, and a resume
costs what a start costs, wherever the run stands. Step t is samples t·B … t·B+B−1, rank r of W delivers those with g mod W = r. Any world size up
to the batch size will do; where it does not divide the batch, ranks get one row more or less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import ConfigError
from headrace.loader.batch_fill import COUNTS
from headrace.loader.loader_plan import BatchMaker, Rank, States, TokenPlan, batch_fill
from headrace.loader.prepared import Planned, PreparedDataset
from headrace.loader.state import LoaderState, damaged_state, merge_rank_states
from headrace.loader.windows import Piece
from headrace.order import Cursor, Digest
from headrace.settings import LoaderSettings

KIND, VERSION = "prepared", 1
_PLANNED_FIRST, _PLANNED = 256, 8192
"""Samples that are planned at once: few at first, so that the first batch comes soon, then twice as many each time up to
about 2 ms, .25 us a sample; 1,024 at a time take .9 us each."""


class _ReadyBatch(NamedTuple):
    """A batch, what it adds to the counts, and what it is made of."""

    batch: dict[str, Any]
    counts: np.ndarray
    """As in batch_fill.COUNTS."""
    source_tokens: np.ndarray
    planned: Planned
    begin: int
    end: int
    digest: int
    next_sample: int


class PreparedPlan(TokenPlan):
    """Prepared blocks. The state is the next sample, and what is said about those before it."""

    room = "prepared"
    batch_wait = "prepared.batch"
    data: PreparedDataset

    def __init__(self, data: PreparedDataset, settings: LoaderSettings, rank: Rank) -> None:
        super().__init__(data, settings, rank)
        self._check()
        self.state = self._new_state()
        self._last: _ReadyBatch | None = None
        """Without its tensors: they belong to the receiver alone."""

    def _new_state(self) -> LoaderState:
        return LoaderState(
            counts=np.zeros(len(COUNTS), np.int64), source_tokens=np.zeros(len(self.data.sources), np.int64)
        )

    def _check(self) -> None:
        problems = self.settings.problems()
        size, world = self.settings.global_batch_size, self.rank.world_size
        if not isinstance(size, int) or size < 1:
            problems.append(f"global_batch_size must be a positive integer, got {size!r}")
        elif size < world:
            problems.append(
                f"global_batch_size {size} leaves some of {world} ranks without a sample: use at most {size} ranks"
            )
        if problems:
            raise ConfigError(problems)

    # -------------------------------------------------------------------------------------- delivery

    def start(self) -> _PreparedMaker:
        return _PreparedMaker(self)

    def deliver(self, ready: _ReadyBatch) -> dict[str, Any]:
        state = self.state
        state.count(ready.counts, ready.source_tokens, ready.digest)
        state.step += 1
        state.sample = ready.next_sample
        self._last = ready._replace(batch={})
        return ready.batch

    def next_pass(self) -> None:
        self.state.number += 1
        self.state.begun, self.state.ended = self.state.sample, False

    def skip_to_pass(self, number: int) -> None:
        state = self.state
        if number > state.number + 1 if state.ended else state.sample == state.begun and number > state.number:
            state.number, state.ended = number - 1, True

    def __len__(self) -> int:
        return -(-len(self.data) // (self.settings.global_batch_size or 1))

    # ------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        state = self.state
        body = {
            "sample": state.sample, "step": state.step, "pass": state.number, "begun": state.begun, "ended": state.ended,
            "share": [self.rank.rank, self.rank.world_size], "digest": self.digest, "delivered": state.delivered,
            "source_tokens": state.tokens_by_source,
        }  # fmt: skip
        return Cursor(kind=KIND, version=VERSION, fingerprint=self.data.fingerprint(), body=body).to_dict()

    def load_state_dict(self, state: States, *, accept: Collection[str], fixed: Mapping[str, str]) -> None:
        """One rank's state says where; digest and counts go on whole only from the states of all ranks. Other weights, if accepted, hold as if they
        had held from the start, so blocks near this point may come twice or not at all."""
        cursor = Cursor.from_dict(self.merge(state if isinstance(state, Sequence) else [state]))
        cursor.require(kind=KIND, version=VERSION, fingerprint=self.data.fingerprint(), accept=accept, fixed=fixed)
        loaded = self._new_state()
        try:
            body = cursor.body
            loaded.sample, loaded.step = int(body["sample"]), int(body["step"])
            loaded.number, loaded.begun, loaded.ended = int(body["pass"]), int(body["begun"]), bool(body["ended"])
            if not 0 <= loaded.begun <= loaded.sample < 1 << 62 or loaded.step < 0 or loaded.number < 0:
                raise ValueError(f"impossible position {loaded.sample} of a pass that began at {loaded.begun}")
            share = tuple(int(n) for n in body["share"])
            # What was delivered before is added up once: on rank 0, or by the rank that goes on with its own share.
            if share == (self.rank.rank, self.rank.world_size) or (share == (0, 1) and self.rank.rank == 0):
                loaded.digest = Digest(body["digest"])
                loaded.counts[:] = [int(body["delivered"][k]) for k in COUNTS]
                tokens = [int(n) for n in body["source_tokens"]][: len(self.data.sources)]
                loaded.source_tokens[: len(tokens)] = tokens
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise damaged_state(error) from error
        self.state = loaded
        self._drained = self.totals()
        self._last = None

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        same = ("sample", "step", "pass", "begun", "ended")
        return merge_rank_states(states, same=same, combine=lambda bodies: {"share": [0, 1]})

    # ---------------------------------------------------------------------------------------- insight

    def targets(self) -> Sequence[float]:
        return self.data.weights

    def pieces(self, batch: Mapping[str, Any]) -> list[Piece]:
        first = int(batch["sample_index"][0]) if len(batch["sample_index"]) else -1
        last = self._last
        if last is None or int(last.planned.sample[last.begin]) != first:
            raise ValueError(
                f"the batch with sample {first} is not the one this loader delivered last: ask before taking the next"
            )
        planned, rows = last.planned, slice(last.begin, last.end)
        columns = (c[rows].tolist() for c in (planned.sample, planned.source, planned.shard, planned.local))
        return [piece for sample in zip(*columns, strict=True) for piece in self.data.pieces(*sample)]


class _PreparedMaker(BatchMaker):
    """Batches are planned many samples at once, and filled one at a time."""

    def __init__(self, plan: PreparedPlan) -> None:
        self._data, self._size = plan.data, plan.settings.global_batch_size or 0
        self._rank, self._world = plan.rank.rank, plan.rank.world_size
        self._sample, self._begun, self._number = plan.state.sample, plan.state.begun, plan.state.number
        self._most = -(-self._size // self._world)
        self._ahead = _PLANNED_FIRST
        self._planned: Planned | None = None
        self._batches: deque[tuple[int, int, int]] = deque()
        """Where in `_planned` the next batches begin and end, and what each adds to the digest."""
        self._fill = batch_fill(plan.settings, self._data.seq_len, self._data.pad_id)

    def make_next(self) -> _ReadyBatch | None:
        """The next batch, or None when the pass is over."""
        if not self._batches and not self._plan():
            return None
        assert self._planned is not None
        begin, end, digest = self._batches.popleft()
        planned, first = self._planned, int(self._planned.sample[begin])
        rows = self._fill.rows(end - begin)
        self._data.gather(planned, begin, end, rows)
        batch = self._fill.batch(rows, range(first, first + (end - begin) * self._world, self._world))
        self._sample += self._size
        counts, source_tokens = rows.totals(planned.source[begin:end], len(self._data.sources))
        return _ReadyBatch(batch, counts, source_tokens, planned, begin, end, digest, self._sample)

    def _plan(self) -> bool:
        """Work out the next batches; False at the end. All ranks come to the end at the same batch."""
        first, size, world = self._sample, self._size, self._world
        count = max(1, self._ahead // self._most)
        self._ahead = min(2 * self._ahead, _PLANNED)
        if not self._data.schedule.reaches(first + (count - 1) * size - self._begun):
            total = self._data.schedule.total
            assert total is not None
            count = -(-(self._begun + total - first) // size)
        if count <= 0:
            return False
        # A rank's samples are one arithmetic progression; batches are cut from it where a global batch ends.
        own = first + (self._rank - first) % world
        samples = np.arange(own, first + count * size, world, dtype=np.int64)
        ends = -(-(first + size * np.arange(1, count + 1) - own) // world)
        self._planned = planned = self._data.plan(samples, self._number, self._begun)
        begins = np.concatenate([[0], ends[:-1]])
        self._batches.extend(zip(begins.tolist(), ends.tolist(), _sums(planned.low, planned.high, begins), strict=True))
        return True


def _sums(low: np.ndarray, high: np.ndarray, starts: np.ndarray) -> list[int]:
    """Sums of 128-bit numbers, given as halves, over the runs that begin at `starts`: 32 bits at a time, so nothing overflows."""
    small = np.uint64(0xFFFFFFFF)
    quarters = (low & small, low >> np.uint64(32), high & small, high >> np.uint64(32))
    columns = [np.add.reduceat(q, starts).tolist() for q in quarters]
    return [a + (b << 32) + (c << 64) + (d << 96) for a, b, c, d in zip(*columns, strict=True)]
