"""headrace metrics: every declared metric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headrace.cli.terminal import TEXT, Line, Output

if TYPE_CHECKING:
    from headrace.metrics import MetricSpec


def metrics(*, output: Output = TEXT) -> int:
    """List every metric: key, how ranks are combined, unit, healthy range, meaning.

    ```
    headrace metrics
    headrace metrics --format json | jq '.[].key'
    ```
    """
    from headrace.metrics import registered_specs

    specs = registered_specs()
    rows = [
        {
            "key": s.key, "reduction": s.reduction.value, "with_max": s.with_max, "unit": s.unit,
            "healthy": list(s.healthy) if s.healthy else None, "help": s.help,
        }
        for s in specs
    ]  # fmt: skip
    output.answer(rows, _lines(specs))
    return 0


def _lines(specs: Sequence[MetricSpec]) -> Iterator[Line]:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("key", "over ranks", "unit", "healthy", "meaning"):
        table.add_column(name, overflow="fold", no_wrap=name == "key")
    for s in specs:
        healthy = f"{s.healthy[0]:g} – {s.healthy[1]:g}" if s.healthy else ""
        table.add_row(s.key, s.reduction.value + (", worst rank" if s.with_max else ""), s.unit, healthy, s.help)
    yield table
