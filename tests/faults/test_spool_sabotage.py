"""Do the tests bite? Defects that have cost others data are put into a copy of the source, one at a time; each must make
the suite fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LONG = os.environ.get("HEADRACE_FAULTS", "long") == "long"
ROOT = Path(__file__).resolve().parents[2]
SUITE = ("tests/unit/files", "tests/unit/spool", "tests/property/test_spool_laws.py", "tests/faults/test_spool_disk.py")

DEFECTS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "no fsync": (("files.py", "            if durable:\n                os.fsync(fd)\n", ""),),
    "no fsync of a commit": (("spool/records.py", "                os.fsync(fd)\n            except OSError:", "                pass\n            except OSError:"),),
    "no fsync of the folder": (("files.py", "        if durable:\n            sync_folder(folder)\n", ""),),
    "no checksum": (("files.py", "!= sums[segment]:", "!= sums[segment] and False:"),),
    "delete before commit": (
        ("spool/retention.py", 'self.move_commit({split: {"g": end, "at": [[seq + 1, 0]], "start": [end]}}, patience=0.0)', "self._channel(split, 0).delete(seq)"),
    ),
    "cursor at produce": (
        ("spool/reader.py", 'return {"g": self.position, "at": at,',
         'return {"g": self.parts[0].reached, "at": [[part.seq + len(part.open), 0] for part in self.parts],'),
    ),
    "order by timestamp": (
        ("spool/channel.py", "        path = self.path(seq)\n        if os.path.lexists(path):\n            return path\n",
         "        found = sorted(self.queue.glob('0*'), key=lambda p: p.lstat().st_mtime) if self.queue.is_dir() else []\n"
         "        place = seq - self.commit_point()\n"
         "        if 0 <= place < len(found):\n            return found[place]\n"),
    ),
    "number = max(names) + 1": (
        ("spool/provider.py", "        return range(channel.commit_point(),", "        return range(max(channel.present(), default=-1) + 1,"),
        ("spool/provider.py", "commit = channel.commit_point() if missing else 0", "commit = 0"),
        ("spool/channel.py", "        return max(self.commit_point(), min(", "        return max(*(n + 1 for n in self.present()), 0, 0 * min("),
        ("spool/channel.py", "        if not self.circular and seq < self.commit_point():\n            return \"late\"\n        try:", "        try:"),
        ("spool/channel.py", "        if not self.circular and seq < self.commit_point():\n            # It is never read.", "        if False:\n            # It is never read."),
    ),
    "a failed fsync is tried again": (
        ("files.py", "                os.fsync(fd)\n        finally:", "                try:\n                    os.fsync(fd)\n                except OSError:\n                    os.fsync(fd)\n        finally:"),
    ),
    "os.replace": (("files.py", "            os.link(temp, path)\n            os.unlink(temp)\n", "            os.replace(temp, path)\n"),),
    "no verdict": (
        ("spool/verdicts.py", "        if verdict is None and not mine and time.monotonic() - since <= self._patience:", "        if False:"),
        ("spool/verdicts.py", "verdict = decide(lambda: channel.judge(seq, problem))", "verdict = Verdict(good=not problem, reason=problem)"),
    ),
}  # fmt: skip


def sabotage(source: Path, changes) -> None:
    for name, before, after in changes:
        path = source / "headrace" / name
        text = path.read_text()
        assert text.count(before) == 1, f"the defect no longer fits {name}: {before!r}"
        path.write_text(text.replace(before, after))


def suite(source: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(source), "HEADRACE_FAULTS": "short"}
    words = [
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "120",
        "--deselect",
        "tests/faults/test_spool_disk.py::test_no_acknowledged_file_is_missing_after_a_power_cut",
    ]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words, *SUITE], cwd=ROOT, env=env, capture_output=True, text=True, timeout=860
    )


@pytest.mark.timeout(900)
@pytest.mark.skipif(not LONG, reason="the suite once for each defect: for the long sweep")
@pytest.mark.parametrize("defect", DEFECTS)
def test_the_suite_fails_on_a_seeded_defect(tmp_path, defect):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    sabotage(tmp_path / "src", DEFECTS[defect])
    done = suite(tmp_path / "src")
    assert done.returncode == 1, f"no test noticed: {done.stdout[-2000:]}"
    found = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    print(defect, found)
    assert found
    assert "Failed: Timeout" not in done.stdout, f"a time limit is no finding: {found}"


def test_every_defect_still_fits_the_source(tmp_path):
    for number, changes in enumerate(DEFECTS.values()):
        shutil.copytree(ROOT / "src", tmp_path / f"src{number}", ignore=shutil.ignore_patterns("__pycache__"))
        sabotage(tmp_path / f"src{number}", changes)
