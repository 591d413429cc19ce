"""Access control of gRPC calls: signatures, and the rights of each method."""

from __future__ import annotations

import hmac
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from google.protobuf.message import Message
from rocketmq.grpc_protocol import definition_pb2 as definition
from rocketmq.grpc_protocol import service_pb2 as service

from ha.acl import Account, AclGuard, AclPolicy, Right
from ha.proxy import in_flight
from ha.proxy.access import GuardedCalls
from ha.proxy.brokers import BrokerUnreachable
from tests.proxy.site import Client, Site, message, open_site
from tests.proxy.test_receiving import QUICK, again, receiving
from tests.proxy.test_telemetry import chatting, consumer, producer

Code = definition.Code
T, G, OTHER = (definition.Resource(name=name) for name in ("t", "g", "other"))
POLICY = AclPolicy(
    [
        Account("sender", "secret-s", topics={"t": Right.PUB}),
        Account("reader", "secret-r", topics={"t": Right.SUB}, groups={"g": Right.SUB}),
    ]
)


def signed(address: str, access_key: str, secret: str) -> Client:
    """A client that signs its calls."""
    client = Client(address, f"vm@{access_key}")
    date = dict(client.metadata)["x-mq-date-time"]
    signature = hmac.new(secret.encode(), date.encode(), "sha1").hexdigest()
    value = f"MQv2-HMAC-SHA1 Credential={access_key}, SignedHeaders=x-mq-date-time, Signature={signature}"
    client.metadata.append(("authorization", value))
    return client


async def code(client: Client, method: str, request: Message) -> int:
    """The code of a call's status."""
    if method == "ReceiveMessage":
        found: int = (await client.receive(method, request))[0].status.code
    else:
        found = (await client.call(method, request)).status.code
    return found


def receive(topic: Any, group: Any) -> service.ReceiveMessageRequest:
    request = service.ReceiveMessageRequest(group=group)
    request.message_queue.topic.CopyFrom(topic)
    return request


SENDING = [
    ("SendMessage", service.SendMessageRequest(messages=[message("t")])),
    ("RecallMessage", service.RecallMessageRequest(topic=T)),
    ("EndTransaction", service.EndTransactionRequest(topic=T)),
]
READING = [
    ("QueryAssignment", service.QueryAssignmentRequest(topic=T, group=G)),
    ("ReceiveMessage", receive(T, G)),
    ("AckMessage", service.AckMessageRequest(topic=T, group=G)),
    ("ChangeInvisibleDuration", service.ChangeInvisibleDurationRequest(topic=T, group=G)),
    ("ForwardMessageToDeadLetterQueue", service.ForwardMessageToDeadLetterQueueRequest(topic=T, group=G)),
    ("Heartbeat", service.HeartbeatRequest(group=G)),
    ("NotifyClientTermination", service.NotifyClientTerminationRequest(group=G)),
]
FOREIGN = [
    ("ReceiveMessage", receive(T, OTHER)),
    ("ReceiveMessage", receive(OTHER, G)),
    ("AckMessage", service.AckMessageRequest(topic=T, group=OTHER)),
    ("QueryRoute", service.QueryRouteRequest(topic=OTHER)),
]
REFUSED = {Code.UNAUTHORIZED, Code.FORBIDDEN}


async def test_rights_of_each_method(tmp_path: Path) -> None:
    async with open_site(tmp_path, acl_policy=POLICY) as site:
        await site.topic("t")
        sender, reader = signed(site.address, "sender", "secret-s"), signed(site.address, "reader", "secret-r")
        for method, request in SENDING:
            assert await code(sender, method, request) not in REFUSED, method
            assert await code(reader, method, request) == Code.FORBIDDEN, method
        for method, request in READING:
            assert await code(reader, method, request) not in REFUSED, method
            assert await code(sender, method, request) == Code.FORBIDDEN, method
        for method, request in FOREIGN:
            assert await code(reader, method, request) == Code.FORBIDDEN, method
        for client in (sender, reader):
            assert await code(client, "QueryRoute", service.QueryRouteRequest(topic=T)) == Code.OK


