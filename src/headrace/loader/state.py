"""What is saved: the lanes as they were delivered.

    {"kind": "text", "version": 1, "fingerprint": {…}, "body": {
        "step": 40, "sample": 960, "pass": 0, "ended": false, "lanes": 48, "sources": ["prose", "code"],
        "digest": "…", "delivered": {…}, "entries": {"0": [[epoch, row, offset, block, tokens, credit], …], …}}}

A rank saves its own lanes and needs nobody for it. `merge` puts the states of all ranks together, for any other number
of ranks; a rank that goes on at the same world size may also load just its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import CursorMismatch
from headrace.loader.lanes import DRY, Entry
from headrace.order import Cursor, Digest

__all__ = ["KIND", "VERSION", "LaneState", "LoaderState", "load_states", "merge_states"]

KIND, VERSION = "text", 1

LaneState = tuple[tuple[Entry, ...], tuple[int, ...]]
"""Entries and credits of one lane."""


@dataclass(slots=True)
class LoaderState:
    """What was delivered. Changed only when a batch reaches the trainer."""

    step: int = 0
    sample: int = 0
    number: int = 0
    """Which pass over finite sources."""
    ended: bool = False
    digest: Digest = field(default_factory=Digest)
    delivered: dict[str, int] = field(
        default_factory=lambda: {"tokens": 0, "padding": 0, "rows": 0, "samples": 0, "fillers": 0}
    )
    source_tokens: list[int] = field(default_factory=list)
    """Per source, over all passes, by this rank (rank 0 also holds what ranks of an earlier shape delivered)."""
    lanes: dict[int, LaneState] = field(default_factory=dict)

    def to_cursor(self, fingerprint: Mapping[str, str], lane_count: int, names: Sequence[str]) -> Cursor:
        entries = {
            str(lane): [[*entry, credit] for entry, credit in zip(es, cs, strict=True)]
            for lane, (es, cs) in sorted(self.lanes.items())
        }
        body = {
            "step": self.step, "sample": self.sample, "pass": self.number, "ended": self.ended, "lanes": lane_count,
            "sources": list(names), "digest": str(self.digest), "delivered": dict(self.delivered),
            "source_tokens": list(self.source_tokens), "entries": entries,
        }  # fmt: skip
        return Cursor(kind=KIND, version=VERSION, fingerprint=fingerprint, body=body)


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of several ranks, saved at the same step, as one."""
    if not states:
        raise CursorMismatch("no state was given: pass one state, or the list of all ranks' states")
    cursors = [Cursor.from_dict(s, what=f"state {i} of {len(states)}") for i, s in enumerate(states)]
    if len(cursors) == 1:
        return cursors[0].to_dict()
    first = cursors[0]
    for i, other in enumerate(cursors[1:], start=1):
        other.require(
            kind=first.kind, version=first.version, fingerprint=first.fingerprint, what=f"state {i} of {len(states)}"
        )
    bodies = [dict(c.body) for c in cursors]
    for name in ("step", "sample", "pass", "lanes", "sources"):
        found = [b.get(name) for b in bodies]
        if any(f != found[0] for f in found):
            raise CursorMismatch(
                f"the states of the ranks do not belong together: {name} is {', '.join(map(str, found))}. Save all ranks at "
                "the same step."
            )
    entries: dict[str, Any] = {}
    for i, body in enumerate(bodies):
        twice = sorted(set(entries) & set(body["entries"]), key=int)
        if twice:
            raise CursorMismatch(
                f"lane {twice[0]} is in two of the states (the second is state {i}): was one passed twice?"
            )
        entries |= body["entries"]
    merged = bodies[0] | {
        "entries": entries,
        "ended": all(b["ended"] for b in bodies),
        "digest": str(Digest(sum(Digest(b["digest"]).value for b in bodies))),
        "delivered": {k: sum(b["delivered"][k] for b in bodies) for k in bodies[0]["delivered"]},
        "source_tokens": [sum(t) for t in zip(*(b["source_tokens"] for b in bodies), strict=True)],
    }
    return Cursor(kind=first.kind, version=first.version, fingerprint=first.fingerprint, body=merged).to_dict()


def load_states(
    state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    fingerprint: Mapping[str, str],
    names: Sequence[str],
    lanes: int,
    own: Collection[int],
    rank: int,
    accept: Collection[str],
    fresh: Mapping[int, LaneState],
) -> tuple[LoaderState, dict[int, LaneState]]:
    """The state for one rank, and the lanes of the other ranks as far as they are known.

    `fresh` is what a lane looks like before its first sample; a source that a state does not know (accepted as
    "sources") starts there.
    """
    cursor = Cursor.from_dict(merge_states(state if isinstance(state, Sequence) else [state]))
    cursor.require(kind=KIND, version=VERSION, fingerprint=fingerprint, accept=accept)
    try:
        body = cursor.body
        entries = {int(lane): rows for lane, rows in body["entries"].items()}
        saved_names = list(body["sources"])
        if int(body["lanes"]) != lanes:
            raise CursorMismatch(
                f"state was saved with {body['lanes']} lanes, this dataset has {lanes}; lanes belong to the run"
            )
        place = {name: i for i, name in enumerate(saved_names)}
        known: dict[int, LaneState] = {}
        for lane, rows in entries.items():
            fresh_entries, fresh_credits = fresh[lane]
            parsed = [
                _entry(rows[place[n]]) if n in place else (fresh_entries[i], fresh_credits[i])
                for i, n in enumerate(names)
            ]
            known[lane] = tuple(e for e, _ in parsed), _balanced([c for _, c in parsed])
        partial = set(known) != set(range(lanes))
        loaded = LoaderState(
            step=int(body["step"]),
            sample=int(body["sample"]),
            number=int(body["pass"]),
            ended=bool(body["ended"]),
        )
        # What earlier ranks delivered is added up once: here if this rank goes on alone from its own state, else on rank 0.
        if partial or rank == 0:
            loaded.digest = Digest(body["digest"])
            loaded.delivered = {k: int(v) for k, v in body["delivered"].items()}
            tokens = dict(zip(saved_names, body["source_tokens"], strict=True))
            loaded.source_tokens = [int(tokens.get(n, 0)) for n in names]
        else:
            loaded.source_tokens = [0] * len(names)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CursorMismatch(f"state is damaged: {type(error).__name__} {error} while reading its body") from error
    missing = sorted(set(own) - set(known))
    if missing:
        raise CursorMismatch(
            f"state has lanes {_ranges(known)} of {lanes}, this rank needs lanes {_ranges(own)}: it was saved by one rank of "
            "several. Pass the list of all ranks' states, or the one from gather_state()."
        )
    loaded.lanes = {lane: known[lane] for lane in sorted(own)}
    return loaded, known


def _entry(row: Sequence[int]) -> tuple[Entry, int]:
    *values, credit = (int(v) for v in row)
    entry = Entry(*values)
    if min(entry[1:]) < 0 or entry.epoch < DRY:
        raise ValueError(f"negative position {row}")
    return entry, credit


def _balanced(credits: list[int]) -> tuple[int, ...]:
    """Credits sum to zero; they no longer do when sources were added or taken away."""
    total = sum(credits)
    if total and credits:
        share, rest = divmod(total, len(credits))
        credits = [c - share - (1 if i < rest else 0) for i, c in enumerate(credits)]
    return tuple(credits)


def _ranges(lanes: Collection[int]) -> str:
    ordered = sorted(lanes)
    shown = ", ".join(map(str, ordered[:6]))
    return shown + (f", … ({len(ordered)} of them)" if len(ordered) > 6 else "")
