"""Whatever lies there, the answer comes soon and in bounded memory, is exact or an error that names the file, and nothing
outside the folder is opened for writing. The short form; `python tests/fuzz/run.py` is the long one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure peaks of memory")  # fmt: skip

sys.path.insert(0, str(Path(__file__).resolve().parent))


def test_changed_files_are_read_exactly_or_refused_by_name_by_every_reader(tmp_path):
    from targets import TARGETS

    from run import Outcome, fuzz

    each = int(os.environ.get("HEADRACE_FUZZ", "8"))
    outcome = Outcome()
    fuzz(tmp_path, 1, 0, each, list(TARGETS), outcome)
    assert not outcome.bad, json.dumps(outcome.bad[:5], indent=1)
    assert outcome.inputs == dict.fromkeys(TARGETS, each)
    assert sum(outcome.read.values()) > each
    assert sum(outcome.refused.values()) > 10 * each
