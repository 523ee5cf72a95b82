"""The machine of tests/spool_machine.py for long, along other ways each time."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from spool_machine import Spool

LONG = os.environ.get("HEADRACE_FAULTS", "long") == "long"
EXAMPLES = int(os.environ.get("HEADRACE_SOAK", "400" if LONG else "4"))


@pytest.mark.timeout(7200)
def test_long_lives_of_a_spool_lose_and_repeat_nothing(capsys):
    Spool.steps = 0
    ways = settings(
        max_examples=EXAMPLES,
        stateful_step_count=50,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Spool, settings=ways)
    assert Spool.steps >= 5 * EXAMPLES
    with capsys.disabled():
        print(f"\n{Spool.steps:,} steps of {EXAMPLES} lives")
