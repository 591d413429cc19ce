"""The brokers of a cluster as a front sees them, with a name server and a broker of scripted answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from ha.config import ProxyConfig, load_config
from ha.protocol import java_json
from ha.protocol.bodies import BrokerData, ClusterInfo, GroupConfig, QueueData, TopicConfig, TopicRouteData
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand, encode_command
from ha.proxy.__main__ import BODY_SIZE_MAX, serve_proxy
from ha.proxy.brokers import UNTYPED, BrokerUnreachable
from ha.proxy.cluster import ROUTE_AGE_S_MAX, Cluster
from ha.proxy.messages import MessageType
from tests.proxy.site import Client
from tests.proxy.test_telemetry import chatting, producer
from tests.remoting.lookups import watch_lookups

ROUTE = TopicRouteData(
    broker_datas=[
        BrokerData(broker_name="a", broker_addrs={0: "a:1", 1: "a:2"}),
        BrokerData(broker_name="b", broker_addrs={1: "b:2"}),
    ],
    queue_datas=[
        QueueData(broker_name="b", perm=6, read_queue_nums=4, write_queue_nums=4),
        QueueData(broker_name="a", perm=6, read_queue_nums=3, write_queue_nums=2),
    ],
)

Answer = Callable[[RemotingCommand], RemotingCommand]


class Servers:
    """Answers by address and code, in place of the remoting client."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.gone: set[str] = set()
        self.cluster = ClusterInfo(broker_addr_table={each.broker_name: each for each in ROUTE.broker_datas})
        self.answers: dict[int, Answer] = {
            RequestCode.GET_ROUTEINFO_BY_TOPIC: lambda command: command.reply(0, body=java_json.dumps(ROUTE)),
            RequestCode.GET_BROKER_CLUSTER_INFO: lambda command: command.reply(0, body=java_json.dumps(self.cluster)),
            RequestCode.ACK_MESSAGE: lambda command: command.reply(0),
            RequestCode.GET_TOPIC_CONFIG: lambda command: command.reply(
                0, body=java_json.dumps(TopicConfig(attributes={"message.type": "FIFO"}))
            ),
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: lambda command: command.reply(
                0, body=java_json.dumps(GroupConfig(group_name="g", consume_message_orderly=True))
            ),
        }

    async def invoke(self, address: str, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        self.asked.append((address, command.code))
        await trio.lowlevel.checkpoint()
        if address in self.gone:
            raise OSError("refused")
        return self.answers[command.code](command)


@asynccontextmanager
async def opened(*name_servers: str) -> AsyncIterator[tuple[Cluster, Servers]]:
    cluster, servers = Cluster(name_servers or ("n1:1", "n2:1")), Servers()
    client: Any = servers
    cluster._client = client
    yield cluster, servers


async def test_route() -> None:
    """Queues of brokers that have a master, in the order of their names."""
    async with opened() as (cluster, _):
        route = await cluster.route("t")
        assert route is not None
        assert route.message_types == (MessageType.FIFO,)
        assert [(queues.broker_name, queues.readable, queues.writable) for queues in route.brokers] == [("a", 3, 2)]


async def test_answers_are_used_for_a_while(autojump_clock: MockClock) -> None:
    async with opened() as (cluster, servers):
        for _ in range(3):
            await cluster.route("t")
            await cluster.group("g")
        assert len(servers.asked) == 3
        await trio.sleep(ROUTE_AGE_S_MAX + 0.1)
        await cluster.route("t")
        await cluster.group("g")
        assert len(servers.asked) == 6


async def test_old_answers_are_used_while_nobody_answers(autojump_clock: MockClock) -> None:
    """As in RocketMQ, clients go on while all name servers are down. Only one call at a time waits for them."""
    async with opened() as (cluster, servers):
        route, group = await cluster.route("t"), await cluster.group("g")
        answer = servers.invoke

        async def silent(address: str, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
            await trio.sleep(timeout_s)
            raise trio.TooSlowError

        servers.invoke = silent  # type: ignore[method-assign]
        await trio.sleep(10 * ROUTE_AGE_S_MAX)
        took_s = []

        async def call() -> None:
            began = trio.current_time()
            assert await cluster.route("t") is route
            took_s.append(trio.current_time() - began)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(call)
        assert took_s == [0, 0, 6]
        assert await cluster.group("g") is group
        servers.invoke = answer  # type: ignore[method-assign]
        await trio.sleep(ROUTE_AGE_S_MAX + 0.1)
        assert await cluster.route("t") is not route


@pytest.mark.parametrize("silent", ["n1:1", "a:1"], ids=["name server", "broker"])
async def test_a_silent_server_does_not_hold_up_every_call(silent: str, autojump_clock: MockClock) -> None:
    """The deadline of a client's call is shorter than the timeout of a request. The next call asks another server."""
    async with opened() as (cluster, servers):
        brokers = [BrokerData(broker_name=name, broker_addrs={0: f"{name}:1"}) for name in ("a", "b")]
        servers.cluster = ClusterInfo(broker_addr_table={each.broker_name: each for each in brokers})
        route = TopicRouteData(broker_datas=brokers, queue_datas=ROUTE.queue_datas)
        servers.answers[RequestCode.GET_ROUTEINFO_BY_TOPIC] = lambda command: command.reply(
            0, body=java_json.dumps(route)
        )
        answer = servers.invoke

        async def invoke(address: str, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
            if address == silent:
                await trio.sleep(timeout_s)
                raise trio.TooSlowError
            return await answer(address, command, timeout_s)

        servers.invoke = invoke  # type: ignore[method-assign]
        with trio.move_on_after(2.9) as first:
            await cluster.route("t")
        assert first.cancelled_caught
        with trio.fail_after(2.9):
            assert await cluster.route("t") is not None
            assert await cluster.group("g") is not None
            assert await cluster.route("t2") is not None
            with pytest.raises(BrokerUnreachable):
                await cluster.invoke(None, "unknown", RemotingCommand(RequestCode.PULL_MESSAGE))
            assert await cluster.group("h") is not None, "a search keeps the order"


async def test_a_topic_is_not_reported_as_missing_while_nobody_answers(autojump_clock: MockClock) -> None:
    """It may have been created meanwhile."""
    async with opened() as (cluster, servers):
        servers.answers[RequestCode.GET_ROUTEINFO_BY_TOPIC] = lambda command: command.reply(
            ResponseCode.TOPIC_NOT_EXIST, "no"
        )
        assert await cluster.route("t") is None
        await trio.sleep(ROUTE_AGE_S_MAX + 0.1)
        servers.gone = {"n1:1", "n2:1"}
        with pytest.raises(BrokerUnreachable, match="no name server answers"):
            await cluster.route("t")


async def test_unknown_topics_and_groups() -> None:
    async with opened() as (cluster, servers):
        servers.answers[RequestCode.GET_ROUTEINFO_BY_TOPIC] = lambda command: command.reply(
            ResponseCode.TOPIC_NOT_EXIST, "no"
        )
        assert await cluster.route("t") is None
        group = await cluster.group("g")
        assert group is not None
        assert servers.asked[-1] == ("a:1", RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG), "found without a route"


async def test_brokers_without_message_types() -> None:
    """Those of RocketMQ 4."""
    async with opened() as (cluster, servers):
        servers.answers[RequestCode.GET_TOPIC_CONFIG] = lambda command: command.reply(
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "no"
        )
        route = await cluster.route("t")
        assert route is not None
        assert route.message_types == UNTYPED


async def test_name_servers_that_are_gone() -> None:
    """The next one is asked, and from then on first."""
    async with opened() as (cluster, servers):
        servers.gone = {"n1:1"}
        for topic in ("t1", "t2"):
            await cluster.route(topic)
        asked = [address for address, code in servers.asked if code == RequestCode.GET_ROUTEINFO_BY_TOPIC]
        assert asked == ["n1:1", "n2:1", "n2:1"]
        servers.gone.add("n2:1")
        with pytest.raises(BrokerUnreachable, match="no name server answers"):
            await cluster.route("t3")


def moved(servers: Servers) -> None:
    """Another broker becomes the master of `a`."""
    servers.cluster = ClusterInfo(broker_addr_table={"a": BrokerData(broker_name="a", broker_addrs={0: "a:9"})})


async def test_a_master_that_is_gone_is_asked_for_again() -> None:
    async with opened() as (cluster, servers):
        await cluster.route("t")
        servers.gone = {"a:1"}
        moved(servers)
        with pytest.raises(BrokerUnreachable, match="a:1"):
            await cluster.invoke(None, "a", RemotingCommand(RequestCode.ACK_MESSAGE), 3)
        await cluster.invoke(None, "a", RemotingCommand(RequestCode.ACK_MESSAGE), 3)
        assert servers.asked[-1] == ("a:9", RequestCode.ACK_MESSAGE)


async def test_calls_that_miss_a_master_ask_for_it_once() -> None:
    async with opened() as (cluster, servers):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(cluster.invoke, None, "a", RemotingCommand(RequestCode.ACK_MESSAGE), 3)
        assert servers.asked == [("n1:1", RequestCode.GET_BROKER_CLUSTER_INFO), *3 * [("a:1", RequestCode.ACK_MESSAGE)]]


async def test_calls_that_miss_a_master_share_a_failure(autojump_clock: MockClock) -> None:
    """They would wait for each other, and abandoned ones for ever, as long as more of them come than can fail."""
    async with opened() as (cluster, servers):

        async def silent(address: str, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
            servers.asked.append((address, command.code))
            await trio.sleep(timeout_s)
            raise trio.TooSlowError

        servers.invoke = silent  # type: ignore[method-assign]
        failed_at = []

        async def call() -> None:
            with pytest.raises(BrokerUnreachable):
                await cluster.invoke(None, "a", RemotingCommand(RequestCode.ACK_MESSAGE), 3)
            failed_at.append(trio.current_time())

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(call)
        assert failed_at == [began + 6] * 100
        assert len(servers.asked) == 2
        await call()
        assert failed_at[-1] == began + 12, "later calls look for it again"


async def test_a_late_failure_at_an_old_master_leaves_the_new_one_known() -> None:
    async with opened() as (cluster, servers):
        await cluster.route("t")
        moved(servers)
        answer = servers.answers[RequestCode.ACK_MESSAGE]

        def fail_late(command: RemotingCommand) -> RemotingCommand:
            """Another call has found the new master meanwhile."""
            cluster._masters = {"a": "a:9"}
            raise OSError("reset")

        servers.answers[RequestCode.ACK_MESSAGE] = fail_late
        with pytest.raises(BrokerUnreachable, match="reset"):
            await cluster.invoke(None, "a", RemotingCommand(RequestCode.ACK_MESSAGE), 3)
        servers.answers[RequestCode.ACK_MESSAGE] = answer
        asked = len(servers.asked)
        await cluster.invoke(None, "a", RemotingCommand(RequestCode.ACK_MESSAGE), 3)
        assert servers.asked[asked:] == [("a:9", RequestCode.ACK_MESSAGE)]


async def test_a_master_that_may_not_store_is_asked_for_again() -> None:
    """A member of a failover group that lost the role answers 14, and keeps its connections."""
    async with opened() as (cluster, servers):
        await cluster.route("t")
        servers.answers[RequestCode.ACK_MESSAGE] = lambda command: command.reply(ResponseCode.SERVICE_NOT_AVAILABLE)
        moved(servers)
        for address in ("a:1", "a:9"):
            await cluster.invoke(None, "a", RemotingCommand(RequestCode.ACK_MESSAGE), 3)
            assert servers.asked[-1] == (address, RequestCode.ACK_MESSAGE)


@pytest.mark.parametrize(
    ("code", "remark", "expected"),
    [
        (ResponseCode.NO_PERMISSION, "check signature failed.", ["u"]),
        (ResponseCode.NO_PERMISSION, "User:u is not found.", ["u"]),
        (ResponseCode.NO_PERMISSION, "User:u is disabled.", ["u"]),
        (ResponseCode.NO_PERMISSION, "User:u has no permission to access Topic:t", []),
        (ResponseCode.SUCCESS, "", []),
    ],
)
async def test_a_user_that_a_broker_refuses(code: ResponseCode, remark: str, expected: list[str]) -> None:
    """It may have been changed or deleted."""
    async with opened() as (cluster, servers):
        servers.answers[RequestCode.ACK_MESSAGE] = lambda command: command.reply(code, remark)
        doubted: list[str] = []
        cluster.on_user_refused = doubted.append
        session: Any = SimpleNamespace(access_key="u")
        await cluster.invoke(session, "a", RemotingCommand(RequestCode.ACK_MESSAGE), 3)
        await cluster.invoke(None, "a", RemotingCommand(RequestCode.ACK_MESSAGE), 3)
        assert doubted == expected


async def test_a_broker_without_a_master() -> None:
    async with opened() as (cluster, servers):
        for _ in range(2):
            with pytest.raises(BrokerUnreachable, match="no master of broker b"):
                await cluster.invoke(None, "b", RemotingCommand(RequestCode.ACK_MESSAGE), 3)
        assert servers.asked == 2 * [("n1:1", RequestCode.GET_BROKER_CLUSTER_INFO)]


async def test_a_topic_whose_brokers_have_no_master() -> None:
    """It exists, so clients must not be told otherwise."""
    async with opened() as (cluster, servers):
        brokers = [BrokerData(broker_name="a", broker_addrs={1: "a:2"})]
        route = TopicRouteData(broker_datas=brokers, queue_datas=ROUTE.queue_datas)
        servers.answers[RequestCode.GET_ROUTEINFO_BY_TOPIC] = lambda command: command.reply(
            0, body=java_json.dumps(route)
        )
        with pytest.raises(BrokerUnreachable, match="no broker with topic t has a master"):
            await cluster.route("t")


async def test_what_a_topic_accepts_is_not_guessed() -> None:
    """Clients keep a route for half a minute, and send nothing that it does not accept."""
    async with opened() as (cluster, servers):
        servers.gone = {"a:1"}
        with pytest.raises(BrokerUnreachable, match="a:1"):
            await cluster.route("t")
        servers.gone = set()
        route = await cluster.route("t")
        assert route is not None
        assert route.message_types == (MessageType.FIFO,)


@pytest.mark.parametrize("code", [ResponseCode.SYSTEM_BUSY, ResponseCode.NO_PERMISSION])
async def test_what_a_topic_accepts_is_not_guessed_if_brokers_refuse_to_say(code: ResponseCode) -> None:
    async with opened() as (cluster, servers):
        known = servers.answers[RequestCode.GET_TOPIC_CONFIG]
        servers.answers[RequestCode.GET_TOPIC_CONFIG] = lambda command: command.reply(code, "no")
        with pytest.raises(BrokerUnreachable, match="about topic t: no"):
            await cluster.route("t")
        servers.answers[RequestCode.GET_TOPIC_CONFIG] = known
        route = await cluster.route("t")
        assert route is not None
        assert route.message_types == (MessageType.FIFO,)


async def test_a_topic_without_configuration_accepts_normal_messages() -> None:
    async with opened() as (cluster, servers):
        servers.answers[RequestCode.GET_TOPIC_CONFIG] = lambda command: command.reply(
            ResponseCode.TOPIC_NOT_EXIST, "no"
        )
        route = await cluster.route("t")
        assert route is not None
        assert route.message_types == (MessageType.NORMAL,)


@pytest.mark.parametrize("code", [ResponseCode.SYSTEM_BUSY, ResponseCode.NO_PERMISSION])
async def test_whether_a_group_is_ordered_is_not_guessed(code: ResponseCode) -> None:
    async with opened() as (cluster, servers):
        known = servers.answers[RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG]
        servers.answers[RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG] = lambda command: command.reply(code, "no")
        with pytest.raises(BrokerUnreachable, match="about group g: no"):
            await cluster.group("g")
        servers.answers[RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG] = known
        group = await cluster.group("g")
        assert group is not None
        assert group.consume_message_orderly


async def test_a_group_that_only_one_broker_has() -> None:
    """It was taken for unknown, and so for unordered, if another broker was asked first."""
    async with opened() as (cluster, servers):
        brokers = [BrokerData(broker_name=name, broker_addrs={0: f"{name}:1"}) for name in ("a", "b")]
        servers.cluster = ClusterInfo(broker_addr_table={each.broker_name: each for each in brokers})
        answer = servers.invoke

        async def invoke(address: str, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
            if address == "a:1":
                return command.reply(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "no")
            return await answer(address, command, timeout_s)

        servers.invoke = invoke  # type: ignore[method-assign]
        group = await cluster.group("g")
        assert group is not None
        assert group.consume_message_orderly
        servers.gone = {"b:1"}
        with pytest.raises(BrokerUnreachable, match="b:1: refused"):
            await cluster.group("h")


async def test_requests_that_are_too_large_for_a_frame() -> None:
    """They fail their call, and not the process."""
    async with opened() as (cluster, servers):
        servers.answers[RequestCode.SEND_MESSAGE_V2] = lambda command: command.reply(len(encode_command(command)))
        await cluster.route("t")
        command = RemotingCommand(RequestCode.SEND_MESSAGE_V2, body=bytes(1 << 24))
        with pytest.raises(BrokerUnreachable, match="the maximum is 16777216"):
            await cluster.invoke(None, "a", command, 3)


async def test_a_front_listens_on_those_addresses_of_its_host_that_are_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 0)) for host in ("192.0.2.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: found)
    keys = ("grpcListenPort=0", "namesrvAddr=127.0.0.1:1", "bindAddress=front.invalid")
    async with serve_proxy(load_config(ProxyConfig, settings=keys).config) as line:
        assert line.startswith("READY role=PROXY grpc=127.0.0.1:")
    assert "node.address_unavailable key=grpcListenPort address=192.0.2.1 " in caplog.text


async def test_the_lookup_of_its_host_does_not_block_the_programs_of_a_front(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = watch_lookups(monkeypatch)
    keys = ("grpcListenPort=0", "namesrvAddr=127.0.0.1:1", "bindAddress=front.invalid")
    async with serve_proxy(load_config(ProxyConfig, settings=keys).config):
        assert threads["front.invalid"] != threading.get_ident()


async def test_a_front_accepts_what_a_frame_can_hold() -> None:
    """Whatever maxMessageSize says. Its clients learn the limit before they send."""
    keys = ("grpcListenPort=0", "namesrvAddr=127.0.0.1:1", "maxMessageSize=100000000")
    config = load_config(ProxyConfig, settings=keys).config
    async with serve_proxy(config) as line, chatting(Client(line.rpartition("=")[2])) as chat:
        answer = await chat.tell(producer("t"))
        assert answer.settings.publishing.max_body_size == BODY_SIZE_MAX
    encode_command(
        RemotingCommand(RequestCode.SEND_MESSAGE_V2, ext_fields={"i": "ü" * 20_000}, body=bytes(BODY_SIZE_MAX))
    )


async def test_malformed_answers() -> None:
    async with opened() as (cluster, servers):
        for code in (RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.GET_BROKER_CLUSTER_INFO):
            servers.answers[code] = lambda command: command.reply(0, body=b"{")
        with pytest.raises(BrokerUnreachable, match="malformed answer"):
            await cluster.route("t")
        with pytest.raises(BrokerUnreachable, match="malformed answer"):
            await cluster.invoke(None, "a", RemotingCommand(RequestCode.GET_TOPIC_CONFIG))


async def test_a_long_name_of_a_broker_is_not_repeated() -> None:
    """It is in a client's receipt handle, and the reason is sent and logged."""
    async with opened() as (cluster, _):
        with pytest.raises(BrokerUnreachable, match="no master of broker xxx") as unreachable:
            await cluster.invoke(None, "x" * 1_000_000, RemotingCommand(RequestCode.ACK_MESSAGE))
        assert len(str(unreachable.value)) < 1000


async def test_known_answers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.proxy.cluster.KNOWN_COUNT_MAX", 2)
    async with opened() as (cluster, servers):
        for topic in ("t1", "t2", "t3"):
            await cluster.route(topic)
        servers.asked.clear()
        await cluster.route("t3")
        assert servers.asked == []
        await cluster.route("t1")
        assert servers.asked
