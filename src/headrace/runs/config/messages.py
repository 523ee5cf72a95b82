"""Messages about a config: one line for each problem, with the place where the user wrote it and the nearest right thing.

    run.toml:12: train.lrr: unknown key, did you mean lr?
    run.toml:15: train.prefetch_batches: unknown key, belongs in [loader]
    --text.pack: unknown value "bestfit", did you mean "best_fit"? (values: "best_fit", "concat")

`Report` collects the problems of all layers. `explain` words what pydantic found; pydantic's own sentences are never shown. What a key
takes is read off the models (`KeyShape`), so no message can disagree with them.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from headrace.errors import ConfigError, found_text, number_text, quoted
from headrace.runs.config.base import NONE_GIVEN, JobConfig, OneOf, toml_text
from headrace.runs.config.schema import RunConfig
from headrace.runs.config.toml_positions import KeyPath

_MAX_PROBLEMS = 100
"""Problems that are listed; the nearest names of more would take seconds to find."""
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
"""The keys here that replace those of prime-rl's [orchestrator]."""
_OTHER_TRAINERS = {
    "save_every": "checkpoint_every", "save_steps": "checkpoint_every", "save_interval": "checkpoint_every", "checkpoint_interval": "checkpoint_every",
    "save_total_limit": "keep_checkpoints", "logging_steps": "log_every", "log_interval": "log_every", "max_steps": "steps", "max_iters": "steps",
    "learning_rate": "lr", "block_size": "seq_len", "max_seq_len": "seq_len", "output_dir": "dir", "num_workers": "tokenizer_workers", "context_len": "seq_len",
}  # fmt: skip
"""The keys here that mean what other trainers call by another name; a comparison of letters would find a wrong one."""


# ----------------------------------------------------------------------------------------------- the report


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the user wrote a value."""

    layer: Literal["file", "environment", "override"]
    place: int
    """The line, or the position among the variables or overrides; for the order of the messages."""
    label: str
    """How a message begins: run.toml:12, CONTEXT_LEN, --train.lr."""
    written: str = ""
    """The key as it was written, where that is not the key's path."""
    bare: bool = False
    """An override without a value, which means true."""


