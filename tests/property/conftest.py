"""Both ways in which a consumer opens the files of a spool: by compiled loops, or without."""

from __future__ import annotations

import pytest


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
