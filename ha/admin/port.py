"""Listens on the admin port; server.py handles the connections.

server.py needs Hypercorn, Starlette and prometheus-client. They would be a quarter of what a node imports before it
serves, although brokers' requests don't use them. Therefore a worker thread imports server.py at the first connection,
unless the entry point has imported it after printing READY (process.py).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import trio

from ha.log_rate_limiter import LogRateLimiter

from .sessions import AdminKey
from .view import AdminView, Secure

if TYPE_CHECKING:
    from .server import AdminServer

logger = logging.getLogger(__name__)

RunBlocking = Callable[..., Awaitable[Any]]

SERVER_MODULE = "ha.admin.server"


@asynccontextmanager
async def open_admin(
    view: AdminView,
    listeners: Sequence[trio.abc.Listener[Any]],
    secure: Secure | None = None,
    key: AdminKey | None = None,
    run_blocking: RunBlocking = trio.to_thread.run_sync,
) -> AsyncIterator[None]:
    """Serves `view` on `listeners` during the block, over HTTPS if `secure` is given. Closes the listeners."""
    server: AdminServer | None = None
    loading = trio.Lock()
    log_limiter = LogRateLimiter()

    async def handle(stream: trio.SocketStream) -> None:
        nonlocal server
        async with loading:
            if server is None:
                try:
                    module = await run_blocking(import_module, SERVER_MODULE)
                except (ImportError, OSError) as error:  # such as too many open files: the next one retries
                    if times := log_limiter.admit("import", trio.current_time()):
                        logger.error("admin.import_failed reason=%r times=%d", str(error), times)
                    await trio.aclose_forcefully(stream)
                    return
                server = module.AdminServer(view, secure, key or AdminKey())
                nursery.start_soon(server.watch)
        await server.handle(stream)

    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, handle, list(listeners))
        yield
        nursery.cancel_scope.cancel()
