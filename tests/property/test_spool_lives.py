"""Whatever lives a spool is led through, the model sees every sample once, in order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from spool_machine import Spool

LIVES = settings(max_examples=12, stateful_step_count=18, deadline=None, derandomize=True)


@pytest.mark.usefixtures("spool_files_step_by_step")
class TestSpoolMachine(Spool.TestCase):
    settings = LIVES


@pytest.mark.usefixtures("spool_files_in_one_call")
class TestSpoolMachineInOneCall(Spool.TestCase):
    settings = LIVES
