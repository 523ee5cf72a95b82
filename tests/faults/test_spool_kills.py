"""SIGKILL at every file operation of both ends of a spool: nothing lost, repeated, reordered or torn.

A fork server: a process that has everything imported but torch (with it a fork takes 50 ms instead of 5). A child counts its file operations and
kills itself before, after, or in the middle of one of them; the number goes round, so that every operation of a life is
met again and again, in every state an earlier kill has left. The server plays the trainer's checkpoint: what the ranks
of a turn delivered counts only if all of them came through, else the next turn starts from the last checkpoint.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import DeadlineExceeded
from headrace.order import derive, key
from headrace.spool import DatasetConsumer, SequentialProvider
from headrace.spool.survey import describe, verify

LONG = os.environ.get("HEADRACE_FAULTS", "long") == "long"
KILLS = int(os.environ.get("HEADRACE_KILLS", "10000" if LONG else "80"))
BATCH = 6
OPERATIONS = ("open", "write", "fsync", "close", "link", "unlink", "replace", "rename", "mkdir", "ftruncate", "pwrite")


class Counted(SequentialProvider):
    def build_meta(self) -> dict[str, Any]:
        return {
            "dataset_name": "counted",
            "training_type": "SEQUENCE_SCORING",
            "batch_schema": [{"name": "g", "dtype": "int64", "shape": [40]}],
        }

    def start_from(self, split, part, cursor) -> None:
        self.at = cursor["rows"] if cursor else 0

    def next_batch(self, split, part):
        own, self.at = self.at, self.at + self.batch_size
        return {"g": np.repeat(np.arange(own, own + self.batch_size)[:, None], 40, 1)}

    def cursor(self, split, part):
        return {"rows": self.at}


def arm(at: int, mode: int) -> None:
    """Die at file operation number `at`: before it, after it, or, for a write, in the middle of it."""
    count = [0]

    def wrapped(real, name):
        def call(*args, **more):
            here = count[0] == at
            count[0] += 1
            if here and mode == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if here and mode == 2 and name in ("write", "pwrite"):
                # A record is padded with blanks: half of its bytes may be all of it.
                some = len(args[1]) // 2 if name == "write" else 40
                args = (args[0], memoryview(args[1])[:some], *args[2:])
            result = real(*args, **more)
            if here:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in OPERATIONS:
        setattr(os, name, wrapped(getattr(os, name), name))
    fcntl.flock = wrapped(fcntl.flock, "flock")


def life(work, at: int, mode: int) -> int:
    """Fork, arm, work; the child's process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            arm(at, mode)
            work()
            code = 0
        except DeadlineExceeded:
            code = 5
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            os._exit(code)
    return child


def outcome(child: int) -> str:
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return "killed"
    assert os.WEXITSTATUS(status) in (0, 5), "a life that was not killed failed"
    return "done" if os.WEXITSTATUS(status) == 0 else "nothing to read"


def provide(folder: Path, files: int) -> None:
    Counted(folder, BATCH, batches_per_file=2, max_backlog_files=4, sleep_seconds=0.001, deadline=0.005).run(
        max_files=files
    )


def consume(folder: Path, rank: int, world: int, state, oldest, report: Path) -> None:
    began = time.perf_counter()
    consumer = DatasetConsumer(
        folder, ack="commit", dp_rank=rank, dp_world_size=world, deadline=0.5, verdict_patience=0.05
    )
    if state is not None:
        consumer.load_state_dict(state)
        consumer.commit(oldest)
    delivered = []
    first = 0.0
    reader = consumer._reader("train")
    for step in range(5):
        if not consumer.wait_for_data("train", timeout=0.0 if step else 0.05):
            break
        rows = reader.read(BATCH)["g"]  # get_batch without torch
        reader.advance()
        first = first or time.perf_counter() - began
        assert (rows == rows[:, :1]).all(), "torn"
        delivered.append(rows[:, 0].tolist())
    told = {"delivered": delivered, "state": consumer.state_dict(), "first": first}
    with open(report, "w") as handle:
        json.dump(told, handle)
    consumer.close()


