"""Both ways in which a consumer opens the files of a spool: by compiled loops, or without. `make test-bounds`: nothing runs as plain Python."""

from __future__ import annotations

import pytest

from headrace.ledger.kernels import INDEX_KERNELS
from headrace.runtime.compiled import BOUNDS_CHECKS, wait_for_kernels
from headrace.text import PACK_KERNELS


@pytest.fixture(scope="session", autouse=True)
def kernels_compiled_where_indices_are_checked():
    if BOUNDS_CHECKS:
        wait_for_kernels(*PACK_KERNELS, *INDEX_KERNELS)


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "in one call"])
def spool_files(request, spool_files_opened):
    with spool_files_opened(request.param):
        yield


@pytest.fixture(scope="class")
def spool_files_in_one_call(spool_files_opened):
    with spool_files_opened(True):
        yield


@pytest.fixture(scope="class")
def spool_files_step_by_step(spool_files_opened):
    with spool_files_opened(False):
        yield
