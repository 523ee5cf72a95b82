"""Encoding of very long documents in pieces, with the ids of the whole document.

An encoder takes 10 to 170 bytes of memory for every character of a text. A document is therefore cut into pieces of about
256 Ki characters, and their ids are joined. That is exact only where a cut never moves a border of the pre-tokenizer. It holds
for byte-level BPE with one of the split patterns below, cut between a letter and a character that is neither letter nor mark
nor apostrophe (`cuts_of`):

- No alternative of these patterns goes on from a letter to such a character, so a match ends at the cut in the whole text.
- The patterns look behind at nothing, so what follows the cut is matched as if the text began there.
- They look ahead only after white space, so what precedes the cut is matched as if the text ended there.
- BPE merges inside of a match, and no added token lies near the cut.

Any other tokenizer encodes a document as a whole. `Pieces.refusal` says so of a document that would take too much memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import orjson

from headrace.text.engines import GPT2_PATTERN, Encode, split_pattern
from headrace.text.token_batch import TokenBatch

PIECE = 256 << 10
"""Characters of a piece. Documents of up to twice as many are encoded whole."""
LONGEST_PIECE = 16 << 20
"""Characters that are encoded at once at most: 2.6 GB of memory with `tokenizers`."""
CL100K_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = CL100K_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_PATTERNS = frozenset({GPT2_PATTERN, CL100K_PATTERN, O200K_PATTERN, _QWEN2})
# Letters and other characters that were so in every version of Unicode that an encoder may know.
_CUT = re.compile(r"[A-Za-zА-Яа-яぁ-ゖァ-ヺ一-龥가-힣](?=[\t\n\r -&(-@\[-`{-~、。，])")


class Pieces:
    """The places where documents may be cut for one tokenizer, whose tokenizer.json is `definition`."""

    def __init__(self, definition: bytes) -> None:
        added = _cuttable(orjson.loads(definition))
        self.exact = added is not None
        """Whether documents may be cut at all."""
        self._added = added or ()
        self._reach = max(map(len, self._added), default=0)

    def cuts_of(self, text: str) -> list[int]:
        """Return the end of each piece of a text; the last piece ends with the text."""
        ends: list[int] = []
        at = 0
        while self.exact and len(text) - at > 2 * PIECE:
            found = next(
                (m.end() for m in _CUT.finditer(text, at + PIECE) if not self._near_added(text, m.end())), None
            )
            if found is None:
                break
            ends.append(found)
            at = found
        return [*ends, len(text)]

    def refusal(self, text: str) -> str | None:
        """Return why a text would take too much memory to encode; None if it can be encoded."""
        if len(text) <= LONGEST_PIECE:
            return None
        longest = max(map(len, self._pieces_of(text)))
        if longest <= LONGEST_PIECE:
            return None
        if self.exact:
            return f"it has {longest:,} characters in a row without a place to cut; at most {LONGEST_PIECE:,} are encoded at once"
        return f"it has {len(text):,} characters, and this tokenizer can only encode a document as a whole, of at most {LONGEST_PIECE:,}"

    def encoder(self, encode: Encode) -> Encode:
        """Return an encoder with the ids of `encode` that takes less memory for long texts."""

        def in_pieces(texts: Sequence[str]) -> TokenBatch:
            if max(map(len, texts)) <= 2 * PIECE:
                return encode(texts)
            # Each by itself: an encoder takes the memory of all texts of a call.
            ids = [[encode([piece]).ids for piece in self._pieces_of(text)] for text in texts]
            flat = [piece for own in ids for piece in own]
            return TokenBatch.of_counts(np.concatenate(flat), (sum(map(len, own)) for own in ids))

        return in_pieces if self.exact else encode

    def _pieces_of(self, text: str) -> list[str]:
        ends = self.cuts_of(text)
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def _near_added(self, text: str, at: int) -> bool:
        near = text[max(at - self._reach, 0) : at + self._reach]
        return any(token in near for token in self._added)


def _cuttable(described: dict) -> tuple[str, ...] | None:
    """The added tokens of a tokenizer whose documents may be cut; None if they may not."""
    model, added = described.get("model") or {}, described.get("added_tokens") or ()
    if model.get("type", "BPE") != "BPE" or model.get("dropout") or described.get("normalizer") is not None:
        return None
    if any(t.get(flag) for t in added for flag in ("single_word", "lstrip", "rstrip")):
        return None
    try:
        pattern = split_pattern(described.get("pre_tokenizer"))
    except (ValueError, KeyError, TypeError):
        return None
    return tuple(str(t["content"]) for t in added if t.get("content")) if pattern in _PATTERNS else None
