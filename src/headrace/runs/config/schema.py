"""The checked config of a text run.

    config = load_config(Path("run.toml"), ["--train.lr", "3e-4"])         (loading.py)
    config.train.lr, config.source[0].weight, config.resolved(), config.to_toml(), config.hash

This module opens no file and imports neither numpy nor torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from headrace.batch import Labels
from headrace.errors import ConfigError, found_text, number_text
from headrace.runs.config.base import (
    NONE_GIVEN,
    Array,
    JobConfig,
    Name,
    OneOf,
    OptimiserSection,
    Section,
    Text,
    default_of,
    with_unique_names,
)  # fmt: skip
from headrace.settings import MAX_WINDOW_TOKENS, TXT_SPLITS, Exhausted, LoaderSettings, PackStrategy, TextSettings
from headrace.train.settings import TrainSettings


def _refuse_few_labels(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(names) == 1 or len(set(names)) < len(names):
        raise ValueError("needs at least two names, each once")
    return names


def _engine_names() -> Iterable[str]:
    from headrace.text.engines import EngineName

    return get_args(EngineName)


if TYPE_CHECKING:
    from headrace.text.engines import EngineName as _Engine
else:
    _Engine = Annotated[str, OneOf(_engine_names)]
_AutoCount = Annotated[int, Field(ge=1, le=1 << 16)] | Literal["auto"]


class SourceSection(Section):
    """[[source]]: where documents come from, and how many of the tokens are theirs."""

    spec: Text = Field(examples=["jsonl:web/*.jsonl"])
    """One line, KIND:PATH. Options after "?" (`jsonl:web?weight=0.3&text_key=content`) are lifted into the keys below."""
    weight: float = Field(1.0, ge=0)
    """Share of the delivered tokens, in proportion to the weights of all sources."""
    name: Name = Field("", examples=["web"])
    """Derived from the spec unless given; unique in a RunConfig."""
    text_key: Text = "text"
    """Field or column that holds the text; `a.b` is field b of object a."""
    label_key: Text | None = Field(None, examples=["label"])
    """Where labels are, for the tasks of a spool that have some; "label" (classify) or "tags" (tag) unless given."""
    max_rows: int | None = Field(None, ge=1, examples=[1000])
    """Read only the first rows of the source."""
    max_tokens: int | None = Field(None, ge=1, examples=[1_000_000])
    """Stop delivering the source after this many tokens."""
    max_epochs: int | None = Field(None, ge=1, examples=[4])
    """How often the source may be read."""
    on_bad: Literal["fail", "skip"] = "fail"
    """A row, chunk or file that cannot be decoded stops the run (fail), or is recorded as a hole (skip)."""
    allow_symlinks: bool = False
    """Follow symbolic links and `..` out of the named folder."""
    split: Text | None = Field(None, examples=["train"])
    """Of hf:, the split of the dataset; train unless given. Of txt:, what a document is: file (the default), paragraph or line."""
    config: Text | None = Field(None, examples=["en"])
    """Configuration of an hf: dataset."""
    cache: Text | None = Field(None, examples=["/scratch/headrace"])
    """Folder for the manifest and copies of this source, in place of the common cache."""

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


class MixChangeSection(Section):
    """[[mix.change]]: other weights from a step on."""

    step: int = Field(ge=1, le=1 << 40, examples=[500])
    """The first step with the new weights, as a run counts: its first is 1."""
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(examples=[{"web": 0.5}])
    """By the name of the source; sources that are not named keep theirs."""


class MixSection(Section):
    """[mix]: how the mix changes over the run."""

    change: Array[tuple[MixChangeSection, ...]] = ()


class TextSection(Section):
    """[text]: how documents become blocks of tokens."""

    tokenizer: Text | None = Field(None, examples=["tokenizer.json"])
    """"sample": the built-in small BPE; "bytes" or none: bytes; else the path of a tokenizer.json, or a name that the local Hugging Face cache has."""
    seq_len: int = Field(default_of(TextSettings, "seq_len"), ge=2, le=1 << 24)
    """Tokens in a row."""
    pack: PackStrategy = default_of(TextSettings, "pack")
    """best_fit cuts only documents longer than a row; concat cuts wherever a row ends."""
    bos: bool = default_of(TextSettings, "bos")
    """Put a token before each document."""
    eos: bool = default_of(TextSettings, "eos")
    """Put a token after each document."""
    eos_token: Text | None = Field(default_of(TextSettings, "eos_token"), examples=["<|endoftext|>"])
    """The token that ends a document, where the tokenizer has none under a usual name."""
    bos_token: Text | None = Field(default_of(TextSettings, "bos_token"), examples=["<|bos|>"])
    """The token that begins a document, where the tokenizer has none under a usual name."""
    engine: _Engine = default_of(TextSettings, "engine")
    """Which library encodes: the fastest one installed that proves to give the same ids, unless one is named."""
    labels: Labels = default_of(LoaderSettings, "labels")
    """shifted: the token after each position. hf: not shifted, for models that shift by themselves."""
    window_blocks: _AutoCount = Field(default_of(TextSettings, "window_blocks"), examples=[64])
    """Blocks that are tokenised and packed as one unit. auto: 64, or fewer (8 at least) where 64 would hold more than 262,144 tokens."""
    shuffle_chunks: _AutoCount = Field(default_of(TextSettings, "shuffle_chunks"), examples=[16])
    """Chunks whose documents are shuffled together. auto: 16, or fewer where the open chunks of all lanes would exceed 256 MiB."""
    segment_ids: bool = default_of(LoaderSettings, "segment_ids")
    """Add `segment_ids` to a batch: 1, 2, … for the pieces of documents in a row, 0 on padding."""
    shuffle: bool = default_of(TextSettings, "shuffle")
    """Put chunks, rows and blocks into a random order that follows from the seed."""

    @field_validator("window_blocks")
    @classmethod
    def _keep_windows_in_memory(cls, blocks: int | Literal["auto"], info: ValidationInfo) -> int | Literal["auto"]:
        seq_len = info.data.get("seq_len", 2)
        if blocks != "auto" and blocks * seq_len > MAX_WINDOW_TOKENS:
            raise ValueError(
                f"a window of {number_text(blocks)} blocks of {number_text(seq_len)} tokens is packed in memory as one unit and "
                f"may hold at most {number_text(MAX_WINDOW_TOKENS)} tokens; lower text.window_blocks to "
                f"{MAX_WINDOW_TOKENS // seq_len} or less, or text.seq_len"
            )
        return blocks


class LoaderSection(Section):
    """[loader]: how blocks become batches, and who makes them ahead of need."""

    global_batch_size: int = Field(8, ge=1, le=1 << 20)
    """Blocks a step, over all ranks."""
    lanes: _AutoCount = Field(default_of(TextSettings, "lanes"), examples=[48])
    """Parts that the data is dealt into. They belong to the run; the number of ranks may change at every resume. Ranks share work best where their number divides
    the lanes. auto: 48, or fewer for data with less than 8 documents or rows a lane."""
    tokenizer_workers: int | None = Field(default_of(LoaderSettings, "tokenizer_workers"), ge=0, le=1024, examples=[4])
    """Threads; each rank's share of the machine's processors (2 to 16) unless given, or 0 when there are worker processes."""
    data_loader_workers: int = Field(default_of(LoaderSettings, "data_loader_workers"), ge=0, le=1024, examples=[2])
    """Processes in place of threads, for tokenizers that hold Python's lock."""
    prefetch_batches: int = Field(default_of(LoaderSettings, "prefetch_batches"), ge=0, le=1 << 16)
    """Batches made ahead of need."""
    exhausted: Exhausted = default_of(TextSettings, "exhausted")
    """When a source was read once, or `max_epochs` times. drop: the other sources continue until all are read. repeat: it is read again. stop_first: the run ends."""
    pin_memory: bool = default_of(LoaderSettings, "pin_memory")
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


