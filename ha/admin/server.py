"""What the admin port answers: a Starlette application on Hypercorn's HTTP protocol. Connections come from port.py.

    /live     200 while the event loop turns
    /ready    200 if the node serves its role, else 503 and why, one line of text
    /status   everything, as JSON; for `ha status`, health checks and people
    /dashboard   the same for people with a browser, and topics, messages and groups (dashboard/)
    /metrics  the figures of metrics.py, for Prometheus
    /switch   POST ?to=2&reason=…&wait_s=10: have another member of the failover group become master, and wait for that
    /log-level   POST ?logger=ha.replication&level=DEBUG: let a logger say more or less; GET: what each says (logs.py)
    /loop     POST ?seconds=60: watch for so long what holds the event loop; GET: what was seen, as JSON (loop_watch.py)

Hypercorn parses whatever a stranger sends, so each connection gets what Hypercorn's own accept loop doesn't give it: a
place, HEADER_S_MAX for its first question, CONNECTION_S_MAX of time, and an end of its own if the parser fails. Closing
the socket is what ends one, because Hypercorn's sends are shielded from cancellation.

There are CONNECTION_COUNT_MAX places, at most CONNECTIONS_PER_HOST_MAX of them for one address. With none left, the
connection that has been kept for a next question for the longest time is closed, or else the oldest one that has asked
nothing for SILENT_S_MIN. If there is none, the newcomer gets one of RESERVED_COUNT places for RESERVED_S_MAX, where
/live and /ready are answered and nothing else: an orchestrator's probe gets in whatever others do, and restarts no node
that is well. Of these the oldest makes way, whatever it does.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState
from hypercorn.utils import wrap_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ha.errors import HandshakeFailed
from ha.log_rate_limiter import LogRateLimiter

from .credentials import AdminGuard, Application
from .dashboard.live import POLL_S
from .dashboard.pages import Dashboard
from .logs import LOG_LEVEL
from .loop_watch import SECONDS_MAX, LoopWatch
from .metrics import Sample
from .metrics_page import MetricsPage
from .sessions import AdminKey
from .view import AdminView, Secure

logger = logging.getLogger(__name__)

CONNECTION_COUNT_MAX = 64
CONNECTIONS_PER_HOST_MAX = 48
HEADER_S_MAX = 5.0
"""From the accept to the end of the first request's header, a TLS handshake included"""
SILENT_S_MIN = 1.0
"""So long a connection may ask nothing before it makes way for another"""
RESERVED_COUNT = 8
RESERVED_S_MAX = 2.0
PROBES = frozenset({"/live", "/ready"})
CONNECTION_S_MAX = 12.5 * POLL_S
"""Ends between two questions of an overview, which asks every POLL_S."""
KEPT_S = 2 * POLL_S
"""How long a connection is kept that asks nothing: longer than an open overview waits before it asks again."""
SWITCH_WAIT_S_MAX = 25.0
REASON_SIZE_MAX = 200


def _application(view: AdminView, loop_watch: LoopWatch, metrics: MetricsPage, guard: AdminGuard) -> Starlette:
    async def live(request: Request) -> Response:
        return PlainTextResponse("live\n")

    async def ready(request: Request) -> Response:
        reason = view.not_ready()
        return PlainTextResponse(f"not ready: {reason}\n", 503) if reason else PlainTextResponse("ready\n")

    async def status(request: Request) -> Response:
        return _json(view.status())

    async def scrape(request: Request) -> Response:
        page, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(page, headers={"Content-Type": content_type})

    async def loop(request: Request) -> Response:
        if request.method == "POST":
            try:
                seconds = float(request.query_params["seconds"])
            except (KeyError, ValueError):
                seconds = 0.0
            if not 0.0 < seconds <= SECONDS_MAX:
                return PlainTextResponse(f"seconds is a number above 0 and at most {SECONDS_MAX:g}\n", 400)
            loop_watch.begin(seconds)
        return _json(loop_watch.report())

    async def switch(request: Request) -> Response:
        if view.switch is None:
            return PlainTextResponse("this node is in no failover group: etcdEndpoints is not set\n", 404)
        asked = request.query_params
        try:
            to = int(asked["to"]) if "to" in asked else None
            wait_s = float(asked.get("wait_s", "10"))
        except ValueError:
            to, wait_s = None, 0.0
        if not 0.0 < wait_s <= SWITCH_WAIT_S_MAX:
            text = f"to is a broker id, wait_s a number of seconds above 0 and at most {SWITCH_WAIT_S_MAX:g}\n"
            return PlainTextResponse(text, 400)
        outcome = await view.switch(to, asked.get("reason", "")[:REASON_SIZE_MAX], wait_s)
        return _json(outcome, 200 if outcome["is_done"] else 409)

    return Starlette(
        routes=[
            Route("/live", live),
            Route("/ready", ready),
            Route("/status", status),
            Route("/metrics", scrape),
            LOG_LEVEL,
            Route("/loop", loop, methods=["GET", "POST"]),
            Route("/switch", switch, methods=["POST"]),
            *([] if view.dashboard is None else Dashboard(view.dashboard, guard).routes()),
        ]
    )


