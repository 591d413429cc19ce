"""Message filters of consumers: tags, or an SQL92 condition on properties; and request 46 CHECK_CLIENT_CONFIG.

The FILTER_COUNT_MAX most recently used conditions are cached in compiled form, an invalid one as its error. A condition
is compiled when a pull first needs it, not at the heartbeat; clients ask in advance (CHECK_CLIENT_CONFIG) whether the
broker accepts their condition. A pull with an invalid condition is refused. RocketMQ delivers every message instead if
the pull itself contains the condition. Sources: PullMessageProcessor, ConsumerFilterManager, ClientManageProcessor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import msgspec
import trio

from ha.broker.options import BrokerOptions
from ha.broker.queue_read import SCAN_COUNT_MAX, SCAN_COUNT_MIN, QueueRead, QueueReader, ReadStatus
from ha.broker.refused import RefusedError
from ha.broker.sql92 import EXPRESSION_LENGTH_MAX, FilterSyntaxError, Predicate, compile_filter
from ha.broker.subscription import is_tag_type, parse_tag_expression
from ha.errors import RemoteProtocolError
from ha.protocol.bodies import read_request
from ha.protocol.codes import ResponseCode
from ha.protocol.group_requests import CheckClientBody
from ha.protocol.properties import decode_properties
from ha.protocol.record import RECORD_PLACE, record_properties
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingConnection
from ha.store.consume_queue import ConsumeQueue

SQL92 = "SQL92"
FILTER_COUNT_MAX = 256
"""Maximum number of cached conditions, for all brokers of the process together."""

_UNLIMITED = 1 << 62
"""Passed as the limits of a read that scans messages: the consumer's limits are for the messages that it selects."""


class Selection(msgspec.Struct, frozen=True, gc=False):
    """Selects the messages that a consumer gets: those whose properties satisfy `is_wanted` or, if it is None, those
    with a tag hash in `tags_codes`. Selects all messages if both are None.
    """

    tags_codes: frozenset[int] | None = None
    is_wanted: Predicate | None = None


class Filters:
    """Parses the filter expressions of requests and subscriptions into `Selection`s."""

    def __init__(self, options: BrokerOptions) -> None:
        self._is_enabled = options.enable_property_filter

    def select(self, expression: str | None, expression_type: str | None, *, is_registered: bool) -> Selection:
        """Returns the selection of an expression.

        `is_registered`: whether the expression is from a heartbeat, not from the pull itself; an invalid condition is
        then refused with FILTER_DATA_NOT_EXIST instead of SUBSCRIPTION_PARSE_FAILED. Raises RefusedError for an invalid
        expression, or a type that this broker does not support.
        """
        try:
            if is_tag_type(expression_type):
                return Selection(parse_tag_expression(expression))
            assert expression_type is not None
            self._check_enabled(expression_type)
            if not expression:
                raise FilterSyntaxError("Expression can't be null!")
            return Selection(is_wanted=_compiled(expression))
        except FilterSyntaxError as error:
            code = ResponseCode.SUBSCRIPTION_PARSE_FAILED
            remark = f"parse the consumer's subscription failed: {error}"
            if is_registered:
                code = ResponseCode.FILTER_DATA_NOT_EXIST
                remark = f"The broker's consumer filter data is not exist!Your expression may be wrong! {error}"
            raise RefusedError(code, remark) from None
        except RemoteProtocolError as error:
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"parse the consumer's subscription failed: {error}"
            ) from None

    def _check_enabled(self, expression_type: str) -> None:
        if expression_type != SQL92 or not self._is_enabled:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                f"The broker does not support consumer to filter message by {expression_type[:40]}",
            )

    async def check_client(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """CHECK_CLIENT_CONFIG (46), which clients send before they subscribe: answers SUCCESS if this broker accepts
        the subscription. Raises RefusedError if not."""
        asked = read_request(CheckClientBody, command.body).subscription_data
        if not is_tag_type(asked.expression_type):
            self._check_enabled(SQL92)
            try:
                if asked.expression_type != SQL92:
                    raise FilterSyntaxError(f"there are no conditions of type {asked.expression_type[:40]}")
                _compiled(asked.sub_string)
            except FilterSyntaxError as error:
                raise RefusedError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error)) from None
        return command.reply(ResponseCode.SUCCESS)


def _compiled(expression: str) -> Predicate:
    """Returns the predicate of an SQL92 expression. Raises FilterSyntaxError."""
    if len(expression) > EXPRESSION_LENGTH_MAX:
        return compile_filter(expression)  # raises; not cached, as it may take 256 KiB
    found = _compiled_or_fault(expression)
    if isinstance(found, str):
        raise FilterSyntaxError(found)
    return found


@lru_cache(FILTER_COUNT_MAX)
def _compiled_or_fault(expression: str) -> Callable[..., bool] | str:
    try:
        return compile_filter(expression)
    except FilterSyntaxError as error:
        return str(error)


async def read_wanted(
    reader: QueueReader,
    queue: ConsumeQueue | None,
    queue_offset: int,
    is_wanted: Predicate,
    *,
    message_count_max: int,
    message_bytes_max: int,
) -> QueueRead:
    """As `QueueReader.read`, with a predicate on properties instead of tag hashes.

    Reads each message, not only its queue entry. Scans as many messages as a read by tags scans entries, in parts of
    about the size of one answer; other tasks run in between.
    """
    scan_end = queue_offset + min(max(SCAN_COUNT_MIN, message_count_max), SCAN_COUNT_MAX)
    at = queue_offset
    parts: list[memoryview] = []
    total_size = 0
    first: QueueRead | None = None
    while True:
        read = await reader.read(queue, at, message_count_max=_UNLIMITED, message_bytes_max=_UNLIMITED, tags_codes=None)
        if first is None:
            first = read
            if read.status not in (ReadStatus.FOUND, ReadStatus.MESSAGE_WAS_REMOVING):
                return read
            count_max, bytes_max = reader.limits(message_count_max, message_bytes_max, is_far_behind=read.is_far_behind)
        is_full = False
        body = memoryview(read.body)
        while body:
            size, _, record_offset, _ = RECORD_PLACE.unpack_from(body)
            if _is_wanted(body[:size], is_wanted):
                is_full = bool(parts) and (len(parts) == count_max or total_size + size > bytes_max)
                if is_full:
                    at = record_offset
                    break
                parts.append(body[:size])
                total_size += size
            body = body[size:]
        if is_full:
            break
        is_over = read.next_offset <= at
        at = max(at, read.next_offset)
        if is_over or at >= min(scan_end, read.max_offset):
            break
        await trio.lowlevel.checkpoint()
    status = ReadStatus.FOUND if parts else ReadStatus.NO_MATCHED_MESSAGE
    return QueueRead(
        status, at, read.min_offset, read.max_offset, b"".join(parts), len(parts), first.is_far_behind and bool(parts)
    )


def _is_wanted(record: memoryview, is_wanted: Predicate) -> bool:
    try:
        return is_wanted(decode_properties(record_properties(record)))
    except RemoteProtocolError:  # malformed record: filtered as if it had no properties
        return is_wanted({})
