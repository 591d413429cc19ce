"""The admin port's HTTP server: a Starlette application on Hypercorn's HTTP protocol, for connections from port.py.

    /live     200 while the event loop runs
    /ready    200 if the node serves its role, otherwise 503 and the reason as one line of text
    /status   the node's state as JSON, for `ha status`, health checks and people
    /dashboard   the same for browsers, and topics, messages, groups and actions (dashboard/)
    /metrics  metrics for Prometheus (metrics.py)
    /switch   POST ?to=2&reason=…&wait_s=10: switch the failover group to another master, and wait for it
    /log-level   POST ?logger=ha.replication&level=DEBUG: set a logger's level; GET: all levels (logs.py)
    /loop     POST ?seconds=60: watch the event loop for that time; GET: the result as JSON (loop_watch.py)

Hypercorn parses untrusted input, so each connection is limited beyond what Hypercorn's own accept loop does. It needs a
slot, and has HEADER_S_MAX for its first request and CONNECTION_S_MAX in total (then ANSWER_S_MAX for a request in
progress). An error in the parser ends only this connection. A connection is ended by closing its socket, because
Hypercorn shields its sends from cancellation.

There are CONNECTION_COUNT_MAX slots, at most CONNECTIONS_PER_HOST_MAX per address. If all of them, or all that the
address may have, are in use, one of these connections is closed: the one that has been idle after a response for
longest, or else the oldest without a request for SILENT_S_MIN. If there is neither, the new connection gets one of
RESERVED_COUNT reserved slots for RESERVED_S_MAX. They serve only /live and /ready, so that an orchestrator's probe
always gets through and does not restart a healthy node. If those are in use as well, the oldest of them is closed.
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
"""Maximum time from the accept to the end of the first request's header, including the TLS handshake."""
SILENT_S_MIN = 1.0
"""Age from which a connection without a request can be closed to make room for another one."""
RESERVED_COUNT = 8
RESERVED_S_MAX = 2.0
PROBES = frozenset({"/live", "/ready"})
CONNECTION_S_MAX = 12.5 * POLL_S
"""Maximum age of a connection: half an interval longer than a multiple of POLL_S, so that it ends between two requests
of an open overview."""
ANSWER_S_MAX = 30.0
"""Maximum time after CONNECTION_S_MAX for the response to a request in progress; /switch takes up to 25 s."""
KEPT_S = 2 * POLL_S
"""Keep-alive timeout; longer than an open overview waits between requests."""
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
                return PlainTextResponse(f"seconds must be greater than 0 and at most {SECONDS_MAX:g}\n", 400)
            loop_watch.begin(seconds)
        return _json(loop_watch.report())

    async def switch(request: Request) -> Response:
        if view.switch is None:
            return PlainTextResponse("this node is not in a failover group: etcdEndpoints is not set\n", 404)
        asked = request.query_params
        try:
            to = int(asked["to"]) if "to" in asked else None
            wait_s = float(asked.get("wait_s", "10"))
        except ValueError:
            to, wait_s = None, 0.0
        if not 0.0 < wait_s <= SWITCH_WAIT_S_MAX:
            text = f"to must be a broker ID, wait_s greater than 0 and at most {SWITCH_WAIT_S_MAX:g}\n"
            return PlainTextResponse(text, 400)
        outcome = await view.switch(to, asked.get("reason", "")[:REASON_SIZE_MAX], wait_s)
        return _json(outcome, 200 if outcome["is_done"] else 409)

    dashboard_routes: list[Route] = []
    if view.dashboard is not None:
        dashboard_routes = Dashboard(view.dashboard, guard, actions=view.actions, switch=view.switch).routes()
    return Starlette(
        routes=[
            Route("/live", live),
            Route("/ready", ready),
            Route("/status", status),
            Route("/metrics", scrape),
            LOG_LEVEL,
            Route("/loop", loop, methods=["GET", "POST"]),
            Route("/switch", switch, methods=["POST"]),
            *dashboard_routes,
        ]
    )


def _json(answer: object, code: int = 200) -> Response:
    body = msgspec.json.format(msgspec.json.encode(answer), indent=2)
    return Response(body + b"\n", code, media_type="application/json")


class _SendFailedError(Exception):
    """Hypercorn could not send, because of the peer."""


