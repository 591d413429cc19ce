"""Who may see the admin port's pages, and who may change something through it.

Reading is open while no token is set (the port is on loopback unless the operator says otherwise). With a token every
page needs it, /live and /ready too: as `Authorization: Bearer TOKEN`, or as the password of basic authentication, which
browsers and old probes know. Whatever may change something (any method but GET and HEAD) needs a token to be set, and
takes it as a bearer token only: a password is sent along by a browser whichever page makes it ask.

The dashboard asks for the token with a form of its own, and reads with the cookie that it gives (sessions.py).
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import trio
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from ha.log_rate_limiter import LogRateLimiter

from .sessions import AdminKey

logger = logging.getLogger(__name__)

READING = frozenset({"GET", "HEAD"})

DASHBOARD_PATH = "/dashboard"
LOGIN_PATH = f"{DASHBOARD_PATH}/login"
LOGOUT_PATH = f"{DASHBOARD_PATH}/logout"
STATIC_PATH = f"{DASHBOARD_PATH}/static"
"""Style, scripts and pictures, which hold nothing of the node; the form needs them."""

Application = Callable[[Any, Any, Any], Awaitable[None]]


class AdminGuard:
    """Stands before an ASGI application. A `key` without a token: reading is open, and nothing else possible."""

    def __init__(self, key: AdminKey) -> None:
        self._key = key
        self.sessions = key.sessions
        self._log_limiter = LogRateLimiter()

    def around(self, application: Application) -> Application:
        """The application, behind this guard."""

        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            refusal = self._refusal(scope) if scope["type"] == "http" else None
            await (refusal or application)(scope, receive, send)

        return guarded

    def knows(self, token: str) -> bool:
        """Whether it is the token."""
        return self._key.fits(token.encode())

    def _refusal(self, scope: Any) -> Response | None:
        is_reading = scope["method"] in READING
        if not self._key.is_set:
            if is_reading:
                return None
            return self._refuse(scope, 403, "nothing can be changed here: adminToken is not set")
        path: str = scope["path"]
        if path in (LOGIN_PATH, LOGOUT_PATH) or self._is_known(scope, takes_password=is_reading):
            return None
        if is_reading:
            if path.startswith(f"{STATIC_PATH}/") or self._has_session(scope):
                return None
            if path in ("/", DASHBOARD_PATH) or path.startswith(f"{DASHBOARD_PATH}/"):
                asked = path + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
                return RedirectResponse(
                    f"{LOGIN_PATH}?next={quote(asked, safe='')}", 303, {"Cache-Control": "no-store"}
                )
        return self._refuse(scope, 401, "adminToken is needed: Authorization: Bearer …")

    def _has_session(self, scope: Any) -> bool:
        assert self.sessions is not None
        value = HTTPConnection(scope).cookies.get(self.sessions.cookie_name)
        return value is not None and self.sessions.is_valid(value)

    def _is_known(self, scope: Any, *, takes_password: bool) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, value = given[0].strip().partition(b" ")
        value = value.strip()
        match scheme.lower():
            case b"bearer":
                token = value
            case b"basic" if takes_password:
                try:
                    token = base64.b64decode(value, validate=True).partition(b":")[2]
                except binascii.Error:
                    return False
            case _:
                return False
        return self._key.fits(token)

    def _refuse(self, scope: Any, status: int, text: str) -> PlainTextResponse:
        self.note_refused(scope, status)
        headers = {}
        if status == 401:
            headers["WWW-Authenticate"] = 'Bearer realm="halog", Basic realm="halog"'
        if scope.get("http_version", "1.1").startswith("1"):
            headers["Connection"] = "close"  # one try for each connection
        return PlainTextResponse(text + "\n", status, headers)

    def note_refused(self, scope: Any, status: int) -> None:
        """Log that somebody was refused, the first time and then now and again."""
        host = (scope.get("client") or ("?",))[0]
        count = self._log_limiter.admit((host, status), trio.current_time())
        if count:
            logger.warning(
                "admin.request_refused peer=%s method=%.16r path=%.64r status=%d times=%d",
                host,
                scope["method"],
                scope["path"],
                status,
                count,
            )
