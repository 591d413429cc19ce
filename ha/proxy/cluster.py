"""Implements `Brokers` for `python -m ha.proxy`: finds the brokers of a cluster through its name servers, and sends
requests to them over remoting.

Brokers may be halog's or RocketMQ's. Answers about topics and groups are cached for ROUTE_AGE_S_MAX, and longer while
no server answers, so that clients continue without name servers. If a master does not answer, or answers
SERVICE_NOT_AVAILABLE, its address is looked up again at the next request, because another broker may be the master now.
All clients share one connection to each broker. The broker also sends its transaction checks over this connection.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
import trio

from ha.acl.source import refuses_user
from ha.errors import LocalProtocolError
from ha.log_rate_limiter import LogRateLimiter
from ha.protocol import java_json
from ha.protocol.admin_requests import GroupRequest, TopicRequest
from ha.protocol.bodies import ClusterInfo, GroupConfig, TopicConfig, TopicRouteData
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.headers import GetRouteInfoRequest
from ha.protocol.remoting import RemotingCommand
from ha.protocol.request_parser import SendCommand
from ha.remoting import (
    RemotingClient,
    RemotingClientOptions,
    RemotingConnection,
    each_request,
    open_remoting_client,
)
from ha.tls.ports import Connect

from .brokers import (
    BROKER_TIMEOUT_S,
    UNTYPED,
    BrokerQueues,
    BrokerUnreachable,
    OnResponse,
    Route,
    accepted_types,
    reading_answer,
)

if TYPE_CHECKING:
    from .front import Front
    from .messages import MessageType
    from .session import Session

logger = logging.getLogger(__name__)

_UNKNOWN_GROUP = (
    ResponseCode.SUCCESS,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
)
"""Codes that mean that the group has no configuration (SUCCESS: if the body is empty), or that the broker (RocketMQ 4)
has no request for one group's configuration"""
ROUTE_AGE_S_MAX = 10.0
"""Age of an answer about a topic or group, in seconds, from which it is requested again."""
KNOWN_COUNT_MAX = 16_384
"""Maximum number of topics, and of groups, whose answers are kept."""


Sign = Callable[["Session | None", RemotingCommand], None]
"""Signs a request for a client, or for the front itself (None)."""


T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)


class _Answers(Generic[T]):
    """A cache of the cluster's answers about topics or groups, by name."""

    def __init__(self, ask: Callable[[str], Awaitable[T]]) -> None:
        """`ask` returns the cluster's answer about a name, or raises BrokerUnreachable."""
        self._ask = ask
        self._answers: dict[str, tuple[T, float]] = {}
        """Name -> the answer, and the time from which it is too old (Trio's clock)"""
        self._log_limiter = LogRateLimiter()

    async def get(self, name: str) -> T:
        """Returns the answer about a name: the cached one, or a new one if there is none or it is too old.

        While a call asks for a new answer, other calls return the old one. If asking fails, the call that asked also
        returns the old answer. An old answer that is None is never returned, because the topic may exist now. Raises
        BrokerUnreachable if asking fails and there is no old answer to return.
        """
        known = self._answers.get(name)
        if known is not None and known[1] >= trio.current_time():
            return known[0]
        old = None if known is None else known[0]
        if old is not None:
            self._add(name, old)
        try:
            answer = await self._ask(name)
        except BrokerUnreachable as error:
            if old is None:
                raise
            if times := self._log_limiter.admit("old", trio.current_time()):
                logger.warning("proxy.old_answer_used name=%r reason=%r times=%d", name, str(error), times)
            return old
        self._add(name, answer)
        return answer

    def _add(self, name: str, answer: T) -> None:
        """Adds an answer; first forgets all others if there are KNOWN_COUNT_MAX."""
        if len(self._answers) >= KNOWN_COUNT_MAX:
            self._answers.clear()
        self._answers[name] = answer, trio.current_time() + ROUTE_AGE_S_MAX


