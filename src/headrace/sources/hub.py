"""Files of a dataset on the Hugging Face hub.

    hf:org/name?split=train&config=en        in the hub's cache on this machine, else through `datasets`
    hf:path/to/folder?split=test             a folder laid out like a dataset, or one that `save_to_disk` made

Local files (parquet, jsonl, arrow, txt) are read in place; `datasets` is not imported. The files of a split are found by the hub's rules:
`configs:` in the README's header; else names such as data/train-00000-of-00004.parquet; else the words train, test, validation and
their synonyms in file and folder names; else all files are train. Of shards numbered 0 to n - 1 all must be there.

A split that is not on this machine and lies on the hub as parquet is read from the hub by ranges (extra [s3]), at the commit that is newest
when the source is opened. Only the footers are read before the first batch. A copy that is downloaded later is the same data.

Datasets in other formats, datasets that need a token, and machines without obstore use a stream of `datasets` (extra [hf]). A stream cannot be
read twice with the same bytes. So its texts are written to the cache once, shard by shard, as jsonl, and read from there. One process
writes while others wait; after a kill the next process goes on at the first unfinished shard.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import orjson

from headrace.errors import ConfigError, DataError, FileCorrupt, StorageError, nearest
from headrace.files import publish, publish_json, read_json, read_regular, sync_folder
from headrace.formats.byte_file import first_line
from headrace.formats.compressed import PACKINGS
from headrace.formats.hub_cache import cached_snapshots, is_repository
from headrace.formats.object_store import fits
from headrace.metrics import Wait
from headrace.order import fingerprint_json
from headrace.runtime.locks import ExclusiveLock
from headrace.sources.matching import Found, named_files, pinned_objects
from headrace.sources.rows import field_of
from headrace.sources.spec import Source

_FORMATS = {
    ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".txt": "txt",
}  # fmt: skip
_NOT_DATA = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"})
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SHARDED = re.compile(r"data/(?P<split>\w+(?:\.\w+)*)-(?P<shard>\d{5})-of-(?P<of>\d{5})[^/]*")
_OF = re.compile(r"\A(?P<stem>.*)-(?P<shard>\d{5})-of-(?P<of>\d{5})(?P<rest>\.[^/]*)\Z")
_SAVED = re.compile(r"(data-\d{5}-of-\d{5}|dataset)\.arrow")
_MAX_README = 4 << 20
_PART_BYTES = 64 << 20
_LONGEST_WRITE = 86_400.0
"""Seconds that a process waits for another one that writes the same stream to the cache."""
_SEAL = "dataset.json"
_HUB_TIMEOUT = 30.0
_MAX_LISTING = 256 << 20


def find_dataset(
    source: Source, *, base: Path, cache: Path, what: str, columns: tuple[str, ...] | None = None
) -> tuple[Found, str, str]:
    """Return the files of a dataset's split, on this machine or on the hub, their scheme, and the key of their text.

    Args:
        source: The source, with the scheme `hf`.
        base: Folder in which a relative place begins.
        cache: Folder for the rows of a stream.
        what: Begins every error, such as "source 'hf:org/name'".
        columns: Columns of a stream that are kept; the text alone unless given.
    """
    place = source.place
    if source.split is not None and "[" in source.split:
        raise ConfigError(
            f"{what}: split {source.split!r} is a part of a split; name a whole one, and bound it with max_rows"
        )
    local = base / Path(place).expanduser()
    snapshot = local if local.is_dir() else _snapshot(place, what)
    if snapshot is not None and (found := _Layout.of_folder(snapshot, what).files_of(source.split, source.config)):
        follow = source.allow_symlinks or snapshot != local  # the files in the hub's cache are links
        scheme = _format(found, what)
        return named_files(snapshot, found, allow_symlinks=follow, what=what), scheme, source.text_key
    if snapshot is None and not is_repository(place):
        raise DataError(f"{what}: {local} is no folder, and {place!r} is no name of a dataset (org/name)")
    if not local.is_dir() and (on_hub := _parquet_on_hub(source, what)) is not None:
        return on_hub, "parquet", source.text_key
    folder = _frozen(source, str(local) if local.is_dir() else place, cache, what, columns)
    files = [path.name for path in folder.glob("*.jsonl")]
    return named_files(folder, files, allow_symlinks=False, what=what), "jsonl", "text"


# ---------------------------------------------------------------------------------------- files on this machine


def _snapshot(place: str, what: str) -> Path | None:
    """The dataset's folder in the hub's cache: that of refs/main, or the only revision; None if there is none."""
    present = cached_snapshots("datasets", place)
    if len(present) > 1:
        names = ", ".join(path.name[:12] for path in present[:5])
        raise DataError(
            f"{what}: {present[0].parent} holds {len(present)} revisions ({names}) and refs/main names none; name the folder"
        )
    return present[0] if present else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The splits and configurations of a dataset's files, by the rules of the hub."""

    root: Path | str
    """The folder, or the URL of a dataset on the hub."""
    what: str
    """Begins every error."""
    files: Sequence[str]
    """Paths of the files below the root, in bytewise order."""
    readme: str
    """Text of README.md; empty if there is none."""

    @classmethod
    def of_folder(cls, root: Path, what: str) -> _Layout:
        readme = ""
        with contextlib.suppress(OSError, FileCorrupt):
            readme = read_regular(root / "README.md", _MAX_README, follow=True).decode(errors="replace")
        return cls(root=root, what=what, files=sorted(_walk(root), key=os.fsencode), readme=readme)

    def files_of(self, split: str | None, config: str | None) -> tuple[str, ...]:
        """Return the paths of every shard of a split; none if no file is in a format that headrace reads."""
        data = [path for path in self.files if _format_of(path) is not None]
        if "dataset_dict.json" in self.files or "state.json" in self.files:
            splits = self._saved_to_disk(split, config)
        elif not data:
            return ()
        elif declared := self._declared():
            splits = self._configured(declared, config, data)
        elif config in (None, "default"):
            splits = _by_names(data)
        else:
            raise DataError(
                f"{self.what}: there is no configuration {config!r}: {self.root} has no README that declares any. Leave config "
                "out, or name the files, such as 'parquet:...'"
            )
        chosen = self._chosen(splits, split)
        _require_all_shards(chosen, self.root, self.what)
        return tuple(chosen)

    def _chosen(self, splits: dict[str, list[str]], split: str | None) -> list[str]:
        if split is None:
            split = "train" if "train" in splits or len(splits) != 1 else next(iter(splits))
        if split not in splits:
            names = ", ".join(nearest(split, splits)) or "none"
            raise DataError(
                f"{self.what}: {self.root} has no split {split!r}; it has {names}. Set split to one of them."
            )
        if not splits[split]:
            raise DataError(f"{self.what}: no file in {self.root} belongs to split {split!r}, which it declares")
        return splits[split]

    def _declared(self) -> list[dict[str, Any]]:
        """The entries of `configs:` in the README's header."""
        header = re.match(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", self.readme, re.DOTALL)
        if header is None or "configs:" not in header[1]:
            return []
        import yaml

        try:
            value = yaml.safe_load(header[1])
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise DataError(
                f"{self.what}: the header of {self.root}/README.md is no YAML ({first_line(error)})"
            ) from error
        configs = value.get("configs") if isinstance(value, dict) else None
        return [entry for entry in configs if isinstance(entry, dict)] if isinstance(configs, list) else []

    def _configured(self, declared: list[dict[str, Any]], config: str | None, data: list[str]) -> dict[str, list[str]]:
        names = [str(entry.get("config_name", "default")) for entry in declared]
        if config is None:
            default = [
                n for n, entry in zip(names, declared, strict=True) if entry.get("default") is True or n == "default"
            ]
            if not default and len(names) > 1:
                raise DataError(
                    f"{self.what}: the dataset has several configurations; set config to one of {', '.join(names)}"
                )
            config = default[0] if default else names[0]
        if config not in names:
            raise DataError(
                f"{self.what}: there is no configuration {config!r}; there are {', '.join(nearest(config, names))}"
            )
        entry = declared[names.index(config)]
        below = str(entry.get("data_dir") or "").strip("/")
        inside = [path for path in data if not below or path.startswith(f"{below}/")]
        if "data_files" not in entry:
            bare = {path.removeprefix(f"{below}/") if below else path: path for path in inside}
            return {name: [bare[path] for path in paths] for name, paths in _by_names(list(bare)).items()}
        splits: dict[str, list[str]] = {}
        for split, patterns in _data_files(entry["data_files"]):
            taken = splits.setdefault(split, [])
            for pattern in patterns:
                parts = [part for part in f"{below}/{pattern}".split("/") if part not in ("", ".")]
                folder = "/".join(parts) + "/"
                taken += [
                    path
                    for path in inside
                    if path not in taken and (fits(path.split("/"), parts) or path.startswith(folder))
                ]
        return splits

    def _saved_to_disk(self, split: str | None, config: str | None) -> dict[str, list[str]]:
        """The arrow files that `save_to_disk` of `datasets` wrote, by split: those beside a state.json."""
        if config is not None:
            raise ConfigError(f"{self.what}: a folder that save_to_disk made has no configurations; leave config out")
        folders = [path.rpartition("/")[0] for path in self.files if path.rpartition("/")[2] == "state.json"]
        splits: dict[str, list[str]] = {(folder or split or "train"): [] for folder in folders}
        for path in self.files:
            folder, _, name = path.rpartition("/")
            if folder in folders and name == "indices.arrow":
                raise DataError(
                    f"{self.what}: {self.root}/{folder} is a selection of rows that is stored as indices. Save it again after "
                    "flatten_indices()."
                )
            if folder in folders and _SAVED.fullmatch(name):
                splits[folder or split or "train"].append(path)
        return splits


def _walk(root: Path) -> Iterator[str]:
    """Files below a folder, without names that begin with a dot or two underscores: the hub leaves those out."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        below = Path(folder).relative_to(root)
        yield from ((below / name).as_posix() for name in names if not name.startswith((".", "__")))


def _format_of(path: str) -> str | None:
    file = PurePosixPath(path)
    if file.name in _NOT_DATA:
        return None
    if file.suffix in PACKINGS:
        packed = _FORMATS.get(PurePosixPath(file.stem).suffix)
        return packed if packed in ("jsonl", "txt") else None
    return _FORMATS.get(file.suffix)


def _format(files: Sequence[str], what: str) -> str:
    """The one format of a split's files."""
    if unknown := [path for path in files if _format_of(path) is None]:
        raise DataError(f"{what}: {unknown[0]!r} belongs to the split and is in no format that is read")
    formats = sorted({str(_format_of(path)) for path in files})
    if len(formats) > 1:
        raise DataError(
            f"{what}: the split has files of several formats ({', '.join(formats)}); name the files to read, such as "
            f"'{formats[0]}:...'"
        )
    return formats[0]


def _by_names(files: Sequence[str]) -> dict[str, list[str]]:
    """Splits and their files, found by names alone."""
    splits: dict[str, list[str]] = {}
    for path in files:
        match = _SHARDED.fullmatch(path)
        if match is not None:
            splits.setdefault(match["split"], []).append(path)
    if splits:
        return splits
    for split, words in _KEYWORDS.items():
        # A word ends at a slash, a digit, one of -._ and a blank, or the end of the path.
        pattern = re.compile(rf"(?:\A|[-._ 0-9/])(?:{'|'.join(words)})(?:[-._ 0-9/]|\Z)")
        taken = [path for path in files if pattern.search(path)]
        if taken:
            splits[split] = taken
    return splits or {"train": list(files)}


def _data_files(value: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield (split, patterns) for each of the forms that `data_files` may have in a README."""
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        pairs = [(entry.get("split", "train"), entry.get("path")) for entry in value if isinstance(entry, dict)]
    else:
        pairs = [("train", value)]
    for split, patterns in pairs:
        listed = patterns if isinstance(patterns, list) else [patterns]
        yield str(split), [pattern for pattern in listed if isinstance(pattern, str)]


def _require_all_shards(files: Iterable[str], root: Path | str, what: str) -> None:
    """Refuse a split of which numbered shards are missing: a snapshot may hold a part of the dataset only."""
    present: dict[tuple[str, str, int], set[int]] = {}
    for path in files:
        match = _OF.match(path)
        if match is not None:
            present.setdefault(
                (match["stem"], re.sub(r"-[0-9a-f]{16}", "", match["rest"]), int(match["of"])), set()
            ).add(int(match["shard"]))
    for (stem, rest, of), shards in present.items():
        missing = sorted(set(range(of)) - shards)
        if missing:
            raise DataError(
                f"{what}: {len(missing)} of {of} shards are not in {root}, the first is {stem}-{missing[0]:05}-of-{of:05}{rest}. "
                "Download the rest (hf download --repo-type dataset), or name the files to read."
            )


# ------------------------------------------------------------------------------------------------- on the hub


def _parquet_on_hub(source: Source, what: str) -> Found | None:
    """The split's parquet files on the hub; None if it has none there, or if they cannot be read by ranges."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return None
    if importlib.util.find_spec("obstore") is None:
        return None
    place, endpoint = source.place, os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    # An error that passes stops the run: a rank that used `datasets` instead would have another order than the others.
    try:
        with Wait("source.hub", hidden=True):
            about = json.loads(_fetched(f"{endpoint}/api/datasets/{place}?blobs=true", _MAX_LISTING))
            commit = str(about["sha"])
            root = f"{endpoint}/datasets/{place}/resolve/{commit}"
            sizes = {str(entry["rfilename"]): entry.get("size") for entry in about["siblings"]}
            readme = _fetched(f"{root}/README.md", _MAX_README).decode(errors="replace") if "README.md" in sizes else ""
    except urllib.error.HTTPError as error:
        with error:
            if error.code < 500 and error.code not in (408, 429):
                return None  # a token is needed, or there is no such dataset: `datasets` says which
        raise _unreachable(place, what, error) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreachable(place, what, error) from error
    visible = sorted(name for name in sizes if not any(part.startswith((".", "__")) for part in name.split("/")))
    if "dataset_dict.json" in visible or "state.json" in visible:
        return None
    files = _Layout(root=root, what=what, files=visible, readme=readme).files_of(source.split, source.config)
    if not files or _format(files, what) != "parquet" or not all(isinstance(sizes[path], int) for path in files):
        return None
    return pinned_objects(root, {path: sizes[path] for path in files}, version=commit)


def _fetched(url: str, most: int) -> bytes:
    with urllib.request.urlopen(url, timeout=_HUB_TIMEOUT) as answer:
        data = answer.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{url} has more than {most:,} bytes")
    return data


# ------------------------------------------------------------------------------------- through `datasets`


def _frozen(source: Source, place: str, cache: Path, what: str, columns: tuple[str, ...] | None) -> Path:
    """The folder of jsonl files with a stream's texts, or these columns of it. It is written now if this is the first use."""
    split, config, text_key = source.split or "train", source.config, source.text_key
    asked = {"place": place, "split": split, "config": config, "text_key": text_key, "max_rows": source.max_rows}
    key = fingerprint_json(asked if columns is None else asked | {"columns": list(columns)})
    name = re.sub(r"[^\w.-]+", "-", place).strip("-.")[-60:]
    folder = cache / "hf" / f"{name}-{key}"
    if (folder / _SEAL).is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = ExclusiveLock.acquire(
            folder.with_name(folder.name + ".lock"),
            in_use=f"{folder} is being written by",
            advice="wait until it is done, or end that process, and run again",
            inside=folder.parent,
            patience=_LONGEST_WRITE,
            wait_name="source.hf.lock",
        )
        try:
            if not (folder / _SEAL).is_file():
                stream = _stream(place, split, config, what)
                kept = {"text": text_key} if columns is None else {column: column for column in columns}
                _write(stream, folder, place, kept, source.max_rows, what)
        finally:
            lock.release()
    except OSError as error:
        raise StorageError(
            f"{what}: could not keep the dataset in {folder}: {error.strerror or error}. Make room there, or choose a folder with "
            "cache = ... in the source."
        ) from error
    return folder


def _stream(place: str, split: str, config: str | None, what: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{what}: the files of {place!r} are not on this machine in a format that is read directly (parquet, jsonl, arrow, "
            "txt), and datasets, which could stream them, is not installed: pip install 'headrace[hf]'"
        ) from error
    try:
        return datasets.load_dataset(place, name=config, split=split, streaming=True)
    except Exception as error:  # datasets, fsspec and the HTTP client each have errors of their own
        raise _unreachable(place, what, error) from error


def _unreachable(place: str, what: str, error: BaseException) -> DataError:
    return DataError(
        f"{what}: datasets could not read {place!r} ({type(error).__name__}: {first_line(error)}). Check the name, the split, the "
        f"config and the network; or fetch it where there is one (hf download --repo-type dataset {place}) and run again."
    )


def _write(stream: Any, folder: Path, place: str, kept: Mapping[str, str], max_rows: int | None, what: str) -> None:
    """Write a stream shard by shard into a folder beside `folder`, each finished shard marked; then seal and rename it.

    `kept`: by name in the jsonl, the field of a row.
    """
    aside = folder.with_name(folder.name + ".partial")
    aside.mkdir(exist_ok=True)
    shards = int(getattr(stream, "num_shards", None) or getattr(stream, "n_shards", 1) or 1)
    total = 0
    for shard in range(shards):
        done = aside / f"{shard:05}.done"
        if done.is_file():
            total += int(read_json(done)["rows"])
        else:
            for left in aside.glob(f"{shard:05}-*.jsonl"):
                left.unlink()
            part = stream.shard(num_shards=shards, index=shard) if shards > 1 else stream
            lines = _lines(part, place, kept, None if max_rows is None else max_rows - total, what)
            rows = _write_shard(lines, aside, shard)
            publish_json(done, {"rows": rows})
            total += rows
        if max_rows is not None and total >= max_rows:
            break
    for done in aside.glob("*.done"):
        done.unlink()
    publish_json(aside / _SEAL, {"rows": total, "shards": shards}, replace=True)
    if folder.exists():  # a folder without a seal is not complete
        shutil.rmtree(folder)
    aside.rename(folder)
    sync_folder(folder.parent)


def _write_shard(lines: Iterator[bytes], aside: Path, shard: int) -> int:
    """Publish lines as files of 64 MiB; return how many lines there were."""
    rows = number = 0
    for first in lines:
        part, size = [first], len(first)
        while size < _PART_BYTES and (line := next(lines, None)) is not None:
            part.append(line)
            size += len(line)
        publish(aside / f"{shard:05}-{number:04}.jsonl", part)
        rows, number = rows + len(part), number + 1
    return rows


def _lines(stream: Any, place: str, kept: Mapping[str, str], most: int | None, what: str) -> Iterator[bytes]:
    """Yield the kept fields of the first `most` rows of a stream, each as a line of JSON."""
    rows = iter(stream)
    count = 0
    while most is None or count < most:
        try:
            with Wait("source.hf", hidden=True):
                row = next(rows, None)
        except Exception as error:  # datasets, fsspec and the HTTP client each have errors of their own
            raise _unreachable(place, what, error) from error
        if row is None:
            break
        try:
            values = {name: field_of(row, key) for name, key in kept.items()}
        except KeyError as error:
            raise DataError(
                f"{what}: a row has {error.args[0]}. Set text_key to the field that holds the text, and label_key to the field of "
                "the label."
            ) from error
        yield orjson.dumps(values, default=str) + b"\n"
        count += 1
    if hasattr(rows, "close"):
        rows.close()  # a generator that is left in the middle keeps its files open
