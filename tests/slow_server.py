"""A store on loopback that is as slow as a test wants it to be.

    python tests/slow_server.py FOLDER          prints its port, then serves until it is killed or its stdin ends

It speaks as much of S3's protocol as listing and ranged reading need (FOLDER/bucket/key is s3://bucket/key), and each
object is at http://127.0.0.1:PORT/bucket/key as well. A client finds it through `environment(port)`:

    with serving(folder) as server:
        monkeypatch.setenv(...) for each of server.environment
        open_source(Source("jsonl:s3://bucket/web/*.jsonl"), ...)      counts the rows, not slowed down
        server.slow(first=2.0)          from now on the first GET of every object takes 2 s until its first byte,
        server.slow(each=0.05)          or every GET takes 50 ms
        server.slow(status=503, times=3)   or the next three GETs fail
        server.counts()                 GETs so far, by object

Objects' tags are made of size and time of modification, so a rewritten file is another object.
"""

from __future__ import annotations

import argparse
import contextlib
import email.utils
import json
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from xml.sax.saxutils import escape


class Server:
    """The client's end: a running server."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_SKIP_SIGNATURE": "true",
            "AWS_REGION": "us-east-1",
        }

    def slow(self, *, first: float = 0.0, each: float = 0.0, status: int = 0, times: int = 0) -> None:
        """From now on: seconds before the first byte of each object's first GET, of each GET; failures to give."""
        query = urllib.parse.urlencode({"first": first, "each": each, "status": status, "times": times})
        urllib.request.urlopen(f"{self.url}/_slow?{query}", timeout=10).read()

    def counts(self) -> dict[str, int]:
        return json.loads(urllib.request.urlopen(f"{self.url}/_counts", timeout=10).read())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Server(process, int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait(timeout=10)
        process.stdin.close()
        process.stdout.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path
    lock = threading.Lock()
    first = each = 0.0
    status = times = 0
    seen: ClassVar[set[str]] = set()
    gets: ClassVar[Counter[str]] = Counter()

    def log_message(self, format: str, *args: object) -> None:
        return None

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        key = urllib.parse.unquote(url.path).strip("/")
        kind = type(self)
        if key == "_slow":
            with kind.lock:
                kind.first, kind.each = float(query["first"]), float(query["each"])
                kind.status, kind.times = int(query["status"]), int(query["times"])
                kind.seen.clear()
            return self._send(200, b"")
        if key == "_counts":
            return self._send(200, json.dumps(kind.gets).encode())
        if "list-type" in query:
            return self._list(key, query.get("prefix", ""))
        path = (kind.folder / key).resolve()
        if not path.is_relative_to(kind.folder.resolve()) or not path.is_file():
            return self._send(404, b"", body=body)
        status = path.stat()
        tag = f'"{status.st_size:x}-{status.st_mtime_ns:x}"'
        headers = {
            "ETag": tag,
            "Last-Modified": email.utils.formatdate(status.st_mtime, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if self.headers.get("If-Match", tag) != tag:
            return self._send(412, b"", body=body)
        if not body:
            return self._send(200, b"", headers, body=False, length=status.st_size)
        with kind.lock:
            pause = kind.each + (kind.first if key not in kind.seen else 0.0)
            kind.seen.add(key)
            kind.gets[key] += 1
            failing = kind.times > 0
            kind.times -= failing
        time.sleep(pause)
        if failing:
            return self._send(kind.status, b"")
        start, end = 0, status.st_size
        wanted = self.headers.get("Range", "")
        if wanted.startswith("bytes="):
            low, _, high = wanted.removeprefix("bytes=").partition("-")
            start, end = int(low), min(end, int(high) + 1) if high else end
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{status.st_size}"
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(end - start)
        self._send(206 if wanted else 200, data, headers)

    def _list(self, bucket: str, prefix: str) -> None:
        root = type(self).folder / bucket
        if not root.is_dir():
            return self._send(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        entries = []
        for path in sorted(p for p in root.rglob("*") if p.is_file()):
            key, status = path.relative_to(root).as_posix(), path.stat()
            if key.startswith(prefix):
                stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
                entries.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>{stamp}</LastModified><Size>{status.st_size}</Size>"
                    f"<ETag>&quot;{status.st_size:x}-{status.st_mtime_ns:x}&quot;</ETag></Contents>"
                )
        answer = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(entries)}</ListBucketResult>"
        self._send(200, answer.encode(), {"Content-Type": "application/xml"})

    def _send(
        self,
        code: int,
        data: bytes,
        headers: dict[str, str] | None = None,
        *,
        body: bool = True,
        length: int | None = None,
    ) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if body:
            self.wfile.write(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    _Handler.folder = parser.parse_args().folder
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
