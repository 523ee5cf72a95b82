"""Load a config from a TOML file, the environment and overrides, and check it.

    config = load_config(Path("run.toml"), ["--train.lr", "3e-4", "--source.0.weight=0.5"])
    config.train.lr, config.source[0].weight      -> 0.0003, 0.5
    config.resolved(), config.to_toml(), config.hash

A value comes from the last of these that names it:

    default < file < environment (CONTEXT_LEN, TOKENIZER_WORKERS, DATA_LOADER_WORKERS, PREFETCH_BATCHES) < override

DATASET_SPECS holds one-line specs, separated by newlines or ";" (a spec may hold a comma), or a JSON list of them. It replaces [[source]]
and is refused beside it. A variable that is set but empty counts as not set.

All problems are reported at once (messages.py). Nothing here opens a data file or a tokenizer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pydantic import BaseModel, ValidationError

from headrace.errors import ConfigError, FileCorrupt, StorageError, found_text, shortened
from headrace.runs.config.base import JobConfig
from headrace.runs.config.messages import (
    KeyShape,
    Origin,
    Report,
    did_you_mean,
    dotted,
    explain,
    explain_orchestrator,
    nearest,
    printable,
    toml_value,
)  # fmt: skip
from headrace.runs.config.paths import find_environment_files, settle_paths
from headrace.runs.config.schema import RunConfig, SourceSection
from headrace.runs.config.toml_positions import KeyPath, TomlError, parse_toml

BUILT_IN = {"quickstart": Path(__file__).parent.parent / "quickstart.toml"}
"""Configs that come with headrace, by the name that a command takes in place of a file."""
_MAX_FILE = 1 << 20
_MAX_SOURCES = 4_096
_ENVIRONMENT: dict[str, KeyPath] = {
    "CONTEXT_LEN": ("text", "seq_len"),
    "TOKENIZER_WORKERS": ("loader", "tokenizer_workers"),
    "DATA_LOADER_WORKERS": ("loader", "data_loader_workers"),
    "PREFETCH_BATCHES": ("loader", "prefetch_batches"),
}
_OPTIONS = re.compile(r"(?P<spec>.+?)\?(?P<options>\w+=[^&]*(?:&\w+=[^&]*)*)", re.DOTALL)
"""A spec with options; a "?" without a "=" after it is part of a pattern."""


def load_config(path: Path | None, overrides: Sequence[str] = (), env: Mapping[str, str] = os.environ) -> RunConfig:
    """The checked config of a text run. Takes what `load_any_config` takes, and refuses other kinds of runs."""
    config = load_any_config(path, overrides, env)
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"{printable(path) if path is not None else 'the config'} describes a job of kind {config.kind!r}; this works on text jobs, "
            "[[source]] with [train]"
        )
    return config


def load_any_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] = os.environ,
    *,
    base: Path | None = None,
) -> JobConfig:
    """The checked config of a run; its class follows from its tables. ConfigError lists all problems.

    Args:
        path: The TOML file, or a name of `BUILT_IN`; None for a config without a file.
        overrides: As on a command line: `--train.lr 3e-4`, `--train.lr=3e-4`, `--source.0.weight 0.5`, and `--text.bos` for `--text.bos true`. The
            last of two equal ones holds. A source numbered one past the last is added.
        env: Environment variables.
        base: Where relative paths in the file start; the file's own folder unless given.
    """
    if path is not None and str(path) in BUILT_IN and not path.exists():
        path, base = BUILT_IN[str(path)], Path.cwd()
    layers = _Layers()
    if path is not None:
        layers.read_file(path)
    layers.read_environment(env)
    layers.read_overrides(overrides)
    folder = path.parent if path is not None else Path()
    if layers.root.kind == "rl":
        find_environment_files(layers.values, folder)
    else:
        settle_paths(layers.values, layers.report, base if base is not None else folder)
    return layers.checked()


@dataclass(slots=True)
class _Layers:
    """The values of the layers read so far, merged."""

    values: dict[str, Any] = field(default_factory=dict)
    report: Report = field(default_factory=Report)

    @property
    def root(self) -> type[JobConfig]:
        """The class of the config, which follows from the names of its tables."""
        if "streams" in self.values:
            from headrace.runs.config.streams import StreamsConfig

            return StreamsConfig
        if {"rollouts", "policy", "env", "engine"} & self.values.keys():
            from headrace.runs.config.rl import RLConfig

            return RLConfig
        return RunConfig

    def checked(self) -> JobConfig:
        """The config. ConfigError lists the problems of all layers."""
        if (count := len(self._source_tables())) > _MAX_SOURCES:
            advice = f"at most {_MAX_SOURCES:,} can be mixed; name many files with one pattern"
            self.report.add(("source",), f"{count:,} sources, {advice}")
        elif "orchestrator" in self.values:
            explain_orchestrator(self.values["orchestrator"], self.report)
        else:
            try:
                config = self.root.model_validate(self.values)
            except ValidationError as error:
                explain(error, self.values, self.root, self.report)
            else:
                if not self.report.problems:
                    return config
        raise self.report.error()

    # -------------------------------------------------------------------------------- reading the layers

    def read_file(self, path: Path) -> None:
        try:
            self.values, lines = parse_toml(_file_text(path))
        except TomlError as error:
            raise ConfigError(f"{printable(path)}:{error.line}: {error.message}") from error
        origins = {
            key: Origin(layer="file", place=line, label=f"{printable(path)}:{line}") for key, line in lines.items()
        }
        self.report = Report(origins, start=Origin(layer="file", place=1, label=f"{printable(path)}:1"))
        for index, table in enumerate(self._source_tables()):
            self._lift_options(index, table, replaces=False)

    def read_environment(self, env: Mapping[str, str]) -> None:
        if self.root is not RunConfig:
            return  # the variables are about text
        for place, (variable, path) in enumerate(_ENVIRONMENT.items()):
            if env.get(variable, "").strip():
                origin = Origin(layer="environment", place=place, label=variable)
                self._put(path, _parsed(env[variable].strip(), path, self.root), origin)
        origin = Origin(layer="environment", place=len(_ENVIRONMENT), label="DATASET_SPECS")
        specs = _one_line_specs(env.get("DATASET_SPECS", ""))
        if specs is None:
            self.report.add(("source",), 'expected a JSON list of specs such as ["jsonl:web", "sample:prose"]', origin)
            self.values.setdefault("source", [{"spec": "sample:prose"}])  # so that it is not reported as missing too
        elif specs and "source" in self.values:
            self.report.add(
                ("source",), "the file has [[source]] too; unset DATASET_SPECS or remove [[source]]", origin
            )
        elif specs:
            self.values["source"] = [{"spec": spec} for spec in specs]
            self.report.origins[("source",)] = origin
            for index, table in enumerate(self._source_tables()):
                self._lift_options(index, table, replaces=False)

    def read_overrides(self, overrides: Sequence[str]) -> None:
        for place, (name, text) in enumerate(_override_pairs(overrides)):
            origin = Origin(layer="override", place=place, label=printable(shortened(name)), bare=text is None)
            parts = name.removeprefix("--").split(".")
            if not name.startswith("--") or not all(parts):
                self.report.add((), "expected an override such as --train.lr 3e-4", origin)
                continue
            path: KeyPath = tuple(parts)
            self._put(path, True if text is None else _parsed(text, path, self.root), origin)
            for index, table in enumerate(self._source_tables()):
                if self.report.origin_of(("source", index, "spec")) is origin:
                    self._lift_options(index, table, replaces=True)

    # ------------------------------------------------------------------------------- setting one value

    def _put(self, path: KeyPath, value: Any, origin: Origin) -> None:
        """Set one value, making the tables on the way."""
        origins = self.report.origins
        here: Any = self.values
        done: KeyPath = ()
        for depth, part in enumerate(path, start=1):
            key = self._slot(here, done, part, path[depth:], origin)
            if key is None:
                return
            done = (*done, key)
            below: Any = value if depth == len(path) else [] if KeyShape.at(done, self.root).is_array else {}
            if isinstance(here, list) and key == len(here):
                here.append(below)
            elif depth == len(path) or (isinstance(here, dict) and key not in here):
                here[key] = below
            if depth < len(path):
                origins.setdefault(done, origin)
            here = here[key]
        for inner in [k for k in origins if k[: len(done)] == done]:
            del origins[inner]
        origins[done] = origin

    def _slot(self, here: Any, done: KeyPath, part: str | int, rest: KeyPath, origin: Origin) -> str | int | None:
        """The key or index of the next part of a path in `here`; None, and a problem, if there is none."""
        if isinstance(here, dict):
            return part
        path = (*done, part, *rest)
        if not isinstance(here, list):
            self.report.add(path, f"{dotted(done)} is a value, not a table", origin)
            return None
        # One past the last is an element to add.
        if re.fullmatch(r"[0-9]{1,9}", str(part)) and int(part) <= len(here):
            return int(part)
        numbers = f"there are 0 to {len(here) - 1}" if len(here) > 1 else "there is 0" if here else "there are none"
        example = f"count from 0, as in --{dotted((*done, 0, *rest))}"
        self.report.add(path, f"no {dotted(done)} {found_text(str(part))}, {numbers}; {example}", origin)
        return None

    def _source_tables(self) -> list[Any]:
        sources = self.values.get("source")
        return sources if isinstance(sources, list) else []

    def _lift_options(self, index: int, table: Any, *, replaces: bool) -> None:
        """Move the options of a spec, such as `?weight=0.3`, to their keys. `replaces`: they win over keys that are set already."""
        spec = table.get("spec") if isinstance(table, dict) else None
        split = _OPTIONS.fullmatch(spec) if isinstance(spec, str) else None
        if split is None:
            return
        options = [name for name in SourceSection.model_fields if name != "spec"]
        for option in split["options"].split("&"):
            name, _, text = option.partition("=")
            path: KeyPath = ("source", index, name)
            origin = self.report.origin_of(("source", index, "spec"))
            lifted = replace(origin, written=f"source.{index}.spec?{shortened(name)}", bare=False)
            if name not in options:
                near = did_you_mean(nearest(name, options)) or f", a spec takes {', '.join(options)}"
                self.report.add(path, f"unknown option{near}", lifted)
            elif name in table and not replaces:
                self.report.add(path, f"{name} is set elsewhere too; keep one of the two", lifted)
            else:
                self._put(path, _parsed(unquote(text), path, self.root), lifted)
        table["spec"] = split["spec"]


def _file_text(path: Path) -> str:
    """The text of a config file. A file that could block or fill the memory is not read."""
    from headrace.files import read_regular  # not above: it imports numpy

    file = f"config file {printable(path)}"
    try:
        data = read_regular(path, _MAX_FILE, follow=True)
    except FileNotFoundError as error:
        raise ConfigError(f"{file} does not exist{_nearest_file(path)}") from error
    except (FileCorrupt, StorageError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(f"{file} cannot be read: {error}. A TOML file of a few hundred lines is expected") from error
    try:
        return data.decode("utf-8-sig")  # some editors begin a file with a mark that tomllib would refuse
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{printable(path)}:{line}: the text is not UTF-8; save the file as UTF-8") from error


def _nearest_file(path: Path) -> str:
    try:
        if not path.parent.is_dir():
            return f"; neither does the folder {printable(path.parent)}"
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in islice(entries, 10_000) if entry.is_file()]
    except OSError:
        return ""  # a folder that may not be listed leaves nothing to suggest
    near = nearest(path.name, [n for n in names if n.endswith(".toml")] or names)
    return did_you_mean(near and printable(path.parent / near))


def _override_pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(`--section.key`, its text or None). A value may start with one dash, as -1 does, but not with two."""
    at = 0
    while at < len(overrides):
        name, equals, text = overrides[at].partition("=")
        at += 1
        if not name.startswith("--"):
            yield overrides[at - 1], None
        elif equals:
            yield name, text
        elif at < len(overrides) and not overrides[at].startswith("--"):
            yield name, overrides[at]
            at += 1
        else:
            yield name, None


def _parsed(text: str, path: KeyPath, root: type[BaseModel]) -> Any:
    """The value of an override or a variable: parsed as TOML, or the text itself."""
    value, kind = toml_value(text), KeyShape.at(path, root).kind
    if kind is str and not isinstance(value, str):
        return text  # where text is wanted, `--run.name 7` and `--run.name 2024-05-01` mean just that
    if value is None and kind is float:  # users type .3 and 3. on a command line, which are no TOML
        with contextlib.suppress(ValueError):
            return float(text)
    return text if value is None else value


def _one_line_specs(text: str) -> list[str] | None:
    """The specs of DATASET_SPECS; None if it begins like a JSON list and is no list of texts."""
    if not text.lstrip().startswith("["):  # which no spec does: it would have no scheme
        return [line.strip() for line in re.split(r"[\n;]", text) if line.strip()]
    try:
        specs = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return specs if all(isinstance(spec, str) and spec.strip() for spec in specs) else None
