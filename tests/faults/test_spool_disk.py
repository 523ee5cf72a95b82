"""Disks that fill, fail, forbid and forget; clocks that jump; a process that was stopped and wakes up."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.batch import OFFSETS
from headrace.errors import ConfigError, HeadraceError, StorageError
from headrace.files import TEMP_PREFIX, temporary_name
from headrace.metrics import Meter
from headrace.order import derive, key
from headrace.spool import DatasetConsumer, FieldSpec, FileHeader, SequentialProvider, open_batch_file, write_batch_file
from headrace.spool.records import seal
from headrace.spool.survey import verify

LONG = os.environ.get("HEADRACE_FAULTS", "long") == "long"
BATCH = 4
root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to mount")


class Counted(SequentialProvider):
    """Sample g is 500 times g: 16 KiB a file."""

    def build_meta(self) -> dict[str, Any]:
        return {
            "dataset_name": "counted",
            "training_type": "SEQUENCE_SCORING",
            "batch_schema": [{"name": "g", "dtype": "int64", "shape": [500]}],
        }

    def start_from(self, split, part, cursor) -> None:
        self.at = cursor["rows"] if cursor else 0

    def next_batch(self, split, part):
        own, self.at = self.at, self.at + self.batch_size
        return {"g": np.repeat(np.arange(own, own + self.batch_size)[:, None], 500, 1)}

    def cursor(self, split, part):
        return {"rows": self.at}


def provider(folder, **more):
    return Counted(
        folder,
        **(
            {"batch_size": BATCH, "batches_per_file": 1, "sleep_seconds": 0.005, "max_backlog_files": 8, "deadline": 30}
            | more
        ),
    )


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        os.sched_yield()


@contextmanager
def mounted(folder: Path, *words: str):
    folder.mkdir()
    if subprocess.run(["mount", *words, str(folder)], capture_output=True).returncode:
        pytest.skip("this machine does not allow mounts")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def running(made):
    """A provider at work in a thread; its error, if it ends with one."""
    errors: list[BaseException] = []

    def work():
        try:
            made.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield errors
    finally:
        made.stop()
        thread.join(40)
        assert not thread.is_alive()
        assert not errors


def read_on(consumer, begin, steps):
    for step in range(begin, begin + steps):
        rows = consumer.get_batch("train")["g"]
        assert (rows == rows[:, :1]).all()
        assert rows[:, 0].tolist() == list(range(step * BATCH, (step + 1) * BATCH))


@root
@pytest.mark.parametrize("limit", ["size=256k", "nr_inodes=32"])
def test_a_full_disk_is_a_named_wait_and_goes_on_by_itself_when_there_is_room(tmp_path, limit):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", limit, "tmpfs") as disk:
        meter = Meter()
        made = provider(disk / "spool", meter=meter)
        made.open()
        if limit.startswith("size"):
            (disk / "ballast").write_bytes(bytes(150 << 10))
        else:
            for k in range(12):
                (disk / f"ballast{k}").write_bytes(b"")
        with running(made) as errors:
            until(lambda: "spool.disk" in {w.name for w in meter.open_waits()} | {w.name for w in _default_waits()})
            before = len(made.channels("train")[0].present())
            assert not errors
            for path in disk.glob("ballast*"):
                path.unlink()
            until(lambda: len(made.channels("train")[0].present()) > before)
            with DatasetConsumer(disk / "spool", deadline=20, ack="commit") as consumer:
                for begin in range(0, 30, 3):
                    read_on(consumer, begin, 3)
                    consumer.commit()
            assert not errors
        assert verify(disk / "spool")[1] == []


def _default_waits():
    from headrace.metrics import default_meter

    return default_meter().open_waits()


@root
def test_a_read_only_disk_is_a_sentence_at_the_start(tmp_path):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=4m", "tmpfs") as disk:
        provider(disk / "spool").run(max_files=1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(
            (ConfigError, StorageError), match=r"cannot be (written|opened|made).*Read-only file system"
        ):
            provider(disk / "spool").run()
        with pytest.raises(
            (ConfigError, StorageError), match=r"cannot be (written|opened|made).*Read-only file system"
        ):
            DatasetConsumer(disk / "spool")


@root
def test_a_folder_that_forbids_new_files_is_a_named_wait_until_it_allows_them(tmp_path):
    made = provider(tmp_path / "spool")
    made.open()
    queue = tmp_path / "spool" / "queue" / "train"
    if shutil.which("chattr") is None or subprocess.run(["chattr", "+i", str(queue)], capture_output=True).returncode:
        pytest.skip("needs a file system with immutable folders")
    try:
        with running(made) as errors:
            until(lambda: "spool.disk" in {w.name for w in _default_waits()} or errors)
            assert not errors
            subprocess.run(["chattr", "-i", str(queue)], check=True)
            until(lambda: len(made.channels("train")[0].present()) >= 3)
    finally:
        subprocess.run(["chattr", "-i", str(queue)], check=True)


@root
def test_a_file_that_may_not_be_deleted_is_tried_again_and_never_delivered_again(tmp_path):
    if shutil.which("chattr") is None:
        pytest.skip("needs chattr")
    folder = tmp_path / "spool"
    provider(folder).run(max_files=4)
    path = folder / "queue" / "train" / "000000000000.safetensors"
    if subprocess.run(["chattr", "+i", str(path)], capture_output=True).returncode:
        pytest.skip("this file system has no immutable files")
    try:
        with DatasetConsumer(folder, deadline=20) as consumer:
            read_on(consumer, 0, 2)
            until(lambda: consumer.stats()["retries"] > 0)
        with DatasetConsumer(folder, deadline=20) as consumer:
            read_on(consumer, 2, 1)
            assert path.exists()
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)
    with DatasetConsumer(folder, deadline=20) as consumer:
        read_on(consumer, 3, 1)
        until(lambda: not path.exists())


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc to tell files apart")
def test_a_failed_fsync_is_never_repeated_on_the_same_file(tmp_path, monkeypatch):
    failed: list[str] = []
    real = os.fsync

    def fsync(fd):
        name = str(Path(f"/proc/self/fd/{fd}").readlink())
        if Path(f"/proc/self/fd/{fd}").is_dir():
            return real(fd)
        assert name not in failed, "the kernel may have dropped the pages and say yes the second time"
        if len(failed) < 3 and os.fstat(fd).st_size > 10_000:
            failed.append(name)
            raise OSError(5, "Input/output error")
        return real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    made = provider(tmp_path / "spool")
    assert made.run(max_files=2) == 2
    assert len(failed) == 3
    for path in (tmp_path / "spool" / "queue" / "train").iterdir():
        open_batch_file(path).check()


def test_a_folder_that_cannot_be_synced_makes_the_file_anew(tmp_path, monkeypatch):
    made = provider(tmp_path / "spool")
    made.open()
    failures = [2]
    real = os.fsync
    queue = (tmp_path / "spool" / "queue" / "train").stat().st_ino

    def fsync(fd):
        if os.fstat(fd).st_ino == queue and failures[0]:
            failures[0] -= 1
            raise OSError(5, "Input/output error")
        return real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    assert made.run(max_files=1) == 1
    assert failures == [0]
    assert verify(tmp_path / "spool") == (1, [])


def test_order_is_by_number_whatever_the_clock_says(tmp_path, monkeypatch):
    folder = tmp_path / "spool"
    provider(folder).run(max_files=4)
    for k, path in enumerate(sorted((folder / "queue" / "train").iterdir())):
        os.utime(path, (1e9 - 1e6 * k, 1e9 - 1e6 * k))
    monkeypatch.setattr(time, "time", lambda: -5.0)
    with DatasetConsumer(folder, deadline=20) as consumer:
        read_on(consumer, 0, 2)
        monkeypatch.setattr(time, "time", lambda: 4e9)
        read_on(consumer, 2, 2)


SLEEPER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_spool_disk import provider
real = os.link
def link(source, target, *args, **more):
    if str(target).endswith(".safetensors"):
        os.kill(os.getpid(), signal.SIGSTOP)
    return real(source, target, *args, **more)
made = provider(Path(sys.argv[1]), join=True)
made.open()
os.link = link
print("made", made._make(made._take(("train",))), flush=True)
"""


