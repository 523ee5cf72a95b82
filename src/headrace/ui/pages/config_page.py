"""The config of a run, and the events of its journal."""

from __future__ import annotations

import json
from typing import Any

from headrace.ui.pages.page_parts import facts, header
from headrace.ui.run_view import RunView


def config(view: RunView) -> dict[str, Any]:
    """The config as pairs, and the newest events."""
    events = [{str(k): _text(v) for k, v in list(event.items())[:20]} for event in view.events[-200:]]
    return header(view) | {"config": config_pairs(view.config), "events": events, "facts": facts(view)}


def config_pairs(value: Any, prefix: str = "") -> list[list[str]]:
    """A config as [key, value] pairs, keys with dots."""
    if isinstance(value, dict):
        items = [(f"{prefix}.{key}" if prefix else str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        items = [(f"{prefix}.{i}", item) for i, item in enumerate(value[:200])]
    else:
        return [[prefix, _text(value)]]
    return [pair for key, item in items for pair in config_pairs(item, key)]


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:300]
