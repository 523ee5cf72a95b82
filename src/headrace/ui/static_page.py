"""The static report: the live page with its data inside, one HTML file that loads nothing from a network.

It shows the same pages from the same code (`pages`, `assets/`). Answers that are computed on request (documents of a step, find, compare) need
the live page. Scripts and styles are allowed by their hashes, so no script in a name or text of the data can run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from headrace.errors import DataError
from headrace.files import publish
from headrace.ui import pages
from headrace.ui.pages.page_parts import POINTS
from headrace.ui.run_view import RunView

_ASSETS = files("headrace.ui") / "assets"


def read_run(path: Path) -> RunView:
    """A run folder, read whole. DataError if it holds no line of metrics."""
    if not path.is_dir():
        raise DataError(f"{path} is not a run folder; give the --run.dir of a run that was started")
    view = RunView(path.resolve().name, path)
    view.index.update()
    if not view.index.lines:
        raise DataError(
            f"{path / 'metrics.jsonl'} holds no line yet; wait for the first one, or look at the run's own output"
        )
    return view


def write_page(view: RunView, path: Path) -> int:
    """Publish the report of a run at `path`; returns its size in bytes."""
    data = page_html(view).encode("utf-8", "replace")
    publish(path, data, replace=True, durable=False)
    return len(data)


def page_html(view: RunView) -> str:
    """The report of a run as HTML."""
    tabs = [name for name in pages.tabs(view) if name not in ("step", "find")]
    made: dict[str, Any] = {name: getattr(pages, name)(view) | {"tabs": tabs} for name in tabs}
    keys = [curve["key"] for panel in made["metrics"]["panels"] for curve in panel["curves"]]
    data = {
        "run": view.run,
        "path": str(view.path),
        "pages": made,
        "curves": {key: view.index.curve(key, points=POINTS) for key in keys},
    }
    # Inside a script element a parser looks for "</" and "<!--" only. Escaped like this, JSON has neither.
    text = (
        json.dumps(_finite(data), ensure_ascii=True, allow_nan=False, default=str)
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
    )
    style, script = _asset("app.css"), _asset("charts.js") + "\n" + _asset("app.js")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    return (
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{html.escape(view.name)} – headrace</title>\n<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n<body>\n'
        '<header id="top"></header>\n<main id="main" tabindex="-1"></main>\n'
        f'<script type="application/json" id="data">{text}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )  # fmt: skip


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _finite(value: Any) -> Any:
    """The value with None for NaN and infinite numbers, which JSON does not have."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value