async def test_only_users_without_an_account_in_the_file_are_read_from_brokers() -> None:
    """Those of the file can make calls while no broker answers."""
    asked: list[str] = []

    async def load_user(access_key: str) -> None:
        asked.append(access_key)
        raise BrokerUnreachable("gone")

    def call(access_key: str, secret: str) -> Any:
        metadata = dict(signed("127.0.0.1:1", access_key, secret).metadata)
        return SimpleNamespace(method="QueryRoute", metadata=lambda name: metadata.get(name.decode(), ""))

    calls, request = GuardedCalls(AclGuard(POLICY), load_user), service.QueryRouteRequest(topic=T)
    session: Any = SimpleNamespace(connection=SimpleNamespace(peer=("127.0.0.1", 1), is_encrypted=False), access_key="")
    await calls.check(session, call("sender", "secret-s"), request)
    with pytest.raises(BrokerUnreachable):
        await calls.check(session, call("another", "secret"), request)
    assert asked == ["another"]
    assert session.access_key == "sender"


@pytest.mark.parametrize(
    ("access_key", "secret"), [("sender", "wrong"), ("nobody", "secret-s"), ("", "secret-s")], ids=str
)
async def test_wrong_signatures(tmp_path: Path, access_key: str, secret: str) -> None:
    async with open_site(tmp_path, acl_policy=POLICY) as site:
        await site.topic("t")
        for method, request in (*SENDING, *READING):
            assert await code(signed(site.address, access_key, secret), method, request) == Code.UNAUTHORIZED, method
        assert await code(Client(site.address), *SENDING[0]) == Code.UNAUTHORIZED
        change = service.ChangeInvisibleDurationRequest(topic=T, group=G, receipt_handle="h")
        refused = await Client(site.address).call("ChangeInvisibleDuration", change)
        assert (refused.status.code, refused.receipt_handle) == (Code.UNAUTHORIZED, "h")


async def test_settings(tmp_path: Path) -> None:
    """A client is not asked about half messages of topics that it may not send to."""
    async with open_site(tmp_path, acl_policy=POLICY) as site:
        for client, settings, error in (
            (signed(site.address, "sender", "secret-s"), producer("t"), None),
            (signed(site.address, "sender", "secret-s"), producer("t", "other"), "INVALID_ARGUMENT"),
            (signed(site.address, "reader", "secret-r"), producer("t"), "INVALID_ARGUMENT"),
            (signed(site.address, "reader", "secret-r"), consumer("g", "t"), None),
            (signed(site.address, "reader", "secret-r"), consumer("other", "t"), "INVALID_ARGUMENT"),
            (Client(site.address), producer("t"), "INVALID_ARGUMENT"),
        ):
            async with chatting(client) as chat:
                await chat._send.send(service.TelemetryCommand(settings=settings))
                answers = []
                async for answer in chat.answers:
                    answers.append(answer.status.code)
                    break
            assert answers == ([] if error else [Code.OK])
            assert error is None or (chat.error is not None and chat.error.code().name == error)


async def test_committing_needs_the_right_of_the_account(tmp_path: Path) -> None:
    """The broker itself checks it on the topic of the half message, whatever the call says."""
    async with open_site(tmp_path, acl_policy=POLICY) as site:
        await site.topic("t", "TRANSACTION")
        sender = signed(site.address, "sender", "secret-s")
        half = message("t")
        half.system_properties.message_type = definition.TRANSACTION
        [entry] = (await sender.send(half)).entries
        assert entry.status.code == Code.OK
        ending = service.EndTransactionRequest(topic=T, transaction_id=entry.transaction_id, resolution=1)
        assert await code(signed(site.address, "reader", "secret-r"), "EndTransaction", ending) == Code.FORBIDDEN
        assert await code(sender, "EndTransaction", ending) == Code.OK


