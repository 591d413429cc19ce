"""Files that the disk can't read: requests that need them are answered, and the broker goes on."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.protocol.codes import ResponseCode
from ha.store.files import File, OsDisk
from tests.broker.node import PULL, Node, open_node
from tests.broker.pop_client import POP
from tests.store.bad_sectors import SECTOR_BYTES, BadSectors, bad_sectors

FIELDS: dict[int, dict[str, Any]] = {
    11: {**PULL, "queueOffset": 0, "sysFlag": 6, "suspendTimeoutMillis": 9000},
    200050: {**POP, "pollTime": 9000},
}
"""Those of a pull and a pop that wait for messages"""
REMARK = "the disk can't read: [Errno 5] Input/output error"


class WithoutCopies(OsDisk):
    """While `is_failing`, no queue file can be replaced by a copy."""

    is_failing = False

    def create(self, path: Path, size: int, *, allocate: bool) -> File:
        if self.is_failing and path.suffix == ".whole":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().create(path, size, allocate=allocate)


@pytest.fixture
def disk() -> WithoutCopies:
    return WithoutCopies()


@pytest.fixture
async def node(tmp_path: Path, disk: WithoutCopies) -> AsyncIterator[Node]:
    """A node with a message in queues 0 and 1 of TT."""
    async with open_node(tmp_path, disk=disk) as node:
        for queue_id in range(2):
            assert (await node.send(b"%d" % queue_id, e=queue_id)).code == 0
        await node.dispatched()
        yield node


def spoil_queue(bad: BadSectors, node: Node) -> None:
    """Makes the entries of queue 0 unreadable."""
    queue = node.store.queues.get("TT", 0)
    assert queue is not None
    bad.add(queue.files.file(0).path, 0)


@pytest.mark.parametrize("code", FIELDS)
async def test_queue_is_repaired_while_a_consumer_waits(node: Node, code: int) -> None:
    """The request ended the broker when it was woken."""
    end = node.store.log.max_offset.value
    damage = node.store.damage.add(0, end, file="f", reason="r", found_by="scrub", by_checksum=True)
    with bad_sectors() as bad:
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def consume() -> None:
                answer = await node.ask(code, **{**FIELDS[code], "queueId": 0})
                assert [record.body for record in node.records(answer)] == [b"0"]
                assert trio.current_time() == repaired_at

            await wait_all_tasks_blocked()
            spoil_queue(bad, node)
            repaired_at = trio.current_time()
            node.store.damage.healed(damage, "a peer")
        assert bad.failed_count > 0


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("code", FIELDS)
async def test_consumer_of_a_queue_that_can_not_be_repaired(
    node: Node, disk: WithoutCopies, code: int, is_held: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {**FIELDS[code], "queueId": 0}
    end = node.store.log.max_offset.value
    with bad_sectors() as bad:
        disk.is_failing = True
        if is_held:
            damage = node.store.damage.add(0, end, file="f", reason="r", found_by="scrub", by_checksum=True)
        else:
            spoil_queue(bad, node)
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def consume() -> None:
                for _ in range(1 if is_held else 3):
                    await refuses(node, code, **fields)

            if is_held:
                await wait_all_tasks_blocked()
                spoil_queue(bad, node)
                node.store.damage.healed(damage, "a peer")
        answer = await node.ask(code, **{**fields, "queueId": 1})
        assert [record.body for record in node.records(answer)] == [b"1"]
        disk.is_failing = False
        assert [record.body for record in node.records(await node.ask(code, **fields))] == [b"0"]
    assert caplog.text.count("broker.read_failed reason='[Errno 5] Input/output error' times=1") == 1


async def test_pop_takes_from_the_other_queues(node: Node, disk: WithoutCopies) -> None:
    with bad_sectors() as bad:
        disk.is_failing = True
        spoil_queue(bad, node)
        answer = await node.ask(200050, **POP)
        assert [record.body for record in node.records(answer)] == [b"1"]
        await refuses(node, 200050, **POP)
        await refuses(node, 200052, **{**POP, "queueId": 0})
        disk.is_failing = False
        assert [record.body for record in node.records(await node.ask(200050, **POP))] == [b"0"]


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        (29, {"topic": "TT", "queueId": 0, "timestamp": 1}),
        (32, {"topic": "TT", "queueId": 0}),
        (321, {"topic": "TT", "queueId": 0, "index": 0, "count": 1}),
    ],
)
async def test_requests_for_a_queue(node: Node, code: int, fields: dict[str, Any]) -> None:
    """They ended the broker. They don't repair the queue."""
    assert (await node.ask(code, **fields)).code == ResponseCode.SUCCESS
    with bad_sectors() as bad:
        spoil_queue(bad, node)
        await refuses(node, code, **fields)
    assert (await node.ask(code, **fields)).code == ResponseCode.SUCCESS


@pytest.mark.parametrize("topic", ["rmq_sys_wheel_timer", "SCHEDULE_TOPIC_XXXX"])
async def test_delayed_messages_of_an_unreadable_queue_are_delivered(tmp_path: Path, topic: str) -> None:
    """The service ended the broker."""
    delay = "TIMER_DELAY_SEC\x0130\x02" if topic == "rmq_sys_wheel_timer" else "DELAY\x014\x02"
    with bad_sectors() as bad:
        async with open_node(tmp_path) as node:
            assert (await node.send(b"late", i=delay)).code == 0
            await node.dispatched()
            [path] = (tmp_path / "consumequeue" / topic).glob("*/*")
            bad.add(path, 0)
            await trio.sleep(60)
            assert [record.body for record in node.records(await node.pull())] == [b"late"]
            assert bad.failed_count > 0


async def test_query_by_key(tmp_path: Path) -> None:
    """It ended the broker."""
    fields: dict[str, Any] = {"topic": "TT", "key": "k", "maxNum": 32, "beginTimestamp": 0, "endTimestamp": 1 << 62}
    async with open_node(tmp_path) as node:
        assert (await node.send(i="KEYS\x01k\x02")).code == 0
    async with open_node(tmp_path) as node:
        assert node.store.index is not None
        with bad_sectors() as bad:
            for file in node.store.index.files:
                bad.add(file.path, 0, file.path.stat().st_size)
            await refuses(node, 12, **fields)
        assert (await node.ask(12, **fields)).code == ResponseCode.SUCCESS


async def test_message_without_checksum(tmp_path: Path) -> None:
    """The request ended the broker."""
    async with open_node(tmp_path) as node:
        assert (await node.send(bytes(2 * SECTOR_BYTES))).code == 0
    async with open_node(tmp_path, store_changes={"hot_window_bytes": 0, "scrub_bytes_per_s": 0}) as node:
        for path in (tmp_path / "checksums").iterdir():
            path.unlink()
        node.store.log.verified.checksums.forget()
        with bad_sectors() as bad:
            bad.add(tmp_path / "commitlog" / f"{0:020d}", 0)
            await refuses(node, 11, **FIELDS[11])
            await refuses(node, 33, offset=0)
        assert [record.body for record in node.records(await node.pull())] == [bytes(2 * SECTOR_BYTES)]


async def refuses(node: Node, code: int, **fields: Any) -> None:
    """Checks that the broker answers that the disk can't read."""
    answer = await node.ask(code, **fields)
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, REMARK)
