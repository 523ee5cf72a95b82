"""Errors between processes, by class name and sentence.

    wire = encode_error(error)                            {"kind": "DataError", "sentence": "a.jsonl is gone"}
    raise decode_error(wire, prefix="rank 3: ")           DataError("rank 3: a.jsonl is gone")

Nothing is pickled. Only classes of `headrace.errors` are looked up by name, so another process, or a file, cannot choose what is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace import errors
from headrace.errors import DataError, EnvironmentFailed, HeadraceError, RolloutRefused


def encode_error(error: BaseException, prefix: str = "") -> dict[str, str]:
    """An error as values that JSON and msgpack can carry. `prefix` is put before its sentence."""
    # A room's own subclass arrives as the class of headrace.errors that it extends.
    ours = (c for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
    wire = {"kind": next(ours, type(error)).__name__, "sentence": f"{prefix}{error}"}
    return wire | {"cause": error.cause} if isinstance(error, RolloutRefused | EnvironmentFailed) else wire


def decode_error(wire: Mapping[str, Any], *, prefix: str = "", otherwise: type[Exception] = DataError) -> Exception:
    """The error that `encode_error` was given: its class and its sentence, without further attributes.

    Args:
        wire: What `encode_error` returned. Values of other types are taken as text.
        prefix: Put before the sentence. It names the sender.
        otherwise: Class to use where the name is none of `headrace.errors`; the sentence then names the class.
    """
    kind, sentence = str(wire.get("kind")), f"{prefix}{wire.get('sentence')}"
    found = getattr(errors, kind, None)
    if not (isinstance(found, type) and issubclass(found, HeadraceError)):
        return otherwise(f"{prefix}a worker process failed: {kind}: {wire.get('sentence')}")
    return found(str(wire.get("cause")), sentence) if found in (RolloutRefused, EnvironmentFailed) else found(sentence)
