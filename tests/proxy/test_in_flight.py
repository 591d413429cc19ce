"""Renewal and release of push consumers' messages, on a virtual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
from rocketmq.grpc_protocol import definition_pb2 as definition
from rocketmq.grpc_protocol import service_pb2 as service
from trio.testing import MockClock

from ha.protocol.codes import RequestCode
from ha.protocol.pop import ORDER_QUEUE, Handle
from ha.protocol.popped import ReceiptHandle
from ha.protocol.remoting import RemotingCommand
from ha.proxy.acknowledging import Acknowledging
from ha.proxy.brokers import BrokerUnreachable
from ha.proxy.in_flight import (
    RELEASED_MS,
    RENEWED_S_MAX,
    RETRY_INTERVAL_S,
    RETURN_S,
    SETTLED_WITHIN_S,
    InFlight,
)
from ha.proxy.messages import Code
from ha.proxy.options import FrontOptions
from ha.proxy.refusal import CallRefused

INVISIBLE_MS = 900_000


class Session:
    client_id = "c"
    access_key = ""
    is_ended = False


def receipt(offset: int = 0, revive_queue: int = 0, broker_name: str = "b") -> ReceiptHandle:
    handle = Handle(
        start_offset=0,
        pop_time_ms=1,
        invisible_ms=INVISIBLE_MS,
        revive_queue=revive_queue,
        flag=0,
        broker_name=broker_name,
        queue_id=0,
        offset=offset,
    )
    return ReceiptHandle(handle, 7)


class World:
    """The table, and the changes that it asks for: time, queue offset, new invisible time. `suspended`: offsets of
    messages whose next delivery does not count."""

    def __init__(self) -> None:
        self.table = InFlight()
        self.session: Any = Session()
        self.changes: list[tuple[float, int, int]] = []
        self.suspended: set[int] = set()
        self.started = trio.current_time()
        self.is_unreachable = False
        self.refusal: CallRefused | None = None
        self.answers_after_s = 0.0
        self.silent: set[str] = set()  # brokers
        self.forbidden: set[tuple[str, str, str]] = set()

    @property
    def now(self) -> float:
        return trio.current_time() - self.started

    def may_renew(self, session: Any, group: str, topic: str) -> bool:
        return (session.client_id, group, topic) not in self.forbidden

    async def delay(
        self, group: str, topic: str, old: ReceiptHandle, invisible_ms: int, *, suspends: bool
    ) -> ReceiptHandle:
        self.changes.append((round(self.now), old.handle.offset, invisible_ms))
        if suspends:
            self.suspended.add(old.handle.offset)
        is_silent = old.handle.broker_name in self.silent
        await trio.sleep(3 if is_silent else self.answers_after_s)
        if self.is_unreachable or is_silent:
            raise BrokerUnreachable(old.handle.broker_name)
        if self.refusal is not None:
            raise self.refusal
        if old.handle.is_order:  # the pop time stays
            until_ms = 1 + round(1000 * self.now) + invisible_ms
            handle = msgspec.structs.replace(old.handle, invisible_ms=until_ms - old.handle.pop_time_ms)
        else:
            handle = msgspec.structs.replace(old.handle, pop_time_ms=old.handle.pop_time_ms + 1)
        return ReceiptHandle(handle, old.physical_offset)


@asynccontextmanager
async def opened() -> AsyncIterator[World]:
    world = World()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.table.serve, world.delay, world.may_renew)
        yield world
        nursery.cancel_scope.cancel()


async def test_slow_consumer(autojump_clock: MockClock) -> None:
    """Its messages are renewed before they become visible, and its first handle stands for the latest."""
    async with opened() as world:
        first = receipt().encode()
        world.table.add(world.session, "g", "t", receipt())
        await trio.sleep(1800)
        assert world.changes == [(855, 0, INVISIBLE_MS), (1710, 0, INVISIBLE_MS)]
        latest = world.table.find(world.session, first)
        assert latest is not None
        assert latest.handle.pop_time_ms == 3
        world.table.remove(world.session, first)
        assert world.table.count == 0
        await trio.sleep(1800)
        assert len(world.changes) == 2


async def test_many_slow_consumers(autojump_clock: MockClock) -> None:
    """All of their messages are renewed in time, although each request takes as long as a synchronous flush."""
    async with opened() as world:
        world.answers_after_s = 0.02
        for offset in range(5_000):
            world.table.add(world.session, "g", "t", receipt(offset))
        await trio.sleep(1000)
        assert world.table.count == 5_000


@pytest.mark.parametrize("client_count", [100, 1])
async def test_other_tasks_run_while_many_messages_are_checked(
    client_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ha.proxy.in_flight.TIME_SLICE_S", 0.0)
    table, passes = InFlight(), 0
    sessions: list[Any] = [Session() for _ in range(client_count)]
    for number in range(100):
        session = sessions[number % client_count]
        session.client_id = str(number % client_count)
        table.add(session, "g", "t", receipt(number))

    async def count() -> None:
        nonlocal passes
        while True:
            await trio.lowlevel.checkpoint()
            passes += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        assert await table._due() == {}
        nursery.cancel_scope.cancel()
    assert passes >= 90


async def test_silent_broker_does_not_delay_the_messages_of_others(autojump_clock: MockClock) -> None:
    async with opened() as world:
        for offset in range(100):
            world.table.add(world.session, "g", "t", receipt(offset, broker_name="silent"))
        world.table.add(world.session, "g", "t", receipt(1000))
        world.silent = {"silent"}
        await trio.sleep(855.5)
        assert (855, 1000, INVISIBLE_MS) in world.changes
        await trio.sleep(60)
        assert world.table.count == 1, "the others are visible"


async def test_renewals_end(autojump_clock: MockClock) -> None:
    async with opened() as world:
        world.table.add(world.session, "g", "t", receipt())
        await trio.sleep(2 * RENEWED_S_MAX)
        assert world.changes[-1][0] <= RENEWED_S_MAX
        assert world.table.count == 0


async def test_client_that_is_gone(autojump_clock: MockClock) -> None:
    async with opened() as world:
        for offset in range(3):
            world.table.add(world.session, "g", "t", receipt(offset))
        world.table.gone(world.session, may_return=True)
        await trio.sleep(RETURN_S - 2)
        assert world.changes == []
        await trio.sleep(3)
        assert sorted((offset, time) for _, offset, time in world.changes) == [(n, RELEASED_MS) for n in range(3)]
        assert world.table.count == 0


async def test_failed_releases_are_tried_again(autojump_clock: MockClock) -> None:
    """While the message is still invisible: a broker can be without a master at the moment."""
    async with opened() as world:
        world.table.add(world.session, "g", "t", receipt(0))
        world.table.abandon(world.session, "g", "t", [receipt(1)])
        world.table.gone(world.session, may_return=False)
        world.is_unreachable = True
        await trio.sleep(20)
        world.is_unreachable = False
        await trio.sleep(RETRY_INTERVAL_S + 1)
        assert world.table.count == 0
        assert {(offset, ms) for at, offset, ms in world.changes if at >= 20} == {(0, RELEASED_MS), (1, RELEASED_MS)}
        world.is_unreachable = True
        world.table.abandon(world.session, "g", "t", [receipt(2)])
        await trio.sleep(INVISIBLE_MS / 1000 + RETRY_INTERVAL_S + 1)
        assert world.table.count == 0, "it is visible"


@pytest.mark.parametrize(
    ("code", "attempt_count"), [(Code.FORBIDDEN, 1), (Code.TOPIC_NOT_FOUND, 1), (Code.INTERNAL_SERVER_ERROR, 4)]
)
async def test_a_release_that_is_refused_for_good_is_not_tried_again(
    code: Code, attempt_count: int, autojump_clock: MockClock
) -> None:
    async with opened() as world:
        world.refusal = CallRefused(code, "no")
        world.table.abandon(world.session, "g", "t", [receipt()])
        await trio.sleep(1 + 3 * (RETRY_INTERVAL_S + 1))
        assert len(world.changes) == attempt_count
        assert world.table.count == (attempt_count > 1)


async def test_a_message_received_again_during_its_release_stays(autojump_clock: MockClock) -> None:
    async with opened() as world:
        world.answers_after_s = 5.0
        world.table.abandon(world.session, "g", "t", [receipt()])
        await trio.sleep(3)
        world.table.add(world.session, "g", "t", receipt())
        await trio.sleep(10)
        assert world.changes == [(1, 0, RELEASED_MS)]
        assert world.table.count == 1


async def test_message_for_a_session_that_has_ended(autojump_clock: MockClock) -> None:
    """Its receive was still open. The client's other messages are released, too."""
    async with opened() as world:
        world.table.add(world.session, "g", "t", receipt(0))
        world.session.is_ended = True
        world.table.gone(world.session, may_return=False)
        world.table.add(world.session, "g", "t", receipt(1))
        await trio.sleep(3)
        assert sorted((offset, time) for _, offset, time in world.changes) == [(0, RELEASED_MS), (1, RELEASED_MS)]
        assert world.table.count == 0


