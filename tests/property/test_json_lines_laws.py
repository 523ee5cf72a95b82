"""The compiled reader of JSON lines: what msgspec reads line by line, or no answer at all."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.sources.lines import JsonLines, json_kernels

json_kernels()

words = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from('\\"/\b\f\n\r\t \u0000\u001f\u007fé漢👍\u2028')),
    max_size=40,
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False), words
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=8,
)
ways = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "separators": st.sampled_from([(",", ":"), (", ", ": "), ("\t, ", " :  ")]),
    }
)


@st.composite
def lines(draw) -> bytes:
    """One object with a text in it, and other things before and after."""
    before, after = (draw(st.dictionaries(words.filter(lambda k: k != "text"), values, max_size=2)) for _ in range(2))
    row = before | {"text": draw(words)} | after
    return json.dumps(row, **draw(ways)).encode("utf-8", "surrogatepass")


def compiled(data: bytes, rows: int) -> list[str | None] | None:
    reader = JsonLines(text_key="text", max_line_bytes=1 << 20)
    return reader._compiled(bytearray(data), rows)


def by_msgspec(data: bytes) -> list[str]:
    """Line by line, strictly; raises at the first that is not right."""
    decoder = msgspec.json.Decoder(msgspec.defstruct("Row", [("text", str)]))
    return [decoder.decode(line.removesuffix(b"\r")).text for line in data.removesuffix(b"\n").split(b"\n")]


@given(rows=st.lists(lines(), min_size=1, max_size=6), end=st.sampled_from([b"\n", b"\r\n"]), ended=st.booleans())
def test_what_is_written_by_json_is_read(rows, end, ended):
    data = end.join(rows) + (end if ended else b"")
    expected = [json.loads(row)["text"] for row in rows]
    keys = [key for row in rows for key in json.loads(row)]
    found = compiled(data, len(rows))
    if any(json.dumps(key)[1:-1] != key for key in keys) or b"\\ud" in data.lower():
        assert found in (None, expected)  # an escape in a key, or perhaps half a pair: left to msgspec
    else:
        assert found == expected
    assert compiled(data, len(rows) + 1) is None
    if len(rows) > 1:
        assert compiled(data, len(rows) - 1) is None


@settings(max_examples=400)
@given(
    rows=st.lists(lines(), min_size=1, max_size=3),
    edits=st.lists(
        st.tuples(
            st.integers(0, 10**6),
            st.sampled_from([b"", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b" ", b"\n", b"\r", b"0", b"-", b".", b"e", b"\x00", b"\xff", b"\xc3", b"\\u", b"\\ud83d", b"t", b'"text":"x",']),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=3,
    ),
)  # fmt: skip
def test_damaged_lines_are_read_as_msgspec_reads_them_or_not_at_all(rows, edits):
    data = b"\n".join(rows) + b"\n"
    for place, what, gone in edits:
        at = place % (len(data) + 1)
        data = data[:at] + what + data[at + gone :]
    count = data.count(b"\n") + (not data.endswith(b"\n"))
    found = compiled(data, count)
    if found is not None:
        assert found == by_msgspec(data)


@pytest.mark.parametrize(
    "line",
    [
        b'{"text":"a","x":"\x01"}', b'{"text":"a","x":"\\ud800"}', b'{"text":"a","x":01}', b'{"text":"a","x":tru}', b'{"text":"a","x":[1,]}',
        b'{"text":"a",}', b'{"text":"a","x":"\\q"}', b'{"text":"a","x":-}', b'{"text":"a","x":1.}', b'{"text":"a","x":.5}', b'{"text":"a","x":NaN}',
        b'{"text":"a","x":1e}', b'{"text":"a","x":"\\u00zz"}', b'{"text":"a","x":{"y"}}', b'{"text":"a","x":{]}', b'{"text":"a" "x":1}', b'{"text":7}',
        b'{"text":"a","x":{"y":1]}', b'{"text":"a","x":[1}}', b'{"text":"\\udc00\\udc00"}', b'{"text":"a","x":"\\udc00\\udc00"}', b'{"text":"\\ud800\\ue000"}', b'{"other":"a"}', b'{"text":"a\xff"}', b'{"text":"a\xed\xa0\x80"}', b'{"text":"\\udc00\\ud800"}', b'["text","a"]', b'{"text":"a"}}', b'{"text":"a"',
        b'{"text":"a', b'{"text":"a\\', b'{"text":"a\\u12', b'{"text":', b'{"text"', b"{", b"{}", b"", b"\r",
    ],
)  # fmt: skip
def test_a_line_that_is_not_right_gets_no_answer(line):
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        by_msgspec(line)
    good = b'{"text":"good"}'
    for data, rows in ((line, 1), (good + b"\n" + line, 2), (line + b"\n" + good, 2)):
        assert compiled(data, rows) is None


@pytest.mark.parametrize(
    "line", [b'{"te\\u0078t":"a"}', b'{"text":"a","text":"b"}', b' {"text":"a"}', b'{"text":"a"} ', b'{"text":"a","x":' + b"[" * 62 + b"]" * 62 + b"}"]
)  # fmt: skip
def test_a_form_that_it_does_not_know_is_left_to_msgspec(line):
    assert compiled(line, 1) is None
    texts, bad = JsonLines(text_key="text", max_line_bytes=1 << 20)._decode_each(None, bytearray(line), 1)  # type: ignore[arg-type]
    assert texts == by_msgspec(line)
    assert not bad


@given(text=words, length=st.integers(0, 40))
@example(text="\\" * 9, length=7)
def test_nothing_beyond_the_end_counts_and_nothing_is_written_beyond_what_was_promised(text, length):
    """A line that lies at the end of its memory, and a place to write that is as long as was promised."""
    line = json.dumps({"pad": "x" * length, "text": text}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    memory = np.full(len(line) + 64, 0x22, np.uint8)
    memory[: len(line)] = np.frombuffer(line, np.uint8)
    into, offsets, key = np.full(len(line) + 64, 7, np.uint8), np.empty(2, np.int64), np.frombuffer(b"text", np.uint8)
    for size in range(len(line) + 1):
        whole = json_kernels().json_texts(memory.ctypes.data, size, key.ctypes.data, 4, into.ctypes.data, offsets)
        assert bool(whole) == (size == len(line))
        assert (into[size + 8 :] == 7).all()
    assert into[: offsets[1]].tobytes().decode() == text
