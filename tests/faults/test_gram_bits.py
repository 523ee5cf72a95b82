"""One hash over processors, tile shapes and threads: neither the compiler nor the hardware decides where a sum is rounded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LONG = os.environ.get("HEADRACE_FAULTS", "long") == "long"
SCRIPT = """
import hashlib, numpy as np
from headrace.reduce import chunk_gram, kernel
kernel._WORTH_SHARING = 0  # threads share small matrices too
rng, told = np.random.default_rng(7), hashlib.sha256()
for n, k in ((1, 1), (127, 9), (129, 17), (700, 33), (2049, 65), (517, 270)):
    rows = rng.standard_normal((n, k)) * np.exp2(rng.integers(-30, 30, (n, k)))
    rows[rng.random((n, k)) < 0.05] = -0.0
    rows[rng.random((n, k)) < 0.01] = 5e-324
    narrow = np.clip(rows, -100, 100)
    for x in (rows, rows.astype("f4"), narrow.astype("f2"), (narrow.astype("f4").view(np.uint32) >> 16).astype(np.uint16)):
        for threads in (1, 2, 3):
            told.update(chunk_gram(x, threads=threads))
print(told.hexdigest())
"""
VARIANTS = [("generic", "")]
if LONG:
    VARIANTS += [
        ("host", "8x16x8"),
        ("haswell", ""),
        ("generic", "4x12x4"),
        ("host", "2x4x2"),
        ("host", "4x12x4"),
        ("haswell", "8x8x8"),
        ("host", "1x8x4"),
    ]


def told(cpu: str, tile: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CPU_NAME", "HEADRACE_GRAM_TILE")}
    if cpu != "host":
        env["NUMBA_CPU_NAME"] = cpu
    if tile:
        env["HEADRACE_GRAM_TILE"] = tile
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def here() -> str:
    return told("host", "")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("cpu", "tile"), VARIANTS)
def test_every_processor_target_and_tile_shape_gives_the_same_bits(cpu, tile, here):
    assert told(cpu, tile) == here