async def test_client_that_comes_back(autojump_clock: MockClock) -> None:
    async with opened() as world:
        world.table.add(world.session, "g", "t", receipt())
        world.table.gone(world.session, may_return=True)
        await trio.sleep(RETURN_S - 2)
        world.table.returned(world.session)
        await trio.sleep(60)
        assert world.changes == []
        assert world.table.find(world.session, receipt().encode()) == receipt()


async def test_client_whose_old_connection_ends_after_it_has_come_back(autojump_clock: MockClock) -> None:
    async with opened() as world:
        world.table.add(world.session, "g", "t", receipt())
        new: Any = Session()
        world.table.returned(new)
        world.table.gone(world.session, may_return=True)
        await trio.sleep(60)
        assert world.changes == []
        world.table.gone(new, may_return=True)
        await trio.sleep(RETURN_S + 1)
        assert [time for _, _, time in world.changes] == [RELEASED_MS]


async def test_client_with_the_id_of_another_account(autojump_clock: MockClock) -> None:
    """Neither its calls nor its end change anything for the account's own client."""
    async with opened() as world:
        world.table.add(world.session, "g", "t", receipt())
        other: Any = Session()
        other.access_key = "other"
        world.table.returned(other)
        assert world.table.find(other, receipt().encode()) is None
        world.table.remove(other, receipt().encode())
        world.table.gone(other, may_return=False)
        await trio.sleep(60)
        assert (world.changes, world.table.count) == ([], 1)


