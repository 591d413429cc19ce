"""A test with a real master; `pytest test_events.py` runs it on asyncio and on Trio.

The fixtures `halog` and `halog_name` are halog's. `pytest.mark.anyio` is AnyIO's, which
is installed with halog.
"""

import pytest

from events import Cancellation, Event, Order, from_message, to_message
from ha.client import Producer, SendStatus, SimpleConsumer, StartFrom
from ha.testing import Master


@pytest.mark.anyio
async def test_events_arrive_as_they_were_sent(halog: Master, halog_name: str) -> None:
    events: set[Event] = {
        Order(order_id=1, customer="Ada", amount_cents=4200),
        Cancellation(order_id=1),
    }
    async with (
        Producer(halog.name_server_address) as producer,
        SimpleConsumer(
            halog.name_server_address,
            group=halog_name,
            subscriptions={halog_name: "*"},
            start_from=StartFrom.FIRST,
        ) as consumer,
    ):
        for event in events:
            result = await producer.send(to_message(event, topic=halog_name))
            assert result.status is SendStatus.SEND_OK
        received = set[Event]()
        async for message in consumer.messages():
            received.add(from_message(message))
            await message.ack()
            if received == events:
                break
