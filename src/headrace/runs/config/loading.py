"""From a TOML file, the environment and overrides to a checked config, with messages that name file and line.

    config = load_config(Path("run.toml"), ["--train.lr", "3e-4", "--source.0.weight=0.5"])
    config.train.lr, config.source[0].weight      -> 0.0003, 0.5
    config.resolved(), config.to_toml(), config.hash

A value comes from the last of these that names it:

    default < file < environment (CONTEXT_LEN, TOKENIZER_WORKERS, DATA_LOADER_WORKERS, PREFETCH_BATCHES) < override

DATASET_SPECS holds one-line specs, separated by newlines or ";" (a spec may hold a comma), or a JSON list of them. It
stands in for [[source]] and is refused beside it. A variable that is set but empty counts as not set.

All that is wrong is said at once, where the user wrote it, with the nearest thing that would be right:

    run.toml:12: train.lrr: unknown key, did you mean lr?
    run.toml:15: train.prefetch_batches: unknown key, belongs in [loader]
    --text.pack: unknown value "bestfit", did you mean "best_fit"? (values: "best_fit", "concat")

The values are checked once, by pydantic; its words are never shown. Nothing here opens a data file or a tokenizer.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ValidationError,
)
from pydantic.fields import FieldInfo

from headrace.errors import ConfigError, FileCorrupt, StorageError, found_text, number_text, quoted, shortened
from headrace.runs.config.schema import ALL_ZERO, NO_SOURCE, OneOf, RunConfig, SourceSection, toml_text
from headrace.runs.config.toml_positions import KeyPath, TomlError, parse_toml

if TYPE_CHECKING:
    from headrace.runs.config.rl import RLConfig
    from headrace.runs.config.streams import StreamsConfig

AnyConfig: TypeAlias = "RunConfig | StreamsConfig | RLConfig"

_MAX_FILE = 1 << 20
_MAX_PROBLEMS = 100
"""Problems that are listed; the nearest names of more would take seconds to find."""
_MAX_SOURCES = 4_096

_ENVIRONMENT: dict[str, KeyPath] = {
    "CONTEXT_LEN": ("text", "seq_len"),
    "TOKENIZER_WORKERS": ("loader", "tokenizer_workers"),
    "DATA_LOADER_WORKERS": ("loader", "data_loader_workers"),
    "PREFETCH_BATCHES": ("loader", "prefetch_batches"),
}
_ALIASES: dict[KeyPath, KeyPath] = {("text", "context_len"): ("text", "seq_len")}
_BLAMED: dict[KeyPath, KeyPath] = {("text", "window_blocks"): ("text", "seq_len")}
"""The key that a message names if the checked key was left at its default."""
_ORCHESTRATOR = {
    "dump_raw_rollouts": "rollouts.keep: every rollout is kept in the run folder's arrivals/",
    "gather_chunk_size": "nothing: rollouts are processed when they arrive, so there is no gather to cut into chunks",
    "use_process_pool": "env.workers: processes that play an environment",
    "seq_len": "policy.micro_tokens, or policy.context for the longest rollout",
    "advantage": "policy.advantage",
    "filters": "rollouts.drop_equal; others are headrace.rollouts.RolloutPipeline(filters=[...])",
    "state_columns": "headrace.rollouts.RolloutPipeline(state_columns={env: [...]})",
    "env": "[[env]]",
    "batch_size": "rollouts.groups_per_step, in groups",
    "rollouts_per_example": "env.group_size",
    "max_off_policy_steps": "rollouts.lag",
    "max_async_level": "rollouts.lag",
    "max_concurrent": "rollouts.concurrency",
    "output_dir": "run.dir",
}
"""Where the keys of prime-rl's [orchestrator] live here."""
_ELSEWHERE = {
    "save_every": "checkpoint_every", "save_steps": "checkpoint_every", "save_interval": "checkpoint_every", "checkpoint_interval": "checkpoint_every",
    "save_total_limit": "keep_checkpoints", "logging_steps": "log_every", "log_interval": "log_every", "max_steps": "steps", "max_iters": "steps",
    "learning_rate": "lr", "block_size": "seq_len", "max_seq_len": "seq_len", "output_dir": "dir", "num_workers": "tokenizer_workers",
}  # fmt: skip
"""What other trainers call a key: letters alone would find another one."""
_PATHS: dict[str, tuple[str, ...]] = {
    "source": ("spec", "cache"), "text": ("tokenizer",), "spool": ("dir",), "streams": ("roots",),
}  # fmt: skip
"""Keys that name paths, by table."""
_OPTIONS = re.compile(r"(?P<spec>.+?)\?(?P<options>\w+=[^&]*(?:&\w+=[^&]*)*)", re.DOTALL)
"""A spec with options; a "=" after the "?" tells the options from a pattern."""
_SHORT_FLOAT = re.compile(r"[+-]?(?:[0-9]*\.[0-9]+|[0-9]+\.)(?:[eE][+-]?[0-9]+)?")
"""`.3` and `3.` are no TOML, but users type them on a command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Where the user wrote something, in the words of a message about it."""

    layer: Literal["file", "environment", "override"]
    place: int
    """The line, or the position among the overrides; for the order of the messages."""
    label: str
    written: str = ""
    """The key as written, where that is not the key's path."""
    bare: bool = False
    """An override without a value, which means true."""

    def say(self, path: KeyPath, what: str) -> str:
        if self.layer == "override" and not self.written:
            return f"{self.label}: {what}"
        name = self.written or _dotted(path)
        return f"{self.label}: {name}: {what}" if name else f"{self.label}: {what}"

    @property
    def order(self) -> tuple[int, int]:
        return ("file", "environment", "override").index(self.layer), self.place


