"""JSON lines, a chunk at a time: what msgspec reads line by line, or no answer at all."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.formats.lines import JsonLines

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


def at_once(data: bytes, rows: int) -> list[str | None] | None:
    return JsonLines(text_key="text")._decode_all(bytearray(data), rows)


def by_msgspec(data: bytes) -> list[str]:
    """Line by line, strictly; raises at the first that is not right."""
    decoder = msgspec.json.Decoder(msgspec.defstruct("Row", [("text", str)]))
    return [decoder.decode(line.removesuffix(b"\r")).text for line in data.removesuffix(b"\n").split(b"\n")]


@given(rows=st.lists(lines(), min_size=1, max_size=6), end=st.sampled_from([b"\n", b"\r\n"]), ended=st.booleans())
def test_what_is_written_by_json_is_read(rows, end, ended):
    data = end.join(rows) + (end if ended else b"")
    expected = [json.loads(row)["text"] for row in rows]
    assert at_once(data, len(rows)) == expected
    assert at_once(data, len(rows) + 1) is None
    if len(rows) > 1:
        assert at_once(data, len(rows) - 1) is None


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
    found = at_once(data, count)
    if found is not None:
        assert found == by_msgspec(data)


@pytest.mark.parametrize(
    "line",
    [
        b'{"text":"a","x":"\x01"}', b'{"text":"a","x":"\\ud800"}', b'{"text":"a","x":01}', b'{"text":"a","x":tru}', b'{"text":"a","x":[1,]}',
        b'{"text":"a",}', b'{"text":"a","x":"\\q"}', b'{"text":"a","x":-}', b'{"text":"a","x":1.}', b'{"text":"a","x":.5}', b'{"text":"a","x":NaN}',
        b'{"text":"a","x":1e}', b'{"text":"a","x":"\\u00zz"}', b'{"text":"a","x":{"y"}}', b'{"text":"a","x":{]}', b'{"text":"a" "x":1}', b'{"text":7}',
        b'{"text":"a","x":{"y":1]}', b'{"text":"a","x":[1}}', b'{"text":"\\udc00\\udc00"}', b'{"text":"a","x":"\\udc00\\udc00"}', b'{"text":"\\ud800\\ue000"}', b'{"other":"a"}', b'{"text":"a\xff"}', b'{"text":"a\xed\xa0\x80"}', b'{"text":"\\udc00\\ud800"}', b'["text","a"]', b'{"text":"a"}}', b'{"text":"a"',
        b'{"text":"a', b'{"text":"a\\', b'{"text":"a\\u12', b'{"text":', b'{"text"', b"{", b"{}", b"\r",
    ],
)  # fmt: skip
def test_a_line_that_is_not_right_gets_no_answer(line):
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        by_msgspec(line)
    good = b'{"text":"good"}'
    for data, rows in ((line, 1), (good + b"\n" + line, 2), (line + b"\n" + good, 2)):
        assert at_once(data, rows) is None


@pytest.mark.parametrize(
    "line", [b'{"te\\u0078t":"a"}', b'{"text":"a","text":"b"}', b' {"text":"a"}', b'{"text":"a"} ', b'{"text":"a","x":' + b"[" * 62 + b"]" * 62 + b"}"]
)  # fmt: skip
def test_an_unusual_line_is_read_as_msgspec_reads_it(line):
    reader = JsonLines(text_key="text")
    texts, bad = reader._decode_each(None, bytearray(line), 1)  # type: ignore[arg-type]
    assert texts == by_msgspec(line)
    assert not bad
    assert at_once(line, 1) in (None, texts)