@contextmanager
def scratch():
    base = (
        "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    )  # a kill does not ask the disk; waiting for it would take an hour
    path = Path(tempfile.mkdtemp(dir=base))
    try:
        yield path / "spool"
    finally:
        shutil.rmtree(path)


DOCUMENTED = re.compile(
    r"meta\.(json|pkl)|queue/train/\d{12}\.safetensors|claims/train/\d{12}|verdicts/train/\d{12}"
    r"|state/(commit|read-\d+)|state/(provider|consumer-\d+|part-\d+)\.lock"
)


def exactly_once(folder: Path, wanted: int) -> str:
    """Kill until `wanted` kills came to pass, with a checkpointed cursor; what happened."""
    gc.collect()
    gc.freeze()  # what is not touched need not be copied
    kills = turn = lives = 0
    trained = 0
    checkpoints: list[tuple[dict, int]] = []
    slowest, began = 0.0, time.perf_counter()
    met: set[tuple[str, int, int]] = set()
    delivered = [0, 0, 0, 0]
    """Batches, by the number of ranks."""
    while kills < wanted:
        turn += 1
        mode = turn % 3
        lives += 1
        # A life that makes files has about 90 operations, one that reads about 70, one that finds nothing to do 30.
        next_provider, next_consumer = (derive(key("spool.kill", side=side), turn) % 90 for side in (0, 1))
        doomed = turn % 6 != 0
        result = outcome(life(partial(provide, folder, 2), next_provider if doomed else 10**9, mode))
        if result == "killed":
            kills += 1
            met.add(("provider", next_provider, mode))
        if not (folder / "meta.json").exists():
            continue
        world = (1, 2, 1, 3, 1)[turn // 3 % 5]
        state, oldest = (checkpoints[-1][0], checkpoints[0][0]) if checkpoints else (None, None)
        reports = [folder.parent / f"rank-{r}" for r in range(world)]
        for report in reports:
            report.unlink(missing_ok=True)
        victim = turn % world if turn % 4 else -1
        children = [
            life(
                partial(consume, folder, r, world, state, oldest, reports[r]),
                next_consumer if r == victim else 10**9,
                mode,
            )
            for r in range(world)
        ]
        results = [outcome(child) for child in children]
        lives += world
        if "killed" in results:
            kills += 1
            met.add(("consumer", next_consumer, mode))
        if any(r != "done" for r in results):
            continue
        told = [json.loads(report.read_text()) for report in reports]
        slowest = max([slowest, *(t["first"] for t in told)])
        delivered[world] += sum(len(t["delivered"]) for t in told)
        steps = {len(t["delivered"]) for t in told}
        if len(steps) != 1:  # a rank found nothing more to read: they would have waited for each other
            continue
        assert len({json.dumps(t["state"]) for t in told}) == 1
        for shares in zip(*(t["delivered"] for t in told), strict=True):
            whole = sorted(g for share in shares for g in share)
            assert whole == list(range(trained, trained + BATCH)), f"turn {turn}, {world} ranks"
            trained += BATCH
        checkpoints = [*checkpoints[-1:], (told[0]["state"], trained)]
        if turn % 7 == 0 and len(checkpoints) == 2 and checkpoints[0][1] < trained:
            checkpoints.pop()  # the newest one is lost: the fallback generation has to work as well
            trained = checkpoints[-1][1]
    # Everything a last, undisturbed start leaves is documented.
    assert outcome(life(partial(provide, folder, 1), 10**9, 0)) in ("done", "nothing to read")
    state, oldest = checkpoints[-1][0], checkpoints[0][0]
    assert outcome(life(partial(consume, folder, 0, 1, state, oldest, folder.parent / "rank-0"), 10**9, 0)) == "done"
    left = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]
    assert [name for name in left if not DOCUMENTED.fullmatch(name)] == []
    assert verify(folder)[1] == []
    told = describe(folder)["splits"]["train"][0]
    assert told["files"] < 40, "what was committed was deleted"
    assert trained > wanted // 4, "too little was trained for the kills to mean anything"
    assert len(met) > min(wanted // 8, 150)
    assert delivered[1], "single ranks were given views"
    assert delivered[2] + delivered[3] or wanted < 500, "and several ranks rows that were gathered for them"
    assert slowest <= 2.0, "seconds from a restart to its first batch"
    seconds = time.perf_counter() - began
    return (
        f"{kills:,} kills in {lives:,} lives, {trained:,} samples exactly once, {len(met)} different places, batches for 1, 2, 3 ranks {delivered[1:]}, first batch after a restart within "
        f"{slowest * 1e3:.0f} ms, {1e3 * seconds / kills:.1f} ms a kill"
    )


def read_and_log(folder: Path, log: Path) -> None:
    consumer = DatasetConsumer(folder, deadline=0.5)
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for _ in range(5):
        if not consumer.wait_for_data("train", timeout=0.05):
            break
        reader = consumer._reader("train")
        rows = reader.read(BATCH)["g"][:, 0].tolist()
        reader.advance()
        os.write(fd, f"{rows[0]}\n".encode())
    consumer.close()


def at_most_once(folder: Path, wanted: int) -> str:
    """Kill a consumer that has no checkpoint; what happened."""
    log = folder.parent / "log"
    kills = turn = 0
    while kills < wanted:
        turn += 1
        kills += (
            outcome(life(partial(provide, folder, 3), (turn * 3) % 130 if turn % 3 else 10**9, turn % 3)) == "killed"
        )
        if (folder / "meta.json").exists():
            kills += (
                outcome(life(partial(read_and_log, folder, log), turn % 110 if turn % 4 else 10**9, turn % 2))
                == "killed"
            )
    seen = [int(line) for line in log.read_text().split("\n")[:-1] if line]
    assert seen == sorted(set(seen)), "in order, none twice"
    assert len(seen) > wanted // 10
    # What a crash costs is the rest of the file it happened in: two batches here.
    assert max(np.diff(seen)) <= 12 * BATCH
    return f"{kills:,} kills, {len(seen):,} batches delivered, none twice"


SWEEPS = {"exactly_once": exactly_once, "at_most_once": at_most_once}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("sweep", "kills"), [("exactly_once", KILLS), ("at_most_once", KILLS // 5)])
def test_no_kill_loses_repeats_reorders_or_tears_a_sample(sweep, kills, capfd):
    done = subprocess.run([sys.executable, __file__, sweep, str(kills)], capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stderr[-3000:]
    with capfd.disabled():
        print(f"\n{sweep}: {done.stdout.strip()}")


if __name__ == "__main__":
    with scratch() as place:
        print(SWEEPS[sys.argv[1]](place, int(sys.argv[2])))
