"""Weights as files with a probe: an engine has a version when its own log-probs of the probe agree with the trainer's.

    weights/v000012/model.safetensors     the parameters, checked and published whole
    weights/v000012/probe.json            64 fixed ids and the trainer's log-prob of each after the first

    publish_weights(folder, 12, arrays, probe_ids, probe_logprobs)
    check_probe(12, "http://gpu1:8000", expected, found, tolerance=1e-4)     WeightsNotTaken if they differ

Why: an engine's reload can answer 200 and leave layers unchanged (vLLM on CPU keeps prepacked linear layers: log-probs off by 0.86). Without the probe nothing
reports that, and the policy does not learn.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from headrace.errors import FileCorrupt, WeightsNotTaken
from headrace.files import make_inside, publish_json, read_json, write_container
from headrace.order import draws, key

_PROBE_TOKENS = 64


def probe_ids(vocab_size: int, context: int) -> np.ndarray:
    """The ids of the probe, a function of vocabulary and context size only."""
    count = min(_PROBE_TOKENS, context - 1)
    return (draws(key("rollouts.probe"), count) % np.uint64(vocab_size)).astype(np.int32)


def publish_weights(
    folder: Path, version: int, arrays: Mapping[str, np.ndarray], ids: np.ndarray, logprobs: np.ndarray
) -> Path:
    """Write a version and return its folder. The probe is written last: a folder with a probe is complete."""
    where = folder / f"v{version:06d}"
    shutil.rmtree(where, ignore_errors=True)  # left over from a killed run
    make_inside(folder, where.name)
    write_container(where / "model.safetensors", arrays, {"version": version}, durable=False)
    probe = {"version": version, "ids": ids.tolist(), "logprobs": [float(p) for p in logprobs]}
    publish_json(where / "probe.json", probe)
    return where


def read_probe(where: Path) -> tuple[np.ndarray, np.ndarray]:
    """The probe's ids and the trainer's log-probs of all but the first."""
    try:
        value = read_json(where / "probe.json")
        return np.array(value["ids"], np.int32), np.array(value["logprobs"], np.float32)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise FileCorrupt(f"{where / 'probe.json'} cannot be read: {error}") from error


def drop_weights_below(folder: Path, version: int) -> None:
    """Delete older versions."""
    for path in folder.glob("v*"):
        if path.name[1:].isdecimal() and int(path.name[1:]) < version:
            shutil.rmtree(path, ignore_errors=True)


def check_probe(
    version: int, who: str, expected: Sequence[float] | np.ndarray, found: Sequence[float] | np.ndarray, *, tolerance: float
) -> float:  # fmt: skip
    """The largest difference of log-probs; WeightsNotTaken if it is above the tolerance.

    Args:
        version: the version that the engine was asked to take.
        who: the engine, for the message.
        expected: the trainer's log-probs of the probe.
        found: the engine's.
        tolerance: 1e-4 suits float32, 0.02 bfloat16.
    """
    ours, theirs = np.asarray(expected, np.float64), np.asarray(found, np.float64)
    if ours.shape != theirs.shape or not np.isfinite(theirs).all():
        raise WeightsNotTaken(
            f"{who} answered the probe of version {version} with {theirs.size} log-probs, {ours.size} finite ones were expected: it does not serve this policy"
        )
    apart = float(np.abs(ours - theirs).max()) if ours.size else 0.0
    if apart > tolerance:
        raise WeightsNotTaken(
            f"{who} does not have version {version} of the weights: its log-probs of the probe are up to {apart:.3g} from the trainer's, {tolerance:g} is allowed "
            "(engine.tolerance; 0.02 for bfloat16). Check how it loads weights: a reload that answers 200 may leave layers as they were"
        )
    return apart
