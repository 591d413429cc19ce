"""A front and brokers that answer as scripted."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from google.protobuf.message import Message
from rocketmq.grpc_protocol import definition_pb2 as definition
from rocketmq.grpc_protocol import service_pb2 as service
from trio.testing import MockClock

from ha.protocol.bodies import GroupConfig
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.pop import Handle
from ha.protocol.popped import ReceiptHandle
from ha.protocol.recall_handle import RecallHandle, encode_recall_handle
from ha.protocol.remoting import RemotingCommand
from ha.proxy.brokers import BrokerQueues, BrokerUnreachable, Route
from ha.proxy.front import Front
from ha.proxy.messages import MessageType
from ha.proxy.options import FrontOptions
from ha.proxy.session import Session
from tests.protocol.test_popped import response as popped
from tests.proxy.site import message
from tests.proxy.test_receiving import receiving as poll


class Brokers:
    """Brokers a and b."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.is_reachable = True

    def known_route(self, topic: str) -> Route:
        queues = tuple(BrokerQueues(name, perm=6, read_count=4, write_count=4) for name in "ab")
        return Route(topic, (MessageType.NORMAL,), queues)

    async def route(self, topic: str) -> Route:
        if not self.is_reachable:
            raise BrokerUnreachable("no name server answers")
        return self.known_route(topic)

    async def invoke(
        self, session: Any, broker_name: str, command: RemotingCommand, timeout_s: float = 3.0
    ) -> RemotingCommand:
        self.asked.append((broker_name, command.code))
        return RemotingCommand(0, ext_fields={"queueOffset": "0"})

    def invoke_nowait(self, *_: object) -> bool:
        return False

    async def group(self, group: str) -> GroupConfig:
        return GroupConfig(group_name=group)

    def forget(self, session: Any) -> None:
        pass


def front_of(brokers: Any, options: FrontOptions | None = None) -> Front:
    return Front(brokers, options or FrontOptions(), client_id="front", wall_clock_ms=lambda: 0)


async def test_front_stays_registered_while_no_name_server_answers(autojump_clock: MockClock) -> None:
    """Brokers still ask about half messages then, and give up after some checks without an answer."""
    brokers = Brokers()
    front = front_of(brokers)
    connection: Any = SimpleNamespace()
    session = Session(connection, "vm@1")
    async with trio.open_nursery() as nursery:
        await nursery.start(front.serve_clients)
        front._producers.add(session, ["t"])
        await trio.sleep(5)
        brokers.is_reachable = False
        brokers.asked.clear()
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert sorted(brokers.asked) == 2 * [("a", RequestCode.HEART_BEAT)] + 2 * [("b", RequestCode.HEART_BEAT)]


async def test_front_with_many_topics_stays_registered_while_name_servers_are_silent(autojump_clock: MockClock) -> None:
    """Brokers forget a producer after 120 s without a heartbeat."""
    brokers = Brokers()
    answer = brokers.route

    async def silent(topic: str) -> Route:
        await trio.sleep(6)
        raise BrokerUnreachable("no name server answers")

    front = front_of(brokers)
    session = Session(SimpleNamespace(), "vm@1")  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        await nursery.start(front.serve_clients)
        front._producers.add(session, [f"t{number}" for number in range(200)])
        await trio.sleep(5)
        assert brokers.route == answer
        brokers.route = silent  # type: ignore[method-assign]
        brokers.asked.clear()
        await trio.sleep(120)
        nursery.cancel_scope.cancel()
    assert set(brokers.asked) == {("a", RequestCode.HEART_BEAT), ("b", RequestCode.HEART_BEAT)}


async def test_a_refused_heartbeat_is_logged_and_others_are_sent(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    """Without it, nobody would know why no producer is asked about its half messages."""
    brokers = Brokers()
    heartbeats = 0

    async def refused(session: Any, broker_name: str, command: RemotingCommand, timeout_s: float = 3.0) -> Any:
        nonlocal heartbeats
        heartbeats += 1
        return command.reply(ResponseCode.NO_PERMISSION, "no right")

    brokers.invoke = refused  # type: ignore[method-assign]
    front = front_of(brokers)
    session = Session(SimpleNamespace(), "vm@1")  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        await nursery.start(front.serve_clients)
        await trio.testing.wait_all_tasks_blocked()
        front._producers.add(session, [f"t{number}" for number in range(100)])
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert heartbeats == 4, "two for each broker, of 64 topics and the others"
    lines = [record.getMessage() for record in caplog.records if "proxy.heartbeat_failed" in record.message]
    assert sorted(lines) == [f"proxy.heartbeat_failed broker={name!r} reason='no right' times=1" for name in "ab"]


async def test_brokers_take_turns() -> None:
    """Also if a message is prepared twice, because it could not be sent at once."""
    brokers = Brokers()
    sending = front_of(brokers)._sending
    session: Any = None
    for _ in range(4):
        request = service.SendMessageRequest(messages=[message("t")])
        call: Any = SimpleNamespace(message=request.SerializeToString())
        assert not sending.take(session, call)
        await sending.send(session, request)
    assert sorted(name for name, _ in brokers.asked) == ["a", "a", "b", "b"]


async def test_brokers_take_turns_with_batches() -> None:
    """Whatever number of messages a batch has."""
    brokers = Brokers()
    sending = front_of(brokers)._sending
    session: Any = None
    for _ in range(4):
        await sending.send(session, service.SendMessageRequest(messages=[message("t"), message("t")]))
    assert sorted(name for name, _ in brokers.asked) == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    "answer", [RemotingCommand(ResponseCode.NO_PERMISSION, remark="no right"), RemotingCommand(ResponseCode.SUCCESS)]
)
async def test_messages_of_a_batch_that_was_not_stored_have_no_offsets(answer: RemotingCommand) -> None:
    brokers = Brokers()

    async def refused(session: Any, broker_name: str, command: RemotingCommand, timeout_s: float = 3.0) -> Any:
        return answer

    brokers.invoke = refused  # type: ignore[method-assign]
    request = service.SendMessageRequest(messages=[message("t"), message("t")])
    response = await front_of(brokers)._sending.send(None, request)  # type: ignore[arg-type]
    assert [(entry.offset, entry.message_id) for entry in response.entries] == [(0, "")] * 2


