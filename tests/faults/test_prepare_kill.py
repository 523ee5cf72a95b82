"""A preparation that is killed again and again ends with the bytes of the one that nobody touched."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

from headrace.testing import kill_sweep

LONG = os.environ.get("HEADRACE_FAULTS", "long") == "long"
ENV = os.environ | {"NO_COLOR": "1"}


def contents(folder):
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != "prepare.lock" and p.parent.name != "records"
    }


@pytest.mark.timeout(1800)
def test_killed_preparations_end_with_the_bytes_of_the_one_nobody_touched(tmp_path):
    texts = [f"document {i} " + "lorem ipsum dolor sit amet " * (i % 61) for i in range(2500)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (tmp_path / "c.toml").write_text(
        '[[source]]\nspec = "jsonl:a.jsonl"\n[text]\ntokenizer = "sample"\nseq_len = 128\n[train]\n'
    )
    # 16 KiB shards: hundreds of them, so that most kills fall into the making of one.
    script = (
        "import sys; from pathlib import Path\n"
        "from headrace.runs.config.loading import load_config\n"
        "from headrace.runs.prepare import prepare\n"
        "class Silent:\n"
        "    def progress(self, *_): ...\n"
        "    def notice(self, sentence): print(sentence)\n"
        "prepare(load_config(Path('c.toml')), Path(sys.argv[1]), Silent(), began=lambda *_: (Path(sys.argv[1]) / 'ready').touch(), workers=2, shard_bytes=1 << 14)\n"
        "(Path(sys.argv[1]) / 'ready').unlink()\n"
    )
    command = [sys.executable, "-c", script]
    subprocess.run([*command, "whole"], cwd=tmp_path, env=ENV, check=True, capture_output=True)
    expected = contents(tmp_path / "whole")
    assert len(expected) > 20
    for seed in range(6 if LONG else 1):
        out = tmp_path / f"killed-{seed}"
        sweep = kill_sweep(
            [*command, out.name], [*command, out.name], kills=8 if LONG else 3, seed=seed, longest=0.8,
            ready=lambda out=out: (out / "ready").exists(), env=ENV, cwd=tmp_path,
        )  # fmt: skip
        assert contents(out) == expected, sweep
        assert not list(out.rglob(".tmp-*")), "a finished folder leaves nothing behind"
