"""One file of a spool: rows of every field, and the header that says which rows they are.

    write_batch_file(path, header, arrays)     published whole or not at all, with checksums of its rows
    file = open_batch_file(path)               mapped; the header is checked, the rows are not yet
    file.check(3, None, 8)                     checks rows 3, 11, 19, … and reads no others
    file.arrays["input_ids"][3::8]             the rows of rank 3 of 8

The format is safetensors, so any tool opens a file. The bytes follow from the content alone: they hold no clock, host or process, so
every provider that makes a file makes the same bytes. A row of 8 KiB or more has a checksum of its own; smaller rows share one in groups of
that size.

Files in the `.pt` layout (`torch.save` of metadata and tensors) are read too: weights only, mapped. Every size is compared with the size of
the file before a tensor is used, because a .pt of 1.4 kB can describe 2**40 elements. Those that headrace writes have checksums as well.
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from headrace.batch import DTYPES, OFFSETS, BatchSpec, numpy_dtype
from headrace.errors import DataError, FileCorrupt
from headrace.files import open_container, publish, unreadable, write_container

if TYPE_CHECKING:
    import torch

SEGMENT_BYTES = 8 << 10
_KIND, _VERSION = "headrace-spool", 1
_MAX_COUNT = 1 << 62
_MAX_PICKLE = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """Which rows of which spool a file holds."""

    split: str
    seq: int
    schema: BatchSpec
    rows: int
    first: int
    """Index of the first row within its part: the number of rows in the files before it."""
    batch_size: int
    job: str = ""
    """Fingerprint of the spool that the file was made for."""
    part: int = 0
    parts: int = 1
    last: bool = False
    """Whether the part ends with this file."""
    cursor: Mapping[str, Any] | None = None
    """State of a sequential producer after this file."""
    follows: str = ""
    """Fingerprint of the producer's state before this file."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", BatchSpec(self.schema))  # a caller may pass any sequence of fields
        for name in ("seq", "rows", "first", "batch_size", "part", "parts"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < _MAX_COUNT:
                raise ValueError(f"{name} is {value!r}")
        if self.batch_size < 1 or not self.part < self.parts:
            raise ValueError(f"batch_size {self.batch_size}, part {self.part} of {self.parts}")

    @property
    def num_batches(self) -> int:
        return -(-self.rows // self.batch_size)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": _KIND, "version": _VERSION, "job": self.job, "split": self.split, "part": self.part, "parts": self.parts,
            "seq": self.seq, "first": self.first, "rows": self.rows, "batch_size": self.batch_size, "num_batches": self.num_batches,
            "last": self.last, "follows": self.follows, "cursor": self.cursor, "schema": [f.to_json() for f in self.schema],
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Any) -> FileHeader:
        if not isinstance(value, dict) or value.get("kind") != _KIND:
            raise ValueError("it is not a batch file of a spool")
        if value.get("version") != _VERSION:
            raise ValueError(f"it is version {value.get('version')!r}; this headrace reads {_VERSION}")
        return cls(
            split=str(value["split"]), seq=value["seq"], schema=BatchSpec.from_json(value["schema"]), rows=value["rows"], first=value["first"],
            batch_size=value["batch_size"], job=str(value["job"]), part=value["part"], parts=value["parts"], last=bool(value["last"]),
            cursor=value["cursor"], follows=str(value["follows"]),
        )  # fmt: skip


@dataclass(eq=False, repr=False)
class BatchFile:
    """An open file. `arrays` are views of it. A ragged field has its values and, under `<name>_offsets`, where its rows begin and end."""

    path: Path
    header: FileHeader
    arrays: Mapping[str, np.ndarray]
    _check: Callable[[str, int, int, int], None]
    """Called with (array name, start, stop, step); raises FileCorrupt if these rows fail their checksums."""

    def __post_init__(self) -> None:
        self.rows, self.last = self.header.rows, self.header.last
        self._references = self._count_references()
        """References to each array's memory before any row was handed out."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}, {self.rows:,} rows>"

    @property
    def held(self) -> bool:
        """Whether rows that were handed out as views are still in use."""
        return any(now > then for now, then in zip(self._count_references(), self._references, strict=True))

    def _count_references(self) -> tuple[int, ...]:
        owners = (a.base if isinstance(a.base, np.ndarray) else a for a in self.arrays.values())
        return tuple(map(sys.getrefcount, owners))

    def check(self, start: int = 0, stop: int | None = None, step: int = 1) -> None:
        """Check rows start, start + step, … below `stop` of every field. FileCorrupt names file, field and rows."""
        stop = self.rows if stop is None else min(stop, self.rows)
        for field in self.header.schema:
            if not field.ragged:
                self._check(field.name, start, stop, step)
                continue
            self._check(field.name + OFFSETS, 0, self.rows + 1, 1)
            offsets = self.arrays[field.name + OFFSETS]
            if offsets[0] != 0 or offsets[-1] != len(self.arrays[field.name]) or (np.diff(offsets) < 0).any():
                raise FileCorrupt(f"{self.path} is damaged: the offsets of {field.name!r} do not divide its values")
            self._check(field.name, 0, len(self.arrays[field.name]), 1)


# -------------------------------------------------------------------------------------------------- write


def write_batch_file(path: Path, header: FileHeader, arrays: Mapping[str, np.ndarray], *, durable: bool = True) -> None:
    """Publish a file; FileExistsError if there is one.

    Args:
        path: Where the file goes. Its suffix decides the format.
        header: Which rows it holds.
        arrays: The rows, by field; a ragged field has a second array `<name>_offsets`.
        durable: Whether the file survives a power cut.
    """
    header.schema.check(arrays, header.rows)
    _format_of(path).write(path, header, arrays, durable)


def _write_safetensors(path: Path, header: FileHeader, arrays: Mapping[str, np.ndarray], durable: bool) -> None:
    dtypes = {f.name: DTYPES[f.dtype] for f in header.schema}
    segments = {
        f.name: max(1, SEGMENT_BYTES // max(1, arrays[f.name].nbytes // header.rows))
        for f in header.schema
        if not f.ragged and header.rows
    }
    write_container(path, arrays, header.to_json(), dtypes=dtypes, segments=segments, durable=durable)


def _write_pt(path: Path, header: FileHeader, arrays: Mapping[str, np.ndarray], durable: bool) -> None:
    import io

    import torch

    about = header.to_json()
    sums = {
        name: xxhash.xxh3_128_hexdigest(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data)
        for name, a in arrays.items()
    }
    ours = json.dumps({"header": about, "sums": sums}, sort_keys=True)
    metadata = {
        "batch_size": header.batch_size, "num_batches": header.num_batches, "file_idx": header.seq, "split": header.split,
        "schema": about["schema"], "headrace": ours, "headrace_sum": xxhash.xxh3_128_hexdigest(ours.encode()),
    }  # fmt: skip
    kinds = {f.name: f.dtype for f in header.schema}
    tensors = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        tensors[name] = tensor.view(torch.bfloat16) if kinds.get(name) == "bfloat16" else tensor
    buffer = io.BytesIO()
    torch.save({"metadata": metadata, "tensors": tensors}, buffer)
    publish(path, [buffer.getbuffer()], durable=durable)


class RowBuffer:
    """Collects the rows of one file, batch by batch."""

    def __init__(self, schema: BatchSpec) -> None:
        self._schema, self._rows = schema, 0
        self._batches: list[dict[str, np.ndarray]] = []

    def add(self, batch: Mapping[str, Any]) -> int:
        """Append a copy of a batch; returns its number of rows. DataError if it does not fit the schema."""
        if not isinstance(batch, Mapping):
            raise DataError(
                f"a batch is {type(batch).__name__}, expected a dict with an array or tensor for every field"
            )
        arrays = {
            name: np.array(v if isinstance(v, (np.ndarray, list)) else tensor_array(v)) for name, v in batch.items()
        }
        rows = self._schema.check(arrays)
        self._batches.append(arrays)
        self._rows += rows
        return rows

    def __len__(self) -> int:
        return self._rows

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything added so far."""
        whole = {}
        for field in self._schema:
            none = np.empty((0, *field.shape), numpy_dtype(field.dtype))
            whole[field.name] = np.concatenate([none, *(batch[field.name] for batch in self._batches)])
            if field.ragged:
                name = field.name + OFFSETS
                lengths = [np.diff(batch[name]) for batch in self._batches]
                whole[name] = np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64)
        return whole


