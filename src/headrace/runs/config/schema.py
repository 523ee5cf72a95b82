"""What a run was asked to be, as checked values.

    config = load_config(Path("run.toml"), ["--train.lr", "3e-4"])         (loading.py)
    config.train.lr, config.source[0].weight, config.resolved(), config.to_toml(), config.hash

The values are checked once, by pydantic; its words are never shown. Nothing here opens a file.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from headrace.batch import Labels, LoaderSettings
from headrace.errors import ConfigError, found_text, number_text, quoted
from headrace.train.settings import TrainSettings

__all__ = [
    "LoaderSection",
    "MixChangeSection",
    "MixSection",
    "RunConfig",
    "RunSection",
    "SourceSection",
    "SpoolSection",
    "TextSection",
    "TrainSection",
]

_MAX_WINDOW_TOKENS = 1 << 27
"""A window is tokenised and packed in memory as one unit: 1 GiB of int64 ids is where that stops being sensible."""
_NAME = re.compile(r"\w[\w.-]{0,63}")
TXT_SPLITS = ("file", "paragraph", "line")
"""What a document of a txt source is, as `sources.spec` has it; its module would bring numpy."""


# ------------------------------------------------------------------------------------------- the values


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


def _array(value: object) -> object:
    """TOML arrays arrive as lists; frozen values hold tuples."""
    return tuple(value) if isinstance(value, list) else value


def _refuse_few_labels(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(names) == 1 or len(set(names)) < len(names):
        raise ValueError("needs at least two names, each once")
    return names


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


def _engine_names() -> Iterable[str]:
    from headrace.text.engines import EngineName

    return get_args(EngineName)


def default_of(settings: Any, name: str) -> Any:
    """The default of a field of a settings dataclass, which TOML shares with Python."""
    return next(field.default for field in fields(settings) if field.name == name)


if TYPE_CHECKING:
    from headrace.text.engines import EngineName as _Engine

    _AutoCount = int | Literal["auto"]
else:
    _Engine = Annotated[str, OneOf(_engine_names)]
    _AutoCount = Annotated[
        int,
        Field(ge=1, le=1 << 16),
        WrapValidator(lambda value, number: value if value == "auto" else number(value)),
        PlainSerializer(lambda value: value, return_type=Any),
    ]
_Text = Annotated[str, AfterValidator(_refuse_odd_text)]
_Name = Annotated[str, AfterValidator(_refuse_odd_name)]
_Beta = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    """A table: frozen, nothing unknown, no conversion but from an integer to a float."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunSection(_Section):
    """[run]: how long, from which seed, and what is kept."""

    name: _Name = "run"
    """Names the run, and its folder unless `dir` is given."""
    dir: _Text = Field("", examples=["runs/first"])
    """The run's folder; runs/<name> unless given."""
    base: _Text = Field("", examples=["/data"])
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
    sinks: Annotated[
        tuple[Annotated[str, OneOf(_sink_names)], ...], BeforeValidator(_array), AfterValidator(_refuse_repeats)
    ] = Field((), examples=[["tensorboard"]])
    """Where metrics go besides metrics.jsonl."""
    stop_after: int | None = Field(None, ge=1, examples=[100])
    """Stop cleanly after this step, with a checkpoint. The learning rate still follows `steps`."""
    deadline: float = Field(300.0, gt=0)
    """Seconds that any wait may take."""
    skip: _Text = Field("", examples=["1200:1240"])
    """Steps whose data is passed over, such as "1200:1240" for 1200 to 1239; several are separated by commas."""

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


