"""headrace inspect PATH: what a file or a folder of ours holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from headrace.cli.terminal import console_for

__all__ = ["inspect"]


def inspect(
    path: Path,
    /,
    *,
    format: Annotated[Literal["text", "json"], Parameter(help="json: one object for machines.")] = "text",
    quiet: Annotated[bool, Parameter(help="Only check: exit 0 if it is whole.", negative=())] = False,
) -> int:
    """Show a run folder, a checkpoint or other container, a saved cursor, or a manifest; its checksums are verified.

    ```
    headrace inspect runs/quickstart
    headrace inspect runs/quickstart --format json | jq -r .digest
    headrace inspect runs/quickstart/checkpoints/step-00000200.safetensors
    ```
    """
    from headrace.runs.inspection import inspect_path

    found = inspect_path(path)
    console = console_for()
    if quiet:
        return 0
    if format == "json":
        console.print_json(json.dumps(found))
        return 0
    console.print(f"[bold]{path}[/]: {found['kind']}", highlight=False)
    _print(console, {k: v for k, v in found.items() if k != "kind"}, indent=1)
    return 0


def _print(console: Any, value: Mapping[str, Any], indent: int) -> None:
    for name, item in value.items():
        pad = "  " * indent
        if isinstance(item, Mapping) and item:
            console.print(f"{pad}[dim]{name}[/]", highlight=False)
            _print(console, item, indent + 1)
        elif isinstance(item, list) and item and isinstance(item[0], Mapping):
            console.print(f"{pad}[dim]{name}[/]", highlight=False)
            for row in item:
                console.print(
                    pad + "  " + "  ".join(f"{k} {v}" for k, v in row.items()),
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )
        else:
            shown = (
                f"{item:,}" if isinstance(item, int) and not isinstance(item, bool) else "none" if item == {} else item
            )
            console.print(f"{pad}[dim]{name:<22}[/] {shown}", highlight=False, soft_wrap=True)
