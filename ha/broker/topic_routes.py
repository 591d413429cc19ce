"""Asks the name servers how many read queues each broker has for a topic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trio

from ha.errors import ProtocolError
from ha.protocol.bodies import TopicRouteData
from ha.protocol.codes import Permission, RequestCode, ResponseCode
from ha.protocol.headers import GetRouteInfoRequest
from ha.protocol.java_json import read_as
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient

TIMEOUT_S = 1.0
"""Timeout per name server; all together less than the 3 s that clients wait for an answer."""
NAME_SERVER_COUNT_MAX = 2
"""Maximum number of name servers asked per topic."""
QUEUE_COUNT_MAX = 65_536
"""Maximum number of read queues of a topic on all brokers together. Without a limit, anyone who may register a broker
could claim any number."""


class TopicRoutes:
    """Looks up topics. `name_servers`: host:port of each."""

    def __init__(self, client: RemotingClient, name_servers: Sequence[str]) -> None:
        self._client = client
        self._name_servers = name_servers

    async def read_queues(self, topic: str) -> Mapping[str, int] | None:
        """Returns the number of read queues on each broker where the topic can be read, by broker name.

        None if no name server answers with a route of at most QUEUE_COUNT_MAX such queues.
        """
        fields = GetRouteInfoRequest(topic=topic).to_ext_fields()
        for address in self._name_servers[:NAME_SERVER_COUNT_MAX]:
            request = RemotingCommand(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext_fields=fields)
            try:
                answer = await self._client.invoke(address, request, TIMEOUT_S)
                if answer.code == ResponseCode.SUCCESS:
                    route = read_as(TopicRouteData, answer.body)
                    found = {
                        queues.broker_name: queues.read_queue_nums
                        for queues in route.queue_datas
                        if queues.perm & Permission.READ
                    }
                    if sum(map(abs, found.values())) <= QUEUE_COUNT_MAX:
                        return found
            except (OSError, trio.BrokenResourceError, trio.TooSlowError, ProtocolError):
                continue
        return None