class Cluster:
    """All brokers that the name servers know. Usable within `open_cluster`."""

    def __init__(self, name_servers: Sequence[str], sign: Sign = lambda session, command: None) -> None:
        self._sign = sign
        self._name_servers = list(name_servers)
        self._client: RemotingClient | None = None
        self._masters: dict[str, str] = {}
        """Broker name -> address of its master"""
        self._finding = trio.Lock()
        self._search_count = 0
        """Number of searches for masters that have ended, other than by cancellation"""
        self._routes: _Answers[Route | None] = _Answers(self._ask_route)
        self._groups: _Answers[GroupConfig] = _Answers(self._ask_group)
        self.front: Front | None = None
        """Receives brokers' checks of transactions; None: they are ignored"""
        self.on_user_refused: Callable[[str], None] | None = None
        """Called with the access key of a user that a broker has refused: the user may have been changed or deleted"""

    def known_route(self, topic: str) -> Route | None:
        """Returns None, because no request is sent without waiting (`invoke_nowait`)."""
        return None

    async def route(self, topic: str) -> Route | None:
        return await self._routes.get(topic)

    async def _ask_route(self, topic: str) -> Route | None:
        header = GetRouteInfoRequest(topic=topic, accept_standard_json_only=True)
        command = RemotingCommand(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext_fields=header.to_ext_fields())
        answer = await self._ask_name_servers(command)
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerUnreachable(f"name server answered code {answer.code}: {answer.remark}")
        data = _read(TopicRouteData, answer)
        for broker in data.broker_datas:
            if 0 in broker.broker_addrs:
                self._masters[broker.broker_name] = broker.broker_addrs[0]
        queues = tuple(
            BrokerQueues(each.broker_name, each.perm, each.read_queue_nums, each.write_queue_nums)
            for each in sorted(data.queue_datas, key=lambda each: each.broker_name)
            if each.broker_name in self._masters
        )
        if not queues:
            raise BrokerUnreachable(f"no broker with topic {topic} has a master")
        return Route(topic, await self._message_types(topic, queues), queues)

    async def _message_types(self, topic: str, queues: Sequence[BrokerQueues]) -> tuple[MessageType, ...]:
        """Asks a topic's brokers in turn for the types that it accepts. Returns UNTYPED if a broker (RocketMQ 4) knows
        no types, and NORMAL if all answer that they do not have the topic. Raises BrokerUnreachable."""

        def read(answer: RemotingCommand) -> tuple[MessageType, ...] | None:
            if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                return UNTYPED
            if answer.code == ResponseCode.SUCCESS:
                attributes = _read(TopicConfig, answer).attributes or {}
                return accepted_types(attributes.get("message.type"))
            if answer.code != ResponseCode.TOPIC_NOT_EXIST:
                # Returning a default is no option: clients would keep it for half a minute.
                raise BrokerUnreachable(f"a broker answered code {answer.code} about topic {topic}: {answer.remark}")
            return None

        names = {each.broker_name for each in queues}
        header = TopicRequest(topic=topic)
        command = RemotingCommand(RequestCode.GET_TOPIC_CONFIG, ext_fields=header.to_ext_fields())
        types = await self._ask_in_turn([each for each in self._masters if each in names], command, read)
        return accepted_types(None) if types is None else types

    async def group(self, group: str) -> GroupConfig | None:
        return await self._groups.get(group)

    async def _ask_group(self, group: str) -> GroupConfig:
        """Returns a group's configuration from the first broker that has one; the default configuration if all answer
        that they have none. Raises BrokerUnreachable."""

        def read(answer: RemotingCommand) -> GroupConfig | None:
            if answer.code == ResponseCode.SUCCESS and answer.body:
                return _read(GroupConfig, answer)
            if answer.code not in _UNKNOWN_GROUP:
                # With a default configuration, the messages of an ordered group would be popped out of order.
                raise BrokerUnreachable(f"a broker answered code {answer.code} about group {group}: {answer.remark}")
            return None

        header = GroupRequest(group=group)
        command = RemotingCommand(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, ext_fields=header.to_ext_fields())
        config = await self._ask_in_turn(await self._broker_names(), command, read)
        # A broker that may create the group does so when it is first used.
        return GroupConfig(group_name=group) if config is None else config

    async def invoke(
        self, session: Session | None, broker_name: str, command: RemotingCommand, timeout_s: float = BROKER_TIMEOUT_S
    ) -> RemotingCommand:
        address = self._masters.get(broker_name) or await self._find_master(broker_name)
        if isinstance(command, SendCommand):
            request = command.request
            command = RemotingCommand(command.code, ext_fields=request.to_ext_fields(), body=command.body)
        self._sign(session, command)
        try:
            answer = await self._invoke(address, command, timeout_s)
        except BrokerUnreachable:
            self._forget_master(broker_name, address)
            raise
        if answer.code == ResponseCode.SERVICE_NOT_AVAILABLE:
            self._forget_master(broker_name, address)
        if session is not None and self.on_user_refused is not None and refuses_user(answer, session.access_key):
            self.on_user_refused(session.access_key)
        return answer

    async def ask_any(self, command: RemotingCommand) -> RemotingCommand:
        """Sends a request of the front itself to one broker after the other until one answers, and returns this answer,
        whatever its code. Raises BrokerUnreachable if none answers."""
        answer = await self._ask_in_turn(await self._broker_names(), command, lambda answer: answer)
        assert answer is not None
        return answer

    async def _broker_names(self) -> list[str]:
        """Returns the names of all brokers whose master is known; asks the name servers if there are none. Raises
        BrokerUnreachable if asking fails."""
        if not self._masters:
            await self._find_masters()
        return list(self._masters)

    async def _ask_in_turn(
        self, broker_names: Sequence[str], command: RemotingCommand, read: Callable[[RemotingCommand], T | None]
    ) -> T | None:
        """Sends a request of the front itself to one broker after the other until `read` returns a result for a
        response. Returns this result, or None if all brokers answered and `read` returned None each time.

        Raises BrokerUnreachable if there are no brokers. Also raises it if there is no result, and a broker did not
        answer or `read` raised BrokerUnreachable."""
        failure = None if broker_names else BrokerUnreachable("no broker has a master")
        for broker_name in broker_names:
            try:
                found = read(await self._ask_broker(broker_name, command))
            except BrokerUnreachable as error:
                failure = error
            else:
                if found is not None:
                    return found
        if failure is not None:
            raise failure
        return None

    async def _ask_broker(self, broker_name: str, command: RemotingCommand) -> RemotingCommand:
        """Sends a request of the front itself, as `invoke` does. If the client's call ends before the broker answers,
        the next call asks this broker last."""
        try:
            return await self.invoke(None, broker_name, command)
        except trio.Cancelled:
            if broker_name in self._masters:
                self._masters[broker_name] = self._masters.pop(broker_name)
            raise

    async def _find_master(self, broker_name: str) -> str:
        """Returns the address of a broker's master, from the name servers. Raises BrokerUnreachable.

        Requests that have waited for another request's search use its result instead of searching again. Otherwise,
        while no name server answers, each request would wait for the timeouts of all requests before it.
        """
        search_count = self._search_count
        async with self._finding:
            if broker_name not in self._masters and self._search_count == search_count:
                try:
                    await self._find_masters()
                except BrokerUnreachable:
                    self._search_count += 1
                    raise
                self._search_count += 1
        address = self._masters.get(broker_name)
        if address is None:
            raise BrokerUnreachable(f"no master of broker {broker_name[:80]} was found")
        return address

    async def _find_masters(self) -> None:
        """Replaces the known masters with those that the name servers return; brokers that were known before keep their
        order. Raises BrokerUnreachable, and then changes nothing."""
        answer = await self._ask_name_servers(RemotingCommand(RequestCode.GET_BROKER_CLUSTER_INFO))
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerUnreachable(f"name server answered code {answer.code}: {answer.remark}")
        brokers = _read(ClusterInfo, answer).broker_addr_table
        masters = {name: each.broker_addrs[0] for name, each in brokers.items() if 0 in each.broker_addrs}
        self._masters = {name: masters[name] for name in (self._masters | masters) if name in masters}

    def _forget_master(self, broker_name: str, address: str) -> None:
        if self._masters.get(broker_name) == address:
            del self._masters[broker_name]

    def invoke_nowait(
        self, session: Session, broker_name: str, command: RemotingCommand, on_response: OnResponse
    ) -> bool:
        return False

    async def heartbeat(self, session: Session) -> None:
        """Does nothing: brokers register a POP consumer when it pops, as behind RocketMQ's proxy."""

    def forget(self, session: Session) -> None:
        pass

    async def _ask_name_servers(self, command: RemotingCommand) -> RemotingCommand:
        """Asks one name server after the other until one answers, and returns this answer, whatever its code. Raises
        BrokerUnreachable if none answers.

        Starts with the last one that answered. A name server that does not answer, or has not answered when the
        client's call ends, is asked last from then on.
        """
        errors = []
        self._sign(None, command)
        for address in list(self._name_servers):
            try:
                return await self._invoke(address, command, BROKER_TIMEOUT_S)
            except (BrokerUnreachable, trio.Cancelled) as error:
                self._name_servers.remove(address)
                self._name_servers.append(address)
                if isinstance(error, trio.Cancelled):
                    raise
                errors.append(str(error))
        raise BrokerUnreachable(f"no name server answers: {'; '.join(errors)}")

    async def _invoke(self, address: str, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        assert self._client is not None
        try:
            return await self._client.invoke(address, command, timeout_s)
        except trio.TooSlowError:
            reason = f"{address} has not answered code {command.code} within {timeout_s:g} s"
            raise BrokerUnreachable(reason, is_timeout=True) from None
        except (OSError, trio.BrokenResourceError, LocalProtocolError) as error:  # LocalProtocolError: frame too large
            raise BrokerUnreachable(f"{address}: {error}") from None

    async def _take_request(self, connection: RemotingConnection, command: RemotingCommand) -> None:
        """Handles a broker's transaction check, CHECK_TRANSACTION_STATE (39). Other requests concern groups of remoting
        clients and are ignored."""
        if command.code != RequestCode.CHECK_TRANSACTION_STATE or self.front is None:
            return
        host, port = connection.peer
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        for broker_name, master in self._masters.items():
            if master == address:
                self.front.transactions.ask(broker_name, command)
                return
        broker_name = command.ext_fields.get("bname", "")
        if broker_name in self._masters:  # the name servers know the master by a host name, not by its IP address
            self.front.transactions.ask(broker_name, command)


def _read(kind: type[StructT], answer: RemotingCommand) -> StructT:
    """Returns the body of an answer. Raises BrokerUnreachable if it is malformed."""
    with reading_answer():
        return java_json.read_as(kind, answer.body)


@asynccontextmanager
async def open_cluster(
    name_servers: Sequence[str], options: RemotingClientOptions, *, connect: Connect, sign: Sign
) -> AsyncIterator[Cluster]:
    """Yields a Cluster, and closes its connections at the end of the block. `sign` is called with each request before
    it is sent."""
    cluster = Cluster(name_servers, sign)
    handler = each_request(cluster._take_request)
    async with open_remoting_client(options, connect=connect, handler=handler) as cluster._client:
        yield cluster
