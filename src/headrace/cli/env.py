"""headrace env: what headrace sees of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.cli.terminal import TEXT, Output

if TYPE_CHECKING:
    from rich.console import Console


def env(*, output: Output = TEXT) -> int:
    """Show what headrace sees here: versions, processors, memory, encoder, cache folder, what its filesystem can do.

    ```
    headrace env
    headrace env --format json > env.json
    ```
    """
    from headrace.runs.machine import describe_machine

    facts = describe_machine()
    output.answer(facts, lambda console: _print_machine(console, facts))
    return 0


def _print_machine(console: Console, facts: dict[str, dict[str, Any]]) -> None:
    for group, values in facts.items():
        console.print(f"[bold]{group}[/]")
        for name, value in values.items():
            console.print(f"  [dim]{name:<14}[/] {value}")
