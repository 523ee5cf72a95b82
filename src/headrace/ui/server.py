"""The server of the live page: reads run folders, answers GET, changes nothing.

    serve(Path("runs"), port=8765)                    until Ctrl-C

`Guard` checks every request before any page: only GET and HEAD, only a Host that is this server, no request from another site, a
token on any address but loopback, short paths. Responses carry a policy that forbids the page to load anything from elsewhere. Connections that
send or read too slowly are aborted, so they cannot keep other clients out.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, DataError, HeadraceError
from headrace.ui import pages
from headrace.ui.questions import Questions, to_json
from headrace.ui.run_view import RunView, find_runs, spec_book

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import MutableHeaders, QueryParams
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError:
    raise ConfigError(
        "the live page needs the packages starlette and uvicorn. Run: pip install 'headrace[ui]'"
    ) from None

ASSETS = Path(__file__).parent / "assets"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_MAX_PATH = 8192
_MAX_CONNECTIONS = 128
_MAX_STREAMS = 32
_REQUEST_SECONDS = 10.0
"""How long a client may take to send a request, and to read each part of an answer."""
_TICK = 1.0
"""Seconds between two checks of a run's files."""
_OPEN_RUNS = 8
"""Runs whose index is kept in memory."""


class Runs:
    """The runs below a folder, by name. Names are looked up in a listing: no path is made from a request."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.book = spec_book()
        self._lock = threading.Lock()
        self._open = functools.lru_cache(_OPEN_RUNS)(lambda name, path: RunView(name, path, self.book))
        self._paths: dict[str, Path] = {}
        self._listed = -math.inf

    def view(self, name: str) -> RunView:
        """A run, refreshed. DataError if there is none of this name."""
        with self._lock:
            if name not in self._paths or time.monotonic() - self._listed > 10:
                self._paths, self._listed = find_runs(self.root), time.monotonic()
            if name not in self._paths:
                raise DataError(f"there is no run {name[:200]!r} below {self.root}")
            view = self._open(name, self._paths[name])
        view.refresh()
        return view


# ------------------------------------------------------------------------------------------------------- guard


class Guard:
    """ASGI middleware that refuses requests which the page itself does not make."""

    def __init__(self, app: Any, *, hosts: frozenset[str], token: str | None) -> None:
        """`hosts`: values of the Host header that are accepted. `token`: what a client has to present; None: no client has to."""
        self._app = app
        self._hosts = hosts
        self._token = token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        request = Request(scope)

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if self._holds_token(request.query_params.get("token")):
                    headers.append("set-cookie", f"headrace={self._token}; HttpOnly; SameSite=Strict; Path=/")
            await send(message)

        problem = self._problem(request)
        app = self._app if problem is None else PlainTextResponse(problem[1], problem[0])
        await app(scope, receive, guarded)

    def _problem(self, request: Request) -> tuple[int, str] | None:
        """Status and sentence of a refusal; None if the request is allowed."""
        scope, headers = request.scope, request.headers
        if request.method not in ("GET", "HEAD"):
            return 405, "this page changes nothing: only GET"
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > _MAX_PATH:
            return 414, "the address is too long"
        hosts = [host.lower() for host in headers.getlist("host")]
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return 421, "this server does not answer to that host name"
        site = headers.get("sec-fetch-site", "none")
        followed_link = site == "cross-site" and headers.get("sec-fetch-mode") == "navigate" and scope["path"] == "/"
        origin = headers.get("origin")
        if not (site in ("none", "same-origin") or followed_link) or (
            origin is not None and origin.lower().partition("://")[2] != hosts[0]
        ):
            return 403, "requests from other sites are refused"
        if self._token is not None:
            given = (request.query_params.get("token"), request.cookies.get("headrace"))
            if not any(map(self._holds_token, given)):
                return 401, "open the address that `headrace ui` printed: it holds a token"
        return None

    def _holds_token(self, given: str | None) -> bool:
        if given is None or self._token is None:
            return False
        return hmac.compare_digest(given.encode(), self._token.encode())


# --------------------------------------------------------------------------------------------------------- app


def make_app(root: Path, *, hosts: frozenset[str], token: str | None = None) -> Any:
    """The pages of the runs below `root`, as an ASGI application behind its guard.

    Args:
        root: A run's folder, or a folder of runs.
        hosts, token: Those of `Guard`.
    """
    runs = Runs(root)
    questions = Questions()
    following = 0
    # At most four threads make answers, so requests cannot start any number of them.
    makers = asyncio.Semaphore(4)

    def answered(value: Any, status: int = 200) -> Response:
        return Response(to_json(value), status, media_type="application/json")

    def api(make: Callable[[QueryParams], Any]) -> Callable[[Request], Any]:
        """An endpoint that answers with what `make` returns for the query of a request."""

        async def answer(request: Request) -> Response:
            try:
                async with makers:
                    return answered(await asyncio.to_thread(make, request.query_params))
            except HeadraceError as error:
                return answered({"error": str(error)[:2000]}, 404 if isinstance(error, DataError) else 409)
            except (ValueError, KeyError) as error:
                return answered({"error": f"the address makes no sense: {error}"[:500]}, 400)

        return answer

    def page(make: Callable[[RunView], Any]) -> Callable[[Request], Any]:
        return api(lambda q: make(runs.view(q["run"])))

    def ask(q: QueryParams, question: str, **arguments: Any) -> Any:
        return questions.ask(question, path=runs.view(q["run"]).path.resolve(), **arguments)

    async def events(request: Request) -> Response:
        nonlocal following
        query = request.query_params
        keys = query.getlist("key")[:40]
        try:
            view = await asyncio.to_thread(runs.view, query["run"])
            line, generation = int(query.get("line", "0")), int(query.get("generation", "-1"))
        except (HeadraceError, KeyError, ValueError) as error:
            return answered({"error": str(error)[:500]}, 400)
        if following >= _MAX_STREAMS:
            return answered({"error": "too many pages follow a run already"}, 503)

        async def lines() -> AsyncIterator[bytes]:
            nonlocal following, line, generation
            following += 1
            try:
                yield b"retry: 3000\n\n"
                state: Any = None
                shown = view.index
                while True:
                    await asyncio.to_thread(view.refresh, 1.0)
                    if view.index.generation != generation or view.index is not shown:
                        yield b"event: reload\ndata: {}\n\n"
                        return
                    status = view.status()
                    now = status["state"], round(status["progress"], 2)
                    if view.index.lines > line or now != state:
                        news = await asyncio.to_thread(pages.new_lines, view, line, keys)
                        line, state = view.index.lines, now
                        yield b"event: lines\ndata: " + to_json(news) + b"\n\n"
                    else:
                        yield b": no news\n\n"
                    await asyncio.sleep(0.05 if status["progress"] < 1 else _TICK)
            finally:
                following -= 1

        return StreamingResponse(lines(), media_type="text/event-stream")

    def number(text: str | None) -> int | None:
        return int(text) if text else None

    routes = {
        "/api/events": events,
        "/api/runs": api(lambda q: pages.runs(root, runs.book)),
        "/api/overview": page(pages.overview), "/api/metrics": page(pages.metrics), "/api/config": page(pages.config),
        "/api/streams": page(pages.streams), "/api/spool": page(pages.spool), "/api/rl": page(pages.rl),
        "/api/rollouts": api(lambda q: pages.rollouts(runs.view(q["run"]), int(q["step"]))),
        "/api/curves": api(lambda q: pages.curves(runs.view(q["run"]), q.getlist("key"), first=number(q.get("first")), last=number(q.get("last")), points=int(q.get("points", "600")))),
        "/api/compare": api(lambda q: pages.compare(runs.view(q["a"]), runs.view(q["b"]))),
        "/api/step": api(lambda q: ask(q, "step", number=int(q["step"]), rank=number(q.get("rank")))),
        "/api/tokens": api(lambda q: ask(q, "tokens", sample=int(q["sample"]))),
        "/api/find": api(lambda q: ask(q, "find", source=q["source"], row=int(q["row"]), file=q.get("file") or None)),
        "/api/search": api(lambda q: ask(q, "search", text=q["text"][:1000], around=int(q["step"]))),
        "/api/diff": api(lambda q: questions.ask("diff", a=runs.view(q["a"]).path.resolve(), b=runs.view(q["b"]).path.resolve())),
    }  # fmt: skip

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        await asyncio.to_thread(questions.close)

    app = Starlette(
        routes=[
            *(Route(path, answer) for path, answer in routes.items()),
            Mount("/", StaticFiles(directory=ASSETS, html=True)),
        ],
        lifespan=lifespan,
    )
    return Guard(app, hosts=hosts, token=token)


# ------------------------------------------------------------------------------------------------------- serve


class Connection(H11Protocol):
    """A connection that must send its request in time and read its answer in time. When there are too many, the oldest without a request is closed."""

    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._late = self.loop.call_later(_REQUEST_SECONDS, self._drop)
        if len(self.connections) > _MAX_CONNECTIONS:
            idle = next(
                (c for c in list(self.connections) if c is not self and getattr(c, "cycle", None) is None), None
            )
            if idle is not None:
                idle.transport.abort()
                idle.connections.discard(idle)

    def _drop(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(_REQUEST_SECONDS, self._reset)

    def _reset(self) -> None:
        # A close would wait until the client reads, in this process or in the kernel. A reset drops what is buffered.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)


def serve(
    root: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ready: Callable[[str], None] = lambda address: None,
    parent: int | None = None,
) -> None:
    """Answer requests until the process is asked to stop.

    Args:
        root: A run's folder, or a folder of runs.
        host: Address to listen on. Any address but loopback needs a token, which is part of the address given to `ready`.
        port: Port to listen on; 0: a free one.
        ready: Called with the page's address.
        parent: Id of a process; the server ends when that process ends.
    """
    find_runs(root)  # DataError for a wrong path, before anything is started
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    token = None if loopback else secrets.token_urlsafe(24)
    bound = _bind(host, port)
    port = bound.getsockname()[1]
    names = (
        {host, "localhost", "127.0.0.1", "[::1]"}
        if loopback
        else {host, socket.gethostname(), socket.getfqdn(), *_addresses()}
    )
    hosts = frozenset(f"{name.lower()}:{port}" for name in names)

    app = make_app(root, hosts=hosts, token=token)
    config = uvicorn.Config(
        app, http=Connection, ws="none", lifespan="on", log_level="warning", access_log=False, server_header=False, timeout_keep_alive=5,
        timeout_graceful_shutdown=1, h11_max_incomplete_event_size=2 * _MAX_PATH, proxy_headers=False,
    )  # fmt: skip
    server = uvicorn.Server(config)
    if parent is not None:
        threading.Thread(target=_follow, args=(server, parent), name="headrace-ui-parent", daemon=True).start()
    shown = f"[{host}]" if ":" in host else host
    ready(f"http://{shown}:{port}/" + (f"?token={token}" if token else ""))
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[bound])


def _bind(host: str, port: int) -> socket.socket:
    v6 = ":" in host
    try:
        # From here on a client of the printed address waits instead of failing.
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if v6 else socket.AF_INET, backlog=128,
            dualstack_ipv6=v6 and socket.has_dualstack_ipv6(),
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}. Give another --port, or 0 for a free one"
        ) from error


def _addresses() -> set[str]:
    with contextlib.suppress(OSError):
        return {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    return set()


def _follow(server: Any, parent: int) -> None:
    """Stop the server when its parent process has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    server.should_exit = True
