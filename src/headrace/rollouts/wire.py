"""The wire contract of rollouts: how token columns travel, and how they are read and written.

A rollout is a record in the form that `verifiers` environments return: a map with `example_id`, `reward` and a `trajectory` of turns, each with
`tokens`. In memory the record is a dict. Between processes it is one msgpack map. The columns of a turn's tokens are raw little-endian bytes:

    field                    element    bytes a token   values
    prompt_ids               int32      4               0 and above: the whole context of the turn
    prompt_mask              uint8      1               0 or 1, as long as prompt_ids
    completion_ids           int32      4               0 and above
    completion_mask          uint8      1               0 or 1, as long as completion_ids
    completion_logprobs      float32    4               finite, as long as completion_ids
    completion_advantages, completion_loss_weights, completion_reference_logprobs
                             float32    4               optional; finite, as long as completion_ids
    routed_experts           {"data": bytes, "shape": [rows, layers, topk], "start": first token}, uint8

The nodes of a trace (`verifiers` 0.4 and later) have `token_ids`, `mask` and `logprobs` of the same three types.

A one-dimensional numpy array may replace the bytes where a rollout stays in its process. Plain lists of numbers are taken as well, in
dicts, in msgpack and in JSON text. Lists are slow: every number is a Python object first. `encode_rollout` and `binary_rollout` make the
binary form.

    wire = encode_rollout(rollout)          in the client: lists, arrays or bytes to msgpack with binary columns
    pipeline.arrive(wire, step=0, key=key)  in the orchestrator

Every column is checked here when it is read: element type, length in bytes, range of values, and the limit of `Limits.tokens`. A column that fails
raises RolloutRefused with the cause it is counted under. `records.StepTokens` checks that the columns of a turn fit each other.
"""

from __future__ import annotations

import array
from collections.abc import Mapping
from typing import Any, TypedDict

import msgspec
import numpy as np

from headrace.errors import RolloutRefused
from headrace.rollouts.records import TOKEN_COLUMNS
from headrace.rollouts.values import model_values

_LARGEST_MESSAGE = 1 << 30
_NO_LIMIT = 1 << 62
_MEANING = {"I": "token ids (0 to 2147483647)", "B": "0 and 1", "f": "numbers"}
"""What a column holds, by the type code that a list is read with."""
_LITTLE_ENDIAN = {dtype: np.dtype(dtype).newbyteorder("<") for dtype in (np.uint32, np.uint8, np.float32)}

# ------------------------------------------------------------------------------------------------- columns


def ids_column(value: Any, name: str, limit: int) -> np.ndarray:
    """Token ids as int32, from raw bytes, an integer array or a list.

    `name` is the field in messages, `limit` the most entries taken. Raises RolloutRefused for another type (`wrong_type`), an id below 0 or above
    2^31 - 1 (`wrong_type`), bytes that are no whole number of ids (`wrong_length`), or too many ids (`oversize`).
    """
    # "I" reads a list in 10 ns a number, "i" in 22.
    column = _column(value, "I", np.uint32, "iu", name, limit)
    _check_range(column, 2**31 - 1, f"{name} holds something other than {_MEANING['I']}")
    return column.astype(np.int32, copy=False)


def mask_column(value: Any, name: str, limit: int) -> np.ndarray:
    """A mask of 0 and 1 as uint8, from raw bytes, an array of booleans or integers, or a list. Arguments and refusals as for `ids_column`."""
    column = _column(value, "B", np.uint8, "biu", name, limit)
    _check_range(column, 1, f"{name} holds something other than {_MEANING['B']}")
    return column.astype(np.uint8, copy=False)


def logprobs_column(value: Any, name: str, limit: int) -> np.ndarray:
    """Log-probabilities as float32, from raw bytes, an array of numbers or a list. Arguments and refusals as for `ids_column`.

    A number without a float32 becomes infinite, and `StepTokens` refuses it as `not_finite`.
    """
    column = _column(value, "f", np.float32, "iuf", name, limit)
    if column.dtype == np.float32:
        return column
    with np.errstate(over="ignore"):
        return column.astype(np.float32)


