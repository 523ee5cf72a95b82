"""The live page under requests that no page of ours makes: refused, memory bounded, still answering."""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live_page import live_page

pytest.importorskip("uvicorn", reason="needs headrace[ui]")

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    good = root / "good"
    good.mkdir()
    (good / "config.toml").write_text('[run]\nname = "good"\nsteps = 100\n')
    (good / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": s, "train/loss": 1 / s, "time": 1e9 + s}) + "\n" for s in range(1, 60))
    )
    evil = root / "evil"
    evil.mkdir()
    (evil / "config.toml").write_text(f"[run]\nname = {json.dumps(EVIL)}\n")
    (evil / "metrics.jsonl").write_text(
        json.dumps({"step": 1, EVIL: 1.0}) + '\n{"step": 2, "x": NaN}\n' + "[" * 100_000 + "\n"
    )
    (evil / "journal.jsonl").write_bytes(b"\xff\xfe{{{\n" + json.dumps({"event": EVIL, "step": 1}).encode() + b"\n")
    (root / "secret.txt").write_text("secret")
    return root


@pytest.fixture(scope="module")
def page(root: Path) -> Iterator[Any]:
    with live_page(root) as page:
        yield page


def raw(page: Any, request: bytes, seconds: float = 20) -> bytes:
    """What the server says to some bytes, up to the end of the connection."""
    with socket.create_connection((page.host, page.port), timeout=seconds) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


def test_pages_and_assets_carry_a_strict_policy(page):
    for path in ("/", "/app.js", "/charts.js", "/app.css", "/api/runs", "/nonsense"):
        status, headers, _ = page.get(path)
        assert status == (404 if path == "/nonsense" else 200)
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers
    assert [r["run"] for r in page.api("runs")["runs"]] == ["good", "evil"]


@pytest.mark.parametrize(
    "path",
    ["/../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt", "/secret.txt", "//etc/passwd", "/app.js/../server.py", "/server.py", "/assets/app.js", "/%00"],
)  # fmt: skip
def test_no_path_reaches_a_file_that_is_no_asset(page, path):
    status, _, body = page.get(path)
    assert status == 404
    assert b"secret" not in body


@pytest.mark.parametrize("run", ["../good", "/etc", "good/../evil", "good/", ".", "", "\x00", "x" * 5000, "%2e%2e"])
@pytest.mark.parametrize("name", ["overview", "curves", "step", "spool", "rollouts"])
def test_a_run_is_named_or_not_found(page, run, name):
    from urllib.parse import quote

    status, _, body = page.get(f"/api/{name}?run={quote(run, safe='')}&step=1")
    assert status == 404, body
    assert b"Traceback" not in body


