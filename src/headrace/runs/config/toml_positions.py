"""The line of every key of a TOML file.

    [train]                    source = parse_toml(text)
    lr = "fast"                source.values                          -> {"train": {"lr": "fast"}}
                               source.lines[("train", "lr")]          -> 2
    [[source]]                 source.lines[("source", 0, "spec")]    -> 5
    spec = "sample:prose"

tomllib parses the values but keeps no positions, and neither do tomlkit and rtoml. A second pass over the same text finds the line of
each key. It runs only on text that tomllib accepted, so it need not decide whether the text is valid.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

KeyPath = tuple[str | int, ...]
"""Names of tables and keys, and indices of arrays: ("source", 0, "weight")."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"[ \t]*")
_GAP = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
"""What may stand between statements and between the elements of an array."""
_QUOTED = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")'  # multi-line basic; up to two quotes may touch the closing three
    r"|'''.*?'{3,5}(?!')"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]+")
_PLACE = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)$")

_NOT_CLOSED = "a string is not closed; put the quote that began it at its end"
# Messages of tomllib that do not tell a user what to change, and what is shown in their place.
_PLAINER = (
    (re.compile(r"Cannot overwrite a value"), "this key is already set above; keep one of the two"),
    (re.compile(r"Cannot declare \((.*?),?\) twice"), "this table already stands above; merge the two"),
    (
        re.compile(r"Cannot mutate immutable namespace .*"),
        "this table was closed above as a {...} value; add the key there",
    ),
    (re.compile(r"Expected [\"']+|Unterminated string|(?:Illegal|Found invalid) character '\\n'"), _NOT_CLOSED),
    (re.compile(r"Invalid statement"), "expected a [table] or a line key = value"),
    (re.compile(r"Invalid value"), 'expected a value: "text" in quotes, a number, true, false or [an, array]'),
)


class TomlError(ValueError):
    """A text is not TOML. `line` is the line of the mistake, `message` says what to change."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(line, message)
        self.line = line
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class TomlSource:
    """The values of a TOML text, and the line of each key."""

    values: dict[str, Any]
    lines: dict[KeyPath, int]
    """The line on which each key was first named, counted from 1; of an array's element, where it begins."""


def parse_toml(text: str) -> TomlSource:
    """Parse a TOML text and find the lines of its keys. Raises TomlError."""
    text = text.replace("\r\n", "\n")  # as tomllib does
    from headrace.files import deep_key_line  # imports numpy, which `headrace --help` does not need

    if (deep := deep_key_line(text)) is not None:
        raise TomlError(deep, "values are nested too deeply: a key has more than 33 parts")
    try:
        values = tomllib.loads(text)
        lines = _Walk(text).lines()
    except tomllib.TOMLDecodeError as error:
        raise _plain_error(str(error), last_line=text.rstrip("\n").count("\n") + 1) from error
    except RecursionError as error:
        raise TomlError(1, "values are nested too deeply") from error
    except ValueError as error:  # not of tomllib but of int(), which refuses to convert more than 4,300 digits
        digits = re.search(r"\d[\d_]{4299,}", text)
        raise TomlError(text.count("\n", 0, digits.start()) + 1 if digits else 1, "a number is too long") from error
    return TomlSource(values=values, lines=lines)


def _plain_error(message: str, *, last_line: int) -> TomlError:
    place = _PLACE.search(message)
    line = int(place[1]) if place and place[1] else last_line
    what = message[: place.start()] if place else message
    for pattern, plainer in _PLAINER:
        if pattern.fullmatch(what):
            return TomlError(line, plainer)
    return TomlError(line, what[:1].lower() + what[1:])


@dataclass(slots=True)
class _Walk:
    """One pass over a valid TOML text."""

    text: str
    at: int = 0
    found: dict[KeyPath, int] = field(default_factory=dict)
    last_element: dict[KeyPath, int] = field(default_factory=dict)
    """For each array of tables, the index of the element that [headers] below it now speak of."""
    line_starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.line_starts = [0, *(m.end() for m in re.finditer("\n", self.text))]

    def lines(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        self._skip(_GAP)
        while self.at < len(self.text):
            if self.text.startswith("[[", self.at):
                table = self._header(2)
            elif self.text[self.at] == "[":
                table = self._header(1)
            else:
                self._pair(table)
            self._skip(_GAP)
        return self.found

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        assert match is not None, f"tomllib took what this walk does not know, at offset {self.at}"
        self.at = match.end()
        return match[0]

    def _note(self, path: KeyPath, offset: int) -> None:
        self.found.setdefault(path, bisect_right(self.line_starts, offset))

    def _header(self, brackets: int) -> KeyPath:
        """`[a.b]` or `[[a.b]]`; the path that the pairs below it hang from."""
        start = self.at
        self.at += brackets
        *above, name = self._key()
        self.at += brackets
        path: KeyPath = ()
        for part in above:
            path = self._enter((*path, part), start)
        path = (*path, name)
        if brackets == 2:
            self.last_element[path] = self.last_element.get(path, -1) + 1
        return self._enter(path, start)

    def _enter(self, path: KeyPath, offset: int) -> KeyPath:
        """A header that names an array of tables means its last element."""
        self._note(path, offset)
        if path in self.last_element:
            path = (*path, self.last_element[path])
            self._note(path, offset)
        return path

    def _key(self) -> list[str]:
        """The parts of a dotted key, with `at` moved past it and the space around it."""
        parts = []
        while True:
            self._skip(_SPACE)
            if self.text[self.at] in "\"'":
                # An escape in a key is rare: let the parser that knows all of them read it.
                parts.append(tomllib.loads(f"k = {self._skip(_QUOTED)}")["k"])
            else:
                parts.append(self._skip(_BARE_KEY))
            self._skip(_SPACE)
            if self.text[self.at] != ".":
                return parts
            self.at += 1

    def _pair(self, table: KeyPath) -> None:
        """`key = value`, in a table or between braces."""
        start = self.at
        path = table
        for part in self._key():
            path = (*path, part)
            self._note(path, start)
        self.at += 1  # =
        self._skip(_SPACE)
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        opening = self.text[self.at]
        if opening in "\"'":
            self._skip(_QUOTED)
        elif opening == "[":
            self.at += 1
            index = 0
            self._skip(_GAP)
            while self.text[self.at] != "]":
                self._note((*path, index), self.at)
                self._value((*path, index))
                index += 1
                self._separator()
            self.at += 1
        elif opening == "{":
            self.at += 1
            self._skip(_GAP)
            while self.text[self.at] != "}":
                self._pair(path)
                self._separator()
            self.at += 1
        else:
            self._skip(_SCALAR)

    def _separator(self) -> None:
        self._skip(_GAP)
        if self.text[self.at] == ",":
            self.at += 1
            self._skip(_GAP)
