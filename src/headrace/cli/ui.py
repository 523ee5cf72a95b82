"""headrace ui RUN_OR_FOLDER: the live page; and the page that `headrace run --ui` starts beside a run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from rich.console import Console


_PORT = 8765


def ui(
    folder: Annotated[Path, Parameter(help="A run's folder, or a folder of runs.")] = Path("runs"),
    /,
    *,
    port: Annotated[int, Parameter(help="Port to listen on; 0 takes a free one.")] = _PORT,
    host: Annotated[str, Parameter(help="Address to listen on. Any but loopback needs the token that is printed.")] = "127.0.0.1",
    beside: Annotated[int | None, Parameter(show=False)] = None,
    quiet: Annotated[bool, Parameter(help="Print nothing but the address.")] = False,
) -> int:  # fmt: skip
    """Show a live page of runs: health, where the time goes, and the documents of every step.

    The page reads the run folders and changes nothing. Click a point of a curve to read the documents of that step.

    ```
    headrace ui runs/quickstart
    headrace ui runs --port 9000
    headrace run examples/quickstart.toml --ui
    ```
    """
    from headrace.ui.server import serve

    def ready(address: str) -> None:
        print(address if quiet else f"{address}  (Ctrl-C ends it)", flush=True)

    if beside is not None:
        with contextlib.suppress(OSError):
            os.nice(10)  # the run comes first
    serve(folder, host=host, port=port, ready=ready, parent=beside)
    return 0


def start_page(run: Path, console: Console) -> None:
    """Start the live page of a run as a process of its own, which ends with this one; its address is printed when it answers."""
    command = [sys.executable, "-m", "headrace", "ui", str(run), "--port", "0", "--beside", str(os.getpid()), "--quiet"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def print_address() -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().strip()
        text = f"page   {address}" if address else f"no live page: {process.stderr.read().strip()[-500:]}"
        console.print(text, markup=False)
        for _ in process.stderr:  # a full pipe would stop the page
            pass

    threading.Thread(target=print_address, name="headrace-ui-address", daemon=True).start()
