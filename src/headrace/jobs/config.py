"""What does the user want run?

    config = load_config(Path("run.toml"), ["--train.lr", "3e-4", "--source.0.weight=0.5"])
    config.train.lr, config.source[0].weight      -> 0.0003, 0.5
    config.resolved(), config.to_toml(), config.hash

A value comes from the last of these that names it:

    default < file < environment (CONTEXT_LEN, TOKENIZER_WORKERS, DATA_LOADER_WORKERS, PREFETCH_BATCHES) < override

DATASET_SPECS holds one-line specs, separated by newlines or ";" (a spec may hold a comma). It stands in for [[source]]
and is refused beside it. A variable that is set but empty counts as not set.

All that is wrong is said at once, where the user wrote it, with the nearest thing that would be right:

    run.toml:12: train.lrr: unknown key, did you mean lr?
    run.toml:15: train.prefetch_batches: unknown key, belongs in [loader]
    --text.pack: unknown value "bestfit", did you mean "best_fit"? (values: "best_fit", "concat")

The values are checked once, by pydantic; its words are never shown. Nothing here opens a data file or a tokenizer.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from headrace.errors import ConfigError
from headrace.jobs.toml_source import KeyPath, TomlError, parse_toml

__all__ = [
    "LoaderSection",
    "RunConfig",
    "RunSection",
    "SourceSection",
    "TextSection",
    "TrainSection",
    "check_world_size",
    "load_config",
]

_MAX_FILE = 1 << 20
_MAX_WINDOW_TOKENS = 1 << 27
"""A window is tokenised and packed in memory as one unit: 1 GiB of int64 ids is where that stops being sensible."""
_CHOSEN_LATER = -1
_NAME = re.compile(r"\w[\w.-]{0,63}")


# ------------------------------------------------------------------------------------------- the values


def _refuse_odd_text(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"must not hold a NUL character, found {_found_text(text)}")
    if any("\ud800" <= c <= "\udfff" for c in text):  # how Python passes on an argument that is not UTF-8
        raise ValueError(f"must be UTF-8, found {_found_text(text)}")
    return text


def _refuse_odd_name(name: str) -> str:
    # A name becomes a folder and a part of metric keys, so neither "/" nor ".." may come in here.
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"expected 1 to 64 letters, digits, _ . or -, the first a letter or a digit, found {_found_text(name)}"
        )
    return name


def _refuse_repeats(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("names the same sink twice; keep one")
    return names


def _array(value: object) -> object:
    """TOML arrays arrive as lists; frozen values hold tuples."""
    return tuple(value) if isinstance(value, list) else value


_Text = Annotated[str, AfterValidator(_refuse_odd_text)]
_Name = Annotated[str, AfterValidator(_refuse_odd_name)]
_Beta = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    """A table: frozen, nothing unknown, no conversion but from an integer to a float."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunSection(_Section):
    """[run]: how long, from which seed, and what is kept."""

    name: _Name = "run"
    dir: _Text = Field("", examples=["runs/first"])
    """The run's folder; runs/<name> unless given."""
    steps: int = Field(200, gt=0, le=1 << 40)
    """Below 2**40, so that with the largest batch a sample's index still fits into 64 bits."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    checkpoint_every: int = Field(20, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    log_every: int = Field(10, ge=1)
    sinks: Annotated[
        tuple[Literal["wandb", "tensorboard"], ...], BeforeValidator(_array), AfterValidator(_refuse_repeats)
    ] = Field((), examples=[["tensorboard"]])
    stop_after: int | None = Field(None, ge=1, examples=[100])
    """Stop cleanly after this step, with a checkpoint. The learning rate still follows `steps`."""
    deadline: float = Field(300.0, gt=0)
    """Seconds that any wait may take."""

    @model_validator(mode="after")
    def _choose_folder(self) -> RunSection:
        if not self.dir:
            object.__setattr__(self, "dir", f"runs/{self.name}")
        return self


class SourceSection(_Section):
    """[[source]]: where documents come from, and how many of the tokens are theirs."""

    spec: _Text = Field(examples=["jsonl:web/*.jsonl"])
    """One line, KIND:PATH. Options after "?" (`jsonl:web?weight=0.3&text_key=content`) are lifted into the keys below."""
    weight: float = Field(1.0, ge=0)
    """Share of the delivered tokens, in proportion to the other weights."""
    name: _Name = Field("", examples=["web"])
    """Derived from the spec unless given; unique in a RunConfig."""
    text_key: _Text = "text"
    max_rows: int | None = Field(None, ge=1, examples=[1000])
    max_tokens: int | None = Field(None, ge=1, examples=[1_000_000])
    max_epochs: int | None = Field(None, ge=1, examples=[4])
    on_bad: Literal["fail", "skip"] = "fail"
    allow_symlinks: bool = False

    @field_validator("spec")
    @classmethod
    def _require_kind_and_path(cls, spec: str) -> str:
        kind, colon, path = spec.partition(":")
        if not (kind and colon and path.strip()):
            raise ValueError(
                f'expected KIND:PATH such as "jsonl:web/*.jsonl" or "sample:prose", found {_found_text(spec)}'
            )
        return spec

    @model_validator(mode="after")
    def _choose_name(self) -> SourceSection:
        if not self.name:
            object.__setattr__(self, "name", _name_of(self.spec))
        return self


class TextSection(_Section):
    """[text]: how documents become blocks of tokens."""

    tokenizer: _Text | None = Field(None, examples=["tokenizer.json"])
    """"sample": the built-in small BPE; "bytes" or none: bytes; else the path of a tokenizer.json."""
    seq_len: int = Field(1024, ge=2, le=1 << 24)
    pack: Literal["best_fit", "concat"] = "best_fit"
    bos: bool = False
    eos: bool = True
    eos_token: _Text | None = Field(None, examples=["<|endoftext|>"])
    """The token that ends a document, where the tokenizer has none under a usual name."""
    bos_token: _Text | None = Field(None, examples=["<|bos|>"])
    labels: Literal["shifted", "hf"] = "shifted"
    window_blocks: int = Field(64, ge=1, validate_default=True)
    """Blocks that are tokenised and packed as one unit."""
    segment_ids: bool = False
    shuffle: bool = True

    @field_validator("window_blocks")
    @classmethod
    def _keep_windows_in_memory(cls, blocks: int, info: ValidationInfo) -> int:
        seq_len = info.data.get("seq_len", 2)
        if blocks * seq_len > _MAX_WINDOW_TOKENS:
            raise ValueError(
                f"a window of {_number(blocks)} blocks of {_number(seq_len)} tokens is packed in memory as one unit and "
                f"may hold at most {_number(_MAX_WINDOW_TOKENS)} tokens; lower text.window_blocks to "
                f"{_MAX_WINDOW_TOKENS // seq_len} or less, or text.seq_len"
            )
        return blocks


class LoaderSection(_Section):
    """[loader]: how blocks become batches, and who makes them ahead of need."""

    global_batch_size: int = Field(8, ge=1, le=1 << 20)
    """Blocks a step, over all ranks."""
    lanes: int = Field(48, ge=1, le=1 << 16)
    """Fixed virtual consumers. They belong to the run; the number of ranks, which must divide them, to the day."""
    tokenizer_workers: int = Field(_CHOSEN_LATER, ge=0, le=1024, examples=[4])
    """Threads; 4 unless given, or 0 when there are worker processes."""
    data_loader_workers: int = Field(0, ge=0)
    prefetch_batches: int = Field(2, ge=0, le=1 << 16)
    exhausted: Literal["repeat", "drop", "stop_first"] = "repeat"
    """What becomes of a source that is dry. A run has a number of steps, so it starts again unless told otherwise."""
    pin_memory: bool = False

    @field_validator("data_loader_workers")
    @classmethod
    def _refuse_worker_processes(cls, workers: int, info: ValidationInfo) -> int:
        if workers > 0 and info.data.get("tokenizer_workers", 0) > 0:
            raise ValueError(
                "data_loader_workers and tokenizer_workers cannot both be above 0: nested process and thread pools can "
                "lead to oversubscription or stalls. Choose data_loader_workers = 0, as worker processes are not "
                "available yet"
            )
        if workers > 0:
            raise ValueError(
                "worker processes are not available yet; tokenizer_workers threads do this work. Set it to 0"
            )
        return workers

    @model_validator(mode="after")
    def _choose_threads(self) -> LoaderSection:
        if self.tokenizer_workers == _CHOSEN_LATER:
            object.__setattr__(self, "tokenizer_workers", 0 if self.data_loader_workers else 4)
        return self


class TrainSection(_Section):
    """[train]: the model and how it learns."""

    model: Literal["gpt-tiny", "gpt-small"] = "gpt-tiny"
    lr: float = Field(3e-3, gt=0)
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """The learning rate falls to this part of `lr` by the last step."""
    warmup_steps: int = Field(20, ge=0)
    weight_decay: float = Field(0.1, ge=0)
    betas: Annotated[tuple[_Beta, _Beta], BeforeValidator(_array)] = (0.9, 0.95)
    grad_clip: float = Field(1.0, gt=0)
    """Largest norm of the gradient. 0 would mean no learning at all, so "no clipping" is a large number."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = Field(None, ge=1, examples=[2])
    """torch threads of each process."""
    compile: bool = False


