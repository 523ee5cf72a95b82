"""Meta of a spool: the fields of a sample, and the facts a trainer needs before it reads the first one.

    meta.json    strict JSON with a checksum; what headrace reads
    meta.pkl     the same for scripts that unpickle it; read only if there is no meta.json

In a folder of the legacy `.pt` layout (`{split}_batches_*.pt`, no queue/) the meta.pkl often holds vocab_size, stoi and itos alone. There no
key is required; the keys that a spool knows are checked if they are there.

Pickle can run code, name any class and ask for any amount of memory. So a meta.pkl is first read as a list of opcodes,
and only opcodes that build dict, list, tuple, str, int, float, bool and None are accepted.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from headrace.batch import BatchSpec, FieldSpec
from headrace.errors import ConfigError, FileCorrupt, StorageError
from headrace.files import publish, read_regular
from headrace.order import fingerprint_json
from headrace.spool.durability import META

CIRCULAR_SPLITS = ("val",)
"""Splits whose files are read again and again and never deleted."""
TRAINING_TYPES = ("LM", "MLM", "CLASSIFICATION", "TOKEN_CLASSIFICATION", "SEQUENCE_SCORING")
_WITH_VOCABULARY = ("LM", "MLM", "TOKEN_CLASSIFICATION")
_REQUIRED = ("dataset_name", "training_type", "batch_size", "batch_schema", "split_info")
_MAX_META = 64 << 20
_MAX_OPCODES = 1_000_000


# ------------------------------------------------------------------------------------------------- checks


def check_meta(meta: object, where: str, *, legacy: bool = False) -> dict[str, Any]:
    """The meta as a plain dict; ConfigError names every problem, and its file or provider `where`. `legacy`: no key is required."""
    if not isinstance(meta, Mapping):
        raise ConfigError(f"{where}: meta is a {type(meta).__name__}, expected a mapping")
    problems = [f"meta has no {key!r}" for key in _REQUIRED if key not in meta and not legacy]
    kind = meta.get("training_type")
    if "training_type" in meta and kind not in TRAINING_TYPES:
        problems.append(f"training_type is {kind!r}; it is one of {', '.join(TRAINING_TYPES)}")
    if kind in _WITH_VOCABULARY and "vocab_size" not in meta and not legacy:
        problems.append(f"meta has no 'vocab_size', which training_type {kind} needs")
    if not isinstance(meta.get("dataset_name", ""), str):
        problems.append(f"dataset_name is {meta['dataset_name']!r}, expected text")
    problems += [
        f"{key} is {meta[key]!r}, expected a whole number of 1 or more"
        for key in ("batch_size", "vocab_size", "block_size", "target_size")
        if meta.get(key) is not None and (type(meta[key]) is not int or meta[key] < 1)
    ]
    if "batch_size" in meta and meta["batch_size"] is None:
        problems.append("batch_size is None, expected a whole number of 1 or more")
    if "batch_schema" in meta:
        try:
            BatchSpec.from_json(meta["batch_schema"])
        except ValueError as error:
            problems.append(f"batch_schema: {error}")
    splits = meta.get("split_info", {})
    if not isinstance(splits, Mapping) or not all(isinstance(v, Mapping) for v in splits.values()):
        problems.append("split_info maps each split to its facts, such as {'train': {}, 'val': {}}")
    if problems:
        raise ConfigError([f"{where}: {problem}" for problem in problems])
    return {str(key): value for key, value in meta.items()}


# -------------------------------------------------------------------------------------------------- files


def write_meta(folder: Path, meta: Mapping[str, Any]) -> None:
    """Publish meta.json and then meta.pkl in a folder. In this order, so that a meta.pkl of headrace is never alone."""
    plain = _plain(meta)
    try:
        value = _keyed(plain)
        sealed = {"checksum": _sum(value), "meta": value}
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"meta of {folder} cannot be written: {error}. It holds text, numbers, lists and mappings; turn anything else "
            "into one of these in build_meta"
        ) from error
    raw = json.dumps(sealed, indent=2, ensure_ascii=False).encode() + b"\n"
    publish(folder / "meta.json", raw, replace=True, durable=META)
    publish(folder / "meta.pkl", pickle.dumps(plain, protocol=4), replace=True, durable=META)


def read_meta(folder: Path) -> dict[str, Any]:
    """The checked meta of the spool, or of the legacy `.pt` layout, in `folder`."""
    path = folder / "meta.json"
    if not os.path.lexists(path):
        path = folder / "meta.pkl"
    if not os.path.lexists(path):
        raise ConfigError(
            f"{folder} has neither meta.json nor meta.pkl, so it is not a spool: start its provider first, or give "
            "the folder of a provider that ran"
        )
    raw = read_regular(path, _MAX_META)
    if path.suffix == ".json":
        return check_meta(_parse_json(path, raw), str(path))
    legacy = not os.path.lexists(folder / "queue") and any(folder.glob("*_batches_*.pt"))
    meta = check_meta(_parse_pickle(path, raw), str(path), legacy=legacy)
    if not legacy:
        _confirm(folder, path, meta)
    if legacy and "batch_size" not in meta:
        from headrace.spool.legacy import legacy_batch_size

        size = legacy_batch_size(folder)
        meta |= {} if size is None else {"batch_size": size}
    return meta


def _confirm(folder: Path, path: Path, meta: Mapping[str, Any]) -> None:
    """Compare a meta.pkl of another program with a file of its queue. FileCorrupt names what differs, and refuses a meta.pkl of headrace without its
    meta.json: a meta.pkl has no checksum, and with a flipped bit in it a consumer could wait for ever."""
    from headrace.spool.batch_file import open_batch_file

    if "headrace" in meta or any(isinstance(value, Mapping) and "job" in value for value in meta.values()):
        raise FileCorrupt(
            f"{path} has lost the meta.json beside it, which has the checksum: remove {path.name} too, and start the provider again: it writes both"
        )
    for first in sorted((folder / "queue").glob("*/*.pt"))[:4]:
        try:
            header = open_batch_file(first).header
        except (FileCorrupt, StorageError):
            continue  # the consumer quarantines it, or reports the problem of the disk
        wanted = BatchSpec.from_json(meta["batch_schema"])
        if header.schema != wanted or header.batch_size != meta["batch_size"]:
            raise FileCorrupt(
                f"{path} says batches of {meta['batch_size']} with {wanted}, {first.name} holds batches of "
                f"{header.batch_size} with {header.schema}. One of the two is damaged: let the provider write {path.name} again"
            )
        return


def _plain(value: Any, key: Callable[[Any], Any] = lambda k: k) -> Any:
    """The value with each FieldSpec as a mapping, tuples as lists, and `key(k)` in the place of each key k of a mapping."""
    if isinstance(value, FieldSpec):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key(k): _plain(v, key) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, key) for v in value]
    return value


_INT_KEYS = "!int keys"


def _keyed(value: Any) -> Any:
    """The value with mappings from whole numbers marked, because JSON has text keys only. A vocabulary (itos) is such a mapping."""
    if isinstance(value, dict):
        keys = {type(k) for k in value}
        if keys == {int}:
            return {_INT_KEYS: {str(k): _keyed(v) for k, v in value.items()}}
        if keys - {str}:
            raise TypeError(f"a mapping has keys of the types {sorted(k.__name__ for k in keys)}")
        return {k: _keyed(v) for k, v in value.items()}
    return [_keyed(v) for v in value] if isinstance(value, list) else value


def _unkeyed(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {_INT_KEYS}:
            return {int(k): _unkeyed(v) for k, v in value[_INT_KEYS].items()}
        return {k: _unkeyed(v) for k, v in value.items()}
    return [_unkeyed(v) for v in value] if isinstance(value, list) else value


def _sum(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


def _parse_json(path: Path, raw: bytes) -> Any:
    try:
        sealed = json.loads(raw)
        checksum, meta = sealed["checksum"], sealed["meta"]
        if set(sealed) != {"checksum", "meta"} or _sum(meta) != checksum:
            raise ValueError("it fails its checksum")
        meta = _unkeyed(meta)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileCorrupt(
            f"{path} is damaged or was edited by hand ({type(error).__name__}: {error}). Let the provider write it again: "
            "delete it and start the provider"
        ) from error
    return meta


_BUILDERS = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1",
    "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_LIST", "LIST", "APPEND",
    "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "GET", "BINGET",
    "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE",
})  # fmt: skip


class _Builder(pickle.Unpickler):
    """An unpickler that looks up no name."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")


