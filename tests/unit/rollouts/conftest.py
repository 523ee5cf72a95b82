"""Fixtures of all tests of rollouts."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def _frozen_garbage():
    """Freeze the modules. A pipeline that finds nothing frozen collects garbage when it opens, which takes 0.1 s of CPU with torch imported."""
    if not gc.get_freeze_count():
        gc.freeze()
