"""A Source says what is wanted, and refuses what cannot be meant."""

import pickle
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.sources import Source


def test_a_one_line_spec_equals_the_same_fields():
    line = "jsonl:web/*.jsonl?weight=0.3&text_key=content&max_rows=10&on_bad=skip&allow_symlinks=true&name=w"
    assert Source.parse(line) == Source(
        "jsonl:web/*.jsonl", weight=0.3, text_key="content", max_rows=10, on_bad="skip", allow_symlinks=True, name="w"
    )


def test_a_question_mark_without_options_stays_a_glob():
    assert Source.parse("jsonl:part-?.jsonl").place == "part-?.jsonl"
    assert Source.parse("jsonl:part-?.jsonl?weight=2").place == "part-?.jsonl"


def test_option_values_are_unquoted():
    assert Source.parse("jsonl:a?text_key=two%20words").text_key == "two words"


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("jsonl:web/*.jsonl", "web"),
        ("jsonl:data/web/", "web"),
        ("parquet:code/**/*.parquet", "code"),
        ("txt:books.txt", "books"),
        ("txt:books.txt.gz", "books"),
        ("jsonl:s3://bucket/web/*.jsonl.zst", "web"),
        ("hf:org/name", "name"),
        ("jsonl:*.jsonl", "jsonl"),
        ("jsonl:v1.5/", "v1.5"),
        ("jsonl:two words/", "two-words"),
        ("txt:/", "txt"),
        ("sample:prose", "prose"),
    ],
)
def test_a_name_is_derived_from_the_last_literal_part_of_the_spec(spec, name):
    assert Source(spec).name == name


def test_a_misspelt_option_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown option 'wieght', did you mean 'weight'\? Options are weight, name"):
        Source.parse("jsonl:web?wieght=0.3")


def test_every_wrong_option_of_a_line_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        Source.parse("jsonl:web?wieght=0.3&max_rows=ten&weight=1&weight=2&allow_symlinks=yes&name=")
    assert len(caught.value.problems) == 5


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -0.1, -1])
def test_a_weight_that_is_no_share_is_refused(weight):
    with pytest.raises(ConfigError, match="weight must be finite and at least 0"):
        Source("jsonl:web", weight=weight)


def test_a_weight_of_zero_is_accepted():
    assert Source("jsonl:web", weight=0).weight == 0.0


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("jsnol:web", r"unknown scheme 'jsnol', did you mean 'jsonl'\? Schemes are jsonl: .*txt: .*parquet: "),
        ("web/*.jsonl", "has no scheme, expected scheme:place"),
        ("s3://bucket/x.parquet", "does not say what the files hold; write parquet:s3://bucket/x.parquet"),
        ("https://host/x.jsonl.gz", "does not say what the files hold; write jsonl:https://host/x.jsonl.gz"),
        ("jsonl:s33://bucket/x.jsonl", r"unknown store 's33://', did you mean 's3://'\? There are s3://, gs://"),
        ("jsonl:s3://", "names no place in the store, expected s3://bucket/path"),
        ("hf:s3://bucket/x", "hf: reads no object store; name the files, such as 'parquet:s3://bucket/x'"),
        ("jsonl:", "names no place"),
        ("jsonl:a\0b", "names no place"),
        ("jsonl:web?weight=.3", r"read by Source.parse\(...\)"),
        ("sample:pose", "there is no sample 'pose', did you mean 'prose'"),
    ],
)
def test_a_spec_that_names_nothing_readable_is_refused(spec, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Source(spec)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_rows": -1}, "max_rows must be a whole number of at least 0, got -1"),
        ({"max_epochs": 0}, "max_epochs must be a whole number of at least 1, got 0"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number"),
        ({"on_bad": "ignore"}, "on_bad must be 'fail' or 'skip', got 'ignore'"),
        ({"text_key": "a..b"}, "text_key must be a field name"),
        ({"name": "a/b"}, "name must be 1 to 80 letters"),
        ({"weight": "1"}, "weight must be a number, got '1'"),
        ({"allow_symlinks": 1}, "allow_symlinks must be true or false"),
        ({"split": "train"}, "split means something for hf: and txt: only; leave it out"),
        ({"config": "en"}, "config means something for hf: only; leave it out"),
        ({"cache": ""}, "cache must be a text, got ''"),
    ],
)
def test_a_field_out_of_its_range_is_refused(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Source("jsonl:web", **fields)


def test_all_wrong_fields_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        Source("jsnol:web", weight=-1, max_rows=-1, on_bad="no")  # type: ignore[arg-type]
    assert len(caught.value.problems) == 4


def test_a_sample_with_another_text_key_is_refused():
    with pytest.raises(ConfigError, match="the samples hold their text under 'text'"):
        Source("sample:prose", text_key="content")


@pytest.mark.parametrize(
    ("spec", "fields", "sentence"),
    [
        ("txt:a.txt", {"text_key": "body"}, "a txt file has no fields; leave text_key out, got 'body'"),
        ("jsonl:s3://b/x", {"allow_symlinks": True}, "allow_symlinks is about folders on disk; leave it out here"),
        ("sample:prose", {"allow_symlinks": True}, "allow_symlinks is about folders on disk"),
        ("sample:prose", {"split": "test"}, "split means something for hf: and txt: only"),
        ("hf:org/name", {"split": 7}, "split must be a text, got 7"),
    ],
)
def test_an_option_that_says_nothing_for_a_scheme_is_refused_by_name(spec, fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Source(spec, **fields)


def test_the_options_of_a_hub_dataset_stand_in_one_line_too():
    line = "hf:org/name?split=validation&config=en&text_key=body&cache=/scratch/kept"
    assert Source.parse(line) == Source(
        "hf:org/name", split="validation", config="en", text_key="body", cache="/scratch/kept"
    )


def test_a_file_url_is_a_path():
    assert Source("jsonl:file:///data/web/*.jsonl").place == "/data/web/*.jsonl"


def test_a_source_survives_pickling():
    source = Source("jsonl:web", weight=2, name="w")
    assert pickle.loads(pickle.dumps(source)) == source  # noqa: S301


@pytest.mark.parametrize(
    ("path", "spec"),
    [("web.jsonl", "jsonl:web.jsonl"), ("a/b.txt.gz", "txt:a/b.txt.gz"), ("code/*.parquet", "parquet:code/*.parquet")],
)
def test_a_path_object_is_a_source_whose_suffix_says_what_it_holds(path, spec):
    source = Source(Path(path), cache=Path("kept"))
    assert (source.spec, source.cache) == (spec, "kept")


def test_a_path_object_that_does_not_say_what_it_holds_is_refused():
    with pytest.raises(ConfigError, match=r"write the scheme before it, such as 'jsonl:books'"):
        Source(Path("books"))


def test_schemes_are_listed_in_one_order():
    lists = set()
    for word in ("txtt", "parquett", "zzz"):
        with pytest.raises(ConfigError) as refused:
            Source(f"{word}:web")
        lists.add(str(refused.value).partition("Schemes are")[2])
    assert len(lists) == 1
