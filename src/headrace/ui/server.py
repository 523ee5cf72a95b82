"""The server of the live page: reads run folders, answers GET, changes nothing.

    serve(Path("runs"), port=8765)                    until Ctrl-C

`Guard` checks every request before any page: only GET and HEAD, only a Host that is this server, no request from another site, a
token on any address but loopback, short paths. Responses carry a policy that forbids the page to load anything from elsewhere. Connections that
send or read too slowly are aborted, so they cannot keep other clients out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from headrace.errors import ConfigError, DataError, HeadraceError
from headrace.ui import pages
from headrace.ui.questions import Questions, to_json
from headrace.ui.run_view import RunView, find_runs, spec_book

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

ASSETS = Path(__file__).parent / "assets"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
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
        self._views: OrderedDict[str, RunView] = OrderedDict()
        self._paths: dict[str, Path] = {}
        self._listed = -math.inf

    def view(self, name: str) -> RunView:
        """A run, refreshed. DataError if there is none of this name."""
        with self._lock:
            if name not in self._paths or time.monotonic() - self._listed > 10:
                self._paths, self._listed = find_runs(self.root), time.monotonic()
            if name not in self._paths:
                raise DataError(f"there is no run {name[:200]!r} below {self.root}")
            view = self._views.get(name)
            if view is None or view.path != self._paths[name]:
                view = self._views[name] = RunView(name, self._paths[name], self.book)
            self._views.move_to_end(name)
            while len(self._views) > _OPEN_RUNS:
                self._views.popitem(last=False)
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
        headers: dict[bytes, bytes] = dict(scope["headers"])

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                kept = [
                    (k, v) for k, v in message.get("headers", ()) if k.lower() not in {name for name, _ in _HEADERS}
                ]
                message["headers"] = [*kept, *_HEADERS, *cookie]
            await send(message)

        cookie: list[tuple[bytes, bytes]] = []
        problem = self._problem(scope, headers, cookie)
        app = self._app
        if problem is not None:
            from starlette.responses import PlainTextResponse

            app = PlainTextResponse(problem[1], problem[0])
        await app(scope, receive, guarded)

    def _problem(
        self, scope: Any, headers: dict[bytes, bytes], cookie: list[tuple[bytes, bytes]]
    ) -> tuple[int, str] | None:
        """Status and sentence of a refusal; None if the request is allowed. Adds a `cookie` to set if the address held the token."""
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this page changes nothing: only GET"
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > _MAX_PATH:
            return 414, "the address is too long"
        hosts = [v.decode("latin-1").lower() for k, v in scope["headers"] if k == b"host"]
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return 421, "this server does not answer to that host name"
        site = headers.get(b"sec-fetch-site", b"none")
        if site not in (b"none", b"same-origin") and not (
            site == b"cross-site" and headers.get(b"sec-fetch-mode") == b"navigate" and scope["path"] == "/"
        ):
            return 403, "requests from other sites are refused"
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != hosts[0]:
            return 403, "requests from other sites are refused"
        if self._token is not None:
            given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
            if given and hmac.compare_digest(given.encode(), self._token.encode()):
                cookie.append((b"set-cookie", f"headrace={self._token}; HttpOnly; SameSite=Strict; Path=/".encode()))
                return None
            held = [
                c.partition("=")[2]
                for c in headers.get(b"cookie", b"").decode("latin-1").split("; ")
                if c.startswith("headrace=")
            ]
            if not any(hmac.compare_digest(h.encode(), self._token.encode()) for h in held):
                return 401, "open the address that `headrace ui` printed: it holds a token"
        return None


# --------------------------------------------------------------------------------------------------------- app


def make_app(root: Path, *, hosts: frozenset[str], token: str | None = None, questions: Questions | None = None) -> Any:
    """The pages of the runs below `root`, as an ASGI application behind its guard.

    Args:
        root: A run's folder, or a folder of runs.
        hosts, token: Those of `Guard`.
        questions: Answers questions about documents; made unless given.
    """
    from starlette.applications import Starlette
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    runs = Runs(root)
    asked = questions if questions is not None else Questions()
    following = 0
    # At most four threads make answers, so requests cannot start any number of them.
    makers = asyncio.Semaphore(4)

    def answered(value: Any, status: int = 200) -> Response:
        return Response(to_json(value), status, media_type="application/json")

    async def made(make: Callable[[], Any]) -> Response:
        try:
            async with makers:
                return answered(await asyncio.to_thread(make))
        except HeadraceError as error:
            return answered({"error": str(error)[:2000]}, 404 if isinstance(error, DataError) else 409)
        except (ValueError, KeyError) as error:
            return answered({"error": f"the address makes no sense: {error}"[:500]}, 400)

    def page(make: Callable[[RunView, Any], Any]) -> Any:
        async def answer(request: Request) -> Response:
            return await made(lambda: make(runs.view(request.query_params["run"]), request.query_params))

        return answer

    def ask(view: RunView, question: str, **arguments: Any) -> Any:
        return asked.ask(question, path=view.path.resolve(), **arguments)

    async def all_runs(request: Request) -> Response:
        return await made(lambda: pages.runs(root, runs.book))

    async def compare(request: Request) -> Response:
        query = request.query_params
        return await made(lambda: pages.compare(runs.view(query["a"]), runs.view(query["b"])))

    async def diff(request: Request) -> Response:
        query = request.query_params
        return await made(
            lambda: asked.ask("diff", a=runs.view(query["a"]).path.resolve(), b=runs.view(query["b"]).path.resolve())
        )

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
        "/api/runs": all_runs, "/api/compare": compare, "/api/diff": diff, "/api/events": events,
        "/api/overview": page(lambda view, q: pages.overview(view)),
        "/api/metrics": page(lambda view, q: pages.metrics(view)),
        "/api/config": page(lambda view, q: pages.config(view)),
        "/api/streams": page(lambda view, q: pages.streams(view)),
        "/api/spool": page(lambda view, q: pages.spool(view)),
        "/api/rl": page(lambda view, q: pages.rl(view)),
        "/api/rollouts": page(lambda view, q: pages.rollouts(view, int(q["step"]))),
        "/api/curves": page(lambda view, q: pages.curves(view, q.getlist("key"), first=number(q.get("first")), last=number(q.get("last")), points=int(q.get("points", "600")))),
        "/api/step": page(lambda view, q: ask(view, "step", number=int(q["step"]), rank=number(q.get("rank")))),
        "/api/tokens": page(lambda view, q: ask(view, "tokens", sample=int(q["sample"]))),
        "/api/find": page(lambda view, q: ask(view, "find", source=q["source"], row=int(q["row"]), file=q.get("file") or None)),
        "/api/search": page(lambda view, q: ask(view, "search", text=q["text"][:1000], around=int(q["step"]))),
    }  # fmt: skip

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        await asyncio.to_thread(asked.close)

    app = Starlette(
        routes=[
            *(Route(path, answer) for path, answer in routes.items()),
            Mount("/", StaticFiles(directory=ASSETS, html=True)),
        ],
        lifespan=lifespan,
    )
    return Guard(app, hosts=hosts, token=token)


# ------------------------------------------------------------------------------------------------------- serve


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
    try:
        import uvicorn
        from uvicorn.protocols.http.h11_impl import H11Protocol
    except ImportError:
        raise ConfigError(
            "the live page needs the packages starlette and uvicorn. Run: pip install 'headrace[ui]'"
        ) from None
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
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(128)  # from here on a client of the printed address waits instead of failing
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}. Give another --port, or 0 for a free one"
        ) from error
    return bound


def _addresses() -> set[str]:
    with contextlib.suppress(OSError):
        return {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    return set()


def _follow(server: Any, parent: int) -> None:
    """Stop the server when its parent process has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    server.should_exit = True
