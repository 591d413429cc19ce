"""A server for the SDK's tests: real sockets and frames, with answers written by the test."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import msgspec
from anyio.abc import SocketStream

from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand, RemotingParser, encode_command

Handler = Callable[[RemotingCommand], RemotingCommand | bytes | Awaitable[RemotingCommand | None] | None]


class FakeServer:
    """Answers each command with what `handler` returns: a response, raw bytes, None (silence), or an awaitable of
    one."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.address = ""
        self.chunks: list[list[RemotingCommand]] = []
        """The commands of each chunk received, in order."""
        self.memberships: list[RemotingCommand] = []
        """Heartbeats and unregistrations, which may arrive at any time and are answered here."""
        self.connection_count = 0
        self.streams: list[SocketStream] = []
        self._grown = anyio.Event()
        self._writing = anyio.Lock()

    @property
    def commands(self) -> list[RemotingCommand]:
        """All commands received."""
        return [command for chunk in self.chunks for command in chunk]

    async def received(self, count: int) -> None:
        """Waits until `count` commands have arrived."""
        while len(self.commands) < count:
            self._grown = anyio.Event()
            await self._grown.wait()

    async def told(self, count: int) -> None:
        """Waits until `count` heartbeats and unregistrations have arrived."""
        while len(self.memberships) < count:
            self._grown = anyio.Event()
            await self._grown.wait()

    async def ask(self, command: RemotingCommand) -> None:
        """Sends a request from the server to the first client, between its answers."""
        await self._send(self.streams[0], encode_command(command))

    async def _send(self, stream: SocketStream, frames: bytes) -> None:
        async with self._writing:
            await stream.send(frames)

    async def disconnect(self) -> None:
        """Closes every connection."""
        streams, self.streams = self.streams, []
        for stream in streams:
            await stream.aclose()

    async def serve(self, stream: SocketStream) -> None:
        self.connection_count += 1
        self.streams.append(stream)
        parser = RemotingParser()
        try:
            async with stream, anyio.create_task_group() as tasks:
                while True:
                    commands = []
                    for command in parser.feed(await stream.receive()):
                        if command.code in (RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT):
                            self.memberships.append(command)
                            self._grown.set()
                            await self._send(stream, encode_command(command.reply(ResponseCode.SUCCESS)))
                        else:
                            commands.append(command)
                    if commands:
                        self.chunks.append(commands)
                        self._grown.set()
                    for command in commands:
                        answer = self.handler(command)
                        if isinstance(answer, bytes):
                            await self._send(stream, answer)
                        elif isinstance(answer, RemotingCommand):
                            await self._send(stream, encode_command(answer))
                        elif answer is not None:
                            tasks.start_soon(self._answer_later, stream, answer)
        except* (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            pass

    async def _answer_later(self, stream: SocketStream, answer: Awaitable[RemotingCommand | None]) -> None:
        command = await answer
        if command is not None:
            await self._send(stream, encode_command(command))


@asynccontextmanager
async def serving(handler: Handler, port: int = 0) -> AsyncIterator[FakeServer]:
    """Runs a FakeServer on 127.0.0.1."""
    server = FakeServer(handler)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)
    server.address = f"127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, server.serve)
        yield server
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def serving_all(handlers: Iterable[Handler]) -> AsyncIterator[list[FakeServer]]:
    """One FakeServer per handler."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving(handler)) for handler in handlers]


def route_body(brokers: dict[str, dict[int, str]], queue_nums: int = 4, perm: int = 6) -> bytes:
    """TopicRouteData as sent by a name server that is asked for standard JSON."""
    return msgspec.json.encode(
        {
            "brokerDatas": [
                {"brokerAddrs": {str(i): a for i, a in addresses.items()}, "brokerName": name, "cluster": "C"}
                for name, addresses in brokers.items()
            ],
            "filterServerTable": {},
            "queueDatas": [
                {
                    "brokerName": name,
                    "perm": perm,
                    "readQueueNums": queue_nums,
                    "topicSysFlag": 0,
                    "writeQueueNums": queue_nums,
                }
                for name in brokers
            ],
        }
    )


def name_server(routes: dict[str, bytes]) -> Handler:
    """A name server that knows these topics; the dict may change while it runs."""

    def handle(command: RemotingCommand) -> RemotingCommand:
        assert command.code == RequestCode.GET_ROUTEINFO_BY_TOPIC
        body = routes.get(command.ext_fields["topic"])
        if body is None:
            return command.reply(ResponseCode.TOPIC_NOT_EXIST, "No topic route info in name server for the topic")
        return command.reply(ResponseCode.SUCCESS, body=body)

    return handle


def stored(
    command: RemotingCommand, queue_offset: int = 0, code: int = 0, remark: str | None = None
) -> RemotingCommand:
    """A broker's answer to a stored message."""
    queue_id = command.ext_fields["e"]
    fields = {"msgId": "7F00000100002A9F0000000000000000", "queueId": queue_id, "queueOffset": str(queue_offset)}
    return command.reply(code, remark, fields)
