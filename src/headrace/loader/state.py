"""What is saved: the lanes as they were delivered.

    {"kind": "text", "version": 1, "fingerprint": {…}, "body": {
        "step": 40, "sample": 960, "pass": 0, "ended": false, "lanes": 48, "sources": ["prose", "code"],
        "digest": "…", "delivered": {…}, "entries": {"0": [epoch, row, offset, block, tokens, credit, epoch, …], …}}}

A lane's entries are six numbers a source, in one flat list (states of earlier versions have a list a source). Fewer lists
matter: 48 lanes of 30 sources were 1,440 of them, and so many new containers make the interpreter's garbage collector
look through every object of the process, which takes hundreds of milliseconds, in the middle of a save.

A rank saves its own lanes without any other rank. `merge` puts the states of all ranks together, for any other number
of ranks; a rank that goes on at the same world size may also load just its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import ConfigError, CursorMismatch
from headrace.loader.lanes import CREDIT, DRY, EPOCH, WIDTH, LaneState
from headrace.loader.weight_text import only_steps_differ, read_weights, shown_weights, weights_asked_for
from headrace.order import Cursor, Digest

if TYPE_CHECKING:
    from headrace.loader.dataset import TextDataset
    from headrace.loader.text_plan import LaneShare

KIND, VERSION = "text", 1
COUNTS = ("tokens", "padding", "rows", "samples", "fillers", "skipped")
"""As the compiled loop counts them."""
ACCEPTABLE = ("data", "weights", "tokenizer", "config", "sources", "skip")
"""What may differ from a state if it is accepted by name."""
_LIMITS = {"step": 1 << 62, "sample": 1 << 62, "pass": 1 << 32}
"""No run gets there: a number beyond is damage."""


@dataclass(slots=True)
class LoaderState:
    """What was delivered. Changed only when a batch reaches the trainer."""

    step: int = 0
    sample: int = 0
    number: int = 0
    """Which pass over finite sources."""
    begun: int = 0
    """Of prepared blocks: the sample at which the pass began."""
    ended: bool = False
    digest: Digest = field(default_factory=Digest)
    counts: np.ndarray = field(default_factory=lambda: np.zeros(len(COUNTS), np.int64))
    """What was delivered, in the order of COUNTS."""
    source_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Per source, over all passes, by this rank (rank 0 also holds what ranks of an earlier shape delivered)."""
    skipped: list[list[int]] = field(default_factory=list)
    """Ranges of steps [from, to) that were passed over on request, by the number of steps before them: so counted from 0."""
    empty_steps: int = 0
    """How many steps were passed over because no rank had anything to learn in them."""
    asked_before: tuple[int, dict[str, float]] | None = None
    """(steps, shares of them added up by source) that other weights asked for, if weights were changed at a resume."""
    lane_ids: tuple[int, ...] = ()
    lanes: tuple[LaneState, ...] = ()
    """The state of each of `lane_ids`."""
    last_term: int = 0
    """What the batch that was counted last added to the digest. Not saved."""

    def count(self, counts: np.ndarray, source_tokens: np.ndarray, term: int) -> None:
        """Count a batch. `counts`: the first of COUNTS; `term`: what the batch adds to the digest."""
        self.counts[: len(counts)] += counts
        self.source_tokens += source_tokens
        self.digest.add(term)
        self.last_term = term

    def pass_over(self, step: int, samples: int) -> None:
        """Count a step that was passed over on request, in which this rank has `samples` samples."""
        self.counts[COUNTS.index("skipped")] += samples
        if self.skipped and self.skipped[-1][1] == step:
            self.skipped[-1][1] = step + 1
        else:
            self.skipped.append([step, step + 1])

    @property
    def delivered(self) -> dict[str, int]:
        return dict(zip(COUNTS, self.counts.tolist(), strict=False))  # of prepared blocks no step is passed over

    @property
    def tokens_by_source(self) -> list[int]:
        return self.source_tokens.tolist()

    @property
    def skipped_steps(self) -> int:
        return sum(b - a for a, b in self.skipped)

    @property
    def delivered_steps(self) -> int:
        return self.step - self.skipped_steps - self.empty_steps

    def to_cursor(
        self, fingerprint: Mapping[str, str], lane_count: int, names: Sequence[str], share: tuple[int, int]
    ) -> Cursor:
        """`share`: the rank that saves, and how many there are."""
        entries = {str(lane): list(state) for lane, state in zip(self.lane_ids, self.lanes, strict=True)}
        body = {
            "step": self.step, "sample": self.sample, "pass": self.number, "ended": self.ended, "lanes": lane_count,
            "sources": list(names), "digest": str(self.digest), "delivered": self.delivered,
            "source_tokens": self.source_tokens.tolist(), "skipped": [list(r) for r in self.skipped], "entries": entries,
        }  # fmt: skip
        if share != (0, 1):
            body["share"] = list(share)
        if self.empty_steps:
            body["empty_steps"] = self.empty_steps
        if self.asked_before is not None:
            body["asked_before"] = {"steps": self.asked_before[0], "shares": dict(self.asked_before[1])}
        return Cursor(kind=KIND, version=VERSION, fingerprint=fingerprint, body=body)


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of several ranks of text, saved at the same step, as one."""
    same = ("step", "sample", "pass", "lanes", "sources", "skipped", "empty_steps")
    return merge_rank_states(states, same=same, combine=_merged_entries)


def merge_rank_states(
    states: Sequence[Mapping[str, Any]],
    *,
    same: Sequence[str],
    combine: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the states of several ranks as one: digests and counts are added up.

    Args:
        states: One of each rank, saved at the same step.
        same: Entries of the bodies that must be equal.
        combine: Makes the other entries from the bodies of all ranks.
    """
    if not states:
        raise CursorMismatch("no state was given: pass one state, or the list of all ranks' states")
    cursors = [Cursor.from_dict(s, what=f"state {i} of {len(states)}") for i, s in enumerate(states)]
    first = cursors[0]
    if len(cursors) == 1:
        return first.to_dict()
    for i, other in enumerate(cursors[1:], start=1):
        other.require(
            kind=first.kind, version=first.version, fingerprint=first.fingerprint, what=f"state {i} of {len(states)}"
        )
    bodies = [dict(c.body) for c in cursors]
    try:
        for name in same:
            found = [b.get(name) for b in bodies]
            if any(f != found[0] for f in found):
                raise CursorMismatch(
                    f"the states of the ranks do not belong together: {name} is {', '.join(map(str, found))}. Save all ranks at "
                    "the same step."
                )
        _check_shares([body.get("share") for body in bodies])
        merged = {key: value for key, value in bodies[0].items() if key != "share"} | {
            "digest": str(Digest(sum(Digest(b["digest"]).value for b in bodies))),
            "delivered": {k: sum(b["delivered"].get(k, 0) for b in bodies) for k in bodies[0]["delivered"]},
            "source_tokens": [sum(t) for t in zip(*(b["source_tokens"] for b in bodies), strict=True)],
            **combine(bodies),
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged_state(error) from error
    return Cursor(kind=first.kind, version=first.version, fingerprint=first.fingerprint, body=merged).to_dict()


def _merged_entries(bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The lanes of all ranks."""
    entries: dict[str, Any] = {}
    for i, body in enumerate(bodies):
        for lane in sorted(set(entries) & set(body["entries"]), key=int):
            if "share" not in body:  # a state of version 0.1, whose ranks had lanes of their own
                raise CursorMismatch(
                    f"lane {lane} is in two of the states (the second is state {i}): was one passed twice?"
                )
            if entries[lane] != body["entries"][lane]:
                raise CursorMismatch(
                    f"lane {lane} stands differently in two of the states: save all ranks at the same step"
                )
        entries |= body["entries"]
    return {"entries": entries, "ended": all(b["ended"] for b in bodies)}


def _check_shares(shares: Sequence[Sequence[int] | None]) -> None:
    """Refuse a list that holds a rank twice or lacks one: ranks may share lanes, so the lanes alone do not show it."""
    known = [_share(share) for share in shares if share is not None]
    if len(known) < len(shares):
        return
    ranks, worlds = [rank for rank, _ in known], {world for _, world in known}
    if len(worlds) > 1:
        raise CursorMismatch(
            f"the states are of runs with {' and '.join(map(str, sorted(worlds)))} ranks: pass those of one run"
        )
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise CursorMismatch(f"rank {twice[0]} is in two of the states: was one passed twice?")
    missing = sorted(set(range(*worlds)) - set(ranks))
    if missing:
        raise CursorMismatch(
            f"the states of ranks {_ranges(missing)} of {worlds.pop()} are missing: pass those of all ranks"
        )


def _share(value: Sequence[int]) -> tuple[int, int]:
    rank, world = (int(n) for n in value)
    if not 0 <= rank < world:
        raise ValueError(f"a share of rank {rank} of {world}")
    return rank, world


def saved_sizes(state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the `TextDataset.sizes` that a state was saved with, as far as it names them."""
    first = state[0] if isinstance(state, Sequence) and state else state
    made_of = first.get("fingerprint") if isinstance(first, Mapping) else None
    if not isinstance(made_of, Mapping):
        return {}
    defaults = {"lanes": None, "window_blocks": None, "shuffle_chunks": 1}  # earlier versions shuffled chunk by chunk
    return {name: made_of.get(f"config:{name}", default) for name, default in defaults.items()}


def load_states(
    state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    data: TextDataset,
    share: LaneShare,
    *,
    skip: Iterable[tuple[int, int]],
    accept: Collection[str],
    fixed: Mapping[str, str],
) -> tuple[LoaderState, dict[int, LaneState]]:
    """The state for one rank, and the lanes of the other ranks as far as they are known.

    `fixed` names what cannot be accepted, and why. A source that the state does not know (accepted as "sources") starts as in a new run.
    """
    names, lanes, own = data.names, data.lanes, share.followed_lanes
    accept = checked_accept(accept)
    cursor = Cursor.from_dict(merge_states(state if isinstance(state, Sequence) else [state]))
    if (cursor.kind, cursor.version) == (KIND, VERSION):
        _check_position(cursor.body)
    step = cursor.body.get("step", 0)
    try:
        accepted = cursor.require(
            kind=KIND, version=VERSION, fingerprint=data.fingerprint(step), accept=accept, shown=shown_weights,
            fixed={"config:lanes": "saved positions are those of the lanes", **fixed},
        )  # fmt: skip
    except CursorMismatch as error:
        if cut := _cut_otherwise(error.differences):
            raise CursorMismatch(f"{error} {cut}", error.differences) from error
        saved, now = error.differences.get("weights", ("", ""))
        if not only_steps_differ(str(saved), str(now)):
            raise
        raise CursorMismatch(
            f"{error} The step of a MixChange is the first one with its weights, counted from 1; earlier versions counted it from 0.",
            error.differences,
        ) from error
    lanes_before = dict(enumerate(data.plan(cursor.body["pass"], step - 1).starts))
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
        for lane, flat in entries.items():
            rows = _by_source(flat)
            if len(rows) != len(saved_names):
                raise ValueError(f"lane {lane} has entries of {len(rows)} sources, expected {len(saved_names)}")
            fresh_rows = _by_source(lanes_before[lane])
            kept = [
                _entry(rows[place[name]]) if name in place else list(new)
                for name, new in zip(names, fresh_rows, strict=True)
            ]
            credits = _balanced([row[CREDIT] for row in kept])
            known[lane] = tuple(n for row, credit in zip(kept, credits, strict=True) for n in (*row[:CREDIT], credit))
        saved_by = None if body.get("share") is None else _share(body["share"])
        partial = saved_by is not None or set(known) != set(range(lanes))
        loaded = LoaderState(
            step=int(body["step"]),
            sample=int(body["sample"]),
            number=int(body["pass"]),
            ended=bool(body["ended"]),
            skipped=[[int(a), int(b)] for a, b in body.get("skipped", ())],
            empty_steps=int(body.get("empty_steps", 0)),
            asked_before=_asked_before(cursor, accepted & {"weights", "sources"}, data.empty),
        )
        # What earlier ranks delivered is added up once: here if this rank goes on alone from its own state, else on rank 0.
        if partial or share.rank == 0:
            loaded.digest = Digest(body["digest"])
            loaded.counts = np.array([int(body["delivered"].get(name, 0)) for name in COUNTS], np.int64)
            tokens = dict(zip(saved_names, body["source_tokens"], strict=True))
            loaded.source_tokens = np.array([int(tokens.get(n, 0)) for n in names], np.int64)
        else:
            loaded.source_tokens = np.zeros(len(names), np.int64)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise damaged_state(error) from error
    if "skip" not in accept:
        _refuse_other_skips(loaded, skip)
    missing = sorted(set(own) - set(known))
    if missing:
        raise CursorMismatch(
            f"state has lanes {_ranges(known)} of {lanes}, this rank needs lanes {_ranges(own)}: it was saved by one rank of "
            "several. Pass the list of all ranks' states, or the one from gather_state()."
        )
    if saved_by is not None and saved_by != (share.rank, share.world_size):
        raise CursorMismatch(
            f"state was saved by rank {saved_by[0]} of {saved_by[1]}, this is rank {share.rank} of {share.world_size}: pass the list of all ranks' "
            "states, or the one from gather_state()."
        )
    loaded.lane_ids = tuple(own)
    loaded.lanes = tuple(known[lane] for lane in loaded.lane_ids)
    return loaded, known


def _cut_otherwise(differences: Mapping[str, Any]) -> str:
    """The advice for a state whose txt files were read line by line, as version 0.1 did; empty where that is not the difference."""
    for name, (saved, now) in differences.items():
        if name.startswith("data:") and ", split=" in str(now) and ", split=" not in str(saved) and saved != "absent":
            return (
                f"The state read the txt files of source {name.removeprefix('data:')!r} line by line, as headrace 0.1 did; now a file is a document. To continue, "
                "add ?split=line to the source's spec."
            )
    return ""


def checked_accept(accept: Collection[str]) -> frozenset[str]:
    """What may differ, or ConfigError for a name that means nothing."""
    names = frozenset([accept] if isinstance(accept, str) else accept)
    for name in sorted(names, key=str):
        if not isinstance(name, str) or name.partition(":")[0] not in ACCEPTABLE:
            near = difflib.get_close_matches(str(name), ACCEPTABLE, 1)
            meant = f", did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"accept: there is no {name!r} to accept{meant} (there are {', '.join(ACCEPTABLE)})")
    return names


def accepts_data(accept: Collection[str]) -> bool:
    """Whether changed data is accepted, all of it or a file by name (`data:web/0.jsonl`)."""
    return any(name.partition(":")[0] == "data" for name in checked_accept(accept))


def joined_ranges(ranges: Iterable[Sequence[int]], end: int) -> list[list[int]]:
    """Ranges [from, to) as far as they lie before `end`, in order, those that touch as one."""
    joined: list[list[int]] = []
    for a, b in sorted((int(a), min(int(b), end)) for a, b in ranges):
        if a >= b:
            continue
        if joined and a <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], b)
        else:
            joined.append([a, b])
    return joined


