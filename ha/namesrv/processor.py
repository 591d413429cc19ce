"""Handles the requests of a name server, by request code:

    settings   100 put, 101 get and 102 delete a setting, 219 list the settings of a namespace
    brokers    103 register, 104 unregister, 322 compare data versions, 904 heartbeat
    clients    105 get the route of a topic
    tools      106 show the clusters and brokers, 901 the replicas of a broker name, 206 all topics, 224 the topics of a
               cluster, and 304 the names of clusters and brokers, which are system topics
               205 remove and 327 restore the write permission of a broker name, 217 add and 216 delete a topic
               319 show the configuration, 318 change it (rejected)

All other codes are answered with REQUEST_CODE_NOT_SUPPORTED, as in 5.x (a 4.9 name server does not answer at all).
Sources: DefaultRequestProcessor, ClientRequestProcessor of RocketMQ's namesrv.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any
from zlib import crc32

import trio

from ha.acl import NAME_SERVER_RULES
from ha.errors import RemoteProtocolError
from ha.log_rate_limiter import LogRateLimiter
from ha.protocol.admin_requests import BrokerNameRequest, TopicRequest
from ha.protocol.bodies import DataVersion, TopicRouteData
from ha.protocol.codes import DUPLICATE_BROKERS, VERSION_STANDARD_JSON, RequestCode, ResponseCode
from ha.protocol.config_body import change_fault, encode_config
from ha.protocol.headers import (
    GetRouteInfoRequest,
    Header,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    UnregisterBrokerRequest,
    parse_header,
)
from ha.protocol.java_json import dumps, read_as
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingConnection

from .options import NameServerOptions
from .registrations import Topics, read_unusual, read_usual
from .routes import NAME_LENGTH_MAX, Registration, RouteTable
from .settings import ORDER_TOPIC_CONFIG, Settings

logger = logging.getLogger(__name__)

TIMEOUT_MIN_S = 1.0
"""Minimum of the timeouts that brokers request, in seconds: with a shorter one, a broker could be dropped before it has
its response."""

BODY_SIZE_MAX = 262_144
"""Maximum size in bytes of a request's body; registrations may be larger."""

LARGE_COUNT = 500
"""Number of brokers or topics in a response above which it is encoded in a worker thread. Encoding 1,000 brokers took
about 5 ms."""

RunBlocking = Callable[..., Awaitable[Any]]
"""Calls a function with arguments in a worker thread, so that it does not block the event loop."""


class SettingRequest(Header):
    """Request PUT_KV_CONFIG (100). GET_KV_CONFIG (101) and DELETE_KV_CONFIG (102) have no value,
    GET_KVLIST_BY_NAMESPACE (219) has neither key nor value."""

    namespace: str
    key: str = ""
    value: str = ""


class ClusterRequest(Header):
    """Request GET_TOPICS_BY_CLUSTER (224)."""

    cluster: str


class HeartbeatRequest(Header):
    """Request BROKER_HEARTBEAT (904)."""

    cluster_name: str
    broker_addr: str


Answer = Callable[[RemotingConnection, RemotingCommand], RemotingCommand | Awaitable[RemotingCommand]]


