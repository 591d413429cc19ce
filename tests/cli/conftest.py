"""A small broker in a thread, so that whole command lines can be run against it."""

from collections import defaultdict
from collections.abc import Iterator

import anyio.from_thread
import msgspec
import pytest

from ha.protocol.bodies import decode_heartbeat
from ha.protocol.codes import RequestCode
from ha.protocol.record import Message, encode_host
from ha.protocol.record_encoding import encode_record
from ha.protocol.remoting import RemotingCommand
from tests.client.fake_broker import name_server, route_body, serving, stored

QUEUE_COUNT = 4


class OneBroker:
    """Topic T with four queues; stores what is sent and gives it back."""

    def __init__(self) -> None:
        self.name_server = ""
        self.records: dict[tuple[str, int], list[bytes]] = defaultdict(list)
        self.sends: list[RemotingCommand] = []
        self.committed: dict[int, int] = {}
        self.heartbeats: list[RemotingCommand] = []
        self.send_code = 0
        self.send_remark: str | None = None

    def handle(self, command: RemotingCommand) -> RemotingCommand:
        fields = command.ext_fields
        match command.code:
            case RequestCode.SEND_MESSAGE_V2:
                self.sends.append(command)
                if self.send_code not in (0, 10, 11, 12):
                    return command.reply(self.send_code, self.send_remark)
                return self.store(command)
            case RequestCode.PULL_MESSAGE:
                records = self.records[fields["topic"], int(fields["queueId"])]
                first = int(fields["queueOffset"])
                found = records[first : first + 2]
                answer = {"suggestWhichBrokerId": 0, "nextBeginOffset": first + len(found)}
                answer |= {"minOffset": 0, "maxOffset": len(records)}
                ext_fields = {key: str(value) for key, value in answer.items()}
                return command.reply(0 if found else 19, "", ext_fields, b"".join(found))
            case RequestCode.GET_MAX_OFFSET:
                size = len(self.records[fields["topic"], int(fields["queueId"])])
                return command.reply(0, ext_fields={"offset": str(size)})
            case RequestCode.GET_MIN_OFFSET:
                return command.reply(0, ext_fields={"offset": "0"})
            case RequestCode.QUERY_CONSUMER_OFFSET:
                offset = self.committed.get(int(fields["queueId"]))
                return command.reply(22) if offset is None else command.reply(0, ext_fields={"offset": str(offset)})
            case RequestCode.GET_CONSUMER_LIST_BY_GROUP:
                members = sorted({decode_heartbeat(each.body).client_id for each in self.heartbeats if each.body})
                return command.reply(0, body=msgspec.json.encode({"consumerIdList": members[-1:]}))
            case RequestCode.UPDATE_CONSUMER_OFFSET:
                self.committed[int(fields["queueId"])] = int(fields["commitOffset"])
                return command.reply(0)
        return command.reply(3, f" request type {command.code} not supported")

    def store(self, command: RemotingCommand) -> RemotingCommand:
        fields = command.ext_fields
        self.put(int(fields["e"]), bytes(command.body), fields["i"].encode())
        offset = len(self.records[fields["b"], int(fields["e"])]) - 1
        return stored(command, offset, self.send_code, self.send_remark)

    def put(self, queue_id: int, body: bytes, properties: bytes = b"", *, sys_flag: int = 0) -> None:
        """Stores a message of topic T."""
        records = self.records["T", queue_id]
        record = encode_record(
            Message("T", queue_id, body, properties, sys_flag=sys_flag),
            queue_offset=len(records),
            physical_offset=0,
            store_timestamp_ms=1_700_000_000_000,
            store_host=encode_host("127.0.0.1", 10911),
        )
        records.append(record)

    def bodies(self) -> list[bytes]:
        """Bodies sent so far, in order."""
        return [bytes(command.body) for command in self.sends]


@pytest.fixture
def broker() -> Iterator[OneBroker]:
    one = OneBroker()
    routes: dict[str, bytes] = {}
    with (
        anyio.from_thread.start_blocking_portal("trio") as portal,
        portal.wrap_async_context_manager(serving(one.handle)) as server,
        portal.wrap_async_context_manager(serving(name_server(routes))) as names,
    ):
        routes["T"] = route_body({"a": {0: server.address}}, QUEUE_COUNT)
        one.heartbeats = server.memberships
        one.name_server = names.address
        yield one
