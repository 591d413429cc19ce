"""Topic routes: which brokers hold which queues. Looked up at name servers, cached, and refreshed periodically
(route_refresh_interval_s).

The last known route stays in use, as in RocketMQ's clients, while no name server answers, while one rejects the
request, and for _UNKNOWN_ROUTE_KEPT_S while one does not know the topic, for example after its restart.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import msgspec

from ha.client.connections import Connections
from ha.client.messages import MessageQueue, ReadFrom
from ha.client.options import ClientOptions
from ha.errors import (
    BrokerError,
    ClientError,
    ConnectionFailed,
    NameServersUnreachable,
    RemoteProtocolError,
    RouteNotFound,
)
from ha.protocol.bodies import ClusterInfo, TopicList, TopicRouteData
from ha.protocol.codes import MASTER_ID, Permission, RequestCode, ResponseCode
from ha.protocol.headers import GetRouteInfoRequest
from ha.protocol.java_json import read_as
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import AUTO_CREATE_TOPIC

_log = logging.getLogger(__name__)

_QUEUE_COUNT_MAX = 65_536
"""Maximum number of queues of a topic on all brokers; a route with more is rejected."""

_UNKNOWN_ROUTE_KEPT_S = 120.0
"""Time in seconds for which a route is kept while name servers don't know the topic, unless a broker rejects the topic,
too. A restarted name server knows a topic once its brokers have registered again, which they do every 30 s."""


class TopicRoute(msgspec.Struct, frozen=True):
    """The brokers and queues of `topic`. `addresses[broker_name][broker_id]` is host:port; id 0 is the master."""

    topic: str
    write_queues: tuple[MessageQueue, ...]
    """Queues that may be written to and whose broker set has a master."""
    read_queues: tuple[MessageQueue, ...]
    addresses: dict[str, dict[int, str]]

    @property
    def lacks_master(self) -> bool:
        """Whether a broker set currently has only slaves, so that one of them may be promoted."""
        return any(known and MASTER_ID not in known for known in self.addresses.values())

    def masters(self) -> set[str]:
        """The addresses of all masters."""
        return {known[MASTER_ID] for known in self.addresses.values() if MASTER_ID in known}

    def master_of(self, broker_name: str) -> str:
        """The address of the set's master. Raises ConnectionFailed while none is registered."""
        return self.address_of(broker_name, MASTER_ID)

    def address_of(self, broker_name: str, broker_id: int) -> str:
        """The address of one broker of a set. Raises ConnectionFailed if none is registered under that id."""
        known = self.addresses.get(broker_name, {})
        if broker_id not in known:
            registered = ", ".join(map(str, sorted(known))) or "none"
            raise ConnectionFailed(broker_name, f"no broker with ID {broker_id} is registered; IDs: {registered}")
        return known[broker_id]

    def broker_id_for(self, broker_name: str, read_from: ReadFrom | int) -> int:
        """Returns the id of the broker to read from; for SUGGESTED the master, or without one the slave with the lowest
        id. A number is returned as it is. Raises ConnectionFailed for SLAVE if no slave is registered."""
        known = self.addresses.get(broker_name, {})
        if isinstance(read_from, int):
            return read_from
        if read_from is ReadFrom.MASTER:
            return MASTER_ID
        slaves = [broker_id for broker_id in known if broker_id != MASTER_ID]
        if read_from is ReadFrom.SLAVE:
            if not slaves:
                raise ConnectionFailed(broker_name, "no slave is registered for this name")
            return min(slaves)
        return min(known, default=MASTER_ID)


class _Lookup:
    """A lookup in progress, awaited by any number of tasks; all of them get its error."""

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.error: Exception | None = None