def _refuse_other_skips(loaded: LoaderState, skip: Iterable[tuple[int, int]]) -> None:
    """What was passed over is part of the order: a loader that says otherwise describes another run."""
    saved, now = joined_ranges(loaded.skipped, loaded.step), joined_ranges(skip, loaded.step)
    if saved != now:
        said = [f"skip=[{', '.join(f'({a + 1}, {b + 1})' for a, b in ranges)}]" for ranges in (saved, now)]
        from_zero = saved == joined_ranges(((a + 1, b + 1) for a, b in skip), loaded.step)
        raise CursorMismatch(
            f"state was saved after step {loaded.step} of a run with {said[0]}; this loader has {said[1]} up to that step. Make the "
            f'loader with {said[0]}, and with what lies ahead, or accept it with accept={{"skip"}}.'
            + (
                " Earlier versions counted the steps of `skip` from 0; they are counted from 1 now."
                if from_zero
                else ""
            ),
            {"skip": (said[0], said[1])},
        )


def _check_position(body: Mapping[str, Any]) -> None:
    for name, limit in _LIMITS.items():
        number = body.get(name)
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < limit:
            raise CursorMismatch(f"state is damaged: its {name} is {number!r}, expected a whole number of at least 0")


def _asked_before(
    cursor: Cursor, changed: Collection[str], empty: Collection[str]
) -> tuple[int, dict[str, float]] | None:
    """What was asked of the sources until now, if it does not follow from the weights of this run."""
    body = cursor.body
    kept = body.get("asked_before")
    steps, shares = (
        (0, {}) if kept is None else (int(kept["steps"]), {str(n): float(w) for n, w in kept["shares"].items()})
    )
    if not changed:
        return None if kept is None else (steps, shares)
    changes = read_weights(cursor.fingerprint["weights"], list(body["sources"]))
    asked = weights_asked_for(changes, steps, body["step"], empty)
    return body["step"], {name: shares.get(name, 0.0) + asked.get(name, 0.0) for name in {**shares, **asked}}


def damaged_state(error: Exception) -> CursorMismatch:
    return CursorMismatch(f"state is damaged: {type(error).__name__} {error} while reading its body")


def _by_source(flat: Sequence[Any]) -> list[Sequence[int]]:
    """A lane's entries, one for each source, of either layout."""
    if flat and not isinstance(flat[0], int):
        return list(flat)
    return [flat[i : i + WIDTH] for i in range(0, len(flat), WIDTH)]


def _entry(row: Sequence[int]) -> list[int]:
    values = [int(v) for v in row]
    if len(values) != WIDTH:
        raise ValueError(f"an entry of {len(values)} numbers, expected {WIDTH}: {row}")
    if min(values[EPOCH + 1 : CREDIT]) < 0 or values[EPOCH] < DRY or max(map(abs, values)) >= 1 << 62:
        raise ValueError(f"an impossible position {row}")
    return values


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
