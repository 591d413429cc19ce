"""What a node answers its dashboard, of messages and groups that aren't as they usually are."""

import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio

import ha
from ha.admin.dashboard.source import (
    GroupDetail,
    MessageDetail,
    Missing,
    QueuePart,
    SourceBusyError,
    TopicDetail,
    Topics,
)
from ha.node import Node
from ha.node.dashboard import NodeDashboard
from ha.node.history import GROUP_COUNT_MAX, QUEUE_COUNT_MAX, SAMPLE_COUNT_MAX, TOPIC_COUNT_MAX, History
from ha.node.messages import PREVIEW_BYTES
from ha.node.platform import Platform
from ha.node.startup import open_node
from ha.protocol.codes import SysFlag
from ha.protocol.compression import Compression, compressed
from ha.protocol.message_id import decode_message_id, encode_message_id
from ha.protocol.record import Message, encode_host
from ha.protocol.topic_names import TABLES_TOPIC
from ha.replication import healer
from ha.store.commitlog import UNLIMITED
from tests.broker.few_descriptors import FewDescriptors
from tests.node.test_library import config
from tests.store.stores import reached

PLAIN = b"a body that a client compressed " * 100


def history_of(node: Node) -> History:
    return History(node.store, node.broker.tables, wall_clock_ms=lambda: round(trio.current_time() * 1000))


@asynccontextmanager
async def master(root: Path) -> AsyncIterator[tuple[Node, NodeDashboard]]:
    async with ha.open_master(config(root)) as node:
        yield node, NodeDashboard(node, history_of(node))


async def put(node: Node, body: bytes, sys_flag: int = 0, *, topic: str = "t", queue_id: int = 0) -> int:
    """Put a message, and wait until readers may have it; its physical offset."""
    result = await node.put(Message(topic=topic, queue_id=queue_id, body=body, sys_flag=sys_flag))
    await reached(node.store.log.dispatched_offset, result.physical_offset + 1)
    return result.physical_offset


async def detail(dashboard: NodeDashboard, physical_offset: int, size_max: int = 100) -> MessageDetail:
    found = await dashboard.message(physical_offset, size_max)
    assert isinstance(found, MessageDetail)
    return found


async def test_files_that_cannot_be_opened_now(tmp_path: Path) -> None:
    disk = FewDescriptors()
    async with open_node(config(tmp_path), Platform(disk=disk)) as node:
        dashboard = NodeDashboard(node, history_of(node))
        await put(node, b"x")

        async def asked() -> list[object]:
            found: list[object] = []
            for ask in (
                lambda: dashboard.topics("", with_system=False, begin=0, count=9),
                lambda: dashboard.topic("t", begin=0, count=9, at_ms=1),
                lambda: dashboard.offset_at("t", 0, 1),
            ):
                node.store.queues._files._files.clear()
                try:
                    found.append(type(await ask()))
                except SourceBusyError as error:
                    found.append(str(error))
            return found

        disk.is_exhausted = True
        assert await asked() == ["[Errno 24] Too many open files"] * 3
        disk.is_exhausted = False
        assert await asked() == [Topics, TopicDetail, int]


async def test_compressed_bodies(tmp_path: Path) -> None:
    async with master(tmp_path) as (node, dashboard):
        packed = zlib.compress(PLAIN)
        found = await detail(dashboard, await put(node, packed, SysFlag.COMPRESSED))
        assert (found.body, found.is_body_cut, found.is_body_sound) == (PLAIN[:100], True, True)
        assert found.system_flags == ["compressed"]
        whole = await detail(dashboard, found.line.physical_offset, len(PLAIN))
        assert (whole.body, whole.is_body_cut) == (PLAIN, False)
        broken = await detail(dashboard, await put(node, b"no zlib", SysFlag.COMPRESSED))
        assert broken.body == b"no zlib"
        assert "does not inflate" in broken.body_note