@dataclass(slots=True)
class Report:
    """Where every value of a config was written, and the problems found so far."""

    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    start: Origin = Origin(layer="file", place=1, label="command line")
    """The origin of problems that no written value has, such as a missing table."""
    problems: list[tuple[int, int, str]] = field(default_factory=list)
    """(layer, place, message)."""

    def origin_of(self, path: KeyPath) -> Origin:
        """The origin of a key, or else of the nearest table around it."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, self.start)

    def add(self, path: KeyPath, what: str, origin: Origin | None = None) -> None:
        """Add a problem of the key at `path`; `origin` is that of the key unless given."""
        origin = origin if origin is not None else self.origin_of(path)
        name = origin.written or ("" if origin.layer == "override" else dotted(path))
        layer = ("file", "environment", "override").index(origin.layer)
        self.problems.append((layer, origin.place, ": ".join(filter(None, (origin.label, name, what)))))

    def error(self) -> ConfigError:
        """All problems, in the order of layers and lines, each once."""
        ordered = sorted(self.problems, key=lambda problem: problem[:2])
        return ConfigError(list(dict.fromkeys(message for *_, message in ordered)))


def explain(error: ValidationError, values: Mapping[str, Any], root: type[JobConfig], report: Report) -> None:
    """Add what pydantic found in the tables `values` of a config of class `root` to the report."""
    errors: dict[KeyPath, Any] = {}
    for one in error.errors(include_url=False):
        path: KeyPath = one["loc"]
        if one["type"] != "extra_forbidden" and KeyShape.at(path, root).kind is None:
            path = path[:-1]  # pydantic reports every branch of a union, with its name behind the key
        errors.setdefault(path, one)
    if len(errors) > _MAX_PROBLEMS:
        report.add((), f"{len(errors):,} mistakes; the first {_MAX_PROBLEMS} are listed", report.start)
    for path, one in islice(errors.items(), _MAX_PROBLEMS):
        if one["type"] == "missing" and path == ("source",) and any(map(_means_source, islice(values, 100))):
            continue  # the misspelt table is reported; that [[source]] is missing follows from it
        report.add(path, _sentence(path, one, values, root, report))


def explain_orchestrator(table: object, report: Report) -> None:
    """Say of every key of an [orchestrator] what replaces it: no run is described by such a table."""
    path: KeyPath = ("orchestrator",)
    report.add(path, "an RL run has the tables [policy], [engine], [[env]], [rollouts] and [eval] (docs/guides/rl.md)")
    for name in table if isinstance(table, dict) else ():
        report.add(
            (*path, name), _ORCHESTRATOR.get(name) or f"not known{did_you_mean(nearest(name, list(_ORCHESTRATOR)))}"
        )


# ------------------------------------------------------------------------------------- one sentence a problem


def _sentence(path: KeyPath, error: Any, values: Mapping[str, Any], root: type[JobConfig], report: Report) -> str:
    kind, found, origin = error["type"], error["input"], report.origin_of(path)
    if kind == "extra_forbidden":
        return _unknown_key(path, found, values, root, origin)
    if kind == "missing":
        return _missing_key(path, root, origin)
    if kind == "value_error":
        return str(error["ctx"]["error"])
    shape = KeyShape.at(path, root)
    if origin.bare:
        return f"needs a value, {shape.expected()}"
    if kind == "finite_number":
        return f"must be a finite number, found {_found(found)}"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return f"must be {shape.range()}, found {number_text(found)}"
    if kind == "literal_error" and isinstance(found, str):
        choices = sorted(shape.choices, key=lambda n: -difflib.SequenceMatcher(None, found.lower(), n).ratio())
        near = nearest(found, choices)
        listed = ", ".join(map(quoted, choices))
        return f"unknown value {found_text(found)}{did_you_mean(near and quoted(near))} (values: {listed})"
    if len(path) == 1:
        return _wrong_table(str(path[0]), found)
    hint = "; write it without quotes" if isinstance(found, str) and shape.takes(toml_value(found)) else ""
    return f"{shape.expected()}, found {_found(found)}{hint}"


def _missing_key(path: KeyPath, root: type[JobConfig], origin: Origin) -> str:
    if path[0] in NONE_GIVEN and len(path) == 1:
        return NONE_GIVEN[str(path[0])]
    if origin.layer == "override" and path[0] == "source":
        return f"there is no source {path[1]}; to add it, give --{dotted(path)} too"
    return f"missing, {KeyShape.at(path, root).expected()}"


def _unknown_key(path: KeyPath, found: object, values: Mapping[str, Any], root: type[JobConfig], origin: Origin) -> str:
    """The key that an unknown one may have been meant to be: one of another table, or nearly one of this table."""
    name, override, tables = str(path[-1]), origin.layer == "override", _keys_by_table(root)
    if path[:-1] == ("streams",) and name == "debug_log_active_every_n_batches":
        return "removed; metrics are emitted every step"
    if len(path) == 1 and name in RunConfig.model_fields:
        other = "[streams] to a stream job" if "streams" in values else "[rollouts] to an RL job"
        return f"{_header(name)} belongs to a text job and {other}; keep one of the two"
    if len(path) == 1 and _is_table(found):
        near = nearest(name, list(tables))
        if not near:
            return f"unknown table, the tables are {', '.join(map(_header, tables))}"
        rest = origin.label.removeprefix(f"--{name}.")
        return "unknown table" + did_you_mean(f"--{near}.{rest}" if rest != origin.label else _header(near))
    table = str(path[0]) if len(path) > 1 else ""
    homes = [other for other, keys in tables.items() if other != table and name in keys]
    if homes and override:
        return f"unknown key{did_you_mean(' or '.join(_option(home, name) for home in homes))}"
    if homes:
        return f"unknown key, belongs in {' or '.join(map(_header, homes))}"
    if near := nearest(name, tables.get(table, ())):
        return f"unknown key{did_you_mean(f'--{dotted((*path[:-1], near))}' if override else near)}"
    if near := nearest(name, [key for keys in tables.values() for key in keys]):
        home = next(t for t, keys in tables.items() if near in keys)
        return f"unknown key{did_you_mean(_option(home, near) if override else f'{near} in {_header(home)}')}"
    if table in tables:
        return f"unknown key, {_header(table)} takes {', '.join(tables[table])}"
    return f"unknown key, the tables are {', '.join(map(_header, tables))}"


def _keys_by_table(root: type[BaseModel]) -> dict[str, tuple[str, ...]]:
    """The keys of every table."""
    return {
        table: tuple(KeyShape.at((table, 0), root).table_keys or KeyShape.at((table,), root).table_keys)
        for table in root.model_fields
    }


def _header(table: str) -> str:
    return f"[[{table}]]" if table in NONE_GIVEN else f"[{table}]"


def _option(table: str, key: str) -> str:
    return f"--{table}.{'0.' if table in NONE_GIVEN else ''}{key}"


def _means_source(name: str) -> bool:
    return name not in RunConfig.model_fields and nearest(name, RunConfig.model_fields) == "source"


def _is_table(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _wrong_table(name: str, found: object) -> str:
    if name in NONE_GIVEN and isinstance(found, dict):
        return f"expected an array of tables, write [[{name}]] in place of [{name}]"
    if _is_table(found):
        return f"expected one table, write [{name}] in place of [[{name}]]"
    return f"expected the table {_header(name)}, found {_found(found)}"


# --------------------------------------------------------------------------------------------- what a key takes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyShape:
    """Type, bounds and example of a key, read off the models."""

    kind: Any = None
    """The type without `| None`; None where no key is known."""
    bounds: tuple[Any, ...] = ()
    example: Any = None

    @classmethod
    def at(cls, path: KeyPath, root: type[BaseModel]) -> KeyShape:
        """The shape of the key at `path` in a config of class `root`."""
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
    def table_keys(self) -> Iterable[str]:
        """The keys of a table; empty for any other value."""
        return self.kind.model_fields if isinstance(self.kind, type) and issubclass(self.kind, BaseModel) else ()

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of an enumeration or the names of a registry; empty for any other value."""
        if get_origin(self.kind) is Literal:
            return get_args(self.kind)
        return tuple(name for bound in self.bounds if isinstance(bound, OneOf) for name in bound.names())

    def expected(self) -> str:
        """What is expected, with an example."""
        if self.choices:
            return f"expected one of {', '.join(map(quoted, self.choices))}"
        if self.kind is bool:
            return "expected true or false"
        if tuple(self.table_keys):
            return "expected a table"
        if self.is_array:
            args = get_args(self.kind)
            what = "an array" if args[-1] is ... else f"an array of {len(args)} numbers"
        else:
            what = {int: "an integer", float: "a number", str: "a string"}.get(self.kind, "a value")
        return f"expected {what} such as {toml_text(self.example)}"

    def range(self) -> str:
        """The bounds of a number in words."""
        words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
        limits = [
            f"{words[name]} {number_text(limit)}"
            for name in words
            for bound in self.bounds
            if (limit := getattr(bound, name, None)) is not None
        ]
        return " and ".join(limits)

    def takes(self, value: object) -> bool:
        """Whether a number or boolean that was written in quotes would have been right without them."""
        if self.kind is float:
            return type(value) in (int, float)
        return self.kind in (int, bool) and type(value) is self.kind


