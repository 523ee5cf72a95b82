"""From checked values to the rooms' own objects.

job = headrace.load("run.toml")        the same objects that `headrace run` uses
for batch in job.loader(): ...         a text job
for batch in job.dataset(): ...        a stream job
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError
from headrace.loader import Loader, MixChange, TextDataset
from headrace.metrics import Meter
from headrace.runs.config.loading import load_any_config
from headrace.runs.config.schema import RunConfig
from headrace.runs.config.streams import StreamsConfig
from headrace.sources import Source

if TYPE_CHECKING:
    from headrace.loader.streams import StreamMixingDataset
    from headrace.train import TrainSettings


@dataclass(frozen=True, slots=True)
class Job:
    """A config that can make its own parts."""

    config: RunConfig
    base: Path | None = None
    """Where relative paths start; `run.base` of the config unless given."""

    def __post_init__(self) -> None:
        if self.base is None:
            object.__setattr__(self, "base", Path(self.config.run.base))

    def dataset(
        self,
        *,
        records: Path | None = None,
        cache: Path | None = None,
        meter: Meter | None = None,
        accept: Collection[str] = (),
        full_check: bool = False,
    ) -> TextDataset:
        text, loader, task = self.config.text, self.config.loader, self.config.spool.task
        if self.config.spool.labelled:
            raise ConfigError(
                f'spool.task = "{task}" has labelled rows in place of packed text: fill a spool with `headrace provide CONFIG` and read it with '
                "headrace.DatasetConsumer"
            )
        return TextDataset(
            [Source(**section.model_dump()) for section in self.config.source],
            tokenizer=text.tokenizer,
            seq_len=text.seq_len,
            pack=text.pack,
            seed=self.config.run.seed,
            lanes=loader.lanes,
            window_blocks=text.window_blocks,
            shuffle=text.shuffle,
            exhausted=loader.exhausted,
            mix_changes=[MixChange(c.step, c.weights) for c in self.config.mix.change],
            bos=text.bos,
            eos=text.eos,
            eos_token=text.eos_token,
            bos_token=text.bos_token,
            engine=text.engine,
            base=self.base,
            cache=cache,
            records=records,
            full_check=full_check,
            accept_changes="data" in accept,
            meter=meter,
        )

    def loader(self, data: TextDataset | None = None, **options: Any) -> Loader:
        """A loader over `data` (default: a new dataset). Options are Loader's own and win over the config."""
        section = self.config.loader
        settings: dict[str, Any] = {
            "global_batch_size": section.global_batch_size,
            "tokenizer_workers": section.tokenizer_workers,
            "prefetch_batches": section.prefetch_batches,
            "data_loader_workers": section.data_loader_workers,
            "skip": self.config.run.skips,
            "pin_memory": section.pin_memory,
            "labels": self.config.text.labels,
            "segment_ids": self.config.text.segment_ids,
            "deadline": self.config.run.deadline,
        }
        return Loader(data if data is not None else self.dataset(), **(settings | options))

    def train_settings(self) -> TrainSettings:
        from headrace.train import TrainSettings

        values = self.config.train.model_dump()
        values["threads"] = values["threads"] or 0
        return TrainSettings(**values, steps=self.config.run.steps, seed=self.config.run.seed)


@dataclass(frozen=True, slots=True)
class StreamJob:
    """The config of a stream job, which can make its dataset."""

    config: StreamsConfig
    base: Path | None = None
    """Where relative paths start; `run.base` of the config unless given."""

    def dataset(self, **options: Any) -> StreamMixingDataset:
        """Options are StreamMixingDataset's own and win over the config."""
        from headrace.runs.streams import open_dataset

        return open_dataset(self.config, self.base, **options)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Job | StreamJob:
    """The job that a TOML file describes.

    `path` is the file; relative paths in it are relative to its folder. `overrides` are options as on the command line: ["--train.lr", "3e-4"].
    ConfigError lists every mistake of both.
    """
    config = load_any_config(Path(path), overrides)
    if isinstance(config, RunConfig):
        return Job(config)
    if isinstance(config, StreamsConfig):
        return StreamJob(config)
    raise ConfigError(
        f"{path} describes an RL job, which has no loader: its batches come from rollouts. Start it with `headrace run {path}`"
    )