@dataclass(slots=True)
class _Layers:
    """The merged values; who set each of them; and what is wrong so far."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, _Origin] = field(default_factory=dict)
    nowhere: _Origin = _Origin(layer="file", place=1, label="command line")
    """Remarks about sections that are missing altogether."""
    problems: list[tuple[tuple[int, int], str]] = field(default_factory=list)

    @property
    def root(self) -> type[RunConfig] | type[StreamsConfig] | type[RLConfig]:
        """The model that the tables stand for: a job's kind follows from them."""
        if "streams" in self.values:
            from headrace.runs.config.streams import StreamsConfig

            return StreamsConfig
        if {"rollouts", "policy", "env", "engine"} & self.values.keys():
            from headrace.runs.config.rl import RLConfig

            return RLConfig
        return RunConfig

    # -------------------------------------------------------------------------------- reading the layers

    def read_file(self, path: Path) -> None:
        try:
            source = parse_toml(_file_text(path))
        except TomlError as error:
            raise ConfigError(f"{_shown(path)}:{error.line}: {error.message}") from error
        self.nowhere = _Origin(layer="file", place=1, label=f"{_shown(path)}:1")
        self.values = source.values
        self.origins = {
            key: _Origin(layer="file", place=line, label=f"{_shown(path)}:{line}") for key, line in source.lines.items()
        }
        self._resolve_aliases()
        for index, table in enumerate(self._source_tables()):
            self._lift_options(index, table, replace=False)

    def read_environment(self, env: Mapping[str, str]) -> None:
        if self.root is not RunConfig:
            return  # the variables are about text
        for place, (variable, path) in enumerate(_ENVIRONMENT.items()):
            if env.get(variable, "").strip():
                origin = _Origin(layer="environment", place=place, label=variable)
                self._put(path, _parsed(env[variable].strip(), path, self.root), origin)
        origin = _Origin(layer="environment", place=len(_ENVIRONMENT), label="DATASET_SPECS")
        specs = _one_line_specs(env.get("DATASET_SPECS", ""))
        if specs is None:
            self._report(origin, ("source",), 'expected a JSON list of specs such as ["jsonl:web", "sample:prose"]')
            self.values.setdefault("source", [{"spec": "sample:prose"}])  # so that it is not reported as missing too
        if not specs:
            return
        if "source" in self.values:
            self._report(origin, ("source",), "the file has [[source]] too; unset DATASET_SPECS or remove [[source]]")
            return
        self.values["source"] = [{"spec": spec} for spec in specs]
        self.origins[("source",)] = origin
        for index, table in enumerate(self._source_tables()):
            self.origins[("source", index)] = origin
            self._lift_options(index, table, replace=False)

    def read_overrides(self, overrides: Sequence[str]) -> None:
        for place, (name, text) in enumerate(_override_pairs(overrides)):
            origin = _Origin(layer="override", place=place, label=_shown(shortened(name)), bare=text is None)
            parts = name.removeprefix("--").split(".")
            if not name.startswith("--") or not all(parts):
                self._report(origin, (), "expected an override such as --train.lr 3e-4")
                continue
            path: KeyPath = _ALIASES.get(tuple(parts), tuple(parts))
            self._put(path, True if text is None else _parsed(text, path, self.root), origin)
            for index, table in enumerate(self._source_tables()):
                if self._origin_of(("source", index, "spec")) is origin:
                    self._lift_options(index, table, replace=True)

    # ------------------------------------------------------------------------------- setting one value

    def _put(self, path: KeyPath, value: Any, origin: _Origin) -> None:
        """Set one value, making the tables on the way."""
        here: Any = self.values
        done: KeyPath = ()
        for depth, part in enumerate(path, start=1):
            key = self._slot(here, done, part, path[depth:], origin)
            if key is None:
                return
            done = (*done, key)
            below: Any = value if depth == len(path) else [] if _Shape.at(done, self.root).is_array else {}
            if isinstance(here, list) and key == len(here):
                here.append(below)
            elif depth == len(path) or (isinstance(here, dict) and key not in here):
                here[key] = below
            if depth < len(path):
                self.origins.setdefault(done, origin)
            here = here[key]
        for inner in [k for k in self.origins if k[: len(done)] == done]:
            del self.origins[inner]
        self.origins[done] = origin

    def _slot(self, here: Any, done: KeyPath, part: str | int, rest: KeyPath, origin: _Origin) -> str | int | None:
        """The key or the index under which a path goes on from `here`; None, and a problem, if it cannot."""
        if isinstance(here, dict):
            return part
        path = (*done, part, *rest)
        if not isinstance(here, list):
            self._report(origin, path, f"{_dotted(done)} is a value, not a table")
            return None
        # One past the last is an element to add.
        if re.fullmatch(r"[0-9]{1,9}", str(part)) and int(part) <= len(here):
            return int(part)
        numbers = f"there are 0 to {len(here) - 1}" if len(here) > 1 else "there is 0" if here else "there are none"
        self._report(
            origin,
            path,
            f"no {_dotted(done)} {found_text(str(part))}, {numbers}; count from 0, as in --{_dotted((*done, 0, *rest))}",
        )
        return None

    def _resolve_aliases(self) -> None:
        for alias, path in _ALIASES.items():
            table = self.values.get(alias[0])
            if not isinstance(table, dict) or alias[1] not in table:
                continue
            origin = self.origins.pop(alias)
            value = table.pop(alias[1])
            if path[1] in table:
                self._report(origin, alias, f"is another name of {path[1]}, which is set too; keep one of the two")
                continue
            table[path[1]] = value
            self.origins[path] = _Origin(
                layer=origin.layer, place=origin.place, label=origin.label, written=_dotted(alias)
            )

    def _source_tables(self) -> list[Any]:
        sources = self.values.get("source")
        return sources if isinstance(sources, list) else []

    def _lift_options(self, index: int, table: Any, *, replace: bool) -> None:
        """Move `?weight=0.3` from a spec to the key it means, so that each thing is said in one place."""
        spec = table.get("spec") if isinstance(table, dict) else None
        split = _OPTIONS.fullmatch(spec) if isinstance(spec, str) else None
        if split is None:
            return
        from headrace.sources.spec import option_value  # brings numpy, which a config without options does not need

        origin = self._origin_of(("source", index, "spec"))
        for option in split["options"].split("&"):
            name, _, text = option.partition("=")
            path: KeyPath = ("source", index, name)
            lifted = _Origin(
                layer=origin.layer,
                place=origin.place,
                label=origin.label,
                written=f"source.{index}.spec?{shortened(name)}",
            )
            if name not in SourceSection.model_fields or name == "spec":
                options = [n for n in SourceSection.model_fields if n != "spec"]
                near = _did_you_mean(_nearest(name, options)) or f", a spec takes {', '.join(options)}"
                self._report(lifted, path, f"unknown option{near}")
            elif name in table and not replace:
                self._report(lifted, path, f"{name} is set elsewhere too; keep one of the two")
            else:
                self._put(path, _parsed(option_value(text), path, self.root), lifted)
        table["spec"] = split["spec"]

    # ------------------------------------------------------------------------------- where paths start

    def settle_paths(self, folder: Path) -> None:
        """Set `run.base`, where the file's relative paths start, and make those of the environment and of overrides absolute."""
        run, here = self.values.get("run", {}), Path.cwd()
        if self.root.__name__ == "RLConfig" or not isinstance(run, dict) or not isinstance(run.get("base", ""), str):
            return
        in_file = self._origin_of(("run", "base")).layer == "file"
        base = ((folder if in_file else here) / run.get("base", "")).resolve()
        self.values["run"] = run | {"base": str(base)}
        if base == here:
            return
        for table, keys in _PATHS.items():
            found = self.values.get(table)
            places: list[tuple[int | None, Any]] = [*enumerate(found)] if isinstance(found, list) else [(None, found)]
            for index, values in places:
                if not isinstance(values, dict):
                    continue
                for key in keys:
                    path: KeyPath = (table, key) if index is None else (table, index, key)
                    self._settle(values, path, base, here)

    def _settle(self, values: dict[str, Any], path: KeyPath, base: Path, here: Path) -> None:
        """One value that names paths, or several: absolute unless it stands in the file, whose paths start at `base`."""
        name = str(path[-1])
        given = values.get(name)
        for at, text in enumerate(given if isinstance(given, list) else [given]):
            kind, colon, place = text.partition(":") if name == "spec" and isinstance(text, str) else ("", "", text)
            if not isinstance(place, str) or not _is_relative(kind, place):
                continue
            if self._origin_of(path).layer == "file":
                if name in ("spec", "roots") and not _exists(base, place) and _exists(here, place):
                    self._report(self._origin_of(path), path, f"paths of a config start at its folder, and {base / place} does not exist; {place} of the working folder does: set run.base = {quoted(os.path.relpath(here, base))}, or write the whole path")  # fmt: skip
            elif name != "tokenizer" or _exists(here, place):  # else it is a name
                absolute = f"{kind}{colon}{here / place}"
                if isinstance(given, list):
                    given[at] = absolute
                else:
                    values[name] = absolute

    # ---------------------------------------------------------------------------------- what is wrong

    def checked(self) -> AnyConfig:
        """The config, or one ConfigError with all that is wrong."""
        if (count := len(self._source_tables())) > _MAX_SOURCES:
            self._report(self._origin_of(("source",)), ("source",), f"{count:,} sources, at most {_MAX_SOURCES:,} can be mixed; name many files with one pattern")  # fmt: skip
            raise ConfigError([message for _, message in self.problems])
        if "orchestrator" in self.values:
            self._answer_orchestrator(self.values.pop("orchestrator"))
            raise ConfigError([message for _, message in sorted(self.problems, key=lambda p: p[0])])
        try:
            config = self.root.model_validate(self.values)
        except ValidationError as error:
            self._explain(error)
        else:
            if not self.problems:
                return config
        raise ConfigError(list(dict.fromkeys(message for _, message in sorted(self.problems, key=lambda p: p[0]))))

    def _answer_orchestrator(self, table: object) -> None:
        """Say of every key of an [orchestrator] where it lives: no run is described by such a table."""
        path: KeyPath = ("orchestrator",)
        self._report(
            self._origin_of(path), path, "an RL run has the tables [policy], [engine], [[env]], [rollouts] and [eval] (docs/guides/rl.md)"
        )  # fmt: skip
        for name in table if isinstance(table, dict) else ():
            place = _ORCHESTRATOR.get(name)
            if place is None:
                near = _nearest(name, list(_ORCHESTRATOR))
                place = f"not known{_did_you_mean(near)}"
            self._report(self._origin_of((*path, name)), (*path, name), place)

    def _explain(self, error: ValidationError) -> None:
        errors = error.errors(include_url=False)
        if len(errors) > _MAX_PROBLEMS:
            self._report(self.nowhere, (), f"{len(errors):,} mistakes; the first {_MAX_PROBLEMS} are listed")
        for one in errors[:_MAX_PROBLEMS]:
            path: KeyPath = one["loc"]
            if (
                one["type"] == "missing"
                and path == ("source",)
                and any(map(_stands_for_source, islice(self.values, 100)))
            ):
                continue  # a misspelt or unbuilt table is reported; that [[source]] is missing follows from it
            if path not in self.origins:
                path = _BLAMED.get(path, path)
            self._report(self._origin_of(path), path, self._sentence(path, one))
        # A source with another mistake never reaches the check of all weights together.
        weights = [t.get("weight", 1.0) if isinstance(t, dict) else 1.0 for t in self._source_tables()]
        if weights and all(type(w) in (int, float) and w == 0 for w in weights):
            self._report(self._origin_of(("source",)), ("source",), ALL_ZERO)

    def _sentence(self, path: KeyPath, error: Any) -> str:
        kind, found = error["type"], error["input"]
        if kind == "extra_forbidden":
            return self._unknown(path, found)
        if kind == "missing":
            return self._missing(path)
        if kind == "value_error":
            return str(error["ctx"]["error"])
        shape = _Shape.at(path, self.root)
        if self._origin_of(path).bare:
            return f"needs a value, {shape.expected()}"
        if kind == "finite_number":
            return f"must be a finite number, found {_found(found)}"
        if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
            return f"must be {shape.range()}, found {number_text(found)}"
        if kind == "literal_error" and isinstance(found, str):
            values = shape.values(near=found)
            near = _nearest(found, values)
            listed = ", ".join(map(quoted, values))
            return f"unknown value {found_text(found)}{_did_you_mean(near and quoted(near))} (values: {listed})"
        if len(path) == 1:
            return _wrong_table(str(path[0]), found)
        hint = "; write it without quotes" if isinstance(found, str) and shape.takes(_toml_value(found)) else ""
        return f"{shape.expected()}, found {_found(found)}{hint}"

    def _missing(self, path: KeyPath) -> str:
        if path == ("source",):
            return NO_SOURCE
        if path == ("env",):
            return 'missing, expected at least one [[env]] with a spec such as spec = "python:sort.py:play"'
        origin = self._origin_of(path)
        if origin.layer == "override" and path[0] == "source":
            return f"there is no source {path[1]}; to add it, give --{_dotted(path)} too"
        return f"missing, {_Shape.at(path, self.root).expected()}"

    def _unknown(self, path: KeyPath, found: object) -> str:
        """What an unknown key may have been meant to be: a key of another table, or nearly one of this table."""
        name = str(path[-1])
        origin = self._origin_of(path)
        override = origin.layer == "override"
        tables = _keys_by_table(self.root)
        if path[:-1] == ("streams",) and name == "debug_log_active_every_n_batches":
            return "removed; metrics are emitted every step"
        if len(path) == 1 and name in RunConfig.model_fields:
            other = "[streams] to a stream job" if "streams" in self.values else "[rollouts] to an RL job"
            return f"{_header(name)} belongs to a text job and {other}; keep one of the two"
        if len(path) == 1 and _is_table(found):
            near = _nearest(name, list(tables))
            if not near:
                return f"unknown table, the tables are {', '.join(map(_header, tables))}"
            rest = origin.label.removeprefix(f"--{name}.")
            return "unknown table" + _did_you_mean(f"--{near}.{rest}" if rest != origin.label else _header(near))
        table = str(path[0]) if len(path) > 1 else ""
        homes = [other for other, keys in tables.items() if other != table and name in keys]
        if homes and override:
            return f"unknown key{_did_you_mean(' or '.join(f'--{home}.{_zero(home)}{name}' for home in homes))}"
        if homes:
            return f"unknown key, belongs in {' or '.join(map(_header, homes))}"
        if near := _nearest(name, tables.get(table, ())):
            return f"unknown key{_did_you_mean(f'--{_dotted((*path[:-1], near))}' if override else near)}"
        if near := _nearest(name, [key for keys in tables.values() for key in keys]):
            home = next(t for t, keys in tables.items() if near in keys)
            return f"unknown key{_did_you_mean(f'--{home}.{_zero(home)}{near}' if override else f'{near} in {_header(home)}')}"
        if table in tables:
            return f"unknown key, {_header(table)} takes {', '.join(tables[table])}"
        return f"unknown key, the tables are {', '.join(map(_header, tables))}"

    def _origin_of(self, path: KeyPath) -> _Origin:
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, self.nowhere)

    def _report(self, origin: _Origin, path: KeyPath, what: str) -> None:
        self.problems.append((origin.order, origin.say(path, what)))


