"""The admin port, from the moment on at which it listens; server.py answers what comes in.

What that takes (Hypercorn, Starlette, prometheus-client) is a quarter of all that a node would have to import before it
serves, and no message needs it. So a worker imports it when the first connection comes, or whoever runs the node has
done it before that (process.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import trio

from .sessions import AdminKey
from .view import AdminView

if TYPE_CHECKING:
    from .server import AdminServer

Secure = Callable[[trio.abc.Stream], Awaitable[trio.abc.Stream]]
"""Makes an encrypted stream of one that was accepted; HandshakeFailed, the stream closed."""
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
    """Serve `view` on `listeners`, which are closed in the end, while the block runs; by HTTPS if `secure` is given."""
    server: AdminServer | None = None
    loading = trio.Lock()

    async def handle(stream: trio.SocketStream) -> None:
        nonlocal server
        async with loading:
            if server is None:
                module = await run_blocking(import_module, SERVER_MODULE)
                server = module.AdminServer(view, secure, key or AdminKey())
                nursery.start_soon(server.watch)
        await server.handle(stream)

    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, handle, list(listeners))
        yield
        nursery.cancel_scope.cancel()
