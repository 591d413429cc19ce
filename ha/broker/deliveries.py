"""How delayed and timer messages get from their system topic into their own: put until stored, or never can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from ha.broker.put import PutService
from ha.broker.put_request import PutRequest

PAUSE_S_MIN = 0.1
PAUSE_S_MAX = 2.0
"""Between attempts to read or put what can't be read or put now."""


class Delivery(PutRequest, kw_only=True, gc=False):
    """The put of one message whose time has come; `queue_offset` in the system topic's queue."""

    queue_offset: int


async def put_all(
    puts: PutService,
    deliveries: Sequence[Delivery],
    *,
    on_retry: Callable[[Delivery], None],
    on_dropped: Callable[[Delivery], None],
) -> int:
    """Puts messages until each is stored, or never can be (`on_dropped`). Returns how many are stored.

    They wait for no flush and no slave, so each put is done at once. Before each pause, `on_retry` is called with the
    first delivery that failed.
    """
    stored_count = 0
    pause_s = PAUSE_S_MIN
    while deliveries:
        await puts.settle(deliveries)
        failed = []
        for delivery in deliveries:
            if delivery.status.is_stored:
                stored_count += 1
            elif delivery.is_hopeless:
                on_dropped(delivery)
            else:
                failed.append(delivery)
        if failed:
            on_retry(failed[0])
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        deliveries = failed
    return stored_count
