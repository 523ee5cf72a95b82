"""headrace inspect PATH: what a file or a folder written by headrace holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.terminal import TEXT, Output, print_plain

if TYPE_CHECKING:
    from rich.console import Console


def inspect(
    path: Path,
    /,
    *,
    output: Output = TEXT,
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
    output.answer(found, lambda console: _print_description(console, path, found))
    return 0


def _print_description(console: Console, path: Path, found: Mapping[str, Any]) -> None:
    console.print(f"[bold]{path}[/]: {found['kind']}")
    _print_tree(console, {k: v for k, v in found.items() if k != "kind"}, "  ")


def _print_tree(console: Console, values: Mapping[str, Any], pad: str) -> None:
    for name, item in values.items():
        if isinstance(item, Mapping) and item:
            console.print(f"{pad}[dim]{name}[/]")
            _print_tree(console, item, pad + "  ")
        elif isinstance(item, list) and item and isinstance(item[0], Mapping):
            console.print(f"{pad}[dim]{name}[/]")
            for row in item:
                print_plain(console, f"{pad}  " + "  ".join(f"{k} {v}" for k, v in row.items()))
        else:
            shown = (
                f"{item:,}" if isinstance(item, int) and not isinstance(item, bool) else "none" if item == {} else item
            )
            console.print(f"{pad}[dim]{name:<22}[/] {shown}")