@pytest.mark.parametrize("kind", [Compression.ZLIB, Compression.LZ4, Compression.ZSTD])
async def test_compressed_bodies_of_each_kind(
    tmp_path: Path, kind: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, flags = compressed(PLAIN, kind)
    async with master(tmp_path) as (node, dashboard):
        begun = await detail(dashboard, offset := await put(node, packed, flags))
        assert (begun.body, begun.is_body_cut) == (PLAIN[:100], True)
        assert begun.body_note == f"Compressed with {kind.value}; shown decompressed."
        whole = await detail(dashboard, offset, len(PLAIN))
        assert (whole.body, whole.is_body_cut, whole.body_note) == (PLAIN, False, begun.body_note)
        cut = await detail(dashboard, await put(node, packed[:-3], flags), len(PLAIN))
        assert PLAIN.startswith(cut.body)
        assert "and truncated" in cut.body_note
        garbage = await detail(dashboard, await put(node, b"garbage" * 5, flags))
        assert garbage.body == b"garbage" * 5
        assert "does not inflate" in garbage.body_note
        for name in ("lz4.frame", "zstandard"):
            monkeypatch.setitem(sys.modules, name, None)
        stored = await detail(dashboard, offset)
        if kind is not Compression.ZLIB:
            assert (stored.body, stored.is_body_cut) == (packed[:100], len(packed) > 100)
            assert "halog[compression]" in stored.body_note


async def test_where_no_message_is(tmp_path: Path) -> None:
    async with master(tmp_path) as (node, dashboard):
        first, second = await put(node, b"1"), await put(node, b"2")
        end = node.store.log.max_offset.value
        for offset, why in (
            (first + 1, "No message starts at offset 1"),
            (end, f"its range is 0 to {end}"),
            (1 << 62, "The log has no message"),
        ):
            missing = await dashboard.message(offset, 100)
            assert isinstance(missing, Missing)
            assert why in missing.reason
        found = await detail(dashboard, second)
        assert await dashboard.message_by_id(found.message_id) == second
        assert await dashboard.message_by_id(found.message_id.lower()) == second
        host, port, _ = decode_message_id(found.message_id)
        for other in (encode_message_id(encode_host(host, port + 1), second), "7F", "x" * 32, ""):
            assert isinstance(await dashboard.message_by_id(other), Missing)


async def test_what_is_damaged_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healer, "ATTEMPTS", 1)
    async with master(tmp_path) as (node, dashboard):
        first, second = await put(node, b"1"), await put(node, b"2")
        damage = node.store.damage
        damage.add(first, second, file="0", reason="a test", found_by="scrub", by_checksum=True)
        missing = await dashboard.message(first, 100)
        assert isinstance(missing, Missing)
        assert "is damaged" in missing.reason
        with trio.fail_after(30):
            while not damage.open[0].is_hopeless:  # the healer finds that there is nobody to ask
                await damage.wait_changed()
        part = await dashboard.queue("t", 0, 0, 10)
        assert isinstance(part, QueuePart)
        assert [line.queue_offset for line in part.messages] == [1]
        damage.failed(damage.open[0], "a test", is_hopeless=False)
        part = await dashboard.queue("t", 0, 0, 10)
        assert isinstance(part, QueuePart)
        assert (list(part.messages), "may still be repaired" in part.reason) == ([], True)
        assert (await detail(dashboard, second)).body == b"2"


async def test_what_is_not_confirmed_is_not_shown(tmp_path: Path) -> None:
    async with master(tmp_path) as (node, dashboard):
        await put(node, b"1")
        node.store.log.limit_dispatch(node.store.log.max_offset.value)
        hidden = (await node.put(Message(topic="t", queue_id=0, body=b"2"))).physical_offset
        missing = await dashboard.message(hidden, 100)
        assert isinstance(missing, Missing)
        assert "not confirmed yet" in missing.reason
        part = await dashboard.queue("t", 0, 0, 10)
        assert isinstance(part, QueuePart)
        assert [line.queue_offset for line in part.messages] == [0]
        node.store.log.limit_dispatch(UNLIMITED)


async def test_pages_of_a_queue(tmp_path: Path) -> None:
    async with master(tmp_path) as (node, dashboard):
        for number in range(30):
            await put(node, b"%d" % number)
        offset, seen = 0, []
        while offset < 30:
            part = await dashboard.queue("t", 0, offset, 7)
            assert isinstance(part, QueuePart)
            assert 0 < len(part.messages) <= 7
            seen += [line.queue_offset for line in part.messages]
            offset = part.next_offset
        assert seen == list(range(30))
        for beyond in (30, 1000):
            part = await dashboard.queue("t", 0, beyond, 7)
            assert isinstance(part, QueuePart)
            assert (list(part.messages), part.reason[:15]) == ([], "The queue ends ")
        assert isinstance(await dashboard.queue("t", 9, 0, 7), Missing)