def test_other_methods_hosts_and_sites_are_refused(page):
    own = f"{page.host}:{page.port}"
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert page.get("/api/runs", method=method)[0] == 405
    for host in (
        "evil.example",
        f"evil.example:{page.port}",
        f"{page.host}",
        "",
        f"{own}.evil.example",
        f"{page.host}:1",
    ):
        assert page.get("/api/runs", {"Host": host})[0] in (400, 421), host
    two_hosts = f"GET /api/runs HTTP/1.1\r\nHost: {own}\r\nHost: evil\r\nConnection: close\r\n\r\n"
    assert raw(page, two_hosts.encode()).startswith(b"HTTP/1.1 4")
    assert page.get("/api/runs", {"Origin": "http://evil.example"})[0] == 403
    assert page.get("/api/runs", {"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert page.get("/api/runs", {"Sec-Fetch-Site": "same-site"})[0] == 403
    assert page.get("/api/runs", {"Origin": f"http://{own}", "Sec-Fetch-Site": "same-origin"})[0] == 200
    assert page.get("/", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})[0] == 200, (
        "a link to the page opens it"
    )


def test_nonsense_in_an_address_is_an_answer(page):
    for query in ("", "run=good&key=train/loss&first=x", "run=good&points=1e9", "run=good&key=" + "k" * 6000):
        status, _, body = page.get(f"/api/curves?{query}")
        assert status in (200, 400, 404), query
        assert "error" in json.loads(body) or json.loads(body)["curves"] == {}
    assert page.get("/api/events?run=good&line=x")[0] == 400
    status, _, body = page.get("/api/step?run=good&step=3")
    assert status == 409, "a run that recorded no documents"
    assert "config" in json.loads(body)["error"] or "run.json" in json.loads(body)["error"]


def test_addresses_of_a_megabyte_and_garbage_leave_the_server_standing(page):
    before = page.memory
    long = b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    header = b"GET / HTTP/1.1\r\nX: " + b"b" * (1 << 20) + b"\r\n\r\n"
    for request in (
        long,
        header,
        b"\x16\x03\x01" + bytes(range(256)) * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n" * 10_000,
    ):
        for _ in range(5):
            try:
                answer = raw(page, request)
            except OSError:  # the server closed before it was told everything
                answer = b""
            assert b"200 OK" not in answer[:20]
    assert page.get("/api/runs", timeout=10)[0] == 200
    assert page.memory - before < 30 << 20


def test_slow_clients_do_not_keep_others_out(page):
    """More connections than the server keeps, none of which sends a whole request; and some that ask for 20 MB and do not read."""
    idle = []
    before = page.memory
    request = f"GET /app.js HTTP/1.1\r\nHost: {page.host}:{page.port}\r\n\r\n".encode()
    deaf = [socket.socket() for _ in range(8)]
    try:
        for connection in deaf:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(20)
            connection.connect((page.host, page.port))
            connection.sendall(500 * request)
        for _ in range(200):
            connection = socket.create_connection((page.host, page.port), timeout=20)
            connection.sendall(b"GET / HTTP/1.1\r\nHost: ")
            idle.append(connection)
        assert page.get("/api/runs", timeout=20)[0] == 200
        oldest = idle[0]
        oldest.settimeout(30)
        with contextlib.suppress(ConnectionError):  # reset, or closed
            assert oldest.recv(100) == b"", "a connection without a request is dropped"
        for connection in deaf:
            ended = select.poll()
            ended.register(connection, 0)  # only the end of the connection is reported
            assert ended.poll(60_000), "a connection that does not read is dropped"
        assert page.memory - before < 60 << 20
    finally:
        for connection in [*idle, *deaf]:
            connection.close()


def test_a_page_follows_a_run_and_gets_new_points_only(page, root):
    run = root / "good"
    first = page.api("overview", run="good")
    with socket.create_connection((page.host, page.port), timeout=30) as connection:
        status = first["status"]
        connection.sendall(
            f"GET /api/events?run=good&line={status['lines']}&generation={status['generation']}&key=train/loss HTTP/1.1\r\nHost: {page.host}:{page.port}\r\n\r\n".encode()
        )
        stream = connection.makefile("rb")

        def next_event() -> dict[str, Any]:
            for line in stream:
                if line.startswith(b"data: "):
                    return json.loads(line[6:])
            raise AssertionError("the stream ended")

        assert next_event()["points"] == {"train/loss": []}
        with open(run / "metrics.jsonl", "a") as out:
            out.write(json.dumps({"step": 60, "train/loss": 0.5, "time": 1e9 + 60}) + "\n")
        event = next_event()
        assert event["points"] == {"train/loss": [[60, 0.5]]}
        assert event["status"]["step"] == 60
        stream.close()


def test_names_that_are_tags_stay_data(page):
    told = page.api("overview", run="evil")
    assert told["status"]["name"] == EVIL
    _, headers, body = page.get("/api/metrics?run=evil")
    assert headers["content-type"] == "application/json"
    assert EVIL in {p["key"] for p in json.loads(body)["panels"]}


def test_an_address_that_is_not_loopback_needs_its_token(root):
    with live_page(root, "--host", "0.0.0.0") as page:
        token = page.query.partition("token=")[2]
        assert len(token) > 20
        name = {"Host": f"{socket.gethostname()}:{page.port}"}
        assert page.get("/api/runs", name)[0] == 401
        assert page.get("/api/runs?token=wrong", name)[0] == 401
        status, headers, _ = page.get(f"/?token={token}", name)
        assert status == 200
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert page.get("/api/runs", name | {"Cookie": cookie.partition(";")[0]})[0] == 200


def test_a_million_lines_open_at_once_in_bounded_memory(root, page):
    run = root / "million"
    run.mkdir()
    block = "".join(
        f'{{"step":%d,"train/loss":{3 + math.sin(i / 99):.4f},"tokens_per_second":5e5,"steps_in_interval":1,"step/seconds":0.02}}\n'
        for i in range(1000)
    )
    with open(run / "metrics.jsonl", "w") as out:
        for k in range(1000):
            out.write(block % tuple(range(k * 1000 + 1, k * 1000 + 1001)))
    page.api("runs")
    began = time.monotonic()
    told = page.api("overview", run="million")
    took = time.monotonic() - began
    assert told["status"]["step"] == 1_000_000
    assert len(told["charts"][0]["curves"][0]["steps"]) <= 700
    assert took < 5.0, f"{took:.2f} s; on a machine of its own it is below 1 s (benchmarks/ui.py)"
    assert told["status"]["sketched"], "shown before it was read"
    assert page.memory < 400 << 20
    (run / "metrics.jsonl").unlink()
    assert page.api("overview", run="good")["status"]["step"] >= 59