def _column(value: Any, code: str, dtype: type[Any], kinds: str, name: str, limit: int) -> np.ndarray:
    """The column before its values are checked: contiguous, aligned, and a copy where `value` was bytes or a list.

    `code` is the type code of `array.array` for lists, `dtype` the element of raw bytes, `kinds` the numpy kinds that an array may have.
    """
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in kinds:
            raise RolloutRefused("wrong_type", f"{name} is an array of {value.dtype} with shape {list(value.shape)}")
        _check_count(len(value), name, limit)
        return np.ascontiguousarray(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        size, width = memoryview(value).nbytes, _LITTLE_ENDIAN[dtype].itemsize
        if size % width:
            raise RolloutRefused("wrong_length", f"{name} has {size:,} bytes, expected {width} for each entry")
        _check_count(size // width, name, limit)
        # A copy: completions are kept until the step ends, and a view would keep the whole message with its experts.
        return np.frombuffer(value, _LITTLE_ENDIAN[dtype]).astype(dtype) if size else np.empty(0, dtype)
    if not isinstance(value, (list, tuple)):
        raise RolloutRefused(
            "wrong_type", f"{name} is a {type(value).__name__}, expected raw bytes, an array or a list of numbers"
        )
    _check_count(len(value), name, limit)
    try:
        # A copy: a view of an array.array is two objects more for the garbage collector.
        return np.frombuffer(array.array(code, value), dtype).copy() if value else np.empty(0, dtype)
    except (TypeError, OverflowError, ValueError) as error:
        raise RolloutRefused("wrong_type", f"{name} holds something other than {_MEANING[code]}: {error}") from error


def _check_range(column: np.ndarray, most: int, message: str) -> None:
    """Refuse a column with an entry below 0 or above `most`."""
    if column.size and (column.max() > most or (column.dtype.kind == "i" and column.min() < 0)):
        raise RolloutRefused("wrong_type", message)


def _check_count(found: int, name: str, limit: int) -> None:
    """Refuse a column of more than `limit` entries as `oversize`."""
    if found > limit:
        raise RolloutRefused("oversize", f"{name} has {found:,} entries, at most {limit:,} are taken")


# ------------------------------------------------------------------------------------------------ messages


_Plain = list[Any] | int | float | bool | None


class _Turn(TypedDict, total=False):
    """What ingest reads of a turn in msgpack. Bytes become views of the message, not copies."""

    prompt: Any
    completion: Any
    tokens: dict[str, memoryview | dict[str, memoryview | _Plain] | _Plain] | None
    is_truncated: Any


_TURN = msgspec.msgpack.Decoder(_Turn)


def decode_rollout(raw: bytes | bytearray | memoryview | str) -> Any:
    """The record in msgpack or JSON text. Binary columns and experts of a msgpack trajectory are views of `raw`.

    Turns are decoded one by one: a decoder holds the GIL for the whole of a call. Raises RolloutRefused (`malformed`, `oversize`).
    """
    if len(raw) > _LARGEST_MESSAGE:
        raise RolloutRefused("oversize", f"a rollout of {len(raw):,} bytes, at most {_LARGEST_MESSAGE:,} are taken")
    try:
        data = raw.encode() if isinstance(raw, str) else raw
        decode = msgspec.msgpack.decode if _is_msgpack(data) else msgspec.json.decode
        try:
            fields = decode(data, type=dict[str, msgspec.Raw])
            turns = decode(fields.pop("trajectory"), type=list[msgspec.Raw])
        except (msgspec.ValidationError, KeyError):  # a trace, an episode, or a record that ingest refuses
            return decode(data)
        record = {name: decode(value) for name, value in fields.items()}
        return record | {"trajectory": [_decoded_turn(turn, decode) for turn in turns]}
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RolloutRefused("malformed", f"a rollout is neither JSON nor msgpack: {error}") from error


def _decoded_turn(raw: msgspec.Raw, decode: Any) -> Any:
    if decode is msgspec.msgpack.decode:
        try:
            return _TURN.decode(raw)
        except msgspec.ValidationError:
            pass  # text among the tokens, such as experts in base64: decoded without a schema
    return decode(raw)


def _is_msgpack(raw: bytes | bytearray | memoryview) -> bool:
    """Whether bytes begin a map in msgpack. JSON text begins with a bracket or white space, which no such map does."""
    first = raw[0] if len(raw) else 0
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def binary_rollout(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the record whose token columns are raw bytes; everything else is as it was.

    `rollout` is a record with a `trajectory`, whose columns are lists, arrays or bytes. Raises RolloutRefused for a column that the pipeline would refuse.
    """
    turns = [model_values(turn) for turn in rollout["trajectory"]]
    return {
        **rollout,
        "trajectory": [{**t, "tokens": _binary_tokens(t.get("tokens"), at)} for at, t in enumerate(turns)],
    }


def encode_rollout(rollout: Mapping[str, Any]) -> bytes:
    """The record as msgpack with binary columns, ready for `RolloutPipeline.arrive` in another process. Raises RolloutRefused as `binary_rollout` does."""
    return _ENCODER.encode(binary_rollout(rollout))


def _encoded_object(value: Any) -> Any:
    if (fields := model_values(value)) is not value:
        return fields
    if isinstance(value, np.generic):
        return value.item()
    raise RolloutRefused("wrong_type", f"a rollout holds a {type(value).__name__}, expected plain values")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded_object)
COLUMN_READERS = {
    "prompt_ids": ids_column, "prompt_mask": mask_column, "completion_ids": ids_column, "completion_mask": mask_column,
    "completion_logprobs": logprobs_column,
}  # fmt: skip
"""The function that reads each column of a turn's tokens."""
OPTIONAL_COLUMNS = {f"completion_{name}": name for name in TOKEN_COLUMNS}
"""Optional columns of a turn's tokens, read by `logprobs_column`: field on the wire -> name in records."""


def _binary_tokens(tokens: Mapping[str, Any] | None, turn: int) -> dict[str, Any] | None:
    if tokens is None:
        return None
    binary = dict(tokens)
    for name, read in (COLUMN_READERS | dict.fromkeys(OPTIONAL_COLUMNS, logprobs_column)).items():
        if binary.get(name) is not None:
            column = read(binary[name], f"{name} of turn {turn}", _NO_LIMIT)
            binary[name] = column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
    return binary
