"""Packing of samples into micro batches, equally many for every rank: `pack_samples`.

First fit decreasing into `seq_len` tokens. Samples of different runs or modes never share a micro batch.
Each class of run and mode is filled up to a multiple of the ranks with dummies, whose masks are 0, and dealt to the ranks in turn. So every rank takes
the same number of micro batches, of the same class at the same time, and no collective waits for a rank without work.

Packing copies no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.errors import ConfigError
from headrace.rollouts.records import ExpertRows, Mode, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples one after the other in one row of the trainer's forward pass."""

    samples: tuple[TrainingSample, ...]
    run: str
    mode: Mode
    dummy: bool = False

    @property
    def tokens(self) -> int:
        return sum(len(s) for s in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Micro batches by rank, equally many for each."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    truncated: int
    """Samples that were longer than seq_len and lost their end."""
    dummies: int

    @property
    def micro_batches(self) -> int:
        """Number of micro batches of each rank."""
        return len(self.ranks[0])


def first_fit_decreasing(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Bins of indices: longest first, each into the first bin with room. Equal lengths keep their order; none is above `room`."""
    left = np.full(len(lengths), room)
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = int(np.argmax(left[: len(bins) + 1] >= lengths[item]))
        if at == len(bins):
            bins.append([])
        bins[at].append(item)
        left[at] -= lengths[item]
    return bins


def pack_samples(samples: Sequence[TrainingSample], *, seq_len: int, ranks: int = 1) -> Packed:
    """The micro batches of every rank. With no samples at all each rank has one dummy, so that no rank waits for a batch."""
    if seq_len < 1 or ranks < 1:
        raise ConfigError(f"seq_len is {seq_len} and ranks is {ranks}, both must be at least 1")
    shapes = {s.experts.shape[1:] if s.experts is not None else None for s in samples}
    if len(shapes) > 1:
        raise ConfigError(
            f"samples of one batch have routed experts of different kinds (layers and experts a token: {sorted(map(str, shapes))}); "
            "a trainer that replays routing needs them alike in all"
        )
    shape = next(iter(shapes), None)
    classes: dict[tuple[str, Mode], list[TrainingSample]] = {}
    truncated = 0
    for sample in samples:
        truncated += len(sample) > seq_len
        if len(sample):
            classes.setdefault((sample.run, sample.mode), []).append(sample.truncated(seq_len))
    batches: list[MicroBatch] = []
    dummies = 0
    for (run, mode), members in sorted(classes.items()) or [(("", "rl"), [])]:
        # An image's fields describe one context: a sample that has some is alone in its micro batch.
        alone = [s for s in members if s.multimodal]
        shared = [s for s in members if not s.multimodal]
        found = first_fit_decreasing([len(s) for s in shared], seq_len)
        bins = [[shared[i] for i in b] for b in found]
        bins += [[s] for s in alone]
        batches += [MicroBatch(samples=tuple(b), run=run, mode=mode) for b in bins]
        missing = -len(bins) % ranks if bins else ranks
        batches += [_dummy(run, mode, shape) for _ in range(missing)]
        dummies += missing
    return Packed(ranks=tuple(tuple(batches[r::ranks]) for r in range(ranks)), truncated=truncated, dummies=dummies)


def _dummy(run: str, mode: Mode, shape: tuple[int, int] | None) -> MicroBatch:
    nothing = TrainingSample(
        env_name="", example_id="", ids=np.zeros(1, np.int32), mask=np.zeros(1, np.uint8), logprobs=np.zeros(1, np.float32),
        prompt_length=1, run=run, mode=mode,
        experts=None if shape is None else ExpertRows(chunks=(np.zeros((1, *shape), np.uint8),)),
    )  # fmt: skip
    return MicroBatch(samples=(nothing,), run=run, mode=mode, dummy=True)