@pytest.mark.parametrize("committed", [False, True] if LONG else [True])
def test_a_provider_that_was_stopped_and_wakes_up_changes_nothing(tmp_path, committed):
    from headrace.spool import DataProviderBase

    folder = tmp_path / "spool"
    script = SLEEPER.replace("provider(Path", "drawn(Path").replace("import provider", "import drawn")
    asleep = subprocess.Popen(
        [sys.executable, "-c", script, folder, str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: os.waitid(os.P_PID, asleep.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None, 60)
        awake = drawn(folder, join=True, lease_seconds=0.1)
        assert isinstance(awake, DataProviderBase)
        assert awake.run(("train",), max_files=3) == 3
        whole = {p.name: p.read_bytes() for p in (folder / "queue" / "train").glob("0*")}
        with DatasetConsumer(folder, ack="commit", deadline=20) as consumer:
            for _ in range(2):
                consumer.get_batch("train")
            if committed:
                consumer.commit()
        os.kill(asleep.pid, signal.SIGCONT)
        assert asleep.communicate(timeout=60)[0].strip() == "made False"
    finally:
        asleep.kill()
        asleep.wait()
    left = {p.name: p.read_bytes() for p in (folder / "queue" / "train").iterdir()}
    assert left == {name: raw for name, raw in whole.items() if not committed or int(name[:12]) >= 2}


def drawn(folder, **more):
    import torch

    from headrace.spool import DataProviderBase

    class Drawn(DataProviderBase):
        def build_meta(self):
            return {
                "dataset_name": "drawn",
                "training_type": "SEQUENCE_SCORING",
                "batch_schema": [{"name": "x", "dtype": "int64", "shape": []}],
            }

        def sample_batch(self, split, rng):
            return {"x": torch.randint(0, 1 << 40, (self.batch_size,), generator=rng)}

    return Drawn(folder, 4, batches_per_file=1, max_backlog_files=3, sleep_seconds=0.01, deadline=30, **more)


def test_a_stopped_consumer_keeps_its_place_and_a_second_one_is_refused(tmp_path):
    folder = tmp_path / "spool"
    provider(folder).run(max_files=4)
    code = (
        "import os, signal, sys; from headrace.spool import DatasetConsumer\n"
        "c = DatasetConsumer(sys.argv[1], ack='commit', deadline=20); c.get_batch('train')\n"
        "os.kill(os.getpid(), signal.SIGSTOP); print(c.get_batch('train')['g'][0, 0].item()); c.close()\n"
    )
    asleep = subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: os.waitid(os.P_PID, asleep.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None, 60)
        began = time.perf_counter()
        with pytest.raises(ConfigError, match=f"is in use by rank 0 of 1, process {asleep.pid}"):
            DatasetConsumer(folder)
        assert time.perf_counter() - began < 2
        os.kill(asleep.pid, signal.SIGCONT)
        assert asleep.communicate(timeout=60)[0].strip() == str(BATCH)
    finally:
        asleep.kill()
        asleep.wait()


@root
@pytest.mark.timeout(900)
def test_no_acknowledged_file_is_missing_after_a_power_cut(tmp_path):
    """A copy of a mounted file system's backing file is what a power cut leaves on the disk."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4")
    image = tmp_path / "disk.img"
    with open(image, "wb") as handle:
        handle.truncate(24 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-E", "lazy_itable_init=0", str(image)], check=True)
    cuts = 90 if LONG else 4
    with mounted(tmp_path / "disk", "-o", "loop", str(image)) as disk:
        made = provider(disk / "spool", max_backlog_files=500)
        made.open()
        consumer = DatasetConsumer(disk / "spool", ack="commit", deadline=20)
        for cut in range(cuts):
            for _ in range(1 + cut % 3):
                assert made._make(made._take(("train",)))
            acknowledged = made.channels("train")[0].present()
            if cut % 2:
                read_on(consumer, consumer.stats()["splits"].get("train", {}).get("batches", 0), 1)
                consumer.commit()
            committed = consumer._queue.folder.commit_points().get("train", {"g": 0})["g"]
            shutil.copyfile(image, tmp_path / "cut.img")
            with mounted(tmp_path / f"cut{cut}", "-o", "loop", str(tmp_path / "cut.img")) as after:
                after_commit = DatasetConsumer(after / "spool", ack="commit", deadline=20)
                assert after_commit._queue.folder.commit_points().get("train", {"g": 0})["g"] == committed
                wanted = [seq for seq in acknowledged if seq >= committed // BATCH]
                assert set(wanted) <= set(after_commit._queue.channel("train", 0).present())
                read_on(after_commit, committed // BATCH, len(wanted))
                after_commit.close()
                assert verify(after / "spool")[1] == []
        consumer.close()
        made.close()


# ----------------------------------------------------------------- nothing is free; what dead processes leave

LIMITS = ["nr_inodes=40", "size=300k"]


@contextmanager
def consumers(folder: Path, ranks: int, ack: str):
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                DatasetConsumer(
                    folder, "cpu", ack=ack, dp_rank=r, dp_world_size=ranks, deadline=20, verdict_patience=60
                )
            )
            for r in range(ranks)
        ]


def read_and_commit(ranks: list[DatasetConsumer], begin: int, steps: int, *, commits: bool = True) -> None:
    """Read on, every sample once over all ranks, and commit after every second step."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        for step in range(begin, begin + steps):
            shares = list(threads.map(lambda rank: rank.get_batch("train")["g"], ranks))
            got = sorted(g for share in shares for g in share[:, 0].tolist())
            assert got == list(range(step * BATCH, (step + 1) * BATCH))
            if commits and step % 2 and ranks[0].settings.ack == "commit":
                ranks[0].commit()


def waiting_for_the_disk(meter: Meter) -> bool:
    return "spool.disk" in {w.name for w in meter.open_waits()} | {w.name for w in _default_waits()}


def fill(disk: Path) -> None:
    """Take everything that is left, of bytes or of inodes."""
    for size in (1 << 16, 4096):
        with contextlib.suppress(OSError):
            for k in range(1000):
                (disk / f"ballast-{size}-{k}").write_bytes(bytes(size))
    left = os.statvfs(disk)
    assert left.f_bavail == 0 or left.f_favail == 0


@root
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(("ranks", "ack"), [(1, "consume"), (1, "commit"), (2, "commit")])
@pytest.mark.parametrize("when", ["before the disk is full", "after it"])
def test_a_backlog_larger_than_the_disk_is_read_to_its_end(tmp_path, limit, ranks, ack, when):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", limit, "tmpfs") as disk, contextlib.ExitStack() as stack:
        meter = Meter()
        made = provider(disk / "spool", meter=meter, max_backlog_files=100)
        made.open()
        if when.startswith("before"):
            opened = stack.enter_context(consumers(disk / "spool", ranks, ack))
        with running(made) as errors:
            until(lambda: waiting_for_the_disk(meter) or errors)
            assert not errors
            if when.startswith("after"):
                opened = stack.enter_context(consumers(disk / "spool", ranks, ack))
            read_and_commit(opened, 0, 60)
            assert not errors
        assert verify(disk / "spool")[1] == []


@root
def test_several_ranks_can_judge_every_file_of_a_full_disk_before_they_commit(tmp_path):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "nr_inodes=160", "tmpfs") as disk:
        meter = Meter()
        made = provider(disk / "spool", meter=meter, max_backlog_files=200)
        made.open()
        with running(made) as errors, consumers(disk / "spool", 2, "commit") as opened:
            for _ in range(2):
                until(lambda: waiting_for_the_disk(meter) or errors)
                last = max(made.channels("train")[0].present())
                assert last > 40, "more files than there is room left for anything else"
                step = opened[0].stats()["splits"].get("train", {}).get("batches", 0)
                read_and_commit(opened, step, last + 1 - step, commits=False)
                opened[0].commit()
                until(lambda last=last: made.channels("train")[0].present()[0] >= last, 20)
            assert not errors


@root
@pytest.mark.parametrize("limit", LIMITS)
def test_a_file_that_went_bad_on_a_full_disk_is_made_again(tmp_path, limit):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", limit, "tmpfs") as disk:
        meter = Meter()
        made = provider(disk / "spool", meter=meter, max_backlog_files=100)
        made.open()
        made.folder.write_read_position(0, 1, {"train": {"done": [0]}})  # of a single rank, in an earlier life
        with running(made) as errors:
            until(lambda: waiting_for_the_disk(meter) or errors)
            path = made.channels("train")[0].path(0)
            raw = path.read_bytes()
            path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
            with consumers(disk / "spool", 1, "commit") as opened:
                read_and_commit(opened, 0, 4, commits=False)
                assert opened[0].stats()["bad_files"] == 1
            assert not errors


@root
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("ack", ["consume", "commit"])
def test_a_consumer_commits_and_starts_again_where_nothing_at_all_is_free(tmp_path, limit, ack):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", limit, "tmpfs") as disk:
        folder = disk / "spool"
        provider(folder, max_backlog_files=6).run(max_files=6)
        with consumers(folder, 1, ack) as opened:
            fill(disk)
            read_and_commit(opened, 0, 2)
            assert opened[0]._queue.background.drain(20)
            assert opened[0].stats()["retries"] == 0
            assert opened[0].stats()["files_deleted"] == 1, (
                "the newest one below the commit point stays for the producer"
            )
        fill(disk)
        with consumers(folder, 1, ack) as opened:
            read_and_commit(opened, 2, 4)
            assert opened[0]._queue.background.drain(20)
            assert opened[0].stats()["files_deleted"] == 4


PROVIDER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_spool_disk import provider
provider(Path(sys.argv[1]), report=lambda line: print(line, flush=True), max_backlog_files=2, deadline=60).run()
"""


def test_a_provider_without_descriptors_waits_by_name_and_goes_on_and_nothing_is_called_damaged(tmp_path):
    folder = tmp_path / "spool"
    child = subprocess.Popen(
        [sys.executable, "-c", PROVIDER, folder, str(Path(__file__).parent)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        said = [child.stdout.readline() for _ in range(2)]
        assert "train 1: published" in said[1], said
        with DatasetConsumer(folder, "cpu", ack="commit", deadline=20) as consumer:
            read_on(consumer, 0, 1)
            consumer.commit()
            assert "train 2: published" in child.stdout.readline()
            soft, hard = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (3, hard))
            line = child.stdout.readline()
            assert line.startswith("waiting to try again: "), line
            assert "Too many open files" in line
            read_on(consumer, 1, 2)
            consumer.commit()
            resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (soft, hard))
            read_on(consumer, 3, 20)
        assert child.poll() is None
    finally:
        child.kill()
        rest = child.communicate(timeout=20)[0]
    assert "damaged" not in rest
    assert "remove" not in rest
    assert not list((folder / "quarantine").rglob("*.safetensors"))
    assert verify(folder)[1] == []


KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from headrace.files import publish
os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        publish(Path(name), b"half", replace=True)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


@pytest.mark.parametrize("end", ["provider", "consumer"])
def test_every_start_removes_what_dead_processes_left_and_nothing_of_the_living(tmp_path, end):
    folder = tmp_path / "spool"
    provider(folder).run(max_files=2)
    places = [
        "meta.json",
        "state/shards.json",
        "queue/train/9",
        "verdicts/train/9",
        "claims/train/9",
        "quarantine/train/9",
    ]
    subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, *(folder / p for p in places)], check=True, timeout=60)
    # In a container the process before may have had the id of this one.
    (folder / "state" / f"{TEMP_PREFIX}{os.getpid()}_1-0").write_bytes(b"")
    living = folder / "queue" / "train" / temporary_name()
    living.write_bytes(b"")
    assert len(list(folder.rglob(f"{TEMP_PREFIX}*"))) == len(places) + 2
    if end == "provider":
        provider(folder).run(max_files=1)
    else:
        DatasetConsumer(folder, "cpu").close()
    assert list(folder.rglob(f"{TEMP_PREFIX}*")) == [living]


# ------------------------------------------------------------------------------------------------ flipped bits


@pytest.mark.timeout(1800)
def test_every_flipped_bit_is_found_before_a_value_reaches_the_user(tmp_path):
    flips = 12_000 if LONG else 500
    schema = (FieldSpec("a", "int64", (300,)), FieldSpec("b", "int8", (3,)), FieldSpec("r", "int32", ragged=True))
    rows = 12
    arrays = {
        "a": np.arange(rows * 300).reshape(rows, 300), "b": np.ones((rows, 3), np.int8), "r": np.arange(24, dtype=np.int32),
        "r" + OFFSETS: np.arange(rows + 1) * 2,
    }  # fmt: skip
    header = FileHeader(
        split="train",
        seq=3,
        schema=schema,
        rows=rows,
        first=36,
        batch_size=3,
        job="j",
        cursor={"cursor": {"at": 5}, "end": 48},
    )
    harmless = found = 0
    for suffix in (".safetensors", ".pt"):
        path = tmp_path / f"f{suffix}"
        write_batch_file(path, header, arrays)
        whole = path.read_bytes()
        for flip in range(flips // 2):
            bit = derive(key("spool.flip"), flip) % (8 * len(whole))
            raw = bytearray(whole)
            raw[bit // 8] ^= 1 << (bit % 8)
            path.write_bytes(raw)
            try:
                file = open_batch_file(path)
                file.check()
            except HeadraceError:
                found += 1
                continue
            # Only bytes that carry nothing may change unseen: padding between the records of a zip archive.
            harmless += 1
            assert suffix == ".pt"
            assert file.header == header
            assert all(np.array_equal(file.arrays[name], array) for name, array in arrays.items())
    assert found + harmless == flips
    assert found > 0.75 * flips


@pytest.mark.timeout(600)
def test_a_flipped_bit_in_the_state_of_a_spool_is_never_taken_for_a_value(tmp_path):
    from headrace.errors import FileCorrupt
    from headrace.spool import read_meta
    from headrace.spool.folder import read_sealed

    provider(tmp_path / "spool").run(max_files=1)
    value = {"splits": {"train": {"g": 8, "at": [[2, 0]], "start": [8]}}}
    sealed, meta = seal(value), (tmp_path / "spool" / "meta.json").read_bytes()
    truth = read_meta(tmp_path / "spool")
    path = tmp_path / "commit.json"
    for bit in range(8 * len(sealed)):
        raw = bytearray(sealed)
        raw[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(raw)
        with pytest.raises(FileCorrupt):
            read_sealed(path)
    for flip in range(4000 if LONG else 300):
        bit = derive(key("spool.meta.flip"), flip) % (8 * len(meta))
        raw = bytearray(meta)
        raw[bit // 8] ^= 1 << (bit % 8)
        (tmp_path / "spool" / "meta.json").write_bytes(raw)
        try:
            found = read_meta(tmp_path / "spool")
        except HeadraceError:
            continue
        assert found == truth, "a blank became another blank"
