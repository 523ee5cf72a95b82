"""Encoders of text into ids, and the proof that a fast encoder gives the ids of `tokenizers`.

    tokenizers   the reference: any tokenizer.json, 0.65 M tokens/s a core
    fastokens    byte-level BPE of the usual shapes, about 40 times as fast; installed with headrace
    gigatoken    as fast; optional, needs awkward

Each fast engine supports only some tokenizers, and none is trusted. An engine is used for a tokenizer only after it gave the reference's
ids on a fixed sample of difficult texts, the tokenizer's own special tokens among them. One live document in 16,384 is encoded by both for
as long as the run lasts (`loader.windows`). `auto` takes the first of `ENGINES` that is installed and proves itself. Where none does,
`tokenizers` encodes, and one line of the log says so and why.
"""

from __future__ import annotations

import importlib.metadata
import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import orjson

from headrace.errors import TokenizerError
from headrace.formats.byte_file import first_line
from headrace.order import draws, key
from headrace.text.token_batch import TokenBatch

_log = logging.getLogger("headrace.text")

EngineName = Literal["auto", "tokenizers", "fastokens", "gigatoken"]
ENGINES: tuple[str, ...] = ("fastokens", "gigatoken")
"""The fast engines, in the order in which `auto` tries them."""
SPOT_CHECK_EVERY = 16_384
"""One document in this many is encoded by the reference too: about 1 % of the work of the fastest engine."""

Encode = Callable[[Sequence[str]], TokenBatch]
"""Encodes at least one text."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine that encodes, and why others were not taken."""

    name: str
    version: str
    encode: Encode = field(repr=False)
    passed_over: tuple[str, ...] = ()
    """Why a faster engine was not taken, a phrase each."""

    @property
    def is_fallback(self) -> bool:
        """Whether the reference encodes because no fast engine could be used."""
        return self.name == "tokenizers" and bool(self.passed_over)

    def __str__(self) -> str:
        reasons = f" ({'; '.join(self.passed_over)})" if self.passed_over else ""
        return f"{self.name} {self.version}{reasons}"