class NameServerProcessor:
    """Handles requests with the route table and the settings."""

    def __init__(
        self,
        routes: RouteTable,
        settings: Settings,
        options: NameServerOptions,
        expect_expiry: Callable[[float], None],
        run_blocking: RunBlocking,
    ) -> None:
        """`expect_expiry` is called at each registration, with the broker's deadline (trio clock)."""
        self._expect_expiry = expect_expiry
        self._run_blocking = run_blocking
        # Workers read one body and encode one answer at a time, so that waiting requests hold no decoded tables.
        self._reading = trio.Lock()
        self._encoding = trio.Lock()
        self._routes = routes
        self._settings = settings
        self._options = options
        self._watched: set[RemotingConnection] = set()
        self._log_limiter = LogRateLimiter()
        self._answers: dict[int, Answer] = {
            RequestCode.PUT_KV_CONFIG: self._put_setting,
            RequestCode.GET_KV_CONFIG: self._get_setting,
            RequestCode.DELETE_KV_CONFIG: self._delete_setting,
            RequestCode.REGISTER_BROKER: self._register,
            RequestCode.UNREGISTER_BROKER: self._unregister,
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.GET_BROKER_CLUSTER_INFO: self._cluster_info,
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: partial(self._set_write_permission, "wipeTopicCount"),
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._topics,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self._delete_topic,
            RequestCode.REGISTER_TOPIC_IN_NAMESRV: self._add_topic,
            RequestCode.UPDATE_NAMESRV_CONFIG: self._configure,
            RequestCode.GET_NAMESRV_CONFIG: self._configuration,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self._list_settings,
            RequestCode.GET_TOPICS_BY_CLUSTER: self._topics_of_cluster,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self._system_topics,
            RequestCode.QUERY_DATA_VERSION: self._query_data_version,
            RequestCode.ADD_WRITE_PERM_OF_BROKER: partial(self._set_write_permission, "addTopicCount"),
            RequestCode.GET_BROKER_MEMBER_GROUP: self._member_group,
            RequestCode.BROKER_HEARTBEAT: self._heartbeat,
        }
        assert self._answers.keys() <= NAME_SERVER_RULES.keys()  # access control knows every supported code

    @property
    def codes(self) -> Collection[int]:
        """Supported request codes."""
        return self._answers.keys()

    async def __call__(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        """Handles a request. Raises RemoteProtocolError if its header or body is invalid, or the route table or
        settings reject it."""
        answer = self._answers.get(request.code)
        if answer is None:
            return request.reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f" request type {request.code} not supported")
        if len(request.body) > BODY_SIZE_MAX and request.code != RequestCode.REGISTER_BROKER:
            raise RemoteProtocolError(f"a body of {len(request.body)} bytes; the maximum is {BODY_SIZE_MAX}")
        response = answer(connection, request)
        return response if isinstance(response, RemotingCommand) else await response

    async def _encode(self, entry_count: int, get: Callable[[], Any], *, bare_integer_keys: bool = True) -> bytes:
        """Returns the result of `get` as JSON, encoded in a worker thread if `entry_count` exceeds LARGE_COUNT; b"" if
        the result is None. `bare_integer_keys`: as in `dumps`."""

        def encode(value: Any) -> bytes:
            return b"" if value is None else dumps(value, bare_integer_keys=bare_integer_keys)

        if entry_count <= LARGE_COUNT:
            return encode(get())
        async with self._encoding:
            encoded: bytes = await self._run_blocking(encode, get())
            return encoded

    # Brokers

    async def _register(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        header = parse_header(RegisterBrokerRequest, request.ext_fields)
        if header.body_crc32 and crc32(request.body) & 0x7FFFFFFF != header.body_crc32:
            raise RemoteProtocolError("crc32 not match")
        data_version, topics = await self._registered(request.body, is_compressed=header.compressed)
        timeout_ms = header.heartbeat_timeout_millis
        timeout_s = self._options.broker_timeout_s if timeout_ms is None else max(TIMEOUT_MIN_S, timeout_ms / 1000)
        now = trio.current_time()
        is_new = self._routes.data_version(header.cluster_name, header.broker_addr) is None
        master = self._routes.register(
            Registration(
                cluster_name=header.cluster_name,
                broker_name=header.broker_name,
                broker_id=header.broker_id,
                broker_address=header.broker_addr,
                ha_address=header.ha_server_addr,
                data_version=data_version,
                topics=self._accepted_topics(header.broker_name, topics, now),
                timeout_s=timeout_s,
                acting_master=header.enable_acting_master,
                channel=connection,
            ),
            now,
        )
        self._log_duplicates(now)
        if is_new and self._routes.data_version(header.cluster_name, header.broker_addr) is not None:  # not ignored
            logger.info(
                "namesrv.broker_registered broker=%s id=%d address=%s ha=%s cluster=%s topics=%d",
                header.broker_name,
                header.broker_id,
                header.broker_addr,
                header.ha_server_addr,
                header.cluster_name,
                len(topics),
            )
        self._expect_expiry(now + timeout_s)
        self._watch(connection)
        order = self._settings.namespace(ORDER_TOPIC_CONFIG)
        response = RegisterBrokerResponse(ha_server_addr=master.ha_address, master_addr=master.master_address)
        return request.reply(
            ResponseCode.SUCCESS, None, response.to_ext_fields(), dumps({"table": order}) if order else b""
        )

    def _accepted_topics(self, broker_name: str, topics: Topics, now: float) -> Topics:
        """Returns `topics` without those whose names exceed NAME_LENGTH_MAX, and logs how many are ignored
        (rate-limited)."""
        if max(map(len, topics), default=0) <= NAME_LENGTH_MAX:
            return topics
        accepted = {name: topic for name, topic in topics.items() if len(name) <= NAME_LENGTH_MAX}
        times = self._log_limiter.admit(("long", broker_name), now)
        if times:
            logger.warning(
                "namesrv.topics_ignored broker=%s count=%d reason='names longer than %d characters' times=%d",
                broker_name,
                len(topics) - len(accepted),
                NAME_LENGTH_MAX,
                times,
            )
        return accepted

    def _log_duplicates(self, now: float) -> None:
        """Logs that the registration at `now` replaced a broker of the same name and ID, if it did. Rate-limited."""
        for each in self._routes.duplicates(now)[-1:]:
            times = self._log_limiter.admit((each.broker_name, each.broker_id), now) if each.seen_at == now else 0
            if times:
                logger.warning(
                    'namesrv.duplicate_found broker=%s id=%d address=%s other=%s times=%d hint="clients use the broker '
                    'that registered last; stop one or change its brokerName or brokerId"',
                    each.broker_name,
                    each.broker_id,
                    each.address,
                    each.other_address,
                    times,
                )

    async def _registered(self, body: bytes | memoryview, *, is_compressed: bool) -> tuple[DataVersion, Topics]:
        """Returns the version and topics in the body of REGISTER_BROKER (103), which is empty for a broker without
        topics."""
        if not body:
            return DataVersion(), {}
        if not is_compressed and (found := read_usual(body)) is not None:
            if len(found[1]) > LARGE_COUNT:  # registering them takes as long as reading them
                await trio.lowlevel.checkpoint()
            return found
        read = partial(read_unusual, is_compressed=is_compressed, topic_count_max=self._options.topics_max)
        async with self._reading:
            version, topics = await self._run_blocking(read, body)
        return version, topics

    def _watch(self, connection: RemotingConnection) -> None:
        if connection in self._watched:
            return
        self._watched.add(connection)

        def closed() -> None:
            self._watched.discard(connection)
            for broker in self._routes.channel_closed(connection):
                logger.warning(
                    "namesrv.broker_dropped broker=%s address=%s cause='connection closed'",
                    broker.broker_name,
                    broker.address,
                )

        connection.on_close(closed)

    def _unregister(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        header = parse_header(UnregisterBrokerRequest, request.ext_fields)
        if self._routes.unregister(header.cluster_name, header.broker_name, header.broker_addr):
            logger.info("namesrv.broker_unregistered broker=%s address=%s", header.broker_name, header.broker_addr)
        return request.reply(ResponseCode.SUCCESS)

    def _query_data_version(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        header = parse_header(UnregisterBrokerRequest, request.ext_fields)
        given = read_as(DataVersion, request.body)
        known = self._routes.data_version(header.cluster_name, header.broker_addr)
        is_changed = known is None or known != given
        if not is_changed:
            self._touch(connection, header)
        return request.reply(
            ResponseCode.SUCCESS,
            None,
            {"changed": "true" if is_changed else "false"},
            b"" if known is None else dumps(known),
        )

    def _heartbeat(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        header = parse_header(HeartbeatRequest, request.ext_fields)
        self._touch(connection, header)
        return request.reply(ResponseCode.SUCCESS)

    def _touch(self, connection: RemotingConnection, header: UnregisterBrokerRequest | HeartbeatRequest) -> None:
        self._routes.touch(header.cluster_name, header.broker_addr, connection, trio.current_time())
        self._watch(connection)

    def _member_group(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        group = self._routes.group(parse_header(BrokerNameRequest, request.ext_fields).broker_name)
        body: dict[str, Any] = {}
        if group is not None:
            body = {"brokerAddrs": group.broker_addrs, "brokerName": group.broker_name, "cluster": group.cluster}
        return request.reply(ResponseCode.SUCCESS, body=dumps({"brokerMemberGroup": body}))

    # Clients

    async def _route(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        header = parse_header(GetRouteInfoRequest, request.ext_fields)

        def route() -> TopicRouteData | None:
            found = self._routes.route(header.topic)
            if found is not None and self._options.order_message_enable:
                found.order_topic_conf = self._settings.get(ORDER_TOPIC_CONFIG, header.topic)
            return found

        is_standard = request.version >= VERSION_STANDARD_JSON or bool(header.accept_standard_json_only)
        count = self._routes.group_count(header.topic)
        body = await self._encode(count, route, bare_integer_keys=not is_standard)
        if body:
            return request.reply(ResponseCode.SUCCESS, body=body)
        return request.reply(
            ResponseCode.TOPIC_NOT_EXIST,
            f"No topic route info in name server for the topic: {header.topic}"
            "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details.",
        )

    # Tools

    async def _cluster_info(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        body = await self._encode(self._routes.broker_count, self._routes.cluster_info)
        return request.reply(ResponseCode.SUCCESS, body=body)

    async def _topics(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        body = await self._encode(self._routes.topic_count, lambda: {"topicList": self._routes.topics()})
        return request.reply(ResponseCode.SUCCESS, body=body)

    async def _topics_of_cluster(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        name = parse_header(ClusterRequest, request.ext_fields).cluster
        topics = partial(self._routes.topics_of_cluster, name)
        body = await self._encode(self._routes.topic_count, lambda: {"topicList": topics()})
        return request.reply(ResponseCode.SUCCESS, body=body)

    def _system_topics(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        names: dict[str, None] = {}
        for cluster, brokers in self._routes.clusters().items():
            names[cluster] = None
            names.update(dict.fromkeys(brokers))
        body: dict[str, Any] = {"topicList": list(names)}
        first = next(iter(self._routes.brokers()), None)
        if first is not None:
            body["brokerAddr"] = first.address
        return request.reply(ResponseCode.SUCCESS, body=dumps(body))

    def _set_write_permission(
        self, count_field: str, connection: RemotingConnection, request: RemotingCommand
    ) -> RemotingCommand:
        """Removes or restores write permission; `count_field` of the response has the number of topics."""
        name = parse_header(BrokerNameRequest, request.ext_fields).broker_name
        is_on = request.code == RequestCode.ADD_WRITE_PERM_OF_BROKER
        count = self._routes.set_write_permission(name, is_on=is_on)
        if count:
            logger.info("namesrv.write_permission_changed broker=%s on=%s topics=%d", name, str(is_on).lower(), count)
        return request.reply(ResponseCode.SUCCESS, ext_fields={count_field: str(count)})

    def _delete_topic(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        header = parse_header(TopicRequest, request.ext_fields)
        if self._routes.delete_topic(header.topic, header.cluster_name or None):
            logger.info("namesrv.topic_deleted topic=%r cluster=%r", header.topic, header.cluster_name)
        return request.reply(ResponseCode.SUCCESS)

    def _add_topic(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        header = parse_header(TopicRequest, request.ext_fields)
        self._routes.add_queues(header.topic, read_as(TopicRouteData, request.body).queue_datas)
        return request.reply(ResponseCode.SUCCESS)

    # Configuration

    def _present(self) -> dict[str, str]:
        options = self._options
        return {
            "bindAddress": options.host,
            "listenPort": str(options.port),
            "orderMessageEnable": "true" if options.order_message_enable else "false",
            "serverChannelMaxIdleTimeSeconds": f"{options.remoting.idle_timeout_s:g}",
        }

    def _configuration(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        return request.reply(ResponseCode.SUCCESS, body=encode_config(self._present()))

    def _configure(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        fault = change_fault("name server", self._present(), request.body)
        return request.reply(ResponseCode.NO_PERMISSION if fault else ResponseCode.SUCCESS, fault or None)

    # Settings

    def _put_setting(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        header = _change_of_setting(request)
        self._settings.put(header.namespace, header.key, header.value)
        return request.reply(ResponseCode.SUCCESS)

    def _get_setting(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        header = parse_header(SettingRequest, request.ext_fields)
        value = self._settings.get(header.namespace, header.key)
        if value is None:
            return request.reply(
                ResponseCode.QUERY_NOT_FOUND,
                f"No config item, Namespace: {header.namespace} Key: {header.key}",
            )
        return request.reply(ResponseCode.SUCCESS, ext_fields={"value": value})

    def _delete_setting(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        header = _change_of_setting(request)
        self._settings.delete(header.namespace, header.key)
        return request.reply(ResponseCode.SUCCESS)

    def _list_settings(self, connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand:
        header = parse_header(SettingRequest, request.ext_fields)
        table = self._settings.namespace(header.namespace)
        if header.namespace == DUPLICATE_BROKERS:
            table = {
                f"{each.broker_name}:{each.broker_id}": f"{each.address};{each.other_address}"
                for each in self._routes.duplicates(trio.current_time())
            }
        if not table:
            return request.reply(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {header.namespace}")
        return request.reply(ResponseCode.SUCCESS, body=dumps({"table": table}))


def _change_of_setting(request: RemotingCommand) -> SettingRequest:
    """Returns the header of a request to change a setting. Raises RemoteProtocolError for the namespace that lists the
    duplicate brokers."""
    header = parse_header(SettingRequest, request.ext_fields)
    if header.namespace == DUPLICATE_BROKERS:
        raise RemoteProtocolError(f"namespace {DUPLICATE_BROKERS} can't be changed: it lists the duplicate brokers")
    return header
