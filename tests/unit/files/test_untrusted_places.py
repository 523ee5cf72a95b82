"""Anything in the place of a file: a pipe, a device, a folder, a link out, gigabytes, nesting without end. The answer comes
at once, is right or an error that names the file, and what a link leads to is not written."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch  # noqa: F401 (here, and not while an answer is waited for)

from headrace.errors import HeadraceError
from headrace.files import (  # fmt: skip
    decode_json,
    decode_toml,
    open_regular,
    read_json,
    read_lines,
    read_regular,
    read_tail,
)
from headrace.rollouts.arrival_log import ArrivalLog, read_arrivals

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fuzz"))
from targets import (  # fmt: skip
    CONFIG,
    TARGETS,
    arrivals,
    read_chunk_hashes,
    read_config,
    read_cursor,
    read_dump,
    read_episodes,
    read_flight,
    read_legacy,
    read_manifest,
    read_run,
    read_shift,
    read_spool_record,
    read_tiktoken,
    read_tokenizer,
    read_verdict,
    read_weights,
    run_folder,
)


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


def link_out(path):
    (path.parent.parent / "outside").write_text('{"event": "outside", "step": 1}\n')
    path.symlink_to(path.parent.parent / "outside")


def gigabytes(path):
    path.touch()
    os.truncate(path, 8 << 30)


def deep(path):
    path.write_text("[" * 1_000_000)


def deep_keys(path):
    path.write_text("[" + ".".join("a" * 100_000) + "]\n" + "k = 1\n" * 1)


def binary(path):
    path.write_bytes(b"\xff\xfe\x00" * 1000)


KINDS = [pipe, device, folder, link_out, gigabytes, deep, deep_keys, binary]


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory):
    """Everything is imported once, before answers are waited for."""
    folder = tmp_path_factory.mktemp("whole")
    run_folder(folder / "run.json")
    read_run(folder / "run.json")
    (folder / "train.jsonl").write_text('{"text": "a"}\n')
    hub_folder(folder / "train.jsonl").close()


@pytest.fixture(autouse=True)
def soon(imported):
    """Every answer within 5 s of processor time; a call that waits for a pipe would never return, and is ended after a minute."""

    def late(*_):
        raise TimeoutError("it waits, or works without end")

    before = [signal.signal(number, late) for number in (signal.SIGALRM, signal.SIGVTALRM)]
    signal.alarm(60)
    signal.setitimer(signal.ITIMER_VIRTUAL, 5.0)
    yield
    signal.alarm(0)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    for number, handler in zip((signal.SIGALRM, signal.SIGVTALRM), before, strict=True):
        signal.signal(number, handler)


def spool_stat(path):
    from headrace.spool.survey import survey

    return survey(path.parents[3])


def gram_folder(path):
    from headrace.reduce.shards import RowShards

    return RowShards.open([path.parent])


def gram_stamps(path):
    from headrace.reduce.shards import saved_stamps

    return saved_stamps(path)


def hub_folder(path):
    from headrace.sources import Source, open_source

    return open_source(Source(f"hf:{path.parent}"), cache=path.parent.parent / "cache")


READERS = {
    "run.json": read_run, "summary.json": read_run, "metrics.jsonl": read_run, "journal.jsonl": read_run, "config.toml": read_run,
    "run.toml": read_config, "tokenizer.json": read_tokenizer, "a.jsonl": read_episodes, "a.msgpack": read_episodes,
    "a.safetensors": gram_folder, "a.npy": gram_folder, "a.parquet": gram_folder, "stamps.json": gram_stamps,
    "README.md": hub_folder, "meta.json": TARGETS["spool meta.json"].read, "meta.pkl": TARGETS["spool meta.pkl"].read,
    "commit": read_spool_record, "verdict": read_verdict, "train_batches_0.pt": read_legacy, "manifest.json": read_manifest,
    "shift.npy": read_shift, "gpt2.tiktoken": read_tiktoken, "a.chunks": read_chunk_hashes, "cursor.json": read_cursor,
    "probe.json": read_weights, "flight.jsonl": read_flight, "step_000000000003.log": lambda path: list(read_arrivals(path)), "a.dump": read_dump,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_what_lies_in_the_place_of_a_file_is_refused_by_name_or_passed_over(tmp_path, name, kind):
    place = tmp_path / "foreign"
    place.mkdir()
    path = place / name
    run_folder(path)
    (place / "train.jsonl").write_text('{"text": "a"}\n')
    if os.path.lexists(path):
        path.unlink()
    kind(path)
    try:
        READERS[name](path)
    except HeadraceError as error:
        assert str(place) in str(error) or name in str(error)  # noqa: PT017
    if kind is link_out:
        assert (tmp_path / "outside").read_text() == '{"event": "outside", "step": 1}\n'


@pytest.mark.parametrize("kind", [pipe, device, folder, link_out])
def test_only_a_regular_file_is_opened(tmp_path, kind):
    place = tmp_path / "f"
    place.mkdir()
    path = place / "a.json"
    kind(path)
    for read in (lambda: open_regular(path), lambda: read_regular(path, 10), lambda: list(read_lines(path)), lambda: read_tail(path)):  # fmt: skip
        with pytest.raises(HeadraceError, match=r"a\.json is (not a regular file|a symbolic link)"):
            read()
    if kind is link_out:
        assert read_json(path, follow=True)["event"] == "outside"


def test_sizes_lines_and_tails_are_bounded(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"one\n" + b"x" * 5000 + b"\nthree")
    with pytest.raises(HeadraceError, match=r"has 5,010 bytes; at most 10 are read"):
        read_regular(path, 10)
    assert [tuple(line) for line in read_lines(path, 100)] == [(1, 0, b"one\n"), (2, 4, None), (3, 5005, b"three")]
    assert read_tail(path, 10) == [b"three"]
    assert read_tail(path)[0] == b"one"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 10)


def test_values_nested_too_deeply_are_refused_by_name():
    with pytest.raises(HeadraceError, match="w is damaged: its JSON is nested too deeply"):
        decode_json("[" * 1_000_000, "w")
    with pytest.raises(HeadraceError, match="w is damaged: it is not JSON"):
        decode_json(b"\xff", "w")
    with pytest.raises(HeadraceError, match="w:2: a key of more than 33 parts"):
        decode_toml("a = 1\n" + "b." * 40 + "c = 1", "w")
    with pytest.raises(HeadraceError, match="w: values are nested too deeply"):
        decode_toml("a = " + "[" * 100_000, "w")
    assert decode_toml(CONFIG, "w")["text"] == {"seq_len": 16}
    assert decode_json(json.dumps({"n": 1 << 200}), "w") == {"n": 1 << 200}


# ----------------------------------------------------------------------------------------------- writing


def outside_of(tmp_path):
    return {
        str(p.relative_to(tmp_path)): p.read_bytes() if p.is_file() else None for p in (tmp_path / "outside").rglob("*")
    }


def test_an_arrival_log_is_not_cut_or_appended_through_a_link(tmp_path):
    (tmp_path / "outside").mkdir()
    real, log = tmp_path / "outside" / "log", tmp_path / "arrivals" / "step_000000000003.log"
    log.parent.mkdir()
    arrivals(log)
    log.rename(real)
    real.write_bytes(real.read_bytes() + b"torn")
    log.symlink_to(real)
    (log.parent / "step_of_mine.log").write_text("a file of another name")
    before = outside_of(tmp_path)
    with pytest.raises(HeadraceError, match=r"step_000000000003\.log is a symbolic link"):
        ArrivalLog(log.parent)
    log.unlink()
    opened = ArrivalLog(log.parent)
    (log.parent / "step_000000000004.log").symlink_to(tmp_path / "outside" / "new")
    with pytest.raises(HeadraceError, match=r"step_000000000004\.log: it is a symbolic link"):
        opened.append_failure({"task": 1, "member": 0, "attempt": 0, "step": 4, "reason": "late"})
    opened.drop_below(9)
    assert outside_of(tmp_path) == before
    assert (log.parent / "step_of_mine.log").exists()


@pytest.mark.parametrize("name", ["queue/train", "claims/train", "verdicts/train", "quarantine/train", "archives", "queue/rollouts"])  # fmt: skip
def test_no_folder_of_a_spool_is_a_link_out_of_it(tmp_path, name):
    from headrace.rollouts.transport import SpoolReceiver
    from headrace.spool.channel import Channel
    from headrace.spool.folder import SpoolFolder

    folder = SpoolFolder(tmp_path / "spool")
    folder.prepare()
    (tmp_path / "outside").mkdir()
    (tmp_path / "spool" / name).symlink_to(tmp_path / "outside")
    channel = Channel(folder, "train")

    def write():
        SpoolReceiver(tmp_path / "spool")
        channel.prepare()
        channel.path(0).write_bytes(b"a batch")
        channel.delete(0, archive=2)

    with pytest.raises(HeadraceError, match=rf"spool/{name}: it is a symbolic link"):
        write()
    assert outside_of(tmp_path) == {}


# ------------------------------------------------------------------------------------- right sums, slow refusals


def keys_without_end(path):
    path.write_text(json.dumps({f"key{i}": 1 for i in range(300_000)}) + "\n")


def pickle_without_end(path):
    path.write_bytes(b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b".")


@pytest.mark.parametrize(
    ("name", "make", "read"),
    [("a.jsonl", keys_without_end, TARGETS["text: jsonl"].read), ("meta.pkl", pickle_without_end, TARGETS["spool meta.pkl"].read)],
)  # fmt: skip
def test_what_is_refused_is_refused_soon(tmp_path, name, make, read):
    make(tmp_path / name)
    began = time.process_time()
    with pytest.raises(HeadraceError, match=name):
        read(tmp_path / name)
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize("kind", [pipe, device, folder, link_out])
def test_what_lies_in_the_place_of_a_claim_is_refused_by_name(tmp_path, kind):
    from headrace.spool.channel import Channel
    from headrace.spool.folder import SpoolFolder

    spool = SpoolFolder(tmp_path / "spool")
    spool.prepare()
    channel = Channel(spool, "train")
    channel.prepare()
    kind(channel.claims / f"{0:012d}")
    with pytest.raises(HeadraceError, match=r"claims/train/000000000000"):
        channel.claim(0, "a provider", lease=10.0)


@pytest.mark.parametrize("kind", [pipe, device, folder, link_out, gigabytes, deep])
def test_what_lies_in_the_place_of_a_verdict_is_none(tmp_path, kind):
    from headrace.spool.channel import Channel
    from headrace.spool.folder import SpoolFolder

    spool = SpoolFolder(tmp_path / "spool")
    spool.prepare()
    channel = Channel(spool, "train")
    channel.prepare()
    kind(channel.verdicts / f"{0:012d}")
    assert channel.verdict(0) is None
    try:
        assert channel.judge(0, "damaged").reason == "damaged"
    except HeadraceError as error:
        assert "verdicts/train/000000000000" in str(error)  # noqa: PT017