async def test_topics_and_groups(tmp_path: Path) -> None:
    async with master(tmp_path) as (node, dashboard):
        await put(node, b"x", topic="Paid", queue_id=1)
        await put(node, b"y", topic="Paid", queue_id=1)
        await put(node, b"z", topic="open")
        found = await dashboard.topics("P", with_system=False, begin=0, count=10)
        assert [(topic.name, topic.message_count, topic.kind) for topic in found.topics] == [
            ("Paid", 2, "messages"),
            ("open", 1, "messages"),
        ]
        everything = await dashboard.topics("", with_system=True, begin=0, count=1)
        assert everything.found_count > 3
        assert len(everything.topics) == 1
        node.broker.offsets.commit("billing", "Paid", 1, 1)
        topic = await dashboard.topic("Paid", begin=1, count=1)
        assert isinstance(topic, TopicDetail)
        assert [(queue.queue_id, queue.max_offset) for queue in topic.queues] == [(1, 2)]
        assert topic.groups == ["billing"]
        groups = await dashboard.groups("BILL", begin=0, count=10)
        assert [(group.name, group.behind_count, group.member_count) for group in groups.groups] == [("billing", 1, 0)]
        group = await dashboard.group("billing", topic_count_max=10, queue_count_max=1)
        assert isinstance(group, GroupDetail)
        assert (group.topics[0].behind_count, len(group.topics[0].queues)) == (1, 1)
        assert "In flight (POP)" not in group.settings
        assert isinstance(await dashboard.group("nobody", topic_count_max=1, queue_count_max=1), Missing)
        assert isinstance(await dashboard.topic("nothing", begin=0, count=1), Missing)


async def test_lists_show_how_bodies_begin(tmp_path: Path) -> None:
    async with master(tmp_path) as (node, dashboard):
        await put(node, b"short")
        await put(node, zlib.compress(PLAIN), SysFlag.COMPRESSED)
        part = await dashboard.queue("t", 0, 0, 10)
        assert isinstance(part, QueuePart)
        assert [(line.body_begin, line.is_body_cut) for line in part.messages] == [
            (b"short", False),
            (PLAIN[:PREVIEW_BYTES], True),
        ]
        # Records of the tables contain passwords.
        await put(node, b"password", topic=TABLES_TOPIC)
        part = await dashboard.queue(TABLES_TOPIC, 0, 0, 10)
        assert isinstance(part, QueuePart)
        assert [line.body_begin for line in part.messages] == [b""]


async def test_a_topic_s_last_message_and_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with master(tmp_path) as (node, dashboard):
        await put(node, b"x", queue_id=3)
        last = await detail(dashboard, await put(node, b"y", queue_id=1))
        [topic] = (await dashboard.topics("t", with_system=False, begin=0, count=1)).topics
        assert (topic.last_ms, topic.per_s) == (last.line.store_timestamp_ms, None)
        history = dashboard._history
        await history.take_sample()
        assert history.per_s("t") is None
        await put(node, b"z")
        monkeypatch.setattr(trio, "current_time", lambda now=trio.current_time: now() + 10)
        await history.take_sample()
        assert history.per_s("t") == pytest.approx(0.1, rel=0.3)
        assert history.per_s("nothing") is None


async def test_the_lag_of_groups_over_time(tmp_path: Path) -> None:
    async with master(tmp_path) as (node, dashboard):
        history, offsets = dashboard._history, node.broker.offsets
        for number in range(3):
            await put(node, b"x")
            offsets.commit("billing", "t", 0, 1)
            await history.take_sample()
            assert [point.behind_count for point in history.lag("billing")] == list(range(number + 1))
        group = await dashboard.group("billing", topic_count_max=1, queue_count_max=1)
        assert isinstance(group, GroupDetail)
        assert [point.behind_count for point in group.lag] == [0, 1, 2]
        for _ in range(SAMPLE_COUNT_MAX):
            await history.take_sample()
        assert [point.behind_count for point in history.lag("billing")] == [2] * SAMPLE_COUNT_MAX
        offsets.remove(group="billing")
        await history.take_sample()
        assert history.lag("billing") == ()


