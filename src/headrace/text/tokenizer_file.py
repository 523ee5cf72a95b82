"""Checks of a tokenizer.json before native code sees it.

`tokenizers` trusts the file: it takes memory for the largest id, and runs every normaliser over every document. An id of
2^31 asks for 34 GB and aborts the process; 60 normalisers that each double a blank never return. The claims of a file are compared with
caps here. Of regular expressions only the length is checked: the libraries stop one that takes too many steps
(docs/decisions/text-encoders.md).
"""

from __future__ import annotations

from typing import Any

import orjson

from headrace.errors import TokenizerError

_MAX_ADDED = 10_000
_MAX_CONTENT = 1_000
_MAX_PATTERN = 4_096
"""Characters of a regular expression; the longest in use has about 600."""
_MAX_STEPS = 64
"""Normalisers, pre-tokenisers and post-processors, each counted with those inside it."""
_MAX_GROWTH = 64
"""How many times longer normalisers may make a text."""
_SMALL = 1 << 20


def check_tokenizer(text: bytes, name: str) -> None:
    """Raise TokenizerError if a tokenizer.json claims too much. `tokenizers` may still refuse a file that passes.

    Args:
        text: The file.
        name: What errors call it.
    """
    try:
        found = orjson.loads(text)
        if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
            raise ValueError("it has no model")
        added = found.get("added_tokens") or []
        if not isinstance(added, list) or len(added) > _MAX_ADDED:
            raise ValueError(f"it has more than {_MAX_ADDED:,} added tokens")
        _check_ids(found["model"], added)
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            steps = _steps(found.get(part))
            _check_patterns(steps)
            if part == "normalizer":
                _check_growth(steps)
        _check_template(found.get("post_processor"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TokenizerError(
            f"{name} is not a tokenizer.json that can be trusted: {error or type(error).__name__}. Give the file of its publisher"
        ) from error


def _check_ids(model: dict[str, Any], added: list[Any]) -> None:
    """Check the ids: the library holds a table as long as the largest one."""
    vocab = model.get("vocab") or {}
    if not isinstance(vocab, dict | list):
        raise ValueError(f"its vocabulary is a {type(vocab).__name__}")
    for token in added:
        content = token["content"]
        if not isinstance(content, str) or len(content) > _MAX_CONTENT:
            raise ValueError(f"an added token has more than {_MAX_CONTENT:,} characters")
    ids = [token["id"] for token in added] + (list(vocab.values()) if isinstance(vocab, dict) else [len(vocab)])
    if not all(type(i) is int for i in ids):
        raise ValueError("an id is no whole number")
    most = max(_SMALL, 4 * (len(vocab) + len(added)))
    if ids and not 0 <= min(ids) <= max(ids) < most:
        raise ValueError(f"it has an id of {max(ids):,} or below 0, and {len(vocab) + len(added):,} tokens")


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return a part and all parts inside it; ValueError if there are too many."""
    found = [part] if isinstance(part, dict) else []
    for step in found:  # grows meanwhile
        for inner in step.values():
            if isinstance(inner, list):
                found += [i for i in inner if isinstance(i, dict) and "type" in i]
        if len(found) > _MAX_STEPS:
            raise ValueError(f"it has more than {_MAX_STEPS} steps in one part")
    return found


def _check_patterns(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        pattern = step.get("pattern")
        if isinstance(pattern, dict) and len(str(pattern.get("Regex") or "")) > _MAX_PATTERN:
            raise ValueError(f"it has a regular expression of more than {_MAX_PATTERN:,} characters")


def _check_growth(steps: list[dict[str, Any]]) -> None:
    growth = 1.0
    for step in steps:
        if step.get("type") == "Replace":
            pattern, content = step.get("pattern") or {}, step.get("content") or ""
            matched = len(pattern["String"]) if isinstance(pattern.get("String"), str) else 1
            growth *= max(1.0, len(content) / max(matched, 1))
        if growth > _MAX_GROWTH or len(str(step.get("prepend") or "")) > _MAX_CONTENT:
            raise ValueError(f"its normalisers make a text more than {_MAX_GROWTH} times longer")


def _check_template(part: Any) -> None:
    for step in _steps(part):
        for template in ("single", "pair"):
            if isinstance(step.get(template), list) and len(step[template]) > _MAX_STEPS:
                raise ValueError(f"its template adds more than {_MAX_STEPS} tokens to every text")