def _parse_pickle(path: Path, raw: bytes) -> Any:
    count = 0
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(raw), 1):
            if opcode.name not in _BUILDERS:
                raise pickle.UnpicklingError(f"it uses {opcode.name}")
            # A memo slot is memory: slot 2**31 would cost 32 GiB. A writer never skips one.
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count:
                raise pickle.UnpicklingError(f"it fills memo slot {argument} at opcode {count}")
            if count > _MAX_OPCODES:
                raise pickle.UnpicklingError(f"it has more than {_MAX_OPCODES:,} opcodes")
        value = _Builder(io.BytesIO(raw)).load()
        _check_plain(value, budget=1000 + 10 * count)
    except Exception as error:  # hostile bytes can make the unpickler raise anything
        raise FileCorrupt(
            f"{path} was not read: {error}. A meta.pkl holds dict, list, tuple, str, int, float, bool and None, and nothing "
            "else is unpickled"
        ) from error
    return value


def _check_plain(value: Any, budget: int) -> None:
    """ValueError if a value is not plain, or unfolds into more than `budget` values: a few bytes of pickle can refer to a list 2**60 times."""
    stack = [value]
    while stack:
        budget -= 1
        if budget < 0:
            raise ValueError("it unfolds into too many values")
        top = stack.pop()
        if isinstance(top, dict):
            stack += top.keys()
            stack += top.values()
        elif isinstance(top, (list, tuple)):
            if len(top) > budget:
                raise ValueError("it unfolds into too many values")
            stack += top
        elif not isinstance(top, (str, int, float, bool, type(None))):
            raise ValueError(f"it holds a {type(top).__name__}")


