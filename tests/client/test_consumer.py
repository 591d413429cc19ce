"""The pull consumer with scripted servers: choice of the broker, and handling of each answer."""

import math
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from ha.client import Client, ClientOptions, MessageQueue, PullConsumer, PullStatus, RawPull, ReadFrom
from ha.client.connections import Connections
from ha.errors import BodyUnreadable, BrokerError, ConnectionFailed, RemoteProtocolError, RouteNotFound
from ha.protocol.codes import RequestCode, SysFlag
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message as StoredMessage
from ha.protocol.record import encode_host
from ha.protocol.record_encoding import encode_record
from ha.protocol.remoting import RemotingCommand
from tests.client.backends import on_both_backends
from tests.client.fake_broker import FakeServer, Handler, name_server, route_body, serving, serving_all

QUEUE = MessageQueue("T", "a", 1)


def record(queue_offset: int, body: bytes = b"hello", sys_flag: int = 0, **properties: str) -> bytes:
    message = StoredMessage(
        topic="T",
        queue_id=1,
        body=body,
        properties=encode_properties(properties),
        flag=3,
        sys_flag=sys_flag,
        born_timestamp_ms=1_700_000_000_000,
        born_host=encode_host("10.0.0.9", 4321),
    )
    return encode_record(
        message,
        queue_offset=queue_offset,
        physical_offset=315,
        store_timestamp_ms=1_700_000_000_005,
        store_host=encode_host("10.0.0.1", 10911),
    )


def pulled(
    command: RemotingCommand,
    code: int,
    body: bytes = b"",
    next_offset: int = 2,
    suggest: int = 0,
    begin: int = 0,
    end: int = 9,
) -> RemotingCommand:
    """The answer to a pull of a queue that holds [begin, end)."""
    fields = {"suggestWhichBrokerId": suggest, "nextBeginOffset": next_offset, "minOffset": begin, "maxOffset": end}
    return command.reply(code, "REMARK", {key: str(value) for key, value in fields.items()}, body)


@asynccontextmanager
async def open_brokers(handlers: dict[int, Handler]) -> AsyncIterator[tuple[str, dict[int, FakeServer]]]:
    """The address of a name server, and the servers of broker set "a" by broker id."""
    async with serving_all(handlers.values()) as started:
        servers = dict(zip(handlers, started, strict=True))
        body = route_body({"a": {broker_id: server.address for broker_id, server in servers.items()}})
        async with serving(name_server({"T": body})) as names:
            yield names.address, servers


@asynccontextmanager
async def open_consumer(
    handlers: dict[int, Handler], **arguments: Any
) -> AsyncIterator[tuple[PullConsumer, dict[int, FakeServer]]]:
    """A consumer of the brokers of set "a", and their servers by broker id."""
    async with open_brokers(handlers) as (names, servers), PullConsumer(names, **arguments) as consumer:
        yield consumer, servers


@on_both_backends()
async def test_fields_of_a_pull_and_its_result() -> None:
    body_found = record(7, UNIQ_KEY="ABC", TAGS="TagA", KEYS="k0 k1", own="x") + record(8, b"yo")
    async with open_consumer({0: lambda c: pulled(c, 0, body_found, 9)}, group="g") as (consumer, servers):
        assert await consumer.queues("T") == [MessageQueue("T", "a", i) for i in range(4)]
        result = await consumer.pull(QUEUE, 7, max_messages=5)
        (command,) = servers[0].commands
        assert command.code == RequestCode.PULL_MESSAGE
        assert command.ext_fields == {
            "consumerGroup": "g",
            "topic": "T",
            "queueId": "1",
            "queueOffset": "7",
            "maxMsgNums": "5",
            "sysFlag": "4",
            "commitOffset": "0",
            "suspendTimeoutMillis": "0",
            "subVersion": "0",
            "subscription": "*",
            "expressionType": "TAG",
        }
        assert (result.status, result.next_offset, result.min_offset, result.max_offset) == (PullStatus.FOUND, 9, 0, 9)
        assert result.broker_id == 0
        first, second = result.messages
        assert (first.queue, first.queue_offset, first.physical_offset) == (QUEUE, 7, 315)
        assert (first.message_id, first.offset_message_id) == ("ABC", "0A00000100002A9F000000000000013B")
        assert (first.topic, first.body, first.tags, first.keys, first.flag) == ("T", b"hello", "TagA", ("k0", "k1"), 3)
        assert first.properties == {"UNIQ_KEY": "ABC", "TAGS": "TagA", "KEYS": "k0 k1", "own": "x"}
        assert (first.born_timestamp_ms, first.store_timestamp_ms) == (1_700_000_000_000, 1_700_000_000_005)
        assert (first.born_host, first.store_host) == (("10.0.0.9", 4321), ("10.0.0.1", 10911))
        assert (second.message_id, second.tags, second.keys) == (second.offset_message_id, None, ())


