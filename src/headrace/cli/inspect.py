"""headrace inspect PATH: what a file or a folder written by headrace holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.cli.terminal import TEXT, Line, Output, marked


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
    output.answer(found, _description(path, found))
    return 0


def _description(path: Path, found: Mapping[str, Any]) -> Iterator[Line]:
    yield marked(f"[bold]{path}[/]: {found['kind']}")
    yield from _tree({k: v for k, v in found.items() if k != "kind"}, "  ")


def _tree(values: Mapping[str, Any], pad: str) -> Iterator[Line]:
    for name, item in values.items():
        if isinstance(item, Mapping) and item:
            yield marked(f"{pad}[dim]{name}[/]")
            yield from _tree(item, pad + "  ")
        elif isinstance(item, list) and item and isinstance(item[0], Mapping):
            yield marked(f"{pad}[dim]{name}[/]")
            for row in item:
                yield f"{pad}  " + "  ".join(f"{k} {v}" for k, v in row.items())
        else:
            shown = (
                f"{item:,}" if isinstance(item, int) and not isinstance(item, bool) else "none" if item == {} else item
            )
            yield marked(f"{pad}[dim]{name:<22}[/] {shown}")
