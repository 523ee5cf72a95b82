"""The reference pages of the site, generated from the package: public names, config keys, metrics, commands.

MkDocs loads this file as a hook (mkdocs.yml). The functions that return a page need no MkDocs, so tests call them directly.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

GROUPS = {
    "Text": ("TextDataset", "Source", "MixChange", "Loader", "merge_states"),
    "Prepared tokens": ("PreparedDataset", "PreparedLoader"),
    "Runs in Python": ("load", "Job"),
    "Adapters": ("TorchDataset", "attach_to_trainer", "global_token_mean"),
    "Spool": ("DataProviderBase", "DatasetConsumer"),
    "Streams": ("StreamMixingDataset", "DataStatsCollector", "extra_metrics"),
    "Order": ("Cursor", "Digest"),
    "Metrics": ("MetricSpec", "Reducer", "Reduction", "Wait", "phase"),
    "Errors": (
        "HeadraceError", "ConfigError", "DataError", "DataChanged", "TokenizerError", "CursorMismatch", "FileCorrupt", "StorageError",
        "WorkerDied", "EndOfData", "DeadlineExceeded",
    ),
}  # fmt: skip
"""Where each public name of `headrace` stands on the API page."""
SETTINGS = (
    "headrace.settings.TextSettings",
    "headrace.settings.LoaderSettings",
    "headrace.spool.settings.ProviderSettings",
    "headrace.spool.settings.ConsumerSettings",
)
"""Classes that explain the arguments of public names."""
PACKAGES = ("ledger", "reduce", "rollouts", "testing")
"""Public packages, a page each."""
GUIDES = (
    "text",
    "sources",
    "prepared",
    "integrations",
    "spool",
    "streams",
    "ledger",
    "rl",
    "rollouts",
    "gram",
    "observability",
    "testing",
)
"""The order of the guides in the navigation."""


# ---------------------------------------------------------------------------------------------- public names


def api_page() -> str:
    """Every public name of `headrace`, grouped; the packages have pages of their own."""
    parts = [
        "# Python API\n",
        "`import headrace as hr`. Packages: " + ", ".join(f"[`hr.{p}`]({p}.md)" for p in PACKAGES) + ".\n",
    ]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [f"::: headrace.{name}\n    options:\n      heading_level: 3\n" for name in names]
    parts.append("## Settings\n")
    parts += [f"::: {name}\n    options:\n      heading_level: 3\n" for name in SETTINGS]
    return "\n".join(parts)


def package_page(package: str) -> str:
    """Every public name of one package."""
    module = importlib.import_module(f"headrace.{package}")
    parts = [f"# headrace.{package}\n", _code_block(inspect.getdoc(module) or "")]
    for name in module.__all__:
        if isinstance(getattr(module, name), (type, types.FunctionType)):
            parts.append(f"::: headrace.{package}.{name}\n    options:\n      heading_level: 2\n")
        else:
            parts.append(f"## `{name}`\n\n`{_short(repr(getattr(module, name)))}`\n")
    return "\n".join(parts)


def _code_block(doc: str) -> str:
    return f"```text\n{doc}\n```\n"


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


# ----------------------------------------------------------------------------------------------- config keys


def config_page() -> str:
    """Every table and key of a run's TOML file."""
    parts = [
        "# Config keys\n",
        "A run is a TOML file. On the command line a key is `--table.key VALUE`, and of the n-th source `--source.n.key VALUE`, counted\n"
        "from 0. The tables of a file say which kind of run it is. `headrace check` reports every mistake at once.\n",
    ]
    for root in config_roots():
        parts += [f"## {root.__name__.removesuffix('Config')} config\n", " ".join((root.__doc__ or "").split()), ""]
        for name, model in _tables(root):
            parts += [
                f"### {name}\n",
                _sentence(model.__doc__),
                "",
                "| key | type | default | meaning |",
                "|---|---|---|---|",
            ]
            said = _attribute_docs(model)
            parts += [
                f"| `{key}` | {_type(field.annotation, field.metadata)} | {_default(field)} | {_cell(said.get(key, ''))} |"
                for key, field in model.model_fields.items()
                if not _nested(field.annotation)
            ]
            parts.append("")
    return "\n".join(parts)


def config_roots() -> list[Any]:
    """The models that a whole TOML file is checked against: one for each kind of run."""
    from pydantic import BaseModel

    import headrace.runs.config as package

    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, BaseModel)
        and hasattr(value, "kind")
        and value.__module__ == module.__name__
    ]