@on_both_backends()
@pytest.mark.parametrize(
    ("code", "status"),
    [(19, PullStatus.NO_NEW_MSG), (20, PullStatus.NO_MATCHED_MSG), (21, PullStatus.OFFSET_ILLEGAL)],
)
async def test_empty_pull_returns_status_and_next_offset(code: int, status: PullStatus) -> None:
    async with open_consumer({0: lambda c: pulled(c, code, next_offset=6)}) as (consumer, _):
        result = await consumer.pull(QUEUE, 2)
        assert (result.status, result.messages, result.next_offset) == (status, [], 6)


@on_both_backends()
@pytest.mark.parametrize(
    ("code", "status"), [(0, PullStatus.FOUND), (19, PullStatus.NO_NEW_MSG), (21, PullStatus.OFFSET_ILLEGAL)]
)
async def test_raw_pull_returns_the_records_unchanged(code: int, status: PullStatus) -> None:
    bytes_sent = b"" if code else record(7, TAGS="Aa") + record(8, TAGS="BB")
    async with open_consumer({0: lambda c: pulled(c, code, bytes_sent, 9)}) as (consumer, servers):
        raw = await consumer.pull_raw(QUEUE, 7, tags="Aa", max_messages=9)
        assert raw == RawPull(status, bytes_sent, 9, 0, 9, 0, "REMARK")
        fields = servers[0].commands[0].ext_fields
        assert (fields["subscription"], fields["maxMsgNums"], fields["sysFlag"]) == ("Aa", "9", "4")


@on_both_backends(open_brokers, {0: lambda c: c.reply(26, "no such group")})
async def test_rejected_pull_raises_its_code(names: str, servers: dict[int, FakeServer]) -> None:
    async with PullConsumer(names) as consumer:
        with pytest.raises(BrokerError) as caught:
            await consumer.pull(QUEUE, 2)
        assert (caught.value.code, caught.value.remark) == (26, "no such group")
        with pytest.raises(RouteNotFound):
            await consumer.queues("Other")


@on_both_backends()
async def test_topic_unknown_to_its_broker_is_looked_up_again() -> None:
    routes: dict[str, bytes] = {}
    async with serving(lambda c: c.reply(17, "no topic")) as broker, serving(name_server(routes)) as names:
        routes["T"] = route_body({"a": {0: broker.address}})
        async with PullConsumer(names.address) as consumer:
            assert QUEUE in await consumer.queues("T")
            routes.clear()
            with pytest.raises(BrokerError, match="17"):
                await consumer.pull(QUEUE, 2)
            with pytest.raises(RouteNotFound):
                await consumer.queues("T")


@on_both_backends()
async def test_queues_of_a_route_are_limited() -> None:
    """Also if they are of several brokers, or one broker is named again and again."""
    address = {0: "127.0.0.1:1"}
    repeated = msgspec.json.decode(route_body({"a": address}, 32_768))
    repeated["queueDatas"] *= 3
    routes = {
        "T": route_body({"a": address, "b": address}, 32_768),
        "many brokers": route_body({"a": address, "b": address, "c": address}, 32_768),
        "repeated": msgspec.json.encode(repeated),
        "negative": route_body({"a": address}, -1),
    }
    async with serving(name_server(routes)) as names, PullConsumer(names.address) as consumer:
        assert len(await consumer.queues("T")) == 65_536
        for topic in ("many brokers", "repeated", "negative"):
            with pytest.raises(RemoteProtocolError, match="a route with"):
                await consumer.queues(topic)


