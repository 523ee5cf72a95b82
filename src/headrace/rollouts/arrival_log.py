"""Arrival log: every finished rollout is appended to it, so that a restarted run requests none of them again.

    log = ArrivalLog(folder, first_step=12)           reads the records of step 12 and later
    log.answer(request)                               the recorded rollout of a request, or None
    log.append(request, rollout)                      one write; after a kill the record is complete or absent
    log.append_failure(fact)                          a request that failed, as the GroupBook journals it
    log.forget_failures()                             after every request of a step failed: a resumed run sends them again
    log.drop_below(12)                                a checkpoint covers the steps before 12

    arrivals/made_with.json        = the settings that the rollouts depend on
    arrivals/step_000000000012.log = records:  u32 length | u64 xxh3 of the payload | payload (msgpack), little-endian

A payload is an `Arrival`. Ids and log-probs are raw little-endian bytes (int32, float32). A turn's `prompt_ids` leave out the first `kept`
tokens of the context, which are the earlier turns. Where a request has both a rollout and a failure (it was refused, or came after its step's deadline), the
failure counts. An incomplete last record, cut short by a kill, is removed when the log is opened. An earlier record that fails its checksum is damage, and raises
FileCorrupt. Writes are not synced: a power cut costs rollouts that can be made again, and never leaves a wrong one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from headrace.errors import ConfigError, FileCorrupt, StorageError
from headrace.files import make_inside, open_inside, open_regular, publish, publish_json, read_json
from headrace.rollouts.groups import Request
from headrace.rollouts.records import Rollout, Step, StepTokens, VersionSpan, check_env_name

_HEAD = struct.Struct("<IQ")
_LOG = re.compile(r"step_(\d{1,18})\.log", re.ASCII)
Key = tuple[int, int, int]
"""(task, member, attempt)."""


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One turn of a rollout."""

    prompt: str
    completion: str
    kept: int
    """Tokens of the context that are those of the turns before."""
    prompt_ids: bytes
    """int32, the context after the first `kept` tokens."""
    ids: bytes
    """int32, the policy's answer."""
    logprobs: bytes
    """float32, one for each of `ids`."""
    spans: tuple[VersionSpan, ...] = ()
    """Which weights sampled which ids."""


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """One record of the log: a rollout that finished, or a request that failed."""

    task: int
    member: int
    attempt: int
    step: int
    """Number of the batch, from 0: batch n makes the run's step n + 1."""
    env: str
    version: int
    """Version of the policy that sampled it, the oldest if there were several: the number of steps that it had learnt from."""
    time: float
    """Unix seconds when it arrived."""
    failed: str = ""
    """Why the request failed; empty for a rollout."""
    reward: float = 0.0
    metrics: dict[str, float] = {}
    turns: tuple[Turn, ...] = ()
    timing: dict[str, float] = {}
    """Seconds by name: total, model, env."""
    sampling: dict[str, Any] = {}

    @property
    def key(self) -> Key:
        return self.task, self.member, self.attempt

    def rollout(self) -> Rollout:
        """The rollout as it was before it was written."""
        context = np.empty(0, np.int32)
        steps = []
        for turn in self.turns:
            prompt = np.concatenate([context[: turn.kept], np.frombuffer(turn.prompt_ids, "<i4")]).astype(
                np.int32, copy=False
            )
            ids = np.frombuffer(turn.ids, "<i4").astype(np.int32, copy=False)
            logprobs = np.frombuffer(turn.logprobs, "<f4").astype(np.float32, copy=False)
            tokens = StepTokens.answered(prompt, ids, logprobs, version_spans=turn.spans)
            steps.append(Step(prompt=turn.prompt, completion=turn.completion, tokens=tokens))
            context = np.concatenate([prompt, ids])
        return Rollout(
            example_id=self.task, env_name=self.env, reward=self.reward, metrics=self.metrics, trajectory=tuple(steps), timing=self.timing,
            policy_version=self.version, sampling_args=self.sampling,
        )  # fmt: skip


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Arrival).decode


def arrival_path(folder: Path | str, step: int) -> Path:
    """The log of a batch's arrivals."""
    return Path(folder) / f"step_{step:012d}.log"


def _record(arrival: Arrival) -> bytes:
    payload = _encode(arrival)
    return _HEAD.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def read_arrivals(path: Path | str) -> Iterator[Arrival]:
    """The records of one log, in the order of their arrival. FileCorrupt if a record other than the last is damaged."""
    for arrival, _ in _records(Path(path)):
        yield arrival


def _records(path: Path) -> Iterator[tuple[Arrival, int]]:
    """Yield every complete record and the offset of its end."""
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return
    with open(fd, "rb") as log:
        size, at = os.fstat(fd).st_size, 0
        while at + _HEAD.size <= size:
            length, total = _HEAD.unpack(log.read(_HEAD.size))
            end = at + _HEAD.size + length
            payload = log.read(length) if end <= size else b""
            if end > size or xxhash.xxh3_64_intdigest(payload) != total:
                if end < size:
                    raise FileCorrupt(
                        f"{path} is damaged: the record at byte {at:,} fails its checksum. Move the file away; its rollouts are made again"
                    )
                return
            try:
                arrival = _decode(payload)
                _check(arrival)
            except (ValueError, ConfigError, RecursionError) as error:  # msgspec's errors are ValueErrors
                raise FileCorrupt(f"{path} is damaged: the record at byte {at:,} does not parse ({error})") from error
            yield arrival, end
            at = end


