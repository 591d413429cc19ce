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
place among at most CONNECTION_COUNT_MAX, CONNECTION_S_MAX of time, and an end of its own if the parser fails. Closing
the socket is what ends one, because Hypercorn's sends are shielded from cancellation. One that was answered and is kept
for a next question gives its place to whoever comes.
"""

from __future__ import annotations

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
from ha.repeats import Repeats

from .credentials import AdminGuard, Application
from .dashboard.live import POLL_S
from .dashboard.pages import Dashboard
from .logs import LOG_LEVEL
from .loop_watch import SECONDS_MAX, LoopWatch
from .metrics import Sample
from .metrics_page import MetricsPage
from .port import Secure
from .sessions import AdminKey
from .view import AdminView

logger = logging.getLogger(__name__)

CONNECTION_COUNT_MAX = 64
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
            logger.debug("admin_peer_gone reason=%r", group.exceptions[0])

    return guarded


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
        self._strangers = Repeats()
        self._config = HypercornConfig()
        self._config.accesslog = None
        self._config.errorlog = logging.getLogger(f"{__name__}.http")
        self._config.include_server_header = False
        self._config.read_timeout = 10
        self._config.keep_alive_timeout = KEPT_S  # a connection that the peer has closed lingers for as long, too
        self._app = _guarded(application)
        self._context = WorkerContext(None)
        self._idle: dict[trio.CancelScope, None] = {}
        """Of connections that were answered and ask nothing now, the longest idle first"""
        self.connection_count = 0

    def _own_metrics(self) -> Iterator[Sample]:
        yield "halog_connections", ("admin",), self.connection_count

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one connection until it ends."""
        if self.connection_count >= CONNECTION_COUNT_MAX and not self._end_an_idle_one():
            await trio.aclose_forcefully(stream)
            return
        self.connection_count += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_close_in_the_end, stream)
                await self._serve_securely(stream, nursery.cancel_scope)
                nursery.cancel_scope.cancel()
        finally:
            self._idle.pop(nursery.cancel_scope, None)
            self.connection_count -= 1

    def _end_an_idle_one(self) -> bool:
        """Whether there was one; it is gone when the event loop has turned."""
        life = next(iter(self._idle), None)
        if life is None:
            return False
        del self._idle[life]
        life.cancel()
        return True

    async def _serve_securely(self, stream: trio.SocketStream, life: trio.CancelScope) -> None:
        peer = _peer(stream)
        if self._secure is None:
            await self._serve(stream, peer, life)
            return
        try:
            secured = await self._secure(stream)
        except HandshakeFailed as error:
            times = self._strangers.count_if_due(peer.rpartition(":")[0], trio.current_time())
            level = logging.WARNING if times else logging.DEBUG
            logger.log(level, "admin_refused peer=%s reason=%r times=%d", peer, error.reason, times)
        else:
            await self._serve(secured, peer, life)

    async def _serve(self, stream: trio.abc.Stream, peer: str, life: trio.CancelScope) -> None:
        request_count = under_way = 0  # of HTTP/2 several at once

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            nonlocal request_count, under_way
            request_count += scope["type"] == "http"
            under_way += 1
            self._idle.pop(life, None)
            await self._app(scope, receive, send)
            under_way -= 1
            if not under_way:
                self._idle[life] = None

        app = wrap_app(counted, self._config.wsgi_max_body_size, "asgi")
        try:
            await TCPServer(app, self._config, self._context, ConnectionState({}), stream)  # type: ignore[arg-type]
        except* Exception as group:
            # Anything: the bytes are a stranger's, the code another project's, and one connection must not end a node.
            logger.warning("admin_connection_failed peer=%s reason=%r", peer, group.exceptions[0])
        else:
            if not request_count:
                logger.info("admin_closed_without_request peer=%s", peer)


def _peer(stream: trio.SocketStream) -> str:
    try:
        host, port = stream.socket.getpeername()[:2]
    except OSError:
        return "gone"
    return f"{host}:{port}"


async def _close_in_the_end(stream: trio.SocketStream) -> None:
    try:
        await trio.sleep(CONNECTION_S_MAX)
    finally:
        stream.socket.close()
