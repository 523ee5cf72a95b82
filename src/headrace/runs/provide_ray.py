"""Providers on a Ray cluster: one actor for each part of a spool.

    headrace provide run.toml --spool.parts 8 --engine ray

Ray says where an actor runs and starts it again elsewhere when its machine is gone. What an actor makes follows from the
spool alone: it takes a part that is free, continues after that part's last file, and makes the same bytes on every machine. The
spool's folder, the sources and the tokenizer have to be reachable under the same paths everywhere.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from headrace.errors import ConfigError, HeadraceError, WorkerDied
from headrace.metrics import Wait
from headrace.runs.config.schema import RunConfig
from headrace.runs.job import Job
from headrace.runs.provide import provide_text, provider_of
from headrace.runtime.signals import stop_signals


def provide_on_ray(
    config: RunConfig,
    *,
    max_files: int | None = None,
    report: Callable[[str], None] = lambda _: None,
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Fill the spool of a config by one actor for each part, until stopped; the number of files made.

    The cluster is that of RAY_ADDRESS, or the one this process is part of, or a new one on this machine.

    Args:
        config: The run and its [spool].
        max_files: Stop each part after this many files.
        report: Takes sentences about what happens.
        ready: Called once the spool is made and no other provider holds it.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError("--engine ray needs Ray: install it with `pip install headrace[ray]`") from error
    # Meta and folders are made here, so that actors only join, and a wrong config fails before an actor is started.
    opener = provider_of(Job(config))
    opener.open(("train",))
    opener.close()
    ready()
    started, address = not ray.is_initialized(), os.environ.get("RAY_ADDRESS")
    if started:
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False)
        except ConnectionError as error:
            raise ConfigError(f"there is no Ray cluster at {address} (RAY_ADDRESS): {error}") from error

    class Provider:
        """One part's producer, wherever Ray puts it."""

        def fill(self, config: RunConfig, max_files: int | None) -> int:
            return provide_text(config, join=True, take=1, max_files=max_files)

    remote = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)(Provider)
    stopping = []
    try:
        with stop_signals(stopping.append):
            actors = [remote.remote() for _ in range(config.spool.parts)]
            waiting = [actor.fill.remote(config, max_files) for actor in actors]
            report(f"{len(actors)} provider actors on {len(ray.nodes())} node{'s' if len(ray.nodes()) > 1 else ''}")
            made = 0
            while waiting and not stopping:
                with Wait("fleet.actors", deadline=60.0):
                    done, waiting = ray.wait(waiting, num_returns=1, timeout=0.5)
                for result in done:
                    try:
                        made += ray.get(result)
                    except ray.exceptions.RayTaskError as error:
                        cause = error.cause if isinstance(getattr(error, "cause", None), HeadraceError) else None
                        raise cause or WorkerDied(
                            f"a provider actor failed: {str(error).strip().splitlines()[-1]}"
                        ) from error
            return made
    finally:
        if started:
            ray.shutdown()
