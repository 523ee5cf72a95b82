"""The live page in a process of its own, for tests and benchmarks: start it, ask it, look at its memory."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit


class LivePage:
    """A running `headrace ui`."""

    def __init__(self, address: str, process: subprocess.Popen[str]) -> None:
        self.address = address
        self.process = process
        parts = urlsplit(address)
        self.host, self.port, self.query = str(parts.hostname), int(parts.port or 0), parts.query

    def get(
        self, path: str, headers: dict[str, str] | None = None, method: str = "GET", timeout: float = 60
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def api(self, name: str, **query: Any) -> Any:
        """The JSON of a page; the answer must be 200."""
        pairs = [(k, v) for k, given in query.items() for v in (given if isinstance(given, list) else [given])]
        status, _, body = self.get(f"/api/{name}?" + "&".join(f"{quote(k)}={quote(str(v), safe='')}" for k, v in pairs))
        assert status == 200, (status, body[:500])
        return json.loads(body)

    @property
    def memory(self) -> int:
        """Resident bytes of the server process, without its worker."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1])

    @property
    def cpu_seconds(self) -> float:
        """Processor time the server process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def live_page(root: Path, *options: str) -> Iterator[LivePage]:
    """Start `headrace ui ROOT` on a free port; ended on leaving."""
    command = [sys.executable, "-m", "headrace", "ui", str(root), "--port", "0", "--quiet", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"NO_COLOR": "1"}
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().strip()
        assert address, process.stderr.read()
        yield LivePage(address, process)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
