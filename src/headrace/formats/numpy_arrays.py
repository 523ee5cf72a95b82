"""Arrays that numpy saved: .npy files, and .npz archives. Nothing is unpickled.

Arrays are read in place with pread. The arrays of a compressed archive are unpacked when their first row is read, and kept; the cap is on
all of them together.
"""

from __future__ import annotations

import io
import math
import struct
import threading
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np

from headrace.errors import DataError
from headrace.formats.byte_file import ByteFile, FileObject, Undecodable, first_line, most_decoded
from headrace.formats.rows import Column, Ragged, chosen, common_rows, read_array

_MAX_UNPACKED = 1 << 30
"""Bytes that the compressed arrays of an archive may have together: they stay in memory as long as the file is open."""
_MAX_ROW = 1 << 40
_HEAD = 1 << 16
_parsing = threading.Lock()


def _npy_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """(shape, is Fortran order, dtype, where the data begins) of a .npy; ValueError if it is none.

    numpy's parser uses `ast`, which two threads may not do at once in Python 3.11: one of them gets a SystemError. Hence the lock.
    """
    if head[:6] != b"\x93NUMPY" or len(head) < 12:
        raise ValueError(f"it begins with {head[:6]!r}. Give files that numpy.save wrote")
    stream = io.BytesIO(head)
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {version}")
    with _parsing:
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    return shape, fortran, dtype, stream.tell()


class _Array:
    """Dtype, shape and place of one array."""

    def __init__(self, path: object, what: str, head: bytes, offset: int, limit: int) -> None:
        """Args:
        path: The file.
        what: Begins errors: "is an array", "holds an array 'x'".
        head: The first 64 KiB of the array.
        offset: Its first byte in the file.
        limit: The bytes it has.
        """
        try:
            shape, fortran, dtype, began = _npy_header(head)
        except Exception as error:  # numpy hands the header to Python's own parser, which raises whatever it meets
            raise Undecodable(path, f"{what} that is no numpy array: {first_line(error)}") from error
        if dtype.hasobject:
            raise DataError(
                f"{path} cannot be read as .npy: it {what} of Python objects, which only unpickling could read. Save it with a "
                "numeric dtype."
            )
        if min(shape, default=0) < 0:
            raise Undecodable(path, f"{what} with the impossible shape {shape}")
        if not shape or (fortran and sum(n > 1 for n in shape) > 1):
            raise DataError(
                f"{path} {what} of shape {shape}{' and is stored by columns, in Fortran order' if fortran else ''}; expected "
                "one row a cell, in C order. Save np.ascontiguousarray of it."
            )
        self.dtype, self.shape = dtype, shape
        self.row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self.offset = offset + began
        self.nbytes = shape[0] * self.row_bytes
        if self.nbytes > limit - began or max(self.row_bytes, *shape) > _MAX_ROW:
            raise Undecodable(
                path, f"is cut short: it {what} that claims {self.nbytes:,} bytes, {max(limit - began, 0):,} are there"
            )

    def read(self, file: ByteFile, start: int, stop: int) -> np.ndarray:
        return read_array(file, self.offset, self.dtype, self.shape[1:], start, stop)


class NpyRows:
    """One array: the column `x`, or a column for each field of a structured one."""

    def __init__(self, file: ByteFile, columns: Sequence[str] | None = None) -> None:
        self._file = file
        self._array = _Array(file.path, "is an array", bytes(file.read(0, min(_HEAD, file.size))), 0, file.size)
        dtype, (rows, *shape) = self._array.dtype, self._array.shape
        self.rows = rows
        self.schema: dict[str, Column] = {}
        for name in chosen(file.path, dtype.names or ("x",), columns):
            inner = dtype[name] if dtype.names else dtype
            self.schema[name] = Column(dtype=inner.base, shape=(*shape, *inner.shape), rows=rows)

    def read(self, start: int, stop: int, columns: Sequence[str]) -> dict[str, np.ndarray | Ragged]:
        array = self._array.read(self._file, start, stop)
        return {name: np.ascontiguousarray(array[name]) if array.dtype.names else array for name in columns}


class NpzRows:
    """An archive of arrays. Stored ones are read in place, deflated ones are unpacked under the cap."""

    def __init__(self, file: ByteFile, columns: Sequence[str] | None = None) -> None:
        self._file = file
        self._arrays: dict[str, _Array] = {}
        self._deflated: dict[str, zipfile.ZipInfo] = {}
        self._unpacked: dict[str, np.ndarray] = {}
        self._archive = _archive(file)
        members = {i.filename.removesuffix(".npy"): i for i in self._archive.infolist() if i.filename.endswith(".npy")}
        if not members:
            raise DataError(f"{file.path} holds no array; expected names such as x and group_id")
        names = chosen(file.path, list(members), columns)
        total = 0
        for name in names:
            info = members[name]
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
                raise Undecodable(
                    file.path, f"has an array {name!r} that is encrypted or packed in another way than numpy does"
                )
            head = self._unpack(info, min(_HEAD, info.file_size))
            if info.compress_type == zipfile.ZIP_STORED:
                offset = info.header_offset + 30 + sum(struct.unpack_from("<2H", file.read(info.header_offset, 30), 26))
                limit = min(info.file_size, file.size - offset)
            else:
                self._deflated[name] = info
                offset, limit = 0, info.file_size
                total += info.file_size
            most = min(_MAX_UNPACKED, most_decoded(file.size))
            if total > most:
                raise Undecodable(
                    file.path,
                    f"has too much to unpack: with array {name!r} it unpacks to {total:,} bytes, more than {most:,}",
                    "Save it uncompressed",
                )
            self._arrays[name] = _Array(file.path, f"holds an array {name!r}", head, offset, limit)
        self.schema = {n: Column(dtype=a.dtype, shape=a.shape[1:], rows=a.shape[0]) for n, a in self._arrays.items()}

    def _unpack(self, info: zipfile.ZipInfo, size: int) -> bytes:
        try:
            with self._archive.open(info) as packed:
                return packed.read(size)
        except _ZIP_ERRORS as error:
            raise Undecodable(
                self._file.path, f"array {info.filename!r} cannot be unpacked: {first_line(error)}"
            ) from error

    @property
    def rows(self) -> int:
        return common_rows(self._file.path, self.schema)

    def read(self, start: int, stop: int, columns: Sequence[str]) -> dict[str, np.ndarray | Ragged]:
        return {name: self._read(name, start, stop) for name in columns}

    def _read(self, name: str, start: int, stop: int) -> np.ndarray:
        array = self._arrays[name]
        if name not in self._deflated:
            return array.read(self._file, start, stop)
        if name not in self._unpacked:
            data = self._unpack(self._deflated[name], self._deflated[name].file_size + 1)
            if len(data) < array.offset + array.nbytes:
                raise Undecodable(self._file.path, f"is cut short: array {name!r} unpacks to {len(data):,} bytes")
            values = np.frombuffer(data, array.dtype, math.prod(array.shape), array.offset)
            self._unpacked[name] = values.reshape(array.shape)
        return self._unpacked[name][start:stop]


_ZIP_ERRORS = (
    zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError, OverflowError, struct.error, zlib.error,
)  # fmt: skip
"""What zipfile raises for archives that are damaged."""


def _archive(file: ByteFile) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(FileObject(lambda offset, length: bytes(file.read(offset, length)), file.size))
    except _ZIP_ERRORS as error:
        raise Undecodable(file.path, f"is no .npz archive: {first_line(error)}") from error
