import subprocess
import sys

import pytest

import headrace.metrics
from headrace.errors import ConfigError
from headrace.metrics import Meter, Metered, MetricSpec, Reduction, SpecBook, register, registered_specs


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "a b", "a/<>", "a/<Name>", "ä"])
def test_a_key_that_no_page_could_show_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="metric key"):
        MetricSpec(key, Reduction.SUM)


def test_a_healthy_range_runs_upward() -> None:
    with pytest.raises(ValueError, match=r"'a'.*lo <= hi.*\(2, 1\)"):
        MetricSpec("a", Reduction.SUM, healthy=(2, 1))


def test_a_reduction_is_a_reduction() -> None:
    with pytest.raises(TypeError, match="'a' needs a Reduction, got 'sum'"):
        MetricSpec("a", "sum")  # type: ignore[arg-type]


def test_a_family_matches_its_members_and_nothing_else() -> None:
    spec = MetricSpec("wait/<name>/seconds", Reduction.SUM)
    assert spec.is_family
    assert spec.matches("wait/spool.empty/seconds")
    assert not spec.matches("wait/seconds")
    assert not spec.matches("wait/a/b/seconds")
    assert not spec.matches("wait/a/count")


def test_a_plain_key_wins_over_a_family() -> None:
    family, plain = MetricSpec("a/<x>", Reduction.SUM), MetricSpec("a/b", Reduction.MAX)
    book = SpecBook([family, plain])
    assert book.find("a/b") is plain
    assert book.find("a/c") is family
    assert book.find("b") is None


def test_a_book_finds_what_was_added_after_a_miss() -> None:
    book = SpecBook()
    assert book.find("a/c") is None
    family = MetricSpec("a/<x>", Reduction.SUM)
    book.add(family)
    assert book.find("a/c") is family


def test_declaring_the_same_twice_is_fine_and_something_else_is_refused_naming_both() -> None:
    spec = MetricSpec("test.spec/once", Reduction.SUM, unit="rows")
    register(spec)
    register(MetricSpec("test.spec/once", Reduction.SUM, unit="rows"))
    assert registered_specs().count(spec) == 1
    with pytest.raises(
        ConfigError, match=r"'test.spec/once' is declared twice, with reduction SUM and MAX, unit 'rows' and ''"
    ):
        register(MetricSpec("test.spec/new", Reduction.SUM), MetricSpec("test.spec/once", Reduction.MAX))
    assert "test.spec/new" not in {s.key for s in registered_specs()}


def test_registered_specs_are_sorted_and_hold_the_waits() -> None:
    keys = [spec.key for spec in registered_specs()]
    assert keys == sorted(keys)
    assert {"wait/<name>/seconds", "waits/exposed/seconds", "sink/dropped", "steps_in_interval"} <= set(keys)
    assert all(spec.help for spec in registered_specs() if not spec.key.startswith("test."))


def test_a_meter_is_metered() -> None:
    assert isinstance(Meter(), Metered)
    assert not isinstance(object(), Metered)


def test_every_public_name_is_there_and_listed() -> None:
    names = headrace.metrics.__all__
    assert len(set(names)) == len(names)
    modules = {"histogram", "lag", "loss", "ranks", "reducer", "sinks", "spec", "wait"}
    public = {n for n in vars(headrace.metrics) if not n.startswith("_")} - modules
    assert public == set(names)


def test_importing_metrics_imports_no_torch() -> None:
    code = "import headrace.metrics, sys; sys.exit('torch' in sys.modules or 'wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
