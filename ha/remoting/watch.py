"""Closes the connections whose timeouts have expired, with one task for all of them.

With a cancel scope per connection, its deadline would have to be moved with every chunk. Instead, connections only
record the times of their events, and are checked when the earliest of their deadlines is due.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

import trio

from .connection import RemotingConnection
from .options import ConnectionOptions


async def watch_connections(connections: Collection[RemotingConnection], options: ConnectionOptions) -> NoReturn:
    """Closes each connection of the (changing) collection at the moment that one of its timeouts expires.

    No check is late: a connection or wait that begins after a check can't be due before the shortest timeout has
    passed, and by then there is another check.
    """
    interval_s = min(options.idle_timeout_s, options.frame_timeout_s, options.send_timeout_s)
    while True:
        now = trio.current_time()
        wake_at = now + interval_s
        for connection in connections:
            if connection.is_closed:
                continue
            if cause := connection.protocol.overdue(now):
                connection.close(cause)
            else:
                wake_at = min(wake_at, connection.protocol.deadline)
        await trio.sleep_until(wake_at)