class SourceSection(_Section):
    """[[source]]: where documents come from, and how many of the tokens are theirs."""

    spec: _Text = Field(examples=["jsonl:web/*.jsonl"])
    """One line, KIND:PATH. Options after "?" (`jsonl:web?weight=0.3&text_key=content`) are lifted into the keys below."""
    weight: float = Field(1.0, ge=0)
    """Share of the delivered tokens, in proportion to the weights of all sources."""
    name: _Name = Field("", examples=["web"])
    """Derived from the spec unless given; unique in a RunConfig."""
    text_key: _Text = "text"
    """Field or column that holds the text; `a.b` is field b of object a."""
    label_key: _Text | None = Field(None, examples=["label"])
    """Where labels are, for the tasks of a spool that have some; "label" (classify) or "tags" (tag) unless given."""
    max_rows: int | None = Field(None, ge=1, examples=[1000])
    """Read only the first rows of the source."""
    max_tokens: int | None = Field(None, ge=1, examples=[1_000_000])
    """Stop delivering the source after this many tokens."""
    max_epochs: int | None = Field(None, ge=1, examples=[4])
    """How often the source may be read."""
    on_bad: Literal["fail", "skip"] = "fail"
    """What a row, chunk or file that cannot be decoded does: stop the run, or become a recorded hole."""
    allow_symlinks: bool = False
    """Follow symbolic links and `..` out of the named folder."""
    split: _Text | None = Field(None, examples=["train"])
    """Of hf:, the split of the dataset; train unless given. Of txt:, what a document is: file (the default), paragraph or line."""
    config: _Text | None = Field(None, examples=["en"])
    """Configuration of an hf: dataset."""
    cache: _Text | None = Field(None, examples=["/scratch/headrace"])
    """A folder for what is kept of this source, in place of the common cache."""

    @field_validator("spec")
    @classmethod
    def _require_kind_and_path(cls, spec: str) -> str:
        kind, colon, path = spec.partition(":")
        if not (kind and colon and path.strip()):
            raise ValueError(
                f'expected KIND:PATH such as "jsonl:web/*.jsonl" or "sample:prose", found {found_text(spec)}'
            )
        return spec

    @field_validator("split")
    @classmethod
    def _require_known_split(cls, split: str | None, info: ValidationInfo) -> str | None:
        if split is not None and str(info.data.get("spec", "")).startswith("txt:") and split not in TXT_SPLITS:
            raise ValueError(
                f"expected {', '.join(TXT_SPLITS[:-1])} or {TXT_SPLITS[-1]} for a txt source, found {found_text(split)}"
            )
        return split

    @model_validator(mode="after")
    def _choose_name(self) -> SourceSection:
        if not self.name:
            object.__setattr__(self, "name", _name_of(self.spec))
        if self.split is None and self.spec.startswith("txt:"):
            object.__setattr__(self, "split", TXT_SPLITS[0])  # a kept config says it: without a word, 0.1 meant lines
        return self


class MixChangeSection(_Section):
    """[[mix.change]]: other weights from a step on."""

    step: int = Field(ge=1, le=1 << 40, examples=[500])
    """The first step with the new weights, as a run counts: its first is 1."""
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(examples=[{"web": 0.5}])
    """By the name of the source; sources that are not named keep theirs."""


class MixSection(_Section):
    """[mix]: how the mix changes over the run."""

    change: Annotated[tuple[MixChangeSection, ...], BeforeValidator(_array)] = ()


class TextSection(_Section):
    """[text]: how documents become blocks of tokens."""

    tokenizer: _Text | None = Field(None, examples=["tokenizer.json"])
    """"sample": the built-in small BPE; "bytes" or none: bytes; else the path of a tokenizer.json, or a name that the local Hugging Face cache has."""
    seq_len: int = Field(1024, ge=2, le=1 << 24)
    """Tokens in a row."""
    pack: Literal["best_fit", "concat"] = "best_fit"
    """best_fit cuts only documents longer than a row; concat cuts wherever a row ends."""
    bos: bool = False
    """Put a token before each document."""
    eos: bool = True
    """Put a token after each document."""
    eos_token: _Text | None = Field(None, examples=["<|endoftext|>"])
    """The token that ends a document, where the tokenizer has none under a usual name."""
    bos_token: _Text | None = Field(None, examples=["<|bos|>"])
    """The token that begins a document, where the tokenizer has none under a usual name."""
    engine: _Engine = "auto"
    """Which library encodes: the fastest one installed that proves to give the same ids, unless one is named."""
    labels: Labels = "shifted"
    """shifted: the token after each position. hf: not shifted, for models that shift by themselves."""
    window_blocks: _AutoCount = Field("auto", examples=[64])
    """Blocks that are tokenised and packed as one unit. auto: 64, or fewer (8 at least) where 64 would hold more than 262,144 tokens."""
    segment_ids: bool = False
    """Add `segment_ids` to a batch: 1, 2, … for the pieces of documents in a row, 0 on padding."""
    shuffle: bool = True
    """Put chunks, rows and blocks into a random order that follows from the seed."""

    @field_validator("window_blocks")
    @classmethod
    def _keep_windows_in_memory(cls, blocks: int | Literal["auto"], info: ValidationInfo) -> int | Literal["auto"]:
        seq_len = info.data.get("seq_len", 2)
        if blocks != "auto" and blocks * seq_len > _MAX_WINDOW_TOKENS:
            raise ValueError(
                f"a window of {number_text(blocks)} blocks of {number_text(seq_len)} tokens is packed in memory as one unit and "
                f"may hold at most {number_text(_MAX_WINDOW_TOKENS)} tokens; lower text.window_blocks to "
                f"{_MAX_WINDOW_TOKENS // seq_len} or less, or text.seq_len"
            )
        return blocks