def _guarded(application: Application) -> ASGIFramework:
    """Distinguishes failed sends from bugs, so that Hypercorn logs a traceback only for the latter.

    Websockets are rejected by closing them, because Hypercorn fails on Starlette's rejection.
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
    NEW = "no request yet"
    BUSY = "at least one request in progress"
    IDLE = "all requests answered"


class _Connection:
    """A connection and its state: NEW, then alternately BUSY and IDLE."""

    __slots__ = ("answered", "host", "is_reserved", "scope", "since", "state")

    def __init__(self, host: str, scope: trio.CancelScope, *, is_reserved: bool) -> None:
        self.host = host
        self.scope = scope
        self.is_reserved = is_reserved
        self.enter(_State.NEW)

    def enter(self, state: _State) -> None:
        self.state = state
        if state is _State.BUSY:
            self.answered = trio.Event()
            """Set when all requests are answered"""
        elif state is _State.IDLE:
            self.answered.set()
        self.since = trio.current_time()


class AdminServer:
    """Serves `view` on connections, over HTTPS if `secure` is given, to users that `key` accepts."""

    def __init__(self, view: AdminView, secure: Secure | None, key: AdminKey) -> None:
        guard = AdminGuard(key)
        loop_watch = LoopWatch()
        metrics = MetricsPage(view.metrics, self._own_metrics)
        application = guard.around(_application(view, loop_watch, metrics, guard))
        self.watch = loop_watch.serve
        """Watches the event loop for `/loop`; the owner of the server runs it as a task."""
        self._secure = secure
        self._log_limiter = LogRateLimiter()
        self._config = HypercornConfig()
        self._config.accesslog = None
        self._config.errorlog = logging.getLogger(f"{__name__}.http")
        self._config.include_server_header = False
        self._config.read_timeout = 10
        self._config.keep_alive_timeout = KEPT_S  # also how long a closed connection lingers
        self._app = _guarded(application)
        self._context = WorkerContext(None)
        self._connections: dict[_Connection, None] = {}
        """Open connections, oldest first"""

    @property
    def connection_count(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    def _own_metrics(self) -> Iterator[Sample]:
        yield "halog_connections", ("admin",), self.connection_count

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serves a connection until it ends."""
        peer = _peer(stream)
        host = peer.rpartition(":")[0]
        is_reserved = not self._find_slot(host)
        if is_reserved:
            self._free_reserved_slot()
            times = self._log_limiter.admit("full", trio.current_time())
            if times:
                text = 'admin.connections_full connections=%d peer=%s times=%d hint="only /live and /ready are served"'
                logger.warning(text, self.connection_count, peer, times)
        async with trio.open_nursery() as nursery:
            connection = _Connection(host, nursery.cancel_scope, is_reserved=is_reserved)
            self._connections[connection] = None
            try:
                nursery.start_soon(_close_at_deadline, stream, connection)
                await self._serve_securely(stream, peer, connection)
                nursery.cancel_scope.cancel()
            finally:
                self._connections.pop(connection, None)

    def _find_slot(self, host: str) -> bool:
        """Returns whether a slot is free for `host`, after closing another connection if necessary."""
        placed = [each for each in self._connections if not each.is_reserved]
        own = [each for each in placed if each.host == host]
        if len(own) >= CONNECTIONS_PER_HOST_MAX:
            return self._close_one(own)
        return len(placed) < CONNECTION_COUNT_MAX or self._close_one(placed)

    def _close_one(self, connections: list[_Connection]) -> bool:
        """Closes a connection that is not busy; its task ends when it next runs. Returns False if there is none."""
        now = trio.current_time()
        for state, age_s_min in ((_State.IDLE, 0.0), (_State.NEW, SILENT_S_MIN)):
            found = [each for each in connections if each.state is state and now - each.since >= age_s_min]
            if found:
                self._close(min(found, key=lambda each: each.since))
                return True
        return False

    def _free_reserved_slot(self) -> None:
        reserved = [each for each in self._connections if each.is_reserved]
        if len(reserved) >= RESERVED_COUNT:
            self._close(reserved[0])

    def _close(self, connection: _Connection) -> None:
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
        request_count = active_count = 0  # an HTTP/2 connection has several requests at once

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            nonlocal request_count, active_count
            request_count += scope["type"] == "http"
            active_count += 1
            if active_count == 1:
                connection.enter(_State.BUSY)
            is_allowed = not connection.is_reserved or scope["type"] != "http" or scope["path"] in PROBES
            try:
                await (self._app if is_allowed else _BUSY)(scope, receive, send)
            finally:  # Starlette answers with 500, then raises the error of a page
                active_count -= 1
                if not active_count:
                    connection.enter(_State.IDLE)

        app = wrap_app(counted, self._config.wsgi_max_body_size, "asgi")
        try:
            await TCPServer(app, self._config, self._context, ConnectionState({}), stream)  # type: ignore[arg-type]
        except* Exception as group:
            # Any exception: untrusted input in another project's parser must not stop the node.
            if times := self._log_limiter.admit((connection.host, "failed"), trio.current_time()):
                reason = group.exceptions[0]
                logger.warning("admin.connection_failed peer=%s reason=%r times=%d", peer, reason, times)
        else:
            if request_count:
                return
            if times := self._log_limiter.admit((connection.host, "no request"), trio.current_time()):
                logger.info("admin.closed_without_request peer=%s times=%d", peer, times)


def _peer(stream: trio.SocketStream) -> str:
    try:
        host, port = stream.socket.getpeername()[:2]
    except OSError:
        return "gone"
    return f"{host}:{port}"


_BUSY = _guarded(PlainTextResponse("all connections are in use\n", 503, headers={"Connection": "close"}))
"""Response to requests on a reserved connection whose path is not in PROBES."""


async def _close_at_deadline(stream: trio.SocketStream, connection: _Connection) -> None:
    life_s = RESERVED_S_MAX if connection.is_reserved else CONNECTION_S_MAX
    header_s = min(HEADER_S_MAX, life_s)
    try:
        await trio.sleep(header_s)
        if connection.state is not _State.NEW:
            await trio.sleep(life_s - header_s)
            if connection.state is _State.BUSY and not connection.is_reserved:
                with trio.move_on_after(ANSWER_S_MAX):
                    await connection.answered.wait()
    finally:
        stream.socket.close()