class TrainSection(OptimiserSection):
    """[train]: the model and how it learns."""

    model: Literal["gpt-tiny", "gpt-small"] = default_of(TrainSettings, "model")
    """Size of the reference model."""
    compile: bool = default_of(TrainSettings, "compile")
    """Use torch.compile."""


class SpoolSection(Section):
    """[spool]: batches are made by a process of their own and wait in files. Which batches, it does not change."""

    enabled: bool = False
    """Also true once `dir` is given."""
    dir: Text = Field("", examples=["/data/spool"])
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
    labels: Annotated[Array[tuple[Text, ...]], AfterValidator(_refuse_few_labels)] = Field(
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


class RunConfig(JobConfig):
    """The config of a run that trains a language model on text."""

    kind = "lm"
    without_effect: ClassVar = {
        "text": ("engine",),
        "loader": ("tokenizer_workers", "data_loader_workers", "prefetch_batches", "pin_memory"),
    }

    source: Array[tuple[SourceSection, ...]]
    mix: MixSection = MixSection()
    text: TextSection = TextSection()
    loader: LoaderSection = LoaderSection()
    spool: SpoolSection = SpoolSection()
    train: TrainSection = TrainSection()

    @field_validator("source")
    @classmethod
    def _weigh_and_name(cls, sources: tuple[SourceSection, ...]) -> tuple[SourceSection, ...]:
        if not sources:
            raise ValueError(NONE_GIVEN["source"])
        if all(s.weight == 0 for s in sources):
            raise ValueError(
                "every source has weight 0, so there is nothing to deliver; give at least one a weight above 0"
            )
        return with_unique_names(sources)

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
        asked += ['loader.exhausted = "stop_first"'] if self.loader.exhausted == "stop_first" else []
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
        """Raise ConfigError for a number of ranks that does not divide the global batch."""
        batch = self.loader.global_batch_size
        if world >= 1 and batch % world == 0:
            return
        raise ConfigError(
            f"loader.global_batch_size: {world} ranks cannot share a global batch of {batch}, because the number of ranks must "
            f"divide it; start {self.ranks_that_divide(batch)} ranks, or change loader.global_batch_size"
        )

    def _hashed_tables(self) -> dict[str, Any]:
        tables = super()._hashed_tables()
        del tables["spool"]
        tables["source"] = [hashed_source(source) for source in tables["source"]]
        tables["text"].setdefault("tokenizer", "bytes")
        if not tables["run"]["skip"]:
            del tables["run"]["skip"]
        if not tables["mix"]["change"]:
            del tables["mix"]
        return tables


def hashed_source(table: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a [[source]] that decide the batches. `split = "line"` is left out: version 0.1 had no such key and read lines."""
    kept = {key: value for key, value in table.items() if key != "cache"}
    if str(kept["spec"]).startswith("txt:") and kept.get("split") == "line":
        del kept["split"]
    return kept


def _name_of(spec: str) -> str:
    """`jsonl:data/web/*.jsonl.zst` is called web: the last part of the path that is not a pattern, without suffixes."""
    path = spec.partition(":")[2].partition("?")[0]
    parts = [part for part in path.split("/") if part.strip(".") and not any(c in part for c in "*?[")]
    stem = parts[-1].lstrip(".").partition(".")[0] if parts else ""
    return re.sub(r"[^\w-]+", "-", stem).strip("-")[:48] or "source"
