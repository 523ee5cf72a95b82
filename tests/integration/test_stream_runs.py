"""Stream runs: what the three example configs show on 1 and on 4 ranks, exact resume, sinks, and bad configs.

Run as a script this file is the fork server of its ranks (rank_server.py); runs on one rank happen in this process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError, CursorMismatch, DataChanged
from headrace.files import read_jsonl
from headrace.order.fingerprint import sampled_offsets
from headrace.runs.config.loading import load_any_config, load_config
from headrace.runs.config.streams import StreamsConfig
from headrace.ui import find_problems, read_run

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import rank_server
import stream_runs
from stream_runs import CONFIGS, lines, run

ranks, desk, on_four = rank_server.ranks, stream_runs.desk, stream_runs.on_four
A = "stream_mixing/active"
EXHAUSTED = "stream_mixing/refill/exhaust_events"

if __name__ == "__main__":
    import torch._dynamo  # noqa: F401  (which an optimizer imports when it is made)

    import headrace.ledger.shard
    import headrace.runs.streams
    import headrace.train.cells  # noqa: F401  (once, for all ranks to come)

    rank_server.serve()
    sys.exit(0)


@pytest.fixture(scope="module")
def server(desk) -> Iterator[subprocess.Popen[str]]:
    with rank_server.serving(__file__, desk) as process:
        yield process


def healthy(found: list[dict[str, Any]], ranks: int) -> None:
    losses = [line["train/loss"] for line in found]
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])
    spread = [line[f"{A}/remaining_fraction_max"] - line[f"{A}/remaining_fraction_min"] for line in found]
    assert sum(spread) / len(spread) < 0.3
    assert max(line[f"{A}/overdue_max"] for line in found) < 3
    assert max(line[f"{A}/steps_since_pick_max"] for line in found) < 5 * 4
    for modality in ("atac", "morphology", "protein", "rna"):
        present = sum(line[f"{A}/modalities/{modality}"] > 0 for line in found)
        assert present > 0.9 * len(found), modality
    assert 0 < sum(line[EXHAUSTED] > 0 for line in found) < 0.2 * len(found)
    assert sum(line["data/rows"] for line in found[:50]) / 50 > 28, "32 rows a step, whatever the ranks"


def imbalanced(found: list[dict[str, Any]], ranks: int) -> None:
    spread = [line[f"{A}/remaining_fraction_max"] - line[f"{A}/remaining_fraction_min"] for line in found]
    assert sum(spread) / len(spread) < 0.2, "draining is healthy under this stress"
    picks = {m: sum(line[f"stream_mixing/picks/{m}"] for line in found) for m in ("atac", "protein", "rna")}
    assert sum(picks.values()) <= len(found), "one draw a step, however many ranks share it"
    assert picks["rna"] > 0.9 * len(found)
    assert picks["atac"] < 0.05 * len(found)
    assert {line[f"{A}/modalities/rna"] for line in found} == {1}, "counts of readers stay flat"
    assert max(line[f"{A}/steps_since_pick_max"] for line in found) > 5 * 4, "the large batches wait"
    assert max(line[f"{A}/overdue_max"] for line in found) < 3, "and no longer than their share promises"


def told(folder: Path) -> str:
    """What the report of a run says in words."""
    view = read_run(folder)
    return "\n".join(finding.sentence for finding in find_problems(view, view.status()))


def spiking(found: list[dict[str, Any]], ranks: int) -> None:
    dry = sum(line[EXHAUSTED] > 0 for line in found) / len(found)
    assert dry > 0.9
    assert sum(line[EXHAUSTED] for line in found) / len(found) > 2


STEPS = 80
"""Of the 200 that the configs have: their signatures are there by then."""
SIGNATURES = {"healthy": healthy, "diag_imbalanced_bs": imbalanced, "diag_exhaust_spike": spiking}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_config_shows_its_signature_on_one_and_on_four_ranks(name, desk, tmp_path, on_four):
    config = str(CONFIGS / f"{name}.toml")
    small = ("--run.steps", str(STEPS), "--train.dim", "16", "--train.depth", "0")
    one = run(config, str(tmp_path / "one"), *small)
    four = on_four(config, tmp_path / "four", *small)
    for world, folder, summary in ((1, "one", one), (4, "four", four)):
        found = lines(tmp_path / folder)
        assert [line["step"] for line in found] == list(range(1, STEPS + 1))
        assert summary["state"] == "completed"
        assert summary["world_size"] == world
        SIGNATURES[name](found, world)
        flat = r"rna gets 9\d% of the batches while the counts of open files stay flat"
        assert bool(re.search(flat, told(tmp_path / folder))) is (name == "diag_imbalanced_bs")
    assert four["order_digest"] == one["order_digest"], "the same cells in the same draws"
    assert four["mix"] == one["mix"]
    worst = lines(tmp_path / "four")[-1]
    assert worst[f"{A}/steps_since_pick_max/worst_rank"] in range(4)


def test_a_run_that_stopped_on_four_ranks_goes_on_on_one_and_ends_where_the_straight_one_does(desk, tmp_path, on_four):
    config = str(CONFIGS / "healthy.toml")
    fast = ("--run.steps", "24", "--run.log_every", "6")
    straight = run(config, str(tmp_path / "straight"), *fast)
    on_four(config, tmp_path / "chain", *fast, "--run.stop_after", "7")
    run("", str(tmp_path / "chain"), "--run.stop_after", "8", "--streams.num_workers", "1")
    end = run("", str(tmp_path / "chain"), "--streams.num_streams_mixed", "4")
    assert end["step"] == 24
    assert end["order_digest"] == straight["order_digest"]
    assert end["mix"] == straight["mix"]
    assert (
        lines(tmp_path / "chain")[-1]["data/tokens_seen/rna"]
        == lines(tmp_path / "straight")[-1]["data/tokens_seen/rna"]
    )


def test_stopping_and_going_on_on_the_same_shape_gives_the_same_model_to_the_bit(desk, tmp_path):
    config = str(CONFIGS / "diag_exhaust_spike.toml")
    straight = run(config, str(tmp_path / "straight"), "--run.steps", "12")
    run(config, str(tmp_path / "chain"), "--run.steps", "12", "--run.stop_after", "5")
    end = run("", str(tmp_path / "chain"))
    assert end["model_sha256"] == straight["model_sha256"]
    assert end["order_digest"] == straight["order_digest"]
    again = run("", str(tmp_path / "chain"))
    assert (again["state"], again["step"], again["model_sha256"]) == ("completed", 12, end["model_sha256"])


@pytest.mark.parametrize(("on_reshard", "what"), [("drop", "dropped {} still-active readers"), ("park", "parked {} still-active readers at the head of the queue")])  # fmt: skip
@pytest.mark.parametrize("stdout", ["text", "json"])
def test_the_command_prints_and_journals_what_a_smaller_pool_did_to_open_readers(
    tmp_path, capsys, on_reshard, what, stdout
):
    from headrace.cli import main
    from stream_cells import write_streams

    write_streams(tmp_path / "cells", {"rna": [40, 40, 40, 40]})
    config = tmp_path / "c.toml"
    config.write_text(
        f'[run]\nsteps = 8\n[streams]\nroots = ["{tmp_path}/cells"]\nbatch_size = 4\nnum_streams_mixed = 4\non_reshard = "{on_reshard}"\n'
    )
    run(str(config), str(tmp_path / "run"), "--run.stop_after", "5")
    capsys.readouterr()
    smaller = ("--streams.num_streams_mixed", "1", *(("--format", "json") if stdout == "json" else ()))
    with pytest.raises(SystemExit, match="0"):
        main(["run", "--resume", str(tmp_path / "run"), *smaller])
    printed = capsys.readouterr()
    assert f"[stream_mixing] resume reshard {what.format(3)}" in (printed.err if stdout == "json" else printed.out)
    resumed = [line for line in read_jsonl(tmp_path / "run" / "journal.jsonl") if line["event"] == "resumed"]
    assert [(line["dropped"], line["parked"]) for line in resumed] == [(3, 0) if on_reshard == "drop" else (0, 3)]


def two_files(tmp_path: Path, rows: int) -> tuple[str, Path]:
    """A config over two files of ten draws each, and the second of them."""
    import numpy as np

    (tmp_path / "cells" / "rna").mkdir(parents=True)
    for file in ("a.npy", "b.npy"):
        np.save(tmp_path / "cells" / "rna" / file, np.ones((rows, 4), np.float32))
    config = tmp_path / "c.toml"
    config.write_text(f'[run]\nsteps = 20\n[streams]\nroots = ["{tmp_path}/cells"]\nbatch_size = {rows // 10}\n')
    return str(config), tmp_path / "cells" / "rna" / "b.npy"


def change_byte(path: Path, at: int) -> None:
    """One byte of a file, which keeps its size and its time of modification."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\x01")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def test_a_resume_over_one_other_value_in_a_file_of_the_same_size_and_time_is_refused_and_names_it(desk, tmp_path):
    config, path = two_files(tmp_path, 40)
    run(config, str(tmp_path / "run"), "--run.stop_after", "3")
    change_byte(path, 600)
    with pytest.raises(CursorMismatch, match=r"cannot resume .* at step 3: .*\(data: rna/b\.npy has other content\)"):
        run("", str(tmp_path / "run"))