class RunConfig(_Section):
    """Everything a run was asked to be, with every default filled in. Frozen, and complete enough to run again."""

    run: RunSection = RunSection()
    source: Annotated[tuple[SourceSection, ...], BeforeValidator(_array)]
    text: TextSection = TextSection()
    loader: LoaderSection = LoaderSection()
    train: TrainSection = TrainSection()

    @field_validator("source")
    @classmethod
    def _weigh_and_name(cls, sources: tuple[SourceSection, ...]) -> tuple[SourceSection, ...]:
        if not sources:
            raise ValueError(_NO_SOURCE)
        if all(s.weight == 0 for s in sources):
            raise ValueError(_ALL_ZERO)
        names = _unique([s.name for s in sources])
        return tuple(
            s if s.name == name else s.model_copy(update={"name": name}) for s, name in zip(sources, names, strict=True)
        )

    @property
    def kind(self) -> Literal["lm"]:
        """What the tables describe. [[source]] with [train] is the one kind there is so far."""
        return "lm"

    def resolved(self) -> dict[str, Any]:
        """Every key with the value that holds, as plain JSON values."""
        return self.model_dump(mode="json")

    @property
    def hash(self) -> str:
        """12 hex digits over what decides the result of the run: equal hashes, equal batches and equal losses.

        Where the run writes, what it shows and how many threads work ahead decide nothing, by the first law of the
        design, so they are left out and may change between a run and its resume.
        """
        # Imported here: the package `order` brings numpy, which takes longer than all of this module.
        from headrace.order.fingerprint import fingerprint_json

        # What is not set is left out, so that a key that a later headrace adds, unset, does not change the hash.
        tables = self.model_dump(mode="json", exclude_none=True)
        for table, keys in _WITHOUT_EFFECT.items():
            for key in keys:
                tables[table].pop(key, None)
        tables["text"].setdefault("tokenizer", "bytes")
        return fingerprint_json(tables)[:12]

    def to_toml(self) -> str:
        """A file that `load_config` reads back to this very config."""
        tables = self.resolved()
        if self.run.dir == f"runs/{self.run.name}":
            del tables["run"]["dir"]  # so that the copy can be run under another name and get a folder of its own
        parts = [_table_toml("[run]", tables["run"])]
        parts += [_table_toml("[[source]]", source) for source in tables["source"]]
        parts += [_table_toml(f"[{name}]", tables[name]) for name in ("text", "loader", "train")]
        return "\n".join(parts)


