"""Make the dataset, loader and trainer settings that a config describes.

job = headrace.load("run.toml")        the same objects that `headrace run` uses
for batch in job.loader(): ...         a text job
for batch in job.dataset(): ...        a stream job
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError
from headrace.loader import Loader, MixChange, TextDataset
from headrace.runs.config.loading import load_any_config
from headrace.runs.config.schema import RunConfig
from headrace.runs.config.streams import StreamsConfig
from headrace.sources import Source

if TYPE_CHECKING:
    from headrace.loader.streams import StreamMixingDataset
    from headrace.runs.spool_plan import SpoolData
    from headrace.train import TrainSettings


@dataclass(frozen=True, slots=True)
class Job:
    """The config of a text job, which can make its dataset and loader."""

    config: RunConfig

    def dataset(self, **options: Any) -> TextDataset:
        """The dataset of the config. Options are TextDataset's own and win over the config."""
        text, loader, task = self.config.text, self.config.loader, self.config.spool.task
        if self.config.spool.labelled:
            raise ConfigError(
                f'spool.task = "{task}" has labelled rows in place of packed text: fill a spool with `headrace provide CONFIG` and read it with '
                "headrace.DatasetConsumer"
            )
        settings: dict[str, Any] = {
            **text.model_dump(exclude={"labels", "segment_ids"}),
            "seed": self.config.run.seed,
            "lanes": loader.lanes,
            "exhausted": loader.exhausted,
            "mix_changes": [MixChange(c.step, c.weights) for c in self.config.mix.change],
            "base": Path(self.config.run.base),
        }
        sources = [Source(**section.model_dump()) for section in self.config.source]
        return TextDataset(sources, **(settings | options))

    def loader(self, data: TextDataset | SpoolData | None = None, **options: Any) -> Loader:
        """A loader over `data` (default: a new dataset). Options are Loader's own and win over the config."""
        settings: dict[str, Any] = {
            **self.config.loader.model_dump(exclude={"lanes", "exhausted"}),
            "skip": self.config.run.skips,
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

    def dataset(self, **options: Any) -> StreamMixingDataset:
        """Options are StreamMixingDataset's own and win over the config."""
        from headrace.runs.streams import open_dataset

        return open_dataset(self.config, **options)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Job | StreamJob:
    """The job that a TOML file describes. ConfigError lists every mistake.

    Args:
        path: The file. Relative paths in it start at its folder.
        overrides: Options as on the command line: ["--train.lr", "3e-4"].
    """
    config = load_any_config(Path(path), overrides)
    if isinstance(config, RunConfig):
        return Job(config)
    if isinstance(config, StreamsConfig):
        return StreamJob(config)
    raise ConfigError(
        f"{path} describes an RL job, which has no loader: its batches come from rollouts. Start it with `headrace run {path}`"
    )
