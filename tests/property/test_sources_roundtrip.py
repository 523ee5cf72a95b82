"""For any texts, any split over files and any chunk size: what was written is what is read."""

import gzip
import itertools
import json
import tempfile
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import DataChanged, DataError
from headrace.formats import compressed, lines
from headrace.sources import Source, open_source
from headrace.sources.records import _parse, _record

settings.register_profile("sources", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
SOURCES = settings.get_profile("sources")

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ["", "\0", "\u2028", "a\u2029b", "\ufeff", "}\n{", "x" * 200, "\x85", "\r", "🙂"]
)
splits = st.lists(st.lists(any_text, max_size=12), min_size=1, max_size=4)
chunk_sizes = st.integers(1, 400)


def written(folder: Path, scheme: str, files: list[list[str]], *, crlf: bool, ended: bool, group: int) -> None:
    for number, texts in enumerate(files):
        path = folder / f"{number:02}.{scheme}"
        if scheme == "parquet":
            pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=group)
            continue
        end = b"\r\n" if crlf else b"\n"
        if scheme == "jsonl":
            rows = [orjson.dumps({"n": 1, "text": text}) for text in texts]
        else:
            rows = [text.encode() for text in texts]
        data = b"".join(row + end for row in rows)
        # A last line without its end is the same row, unless it is empty: then there is nothing to see.
        path.write_bytes(data.removesuffix(end) if rows and rows[-1] and not ended else data)


@pytest.mark.parametrize("scheme", ["jsonl", "txt", "parquet"])
@settings(SOURCES)
@given(files=splits, chunk_bytes=chunk_sizes, crlf=st.booleans(), ended=st.booleans(), group=st.integers(1, 7))
def test_the_chunks_in_order_hold_the_texts_in_order_and_locate_finds_each(
    scheme, files, chunk_bytes, crlf, ended, group
):
    if scheme == "txt":
        # A byte-order mark at a file's start is no text, and \r before a line's end belongs to the end.
        files = [[t.replace("\n", "").rstrip("\r").lstrip("\ufeff") for t in texts] for texts in files]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "d").mkdir()
        written(folder / "d", scheme, files, crlf=crlf, ended=ended, group=group)
        with open_source(
            Source(f"{scheme}:d", **({"split": "line"} if scheme == "txt" else {})),
            base=folder,
            cache=folder / "c",
            chunk_bytes=chunk_bytes,
        ) as source:
            manifest = source.manifest
            chunks = [source.read(chunk) for chunk in range(manifest.chunks)]
            assert [len(texts) for texts in chunks] == manifest.chunk_rows.tolist()
            assert [text for texts in chunks for text in texts] == [text for texts in files for text in texts]
            assert [file.rows for file in manifest.files] == [len(texts) for texts in files]
            assert [files[f][r] for f, r in map(manifest.locate, range(manifest.rows))] == [
                t for c in chunks for t in c
            ]


def members(data: bytes, cuts: list[int], suffix: str) -> bytes:
    """The data packed in as many members or frames as there are cuts, some of them of nothing."""
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    pack = gzip.compress if suffix == ".gz" else partial(pa.Codec("zstd").compress, asbytes=True)
    return b"".join(pack(data[a:b]) for a, b in itertools.pairwise(places))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@settings(SOURCES, max_examples=25)
