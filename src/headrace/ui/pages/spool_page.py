"""The spool of a run: files, backlog, commit point, lag of ranks, providers at work, quarantine."""

from __future__ import annotations

import json
from typing import Any

from headrace.errors import HeadraceError
from headrace.spool.folder import SpoolFolder
from headrace.spool.survey import describe, list_files, quarantined
from headrace.ui.pages.page_parts import chart, header, is_drawn, spool_folder
from headrace.ui.run_view import RunView


def spool(view: RunView) -> dict[str, Any]:
    """What `headrace spool` reports about the run's spool, and its curves."""
    keys = [
        key
        for key in view.index.known_keys()
        if key.startswith("spool/") and is_drawn(view, key) and not key.endswith(("_max", "worst_rank"))
    ]
    found = header(view) | {"charts": [chart(view, [key]) for key in keys[:12]]}
    path = spool_folder(view)
    if path is None:
        return found | {"refused": "The run's spool is not there (any more)."}
    try:
        described = {
            "spool": describe(path), "files": list_files(path)[-300:], "quarantine": quarantined(path)[-100:],
            "ranks": SpoolFolder(path).read_positions()[:1024],
        }  # fmt: skip
    except (HeadraceError, OSError, KeyError, TypeError, ValueError) as error:
        return found | {"refused": f"The spool cannot be read: {error}"[:500]}
    return found | json.loads(json.dumps(described, default=str))