def reference_encoder(inner: Any, name: str) -> Encode:
    """Return the encoder that every engine must agree with. `inner`: a `tokenizers.Tokenizer`. `name`: what errors call it."""

    def encode(texts: Sequence[str]) -> TokenBatch:
        try:
            encodings = inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise TokenizerError(
                f"`tokenizers` gave up on a text with tokenizer {name}: {first_line(error)}. If that is about a regular "
                "expression, it takes too many steps: give the file of its publisher"
            ) from error
        rows = [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
        return TokenBatch.of_counts(np.concatenate(rows), map(len, rows))

    return encode


def is_panic(error: BaseException) -> bool:
    """Whether native code panicked: the error of that is no Exception, and each library has a class of its own for it."""
    return type(error).__name__ == "PanicException"


def choose_engine(wanted: EngineName, definition: bytes, reference: Encode, *, name: str) -> EngineChoice:
    """Choose the encoder for a tokenizer.

    Args:
        wanted: `auto`, which falls back to the reference, or an engine. An engine that cannot be used raises TokenizerError.
        definition: The tokenizer.json.
        reference: The same tokenizer in `tokenizers`.
        name: Name of the tokenizer, for messages.
    """
    if wanted not in ("auto", "tokenizers", *ENGINES):
        raise TokenizerError(f"there is no engine {wanted!r}: choose auto, tokenizers, {', '.join(ENGINES)}")
    own = EngineChoice("tokenizers", _version("tokenizers") or "", reference)
    if wanted == "tokenizers":
        return own
    passed_over: list[str] = []
    sample: tuple[list[str], TokenBatch] | None = None
    for engine in ENGINES if wanted == "auto" else (wanted,):
        version = _version(engine)
        if version is None:
            passed_over.append(f"{engine} is not installed")
            continue
        try:
            encode = _MAKERS[engine](definition)
        except Exception as error:  # each library has its own errors, some of them bare
            passed_over.append(f"{engine} {version} does not support it: {first_line(error)}")
            continue
        if sample is None:
            texts = proof_sample(definition)
            sample = texts, reference(texts)
        reason = disagreement(encode, *sample)
        if reason is None:
            return EngineChoice(engine, version, encode, tuple(passed_over))
        passed_over.append(f"{engine} {version} gave other ids: {reason}")
    if wanted != "auto":
        raise TokenizerError(
            f"engine {wanted} cannot be used for tokenizer {name}: {passed_over[0]}. Install {wanted}, or leave "
            'engine = "auto".'
        )
    _say_fallback(name, passed_over)
    return EngineChoice(own.name, own.version, own.encode, tuple(passed_over))


def _say_fallback(name: str, passed_over: Sequence[str]) -> None:
    """Log once that a slow encoder is used: not in worker processes, and on rank 0 only."""
    if name in _said or multiprocessing.parent_process() is not None or os.environ.get("RANK", "0") != "0":
        return
    _said.add(name)
    slow = (
        "tokenizer %s is encoded by `tokenizers`, at about 1 M tokens/s a core, because no fast encoder can be used: %s"
    )
    _log.warning(slow, name, "; ".join(passed_over))


_said: set[str] = set()
"""Names of tokenizers for which the log has said so."""


def disagreement(encode: Encode, texts: Sequence[str], expected: TokenBatch) -> str | None:
    """Describe the first text on which an encoder differs from the expected ids; None if there is none."""
    try:
        found = encode(texts)
    except Exception as error:
        return f"it failed on the sample ({first_line(error)})"
    if len(found) != len(texts):
        return f"it gave {len(found)} documents for {len(texts)} texts"
    for i, text in enumerate(texts):
        ours, theirs = expected.documents(i, i + 1).ids, found.documents(i, i + 1).ids
        if not np.array_equal(ours, theirs):
            return f"{_shown(text)} is {_ids(ours)} by the reference and {_ids(theirs)} by it"
    return None


# -------------------------------------------------------------------------------------------- the engines


def _fastokens(definition: bytes) -> Encode:
    # It starts no threads of its own: those of the loader call it side by side, and more are a tenth slower on two cores.
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
    import fastokens

    tokenizer = fastokens.Tokenizer.from_json_str(definition.decode())
    tokenizer.no_padding()
    tokenizer.no_truncation()

    def encode(texts: Sequence[str]) -> TokenBatch:
        ids, offsets = tokenizer.encode_batch_flat(list(texts))
        return TokenBatch(np.frombuffer(ids, np.int32), np.frombuffer(offsets, np.int64))

    return encode


def _gigatoken(definition: bytes) -> Encode:
    import awkward  # noqa: F401  encode_batch returns its arrays: a missing package is noticed here
    import gigatoken

    backend = gigatoken.Tokenizer.from_json(definition.decode()).backend

    def encode(texts: Sequence[str]) -> TokenBatch:
        layout: Any = backend.encode_batch(list(texts), parallel=False).layout
        offsets = np.ascontiguousarray(layout.offsets.data, np.int64)
        ids = np.ascontiguousarray(layout.content.data).view(np.int32)
        return TokenBatch(ids[offsets[0] : offsets[-1]], offsets - offsets[0])

    return encode


GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


_MAKERS: dict[str, Callable[[bytes], Encode]] = {"fastokens": _fastokens, "gigatoken": _gigatoken}


def split_pattern(pre_tokenizer: Any) -> str:
    """Return the single pattern by which a byte-level pre-tokenizer cuts text; ValueError if there is none.

    `pre_tokenizer` is that of a tokenizer.json. A first step that sets digits apart is left out of account.
    """
    if not isinstance(pre_tokenizer, dict):
        raise ValueError("it has no pre-tokenizer")
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    if len(steps) > 1 and steps[0].get("type") == "Digits":
        steps = steps[1:]
    kinds = [step.get("type") for step in steps]
    if any(step.get("add_prefix_space") for step in steps):
        raise ValueError("it adds a blank before the text")
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return GPT2_PATTERN
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        split = steps[0]
        if split.get("behavior") == "Isolated" and not split.get("invert") and "Regex" in split.get("pattern", {}):
            return split["pattern"]["Regex"]
    raise ValueError(f"its pre-tokenizer ({', '.join(map(str, kinds))}) is not one that a single pattern expresses")


# --------------------------------------------------------------------------------------------- the sample

_WORDS = (
    "", " ", "\n", "\t", "\r\n", "  ", "\n\n\n", " \n \n", "\u00a0", "\u3000", "\u2028", "\u2029", "\u0085", "\x0b\x0c",
    "\ufeff", "\ufeffstart", "\x00", "a\x00b", "\x01\x02\x1f", "\x7f", "\x80\x9f", "\u200b", "\u200d", "\u00ad",
    "hello", "Hello, world!", "don't I'LL we've 'S'T'RE she'd", "don’t we’ll", "''''", "it's's", "I'M",
    "0", "007", "1234567890", "3.14159e-10", "١٢٣", "१२३", "Ⅷ½²", "1,000,000.00", "12ab34", "0x1F",
    "naïve café", "nai\u0308ve cafe\u0301", "ÅÅ", "ﬁﬂ", "ǅ", "İstanbul ıI", "ß ẞ", "ſ", "ΑΒΓ αβγς", "Привет, мир", "עברית שלום",
    "العربية مَرْحَبًا", "हिन्दी नमस्ते", "ไทยภาษา", "한국어 조선말", "\u1112\u1161\u11ab", "日本語テキスト。漢字、かな", "中文分词测试", "ᠮᠣᠩᠭᠣᠯ",
    "👍", "👨‍👩‍👧‍👦", "🇩🇪🇫🇷", "👍🏽👍🏿", "❤️", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "\U0001f9ff\U000e0001", "\U0010ffff", "\ue000\uf8ff", "\ufffd", "\ufdd0", "𝔘𝔫𝔦", "𐍈",
    "a\u0300\u0301\u0302\u0303\u0304", "\u0301leading", "Z̸̡a̵l̶g̷o̴", "\u202eabc\u202c", "\u2066x\u2069",
    "def f(x):\n    return x  # ok\n\n\n\tif  True :\n", "{\"a\": [1, 2, {\"b\": null}]}", "<div class='x'>&nbsp;</div>", "C:\\path\\n", "$x^2$ \\frac{1}{2}",
    "https://example.org/a?b=c&d=%20#e", "user@example.org", "a_b__c___d", "--flag=--", "!!!???...", "…—–‐", "“q” ‘q’ «q»", "©®™", "№ § ¶",
    " leading", "trailing ", "  two  blanks  ", "tab\tsep\t\t", "mixed \t \n \r end", "\n \n", " \r", "a\rb", "end\n", "x \u00a0 y", "word\u2003word",
    "<|endoftext|>", "<|endoftext", "endoftext|>", "<s>", "</s>", "[CLS]", "<pad>", "<unk>", "<|im_start|>user\n", "▁under", "Ġtoken Ċ", "##ing",
    "CamelCaseWord", "ALLCAPS", "snake_case", "xXxX", "aaaaaaaaaaaaaaaa", "ababababab", "the the the", "\u0130\u0307", "ŉ", "\u1e9b\u0323",
)  # fmt: skip
_ALPHABETS = (
    "abcdefghij ",
    "aB1 \n\t'.,",
    "'sStTrReEvVmMlLdD ",
    "0123456789 ,.",
    "  \n\n\t\r\u00a0\u2003\u3000a",
    "äöüßéèñçåøÆ \u0301",
    "абвгд АБВ",
    "漢字かなカナ。、 a",
    "한국어조 1",
    "אבגד \u05b0\u05b7",
    "👍😀🏽\u200d❤\ufe0f a",
    "{}[]()<>;:=+-*/&|^%$#@!~`\"'\\_ ",
    "\x00\x01\x1f\x7f\x80\u0085\u2028\ufeff ",
    "aÀ漢👍\U0010ffff\u0301\u200b 1\n",
)


def proof_sample(definition: bytes) -> list[str]:
    """Return about 1,500 texts on which encoders are known to differ. They are the same for every run of a tokenizer."""
    texts = list(_WORDS)
    texts += [a + b for a in _WORDS[:24] for b in ("x", "1", "'s", " y")]
    texts += [f"x{a}y" for a in _WORDS[:24]]
    for letters_index, letters in enumerate(_ALPHABETS):
        random = draws(key("text.proof", alphabet=letters_index), 60 * 48)
        picks = (random % np.uint64(len(letters))).astype(np.int64).reshape(60, 48)
        lengths = 1 + (random[:60] >> np.uint64(32)) % np.uint64(47)
        texts += ["".join(letters[p] for p in row[: int(n)]) for row, n in zip(picks, lengths, strict=True)]
    everything = " ".join(_WORDS)
    texts += [everything, everything[::-1], "a" * 5000, " " * 3000, "\n" * 2000, "ab " * 2000, "1" * 1500, "é" * 1500]
    texts += ["漢" * 1200, "👍" * 800, "'" * 1000, " \n" * 1000, "!?" * 700, "x" * 300 + " " + "y" * 300]
    added = _added_tokens(definition)
    for token in added[:24]:
        texts += [
            token,
            f"a{token}b",
            f" {token} ",
            token * 3,
            token[:-1],
            f"\n{token}\n",
            f"{token}'s 12",
            f"  {token}",
        ]
    texts += ["".join(added[:50]), " ".join(added[:50])]
    return texts


def _added_tokens(definition: bytes) -> list[str]:
    try:
        return [str(t["content"]) for t in orjson.loads(definition).get("added_tokens") or ()]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 40 else text[:40] + "…")


def _ids(ids: np.ndarray) -> str:
    return "[" + ", ".join(map(str, ids[:8].tolist())) + (", …]" if len(ids) > 8 else "]")
