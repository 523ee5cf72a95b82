"""Parse TOML and find the line of every key, for messages.

    [train]                    values, lines = parse_toml(text)
    lr = "fast"                values                                 -> {"train": {"lr": "fast"}, …}
                               lines[("train", "lr")]                 -> 2
    [[source]]                 lines[("source", 0, "spec")]           -> 5
    spec = "sample:prose"

tomllib keeps no positions, so the lines are found by a second look at the text: a line that begins with a header or with `key =` counts.
Elements of an array and keys in braces have no line of their own; a message about them names the line of the key they belong to.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

KeyPath = tuple[str | int, ...]
"""Names of tables and keys, and indices of arrays: ("source", 0, "weight")."""

_STRING_OR_COMMENT = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")'  # up to two quotes may touch the closing three
    r"|'''.*?'{3,5}(?!')"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*",
    re.DOTALL,
)
_STATEMENT = re.compile(r"[ \t]*(?:(?P<brackets>\[\[?)(?P<header>[^\]=]+)\]|(?P<key>[^=\[\]{},]+?)[ \t]*=)")
_PLACE = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)$")
_NOT_CLOSED = "a string is not closed; put the quote that began it at its end"
# Messages of tomllib that do not say what to change, and their replacements.
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


def parse_toml(text: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The values of a TOML text, and the line on which each key was first named, counted from 1. Raises TomlError."""
    text = text.replace("\r\n", "\n")  # as tomllib does
    from headrace.files import deep_key_line  # imports numpy, which `headrace --help` does not need

    if (deep := deep_key_line(text)) is not None:
        raise TomlError(deep, "values are nested too deeply: a key has more than 33 parts")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _plain_error(str(error), last_line=text.rstrip("\n").count("\n") + 1) from error
    except RecursionError as error:
        raise TomlError(1, "values are nested too deeply") from error
    except ValueError as error:  # not of tomllib but of int(), which refuses to convert more than 4,300 digits
        digits = re.search(r"\d[\d_]{4299,}", text)
        raise TomlError(text.count("\n", 0, digits.start()) + 1 if digits else 1, "a number is too long") from error
    return values, _key_lines(text)


def _plain_error(message: str, *, last_line: int) -> TomlError:
    place = _PLACE.search(message)
    line = int(place[1]) if place and place[1] else last_line
    what = message[: place.start()] if place else message
    for pattern, plainer in _PLAINER:
        if pattern.fullmatch(what):
            return TomlError(line, plainer)
    return TomlError(line, what[:1].lower() + what[1:])


def _key_lines(text: str) -> dict[KeyPath, int]:
    """The lines of the keys and headers that begin a line of a valid TOML text."""
    # Comments and strings of several lines could look like keys: of the latter only the line ends are kept.
    text = _STRING_OR_COMMENT.sub(lambda m: "" if m[0][0] == "#" else "\n" * m[0].count("\n") or m[0], text)
    lines: dict[KeyPath, int] = {}
    last_element: dict[KeyPath, int] = {}
    """For each array of tables, the index of the element that headers below it mean."""
    table: KeyPath = ()
    for number, line in enumerate(text.split("\n"), start=1):
        statement = _STATEMENT.match(line)
        if statement is None:
            continue
        brackets = statement["brackets"]
        path: KeyPath = () if brackets else table
        parts = _key_parts(statement["header"] or statement["key"])
        for depth, part in enumerate(parts, start=1):
            path = (*path, part)
            lines.setdefault(path, number)
            if brackets == "[[" and depth == len(parts):
                last_element[path] = last_element.get(path, -1) + 1
            if brackets and path in last_element:
                path = (*path, last_element[path])
                lines.setdefault(path, number)
        if brackets and parts:
            table = path
    return lines


def _key_parts(key: str) -> list[str]:
    """The parts of a dotted key; empty if it is none, as in a line of an array."""
    if re.fullmatch(r"[A-Za-z0-9_.-]+", key):
        return key.split(".")
    try:
        value: Any = tomllib.loads(f"{key} = 0")
    except (ValueError, RecursionError):
        return []
    parts = []
    while isinstance(value, dict) and value:
        part, value = value.popitem()
        parts.append(part)
    return parts
