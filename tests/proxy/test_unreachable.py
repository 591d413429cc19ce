"""A front and brokers that answer as scripted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import trio
import trio.testing
from rocketmq.grpc_protocol import service_pb2 as service
from trio.testing import MockClock

from ha.protocol.bodies import GroupConfig
from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand
from ha.proxy.brokers import BrokerQueues, BrokerUnreachable, Route
from ha.proxy.front import Front
from ha.proxy.messages import MessageType
from ha.proxy.options import FrontOptions
from ha.proxy.session import Session
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


def front_of(brokers: Any) -> Front:
    return Front(brokers, FrontOptions(), client_id="front", wall_clock_ms=lambda: 0)


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


async def test_pop_whose_call_has_ended_before_it_was_sent(autojump_clock: MockClock) -> None:
    """It is dropped: nothing would wait for the messages."""

    class Grouped(Brokers):
        async def group(self, group: str) -> GroupConfig:
            return GroupConfig(group_name=group)

    brokers: Any = Grouped()
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