BUILT_IN = {"quickstart": Path(__file__).parent.parent / "quickstart.toml"}
"""Configs that come with headrace, by the name that a command takes in place of a file."""


def load_config(path: Path | None, overrides: Sequence[str] = (), env: Mapping[str, str] = os.environ) -> RunConfig:
    """The checked config of a text job; see `load_any_config`. Another kind of job is refused."""
    config = load_any_config(path, overrides, env)
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"{_shown(path) if path is not None else 'the config'} describes a job of kind {config.kind!r}; this works on text jobs, "
            "[[source]] with [train]"
        )
    return config


def load_any_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] = os.environ,
    *,
    base: Path | None = None,
) -> AnyConfig:
    """The checked config of a file, the environment and `--section.key value` overrides; ConfigError says all problems.

    `path` may also be a name of `BUILT_IN`. Relative paths in the file start at `base`, which is the file's own folder unless given; those of the
    environment and of overrides start at the working folder. `run.base` says so in the config.

    Overrides are what stood on the command line: `--train.lr 3e-4`, `--train.lr=3e-4`, `--source.0.weight 0.5`, and
    `--text.bos` for `--text.bos true`. The last of two equal ones holds. A source numbered one past the last is added.
    """
    layers = _Layers()
    if path is not None and str(path) in BUILT_IN and not path.exists():
        path, base = BUILT_IN[str(path)], Path.cwd()
    if path is not None:
        layers.read_file(path)
    layers.read_environment(env)
    layers.read_overrides(overrides)
    layers.settle_paths(base if base is not None else path.parent if path is not None else Path())
    config = layers.checked()
    if isinstance(config, RunConfig) or config.kind != "rl" or path is None:
        return config
    return _beside(config, path.parent)


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


