"""headrace metrics, headrace env: what is declared, and what this machine has."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from cyclopts import Parameter

from headrace.cli.terminal import console_for

__all__ = ["env", "metrics"]

Format = Annotated[Literal["text", "json"], Parameter(help="json: one object for machines.")]
Quiet = Annotated[bool, Parameter(help="Only the exit code.", negative=())]


def metrics(*, format: Format = "text", quiet: Quiet = False) -> int:
    """List every metric: key, how ranks are combined, unit, healthy range, meaning.

    ```
    headrace metrics
    headrace metrics --format json | jq '.[].key'
    ```
    """
    import headrace.jobs.lm
    import headrace.jobs.streams
    import headrace.ledger.gauges
    import headrace.loader.stream_metrics
    import headrace.rollouts  # noqa: F401  these declare the metrics of every room
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


def env(*, format: Format = "text", quiet: Quiet = False) -> int:
    """Show what headrace sees here: versions, processors, memory, cache folder, what its filesystem can do.

    ```
    headrace env
    headrace env --format json > env.json
    ```
    """
    from headrace.jobs.machine import describe_machine

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