@given(
    texts=st.lists(any_text, max_size=30),
    cuts=st.lists(st.integers(0, 5000), max_size=6),
    chunk_bytes=chunk_sizes,
    frame=st.integers(1, 500),
)
def test_a_packed_shard_is_its_text_wherever_it_was_cut_and_however_it_is_kept(suffix, texts, cuts, chunk_bytes, frame):
    data = b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressed, "_FRAME_TEXT", frame)
        folder = Path(name)
        (folder / f"d.jsonl{suffix}").write_bytes(members(data, cuts, suffix))
        (folder / "p.jsonl").write_bytes(data)
        one, other = (
            open_source(Source(f"jsonl:{file}"), base=folder, cache=folder / "c", chunk_bytes=chunk_bytes)
            for file in (f"d.jsonl{suffix}", "p.jsonl")
        )
        with one, other:
            np.testing.assert_array_equal(one.manifest.chunk_end, other.manifest.chunk_end)
            chunks = [one.read(chunk) for chunk in reversed(range(one.manifest.chunks))][::-1]
            assert [text for chunk in chunks for text in chunk] == texts


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.jsonl.zst", "d.arrow"])
@settings(SOURCES, max_examples=25)
@given(data=st.data())
def test_a_packed_or_arrow_file_with_any_damage_is_read_refused_with_a_sentence_or_a_hole(name, data):
    texts = ["alpha", "beta " * 40, ""] * 5
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        path = folder / name
        if name.endswith(".arrow"):
            table = pa.table({"n": range(15), "text": texts})
            make = data.draw(st.sampled_from([pa.ipc.new_file, pa.ipc.new_stream]))
            options = pa.ipc.IpcWriteOptions(compression=data.draw(st.sampled_from([None, "lz4", "zstd"])))
            with make(path, table.schema, options=options) as writer:
                writer.write_table(table, max_chunksize=7)
        else:
            lines_ = b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts)
            path.write_bytes(members(lines_, [200, 700], name[-4:].lstrip("l")))
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
        said, refused = [], []
        for on_bad in ("fail", "skip"):
            spec = Source(f"{name.split('.')[1]}:{name}", on_bad=on_bad)
            try:
                with open_source(spec, base=folder, cache=folder / "c") as source:
                    for chunk in range(source.manifest.chunks):
                        assert len(source.read(chunk)) == source.manifest.chunk_rows[chunk]
                    said += [hole["reason"] for hole in source.holes()]
            except DataError as error:
                refused.append(str(error))
    assert all(name in sentence for sentence in refused)
    assert not any("\n" in sentence for sentence in said + refused)


def reference(data: bytes) -> list[str | None]:
    """One line at a time, by the standard library."""
    texts: list[str | None] = []
    for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if line.strip(b" \t\r"):
            try:
                value = json.loads(line.decode(), parse_constant=lambda _: 1 / 0)
                text = value["text"] if isinstance(value, dict) else None
                text = text if isinstance(text, str) else None
                if text is not None:
                    text.encode()
            except (ValueError, KeyError, ZeroDivisionError):
                text = None
            texts.append(text)
    return texts


fragments = st.sampled_from(
    [b'{"text":"a"}', b'{"text":', b'"b"}', b'{"x":{}', b"}", b"{", b"\n", b"\n", b"\n", b"\r\n", b" ", b"\t", b"  \n", b'{"text":1}',
     b'{"text":"\\ud83d\\ude42"}', b'{"text":"\\ud83d"}', b'{"text":"\xff"}', b'{"text":"c"} {"text":"d"}', b"\xef\xbb\xbf", b"[]",
     b'{"a":[{"text":"no"}],"text":"e"}', b'{"text":"f","text":"g"}', b"NaN", b'{"text":"\\n"}\r', b","]
)  # fmt: skip


@settings(SOURCES)
@given(parts=st.lists(fragments, max_size=30), chunk_bytes=chunk_sizes, block=st.integers(1, 80))
def test_any_bytes_give_the_rows_a_line_by_line_reader_gives_whatever_the_size_of_chunks_and_blocks(
    parts, chunk_bytes, block
):
    data = b"".join(parts)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", block)
        folder = Path(name)
        (folder / "d.jsonl").write_bytes(data)
        source = Source("jsonl:d.jsonl", on_bad="skip")
        with open_source(source, base=folder, cache=folder / "c", chunk_bytes=chunk_bytes) as opened:
            texts = [text for chunk in range(opened.manifest.chunks) for text in opened.read(chunk)]
    assert texts == reference(data)
    assert texts.count(None) == len(opened.holes())
    rows = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    ended = rows if rows[-1] else rows[:-1]
    assert opened.manifest.blank_lines == sum(not row.strip(b" \t\r") for row in ended)
    # Greedy: a chunk is within the size or a single line, and the next line would not have fitted.
    manifest = opened.manifest
    for start, end in zip(manifest.chunk_start.tolist(), manifest.chunk_end.tolist(), strict=True):
        assert end - start <= chunk_bytes or data.find(b"\n", start, end - 1) < 0
        after = data.find(b"\n", end) + 1 or len(data)
        assert end == len(data) or after - start > chunk_bytes