# ----------------------------------------------------------------------------------------------------- words


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The closest of the names, if it is close; `seq-len` and `Seq_Len` are very close to seq_len."""
    plain = {other.lower().replace("-", "_"): other for other in names}
    if (meant := _OTHER_TRAINERS.get(name.lower().replace("-", "_"))) in plain:
        return plain[meant]
    # 0.55 finds global_batch_size for batch_size and tokenizer_workers for workers; at 0.6 the latter is lost.
    close = difflib.get_close_matches(name[:80].lower().replace("-", "_"), plain, n=1, cutoff=0.55)
    return plain[close[0]] if close else None


def did_you_mean(near: str | None) -> str:
    """The end of a sentence about a name that is nearly right; empty without one."""
    return f", did you mean {near}?" if near else ""


def dotted(path: KeyPath) -> str:
    """A path of keys as TOML writes it."""
    parts = [str(p) for p in path]
    return ".".join(p if re.fullmatch(r"[A-Za-z0-9_-]+", p) else quoted(p) for p in parts)


def printable(place: str | Path) -> str:
    """A file or an argument, quoted if it would break the line."""
    return str(place) if str(place).isprintable() else quoted(str(place))


def toml_value(text: str) -> Any:
    """The text parsed as a TOML value; None if it is no TOML."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return None
    return parsed["value"] if len(parsed) == 1 else None  # a text with a newline could hold a second key


def _found(value: object) -> str:
    """A wrong value, in the words of TOML."""
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
