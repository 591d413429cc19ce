"""Registration of a broker at its name servers, which tell a slave where its master is.

One task per name server, so that one that is down, slow or faulty delays no other. Each registers at once, every
`period_s`, and when the topics or the role change; changes during a registration cause one more. At shutdown the broker
unregisters, for at most `unregister_timeout_s`. RocketMQ: BrokerOuterAPI, BrokerController.registerBrokerAll.

With failover the id changes: 0 while the broker is master, its own otherwise. Effects on name servers:

    same address, other id     the entry under the old id is removed (4.9 and 5.x)
    same id, other address     5.x and halog keep the one with the higher stateVersion, which is the epoch here; 4.9
                               keeps the last one. So a new master registers again at intervals of 1, 2, 4, 8 and 16 s,
                               to replace a late registration of its predecessor before a whole period has passed
    unregistering              4.9 removes any broker with the id. So a broker unregisters only an id that it still has

Without failover, two brokers with the same name and id replace each other at every registration, which name servers
allow. To detect this, a broker looks up the address registered under its name and id once per period, before it
registers.

4.9 has no stateVersion, and ignores a topic table whose counter and time it has seen from that address, even if they
came from a registration as a slave. So a master adds its epoch to the counter, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from zlib import crc32

import msgspec
import trio
from trio_util import AsyncValue

from ha.broker.standing import Standing
from ha.errors import ProtocolError, RemoteProtocolError
from ha.protocol.bodies import BrokerData, ClusterInfo, RegisterBrokerBody, TopicConfigTable, TopicRouteData
from ha.protocol.codes import MASTER_ID, RequestCode, ResponseCode
from ha.protocol.headers import (
    GetRouteInfoRequest,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    UnregisterBrokerRequest,
    parse_header,
)
from ha.protocol.java_json import dumps, read_as
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient
from ha.store.mapped_file import RunBlocking, run_in_thread

logger = logging.getLogger(__name__)


class BrokerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The names and addresses of a broker in its cluster."""

    cluster_name: str
    broker_name: str
    broker_address: str
    """host:port that clients use."""
    ha_address: str
    """host:port that slaves use."""


class RegistrationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals and timeouts of registration, in seconds."""

    period_s: float = 30.0
    """Interval between registrations, in seconds (RocketMQ: registerNameServerPeriod)."""

    timeout_s: float = 24.0
    """Timeout of one request, including the time to connect. RocketMQ: registerBrokerTimeoutMills."""

    retry_s: float = 5.0
    """Time until the next attempt after a failure, or while a slave does not know its master."""

    change_wait_s: float = 0.5
    """Time that a registration in progress gets to finish after the role has changed."""

    start_wait_s: float = 3.0
    """Maximum time that a starting broker waits for name servers."""

    unregister_timeout_s: float = 3.0


class MasterAddresses(msgspec.Struct, frozen=True):
    """Addresses of a slave's master, from a name server: host:port for clients, and for replication."""

    master_address: str
    ha_address: str


