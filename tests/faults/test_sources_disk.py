"""Files that vanish, shrink, turn into something else, or sit on a sick disk; lines that fill the memory."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.errors import DataChanged, DataError
from headrace.formats.byte_file import RawFile, patiently
from headrace.metrics import default_meter
from headrace.sources import Source, open_source


@pytest.fixture
def source(tmp_path):
    (tmp_path / "d.txt").write_bytes(b"".join(b"row %04d\n" % i for i in range(1000)))
    with open_source(
        Source("txt:d.txt", split="line"), base=tmp_path, cache=tmp_path / "cache", chunk_bytes=900
    ) as opened:
        yield opened


def test_a_file_deleted_while_open_is_a_sentence(source, tmp_path):
    assert source.read(0)
    (tmp_path / "d.txt").unlink()
    with pytest.raises(DataError, match=r"opening .*d.txt: the file is gone. Restore it"):
        source.read(1)


def test_a_file_cut_short_while_open_is_a_sentence(source, tmp_path):
    os.truncate(tmp_path / "d.txt", 4000)
    with pytest.raises(DataChanged, match=r"d.txt has 4,000 bytes; it had 9,000"):
        source.read(0)


def test_a_file_cut_short_between_its_opening_and_its_reading_is_a_sentence_not_a_signal(tmp_path):
    path = tmp_path / "d.txt"
    path.write_bytes(bytes(100_000))
    with RawFile(path) as file:
        os.truncate(path, 50_000)
        assert file.read(0, 50_000) == bytes(50_000)
        with pytest.raises(DataChanged, match="ends at byte 50,000 while being read; it had 100,000"):
            file.read(40_000, 20_000)


def test_a_file_that_turned_into_a_pipe_or_a_link_is_refused_without_blocking(source, tmp_path):
    path = tmp_path / "d.txt"
    path.rename(tmp_path / "real.txt")
    os.mkfifo(path)
    with pytest.raises(DataError, match=r"d.txt is a named pipe; a source reads regular files"):
        source.read(0)
    path.unlink()
    path.symlink_to(tmp_path / "real.txt")
    with pytest.raises(DataError, match=r"d.txt: it is a symbolic link"):
        source.read(0)


def test_a_file_one_may_not_read_is_a_sentence(source, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (tmp_path / "d.txt").chmod(0)
    with pytest.raises(DataError, match=r"opening .*d.txt: Permission denied"):
        source.read(0)


READ_ALL = """
import sys
from pathlib import Path
from headrace.errors import DataError
from headrace.metrics import default_meter
from headrace.sources import Source, open_source
folder = Path(sys.argv[1])
try:
    with open_source(Source("txt:d.txt", split="line"), base=folder, cache=folder / "cache", chunk_bytes=900) as source:
        rows = sum(len(source.read(chunk)) for chunk in range(source.manifest.chunks))
        print(rows, default_meter().totals().get("wait/source.retry/count", 0))
except DataError as error:
    print("refused:", error)
"""


def under_strace(folder, inject):
    """Read the source in a real process on whose preadv calls of the data file the kernel reports an error."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    python = os.path.realpath(sys.executable)
    command = ["strace", "-f", "-o", os.devnull, "-P", folder / "d.txt", "-e", "trace=preadv,preadv2", "-e", inject]
    packages = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [*command, python, "-c", READ_ALL, folder],
        env={**os.environ, "PYTHONPATH": packages},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "PTRACE" in done.stderr or "ptrace" in done.stderr:
        pytest.skip("this machine does not allow ptrace")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_io_error_that_passes_is_tried_again_and_counted(source, tmp_path):
    assert under_strace(tmp_path, "inject=preadv,preadv2:error=EIO:when=3") == "1000 1\n"
    assert under_strace(tmp_path, "inject=preadv,preadv2:error=EIO:when=2..3") == "1000 1\n"


def test_an_io_error_that_stays_is_a_sentence_after_three_tries(source, tmp_path):
    said = under_strace(tmp_path, "inject=preadv,preadv2:error=EIO:when=2+")
    assert said.startswith(f"refused: reading {tmp_path / 'd.txt'} at byte ")
    assert "Input/output error, 3 times in a row. Check the disk or the mount and run again." in said