_NO_SOURCE = 'missing, expected at least one [[source]] with a spec such as spec = "sample:prose"'
_ALL_ZERO = "every source has weight 0, so there is nothing to deliver; give at least one a weight above 0"
_WITHOUT_EFFECT = {
    "run": ("name", "dir", "checkpoint_every", "keep_checkpoints", "log_every", "sinks", "stop_after", "deadline"),
    "loader": ("tokenizer_workers", "data_loader_workers", "prefetch_batches", "pin_memory"),
}


def check_world_size(config: RunConfig, world: int) -> None:
    """Refuse a number of ranks that cannot share the lanes and the global batch evenly."""
    lanes, batch = config.loader.lanes, config.loader.global_batch_size
    if world >= 1 and lanes % world == 0 and batch % world == 0:
        return
    common = math.gcd(lanes, batch)
    fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
    raise ConfigError(
        f"loader.global_batch_size: {world} ranks cannot share a global batch of {batch} over {lanes} lanes, because "
        f"the number of ranks must divide both; start {fitting} ranks, or change loader.global_batch_size (and "
        "loader.lanes, in a new run only)"
    )


def _name_of(spec: str) -> str:
    """`jsonl:data/web/*.jsonl.zst` is called web: the last part of the path that is not a pattern, without suffixes."""
    path = spec.partition(":")[2].partition("?")[0]
    parts = [part for part in path.split("/") if part.strip(".") and not any(c in part for c in "*?[")]
    stem = parts[-1].lstrip(".").partition(".")[0] if parts else ""
    return re.sub(r"[^\w-]+", "-", stem).strip("-")[:48] or "source"


