"""The dashboard's actions: a form, a page that shows what will happen and asks for confirmation, and the outcome.

    GET  /dashboard/act/NAME?…    the form, filled in from the query
    POST /dashboard/act/NAME      the page that asks for confirmation; with `confirmed`, carries the action out

Every POST needs a session and a form token of that session (sessions.py). An action uses up the token of its
confirmation, so submitting that again does nothing. Each action leaves a log line, with its session and without the
content of messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..credentials import ACT_PATH, AdminGuard
from ..sessions import session_label
from .formats import size
from .forms import ACTION_SIZE_MAX, form_fields, is_from_here
from .operations import Operation, Refusal

logger = logging.getLogger(__name__)

Page = Callable[..., Response]


class Acting:
    """Handles ACT_PATH. `page` renders a page for a request."""

    def __init__(self, operations: Mapping[str, Operation], guard: AdminGuard, page: Page) -> None:
        self._operations = operations
        self._guard = guard
        self._page = page

    def routes(self, checked: Callable[[Any], Any]) -> list[Route]:
        """Returns the routes, whose handlers are wrapped by `checked`."""
        path = ACT_PATH + "/{name}"
        return [Route(path, checked(self._form)), Route(path, checked(self._submit), methods=["POST"])]

    async def _form(self, request: Request) -> Response:
        operation = self._find(request)
        if isinstance(operation, Response):
            return operation
        return self._show(request, operation, "form", dict(request.query_params))

    async def _submit(self, request: Request) -> Response:
        operation = self._find(request)
        if isinstance(operation, Response):
            return operation
        sessions = self._guard.sessions
        assert sessions is not None
        values = await form_fields(request, ACTION_SIZE_MAX)
        session = self._guard.session_of(request.scope)
        token = values.pop("form_token", "")
        if session is None or not is_from_here(request) or not sessions.is_form_valid(session, token):
            return self._reject(request)
        is_confirmed = values.pop("confirmed", "") == "1"
        plan = await operation.plan(values)
        if isinstance(plan, Refusal):
            return self._show(request, operation, "form", values, error=plan.reason, status=400)
        if not is_confirmed:
            return self._show(request, operation, "confirm", {**values, **plan.values}, plan=plan)
        # Only now: a form whose action could not be planned can be submitted again.
        if not sessions.is_form_valid(session, token):
            return self._reject(request)  # another request has used it meanwhile
        sessions.use_form(token)
        outcome = await operation.run({**values, **plan.values})
        logger.warning(
            "admin.action_performed action=%s session=%s peer=%s done=%s request=%r outcome=%r",
            operation.name,
            session_label(session),
            (request.scope.get("client") or ("?",))[0],
            str(outcome.is_done).lower(),
            plan.audit,
            outcome.text[:200],
        )
        return self._show(request, operation, "done", values, outcome=outcome, status=200 if outcome.is_done else 409)

    def _reject(self, request: Request) -> Response:
        self._guard.log_rejected(request.scope, 403)
        reason = (
            f"This form has expired, was used already, is larger than {size(ACTION_SIZE_MAX)}, or is not from this "
            "page. Nothing was done."
        )
        return self._page(request, "missing.html", 403, title="Not done", reason=reason)

    def _find(self, request: Request) -> Operation | Response:
        """Returns the operation that a path names, or a page that says why there is none."""
        operation = self._operations.get(request.path_params["name"])
        if self._guard.sessions is None:
            reason = "Actions are off, because no adminToken is set."
        elif self._guard.session_of(request.scope) is None:
            reason = "Actions need a session: log in with the form."
        elif operation is None:
            reason = "The dashboard has no such action."
        else:
            return operation
        return self._page(request, "missing.html", 404, title="Not found", reason=reason)

    def _show(
        self,
        request: Request,
        operation: Operation,
        stage: str,
        values: Mapping[str, str],
        *,
        status: int = 200,
        **shown: object,
    ) -> Response:
        sessions, session = self._guard.sessions, self._guard.session_of(request.scope)
        assert sessions is not None
        return self._page(
            request,
            "act.html",
            status,
            operation=operation,
            stage=stage,
            values={field.name: values.get(field.name, field.default) for field in operation.fields},
            form_token="" if session is None else sessions.form_token(session),  # the session may have ended meanwhile
            **{"error": "", "plan": None, "outcome": None, **shown},
        )