@on_both_backends()
@pytest.mark.parametrize("code", [2, 14, 1500])
async def test_unavailable_broker_causes_a_route_lookup(code: int) -> None:
    """It may no longer be the master; name servers know the new one."""
    routes: dict[str, bytes] = {}
    async with (
        serving(lambda c: c.reply(code, "this is a SLAVE")) as old,
        serving(lambda c: pulled(c, 19)) as new,
        serving(name_server(routes)) as names,
    ):
        routes["T"] = route_body({"a": {0: old.address}})
        async with PullConsumer(names.address) as consumer:
            with pytest.raises(BrokerError):
                await consumer.pull(QUEUE, 2)
            routes["T"] = route_body({"a": {0: new.address, 1: old.address}})
            assert (await consumer.pull(QUEUE, 2)).status is PullStatus.NO_NEW_MSG


@on_both_backends(open_brokers, {0: lambda c: pulled(c, 19)})
async def test_long_poll_timeout_includes_the_brokers_check_interval(
    names: str, servers: dict[int, FakeServer]
) -> None:
    async with PullConsumer(names) as consumer:
        await consumer.pull(QUEUE, 2, wait_s=1.5)
    (command,) = servers[0].commands
    assert (command.ext_fields["sysFlag"], command.ext_fields["suspendTimeoutMillis"]) == ("6", "1500")


