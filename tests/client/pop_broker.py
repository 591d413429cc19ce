"""A small broker with POP for one topic, and a name server: messages are invisible while in flight and never come
again by themselves.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

from ha.client import ClientOptions, SimpleConsumer
from ha.protocol.codes import RequestCode
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message, encode_host
from ha.protocol.record_encoding import encode_record
from ha.protocol.remoting import RemotingCommand
from tests.client.fake_broker import FakeServer, name_server, route_body, serving, serving_all
from tests.client.group_broker import Answer

Override = Callable[[RemotingCommand], Answer | Awaitable[None]]
POP_TIME_MS = 1_700_000_000_000


class PopBroker:
    """Queue 0 of topic T. `overrides` answer instead of the broker, by request code."""

    def __init__(self) -> None:
        self.waiting: list[bytes] = []
        self.offset = 0
        self.overrides: dict[int, Override] = {}
        self.requests: list[RemotingCommand] = []
        self._arrived = anyio.Event()

    def put(self, body: bytes, *, reconsume_times: int = 0, sys_flag: int = 0, **properties: str) -> None:
        """Stores a message and wakes requests that wait."""
        raw = encode_properties(properties)
        message = Message("T", 0, body, raw, sys_flag=sys_flag, reconsume_times=reconsume_times)
        self.waiting.append(
            encode_record(
                message,
                queue_offset=self.offset,
                physical_offset=1000 + self.offset,
                store_timestamp_ms=POP_TIME_MS,
                store_host=encode_host("127.0.0.1", 10911),
            )
        )
        self.offset += 1
        self._arrived.set()
        self._arrived = anyio.Event()

    def of(self, code: RequestCode) -> list[dict[str, str]]:
        """The fields of all requests with this code."""
        return [command.ext_fields for command in self.requests if command.code == code]

    def handle(self, command: RemotingCommand) -> Answer | Awaitable[None]:
        self.requests.append(command)
        override = self.overrides.get(command.code)
        if override is not None and (answer := override(command)) is not None:
            return answer
        match command.code:
            case RequestCode.POP_MESSAGE:
                return self._pop(command)
            case RequestCode.NOTIFICATION:
                return self._notify(command)
            case RequestCode.ACK_MESSAGE | RequestCode.CONSUMER_SEND_MSG_BACK:
                return command.reply(0)
            case RequestCode.CHANGE_MESSAGE_INVISIBLETIME:
                invisible = command.ext_fields["invisibleTime"]
                fields = {"popTime": str(POP_TIME_MS + 1), "invisibleTime": invisible, "reviveQid": "5"}
                return command.reply(0, ext_fields=fields)
        return command.reply(3, f" request type {command.code} not supported")

    async def _wait(self, command: RemotingCommand) -> None:
        with anyio.move_on_after(int(command.ext_fields["pollTime"]) / 1000):
            while not self.waiting:
                await self._arrived.wait()

    async def _pop(self, command: RemotingCommand) -> RemotingCommand:
        await self._wait(command)
        fields = command.ext_fields
        header = {"popTime": str(POP_TIME_MS), "invisibleTime": fields["invisibleTime"], "reviveQid": "3"}
        count = int(fields["maxMsgNums"])
        found, self.waiting = self.waiting[:count], self.waiting[count:]
        header |= {"restNum": str(len(self.waiting)), "startOffsetInfo": f"0 0 {self.offset - len(found)}"}
        return command.reply(0 if found else 210, "REMARK", header, b"".join(found))

    async def _notify(self, command: RemotingCommand) -> RemotingCommand:
        await self._wait(command)
        return command.reply(0, ext_fields={"hasMsg": str(bool(self.waiting)).lower(), "pollingFull": "false"})


class PopWorld:
    """Brokers a, b, … and a consumer of them. `server` is the first broker's."""

    def __init__(self, brokers: list[PopBroker], servers: list[FakeServer], names: FakeServer) -> None:
        self.brokers = brokers
        self.broker = brokers[0]
        self.servers = servers
        self.names = names

    def consumer(self, **arguments: object) -> SimpleConsumer:
        usual: dict[str, object] = {"group": "g", "subscriptions": {"T": "*"}}
        return SimpleConsumer(self.names.address, **{**usual, **arguments})  # type: ignore[arg-type]


@asynccontextmanager
async def open_world(count: int = 1) -> AsyncIterator[PopWorld]:
    brokers = [PopBroker() for _ in range(count)]
    async with serving_all([broker.handle for broker in brokers]) as servers:
        routes = {"T": route_body({chr(97 + i): {0: server.address} for i, server in enumerate(servers)}, 1)}
        async with serving(name_server(routes)) as names:
            yield PopWorld(brokers, servers, names)


QUICK = ClientOptions(request_timeout_s=0.5)