# --------------------------------------------------------------------------------------------------- read


def open_batch_file(path: Path, *, split: str = "", seq: int | None = None, private: bool = False) -> BatchFile:
    """Map a file and check its header. FileCorrupt if it is damaged, foreign, a link, a pipe or a device.

    Args:
        path: The file.
        split, seq: Split and number of a `.pt` file of another program, where they differ from its metadata.
        private: Whether the arrays may be written to. The file does not change.
    """
    return _format_of(path).open(path, split, seq, private)


def _open_safetensors(path: Path, split: str, seq: int | None, private: bool) -> BatchFile:
    container = open_container(path, verify=False, private=private, follow=False)
    try:
        header = FileHeader.from_json(container.meta)
        header.schema.check(
            {name: array for name, array in container.arrays.items() if name.isidentifier()}, header.rows
        )
        for field in header.schema:
            stored = container.dtypes[field.name]
            if stored != DTYPES[field.dtype]:
                raise ValueError(f"{field.name!r} is stored as {stored}, its schema says {field.dtype}")
    except (ValueError, KeyError, TypeError, DataError) as error:
        raise FileCorrupt(f"{path} is not a file of this spool, or is damaged: {error}") from error
    return BatchFile(path, header, container.arrays, container.check_rows)


def _open_pt(path: Path, split: str, seq: int | None, private: bool) -> BatchFile:
    size = pt_size(path)
    loaded = load_pt(path, size)
    metadata, tensors = loaded.get("metadata"), loaded.get("tensors")
    try:
        if not isinstance(metadata, dict) or not isinstance(tensors, dict):
            raise ValueError("it has no metadata and tensors")
        arrays = {str(name): pt_array(tensor, size) for name, tensor in tensors.items()}
        sums: dict[str, str] | None = None
        if "headrace" in metadata:
            text = str(metadata["headrace"])
            if xxhash.xxh3_128_hexdigest(text.encode()) != metadata.get("headrace_sum"):
                raise ValueError("its header fails its checksum")
            ours = json.loads(text)
            header, sums = FileHeader.from_json(ours["header"]), ours["sums"]
        else:
            rows = len(next(iter(arrays.values())))
            header = FileHeader(
                split=split or str(metadata["split"]), seq=int(metadata["file_idx"]) if seq is None else seq, schema=BatchSpec.from_json(metadata["schema"]),
                rows=rows, first=0, batch_size=int(metadata["batch_size"]),
            )  # fmt: skip
        header.schema.check(arrays, header.rows)
    except (ValueError, KeyError, TypeError, StopIteration, DataError) as error:
        raise FileCorrupt(
            f"{path} is not a batch file in the .pt layout (metadata and tensors), or is damaged: {error}"
        ) from error

    def check(name: str, start: int, stop: int, step: int) -> None:
        # torch keeps a CRC of every record and never looks at it; files that carry no sums of ours are checked by it.
        if sums is None:
            check_pt_records(path)
        elif xxhash.xxh3_128_hexdigest(arrays[name].reshape(-1).view(np.uint8).data) != sums.get(name):
            raise FileCorrupt(f"{path} is damaged: tensor {name!r} fails its checksum")

    return BatchFile(path, header, arrays, check)


