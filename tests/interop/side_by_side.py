"""A real broker and halog's, used at once by one Java client, to compare the results."""

from collections.abc import Awaitable, Callable

import trio

from ha.protocol.record import MessageRecord, decode_record
from tests.interop.broker import SEGMENT_SIZE, Broker
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.java_client import JavaClient, open_java_client
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker
from tests.interop.stored_files import records


async def run_side_by_side(
    children: Children,
    release: Release,
    use: Callable[[JavaClient, Broker], Awaitable[None]],
    settings: dict[str, object],
    **real_settings: object,
) -> tuple[RocketMqBroker, HalogBroker]:
    """Starts brokers named "real" and "ours", each with its own name server, and calls `use` for both at once.

    Returns both, still running. `real_settings` are for the real one only."""
    names = [await start_halog_name_server(children) for _ in range(2)]
    real = RocketMqBroker(children, release, "real", names[0], "ASYNC_MASTER", extra={**settings, **real_settings})
    ours = HalogBroker(children, "ours", names[1], "ASYNC_MASTER", extra=settings)
    quick = "-Drocketmq.client.rebalance.waitInterval=500"
    async with open_java_client(children, release, real.name_server, quick) as client, trio.open_nursery() as nursery:

        async def start_and_use(broker: Broker) -> None:
            await broker.start()
            await client.wait_route("TBW102", nameServer=broker.name_server)
            await use(client, broker)

        nursery.start_soon(start_and_use, real)
        nursery.start_soon(start_and_use, ours)
    return real, ours


def stored_records(broker: Broker) -> list[MessageRecord]:
    """All records of a broker, running or not, in order."""
    found = []
    for place in records(broker.commitlog):
        start = place.physical_offset // SEGMENT_SIZE * SEGMENT_SIZE
        with (broker.commitlog / f"{start:020d}").open("rb") as file:
            file.seek(place.physical_offset - start)
            found.append(decode_record(file.read(place.size)))
    return found