def _json(answer: object, code: int = 200) -> Response:
    body = msgspec.json.format(msgspec.json.encode(answer), indent=2)
    return Response(body + b"\n", code, media_type="application/json")


class _SendFailedError(Exception):
    """Hypercorn couldn't send: the peer's doing, whatever it looks like."""


def _guarded(application: Application) -> ASGIFramework:
    """Keep Hypercorn's failures to send apart from our own bugs, which alone deserve the traceback that it logs.

    Websockets are refused by saying nothing: Hypercorn stumbles over Starlette's refusal.
    """

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        async def guarded_send(message: Any) -> None:
            try:
                await send(message)
            except* Exception as group:
                raise _SendFailedError(str(group.exceptions[0])) from None

        if scope["type"] != "http":
            return
        try:
            await application(scope, receive, guarded_send)
        except* _SendFailedError as group:
            logger.debug("admin.peer_disconnected reason=%r", group.exceptions[0])

    return guarded


class _State(enum.Enum):
    SILENT = "it has asked nothing yet"
    ANSWERED = "at least one of its requests is being answered"
    KEPT = "all it asked is answered"


class _Connection:
    """One connection and what it is doing: SILENT, then ANSWERED and KEPT by turns."""

    __slots__ = ("host", "is_reserved", "scope", "since", "state")

    def __init__(self, host: str, scope: trio.CancelScope, *, is_reserved: bool) -> None:
        self.host = host
        self.scope = scope
        self.is_reserved = is_reserved
        self.enter(_State.SILENT)

    def enter(self, state: _State) -> None:
        self.state = state
        self.since = trio.current_time()


