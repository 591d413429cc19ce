"""Detects masters that have been replaced while they were frozen or unreachable.

A killed process closes its connections; a frozen or unreachable one does not, and requests to it would wait for their
timeout long after another master was elected. So if a broker has sent nothing for SILENCE_S while a prompt response is
due, the name servers are asked. The connection to a silent broker that is still the master is kept.
"""

from __future__ import annotations

import anyio

from ha.client.connections import Connections
from ha.client.routes import Routes

SILENCE_S = 1.0
CHECK_INTERVAL_S = 0.25


async def disconnect_replaced_masters(connections: Connections, routes: Routes) -> None:
    """Closes connections to silent masters that have been replaced, until cancelled. Their pending requests fail with
    ConnectionFailed, so that callers retry them."""
    while True:
        due = anyio.current_time() + CHECK_INTERVAL_S
        await anyio.sleep(CHECK_INTERVAL_S)
        if anyio.current_time() > due + CHECK_INTERVAL_S:
            continue  # the event loop was blocked: responses that arrived meanwhile are not read yet
        for connection in connections.silent(SILENCE_S):
            if await routes.is_replaced(connection.address):
                connection.hang_up("silent, and replaced by another master")
