"""A key is found on the line where it was written, however it was written."""

from __future__ import annotations

import pytest

from headrace.runs.config.toml_positions import TomlError, parse_toml

DOCUMENT = '''\
top = 1                       # a comment with = and [brackets]
"quoted.\\u0041" . inner = """
not = a key
"""
'literal' = \'\'\'
[not.a.table]''\'\'\'
a.b.c = [ 1, # ]
    "]", {x = 1, y.z = [2,
    3]},
]

[train]
lr = 1979-05-27 07:32:00
[[source]]
spec = "a#b"
[source.options]
deep = {}
[[source]]
  weight = 0.5
'''


def test_every_way_to_write_a_key_has_its_line():
    assert parse_toml(DOCUMENT).lines == {
        ("top",): 1,
        ("quoted.A",): 2, ("quoted.A", "inner"): 2,
        ("literal",): 5,
        ("a",): 7, ("a", "b"): 7, ("a", "b", "c"): 7,
        ("a", "b", "c", 0): 7, ("a", "b", "c", 1): 8, ("a", "b", "c", 2): 8,
        ("a", "b", "c", 2, "x"): 8, ("a", "b", "c", 2, "y"): 8, ("a", "b", "c", 2, "y", "z"): 8,
        ("a", "b", "c", 2, "y", "z", 0): 8, ("a", "b", "c", 2, "y", "z", 1): 9,
        ("train",): 12, ("train", "lr"): 13,
        ("source",): 14, ("source", 0): 14, ("source", 0, "spec"): 15,
        ("source", 0, "options"): 16, ("source", 0, "options", "deep"): 17,
        ("source", 1): 18, ("source", 1, "weight"): 19,
    }  # fmt: skip


def test_line_ends_of_windows_count_as_one():
    unix, windows = parse_toml(DOCUMENT), parse_toml(DOCUMENT.replace("\n", "\r\n"))
    assert windows == unix


def test_an_error_at_the_end_of_the_document_has_its_last_line():
    with pytest.raises(TomlError) as caught:
        parse_toml("a = 1\nb = [1,\n\n")
    assert caught.value.line in (2, 3, 4)
    with pytest.raises(TomlError) as caught:
        parse_toml('a = 1\nb = "')
    assert caught.value.line == 2