def _unique(wanted: Sequence[str]) -> list[str]:
    """The names, the later of two equal ones with -2, -3, …; a name that somebody asked for is not taken from them."""
    taken: set[str] = set()
    names = []
    for name in wanted:
        candidate, n = name, 1
        while candidate in taken or (n > 1 and candidate in wanted):
            n += 1
            candidate = f"{name[:56]}-{n}"
        taken.add(candidate)
        names.append(candidate)
    return names


# ------------------------------------------------------------------------------------------ writing TOML


def _table_toml(header: str, table: Mapping[str, Any]) -> str:
    lines = [f"{key} = {_toml(value)}\n" for key, value in table.items() if value is not None]
    return "".join([f"{header}\n", *lines])


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)  # int and float: Python's shortest exact form is TOML


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def _quoted(text: str) -> str:
    """A TOML string, in which nothing can break a line or move a terminal's cursor."""
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else _escaped(c)) for c in text) + '"'


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# ------------------------------------------------------------------------------- who said it: the layers

_ENVIRONMENT: dict[str, KeyPath] = {
    "CONTEXT_LEN": ("text", "seq_len"),
    "TOKENIZER_WORKERS": ("loader", "tokenizer_workers"),
    "DATA_LOADER_WORKERS": ("loader", "data_loader_workers"),
    "PREFETCH_BATCHES": ("loader", "prefetch_batches"),
}
_ALIASES: dict[KeyPath, KeyPath] = {("text", "context_len"): ("text", "seq_len")}
_BLAMED: dict[KeyPath, KeyPath] = {("text", "window_blocks"): ("text", "seq_len")}
"""Which key is told, when the checked one was left at its default."""
_NOT_BUILT = ("streams", "rollouts")
_OPTIONS = re.compile(r"(?P<spec>.+?)\?(?P<options>\w+=[^&]*(?:&\w+=[^&]*)*)", re.DOTALL)
"""A spec with options; their "?" is told from that of a pattern by the "=" that follows."""
_SHORT_FLOAT = re.compile(r"[+-]?(?:[0-9]*\.[0-9]+|[0-9]+\.)(?:[eE][+-]?[0-9]+)?")
"""`.3` and `3.` are no TOML, but on a command line nobody would know."""
_KEPT_OPTIONS = ("split", "cache")
"""Options of a spec that are not keys of [[source]]; the reader of that kind takes them from the spec."""


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
        return f"{self.label}: {self.written or _dotted(path)}: {what}"

    @property
    def order(self) -> tuple[int, int]:
        return ("file", "environment", "override").index(self.layer), self.place


