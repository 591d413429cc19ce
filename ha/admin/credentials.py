"""Access control of the admin port.

Without adminToken, anybody who reaches the port (by default on loopback) can read. With a token, all pages require it,
including /live and /ready: as `Authorization: Bearer TOKEN`, or as the password of basic authentication, which browsers
and simple probes support. Changes (all methods except GET and HEAD) require a configured token, and accept it only as a
bearer token, because a browser would send a password along with a request from any page.

The dashboard has its own login form, and reads with a session cookie (sessions.py).
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
"""Style sheets, scripts and images, which the login form needs; they contain nothing about the node."""

Application = Callable[[Any, Any, Any], Awaitable[None]]


class AdminGuard:
    """Guards an ASGI application. With a `key` without a token, anybody can read and nobody can make changes."""

    def __init__(self, key: AdminKey) -> None:
        self._key = key
        self.sessions = key.sessions
        self._log_limiter = LogRateLimiter()

    def around(self, application: Application) -> Application:
        """Returns the guarded application."""

        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            refusal = self._refusal(scope) if scope["type"] == "http" else None
            await (refusal or application)(scope, receive, send)

        return guarded

    def accepts(self, token: str) -> bool:
        """Whether `token` is the configured one."""
        return self._key.matches(token.encode())

    def _refusal(self, scope: Any) -> Response | None:
        is_reading = scope["method"] in READING
        if not self._key.is_set:
            if is_reading:
                return None
            return self._refuse(scope, 403, "changes are disabled: adminToken is not set")
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
        return self._refuse(scope, 401, "adminToken required: Authorization: Bearer …")

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
        return self._key.matches(token)

    def _refuse(self, scope: Any, status: int, text: str) -> PlainTextResponse:
        self.log_rejected(scope, status)
        headers = {}
        if status == 401:
            headers["WWW-Authenticate"] = 'Bearer realm="halog", Basic realm="halog"'
        if scope.get("http_version", "1.1").startswith("1"):
            headers["Connection"] = "close"  # one attempt per connection
        return PlainTextResponse(text + "\n", status, headers)

    def log_rejected(self, scope: Any, status: int) -> None:
        """Logs a rejected request, rate-limited."""
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