async def test_dead_letter_that_was_delivered_before(tmp_path: Path) -> None:
    """It is read from the retry topic of its group, which is then the topic whose messages the group may read."""
    async with open_site(tmp_path, QUICK, acl_policy=POLICY) as site:
        await site.topic("t")
        await site.group("g")
        reader = signed(site.address, "reader", "secret-r")
        assert await code(reader, "ReceiveMessage", receiving("t")) == Code.MESSAGE_NOT_FOUND
        await signed(site.address, "sender", "secret-s").send(message("t"))
        await again(reader, receiving("t", invisible_ms=100))
        received, _ = await again(reader, receiving("t"))
        assert received.system_properties.delivery_attempt == 2
        request = service.ForwardMessageToDeadLetterQueueRequest(
            group=G, topic=T, receipt_handle=received.system_properties.receipt_handle
        )
        assert (await reader.call("ForwardMessageToDeadLetterQueue", request)).status.message == "OK"


@pytest.mark.parametrize(
    ("access_key", "group", "topic", "may"),
    [
        ("reader", "g", "t", True),
        ("reader", "other", "t", False),
        ("reader", "g", "other", False),
        ("sender", "g", "t", False),
        ("deleted", "g", "t", False),
        ("", "g", "t", False),
    ],
)
async def test_who_may_receive_at_present(access_key: str, group: str, topic: str, *, may: bool) -> None:
    session: Any = SimpleNamespace(access_key=access_key, connection=SimpleNamespace(peer=("127.0.0.1", 1)))
    calls = GuardedCalls(AclGuard(POLICY))
    assert calls.may_receive(session, group, topic) is may


@pytest.fixture
def quick_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages of a client that is gone are released after a second."""
    for name, value in {"RETURN_S": 1.0, "CHECK_INTERVAL_S": 0.05, "RELEASED_MS": 1}.items():
        monkeypatch.setattr(in_flight, name, value)


RECEIVE = receive(T, G)
RECEIVE.auto_renew = True
RECEIVE.message_queue.broker.name = "b0"
RECEIVE.long_polling_timeout.FromSeconds(2)


async def begin(site: Site, reader: Client) -> None:
    """`reader` receives a message."""
    await site.topic("t")
    await site.group("g")
    await signed(site.address, "sender", "secret-s").send(message("t"))
    assert [each.HasField("message") for each in await reader.receive("ReceiveMessage", RECEIVE)].count(True) == 1


def elsewhere(site: Site) -> str:
    """The site's address by another name: gRPC's clients share the connections to one name."""
    return site.address.replace("127.0.0.1", "localhost")


async def test_refused_call_has_no_effect_on_the_client_whose_id_it_uses(tmp_path: Path, quick_release: None) -> None:
    """When its connection ends, the messages of the client stay hidden."""
    async with open_site(tmp_path, acl_policy=POLICY) as site:
        reader = signed(site.address, "reader", "secret-r")
        await begin(site, reader)
        before = len(site.server.connections)
        stranger = Client(elsewhere(site), "vm@reader")
        assert await code(stranger, "Heartbeat", service.HeartbeatRequest(group=G)) == Code.UNAUTHORIZED
        assert len(site.server.connections) > before
        stranger.channel.close()
        await trio.sleep(1.5)  # longer than RETURN_S
        assert await code(reader, "ReceiveMessage", RECEIVE) == Code.MESSAGE_NOT_FOUND


async def test_client_that_is_back_with_its_stream_alone_keeps_its_messages(
    tmp_path: Path, quick_release: None
) -> None:
    """A consumer that is busy makes no other call than Telemetry."""
    async with open_site(tmp_path, acl_policy=POLICY) as site:
        gone, back = (signed(address, "reader", "secret-r") for address in (elsewhere(site), site.address))
        await begin(site, gone)
        gone.channel.close()
        async with chatting(back) as chat:
            await chat.tell(consumer("g", "t"))
            await trio.sleep(1.5)  # longer than RETURN_S
            assert await code(back, "ReceiveMessage", RECEIVE) == Code.MESSAGE_NOT_FOUND
