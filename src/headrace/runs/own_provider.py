"""The provider that a run starts for its own spool, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Self

from headrace.errors import WorkerDied
from headrace.files import open_inside, publish, read_tail
from headrace.metrics import Wait
from headrace.runs.config.schema import RunConfig
from headrace.spool.folder import SpoolFolder


class OwnProvider:
    """A provider in a process of its own while the body runs, unless one is running already.

    Another provider may start at the same moment, such as one that is restarted after a crash. The spool's lock admits one of
    the two. If that is the foreign provider, the run's own provider ends and the run reads the files of the foreign one.
    """

    def __init__(self, config: RunConfig, log: Path) -> None:
        self._config, self._log = config, log
        self._folder = SpoolFolder(Path(config.run.base, config.spool_dir).resolve())
        self._child: subprocess.Popen[bytes] | None = None
        self.sentence = ""
        """Which process fills the spool, for people."""

    def __enter__(self) -> Self:
        config, folder = self._config, self._folder.path
        holder = self._folder.provider_at_work()
        if holder is not None or not config.spool.provider:
            self.sentence = f"the spool {config.spool_dir} is filled by {holder or 'others'}"
            return self
        copy = self._log.with_name("provide.toml")
        publish(copy, config.to_toml().encode(), replace=True, durable=False)
        command = [sys.executable, "-m", "headrace", "provide", str(copy.resolve()), "--spool.dir", str(folder)]
        with open(open_inside(self._log.parent, self._log.name), "wb") as log:
            log.truncate()
            # Outside the trainer's process group: Ctrl-C stops the run, which saves and then ends its provider.
            self._child = subprocess.Popen(
                [*command, "--quiet", "--until-eof"],
                cwd=config.run.base or None,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.sentence = f"a provider fills {config.spool_dir} (process {self._child.pid}, log {self._log})"
        return self

    def check(self) -> None:
        """WorkerDied if the provider ended by itself in a way that leaves the trainer waiting."""
        code = self._child.poll() if self._child is not None else None
        if code:
            if self._folder.provider_at_work() is not None:  # ours was refused, or is gone and has a successor
                self._child = None
                return
            lines = [line for raw in read_tail(self._log) if (line := raw.decode(errors="replace").strip())]
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            last = f": {lines[-1]}" if lines else ""
            raise WorkerDied(
                f"the provider of the spool {self._config.spool_dir} {how}{last}. The run can be resumed once that is mended"
            )

    def __exit__(self, *_: object) -> None:
        if self._child is None:
            return
        self._child.terminate()
        if self._child.stdin is not None:
            self._child.stdin.close()
        with Wait("spool.provider_ends", deadline=30.0):
            try:
                self._child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
