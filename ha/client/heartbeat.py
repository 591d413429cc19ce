"""What a client says about itself to the brokers: which groups it is a member of, every 30 s and when that changes.

Brokers forget a client that is silent for 120 s, or whose connection closes; a new connection is therefore followed by
a heartbeat at once. Consumers are told to all brokers of the routes known, producers to the masters only. Source:
MQClientInstance (sendHeartbeatToAllBroker, unregisterClient).
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
    """Heartbeats answered and not, since the start."""

    answered_count: int
    failed_count: int


class Heartbeats:
    """The groups of one client and what the brokers know of them. `serve` keeps them informed."""

    def __init__(self, client_id: str, connections: Connections, routes: Routes, options: ClientOptions) -> None:
        self._client_id = client_id
        self._connections = connections
        self._routes = routes
        self._options = options
        self._producers: set[str] = set()
        self._consumers: dict[str, Callable[[], ConsumerData]] = {}
        self._woken = anyio.Event()
        self._unaware: set[str] = set()
        self._telling: set[str] = set()
        self._reached: set[str] = set()
        self._failing: set[str] = set()
        self._answered_count = 0
        self._failed_count = 0
        connections.on_new = self._notice

    def statistics(self) -> HeartbeatStatistics:
        """Return what came of the heartbeats so far."""
        return HeartbeatStatistics(self._answered_count, self._failed_count)

    def add_producer(self, group: str) -> None:
        """`group` is told from the next heartbeat on, which is sent when its first route is known."""
        self._producers.add(group)
        self._unaware |= self._reached | self._telling
        self._woken.set()

    def add_consumer(self, group: str, describe: Callable[[], ConsumerData]) -> None:
        """The consumer of `group` is told from the next heartbeat on; see `beat`."""
        self._consumers[group] = describe

    async def remove_producer(self, group: str) -> None:
        """Takes `group` out, and tells the brokers, which takes at most a second each."""
        self._producers.discard(group)
        await self._unregister(UnregisterClientRequest(client_id=self._client_id, producer_group=group))

    async def remove_consumer(self, group: str) -> None:
        """Takes `group` out, and tells the brokers, which takes at most a second each."""
        self._consumers.pop(group, None)
        await self._unregister(UnregisterClientRequest(client_id=self._client_id, consumer_group=group))

    async def beat(self) -> None:
        """Tells every broker of the routes known now, and returns when each has answered or failed to."""
        await self._tell(self._routes.addresses())

    async def serve(self) -> None:
        """Tells brokers regularly, and those that can't know yet at once, until cancelled."""
        next_round = anyio.current_time() + self._options.heartbeat_interval_s
        routes_changed = self._routes.changed
        while True:
            await wait_any(next_round - anyio.current_time(), self._woken, routes_changed)
            routes_changed, addresses = self._routes.changed, self._routes.addresses()
            if anyio.current_time() >= next_round:
                next_round = anyio.current_time() + self._options.heartbeat_interval_s
            else:
                known = (self._reached - self._unaware) | self._telling
                addresses = {address: i for address, i in addresses.items() if address not in known}
            self._woken = anyio.Event()
            await self._tell(addresses)

    async def _tell(self, addresses: dict[str, int]) -> None:
        body = self._body()
        if body is None:
            return
        async with anyio.create_task_group() as tasks:
            for address, broker_id in addresses.items():
                if self._consumers or broker_id == MASTER_ID:
                    tasks.start_soon(self._tell_one, address, body)

    async def _tell_one(self, address: str, body: bytes) -> None:
        command = RemotingCommand(RequestCode.HEART_BEAT, body=body)
        self._unaware.discard(address)
        self._telling.add(address)
        try:
            answer = await self._connections.invoke(address, command, _TIMEOUT_S)
            reason = "" if answer.code == ResponseCode.SUCCESS else f"{answer.code}: {answer.remark}"
        except ClientError as error:
            reason = str(error)
        finally:
            self._telling.discard(address)
        if address in self._unaware:
            self._woken.set()
        if not reason:
            self._answered_count += 1
            self._reached.add(address)
            self._failing.discard(address)
            return
        self._failed_count += 1
        self._reached.discard(address)
        if address not in self._failing:
            self._failing.add(address)
            _log.warning("heartbeat_failed address=%s reason=%r", address, reason)

    def _body(self) -> bytes | None:
        if not self._producers and not self._consumers:
            return None
        heartbeat = HeartbeatData(
            client_id=self._client_id,
            consumer_data_set=[describe() for describe in self._consumers.values()],
            heartbeat_fingerprint=0,
            producer_data_set=[ProducerData(group_name=group) for group in sorted(self._producers)],
            without_sub=False,
        )
        return java_json.dumps(heartbeat)

    async def _unregister(self, header: UnregisterClientRequest) -> None:
        addresses = (self._reached | self._telling) & set(self._connections.addresses())
        async with anyio.create_task_group() as tasks:
            for address in addresses:
                command = RemotingCommand(RequestCode.UNREGISTER_CLIENT, ext_fields=header.to_ext_fields())
                tasks.start_soon(self._unregister_at, address, command)

    async def _unregister_at(self, address: str, command: RemotingCommand) -> None:
        try:
            await self._connections.invoke(address, command, _UNREGISTER_TIMEOUT_S)
        except ClientError as error:
            _log.info("unregister_failed address=%s reason=%r", address, str(error))

    def _notice(self, address: str) -> None:
        """A connection to `address` is being made: whoever is there does not know this client."""
        # Whom a heartbeat is on its way to will get it over this connection; if that fails, so would another one.
        if address not in self._telling:
            self._unaware.add(address)
            if address in self._routes.addresses():
                self._woken.set()
