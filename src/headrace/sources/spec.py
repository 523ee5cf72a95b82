"""Source specs: which documents to read, and how much of them.

    Source("jsonl:web/*.jsonl", weight=0.7)
    Source.parse("jsonl:web/*.jsonl?weight=0.7&text_key=content")      the same in one line
    Source(Path("web.jsonl.gz"))                                       the scheme follows from the suffix

A spec is `scheme:place`. The place is a file, a folder (all files of the scheme's suffixes below it) or a glob (`**`
too), on disk or in an object store (`jsonl:s3://bucket/web/*.jsonl.zst`). For `hf:` it is a dataset of the hub or a folder
with the same layout. Nothing is opened here: a `Source` checks its values, `open_source` looks at the disk.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Any, Literal
from urllib.parse import unquote

from headrace.errors import ConfigError, nearest
from headrace.formats.object_store import STORES, store_of
from headrace.settings import TXT_SPLITS
from headrace.sources.text_formats import TEXT_FORMATS

SCHEMES: dict[str, str] = {
    **{name: text_format.holds for name, text_format in TEXT_FORMATS.items()},
    "hf": "a dataset of the Hugging Face hub, or a folder laid out like one",
    "sample": "a corpus made from the standard library (prose, code)",
}
SAMPLES: dict[str, str] = {
    "prose": "the language reference and the docstrings of the standard library",
    "code": "the source of the standard library",
}
_ONLY_FOR: dict[str, tuple[str, ...]] = {"split": ("hf", "txt"), "config": ("hf",)}
"""Options that mean something for some schemes only."""
_BY_SUFFIX = {suffix: name for name, text_format in TEXT_FORMATS.items() for suffix in text_format.suffixes}
_NAME = re.compile(r"[\w.+-]{1,80}")
_QUERY = re.compile(r"\A(?P<spec>.*)\?(?P<query>[^?=&]+=[^?]*)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Source:
    """One source of documents: where to read them, their share of the mix, and what a bad row does."""

    spec: str
    """`scheme:place`. A path object is taken too, if its suffix says what the file holds."""
    weight: float = 1.0
    """Share of the delivered tokens, relative to the other sources. 0 keeps the source listed and never read."""
    name: str | None = None
    """Name in metrics and errors; derived from the spec unless given."""
    text_key: str = "text"
    """The field (jsonl) or column (parquet, arrow) that holds the text. `a.b` means field b of object a."""
    label_key: str | None = None
    """The field or column that holds the label, or a label a word; for tasks that have labels."""
    max_rows: int | None = None
    max_tokens: int | None = None
    max_epochs: int | None = None
    on_bad: Literal["fail", "skip"] = "fail"
    """A row, chunk or shard that cannot be used stops the run, or becomes a counted hole."""
    allow_symlinks: bool = False
    """Let the spec lead elsewhere: through symbolic links, and through `..`."""
    split: str | None = None
    """Of `hf:`: which part of the dataset; train unless given. Of `txt:`: what a document is, `"file"` (the default), `"paragraph"` or `"line"`."""
    config: str | None = None
    """Of `hf:`: which of the dataset's configurations; its default one unless given."""
    cache: str | None = None
    """A folder for the manifest and for unpacked and downloaded copies of this source, in place of the common cache."""

    def __post_init__(self) -> None:
        for key in ("spec", "cache"):
            if isinstance(given := getattr(self, key), os.PathLike):
                object.__setattr__(self, key, _spec_of(given) if key == "spec" else os.fspath(given))
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems)
        object.__setattr__(self, "weight", float(self.weight))
        if self.name is None:
            object.__setattr__(self, "name", _derived_name(self.scheme, self.place))

    @property
    def scheme(self) -> str:
        return self.spec.partition(":")[0]

    @property
    def place(self) -> str:
        """The spec without its scheme, and without the `file://` that a path may begin with."""
        return self.spec.partition(":")[2].removeprefix("file://")

    @property
    def document(self) -> str | None:
        """What a document of a txt file is; None for other schemes."""
        return (self.split or TXT_SPLITS[0]) if self.scheme == "txt" else None

    @classmethod
    def parse(cls, line: str) -> Source:
        """Read `scheme:place?key=value&key=value`. The last `?` starts the options if a `=` follows; else it is a glob."""
        match = _QUERY.match(line.strip())
        if match is None:
            return cls(line.strip())
        valid = {field.name: str(field.type) for field in fields(cls) if field.name != "spec"}
        problems: list[str] = []
        options: dict[str, Any] = {}
        for pair in match["query"].split("&"):
            key, equals, text = pair.partition("=")
            value = unquote(text)  # %26 stands for &, and + for itself
            if key not in valid:
                problems.append(
                    f"source {line!r}: unknown option {key!r}, did you mean {nearest(key, valid)[0]!r}? "
                    f"Options are {', '.join(valid)}."
                )
            elif not equals or not value:
                problems.append(f"source {line!r}: option {key!r} has no value, expected {key}=VALUE")
            elif key in options:
                problems.append(f"source {line!r}: option {key!r} is given twice")
            else:
                try:
                    options[key] = _read_option(valid[key], value)
                except ValueError as error:
                    problems.append(f"source {line!r}: option {key!r} needs {error}, got {value!r}")
        if problems:
            raise ConfigError(problems)
        return cls(match["spec"], **options)

    def _problems(self) -> Iterable[str]:
        if not isinstance(self.spec, str):
            yield f"a source needs a spec such as 'jsonl:web/*.jsonl', got {self.spec!r}"
            return
        what = f"source {self.spec!r}"
        scheme, colon, place = self.spec.partition(":")
        if not colon or not scheme:
            yield f"{what} has no scheme, expected scheme:place such as 'jsonl:{self.spec}'. Schemes are {_listed()}."
        elif scheme in STORES or scheme == "file":
            yield f"{what} does not say what the files hold; write {_scheme_of(self.spec) or 'jsonl'}:{self.spec}"
        elif scheme not in SCHEMES:
            yield (
                f"{what}: unknown scheme {scheme!r}, did you mean {nearest(scheme, SCHEMES)[0]!r}? "
                f"Schemes are {_listed()}."
            )
        elif not place or "\0" in place:
            yield f"{what} names no place, expected a file, a folder or a glob after '{scheme}:'"
        elif (store := store_of(place)) is not None and store not in STORES:
            yield (
                f"{what}: unknown store {store + '://'!r}, did you mean {nearest(store, STORES)[0] + '://'!r}? There are "
                f"{', '.join(f'{name}://' for name in STORES)}, and plain paths."
            )
        elif store is not None and scheme in ("hf", "sample"):
            yield f"{what}: {scheme}: reads no object store; name the files, such as 'parquet:{place}'"
        elif store is not None and not place.partition("://")[2].strip("/"):
            yield f"{what} names no place in the store, expected {store}://bucket/path or a glob"
        elif _QUERY.match(place):
            yield f"{what} holds options after '?'; a one-line spec is read by Source.parse(...), or give them as fields"
        elif scheme == "sample" and place not in SAMPLES:
            yield f"{what}: there is no sample {place!r}, did you mean {nearest(place, SAMPLES)[0]!r}? There are {', '.join(SAMPLES)}."
        elif scheme == "sample" and self.text_key != "text":
            yield f"{what}: the samples hold their text under 'text'; leave text_key out, got {self.text_key!r}"
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float):
            yield f"{what}: weight must be a number, got {self.weight!r}"
        elif not math.isfinite(self.weight) or self.weight < 0:
            yield f"{what}: weight must be finite and at least 0, got {self.weight}"
        if self.name is not None and not (isinstance(self.name, str) and _NAME.fullmatch(self.name)):
            yield f"{what}: name must be 1 to 80 letters, digits or _ . + -, got {self.name!r}"
        if not isinstance(self.text_key, str) or not all(self.text_key.split(".")):
            yield f"{what}: text_key must be a field name, or names joined by dots, got {self.text_key!r}"
        if self.label_key is not None and not (isinstance(self.label_key, str) and all(self.label_key.split("."))):
            yield f"{what}: label_key must be a field name, or names joined by dots, got {self.label_key!r}"
        for key, smallest in (("max_rows", 0), ("max_tokens", 0), ("max_epochs", 1)):
            value = getattr(self, key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < smallest):
                yield f"{what}: {key} must be a whole number of at least {smallest}, got {value!r}"
        if self.on_bad not in ("fail", "skip"):
            yield f"{what}: on_bad must be 'fail' or 'skip', got {self.on_bad!r}"
        if not isinstance(self.allow_symlinks, bool):
            yield f"{what}: allow_symlinks must be true or false, got {self.allow_symlinks!r}"
        for key in ("split", "config", "cache"):
            value = getattr(self, key)
            if value is not None and not (isinstance(value, str) and value.strip() and "\0" not in value):
                yield f"{what}: {key} must be a text, got {value!r}"
        yield from self._out_of_place(what, scheme, place)

    def _out_of_place(self, what: str, scheme: str, place: str) -> Iterable[str]:
        """Name options that have no effect for this scheme: setting one is a mistake."""
        for key, schemes in _ONLY_FOR.items():
            if getattr(self, key) is not None and scheme in SCHEMES and scheme not in schemes:
                yield f"{what}: {key} means something for {' and '.join(f'{name}:' for name in schemes)} only; leave it out, or name the files themselves"
        if scheme == "txt" and self.text_key != "text":
            yield f"{what}: a txt file has no fields; leave text_key out, got {self.text_key!r}"
        if scheme == "txt" and self.split is not None and self.split not in TXT_SPLITS:
            yield f"{what}: split of a txt source must be {', '.join(map(repr, TXT_SPLITS[:-1]))} or {TXT_SPLITS[-1]!r}, got {self.split!r}"
        if self.allow_symlinks is True and (scheme == "sample" or store_of(place)):
            yield f"{what}: allow_symlinks is about folders on disk; leave it out here"