class AdminServer:
    """Serves `view` on one connection after the other, by HTTPS if `secure` is given, to whom `key` lets in."""

    def __init__(self, view: AdminView, secure: Secure | None, key: AdminKey) -> None:
        guard = AdminGuard(key)
        loop_watch = LoopWatch()
        metrics = MetricsPage(view.metrics, self._own_metrics)
        application = guard.around(_application(view, loop_watch, metrics, guard))
        self.watch = loop_watch.serve
        """A task that has to run besides"""
        self._secure = secure
        self._log_limiter = LogRateLimiter()
        self._config = HypercornConfig()
        self._config.accesslog = None
        self._config.errorlog = logging.getLogger(f"{__name__}.http")
        self._config.include_server_header = False
        self._config.read_timeout = 10
        self._config.keep_alive_timeout = KEPT_S  # a connection that the peer has closed lingers for as long, too
        self._app = _guarded(application)
        self._context = WorkerContext(None)
        self._connections: dict[_Connection, None] = {}
        """Those that have a place, oldest first"""

    @property
    def connection_count(self) -> int:
        """How many connections there are."""
        return len(self._connections)

    def _own_metrics(self) -> Iterator[Sample]:
        yield "halog_connections", ("admin",), self.connection_count

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one connection until it ends."""
        peer = _peer(stream)
        host = peer.rpartition(":")[0]
        is_reserved = not self._has_place(host)
        if is_reserved:
            self._make_room_in_reserve()
            times = self._log_limiter.admit("full", trio.current_time())
            if times:
                text = 'admin.connections_full connections=%d peer=%s times=%d hint="only /live and /ready are served"'
                logger.warning(text, self.connection_count, peer, times)
        async with trio.open_nursery() as nursery:
            connection = _Connection(host, nursery.cancel_scope, is_reserved=is_reserved)
            self._connections[connection] = None
            try:
                nursery.start_soon(_close_in_the_end, stream, connection)
                await self._serve_securely(stream, peer, connection)
                nursery.cancel_scope.cancel()
            finally:
                self._connections.pop(connection, None)

    def _has_place(self, host: str) -> bool:
        """Whether there is one for a connection from `host`, or another one makes way for it."""
        placed = [each for each in self._connections if not each.is_reserved]
        own = [each for each in placed if each.host == host]
        if len(own) >= CONNECTIONS_PER_HOST_MAX:
            return self._end_one(own)
        return len(placed) < CONNECTION_COUNT_MAX or self._end_one(placed)

    def _end_one(self, connections: list[_Connection]) -> bool:
        """End one that is not being answered; False if none can be. It is gone when the event loop has turned."""
        now = trio.current_time()
        for state, age_s_min in ((_State.KEPT, 0.0), (_State.SILENT, SILENT_S_MIN)):
            found = [each for each in connections if each.state is state and now - each.since >= age_s_min]
            if found:
                self._end(min(found, key=lambda each: each.since))
                return True
        return False

    def _make_room_in_reserve(self) -> None:
        reserved = [each for each in self._connections if each.is_reserved]
        if len(reserved) >= RESERVED_COUNT:
            self._end(reserved[0])

    def _end(self, connection: _Connection) -> None:
        del self._connections[connection]
        connection.scope.cancel()

    async def _serve_securely(self, stream: trio.SocketStream, peer: str, connection: _Connection) -> None:
        if self._secure is None:
            await self._serve(stream, peer, connection)
            return
        try:
            secured = await self._secure(stream)
        except HandshakeFailed as error:
            times = self._log_limiter.admit(peer.rpartition(":")[0], trio.current_time())
            level = logging.WARNING if times else logging.DEBUG
            logger.log(level, "admin.tls_handshake_failed peer=%s reason=%r times=%d", peer, error.reason, times)
        else:
            await self._serve(secured, peer, connection)

    async def _serve(self, stream: trio.abc.Stream, peer: str, connection: _Connection) -> None:
        request_count = under_way = 0  # of HTTP/2 several at once

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            nonlocal request_count, under_way
            request_count += scope["type"] == "http"
            under_way += 1
            connection.enter(_State.ANSWERED)
            is_welcome = not connection.is_reserved or scope["type"] != "http" or scope["path"] in PROBES
            await (self._app if is_welcome else _BUSY)(scope, receive, send)
            under_way -= 1
            if not under_way:
                connection.enter(_State.KEPT)

        app = wrap_app(counted, self._config.wsgi_max_body_size, "asgi")
        try:
            await TCPServer(app, self._config, self._context, ConnectionState({}), stream)  # type: ignore[arg-type]
        except* Exception as group:
            # Anything: the bytes are a stranger's, the code another project's, and one connection must not end a node.
            logger.warning("admin.connection_failed peer=%s reason=%r", peer, group.exceptions[0])
        else:
            if not request_count:
                logger.info("admin.closed_without_request peer=%s", peer)


def _peer(stream: trio.SocketStream) -> str:
    try:
        host, port = stream.socket.getpeername()[:2]
    except OSError:
        return "gone"
    return f"{host}:{port}"


_BUSY = _guarded(PlainTextResponse("all connections are in use\n", 503, headers={"Connection": "close"}))
"""What a connection of the reserve is told that is no probe's"""


async def _close_in_the_end(stream: trio.SocketStream, connection: _Connection) -> None:
    life_s = RESERVED_S_MAX if connection.is_reserved else CONNECTION_S_MAX
    header_s = min(HEADER_S_MAX, life_s)
    try:
        await trio.sleep(header_s)
        if connection.state is not _State.SILENT:
            await trio.sleep(life_s - header_s)
    finally:
        stream.socket.close()
