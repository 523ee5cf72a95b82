"""headrace env: what headrace sees of this machine."""

from __future__ import annotations

from headrace.cli.terminal import TEXT, Output, marked


def env(*, output: Output = TEXT) -> int:
    """Show what headrace sees here: versions, processors, memory, encoder, cache folder, what its filesystem can do.

    ```
    headrace env
    headrace env --format json > env.json
    ```
    """
    from headrace.runs.machine import describe_machine

    machine = describe_machine()
    lines = [
        line
        for group, values in machine.items()
        for line in (f"[bold]{group}[/]", *(f"  [dim]{name:<14}[/] {value}" for name, value in values.items()))
    ]
    output.answer(machine, map(marked, lines))
    return 0
