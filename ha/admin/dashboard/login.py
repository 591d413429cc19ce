"""The login form for adminToken, and the logout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from ..credentials import DASHBOARD_PATH, LOGIN_PATH, AdminGuard
from ..sessions import SESSION_S
from .assets import UNCACHED

FORM_SIZE_MAX = 4096
FIELD_COUNT_MAX = 10

Render = Callable[..., str]


class Login:
    """Handles LOGIN_PATH and LOGOUT_PATH. `render` renders a template by name."""

    def __init__(self, guard: AdminGuard, render: Render) -> None:
        self._guard = guard
        self._render = render

    async def form(self, request: Request) -> Response:
        """Shows the form, if a token is configured."""
        if self._guard.sessions is None:
            return RedirectResponse(DASHBOARD_PATH, 303, UNCACHED)
        return self._page(_safe_redirect(request.query_params.get("next", "")), "", 200)

    async def submit(self, request: Request) -> Response:
        """Checks the token, and sets a session cookie."""
        sessions = self._guard.sessions
        if sessions is None:
            return RedirectResponse(DASHBOARD_PATH, 303, UNCACHED)
        fields = await _form_fields(request)
        wanted = _safe_redirect(fields.get("next", ""))
        if not self._guard.accepts(fields.get("token", "")):
            self._guard.log_rejected(request.scope, 401)
            return self._page(wanted, "Wrong adminToken.", 401)
        response = RedirectResponse(wanted, 303, UNCACHED)
        response.set_cookie(
            sessions.cookie_name,
            sessions.issue(),
            max_age=SESSION_S,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    async def logout(self, request: Request) -> Response:
        """Deletes the session cookie."""
        response = RedirectResponse(LOGIN_PATH, 303, UNCACHED)
        if self._guard.sessions is not None:
            response.delete_cookie(self._guard.sessions.cookie_name, httponly=True, samesite="strict")
        return response

    def _page(self, wanted: str, error: str, status: int) -> Response:
        headers = dict(UNCACHED)
        if error:
            headers["Connection"] = "close"  # one attempt per connection
        return HTMLResponse(self._render("login.html", wanted=wanted, error=error), status, headers)


def _safe_redirect(address: str) -> str:
    """Returns the address to continue at after the login, restricted to the dashboard."""
    is_inside = address == DASHBOARD_PATH or address.startswith((f"{DASHBOARD_PATH}/", f"{DASHBOARD_PATH}?"))
    return address if is_inside and "\\" not in address else DASHBOARD_PATH


async def _form_fields(request: Request) -> dict[str, str]:
    """Returns the fields of a posted form; empty if it is too large, incomplete, or has too many fields."""
    body = b""
    try:
        async with aclosing(request.stream()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > FORM_SIZE_MAX:
                    return {}
    except ClientDisconnect:
        return {}
    try:
        fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=FIELD_COUNT_MAX)
    except ValueError:
        return {}
    return {name: values[0] for name, values in fields.items()}
