"""How a .tiktoken file becomes a tokenizer.json.

A .tiktoken file holds one thing: a rank for every token's bytes. The pattern that cuts text into words and the special
tokens live in the code of its makers, so they are known here by the file's name. The merges of a BPE follow from the ranks:
the last merge that makes a token joins the two parts it has when only merges of lower rank are allowed.

A tokenizer.json is what every engine reads and what the reference runs, so this conversion happens once, at start (about
20 us a token), and nothing after it knows where the vocabulary came from.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from headrace.errors import TokenizerError
from headrace.text.engines import GPT2_PATTERN
from headrace.text.pieces import CL100K_PATTERN, O200K_PATTERN

_KNOWN: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": (GPT2_PATTERN, {"<|endoftext|>": 50256}),
    "r50k_base": (GPT2_PATTERN, {"<|endoftext|>": 50256}),
    "p50k_base": (GPT2_PATTERN, {"<|endoftext|>": 50256}),
    "cl100k_base": (
        CL100K_PATTERN,
        {
            "<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": (O200K_PATTERN, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}  # fmt: skip
_MAX_TOKEN = 1 << 12


def byte_characters() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {b: chr(b) for b in plain}
    return table | {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in table)}


def tokenizer_json_of_ranks(text: bytes, *, encoding: str, name: str) -> bytes:
    """The tokenizer.json that gives the ids of a .tiktoken file. `encoding` is the file's name without its suffix."""
    if encoding not in _KNOWN:
        raise TokenizerError(
            f"{name}: a .tiktoken file does not say how text is cut into words, and {encoding!r} is none of the encodings "
            f"known by name ({', '.join(_KNOWN)}). Rename the file to the encoding it is, or give a tokenizer.json."
        )
    pattern, specials = _KNOWN[encoding]
    ranks = _ranks(text, name)
    characters = byte_characters()

    def spelled(token: bytes) -> str:
        return "".join(characters[b] for b in token)

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = _parts(ranks, token, rank)
            if len(parts) != 2:
                raise TokenizerError(
                    f"{name}: token {token!r} of rank {rank} cannot be made by joining two tokens of lower rank; the file is "
                    "damaged or no byte-pair encoding. Fetch it again."
                )
            merges.append([spelled(parts[0]), spelled(parts[1])])
    taken = set(ranks.values())
    added = [
        {
            "id": number, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": True,
        }
        for content, number in specials.items()
        if number not in taken
    ]  # fmt: skip
    split: dict[str, Any] = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "post_processor": None, "decoder": {**level, "use_regex": True},
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                # The special tokens stand here too: `tokenizers` would number them on from the last token otherwise.
                "vocab": {spelled(t): r for t, r in ranks.items()} | {t["content"]: t["id"] for t in added}, "merges": merges,
            },
        }
    ).encode()  # fmt: skip


def _ranks(text: bytes, name: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(
                f"{name}:{number}: expected BASE64 RANK, found {line[:60]!r}. Fetch the file again."
            ) from error
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing:
        raise TokenizerError(
            f"{name} has no token for the byte {missing[0]:#04x}: it is no byte-level vocabulary, or cut short"
        )
    if len(set(ranks.values())) != len(ranks) or min(ranks.values()) < 0:
        raise TokenizerError(f"{name} gives two tokens the same rank, or a negative one: it is damaged, fetch it again")
    longest = max(ranks, key=len)
    if len(longest) > _MAX_TOKEN:
        raise TokenizerError(f"{name} has a token of {len(longest):,} bytes; at most {_MAX_TOKEN:,} are accepted")
    return ranks


def _parts(ranks: dict[bytes, int], token: bytes, limit: int) -> list[bytes]:
    """The token's parts after all merges of a rank below `limit`, lowest first."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best, at = limit, -1
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1], limit)
            if rank < best:
                best, at = rank, i
        if at < 0:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