def pt_size(path: Path) -> int:
    """Size of a regular file in bytes; FileCorrupt if it is a link or not a regular file."""
    try:
        status = os.lstat(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        raise FileCorrupt(f"{path} is {kind}; a spool holds regular files only")
    return status.st_size


def load_pt(path: Path, size: int) -> dict[str, Any]:
    """Load tensors and plain values only, mapped, after the sizes in the archive's index were compared with the file's `size` in bytes."""
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            packed = [e.filename for e in entries if e.compress_type != zipfile.ZIP_STORED]
            if packed or sum(e.file_size for e in entries) > size:
                raise ValueError("its records are packed or larger than the file")
            if any(e.file_size > _MAX_PICKLE for e in entries if e.filename.endswith(".pkl")):
                raise ValueError(f"its index has more than {_MAX_PICKLE:,} bytes")
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(loaded, dict):
            raise ValueError(f"it holds a {type(loaded).__name__}, expected a dict")
    except Exception as error:  # a damaged or hostile archive makes zipfile and torch raise anything
        sentence = f"{path} was not read: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if isinstance(error, OSError):
            raise unreadable(path, error, sentence) from error
        raise FileCorrupt(sentence) from error
    return loaded


def check_pt_records(path: Path) -> None:
    """Compare every record of an archive with its CRC."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except OSError as error:
        raise unreadable(path, error, f"{path} is damaged: {error}") from error
    except (ValueError, zipfile.BadZipFile) as error:
        raise FileCorrupt(f"{path} is damaged: {error}") from error
    if bad is not None:
        raise FileCorrupt(f"{path} is damaged: its record {bad!r} fails its checksum")


def pt_array(tensor: Any, size: int) -> np.ndarray:
    """A loaded tensor as an array; ValueError if it claims more than the file's `size` bytes."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"it holds a {type(tensor).__name__} among its tensors")
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_complex():
        raise ValueError(f"it holds a {tensor.layout} tensor of {tensor.dtype}")
    nbytes = math.prod(tensor.shape) * tensor.element_size()
    if not tensor.is_contiguous() or nbytes > size or tensor.untyped_storage().nbytes() > size:
        raise ValueError(
            f"a tensor claims {list(tensor.shape)} of {tensor.dtype}, more than the file's {size:,} bytes hold"
        )
    if tensor.ndim == 0:
        raise ValueError("it holds a tensor without rows")
    return tensor_array(tensor)


def tensor_array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as numpy; bfloat16 as uint16."""
    import torch

    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


class FileFormat(NamedTuple):
    """How files of one suffix are written and opened."""

    write: Callable[[Path, FileHeader, Mapping[str, np.ndarray], bool], None]
    open: Callable[[Path, str, int | None, bool], BatchFile]


FORMATS = {
    "safetensors": FileFormat(_write_safetensors, _open_safetensors),
    "pt": FileFormat(_write_pt, _open_pt),
}
"""Formats of batch files by suffix."""


def _format_of(path: Path) -> FileFormat:
    """The format that the suffix names; safetensors for any other suffix."""
    return FORMATS.get(path.suffix.removeprefix("."), FORMATS["safetensors"])
