"""QueryRoute and QueryAssignment: which queues a client may use, and where.

The endpoints in a response decide where all later calls of the client go, so they are those of the client's request:
only the client knows which of this front's addresses it can reach, and a client of several fronts keeps them all.
RocketMQ's proxy returns its own port instead. Sources: RouteActivity, GrpcConverter.
"""

from __future__ import annotations

from typing import Any

from .brokers import Brokers, Route
from .messages import Code, Permission, make
from .names import group_name, topic_name
from .refusal import CallRefused
from .status import ok_status

ENDPOINTS_SIZE_MAX = 4096
"""Maximum bytes of the endpoints in a request, because the response repeats them for each queue."""


async def existing_route(brokers: Brokers, topic: str) -> Route:
    """Returns a topic's route. Raises CallRefused if no broker has the topic, and BrokerUnreachable."""
    route = await brokers.route(topic)
    if route is None:
        raise CallRefused(Code.TOPIC_NOT_FOUND, f"no topic {topic}")
    return route


class Routes:
    """Serves QueryRoute and QueryAssignment."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    async def query(self, request: Any) -> Any:
        """QueryRoute: returns the queues of a topic on all brokers. Raises CallRefused, BrokerUnreachable."""
        endpoints = _endpoints_of(request)
        route = await existing_route(self._brokers, topic_name(request.topic))
        queues = []
        for broker in route.brokers:
            queue_broker = make("Broker", name=broker.broker_name, id=0, endpoints=endpoints)
            both = min(broker.readable, broker.writable)
            kinds = [Permission.READ_WRITE] * both
            kinds += [Permission.READ] * (broker.readable - both) + [Permission.WRITE] * (broker.writable - both)
            for queue_id, permission in enumerate(kinds):
                queues.append(
                    make(
                        "MessageQueue",
                        topic=request.topic,
                        id=queue_id,
                        permission=permission,
                        broker=queue_broker,
                        accept_message_types=route.message_types,
                    )
                )
        return make("QueryRouteResponse", status=ok_status(), message_queues=queues)

    async def assignments(self, request: Any) -> Any:
        """QueryAssignment: returns one queue with the id -1 per broker, which stands for all of its queues, because a
        pop takes messages from any of them. An ordered group gets each queue separately, so that a client receives from
        all of them concurrently. Raises CallRefused, BrokerUnreachable."""
        endpoints = _endpoints_of(request)
        route = await existing_route(self._brokers, topic_name(request.topic))
        group = await self._brokers.group(group_name(request.group))
        is_ordered = group is not None and group.consume_message_orderly
        queues = []
        for broker in route.brokers:
            queue_broker = make("Broker", name=broker.broker_name, id=0, endpoints=endpoints)
            for queue_id in range(broker.readable) if is_ordered else (-1,) if broker.readable else ():
                queues.append(
                    make(
                        "MessageQueue",
                        topic=request.topic,
                        id=queue_id,
                        permission=Permission.READ_WRITE,
                        broker=queue_broker,
                    )
                )
        if not queues:
            raise CallRefused(Code.FORBIDDEN, "no readable queue")
        assigned = [make("Assignment", message_queue=queue) for queue in queues]
        return make("QueryAssignmentResponse", status=ok_status(), assignments=assigned)


def _endpoints_of(request: Any) -> Any:
    """Returns the endpoints that the client uses. Raises CallRefused if they have more than ENDPOINTS_SIZE_MAX
    bytes."""
    size = request.endpoints.ByteSize()
    if size > ENDPOINTS_SIZE_MAX:
        raise CallRefused(
            Code.ILLEGAL_ACCESS_POINT, f"endpoints of {size} bytes; at most {ENDPOINTS_SIZE_MAX} are accepted"
        )
    return request.endpoints