def _beside(config: RLConfig, folder: Path) -> RLConfig:
    """The config with the files of its environments found beside its own file, where they are there."""
    found = []
    for env in config.env:
        kind, _, rest = env.spec.partition(":")
        file, _, function = rest.rpartition(":")
        if kind == "python" and file.endswith(".py") and not Path(file).is_absolute() and (folder / file).is_file():
            env = env.model_copy(update={"spec": f"python:{folder / file}:{function}"})
        found.append(env)
    return config.model_copy(update={"env": tuple(found)})


def _file_text(path: Path) -> str:
    """The text of a config file. Nothing that could block or fill the memory is read."""
    from headrace.files import read_regular  # not above: it brings numpy

    file = f"config file {_shown(path)}"
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
        raise ConfigError(f"{_shown(path)}:{line}: the text is not UTF-8; save the file as UTF-8") from error


def _nearest_file(path: Path) -> str:
    try:
        if not path.parent.is_dir():
            return f"; neither does the folder {_shown(path.parent)}"
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in islice(entries, 10_000) if entry.is_file()]
    except OSError:
        return ""  # a folder that may not be listed leaves nothing to suggest
    near = _nearest(path.name, [n for n in names if n.endswith(".toml")] or names)
    return _did_you_mean(near and _shown(path.parent / near))


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
    """The TOML value that a text outside of a file stands for, or else the text itself."""
    value, kind = _toml_value(text), _Shape.at(path, root).kind
    if kind is str and not isinstance(value, str):
        return text  # where text is wanted, `--run.name 7` and `--run.name 2024-05-01` mean just that
    if value is None and kind is float and _SHORT_FLOAT.fullmatch(text):
        return float(text)
    return text if value is None else value


