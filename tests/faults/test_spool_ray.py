"""Providers as actors on a local Ray cluster make the files that one process makes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace.runs.config.loading import load_config
from headrace.runs.provide import provide_text
from headrace.spool.survey import verify

pytest.importorskip("ray", reason="needs the extra [ray]")
pytestmark = pytest.mark.skipif(
    os.environ.get("HEADRACE_FAULTS", "long") != "long", reason="starting a cluster takes half a minute"
)

CONFIG = """
[run]
seed = 3
[[source]]
spec = "sample:prose"
[text]
seq_len = 64
[loader]
global_batch_size = 10
lanes = 10
exhausted = "repeat"
[spool]
batches_per_file = 2
max_backlog_files = 3
parts = 5
[train]
"""

# Ray keeps sockets and warnings of its own, so it gets a process of its own.
FLEET = """
import sys, ray
from pathlib import Path
from headrace.runs.config.loading import load_config
from headrace.runs.provide_ray import provide_on_ray
ray.init(num_cpus=int(sys.argv[3]), log_to_driver=False, include_dashboard=False)
config = load_config(Path(sys.argv[1]), ("--spool.dir", sys.argv[2]))
print("made", provide_on_ray(config, max_files=3))
"""


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted((folder / "queue").rglob("*.safetensors"))}


@pytest.mark.timeout(180)
def test_actors_on_a_cluster_make_the_bytes_of_one_process(tmp_path):
    (tmp_path / "run.toml").write_text(CONFIG)
    assert provide_text(load_config(tmp_path / "run.toml", ("--spool.dir", str(tmp_path / "one"))), max_files=15) == 15
    expected = contents(tmp_path / "one")
    assert len(expected) == 15
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FLEET, tmp_path / "run.toml", tmp_path / "fleet", "5"],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "made 15" in done.stdout
    assert contents(tmp_path / "fleet") == expected
    assert verify(tmp_path / "fleet") == (15, [])
