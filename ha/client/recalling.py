"""Recalls timer messages for a producer. Source: DefaultMQProducerImpl.recallMessage."""

from __future__ import annotations

import anyio

from ha.client.client import Client
from ha.client.connections import Connections
from ha.client.routes import Routes
from ha.errors import BrokerError, ConnectionFailed, RequestTimedOut
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
"""Response codes of a broker that is not the master, or can't store messages at present. A recall may safely be
repeated."""


async def recall(client: Client, group: str, handle: str, timeout_s: float) -> str:
    """See `Producer.recall`."""
    named = decode_recall_handle(handle)
    request = RecallMessageRequest(
        topic=named.topic, recall_handle=handle, producer_group=group, broker_name=named.broker_name
    )
    routes, connections = client.routes, client.connections  # a closed client has none
    failure: BrokerError | ConnectionFailed | None = None
    with anyio.move_on_after(timeout_s):
        while failure is None or client.is_open:
            try:
                return await _recall_once(routes, connections, named, request, timeout_s)
            except ConnectionFailed as error:
                failure = error
            except BrokerError as error:
                if error.code not in _RETRYABLE_CODES:
                    raise
                failure = error
            routes.mark_stale(named.topic)
            await anyio.sleep(_RETRY_PAUSE_S)
    if failure is None:
        raise RequestTimedOut(named.broker_name, timeout_s)
    raise failure


async def _recall_once(
    routes: Routes, connections: Connections, named: RecallHandle, request: RecallMessageRequest, timeout_s: float
) -> str:
    route = routes.known(named.topic) or await routes.find_for_sending(named.topic)
    address = route.master_of(named.broker_name)
    command = RemotingCommand(RequestCode.RECALL_MESSAGE, ext_fields=request.to_ext_fields())
    answer = await connections.invoke(address, command, timeout_s)
    if answer.code != ResponseCode.SUCCESS:
        raise BrokerError(address, answer.code, answer.remark or "")
    return parse_header(RecallMessageResponse, answer.ext_fields).msg_id
