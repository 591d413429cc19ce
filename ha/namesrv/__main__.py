"""`python -m ha.namesrv`: a name server as a process of its own."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ha.config import NameServerConfig
from ha.process import Entry
from ha.remoting import RemotingServerOptions

from . import NameServerOptions, open_name_server


@asynccontextmanager
async def serve_name_server(config: NameServerConfig) -> AsyncIterator[str]:
    """A name server while the block runs; yields its READY line. AddressInUse."""
    options = NameServerOptions(
        host=config.bind_address,
        port=config.listen_port,
        remoting=RemotingServerOptions(idle_timeout_s=config.channel_idle_timeout_s),
    )
    async with open_name_server(options) as name_server:
        host, port = name_server.address
        yield f"READY role=NAMESRV remoting={host}:{port}"


ENTRY = Entry("ha.namesrv", NameServerConfig, serve_name_server)

if __name__ == "__main__":
    sys.exit(ENTRY.main())
