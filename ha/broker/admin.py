"""What operators ask of a broker: the admin modules put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from ha.broker.admin_clients import AdminClients
from ha.broker.admin_groups import AdminGroups
from ha.broker.admin_store import AdminStore
from ha.broker.admin_topics import AdminTopics
from ha.broker.consume_statistics import ConsumeStatistics
from ha.broker.holds import PullHolds
from ha.broker.message_queries import MessageQueries
from ha.broker.offset_resets import OffsetResets
from ha.broker.options import BrokerOptions
from ha.broker.processor import handlers_of
from ha.broker.put import PutService
from ha.broker.runtime_info import RuntimeInfo
from ha.broker.tables import Tables
from ha.broker.throughput import Throughput
from ha.broker.world import World

if TYPE_CHECKING:
    from ha.remoting import RequestHandler
    from ha.store.message_store import MessageStore


class Admin:
    """The admin side of a broker. `serve` runs its services."""

    def __init__(
        self,
        store: MessageStore,
        tables: Tables,
        put_service: PutService,
        holds: PullHolds,
        options: BrokerOptions,
        world: World,
        *,
        sends_in_flight: Callable[[], int],
    ) -> None:
        clock = world.wall_clock_ms
        self.topics = AdminTopics(store, tables, options)
        self.clients = AdminClients(store, tables, options, wall_clock_ms=clock)
        self.throughput = Throughput(lambda: put_service.stored_count, tables.reads, wall_clock_ms=clock)
        self.info = RuntimeInfo(store, tables, self.throughput, options, world, sends_in_flight=sends_in_flight)
        self._families = (
            MessageQueries(store),
            self.topics,
            AdminGroups(tables),
            self.info,
            ConsumeStatistics(store, tables, options, wall_clock_ms=clock),
            self.clients,
            OffsetResets(store, tables, holds, options),
            AdminStore(store, tables),
        )

    def handlers(self) -> dict[int, RequestHandler]:
        """What is answered here."""
        return handlers_of(self._families)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Sample the counters and ask clients what is to be asked, until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.throughput.serve)
            await nursery.start(self.clients.serve)
            task_status.started()
