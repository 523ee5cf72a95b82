"""Run the benchmarks: all of them, or the rooms named on the command line.

    python benchmarks/run.py            every room
    python benchmarks/run.py loader     one

Each prints ratios of figures taken in one run on one machine: to a physical limit, and to what one would use instead.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ROOMS = (
    "order", "files", "mix", "text", "sources", "metrics", "loader", "prepared", "mixing", "ledger", "spool", "rollouts",
    "train", "reduce", "start", "ui", "shuffle",
)  # fmt: skip


def main() -> int:
    rooms = sys.argv[1:] or list(ROOMS)
    unknown = [r for r in rooms if r not in ROOMS]
    if unknown:
        print(f"no benchmark for {', '.join(unknown)}; there are {', '.join(ROOMS)}", file=sys.stderr)
        return 2
    print(f"{platform.machine()}, {os.cpu_count()} cores, {_processor()}, Python {platform.python_version()}")
    worst = 0
    for room in rooms:
        print(f"\n== {room}", flush=True)
        worst = max(worst, subprocess.run([sys.executable, str(FOLDER / f"{room}.py")], check=False).returncode)
    return worst


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


if __name__ == "__main__":
    sys.exit(main())
