"""The admin port over real sockets, with strangers on it. `open_admin` alone: what it shows is a stub's."""

from __future__ import annotations

import errno
import json
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib import import_module

import msgspec
import pytest
import trio
import trio.testing
from h2.config import H2Configuration
from h2.connection import H2Connection

from ha.admin import AdminKey, AdminView, open_admin
from ha.admin.server import CONNECTION_COUNT_MAX, _Connection, _guarded, _State
from ha.remoting import BoundPort
from tests.limits.sockets import until

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


@pytest.mark.parametrize("version", ['"1.0.0"', "x"])
@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
async def test_metrics_for_who_accepts_an_unknown_version(
    kind: str, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with admin() as (port, _):
        request = GET.format("/metrics").replace("Host: x", f"Host: x\r\nAccept: {kind};version={version}")
        code, body = await ask(port, request)
        assert (code, "# TYPE process_cpu_seconds_total counter" in body) == (200, True)
    assert not caplog.records


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


async def test_a_first_connection_without_file_descriptors_ends_no_node(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of the server can be imported then."""
    errors = [OSError(errno.EMFILE, "Too many open files"), ModuleNotFoundError("No module named 'hypercorn'")]

    async def run_blocking(function: Callable[..., object], *arguments: object) -> object:
        if errors:
            raise errors.pop(0)
        return await trio.to_thread.run_sync(function, *arguments)

    view = AdminView(status=dict, not_ready=lambda: "")
    with BoundPort("adminListenPort", "127.0.0.1", 0) as port:
        async with open_admin(view, port.listen(), run_blocking=run_blocking):
            for _ in range(2):
                async with await trio.open_tcp_stream("127.0.0.1", port.port) as stream:
                    with suppress(trio.BrokenResourceError):
                        assert await stream.receive_some(1) == b""
            assert await ask(port.port, GET.format("/live")) == (200, "live\n")
    assert caplog.text.count("admin.import_failed") == 1


POST = "POST {} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\nAuthorization: Bearer {}\r\n\r\n"
TOKEN = "sixteen characters and more"


def test_a_start_without_file_descriptors_leaves_the_import_to_the_first_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ended the node."""

    class NoDescriptors:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "ha.admin.server":
                raise OSError(errno.EMFILE, "Too many open files", name)

    for name in ("ha.node.later", "ha.admin.server"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoDescriptors(), *sys.meta_path])
    import_module("ha.node.later")
    assert "ha.admin.server" not in sys.modules


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
            assert (code, "not in a failover group" in body) == (404, True)


async def test_a_bug_behind_a_page_is_a_500_and_a_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with admin() as (port, stub):
        stub.size = -1
        assert (await ask(port, GET.format("/status")))[0] == 500
        assert [record.exc_info is not None for record in caplog.records] == [True]
        assert "ValueError: a bug in the status" in caplog.text
        assert (await ask(port, GET.format("/live")))[0] == 200


Connect = Callable[[], Awaitable[trio.SocketStream]]


@asynccontextmanager
async def connecting(port: int, host: str = "127.0.0.1") -> AsyncIterator[Connect]:
    """Connections from an address of this machine, all closed in the end."""
    async with AsyncExitStack() as streams:

        async def connect() -> trio.SocketStream:
            stream = await trio.open_tcp_stream("127.0.0.1", port, local_address=host)
            return await streams.enter_async_context(stream)

        yield connect


async def is_live(stream: trio.SocketStream) -> bool:
    """Ask, and leave the connection open."""
    await stream.send_all(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = b""
    while not answer.endswith(b"live\n") and (chunk := await stream.receive_some(4096)):
        answer += chunk
    return answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("error", [ValueError("gone"), ExceptionGroup("", [ValueError("gone")])], ids=["one", "group"])
async def test_a_failure_to_send_is_the_peer_s(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever Hypercorn raises: it would log a traceback, as for a bug in a page."""

    async def page(scope: object, receive: object, send: Callable[[object], Awaitable[None]]) -> None:
        await send({})

    async def send(message: object) -> None:
        raise error

    caplog.set_level(logging.DEBUG)
    await _guarded(page)({"type": "http"}, None, send)  # type: ignore[arg-type]
    assert "admin.peer_disconnected reason=_SendFailedError('gone')" in caplog.text


async def test_with_every_place_taken_by_answers_probes_are_answered_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ha.admin.server.CONNECTION_COUNT_MAX", 3)
    async with admin() as (port, stub), connecting(port) as connect:
        stub.size = 20_000_000  # more than sockets hold: Hypercorn closes who is silent, not who is slow to read
        slow = [await connect() for _ in range(3)]
        for stream in slow:
            await stream.send_all(GET.format("/status").encode())
            assert await stream.receive_some(1) == b"H"
        for _ in range(20):
            assert await ask(port, GET.format("/live")) == (200, "live\n")
            assert await ask(port, GET.format("/ready")) == (200, "ready\n")
            assert await ask(port, GET.format("/status")) == (503, "all connections are in use\n")
        for stream in slow:
            await stream.aclose()
        stub.size = 0
        answers = [(await ask(port, GET.format("/status")))[0] for _ in range(50)]
        assert answers[-1] == 200


async def test_half_sent_headers_keep_no_probe_out(caplog: pytest.LogCaptureFixture) -> None:
    """Many times as many as there are places, all from the address that the probe comes from."""
    async with admin() as (port, _), connecting(port) as connect:
        assert (await ask(port, GET.format("/live")))[0] == 200
        for _ in range(3 * CONNECTION_COUNT_MAX):
            stream = await connect()
            await stream.send_all(b"GET /live HTTP/1.1\r\nHost: x\r\nX-Y: ")
        assert await ask(port, GET.format("/live")) == (200, "live\n")
        assert await ask(port, GET.format("/ready")) == (200, "ready\n")
    assert caplog.text.count("admin.connections_full") == 1


async def test_a_header_has_to_be_whole_in_time_however_it_drips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.admin.server.HEADER_S_MAX", 0.3)
    async with admin() as (port, _), connecting(port) as connect, trio.open_nursery() as nursery:
        dripping, asking = await connect(), await connect()

        async def drip() -> None:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await dripping.send_all(b"GET /live HTTP/1.1\r\nX-Y: ")
                while True:
                    await dripping.send_all(b"z")
                    await trio.sleep(0.02)

        nursery.start_soon(drip)
        with trio.fail_after(4):  # below Hypercorn's keep-alive timeout
            assert await is_live(asking)
            with suppress(trio.BrokenResourceError):
                assert await dripping.receive_some(1) == b""
            assert await is_live(asking)  # kept, as it has asked something
        nursery.cancel_scope.cancel()


async def test_one_address_has_a_share_of_the_places_and_loses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.admin.server.CONNECTION_COUNT_MAX", 4)
    monkeypatch.setattr("ha.admin.server.CONNECTIONS_PER_HOST_MAX", 2)
    monkeypatch.setattr("ha.admin.server.SILENT_S_MIN", 0.0)
    monkeypatch.setattr("ha.admin.server.RESERVED_COUNT", 0)
    async with admin() as (port, _), connecting(port) as connect, connecting(port, "127.0.0.2") as connect_greedy:
        assert (await ask(port, GET.format("/live")))[0] == 200
        own = [await connect() for _ in range(2)]
        await trio.testing.wait_all_tasks_blocked(0.05)
        greedy = [await connect_greedy() for _ in range(2)]
        await trio.testing.wait_all_tasks_blocked(0.05)
        one_more = await connect_greedy()
        with trio.fail_after(4):
            assert await greedy[0].receive_some(1) == b""
        for stream in (*own, greedy[1], one_more):
            with trio.fail_after(20):
                assert await is_live(stream)


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


async def test_a_connection_whose_page_failed_gives_its_place_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.admin.server.CONNECTION_COUNT_MAX", 1)
    async with admin() as (port, stub), connecting(port) as connect:
        stub.size = -1
        kept = await connect()
        with trio.fail_after(20):
            await kept.send_all(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"Internal Server Error"):
                answer += (chunk := await kept.receive_some(4096))
                assert chunk, "closed"
            await trio.testing.wait_all_tasks_blocked()  # the server's task, too, is done with it
            stub.size = 0
            assert (await ask(port, GET.format("/status")))[0] == 200
            assert await kept.receive_some(1) == b""


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
        with trio.fail_after(4):  # below Hypercorn's keep-alive timeout, and HEADER_S_MAX
            assert await stream.receive_some(1) == b""


async def test_a_request_in_progress_is_answered_before_its_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.admin.server.CONNECTION_S_MAX", 1.0)
    monkeypatch.setattr("ha.admin.server.HEADER_S_MAX", 0.5)

    async def switch(to: int | None, reason: str, wait_s: float) -> dict[str, object]:
        await trio.sleep(2)
        return {"is_done": True}

    view = AdminView(status=dict, not_ready=lambda: "", switch=switch)
    with BoundPort("adminListenPort", "127.0.0.1", 0) as port:
        async with open_admin(view, port.listen(), key=AdminKey(TOKEN)):
            request = POST.format("/switch", TOKEN).replace("Connection: close\r\n", "")
            async with await trio.open_tcp_stream("127.0.0.1", port.port) as stream:
                await stream.send_all(request.encode())
                with trio.fail_after(20):
                    answer = b"".join([chunk async for chunk in stream])
    assert answer.startswith(b"HTTP/1.1 200")
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"is_done": True}


async def test_a_connection_ends_when_requests_that_overlap_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of HTTP/2: the second one begins after the end of the connection's time."""
    for name, value in {"CONNECTION_S_MAX": 0.2, "HEADER_S_MAX": 0.1, "ANSWER_S_MAX": 60.0, "KEPT_S": 60.0}.items():
        monkeypatch.setattr(f"ha.admin.server.{name}", value)
    connections: list[_Connection] = []

    class Noted(_Connection):
        def enter(self, state: _State) -> None:
            super().enter(state)
            connections.append(self)

    monkeypatch.setattr("ha.admin.server._Connection", Noted)
    begun, may_end = 0, trio.Event()

    async def switch(to: int | None, reason: str, wait_s: float) -> dict[str, object]:
        nonlocal begun
        begun += 1
        await may_end.wait()
        return {"is_done": True}

    view = AdminView(status=dict, not_ready=lambda: "", switch=switch)
    headers = {":method": "POST", ":scheme": "http", ":authority": "x", ":path": "/switch"}
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    with BoundPort("adminListenPort", "127.0.0.1", 0) as port:
        async with (
            open_admin(view, port.listen(), key=AdminKey(TOKEN)),
            await trio.open_tcp_stream("127.0.0.1", port.port) as stream,
        ):
            for count in (1, 2):
                request = [*headers.items(), ("authorization", f"Bearer {TOKEN}")]
                client.send_headers(2 * count - 1, request, end_stream=True)
                await stream.send_all(client.data_to_send())
                await until(lambda count=count: begun == count)  # type: ignore[misc]
                await until(lambda: connections[-1].answered.statistics().tasks_waiting == 1)
            may_end.set()
            with trio.fail_after(20):
                async for _ in stream:
                    pass


async def test_a_connection_of_the_reserve_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.admin.server.CONNECTION_COUNT_MAX", 0)
    monkeypatch.setattr("ha.admin.server.RESERVED_S_MAX", 0.2)
    async with admin() as (port, _), await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        with trio.fail_after(4):  # below Hypercorn's own limits, and those of a place
            while chunk := await stream.receive_some(4096):
                answer += chunk
        assert answer.endswith(b"live\n")


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


@pytest.mark.parametrize("text", ["", "GET\r\n\r\n"])
async def test_a_stranger_does_not_fill_the_log(
    text: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ha.admin.server.KEPT_S", 0.05)  # how long a closed connection lingers
    with caplog.at_level("INFO", "ha.admin"):
        async with admin() as (port, _):
            for _ in range(5):
                async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                    await stream.send_all(text.encode())
                    await stream.send_eof()
                    with trio.fail_after(20):
                        async for _ in stream:
                            pass
            await trio.sleep(0.5)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" peer=127.0.0.1:")[0] for line in lines] == ["admin.closed_without_request"]
