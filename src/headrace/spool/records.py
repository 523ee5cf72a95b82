"""Small state files: sealed JSON, and records that are overwritten in place.

    seal(value), read_sealed(path)            JSON with its checksum; FileCorrupt if a file fails it

    reserve_record(path, {"splits": {}})      make a file with room for two records
    write_record(path, value, durable=True)   overwrite the older record
    read_record(path)                         the newer record that is whole

A consumer writes its state as records. On a full disk only a commit frees space, so a commit must not need any; a new file that replaces
the old one would need an inode and a block. A record file has two slots of equal size. Each holds a sealed record with a
number that counts up. If a crash tears one record, the other one still holds the previous value.

The slots of a new file are whole blocks of 4 KiB, so that a power cut while one is written does not touch the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from headrace.errors import FileCorrupt, StorageError
from headrace.files import publish, read_regular

_MAX_SEALED = 4 << 20
_BLOCK = 4096
_NUMBER = "turn"
"""Key under which a record holds its number."""


def seal(value: Any) -> bytes:
    """A JSON value with its checksum, as the bytes of a small file."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f'{{"sum":"{xxhash.xxh3_128_hexdigest(text.encode())}","value":{text}}}\n'.encode()


def _unsealed(raw: bytes) -> Any:
    """The value in sealed bytes; ValueError if they are damaged."""
    try:
        value = json.loads(raw)["value"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("it is not sealed JSON") from error
    if seal(value) != raw:
        raise ValueError("it fails its checksum")
    return value


def read_sealed(path: Path | str) -> Any:
    """The value of a sealed file; None if there is no file.

    Raises:
        FileCorrupt: The file fails its checksum.
        StorageError: The system could not read it: out of descriptors or memory, or a failing disk.
    """
    try:
        return _unsealed(read_regular(path, _MAX_SEALED))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise FileCorrupt(f"{path} is damaged: {error}") from error


# ------------------------------------------------------------------------------------------------ records


def read_record(path: Path) -> dict[str, Any] | None:
    """The newest whole record; None if there is no file.

    A record that is being written is not whole. Then the file is read again until two readings agree, because a writer that is
    two records ahead of a slow reader may have overwritten both slots meanwhile.

    Raises:
        FileCorrupt: No record is whole.
        StorageError: The system could not read the file.
    """
    before = None
    while True:
        try:
            raw = read_regular(path, _MAX_SEALED)
        except FileNotFoundError:
            return None
        found = _whole(raw)
        if len(found) == 2 or raw == before:
            break
        before = raw
    if not found:
        raise FileCorrupt(f"{path} is damaged: neither of its records is whole")
    return max(found, key=lambda entry: entry[0])[2]


def reserve_record(path: Path, value: Mapping[str, Any], *, size: int = _BLOCK, durable: bool = True) -> None:
    """Make a record file that holds `value`, unless the file exists.

    Args:
        path: The file.
        value: The first record.
        size: Bytes that a later record may need.
        durable: Whether the file survives a power cut.
    """
    if not os.path.lexists(path):
        with contextlib.suppress(FileExistsError):
            publish(path, _new_file(value, size), durable=durable)


def write_record(path: Path, value: Mapping[str, Any], *, durable: bool) -> None:
    """Overwrite the older record of a file. StorageError if that fails; the newer record is still there then.

    A file that is missing, has too small slots or has no whole record is replaced by a new one. Only this needs space on the disk.
    `durable`: whether the record survives a power cut.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        publish(path, _new_file(value), replace=True, durable=durable)
        return
    except OSError as error:
        raise StorageError(_unusable(path, error.strerror or str(error))) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(_unusable(path, "it is not a regular file"))
        raw = os.pread(fd, min(status.st_size, _MAX_SEALED), 0)
        number, place, _ = max(_whole(raw), default=(-1, 0, None), key=lambda entry: entry[0])
        record, slot = seal({_NUMBER: number + 1, **value}), len(raw) // 2
        if number < 0 or len(record) > slot:
            publish(path, _new_file(value, number=number + 1), replace=True, durable=durable)
            return
        place = 1 - place
        if os.pwrite(fd, record.ljust(slot), place * slot) != slot:
            raise OSError("fewer bytes were written than asked for")
        if durable:
            try:
                os.fsync(fd)
            except OSError:
                # The kernel may have dropped the bytes and count them as written. No reader may take this record for one on the disk: the next
                # attempt would overwrite the other record. With this slot blank, the next attempt writes this slot again.
                with contextlib.suppress(OSError):
                    os.pwrite(fd, b" " * slot, place * slot)
                raise
    except OSError as error:
        raise StorageError(_unusable(path, error.strerror or str(error))) from error
    finally:
        os.close(fd)


def _new_file(value: Mapping[str, Any], size: int = _BLOCK, *, number: int = 0) -> bytes:
    record = seal({_NUMBER: number, **value})
    slot = -(-max(size, len(record)) // _BLOCK) * _BLOCK
    return record.ljust(2 * slot)


def _whole(raw: bytes) -> list[tuple[int, int, dict[str, Any]]]:
    """(number, slot, value) of each record that is whole."""
    found = []
    slot = len(raw) // 2
    for place in (0, 1):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            value = _unsealed(raw[place * slot : (place + 1) * slot].rstrip(b" "))
            found.append((int(value.pop(_NUMBER)), place, value))
    return found


def _unusable(path: Path, reason: str) -> str:
    return f"{path} cannot be used: {reason}. Free space, or remove what lies there, and run again"
