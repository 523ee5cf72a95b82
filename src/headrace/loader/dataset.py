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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headrace.errors import ConfigError, DataError, TokenizerError
from headrace.files import publish
from headrace.loader.lanes import LanePlan
from headrace.loader.pool import WindowKey
from headrace.loader.windows import Carry, ChunkCache, Window, WindowMaker
from headrace.metrics import Meter, Wait
from headrace.mix import Deal, lane_weight_factors
from headrace.order import fingerprint_json, key
from headrace.sources import OpenSource, Source, cache_folder, open_source
from headrace.text import BpeTokenizer, Packing, Tokenizer, load_tokenizer, train_bpe, warm_kernels

__all__ = ["TextDataset", "sample_tokenizer"]

SAMPLE_VOCAB = 4096
_SAMPLE_TEXT = 2_000_000
_SCALED_BELOW = 64
"""A source with fewer rows a lane than this is dealt unevenly enough for its weight to be scaled lane by lane."""

Exhausted = Literal["drop", "repeat", "stop_first"]


class TextDataset:
    """Documents of weighted sources, dealt to lanes, tokenised and packed.

    `exhausted` says what happens when a source has been read `max_epochs` times (once, if the source does not say):
    `drop` goes on with the others until all are dry, `stop_first` ends with the first, `repeat` reads for ever unless
    the source sets `max_epochs`.
    """

    def __init__(
        self,
        sources: Sequence[Source | str] | Source | str,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        seq_len: int,
        pack: Literal["best_fit", "concat"] = "best_fit",
        seed: int = 0,
        lanes: int = 48,
        window_blocks: int = 64,
        shuffle: bool = True,
        exhausted: Exhausted = "drop",
        bos: bool = False,
        eos: bool = True,
        eos_token: str | None = None,
        bos_token: str | None = None,
        base: Path | None = None,
        cache: Path | None = None,
        records: Path | None = None,
        full_check: bool = False,
        accept_changes: bool = False,
        meter: Meter | None = None,
    ) -> None:
        _check(seq_len=seq_len, lanes=lanes, window_blocks=window_blocks, seed=seed, pack=pack, exhausted=exhausted)
        warm_kernels()
        self.meter = meter if meter is not None else Meter()
        self.seq_len = seq_len
        self.seed = seed
        self.lanes = lanes
        self.shuffle = shuffle
        self.exhausted: Exhausted = exhausted
        if isinstance(sources, str | Source):
            sources = [sources]
        described = _named([Source.parse(s) if isinstance(s, str) else s for s in sources])
        if not described:
            raise ConfigError('a dataset needs at least one source, such as Source("sample:prose")')
        if not any(s.weight > 0 for s in described):
            raise ConfigError("all sources have weight 0: give at least one of them a positive weight")
        self.cache = cache if cache is not None else cache_folder()
        with Wait("source.open", meter=self.meter):
            self.sources: tuple[OpenSource, ...] = tuple(
                open_source(
                    s,
                    base=base,
                    cache=self.cache,
                    records=records,
                    full_check=full_check,
                    accept_changes=accept_changes,
                )
                for s in described
            )
        if not any(s.manifest.rows and s.source.weight > 0 for s in self.sources):
            names = ", ".join(s.source.spec for s in self.sources)
            raise DataError(f"no source has any rows ({names}): check the paths, or the files they point to")
        with Wait("tokenizer.load", meter=self.meter):
            self.tokenizer = self._tokenizer(tokenizer, eos_token, bos_token)
        self.packing = Packing(
            seq_len=seq_len,
            strategy=pack,
            blocks=window_blocks,
            bos_id=self._special("bos", self.tokenizer.bos_id) if bos else None,
            eos_id=self._special("eos", self.tokenizer.eos_id) if eos else None,
            pad_id=self.tokenizer.pad_id if self.tokenizer.pad_id is not None else 0,
        )
        self.chunks = ChunkCache(self.meter)
        self.deals = tuple(self._deal(i, s) for i, s in enumerate(self.sources))
        self.makers = tuple(
            WindowMaker(
                i, s, self.deals[i], self.tokenizer, self.packing,
                key=key(f"text.window/{s.name}", seed=seed), shuffle=shuffle, cache=self.chunks, meter=self.meter,
            )
            for i, s in enumerate(self.sources)
        )  # fmt: skip

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def names(self) -> tuple[str, ...]:
        """The sources' names, in order."""
        return tuple(s.name for s in self.sources)

    @property
    def weights(self) -> tuple[float, ...]:
        """The sources' weights, adding up to 1. Sources without rows have none."""
        raw = [s.source.weight if s.manifest.rows else 0.0 for s in self.sources]
        return tuple(w / sum(raw) for w in raw)

    def plan(self, number: int) -> LanePlan:
        """What the lanes do in pass `number`."""
        epochs = tuple(self._max_epochs(s.source) for s in self.sources)
        factors = np.stack([self._lane_factors(i, epochs[i], number) for i in range(len(self.sources))])
        weights = np.asarray(self.weights)[:, None] * factors
        return LanePlan(
            deals=self.deals,
            weights=tuple(tuple(float(w) for w in weights[:, lane]) for lane in range(self.lanes)),
            lanes=self.lanes,
            seq_len=self.seq_len,
            seed=self.seed,
            max_epochs=epochs,
            max_tokens=tuple(s.source.max_tokens for s in self.sources),
            stop_first=self.exhausted == "stop_first",
            number=number,
        )

    def fingerprint(self) -> dict[str, str]:
        """What the order depends on, by name: what a cursor records and a resume compares."""
        found: dict[str, str] = {}
        for source in self.sources:
            found |= source.fingerprint()
        settings = {
            "seq_len": self.seq_len, "pack": self.packing.strategy, "seed": self.seed, "lanes": self.lanes,
            "window_blocks": self.packing.blocks, "shuffle": self.shuffle, "exhausted": self.exhausted,
            "bos": self.packing.bos_id, "eos": self.packing.eos_id,
        }  # fmt: skip
        found |= {f"config:{name}": str(value) for name, value in settings.items()}
        limits = [[s.source.max_rows, s.source.max_tokens, s.source.max_epochs, s.source.on_bad] for s in self.sources]
        found["config:limits"] = fingerprint_json(limits)
        found["tokenizer"] = f"{self.tokenizer.fingerprint}"
        found["sources"] = ", ".join(self.names)
        found["weights"] = ", ".join(f"{s.source.weight!r}" for s in self.sources)
        return found

    def estimated_tokens(self, sample_chunks: int = 3) -> tuple[int, ...]:
        """About how many tokens each source has in one epoch, from a few chunks spread over it."""
        return tuple(self._estimate(i, sample_chunks) for i in range(len(self.sources)))

    def make_window(self, wanted: WindowKey, carry: Carry | None) -> tuple[Window, Carry | None]:
        """What a pool's thread does."""
        source, lane, start = wanted
        return self.makers[source].make(lane, start, carry)

    def close(self) -> None:
        """Let go of the files. Loaders over this dataset must be closed first."""
        for source in self.sources:
            source.close()

    def _deal(self, index: int, source: OpenSource) -> Deal:
        rows = np.asarray(source.manifest.chunk_rows, dtype=np.int64)
        sizes = np.asarray(source.manifest.chunk_bytes, dtype=np.int64)
        limit = source.source.max_rows
        if limit is not None:
            before = np.cumsum(rows) - rows
            kept = np.clip(limit - before, 0, rows)
            sizes = sizes * kept // np.maximum(rows, 1)
            rows = kept
        return Deal(
            rows, sizes, key=key(f"text.deal/{source.name}", seed=self.seed), lanes=self.lanes, shuffle=self.shuffle
        )

    def _max_epochs(self, source: Source) -> int | None:
        if self.exhausted == "repeat":
            return source.max_epochs
        return source.max_epochs if source.max_epochs is not None else 1

    def _lane_factors(self, index: int, epochs: int | None, number: int) -> np.ndarray:
        deal = self.deals[index]
        if epochs is None or deal.rows == 0 or deal.rows >= _SCALED_BELOW * self.lanes:
            return np.ones(self.lanes)
        return lane_weight_factors(deal.rows_owned(range(number * epochs, (number + 1) * epochs)))

    def _estimate(self, index: int, sample_chunks: int) -> int:
        source, deal = self.sources[index], self.deals[index]
        filled = np.flatnonzero(deal.chunk_rows)
        if not filled.size:
            return 0
        picks = filled[np.unique(np.linspace(0, filled.size - 1, sample_chunks).astype(np.int64))]
        tokens = rows = 0
        for chunk in picks.tolist():
            texts = [t for t in self.chunks.texts(index, source, chunk) if t][:200]
            tokens += int(self.packing.lengths(self.tokenizer.encode(texts).counts()).sum())
            rows += len(texts)
        return round(tokens / rows * deal.rows) if rows else 0

    def _tokenizer(self, given: str | Path | Tokenizer | None, eos: str | None, bos: str | None) -> Tokenizer:
        if given == "sample":
            return sample_tokenizer(self.cache)
        if given is None or isinstance(given, str | Path):
            return load_tokenizer(given, eos=eos, bos=bos)
        return given

    def _special(self, role: str, found: int | None) -> int:
        if found is None:
            raise TokenizerError(
                f"tokenizer {self.tokenizer.name} has no {role} token under any usual name: name it with "
                f'{role}_token="...", or switch it off with {role}=False'
            )
        return found


