"""`python -m ha.namesrv`: runs a name server."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from ha.acl import AclGuard, guard_options
from ha.config import NameServerConfig, options_of
from ha.process import Entry
from ha.remoting import PortTls, RemotingServerOptions
from ha.tls.handshake import Handshakes
from ha.tls.ports import FILE_CHECK_INTERVAL_S, keep_fresh, load_server, securing

from . import NameServerOptions, open_name_server


@asynccontextmanager
async def serve_name_server(config: NameServerConfig) -> AsyncIterator[str]:
    """Runs a name server during the block, and yields its READY line. Raises AddressInUse if it can't listen,
    ConfigError if a file that the configuration names can't be used."""
    options = NameServerOptions(
        host=config.bind_address,
        port=config.listen_port,
        order_message_enable=config.order_message_enable,
        remoting=options_of(RemotingServerOptions, config),
    )
    credentials = load_server(config, wall_clock_ms)
    tls = None
    if credentials is not None:
        is_required = config.tls_server_mode == "enforcing"
        tls = PortTls(secure=securing(Handshakes(), credentials), is_required=is_required)
    guard = files = None
    if config.acl_enable:
        from ha.acl.policy_files import system_policy_files

        files = system_policy_files(config.acl_file, config.acl_directory)
        guard = AclGuard(await files.load(), guard_options(config))
    async with open_name_server(options, tls=tls, guard=guard) as name_server, trio.open_nursery() as nursery:
        if guard is not None and files is not None:
            nursery.start_soon(files.keep_loaded, guard, FILE_CHECK_INTERVAL_S)
        if credentials is not None:
            nursery.start_soon(keep_fresh, [credentials], FILE_CHECK_INTERVAL_S, trio.to_thread.run_sync)
        host, port = name_server.address
        yield f"READY role=NAMESRV remoting={host}:{port}"
        nursery.cancel_scope.cancel()


def wall_clock_ms() -> int:
    """Returns the wall-clock time in ms since the epoch."""
    return time.time_ns() // 1_000_000


ENTRY = Entry("ha.namesrv", NameServerConfig, serve_name_server)

if __name__ == "__main__":
    sys.exit(ENTRY.main())