@pytest.mark.parametrize("scheme", ["jsonl", "txt", "parquet"])
@settings(SOURCES, max_examples=40)
@given(data=st.data(), files=splits.filter(lambda files: any(map(any, files))), chunk_bytes=chunk_sizes)
def test_a_flipped_bit_in_any_chunk_that_was_read_is_refused(scheme, data, files, chunk_bytes):
    if scheme == "txt":
        files = [[t.replace("\n", "").rstrip("\r").lstrip("\ufeff") + "." for t in texts] for texts in files]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "d").mkdir()
        written(folder / "d", scheme, files, crlf=False, ended=True, group=3)

        def opened():
            return open_source(
                Source(f"{scheme}:d", **({"split": "line"} if scheme == "txt" else {})),
                base=folder,
                cache=folder / "c",
                records=folder / "run",
                chunk_bytes=chunk_bytes,
            )

        with opened() as source:
            manifest = source.manifest
            for chunk in range(manifest.chunks):
                source.read(chunk)
        chunk = data.draw(st.integers(0, manifest.chunks - 1))
        path = folder / "d" / manifest.files[manifest.chunk_file[chunk]].path
        start, end = int(manifest.chunk_start[chunk]), int(manifest.chunk_end[chunk])
        if scheme == "parquet":
            column = pq.read_metadata(path).row_group(start).column(0)
            start = column.dictionary_page_offset or column.data_page_offset
            end = start + column.total_compressed_size
        place = data.draw(st.integers(start, end - 1))
        raw = bytearray(path.read_bytes())
        raw[place] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(raw)
        # The open source: its manifest stands, and the chunk is refused whatever the flip did to it.
        with source, pytest.raises(DataChanged):
            source.read(chunk)
        # A new one: a flip of a line end moves the chunks, so that the fingerprint differs, or the chunk is refused.
        with opened() as again:
            if again.manifest.chunks == manifest.chunks and np.array_equal(
                again.manifest.chunk_end, manifest.chunk_end
            ):
                with pytest.raises(DataChanged):
                    again.read(chunk)
            assert again.describe_change(source.fingerprint())[0].startswith(f"{path.name} changed")


@settings(SOURCES)
@given(data=st.data())
def test_a_parquet_file_with_any_damage_is_read_or_refused_with_a_sentence(data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "d.parquet"
        texts = ["alpha", None, "beta " * 40, ""] * 5
        compression = data.draw(st.sampled_from(["none", "snappy", "zstd"]))
        pq.write_table(pa.table({"text": texts, "n": range(20)}), path, row_group_size=7, compression=compression)
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
        said = "d.parquet"
        try:
            with open_source(Source("parquet:d.parquet", on_bad="skip"), base=folder, cache=folder / "c") as source:
                for chunk in range(source.manifest.chunks):
                    texts = source.read(chunk)
                    assert len(texts) == source.manifest.chunk_rows[chunk]
                    assert all(text is None or isinstance(text, str) for text in texts)
        except DataError as error:
            said = str(error)
    assert "d.parquet" in said
    assert "\n" not in said


@settings(SOURCES)
@given(
    records=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=8),
    cuts=st.lists(st.integers(0, 43), max_size=8),
    junk=st.lists(st.binary(max_size=60).map(lambda b: b"\n" + b), max_size=4),
)
def test_torn_records_and_junk_between_whole_ones_lose_and_invent_nothing(records, cuts, junk):
    data = b""
    for index, (chunk, value) in enumerate(records):
        data += junk[index] if index < len(junk) else b""
        data += _record(chunk, value)
        data += _record(value, chunk)[: min(cuts[index], 42)] if index < len(cuts) else b""
    ids, values = _parse(data)
    assert list(zip(ids.tolist(), values.tolist(), strict=True)) == records


@settings(SOURCES)
@given(
    record=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    place=st.integers(1, 42),
    bit=st.integers(0, 7),
)
def test_a_flipped_bit_in_a_record_makes_it_unknown_never_another(record, place, bit):
    data = bytearray(_record(*record))
    data[place] ^= 1 << bit
    assert _parse(bytes(data))[0].size == 0


@given(text=any_text, keys=st.lists(st.sampled_from("abc"), min_size=1, max_size=4))
@settings(SOURCES, max_examples=30)
def test_a_dotted_key_reads_what_lies_there(text, keys):
    value: object = text
    for key in reversed(keys):
        value = {"other": [1, {}], key: value}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "d.jsonl").write_bytes(msgspec.json.encode(value) + b"\n")
        with open_source(Source("jsonl:d.jsonl", text_key=".".join(keys)), base=folder, cache=folder / "c") as source:
            assert source.read(0) == [text]
