"""Inspection of a spool: its files, its problems, its quarantine.

list_files(path)      every file with its rows, size and verdict
describe(path)        sequence, gaps, backlog, commit point, held locks
verify(path)          checks every byte; the problems, by file
quarantined(path)     the files in the quarantine, with their reasons
set_aside(path, 7)    move a file into the quarantine by hand, so that it is made again
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, FileCorrupt
from headrace.order import fingerprint_json
from headrace.runtime.locks import lock_holder
from headrace.spool.batch_file import BatchFile, open_batch_file
from headrace.spool.channel import Channel
from headrace.spool.file_system import FileSystem, room
from headrace.spool.folder import SpoolFolder
from headrace.spool.meta import parts_of, read_meta


def _channels(path: Path) -> Iterator[Channel]:
    meta, folder = read_meta(path), SpoolFolder(path)
    queue = path / "queue"
    if not queue.is_dir():
        raise ConfigError(f"{path} has no queue/: give the folder of a spool, the one with meta.json in it")
    for split in sorted(os.listdir(queue)):
        if not (queue / split).is_dir() or (queue / split).is_symlink():
            continue  # `verify` reports it
        for part in range(parts_of(meta, split)):
            try:
                yield Channel.of_spool(folder, meta, split, part)
            except ConfigError as error:
                raise ConfigError(f"{queue / split} does not belong into a spool: {error}") from error


def list_files(path: Path) -> list[dict[str, Any]]:
    """Every file of the queue, in order, as JSON values. Reads headers, not rows.

    `rows`, and `first`, the row of the part at which a file begins, are None if the header cannot be read. `verdict` is good, bad or none yet;
    `produced_at` is when the file was written, in seconds since 1970, UTC.
    """
    found = []
    for channel in _channels(path):
        for seq in channel.present():
            file = channel.find(seq)
            if file is None:
                continue
            rows = first = None
            with contextlib.suppress(FileCorrupt):
                header = open_batch_file(file, split=channel.split, seq=seq).header
                rows, first = header.rows, header.first
            verdict = channel.verdict(seq)
            word = "none yet" if verdict is None else "good" if verdict.good else "bad"
            with contextlib.suppress(FileNotFoundError):
                status = file.lstat()
                found.append(
                    {
                        "split": channel.split, "part": channel.part, "seq": seq, "name": file.name, "bytes": status.st_size, "rows": rows, "first": first,
                        "verdict": word, "produced_at": status.st_mtime,
                    }
                )  # fmt: skip
    return found


def describe(path: Path) -> dict[str, Any]:
    """Files, backlog, commit point, locks and disk of a spool, as JSON values."""
    meta = read_meta(path)
    folder = SpoolFolder(path)
    points = folder.commit_points()
    splits: dict[str, Any] = {}
    for channel in _channels(path):
        present, quarantine = channel.present(), channel.quarantined()
        commit, position = (0, 0) if channel.circular else (channel.commit_point(), channel.read_position())
        aside = [int(match[0]) for e in quarantine if (match := re.match(r"\d{12}(?=\.)", e["file"]))]
        top = max([*present, *aside], default=commit - 1)
        there = set(present)
        size = 0
        for seq in present:
            file = channel.find(seq)
            with contextlib.suppress(OSError):
                size += file.lstat().st_size if file is not None else 0
        splits.setdefault(channel.split, []).append(
            {
                "part": channel.part, "files": len(present), "bytes": size, "first": min(present, default=None), "last": max(present, default=None),
                "gaps": [seq for seq in range(position, top + 1) if seq not in there][:1000], "commit": commit, "read": position,
                "backlog": sum(1 for seq in present if seq >= position), "retained": sum(1 for seq in present if commit <= seq < position),
                "quarantined": len(quarantine),
            }
        )  # fmt: skip
    locks = {}
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(folder.state)):
            holder = lock_holder(folder.state / name) if name.endswith(".lock") else None
            if holder:
                locks[name.removesuffix(".lock")] = holder
    ours, disk = meta.get("headrace", {}), FileSystem.of(path)
    return {
        "path": str(path), "dataset_name": meta["dataset_name"], "training_type": meta["training_type"], "batch_size": meta["batch_size"],
        "job": ours.get("job"), "kind": ours.get("kind", "timestamped .pt"), "parts": ours.get("parts", 1), "samples_committed": {s: p["g"] for s, p in points.items()},
        "splits": splits, "at_work": locks, "disk": {"file_system": disk.kind, "warnings": list(disk.warnings), **asdict(room(path))},
    }  # fmt: skip


def verify(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Check every byte of every file; returns the number of files, and the problems with their split, part and file (None: no file of the spool)."""
    meta = read_meta(path)
    ours = meta.get("headrace")
    checked, findings = 0, []
    channels = {(channel.split, channel.part): channel for channel in _channels(path)}
    for channel in channels.values():
        before: BatchFile | None = None
        for seq in channel.present():
            file = channel.find(seq)
            if file is None:
                continue
            checked += 1
            try:
                opened = open_batch_file(file, split=channel.split, seq=seq)
                opened.check()
                problem = _disagreement(opened, before, channel, seq, ours["job"] if ours else None)
                before = opened
            except FileCorrupt as error:
                problem, before = str(error), None
            if problem:
                findings.append({"split": channel.split, "part": channel.part, "seq": seq, "problem": problem})
    with os.scandir(path / "queue") as entries:
        findings += [
            {"split": e.name, "part": 0, "seq": None, "problem": f"{e.path} does not belong into a spool: remove it"}
            for e in sorted(entries, key=lambda e: e.name)
            if not e.is_dir(follow_symlinks=False)
        ]
    for split, parts in describe(path)["splits"].items():
        for entry in parts:
            part, channel = entry["part"], channels[split, entry["part"]]
            findings += [
                {"split": split, "part": part, "seq": seq, "problem": _why_missing(channel, seq)}
                for seq in entry["gaps"]
            ]
    return checked, findings


