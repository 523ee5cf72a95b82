"""Writing and reading of files: a file appears whole, durable and checked, or not at all.

    publish(path, parts)            temp → write all → fsync → link (exclusive) → unlink temp → fsync of the folder
    write_container(path, arrays, meta)   a safetensors file with checksums and a JSON value
    open_container(path)            mapped and verified before a value is handed out
    quarantine(path, reason)        moves a bad file into a quarantine folder, with the reason beside it
    open_inside(folder, name)       a file that is appended to or locked; no symbolic link below the folder is followed
    open_regular(path)              a file of unknown origin: only a regular file is opened
    read_regular(path, most)        all bytes of such a file, at most `most` of them
    read_json(path, most)           the JSON value in such a file

A process that dies at any point leaves either nothing, or a name starting with `.tmp-`, or the finished file. A failed
fsync is never retried on the same file, because the kernel may have dropped the pages and report success the second
time: the error is raised, and the next attempt is a new temp file.

Containers are ordinary safetensors, so any tool reads them. `__metadata__["headrace"]` adds a checksum of every tensor, one of the header
itself (with its own digits blanked), and a JSON value of the caller's. Neither safetensors nor torch.load notices a flipped bit; here
every flipped bit is found before use.

A tensor may be summed in segments of rows as well as a whole (`segments`): then a reader who needs some rows checks those
and touches no other (`Container.check_rows`). The sums of the segments are a tensor of their own, summed as a whole.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import re
import secrets
import stat
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import xxhash

from headrace.errors import FileCorrupt, StorageError

TEMP_PREFIX = ".tmp-"
SEGMENT_SUMS = "!sums"
"""Ends the name of the tensor that holds another tensor's sums by segment."""
_MAX_HEADER = 64 << 20
_BLANK = "0" * 32
_SUM = re.compile(r"(?:rows:([0-9]{1,15}):)?([0-9a-f]{32})")
_ALIGN = 64
_UNBROKEN = 1 << 20
"""Bytes that are summed in small pieces before other threads get their turn."""

SAFETENSORS_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
"""numpy's types by safetensors' names. BF16 appears as uint16, because numpy has no bfloat16."""
_NAME_OF = {np.dtype(v).str: k for k, v in SAFETENSORS_DTYPES.items() if k != "BF16"}


# ---------------------------------------------------------------------------------------------- publish


def publish(
    path: Path,
    parts: bytes | Iterable[bytes | memoryview],
    *,
    replace: bool = False,
    durable: bool = True,
) -> None:
    """Make `path` appear with all of `parts` in it. StorageError if that fails; then `path` is as it was.

    Args:
        path: The file. Its folder has to exist.
        parts: The content, in order.
        replace: Take the place of an existing file in one step. Otherwise a path that exists raises FileExistsError.
        durable: fsync file and folder before returning, so that the file survives a power cut. False leaves it to the kernel, which writes the
            file within about half a minute: for files that can be made again. A process that is killed takes nothing in either case.
    """
    folder = path.parent
    published = False
    temp = folder / temporary_name()
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for part in (parts,) if isinstance(parts, bytes) else parts:
                _write_all(fd, memoryview(part).cast("B"))
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        if replace:
            os.replace(temp, path)
        else:
            os.link(temp, path)
            os.unlink(temp)
        published = True
        if durable:
            sync_folder(folder)
    except FileExistsError:
        raise
    except OSError as error:
        if published:
            raise StorageError(
                f"{path} was written whole, but its folder could not be synced ({error.strerror or error}): it may be gone after a "
                "power cut. Check the disk before relying on it."
            ) from error
        raise StorageError(
            f"could not write {path}: {error.strerror or error}. Nothing was published; free space or fix the folder "
            "and run again."
        ) from error
    finally:
        if not published:
            _unlink_quietly(temp)


def temporary_name() -> str:
    """A new name for an unfinished file: `.tmp-<process id>_<start of the process>-<random>`."""
    pid = os.getpid()
    return f"{TEMP_PREFIX}{pid}_{process_start(pid)}-{secrets.token_hex(6)}"


