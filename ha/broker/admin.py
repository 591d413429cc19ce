"""Combines the families of admin requests, and runs the services that they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio

from ha.broker.admin_clients import AdminClients
from ha.broker.admin_groups import AdminGroups
from ha.broker.admin_store import AdminStore
from ha.broker.admin_topics import AdminTopics
from ha.broker.admin_users import AdminUsers
from ha.broker.consume_statistics import ConsumeStatistics
from ha.broker.core import BrokerCore
from ha.broker.holds import PullHolds
from ha.broker.message_queries import MessageQueries
from ha.broker.offset_resets import OffsetResets
from ha.broker.processor import handlers_of
from ha.broker.runtime_info import RuntimeInfo
from ha.broker.throughput import Throughput
from ha.remoting import RequestHandler


class Admin:
    """Answers all admin requests of a broker. `serve` runs the services that they need."""

    def __init__(
        self,
        core: BrokerCore,
        holds: PullHolds,
        *,
        sends_in_flight: Callable[[], int],
        pops_in_flight: Callable[[str, str, int], int],
        delay_figures: Callable[[], Mapping[str, str]],
    ) -> None:
        """The callables supply figures for the answers.

        sends_in_flight: number of sends without an answer, as `SendProcessor.in_flight_count`.
        pops_in_flight: messages in flight of a group, topic and queue id, as `PopService.in_flight_count`.
        delay_figures: entries about delayed messages for GET_BROKER_RUNTIME_INFO (28).
        """
        puts = core.puts
        self.topics = AdminTopics(core)
        self.clients = AdminClients(core)
        self.throughput = Throughput(
            lambda: puts.stored_count, core.tables.reads, wall_clock_ms=core.world.wall_clock_ms
        )
        self.info = RuntimeInfo(core, self.throughput, sends_in_flight=sends_in_flight, delay_figures=delay_figures)
        self._families = (
            MessageQueries(core),
            self.topics,
            AdminGroups(core),
            AdminUsers(core),
            self.info,
            ConsumeStatistics(core, in_flight_count=pops_in_flight),
            self.clients,
            OffsetResets(core, holds),
            AdminStore(core),
        )

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return handlers_of(self._families)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Samples the throughput counters and relays requests to clients, until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.throughput.serve)
            await nursery.start(self.clients.serve)
            task_status.started()
