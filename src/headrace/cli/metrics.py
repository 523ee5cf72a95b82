"""headrace metrics: every declared metric."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from headrace.cli.terminal import Format, console_for

__all__ = ["metrics"]


def metrics(
    *, format: Format = "text", quiet: Annotated[bool, Parameter(help="Only the exit code.", negative=())] = False
) -> int:
    """List every metric: key, how ranks are combined, unit, healthy range, meaning.

    ```
    headrace metrics
    headrace metrics --format json | jq '.[].key'
    ```
    """
    from headrace.metrics import registered_specs

    specs = registered_specs()
    console = console_for()
    if quiet:
        return 0
    if format == "json":
        rows = [
            {
                "key": s.key, "reduction": s.reduction.value, "with_max": s.with_max, "unit": s.unit,
                "healthy": list(s.healthy) if s.healthy else None, "help": s.help,
            }
            for s in specs
        ]  # fmt: skip
        console.print_json(json.dumps(rows))
        return 0
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("key", "over ranks", "unit", "healthy", "meaning"):
        table.add_column(name, overflow="fold", no_wrap=name == "key")
    for s in specs:
        healthy = f"{s.healthy[0]:g} – {s.healthy[1]:g}" if s.healthy else ""
        table.add_row(s.key, s.reduction.value + (", worst rank" if s.with_max else ""), s.unit, healthy, s.help)
    console.print(table)
    return 0