def process_start(pid: int) -> str:
    """When a process began, in clock ticks since the machine booted; empty where the system does not say.

    With the process id it names one process: in a container every start of a program may get the same id.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def publish_json(path: Path, value: Any, *, replace: bool = False) -> None:
    """`publish` a JSON value, indented, for people and machines."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    publish(path, text.encode(), replace=replace)


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that the names in it survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sweep_temporaries(folder: Path) -> None:
    """Remove the unfinished files of dead writers. Only for a folder that has one writer."""
    for path in folder.glob(f"{TEMP_PREFIX}*"):
        _unlink_quietly(path)


def quarantine(path: Path, reason: str, folder: Path | None = None, about: Mapping[str, Any] | None = None) -> Path:
    """Move a bad file, link or folder into a quarantine, with the reason beside it; return its path there.

    Args:
        path: The file. FileNotFoundError if it is gone.
        reason: Written beside it, into `<name>.reason.json`.
        folder: The quarantine; `quarantine` beside the file unless given. A file of the same name in it is kept.
        about: More values for the reason file.
    """
    folder = folder if folder is not None else path.parent / "quarantine"
    make_inside(folder.parent, folder.name)
    for attempt in range(10_000):
        target = folder / (path.name if attempt == 0 else f"{path.name}.{attempt}")
        if os.path.lexists(target):
            continue
        path.rename(target)  # not link and unlink: the name may be a symbolic link or a folder
        values = {"file": path.name, **(about or {}), "reason": reason}
        publish_json(target.with_name(target.name + ".reason.json"), values, replace=True)
        sync_folder(path.parent)
        return target
    raise StorageError(
        f"could not quarantine {path}: {folder} holds 10,000 files of that name. Empty it and run again."
    )


def open_inside(folder: Path, name: str, flags: int = os.O_WRONLY) -> int:
    """Open the file `name` of a folder for writing and return its descriptor. A missing file is made.

    Symbolic links below `folder` are refused, so that nothing outside it is written; `folder` itself may be reached through links.
    `flags` are those of `os.open`; what a file holds is kept, unless the caller truncates it. StorageError if the file is a link or
    not a regular file, or if it cannot be opened.
    """
    path = folder / name
    *between, last = Path(name).parts
    parent = _open_folder(folder, between)
    try:
        fd = os.open(last, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=parent)
    except OSError as error:
        raise StorageError(_not_opened(path, error)) from error
    finally:
        os.close(parent)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StorageError(f"could not write {path}: it is not a regular file. Remove it and run again.")
    return fd


def make_inside(folder: Path, name: str) -> Path:
    """Make the folder `name` below another, as `open_inside` makes files: where it exists, it must not be a symbolic link."""
    os.close(_open_folder(folder, Path(name).parts))
    return folder / name


def _open_folder(folder: Path, below: Sequence[str]) -> int:
    """A descriptor of the folder that `below` leads to from `folder`; missing ones are made, links below `folder` refused."""
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for name in below:
            path /= name
            outer = fd
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=outer)
                fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=outer)
            finally:
                os.close(outer)
    except OSError as error:
        raise StorageError(_not_opened(path, error)) from error
    return fd


def _not_opened(path: Path, error: OSError) -> str:
    if path.is_symlink():
        return f"could not write {path}: it is a symbolic link, and none is followed here. Put what it leads to in its place, or remove it, and run again."
    return f"could not write {path}: {error.strerror or error}. Free space or fix the folder and run again."


def _write_all(fd: int, view: memoryview) -> None:
    while len(view):
        written = os.write(fd, view[: 1 << 30])
        if written == 0:
            raise OSError("write returned 0")
        view = view[written:]


