"""Sends and consumes typed JSON on asyncio; invalid ones become dead letters."""

import asyncio

import msgspec

from events import TOPIC, Cancellation, Event, Order, from_message, to_message
from ha.client import (
    Message,
    Producer,
    PushConsumer,
    ReceivedMessage,
    RetryLater,
    StartFrom,
)


async def main() -> None:
    """Sends two events and something else, and ends when all are handled."""
    handled: asyncio.Queue[Event | msgspec.DecodeError] = asyncio.Queue()

    async def handle(message: ReceivedMessage) -> None:
        try:
            handled.put_nowait(from_message(message))
        except msgspec.DecodeError as error:
            handled.put_nowait(error)
            raise RetryLater(
                delay_level=-1
            ) from error  # another delivery would not help

    async with (
        Producer(group="shop") as producer,
        PushConsumer(
            None,
            handle,
            group="json",
            subscriptions={TOPIC: "*"},
            start_from=StartFrom.FIRST,
        ),
    ):
        await producer.send(
            to_message(Order(order_id=7, customer="Ada", amount_cents=4200))
        )
        await producer.send(to_message(Cancellation(order_id=7)))
        await producer.send(Message(TOPIC, b'{"type": "order", "order_id": "seven"}'))
        for _ in range(3):
            match await handled.get():
                case Order(order_id, customer, amount_cents):
                    amount = f"{amount_cents / 100:.2f} EUR"
                    print(f"{customer} ordered {order_id} for {amount}")
                case Cancellation(order_id):
                    print(f"{order_id} is cancelled")
                case msgspec.DecodeError() as error:
                    print(f"dead letter: {error}")


if __name__ == "__main__":
    asyncio.run(main())