def test_a_value_that_changed_between_the_sampled_blocks_of_a_large_file_is_refused_when_it_is_read_again(
    desk, tmp_path
):
    config, path = two_files(tmp_path, 400_000)
    run(config, str(tmp_path / "run"), "--run.stop_after", "3")
    sampled = sampled_offsets(path.stat().st_size)
    change_byte(path, next(at for at in range(1 << 16, 1 << 19, 1 << 16) if at not in sampled))  # of the first draw
    run("", str(tmp_path / "run"))
    with pytest.raises(DataChanged, match=r"rows \S+ to \S+ of \S+/rna/b\.npy are not the cells that were read"):
        run("", str(tmp_path / "run"), "--run.steps", "40")


def test_the_file_and_tensorboard_get_the_stream_metrics(desk, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(
        str(CONFIGS / "healthy.toml"),
        str(tmp_path / "run"),
        "--run.steps",
        "3",
        "--run.sinks",
        '["tensorboard", "wandb"]',
    )
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert {f"{A}/remaining_min", EXHAUSTED, f"{A}/modalities/rna", "data/tokens_seen/rna"} <= set(
        events.Tags()["scalars"]
    )
    assert {f"{A}/overdue_max", "stream_mixing/picks/atac"} <= lines(tmp_path / "run")[-1].keys()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[streams]\nroots = ['a']\ndebug_log_active_every_n_batches = 5", r"c.toml:3: streams.debug_log_active_every_n_batches: removed; metrics are emitted every step"),
        ("[streams]\nroots = ['a']\npick_mode = 'wieghted'", r'c.toml:3: streams.pick_mode: unknown value "wieghted", did you mean "weighted"'),
        ("[streams]\nroot = ['a']", r"c.toml:2: streams.root: unknown key, did you mean roots\?"),
        ("[streams]\nroots = []", "expected at least one folder"),
        ("[streams]\nroots = ['a']\nbatch_size = 0", "c.toml:3: streams.batch_size: must be at least 1"),
        ("[streams]\nroots = ['a']\nbatch_sizes = {rna = 0}", "streams.batch_sizes.rna: must be at least 1"),
        ("[streams]\nroots = ['a']\nlanes = 2", "streams.lanes belong to batching_mode"),
        ("[streams]\nroots = ['a']\n[[source]]\nspec = 'sample:prose'", "belongs to a text job and"),
        ("[streams]\nroots = ['a']\n[train]\nmodel = 'gpt-tiny'", r"train.model: unknown key"),
        ("[streams]\nroots = ['a']\n[text]\nseq_len = 4", "belongs to a text job and"),
        ("[rollouts]\n", r"env: missing, expected at least one \[\[env\]\]"),
        ("[rollouts]\nlagg = 1\n[[env]]\nspec = 'python:a.py:play'", r"c.toml:2: rollouts.lagg: unknown key, did you mean lag\?"),
        ("[[env]]\nspec = 'ruby:a.rb'", "env.0.spec: expected \"python:"),
        ("[[env]]\nspec = 'python:a.py:all'\nname = 'all'", "cannot be called \"all\""),
        ("[[env]]\nspec = 'python:a.py:play'\n[text]\nseq_len = 4", "belongs to a text job and"),
        ("[[env]]\nspec = 'python:a.py:play'\n[engine]\nkind = 'openai'", "needs url ="),
        ("[[env]]\nspec = 'python:a.py:play'\n[policy]\nadvantage = 'best'", "policy.advantage: expected \"mean\""),
    ],
)  # fmt: skip
def test_a_config_that_is_wrong_says_so_where_it_is_written(tmp_path, text, sentence):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load_any_config(tmp_path / "c.toml", env={})


