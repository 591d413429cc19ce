"""A master of real processes is killed while a POP group has 10,000 messages in flight."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from ha.client import Message, PoppedMessage, Producer, SendStatus, SimpleConsumer, StartFrom
from ha.errors import ClientError, ReceiptExpired
from tests.failover.etcd_servers import require_etcd
from tests.failover.members import Members, open_group, until

pytestmark = [pytest.mark.processes, pytest.mark.long]

COUNT = 10_000
TOPIC = "Popped"
INVISIBLE_S = 60.0
"""Time to pop all messages, to elect another master, and to acknowledge half of the messages there"""
RECEIVERS, ACKNOWLEDGERS = 8, 64
AGAIN_S = 0.2
PROGRESS_S = 240.0


@dataclass
class Delivery:
    """A message, and when it was asked for and given."""

    message: PoppedMessage
    asked_at: float
    given_at: float


async def store(name_server: str, count: int) -> set[bytes]:
    """Sends messages until `count` are acknowledged; returns their bodies."""
    stored: set[bytes] = set()
    async with Producer(name_server, group="senders") as producer:
        while len(stored) < count:
            bodies = [b"%d" % number for number in range(count) if b"%d" % number not in stored][:500]
            results = await producer.send_many([Message(TOPIC, body) for body in bodies], timeout_s=PROGRESS_S)
            stored |= {
                body
                for body, result in zip(bodies, results, strict=True)
                if not isinstance(result, Exception) and result.status is SendStatus.SEND_OK
            }
    return stored


async def receive(consumer: SimpleConsumer, wanted: int) -> dict[bytes, Delivery]:
    """Receives until `wanted` messages were received; returns them by body."""
    found: dict[bytes, Delivery] = {}

    async def run() -> None:
        while len(found) < wanted:
            asked_at = trio.current_time()
            try:
                messages = await consumer.receive(invisible_s=INVISIBLE_S, wait_s=5.0)
            except ClientError:
                await trio.sleep(AGAIN_S)
                continue
            given_at = trio.current_time()
            found.update({message.body: Delivery(message, asked_at, given_at) for message in messages})

    with trio.fail_after(PROGRESS_S):
        async with trio.open_nursery() as nursery:
            for _ in range(RECEIVERS):
                nursery.start_soon(run)
    return found


async def acknowledge(consumer: SimpleConsumer, messages: list[PoppedMessage]) -> None:
    """Acknowledges messages by the handles that they have."""

    async def run() -> None:
        while messages:
            message = messages.pop()
            while True:
                try:
                    await consumer.ack(message)
                    break
                except ReceiptExpired:
                    raise AssertionError("the machine is too slow for INVISIBLE_S") from None
                except ClientError:
                    await trio.sleep(AGAIN_S)

    with trio.fail_after(PROGRESS_S):
        async with trio.open_nursery() as nursery:
            for _ in range(ACKNOWLEDGERS):
                nursery.start_soon(run)


def in_flight(members: Members) -> int:
    """Returns the number of messages in flight at the master; -1 if it does not answer."""
    try:
        assert members.master_id is not None
        found: int = members.status(members.master_id)["pop"]["in_flight_count"]
    except (OSError, AssertionError):
        return -1
    return found


async def test_a_new_master_knows_what_is_in_flight(tmp_path: Path) -> None:
    """Half of the messages are acknowledged at it, by the handles of the old one. Exactly the others come again."""
    require_etcd()
    async with open_group(tmp_path, 1, 2, 3) as members:
        await members.wait_set(1, 2, 3)
        bodies = await store(members.name_server, COUNT)
        async with SimpleConsumer(
            members.name_server, group="poppers", subscriptions={TOPIC: "*"}, start_from=StartFrom.FIRST
        ) as consumer:
            popped = await receive(consumer, COUNT)
            assert popped.keys() == bodies
            old = members.master_id
            await members.master.kill()
            await members.wait_another(old)
            done = sorted(bodies)[::2]
            await acknowledge(consumer, [popped[body].message for body in done])
            await until("only the others in flight", lambda: in_flight(members) == COUNT - len(done))
            again = await receive(consumer, COUNT - len(done))
            assert again.keys() == bodies - set(done)
            for body, delivery in again.items():
                assert delivery.message.reconsume_times == 1
                assert delivery.given_at >= popped[body].asked_at + INVISIBLE_S
            await acknowledge(consumer, [delivery.message for delivery in again.values()])
            await until("nothing in flight", lambda: in_flight(members) == 0)
            assert await consumer.receive(wait_s=1.0) == []
