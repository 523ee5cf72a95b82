"""`headrace inspect`: describes a run folder, a container (checkpoint, manifest), an arrival log, a batch file or a saved cursor."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import CursorMismatch, DataError, FileCorrupt
from headrace.files import Container, decode_json, json_objects, open_container, open_regular, read_regular, read_tail
from headrace.order import Cursor
from headrace.runs.folder import read_json

_MAX_CURSOR = 64 << 20


def inspect_path(path: Path) -> dict[str, Any]:
    """A description of a path as JSON values; always has `kind`. Damaged and unknown files raise a HeadraceError."""
    if path.is_dir():
        if (path / "config.toml").exists():
            return _run(path)
        if (path / "queue").is_dir():
            raise DataError(f"{path} is a spool: see `headrace spool stat {path}`, or give one of its files")
        raise DataError(
            f"{path} is a folder without a run in it (no config.toml): give a run folder or one of its files"
        )
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if not path.is_file():
        raise DataError(f"{path} is not a regular file")
    if path.suffix == ".log":
        return _arrivals(path)
    with open(open_regular(path, follow=True), "rb") as handle:
        head = handle.read(16)
    if head.lstrip()[:1] == b"{" and head[:1] in b" \n\t{":
        return _cursor(path)
    if head[:4] == b"PK\x03\x04":  # an archive of torch's
        return _batch_file(path)
    return _container(open_container(path))


def _run(path: Path) -> dict[str, Any]:
    from headrace.train.checkpoint import CheckpointStore

    about, ended = read_json(path / "run.json"), path / "summary.json"
    summary = read_json(ended) if ended.exists() else {}
    journal = list(json_objects(read_tail(path / "journal.jsonl"))) if (path / "journal.jsonl").exists() else []
    store = CheckpointStore(path / "checkpoints", writer=False, report=lambda _: None)
    found = store.latest()
    meta = found[1].meta if found is not None else {}
    if "rl" in meta:
        rl = meta["rl"]
        learnt = {
            "reward_first": rl["reward_first"], "reward_last": _mean(rl["rewards"]), "accuracy_first": rl["accuracy_first"],
            "accuracy": rl["accuracy"], "rollouts": rl["rollouts"], "tokens": rl["tokens"], "environments": rl["environments"],
        }  # fmt: skip
    else:
        data = meta.get("data", {})
        learnt = {"delivered": data.get("body", {}).get("delivered", {}), "fingerprint": data.get("fingerprint", {})}
    # A summary of another step than the newest checkpoint is left over from before a resume that was killed.
    current = summary if summary.get("step") == (found[0] if found else None) else {}
    return {
        "kind": "run",
        "state": current.get("state", "interrupted" if found else "started"),
        "step": found[0] if found else 0,
        "digest": meta.get("digest"),
        "model_sha256": meta.get("model_sha256"),
        "config_hash": meta.get("config_hash", about.get("config_hash")),
        "world_size": meta.get("world_size"),
        "loss_first": meta.get("loss_first"),
        "loss_last": _mean(meta.get("losses", [])),
        "checkpoints": [store.path(step).name for step in store.steps()],
        **learnt,
        "about": about,
        "journal": [{k: v for k, v in e.items() if k != "time"} for e in journal[-20:]],
    }


def _arrivals(path: Path) -> dict[str, Any]:
    """The arrival log of one batch of an RL run."""
    from headrace.rollouts.arrival_log import read_arrivals

    arrivals = list(read_arrivals(path))
    rollouts = [a for a in arrivals if not a.failed]
    return {
        "kind": "arrival log",
        "bytes": path.stat().st_size,
        "verified": True,
        "rollouts": dict(Counter(a.env for a in rollouts)),
        "failed": dict(Counter(a.failed for a in arrivals if a.failed)),
        "policy_versions": sorted({a.version for a in rollouts}),
        "reward": _mean([a.reward for a in rollouts]),
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _container(container: Container) -> dict[str, Any]:
    arrays = {
        name: f"{container.dtypes[name]} {list(array.shape)} {array.nbytes:,} bytes"
        for name, array in sorted(container.arrays.items())
    }
    meta = container.meta if isinstance(container.meta, dict) else {"value": container.meta}
    if meta.get("kind") == "headrace-spool":
        return _batch_file(container.path)
    if "recipe" in meta and "chunk_rows" in container.arrays:
        return _manifest(container)
    return {
        "kind": f"container ({meta.get('kind', 'no kind')})",
        "bytes": container.path.stat().st_size,
        "verified": True,
        "meta": _abridged(meta),
        "arrays": arrays,
    }


def _batch_file(path: Path) -> dict[str, Any]:
    """A file of a spool: which rows it holds, its fields, and the first of them."""
    from headrace.spool import open_batch_file

    file = open_batch_file(path)
    file.check()
    header = file.header
    return {
        "kind": f"batch file ({header.split}, file {header.seq})",
        "bytes": path.stat().st_size,
        "verified": True,
        "rows": header.rows,
        "first_row": header.first,
        "part": f"{header.part} of {header.parts}",
        "batches": header.num_batches,
        "batch_size": header.batch_size,
        "job": header.job,
        "last": header.last,
        "schema": [field.to_json() for field in header.schema],
        "first_rows": [
            {field.name: _head(file.arrays, field.name, row, ragged=field.ragged) for field in header.schema}
            for row in range(min(3, header.rows))
        ],
    }


def _head(arrays: Mapping[str, Any], name: str, row: int, *, ragged: bool) -> Any:
    """The first numbers of a row."""
    value = arrays[name][row]
    if ragged:
        offsets = arrays[f"{name}_offsets"]
        value = arrays[name][offsets[row] : offsets[row + 1]]
    flat = value.reshape(-1)
    return flat.tolist()[0] if value.ndim == 0 else [*flat[:8].tolist(), *(["…"] if flat.size > 8 else [])]


def _manifest(container: Container) -> dict[str, Any]:
    """A cached manifest: the files of a source, with their rows and fingerprints."""
    meta = container.meta
    return {
        "kind": f"manifest ({meta['recipe'].get('format')})",
        "verified": True,
        "rows": int(container.arrays["chunk_rows"].sum()),
        "chunks": len(container.arrays["chunk_rows"]),
        "blank_lines": meta.get("blank_lines", 0),
        "recipe": meta["recipe"],
        "files": [{"path": p, "bytes": s, "rows": r, "fingerprint": f} for p, s, r, f in meta["files"]],
    }


def _abridged(meta: dict[str, Any]) -> dict[str, Any]:
    """Long lists of lanes are counted rather than listed."""
    return json.loads(
        json.dumps(meta), object_hook=lambda d: {k: (f"{len(v)} lanes" if k == "entries" else v) for k, v in d.items()}
    )


def _cursor(path: Path) -> dict[str, Any]:
    try:
        cursor = Cursor.from_dict(decode_json(read_regular(path, _MAX_CURSOR, follow=True), path), what=str(path))
    except CursorMismatch as error:
        raise FileCorrupt(str(error)) from error
    body = dict(cursor.body)
    lanes = body.pop("entries", {})
    return {
        "kind": f"cursor ({cursor.kind})",
        "version": cursor.version,
        "lanes_saved": len(lanes),
        **{k: v for k, v in body.items() if k != "pass"},
        "fingerprint": dict(cursor.fingerprint),
    }