class LoaderSection(_Section):
    """[loader]: how blocks become batches, and who makes them ahead of need."""

    global_batch_size: int = Field(8, ge=1, le=1 << 20)
    """Blocks a step, over all ranks."""
    lanes: _AutoCount = Field("auto", examples=[48])
    """Parts that the data is dealt into. They belong to the run; the number of ranks may change at every resume. Ranks share work best where their number divides
    the lanes. auto: 48, or fewer for data with less than 8 documents or rows a lane."""
    tokenizer_workers: int | None = Field(None, ge=0, le=1024, examples=[4])
    """Threads; each rank's share of the machine's processors (2 to 16) unless given, or 0 when there are worker processes."""
    data_loader_workers: int = Field(0, ge=0, le=1024, examples=[2])
    """Processes in place of threads, for tokenizers that hold Python's lock."""
    prefetch_batches: int = Field(default_of(LoaderSettings, "prefetch_batches"), ge=0, le=1 << 16)
    """Batches made ahead of need."""
    exhausted: Literal["repeat", "drop", "stop_first"] = "repeat"
    """What becomes of a source that is dry. A run has a number of steps, so by default the source starts again."""
    pin_memory: bool = False
    """Put batches into pinned memory, for copies to a CUDA device."""

    @field_validator("data_loader_workers")
    @classmethod
    def _refuse_both_kinds(cls, workers: int, info: ValidationInfo) -> int:
        if workers > 0 and (info.data.get("tokenizer_workers") or 0) > 0:
            raise ValueError(
                "data_loader_workers and tokenizer_workers cannot both be above 0: nested process and thread pools can "
                "lead to oversubscription or stalls. Set tokenizer_workers = 0 for processes, which pay for slow Python "
                "tokenizers only, or data_loader_workers = 0 for threads"
            )
        return workers


class TrainSection(_Section):
    """[train]: the model and how it learns."""

    model: Literal["gpt-tiny", "gpt-small"] = default_of(TrainSettings, "model")
    """Size of the reference model."""
    lr: float = Field(default_of(TrainSettings, "lr"), gt=0)
    """Largest learning rate."""
    min_lr_ratio: float = Field(default_of(TrainSettings, "min_lr_ratio"), ge=0, le=1)
    """The learning rate falls to this part of `lr` by the last step."""
    warmup_steps: int = Field(default_of(TrainSettings, "warmup_steps"), ge=0)
    """Steps over which the learning rate rises."""
    weight_decay: float = Field(default_of(TrainSettings, "weight_decay"), ge=0)
    """AdamW's weight decay."""
    betas: Annotated[tuple[_Beta, _Beta], BeforeValidator(_array)] = default_of(TrainSettings, "betas")
    """AdamW's betas."""
    grad_clip: float = Field(default_of(TrainSettings, "grad_clip"), gt=0)
    """Largest norm of the gradient. 0 would mean no learning at all, so "no clipping" is a large number."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a device."""
    threads: int | None = Field(None, ge=1, examples=[2])
    """torch threads of each process."""
    compile: bool = False
    """Use torch.compile."""


