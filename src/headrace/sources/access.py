"""Access to the bytes of a source's shards, as a ByteFile.

on disk, in a store           RawFile, StoredObject         the bytes of the file
packed (.gz, .zst)            UnpackedFile                  the text in it
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import xxhash

from headrace.errors import DataChanged
from headrace.formats.byte_file import ByteFile, RawFile
from headrace.formats.compressed import UnpackedFile, Unpacker
from headrace.formats.object_store import StoredObject
from headrace.order.fingerprint import SAMPLED_BLOCK, sampled_offsets
from headrace.sources.matching import Found, FoundFile


@dataclass(frozen=True, kw_only=True)
class Access:
    """Opens the files of a source. Every method may be called from many threads."""

    found: Found
    packings: tuple[str, ...]
    unpacker: Unpacker

    @cached_property
    def root(self) -> str:
        return str(self.found.root)

    @cached_property
    def _versions(self) -> dict[str, int | str]:
        return {file.path: file.version for file in self.found.files}

    @property
    def vouched_for(self) -> bool:
        """Whether every file is an object with an entity tag, which says by itself when the object changed."""
        return self.found.store is not None and all(str(v).endswith('"') for v in self._versions.values())

    def open(self, path: str, size: int, fingerprint: str) -> ByteFile:
        """Return what formats read: the text of a packed file, the bytes of any other."""
        file = self.bare(path, size)
        if not self.is_packed(path):
            return file
        return UnpackedFile(self.unpacker, file, identity=(self.root, path, size, fingerprint, self._versions[path]))

    def is_packed(self, path: str) -> bool:
        return path.endswith(self.packings)

    def bare(self, path: str, size: int) -> ByteFile:
        """Return the bytes of a file, not unpacked."""
        store = self.found.store
        if store is None:
            return RawFile(f"{self.root}/{path}", follow=self.found.follow, size=size)
        key = f"{self.root}/{path}".removeprefix(f"{store.root}/")
        return StoredObject(store, key, size=size, tag=str(self._versions[path]))

    def fingerprint(self, file: FoundFile) -> str:
        """Return 16 hex digits over the size and sampled blocks. A file on disk and its copy in a store have the same."""
        hasher = xxhash.xxh3_64()
        hasher.update(file.size.to_bytes(8, "little"))
        with self.bare(file.path, file.size) as found:
            for start in sampled_offsets(file.size):
                hasher.update(found.read(start, min(SAMPLED_BLOCK, file.size - start)))
        return hasher.hexdigest()

    def require_unchanged(self, file: FoundFile) -> None:
        """Refuse a file that was written to since it was listed. A store refuses by itself, at every read."""
        if self.found.store is not None:
            return
        with self.bare(file.path, file.size) as now:
            if now.version != file.version:
                raise DataChanged(
                    f"{now.path} was written to while its rows were counted. Wait until it is complete and run again."
                )