def sample_tokenizer(cache: Path) -> BpeTokenizer:
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
    return BpeTokenizer(path.read_bytes(), name="sample")


def _named(sources: Sequence[Source]) -> list[Source]:
    """Sources with different names: the second `web` becomes `web-2`."""
    seen: dict[str, int] = {}
    named = []
    for source in sources:
        name = source.name or "source"
        seen[name] = seen.get(name, 0) + 1
        while seen[name] > 1 and f"{name}-{seen[name]}" in seen:
            seen[name] += 1
        unique = name if seen[name] == 1 else f"{name}-{seen[name]}"
        seen.setdefault(unique, 1)
        named.append(dataclasses.replace(source, name=unique))
    return named


def _check(**settings: Any) -> None:
    problems = []
    if not isinstance(settings["seq_len"], int) or settings["seq_len"] < 2:
        problems.append(f"seq_len must be an integer of at least 2, got {settings['seq_len']!r}")
    if not isinstance(settings["lanes"], int) or settings["lanes"] < 1:
        problems.append(f"lanes must be a positive integer, got {settings['lanes']!r}")
    if not isinstance(settings["window_blocks"], int) or settings["window_blocks"] < 1:
        problems.append(f"window_blocks must be a positive integer, got {settings['window_blocks']!r}")
    if not isinstance(settings["seed"], int) or not 0 <= settings["seed"] < 1 << 63:
        problems.append(f"seed must be an integer in [0, 2**63), got {settings['seed']!r}")
    if settings["pack"] not in ("best_fit", "concat"):
        problems.append(f'pack must be "best_fit" or "concat", got {settings["pack"]!r}')
    if settings["exhausted"] not in ("drop", "repeat", "stop_first"):
        problems.append(f'exhausted must be "drop", "repeat" or "stop_first", got {settings["exhausted"]!r}')
    if problems:
        raise ConfigError(problems)