@dataclass(slots=True)
class _Layers:
    """The merged values; who set each of them; and what is wrong so far."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, _Origin] = field(default_factory=dict)
    nowhere: _Origin = _Origin(layer="file", place=1, label="command line")
    """Who is told about what is missing altogether."""
    problems: list[tuple[tuple[int, int], str]] = field(default_factory=list)

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
        for place, (variable, path) in enumerate(_ENVIRONMENT.items()):
            if env.get(variable, "").strip():
                origin = _Origin(layer="environment", place=place, label=variable)
                self._put(path, _parsed(env[variable].strip(), path), origin)
        specs = [line.strip() for line in re.split(r"[\n;]", env.get("DATASET_SPECS", "")) if line.strip()]
        if not specs:
            return
        origin = _Origin(layer="environment", place=len(_ENVIRONMENT), label="DATASET_SPECS")
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
            origin = _Origin(layer="override", place=place, label=_shown(_shortened(name)), bare=text is None)
            parts = name.removeprefix("--").split(".")
            if not name.startswith("--") or not all(parts):
                self._report(origin, (), "expected an override such as --train.lr 3e-4")
                continue
            path: KeyPath = _ALIASES.get(tuple(parts), tuple(parts))
            self._put(path, True if text is None else _parsed(text, path), origin)
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
            below: Any = value if depth == len(path) else [] if _Shape.at(done).is_array else {}
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
            f"no {_dotted(done)} {_found_text(str(part))}, {numbers}; count from 0, as in --{_dotted((*done, 0, *rest))}",
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
        origin = self._origin_of(("source", index, "spec"))
        kept = []
        for option in split["options"].split("&"):
            name, _, text = option.partition("=")
            path: KeyPath = ("source", index, name)
            lifted = _Origin(
                layer=origin.layer,
                place=origin.place,
                label=origin.label,
                written=f"source.{index}.spec?{_shortened(name)}",
            )
            if name in _KEPT_OPTIONS:
                kept.append(option)
            elif name not in SourceSection.model_fields or name == "spec":
                options = [*(n for n in SourceSection.model_fields if n != "spec"), *_KEPT_OPTIONS]
                near = _did_you_mean(_nearest(name, options)) or f", a spec takes {', '.join(options)}"
                self._report(lifted, path, f"unknown option{near}")
            elif name in table and not replace:
                self._report(lifted, path, f"{name} is set elsewhere too; keep one of the two")
            else:
                self._put(path, _parsed(text, path), lifted)
        table["spec"] = split["spec"] + ("?" + "&".join(kept) if kept else "")

    # ---------------------------------------------------------------------------------- what is wrong

    def checked(self) -> RunConfig:
        """The config, or one ConfigError with all that is wrong."""
        try:
            config = RunConfig.model_validate(self.values)
        except ValidationError as error:
            self._explain(error)
        else:
            if not self.problems:
                return config
        raise ConfigError(list(dict.fromkeys(message for _, message in sorted(self.problems, key=lambda p: p[0]))))

    def _explain(self, error: ValidationError) -> None:
        for one in error.errors(include_url=False):
            path: KeyPath = one["loc"]
            if one["type"] == "missing" and path == ("source",) and any(map(_stands_for_source, self.values)):
                continue  # a misspelt or unbuilt table is reported; that [[source]] is missing follows from it
            if path not in self.origins:
                path = _BLAMED.get(path, path)
            self._report(self._origin_of(path), path, self._sentence(path, one))
        # A source with another mistake never reaches the check of all weights together.
        weights = [t.get("weight", 1.0) if isinstance(t, dict) else 1.0 for t in self._source_tables()]
        if weights and all(type(w) in (int, float) and w == 0 for w in weights):
            self._report(self._origin_of(("source",)), ("source",), _ALL_ZERO)

    def _sentence(self, path: KeyPath, error: Any) -> str:
        kind, found = error["type"], error["input"]
        if kind == "extra_forbidden":
            return self._unknown(path, found)
        if kind == "missing":
            return self._missing(path)
        if kind == "value_error":
            return str(error["ctx"]["error"])
        shape = _Shape.at(path)
        if self._origin_of(path).bare:
            return f"needs a value, {shape.expected()}"
        if kind == "finite_number":
            return f"must be a finite number, found {_found(found)}"
        if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
            return f"must be {shape.range()}, found {_number(found)}"
        if kind == "literal_error" and isinstance(found, str):
            values = shape.values(near=found)
            near = _nearest(found, values)
            listed = ", ".join(map(_quoted, values))
            return f"unknown value {_found_text(found)}{_did_you_mean(near and _quoted(near))} (values: {listed})"
        if len(path) == 1:
            return _wrong_table(str(path[0]), found)
        hint = "; write it without quotes" if isinstance(found, str) and shape.takes(_toml_value(found)) else ""
        return f"{shape.expected()}, found {_found(found)}{hint}"

    def _missing(self, path: KeyPath) -> str:
        if path == ("source",):
            return _NO_SOURCE
        origin = self._origin_of(path)
        if origin.layer == "override" and path[0] == "source":
            return f"there is no source {path[1]}; to add it, give --{_dotted(path)} too"
        return f"missing, {_Shape.at(path).expected()}"

    def _unknown(self, path: KeyPath, found: object) -> str:
        """What an unknown key may have been meant to be: a key of another table, or nearly one of this table."""
        name = str(path[-1])
        origin = self._origin_of(path)
        override = origin.layer == "override"
        if len(path) == 1:
            if name in _NOT_BUILT:
                return f"[{name}] is not built yet; this headrace runs text jobs, [[source]] with [train]"
            if _is_table(found):
                near = _nearest(name, list(_KEYS))
                if not near:
                    return f"unknown table, the tables are {', '.join(map(_header, _KEYS))}"
                rest = origin.label.removeprefix(f"--{name}.")
                return "unknown table" + _did_you_mean(f"--{near}.{rest}" if rest != origin.label else _header(near))
        table = str(path[0]) if len(path) > 1 else ""
        homes = [other for other, keys in _KEYS.items() if other != table and name in keys]
        if homes and override:
            return f"unknown key{_did_you_mean(' or '.join(f'--{home}.{_zero(home)}{name}' for home in homes))}"
        if homes:
            return f"unknown key, belongs in {' or '.join(map(_header, homes))}"
        if near := _nearest(name, _KEYS.get(table, ())):
            return f"unknown key{_did_you_mean(f'--{_dotted((*path[:-1], near))}' if override else near)}"
        if near := _nearest(name, [key for keys in _KEYS.values() for key in keys]):
            home = next(t for t, keys in _KEYS.items() if near in keys)
            return f"unknown key{_did_you_mean(f'--{home}.{_zero(home)}{near}' if override else f'{near} in {_header(home)}')}"
        if table in _KEYS:
            return f"unknown key, {_header(table)} takes {', '.join(_KEYS[table])}"
        return f"unknown key, the tables are {', '.join(map(_header, _KEYS))}"

    def _origin_of(self, path: KeyPath) -> _Origin:
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, self.nowhere)

    def _report(self, origin: _Origin, path: KeyPath, what: str) -> None:
        self.problems.append((origin.order, origin.say(path, what)))


def load_config(path: Path | None, overrides: Sequence[str] = (), env: Mapping[str, str] = os.environ) -> RunConfig:
    """The checked config of a file, the environment and `--section.key value` overrides; ConfigError says all problems.

    Overrides are what stood on the command line: `--train.lr 3e-4`, `--train.lr=3e-4`, `--source.0.weight 0.5`, and
    `--text.bos` for `--text.bos true`. The last of two equal ones holds. A source numbered one past the last is added.
    """
    layers = _Layers()
    if path is not None:
        layers.read_file(path)
    layers.read_environment(env)
    layers.read_overrides(overrides)
    return layers.checked()


def _file_text(path: Path) -> str:
    """The text of a config file. Nothing that could block or fill the memory is read."""
    file = f"config file {_shown(path)}"
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError as error:
        raise ConfigError(f"{file} does not exist{_nearest_file(path)}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(f"{file} cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
            raise ConfigError(f"{file} is {what}; expected a TOML file")
        with open(fd, "rb", closefd=False) as handle:
            data = handle.read(_MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    finally:
        os.close(fd)
    if len(data) > _MAX_FILE:
        raise ConfigError(f"{file} holds more than 1 MiB; expected a TOML file of a few hundred lines")
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


def _parsed(text: str, path: KeyPath) -> Any:
    """The TOML value that a text outside of a file stands for, or else the text itself."""
    value, kind = _toml_value(text), _Shape.at(path).kind
    if kind is str and not isinstance(value, str):
        return text  # where text is wanted, `--run.name 7` and `--run.name 2024-05-01` mean just that
    if value is None and kind is float and _SHORT_FLOAT.fullmatch(text):
        return float(text)
    return text if value is None else value


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
    def at(cls, path: KeyPath) -> _Shape:
        kind: Any = RunConfig
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

    def values(self, *, near: str = "") -> list[str]:
        """The values of an enumeration, the nearest first."""
        names = list(get_args(self.kind)) if get_origin(self.kind) is Literal else []
        return sorted(names, key=lambda name: -difflib.SequenceMatcher(None, near.lower(), name).ratio())

    def expected(self) -> str:
        if get_origin(self.kind) is Literal:
            return f"expected one of {', '.join(map(_quoted, get_args(self.kind)))}"
        if self.kind is bool:
            return "expected true or false"
        if isinstance(self.kind, type) and issubclass(self.kind, BaseModel):
            return "expected a table"
        if self.is_array:
            args = get_args(self.kind)
            what = "an array" if args[-1] is ... else f"an array of {len(args)} numbers"
        else:
            what = {int: "an integer", float: "a number", str: "a string"}.get(self.kind, "a value")
        return f"expected {what} such as {_toml(self.example)}"

    def range(self) -> str:
        words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
        limits = [
            f"{words[name]} {_number(limit)}"
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


def _keys_of(model: type[BaseModel]) -> tuple[str, ...]:
    return tuple(model.model_fields)


_KEYS: dict[str, tuple[str, ...]] = {
    "run": _keys_of(RunSection),
    "source": _keys_of(SourceSection),
    "text": (*_keys_of(TextSection), *(str(alias[1]) for alias in _ALIASES)),
    "loader": _keys_of(LoaderSection),
    "train": _keys_of(TrainSection),
}


def _header(table: str) -> str:
    return "[[source]]" if table == "source" else f"[{table}]"


def _zero(table: str) -> str:
    return "0." if table == "source" else ""


def _stands_for_source(name: str) -> bool:
    return name in _NOT_BUILT or (name not in _KEYS and _nearest(name, list(_KEYS)) == "source")


def _is_table(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _wrong_table(name: str, found: object) -> str:
    if name == "source" and isinstance(found, dict):
        return "expected an array of tables, write [[source]] in place of [source]"
    if _is_table(found):
        return f"expected one table, write [{name}] in place of [[{name}]]"
    return f"expected the table {_header(name)}, found {_found(found)}"


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """The closest of the names, if it is close; `seq-len` and `Seq_Len` are very close to seq_len."""
    plain = {other.lower().replace("-", "_"): other for other in names}
    # 0.55 finds global_batch_size for batch_size and tokenizer_workers for workers; at 0.6 the latter is lost.
    close = difflib.get_close_matches(name[:80].lower().replace("-", "_"), plain, n=1, cutoff=0.55)
    return plain[close[0]] if close else None


def _did_you_mean(near: str | None) -> str:
    return f", did you mean {near}?" if near else ""


def _dotted(path: KeyPath) -> str:
    parts = [str(p) for p in path]
    return ".".join(p if re.fullmatch(r"[A-Za-z0-9_-]+", p) else _quoted(p) for p in parts)


def _shown(place: str | Path) -> str:
    """A file or an argument, as it stands unless it would break the line."""
    return str(place) if str(place).isprintable() else _quoted(str(place))


def _found(value: object) -> str:
    """A value that was not right, in the words of TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string {_found_text(value)}"
    if isinstance(value, int):
        return _number(value) if value.bit_length() > 64 else f"the integer {_number(value)}"
    if isinstance(value, float):
        return f"the number {value!r}"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, (list, tuple)):
        return f"an array of {len(value)}"
    return "a date or a time"


def _found_text(text: str) -> str:
    return _quoted(_shortened(text))


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _number(value: int | float) -> str:
    if isinstance(value, int) and value >= 1 << 16 and value & (value - 1) == 0:
        return f"2**{value.bit_length() - 1}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"  # str() refuses more than 4,300 digits
    return repr(value)
