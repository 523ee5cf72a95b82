"""Whatever lives a spool is led through, the model sees every sample once, in order."""

from __future__ import annotations

from hypothesis import settings

from spool_machine import Spool

LIVES = settings(max_examples=12, stateful_step_count=18, deadline=None)


class TestSpoolMachine(Spool.TestCase):
    settings = LIVES