AGAIN_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Intervals in seconds between the first registrations after a change of role, if shorter than the usual ones."""


class NameServerState(msgspec.Struct, kw_only=True):
    """State of the registration at one name server."""

    is_registered: bool = False
    """Whether the last attempt succeeded."""
    error: str = ""
    """Why the last attempt failed, or why the broker did not try; "" if the attempt succeeded or none has ended yet."""
    registered_count: int = 0
    failed_count: int = 0
    last_registered_at: float | None = None
    """Time of the last success (Trio's clock); None before the first"""
    registered_id: int = -1
    """Broker id of the last successful registration; -1 before the first, and from the first attempt under another id
    until that succeeds"""
    tried_revision: int = -1
    """The revision of topics and role in the last attempt; -1 before the first."""
    other_address: str = ""
    """Address of another broker registered under this one's name and id; "" if none was found for two periods."""
    other_seen_at: float = -math.inf
    """Time at which the broker at `other_address` was last found (Trio's clock); -inf if none was found"""
    looked_at: float
    """Time of the last lookup of another broker with this name and id; before the first lookup, the time at which this
    state was created (Trio's clock)"""


class NameServerRegistration:
    """Keeps one broker registered while `serve` runs.

    `master`: the last addresses of a master that any name server sent; None before. Changed only while this broker is a
    slave, and kept when a name server no longer sends them.
    """

    def __init__(
        self,
        identity: BrokerIdentity,
        name_servers: Sequence[str],
        client: RemotingClient,
        topics: Callable[[], TopicConfigTable],
        standing: Standing,
        options: RegistrationOptions | None = None,
        *,
        why_not: Callable[[], str] = lambda: "",
        run_blocking: RunBlocking = run_in_thread,
    ) -> None:
        """`topics`: returns the topics to register. `why_not`: returns why the broker must not register at present, or
        "". `run_blocking`: runs the encoding of the topics.

        Call `topics_changed` whenever the topics have changed.
        """
        self._identity = identity
        self._name_servers = tuple(dict.fromkeys(name_servers))
        self._client = client
        self._topics = topics
        self._standing = standing
        self._options = RegistrationOptions() if options is None else options
        self._why_not = why_not
        self._run_blocking = run_blocking
        self._revision = 0
        self._changed = trio.lowlevel.ParkingLot()
        self._tried = trio.lowlevel.ParkingLot()
        self._trying: dict[str, trio.CancelScope] = {}
        self.master: AsyncValue[MasterAddresses | None] = AsyncValue(None)
        self.states: dict[str, NameServerState] = {
            address: NameServerState(looked_at=trio.current_time()) for address in self._name_servers
        }
        """State by name server address; read-only."""

    def topics_changed(self) -> None:
        """Registers again at every name server, once registrations in progress are done."""
        self._revision += 1
        self._changed.unpark_all()

    def _standing_changed(self) -> None:
        self.topics_changed()
        patience_ends = trio.current_time() + self._options.change_wait_s
        for scope in self._trying.values():
            scope.deadline = min(scope.deadline, patience_ends)

    async def wait_told(self) -> None:
        """Waits until an attempt to register the current topics and role has ended at each name server, successfully or
        not."""
        revision = self._revision
        while any(state.tried_revision < revision for state in self.states.values()):
            await self._tried.park()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Registers until cancelled, then unregisters for at most `unregister_timeout_s`.

        Reports started once an attempt at each name server has ended, at the latest after `start_wait_s`.
        """
        self._standing.subscribe(self._standing_changed)
        try:
            async with trio.open_nursery() as nursery:
                tried = {address: trio.Event() for address in self._name_servers}
                for address, event in tried.items():
                    nursery.start_soon(self._keep_registered, address, event)
                with trio.move_on_after(self._options.start_wait_s):
                    for event in tried.values():
                        await event.wait()
                task_status.started()
                await trio.sleep_forever()
        finally:
            with trio.move_on_after(self._options.unregister_timeout_s, shield=True):
                async with trio.open_nursery() as nursery:
                    for address, state in self.states.items():
                        if state.registered_count and self._has_its_id(state):
                            nursery.start_soon(self._unregister, address)

    async def _keep_registered(self, address: str, tried: trio.Event) -> None:
        state = self.states[address]
        standing = self._standing
        told_standing = standing.revision
        again: Iterator[float] = iter(())
        while True:
            revision = self._revision
            if standing.revision != told_standing:
                told_standing, again = standing.revision, iter(AGAIN_S)
            error = self._why_not()
            if error:
                state.is_registered, state.error = False, error
            else:
                error = await self._try(address, state)
                self._note(address, state, error)
            state.tried_revision = revision
            self._tried.unpark_all()
            tried.set()
            is_waiting_for_master = standing.broker_id != MASTER_ID and self.master.value is None
            wait_s = self._options.retry_s if error or is_waiting_for_master else self._options.period_s
            wait_s = min(wait_s, next(again, wait_s))
            with trio.move_on_after(wait_s):
                while self._revision == revision:
                    await self._changed.park()

    async def _look_for_another(self, address: str, state: NameServerState) -> None:
        """Looks up whether another broker has this one's name and id, and logs changes.

        Raises the errors of `RemotingClient.invoke`. Ignores an unusable answer.
        """
        name, broker_id, now = self._identity.broker_name, self._standing.broker_id, trio.current_time()
        state.looked_at = now
        try:
            addresses = await self._find_replicas(address)
        except RemoteProtocolError as error:
            logger.debug("registration.lookup_failed namesrv=%s reason=%r", address, str(error))
            return
        other = addresses.get(broker_id, "")
        if not other or other == self._identity.broker_address:
            # The other broker may still exist: this one may only have been the last to register for a while.
            if now - state.other_seen_at > 2 * self._options.period_s:
                state.other_address = ""
            return
        if other != state.other_address:
            logger.error(
                'registration.duplicate_found namesrv=%s broker=%s id=%d other=%s hint="clients use the broker that '
                'registered last; stop one or change its brokerName or brokerId"',
                address,
                name,
                broker_id,
                other,
            )
        state.other_address, state.other_seen_at = other, now

    async def _find_replicas(self, address: str) -> dict[int, str]:
        """Returns the addresses that a name server has under this broker's name, by broker id.

        Asks for the route of the topic that has the broker's own name, which every broker registers. A set without a
        master has no such route; only then the list of all brokers is requested, because in a large cluster it costs
        the name server more than the registrations do. Raises RemoteProtocolError if the answer is unusable.
        """
        name, timeout_s = self._identity.broker_name, self._options.timeout_s
        header = GetRouteInfoRequest(topic=name)
        request = RemotingCommand(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext_fields=header.to_ext_fields())
        answer = await self._client.invoke(address, request, timeout_s)
        if answer.code == ResponseCode.SUCCESS:
            for each in read_as(TopicRouteData, answer.body).broker_datas:
                if each.broker_name == name:
                    return each.broker_addrs
        answer = await self._client.invoke(address, RemotingCommand(RequestCode.GET_BROKER_CLUSTER_INFO), timeout_s)
        if answer.code != ResponseCode.SUCCESS:
            raise RemoteProtocolError(f"code {answer.code} {answer.remark or ''}".rstrip())
        return read_as(ClusterInfo, answer.body).broker_addr_table.get(name, BrokerData()).broker_addrs

    async def _try(self, address: str, state: NameServerState) -> str:
        """Registers once, unless the role changes meanwhile; returns why it failed, or ""."""
        if not self._standing.is_slave and not self._standing.has_lease:
            return "the lease of this master has ended"
        with trio.CancelScope() as scope:
            self._trying[address] = scope
            try:
                return await self._register(address, state)
            finally:
                del self._trying[address]
        return "no answer before the role changed"

    def _has_its_id(self, state: NameServerState) -> bool:
        """Returns whether this broker still has the id under which it is registered at a name server."""
        standing = self._standing
        if self._why_not():
            return False
        return state.registered_id == standing.broker_id and (standing.is_slave or standing.has_lease)

    def _table(self) -> TopicConfigTable:
        """Returns the topics to register. With failover, their data version differs in each term."""
        table, epoch = self._topics(), self._standing.epoch
        if not self._standing.can_be_replaced:
            return table
        version = table.data_version
        counter = version.counter if self._standing.is_slave else version.counter + epoch
        version = msgspec.structs.replace(version, counter=counter, state_version=epoch)
        return msgspec.structs.replace(table, data_version=version)

    async def _register(self, address: str, state: NameServerState) -> str:
        """Registers once; returns why it failed, or ""."""
        try:
            if self._may_look(state):
                await self._look_for_another(address, state)
            return await self._send_registration(address, state)
        except trio.TooSlowError:
            return f"no answer within {self._options.timeout_s:g} s"
        except (OSError, trio.BrokenResourceError, ProtocolError) as error:
            return str(error) or type(error).__name__

    def _may_look(self, state: NameServerState) -> bool:
        is_due = trio.current_time() - state.looked_at > self._options.period_s / 2
        return is_due and not self._standing.can_be_replaced

    async def _send_registration(self, address: str, state: NameServerState) -> str:
        """Sends one registration; returns why it was refused, or ""."""
        identity, broker_id = self._identity, self._standing.broker_id
        if state.registered_id != broker_id:
            state.registered_id = -1
        table = RegisterBrokerBody(topic_config_serialize_wrapper=self._table())
        body = await self._run_blocking(dumps, table)
        header = RegisterBrokerRequest(
            broker_name=identity.broker_name,
            broker_addr=identity.broker_address,
            cluster_name=identity.cluster_name,
            ha_server_addr=identity.ha_address,
            broker_id=broker_id,
            body_crc32=crc32(body) & 0x7FFFFFFF,
        )
        request = RemotingCommand(RequestCode.REGISTER_BROKER, ext_fields=header.to_ext_fields(), body=body)
        answer = await self._client.invoke(address, request, self._options.timeout_s)
        response = parse_header(RegisterBrokerResponse, answer.ext_fields)
        if answer.code != ResponseCode.SUCCESS:
            return f"code {answer.code} {answer.remark or ''}".rstrip()
        state.registered_id = broker_id
        if broker_id != MASTER_ID and response.master_addr and response.ha_server_addr:
            master = MasterAddresses(response.master_addr, response.ha_server_addr)
            if master != self.master.value:
                logger.info(
                    "registration.master_changed address=%s ha=%s namesrv=%s",
                    master.master_address,
                    master.ha_address,
                    address,
                )
                self.master.value = master
        return ""

    def _note(self, address: str, state: NameServerState, error: str) -> None:
        """Updates the state after an attempt, and logs changes."""
        if error:
            state.failed_count += 1
            if state.is_registered or error != state.error:
                logger.warning("registration.failed namesrv=%s reason=%r", address, error)
        else:
            state.registered_count += 1
            state.last_registered_at = trio.current_time()
            if not state.is_registered:
                logger.info("registration.succeeded namesrv=%s broker=%s", address, self._identity.broker_name)
        state.is_registered = not error
        state.error = error

    async def _unregister(self, address: str) -> None:
        identity = self._identity
        header = UnregisterBrokerRequest(
            broker_name=identity.broker_name,
            broker_addr=identity.broker_address,
            cluster_name=identity.cluster_name,
            broker_id=self.states[address].registered_id,
        )
        request = RemotingCommand(RequestCode.UNREGISTER_BROKER, ext_fields=header.to_ext_fields())
        try:
            await self._client.invoke(address, request, self._options.unregister_timeout_s)
        except (OSError, trio.BrokenResourceError, trio.TooSlowError) as error:
            # The name server drops the registration when the connection closes, or after 120 s.
            logger.info("registration.unregister_failed namesrv=%s reason=%r", address, str(error) or "too slow")
        else:
            self.states[address].is_registered = False
