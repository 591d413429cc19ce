"""The SDK and a complete halog broker in one process, without sockets and with a mock clock."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import trio
from anyio.abc import ByteStream
from trio.testing import MockClock, memory_stream_pair

from ha.client import ClientOptions
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand, RemotingParser, encode_command
from tests.broker.node import HOST, PORT, Node, open_node
from tests.client.fake_broker import route_body

NAMES = "names:9876"


class OverTrio(ByteStream):
    """A trio stream as the SDK expects it."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return {}

    async def receive(self, max_bytes: int = 65536) -> bytes:
        try:
            received = await self._stream.receive_some(max_bytes)
        except trio.BrokenResourceError as error:
            raise anyio.BrokenResourceError from error
        if not received:
            raise anyio.EndOfStream
        return bytes(received)

    async def send(self, item: bytes) -> None:
        try:
            await self._stream.send_all(item)
        except trio.BrokenResourceError as error:
            raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        await self._stream.aclose()


def run_with_our_broker(folder: Path, body: Callable[[Node, ClientOptions], Awaitable[None]], **changes: Any) -> None:
    """Runs `body` with a broker, and with options to reach it through the name server NAMES. `changes` are
    BrokerOptions."""

    async def main() -> None:
        async with open_node(folder, **changes) as node, trio.open_nursery() as nursery:

            async def connect(host: str, port: int) -> ByteStream:
                if host == HOST:
                    return OverTrio(node.listener.connect())
                ours, theirs = memory_stream_pair()
                nursery.start_soon(_answer_routes, theirs, node)
                return OverTrio(ours)

            with trio.fail_after(600):
                await body(node, ClientOptions(connect=connect))
            nursery.cancel_scope.cancel()

    anyio.run(main, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})


async def _answer_routes(stream: trio.abc.Stream, node: Node) -> None:
    """A name server that knows the broker's topics as soon as they exist."""
    parser = RemotingParser()
    while received := await stream.receive_some(65536):
        for command in parser.feed(bytes(received)):
            await stream.send_all(encode_command(_route(command, node)))


def _route(command: RemotingCommand, node: Node) -> RemotingCommand:
    config = node.broker.topics.get(command.ext_fields["topic"])
    if config is None:
        return command.reply(ResponseCode.TOPIC_NOT_EXIST, "No topic route info in name server for the topic")
    body = route_body({"b0": {0: f"{HOST}:{PORT}"}}, config.read_queue_nums, config.perm)
    return command.reply(ResponseCode.SUCCESS, body=body)
