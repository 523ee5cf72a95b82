"""Errors between processes."""

from __future__ import annotations

import json

import pytest

from headrace import errors
from headrace.runtime.wire_errors import decode_error, encode_error


def sent(error, **options):
    return decode_error(json.loads(json.dumps(encode_error(error))), **options)


CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.HeadraceError)]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_of_ours_arrives_as_its_own_class(kind):
    error = (
        kind("cause", "a sentence") if kind in (errors.RolloutRefused, errors.EnvironmentFailed) else kind("a sentence")
    )
    received = sent(error, prefix="rank 3: ")
    assert type(received) is kind
    assert str(received) == "rank 3: a sentence"
    assert getattr(received, "cause", "cause") == "cause"


def test_a_foreign_error_arrives_under_its_name_as_the_class_asked_for():
    received = sent(ValueError("seven"), otherwise=RuntimeError, prefix="worker 1: ")
    assert type(received) is RuntimeError
    assert str(received) == "worker 1: a worker process failed: ValueError: seven"


@pytest.mark.parametrize(
    "wire",
    [
        {"kind": "nearest", "sentence": "a function of the module"},
        {"kind": "Mapping", "sentence": "a class that the module imports"},
        {"kind": "__builtins__", "sentence": "a dict"},
        {"kind": ["DataError"], "sentence": {}},
        {"sentence": "no kind"},
        {},
    ],
)
def test_a_name_that_is_no_error_class_is_never_called(wire):
    assert type(decode_error(wire)) is errors.DataError


def test_all_problems_of_a_config_error_arrive():
    assert str(sent(errors.ConfigError(["a is wrong", "b is wrong"]))) == "a is wrong\nb is wrong"
