"""The folder of a run: its files, its lock, and its config.

    runs/quickstart/
      config.toml         every key with its value
      run.json            config hash, versions, where relative paths start
      journal.jsonl       facts, appended: started, resumed, saved, stopped, accepted
      metrics.jsonl       one line an interval, reduced over ranks
      digests.jsonl       the digest of every step, summed over ranks
      flight.jsonl        which source and window every sample came from (headrace step, find, diff)
      records/            a content hash of every chunk that was read
      checkpoints/        two generations, checksummed
      summary.json        the final state; written last
      run.lock            locked by the process that writes; the kernel releases it when that process dies

No symbolic link inside the folder is followed when a file is written: a run changes nothing outside it.
The folder is claimed before anything heavy is imported, so a run that is killed in its first second can be resumed too.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, FileCorrupt
from headrace.files import decode_json, make_inside, publish, publish_json, read_regular, sweep_temporaries
from headrace.runs.config.base import JobConfig
from headrace.runs.config.loading import load_any_config
from headrace.runs.config.schema import RunConfig
from headrace.runtime.locks import ExclusiveLock

_MAX_JSON = 16 << 20


class RunFolder:
    """One run's folder. Made by `create` or `reopen`; every rank holds one, rank 0 writes."""

    def __init__(self, path: Path, config: JobConfig, about: Mapping[str, Any]) -> None:
        self.path = path
        self.config = config
        self.about = dict(about)
        self.opened = time.perf_counter()
        self._lock: ExclusiveLock | None = None

    @classmethod
    def create(cls, config: JobConfig, *, version: str) -> RunFolder:
        """Claim the folder of a new run. A folder that holds a run already is refused."""
        path = Path(config.run.dir)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"run.dir {path} is a file: give a folder with --run.dir")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run.dir {path} cannot be made: {error.strerror or error}. Give another with --run.dir"
            ) from error
        about = {
            "config_hash": config.hash,
            "base": config.run.base or os.getcwd(),
            "headrace": version,
            "python": platform.python_version(),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        folder = cls(path, config, about)
        folder.lock()
        try:
            if (path / "config.toml").exists() and any((path / "checkpoints").glob("step-*")):
                raise ConfigError(
                    f"{path} already holds a run: continue it with `headrace run --resume {path}`, or give this one another "
                    "folder with --run.dir"
                )
            # Hashes of a run that never saved a step: its files may have been repaired since.
            shutil.rmtree(folder.records, ignore_errors=True)
            publish_json(path / "run.json", about, replace=True)
            folder.keep_config()  # last: from here on the folder is a run
        except BaseException:
            folder.release()
            raise
        return folder

    def keep_config(self) -> None:
        """Write config.toml, overrides of a resume included. `run.stop_after` holds for one process only and is left out."""
        lasting = self.config.model_copy(update={"run": self.config.run.model_copy(update={"stop_after": None})})
        publish(self.path / "config.toml", lasting.to_toml().encode(), replace=True)

    @classmethod
    def reopen(cls, path: Path, overrides: tuple[str, ...] = ()) -> RunFolder:
        """Open the folder of an existing run, with its own config and `overrides`, which are as on a command line."""
        if not path.is_dir():
            raise ConfigError(f"there is no run folder {path}: give the --run.dir of a run that was started")
        if not (path / "config.toml").is_file():
            raise ConfigError(
                f"{path} holds no run (it has no config.toml): it was stopped before it began. Start it again with `headrace "
                f"run CONFIG --run.dir {path}`"
            )
        if any(o.removeprefix("--").partition("=")[0] == "run.dir" for o in overrides):
            raise ConfigError(
                f"--run.dir cannot be changed at a resume: {path} is the run's folder. Copy it first, or leave that out"
            )
        about = read_json(path / "run.json")
        kept = path / "config.toml"
        config = load_any_config(
            kept,
            (*_lines_of_old_txt(kept), *overrides, "--run.dir", str(path)),
            env={},
            base=Path(str(about.get("base", "."))),
        )
        return cls(path, config, about)

    def lock(self) -> None:
        """Lock the folder for writing. If another process holds the lock, the error names it."""
        in_use, advice = f"{self.path} is being written by", "stop that run first, or wait for it"
        self._lock = ExclusiveLock.acquire(self.path / "run.lock", in_use=in_use, advice=advice, inside=self.path)
        sweep_temporaries(self.path)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def text_config(self) -> RunConfig:
        """The config of a text run; another kind of run is refused."""
        if not isinstance(self.config, RunConfig):
            raise ConfigError(f"{self.path} holds a run of kind {self.config.kind!r}; this works on text runs only")
        return self.config

    @property
    def base(self) -> Path:
        """Where the run's relative paths start."""
        return Path(self.config.run.base or str(self.about.get("base", ".")))

    @property
    def records(self) -> Path:
        return self.path / "records"

    def make_folder(self, name: str) -> Path:
        """A folder inside the run's folder, made if it is missing. A symbolic link in its place is refused: a run writes nothing outside."""
        return make_inside(self.path, name)

    def finish(self, summary: Mapping[str, Any]) -> None:
        publish_json(self.path / "summary.json", summary, replace=True)


def _lines_of_old_txt(config: Path) -> list[str]:
    """Overrides that make the txt sources of a run of version 0.1 read lines: that version had no `split`, and a line was a document."""
    try:
        sources = tomllib.loads(read_regular(config, _MAX_JSON).decode())["source"]
        specs = [(str(source["spec"]), "split" in source) for source in sources]
    except (OSError, FileCorrupt, ValueError, KeyError, TypeError):
        return []  # loading the config reports the problem
    found = [i for i, (spec, said) in enumerate(specs) if spec.startswith("txt:") and not said]
    return [word for i in found for word in (f"--source.{i}.split", "line")]


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = decode_json(read_regular(path, _MAX_JSON), path)
    except FileNotFoundError:
        raise FileCorrupt(f"{path} is missing: the folder is not a whole run") from None
    if not isinstance(value, dict):
        raise FileCorrupt(f"{path} holds a {type(value).__name__}, expected an object")
    return value