async def test_client_that_ends_under_another_account(autojump_clock: MockClock) -> None:
    """Its credentials were changed meanwhile."""
    async with opened() as world:
        world.table.add(world.session, "g", "t", receipt())
        world.session.access_key = "new"
        world.session.is_ended = True
        world.table.gone(world.session, may_return=True)
        await trio.sleep(3)
        assert [ms for _, _, ms in world.changes] == [RELEASED_MS]


async def test_unreachable_broker(autojump_clock: MockClock) -> None:
    """A failed renewal ends neither the task nor the other messages."""
    async with opened() as world:
        world.is_unreachable = True
        world.table.add(world.session, "g", "t", receipt(0))
        world.table.add(world.session, "g", "t", receipt(1))
        await trio.sleep(1000)
        assert {offset for _, offset, _ in world.changes} == {0, 1}
        assert all(855 <= at <= 900 for at, _, _ in world.changes)
        assert world.table.count == 0, "its first handle says that it is over"


async def test_failed_renewals_are_tried_again(autojump_clock: MockClock) -> None:
    """While the message is still invisible."""
    async with opened() as world:
        world.table.add(world.session, "g", "t", receipt())
        await trio.sleep(850)
        world.is_unreachable = True
        await trio.sleep(20)
        world.is_unreachable = False
        await trio.sleep(20)
        assert world.changes[0][0] == 855
        assert world.changes[-1][0] in range(870, 880)
        await trio.sleep(800)
        assert world.table.count == 1


async def test_messages_of_ordered_groups_are_renewed_in_time(autojump_clock: MockClock) -> None:
    """Their handles count the invisible time from the pop, not from the last renewal."""
    async with opened() as world:
        world.table.add(world.session, "g", "t", receipt(revive_queue=ORDER_QUEUE))
        await trio.sleep(2700)
        assert world.changes == [(855, 0, INVISIBLE_MS), (1710, 0, INVISIBLE_MS), (2565, 0, INVISIBLE_MS)]


