"""A key is found on the line where it was written."""

from __future__ import annotations

import pytest

from headrace.runs.config.toml_positions import TomlError, parse_toml

TEXT = '''\
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
# lr = 3
lr = 1979-05-27 07:32:00
[[source]]
spec = "a#b"
[source.options]
deep = {}
[[source]]
  weight = 0.5
'''


def test_a_key_that_begins_a_line_has_that_line():
    assert parse_toml(TEXT)[1] == {
        ("top",): 1,
        ("quoted.A",): 2, ("quoted.A", "inner"): 2,
        ("literal",): 5,
        ("a",): 7, ("a", "b"): 7, ("a", "b", "c"): 7,
        ("train",): 12, ("train", "lr"): 14,
        ("source",): 15, ("source", 0): 15, ("source", 0, "spec"): 16,
        ("source", 0, "options"): 17, ("source", 0, "options", "deep"): 18,
        ("source", 1): 19, ("source", 1, "weight"): 20,
    }  # fmt: skip


def test_line_ends_of_windows_count_as_one():
    unix, windows = parse_toml(TEXT), parse_toml(TEXT.replace("\n", "\r\n"))
    assert windows == unix


def test_an_error_at_the_end_of_the_text_has_its_last_line():
    with pytest.raises(TomlError) as caught:
        parse_toml("a = 1\nb = [1,\n\n")
    assert caught.value.line in (2, 3, 4)
    with pytest.raises(TomlError) as caught:
        parse_toml('a = 1\nb = "')
    assert caught.value.line == 2
