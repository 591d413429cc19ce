"""Sends and consumes typed JSON on Trio; invalid ones become dead letters."""

import msgspec
import trio

from events import TOPIC, Cancellation, Order, describe, from_message, to_message
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
    handled = trio.Semaphore(0)

    async def handle(message: ReceivedMessage) -> None:
        try:
            print(describe(from_message(message)))
        except msgspec.DecodeError as error:
            print(f"dead letter: {error}")
            raise RetryLater(delay_level=-1) from error  # a retry would not help
        finally:
            handled.release()

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
            await handled.acquire()


if __name__ == "__main__":
    trio.run(main)
