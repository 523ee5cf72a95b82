"""Text from anywhere, as an endless or finite supply of packed blocks in a fixed order.

    data = TextDataset(
        sources=[Source("jsonl:web/*.jsonl", weight=0.7), Source("parquet:code/", weight=0.3)],
        tokenizer="tokenizer.json", seq_len=2048, seed=7,
    )

A dataset is the wiring of sources, deal, mix, tokenizer and packer; it holds no position. `Loader` walks over it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np

from headrace.errors import ConfigError, DataError, HeadraceError, TokenizerError
from headrace.files import publish, read_regular
from headrace.loader.batch_fill import FILL_KERNELS
from headrace.loader.estimates import SAMPLED_CHUNKS, SourceEstimate, estimate_source
from headrace.loader.lanes import LanePlan
from headrace.loader.pool import WindowKey
from headrace.loader.weight_text import weights_asked_for, weights_in_force, written_weights
from headrace.loader.windows import ChunkCache, Encoded, Window, WindowMaker
from headrace.metrics import Meter, Wait
from headrace.mix import Deal, lane_weight_factors
from headrace.order import fingerprint_json, key
from headrace.runtime.compiled import warm_kernels
from headrace.settings import MAX_WINDOW_TOKENS, Exhausted, TextOptions, TextSettings, with_options
from headrace.sources import OpenSource, Source, cache_folder, open_source
from headrace.text import (
    PACK_KERNELS,
    BpeTokenizer,
    EngineName,
    Packing,
    Tokenizer,
    definition_of,
    load_tokenizer,
    train_bpe,
)
from headrace.text.named_tokenizer import TokenizerDefinition

SAMPLE_VOCAB = 4096
_SAMPLE_TEXT = 2_000_000
_SCALED_BELOW = 64
"""A source with fewer rows a lane than this is dealt unevenly enough for its weight to be scaled lane by lane."""

MOST_LANES = 48
"""Lanes of data that is large enough; smaller data has one of the divisors."""
_LANE_DOCUMENTS = _LANE_ROWS = 8
"""Documents, and rows of a batch, that every lane has at least: with fewer, lanes end far apart and rows hold nothing to learn."""
_WINDOW_BLOCKS, _WINDOW_TOKENS, _LEAST_WINDOW_BLOCKS = 64, 1 << 18, 8
"""Sizes of a window. More tokens make the first batch wait longer; fewer blocks leave more padding."""
_SHUFFLE_CHUNKS, _SHUFFLE_BYTES = 16, 256 << 20
"""Chunks that are shuffled together, and the bytes that those of all lanes may have: half of what is kept of decoded chunks."""
_BYTES_A_TOKEN = 4
_PLANS_KEPT = 8
_READERS = 16


@dataclass(frozen=True, slots=True)
class MixChange:
    """Other weights from a step on, counted from 1 as everywhere. Sources that are not named keep theirs."""

    step: int
    """The first step with these weights."""
    weights: Mapping[str, float]

    @property
    def steps_before(self) -> int:
        """How many steps come before the change: what a saved state keeps."""
        return self.step - 1

    def __str__(self) -> str:
        return f"the mix change at step {self.step}"


class TextDataset:
    """Documents of weighted sources, dealt to lanes, tokenised and packed.

    - `sources`: specs such as `"jsonl:web/*.jsonl"`, or `Source` objects.
    - `settings`: a `TextSettings`. Its fields may be given by name too, and then win: `TextDataset(sources, seq_len=2048, seed=7)`.
    - `tokenizer`: the path of a tokenizer.json or of a folder that holds one; a name such as `"org/name"`, found in the local Hugging Face cache; an object of
      transformers or `tokenizers`; `"sample"` (a small built-in BPE); or None for bytes.
    - `mix_changes`: other weights from given steps on.
    - `base`: folder where relative paths start. `cache`: folder for manifests and repacked files.
    - `records`: folder of content hashes to compare with. `full_check`: compare everything that was ever read. `accept_changes`: take changed files as they are.
    - `meter`: where waits are counted.
    """

    def __init__(
        self,
        sources: Sequence[Source | str | Path] | Source | str | Path,
        settings: TextSettings | None = None,
        *,
        tokenizer: Any = None,
        mix_changes: Sequence[MixChange] = (),
        base: str | Path | None = None,
        cache: str | Path | None = None,
        records: str | Path | None = None,
        full_check: bool = False,
        accept_changes: bool = False,
        meter: Meter | None = None,
        **options: Unpack[TextOptions],
    ) -> None:
        chosen = with_options(settings or TextSettings(), options, "TextDataset")
        if problems := chosen.problems():
            raise ConfigError(problems)
        if tokenizer is not None and not isinstance(tokenizer, str | Path):
            tokenizer = definition_of(tokenizer) or tokenizer
        # What a worker process or a foreign DataLoader makes this dataset from again.
        self.recipe: dict[str, Any] = {
            "sources": sources,
            "settings": chosen,
            "tokenizer": tokenizer,
            "mix_changes": tuple(mix_changes),
            "base": Path(base) if base is not None else Path.cwd(),
            "cache": Path(cache) if cache is not None else cache_folder(),
            "records": None if records is None else Path(records),
            "accept_changes": accept_changes,
        }
        warm_kernels(*PACK_KERNELS, *FILL_KERNELS)
        self.meter = meter if meter is not None else Meter()
        self.settings = chosen
        self.seq_len, self.seed, self.shuffle = chosen.seq_len, chosen.seed, chosen.shuffle
        self.exhausted: Exhausted = chosen.exhausted
        described = _described(sources)
        if not described:
            raise ConfigError('a dataset needs at least one source, such as Source("sample:prose")')
        if not any(s.weight > 0 for s in described):
            raise ConfigError("all sources have weight 0: give at least one of them a positive weight")
        self.mix_changes = _checked_changes(mix_changes, described)
        self.cache: Path = self.recipe["cache"]
        self.sources = self._open(described, full_check=full_check)
        self.records_bound = records is not None
        """Whether a chunk that differs from its recorded hash is refused."""
        if not any(s.manifest.rows and s.source.weight > 0 for s in self.sources):
            names = ", ".join(s.source.spec for s in self.sources)
            raise DataError(f"no source has any rows ({names}): check the paths, or the files they point to")
        self._refuse_changes_to_nothing()
        self.lanes: int = fitting_lanes(*self._size()) if chosen.lanes == "auto" else chosen.lanes
        self.shuffle_chunks = (
            self._fitting_shuffle_chunks() if chosen.shuffle_chunks == "auto" else chosen.shuffle_chunks
        )
        """Chunks whose documents are shuffled together."""
        with Wait("tokenizer.load", meter=self.meter):
            self.tokenizer = self._tokenizer(tokenizer)
        self.packing = Packing(
            seq_len=chosen.seq_len,
            strategy=chosen.pack,
            blocks=fitting_window_blocks(chosen.seq_len) if chosen.window_blocks == "auto" else chosen.window_blocks,
            bos_id=self._special("bos", self.tokenizer.bos_id) if chosen.bos else None,
            eos_id=self._special("eos", self.tokenizer.eos_id) if chosen.eos else None,
            pad_id=self.tokenizer.pad_id if self.tokenizer.pad_id is not None else 0,
        )
        self._lock = threading.Lock()
        self._readers: ThreadPoolExecutor | None = None
        self._foreign_holes: dict[int, dict[tuple[str, int], dict[str, Any]]] = {}
        self._wire()

    def _open(self, described: Sequence[Source], *, full_check: bool = False) -> tuple[OpenSource, ...]:
        made = {name: self.recipe[name] for name in ("base", "cache", "records", "accept_changes")}
        with Wait("source.open", meter=self.meter):
            return tuple(open_source(s, full_check=full_check, **made) for s in described)

    def _wire(self) -> None:
        """Deal the rows of the open sources to lanes, and make the makers of their windows."""
        self.chunks = ChunkCache(self.meter, self.settings.chunk_memory)
        self._plans: dict[tuple[int, int], LanePlan] = {}
        self.deals = tuple(self._deal(i, s) for i, s in enumerate(self.sources))
        self.makers = tuple(
            WindowMaker(
                i, s, self.deals[i], self.tokenizer, self.packing,
                key=key(f"text.window/{s.name}", seed=self.seed), shuffle=self.shuffle, cache=self.chunks, meter=self.meter,
            )
            for i, s in enumerate(self.sources)
        )  # fmt: skip

    def expect_recorded(self, *, accept_changes: bool = False) -> None:
        """Hold the sources to what was read of them before, as a run that goes on from a state must.

        `accept_changes`: take their bytes as they are now instead, counted anew. Loaders over this dataset must be closed.
        """
        if accept_changes and not self.recipe["accept_changes"]:
            self.recipe["accept_changes"] = True
            self.close()
            self.sources = self._open([s.source for s in self.sources])
            self._wire()
        self.records_bound = True
        for source in self.sources:
            source.bind_records()

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def names(self) -> tuple[str, ...]:
        """The sources' names, in order."""
        return tuple(s.name for s in self.sources)

    @property
    def bad_shards(self) -> int:
        """Files that cannot be decoded and are left out (on_bad = "skip")."""
        return sum(bool(file.hole) for source in self.sources for file in source.manifest.files)

    @property
    def weights(self) -> tuple[float, ...]:
        """The sources' weights at the start, adding up to 1. Sources without rows have none."""
        return self.weights_at(-1)

    def weights_at(self, steps: int) -> tuple[float, ...]:
        """The weights that hold once `steps` steps have passed, adding up to 1; -1: those at the start. Sources without rows have none."""
        weights = weights_in_force(self._weight_changes, steps)
        raw = [0.0 if name in self.empty else weight for name, weight in weights.items()]
        return tuple(w / sum(raw) for w in raw)

    @property
    def empty(self) -> frozenset[str]:
        """The names of the sources without rows."""
        return frozenset(s.name for s in self.sources if not s.manifest.rows)

    @property
    def _weight_changes(self) -> list[tuple[int, Mapping[str, float]]]:
        """The weights at the start, and then the changes: steps before each, and its weights."""
        first = {s.name: s.source.weight for s in self.sources}
        return [(-1, first), *((change.steps_before, change.weights) for change in self.mix_changes)]

    def _refuse_changes_to_nothing(self) -> None:
        """Weights that only sources without rows have leave nothing to read."""
        for change in self.mix_changes:
            weights = weights_in_force(self._weight_changes, change.steps_before)
            if not any(weight > 0 for name, weight in weights.items() if name not in self.empty):
                empty = ", ".join(name for name, weight in weights.items() if weight > 0)
                raise ConfigError(
                    f"{change} leaves weight only on "
                    f"sources without rows ({empty}): give a source that has rows a positive weight there"
                )

    def _size(self) -> tuple[int, int]:
        """How many documents the sources have, and about how many rows they fill."""
        kept = [_kept_chunks(source) for source in self.sources]
        text_bytes = sum(int(sizes.sum()) for _, sizes in kept)
        return sum(int(rows.sum()) for rows, _ in kept), text_bytes // (_BYTES_A_TOKEN * self.seq_len)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that may be automatic, as numbers."""
        return {"lanes": self.lanes, "window_blocks": self.packing.blocks, "shuffle_chunks": self.shuffle_chunks}

    def _fitting_shuffle_chunks(self) -> int:
        if not self.shuffle:
            return 1
        kept = [_kept_chunks(source) for source in self.sources]
        chunk_bytes = sum(int(sizes.sum() // max(np.count_nonzero(rows), 1)) for rows, sizes in kept)
        return max(1, min(_SHUFFLE_CHUNKS, _SHUFFLE_BYTES // max(self.lanes * chunk_bytes, 1)))

    def keep_sizes(self, saved: Mapping[str, Any]) -> None:
        """Take the automatic sizes from those of an earlier start: a run keeps what it began with. Loaders over this dataset must be closed.

        saved: `sizes` as numbers, or as the words of a state's fingerprint. What is not a possible size is left out.
        """
        before = self.sizes
        if self.settings.lanes == "auto" and (lanes := _whole_number(saved.get("lanes"), 1 << 16)):
            self.lanes = lanes
        limit = MAX_WINDOW_TOKENS // self.seq_len
        if self.settings.window_blocks == "auto" and (blocks := _whole_number(saved.get("window_blocks"), limit)):
            self.packing = dataclasses.replace(self.packing, blocks=blocks)
        if self.settings.shuffle_chunks == "auto" and (chunks := _whole_number(saved.get("shuffle_chunks"), 1 << 16)):
            self.shuffle_chunks = chunks
        if before != self.sizes:
            self._wire()

    def mean_weights(self, steps: int) -> tuple[float, ...]:
        """What the weights add up to over the first `steps` steps: the shares that a run should have reached by then."""
        return tuple(asked / max(steps, 1) for asked in self.weight_sums(0, max(steps, 1)).values())

    def weight_sums(self, begin: int, end: int) -> dict[str, float]:
        """The weights between the first `begin` steps and the first `end`, added up by source."""
        return weights_asked_for(self._weight_changes, begin, end, self.empty)

    def changes_from(self, steps: int, number: int) -> list[tuple[int, tuple[tuple[float, ...], ...]]]:
        """The changes of weights after `steps` steps or more: the number of steps before each, and its weights per lane and source."""
        befores = [c.steps_before for c in self.mix_changes]
        return [(before, self._lane_weights(before, number)) for before in befores if before >= steps]

    def plan(self, number: int, step: int = -1) -> LanePlan:
        """What the lanes do in pass `number`, with the weights that hold once `step` steps have passed."""
        changes_made = sum(1 for change in self.mix_changes if change.steps_before <= step)
        found = self._plans.get((number, changes_made))
        if found is None:
            found = self._plans[number, changes_made] = self._new_plan(number, step)
            while len(self._plans) > _PLANS_KEPT:
                del self._plans[next(iter(self._plans))]
        return found

    def _new_plan(self, number: int, step: int) -> LanePlan:
        epochs = tuple(self._max_epochs(s.source) for s in self.sources)
        return LanePlan(
            deals=self.deals,
            weights=self._lane_weights(step, number),
            lanes=self.lanes,
            seq_len=self.seq_len,
            seed=self.seed,
            max_epochs=epochs,
            max_tokens=tuple(s.source.max_tokens for s in self.sources),
            stop_first=self.exhausted == "stop_first",
            number=number,
        )

    def fingerprint(self, step: int = 0) -> dict[str, str]:
        """What the order before `step` depends on, by name: what a cursor records and a resume compares."""
        found: dict[str, str] = {}
        for source in self.sources:
            found |= source.fingerprint()
        settings = {
            "seq_len": self.seq_len, "pack": self.packing.strategy, "seed": self.seed, **self.sizes,
            "shuffle": self.shuffle, "exhausted": self.exhausted, "bos": self.packing.bos_id, "eos": self.packing.eos_id,
        }  # fmt: skip
        if self.shuffle_chunks == 1:  # states of earlier versions do not name it
            del settings["shuffle_chunks"]
        found |= {f"config:{name}": str(value) for name, value in settings.items()}
        limits = [[s.source.max_rows, s.source.max_tokens, s.source.max_epochs, s.source.on_bad] for s in self.sources]
        found["config:limits"] = fingerprint_json(limits)
        found["tokenizer"] = f"{self.tokenizer.fingerprint}"
        found["sources"] = ", ".join(self.names)
        # What lies ahead may be changed freely.
        found["weights"] = written_weights([change for change in self._weight_changes if change[0] < step])
        return found

    def estimated_tokens(self, sample_chunks: int = SAMPLED_CHUNKS) -> tuple[int, ...]:
        """About how many tokens each source has in one epoch, from a few chunks spread over it."""
        return tuple(estimate.tokens for estimate in self.estimates(sample_chunks))

    def estimates(self, sample_chunks: int = SAMPLED_CHUNKS) -> tuple[SourceEstimate, ...]:
        """Tokens, median length and first document of each source, from a few chunks spread over it."""
        return tuple(
            estimate_source(
                *_kept_chunks(source), lambda chunk, i=i, source=source: self.chunks.texts(i, source, chunk), self.tokenizer, self.packing,
                sample_chunks=sample_chunks,
            )
            for i, source in enumerate(self.sources)
        )  # fmt: skip

    def make_window(self, wanted: WindowKey, carry: Encoded | None) -> tuple[Window, Encoded | None]:
        """What a pool's thread does."""
        source, lane, start = wanted
        return self.makers[source].make(lane, start, carry)

    def look_ahead(self, wanted: WindowKey) -> None:
        """Have the chunks of a window read in the background, where reading waits for a network.

        Tokenizer threads are few, because they use the processor; reads that only wait may be many at a time.
        """
        index, lane, start = wanted
        source = self.sources[index]
        if "://" not in str(source.manifest.root):
            return
        with self._lock:
            if self._readers is None:
                self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="headrace-read")
            readers = self._readers
        for chunk in self.makers[index].first_chunks(lane, start):
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                readers.submit(self._read_ahead, index, chunk)

    def _read_ahead(self, index: int, chunk: int) -> None:
        with contextlib.suppress(
            HeadraceError
        ):  # the reader that needs the chunk meets the error again, at the right sample
            self.chunks.texts(index, self.sources[index], chunk)

    def note_hole(self, source: int, hole: dict[str, Any]) -> None:
        """A hole that a worker process met."""
        with self._lock:
            known = self._foreign_holes.setdefault(source, {})
            known[hole["file"], hole["row"]] = hole

    def holes(self) -> list[dict[str, Any]]:
        """Rows and shards that cannot be used and were passed over so far (on_bad = "skip")."""
        found = []
        with self._lock:
            foreign = {i: dict(holes) for i, holes in self._foreign_holes.items()}
        for i, source in enumerate(self.sources):
            own = {(hole["file"], hole["row"]): hole for hole in source.holes()}
            found += [{"source": source.name, **hole} for _, hole in sorted((foreign.get(i, {}) | own).items())]
        return found

    def close(self) -> None:
        """Let go of the files. Loaders over this dataset must be closed first."""
        with self._lock:
            readers, self._readers = self._readers, None
        if readers is not None:
            readers.shutdown(wait=False, cancel_futures=True)
        for source in self.sources:
            source.close()

    def _deal(self, index: int, source: OpenSource) -> Deal:
        rows, sizes = _kept_chunks(source)
        return Deal(
            rows, sizes, key=key(f"text.deal/{source.name}", seed=self.seed), lanes=self.lanes, shuffle=self.shuffle,
            shuffle_chunks=self.shuffle_chunks,
        )  # fmt: skip

    def _max_epochs(self, source: Source) -> int | None:
        if self.exhausted == "repeat":
            return source.max_epochs
        return source.max_epochs if source.max_epochs is not None else 1

    def _lane_weights(self, step: int, number: int) -> tuple[tuple[float, ...], ...]:
        """Per lane and source."""
        epochs = [self._max_epochs(s.source) for s in self.sources]
        factors = np.stack([self._lane_factors(i, epochs[i], number) for i in range(len(self.sources))])
        weights = np.asarray(self.weights_at(step))[:, None] * factors
        return tuple(tuple(float(w) for w in weights[:, lane]) for lane in range(self.lanes))

    def _lane_factors(self, index: int, epochs: int | None, number: int) -> np.ndarray:
        deal = self.deals[index]
        if epochs is None or deal.rows == 0 or deal.rows >= _SCALED_BELOW * self.lanes:
            return np.ones(self.lanes)
        return lane_weight_factors(deal.rows_owned(range(number * epochs, (number + 1) * epochs)))

    def _tokenizer(self, given: Any) -> Tokenizer:
        chosen = self.settings
        engine = cast(EngineName, chosen.engine)  # `choose_engine` refuses names that it does not know
        if given == "sample":
            return sample_tokenizer(self.cache, engine)
        if given is None or isinstance(given, str | Path | TokenizerDefinition):
            return load_tokenizer(
                given, eos=chosen.eos_token, bos=chosen.bos_token, engine=engine, base=self.recipe["base"]
            )
        lacking = [name for name in ("encode", "vocab_size", "name", "fingerprint") if not hasattr(given, name)]
        if lacking:
            raise ConfigError(
                f"tokenizer must be a path, a name, or an object with encode, vocab_size, name and fingerprint; {given!r} has no {', '.join(lacking)}"
            )
        return given

    def _special(self, role: str, found: int | None) -> int:
        if found is None:
            raise TokenizerError(
                f"tokenizer {self.tokenizer.name} has no {role} token under any usual name: name it with "
                f'{role}_token="...", or switch it off with {role}=False'
            )
        return found


def fitting_lanes(documents: int, rows: int) -> int:
    """Return the number of lanes for data of this size: the largest divisor of 48 that leaves every lane enough to read."""
    fitting = [
        n
        for n in range(1, MOST_LANES + 1)
        if MOST_LANES % n == 0 and n * _LANE_DOCUMENTS <= documents and n * _LANE_ROWS <= rows
    ]
    return max(fitting, default=1)


def fitting_window_blocks(seq_len: int) -> int:
    """Return the number of rows in a window."""
    return min(_WINDOW_BLOCKS, max(_LEAST_WINDOW_BLOCKS, _WINDOW_TOKENS // seq_len))


def _whole_number(given: object, limit: int) -> int | None:
    """Return the number if it is one from 1 to `limit`, else None."""
    text = str(given)
    return int(text) if text.isdecimal() and len(text) < 10 and 1 <= int(text) <= limit else None


def sample_tokenizer(cache: Path, engine: EngineName = "auto") -> BpeTokenizer:
    """The small BPE of the built-in corpora: trained on them once, then frozen in the cache."""
    folder = cache / "samples"
    path = folder / f"bpe-{SAMPLE_VOCAB}-v1.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        texts: list[str] = []
        for name in ("sample:prose", "sample:code"):
            source, taken, chunk = open_source(Source(name), cache=cache), 0, 0
            while taken < _SAMPLE_TEXT // 2 and chunk < len(source.manifest.chunk_rows):
                found = [t for t in source.read(chunk) if t]
                texts += found
                taken += sum(map(len, found))
                chunk += 1
            source.close()
        with contextlib.suppress(
            FileExistsError
        ):  # another process trained it too: the file that came first is used by all
            publish(path, train_bpe(texts, SAMPLE_VOCAB))
    return BpeTokenizer(read_regular(path, 1 << 26), name="sample", engine=engine)


def _kept_chunks(source: OpenSource) -> tuple[np.ndarray, np.ndarray]:
    """Rows and bytes of each chunk of a source, of the first `max_rows` rows alone."""
    rows = np.asarray(source.manifest.chunk_rows, dtype=np.int64)
    sizes = np.asarray(source.manifest.chunk_bytes, dtype=np.int64)
    limit = source.source.max_rows
    if limit is None:
        return rows, sizes
    kept = np.clip(limit - (np.cumsum(rows) - rows), 0, rows)
    return kept, sizes * kept // np.maximum(rows, 1)


def _described(sources: Any) -> list[Source]:
    """The sources that were given, one or several, as objects or one-line specs; each with a name of its own."""
    given = (
        [sources]
        if isinstance(sources, str | Source | Path | Mapping) or not isinstance(sources, Iterable)
        else list(sources)
    )
    for source in given:
        if not isinstance(source, str | Path | Source):
            raise ConfigError(
                f"a source is a Source, a path or a one-line spec, such as Source('jsonl:web', weight=0.5); got {source!r}"
            )
    opened = [Source.parse(s) if isinstance(s, str) else Source(s) if isinstance(s, Path) else s for s in given]
    names = unique_names(s.name or "source" for s in opened)
    return [dataclasses.replace(source, name=name) for source, name in zip(opened, names, strict=True)]


def unique_names(names: Iterable[str]) -> list[str]:
    """Different names for things that may be named alike: the second `web` becomes `web-2`."""
    unique: list[str] = []
    for name in names:
        numbered = (f"{name}-{n}" for n in itertools.count(2))
        unique.append(next(n for n in itertools.chain([name], numbered) if n not in unique))
    return unique


def _checked_changes(changes: Sequence[MixChange], sources: Sequence[Source]) -> tuple[MixChange, ...]:
    """In the order of their steps, every one of them possible."""
    for given in changes:
        if (
            not isinstance(given, MixChange)
            or not isinstance(given.step, int)
            or not isinstance(given.weights, Mapping)
        ):
            raise ConfigError(
                f"mix_changes takes changes such as MixChange(step=500, weights={{'web': 0.2}}), with a step of at least 1; got {given!r}"
            )
    weights = {s.name or "": s.weight for s in sources}
    problems: list[str] = []
    ordered = tuple(sorted(changes, key=lambda c: c.step))
    for i, change in enumerate(ordered):
        what = str(change)
        if change.step < 1:
            problems.append(f"{what}: steps are counted from 1, and the first step with the new weights is given")
        if i and ordered[i - 1].step == change.step:
            problems.append(f"{what} is given twice; put all weights of a step into one")
        if not change.weights:
            problems.append(f"{what} changes nothing: name at least one source and its weight")
        for name, weight in change.weights.items():
            if name not in weights:
                near = difflib.get_close_matches(name, weights, 1)
                meant = f", did you mean {near[0]!r}?" if near else ""
                problems.append(f"{what}: there is no source {name!r}{meant} (sources: {', '.join(weights)})")
            elif not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
                problems.append(f"{what}: the weight of {name} must be finite and at least 0, got {weight!r}")
            else:
                weights[name] = float(weight)
        if not any(w > 0 for w in weights.values()):
            problems.append(f"{what} leaves every source with weight 0: give at least one a positive weight")
    if problems:
        raise ConfigError(problems)
    return ordered
