"""Admin with scripted servers: how it combines the answers of several brokers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import msgspec
import pytest

from ha.client import Admin, BrokerError, ConnectionFailed
from ha.protocol.access_bodies import UserInfo
from ha.protocol.codes import RequestCode
from ha.protocol.group_requests import encode_running_info
from ha.protocol.message_id import encode_message_id
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message, encode_host
from ha.protocol.record_encoding import encode_record
from ha.protocol.remoting import RemotingCommand
from tests.client.backends import on_both_backends
from tests.client.fake_broker import Handler, name_server, route_body, serving, serving_all

BEGIN = datetime.fromtimestamp(0, UTC)


@asynccontextmanager
async def open_admin(handlers: list[Handler], queue_nums: int = 1) -> AsyncIterator[Admin]:
    """An Admin of one broker per handler, each with `queue_nums` queues of T."""
    async with serving_all(handlers) as brokers:
        body = route_body({chr(97 + i): {0: each.address} for i, each in enumerate(brokers)}, queue_nums)
        async with serving(name_server({"T": body})) as names, Admin(names.address) as admin:
            yield admin


def record(stored_s: int) -> bytes:
    message = Message("T", 0, str(stored_s).encode(), encode_properties({"KEYS": "k"}))
    return encode_record(
        message,
        queue_offset=stored_s,
        physical_offset=1000 * stored_s,
        store_timestamp_ms=1000 * stored_s,
        store_host=encode_host("127.0.0.1", 10911),
    )


@on_both_backends()
async def test_newest_messages_of_all_brokers_are_found_by_key() -> None:
    """Each broker returns its newest ones."""

    def holding(*stored_s: int) -> Handler:
        def handle(command: RemotingCommand) -> RemotingCommand:
            newest = stored_s[-int(command.ext_fields["maxNum"]) :]
            fields = {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"}
            return command.reply(0, ext_fields=fields, body=b"".join(map(record, newest)))

        return handle

    async with open_admin([holding(1, 4, 5), holding(2, 3, 6)]) as admin:
        for count, expected in ((2, [b"5", b"6"]), (3, [b"4", b"5", b"6"]), (64, [b"1", b"2", b"3", b"4", b"5", b"6"])):
            found = await admin.messages_by_key("T", "k", max_count=count)
            assert [message.body for message in found] == expected


@on_both_backends()
async def test_pull_without_messages_is_continued() -> None:
    """A broker says that it has found some, but returns none."""

    def handle(command: RemotingCommand) -> RemotingCommand:
        match command.code:
            case RequestCode.GET_MAX_OFFSET:
                return command.reply(0, ext_fields={"offset": "2"})
            case RequestCode.SEARCH_OFFSET_BY_TIMESTAMP:
                return command.reply(0, ext_fields={"offset": "0"})
        offset = int(command.ext_fields["queueOffset"])
        fields = {"suggestWhichBrokerId": 0, "nextBeginOffset": offset + 1, "minOffset": 0, "maxOffset": 2}
        body = record(offset) if offset else b""
        return command.reply(0, ext_fields={key: str(value) for key, value in fields.items()}, body=body)

    async with open_admin([handle]) as admin:
        assert [message.body async for message in admin.messages_between("T", BEGIN)] == [b"1"]


@on_both_backends()
async def test_a_message_that_can_not_be_read_yet_is_waited_for(*, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.client.reading._PAUSE_S", 0.0)
    pulls: list[int] = []

    def handle(command: RemotingCommand) -> RemotingCommand:
        match command.code:
            case RequestCode.GET_MAX_OFFSET:
                return command.reply(0, ext_fields={"offset": "3"})
            case RequestCode.SEARCH_OFFSET_BY_TIMESTAMP:
                return command.reply(0, ext_fields={"offset": "0"})
        offset = int(command.ext_fields["queueOffset"])
        pulls.append(offset)
        is_readable = offset != 1 or pulls.count(1) == 3
        fields = {"suggestWhichBrokerId": 0, "nextBeginOffset": offset + is_readable, "minOffset": 0, "maxOffset": 3}
        body = record(offset) if is_readable else b""
        texts = {key: str(value) for key, value in fields.items()}
        return command.reply(0 if is_readable else 19, ext_fields=texts, body=body)

    async with open_admin([handle]) as admin:
        found = [message.queue_offset async for message in admin.messages_between("T", BEGIN)]
    assert found == [0, 1, 2]


@on_both_backends()
async def test_a_queue_that_ends_earlier_than_at_the_start_is_an_error() -> None:
    """The master was lost, and its slave is behind."""

    def slave(command: RemotingCommand) -> RemotingCommand:
        match command.code:
            case RequestCode.GET_MAX_OFFSET:
                return command.reply(0, ext_fields={"offset": "3"})
            case RequestCode.SEARCH_OFFSET_BY_TIMESTAMP:
                return command.reply(0, ext_fields={"offset": "1"})
        offset = int(command.ext_fields["queueOffset"])
        fields = {"suggestWhichBrokerId": 0, "nextBeginOffset": 2, "minOffset": 0, "maxOffset": 2}
        body = record(offset) if offset < 2 else b""
        return command.reply(
            0 if body else 20, ext_fields={key: str(value) for key, value in fields.items()}, body=body
        )

    async with serving(slave) as server:
        routes = {"T": route_body({"a": {1: server.address}}, 1)}
        async with serving(name_server(routes)) as names, Admin(names.address) as admin:
            messages = admin.messages_between("T", BEGIN)
            assert (await anext(messages)).queue_offset == 1
            with pytest.raises(ConnectionFailed, match="now ends at queue offset 2, before its end at the start, 3"):
                await anext(messages)


@on_both_backends()
async def test_damage_or_denied_access_does_not_look_like_an_absent_message_or_group() -> None:
    """All have code 1."""
    remark = "can not find message by the offset, 7"

    def master(command: RemotingCommand) -> RemotingCommand:
        return command.reply(1, remark)

    async with serving(master) as server:

        def cluster(command: RemotingCommand) -> RemotingCommand:
            brokers = {"a": {"cluster": "c", "brokerName": "a", "brokerAddrs": {"0": server.address}}}
            return command.reply(0, body=msgspec.json.encode({"brokerAddrTable": brokers, "clusterAddrTable": {}}))

        host, _, port = server.address.rpartition(":")
        message_id = encode_message_id(encode_host(host, int(port)), 7)
        async with serving(cluster) as names, Admin(names.address) as admin:
            assert await admin.message_at(message_id) is None
            remark = "the producer group[g] not exist"
            assert await admin.producer_connections("g") == []
            remark = "java.lang.NullPointerException"
            with pytest.raises(BrokerError, match="NullPointer"):
                await admin.producer_connections("g")
            remark = "can not find message by the offset, 7: its body CRC is wrong"
            with pytest.raises(BrokerError, match="CRC is wrong"):
                await admin.message_at(message_id)
            remark = "org.apache.rocketmq.acl.common.AclException: No acl config for reader"
            with pytest.raises(BrokerError, match="No acl config"):
                await admin.message_at(message_id)
            with pytest.raises(BrokerError, match="No acl config"):
                await admin.producer_connections("g")


@on_both_backends()
async def test_a_member_is_found_although_a_master_is_down() -> None:
    async with serving(lambda command: None) as down:
        pass
    info = encode_running_info({}, {"PROP_CLIENT_VERSION": "V"}, {}, [])
    async with serving(lambda command: command.reply(0, body=info)) as up:

        def cluster(command: RemotingCommand) -> RemotingCommand:
            brokers = {
                name: {"cluster": "c", "brokerName": name, "brokerAddrs": {"0": address}}
                for name, address in (("a", down.address), ("b", up.address))
            }
            return command.reply(0, body=msgspec.json.encode({"brokerAddrTable": brokers, "clusterAddrTable": {}}))

        async with serving(cluster) as names, Admin(names.address) as admin:
            assert (await admin.running_info("g", "c")).properties["PROP_CLIENT_VERSION"] == "V"
            up.handler = lambda command: command.reply(206, "The Consumer <g> <c> not online")
            with pytest.raises(ConnectionFailed):  # the member may be connected to the master that is down
                await admin.running_info("g", "c")


@on_both_backends()
async def test_a_topic_that_a_broker_set_without_a_master_may_still_have_is_an_error() -> None:
    """Its next master would register the topic again."""
    b_id = "1"
    async with serving(lambda command: command.reply(0)) as a, serving(lambda command: command.reply(0)) as b:

        def answer(command: RemotingCommand) -> RemotingCommand:
            brokers = {
                name: {"cluster": "c", "brokerName": name, "brokerAddrs": {broker_id: server.address}}
                for name, broker_id, server in (("a", "0", a), ("b", b_id, b))
            }
            return command.reply(0, body=msgspec.json.encode({"brokerAddrTable": brokers, "clusterAddrTable": {}}))

        async with serving(answer) as names, Admin(names.address) as admin:
            with pytest.raises(ConnectionFailed, match="b: no master is registered, so nothing changed there"):
                await admin.delete_topic("T")
            assert names.commands[-1].code == RequestCode.DELETE_TOPIC_IN_NAMESRV
            b_id = "0"
            await admin.delete_topic("T")
    deleted = [RequestCode.DELETE_TOPIC_IN_BROKER]
    assert [[command.code for command in each.commands] for each in (a, b)] == [2 * deleted, deleted]


@on_both_backends()
async def test_change_on_no_broker_set_changes_nothing() -> None:
    def cluster(command: RemotingCommand) -> RemotingCommand:
        assert command.code == RequestCode.GET_BROKER_CLUSTER_INFO
        return command.reply(0, body=b'{"brokerAddrTable":{},"clusterAddrTable":{}}')

    async with serving(cluster) as names, Admin(names.address) as admin:
        await admin.create_user(UserInfo(username="ann"), broker_names=[])
        await admin.update_policies("ann", [], broker_names=[])
