"""Publishing, quarantine, and what a container refuses."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import xxhash

from headrace.errors import FileCorrupt, StorageError
from headrace.files import (
    TEMP_PREFIX,
    make_inside,
    open_container,
    open_inside,
    publish,
    publish_json,
    quarantine,
    sweep_temporaries,
    write_container,
)


def test_publish_is_exclusive_and_leaves_the_first(tmp_path):
    publish(tmp_path / "a", b"first")
    with pytest.raises(FileExistsError):
        publish(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["a"]


def test_publish_replaces_only_when_asked(tmp_path):
    publish(tmp_path / "a", b"first")
    publish(tmp_path / "a", [b"sec", memoryview(b"ond")], replace=True)
    assert (tmp_path / "a").read_bytes() == b"second"


def test_a_failed_write_leaves_nothing_and_names_the_file(tmp_path):
    def parts():
        yield b"some"
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match=r"could not write .*/a: No space left on device"):
        publish(tmp_path / "a", parts())
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(tmp_path):
    # RLIMIT_FSIZE stands in for a full disk: the write stops in the middle.
    code = (
        "import resource, signal, sys; from pathlib import Path; from headrace.files import publish\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "from headrace.errors import StorageError\n"
        "try: publish(Path(sys.argv[1]) / 'a', b'x' * 5000)\n"
        "except StorageError as e: print('refused', e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "refused could not write" in done.stdout
    assert os.listdir(tmp_path) == []


def test_publish_syncs_the_file_before_and_the_folder_after_it_appears(tmp_path, monkeypatch):
    calls: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "link", "unlink")}

    def fsync(fd: int) -> None:
        calls.append("fsync folder" if Path(f"/proc/self/fd/{fd}").is_dir() else "fsync file")
        real["fsync"](fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", lambda *a: (calls.append("link"), real["link"](*a)))
    monkeypatch.setattr(os, "unlink", lambda *a: (calls.append("unlink"), real["unlink"](*a)))
    publish(tmp_path / "a", b"x")
    assert calls == ["fsync file", "link", "unlink", "fsync folder"]


def test_sweeping_removes_what_dead_writers_left_and_nothing_else(tmp_path):
    (tmp_path / f"{TEMP_PREFIX}1-abc").write_bytes(b"half")
    (tmp_path / "whole").write_bytes(b"x")
    sweep_temporaries(tmp_path)
    assert os.listdir(tmp_path) == ["whole"]


def test_quarantine_keeps_the_file_and_says_why(tmp_path):
    for round_ in range(2):
        (tmp_path / "bad").write_bytes(b"%d" % round_)
        went = quarantine(tmp_path / "bad", "it smelled")
        assert went.read_bytes() == b"%d" % round_
        assert json.loads(went.with_name(went.name + ".reason.json").read_text())["reason"] == "it smelled"
    assert not (tmp_path / "bad").exists()


def test_other_tools_read_our_containers(tmp_path):
    write_container(tmp_path / "c", {"w": np.eye(3, dtype=np.float32)}, {"a": 1})
    assert np.array_equal(safetensors.numpy.load_file(tmp_path / "c")["w"], np.eye(3, dtype=np.float32))


def test_bfloat16_passes_as_its_bits(tmp_path):
    write_container(tmp_path / "c", {"w": np.array([1, 2], np.uint16)}, None, dtypes={"w": "BF16"})
    opened = open_container(tmp_path / "c")
    assert opened.dtypes["w"] == "BF16"
    assert opened.arrays["w"].tolist() == [1, 2]


def test_a_dtype_that_no_container_holds_is_refused(tmp_path):
    with pytest.raises(TypeError, match="'w' has dtype complex128"):
        write_container(tmp_path / "c", {"w": np.zeros(2, np.complex128)}, None)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 7,
        (2**63).to_bytes(8, "little") + b"{}",
        (2**40).to_bytes(8, "little") + b"{}" + b" " * 100,
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (40).to_bytes(8, "little") + b'{"__metadata__":{"headrace":"{}"}}      ',
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
    ],
)
def test_a_hostile_header_is_refused_without_a_large_allocation(tmp_path, raw):
    (tmp_path / "c").write_bytes(raw)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileCorrupt, match="c "):
        open_container(tmp_path / "c")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_tensor_that_claims_more_than_the_file_is_refused(tmp_path):
    write_container(tmp_path / "c", {"w": np.arange(4)}, None)
    raw = (tmp_path / "c").read_bytes()
    (tmp_path / "c").write_bytes(raw.replace(b'"shape":[4]', b'"shape":[9]'))
    with pytest.raises(FileCorrupt, match="damaged"):
        open_container(tmp_path / "c")


def test_a_fifo_is_refused_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "c")
    with pytest.raises(FileCorrupt, match="not a regular file"):
        open_container(tmp_path / "c")


def test_publish_json_refuses_what_json_cannot_say(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        publish_json(tmp_path / "a", {"x": float("nan")})
    assert os.listdir(tmp_path) == []


def test_a_container_gives_back_whatever_json_its_writer_could_say(tmp_path):
    meta = {"lone": "\ud800", "large": (1 << 80) + 1, "name": "naïve ☃", "deep": [[[{}]]]}
    write_container(tmp_path / "c", {"x": np.arange(3)}, meta)
    assert open_container(tmp_path / "c").meta == meta


@pytest.mark.parametrize("offsets", ["[0.0, 24]", "[0, 24.0]", "[0, 1e400]", "[0, true]", "[-8, 16]", "[0]", "null"])
def test_offsets_that_are_no_whole_numbers_within_the_file_are_damage(tmp_path, offsets):
    write_container(tmp_path / "c", {"x": np.arange(3)}, {})
    data = (tmp_path / "c").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip().replace(b"[0,24]", offsets.encode())
    recorded = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["headrace"])["header"].encode()
    blank = header.replace(recorded, b"0" * 32)
    header = header.replace(recorded, xxhash.xxh3_128_hexdigest(blank).encode())
    (tmp_path / "d").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    with pytest.raises(
        FileCorrupt, match=r"does not describe its data|TypeError in its header|\w+Error in its header|bytes of data"
    ):
        open_container(tmp_path / "d")


def test_a_link_is_followed_unless_it_must_not_be(tmp_path):
    write_container(tmp_path / "c", {"x": np.arange(3)}, {})
    (tmp_path / "link").symlink_to(tmp_path / "c")
    assert open_container(tmp_path / "link").arrays["x"].tolist() == [0, 1, 2]
    with pytest.raises(FileCorrupt, match=r"link is a symbolic link, which is not followed here"):
        open_container(tmp_path / "link", follow=False)


def test_a_file_opened_inside_a_folder_is_made_with_the_folders_between_and_kept_when_opened_again(tmp_path):
    for text in (b"one ", b"two"):
        fd = open_inside(tmp_path / "new", "a/b/log", os.O_WRONLY | os.O_APPEND)
        os.write(fd, text)
        os.close(fd)
    assert (tmp_path / "new" / "a" / "b" / "log").read_bytes() == b"one two"


@pytest.mark.parametrize("link", ["a/log", "a"])
def test_no_link_below_the_folder_is_followed_when_a_file_is_opened_for_writing(tmp_path, link):
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "a").mkdir(parents=True)
    outside.mkdir()
    (outside / "log").write_text("precious")
    if link == "a":
        (root / "a").rmdir()
    (root / link).symlink_to(outside if link == "a" else outside / "log")
    opened = len(os.listdir("/proc/self/fd"))
    for attempt in (lambda: open_inside(root, "a/log"), lambda: make_inside(root, link)):
        with pytest.raises(StorageError, match=rf"could not write .*root/{link}: it is a symbolic link.*run again"):
            attempt()
    assert len(os.listdir("/proc/self/fd")) == opened
    assert (outside / "log").read_text() == "precious"


def test_the_folder_itself_may_be_reached_through_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.close(open_inside(tmp_path / "link", "log"))
    assert (tmp_path / "real" / "log").is_file()


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR])
def test_a_fifo_in_the_place_of_a_file_is_refused_without_blocking(tmp_path, flags):
    os.mkfifo(tmp_path / "log")
    with pytest.raises(StorageError, match=r"could not write .*log"):
        open_inside(tmp_path, "log", flags)
