"""The admin port over real sockets, with strangers on it. `open_admin` alone: what it shows is a stub's."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from ha.admin import AdminKey, AdminView, open_admin
from ha.node.ports import BoundPort

GET = "GET {} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class Shown(msgspec.Struct):
    number: int = 7


class Stub:
    def __init__(self) -> None:
        self.reason = ""
        self.size = 0

    def status(self) -> dict[str, object]:
        if self.size < 0:
            raise ValueError("a bug in the status")
        return {"shown": Shown(), "padding": "x" * self.size}


@asynccontextmanager
async def admin() -> AsyncIterator[tuple[int, Stub]]:
    stub = Stub()
    with BoundPort("adminListenPort", "127.0.0.1", 0) as port:
        async with open_admin(AdminView(status=stub.status, not_ready=lambda: stub.reason), port.listen()):
            yield port.port, stub


async def ask(port: int, text: str) -> tuple[int, str]:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        with trio.fail_after(20):
            await stream.send_all(text.encode())
            answer = b"".join([chunk async for chunk in stream])
    head, _, body = answer.decode().partition("\r\n\r\n")
    return int(head.split()[1]), body


async def test_pages() -> None:
    async with admin() as (port, stub):
        assert await ask(port, GET.format("/live")) == (200, "live\n")
        assert await ask(port, GET.format("/ready")) == (200, "ready\n")
        stub.reason = "the disk failed"
        assert await ask(port, GET.format("/ready")) == (503, "not ready: the disk failed\n")
        assert (await ask(port, GET.format("/live")))[0] == 200
        code, body = await ask(port, GET.format("/status"))
        assert (code, json.loads(body)["shown"]) == (200, {"number": 7})
        assert (await ask(port, GET.format("/nothing")))[0] == 404
        assert (await ask(port, "POST /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"))[
            0
        ] == 403


async def test_a_worker_loads_what_answers_when_somebody_asks() -> None:
    calls: list[object] = []

    async def run_blocking(function: Callable[..., object], *arguments: object) -> object:
        calls.append(arguments)
        return await trio.to_thread.run_sync(function, *arguments)

    view = AdminView(status=dict, not_ready=lambda: "")
    with BoundPort("adminListenPort", "127.0.0.1", 0) as port:
        async with open_admin(view, port.listen(), run_blocking=run_blocking):
            assert calls == []
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(ask, port.port, GET.format("/live"))
            assert calls == [("ha.admin.server",)]


POST = "POST {} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\nAuthorization: Bearer {}\r\n\r\n"
TOKEN = "sixteen characters and more"


async def test_a_switch_is_asked_for_with_the_token_alone() -> None:
    asked: list[tuple[int | None, str, float]] = []

    async def switch(to: int | None, reason: str, wait_s: float) -> dict[str, object]:
        asked.append((to, reason, wait_s))
        return {"is_done": to != 9, "why_not": "member 9 is not there" if to == 9 else ""}

    view = AdminView(status=dict, not_ready=lambda: "", switch=switch)
    with BoundPort("adminListenPort", "127.0.0.1", 0) as port:
        async with open_admin(view, port.listen(), key=AdminKey(TOKEN)):
            code, body = await ask(port.port, POST.format("/switch?to=2&reason=a+new%20disk&wait_s=3", TOKEN))
            assert (code, json.loads(body)["is_done"]) == (200, True)
            assert (await ask(port.port, POST.format("/switch", TOKEN)))[0] == 200
            code, body = await ask(port.port, POST.format("/switch?to=9", TOKEN))
            assert (code, json.loads(body)["why_not"]) == (409, "member 9 is not there")
            assert asked == [(2, "a new disk", 3.0), (None, "", 10.0), (9, "", 10.0)]
            for wrong in ("to=two", "to=", "wait_s=0", "wait_s=26", "wait_s=nan", "wait_s=soon"):
                assert (await ask(port.port, POST.format(f"/switch?{wrong}", TOKEN)))[0] == 400
            assert (await ask(port.port, POST.format("/switch?to=2", "another")))[0] == 401
            assert (await ask(port.port, GET.format("/switch?to=2")))[0] == 401
            assert len(asked) == 3
    with BoundPort("adminListenPort", "127.0.0.1", 0) as port:
        async with open_admin(view, port.listen()):
            assert (await ask(port.port, POST.format("/switch?to=2", TOKEN)))[0] == 403
            assert (await ask(port.port, GET.format("/switch?to=2")))[0] == 405
            assert len(asked) == 3


async def test_a_node_of_no_group_switches_nothing() -> None:
    view = AdminView(status=dict, not_ready=lambda: "")
    with BoundPort("adminListenPort", "127.0.0.1", 0) as port:
        async with open_admin(view, port.listen(), key=AdminKey(TOKEN)):
            code, body = await ask(port.port, POST.format("/switch?to=2", TOKEN))
            assert (code, "no failover group" in body) == (404, True)


async def test_a_bug_behind_a_page_is_a_500_and_a_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with admin() as (port, stub):
        stub.size = -1
        assert (await ask(port, GET.format("/status")))[0] == 500
        assert [record.exc_info is not None for record in caplog.records] == [True]
        assert "ValueError: a bug in the status" in caplog.text
        assert (await ask(port, GET.format("/live")))[0] == 200


async def test_more_connections_than_allowed_are_closed_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("ha.admin.server.CONNECTION_COUNT_MAX", 3)
    async with admin() as (port, stub), AsyncExitStack() as streams:

        async def connect() -> trio.SocketStream:
            return await streams.enter_async_context(await trio.open_tcp_stream("127.0.0.1", port))

        stub.size = 20_000_000  # more than sockets hold: Hypercorn closes who is silent, not who is slow to read
        slow = [await connect() for _ in range(3)]
        for stream in slow:
            await stream.send_all(GET.format("/status").encode())
            assert await stream.receive_some(1) == b"H"
        one_more = await connect()
        its_port = one_more.socket.getsockname()[1]
        with trio.fail_after(10):
            assert await one_more.receive_some(1) == b""
        for stream in slow:
            await stream.aclose()
        with trio.fail_after(10):
            while True:
                try:
                    assert (await ask(port, GET.format("/live")))[0] == 200
                    break
                except (IndexError, trio.BrokenResourceError):
                    await trio.sleep(0.01)
    # Whom Hypercorn closes for his silence has been served until then and is logged.
    assert not any(record.getMessage().endswith(f":{its_port}") for record in caplog.records)


async def test_a_connection_that_was_answered_gives_its_place_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.admin.server.CONNECTION_COUNT_MAX", 3)
    question = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
    async with admin() as (port, _), AsyncExitStack() as streams:

        async def connect() -> trio.SocketStream:
            return await streams.enter_async_context(await trio.open_tcp_stream("127.0.0.1", port))

        async def asked(stream: trio.SocketStream) -> bytes:
            await stream.send_all(question)
            answer = b""
            while not answer.endswith(b"live\n"):
                answer += (chunk := await stream.receive_some(4096))
                assert chunk, "closed"
            await trio.testing.wait_all_tasks_blocked()  # the server's task, too, is done with it
            return answer

        kept = [await connect() for _ in range(3)]
        with trio.fail_after(20):
            for stream in (*kept, kept[0]):  # so that the second is the one that has asked nothing for the longest time
                assert (await asked(stream)).startswith(b"HTTP/1.1 200")
            assert (await asked(await connect())).startswith(b"HTTP/1.1 200")
            assert await kept[1].receive_some(1) == b""
            for stream in (kept[0], kept[2]):
                assert (await asked(stream)).startswith(b"HTTP/1.1 200")
            for _ in range(20):
                assert (await ask(port, GET.format("/live")))[0] == 200


async def test_a_stranger_who_never_reads_does_not_hold_up_the_end() -> None:
    """Hypercorn's sends are shielded: only closing the socket ends one that the peer doesn't take."""
    with trio.fail_after(20):
        async with admin() as (port, stub):
            stub.size = 50_000_000
            stranger = await trio.open_tcp_stream("127.0.0.1", port)
            await stranger.send_all(GET.format("/status").encode())
            assert await stranger.receive_some(1) == b"H"  # the answer is on its way and stuck
        await stranger.aclose()


async def test_a_connection_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.admin.server.CONNECTION_S_MAX", 0.2)
    async with admin() as (port, _), await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(b"GET /live HTTP/1.1\r\n")
        with trio.fail_after(5):  # far below Hypercorn's own limits
            assert await stream.receive_some(1) == b""


@pytest.mark.parametrize("text", ["\x16\x03\x01\x02\x00", "GET\r\n\r\n", "\x00" * 100])
async def test_who_asks_nothing_that_can_be_understood_is_closed_and_logged(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    logged = trio.Event()
    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            logged.set()

    logger, listener = logging.getLogger("ha.admin.server"), Listener()
    logger.addHandler(listener)
    with caplog.at_level("INFO"):
        async with admin() as (port, _):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                own_port = stream.socket.getsockname()[1]
                await stream.send_all(text.encode())
                await stream.send_eof()
                with trio.fail_after(20):
                    async for _ in stream:
                        pass
                    await logged.wait()
            assert (await ask(port, GET.format("/live")))[0] == 200
    logger.removeHandler(listener)
    [line] = told
    assert f"peer=127.0.0.1:{own_port}" in line