def _one_line_specs(text: str) -> list[str] | None:
    """The specs of DATASET_SPECS; None if it is meant as a JSON list and is none of texts."""
    if not text.lstrip().startswith("["):  # which no spec does: it would have no scheme
        return [line.strip() for line in re.split(r"[\n;]", text) if line.strip()]
    try:
        specs = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return specs if all(isinstance(spec, str) and spec.strip() for spec in specs) else None


def _toml_value(text: str) -> Any:
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return None
    return document["value"] if len(document) == 1 else None  # a text with a newline could smuggle in a second key


# ---------------------------------------------------------------------------- what would have been right


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What a key takes, read off the models so that no message can disagree with them."""

    kind: Any = None
    """The type without `| None`; None where no key is known."""
    bounds: tuple[Any, ...] = ()
    example: Any = None

    @classmethod
    def at(cls, path: KeyPath, root: type[BaseModel]) -> _Shape:
        kind: Any = root
        bounds: tuple[Any, ...] = ()
        example: Any = None
        for part in path:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                info = kind.model_fields.get(str(part))
                if info is None:
                    return cls()
                kind, bounds = info.annotation, tuple(info.metadata)
                example = info.examples[0] if info.examples else info.default
            elif get_origin(kind) is tuple:
                args = get_args(kind)
                kind = args[0] if len(args) < 2 or args[1] is ... else args[-1]
                example = example[0] if isinstance(example, (list, tuple)) and example else None
            elif get_origin(kind) is dict:
                kind = get_args(kind)[1]
                example = next(iter(example.values()), None) if isinstance(example, dict) else None
            else:
                return cls()
            while get_origin(kind) in (Annotated, Union, UnionType):
                if get_origin(kind) is Annotated:
                    kind, *metadata = get_args(kind)
                    bounds += tuple(b for m in metadata for b in (m.metadata if isinstance(m, FieldInfo) else [m]))
                else:
                    kind = next(a for a in get_args(kind) if a is not type(None))
        return cls(kind=kind, bounds=bounds, example=example)

    @property
    def is_array(self) -> bool:
        return get_origin(self.kind) is tuple

    @property
    def table(self) -> Iterable[str]:
        """The keys of a table; empty for any other value."""
        return self.kind.model_fields if isinstance(self.kind, type) and issubclass(self.kind, BaseModel) else ()

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of an enumeration or the names of a registry; empty for any other value."""
        if get_origin(self.kind) is Literal:
            return get_args(self.kind)
        return tuple(name for bound in self.bounds if isinstance(bound, OneOf) for name in bound.names())

    def values(self, *, near: str = "") -> list[str]:
        """The values of an enumeration, the nearest first."""
        return sorted(self.choices, key=lambda name: -difflib.SequenceMatcher(None, near.lower(), name).ratio())

    def expected(self) -> str:
        if self.choices:
            return f"expected one of {', '.join(map(quoted, self.choices))}"
        if self.kind is bool:
            return "expected true or false"
        if isinstance(self.kind, type) and issubclass(self.kind, BaseModel):
            return "expected a table"
        if self.is_array:
            args = get_args(self.kind)
            what = "an array" if args[-1] is ... else f"an array of {len(args)} numbers"
        else:
            what = {int: "an integer", float: "a number", str: "a string"}.get(self.kind, "a value")
        return f"expected {what} such as {toml_text(self.example)}"

    def range(self) -> str:
        words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
        limits = [
            f"{words[name]} {number_text(limit)}"
            for name in words
            for bound in self.bounds
            if (limit := getattr(bound, name, None)) is not None
        ]
        return " and ".join(limits)

    def takes(self, value: object) -> bool:
        """Would this have been right, without its quotes?"""
        if self.kind is float:
            return type(value) in (int, float)
        return self.kind in (int, bool) and type(value) is self.kind