async def test_pop_whose_call_has_ended_before_it_was_sent(autojump_clock: MockClock) -> None:
    """It is dropped: nothing would wait for the messages."""
    brokers = Brokers()
    receiving = front_of(brokers)._receiving
    session: Any = None
    call: Any = SimpleNamespace(timeout_s=10.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(receiving.receive, session, call, poll("t", auto_renew=True))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    with trio.move_on_after(1):
        await receiving.serve()
    assert brokers.asked == []


class LateBrokers(Brokers):
    """Answer a pop 4 s after its poll time, because their disk stalls."""

    def __init__(self) -> None:
        super().__init__()
        self.released_at: list[float] = []

    async def invoke(
        self, session: Any, broker_name: str, command: RemotingCommand, timeout_s: float = 3.0
    ) -> RemotingCommand:
        if command.code == RequestCode.CHANGE_MESSAGE_INVISIBLETIME:
            self.released_at.append(trio.current_time())
            return command.reply(
                ResponseCode.SUCCESS, ext_fields={"popTime": "1", "invisibleTime": "1", "reviveQid": "0"}
            )
        with trio.move_on_after(timeout_s):
            await trio.sleep(int(command.ext_fields["pollTime"]) / 1000 + 4)
            return popped()
        raise BrokerUnreachable(broker_name, is_timeout=True)


@pytest.mark.parametrize("patience_s", [3, 10])
async def test_pop_that_is_answered_late(patience_s: int, autojump_clock: MockClock) -> None:
    """A client that still waits gets the messages; otherwise, they are released."""
    brokers = LateBrokers()
    front = front_of(brokers, FrontOptions(polling_ms_max=5_000))
    session: Any = SimpleNamespace(client_id="vm@1", access_key="", is_ended=False)
    answers: list[bytes] = []

    async def respond_all(messages: Iterable[bytes]) -> None:
        answers.extend(messages)

    call: Any = SimpleNamespace(timeout_s=5.0 + patience_s, respond_all=respond_all)
    async with trio.open_nursery() as nursery:
        await nursery.start(front.serve_clients)
        began = trio.current_time()
        request = poll("t")
        request.long_polling_timeout.FromSeconds(5)
        with trio.move_on_after(call.timeout_s):
            await front._receiving.receive(session, call, request)
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    if patience_s > 4:
        assert [service.ReceiveMessageResponse.FromString(each).message.body for each in answers] == [b"", b"body", b""]
        assert brokers.released_at == []
    else:
        [released_at] = brokers.released_at
        assert 9 <= released_at - began <= 10


RECEIPT = ReceiptHandle(
    Handle(
        start_offset=0,
        pop_time_ms=1,
        invisible_ms=900_000,
        revive_queue=0,
        flag=0,
        broker_name="a",
        queue_id=0,
        offset=0,
    ),
    7,
)


async def test_malformed_answers_are_not_the_clients_fault(autojump_clock: MockClock) -> None:
    """The broker answers without the fields of a pop, a changed time and a recall."""
    topic, group = definition.Resource(name="t"), definition.Resource(name="g")
    handle = encode_recall_handle(RecallHandle("t", "a", 1, "key"))
    calls: dict[str, Message] = {
        "ReceiveMessage": poll("t"),
        "ChangeInvisibleDuration": service.ChangeInvisibleDurationRequest(
            group=group, topic=topic, receipt_handle=RECEIPT.encode()
        ),
        "RecallMessage": service.RecallMessageRequest(topic=topic, recall_handle=handle),
    }
    brokers = Brokers()
    front = front_of(brokers, FrontOptions(is_message_type_checked=False))
    answers: list[bytes] = []

    async def respond_all(messages: Iterable[bytes]) -> None:
        answers.append(next(iter(messages)))

    async with trio.open_nursery() as nursery:
        await nursery.start(front.serve_clients)
        for method, request in calls.items():
            call: Any = SimpleNamespace(
                method=method,
                message=request.SerializeToString(),
                timeout_s=10.0,
                metadata=lambda name: b"vm@1",
                connection=SimpleNamespace(sessions={}, on_close=lambda callback: None),
                received_at=0.0,
                respond=answers.append,
                respond_all=respond_all,
            )
            await front.serve(call)
        nursery.cancel_scope.cancel()
    for method, answer in zip(calls, answers, strict=True):
        status = getattr(service, f"{method}Response").FromString(answer).status
        assert (status.code, status.message.partition(":")[0]) == (
            definition.Code.INTERNAL_SERVER_ERROR,
            "malformed answer",
        )
    assert [code for _, code in brokers.asked] == [200050, 200053, 370]


async def test_malformed_answer_to_a_renewal(autojump_clock: MockClock) -> None:
    """The front goes on, and renews the message again."""
    brokers = Brokers()
    front = front_of(brokers)
    connection: Any = SimpleNamespace()
    async with trio.open_nursery() as nursery:
        await nursery.start(front.serve_clients)
        front._in_flight.add(Session(connection, "vm@1"), "g", "t", RECEIPT)
        await trio.sleep(870)
        nursery.cancel_scope.cancel()
    renewals = [code for _, code in brokers.asked if code == RequestCode.CHANGE_MESSAGE_INVISIBLETIME]
    assert len(renewals) > 1
