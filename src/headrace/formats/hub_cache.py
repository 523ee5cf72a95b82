"""The local cache of the Hugging Face hub, in which datasets and tokenizers are looked up. Nothing is downloaded."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Literal

from headrace.errors import FileCorrupt
from headrace.files import read_regular

_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


def hub_cache() -> Path:
    """Return the folder in which huggingface_hub keeps what it downloaded."""
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def is_repository(name: str) -> bool:
    """Return whether a text may be the name of a dataset or model: `name` or `org/name`."""
    return _REPOSITORY.fullmatch(name) is not None and name.strip(".") != ""


def cached_snapshots(kind: Literal["datasets", "models"], name: str) -> list[Path]:
    """Return the folders of a repository's revisions: that of refs/main alone, or all if it is not there."""
    folder = hub_cache() / f"{kind}--{name.replace('/', '--')}"
    if not is_repository(name) or not (folder / "snapshots").is_dir():
        return []
    with contextlib.suppress(OSError, UnicodeDecodeError, FileCorrupt):
        revision = read_regular(folder / "refs" / "main", 1 << 10, follow=True).decode().strip()
        main = folder / "snapshots" / revision
        if re.fullmatch(r"[\w.-]{1,80}", revision) and revision.strip(".") and main.is_dir():
            return [main]
    return sorted(path for path in (folder / "snapshots").iterdir() if path.is_dir())
