"""Who may see the admin port's pages, and who may change something through it.

Reading is open while no token is set (the port is on loopback unless the operator says otherwise). With a token every
page needs it, /live and /ready too: as `Authorization: Bearer TOKEN`, or as the password of basic authentication, which
browsers and old probes know. Whatever may change something (any method but GET and HEAD) needs a token to be set, and
takes it as a bearer token only: a password is sent along by a browser whichever page makes it ask.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any

import trio
from starlette.responses import PlainTextResponse

from ha.repeats import Repeats

logger = logging.getLogger(__name__)

READING = frozenset({"GET", "HEAD"})

Application = Callable[[Any, Any, Any], Awaitable[None]]


class AdminGuard:
    """Stands before an ASGI application. `token` None: reading is open, and nothing else possible."""

    def __init__(self, token: str | None = None) -> None:
        self._digest = None if token is None else sha256(token.encode()).digest()
        self._repeats = Repeats()

    def around(self, application: Application) -> Application:
        """The application, behind this guard."""

        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            refusal = self._refusal(scope) if scope["type"] == "http" else None
            await (refusal or application)(scope, receive, send)

        return guarded

    def _refusal(self, scope: Any) -> PlainTextResponse | None:
        is_reading = scope["method"] in READING
        if self._digest is None:
            if is_reading:
                return None
            return self._refuse(scope, 403, "nothing can be changed here: adminToken is not set")
        if self._is_known(scope, takes_password=is_reading):
            return None
        return self._refuse(scope, 401, "adminToken is needed: Authorization: Bearer …")

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
        assert self._digest is not None
        return hmac.compare_digest(sha256(token).digest(), self._digest)

    def _refuse(self, scope: Any, status: int, text: str) -> PlainTextResponse:
        host = (scope.get("client") or ("?",))[0]
        count = self._repeats.count_if_due((host, status), trio.current_time())
        if count:
            logger.warning(
                "admin_refused peer=%s method=%.16r path=%.64r status=%d times=%d",
                host,
                scope["method"],
                scope["path"],
                status,
                count,
            )
        headers = {}
        if status == 401:
            headers["WWW-Authenticate"] = 'Bearer realm="halog", Basic realm="halog"'
        if scope.get("http_version", "1.1").startswith("1"):
            headers["Connection"] = "close"  # one try for each connection
        return PlainTextResponse(text + "\n", status, headers)
