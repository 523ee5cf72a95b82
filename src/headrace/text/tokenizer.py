"""Tokenizers: text becomes token ids.

    load_tokenizer("tokenizer.json")   any Hugging Face tokenizer file, or a folder that holds one
    load_tokenizer("org/name")         the same from the local Hugging Face cache
    load_tokenizer(AutoTokenizer...)   a tokenizer object of transformers or `tokenizers`
    load_tokenizer(None)               bytes: 256 ids and three special tokens; needs no file
    train_bpe(texts, 4096)             a small byte-level BPE, for corpora that come without a tokenizer

Ids are one flat int32 array with offsets. No special tokens are added here: the packer adds BOS and EOS, so that the text of a document
cannot forge one unless its tokenizer says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from headrace.errors import TokenizerError
from headrace.text.engines import Encode, EngineName, choose_engine, is_panic, reference_encoder
from headrace.text.named_tokenizer import definition_of, read_definition
from headrace.text.pieces import Pieces
from headrace.text.token_batch import TokenBatch
from headrace.text.tokenizer_file import check_tokenizer

_EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "[EOS]", "[SEP]")
_BOS_NAMES = ("<|bos|>", "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "[CLS]")
_PAD_NAMES = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>")


class Tokenizer(Protocol):
    """What a loader needs of a tokenizer. `encode` is called from several threads at once."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def pad_id(self) -> int | None: ...
    @property
    def fingerprint(self) -> str: ...
    def encode(self, texts: Sequence[str]) -> TokenBatch: ...
    def decode(self, ids: np.ndarray) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0–255, then EOS 256, BOS 257, PAD 258."""

    name = "bytes"
    vocab_size = 259
    eos_id: int | None = 256
    bos_id: int | None = 257
    pad_id: int | None = 258
    fingerprint = "bytes-v1"

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        raw = [text.encode() for text in texts]
        return TokenBatch.of_counts(np.frombuffer(b"".join(raw), np.uint8).astype(np.int32), map(len, raw))

    def decode(self, ids: np.ndarray) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")


class BpeTokenizer:
    """A tokenizer.json of any model, encoded by the fastest engine that gives the ids of the `tokenizers` library."""

    def __init__(
        self,
        text: bytes,
        *,
        name: str,
        eos: str | None = None,
        bos: str | None = None,
        engine: EngineName = "auto",
    ) -> None:
        # The loader's threads are the parallelism; a second pool inside every call is slower (0.93x on 2 cores).
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        check_tokenizer(text, name)
        try:
            self._inner = tokenizers.Tokenizer.from_buffer(text)
        except BaseException as error:  # the library raises bare Exception
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise TokenizerError(f"{name} is not a tokenizer.json that `tokenizers` can load: {error}") from error
        self._inner.no_padding()
        self._inner.no_truncation()
        self.name = name
        # Ids may have gaps, and a model needs a row for the largest id.
        self.vocab_size: int = max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos_id: int | None = self._special("eos", eos, _EOS_NAMES)
        self.bos_id: int | None = self._special("bos", bos, _BOS_NAMES)
        self.pad_id: int | None = self._special("pad", None, _PAD_NAMES)
        self.fingerprint = f"{xxhash.xxh3_64_intdigest(text):016x} ({self.vocab_size:,} ids)"
        if self.vocab_size == 0:
            raise TokenizerError(f"{name} has an empty vocabulary: train it, or give another tokenizer")
        reference = reference_encoder(self._inner, name)
        self.engine = choose_engine(engine, text, reference, name=name)
        self._pieces = Pieces(text)
        self._encode = self._pieces.encoder(self.engine.encode)
        self.reference: Encode | None = None if self.engine.name == "tokenizers" else self._pieces.encoder(reference)
        """The encoder that spot checks compare with; None where the reference itself encodes."""

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        return self._encode(texts) if texts else TokenBatch.of_counts(np.empty(0, np.int32), ())

    def refusal(self, text: str) -> str | None:
        """Return why a document is too long to be encoded; None if it is not."""
        return self._pieces.refusal(text)

    def decode(self, ids: np.ndarray) -> str:
        return self._inner.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def _special(self, role: str, wanted: str | None, usual: tuple[str, ...]) -> int | None:
        if wanted is not None:
            found = self._inner.token_to_id(wanted)
            if found is None:
                raise TokenizerError(f"{self.name} has no token {wanted!r}, which was given as {role}_token")
            return found
        return next((i for name in usual if (i := self._inner.token_to_id(name)) is not None), None)


def load_tokenizer(
    given: Any,
    *,
    eos: str | None = None,
    bos: str | None = None,
    engine: EngineName = "auto",
    base: Path | None = None,
) -> ByteTokenizer | BpeTokenizer:
    """Load the tokenizer of a path, a name or an object, or the byte tokenizer for None and "bytes".

    Args:
        given: The path of a tokenizer.json or of its folder; a name such as "org/name", which is looked up in the local Hugging Face cache where no such
            path exists; a `tokenizers.Tokenizer`; or a transformers tokenizer.
        eos: The token that ends a document; found under its usual names, or in the object, unless given.
        bos: The token that begins a document, likewise.
        engine: Which library encodes.
        base: Where a relative path starts; the working folder unless given.
    """
    if given is None or given == "bytes":
        return ByteTokenizer()
    if isinstance(given, str | Path):
        return BpeTokenizer(read_definition(given, base=base), name=str(given), eos=eos, bos=bos, engine=engine)
    found = definition_of(given)
    if found is None:
        raise TokenizerError(
            f"a tokenizer is a path, a name, or an object of tokenizers or transformers; got {given!r}"
        )
    return BpeTokenizer(found.text, name=found.name, eos=eos or found.eos, bos=bos or found.bos, engine=engine)


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a byte-level BPE of `vocab_size` ids on `texts`; return the bytes of its tokenizer.json."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|bos|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return inner.to_str().encode()
