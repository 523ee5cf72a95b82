"""`headrace init`: a first config for existing files.

draft_config([Path("web")], beside=Path("run.toml"))        the text of a commented TOML file
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import orjson

from headrace.errors import ConfigError, quoted
from headrace.files import open_regular
from headrace.sources.text_formats import TEXT_FORMATS

_MAX_FILES = 10_000
"""Files of a folder that are looked at."""
_HEAD = 1 << 20
_SUFFIXES = {suffix: name for name, found in TEXT_FORMATS.items() for suffix in found.suffixes}


@dataclass(frozen=True, slots=True)
class _Found:
    spec: str
    text_key: str | None
    note: str


def draft_config(given: Sequence[Path], *, beside: Path, tokenizer: str | None = None) -> str:
    """The text of a config that reads `given`, with a comment on every key.

    Args:
        given: Files and folders of text; the built-in samples if there are none.
        beside: Path of the config; its relative paths start at the folder of this file.
        tokenizer: What `text.tokenizer` is to be; bytes unless given.

    ConfigError names a path that does not exist or holds no text that headrace reads.
    """
    sources = [found for path in given for found in _look_at(path, beside.resolve().parent)]
    if not sources:
        sources = [
            _Found("sample:prose", None, 'built-in; your own: "jsonl:web/*.jsonl", "parquet:code/", "txt:books/"')
        ]
    tables = "\n".join(
        f"[[source]]\nspec = {quoted(s.spec)}"
        + (f"   # {s.note}" if s.note else "")
        + "\nweight = 1.0               # share of the tokens delivered, in proportion to the other sources\n"
        + (f"text_key = {quoted(s.text_key)}          # the field that holds the text\n" if s.text_key else "")
        for s in sources
    )
    name = re.sub(r"[^\w.-]+", "-", beside.stem).strip("-.") or "run"
    chosen = (
        f"tokenizer = {quoted(tokenizer)}"
        if tokenizer
        else '# tokenizer = "tokenizer.json"   # bytes without one; a file, a folder, or "org/name" of the local Hugging Face cache'
    )
    return f"""# Written by `headrace init`. `headrace check {beside.name}` says what a run would do, `headrace run {beside.name}` trains.
# Paths start at the folder of this file. Every key can be overridden: headrace run {beside.name} --train.lr 1e-3

[run]
name = {quoted(name)}          # the run's folder is runs/{name}
steps = 200
seed = 0                   # with the sources and the sizes below, this fixes every batch
checkpoint_every = 20

{tables}
[text]
{chosen}
seq_len = 1024             # tokens in a row
pack = "best_fit"          # only documents longer than a row are cut; "concat" cuts wherever a row ends
labels = "shifted"         # the next token at each position; "hf": not shifted, for models that shift by themselves

[loader]
global_batch_size = 8      # rows in a step, over all ranks: any number of ranks that divides it
exhausted = "repeat"       # read the sources again until the steps are done; "drop": once

[train]
model = "gpt-tiny"
lr = 3e-3
"""


def _look_at(path: Path, folder: Path) -> list[_Found]:
    """The sources that a path is: one for each format below it."""
    if not path.exists():
        raise ConfigError(f"there is no {path}: give files or folders of text")
    files = [path] if path.is_file() else sorted(islice((p for p in path.rglob("*") if p.is_file()), _MAX_FILES))
    formats = Counter(name for file in files if (name := _format_of(file)) is not None)
    if not formats:
        known = ", ".join(_SUFFIXES)
        raise ConfigError(
            f"{path} holds no text that headrace reads: files end in {known}, with .gz or .zst behind it or not"
        )
    place = os.path.relpath(path.resolve(), folder)
    if place.startswith(".."):  # which a spec may not go through
        place = str(path.resolve())
    place += "/" if path.is_dir() else ""
    found = []
    for name, count in formats.most_common():
        first = next(file for file in files if _format_of(file) == name)
        key = _text_key(name, first)
        note = f"{count:,} files, {TEXT_FORMATS[name].holds}" if path.is_dir() else ""
        found.append(_Found(f"{name}:{place}", key if key != "text" else None, note))
    return found


def _format_of(file: Path) -> str | None:
    bare = re.sub(r"\.(gz|zst)\Z", "", file.name)
    return next((name for suffix, name in _SUFFIXES.items() if bare.endswith(suffix)), None)


def _text_key(name: str, file: Path) -> str | None:
    """The field of a file's first row that holds the text: "text" where there is one, else the longest text."""
    if name == "jsonl" and file.suffix not in (".gz", ".zst"):
        with open(open_regular(file, follow=True), "rb") as lines:
            head = lines.read(_HEAD).partition(b"\n")[0]
        try:
            row = orjson.loads(head)
        except ValueError:
            return None
        texts = {key: value for key, value in row.items() if isinstance(value, str)} if isinstance(row, dict) else {}
        return "text" if "text" in texts else max(texts, key=lambda key: len(texts[key]), default=None)
    if name == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            schema = pq.read_schema(file)
        except (OSError, pa.ArrowException):
            return None
        names = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
        return next((n for n in ("text", "content", "body") if n in names), names[0] if names else None)
    return None