class SpoolSection(_Section):
    """[spool]: batches are made by a process of their own and wait in files. Which batches, it does not change."""

    enabled: bool = False
    """Also true once `dir` is given."""
    dir: _Text = Field("", examples=["/data/spool"])
    """The spool's folder, shared by providers and ranks; the folder spool in the run's unless given."""
    batches_per_file: int = Field(8, ge=1, le=1 << 16)
    """Batches in a file."""
    max_backlog_files: int = Field(4, ge=1, le=1 << 16)
    """Files made ahead of the slowest rank, in each part."""
    parts: int = Field(1, ge=1, le=1000)
    """How many providers can work at the same time: each takes whole parts. Divides the batch. Parts share work best where their number divides the lanes."""
    durable: bool = True
    """fsync each file before it appears."""
    task: Literal["lm", "mlm", "classify", "tag"] = "lm"
    """For a trainer of your own that reads the spool: mlm, tokens to guess; classify, one label a text; tag, one label a word."""
    mask_probability: float = Field(0.15, gt=0, lt=1)
    """Share of the tokens to guess; for mlm."""
    mask_id: int | None = Field(None, ge=0, le=1 << 31, examples=[4])
    """The id of the mask; one after the tokenizer's last unless given."""
    labels: Annotated[tuple[_Text, ...], BeforeValidator(_array), AfterValidator(_refuse_few_labels)] = Field(
        (), examples=[["negative", "positive"]]
    )
    """Names of the classes, in the order of their numbers; those that occur, sorted, unless given."""
    balance: Literal["equal", "natural"] = "equal"
    """equal: every class comes up equally often. natural: as often as it occurs, spread evenly."""
    val_fraction: float = Field(0.0, ge=0, lt=1, examples=[0.1])
    """The share of every class that is kept out of training and read as split val, over and over; for classify and tag."""
    provider: bool = True
    """Whether `headrace run` starts a provider if none is running."""

    @property
    def labelled(self) -> bool:
        """Whether samples are rows with labels, drawn by label."""
        return self.task in ("classify", "tag")

    @model_validator(mode="after")
    def _enable_by_folder(self) -> SpoolSection:
        if self.dir and "enabled" not in self.model_fields_set:
            object.__setattr__(self, "enabled", True)
        return self


