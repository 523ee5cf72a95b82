"""`make test-bounds`: kernels are compiled before the first test, so that none runs as plain Python."""

from __future__ import annotations

import pytest

from headrace.ledger.slot_index import INDEX_KERNELS
from headrace.runtime.compiled import BOUNDS_CHECKS, wait_for_kernels
from headrace.text import PACK_KERNELS


@pytest.fixture(scope="session", autouse=True)
def kernels_compiled_where_indices_are_checked():
    if BOUNDS_CHECKS:
        wait_for_kernels(*PACK_KERNELS, *INDEX_KERNELS)
