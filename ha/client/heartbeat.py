"""Sends heartbeats, which report a client's groups to brokers: every heartbeat_interval_s (30 s) and when a group is
added. Unregisters groups that are removed.

Brokers expire a client that is silent for 120 s or whose connection closes, so a heartbeat is sent at once on each new
connection. A client with consumers sends heartbeats to all brokers of known routes, a client without consumers only to
the masters. Source: MQClientInstance (sendHeartbeatToAllBroker, unregisterClient).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio
import msgspec

from ha.client.connections import Connections
from ha.client.options import ClientOptions
from ha.client.routes import Routes
from ha.client.waiting import wait_any
from ha.errors import ClientError
from ha.protocol import java_json
from ha.protocol.bodies import ConsumerData, HeartbeatData, ProducerData
from ha.protocol.codes import MASTER_ID, RequestCode, ResponseCode
from ha.protocol.group_requests import UnregisterClientRequest
from ha.protocol.remoting import RemotingCommand

_log = logging.getLogger(__name__)

_TIMEOUT_S = 3.0
_UNREGISTER_TIMEOUT_S = 1.0


class HeartbeatStatistics(msgspec.Struct, frozen=True):
    """Counts of heartbeats since the start."""

    answered_count: int
    """Heartbeats that the broker answered with SUCCESS."""
    failed_count: int
    """Heartbeats that the broker rejected or did not answer."""


class Heartbeats:
    """The groups of one client, and the brokers that know of them. `serve` sends the heartbeats."""

    def __init__(self, client_id: str, connections: Connections, routes: Routes, options: ClientOptions) -> None:
        self._client_id = client_id
        self._connections = connections
        self._routes = routes
        self._options = options
        self._producers: set[str] = set()
        self._consumers: dict[str, Callable[[], ConsumerData]] = {}
        self._woken = anyio.Event()
        self._uninformed: set[str] = set()
        self._in_flight: set[str] = set()
        self._informed: set[str] = set()
        self._failing: set[str] = set()
        self._answered_count = 0
        self._failed_count = 0
        connections.on_new = self._on_new_connection

    def statistics(self) -> HeartbeatStatistics:
        """Returns a snapshot of the counters."""
        return HeartbeatStatistics(self._answered_count, self._failed_count)

    def add_producer(self, group: str) -> None:
        """Adds `group` to the heartbeats. Brokers of known routes get a heartbeat at once, others when their routes are
        known."""
        self._producers.add(group)
        self._uninformed |= self._informed | self._in_flight
        self._woken.set()

    def add_consumer(self, group: str, describe: Callable[[], ConsumerData]) -> None:
        """Adds the consumer of `group` to the heartbeats; `describe` is called for each and returns the consumer's
        data. Call `beat` to send a heartbeat at once."""
        self._consumers[group] = describe

    async def remove_producer(self, group: str) -> None:
        """Removes `group` and unregisters it from all connected brokers, within a second. Failures are only logged."""
        self._producers.discard(group)
        await self._unregister(UnregisterClientRequest(client_id=self._client_id, producer_group=group))

    async def remove_consumer(self, group: str) -> None:
        """Removes `group` and unregisters it from all connected brokers, within a second. Failures are only logged."""
        self._consumers.pop(group, None)
        await self._unregister(UnregisterClientRequest(client_id=self._client_id, consumer_group=group))

    async def beat(self) -> None:
        """Sends a heartbeat to each broker of known routes, and returns when all are answered or have failed. Failures
        are logged."""
        await self._send_to_all(self._routes.addresses())

    async def serve(self) -> None:
        """Sends periodic heartbeats, and immediate ones to brokers that don't know of the groups yet, until
        cancelled."""
        next_round = anyio.current_time() + self._options.heartbeat_interval_s
        routes_changed = self._routes.changed
        while True:
            await wait_any(next_round - anyio.current_time(), self._woken, routes_changed)
            routes_changed, addresses = self._routes.changed, self._routes.addresses()
            if anyio.current_time() >= next_round:
                next_round = anyio.current_time() + self._options.heartbeat_interval_s
            else:
                known = (self._informed - self._uninformed) | self._in_flight
                addresses = {address: i for address, i in addresses.items() if address not in known}
            self._woken = anyio.Event()
            await self._send_to_all(addresses)

    async def _send_to_all(self, addresses: dict[str, int]) -> None:
        if not self._producers and not self._consumers:
            return
        async with anyio.create_task_group() as tasks:
            for address, broker_id in addresses.items():
                if self._consumers or broker_id == MASTER_ID:
                    tasks.start_soon(self._send_to, address)

    async def _send_to(self, address: str) -> None:
        # Encoded only here: otherwise a group added in the meantime would be missing in the body, although the broker
        # counts as informed of it.
        command = RemotingCommand(RequestCode.HEART_BEAT, body=self._body())
        self._in_flight.add(address)
        try:
            connection = self._connections.to(address)
            self._uninformed.discard(address)
            answer = await connection.invoke(command, _TIMEOUT_S)
            reason = "" if answer.code == ResponseCode.SUCCESS else f"{answer.code}: {answer.remark}"
        except ClientError as error:
            reason = str(error)
        finally:
            self._in_flight.discard(address)
            if address in self._uninformed:
                self._woken.set()
        if not reason:
            self._answered_count += 1
            self._informed.add(address)
            self._failing.discard(address)
            return
        self._failed_count += 1
        self._informed.discard(address)
        if address not in self._failing:
            self._failing.add(address)
            _log.warning("client.heartbeat_failed address=%s reason=%r", address, reason)

    def _body(self) -> bytes:
        heartbeat = HeartbeatData(
            client_id=self._client_id,
            consumer_data_set=[describe() for describe in self._consumers.values()],
            heartbeat_fingerprint=0,
            producer_data_set=[ProducerData(group_name=group) for group in sorted(self._producers)],
            without_sub=False,
        )
        return java_json.dumps(heartbeat)

    async def _unregister(self, header: UnregisterClientRequest) -> None:
        addresses = (self._informed | self._in_flight) & set(self._connections.addresses())
        async with anyio.create_task_group() as tasks:
            for address in addresses:
                command = RemotingCommand(RequestCode.UNREGISTER_CLIENT, ext_fields=header.to_ext_fields())
                tasks.start_soon(self._unregister_at, address, command)

    async def _unregister_at(self, address: str, command: RemotingCommand) -> None:
        try:
            await self._connections.invoke(address, command, _UNREGISTER_TIMEOUT_S)
        except ClientError as error:
            _log.info("client.unregister_failed address=%s reason=%r", address, str(error))

    def _on_new_connection(self, address: str) -> None:
        """Schedules a heartbeat for the broker at `address`, to which a connection is being opened."""
        self._uninformed.add(address)
        # A heartbeat in flight wakes `serve` when it ends, unless it has opened this connection.
        if address not in self._in_flight and address in self._routes.addresses():
            self._woken.set()