def _keys_by_table(root: type[BaseModel]) -> dict[str, tuple[str, ...]]:
    """The keys of every table, other names of keys included."""
    keys = {
        table: tuple(_Shape.at((table, 0), root).table or _Shape.at((table,), root).table)
        for table in root.model_fields
    }
    for table, alias in _ALIASES:
        if table in keys:
            keys[str(table)] += (str(alias),)
    return keys


_ARRAYS = ("source", "env")


def _header(table: str) -> str:
    return f"[[{table}]]" if table in _ARRAYS else f"[{table}]"


def _zero(table: str) -> str:
    return "0." if table in _ARRAYS else ""


def _stands_for_source(name: str) -> bool:
    return name not in RunConfig.model_fields and _nearest(name, RunConfig.model_fields) == "source"


def _is_table(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _wrong_table(name: str, found: object) -> str:
    if name in _ARRAYS and isinstance(found, dict):
        return f"expected an array of tables, write [[{name}]] in place of [{name}]"
    if _is_table(found):
        return f"expected one table, write [{name}] in place of [[{name}]]"
    return f"expected the table {_header(name)}, found {_found(found)}"


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """The closest of the names, if it is close; `seq-len` and `Seq_Len` are very close to seq_len."""
    plain = {other.lower().replace("-", "_"): other for other in names}
    if (meant := _ELSEWHERE.get(name.lower().replace("-", "_"))) in plain:
        return plain[meant]
    # 0.55 finds global_batch_size for batch_size and tokenizer_workers for workers; at 0.6 the latter is lost.
    close = difflib.get_close_matches(name[:80].lower().replace("-", "_"), plain, n=1, cutoff=0.55)
    return plain[close[0]] if close else None


def _did_you_mean(near: str | None) -> str:
    return f", did you mean {near}?" if near else ""


def _dotted(path: KeyPath) -> str:
    parts = [str(p) for p in path]
    return ".".join(p if re.fullmatch(r"[A-Za-z0-9_-]+", p) else quoted(p) for p in parts)


def _shown(place: str | Path) -> str:
    """A file or an argument, as it stands unless it would break the line."""
    return str(place) if str(place).isprintable() else quoted(str(place))


def _found(value: object) -> str:
    """A value that was not right, in the words of TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string {found_text(value)}"
    if isinstance(value, int):
        return number_text(value) if value.bit_length() > 64 else f"the integer {number_text(value)}"
    if isinstance(value, float):
        return f"the number {value!r}"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, (list, tuple)):
        return f"an array of {len(value)}"
    return "a date or a time"
