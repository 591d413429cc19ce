"""Ends the connections whose time is up, with one task for all of them.

A timeout per connection in a cancel scope of its own would be moved on every chunk; here the connections only note when
things happened, and the watch looks at them when the earliest of their deadlines is due.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

import trio

from .connection import RemotingConnection
from .options import ConnectionOptions


async def watch_connections(connections: Collection[RemotingConnection], options: ConnectionOptions) -> NoReturn:
    """Close each connection of the (changing) collection at the moment that one of its timeouts runs out.

    Exact: a connection or wait that begins after a look can't be due before the shortest timeout has passed, and by
    then there is another look.
    """
    interval_s = min(options.idle_timeout_s, options.frame_timeout_s, options.send_timeout_s)
    while True:
        now = trio.current_time()
        wake_at = now + interval_s
        for connection in connections:
            if connection.is_closed:
                continue
            if cause := connection.overdue(now):
                connection.close(cause)
            else:
                wake_at = min(wake_at, connection.deadline)
        await trio.sleep_until(wake_at)
