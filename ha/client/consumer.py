"""The SDK's pull consumer: asks one queue for what it holds from a queue offset on. Keeps no position of its own.

Sources: DefaultMQPullConsumerImpl, PullAPIWrapper (which broker is asked, tags compared again here), MQClientAPIImpl.
"""

from __future__ import annotations

import zlib
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from ha.client.connections import open_connections
from ha.client.credentials import signing
from ha.client.messages import MessageQueue, PullResult, PullStatus, RawPull, ReadFrom, ReceivedMessage
from ha.client.options import ClientOptions, name_server_addresses
from ha.client.routes import MASTER_ID, TopicRoute, open_routes
from ha.errors import BrokerError, ConnectionFailed, RemoteProtocolError
from ha.protocol import properties as names
from ha.protocol.acl import AclCredentials
from ha.protocol.codes import PullSysFlag, RequestCode, ResponseCode, SysFlag
from ha.protocol.headers import (
    GetMaxOffsetRequest,
    GetMinOffsetRequest,
    Header,
    OffsetResponse,
    PullMessageRequest,
    PullMessageResponse,
    QueryConsumerOffsetRequest,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
    parse_header,
)
from ha.protocol.message_id import encode_message_id
from ha.protocol.record import MessageRecord, decode_records, encode_host
from ha.protocol.remoting import RemotingCommand

_STATUS_OF_CODE = {
    int(ResponseCode.SUCCESS): PullStatus.FOUND,
    int(ResponseCode.PULL_NOT_FOUND): PullStatus.NO_NEW_MSG,
    int(ResponseCode.PULL_RETRY_IMMEDIATELY): PullStatus.NO_MATCHED_MSG,
    int(ResponseCode.PULL_OFFSET_MOVED): PullStatus.OFFSET_ILLEGAL,
}
_LONG_POLL_GRACE_S = 5.0
"""RocketMQ's brokers notice the end of a long poll on a tick of 5 s."""
_COMPRESSION_NAMES = {SysFlag.COMPRESSION_LZ4: "lz4", SysFlag.COMPRESSION_ZSTD: "zstd"}


