"""Label rules: which labels a row may have, and the class that each label names.

A label is a name or a number. Classes are numbered in the order of `spool.labels`; without it they are sorted, numbers by value. With
`spool.labels` a number is an index into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.errors import nearest
from headrace.spool.providers.sampling import IGNORED

Task = Literal["classify", "tag"]
_MAX_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRules:
    """Judges rows and names the classes of their labels."""

    task: Task
    """classify: one label for each text. tag: one label for each word."""
    text_key: str
    """Field of a row that holds the text, or its words."""
    label_key: str
    """Field of a row that holds the label, or the labels of its words."""
    names: tuple[str, ...]
    """The classes, in the order of their numbers; empty: the labels that occur."""

    def judge(self, row: Mapping[str, Any]) -> str:
        """Why a row cannot be used; empty if it can."""
        text, label = row[self.text_key], row[self.label_key]
        if self.task == "classify":
            if not isinstance(text, str):
                return f"{self.text_key!r} is {_kind(text)}, expected text (set text_key to the one that holds it)"
            return self._wrong(label)
        for name, value in ((self.text_key, text), (self.label_key, label)):
            if not isinstance(value, list):
                return f"{name!r} is {_kind(value)}, expected a list with one entry a word"
        if len(text) != len(label):
            return f"it has {len(text):,} words in {self.text_key!r} and {len(label):,} labels in {self.label_key!r}"
        if not all(isinstance(word, str) for word in text):
            return f"{self.text_key!r} holds an entry that is not text"
        return next((why for one in label if one is not None and (why := self._wrong(one))), "")

    def name_of(self, label: Any) -> str:
        """The class of a label that `judge` accepted; empty for no label."""
        if label is None or label == IGNORED:
            return ""
        if isinstance(label, bool):
            return "true" if label else "false"
        if isinstance(label, int) and self.names and str(label) not in self.names:
            return self.names[label]
        return str(label)

    def _wrong(self, label: Any) -> str:
        if self.task == "tag" and label == IGNORED:
            return ""
        if isinstance(label, bool | str) and (self.names or label != ""):
            name = self.name_of(label)
            if self.names and name not in self.names:
                near = nearest(name, self.names)
                return f"its label {name[:40]!r} is none of spool.labels; did you mean {near[0]!r}? There are {', '.join(near[:8])}"
            if len(name) > _MAX_NAME:
                return f"its label has {len(name):,} characters, at most {_MAX_NAME} are taken"
            return ""
        if isinstance(label, int) and not isinstance(label, bool):
            if self.names and str(label) not in self.names and not 0 <= label < len(self.names):
                return f"its label is {label}, spool.labels has the numbers 0 to {len(self.names) - 1}"
            return ""
        return f"{self.label_key!r} is {_kind(label)}, expected a name or a whole number"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"the fraction {value}"
    return {str: "an empty text" if value == "" else "text", list: "a list", dict: "an object"}.get(
        type(value), f"{value!r:.40}"
    )