@on_both_backends(open_brokers, {0: lambda c: pulled(c, 19)})
async def test_a_long_poll_is_limited(
    names: str, servers: dict[int, FakeServer], *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would end it if the broker's host failed."""
    timeout_of_code = {}
    invoke = Connections.invoke

    async def recorded(
        self: Connections, address: str, command: RemotingCommand, timeout_s: float, *, is_prompt: bool = True
    ) -> RemotingCommand:
        timeout_of_code[command.code] = timeout_s
        return await invoke(self, address, command, timeout_s, is_prompt=is_prompt)

    monkeypatch.setattr(Connections, "invoke", recorded)
    async with PullConsumer(names, options=ClientOptions(request_timeout_s=5)) as consumer:
        await consumer.pull(QUEUE, 2, wait_s=math.inf)
    (command,) = servers[0].commands
    assert command.ext_fields["suspendTimeoutMillis"] == "60000"
    assert timeout_of_code[RequestCode.PULL_MESSAGE] == 5 + 60 + 5


@on_both_backends()
async def test_tags_with_equal_hashes_are_distinguished() -> None:
    assert (31 * ord("A") + ord("a")) == (31 * ord("B") + ord("B"))  # "Aa" and "BB" have the same hash in Java
    found = record(0, TAGS="Aa") + record(1, TAGS="BB") + record(2, TAGS="Cc")
    async with open_consumer({0: lambda c: pulled(c, 0, found, 3)}) as (consumer, _):
        result = await consumer.pull(QUEUE, 0, tags=" Aa || Cc ")
        assert [message.tags for message in result.messages] == ["Aa", "Cc"]
        result = await consumer.pull(QUEUE, 0, tags="Zz")
        assert (result.status, result.messages, result.next_offset) == (PullStatus.NO_MATCHED_MSG, [], 3)


@on_both_backends(open_consumer, {0: lambda c: pulled(c, 19)})
async def test_expression_without_a_tag_is_rejected_by_the_client(
    consumer: PullConsumer, servers: dict[int, FakeServer]
) -> None:
    with pytest.raises(ValueError, match="names no tag"):
        await consumer.pull(QUEUE, 0, tags="||")
    assert servers[0].commands == []


@on_both_backends()
async def test_choice_of_the_broker() -> None:
    suggest = 0

    def answer(command: RemotingCommand) -> RemotingCommand:
        return pulled(command, 19, suggest=suggest)

    async with open_brokers(dict.fromkeys((0, 1, 2), answer)) as (names, _):
        for read_from, broker_id in ((ReadFrom.MASTER, 0), (ReadFrom.SLAVE, 1), (2, 2), (ReadFrom.SUGGESTED, 0)):
            async with PullConsumer(names, read_from=read_from) as consumer:
                assert (await consumer.pull(QUEUE, 0)).broker_id == broker_id
        async with PullConsumer(names) as consumer:
            suggest = 2
            assert (await consumer.pull(QUEUE, 0)).broker_id == 0
            assert (await consumer.pull(QUEUE, 0)).broker_id == 2
            suggest = 7  # no broker has that id
            assert (await consumer.pull(QUEUE, 0)).broker_id == 2
            assert (await consumer.pull(QUEUE, 0)).broker_id == 0
        async with PullConsumer(names, read_from=5) as consumer:
            with pytest.raises(ConnectionFailed, match="ID 5"):
                await consumer.pull(QUEUE, 0)


@on_both_backends()
async def test_offsets_are_not_those_of_a_suggested_slave() -> None:
    """It may be new. RocketMQ's clients ask the master for offsets (MQAdminImpl)."""

    def at(offset: int) -> Handler:
        def answer(command: RemotingCommand) -> RemotingCommand:
            if command.code == RequestCode.PULL_MESSAGE:
                return pulled(command, 0, record(1), suggest=1)
            return command.reply(0, None, {"offset": str(offset)})

        return answer

    async with open_consumer({0: at(9), 1: at(0)}) as (consumer, _):
        await consumer.pull(QUEUE, 1)
        assert await consumer.min_offset(QUEUE) == 9
        assert await consumer.max_offset(QUEUE) == 9
        assert await consumer.offset_for_time(QUEUE, 1) == 9
        assert (await consumer.pull(QUEUE, 1)).broker_id == 1
    async with open_consumer({0: at(9), 1: at(0)}, read_from=ReadFrom.SLAVE) as (consumer, _):
        assert await consumer.max_offset(QUEUE) == 0


@on_both_backends()
async def test_unreachable_suggested_slave_is_forgotten() -> None:

    def breaking(command: RemotingCommand) -> bytes:
        return b"\xff" * 8

    async with open_consumer({0: lambda c: pulled(c, 19, suggest=1), 1: breaking}) as (consumer, _):
        assert (await consumer.pull(QUEUE, 0)).broker_id == 0
        assert (await consumer.pull(QUEUE, 0)).broker_id == 0


@on_both_backends()
async def test_reading_needs_a_slave_only_if_one_was_chosen() -> None:
    async with open_consumer({0: lambda c: pulled(c, 19)}, read_from=ReadFrom.SLAVE) as (consumer, _):
        with pytest.raises(ConnectionFailed, match="no slave"):
            await consumer.pull(QUEUE, 0)
    async with open_consumer({3: lambda c: pulled(c, 19)}) as (consumer, _):
        assert (await consumer.pull(QUEUE, 0)).broker_id == 3


@on_both_backends()
async def test_offsets_are_queried_and_committed() -> None:
    answers: dict[int, Callable[[RemotingCommand], RemotingCommand]] = {
        RequestCode.GET_MAX_OFFSET: lambda c: c.reply(0, ext_fields={"offset": "9"}),
        RequestCode.GET_MIN_OFFSET: lambda c: c.reply(0, ext_fields={"offset": "2"}),
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: lambda c: c.reply(0, ext_fields={"offset": "4"}),
        RequestCode.QUERY_CONSUMER_OFFSET: lambda c: c.reply(22, "Not found"),
        RequestCode.UPDATE_CONSUMER_OFFSET: lambda c: c.reply(0),
    }
    async with open_consumer({0: lambda c: answers[c.code](c)}, group="g") as (consumer, servers):
        assert (await consumer.max_offset(QUEUE), await consumer.min_offset(QUEUE)) == (9, 2)
        assert await consumer.offset_for_time(QUEUE, 1_700_000_000_000) == 4
        search = servers[0].commands[-1].ext_fields
        assert search == {"topic": "T", "queueId": "1", "timestamp": "1700000000000", "boundaryType": "lower"}
        assert await consumer.committed_offset(QUEUE) is None
        answers[RequestCode.QUERY_CONSUMER_OFFSET] = lambda c: c.reply(0, ext_fields={"offset": "5"})
        assert await consumer.committed_offset(QUEUE) == 5
        await consumer.commit(QUEUE, 6)
        answers[RequestCode.UPDATE_CONSUMER_OFFSET] = lambda c: c.reply(26, "no group")
        with pytest.raises(BrokerError, match="no group"):
            await consumer.commit(QUEUE, 6)
        commits = [c for c in servers[0].commands if c.code == RequestCode.UPDATE_CONSUMER_OFFSET]
        assert commits[0].ext_fields == {"consumerGroup": "g", "topic": "T", "queueId": "1", "commitOffset": "6"}


@on_both_backends()
@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (zlib.compress(bytes(101)), "inflates to more than 100 bytes"),
        (zlib.compress(bytes(100))[:-6], "it is truncated"),
        (b"no zlib", "does not inflate"),
    ],
    ids=["a bomb", "cut", "no zlib"],
)
async def test_uninflatable_body_does_not_affect_other_messages(stored: bytes, reason: str) -> None:
    found = record(0, b"good") + record(1, stored, SysFlag.COMPRESSED) + record(2, b"good")
    async with open_consumer({0: lambda c: pulled(c, 0, found)}, options=ClientOptions(message_size_max=100)) as (
        consumer,
        _,
    ):
        result = await consumer.pull(QUEUE, 0)
        first, second, third = result.messages
        assert (first.body, third.body) == (b"good", b"good")
        assert second.body_error is not None
        assert reason in second.body_error
        with pytest.raises(BodyUnreadable, match=reason):
            _ = second.body