async def test_messages_that_are_acknowledged_while_others_are_renewed(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """They are not renewed: RocketMQ would deliver them again."""
    monkeypatch.setattr("ha.proxy.in_flight.CHANGES_AT_ONCE", 1)
    async with opened() as world:
        world.answers_after_s = 0.5
        for offset in range(3):
            world.table.add(world.session, "g", "t", receipt(offset))
        await trio.sleep(855.2)
        world.table.remove(world.session, receipt(2).encode())
        await trio.sleep(10)
        assert [offset for _, offset, _ in world.changes] == [0, 1]


async def test_messages_that_are_being_acknowledged(autojump_clock: MockClock) -> None:
    """They are neither renewed nor released. If the acknowledgement fails, they are, later."""
    async with opened() as world:
        for offset in range(2):
            world.table.add(world.session, "g", "t", receipt(offset))
        await trio.sleep(850)
        world.table.release(world.session, [receipt(1)])
        for offset in range(2):
            assert world.table.find(world.session, receipt(offset).encode()) == receipt(offset)
        await trio.sleep(SETTLED_WITHIN_S - 1)
        assert world.changes == []
        await trio.sleep(3)
        assert {(offset, ms) for _, offset, ms in world.changes} == {(0, INVISIBLE_MS), (1, RELEASED_MS)}


class Brokers:
    """A broker that takes a second to change a message's time, and knows messages by their latest pop time only."""

    def __init__(self) -> None:
        self.pop_time_ms = 1
        self.changing = trio.Event()
        self.acknowledged: list[str] = []

    async def invoke(self, session: Any, broker_name: str, command: RemotingCommand) -> RemotingCommand:
        if command.code == RequestCode.CHANGE_MESSAGE_INVISIBLETIME:
            self.changing.set()
            self.pop_time_ms = 2
            await trio.sleep(1)
            fields = {"popTime": "2", "invisibleTime": str(INVISIBLE_MS), "reviveQid": "0"}
            return RemotingCommand(0, ext_fields=fields)
        self.acknowledged.append(command.ext_fields["extraInfo"])
        return RemotingCommand(0)

    def invoke_nowait(self, session: Any, broker_name: str, command: RemotingCommand, on_response: Any) -> bool:
        self.acknowledged.append(command.ext_fields["extraInfo"])
        on_response(RemotingCommand(0))
        return True


async def test_acknowledgement_during_the_renewal_of_its_message(autojump_clock: MockClock) -> None:
    """It waits for the new handle: with the old one, it would succeed without effect."""
    brokers: Any = Brokers()
    table = InFlight()
    acknowledging = Acknowledging(brokers, FrontOptions(), lambda: 0, table)
    session: Any = Session()
    request = service.AckMessageRequest(group=definition.Resource(name="g"), topic=definition.Resource(name="t"))
    request.entries.add(message_id="m", receipt_handle=receipt().encode())
    answered: list[bytes] = []
    call: Any = SimpleNamespace(message=request.SerializeToString(), respond=answered.append)
    renew = partial(acknowledging.delay, None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(table.serve, renew, lambda session, group, topic: True)
        table.add(session, "g", "t", receipt())
        await brokers.changing.wait()
        assert not acknowledging.take(session, call)
        response = await acknowledging.ack(session, request)
        assert response.status.code == definition.Code.OK
        assert brokers.acknowledged == ["0 2 900000 0 0 b 0 0"]
        assert table.count == 0
        nursery.cancel_scope.cancel()


async def test_messages_are_limited(monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    monkeypatch.setattr("ha.proxy.in_flight.COUNT_MAX", 2)
    async with opened() as world:
        for offset in range(3):
            world.table.add(world.session, "g", "t", receipt(offset))
        assert world.table.count == 2
        assert world.table.find(world.session, receipt(2).encode()) is None
        world.table.remove(world.session, receipt(0).encode())
        world.table.add(world.session, "g", "t", receipt(2))
        assert world.table.find(world.session, receipt(2).encode()) == receipt(2)


async def test_message_that_is_received_twice(autojump_clock: MockClock) -> None:
    """By two receives with the same attempt id in one millisecond. It takes one place in the table."""
    async with opened() as world:
        for _ in range(2):
            world.table.add(world.session, "g", "t", receipt())
        assert world.table.count == 1
        world.table.remove(world.session, receipt().encode())
        assert world.table.count == 0


async def test_client_that_may_not_receive_any_more(autojump_clock: MockClock) -> None:
    """Its messages, which it can't acknowledge, are not renewed."""
    async with opened() as world:
        world.table.add(world.session, "g", "t", receipt())
        await trio.sleep(1000)
        assert world.changes == [(855, 0, INVISIBLE_MS)]
        world.forbidden.add(("c", "g", "t"))
        await trio.sleep(RENEWED_S_MAX)
        assert len(world.changes) == 1
        assert world.table.count == 0


async def test_messages_that_were_not_delivered(autojump_clock: MockClock) -> None:
    """They become visible soon; those that were delivered stay invisible."""
    async with opened() as world:
        for offset in range(2):
            world.table.add(world.session, "g", "t", receipt(offset))
        world.table.release(world.session, [receipt(1)])
        world.table.abandon(world.session, "g", "t", [receipt(2)])
        await trio.sleep(60)
        assert sorted((offset, time) for _, offset, time in world.changes) == [(1, RELEASED_MS), (2, RELEASED_MS)]
        assert world.suspended == {2}, "the other one may have reached the client in part"
        assert world.table.count == 1
