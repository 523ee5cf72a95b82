"""The common part of all configs: types of values, [run], the hash, and writing TOML.

pydantic checks the values; config/messages.py words what it finds. This module opens no file and imports neither numpy nor torch.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    field_validator,
    model_validator,
)  # fmt: skip
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from headrace.errors import found_text, quoted
from headrace.settings import LoaderSettings
from headrace.train.settings import TrainSettings

NONE_GIVEN = {
    "source": 'missing, expected at least one [[source]] with a spec such as spec = "sample:prose"',
    "env": 'missing, expected at least one [[env]] with a spec such as spec = "python:sort.py:play"',
}
"""The arrays of tables that a config needs, and what is said of a config without any of them."""
_NAME = re.compile(r"\w[\w.-]{0,63}")


# ---------------------------------------------------------------------------------------------- types of values


def _refuse_odd_text(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"must not hold a NUL character, found {found_text(text)}")
    if any("\ud800" <= c <= "\udfff" for c in text):  # how Python passes on an argument that is not UTF-8
        raise ValueError(f"must be UTF-8, found {found_text(text)}")
    return text


def _refuse_odd_name(name: str) -> str:
    # A name becomes a folder and a part of metric keys, so neither "/" nor ".." may come in here.
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"expected 1 to 64 letters, digits, _ . or -, the first a letter or a digit, found {found_text(name)}"
        )
    return name


def _refuse_repeats(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("names the same sink twice; keep one")
    return names


def array(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


T = TypeVar("T")
Array = Annotated[T, BeforeValidator(array)]
"""A tuple that a TOML array is taken for: frozen values hold tuples, and arrays arrive as lists."""


@dataclass(frozen=True, slots=True)
class OneOf:
    """Marks a string that must be a name of a registry. `names` is called when a value is checked, and may import the registry."""

    names: Callable[[], Iterable[str]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        if value not in self.names():
            raise PydanticCustomError("literal_error", "not a name of the registry")
        return value


def _sink_names() -> Iterable[str]:
    from headrace.metrics import SINKS

    return SINKS


def default_of(settings: Any, name: str) -> Any:
    """The default of a field of a settings dataclass, which TOML shares with Python."""
    return next(field.default for field in fields(settings) if field.name == name)


Text = Annotated[str, AfterValidator(_refuse_odd_text)]
Name = Annotated[str, AfterValidator(_refuse_odd_name)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table: frozen, nothing unknown, no conversion but from an integer to a float."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunSection(Section):
    """[run]: length, seed, folder, checkpoints and metrics."""

    name: Name = "run"
    """Names the run, and its folder unless `dir` is given."""
    dir: Text = Field("", examples=["runs/first"])
    """The run's folder; runs/<name> unless given."""
    base: Text = Field("", examples=["/data"])
    """Where relative paths of data, tokenizer and spool start; the folder of the config file unless given. `dir` starts at the working folder."""
    steps: int = Field(200, gt=0, le=1 << 40)
    """Training steps. Below 2**40, so that with the largest batch a sample's index still fits into 64 bits."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed of the order and of the model's first weights."""
    checkpoint_every: int = Field(20, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    log_every: int = Field(10, ge=1)
    """Steps between progress lines and rows of metrics."""
    sinks: Annotated[Array[tuple[Annotated[str, OneOf(_sink_names)], ...]], AfterValidator(_refuse_repeats)] = Field(
        (), examples=[["tensorboard"]]
    )
    """Where metrics go besides metrics.jsonl."""
    stop_after: int | None = Field(None, ge=1, examples=[100])
    """Stop cleanly after this step, with a checkpoint. The learning rate still follows `steps`."""
    deadline: float = Field(default_of(LoaderSettings, "deadline"), gt=0)
    """Seconds that any wait may take."""
    skip: Text = Field("", examples=["1200:1240"])
    """Steps whose data is skipped, such as "1200:1240" for 1200 to 1239; several are separated by commas."""

    @field_validator("skip")
    @classmethod
    def _require_ranges(cls, text: str) -> str:
        ranges = _ranges(text)
        for (_, end), (start, _) in itertools.pairwise(ranges):
            if start < end:
                raise ValueError(f"ranges of steps must follow each other without overlap, found {found_text(text)}")
        return ",".join(f"{a}:{b}" for a, b in ranges)

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """The same as ranges of steps (from, to), counted from 1."""
        return tuple(_ranges(self.skip))

    @model_validator(mode="after")
    def _choose_folder(self) -> RunSection:
        if not self.dir:
            object.__setattr__(self, "dir", f"runs/{self.name}")
        return self


class OptimiserSection(Section):
    """[train]: the keys that all reference trainers share."""

    lr: float = Field(default_of(TrainSettings, "lr"), gt=0)
    """Largest learning rate."""
    min_lr_ratio: float = Field(default_of(TrainSettings, "min_lr_ratio"), ge=0, le=1)
    """The learning rate falls to this part of `lr` by the last step."""
    warmup_steps: int = Field(default_of(TrainSettings, "warmup_steps"), ge=0)
    """Steps over which the learning rate rises."""
    weight_decay: float = Field(default_of(TrainSettings, "weight_decay"), ge=0)
    """AdamW's weight decay."""
    betas: Array[tuple[Beta, Beta]] = default_of(TrainSettings, "betas")
    """AdamW's betas."""
    grad_clip: float = Field(default_of(TrainSettings, "grad_clip"), gt=0)
    """Largest norm of the gradient; give a large number for no clipping."""
    device: Literal["auto", "cpu", "cuda"] = default_of(TrainSettings, "device")
    """auto: CUDA where there is a device."""
    threads: int | None = Field(None, ge=1, examples=[2])
    """torch threads of each process."""


class JobConfig(Section):
    """The tables of a run, with every default filled in; the base of the configs of text, stream and RL runs."""

    kind: ClassVar[Literal["lm", "streams", "rl"]]
    """The kind of run that the tables describe."""
    without_effect: ClassVar[Mapping[str, tuple[str, ...]]]
    """Keys by table that do not decide the result of the run, beside those of `_RUN_WITHOUT_EFFECT`."""

    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _refuse_skips(self) -> Self:
        if self.run.skip and self.kind != "lm":
            raise ValueError(
                f"run.skip passes over steps of a text job; a job of kind {self.kind} has none to pass over"
            )
        return self

    def check_world_size(self, world: int) -> None:
        """Raise ConfigError for a number of ranks that cannot share the run. Here: any number can."""

    @staticmethod
    def ranks_that_divide(number: int) -> str:
        """The numbers of ranks that divide `number`, for a message."""
        return ", ".join(map(str, divisors(number)))

    def resolved(self) -> dict[str, Any]:
        """Every key with its value, as plain JSON values."""
        return self.model_dump(mode="json")

    @property
    def hash(self) -> str:
        """12 hex digits over the keys that decide the result of the run: equal hashes mean equal batches and equal losses.

        Where the run writes, what it shows and how many threads work ahead are left out: they may change between a run and its resume.
        """
        # Imported here: the package `order` imports numpy, which takes longer than all of this module.
        from headrace.order.fingerprint import fingerprint_json

        return fingerprint_json(self._hashed_tables())[:12]

    def _hashed_tables(self) -> dict[str, Any]:
        """The tables that `hash` covers. Keys without a value are left out, so that a later version can add optional keys."""
        tables = self.model_dump(mode="json", exclude_none=True)
        for table, keys in (("run", _RUN_WITHOUT_EFFECT), *self.without_effect.items()):
            for key in keys:
                tables[table].pop(key, None)
        return tables

    def to_toml(self) -> str:
        """The text of a TOML file that is read back to this very config."""
        tables = self.resolved()
        if self.run.dir == f"runs/{self.run.name}":
            del tables["run"]["dir"]  # a copy that is run under another name then gets a folder of its own
        parts = []
        for name, table in tables.items():
            if isinstance(table, list):
                parts += [_table_toml(f"[[{name}]]", element) for element in table]
            elif table is not None:
                parts.append(_table_toml(f"[{name}]", table))
        return "\n".join(parts)


_RUN_WITHOUT_EFFECT = (
    "name", "dir", "base", "checkpoint_every", "keep_checkpoints", "log_every", "sinks", "stop_after", "deadline",
)  # fmt: skip


def _ranges(text: str) -> list[tuple[int, int]]:
    """`1200:1240, 1300:1310` as numbers, in order."""
    found = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = re.fullmatch(r"([0-9]{1,13})\s*:\s*([0-9]{1,13})", part)
        if match is None or not 1 <= int(match[1]) < int(match[2]):
            raise ValueError(
                f'expected a range of steps FROM:TO with 1 <= FROM < TO, such as "1200:1240" for 1200 to 1239, found {found_text(part)}'
            )
        found.append((int(match[1]), int(match[2])))
    return sorted(found)


def with_unique_names(tables: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tables, of which the later of two with equal names is called -2, -3, …; a name that the config gives is kept."""
    wanted, taken, named = {table.name for table in tables}, set(), []
    for table in tables:
        numbered = (f"{table.name[:56]}-{n}" for n in itertools.count(2))
        name = table.name if table.name not in taken else next(n for n in numbered if n not in wanted | taken)
        taken.add(name)
        named.append(table.model_copy(update={"name": name}))
    return tuple(named)


# ------------------------------------------------------------------------------------------ writing TOML


def _table_toml(header: str, table: Mapping[str, Any]) -> str:
    lines = [f"{key} = {toml_text(value)}\n" for key, value in table.items() if value is not None]
    return "".join([f"{header}\n", *lines])


def toml_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{quoted(str(k))} = {toml_text(v)}' for k, v in value.items())}}}"
    return repr(value)  # int and float: Python's shortest exact form is TOML


def divisors(number: int) -> list[int]:
    """Return the divisors of a number of at least 1, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
