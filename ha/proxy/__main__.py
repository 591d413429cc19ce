"""`python -m ha.proxy`: serves RocketMQ 5's gRPC clients in front of a cluster.

A front stores nothing on disk, and a cluster can have any number of them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from ha.config import ProxyConfig, options_of
from ha.process import Entry
from ha.protocol.remoting import FRAME_SIZE_MAX

STOP_GRACE_S = 0.3
"""Time in seconds that calls in progress have to finish when the front stops; after that, calls that still run, such as
long polls, are cancelled."""
MESSAGE_OVERHEAD = 1 << 20
"""Maximum bytes of a request in addition to one body of the maximum size."""
BODY_SIZE_MAX = FRAME_SIZE_MAX - MESSAGE_OVERHEAD
"""Maximum bytes of a body, even if maxMessageSize is larger: a request to a broker must fit in one frame."""


@asynccontextmanager
async def serve_proxy(config: ProxyConfig) -> AsyncIterator[str]:
    """Runs a front during the block, and yields its READY line. Raises ConfigError if a file that `config` names can't
    be used, and AddressInUse if the port can't be bound.

    A worker thread looks up the name in bindAddress; cancellation waits for the lookup.
    """
    from ha.grpc import GrpcOptions, GrpcServer
    from ha.poller import open_poller
    from ha.remoting import BoundPort, RemotingClientOptions
    from ha.tls.ports import FILE_CHECK_INTERVAL_S, keep_fresh

    from .cluster import open_cluster
    from .front import Front
    from .options import FrontOptions
    from .security import FrontTls, read_access

    tls = FrontTls(config, wall_clock_ms)
    access = await read_access(config)
    wanted = "grpcListenPort", config.bind_address, config.grpc_listen_port
    with await trio.to_thread.run_sync(BoundPort, *wanted) as bound:
        listeners = bound.listen()
    host, port = listeners[0].socket.getsockname()[:2]
    front_options = FrontOptions(message_size_max=min(config.message_size_max, BODY_SIZE_MAX))
    options = GrpcOptions(
        message_size_max=front_options.message_size_max + MESSAGE_OVERHEAD,
        connections_max=config.connections_max,
        connections_per_host_max=config.connections_per_host_max,
        idle_timeout_s=config.idle_timeout_s,
    )
    defaults = RemotingClientOptions()
    links = options_of(
        RemotingClientOptions,
        config,
        connections_max=defaults.connections_max,
        idle_timeout_s=defaults.idle_timeout_s,
    )
    async with (
        open_poller() as poller,
        open_cluster(config.name_servers, links, connect=tls.connect, sign=access.sign) as cluster,
        trio.open_nursery() as nursery,
    ):
        users = access.attach_users(config, cluster)
        front = cluster.front = Front(
            cluster,
            front_options,
            client_id=f"front@{host}:{port}@{os.getpid()}@{time.time_ns():x}",
            wall_clock_ms=wall_clock_ms,
            access=access.calls(users),
        )
        server = GrpcServer(front, options, tls=tls.port, poller=poller)
        nursery.start_soon(keep_fresh, tls.credentials, FILE_CHECK_INTERVAL_S, trio.to_thread.run_sync)
        if users is not None:
            nursery.start_soon(users.serve)
        if access.files is not None and access.guard is not None:
            nursery.start_soon(access.files.keep_loaded, access.guard, FILE_CHECK_INTERVAL_S)
        await nursery.start(front.serve_clients)
        await nursery.start(server.serve, listeners)
        yield f"READY role=PROXY grpc={host}:{port}"
        server.stop()
        with trio.CancelScope(shield=True):
            await trio.sleep(STOP_GRACE_S)
        nursery.cancel_scope.cancel()


def wall_clock_ms() -> int:
    """Returns the wall clock, in ms since 1970."""
    return time.time_ns() // 1_000_000


ENTRY = Entry("ha.proxy", ProxyConfig, serve_proxy)

if __name__ == "__main__":
    sys.exit(ENTRY.main())