async def test_other_tasks_run_while_many_groups_are_left_out_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with master(tmp_path) as (node, dashboard):
        await put(node, b"x")
        for number in range(100):
            node.broker.offsets.commit(f"g{number}", "t", 0, 0)
        [topic] = [name for name in node.broker.tables.topics.table if name == "t"]
        config = node.broker.tables.topics.table[topic]
        too_large = msgspec.structs.replace(config, read_queue_nums=QUEUE_COUNT_MAX + 1)
        node.broker.tables.topics._table[topic] = too_large
        passes = 0

        async def count() -> None:
            nonlocal passes
            while True:
                await trio.lowlevel.checkpoint()
                passes += 1

        history = dashboard._history
        await history._sample_groups()
        monkeypatch.setattr("ha.node.group_progress.QUEUES_PER_SLICE", 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            await history._sample_groups()
            nursery.cancel_scope.cancel()
        assert history._lags == {}
        assert passes >= 90


async def test_series_are_limited(tmp_path: Path) -> None:
    async with master(tmp_path) as (node, dashboard):
        await put(node, b"x")
        for number in range(GROUP_COUNT_MAX + 3):
            node.broker.offsets.commit(f"g{number}", "t", 0, 0)
        table = dict(node.broker.tables.topics.table)
        one = next(iter(table.values()))
        for number in range(TOPIC_COUNT_MAX + 3):
            node.broker.tables.topics._table[f"x{number}"] = one
        history = dashboard._history
        await history.take_sample()
        assert (len(history._lags), len(history._counts)) == (GROUP_COUNT_MAX, TOPIC_COUNT_MAX)
        large = msgspec.structs.replace(one, write_queue_nums=QUEUE_COUNT_MAX, read_queue_nums=QUEUE_COUNT_MAX)
        for name in list(node.broker.tables.topics.table):
            node.broker.tables.topics._table[name] = large
        too_large = msgspec.structs.replace(large, write_queue_nums=QUEUE_COUNT_MAX + 1)
        node.broker.tables.topics._table[next(iter(node.broker.tables.topics.table))] = too_large  # skipped alone
        for other in (history_of(node), history):  # a series that is no longer sampled ends
            await other.take_sample()
            assert (len(other._lags), len(other._counts)) == (1, 1)


async def test_a_key_is_found_in_all_topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with master(tmp_path) as (node, dashboard):
        for topic in ("r", "s", "t"):
            message = Message(topic=topic, queue_id=0, body=topic.encode(), properties=b"KEYS\x01k\x02")
            result = await node.put(message)
        await reached(node.store.log.dispatched_offset, result.physical_offset + 1)
        assert list(await dashboard.topic_names(2)) == ["r", "s"]
        found = await dashboard.with_key_anywhere("k", 10)
        assert ([line.topic for line in found.messages], found.is_cut) == (["t", "s", "r"], False)
        found = await dashboard.with_key_anywhere("k", 2)
        assert ([line.topic for line in found.messages], found.note) == (
            ["s", "r"],
            "Searched 2 of 3 topics, by name. Enter a topic to search the others.",
        )
        for _ in range(3):
            result = await node.put(Message(topic="t", queue_id=0, body=b"", properties=b"KEYS\x01j\x02"))
        await reached(node.store.log.dispatched_offset, result.physical_offset + 1)
        found = await dashboard.with_key_anywhere("j", 2)  # in the last topic
        assert (len(found.messages), found.is_cut) == (2, True)
        monkeypatch.setattr("ha.node.dashboard.SEARCH_S", 0.0)
        assert (await dashboard.with_key_anywhere("k", 10)).note.startswith("Searched 0 of 3 topics")


@pytest.mark.parametrize(("is_guarded", "is_open"), [(False, True), (True, False)])
async def test_content_is_as_open_as_the_remoting_port(tmp_path: Path, is_guarded: bool, is_open: bool) -> None:
    acl_file = tmp_path / "acl.yml"
    acl_file.write_text('accounts: [{accessKey: operator, secretKey: "12345678", admin: true}]\n')
    acl_file.chmod(0o600)
    keys = {"acl_enable": True, "acl_file": str(acl_file)} if is_guarded else {}
    async with ha.open_master(config(tmp_path / "store", **keys)) as node:
        assert NodeDashboard(node, history_of(node)).is_content_open == is_open
