"""Recalls timer messages for a producer. Source: DefaultMQProducerImpl.recallMessage."""

from __future__ import annotations

from copy import copy

import anyio

from ha.client.client import Client
from ha.client.connections import Connections
from ha.client.routes import Routes
from ha.errors import BrokerError, ConnectionFailed
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.headers import RecallMessageRequest, RecallMessageResponse, parse_header
from ha.protocol.recall_handle import RecallHandle, decode_recall_handle
from ha.protocol.remoting import RemotingCommand

_RETRY_PAUSE_S = 0.2
_RETRYABLE_CODES = (
    ResponseCode.SYSTEM_BUSY,
    ResponseCode.SLAVE_NOT_AVAILABLE,
    ResponseCode.SERVICE_NOT_AVAILABLE,
)
"""Response codes of a broker that is not the master, or can't store messages at present. They are retried, because a
recall may safely be repeated."""


async def recall(client: Client, group: str, handle: str, timeout_s: float) -> str:
    """See `Producer.recall`."""
    named = decode_recall_handle(handle)
    request = RecallMessageRequest(
        topic=named.topic, recall_handle=handle, producer_group=group, broker_name=named.broker_name
    )
    routes, connections = client.routes, client.connections  # a closed client has none
    deadline = anyio.current_time() + timeout_s
    was_sent = False  # by any attempt
    while True:
        try:
            return await _recall_once(routes, connections, named, request, deadline)
        except (BrokerError, ConnectionFailed) as error:
            failure = copy(error)  # other tasks may raise the same one: route lookups are shared
        was_sent = failure.was_sent = was_sent or failure.was_sent
        is_final = isinstance(failure, BrokerError) and failure.code not in _RETRYABLE_CODES
        if is_final or anyio.current_time() + _RETRY_PAUSE_S >= deadline:
            raise failure
        routes.mark_stale(named.topic)
        await anyio.sleep(_RETRY_PAUSE_S)
        if not client.is_open:
            raise failure


async def _recall_once(
    routes: Routes, connections: Connections, named: RecallHandle, request: RecallMessageRequest, deadline: float
) -> str:
    route = routes.known(named.topic) or await routes.find_for_sending(named.topic, deadline)
    address = route.master_of(named.broker_name)
    command = RemotingCommand(RequestCode.RECALL_MESSAGE, ext_fields=request.to_ext_fields())
    answer = await connections.invoke(address, command, deadline - anyio.current_time())
    if answer.code != ResponseCode.SUCCESS:
        raise BrokerError(address, answer.code, answer.remark or "")
    return parse_header(RecallMessageResponse, answer.ext_fields).msg_id