class Routes:
    """The known routes; see `open_routes`."""

    def __init__(self, name_servers: tuple[str, ...], connections: Connections, options: ClientOptions) -> None:
        self._name_servers = name_servers
        self._connections = connections
        self._options = options
        self._known: dict[str, TopicRoute] = {}
        self._stale: set[str] = set()
        self._masters: dict[str, str] = {}  # by broker name: the last one seen
        self._former_masters: set[str] = set()  # addresses of replaced masters that were not registered again since
        self._unknown_since: dict[str, float] = {}  # known topic -> since when name servers don't know it
        self._expected: set[str] = set()  # known topics that don't exist yet; their routes are made from the template's
        self._lookups: dict[str, _Lookup] = {}
        self._answering = 0
        self._failure = ""  # why the last lookup failed; "" if it succeeded
        self.changed = anyio.Event()
        """Event that is set when a route changes, and then replaced by a new one."""

    def known(self, topic: str) -> TopicRoute | None:
        """Returns the cached route of `topic`; None if there is none or it was marked stale."""
        return None if topic in self._stale else self._known.get(topic)

    async def find(self, topic: str) -> TopicRoute:
        """Returns the route of `topic`. Concurrent lookups share one request.

        Raises RouteNotFound if the name server that answers does not know the topic. A cached route is returned instead
        for _UNKNOWN_ROUTE_KEPT_S, unless it is the expected route of a topic that did not exist. Without a cached
        route, also raises NameServersUnreachable, BrokerError or RemoteProtocolError if the lookup fails."""
        while True:
            route = self.known(topic)
            if route is not None:
                return route
            lookup = self._lookups.get(topic)
            if lookup is None:
                return await self._refresh(topic)
            await lookup.ended.wait()
            if lookup.error is not None:
                raise lookup.error.with_traceback(None)

    async def find_for_sending(self, topic: str, deadline: float = math.inf) -> TopicRoute:
        """The route of `topic`, or the one that it will have once a send has created it (MQClientInstance).

        Raises the errors of `find`, and NameServersUnreachable at `deadline` (of anyio.current_time)."""
        with anyio.CancelScope(deadline=deadline):
            return await self._find_or_expect(topic)
        servers = ";".join(self._name_servers)
        before = f"; the last lookup failed: {self._failure}" if self._failure else ""
        raise NameServersUnreachable(servers, f"{servers}: no response before the send's timeout{before}")

    async def _find_or_expect(self, topic: str) -> TopicRoute:
        """As `find_for_sending`, without a deadline.

        The expected route of a topic that does not exist yet, if it has writable queues, is cached until the next
        refresh, by which time the topic should exist."""
        try:
            return await self.find(topic)
        except RouteNotFound as not_found:
            try:
                template = await self.find(AUTO_CREATE_TOPIC)
            except RouteNotFound:
                raise not_found from None
        created = self.known(topic)
        if created is not None:  # another task has found it meanwhile
            return created
        limit = self._options.default_topic_queue_nums
        queues = tuple(
            MessageQueue(topic, queue.broker_name, queue.queue_id)
            for queue in template.write_queues
            if queue.queue_id < limit
        )
        route = TopicRoute(topic, queues, queues, template.addresses)
        if queues:  # an empty route must not stay in use as the known one
            self._keep(route)
            self._expected.add(topic)
        return route

    def mark_stale(self, topic: str) -> None:
        """Makes the next `find` look the route up again, because a broker was unreachable or rejected a request.
        Does the same for AUTO_CREATE_TOPIC, the template of new topics."""
        self._stale.add(topic)
        self._stale.add(AUTO_CREATE_TOPIC)

    def forget(self, topic: str) -> None:
        """Drops the route, because a broker does not know the topic, which may have been deleted."""
        self._unknown_since.pop(topic, None)
        self._expected.discard(topic)
        if self._known.pop(topic, None) is not None:
            self._notify_changed()

    async def is_replaced(self, address: str) -> bool:
        """Returns whether another master has replaced the one at `address`; to find out, refreshes a route with this
        master. If it was replaced, marks the routes with its address stale.

        False for an address that was never a master of a known route, and usually while no name server answers."""
        topic = next((topic for topic, route in self._known.items() if address in route.masters()), None)
        if topic is not None and topic not in self._lookups:
            with suppress(ClientError, RemoteProtocolError):
                await self._refresh(topic)
        if address not in self._former_masters:
            return False
        for each, route in self._known.items():
            if address in route.masters():
                self.mark_stale(each)
        return True

    async def serve(self) -> None:
        """Refreshes all known routes every `route_refresh_interval_s`, until cancelled."""
        while True:
            await anyio.sleep(self._options.route_refresh_interval_s)
            for topic in list(self._known):
                if topic in self._lookups:
                    continue  # another task is already looking it up
                try:
                    await self._refresh(topic)
                except RouteNotFound:
                    continue
                except (ClientError, RemoteProtocolError):
                    break  # already logged; known routes stay in use

    async def _refresh(self, topic: str) -> TopicRoute:
        lookup = self._lookups[topic] = _Lookup()
        try:
            route = _route(topic, await self._ask(topic))
        except RouteNotFound as error:
            now, old = anyio.current_time(), self._known.get(topic)
            is_expected = topic in self._expected  # the template may have changed: other brokers would create it
            if old is None or is_expected or now - self._unknown_since.setdefault(topic, now) > _UNKNOWN_ROUTE_KEPT_S:
                self.forget(topic)
                lookup.error = error
                raise
            self._stale.discard(topic)
            return old
        except (BrokerError, ConnectionFailed, RemoteProtocolError) as error:
            is_first, self._failure = not self._failure, str(error)
            if is_first:
                _log.warning("client.routes_not_refreshed topic=%s reason=%r", topic, self._failure)
            old = self._known.get(topic)
            if old is None:
                lookup.error = error
                raise
            self._stale.discard(topic)
            return old
        finally:
            del self._lookups[topic]
            lookup.ended.set()
        if self._failure:
            self._failure = ""
            _log.info("client.routes_recovered topic=%s", topic)
        self._keep(route)
        return route

    def _keep(self, route: TopicRoute) -> None:
        self._stale.discard(route.topic)
        self._unknown_since.pop(route.topic, None)
        self._expected.discard(route.topic)
        for name, addresses in route.addresses.items():
            self._record_master(name, addresses.get(MASTER_ID))
            self._former_masters.difference_update(addresses.values())
        if self._known.get(route.topic) != route:
            self._known[route.topic] = route
            self._notify_changed()

    def _record_master(self, broker_name: str, address: str | None) -> None:
        before = self._masters.get(broker_name)
        if address is None or address == before:
            return
        self._masters[broker_name] = address
        if before is not None:
            self._former_masters.add(before)

    def _notify_changed(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    def addresses(self) -> dict[str, int]:
        """The broker ids of the brokers of all known routes, by address."""
        return {
            address: broker_id
            for route in self._known.values()
            for brokers in route.addresses.values()
            for broker_id, address in brokers.items()
        }

    async def topics(self) -> list[str]:
        """All topics that a name server knows, including system topics, sorted. Raises the errors of
        `ask_name_servers`, and RemoteProtocolError."""
        command = RemotingCommand(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        answer = await self.ask_name_servers(command)
        return sorted(read_as(TopicList, answer.body).topic_list)

    async def broker_names(self) -> list[str]:
        """The names of all registered broker sets, sorted. Raises the errors of `topics`."""
        answer = await self.ask_name_servers(RemotingCommand(RequestCode.GET_BROKER_CLUSTER_INFO))
        return sorted(read_as(ClusterInfo, answer.body).broker_addr_table)

    async def _ask(self, topic: str) -> TopicRouteData:
        header = GetRouteInfoRequest(topic=topic, accept_standard_json_only=True)
        command = RemotingCommand(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext_fields=header.to_ext_fields())
        try:
            answer = await self.ask_name_servers(command)
        except BrokerError as error:
            if error.code == ResponseCode.TOPIC_NOT_EXIST:
                raise RouteNotFound(topic, error.address, error.code, error.remark) from None
            raise
        return read_as(TopicRouteData, answer.body)

    async def ask_name_servers(self, command: RemotingCommand) -> RemotingCommand:
        """Asks one name server after the other, starting with the one that answered last, until one responds. Raises
        BrokerError if this one rejects the request, and NameServersUnreachable if none responds."""
        reasons = []
        count, first = len(self._name_servers), self._answering  # other lookups may change it meanwhile
        for turn in range(count):
            index = (first + turn) % count
            address = self._name_servers[index]
            try:
                answer = await self._connections.request(address, command)
            except BrokerError:
                self._answering = index
                raise
            except ClientError as error:
                reasons.append(f"{address}: {error.reason}" if isinstance(error, ConnectionFailed) else str(error))
                continue
            except anyio.get_cancelled_exc_class():  # often at a deadline: next time, start with another server
                self._answering = (index + 1) % count
                raise
            self._answering = index
            return answer
        raise NameServersUnreachable(";".join(self._name_servers), "; ".join(reasons))


def _route(topic: str, data: TopicRouteData) -> TopicRoute:
    addresses = {broker.broker_name: dict(broker.broker_addrs) for broker in data.broker_datas}
    write_counts = [queues.write_queue_nums for queues in data.queue_datas]
    read_counts = [queues.read_queue_nums for queues in data.queue_datas]
    if min(write_counts + read_counts, default=0) < 0 or max(sum(write_counts), sum(read_counts)) > _QUEUE_COUNT_MAX:
        raise RemoteProtocolError(f"a route with {sum(write_counts)} and {sum(read_counts)} queues")
    write_queues, read_queues = [], []
    for queues in data.queue_datas:
        name = queues.broker_name
        if queues.perm & Permission.WRITE and MASTER_ID in addresses.get(name, {}):
            write_queues += [MessageQueue(topic, name, queue_id) for queue_id in range(queues.write_queue_nums)]
        if queues.perm & Permission.READ:
            read_queues += [MessageQueue(topic, name, queue_id) for queue_id in range(queues.read_queue_nums)]
    return TopicRoute(topic, tuple(sorted(write_queues)), tuple(sorted(read_queues)), addresses)


@asynccontextmanager
async def open_routes(
    name_servers: tuple[str, ...], connections: Connections, options: ClientOptions
) -> AsyncIterator[Routes]:
    """Provides routes, refreshed for the duration of the block."""
    routes = Routes(name_servers, connections, options)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(routes.serve)
        yield routes
        tasks.cancel_scope.cancel()
