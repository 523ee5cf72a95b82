"""headrace env: what headrace sees of this machine."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from headrace.cli.terminal import Format, console_for

__all__ = ["env"]


def env(
    *, format: Format = "text", quiet: Annotated[bool, Parameter(help="Only the exit code.", negative=())] = False
) -> int:
    """Show what headrace sees here: versions, processors, memory, encoder, cache folder, what its filesystem can do.

    ```
    headrace env
    headrace env --format json > env.json
    ```
    """
    from headrace.runs.machine import describe_machine

    facts = describe_machine()
    console = console_for()
    if quiet:
        return 0
    if format == "json":
        console.print_json(json.dumps(facts))
        return 0
    for group, values in facts.items():
        console.print(f"[bold]{group}[/]", highlight=False)
        for name, value in values.items():
            console.print(f"  [dim]{name:<14}[/] {value}", highlight=False, soft_wrap=True)
    return 0
