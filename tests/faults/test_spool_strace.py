"""What the kernel saw: both ends of a spool under strace, killed at each of their system calls.

The fork server of test_spool_kills.py dies between Python's calls; here the kernel kills on entry to a system call, whoever made
it. And the order that makes a file durable is read off the calls themselves: all bytes, fsync, link, unlink, fsync of the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import DeadlineExceeded
from headrace.spool import DatasetConsumer, SequentialProvider
from headrace.spool.survey import verify

LONG = os.environ.get("HEADRACE_FAULTS", "long") == "long"
BATCH, PER_LIFE = 4, 2
# Not openat: an interpreter makes hundreds before it gets to us, and a death on entry to one leaves what the call before it left.
CALLS = "write,pwrite64,fsync,link,linkat,unlink,unlinkat,rename,renameat,renameat2,ftruncate,flock,mkdir"


class Counted(SequentialProvider):
    def build_meta(self) -> dict[str, Any]:
        return {
            "dataset_name": "counted",
            "training_type": "SEQUENCE_SCORING",
            "batch_schema": [{"name": "g", "dtype": "int64", "shape": [600]}],
        }

    def start_from(self, split, part, cursor) -> None:
        self.at = cursor["rows"] if cursor else 0

    def next_batch(self, split, part):
        own, self.at = self.at, self.at + self.batch_size
        return {"g": np.repeat(np.arange(own, own + self.batch_size)[:, None], 600, 1)}

    def cursor(self, split, part):
        return {"rows": self.at}


def provide(folder: Path) -> None:
    provider = Counted(folder, BATCH, batches_per_file=1, max_backlog_files=4, sleep_seconds=0.001, deadline=0.2)
    with contextlib.suppress(DeadlineExceeded):  # enough lies ahead
        provider.run(max_files=PER_LIFE)


def consume(folder: Path, checkpoint: Path) -> None:
    """Train on some batches, and save state and samples together, as a trainer does."""
    saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"state": None, "seen": []}
    with DatasetConsumer(folder, "cpu", ack="commit", deadline=20) as consumer:
        if saved["state"] is not None:
            consumer.load_state_dict(saved["state"])
            consumer.commit(saved["state"])
        for _ in range(PER_LIFE):
            if not consumer.wait_for_data("train", 0.2):
                break
            reader = consumer._reader("train")
            saved["seen"] += reader.read(BATCH)["g"][:, 0].tolist()
            reader.advance()
        saved["state"] = consumer.state_dict()
        checkpoint.with_name("new").write_text(json.dumps(saved))
        checkpoint.with_name("new").rename(checkpoint)


def strace(log: Path, *options: str, end: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["strace", "-f", "-qq", "-s", "0", "-y", "-o", str(log), "-e", f"trace={CALLS}", *options]
    work = [sys.executable, "-B", __file__, end, str(folder)]
    return subprocess.run([*command, *work], capture_output=True, text=True, timeout=60)


def run(end: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-B", __file__, end, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", autouse=True)
def _needs_strace(tmp_path_factory):
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    log = tmp_path_factory.mktemp("strace") / "log"
    if subprocess.run(["strace", "-o", str(log), "true"], capture_output=True, timeout=30).returncode:
        pytest.skip("strace may not trace here")


@pytest.mark.timeout(120)
def test_a_file_is_written_synced_linked_and_its_folder_synced_in_this_order(tmp_path):
    folder, log = tmp_path / "spool", tmp_path / "log"
    done = strace(log, end="provide", folder=folder)
    assert done.returncode == 0, done.stderr
    queue = folder / "queue" / "train"
    lines = log.read_text().splitlines()
    for name in sorted(p.name for p in queue.iterdir()):
        at = next(i for i, line in enumerate(lines) if re.search(rf'\blink(at)?\(.*/{name}"', line))
        temp = re.search(r"(\.tmp-[\w-]+)\"", lines[at])[1]
        told = [
            (i, re.search(r"\b(\w+)\(", line)[1])
            for i, line in enumerate(lines)
            if temp in line or (i > at and f"<{queue}>" in line)
        ]
        kinds = [kind for _, kind in told]
        link = next(n for n, (i, _) in enumerate(told) if i == at)
        assert set(kinds[: link - 1]) == {"write"}, kinds
        assert kinds[link - 1 : link + 3] == ["fsync", "link", "unlink", "fsync"], kinds
        assert f"<{queue}>" in lines[told[link + 2][0]], "the last of them is of the folder"


@pytest.mark.timeout(1800)
def test_no_kill_at_any_system_call_loses_repeats_or_tears_a_sample(tmp_path, capsys):
    folder, checkpoint = tmp_path / "spool", tmp_path / "checkpoint"
    places = {}
    for end in ("provide", "consume"):
        assert strace(tmp_path / "log", end=end, folder=folder).returncode == 0
        # strace counts the calls of each kind and thread by themselves.
        made = Counter(re.findall(r"^(\d+) +(\w+)\(", (tmp_path / "log").read_text(), re.MULTILINE))
        most = {kind: max(n for (_, k), n in made.items() if k == kind) for _, kind in made}
        places[end] = [(end, kind, when + 1) for kind, n in sorted(most.items()) for when in range(n)]
    tried = [place for both in zip_longest(places["provide"], places["consume"]) for place in both if place is not None]
    kills = 0
    for end, kind, when in tried if LONG else tried[3::25]:
        run("consume" if end == "provide" else "provide", folder)  # so that there is something to do
        done = strace(tmp_path / "log", "-e", f"inject={kind}:signal=SIGKILL:when={when}", end=end, folder=folder)
        if done.returncode in (-9, 137):  # strace ends as its tracee did
            kills += 1
        else:
            assert done.returncode == 0, done.stderr
    for end in ("provide", "consume", "provide", "consume"):
        run(end, folder)
    seen = json.loads(checkpoint.read_text())["seen"]
    assert seen == list(range(len(seen)))
    assert len(seen) >= 2 * BATCH
    assert verify(folder)[1] == []
    assert kills >= (40 if LONG else 2)
    with capsys.disabled():
        print(f"\n{kills} kills by the kernel at {len(tried)} places, {len(seen)} samples exactly once")


if __name__ == "__main__":
    if sys.argv[1] == "provide":
        provide(Path(sys.argv[2]))
    else:
        consume(Path(sys.argv[2]), Path(sys.argv[2]).with_name("checkpoint"))
