"""Weights of a run as text in the fingerprint of its order, and back.

    3.0, 1.0; from step 10: b 3.0, web 1.0        as a cursor keeps it: in the order of the sources; the number of steps before the change
    3.0, 1.0; from step 11 on: b 3.0, web 1.0     as people are shown it: the first step with the weights, counted from 1

The kept form is part of every saved state and stays as it is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence

Changes = Sequence[tuple[int, Mapping[str, float]]]
"""(steps delivered before it, weights by source), in order; the first holds from the start and names every source."""

_STEP = re.compile(r"; from step (\d+):")


def written_weights(changes: Changes) -> str:
    """The kept form."""
    (_, first), *later = changes
    text = ", ".join(f"{weight!r}" for weight in first.values())
    for step, weights in later:
        listed = ", ".join(f"{name} {weight!r}" for name, weight in sorted(weights.items()))
        text += f"; from step {step}: {listed}"
    return text


def read_weights(text: str, names: Sequence[str]) -> list[tuple[int, dict[str, float]]]:
    """The changes that a kept form names, for the sources it was written for. ValueError if it is no such text."""
    first, *later = text.split("; from step ")
    changes = [(0, dict(zip(names, map(float, first.split(", ")), strict=True)))]
    for change in later:
        step, _, listed = change.partition(": ")
        pairs = (item.rpartition(" ") for item in listed.split(", "))
        changes.append((int(step), {name: float(weight) for name, _, weight in pairs}))
    return changes


def shown_weights(text: str) -> str:
    """The kept form as people count steps."""
    return _STEP.sub(lambda found: f"; from step {int(found[1]) + 1} on:", text)


def only_steps_differ(one: str, other: str) -> bool:
    """Whether two kept forms have the same weights, changed at different steps."""
    return one != other and _STEP.sub(";", one) == _STEP.sub(";", other)


def weights_in_force(changes: Changes, step: int) -> dict[str, float]:
    """Weights by source once `step` steps have been delivered."""
    weights: dict[str, float] = {}
    for at, changed in changes:
        if at <= step:
            weights |= changed
    return weights


def weights_asked_for(changes: Changes, begin: int, end: int, empty: Collection[str]) -> dict[str, float]:
    """The shares of the steps [begin, end) added up, by source. Sources in `empty` have no rows, and so no share."""
    asked = dict.fromkeys((name for name in changes[0][1]), 0.0)
    cuts = sorted({begin, *(step for step, _ in changes if begin < step < end), max(begin, end)})
    for a, b in itertools.pairwise(cuts):
        weights = {n: 0.0 if n in empty else w for n, w in weights_in_force(changes, a).items()}
        total = sum(weights.values())
        for name, weight in weights.items():
            asked[name] += (b - a) * weight / total if total else 0.0
    return asked