def _listed() -> str:
    return ", ".join(f"{scheme}: ({holds})" for scheme, holds in SCHEMES.items())


def _spec_of(path: os.PathLike[str]) -> str:
    """The spec of a path object, whose suffix says what the file holds."""
    place = os.fspath(path)
    scheme = _scheme_of(place)
    if scheme is None:
        raise ConfigError(
            f"a source of {place!r} does not say what the files hold: write the scheme before it, such as 'jsonl:{place}'. Schemes are {_listed()}."
        )
    return f"{scheme}:{place}"


def _scheme_of(place: str) -> str | None:
    bare = re.sub(r"\.(gz|zst)\Z", "", place)
    return next((scheme for suffix, scheme in _BY_SUFFIX.items() if bare.endswith(suffix)), None)


def _derived_name(scheme: str, place: str) -> str:
    """`jsonl:data/web/*.jsonl` is called web; `txt:books.txt` books; `jsonl:*.jsonl` jsonl."""
    literal: list[str] = []
    for part in PurePosixPath(place).parts:
        if any(c in part for c in "*?["):
            break
        literal.append(part)
    last = literal[-1] if literal else ""
    if scheme != "sample" and len(literal) == len(PurePosixPath(place).parts):
        for suffix in (".gz", ".zst", f".{scheme}"):
            last = last.removesuffix(suffix)
    name = re.sub(r"[^\w.+-]+", "-", last).strip("-.")
    return name[:80] or scheme


_KINDS: dict[str, tuple[str, Any]] = {
    "float": ("a number", float),
    "int | None": ("a whole number", int),
    "bool": ("true or false", {"true": True, "false": False}.__getitem__),
}
"""How an option is read, by the type of its field; any other is text."""


def _read_option(kind: str, text: str) -> Any:
    wanted, read = _KINDS.get(kind, ("a text", str))
    try:
        return read(text)
    except (ValueError, KeyError):
        raise ValueError(wanted) from None
