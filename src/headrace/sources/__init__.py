"""Sources: the files, chunks and rows of a source, and the text of a chunk's rows.

    spec       what to read                                 Source("jsonl:web/*.jsonl", weight=0.7)
    matching   the files that a spec names                  headrace.formats.object_store (s3, gs, az, http), hub (hf)
    access     the bytes of those files                     headrace.formats: files, objects, compressed shards
    text_formats  the reader of each scheme                 headrace.formats.lines (txt, jsonl), text_parquet, text_arrow;
                                                            rows (several columns of any)
    manifest   files, chunks, rows, fingerprints; cached
    records    hashes of the bytes that were read first
    samples    built-in corpora
    opened     open_source(source).read(chunk) -> texts

Files of cells, which have columns instead of one text:

    stream_files   the files, their rows and modalities
    cells          rows [a, b) of one file                  headrace.formats.rows, or a registered format
    cell_readers   the files of a pool, kept open or read by worker processes
    cell_hashes    hashes of the cells that were read first

Nothing here knows an order: a plan takes the chunk table and decides what comes next.
"""

from headrace.sources.manifest import FileEntry, Manifest
from headrace.sources.opened import OpenSource, cache_folder, open_source
from headrace.sources.rows import RowShape
from headrace.sources.spec import Source

__all__ = [
    "FileEntry",
    "Manifest",
    "OpenSource",
    "RowShape",
    "Source",
    "cache_folder",
    "open_source",
]