def parts_of(meta: Mapping[str, Any], split: str) -> int:
    """Number of parts of a split."""
    return 1 if split in CIRCULAR_SPLITS else int((meta.get("headrace") or {}).get("parts", 1))


# ---------------------------------------------------------------------------------------------------- job


def with_job(meta: Mapping[str, Any], recipe: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A checked meta with the key `headrace`: the provider's recipe, and the job, the fingerprint of everything that decides the files.
    `where`: name of the meta, for the message."""
    full = {**meta, "batch_schema": BatchSpec.from_json(meta["batch_schema"]).to_json()}
    try:
        job = fingerprint_json({"recipe": recipe, "meta": _plain(full, str)})
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} cannot be written: {error}. It holds text, numbers, lists and mappings; turn anything else into one of these in build_meta"
        ) from error
    return {**full, "headrace": {"version": 1, **recipe, "job": job}}


def require_own(found: Mapping[str, Any], folder: Path) -> None:
    """ConfigError if the meta `found` in a folder was not written by a provider of headrace."""
    if "headrace" not in found:
        raise ConfigError(
            f"{folder} has a meta that another program wrote (dataset_name {found.get('dataset_name')!r}). Files of both would be mixed: use "
            "another folder, or empty this one with force_regenerate=True (--force_regenerate)"
        )


def require_same_job(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """ConfigError if the meta `found` in a folder has another job than the `wanted` meta of a provider; it names what differs."""
    if found["headrace"].get("job") == wanted["headrace"]["job"]:
        return
    then, now = {**found, **found["headrace"]}, {**wanted, **wanted["headrace"]}
    differences = [
        f"{name} is {then.get(name)!r:.80}, now {now.get(name)!r:.80}"
        for name in sorted((set(then) | set(now)) - {"headrace", "job"}, key=str)
        if _plain(then.get(name), str) != _plain(now.get(name), str)
    ]
    raise ConfigError(
        f"{folder} was made for something else ({'; '.join(differences)}). Files of both would be mixed: use another folder, "
        "or empty this one with force_regenerate=True (--force_regenerate)"
    )
