"""Pure arithmetic of order: keys, permutations, cursors, digests, fingerprints.

    keys         numbers that depend on nothing but their key
    permutation  which row stands at position i of a shuffle, both ways, O(1)
    cursor       a saved position, and what it belongs to
    digest       equal digests: two runs saw the same data
    fingerprint  equal fingerprints: the same file

Reads no clock, draws no randomness, starts no thread.
"""

from headrace.order.cursor import Cursor
from headrace.order.digest import Digest, content_hash, sample_term
from headrace.order.fingerprint import chunk_hash, file_fingerprint, fingerprint_json
from headrace.order.keys import derive, draws, key, mix64, mix64_array
from headrace.order.permutation import Permutation

__all__ = [
    "Cursor",
    "Digest",
    "Permutation",
    "chunk_hash",
    "content_hash",
    "derive",
    "draws",
    "file_fingerprint",
    "fingerprint_json",
    "key",
    "mix64",
    "mix64_array",
    "sample_term",
]
