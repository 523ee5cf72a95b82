"""`headrace env`: versions, processors, encoder and cache folder of this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

from headrace.errors import StorageError
from headrace.files import publish
from headrace.sources import cache_folder

_PACKAGES = (
    "headrace", "torch", "numpy", "numba", "pyarrow", "tokenizers", "fastokens", "gigatoken", "xxhash", "wandb", "tensorboard", "ray", "datasets",
)  # fmt: skip


def describe_machine() -> dict[str, dict[str, Any]]:
    """Versions, processors, memory, the encoder of text, the cache folder, and whether files can be published there."""
    from headrace.train import cpu_threads

    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "processors": os.cpu_count(),
            "usable": cpu_threads(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "cuda": _cuda(),
        },
        "encoder": _encoder(),
        "cache": _folder(cache_folder()),
        "ranks": {
            name: os.environ.get(name, "not set") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        },
    }


def _encoder() -> dict[str, str]:
    """The engine that proves itself for a small byte-level BPE made here, and why others were passed over."""
    from headrace.text import BpeTokenizer, train_bpe

    engine = BpeTokenizer(train_bpe(["a few words, and 12 numbers"], 300), name="of `headrace env`").engine
    used = f"{engine.name} {engine.version}"
    if engine.name != "tokenizers":
        used += ", proven equal to tokenizers"
    return {"byte-level BPE": used, "other": f"tokenizers {_version('tokenizers')}"} | (
        {"passed over": "; ".join(engine.passed_over)} if engine.passed_over else {}
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cuda() -> str:
    import torch

    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else "none"


def _folder(path: Path) -> dict[str, Any]:
    """Whether durable, exclusive publishing works there: link, fsync of file and folder."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path, prefix=".probe-") as probe:
            publish(Path(probe) / "probe", b"probe")
        works = "durable and exclusive"
    except (StorageError, OSError) as error:
        works = f"not possible ({error})"
    free = shutil.disk_usage(path).free if path.exists() else 0
    return {"folder": str(path), "free_gib": round(free / 2**30, 1), "publishing": works}
