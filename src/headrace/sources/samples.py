"""Built-in sample sources: text to train on without data of one's own.

    sample:prose    the language reference's topics and the docstrings of the standard library    ~3 MB
    sample:code     the standard library's source, cut into documents at top-level definitions     ~6 MB

A corpus is made from the installed Python on first use (1 to 2 s), without importing or running any of it, and kept in the cache
folder as four jsonl shards, so that later runs and resumes see the same bytes. The folder is written under another name and renamed. If two
processes do so at once, the first wins, and both read its files.
"""

from __future__ import annotations

import ast
import gc
import io
import itertools
import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import orjson

from headrace.errors import DataChanged, FileCorrupt, StorageError
from headrace.files import publish, publish_json, read_json, sync_folder, temporary_name

_SHARDS = 4
_LEAST, _MOST = 300, 8_000
_LEAST_DOCUMENT = 60
_MOST_BYTES = 6_000_000
_LEFT_OUT = frozenset({
    "test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "turtledemo", "ensurepip", "pydoc_data",
})  # fmt: skip
_SEAL = "sample.json"


def sample_folder(name: str, cache: Path) -> Path:
    """Return the folder of a corpus. It is made now if this is its first use."""
    folder = cache / "samples" / f"{name}-v1-py{sys.version_info.major}.{sys.version_info.minor}"
    if not (folder / _SEAL).is_file():
        _build(name, folder)
    _require_whole(folder)
    return folder


def _build(name: str, folder: Path) -> None:
    """Write the corpus under another name, then rename it. If another process was first, its folder is kept."""
    aside = folder.parent / temporary_name()
    try:
        aside.mkdir(parents=True)
        shards: list[list[bytes]] = [[] for _ in range(_SHARDS)]
        for index, (text, origin) in enumerate(_documents(name)):
            shards[index % _SHARDS].append(orjson.dumps({"text": text, "origin": origin}) + b"\n")
        seal = {}
        for index, lines in enumerate(shards):
            path = aside / f"{name}-{index}.jsonl"
            publish(path, b"".join(lines))
            path.chmod(0o444)
            seal[path.name] = {"size": path.stat().st_size, "rows": len(lines)}
        publish_json(aside / _SEAL, {"made_from": f"Python {sys.version.split()[0]}", "files": seal})
        try:
            aside.rename(folder)
        except OSError:
            if not (folder / _SEAL).is_file():
                raise
        sync_folder(folder.parent)
    except OSError as error:
        raise StorageError(
            f"could not make the sample corpus in {folder}: {error.strerror or error}. Point HEADRACE_CACHE at a folder "
            "that can be written."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _require_whole(folder: Path) -> None:
    """Check that the sealed shards are there at their sizes. Their content is checked like that of any source."""
    try:
        sealed = read_json(folder / _SEAL)["files"]
        whole = all((folder / name).stat().st_size == entry["size"] for name, entry in sealed.items())
    except (OSError, FileCorrupt, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise DataChanged(
            f"the sample corpus in {folder} was changed. Remove the folder and run again to make it anew; a "
            "run that was trained on it cannot be resumed exactly then."
        )


def _documents(name: str) -> list[tuple[str, str]]:
    collecting = gc.isenabled()
    gc.disable()  # a syntax tree is a million small objects without cycles: the collector makes parsing four times as slow
    try:
        return _deduplicated(_prose() if name == "prose" else _code(), _MOST_BYTES)
    finally:
        if collecting:
            gc.enable()


def _deduplicated(documents: Iterator[tuple[str, str]], most_bytes: int) -> list[tuple[str, str]]:
    """Each text that says something, once, first come, up to a size."""
    seen: set[str] = set()
    kept: list[tuple[str, str]] = []
    total = 0
    for text, origin in documents:
        if text in seen or len(text) < _LEAST_DOCUMENT:
            continue
        total += len(text.encode("utf-8"))
        if total > most_bytes:
            break
        seen.add(text)
        kept.append((text, origin))
    return kept


def _prose() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        for number, text in enumerate(_pieces(topics[topic].strip().split("\n\n"), "\n\n")):
            yield text, f"topics/{topic}#{number}"
    for path, relative in _modules():
        _, tree = _parsed(path)
        for name, text in _docstrings(tree, "module"):
            yield text, f"{relative}:{name}"


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """The docstrings of a module, its classes and functions, outermost first. Only statements are walked, not expressions."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text and _is_text(text):
            yield name, text
    for block in ("body", "orelse", "finalbody", "handlers"):
        for inner in getattr(node, block, ()):
            if isinstance(inner, ast.stmt | ast.excepthandler):
                yield from _docstrings(inner, getattr(inner, "name", None) or name)


def _code() -> Iterator[tuple[str, str]]:
    """Every seventh module, seven times over: the cap then takes a part of all packages, not the head of the alphabet."""
    modules = list(_modules())
    for path, relative in (modules[i] for start in range(7) for i in range(start, len(modules), 7)):
        source, tree = _parsed(path)
        lines = io.StringIO(source, newline="\n").readlines()  # as the parser counts them: a form feed ends no line
        firsts = [
            min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1 for node in tree.body
        ]
        cuts = sorted({0, *firsts[1:], len(lines)})
        parts = ["".join(lines[a:b]) for a, b in itertools.pairwise(cuts)]
        for number, text in enumerate(_pieces(parts, "")):
            yield text, f"{relative}#{number}"


def _pieces(parts: list[str], glue: str) -> Iterator[str]:
    """Parts joined in order into documents of 300 characters or more; none passes 8,000."""
    held: list[str] = []
    size = 0
    for part in parts:
        if held and (size + len(part) > _MOST or size >= _LEAST + (len(held) * 977 + size) % 3_000):
            yield glue.join(held).strip("\n")
            held, size = [], 0
        while len(part) > _MOST:  # one definition longer than a document: cut at a line end
            cut = part.rfind("\n", 0, _MOST) + 1 or _MOST
            yield part[:cut].strip("\n")
            part = part[cut:]
        held.append(part)
        size += len(part)
    if held and any(part.strip() for part in held):
        yield glue.join(held).strip("\n")


def _modules() -> Iterator[tuple[Path, str]]:
    """(path, path below the library) of the standard library's modules in bytewise order."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    for relative in sorted(found, key=os.fsencode):
        if not relative.rpartition("/")[2].startswith("test_"):
            yield root / relative, relative


def _parsed(path: Path) -> tuple[str, ast.Module]:
    """A module's source and tree, read and never run; nothing for modules in other encodings or for other Pythons."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old modules are not the reader's concern
            return (source, ast.parse(source)) if _is_text(source) else ("", ast.parse(""))
    except (OSError, ValueError, SyntaxError):
        return "", ast.parse("")


def _is_text(text: str) -> bool:
    """No half surrogates: JSON could not carry them."""
    return text.isascii() or not any(0xD800 <= ord(c) <= 0xDFFF for c in text)
