"""Access control of the admin port.

Without adminToken, anybody who reaches the port (by default on loopback) can read. With a token, everything except the
login form and static files requires it, /live and /ready included: as `Authorization: Bearer TOKEN`, or as the password
of basic authentication, which browsers and simple probes support. Changes (all methods except GET and HEAD) require a
configured token, and accept it only as a bearer token, because a browser would send a password along with a request
from any page.

The dashboard has its own login form. Its pages also accept the session cookie of a login (sessions.py), and its actions
require that cookie and a form token. An address that has given too many wrong tokens has to wait (attempts.py).
"""

from __future__ import annotations

import base64
import binascii
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import trio
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from ha.log_rate_limiter import LogRateLimiter

from .attempts import Attempts
from .sessions import AdminKey

logger = logging.getLogger(__name__)

TOO_MANY = "too many wrong tokens from this address; wait"

READING = frozenset({"GET", "HEAD"})

DASHBOARD_PATH = "/dashboard"
LOGIN_PATH = f"{DASHBOARD_PATH}/login"
ACT_PATH = f"{DASHBOARD_PATH}/act"
LOGOUT_PATH = f"{DASHBOARD_PATH}/logout"
STATIC_PATH = f"{DASHBOARD_PATH}/static"
"""Path of style sheets, scripts and images. They are served without login, because the login form needs them and they
contain nothing about the node."""
_ASSET_PATH = re.compile(f"{STATIC_PATH}/[^/]+/[^/]+")
"""Paths that are served without login: exactly those of the route of assets. Any other path below STATIC_PATH would get
the dashboard's "not found" page, which needs a login."""

Application = Callable[[Any, Any, Any], Awaitable[None]]


class AdminGuard:
    """Guards an ASGI application. With a `key` without a token, anybody can read and nobody can make changes."""

    def __init__(self, key: AdminKey) -> None:
        self._key = key
        self.sessions = key.sessions
        self._attempts = Attempts(trio.current_time)
        self._log_limiter = LogRateLimiter()

    def around(self, application: Application) -> Application:
        """Returns the guarded application."""

        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            refusal = self._refusal(scope) if scope["type"] == "http" else None
            await (refusal or application)(scope, receive, send)

        return guarded

    def wait_s(self, scope: Any) -> float:
        """Returns the seconds that the peer has to wait before it may give a token again; 0 if it may at once."""
        return self._attempts.wait_s(_host(scope))

    def accepts(self, scope: Any, token: bytes) -> bool:
        """Returns whether `token` is the configured one. Counts wrong tokens; call `wait_s` first."""
        if self._key.matches(token):
            return True
        self._attempts.note_failure(_host(scope))
        return False

    def session_of(self, scope: Any) -> str | None:
        """Returns the session cookie of a request; None if it has no valid one."""
        if self.sessions is None:
            return None
        value = HTTPConnection(scope).cookies.get(self.sessions.cookie_name)
        return value if value is not None and self.sessions.is_valid(value) else None

    def _refusal(self, scope: Any) -> Response | None:
        is_reading = scope["method"] in READING
        if not self._key.is_set:
            if is_reading:
                return None
            return self._refuse(scope, 403, "changes are disabled: adminToken is not set")
        path: str = scope["path"]
        if path == LOGIN_PATH or (path == LOGOUT_PATH and scope["method"] == "POST"):
            return None
        token = _given_token(scope, takes_password=is_reading)
        if token is not None:
            if wait_s := self.wait_s(scope):
                return self._refuse(scope, 429, TOO_MANY, {"Retry-After": f"{math.ceil(wait_s)}"})
            if self.accepts(scope, token):
                return None
        if path.startswith(f"{ACT_PATH}/"):
            # `Acting` checks the form token.
            return None if self.session_of(scope) is not None else _redirect_to_login(path)
        if is_reading:
            if _ASSET_PATH.fullmatch(path) or self.session_of(scope) is not None:
                return None
            if path in ("/", DASHBOARD_PATH) or path.startswith(f"{DASHBOARD_PATH}/"):
                asked = path + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
                return _redirect_to_login(asked)
        return self._refuse(scope, 401, "adminToken required: Authorization: Bearer …")

    def _refuse(
        self, scope: Any, status: int, text: str, headers: Mapping[str, str] = MappingProxyType({})
    ) -> PlainTextResponse:
        self.log_rejected(scope, status)
        headers = dict(headers)
        if status == 401:
            headers["WWW-Authenticate"] = 'Bearer realm="halog", Basic realm="halog"'
        if scope.get("http_version", "1.1").startswith("1"):
            headers["Connection"] = "close"  # one attempt per connection
        return PlainTextResponse(text + "\n", status, headers)

    def log_rejected(self, scope: Any, status: int) -> None:
        """Logs a rejected request, rate-limited."""
        host = _host(scope)
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


def _host(scope: Any) -> str:
    return str((scope.get("client") or ("?",))[0])


def _redirect_to_login(asked: str) -> Response:
    address = f"{LOGIN_PATH}?next={quote(asked, safe='')}"
    return RedirectResponse(address, 303, {"Cache-Control": "no-store"})


def _given_token(scope: Any, *, takes_password: bool) -> bytes | None:
    """Returns the token in a request's header, None if there is none in an accepted form."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1:
        return None
    scheme, _, value = given[0].strip().partition(b" ")
    value = value.strip()
    match scheme.lower():
        case b"bearer":
            return bytes(value)
        case b"basic" if takes_password:
            try:
                return base64.b64decode(value, validate=True).partition(b":")[2]
            except binascii.Error:
                return None
        case _:
            return None
