"""For every TOML document: the keys that are found are those of tomllib, each on the line where it was written."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.runs.config.toml_positions import KeyPath, parse_toml

NAMES = st.one_of(
    st.sampled_from(
        ["a", "b", "lr", "x-1", "7", "", ".", "a.b", "#", "=", "[x]", '"', "'", "\\", "é\u2028", "\n", "🜁"]
    ),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), max_size=4),
)
SCALARS = st.sampled_from(
    [
        "1", "0xf", "1_000", "3e-4", "inf", "true", "1979-05-27", "1979-05-27 07:32:00", "07:32:00",
        '""', "''", '"#"', '"]"', "'}'", '"\\""', "'\\'", '"a = 1"', '""""""', "''''''", '"""\n[t]\nk = 1\n"""',
        "'''\n[t]\n# '' \n'''", '"""a""b\\""""""', "'''x'''''", '"""""x"""', '"""\\\n  joined"""', '"""\\\\"""', "'''\\'''",
    ]
)  # fmt: skip
GAPS = st.sampled_from(["", " ", "\t ", "\n", "\n# a = [1\n  ", " # ]\n\n"])
SPACES = st.sampled_from(["", " ", "\t"])
ENDS = st.sampled_from(["\n", "\n\n", " # [c] = {\n", "\t#\n# x = 1\n  "])


class Writer:
    """Writes a document piece by piece and so knows on which line each key came to stand."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.text = ""
        self.lines: dict[KeyPath, int] = {}

    def put(self, *pieces: Any) -> None:
        for piece in pieces:
            self.text += piece if isinstance(piece, str) else self.draw(piece)

    def note(self, path: KeyPath) -> None:
        self.lines.setdefault(path, self.text.count("\n") + 1)

    def names(self, most: int) -> list[str]:
        return self.draw(st.lists(NAMES, unique=True, max_size=most))

    def key(self, parts: list[str]) -> None:
        for i, name in enumerate(parts):
            styles = [json.dumps(name, ensure_ascii=False)]
            if re.fullmatch(r"[A-Za-z0-9_-]+", name):
                styles.append(name)
            if "'" not in name and all(c.isprintable() for c in name):
                styles.append(f"'{name}'")
            self.put("." if i else "", SPACES, st.sampled_from(styles), SPACES)

    def pairs(self, table: KeyPath, names: list[str], end: Any, depth: int, between: str = "") -> None:
        """A pair for each name; some names become the first part of several dotted keys."""
        first = True
        for name in names:
            tails = self.draw(st.sampled_from([[[]], [["x"]], [["x"], ["y", "é"]], [["x", "1"], ["x", "2"]]]))
            for tail in tails:
                if not first:
                    self.put(between)
                first = False
                parts = [name, *tail]
                for n in range(1, len(parts) + 1):
                    self.note((*table, *parts[:n]))
                self.key(parts)
                self.put("=", SPACES)
                self.value((*table, *parts), depth)
                self.put(end)

    def value(self, path: KeyPath, depth: int) -> None:
        kind = self.draw(st.sampled_from(["scalar", "scalar", "array", "table"])) if depth else "scalar"
        if kind == "scalar":
            self.put(SCALARS)
        elif kind == "array":
            count = self.draw(st.integers(0, 3))
            self.put("[", GAPS)
            for i in range(count):
                self.note((*path, i))
                self.value((*path, i), depth - 1)
                self.put(GAPS, "," if i + 1 < count else self.draw(st.sampled_from(["", ","])), GAPS)
            self.put("]")
        else:
            self.put("{", SPACES)
            self.pairs(path, self.names(2), SPACES, depth - 1, between=", ")
            self.put("}")

    def header(self, opening: str, parts: list[str], closing: str) -> None:
        self.put(SPACES, opening)
        self.key(parts)
        self.put(closing, ENDS)

    def table(self, path: KeyPath, names: list[str]) -> None:
        self.pairs(path, names, ENDS, depth=2)


@st.composite
def documents(draw: Any) -> tuple[str, dict[KeyPath, int]]:
    w = Writer(draw)
    w.put(ENDS)
    names = w.names(6)
    split = draw(st.integers(0, len(names)))
    w.table((), names[:split])
    for name in names[split:]:
        kind = draw(st.sampled_from(["table", "deep", "array"]))
        if kind == "table":
            w.note((name,))
            w.header("[", [name], "]")
            w.table((name,), w.names(3))
        elif kind == "deep":  # [name.sub] first, [name] itself afterwards
            w.note((name,))
            w.note((name, "sub"))
            w.header("[", [name, "sub"], "]")
            w.table((name, "sub"), w.names(2))
            w.header("[", [name], "]")
            w.table((name,), [n for n in w.names(2) if n != "sub"])
        else:
            for i in range(draw(st.integers(1, 3))):
                w.note((name,))
                w.note((name, i))
                w.header("[[", [name], "]]")
                w.table((name, i), [n for n in w.names(2) if n not in ("sub", "list")])
                if draw(st.booleans()):
                    w.note((name, i, "sub"))
                    w.header("[", [name, "sub"], "]")
                    w.table((name, i, "sub"), w.names(2))
                for j in range(draw(st.integers(0, 2))):
                    w.note((name, i, "list"))
                    w.note((name, i, "list", j))
                    w.header("[[", [name, "list"], "]]")
                    w.table((name, i, "list", j), w.names(1))
    return w.text, w.lines


def flattened(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from flattened(inner, (*path, key))


@given(documents())
def test_the_keys_found_are_those_of_tomllib_each_on_the_line_where_it_was_written(document):
    text, written = document
    source = parse_toml(text)
    assert source.values == tomllib.loads(text)
    assert set(source.lines) == set(flattened(source.values))
    assert source.lines == written


@given(documents())
@settings(max_examples=30, deadline=None)
def test_line_ends_of_windows_move_no_key(document):
    text, written = document
    assert parse_toml(text.replace("\n", "\r\n")).lines == written