@on_both_backends()
async def test_inflated_bytes_per_pull_are_limited() -> None:
    packed = zlib.compress(bytes(1000))
    found = b"".join(record(number, packed, SysFlag.COMPRESSED) for number in range(10))
    async with open_consumer({0: lambda c: pulled(c, 0, found)}, options=ClientOptions(frame_size_max=4000)) as (
        consumer,
        _,
    ):
        result = await consumer.pull(QUEUE, 0)
        assert [message.queue_offset for message in result.messages] == [0, 1, 2, 3]
        assert result.next_offset == 4


@on_both_backends()
async def test_bodies_deflated_by_java_producers_are_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lz4.frame", None)  # as if it were not installed
    text = b"flight " * 1000
    zlib_flag = SysFlag.COMPRESSED | SysFlag.COMPRESSION_ZLIB
    found = (
        record(0, zlib.compress(text), SysFlag.COMPRESSED)
        + record(1, zlib.compress(text), zlib_flag)
        + record(2, b"lz4 bytes", SysFlag.COMPRESSED | SysFlag.COMPRESSION_LZ4)
    )
    async with open_consumer({0: lambda c: pulled(c, 0, found)}) as (consumer, _):
        messages = (await consumer.pull(QUEUE, 0)).messages
        assert [(m.body, m.compression) for m in messages] == [(text, None), (text, None), (b"lz4 bytes", "lz4")]


@on_both_backends()
@pytest.mark.parametrize(
    "found",
    [
        b"\x00\x00\x00\x10garbage",
        record(0)[:-1],
    ],
    ids=["garbage", "cut"],
)
async def test_invalid_records_are_a_remote_protocol_error(found: bytes) -> None:
    async with open_consumer({0: lambda c: pulled(c, 0, found)}) as (consumer, _):
        with pytest.raises(RemoteProtocolError):
            await consumer.pull(QUEUE, 0)


@on_both_backends()
async def test_concurrent_route_lookups_share_one_request() -> None:
    """A lookup after a failure overlaps with the periodic refresh: they share one request."""
    asked = 0

    async def answer_late(command: RemotingCommand) -> RemotingCommand:
        nonlocal asked
        asked += 1
        if asked > 1:
            await anyio.sleep(0.2)
        return command.reply(0, body=route_body({"a": {0: "127.0.0.1:1"}}))

    options = ClientOptions(route_refresh_interval_s=0.05)
    async with serving(answer_late) as names, Client(names.address, options=options) as client:
        before = await client.routes.find("T")
        client.routes.mark_stale("T")
        assert await client.routes.find("T") == before
        await anyio.sleep(0.1)
