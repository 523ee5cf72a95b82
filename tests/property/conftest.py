"""Both ways in which a consumer opens the files of a spool: by compiled loops, or without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.spool import mapping


@contextmanager
def opened(in_one_call: bool) -> Iterator[None]:
    loops = mapping.map_loops() if in_one_call else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapping.map_loops, "_module", loops)
        patch.setattr(mapping, "warm_kernels", lambda _: None)
        yield


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "in one call"])
def spool_files(request):
    with opened(request.param):
        yield


@pytest.fixture(scope="class")
def spool_files_in_one_call():
    with opened(True):
        yield


@pytest.fixture(scope="class")
def spool_files_step_by_step():
    with opened(False):
        yield
