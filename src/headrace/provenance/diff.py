"""The first sample at which two runs differ, and what differs there.

    diff_runs(run_a, run_b)      step 61: sample 1,440 is prose row 17 in A, prose row 203 in B

A step's digest is a sum over its samples, and every sample counts with its index. So digests can be added up: two runs saw
the same samples before index g exactly if the sums over their steps up to g agree, whatever their batch sizes were. They are
compared wherever both have a step that ends; only the samples of the first stretch that differs are rebuilt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.errors import FileCorrupt, HeadraceError
from headrace.loader import Piece
from headrace.loader.lanes import FILLER_HASH
from headrace.loader.weight_text import shown_weights
from headrace.order import Digest, sample_term
from headrace.provenance.steps import RebuiltSample, RecordedRun, RunProvenance

_NAMES_ONLY = ("run.dir", "run.name", "run.base")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSample:
    """What one of the runs has at the first sample that differs."""

    step: int | None
    """None: the run skipped it."""
    source: str | None
    """None: a filler."""
    file: str | None = None
    row: int | None = None
    start: int | None = None
    length: int | None = None
    column: int | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far two runs agree."""

    a: str
    b: str
    steps_a: int
    steps_b: int
    same: bool
    samples_compared: int
    """The samples before this one were compared and found equal."""
    step_a: int | None
    step_b: int | None
    """The first step that differs, as each of them counts."""
    sample: int | None
    """The first sample that differs; None if the runs are the same, or the documents cannot be rebuilt."""
    seen_a: SeenSample | None
    seen_b: SeenSample | None
    config: Mapping[str, tuple[Any, Any]]
    """Keys of the config that differ, also those without effect on the data."""
    order: Mapping[str, tuple[str | None, str | None]]
    """Inputs of the order that differ: sources, tokenizer, seed, weights."""
    notes: tuple[str, ...]


class _Step(NamedTuple):
    """A recorded step: its samples are [begin, end)."""

    number: int
    begin: int
    end: int
    digest: int


class _Stretch(NamedTuple):
    """Samples between two places where both runs have a step that ends, and the sum of each run's digests over them."""

    begin: int
    end: int
    sums: list[int]


def diff_runs(a: RecordedRun, b: RecordedRun) -> Difference:
    """Compare what two runs saw, step by step."""
    with RunProvenance(a) as first, RunProvenance(b) as second:
        notes: list[str] = []
        recorded = [_recorded_steps(first, notes), _recorded_steps(second, notes)]
        if len({s.end - s.begin for steps in recorded for s in steps[:1]}) > 1:
            notes.append("the runs have other batch sizes: they are compared by sample, where a step ends in both")
        compared, same = 0, True
        sample, seen, steps = None, (None, None), [None, None]
        for stretch in _stretches(*recorded):
            if stretch.sums[0] != stretch.sums[1]:
                found = _first_difference(first, second, stretch, notes)
                if found is not None:
                    same, (sample, seen) = False, found
                    steps = [_first_step(of_run, stretch) for of_run in recorded]
                    break
            compared = stretch.end
        if sample is not None:
            steps = [run.record.step_of(sample) or step for run, step in zip((first, second), steps, strict=True)]
            compared = sample
        return Difference(
            a=str(a.path), b=str(b.path), steps_a=len(recorded[0]), steps_b=len(recorded[1]), same=same, samples_compared=compared,
            step_a=steps[0], step_b=steps[1], sample=sample, seen_a=seen[0], seen_b=seen[1],
            config=_config_differences(first, second), order=_order_differences(first, second, notes), notes=tuple(notes),
        )  # fmt: skip


def _recorded_steps(run: RunProvenance, notes: list[str]) -> list[_Step]:
    """The steps of a run, up to the first whose digest is missing."""
    digests = run.digests
    if not digests:
        raise FileCorrupt(f"{run.path / 'digests.jsonl'} has no digest of any step: the run has not taken one yet")
    try:
        steps = list(run.record.steps())
    except FileCorrupt as error:
        size = run.run.config["loader"]["global_batch_size"]
        notes.append(f"{error}; its steps are taken to have {size} samples each, and its documents cannot be named")
        steps = [(n, (n - 1) * size, n * size) for n in range(1, max(digests) + 1)]
    found: list[_Step] = []
    for step, begin, end in steps:
        if step not in digests or (found and found[-1].number + 1 != step):
            notes.append(f"{run.path} is compared up to step {step - 1}: step {step} is not recorded")
            break
        found.append(_Step(step, begin, end, digests[step]))
    return found


