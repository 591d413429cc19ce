"""adminToken: every page needs it if it is set; changes always need it, as a bearer token."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from starlette.responses import PlainTextResponse

from ha.admin import AdminKey, AdminView, open_admin
from ha.admin.credentials import AdminGuard
from ha.remoting import BoundPort

TOKEN = "a-token-of-the-operator"


def basic(user: str, password: str) -> str:
    """The header of basic authentication."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@asynccontextmanager
async def admin(token: str | None) -> AsyncIterator[int]:
    """The port of a node's admin pages."""
    view = AdminView(status=lambda: {"is": "shown"}, not_ready=lambda: "")
    with BoundPort("adminListenPort", "127.0.0.1", 0) as port:
        async with open_admin(view, port.listen(), key=AdminKey(token)):
            yield port.port


async def ask(port: int, path: str, *headers: str, method: str = "GET") -> tuple[int, str]:
    """Status and response."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Length: 0", *headers, "", ""]
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        with trio.fail_after(20):
            await stream.send_all("\r\n".join(lines).encode("latin-1"))
            answer = b""
            async for chunk in stream:
                answer += chunk
    return int(answer.split()[1]), answer.decode("latin-1")


async def test_without_a_token_reading_is_open_and_nothing_else() -> None:
    async with admin(None) as port:
        for path in ("/live", "/ready", "/status"):
            assert (await ask(port, path, "Connection: close"))[0] == 200
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "X"):
            code, text = await ask(port, "/status", method=method)
            assert code == 403, method
            assert "adminToken is not set" in text


async def test_with_a_token_every_page_needs_it(caplog: pytest.LogCaptureFixture) -> None:
    async with admin(TOKEN) as port:
        for path in ("/live", "/ready", "/status", "/nothing"):
            code, text = await ask(port, path)  # and the connection is closed, which is why this returns at once
            assert code == 401
            assert "shown" not in text
            assert 'www-authenticate: Bearer realm="halog"' in text.replace("WWW-A", "www-a")
        close = "Connection: close"
        for credentials in (f"Bearer {TOKEN}", f"bearer  {TOKEN}", basic("", TOKEN), basic("anybody", TOKEN)):
            assert (await ask(port, "/status", f"Authorization: {credentials}", close))[0] == 200, credentials
        for credentials in (
            "Bearer",
            "Bearer ",
            f"Bearer {TOKEN}x",
            f"Bearer {TOKEN[:-1]}",
            TOKEN,
            f"Token {TOKEN}",
            basic(TOKEN, ""),
            basic("x", TOKEN + ":"),
            "Basic " + TOKEN,
            "Basic \xe4\xf6",
        ):
            assert (await ask(port, "/status", f"Authorization: {credentials}"))[0] == 401, credentials
        twice = (f"Authorization: Bearer {TOKEN}", "Authorization: Bearer x")
        assert (await ask(port, "/status", *twice))[0] == 401
    refused = [record.getMessage() for record in caplog.records if "admin.request_refused" in record.getMessage()]
    assert len(refused) == 1
    assert TOKEN not in caplog.text


async def test_a_change_needs_a_bearer_token() -> None:
    """No page changes anything yet: a 405 of the page itself shows that the request was let through."""
    async with admin(TOKEN) as port:
        close = "Connection: close"
        assert (await ask(port, "/status", method="POST"))[0] == 401
        assert (await ask(port, "/status", f"Authorization: {basic('x', TOKEN)}", method="POST"))[0] == 401
        assert (await ask(port, "/status", f"Authorization: Bearer {TOKEN}", close, method="POST"))[0] == 405


async def test_guard_of_a_page_that_changes_something() -> None:
    changes: list[str] = []

    async def page(scope: object, receive: object, send: object) -> None:
        changes.append("done")
        await PlainTextResponse("done")(scope, receive, send)  # type: ignore[arg-type]

    async def post(guard: AdminGuard, *headers: tuple[bytes, bytes]) -> int:
        sent: list[dict[str, int]] = []

        async def send(message: dict[str, int]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/heal", "headers": list(headers), "http_version": "2"}
        await guard.around(page)(scope, None, send)
        return sent[0]["status"]

    assert await post(AdminGuard(AdminKey())) == 403
    assert await post(AdminGuard(AdminKey(TOKEN))) == 401
    assert changes == []
    assert await post(AdminGuard(AdminKey(TOKEN)), (b"authorization", b"Bearer " + TOKEN.encode())) == 200
    assert changes == ["done"]


def test_token_is_not_kept() -> None:
    key = AdminKey(TOKEN)
    assert TOKEN not in repr(vars(key))
