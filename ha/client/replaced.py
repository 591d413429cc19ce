"""Masters that say nothing any more, and in whose place there is another one.

Where a process is killed its connections end with it; where it is frozen or cut off nothing tells a client, and what it
has sent there waits for its timeout, seconds after another master has been elected. So the name servers are asked as
soon as a broker is silent for longer than a healthy one is. One that still is the master may take its time.
"""

from __future__ import annotations

import anyio

from ha.client.connections import Connections
from ha.client.routes import Routes

SILENT_S = 1.0
LOOK_S = 0.25


async def leave_replaced_masters(connections: Connections, routes: Routes) -> None:
    """Hang up on silent masters that have been replaced, until cancelled; what waits for them is sent elsewhere."""
    while True:
        await anyio.sleep(LOOK_S)
        for connection in connections.silent(SILENT_S):
            if await routes.is_replaced(connection.address):
                connection.hang_up("silent, and there is another master in its place")
