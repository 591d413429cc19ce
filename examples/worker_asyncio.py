"""A worker on asyncio: acknowledges each order, or returns it to the queue if it fails.

SIGTERM ends it once the current orders are acknowledged or returned.
"""

import asyncio
import logging
import signal

from ha.client import ClientError, PoppedMessage, SimpleConsumer, StartFrom

WORKERS = 4
WAIT_S = 5.0
"""Wait for a message per request; an idle worker takes as long to stop."""


async def bill(order: str) -> None:
    """The work. Raises ValueError for an order that can't be billed now."""
    if not order.endswith("EUR"):
        raise ValueError(f"no exchange rate for {order!r}")
    print("billed", order, flush=True)


async def settle(message: PoppedMessage) -> None:
    """Bills an order and acknowledges it, or has it delivered again in 30 s."""
    try:
        await bill(message.body.decode())
    except ValueError as error:
        print("not billed:", error, flush=True)
        await message.nack(delay_s=30)
    else:
        await message.ack()


async def work(consumer: SimpleConsumer, stopping: asyncio.Event) -> None:
    """Acknowledges or returns messages, and ends after the current one."""
    while not stopping.is_set():
        try:
            for message in await consumer.receive(1, invisible_s=60, wait_s=WAIT_S):
                await settle(message)
        except ClientError as error:  # after retries; unsettled messages come again
            logging.warning("%s", error)
            await asyncio.sleep(1)


async def main() -> None:
    """Works until SIGTERM or Ctrl-C."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with (
        SimpleConsumer(
            group="billing", subscriptions={"orders": "*"}, start_from=StartFrom.FIRST
        ) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(WORKERS):
            tasks.create_task(work(consumer, stopping))
    print("stopped")


if __name__ == "__main__":
    asyncio.run(main())
