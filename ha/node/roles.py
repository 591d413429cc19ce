"""Opens a node in one of its roles: master, slave, or member of a failover group."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from os import PathLike
from typing import cast

import trio

from ha.config import Config
from ha.errors import ConfigError

from .member import wait_role
from .node import Node
from .startup import open_node

REGISTRATION_WAIT_S_MAX = 3.0
"""Maximum time that a new member waits for name servers that don't respond, in seconds."""


def _check_type(config: object) -> None:
    """Raises TypeError for anything but a Config."""
    if not isinstance(config, Config):
        hint = f"; a store's directory is given as ha.Config(store_path_root_dir={str(config)!r})"
        raise TypeError(f"config is not a ha.Config: {config!r}{hint if isinstance(config, str | PathLike) else ''}")


@asynccontextmanager
async def _opened(config: Config) -> AsyncIterator[Node]:
    """Opens a node in this event loop if it is Trio's, otherwise in a thread, for asyncio."""
    if trio.lowlevel.in_trio_run():
        async with open_node(config) as node:
            yield node
    else:
        from .in_thread import open_node_in_thread  # asyncio is not imported by a node on Trio

        async with open_node_in_thread(config) as in_thread:
            yield cast(Node, in_thread)  # a caller knows its event loop, which a type can't express


@asynccontextmanager
async def open_master(config: Config | None = None) -> AsyncIterator[Node]:
    """Runs a master during the block, by default an ASYNC_MASTER on the default ports that takes little space on the
    disk (preallocateCommitLog=false), and yields its `Node`.

    Raises TypeError for anything but a Config, ConfigError if brokerRole is SLAVE or etcdEndpoints is set, and the
    errors of `open_node`. Errors during the block, and some before it, are raised in exception groups; `except*`
    catches both forms. Leaving or cancelling the block answers or fails the requests in flight and flushes the log.

    Under asyncio the node runs in a thread with its own Trio loop, and the block gets a `NodeInThread`, which has
    `put`, `put_many`, `read`, `messages` and the addresses. If the node fails, the block is cancelled and the error
    raised. The end of the block waits for the node for at most shutdownTimeout, then raises TimeoutError.
    """
    config = Config(preallocate=False) if config is None else config
    _check_type(config)
    if config.is_slave:
        raise ConfigError("brokerRole", "SLAVE is not a master role", "ASYNC_MASTER, SYNC_MASTER")
    if config.is_member:
        reason = "an election chooses the master of a failover group"
        raise ConfigError("etcdEndpoints", reason, "no value, or run `python -m ha.member`")
    async with _opened(config) as node:
        yield node


@asynccontextmanager
async def open_slave(config: Config | None = None) -> AsyncIterator[Node]:
    """Runs a slave during the block, by default a slave of the master on this machine's default ports. Raises
    ConfigError if brokerRole is not SLAVE. In all other respects like `open_master`."""
    config = Config(broker_role="SLAVE", preallocate=False) if config is None else config
    _check_type(config)
    if not config.is_slave:
        raise ConfigError("brokerRole", f"{config.broker_role} is not a slave role", "SLAVE")
    async with _opened(config) as node:
        yield node


@asynccontextmanager
async def open_member_node(config: Config) -> AsyncIterator[Node]:
    """Runs a member of a failover group during the block.

    The block begins when the member is master or has a master to follow, and has tried to register at each name server;
    it waits for name servers for at most REGISTRATION_WAIT_S_MAX. Raises ConfigError if etcdEndpoints is not set, and
    the errors of `open_node`.
    """
    if not config.is_member:
        raise ConfigError("etcdEndpoints", "is required for a member", "the URLs of the etcd servers")
    async with open_node(config) as node:
        assert node.member is not None
        await wait_role(node.member)
        with trio.move_on_after(REGISTRATION_WAIT_S_MAX):
            await node.registration.wait_told()
        yield node


@asynccontextmanager
async def serve(opened: AbstractAsyncContextManager[Node]) -> AsyncIterator[str]:
    """Runs a node for an entry point, and yields its READY line."""
    async with opened as node:
        yield node.ready_line