def _why_missing(channel: Channel, seq: int) -> str:
    verdict = channel.verdict(seq)
    if verdict is None or verdict.good:
        return f"file {seq} is missing between files that are there"
    return f"file {seq} was set aside and is not made again yet: {verdict.reason}"


def _disagreement(file: BatchFile, before: BatchFile | None, channel: Channel, seq: int, job: str | None) -> str:
    header = file.header
    if (header.split, header.part, header.seq) != (channel.split, channel.part, seq):
        return f"{file.path} says it is file {header.seq} of {header.split} part {header.part}"
    if job is not None and header.job != job:
        return f"{file.path} was made for job {header.job}, the spool is {job}"
    if before is None or before.header.seq != seq - 1 or channel.foreign:
        return ""
    if header.first != before.header.first + before.header.rows:
        return f"{file.path} begins at row {header.first:,}, the file before it ends at {before.header.first + before.header.rows:,}"
    if before.header.cursor is not None and header.follows != fingerprint_json(before.header.cursor["cursor"]):
        return f"{file.path} does not follow from the file before it: its producer was at another position"
    return ""


def quarantined(path: Path) -> list[dict[str, str]]:
    """The files in the quarantine, with their reasons."""
    return [entry for channel in _channels(path) for entry in channel.quarantined()]


def set_aside(path: Path, seq: int, reason: str, *, split: str = "train", part: int = 0) -> Path:
    """Move file `seq`, which no rank has read, into the quarantine of the spool `path` with a reason; returns its new path. Its provider makes it
    again."""
    if not reason.strip():
        raise ConfigError("a file is set aside for a reason: say which")
    channel = next((c for c in _channels(path) if (c.split, c.part) == (split, part)), None)
    if channel is None:
        raise ConfigError(f"{path} has no split {split!r} with a part {part}")
    (entry,) = (e for e in describe(path)["splits"][split] if e["part"] == part)
    if channel.find(seq) is None:
        there = f"files {entry['first']} to {entry['last']}" if entry["files"] else "no files"
        raise ConfigError(f"{path} has no file {seq} in {channel}; it has {there}")
    if seq < entry["read"]:
        raise ConfigError(
            f"file {seq} of {channel} in {path} was read (the read position is {entry['read']}): a file that was trained on cannot be set aside"
        )
    channel.condemn(seq, reason)
    moved = channel.set_aside(seq, reason)
    if moved is None:
        raise ConfigError(f"file {seq} of {channel} in {path} was taken away in the meantime")
    return moved
