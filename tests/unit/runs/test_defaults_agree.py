"""A default that TOML and Python both have is the same in both."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import headrace as hr
from headrace.ledger.settings import LedgerSettings
from headrace.runs.config.base import Section
from headrace.runs.config.schema import LoaderSection, SourceSection, SpoolSection, TextSection
from headrace.runs.config.streams import CellTrainSection, LedgerSection, StreamsSection
from headrace.settings import LoaderSettings, TextSettings
from headrace.spool.providers.labelled import LabelledTextProvider
from headrace.train.cells import CellTrainer

OTHERWISE = {
    (SourceSection, "name"): "TOML derives the name when it checks the table, and has no word for none",
    (LoaderSection, "global_batch_size"): "text must have one; streams have none, so Python has no default",
    (LedgerSection, "device"): "auto is where the model is, which only a run knows",
    (StreamsSection, "columns"): "TOML has no word for none",
    (LedgerSection, "mode"): "TOML has the name, Python the member",
}


def defaults(made: Callable[..., Any]) -> dict[str, Any]:
    """The default of each argument that has one."""
    arguments = inspect.signature(made).parameters.values()
    return {a.name: a.default for a in arguments if a.default is not inspect.Parameter.empty}


@pytest.mark.parametrize(
    ("section", "made", "at_least"),
    [
        (SourceSection, hr.Source, 8),
        (TextSection, TextSettings, 8),
        (LoaderSection, LoaderSettings, 3),
        (StreamsSection, hr.StreamMixingDataset, 10),
        (CellTrainSection, CellTrainer, 3),
        (LedgerSection, LedgerSettings, 5),
        (SpoolSection, LabelledTextProvider, 2),
    ],
)
def test_a_default_is_the_same_in_toml_and_in_python(
    section: type[Section], made: Callable[..., Any], at_least: int
) -> None:
    python = defaults(made)
    shared = [
        name
        for name, field in section.model_fields.items()
        if name in python and not field.is_required() and (section, name) not in OTHERWISE
    ]
    toml = {name: section.model_fields[name].get_default(call_default_factory=True) for name in shared}
    assert toml == {name: python[name] for name in shared}
    assert len(shared) >= at_least, shared
