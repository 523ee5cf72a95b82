"""How fast do rows enter, next to what the reader would use instead?

    python benchmarks/sources.py

Scanning is compared with a bare read() loop over the same warm file, decoding with orjson into dicts and with msgspec
alone (which reads no file, hashes nothing and does not check that a line is one row). Times are CPU seconds, because the
machine may be shared; ratios above 1 mean that we take longer.
"""

from __future__ import annotations

import gzip
import itertools
import random
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.formats import compressed
from headrace.formats.byte_file import RawFile
from headrace.formats.lines import JsonLines, TextLines
from headrace.sources import OpenSource, Source, open_source

_MIB = 96


def best_of(call: Callable[[], object], tries: int = 5) -> float:
    times = []
    for _ in range(tries):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return min(times)


def line(what: str, ours: float, size: int, others: dict[str, float]) -> None:
    beside = "   ".join(f"{name} {size / t / 1e9:5.2f} GB/s ratio {ours / t:.2f}" for name, t in others.items())
    print(f"{what:<15} ours {size / ours / 1e9:5.2f} GB/s ({ours / size * 1e9:.2f} ns/byte)   {beside}")


def corpus(path: Path) -> list[str]:
    """Documents of 20 to 900 words, with some other fields beside the text, as crawls have them."""
    draw = random.Random(1)
    words = ["".join(draw.choices("etaoinshrdlucm", k=draw.randint(1, 11))) for _ in range(5000)] + [
        "naïve",
        "“so”",
        "\n",
    ]
    texts: list[str] = []
    written = 0
    with path.open("wb") as file:
        while written < _MIB << 20:
            text = " ".join(draw.choices(words, k=draw.randint(20, 900)))
            row = {"id": len(texts), "url": f"https://example.org/{len(texts)}", "text": text, "meta": {"score": 0.5}}
            written += file.write(orjson.dumps(row) + b"\n")
            texts.append(text)
    return texts


def read_all(source: OpenSource) -> None:
    for chunk in range(source.manifest.chunks):
        source.read(chunk)


def packed(folder: Path, data: bytes) -> None:
    """Once unpacked, a shard without restart points is read from its copy; the first opening is what that costs."""
    compressed._FRAMES_HELD = 0  # or the benchmark would read memory: a corpus is larger than what is kept
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(data, 6))
    (folder / "d.jsonl.zst").write_bytes(pa.Codec("zstd").compress(data, asbytes=True))
    for name, alone in {
        "d.jsonl.gz": lambda: zlib.decompress((folder / "d.jsonl.gz").read_bytes(), 31),
        "d.jsonl.zst": lambda: pa.Codec("zstd").decompress((folder / "d.jsonl.zst").read_bytes(), len(data)),
    }.items():
        begin = time.process_time()
        source = open_source(Source(f"jsonl:{name}"), base=folder, cache=folder / "cache", chunk_bytes=1 << 20)
        first = time.process_time() - begin
        with source:
            unpack = best_of(alone, 2)
            line(f"open {name[8:]} once", first, len(data), {"unpack alone": unpack})
            line(
                f"read {name[8:]}",
                best_of(lambda source=source: read_all(source), 3),
                len(data),
                {"unpack alone": unpack},
            )


def bare_read(path: Path) -> None:
    buffer = bytearray(1 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            continue


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "d.jsonl"
        texts = corpus(path)
        size = path.stat().st_size

        def scan(reader: TextLines) -> None:
            with RawFile(path) as file:
                reader.scan(file, reader.chunk_bytes(size))

        bare = best_of(lambda: bare_read(path))
        jsonl = JsonLines(text_key="text")
        line("scan jsonl", best_of(lambda: scan(jsonl)), size, {"read()": bare})
        line("scan txt", best_of(lambda: scan(TextLines())), size, {"read()": bare})

        data = path.read_bytes()
        alone = msgspec.json.Decoder(msgspec.defstruct("Row", [("text", str)], gc=False))
        for kib in (64, 1024):
            with open_source(
                Source("jsonl:d.jsonl"), base=folder, cache=folder / "cache", chunk_bytes=kib << 10
            ) as source:
                manifest = source.manifest
                chunks = range(min(manifest.chunks, (32 << 10) // kib))
                spans = zip(manifest.chunk_start.tolist(), manifest.chunk_end.tolist(), strict=True)
                raw = [data[start:end] for start, end in itertools.islice(spans, len(chunks))]

                def ours(source: OpenSource = source, chunks: range = chunks) -> None:
                    for chunk in chunks:
                        source.read(chunk)

                def dicts(raw: list[bytes] = raw) -> None:
                    for chunk in raw:
                        [orjson.loads(row)["text"] for row in chunk.splitlines()]

                def only(raw: list[bytes] = raw) -> None:
                    for chunk in raw:
                        [row.text for row in alone.decode_lines(chunk)]

                others = {"orjson dicts": best_of(dicts), "msgspec alone": best_of(only)}
                line(f"jsonl {kib:>4} KiB", best_of(ours), sum(map(len, raw)), others)

        packed(folder, data[: data.rfind(b"\n", 0, 24 << 20) + 1])

        rows = texts[:8000]
        pq.write_table(pa.table({"text": rows}), folder / "d.parquet", row_group_size=1000)
        with open_source(Source("parquet:d.parquet"), base=folder, cache=folder / "cache") as source:
            group_wise = best_of(lambda: [source.read(chunk) for chunk in range(source.manifest.chunks)], 3)
        whole = best_of(
            lambda: pq.read_table(folder / "d.parquet", columns=["text"], use_threads=False)["text"].to_pylist(), 3
        )
        line("read parquet", group_wise, sum(len(text.encode()) for text in rows), {"read_table": whole})

        table = pa.table({"text": rows})
        with pa.ipc.new_stream(folder / "d.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
        with open_source(Source("arrow:d.arrow"), base=folder, cache=folder / "cache") as source:
            batch_wise = best_of(lambda: read_all(source), 3)
        mapped = best_of(
            lambda: pa.ipc.open_stream(pa.memory_map(str(folder / "d.arrow"))).read_all()["text"].to_pylist(), 3
        )
        line("read arrow", batch_wise, sum(len(text.encode()) for text in rows), {"mapped": mapped})

        begin = time.process_time()
        open_source(Source("sample:code"), cache=folder / "cache").close()
        code = time.process_time() - begin
        begin = time.process_time()
        open_source(Source("sample:prose"), cache=folder / "cache").close()
        print(f"samples        code {code:.2f} s   prose {time.process_time() - begin:.2f} s, once per cache")


if __name__ == "__main__":
    main()
