"""open_master and open_slave under asyncio: the node runs in a thread, and ends with the block."""

import asyncio
import errno
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import ha
from ha.errors import AddressInUse, ConfigError, DiskFailed
from ha.node.in_thread import NodeInThread, _NodeThread
from ha.store.files import OsFile
from tests.node.test_library import config, only_error

TIMEOUT_S = 60


def message(body: bytes) -> ha.LogMessage:
    return ha.LogMessage(topic="t", queue_id=0, body=body)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a program, and see that no thread of a node is left."""

    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await main()

    asyncio.run(bounded())
    assert node_threads() == []


def node_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "halog-node"]


def is_closed(root: Path) -> bool:
    """Whether the store was closed in order."""
    return (root / "checkpoint").exists() and not (root / "abort").exists()


def test_put_and_read_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with ha.open_master(config(tmp_path)) as master:
            assert isinstance(master, NodeInThread)
            results = await master.put_many([message(b"%d" % number) for number in range(3)])
            assert [result.status for result in results] == [ha.PutStatus.PUT_OK] * 3
            assert (await master.put(message(b"3"))).queue_offset == 3
            reading = master.messages("t", 0)
            assert [bytes((await anext(reading)).body) for _ in range(4)] == [b"0", b"1", b"2", b"3"]
            found = await master.read("t", 0, 1, count_max=2)
            assert [bytes(record.body) for record in found.messages] == [b"1", b"2"]
            host, port = master.remoting_address.split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            await writer.wait_closed()

    run(main)
    assert is_closed(tmp_path)


def test_a_slave_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with ha.open_master(config(tmp_path / "m")) as master:
            assert master.name_server_address is not None
            keys = config(tmp_path / "s", broker_role="SLAVE", name_server_addresses=master.name_server_address)
            async with ha.open_slave(keys) as slave:
                assert (await slave.put(message(b"x"))).status is ha.PutStatus.SERVICE_NOT_AVAILABLE
                await master.put(message(b"x"))
                assert bytes((await anext(slave.messages("t", 0))).body) == b"x"

    run(main)
    assert is_closed(tmp_path / "m")
    assert is_closed(tmp_path / "s")


def test_the_wrong_kind(tmp_path: Path) -> None:
    async def main() -> None:
        async with ha.open_slave(config(tmp_path)):
            pass

    with pytest.raises(ConfigError, match="is not a slave role"):
        run(main)


def test_a_node_that_can_not_bind_raises(tmp_path: Path) -> None:
    async def main() -> None:
        async with ha.open_master(config(tmp_path / "one")) as one:
            port = int(one.admin_address.split(":")[1])
            with pytest.raises(BaseExceptionGroup) as caught:
                async with ha.open_master(config(tmp_path / "other", admin_listen_port=port)):
                    pytest.fail("it opened")
            error = only_error(caught.value)
            assert isinstance(error, AddressInUse)
            assert error.port == port
            assert len(node_threads()) == 1
            await one.put(message(b"x"))

    run(main)


def test_the_caller_s_error_comes_out(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(BaseExceptionGroup) as caught:
            async with ha.open_master(config(tmp_path)):
                raise KeyError("mine")
        assert isinstance(only_error(caught.value), KeyError)

    run(main)
    assert is_closed(tmp_path)


def test_a_node_that_fails_cancels_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = OsFile.sync

    def fail(file: OsFile) -> None:
        if file.path.parent.name == "commitlog":
            raise OSError(errno.EIO, "broken")
        sync(file)

    async def main() -> None:
        async def serve() -> None:
            async with ha.open_master(config(tmp_path, flush_interval_ms=10, flush_least_pages=0)) as master:
                monkeypatch.setattr(OsFile, "sync", fail)
                await master.put(message(b"x"))
                await asyncio.Event().wait()

        with pytest.raises(BaseExceptionGroup) as caught:
            await serve()
        assert caught.value.subgroup(DiskFailed) is not None

    run(main)


def test_cancelling_the_block_stops_the_node(tmp_path: Path) -> None:
    async def main() -> None:
        opened = asyncio.Event()

        async def serve() -> None:
            async with ha.open_master(config(tmp_path)) as master:
                await master.put(message(b"x"))
                opened.set()
                await asyncio.Event().wait()

        serving = asyncio.create_task(serve())
        await opened.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert node_threads() == []

    run(main)
    assert is_closed(tmp_path)


@pytest.mark.parametrize("turns", [1, 2, 5, 50])
def test_cancelling_the_start(tmp_path: Path, turns: int) -> None:
    """Cancelled after `turns` passes of the event loop: a started thread ends, and the store can be opened."""

    async def main() -> None:
        async def serve() -> None:
            async with ha.open_master(config(tmp_path)):
                await asyncio.Event().wait()

        serving = asyncio.create_task(serve())
        for _ in range(turns):
            await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert node_threads() == []
        async with ha.open_master(config(tmp_path)) as master:
            assert (await master.put(message(b"x"))).status is ha.PutStatus.PUT_OK

    run(main)


def test_a_cancelled_call_loses_no_message(tmp_path: Path) -> None:
    async def main() -> None:
        async with ha.open_master(config(tmp_path)) as master:
            reading = master.messages("t", 0)
            for number in range(20):
                waiting = asyncio.create_task(anext(reading))
                await asyncio.sleep(0)
                putting = asyncio.create_task(master.put(message(b"%d" % number)))
                for _ in range(number):
                    await asyncio.sleep(0)
                waiting.cancel()
                [got] = await asyncio.gather(waiting, return_exceptions=True)
                await putting
                record = await anext(reading) if isinstance(got, asyncio.CancelledError) else got
                assert isinstance(record, ha.MessageRecord)
                assert bytes(record.body) == b"%d" % number

    run(main)


def test_a_cancelled_call_ends_in_the_node_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with ha.open_master(config(tmp_path)) as in_thread:
            assert isinstance(in_thread, NodeInThread)
            calls = in_thread._call.__self__._calls  # type: ignore[attr-defined]
            waiting = asyncio.create_task(anext(in_thread.messages("t", 0)))
            while not calls.child_tasks:  # noqa: ASYNC110
                await asyncio.sleep(0)
            waiting.cancel()
            while calls.child_tasks:  # noqa: ASYNC110
                await asyncio.sleep(0)

    run(main)


def test_calls_that_wait_fail_when_the_node_stops(tmp_path: Path) -> None:
    async def main() -> None:
        async with ha.open_master(config(tmp_path)) as master:
            await master.put(message(b"x"))
            waiting = asyncio.create_task(anext(master.messages("t", 0, 1)))
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="the node has stopped"):
            await waiting
        with pytest.raises(RuntimeError, match="the node has stopped"):
            await master.put(message(b"late"))

    run(main)


def test_a_node_that_does_not_stop_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck: list[_NodeThread] = []
    request_stop = _NodeThread._request_stop

    async def main() -> None:
        monkeypatch.setattr(_NodeThread, "_request_stop", lambda thread: stuck.append(thread))
        with pytest.raises(BaseExceptionGroup) as caught:
            async with ha.open_master(config(tmp_path, shutdown_timeout_ms=100)):
                pass
        errors = caught.value.exceptions
        assert {type(error) for error in errors} == {TimeoutError}
        assert "did not stop within shutdownTimeout=100" in str(errors[0])
        [thread] = node_threads()
        stuck[0]._in_thread(request_stop, stuck[0])
        await asyncio.to_thread(thread.join)

    run(main)
