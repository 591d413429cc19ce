"""A remoting port over memory streams, with a mode, and clients of every kind."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from ha.protocol.remoting import RemotingCommand
from ha.remoting import PortTls, RemotingServer, RemotingServerOptions
from ha.tls.files import TlsFiles, server_context
from ha.tls.handshake import Handshakes
from tests.remoting.wire import MemoryListener, Peer, Recorder


class SecuredPort:
    """A running server of the mode, the way to it, and the handshakes it has made."""

    def __init__(self, server: RemotingServer, listener: MemoryListener, handshakes: Handshakes) -> None:
        self.server = server
        self.listener = listener
        self.handshakes = handshakes

    def connect(self) -> trio.abc.Stream:
        return self.listener.connect()

    async def connect_tls(self, context: ssl.SSLContext, host: str = "localhost") -> Peer:
        """The first request goes along with the handshake: of TLS 1.3 the client doesn't see the server's verdict."""
        stream = trio.SSLStream(self.connect(), context, server_hostname=host, https_compatible=True)
        await stream.do_handshake()
        return Peer(stream)

    @property
    def closed(self) -> dict[str, int]:
        return self.server.statistics().closed


@asynccontextmanager
async def open_port(
    mode: str,
    files: TlsFiles,
    *,
    client_certificates: ssl.VerifyMode = ssl.CERT_NONE,
    options: RemotingServerOptions | None = None,
    count_max: int = 256,
) -> AsyncIterator[SecuredPort]:
    """`mode` as of tls.server.mode."""
    handshakes = Handshakes(timeout_s=10, count_max=count_max)
    tls = None
    if mode != "disabled":
        context = server_context(files, client_certificates=client_certificates)

        async def secure(stream: trio.abc.Stream, first: bytes) -> trio.abc.Stream:
            return await handshakes.accept(stream, context, first)

        tls = PortTls(secure=secure, is_required=mode == "enforcing")
    listener = MemoryListener()
    async with trio.open_nursery() as nursery:
        server: RemotingServer = await nursery.start(RemotingServer(Recorder(), options, tls=tls).serve, [listener])
        yield SecuredPort(server, listener, handshakes)
        nursery.cancel_scope.cancel()


async def is_served(peer: Peer, body: bytes = b"hello") -> bool:
    """Whether a request is answered; False if the connection ends instead."""
    try:
        await peer.send(RemotingCommand(10, 7, body=body))
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return False
    answer = await peer.receive()
    assert answer is None or answer.opaque == 7
    assert answer is None or answer.body in (body, b"")
    return answer is not None