def _stretches(a: list[_Step], b: list[_Step]) -> Iterator[_Stretch]:
    """The samples cut wherever both runs have a border between steps."""
    if not a or not b:
        return
    totals = [_totals(a), _totals(b)]
    borders = sorted(totals[0].keys() & totals[1].keys())
    if not borders or borders[0] != a[0].begin or borders[0] != b[0].begin:
        raise FileCorrupt(
            f"the records begin at samples {a[0].begin} and {b[0].begin}: runs can be compared from a sample that both begin at"
        )
    for begin, end in itertools.pairwise(borders):
        yield _Stretch(begin, end, [Digest(total[end] - total[begin]).value for total in totals])


def _totals(steps: list[_Step]) -> dict[int, int]:
    """The sum of the digests before every border of a step."""
    total, found = 0, {}
    for step in steps:
        found[step.begin] = total
        total += step.digest
        found[step.end] = total
    return found


def _first_step(steps: list[_Step], stretch: _Stretch) -> int | None:
    """The first step in a stretch; None if the run skipped all of it."""
    return next((s.number for s in steps if stretch.begin <= s.begin and s.end <= stretch.end), None)


# -------------------------------------------------------------------------------- the first difference


def _first_difference(
    a: RunProvenance, b: RunProvenance, parted: _Stretch, notes: list[str]
) -> tuple[int | None, tuple[SeenSample | None, SeenSample | None]] | None:
    """The first sample that differs, and what each run saw there; None if they differ only in samples with nothing to learn, which run a
    delivered among others and run b skipped as a whole step, or the reverse."""
    rebuilt: list[list[RebuiltSample]] = []
    for run, total in ((a, parted.sums[0]), (b, parted.sums[1])):
        try:
            samples = run.rebuild(range(parted.begin, parted.end))
        except HeadraceError as error:
            notes.append(f"the documents of {run.path} cannot be rebuilt: {error}")
            return None, (None, None)
        delivered = [t for t in samples if not t.place.skipped]
        if Digest(sum(sample_term(t.place.sample, t.content) for t in delivered)).value != total:
            notes.append(
                f"the samples of {run.path}, made again, do not give its digest: its data, its tokenizer or the code "
                "changed since, so the documents cannot be rebuilt"
            )
            return None, (None, None)
        rebuilt.append(samples)
    fillers = False
    for one, other in zip(*rebuilt, strict=True):
        if one.content == other.content == FILLER_HASH:
            fillers |= one.place.skipped != other.place.skipped
        elif (one.content, one.place.skipped) != (other.content, other.place.skipped):
            return one.place.sample, _seen(a, one, b, other)
    if fillers:
        return None
    notes.append("every sample is the same, and the sums differ: one of the digest files was changed")
    return None, (None, None)


def _seen(
    a: RunProvenance, one: RebuiltSample, b: RunProvenance, other: RebuiltSample
) -> tuple[SeenSample, SeenSample]:
    """The first piece in which the two samples differ, for each run."""
    pieces = a.pieces(one), b.pieces(other)
    at = 0
    while at < min(map(len, pieces)) and pieces[0][at] == pieces[1][at]:
        at += 1
    return _described(a, one, pieces[0], at), _described(b, other, pieces[1], at)


def _described(
    run: RunProvenance, rebuilt: RebuiltSample, pieces: list[tuple[Piece, str | None]], at: int
) -> SeenSample:
    step = None if rebuilt.place.skipped else run.record.step_of(rebuilt.place.sample)
    if not pieces:
        return SeenSample(step=step, source=None)
    piece, text = pieces[min(at, len(pieces) - 1)]
    return SeenSample(
        step=step, source=piece.source, file=piece.file, row=piece.row, start=piece.start, length=piece.length,
        column=piece.column, text=text,
    )  # fmt: skip


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys at which two tables differ, with both values; None where a table has no such key."""
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


def _config_differences(a: RunProvenance, b: RunProvenance) -> dict[str, tuple[Any, Any]]:
    differing = _differing(dict(_flat(a.run.config)), dict(_flat(b.run.config)))
    return {key: values for key, values in differing.items() if key not in _NAMES_ONLY}


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for i, item in enumerate(value):
            yield from _flat(item, f"{prefix}.{i}")
    else:
        yield prefix, value


def _order_differences(
    a: RunProvenance, b: RunProvenance, notes: list[str]
) -> dict[str, tuple[str | None, str | None]]:
    one, other = a.fingerprint, b.fingerprint
    for run, found in ((a, one), (b, other)):
        if found is None:
            notes.append(f"{run.path} has no checkpoint yet, so nothing says which files it read")
    if one is None or other is None:
        return {}
    differing = dict(sorted(_differing(one, other).items()))
    if "weights" in differing:
        before, after = differing["weights"]
        differing["weights"] = (before and shown_weights(before), after and shown_weights(after))
    return differing
