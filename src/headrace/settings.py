"""Settings of text datasets and loaders. A default stands here once, for Python and for TOML; this module imports neither numpy nor torch.

    TextDataset(sources, TextSettings(seq_len=2048, seed=7), tokenizer="tokenizer.json")
    TextDataset(sources, seq_len=2048, seed=7, tokenizer="tokenizer.json")        the same: fields may be given by name

`TextOptions` and `LoaderOptions` list the same fields with their types, so that editors and type checkers know the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict, TypeVar

from headrace.batch import DEFAULT_LM_FIELDS, LM_FIELDS, Labels, label_problems, lm_field_problems

AutoCount = int | Literal["auto"]
Exhausted = Literal["drop", "repeat", "stop_first"]
PackStrategy = Literal["best_fit", "concat"]

MAX_WINDOW_TOKENS = 1 << 27
"""Tokens of a window of text. A window is tokenised and packed in memory as one unit: 1 GiB of int64 ids is where that stops being sensible."""
TXT_SPLITS = ("file", "paragraph", "line")
"""What a document of a txt source can be; the first is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """How documents become blocks of tokens, and in which order."""

    seq_len: int = 1024
    """Tokens in a row."""
    pack: PackStrategy = "best_fit"
    """`best_fit` cuts only documents longer than a row, `concat` cuts wherever a row ends."""
    seed: int = 0
    """Decides the order, together with the data."""
    shuffle: bool = True
    """Put chunks, rows and blocks into a random order that follows from the seed."""
    lanes: AutoCount = "auto"
    """Parts that the data is dealt into. `auto`: 48, or fewer for data with less than 8 documents or rows a lane. A state keeps the number it was saved with."""
    shuffle_chunks: AutoCount = "auto"
    """Chunks whose documents are shuffled together. A chunk is what is read at once: 64 KiB to 1 MiB of lines, a row group. `auto`: 16, or fewer where the
    open chunks of all lanes would exceed 256 MiB. More of them mix a row better and are read before the first batch."""
    window_blocks: AutoCount = "auto"
    """Rows that are tokenised and packed as one unit. `auto`: 64, or fewer (8 at least) for rows so long that 64 exceed 262,144 tokens."""
    exhausted: Exhausted = "drop"
    """What happens when a source has been read `max_epochs` times (once, if the source does not say). `drop` continues with the other sources until all
    are dry, `stop_first` ends with the first, `repeat` reads for ever unless the source sets `max_epochs`."""
    bos: bool = False
    """Put a token before each document."""
    eos: bool = True
    """Put a token after each document."""
    bos_token: str | None = None
    """The token that begins a document, where the tokenizer has none under a usual name."""
    eos_token: str | None = None
    """The token that ends a document, where the tokenizer has none under a usual name."""
    engine: str = "auto"
    """Which library encodes: the fastest one installed that proves to give the same ids, unless one is named."""
    chunk_memory: int = 512 << 20
    """Bytes of decoded chunks that are kept. Sources that fit are read once, others again in every epoch."""

    def problems(self) -> list[str]:
        """Return what is wrong with the settings, one sentence each."""
        rules = (
            ("seq_len", _is_count(self.seq_len, 2) and self.seq_len <= 1 << 24, "an integer in [2, 2**24]"),
            ("lanes", self.lanes == "auto" or _is_count(self.lanes), 'a positive integer or "auto"'),
            ("shuffle_chunks", self.shuffle_chunks == "auto" or _is_count(self.shuffle_chunks), 'a positive integer or "auto"'),
            ("window_blocks", self.window_blocks == "auto" or _is_count(self.window_blocks), 'a positive integer or "auto"'),
            ("seed", _is_count(self.seed, 0) and self.seed < 1 << 63, "an integer in [0, 2**63)"),
            ("chunk_memory", _is_count(self.chunk_memory, 0), "a whole number of bytes"),
            ("pack", self.pack in ("best_fit", "concat"), '"best_fit" or "concat"'),
            ("exhausted", self.exhausted in ("drop", "repeat", "stop_first"), '"drop", "repeat" or "stop_first"'),
        )  # fmt: skip
        return [f"{name} must be {wanted}, got {getattr(self, name)!r}" for name, holds, wanted in rules if not holds]