class PullConsumer:
    """Reads queues, one pull at a time. An async context manager; works under asyncio and trio, against halog and
    RocketMQ.

        async with PullConsumer("127.0.0.1:9876", group="audit", read_from=ReadFrom.SLAVE) as consumer:
            for queue in await consumer.queues("invoices"):
                result = await consumer.pull(queue, await consumer.min_offset(queue))

    `read_from` says which broker of a set answers: as the broker suggests, the master, a slave, or the one with this
    id. Offsets are committed at and asked of the master while there is one, like RocketMQ's consumers do. `credentials`
    as in Producer.
    """

    def __init__(
        self,
        name_servers: str | list[str] | None = None,
        *,
        group: str = "halog-consumer",
        read_from: ReadFrom | int = ReadFrom.SUGGESTED,
        options: ClientOptions | None = None,
        credentials: AclCredentials | None = None,
    ) -> None:
        self._name_servers = name_server_addresses(name_servers)
        self._group = group
        self._read_from = read_from
        self._options = signing(options or ClientOptions(), credentials)
        self._suggested: dict[MessageQueue, int] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._connections = await stack.enter_async_context(open_connections(self._options))
            self._routes = await stack.enter_async_context(
                open_routes(self._name_servers, self._connections, self._options)
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # As in Producer: the block's own error must not come out wrapped.
        await self._stack.aclose()

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of `topic`, sorted. RouteNotFound, NameServersUnreachable."""
        return list((await self._routes.find(topic)).read_queues)

    async def topics(self) -> list[str]:
        """Every topic that the name servers know, also those that brokers keep for themselves, sorted."""
        return await self._routes.topics()

    async def broker_names(self) -> list[str]:
        """The names of all broker sets that the name servers know, sorted."""
        return await self._routes.broker_names()

    async def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        *,
        max_messages: int = 32,
        tags: str = "*",
        wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> PullResult:
        """Asks for up to `max_messages` messages from `queue_offset` on; brokers may send fewer (RocketMQ at most 32).

        `tags`: "*" or tags joined by "||". `wait_s` > 0 lets the broker wait that long for a message to arrive;
        RocketMQ's may take 5 s more. Raises BrokerError (e.g. no such topic or queue), RequestTimedOut,
        ConnectionFailed, RouteNotFound."""
        raw = await self.pull_raw(
            queue, queue_offset, max_messages=max_messages, tags=tags, wait_s=wait_s, timeout_s=timeout_s
        )
        status = raw.status
        messages = []
        if status is PullStatus.FOUND:
            wanted = None if tags.strip() in ("", "*") else {tag.strip() for tag in tags.split("||")}
            for record in decode_records(raw.body):
                message = _received(record, queue)
                # Brokers compare hashes of tags only.
                if wanted is None or message.tags in wanted:
                    messages.append(message)
            if not messages:
                status = PullStatus.NO_MATCHED_MSG
        return PullResult(status, messages, raw.next_offset, raw.min_offset, raw.max_offset, raw.broker_id)

    async def pull_raw(
        self,
        queue: MessageQueue,
        queue_offset: int,
        *,
        max_messages: int = 32,
        tags: str = "*",
        wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> RawPull:
        """As `pull`, but the records stay the bytes that the broker sent, for a reader with a codec of its own.

        With `tags`, records of other tags with the same hash are among them."""
        route = await self._routes.find(queue.topic)
        broker_id = self._broker_id(route, queue)
        header = PullMessageRequest(
            consumer_group=self._group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=queue_offset,
            max_msg_nums=max_messages,
            sys_flag=PullSysFlag.SUBSCRIPTION | (PullSysFlag.SUSPEND if wait_s > 0 else 0),
            commit_offset=0,
            suspend_timeout_millis=int(wait_s * 1000),
            sub_version=0,
            subscription=tags,
            expression_type="TAG",
        )
        if timeout_s is None:
            timeout_s = self._options.request_timeout_s + (wait_s + _LONG_POLL_GRACE_S if wait_s > 0 else 0)
        answer, address = await self._ask(route, queue, broker_id, RequestCode.PULL_MESSAGE, header, timeout_s)
        status = _STATUS_OF_CODE.get(answer.code)
        if status is None:
            raise BrokerError(address, answer.code, answer.remark or "")
        found = parse_header(PullMessageResponse, answer.ext_fields)
        self._suggested[queue] = found.suggest_which_broker_id
        return RawPull(
            status, bytes(answer.body), found.next_begin_offset, found.min_offset, found.max_offset, broker_id
        )

    async def min_offset(self, queue: MessageQueue) -> int:
        """The queue offset of the oldest message that the broker asked still has."""
        header = GetMinOffsetRequest(topic=queue.topic, queue_id=queue.queue_id)
        return await self._ask_offset(queue, RequestCode.GET_MIN_OFFSET, header)

    async def max_offset(self, queue: MessageQueue) -> int:
        """The queue offset that the next message will get, as the broker asked knows."""
        header = GetMaxOffsetRequest(topic=queue.topic, queue_id=queue.queue_id)
        return await self._ask_offset(queue, RequestCode.GET_MAX_OFFSET, header)

    async def offset_for_time(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """The queue offset of the first message stored at `timestamp_ms` or later, as the broker asked knows.

        The queue's max offset if there is none with halog. RocketMQ then names the last message instead, and it
        compares with its own store times, so a caller who needs to be sure looks at the message."""
        header = SearchOffsetRequest(topic=queue.topic, queue_id=queue.queue_id, timestamp=timestamp_ms)
        return await self._ask_offset(queue, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)

    async def committed_offset(self, queue: MessageQueue) -> int | None:
        """The queue offset that this group has committed; None if none is known. 0 may also mean "begin at the
        start"."""
        header = QueryConsumerOffsetRequest(consumer_group=self._group, topic=queue.topic, queue_id=queue.queue_id)
        route = await self._routes.find(queue.topic)
        answer, address = await self._ask(
            route, queue, self._offsets_id(route, queue), RequestCode.QUERY_CONSUMER_OFFSET, header
        )
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        return _offset(answer, address)

    async def commit(self, queue: MessageQueue, queue_offset: int) -> None:
        """Stores `queue_offset`, the first not yet consumed, for this group. RocketMQ 5 refuses a group that never
        pulled (26)."""
        header = UpdateConsumerOffsetRequest(
            consumer_group=self._group, topic=queue.topic, queue_id=queue.queue_id, commit_offset=queue_offset
        )
        route = await self._routes.find(queue.topic)
        answer, address = await self._ask(
            route, queue, self._offsets_id(route, queue), RequestCode.UPDATE_CONSUMER_OFFSET, header
        )
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(address, answer.code, answer.remark or "")

    def _broker_id(self, route: TopicRoute, queue: MessageQueue) -> int:
        if self._read_from is ReadFrom.SUGGESTED:
            suggested = self._suggested.get(queue, MASTER_ID)
            if suggested in route.addresses.get(queue.broker_name, {}):
                return suggested
        return route.broker_id_for(queue.broker_name, self._read_from)

    def _offsets_id(self, route: TopicRoute, queue: MessageQueue) -> int:
        return route.broker_id_for(queue.broker_name, ReadFrom.SUGGESTED)

    async def _ask_offset(self, queue: MessageQueue, code: RequestCode, header: Header) -> int:
        route = await self._routes.find(queue.topic)
        answer, address = await self._ask(route, queue, self._broker_id(route, queue), code, header)
        return _offset(answer, address)

    async def _ask(
        self,
        route: TopicRoute,
        queue: MessageQueue,
        broker_id: int,
        code: RequestCode,
        header: Header,
        timeout_s: float | None = None,
    ) -> tuple[RemotingCommand, str]:
        """The answer, and the address that it came from."""
        command = RemotingCommand(code, ext_fields=header.to_ext_fields())
        timeout_s = self._options.request_timeout_s if timeout_s is None else timeout_s
        try:
            address = route.address_of(queue.broker_name, broker_id)
            return await self._connections.invoke(address, command, timeout_s), address
        except ConnectionFailed:
            self._routes.distrust(queue.topic)
            self._suggested.pop(queue, None)
            raise


def _offset(answer: RemotingCommand, address: str) -> int:
    if answer.code != ResponseCode.SUCCESS:
        raise BrokerError(address, answer.code, answer.remark or "")
    return parse_header(OffsetResponse, answer.ext_fields).offset


def _received(record: MessageRecord, queue: MessageQueue) -> ReceivedMessage:
    known = record.property_map()
    offset_message_id = encode_message_id(encode_host(*record.store_host), record.physical_offset)
    body, compression = _inflated(record)
    return ReceivedMessage(
        queue=queue,
        queue_offset=record.queue_offset,
        physical_offset=record.physical_offset,
        message_id=known.get(names.UNIQ_KEY) or offset_message_id,
        offset_message_id=offset_message_id,
        body=body,
        tags=known.get(names.TAGS),
        keys=tuple(known.get(names.KEYS, "").split()),
        properties=known,
        flag=record.flag,
        born_timestamp_ms=record.born_timestamp_ms,
        store_timestamp_ms=record.store_timestamp_ms,
        born_host=record.born_host,
        store_host=record.store_host,
        reconsume_times=record.reconsume_times,
        compression=compression,
    )


_INFLATED_SIZE_MAX = 64 * 1024 * 1024


def _inflated(record: MessageRecord) -> tuple[bytes, str | None]:
    """The body as the producer was given it, and None; or as stored, and the name of the compression that it still
    has."""
    if not record.sys_flag & SysFlag.COMPRESSED:
        return record.body, None
    name = _COMPRESSION_NAMES.get(record.sys_flag & SysFlag.COMPRESSION_TYPE_MASK)
    if name is not None:
        return record.body, name
    inflater = zlib.decompressobj()
    try:
        body = inflater.decompress(record.body, _INFLATED_SIZE_MAX)
    except zlib.error as error:
        raise RemoteProtocolError(f"the body at {record.physical_offset} does not inflate: {error}") from None
    if not inflater.eof:
        raise RemoteProtocolError(
            f"the body at {record.physical_offset} does not inflate to at most {_INFLATED_SIZE_MAX} bytes"
        )
    return body, None
