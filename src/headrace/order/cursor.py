"""Cursor: the saved position of a run, with fingerprints of everything its order depends on.

    Cursor(kind="text", version=1, fingerprint={"data": "9f2c…", "tokenizer": "…", "config": "…"}, body={…})

A cursor is small JSON and says nothing about what was produced or prefetched. Its fingerprint names each thing the
order depends on, so a resume on anything else is refused by name instead of silently reading other rows:

    cursor.require(kind="text", version=1, fingerprint=now, accept={"data"})
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.errors import CursorMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A saved position. `body` belongs to the kind; the rest is checked before the body is looked at."""

    kind: str
    version: int
    fingerprint: Mapping[str, str]
    """What the order depends on, by name. Values are short text: they are printed when they differ."""
    body: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The plain dict that `state_dict()` returns."""
        return {"kind": self.kind, "version": self.version, "fingerprint": dict(self.fingerprint), "body": self.body}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), separators=(",", ":"), sort_keys=True, allow_nan=False)

    @classmethod
    def from_dict(cls, state: object, *, what: str = "state") -> Cursor:
        """Check the shape of a loaded state; the content is checked by `require`."""
        try:
            return msgspec.convert(state, cls)
        except msgspec.ValidationError as error:
            raise CursorMismatch(f"{what} is not a headrace cursor: {error}") from error

    @classmethod
    def from_json(cls, text: str | bytes, *, what: str = "state") -> Cursor:
        try:
            state = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CursorMismatch(f"{what} is not JSON: {error}") from error
        return cls.from_dict(state, what=what)

    def require(
        self,
        *,
        kind: str,
        version: int,
        fingerprint: Mapping[str, str],
        accept: Collection[str] = (),
        fixed: Mapping[str, str] | None = None,
        what: str = "state",
        shown: Callable[[str], str] = str,
    ) -> frozenset[str]:
        """Refuse a cursor of something else, naming every difference. Returns the differences that were accepted.

        Args:
            kind, version: What the caller takes.
            fingerprint: What the order depends on now, by name.
            accept: Names, or families of names, that may differ.
            fixed: Names that cannot be accepted, with the reason.
            what: Name of the state in errors.
            shown: Formats a value for the error message.
        """
        if self.kind != kind:
            raise CursorMismatch(
                f"{what} is a cursor of kind {self.kind!r}; this loader takes {kind!r}. Load it where it was saved.",
                {"kind": (self.kind, kind)},
            )
        if self.version != version:
            raise CursorMismatch(
                f"{what} was saved as version {self.version} of the {kind!r} cursor; this headrace reads version "
                f"{version}. Resume with the headrace that saved it.",
                {"version": (self.version, version)},
            )
        names = sorted(set(self.fingerprint) | set(fingerprint))
        differences = {
            name: (self.fingerprint.get(name, "absent"), fingerprint.get(name, "absent"))
            for name in names
            if self.fingerprint.get(name) != fingerprint.get(name)
        }
        fixed = fixed or {}
        refused = {
            name: pair
            for name, pair in differences.items()
            if name in fixed or (_family(name) not in accept and name not in accept)
        }
        if refused:
            listed = "; ".join(
                f"{name}: saved {shown(saved)}, now {shown(now)}" for name, (saved, now) in refused.items()
            )
            raise CursorMismatch(
                f"{what} was saved for something else ({listed}). Resuming would deliver other data than the run you "
                f"continue. {_remedy(refused, fixed)}",
                refused,
            )
        return frozenset(differences)


def _remedy(refused: Collection[str], fixed: Mapping[str, str]) -> str:
    """What can be done about these differences: restore all, accept some, or neither."""
    stuck = [f"{name} cannot be accepted: {fixed[name]}" for name in refused if name in fixed]
    families = sorted({_family(name) for name in refused if name not in fixed})
    advice = f"accept={{{', '.join(map(_quoted, families))}}} (command: {' '.join(f'--accept {f}' for f in families)})"
    if not stuck:
        return f"Restore what changed, or accept it with {advice}."
    rest = f" The rest can be accepted with {advice}." if families else ""
    return f"{'; '.join(stuck)}. Restore that, or start a new run.{rest}"


def _quoted(name: str) -> str:
    return f'"{name}"'


def _family(name: str) -> str:
    """`data:web/0.jsonl` is accepted as `data`."""
    return name.partition(":")[0]
