"""Keeps the SDK's connections: one per address, opened at its first use, and reopened at the next use after it was
lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from ha.client.connection import Connection, RequestHandler
from ha.client.options import ClientOptions
from ha.client.tls import connector
from ha.errors import BrokerError, ConnectionFailed
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand


class Connections:
    """Keeps one open connection per address; see `open_connections`."""

    def __init__(self, options: ClientOptions, on_request: RequestHandler | None = None) -> None:
        self.on_new: Callable[[str], None] | None = None
        """Called with the address of each connection that is about to be opened. Must not block."""
        self.opened_count = 0
        """Number of connections opened so far, including failed attempts."""
        self._options = options
        self._on_request = on_request
        self._connect = connector(options.tls, options.connect)
        self._live: dict[str, Connection] = {}
        self._wanted: list[Connection] = []
        self._wanted_came = anyio.Event()
        self._is_closed = False

    def to(self, address: str) -> Connection:
        """Returns the connection to `address` (host:port). A new one accepts requests before it is established.

        Raises ConnectionFailed after `close`."""
        if self._is_closed:
            raise ConnectionFailed(address, "closed by this client")
        connection = self._live.get(address)
        if connection is None or connection.is_closed:
            connection = self._live[address] = Connection(address, self._options, self._connect, self._on_request)
            self.opened_count += 1
            self._wanted.append(connection)
            self._wanted_came.set()
            if self.on_new is not None:
                self.on_new(address)
        return connection

    async def invoke(
        self, address: str, command: RemotingCommand, timeout_s: float, *, is_prompt: bool = True
    ) -> RemotingCommand:
        """Calls `Connection.invoke` on the connection to `address`."""
        return await self.to(address).invoke(command, timeout_s, is_prompt=is_prompt)

    async def request(self, address: str, command: RemotingCommand) -> RemotingCommand:
        """As `invoke`, with the timeout request_timeout_s. Raises BrokerError for any response code but SUCCESS."""
        answer = await self.invoke(address, command, self._options.request_timeout_s)
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(address, answer.code, answer.remark or "")
        return answer

    def silent(self, at_least_s: float) -> list[Connection]:
        """Returns connections that have been silent for `at_least_s` or longer; see `Connection.silent_s`."""
        return [connection for connection in self._live.values() if connection.silent_s() >= at_least_s]

    def addresses(self) -> list[str]:
        """The addresses of all connections that are open or being established."""
        return [address for address, connection in self._live.items() if not connection.is_closed]

    async def serve(self) -> None:
        """Runs the connections until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                self._wanted_came = anyio.Event()
                for connection in self._wanted:
                    tasks.start_soon(self._run, connection)
                self._wanted.clear()
                await self._wanted_came.wait()

    async def _run(self, connection: Connection) -> None:
        try:
            await connection.run()
        finally:
            if self._live.get(connection.address) is connection:
                del self._live[connection.address]  # else unused addresses would accumulate

    def close(self) -> None:
        """Makes `to` raise ConnectionFailed from now on. Open connections are not affected."""
        self._is_closed = True


@asynccontextmanager
async def open_connections(
    options: ClientOptions, on_request: RequestHandler | None = None
) -> AsyncIterator[Connections]:
    """Provides connections for the duration of the block; at its end they are closed and pending requests fail.

    If the block is cancelled, they stay open until it has ended, so that its cleanup (saving positions, unregistering)
    can use them. `on_request`: as in `Connection`. Raises ValueError if the TLS files of `options` or the environment
    can't be used."""
    connections = Connections(options, on_request)
    serving = anyio.CancelScope(shield=True)

    async def serve() -> None:
        with serving:
            await connections.serve()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        try:
            yield connections
        finally:
            connections.close()
            serving.cancel()