def test_a_config_is_written_back_as_it_was_read_and_verbs_for_text_refuse_it(tmp_path):
    config = load_any_config(
        CONFIGS / "diag_imbalanced_bs.toml", ["--streams.batch_sizes.atac", "3"], env={"CONTEXT_LEN": "7"}
    )
    assert isinstance(config, StreamsConfig)
    assert config.streams.batch_sizes == {"rna": 1, "atac": 3}
    (tmp_path / "again.toml").write_text(config.to_toml())
    assert load_any_config(tmp_path / "again.toml", env={}) == config
    with pytest.raises(ConfigError, match="describes a job of kind 'streams'; this works on text jobs"):
        load_config(CONFIGS / "healthy.toml", env={})


def test_check_warns_of_runs_that_starve_spike_or_evict(desk, tmp_path):
    from headrace.runs.streams_check import check_streams

    def warned(name: str, *overrides: str, **options: Any) -> str:
        return "\n".join(
            check_streams(load_any_config(CONFIGS / f"{name}.toml", overrides, env={}), **options).warnings
        )

    assert warned("healthy") == ""
    assert "spikes: slices run dry at 9" in warned("diag_exhaust_spike")
    assert "lopsided: protein gets" in warned("diag_imbalanced_bs")
    assert "waits: " in warned("healthy", "--streams.pick_mode", "weighted", "--run.steps", "400")
    assert "starves: " in warned(
        "healthy", "--streams.queue", "permuted", "--streams.num_streams_mixed", "1", "--run.steps", "60"
    )
    assert "evicts falsely: a ledger with stale_threshold = 5" in warned(
        "healthy", "--streams.pick_mode", "weighted", stale_threshold=5
    )
    assert "evicts" not in warned("healthy", stale_threshold=20)
    assert "may evict falsely: a ledger of 50 groups" in warned("healthy", "--ledger.mode=lru", "--ledger.capacity=50")
    assert "evict" not in warned("healthy", "--ledger.mode=lru", "--ledger.capacity=5000")
    assert "lanes have no stream" in warned("diag_exhaust_spike", "--streams.lanes", "120")
    with pytest.raises(ConfigError, match="3 ranks cannot share 4 lanes"):
        warned("diag_exhaust_spike", ranks=3)
    with pytest.raises(ConfigError, match="name protien"):
        warned("healthy", "--streams.batch_sizes.protien", "4")
