"""The login form for adminToken, and the logout.

The form has a token that is bound to a separate cookie, which prevents other sites from logging a browser in. Each
login issues a new session.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from ..credentials import DASHBOARD_PATH, LOGIN_PATH, AdminGuard
from ..sessions import FORM_S, SESSION_S, Sessions
from .assets import UNCACHED
from .forms import LOGIN_SIZE_MAX, form_fields, is_from_here

Render = Callable[..., str]


class Login:
    """Handles LOGIN_PATH and LOGOUT_PATH. `render` renders a template by name."""

    def __init__(self, guard: AdminGuard, render: Render) -> None:
        self._guard = guard
        self._render = render

    async def form(self, request: Request) -> Response:
        """Shows the form; redirects to the dashboard if no token is configured."""
        if self._guard.sessions is None:
            return RedirectResponse(DASHBOARD_PATH, 303, UNCACHED)
        return self._page(request, _safe_redirect(request.query_params.get("next", "")), "", 200)

    async def submit(self, request: Request) -> Response:
        """Checks the token. If it is correct, sets a session cookie and redirects to the requested page."""
        sessions = self._guard.sessions
        if sessions is None:
            return RedirectResponse(DASHBOARD_PATH, 303, UNCACHED)
        fields = await form_fields(request, LOGIN_SIZE_MAX)
        wanted = _safe_redirect(fields.get("next", ""))
        nonce, form_token = request.cookies.get(_form_cookie(sessions), ""), fields.get("form_token", "")
        if not is_from_here(request) or not sessions.is_form_valid(_LOGIN + nonce, form_token):
            self._guard.log_rejected(request.scope, 403)
            return self._page(request, wanted, "This form has expired. Please try again.", 403)
        if wait_s := self._guard.wait_s(request.scope):
            self._guard.log_rejected(request.scope, 429)
            text = f"Too many wrong tokens from your address. Wait {math.ceil(wait_s)} s."
            return self._page(request, wanted, text, 429)
        if not self._guard.accepts(request.scope, fields.get("token", "").encode()):
            self._guard.log_rejected(request.scope, 401)
            return self._page(request, wanted, "Wrong adminToken.", 401)
        sessions.use_form(form_token)
        response = RedirectResponse(wanted, 303, UNCACHED)
        _set_cookie(request, response, sessions.cookie_name, sessions.issue(), SESSION_S)
        response.delete_cookie(_form_cookie(sessions), httponly=True, samesite="strict")
        return response

    async def logout(self, request: Request) -> Response:
        """Ends the session, and deletes its cookie."""
        response = RedirectResponse(LOGIN_PATH, 303, UNCACHED)
        sessions = self._guard.sessions
        if sessions is not None and is_from_here(request):
            sessions.end(request.cookies.get(sessions.cookie_name, ""))
            response.delete_cookie(sessions.cookie_name, httponly=True, samesite="strict")
        return response

    def _page(self, request: Request, wanted: str, error: str, status: int) -> Response:
        sessions = self._guard.sessions
        assert sessions is not None
        headers = dict(UNCACHED)
        if error:
            headers["Connection"] = "close"  # one attempt per connection
        nonce = secrets.token_hex(16)
        form_token = sessions.form_token(_LOGIN + nonce)
        html = self._render("login.html", wanted=wanted, error=error, form_token=form_token)
        response = HTMLResponse(html, status, headers)
        _set_cookie(request, response, _form_cookie(sessions), nonce, FORM_S)
        return response


_LOGIN = "login "


def _form_cookie(sessions: Sessions) -> str:
    return f"{sessions.cookie_name}_form"


def _set_cookie(request: Request, response: Response, name: str, value: str, life_s: int) -> None:
    is_secure = request.scope.get("scheme") == "https"
    response.set_cookie(name, value, max_age=life_s, httponly=True, samesite="strict", secure=is_secure)


def _safe_redirect(address: str) -> str:
    """Returns the address to continue at after the login, restricted to the dashboard."""
    is_inside = address == DASHBOARD_PATH or address.startswith((f"{DASHBOARD_PATH}/", f"{DASHBOARD_PATH}?"))
    return address if is_inside and "\\" not in address else DASHBOARD_PATH