class TextOptions(TypedDict, total=False):
    """The fields of `TextSettings`, as keyword arguments."""

    seq_len: int
    pack: PackStrategy
    seed: int
    shuffle: bool
    lanes: AutoCount
    shuffle_chunks: AutoCount
    window_blocks: AutoCount
    exhausted: Exhausted
    bos: bool
    eos: bool
    bos_token: str | None
    eos_token: str | None
    engine: str
    chunk_memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """How a loader makes its batches."""

    global_batch_size: int | None = None
    """Rows of a step, over all ranks. Streams have none: their datasets say how many rows a batch has. For text any world size that divides it works, and may
    change from one resume to the next. One that does not divide the dataset's lanes has several ranks make the same windows (`headrace check` shows how many)."""
    prefetch_batches: int = 2
    """Batches made ahead of need."""
    fields: Sequence[str] = DEFAULT_LM_FIELDS
    """Which of LM_FIELDS a batch has."""
    segment_ids: bool = False
    """Add the field `segment_ids`."""
    labels: Labels = "shifted"
    """`shifted`: the token after each position, so compare them with the logits of the same position. `hf`: equal to input_ids, for transformers' models,
    which shift by themselves."""
    tokenizer_workers: int | None = None
    """Threads that make windows; this rank's share of the processors (2 to 16) unless given, or 0 with `data_loader_workers`."""
    data_loader_workers: int = 0
    """Processes in their place, for tokenizers or trainers that hold the GIL."""
    skip: Sequence[tuple[int, int]] = ()
    """Ranges of steps of text (from, to) that are skipped, counted from 1, `to` excluded. [(5, 8)] skips steps 5, 6 and 7, whose documents count as read."""
    pin_memory: bool = False
    """Put batches into pinned memory, for copies to a CUDA device."""
    deadline: float = 300.0
    """Seconds that a wait may take."""
    copy: bool = False
    """Has no effect; earlier versions had it."""

    def lm_fields(self) -> tuple[str, ...]:
        """Return the fields of a batch of text, in the order of LM_FIELDS."""
        return tuple(f for f in LM_FIELDS if f in self.fields or (f == "segment_ids" and self.segment_ids))

    def problems(self) -> list[str]:
        """Return what is wrong with the settings that all plans share, one sentence each."""
        wrong = []
        if not isinstance(self.prefetch_batches, int) or self.prefetch_batches < 0:
            wrong.append(f"prefetch_batches must be 0 or more, got {self.prefetch_batches!r}")
        if not self.deadline > 0:
            wrong.append(f"deadline must be above 0 seconds, got {self.deadline!r}")
        return wrong + label_problems(self.labels) + lm_field_problems(self.fields)


class LoaderOptions(TypedDict, total=False):
    """The fields of `LoaderSettings`, as keyword arguments."""

    global_batch_size: int | None
    prefetch_batches: int
    fields: Sequence[str]
    segment_ids: bool
    labels: Labels
    tokenizer_workers: int | None
    data_loader_workers: int
    skip: Sequence[tuple[int, int]]
    pin_memory: bool
    deadline: float
    copy: bool


S = TypeVar("S", TextSettings, LoaderSettings)


def with_options(settings: S, options: Mapping[str, Any], caller: str) -> S:
    """Return the settings with the options in place of their fields; a TypeError names an option that is none of the fields."""
    unknown = options.keys() - {field.name for field in fields(settings)}
    if unknown:
        raise TypeError(f"{caller}() got an unexpected keyword argument {sorted(unknown)[0]!r}")
    return replace(settings, **options)


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and value >= least