def _tables(root: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in root.model_fields.items():
        model, many = _nested(field.annotation) or (None, False)
        if model is not None:
            table = f"{prefix}{name}"
            if any(not _nested(f.annotation) for f in model.model_fields.values()):
                yield (f"[[{table}]]" if many else f"[{table}]"), model
            yield from _tables(model, f"{table}.")


def _nested(annotation: Any) -> tuple[Any, bool] | None:
    """The model behind an annotation, and whether there are several; None for plain values."""
    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    arguments = [a for a in get_args(annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
    return (arguments[0], get_origin(annotation) is tuple) if arguments else None


def _attribute_docs(model: Any) -> dict[str, str]:
    """The string below each field of a class, which Python itself does not keep."""
    source = "".join(inspect.getsource(c) for c in reversed(model.__mro__) if c.__module__.startswith("headrace."))
    pattern = r'^    (\w+): (?:[^\n]*\n(?:    [^\n]*\n)*?)    """(.*?)"""'
    found = {}
    for block in re.split(r"^(?=    \w+: )", source, flags=re.MULTILINE)[1:]:
        if match := re.match(pattern, block, re.DOTALL | re.MULTILINE):
            found[match[1]] = " ".join(match[2].strip().split())
    return found


def _type(annotation: Any, metadata: Any = ()) -> str:
    from headrace.runs.config.base import OneOf

    for mark in metadata:
        if isinstance(mark, OneOf):
            return _choices(mark.names())
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], arguments[1:])
    if origin is Literal:
        return _choices(arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(a) for a in arguments if a is not type(None))
    if origin is tuple:
        return "array of " + _type(arguments[0])
    if origin is dict:
        return "table of " + _type(arguments[1])
    return {int: "integer", float: "number", str: "string", bool: "boolean"}.get(annotation, str(annotation))


def _choices(names: Any) -> str:
    return ", ".join(f'`"{name}"`' for name in names)


def _default(field: Any) -> str:
    from headrace.runs.config.base import toml_text

    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value == -1 or value == "":
        return "chosen" if value == -1 else ""
    return f"`{toml_text(value)}`"


def _sentence(doc: str | None) -> str:
    """The docstring of a section without the name of its table."""
    text = " ".join((doc or "").split()).partition(": ")[2]
    return text[:1].upper() + text[1:]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# ---------------------------------------------------------------------------------------- metrics, commands


def metrics_page() -> str:
    """Every registered metric."""
    import headrace
    from headrace.metrics import registered_specs

    for module in pkgutil.walk_packages(headrace.__path__, "headrace."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    rows = [
        f"| `{s.key}` | {s.reduction.value}{', worst rank' if s.with_max else ''} | {s.unit} | "
        f"{f'{s.healthy[0]:g} – {s.healthy[1]:g}' if s.healthy else ''} | {_cell(s.help)} |"
        for s in registered_specs()
    ]
    return "\n".join(
        [
            "# Metrics\n",
            "Every metric is declared with its reduction over ranks. `headrace metrics` prints the same list. *Worst rank*: a second key\n"
            "with the suffix `_max` holds the largest value of all ranks.\n",
            "| key | over ranks | unit | healthy | meaning |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def commands_page() -> str:
    """Every verb with its help, as the command prints it."""
    from headrace.cli import app

    parts = [
        "# Commands\n",
        "`headrace VERB --help` prints the same. `python -m headrace` is the same command, for torchrun.\n",
    ]
    for verb in verbs():
        parts += [f"## headrace {verb}\n", _code_block(_help(app, verb.split()))]
    return "\n".join(parts)


def verbs() -> list[str]:
    """All verbs, those of `headrace spool` included."""
    from headrace.cli import app

    names = [name for name in app if not name.startswith("-")]
    return [
        whole
        for name in names
        for whole in (name, *(f"{name} {below}" for below in app[name] if not below.startswith("-")))
    ]


def _help(app: Any, words: list[str]) -> str:
    from io import StringIO

    from rich.console import Console

    console = Console(file=StringIO(), width=110, no_color=True, force_terminal=False)
    app.help_print(words, console=console)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def pages() -> dict[str, str]:
    """Path below docs/ and text of every generated page."""
    return {
        "reference/api.md": api_page(),
        **{f"reference/{package}.md": package_page(package) for package in PACKAGES},
        "reference/config.md": config_page(),
        "reference/metrics.md": metrics_page(),
        "reference/commands.md": commands_page(),
    }


# ----------------------------------------------------------------------------------------------------- hooks


def on_config(config: Any) -> Any:
    """Fill in the navigation: the guides in their order, and every decision."""
    docs = Path(config.docs_dir)
    guides = [f"guides/{name}.md" for name in GUIDES]
    decisions = sorted(
        f"decisions/{page.name}" for page in (docs / "decisions").glob("*.md") if page.name != "index.md"
    )
    config.nav = [
        {"Home": "index.md"},
        {"Getting started": "getting-started.md"},
        {"Guides": guides},
        {"Concepts": "concepts.md"},
        {"Reference": [f"reference/{page}.md" for page in ("api", *PACKAGES, "config", "metrics", "commands")]},
        {"Coming from another library": "coming-from.md"},
        {"Troubleshooting": "troubleshooting.md"},
        {"Development": ["architecture.md", "release.md", {"Decisions": ["decisions/index.md", *decisions]}]},
    ]
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
