"""Definitions of tokenizers, of a file, a folder, a name in the local Hugging Face cache, or a tokenizer object.

read_definition("tokenizer.json")          the bytes of the file
read_definition("meta-llama/Llama-3.2-1B") of the folder of that name, or of the Hugging Face cache; nothing is downloaded
definition_of(tokenizer)                   of a `tokenizers.Tokenizer`, or of a transformers tokenizer
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import FileCorrupt, StorageError, TokenizerError
from headrace.files import read_regular
from headrace.formats.hub_cache import cached_snapshots, hub_cache, is_repository
from headrace.text.tiktoken_ranks import tokenizer_json_of_ranks

_MAX_FILE = 256 << 20


@dataclass(frozen=True, slots=True)
class TokenizerDefinition:
    """A tokenizer.json in memory, with the special tokens that its object names. Worker processes get it as it is."""

    text: bytes = field(repr=False)
    name: str
    eos: str | None = None
    bos: str | None = None


def definition_of(given: object) -> TokenizerDefinition | None:
    """Return the definition of a tokenizer object of `tokenizers` or transformers; None for any other object."""
    if isinstance(given, TokenizerDefinition):
        return given
    inner: Any = getattr(given, "backend_tokenizer", given)
    if not callable(getattr(inner, "to_str", None)):
        if getattr(given, "is_fast", None) is False or hasattr(given, "convert_tokens_to_ids"):
            raise TokenizerError(
                f"tokenizer {type(given).__name__} is a slow transformers tokenizer, which has no tokenizer.json: load it with use_fast=True, or convert it"
            )
        return None
    described = json.loads(inner.to_str())
    # A call with padding or truncation leaves its settings in the object. They do not belong to the tokenizer.
    described |= {"truncation": None, "padding": None}
    name = str(getattr(given, "name_or_path", "") or type(given).__name__)
    return TokenizerDefinition(
        json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode(),
        name,
        eos=_token(given, "eos_token"),
        bos=_token(given, "bos_token"),
    )


def read_definition(name: str | Path, *, base: Path | None = None) -> bytes:
    """Return the tokenizer.json of a path or name; TokenizerError says where it was looked for.

    Args:
        name: A tokenizer.json or .tiktoken file, a folder that holds a tokenizer.json, or the name of a model on the Hugging Face hub.
        base: Where a relative path starts; the working folder unless given.
    """
    file = (base or Path()) / Path(name).expanduser()
    try:
        if file.is_dir():
            file /= "tokenizer.json"
        if not file.exists():
            cached = _cached(str(name))
            if cached is None:
                raise TokenizerError(_missing(name, file))
            file = cached
        text = read_regular(file, _MAX_FILE, follow=True)
    except (OSError, FileCorrupt, StorageError) as error:
        raise TokenizerError(f"tokenizer {name} cannot be read: {error}") from error
    if file.suffix == ".tiktoken":
        return tokenizer_json_of_ranks(text, encoding=file.stem, name=str(name))
    return text


def _cached(name: str) -> Path | None:
    """The tokenizer.json that the local Hugging Face cache has of a model: of its main revision, or of the newest one if no revision is main."""
    found = [file for folder in cached_snapshots("models", name) if (file := folder / "tokenizer.json").is_file()]
    return max(found, key=lambda file: (file.stat().st_mtime, str(file)), default=None)


def _missing(name: str | Path, file: Path) -> str:
    sentence = f"tokenizer {name} does not exist: give the path of a tokenizer.json, or leave it out to use bytes"
    text = str(name)
    if not is_repository(text) or text.endswith((".json", ".tiktoken")):
        return sentence
    return (
        f"tokenizer {name} is neither a file nor a folder ({file}), and the Hugging Face cache {hub_cache()} has no tokenizer.json of it: "
        f"download it with `hf download {name} tokenizer.json`, or give the path of a tokenizer.json"
    )


def _token(given: object, role: str) -> str | None:
    found = getattr(given, role, None)
    return str(found) if found else None
