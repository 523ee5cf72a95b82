"""Whatever lives a spool is led through, the model sees every sample once, in order."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from spool_machine import Spool

LIVES = settings(max_examples=12, stateful_step_count=18, deadline=None, derandomize=True)


class TestSpoolMachine(Spool.TestCase):
    settings = LIVES
