"""The name server inside a master without namesrvAddr, and the node's connections to it."""

from __future__ import annotations

from functools import partial

import trio

from ha.namesrv import NameServer, NameServerOptions

from .node import Node
from .options import remoting_options
from .platform import Port

OWN_CONNECTIONS_MAX = 4
"""Maximum number of the node's own connections that wait to be accepted."""


class OwnNameServer:
    """Starts the node's own name server, and opens the node's connections to it and to other servers."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._send, self._receive = trio.open_memory_channel[trio.abc.Stream](OWN_CONNECTIONS_MAX)

    async def start(self, port: Port, nursery: trio.Nursery) -> None:
        """Starts the name server in `nursery`; returns when it serves. Raises AddressInUse if the port is in use."""
        node = self._node
        options = NameServerOptions(
            host=port.host,
            port=port.port,
            remoting=remoting_options(node.config, node.platform.open_files_max),
        )
        name_server = NameServer(options, tls=node.tls.remoting_port, guard=node.acl_guard)
        await nursery.start(name_server.serve, port.listen())
        nursery.start_soon(self._serve_own, name_server)

    async def connect(self, address: str) -> trio.abc.Stream:
        """Opens a stream to a name server or to a broker's remoting port. Raises OSError if that fails.

        With TLS or access control, the node reaches its own name server through a socket pair instead of the network,
        because it has no certificate or access key to present to itself.
        """
        tls = self._node.tls
        is_open = tls.remoting_port is None and self._node.acl_guard is None
        if address != self._node.name_server_address or is_open:
            return await tls.connect(address)
        ours, theirs = trio.socket.socketpair()
        try:
            self._send.send_nowait(trio.SocketStream(theirs))
        except (trio.WouldBlock, trio.BrokenResourceError):
            ours.close()
            theirs.close()
            raise ConnectionRefusedError("the node's own name server is too busy") from None
        return trio.SocketStream(ours)

    async def _serve_own(self, name_server: NameServer) -> None:
        async with self._receive, trio.open_nursery() as nursery:
            async for stream in self._receive:
                nursery.start_soon(partial(name_server.server.handle, stream, is_own=True))
