"""Inference engines: token ids in, token ids and log-probs out, by a named version of the weights.

    engine.complete(ids, max_tokens=4, temperature=1.0, seed=…, version=12)  ->  Completion(ids, logprobs, spans)

`EmbeddedEngine` (train/embedded_engine.py) runs a small GPT in this process. `OpenAIEngine` (openai_engine.py) asks servers by URL.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from headrace.errors import TokenizerError
from headrace.rollouts.records import VersionSpan


class Completion(NamedTuple):
    """The answer of an engine."""

    ids: np.ndarray
    """int32; the end token included, if the model wrote it."""
    logprobs: np.ndarray
    """float32, of each id under the distribution it was sampled from."""
    spans: tuple[VersionSpan, ...]
    """Which version of the weights sampled which ids."""
    text: str | None = None
    """The text of the ids, where the engine decoded them."""


class Engine(Protocol):
    """An engine that completes token ids. Called on the event loop."""

    async def complete(
        self, ids: np.ndarray, *, max_tokens: int, temperature: float, seed: int, version: int, session: str = ""
    ) -> Completion:
        """Sample a continuation of `ids`.

        Args:
            ids: the whole context, int32.
            max_tokens: the completion ends after this many tokens, or after the end token.
            temperature: 0 takes the most likely token.
            seed: 64 bits; equal arguments and equal seeds give equal completions.
            version: the version of the weights the request was pinned to.
            session: requests of one rollout share it, so that a server can be chosen that has their context cached.
        """
        ...

    async def close(self) -> None: ...


class Codec(Protocol):
    """Text to ids and back."""

    vocab_size: int
    end_id: int

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, ids: np.ndarray) -> str: ...


class CharacterCodec:
    """One id for each character of a fixed alphabet, and one more that ends an answer."""

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet
        self._ids = {character: at for at, character in enumerate(alphabet)}
        self.end_id = len(alphabet)
        self.vocab_size = len(alphabet) + 1

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text; TokenizerError names a character that is not in the alphabet."""
        try:
            return np.array([self._ids[character] for character in text], np.int32)
        except KeyError as error:
            raise TokenizerError(
                f"the text {text[:60]!r} has the character {error.args[0]!r}, which is not in policy.alphabet {self.alphabet!r}: add it there, "
                "or write the text without it"
            ) from None

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids, without end tokens."""
        return "".join(self.alphabet[i] for i in ids.tolist() if i != self.end_id)