def _check(arrival: Arrival) -> None:
    """ValueError unless the fields of the record fit each other; a right checksum does not prove that."""
    if not arrival.failed:
        check_env_name(arrival.env)
    context = 0
    for turn in arrival.turns:
        if len(turn.prompt_ids) % 4 or len(turn.ids) % 4 or len(turn.logprobs) != len(turn.ids):
            raise ValueError(
                "a turn has a different number of log-probs than of ids, or bytes that are no whole number of them"
            )
        if not 0 <= turn.kept <= context:
            raise ValueError(f"a turn keeps {turn.kept} tokens of a context of {context}")
        answered = len(turn.ids) // 4
        if any(not 0 <= start <= end <= answered for _, start, end in turn.spans):
            raise ValueError(f"a version span lies outside the {answered} tokens of its turn")
        context = turn.kept + len(turn.prompt_ids) // 4 + answered


def _logs(folder: Path) -> dict[int, Path]:
    """The logs of a folder by step. Other names are ignored."""
    return {int(m[1]): p for p in folder.iterdir() if (m := _LOG.fullmatch(p.name))}


class ArrivalLog:
    """The arrivals of the steps that no checkpoint covers yet. Used on one event loop."""

    def __init__(self, folder: Path, *, first_step: int = 0, made_with: Mapping[str, Any] | None = None) -> None:
        """Open the log in `folder` and read the records of `first_step` and later. `made_with`: the settings that rollouts depend on; a log that was made
        with other settings is dropped."""
        self.folder = make_inside(folder.parent, folder.name)
        self._first = first_step
        self._files: dict[int, int] = {}
        self.known: dict[Key, Arrival] = {}
        """The records that the log had when it was opened, by task, member and attempt."""
        self.dropped = made_with is not None and self._drop_if_made_with_others(made_with)
        """Whether rollouts that were made with other settings were dropped."""
        for path in self._unfinished():
            self._read(path)

    def _drop_if_made_with_others(self, made_with: Mapping[str, Any]) -> bool:
        path = self.folder / "made_with.json"
        if path.exists() and read_json(path) == made_with:
            return False
        open_steps = self._unfinished()
        for log in open_steps:
            log.unlink()
        publish_json(path, dict(made_with), replace=True)
        return bool(open_steps)

    def _read(self, path: Path) -> None:
        end = 0
        for arrival, end in _records(path):  # noqa: B007
            if arrival.failed or arrival.key not in self.known:
                self.known[arrival.key] = arrival
        if path.stat().st_size > end:
            fd = open_inside(path.parent, path.name)
            try:
                os.ftruncate(fd, end)
            finally:
                os.close(fd)

    def _unfinished(self) -> list[Path]:
        """The logs of the steps that are not finished, in order."""
        return [log for step, log in sorted(_logs(self.folder).items()) if step >= self._first]

    def failures(self) -> dict[Key, str]:
        """Reasons of the requests that failed in earlier processes."""
        return {key: arrival.failed for key, arrival in self.known.items() if arrival.failed}

    def answer(self, request: Request) -> Rollout | None:
        """The recorded rollout of a request; None if there is none."""
        arrival = self.known.get(request.key)
        return None if arrival is None or arrival.failed else arrival.rollout()

    def append(self, request: Request, rollout: Rollout) -> None:
        """Append a finished rollout. StorageError if the write fails; the file then has no part of the record."""
        turns, context = [], 0
        for step in rollout.trajectory:
            tokens = step.tokens
            assert tokens is not None
            turns.append(
                Turn(
                    str(step.prompt), str(step.completion), context, tokens.prompt_ids[context:].tobytes(), tokens.completion_ids.tobytes(),
                    tokens.completion_logprobs.tobytes(), tokens.version_spans,
                )
            )  # fmt: skip
            context = tokens.length
        self._write(
            Arrival(
                *request.key, request.step, request.env_name, rollout.policy_version, time.time(), "",
                rollout.reward, dict(rollout.metrics), tuple(turns), dict(rollout.timing), dict(rollout.sampling_args),
            )
        )  # fmt: skip

    def append_failure(self, fact: Mapping[str, Any]) -> None:
        """Append a failed request, given as the fact that a GroupBook journals. A failure that the log has already is not repeated."""
        key = fact["task"], fact["member"], fact["attempt"]
        if key not in self.known or not self.known[key].failed:
            self._write(Arrival(*key, fact["step"], fact.get("env", ""), 0, time.time(), fact["reason"]))

    def forget_failures(self) -> None:
        """Remove the failures of all unfinished steps: their causes may be mended before the run is resumed, and recorded failures would fail it again."""
        self.close()
        for path in self._unfinished():
            publish(path, [_record(a) for a in read_arrivals(path) if not a.failed], replace=True, durable=False)

    def _write(self, arrival: Arrival) -> None:
        record = _record(arrival)
        fd = self._file(arrival.step)
        written = 0
        try:
            while written < len(record):
                written += os.write(fd, record[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, os.fstat(fd).st_size - written)
            full = " (the disk is full)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise StorageError(
                f"a finished rollout could not be written to {arrival_path(self.folder, arrival.step)}: {error.strerror or error}{full}. Make room and "
                "resume the run: everything that was written is kept"
            ) from error

    def _file(self, step: int) -> int:
        fd = self._files.get(step)
        if fd is None:
            name = arrival_path(self.folder, step).name
            fd = self._files[step] = open_inside(self.folder, name, os.O_WRONLY | os.O_APPEND)
        return fd

    def finish(self, step: int) -> None:
        """Close the log of a step that takes no more rollouts, and forget its records."""
        self._first = step + 1
        if (fd := self._files.pop(step, None)) is not None:
            os.close(fd)
        for key in [key for key, arrival in self.known.items() if arrival.step <= step]:
            del self.known[key]

    def drop_below(self, step: int) -> None:
        """Delete the logs of earlier steps."""
        for other, path in _logs(self.folder).items():
            if other < step:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
