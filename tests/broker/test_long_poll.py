"""Long polling: what wakes a held pull, when exactly it is answered, and what it leaves behind."""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.broker.filters import Selection
from ha.broker.holds import PullHold, PullHolds
from ha.protocol.codes import LanguageCode
from ha.protocol.headers import PullMessageRequest, parse_header
from ha.protocol.remoting import FRAME_SIZE_MAX, RemotingCommand, encode_command
from ha.remoting.local import LocalConnection
from tests.broker.node import PULL, Node, open_node, text
from tests.testing.time_slices import CALL_COUNT, BusyWork

SUSPEND: dict[str, Any] = {"sysFlag": 6}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with open_node(tmp_path, hold_count_max=3) as node:
        for _ in range(2):
            await node.send()
        await node.dispatched()
        yield node


async def pull_while(node: Node, send: Callable[[], Awaitable[object]], **pull: Any) -> RemotingCommand:
    """Pulls from the end of queue 0, while `send` runs in another task."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        return await node.pull(**{"offset": 2, **SUSPEND, **pull})


async def test_deadline_is_exact(node: Node) -> None:
    began = trio.current_time()
    for timeout_ms in (0, 125, 1500, 3000):
        answer = await node.pull(2, **SUSPEND, suspendTimeoutMillis=timeout_ms)
        assert (answer.code, answer.remark, answer.ext_fields["nextBeginOffset"]) == (19, "OFFSET_OVERFLOW_ONE", "2")
        assert trio.current_time() - began == timeout_ms / 1000
        began = trio.current_time()
    assert len(node.broker.puller.holds) == 0


async def test_earlier_deadline_ends_first(node: Node) -> None:
    began = trio.current_time()
    ended: list[tuple[int, float]] = []

    async def wait(timeout_ms: int) -> None:
        await node.pull(2, **SUSPEND, suspendTimeoutMillis=timeout_ms)
        ended.append((timeout_ms, trio.current_time() - began))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, 9000)
        await wait_all_tasks_blocked()
        nursery.start_soon(wait, 2000)
    assert ended == [(2000, 2.0), (9000, 9.0)]


async def test_arrival_wakes_the_pull(node: Node) -> None:
    began = trio.current_time()

    async def send_later() -> None:
        await trio.sleep(0.5)
        await node.send(b"late", e=1)
        await node.send(b"now")

    answer = await pull_while(node, send_later)
    assert trio.current_time() - began == 0.5
    assert (answer.code, answer.ext_fields["nextBeginOffset"]) == (0, "3")
    assert [record.body for record in node.records(answer)] == [b"now"]


async def test_pull_of_an_empty_queue_is_held(node: Node) -> None:
    async def send_later() -> None:
        await trio.sleep(0.5)
        await node.send(b"now", e=3)

    answer = await pull_while(node, send_later, offset=0, queueId=3)
    assert [record.body for record in node.records(answer)] == [b"now"]


async def test_only_a_matching_tag_wakes(node: Node) -> None:
    began = trio.current_time()

    async def send_later() -> None:
        for tag in ("TagX", "TagB"):
            await trio.sleep(1)
            await node.send(i=f"TAGS\x01{tag}\x02")

    answer = await pull_while(node, send_later, subscription="TagB||TagC")
    assert trio.current_time() - began == 2.0
    assert (answer.code, answer.ext_fields["nextBeginOffset"]) == (0, "4")
    assert [record.property_map()["TAGS"] for record in node.records(answer)] == ["TagB"]


async def test_no_match_until_the_deadline(node: Node) -> None:
    answer = await pull_while(node, node.send, subscription="TagB")
    assert (answer.code, answer.remark, answer.ext_fields["nextBeginOffset"]) == (20, "NO_MATCHED_MESSAGE", "3")


async def test_requested_wait_is_bounded(node: Node) -> None:
    began = trio.current_time()

    async def keep_alive() -> None:
        while True:
            await trio.sleep(50)
            await node.ask(30, topic="TT", queueId=0)

    command = RemotingCommand(
        11,
        language=LanguageCode.JAVA,
        ext_fields={
            name: text(value)
            for name, value in {**PULL, **SUSPEND, "queueOffset": 2, "suspendTimeoutMillis": 1 << 62}.items()
        },
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_alive)
        answer = await node.client.invoke("broker", command, 1000)
        nursery.cancel_scope.cancel()
    assert (answer.code, trio.current_time() - began) == (19, 120.0)


async def test_held_pulls_are_bounded(node: Node) -> None:
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(lambda: node.pull(2, **SUSPEND, suspendTimeoutMillis=5000))
        await wait_all_tasks_blocked()
        assert len(node.broker.puller.holds) == 3
        assert (await node.pull(2, **SUSPEND)).code == 19
        assert trio.current_time() == began
    assert trio.current_time() - began == 5.0


async def test_closed_connection_leaves_no_holds(node: Node) -> None:
    stream = node.listener.connect()
    for opaque in range(2):
        command = RemotingCommand(
            11, opaque=opaque, ext_fields={n: text(v) for n, v in {**PULL, **SUSPEND, "queueOffset": 2}.items()}
        )
        await stream.send_all(encode_command(command))
    await wait_all_tasks_blocked()
    assert len(node.broker.puller.holds) == 2
    await stream.aclose()
    await wait_all_tasks_blocked()
    assert len(node.broker.puller.holds) == 0
    await node.send()


async def test_connection_that_closed_during_the_read_holds_nothing(node: Node) -> None:
    """Its hold was lost from the deadline heap, and counted for ever."""
    connection, holds = LocalConnection(("10.0.0.9", 5)), node.broker.puller.holds
    request = parse_header(PullMessageRequest, {name: text(value) for name, value in PULL.items()})

    def hold() -> PullHold:
        return PullHold(
            connection=connection,
            command=RemotingCommand(11),
            request=request,
            topic="TT",
            queue_id=0,
            queue_offset=2,
            selection=Selection(),
            deadline=trio.current_time() + 1,
        )

    assert holds.add(hold())
    connection.end()
    assert len(holds) == 0
    assert not holds.add(hold())
    assert len(holds) == 0


async def test_without_long_polling_a_pull_waits_one_second(tmp_path: Path) -> None:
    async with open_node(tmp_path, long_polling_enable=False) as node:
        await node.send()
        await node.dispatched()
        began = trio.current_time()
        assert (await node.pull(1, **SUSPEND)).code == 19
        assert trio.current_time() - began == 1.0


async def test_many_short_holds_leave_no_trace(node: Node) -> None:
    """Holds ended by an arrival are removed from the deadline heap long before their deadline."""
    for offset in range(2, 302):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(node.pull, offset, **SUSPEND))
            await wait_all_tasks_blocked()
            await node.send()
    assert len(node.broker.puller.holds._deadlines) < 100


async def test_answer_larger_than_a_frame_fails_only_its_pull(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A message sent in a frame of 16 MiB does not fit an answer, which has a larger header."""
    size: dict[str, Any] = {"message_size_max": FRAME_SIZE_MAX}
    async with open_node(tmp_path, store_changes={"segment_size": 64 << 20, **size}, **size) as node:
        await node.send()
        await node.dispatched()

        async def send_later() -> None:
            await trio.sleep(0.5)
            assert (await node.send(bytes(FRAME_SIZE_MAX - 400))).code == 0

        answer = await pull_while(node, send_later, offset=1)
        assert answer.code == 1
        assert "the answer can't be sent: frame of" in str(answer.remark)
        assert "remoting.reply_failed" in caplog.text
        assert (await node.pull(0)).code == 0


@pytest.mark.real_time
async def test_many_woken_pulls_let_other_tasks_run() -> None:
    work = BusyWork()

    async def busy(hold: PullHold) -> None:
        work.call()

    holds, connection = PullHolds(busy, hold_count_max=CALL_COUNT), LocalConnection(("10.0.0.9", 5))
    for _ in range(CALL_COUNT):
        hold = PullHold(
            connection=connection,
            command=RemotingCommand(11),
            deadline=trio.current_time() + 60,
            request=parse_header(PullMessageRequest, {name: text(value) for name, value in PULL.items()}),
            topic="TT",
            queue_id=0,
            queue_offset=0,
            selection=Selection(),
        )
        assert holds.add(hold)
    async with trio.open_nursery() as nursery:
        await nursery.start(holds.serve)
        holds.wake_all()
        await work.run_beside()
        nursery.cancel_scope.cancel()
    work.check()