def _unlink_quietly(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


_SYSTEM_ERRORS = {
    errno.EMFILE: "Close other files, or raise the limit of open files (ulimit -n), and run again",
    errno.ENFILE: "Close other files, or raise the machine's limit of open files (fs.file-max), and run again",
    errno.ENOMEM: "Free memory, or raise its limit, and run again",
    errno.EIO: "Check the disk and run again",
    errno.ESTALE: "Check the network file system and run again",
    errno.ETIMEDOUT: "Check the network file system and run again",
}
"""Errors that say nothing about the file: the process or the machine is short of something, or the disk fails."""


def unreadable(path: Path | str, error: OSError, sentence: str = "") -> FileCorrupt | StorageError:
    """The error for a file that could not be opened or read: StorageError where the system is at fault, else FileCorrupt.

    Args:
        path: The file.
        error: What the system answered.
        sentence: Message of the FileCorrupt; "<path> cannot be opened: <reason>" unless given.
    """
    reason = error.strerror or str(error)
    remedy = _SYSTEM_ERRORS.get(error.errno or 0)
    if remedy is not None:
        return StorageError(f"{path} could not be read: {reason}. The file may well be whole. {remedy}")
    return FileCorrupt(sentence or f"{path} cannot be opened: {reason}")


# ------------------------------------------------------------------------------------------ reading untrusted files


def open_regular(path: Path | str, *, follow: bool = False) -> int:
    """Open a regular file for reading and return its descriptor. Never blocks: a named pipe is refused, not waited for.

    `follow`: the name itself may be a symbolic link. FileNotFoundError if there is nothing, FileCorrupt if it is no regular
    file, StorageError if the system is at fault.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise FileCorrupt(
                f"{path} is a symbolic link, which is not followed here. Put the file itself there"
            ) from error
        raise unreadable(path, error) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileCorrupt(f"{path} is not a regular file. Remove it, or put the file there that belongs there")
    return fd


def read_regular(path: Path | str, most: int, *, follow: bool = False) -> bytes:
    """Return all bytes of a regular file; FileCorrupt if there are more than `most`. `follow` and errors as for `open_regular`."""
    fd = open_regular(path, follow=follow)
    try:
        size = os.fstat(fd).st_size
        if size > most:
            raise FileCorrupt(f"{path} has {size:,} bytes; at most {most:,} are read")
        with open(fd, "rb", closefd=False) as handle:
            data = handle.read(most + 1)
    except OSError as error:
        raise unreadable(path, error, f"{path} cannot be read: {error.strerror or error}") from error
    finally:
        os.close(fd)
    if len(data) > most:
        raise FileCorrupt(f"{path} grew while it was read; at most {most:,} bytes are read")
    return data


def read_json(path: Path | str, most: int = 16 << 20, *, follow: bool = False) -> Any:
    """Return the JSON value in a regular file of at most `most` bytes; FileCorrupt names the file if there is none."""
    return decode_json(read_regular(path, most, follow=follow), path)


MOST_PASSED = 1 << 28
"""Bytes of an overlong line that are skipped to find its end. Behind a longer line nothing is read."""


class Line(NamedTuple):
    """A line of an append-only file."""

    number: int
    """From 1."""
    offset: int
    text: bytes | None
    """None if the line is longer than a line may be."""


def read_lines(path: Path | str, longest: int = 1 << 20, *, follow: bool = False) -> Iterator[Line]:
    """Yield the lines of a regular file. No more than `longest` bytes are held at once; of a longer line the text is None."""
    with open(open_regular(path, follow=follow), "rb") as handle:
        number = offset = 0
        while text := handle.readline(longest + 1):
            number += 1
            begin, offset = offset, offset + len(text)
            whole = len(text) <= longest or text.endswith(b"\n")
            yield Line(number, begin, text if whole else None)
            while not whole:
                rest = handle.readline(1 << 20)
                offset += len(rest)
                if offset - begin > MOST_PASSED:
                    return
                whole = rest.endswith(b"\n") or not rest


def json_objects(lines: Iterable[bytes | None]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in some lines; lines that are torn, too long or hold another value are skipped."""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line or b"")
            if isinstance(value, dict):
                yield value


def read_jsonl(path: Path | str) -> Iterator[dict[str, Any]]:
    """Yield the objects of an append-only file; none if the file does not exist."""
    with contextlib.suppress(FileNotFoundError):
        yield from json_objects(line.text for line in read_lines(path, follow=True))