def test_an_error_that_does_not_pass_is_not_tried_again():
    calls = []

    def call():
        calls.append(1)
        raise PermissionError(13, "Permission denied")

    with pytest.raises(DataError, match="reading x: Permission denied"):
        patiently("reading x", call)
    assert len(calls) == 1


def test_the_wait_between_tries_has_a_name_and_is_hidden():
    calls = []

    def call():
        calls.append(1)
        if len(calls) < 3:
            raise OSError(5, "Input/output error")
        return "text"

    before = default_meter().totals().get("wait/source.retry/count", 0)
    assert patiently("reading x", call) == "text"
    assert len(calls) == 3
    assert default_meter().totals()["wait/source.retry/count"] == before + 1


LONG_LINE = """
import sys
from pathlib import Path
import msgspec, numpy
from headrace.formats.lines import TextLines
from headrace.sources import Source, open_source
TextLines.max_line_bytes = int(sys.argv[3])
def peak_mib():
    # Not ru_maxrss: that one is inherited from the parent over fork and exec.
    return int(next(row for row in open("/proc/self/status") if row.startswith("VmHWM")).split()[1]) // 1024
folder = Path(sys.argv[1])
base = peak_mib()
scheme = sys.argv[2]
lines = Source(f"{scheme}:d.{scheme}", on_bad="skip", split="line" if scheme == "txt" else None)
source = open_source(lines, base=folder, cache=folder / "cache")
lengths = [-1 if t is None else len(t) for c in range(source.manifest.chunks) for t in source.read(c)]
print(*lengths, peak_mib() - base)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to read the peak of memory")
@pytest.mark.parametrize("scheme", ["jsonl", "txt"])
def test_a_line_of_100_mb_above_the_limit_costs_no_memory_and_below_it_three_times_its_size(tmp_path, scheme):
    opening, closing = (b'{"text":"', b'"}') if scheme == "jsonl" else (b"", b"")
    with (tmp_path / f"d.{scheme}").open("wb") as file:
        file.write(opening + b"a" + closing + b"\n" + opening)
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(closing + b"\n" + opening + b"b" + closing + b"\n")

    def lengths_and_mib(limit):
        command = [sys.executable, "-c", LONG_LINE, tmp_path, scheme, str(limit)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        *lengths, mib = map(int, done.stdout.split())
        return lengths, mib

    lengths, mib = lengths_and_mib(64 << 20)
    assert lengths == [1, -1, 1]
    assert mib < 40
    lengths, mib = lengths_and_mib(256 << 20)
    assert lengths == [1, 100_000_000, 1]
    assert mib < 340


READ_AND_STAY = """
import sys
from pathlib import Path
from headrace.sources import Source, open_source
folder, records = map(Path, sys.argv[1:])
with open_source(Source("txt:d.txt", split="line"), base=folder, cache=folder / "cache", records=records, chunk_bytes=9) as source:
    for chunk in range(source.manifest.chunks):
        source.read(chunk)
    sys.stdin.read()
"""


def test_a_reader_killed_at_any_point_leaves_records_that_hold(tmp_path):
    (tmp_path / "d.txt").write_bytes(b"".join(b"row %04d\n" % i for i in range(3000)))
    records = tmp_path / "run"
    for size in (1, 5_000, 40_000):
        process = subprocess.Popen(
            [sys.executable, "-c", READ_AND_STAY, tmp_path, records], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        deadline = time.monotonic() + 30
        while sum(path.stat().st_size for path in records.glob("*.chunks")) < size:
            assert process.poll() is None
            assert time.monotonic() < deadline
            os.sched_yield()
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=10)
    with open_source(
        Source("txt:d.txt", split="line"),
        base=tmp_path,
        cache=tmp_path / "cache",
        records=records,
        chunk_bytes=9,
        full_check=True,
    ) as source:
        assert source.check_recorded() >= 40_000 // 43
        assert sum(len(source.read(chunk)) for chunk in range(source.manifest.chunks)) == 3000
        assert source.check_recorded() == 3000
