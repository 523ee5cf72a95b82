"""Where the relative paths of a config start.

Paths in the file start at `run.base`, which is the folder of the file unless given. Paths of the environment and of overrides start at the
working folder. So does `run.dir` always.
"""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path
from typing import Any

from headrace.errors import quoted
from headrace.runs.config.messages import Report
from headrace.runs.config.toml_positions import KeyPath

_PATH_KEYS = (
    ("source", "spec"),
    ("source", "cache"),
    ("text", "tokenizer"),
    ("spool", "dir"),
    ("streams", "roots"),
)


def settle_paths(values: dict[str, Any], report: Report, folder: Path) -> None:
    """Set `run.base`, and make the relative paths of the environment and of overrides absolute.

    Args:
        values: The tables of a text or stream run, before they are checked. Changed in place.
        report: Knows which layer each value came from; takes paths that only the working folder has as problems.
        folder: Where the paths of the file start if it has no `run.base`.
    """
    run, here = values.get("run", {}), Path.cwd()
    if not isinstance(run, dict) or not isinstance(run.get("base", ""), str):
        return  # the check of the values reports it
    in_file = report.origin_of(("run", "base")).layer == "file"
    base = ((folder if in_file else here) / run.get("base", "")).resolve()
    values["run"] = run | {"base": str(base)}
    if base == here:
        return
    for name, key in _PATH_KEYS:
        found = values.get(name)
        tables = enumerate(found) if isinstance(found, list) else [(None, found)]
        for index, table in tables:
            if isinstance(table, dict) and key in table:
                path: KeyPath = (name, key) if index is None else (name, index, key)
                table[key] = _settled(table[key], path, report, base, here)


def _settled(value: Any, path: KeyPath, report: Report, base: Path, here: Path) -> Any:
    """A path or spec, or a list of them: made absolute unless it was written in the file."""
    if isinstance(value, list):
        return [_settled(element, (*path, i), report, base, here) for i, element in enumerate(value)]
    if not isinstance(value, str):
        return value
    kind, colon, place = value.partition(":") if path[-1] == "spec" else ("", "", value)
    if not _is_relative(kind, place):
        return value
    if report.origin_of(path).layer == "file":
        is_data = path[-1] == "spec" or path[0] == "streams"
        if is_data and not _exists(base, place) and _exists(here, place):
            report.add(
                path,
                f"paths of a config start at its folder, and {base / place} does not exist; {place} of the working folder does: "
                f"set run.base = {quoted(os.path.relpath(here, base))}, or write the whole path",
            )
    elif path[-1] != "tokenizer" or _exists(here, place):  # a tokenizer that is no file is a name
        return f"{kind}{colon}{here / place}"
    return value


def _is_relative(kind: str, place: str) -> bool:
    """Whether a spec or a path depends on where paths start."""
    return (
        bool(place)
        and kind not in ("sample", "hf")
        and "://" not in place
        and "\0" not in place
        and not place.startswith(("/", "~"))
    )


def _exists(folder: Path, place: str) -> bool:
    """Whether there is something at a path, or at the part of it before the first pattern."""
    literal = takewhile(lambda part: not any(c in part for c in "*?["), Path(place.partition("?")[0]).parts)
    try:
        return folder.joinpath(*literal).exists()
    except (OSError, ValueError):
        return False


def find_environment_files(values: dict[str, Any], folder: Path) -> None:
    """Make the Python files of an RL run's environments paths in `folder`, where they are there. `values` is changed in place."""
    envs = values.get("env")
    for env in envs if isinstance(envs, list) else ():
        spec = env.get("spec") if isinstance(env, dict) else None
        kind, _, rest = spec.partition(":") if isinstance(spec, str) else ("", "", "")
        file, _, function = rest.rpartition(":")
        if kind == "python" and file.endswith(".py") and not Path(file).is_absolute() and os.path.isfile(folder / file):  # noqa: PTH113 (Path.is_file raises if the name is too long)
            env["spec"] = f"python:{folder / file}:{function}"