def read_tail(path: Path | str, most: int = 1 << 20) -> list[bytes]:
    """Return the last lines of a regular file: those that are whole in its last `most` bytes."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        data = os.pread(fd, most, max(size - most, 0))
    except OSError as error:
        raise unreadable(path, error, f"{path} cannot be read: {error.strerror or error}") from error
    finally:
        os.close(fd)
    return data.splitlines()[1 if size > most else 0 :]


def decode_json(raw: bytes | str, what: object) -> Any:
    """Return the value of untrusted JSON text; FileCorrupt names `what` if it is no JSON, or nested too deeply."""
    try:
        return json.loads(raw)
    except RecursionError as error:
        raise FileCorrupt(f"{what} is damaged: its JSON is nested too deeply") from error
    except (ValueError, MemoryError) as error:
        raise FileCorrupt(f"{what} is damaged: it is not JSON ({error})") from error


_DEEP_KEY = re.compile(r"""(?:(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){33}""")


def deep_key_line(text: str) -> int | None:
    """The line of the first TOML key of more than 33 parts (`a.a.a...`): tomllib pays its depth with every key below it."""
    deep = _DEEP_KEY.search(text)
    return None if deep is None else text.count("\n", 0, deep.start()) + 1


def decode_toml(text: str, what: object) -> dict[str, Any]:
    """Return the tables of untrusted TOML; FileCorrupt names `what` if it is no TOML, or nested too deeply."""
    if (line := deep_key_line(text)) is not None:
        raise FileCorrupt(f"{what}:{line}: a key of more than 33 parts, which is nested too deeply")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise FileCorrupt(f"{what}: values are nested too deeply") from error
    except ValueError as error:
        raise FileCorrupt(f"{what} is not TOML: {error}") from error


# -------------------------------------------------------------------------------------------- container


def _first_bad_segment(data: memoryview, size: int, sums: np.ndarray, segments: Sequence[int]) -> int | None:
    """The first of some segments, of `size` bytes each, whose sum is another than recorded."""
    pieces = max(1, _UNBROKEN // max(size, 1))
    for turn, segment in enumerate(segments):
        if not (turn + 1) % pieces:
            # Sums of this size keep the interpreter's lock: without a gap every 100 us a trainer waits up to 5 ms for it. A gap takes 60 us.
            time.sleep(0)
        if xxhash.xxh3_64_intdigest(data[segment * size : (segment + 1) * size]) != sums[segment]:
            return segment
    return None


@dataclass(frozen=True)
class Container:
    """An open container: read-only arrays over the mapped file, and the caller's JSON."""

    path: Path
    arrays: Mapping[str, np.ndarray]
    dtypes: Mapping[str, str]
    """safetensors dtype names; BF16 arrays appear as uint16 in `arrays`, because numpy has no bfloat16."""
    meta: Any
    sums: Mapping[str, tuple[int | None, str]]
    """Of each tensor the checksum, and before it the rows of a segment, where segments are summed in the tensor beside it too."""

    def check_rows(self, name: str, start: int = 0, stop: int | None = None, step: int = 1) -> None:
        """Check the rows start, start + step, … below stop of one tensor, and nothing else where it is summed by segments."""
        per, recorded = self.sums.get(name, (None, ""))
        data = _bytes_of(self.arrays[name])
        if per is None:
            if xxhash.xxh3_128_hexdigest(data) != recorded:
                raise FileCorrupt(f"{self.path} is damaged: tensor {name!r} fails its checksum")
            return
        array = self.arrays[name]
        sums = self.arrays.get(name + SEGMENT_SUMS)
        if sums is None or per < 1 or sums.shape != (-(-len(array) // per),) or sums.dtype != np.uint64:
            raise FileCorrupt(f"{self.path} is damaged: tensor {name!r} has no sums for its segments")
        size = per * (array.nbytes // max(len(array), 1))
        stop = len(array) if stop is None else stop
        segments = range(start // per, -(-stop // per)) if step <= per else [r // per for r in range(start, stop, step)]
        # One call for everything runs at 15 GB/s and without the interpreter's lock; segments of 16 KiB at 8.5 and with it.
        if 2 * len(segments) > len(sums) and xxhash.xxh3_128_hexdigest(data) == recorded:
            return
        bad = _first_bad_segment(data, size, sums, segments)
        if bad is not None:
            raise FileCorrupt(
                f"{self.path} is damaged: tensor {name!r} fails its checksum in rows {bad * per} to {min((bad + 1) * per, len(array)) - 1}"
            )


def write_container(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    meta: Any,
    *,
    dtypes: Mapping[str, str] | None = None,
    segments: Mapping[str, int] | None = None,
    replace: bool = False,
    durable: bool = True,
) -> None:
    """Publish named arrays and a JSON value as one checked safetensors file.

    Args:
        path, replace, durable: As for `publish`.
        arrays: By name.
        meta: A JSON value.
        dtypes: Stored dtype names of arrays that are stored as another type of the same item size (BF16 for uint16).
        segments: Rows per checksum, for arrays that are summed by segments.
    """
    publish(path, _container_parts(arrays, meta, dtypes or {}, segments or {}), replace=replace, durable=durable)


def container_bytes(arrays: Mapping[str, np.ndarray], meta: Any) -> bytes:
    """The bytes of the file that `write_container` would publish."""
    return b"".join(_container_parts(arrays, meta, {}, {}))


def read_container(data: bytes | bytearray | memoryview, what: str) -> Container:
    """Check and read the bytes of a container in place. `what` names them in errors."""
    return _container(Path(what), memoryview(data).cast("B"), verify=True)


def _container_parts(
    arrays: Mapping[str, np.ndarray], meta: Any, dtypes: Mapping[str, str], by_rows: Mapping[str, int]
) -> list[bytes | memoryview]:
    """The header of a container, and what follows it."""
    little = {name: _little_endian(array) for name, array in arrays.items()}
    summed = {name + SEGMENT_SUMS: _segment_sums(little[name], rows) for name, rows in by_rows.items()}
    little |= summed
    # Large items first keeps every tensor aligned to its item size; sums of segments stand before all.
    names = sorted(little, key=lambda n: (n not in summed, -little[n].dtype.itemsize, n))
    entries: dict[str, Any] = {}
    sums: dict[str, str] = {}
    offset = 0
    for name in names:
        array = little[name]
        stored = dtypes.get(name) or _NAME_OF.get(array.dtype.str)
        if stored is None or np.dtype(SAFETENSORS_DTYPES[stored]).itemsize != array.dtype.itemsize:
            raise TypeError(f"array {name!r} has dtype {array.dtype}, which a container cannot hold as {stored}")
        entries[name] = {"dtype": stored, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        whole = xxhash.xxh3_128_hexdigest(_bytes_of(array))
        sums[name] = f"rows:{by_rows[name]}:{whole}" if name in by_rows else whole
        offset += array.nbytes
    ours = {"version": 1, "sums": sums, "header": _BLANK, "meta": meta}
    ours["header"] = xxhash.xxh3_128_hexdigest(_header_bytes(entries, ours))
    header = _header_bytes(entries, ours)
    return [len(header).to_bytes(8, "little"), header, *(_bytes_of(little[name]) for name in names)]


def open_container(path: Path, *, verify: bool = True, private: bool = False, follow: bool = True) -> Container:
    """Map a container and check it. FileCorrupt if it is damaged.

    Args:
        path: The file.
        verify: Check all tensors now. False leaves tensors that are summed by segments, or all if none is, to `check_rows`; the
            header is always checked.
        private: Let the arrays be written to, which changes no file.
        follow: Let `path` be a symbolic link.
    """
    return _container(path, memoryview(_mapped(path, private, follow)), verify=verify)


def _container(path: Path, buffer: memoryview, *, verify: bool) -> Container:
    """The container in these bytes, checked. `path` names it in errors."""
    size = len(buffer)
    if size < 8:
        raise FileCorrupt(f"{path} is not a container: it has {size} bytes")
    length = int.from_bytes(buffer[:8], "little")
    if length > min(size - 8, _MAX_HEADER):
        raise FileCorrupt(
            f"{path} is not a container of headrace's, or is damaged: its header claims {length:,} bytes, the file has {size:,}"
        )
    begin = 8 + length
    entries, ours = _parse_header(path, bytes(buffer[8:begin]))
    arrays: dict[str, np.ndarray] = {}
    dtypes: dict[str, str] = {}
    at = begin
    for name, dtype, shape in _layout(path, entries, size - begin):
        array = np.frombuffer(buffer, SAFETENSORS_DTYPES[dtype], math.prod(shape), at if math.prod(shape) else 0)
        arrays[name], dtypes[name] = array.reshape(shape), dtype
        at += array.nbytes
    container = Container(path, arrays, dtypes, ours["meta"], ours["sums"])
    segmented = any(name.endswith(SEGMENT_SUMS) for name in arrays)
    # Sums first: the others are compared with them.
    for name in sorted(arrays, key=lambda n: not n.endswith(SEGMENT_SUMS)):
        if verify or (segmented and container.sums.get(name, (None, ""))[0] is None):
            container.check_rows(name)
    return container


def _mapped(path: Path, private: bool = False, follow: bool = True) -> mmap.mmap | bytes:
    """The file's bytes, mapped. A FIFO or a device is refused before it can block."""
    try:
        fd = open_regular(path, follow=follow)
    except FileNotFoundError as error:
        raise unreadable(path, error) from error
    try:
        size = os.fstat(fd).st_size
        return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY if private else mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise unreadable(path, error, f"{path} cannot be mapped: {error.strerror or error}") from error
    finally:
        os.close(fd)


def _header_bytes(entries: Mapping[str, Any], ours: Mapping[str, Any]) -> bytes:
    inner = json.dumps(ours, separators=(",", ":"), allow_nan=False)
    header = json.dumps({"__metadata__": {"headrace": inner}, **entries}, separators=(",", ":")).encode()
    return header + b" " * (-(len(header) + 8) % _ALIGN)


def _parse_header(path: Path, header: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        entries = orjson.loads(header)
        # Not by orjson: it reads an integer of more than 64 bits, such as a digest, as a float.
        ours = json.loads(entries.pop("__metadata__")["headrace"])
        recorded, version = ours["header"], ours["version"]
        ours["sums"] = {name: _recorded(text) for name, text in ours["sums"].items()}
        if not isinstance(recorded, str) or len(recorded) != 32 or "meta" not in ours:
            raise ValueError("malformed metadata")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileCorrupt(
            f"{path} is damaged or was not written by headrace: {type(error).__name__} in its header"
        ) from error
    if version != 1:
        raise FileCorrupt(f"{path} is container version {version}; this headrace reads version 1")
    blanked = header.replace(f'\\"header\\":\\"{recorded}\\"'.encode(), f'\\"header\\":\\"{_BLANK}\\"'.encode(), 1)
    if xxhash.xxh3_128_hexdigest(blanked) != recorded:
        raise FileCorrupt(f"{path} is damaged: its header fails its checksum")
    return entries, ours


def _layout(path: Path, entries: Mapping[str, Any], size: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of the tensors in file order. They must tile the `size` bytes of data without a gap or an overlap."""
    found: list[tuple[str, str, tuple[int, ...]]] = []
    expected = 0
    try:
        for name, entry in sorted(entries.items(), key=lambda item: tuple(item[1]["data_offsets"])):
            start, end = entry["data_offsets"]
            shape = tuple(int(n) for n in entry["shape"])
            if type(start) is not int or type(end) is not int or start != expected or min(shape, default=0) < 0:
                raise ValueError(name)
            if end - start != math.prod(shape) * np.dtype(SAFETENSORS_DTYPES[entry["dtype"]]).itemsize:
                raise ValueError(name)
            expected = end
            found.append((name, entry["dtype"], shape))
    except (ValueError, KeyError, TypeError, OverflowError, AttributeError) as error:
        raise FileCorrupt(f"{path} is damaged: its header does not describe its data ({error})") from error
    if expected != size:
        raise FileCorrupt(f"{path} is damaged: {size:,} bytes of data, {expected:,} described")
    return found


def _recorded(text: str) -> tuple[int | None, str]:
    """Rows per segment, where there are segments, and the sum of the whole; ValueError or TypeError if it is no checksum."""
    match = _SUM.fullmatch(text)
    if match is None:
        raise ValueError("malformed checksum")
    return (int(match[1]) if match[1] else None, match[2])


def _segment_sums(array: np.ndarray, rows: int) -> np.ndarray:
    data, size = _bytes_of(array), rows * (array.nbytes // max(len(array), 1))
    return np.array(
        [xxhash.xxh3_64_intdigest(data[i * size : (i + 1) * size]) for i in range(-(-len(array) // rows))], np.uint64
    )


def _little_endian(array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)
    shape = array.shape
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(shape)


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")
