"""The dashboard's routes and pages.

    /dashboard              overview: cluster, rates, lag, recent events
    /dashboard/topics       ?q=&page=&own=1        topics; own=1: the system's, too
    /dashboard/topic        ?name=&page=&at=       a topic and its queues; at: offsets at a time
    /dashboard/queue        ?topic=&queue=&offset=&at=   messages of a queue
    /dashboard/messages     ?q=&topic=             search for messages
    /dashboard/message      ?offset=&as=hex        a message by its physical offset
    /dashboard/groups       ?q=&page=              consumer groups
    /dashboard/group        ?name=                 a group, its members and progress
    /dashboard/live.json, /dashboard/history.json  updates of the overview
    /dashboard/act/NAME     actions (acting.py)

All pages work without scripts, except for automatic updates, and only those of actions change anything. The content of
messages (bodies, properties, keys) is visible to users who have authenticated with adminToken. If none is configured,
it is visible from this machine, through a loopback name, if the remoting port lets anonymous clients read.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import cache
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import trio
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from ..credentials import DASHBOARD_PATH, LOGIN_PATH, LOGOUT_PATH, STATIC_PATH, AdminGuard
from .acting import Acting
from .assets import UNCACHED, serve_asset
from .bodies import BODY_SHOWN_MAX, show_body
from .drawing import draw, surroundings
from .formats import parse_time_ms
from .lag_chart import lag_chart
from .live import POLL_S, Flow, LiveView
from .login import Login
from .operations import Switch, operations_of
from .source import DashboardActions, DashboardSource, Missing, Neighbour, SourceBusyError

if TYPE_CHECKING:
    from .rendering import Renderer

ROWS_PER_PAGE = 50
QUEUES_PER_PAGE = 64
MESSAGES_PER_PAGE = 25
FOUND_MAX = 32
GROUP_TOPICS_MAX = 50
GROUP_QUEUES_MAX = 64
PROPERTIES_MAX = 200
TOPICS_PROPOSED_MAX = 500
"""Maximum number of topics that the search for messages suggests."""
TEXT_LENGTH_MAX = 300
"""Maximum characters of an input field"""

_NUMBER_MAX = (1 << 63) - 1
_SLAVE_STATES = ("connected", "transfer", "out_of_range", "shutdown")
_LINK_STATES = ("ready", "transfer", "shutdown")
_MEMBER_STATES = ("following", "candidate", "master", "fenced")
_PROXY_HEADERS = ("forwarded", "via", "x-forwarded-for", "x-real-ip")

Handler = Callable[[Request], Awaitable[Response]]


class _InvalidQueryError(Exception):
    """The query is invalid; the message says what is accepted."""


class Dashboard:
    """The pages of one node."""

    def __init__(
        self,
        source: DashboardSource,
        guard: AdminGuard,
        *,
        actions: DashboardActions | None = None,
        switch: Switch | None = None,
        wall_clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._source = source
        self._guard = guard
        self._operations = operations_of(source, actions, switch)
        self._renderer: Renderer | None = None
        self._loading = trio.Lock()
        self._live = LiveView(source, self._render_live, wall_clock_ms=wall_clock_ms)

    def routes(self) -> list[Route]:
        """Returns all routes."""
        login = Login(self._guard, self._render)
        pages: dict[str, Handler] = {
            "": self._overview,
            "/topics": self._topics,
            "/topic": self._topic,
            "/queue": self._queue,
            "/messages": self._messages,
            "/message": self._message,
            "/groups": self._groups,
            "/group": self._group,
        }
        return [
            Route("/", _to_overview),
            *(Route(DASHBOARD_PATH + path, self._checked(handler)) for path, handler in pages.items()),
            Route(f"{DASHBOARD_PATH}/live.json", self._checked(self._answer_live)),
            Route(f"{DASHBOARD_PATH}/history.json", self._checked(self._answer_history)),
            Route(LOGIN_PATH, self._checked(login.form)),
            Route(LOGIN_PATH, self._checked(login.submit), methods=["POST"]),
            Route(LOGOUT_PATH, login.logout, methods=["POST"]),
            Route(STATIC_PATH + "/{version}/{name}", serve_asset),
            *Acting(self._operations, self._guard, self._page).routes(self._checked),
            Route(DASHBOARD_PATH + "/{rest:path}", self._checked(self._unknown)),
        ]

    async def _load_templates(self) -> None:
        """Loads the templates, unless another request has done so in the meantime."""
        async with self._loading:
            if self._renderer is None:
                self._renderer = await trio.to_thread.run_sync(_load_renderer)

    # ---- the overview

    async def _overview(self, request: Request) -> Response:
        return self._page(request, "overview.html", live=self._live.html(), poll_ms=round(POLL_S * 1000))

    async def _answer_live(self, request: Request) -> Response:
        return Response(self._live.answer(), headers=UNCACHED, media_type="application/json")

    async def _answer_history(self, request: Request) -> Response:
        return Response(self._live.history(), headers=UNCACHED, media_type="application/json")

    def _render_live(self, status: Mapping[str, Any], flow: Flow, neighbours: Sequence[Neighbour]) -> str:
        around = surroundings(status)
        return self._render(
            "live.html",
            status=status,
            flow=flow,
            neighbours=neighbours,
            around=around,
            wide=draw(around, width=880, columns=3),
            narrow=draw(around, width=330, columns=1),
            slave_states=_SLAVE_STATES,
            link_states=_LINK_STATES,
            member_states=_MEMBER_STATES,
        )

    # ---- topics

    async def _topics(self, request: Request) -> Response:
        search, page = _text(request, "q"), _number(request, "page", 1, least=1)
        with_own = request.query_params.get("own") == "1"
        found = await self._source.topics(
            search, with_system=with_own, begin=(page - 1) * ROWS_PER_PAGE, count=ROWS_PER_PAGE
        )
        return self._page(
            request,
            "topics.html",
            found=found,
            search=search,
            with_own=with_own,
            paging=_paging(request, page, found.found_count, ROWS_PER_PAGE),
        )

    async def _topic(self, request: Request) -> Response:
        name, page = _text(request, "name"), _number(request, "page", 1, least=1)
        at_ms = _time_ms(request)
        detail = await self._source.topic(name, begin=(page - 1) * QUEUES_PER_PAGE, count=QUEUES_PER_PAGE, at_ms=at_ms)
        if isinstance(detail, Missing):
            return self._missing(request, detail)
        paging = _paging(request, page, detail.queue_count, QUEUES_PER_PAGE)
        return self._page(request, "topic.html", detail=detail, paging=paging, at=_text(request, "at"), at_ms=at_ms)

    # ---- messages

    async def _queue(self, request: Request) -> Response:
        topic, queue_id = _text(request, "topic"), _number(request, "queue", 0)
        at_ms = _time_ms(request)
        offset: int | Missing = _number(request, "offset", 0)
        if at_ms is not None:
            offset = await self._source.offset_at(topic, queue_id, at_ms)
            if not isinstance(offset, Missing):
                query = urlencode({"topic": topic, "queue": queue_id, "offset": offset})
                return RedirectResponse(f"{DASHBOARD_PATH}/queue?{query}", 303, UNCACHED)
        if isinstance(offset, Missing):
            return self._missing(request, offset)
        part = await self._source.queue(topic, queue_id, offset, MESSAGES_PER_PAGE)
        if isinstance(part, Missing):
            return self._missing(request, part)
        first = part.messages[0].queue_offset if part.messages else max(offset, part.queue.min_offset)
        return self._page(
            request, "queue.html", topic=topic, part=part, first=first, count=MESSAGES_PER_PAGE, asked=offset
        )

    async def _messages(self, request: Request) -> Response:
        topic, wanted = _text(request, "topic"), _text(request, "q")
        found = None
        if wanted:
            place = await self._offset_of(wanted)
            is_id = not topic and not wanted.isdecimal()  # a number may also be a key
            if self._shows_content(request) and (isinstance(place, Missing) or not is_id):
                if topic:
                    found = await self._source.with_key(topic, wanted, FOUND_MAX)
                else:
                    found = await self._source.with_key_anywhere(wanted, FOUND_MAX)
            if (found is None or not found.messages) and not isinstance(place, Missing):
                return RedirectResponse(f"{DASHBOARD_PATH}/message?offset={place}", 303, UNCACHED)
            if found is None:
                return self._page(request, "withheld.html", 403)
        names = await self._source.topic_names(TOPICS_PROPOSED_MAX)
        return self._page(request, "messages.html", topic=topic, wanted=wanted, found=found, topic_names=names)

    async def _offset_of(self, wanted: str) -> int | Missing:
        """Returns the physical offset in `wanted` (a number or a message ID), or why there is none."""
        if wanted.isascii() and wanted.isdecimal() and len(wanted) < 19:
            return int(wanted)
        return await self._source.message_by_id(wanted)

    async def _message(self, request: Request) -> Response:
        detail = await self._source.message(_number(request, "offset", 0), BODY_SHOWN_MAX)
        if isinstance(detail, Missing):
            return self._missing(request, detail)
        as_hex = request.query_params.get("as") == "hex"
        properties = list(detail.properties.items())
        return self._page(
            request,
            "message.html",
            detail=detail,
            line=detail.line,
            properties=properties[:PROPERTIES_MAX],
            more_count=len(properties) - PROPERTIES_MAX,
            body=show_body(detail.body, is_cut=detail.is_body_cut, as_hex=as_hex),
            as_hex=as_hex,
        )

    # ---- groups

    async def _groups(self, request: Request) -> Response:
        search, page = _text(request, "q"), _number(request, "page", 1, least=1)
        found = await self._source.groups(search, begin=(page - 1) * ROWS_PER_PAGE, count=ROWS_PER_PAGE)
        paging = _paging(request, page, found.found_count, ROWS_PER_PAGE)
        return self._page(request, "groups.html", found=found, search=search, paging=paging)

    async def _group(self, request: Request) -> Response:
        detail = await self._source.group(
            _text(request, "name"), topic_count_max=GROUP_TOPICS_MAX, queue_count_max=GROUP_QUEUES_MAX
        )
        if isinstance(detail, Missing):
            return self._missing(request, detail)
        return self._page(request, "group.html", detail=detail, chart=lag_chart(detail.lag))

    # ---- common

    def _shows_content(self, request: Request) -> bool:
        """Returns whether the content of messages is visible to this user."""
        if self._guard.sessions is not None:
            return True  # the guard has checked the token or the session
        return self._source.is_content_open and _is_local(request)

    def _checked(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            if self._renderer is None:
                await self._load_templates()
            try:
                return await handler(request)
            except _InvalidQueryError as error:
                return self._page(request, "missing.html", 400, title="Invalid address", reason=str(error))
            except SourceBusyError as error:
                reason = f"The node can't read its files at present: {error}."
                return self._page(request, "missing.html", 503, title="Try again later", reason=reason)

        return checked

    async def _unknown(self, request: Request) -> Response:
        if not request.path_params["rest"]:
            return RedirectResponse(DASHBOARD_PATH, 303, UNCACHED)
        return self._missing(request, Missing(f"The dashboard has no page {request.url.path[:TEXT_LENGTH_MAX]}."))

    def _missing(self, request: Request, missing: Missing) -> Response:
        return self._page(request, "missing.html", 404, title="Not found", reason=missing.reason)

    def _page(self, request: Request, template: str, status: int = 200, **shown: object) -> Response:
        node = self._live.status()
        html = self._render(
            template,
            node=node,
            offered=self._offered(request, node["role"]),
            path=request.url.path.removeprefix(DASHBOARD_PATH),
            here=_address(request),
            has_session=self._guard.sessions is not None,
            shows_content=self._shows_content(request),
            **shown,
        )
        return HTMLResponse(html, status, UNCACHED)

    def _offered(self, request: Request, role: str) -> Collection[str]:
        """Returns the names of the actions that a page can offer."""
        if self._guard.session_of(request.scope) is None:
            return ()
        return self._operations.keys() & ({"switch"} if role == "SLAVE" else self._operations.keys())

    def _render(self, template: str, **shown: object) -> str:
        assert self._renderer is not None
        return self._renderer.render(template, shown)


@cache
def _load_renderer() -> Renderer:
    from .rendering import Renderer

    return Renderer()


async def _to_overview(request: Request) -> Response:
    return RedirectResponse(DASHBOARD_PATH, 303, UNCACHED)


def _is_local(request: Request) -> bool:
    """Returns whether the request comes from this machine, not through a proxy, and names a loopback host.

    The name matters because of DNS rebinding: an attacker's page can make its own name resolve to 127.0.0.1.
    """
    if request.client is None or any(name in request.headers for name in _PROXY_HEADERS):
        return False
    named = (request.url.hostname or "").strip("[]")
    try:
        return ip_address(request.client.host).is_loopback and (named == "localhost" or ip_address(named).is_loopback)
    except ValueError:
        return False


def _address(request: Request) -> str:
    """Returns the path and query of a request."""
    query: str = request.scope["query_string"].decode("latin-1")
    return f"{request.scope['path']}?{query}" if query else str(request.scope["path"])


def _text(request: Request, name: str) -> str:
    value = request.query_params.get(name, "").strip()
    if len(value) > TEXT_LENGTH_MAX:
        raise _InvalidQueryError(f"{name} has {len(value)} characters; the maximum is {TEXT_LENGTH_MAX}.")
    return value


def _number(request: Request, name: str, default: int, *, least: int = 0) -> int:
    text = request.query_params.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 19 and least <= int(text) <= _NUMBER_MAX):
        raise _InvalidQueryError(f"{name}={text[:40]} is not a number of at least {least}.")
    return int(text)


def _time_ms(request: Request) -> int | None:
    text = _text(request, "at")
    if not text:
        return None
    at_ms = parse_time_ms(text)
    if at_ms is None:
        raise _InvalidQueryError(f"{text[:40]} is not a time. Use 2025-03-09 07:05:01 (UTC), or ms since 1970.")
    return at_ms


def _paging(request: Request, page: int, found_count: int, per_page: int) -> dict[str, object]:
    """Returns the row numbers of a page, and the addresses of the previous and next page."""
    last = max(1, -(-found_count // per_page))

    def address(number: int) -> str:
        kept = {name: value for name, value in request.query_params.items() if name != "page"}
        return f"?{urlencode({**kept, 'page': number})}"

    return {
        "page": page,
        "last": last,
        "first_row": min(found_count, (page - 1) * per_page + 1),
        "last_row": min(found_count, page * per_page),
        "found_count": found_count,
        "before": address(min(page - 1, last)) if page > 1 else "",
        "after": address(page + 1) if page < last else "",
    }