class RunConfig(_Section):
    """Everything a run was asked to be, with every default filled in. Frozen, and complete enough to run again."""

    run: RunSection = RunSection()
    source: Annotated[tuple[SourceSection, ...], BeforeValidator(_array)]
    mix: MixSection = MixSection()
    text: TextSection = TextSection()
    loader: LoaderSection = LoaderSection()
    spool: SpoolSection = SpoolSection()
    train: TrainSection = TrainSection()

    @field_validator("source")
    @classmethod
    def _weigh_and_name(cls, sources: tuple[SourceSection, ...]) -> tuple[SourceSection, ...]:
        if not sources:
            raise ValueError(NO_SOURCE)
        if all(s.weight == 0 for s in sources):
            raise ValueError(ALL_ZERO)
        names = _unique([s.name for s in sources])
        return tuple(
            s if s.name == name else s.model_copy(update={"name": name}) for s, name in zip(sources, names, strict=True)
        )

    @model_validator(mode="after")
    def _fit_the_spool(self) -> RunConfig:
        parts, batch = self.spool.parts, self.loader.global_batch_size
        if batch % parts:
            raise ValueError(
                f"spool.parts = {parts} must divide loader.global_batch_size = {batch}; {math.gcd(parts, batch)} does"
            )
        return self

    @model_validator(mode="after")
    def _leave_labelled_rows_unweighted(self) -> RunConfig:
        if not self.spool.labelled:
            if self.spool.val_fraction:
                raise ValueError(
                    f'spool.val_fraction = {self.spool.val_fraction:g} holds out labelled rows, and spool.task = "{self.spool.task}" has none; leave it out, '
                    'or set task = "classify" or "tag"'
                )
            return self
        asked = [
            f"source {s.name}: {k}"
            for s in self.source
            for k in ("max_tokens", "max_epochs")
            if getattr(s, k) is not None
        ]
        asked += ["weights that differ"] if len({s.weight for s in self.source}) > 1 else []
        asked += ["[[mix.change]]"] if self.mix.change else []
        asked += [f'loader.exhausted = "{self.loader.exhausted}"'] if self.loader.exhausted != "repeat" else []
        if asked:
            raise ValueError(
                f'spool.task = "{self.spool.task}" draws its samples by label, over all sources together and without an end; leave out {", ".join(asked)}'
            )
        return self

    @property
    def spool_dir(self) -> str:
        """Where the batches wait, if they do; a relative path starts at `run.base`."""
        if self.spool.dir:
            return self.spool.dir
        own = Path(self.run.dir, "spool")
        return str(own if self.run.base in ("", os.getcwd()) else own.absolute())

    @model_validator(mode="after")
    def _know_the_changed_sources(self) -> RunConfig:
        names = [s.name for s in self.source]
        for change in self.mix.change:
            for name in change.weights:
                if name not in names:
                    raise ValueError(
                        f"mix.change at step {change.step}: there is no source {found_text(name)}; there are {', '.join(names)}"
                    )
        steps = [c.step for c in self.mix.change]
        if len(set(steps)) < len(steps):
            raise ValueError("mix.change: two changes at the same step; put all weights of a step into one")
        return self

    def check_world_size(self, world: int) -> None:
        """Refuse a number of ranks that cannot share the global batch evenly."""
        batch = self.loader.global_batch_size
        if world >= 1 and batch % world == 0:
            return
        fitting = ", ".join(map(str, divisors(batch)))
        raise ConfigError(
            f"loader.global_batch_size: {world} ranks cannot share a global batch of {batch}, because the number of ranks must "
            f"divide it; start {fitting} ranks, or change loader.global_batch_size"
        )

    @property
    def kind(self) -> Literal["lm"]:
        """The kind of run that the tables describe: a language model trained on text."""
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
        del tables["spool"]
        tables["source"] = [lasting_source(source) for source in tables["source"]]
        tables["text"].setdefault("tokenizer", "bytes")
        if not tables["run"]["skip"]:
            del tables["run"]["skip"]
        if not tables["mix"]["change"]:
            del tables["mix"]
        return fingerprint_json(tables)[:12]

    def to_toml(self) -> str:
        """A file that `load_config` reads back to this very config."""
        tables = self.resolved()
        if self.run.dir == f"runs/{self.run.name}":
            del tables["run"]["dir"]  # so that the copy can be run under another name and get a folder of its own
        parts = [_table_toml("[run]", tables["run"])]
        parts += [_table_toml("[[source]]", source) for source in tables["source"]]
        parts += [_table_toml("[[mix.change]]", change) for change in tables["mix"]["change"]]
        parts += [_table_toml(f"[{name}]", tables[name]) for name in ("text", "loader", "spool", "train")]
        return "\n".join(parts)


NO_SOURCE = 'missing, expected at least one [[source]] with a spec such as spec = "sample:prose"'
ALL_ZERO = "every source has weight 0, so there is nothing to deliver; give at least one a weight above 0"
_WITHOUT_EFFECT = {
    "run": (
        "name",
        "dir",
        "base",
        "checkpoint_every",
        "keep_checkpoints",
        "log_every",
        "sinks",
        "stop_after",
        "deadline",
    ),
    "text": ("engine",),
    "loader": ("tokenizer_workers", "data_loader_workers", "prefetch_batches", "pin_memory"),
}


def lasting_source(table: Mapping[str, Any]) -> dict[str, Any]:
    """What of a source decides the batches, in the form that 0.1 hashed: lines of a txt source were not spelled out."""
    kept = {key: value for key, value in table.items() if key != "cache"}
    if str(kept["spec"]).startswith("txt:") and kept.get("split") == "line":
        del kept["split"]
    return kept


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


def _name_of(spec: str) -> str:
    """`jsonl:data/web/*.jsonl.zst` is called web: the last part of the path that is not a pattern, without suffixes."""
    path = spec.partition(":")[2].partition("?")[0]
    parts = [part for part in path.split("/") if part.strip(".") and not any(c in part for c in "*?[")]
    stem = parts[-1].lstrip(".").partition(".")[0] if parts else ""
    return re.sub(r"[^\w-]+", "-", stem).strip("-")[:48] or "source"


def _unique(wanted: Sequence[str]) -> list[str]:
    """The names, the later of two equal ones with -2, -3, …; a name that the config gives is kept."""
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
