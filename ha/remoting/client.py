"""The remoting client of brokers and gRPC fronts, for requests to name servers and to other brokers.

There is one connection per address. It is opened for the first request, shared by all requests to the address, and
reopened for the next request if it was lost. Applications use ha.client instead.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NoReturn

import msgspec
import trio

from ha.protocol.addresses import split_address
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand
from ha.transport import open_tcp

from .connection import Handler, RemotingConnection
from .handlers import each_request
from .options import RemotingClientOptions
from .shared import RemotingStatistics, SharedState
from .watch import watch_connections

logger = logging.getLogger(__name__)

Sign = Callable[[RemotingCommand], None]
"""Adds the sender's credentials to a request."""

Connect = Callable[[str], Awaitable[trio.abc.Stream]]
"""Opens a stream to an address. Raises OSError if it can't."""


async def connect_tcp(address: str) -> trio.abc.Stream:
    """Opens a TCP stream to "host:port". Raises OSError if the address is malformed or the connection fails."""
    try:
        host, port = split_address(address.strip())
    except ValueError as error:
        raise OSError(str(error)) from None
    return await open_tcp(host, port)


@each_request
async def refuse(connection: RemotingConnection, request: RemotingCommand) -> RemotingCommand | None:
    """Answers any request of the server with REQUEST_CODE_NOT_SUPPORTED."""
    return request.reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f" request type {request.code} not supported")


class _Slot:
    """The connection to one address. Once the attempt to open it has ended, `ready` is set, and either `connection` or
    `error` is not None."""

    __slots__ = ("address", "connection", "error", "ready")

    def __init__(self, address: str) -> None:
        self.address = address
        self.ready = trio.Event()
        self.connection: RemotingConnection | None = None
        self.error: OSError | None = None

    def fail(self, reason: str) -> None:
        """Wakes the tasks that wait for the connection. If the attempt to open it has not ended, they get an OSError
        with `reason`."""
        if self.connection is None and self.error is None:
            self.error = OSError(reason)
        self.ready.set()


class RemotingClient:
    """Sends requests to servers by address. Usable while `serve` runs (see `open_remoting_client`)."""

    def __init__(
        self,
        options: RemotingClientOptions | None = None,
        *,
        connect: Connect = connect_tcp,
        handler: Handler = refuse,
        sign: Sign | None = None,
    ) -> None:
        self._options = RemotingClientOptions() if options is None else options
        self._connect = connect
        self._handler = handler
        self._sign = sign
        self._slots: dict[str, _Slot] = {}
        self._connections: dict[RemotingConnection, None] = {}
        self._shared = SharedState(connections=self._connections)
        self._wanted_in, self._wanted_out = trio.open_memory_channel[_Slot](self._options.connections_max)

    def statistics(self) -> RemotingStatistics:
        """Returns a snapshot."""
        return self._shared.statistics()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Runs the connections until cancelled. Then, requests in flight raise trio.BrokenResourceError, and requests
        that wait for a connection raise OSError."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_connections, self._connections, self._options)
            task_status.started()
            try:
                async for slot in self._wanted_out:
                    nursery.start_soon(self._run_slot, slot)
            finally:
                self._wanted_out.close()
                for slot in self._slots.values():
                    slot.fail("the client is closing")
        raise AssertionError("a client ends by cancellation only")

    async def invoke(self, address: str, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        """Sends a request to `address` and returns the response, whatever its code.

        Raises OSError if no connection can be opened, trio.BrokenResourceError if it is lost before the response,
        trio.TooSlowError after `timeout_s`, which includes connecting, and LocalProtocolError if the request exceeds
        the frame size.
        """
        deadline = trio.current_time() + timeout_s
        with trio.fail_at(deadline):
            connection = await self.connection(address)
        signed = self._signed(command)
        left_s = deadline - trio.current_time()
        if left_s <= 0:  # the process was paused; connection.invoke would close a connection that works
            raise trio.TooSlowError
        return await connection.invoke(signed, left_s)

    def _signed(self, command: RemotingCommand) -> RemotingCommand:
        if self._sign is None:
            return command
        signed = msgspec.structs.replace(command, ext_fields=dict(command.ext_fields))
        self._sign(signed)
        return signed

    async def connection(self, address: str) -> RemotingConnection:
        """Returns the connection to `address`, opened if there is none. Raises OSError if opening it fails, takes
        longer than connect_timeout_s or would exceed connections_max, or if the client is closing."""
        slot = self._slots.get(address)
        if slot is None or (slot.connection is not None and slot.connection.is_closed):
            if slot is None and len(self._slots) >= self._options.connections_max:
                raise OSError(f"already {len(self._slots)} connections, no room for {address}")
            slot = _Slot(address)
            try:
                self._wanted_in.send_nowait(slot)
            except (trio.WouldBlock, trio.BrokenResourceError):
                raise OSError(f"the client is closing or too busy to connect to {address}") from None
            self._slots[address] = slot
        await slot.ready.wait()
        if slot.connection is None:
            assert slot.error is not None
            # One exception object must not be raised in several tasks: each would add its frames to the same traceback.
            raise type(slot.error)(*slot.error.args) from slot.error
        return slot.connection

    async def _run_slot(self, slot: _Slot) -> None:
        try:
            connection = await self._open(slot)
            if connection is not None:
                slot.ready.set()
                await connection.run(self._handler)
        finally:
            if slot.connection is not None:
                self._connections.pop(slot.connection, None)
            slot.fail("the client is closing")
            if self._slots.get(slot.address) is slot:
                del self._slots[slot.address]

    async def _open(self, slot: _Slot) -> RemotingConnection | None:
        try:
            with trio.fail_after(self._options.connect_timeout_s):
                stream = await self._connect(slot.address)
        except trio.TooSlowError:
            slot.error = TimeoutError(f"{slot.address} not reached within {self._options.connect_timeout_s:g} s")
        except OSError as error:
            slot.error = error
        else:
            self._shared.opened += 1
            slot.connection = RemotingConnection(stream, self._options, self._shared)
            self._connections[slot.connection] = None
            return slot.connection
        self._shared.refused += 1
        return None


@asynccontextmanager
async def open_remoting_client(
    options: RemotingClientOptions | None = None,
    *,
    connect: Connect = connect_tcp,
    handler: Handler = refuse,
    sign: Sign | None = None,
) -> AsyncIterator[RemotingClient]:
    """Yields a client, runs it during the block, and then closes its connections.

    `sign` is called with a copy of each request before the copy is sent."""
    client = RemotingClient(options, connect=connect, handler=handler, sign=sign)
    async with trio.open_nursery() as nursery:
        await nursery.start(client.serve)
        yield client
        nursery.cancel_scope.cancel()
