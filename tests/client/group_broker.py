"""A small broker of one broker set that can be made to misbehave: queues of one topic, offsets, locks, sent-back
messages.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable

import msgspec

from ha.protocol.bodies import decode_heartbeat
from ha.protocol.codes import RequestCode
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message, encode_host
from ha.protocol.record_encoding import encode_record
from ha.protocol.remoting import RemotingCommand
from tests.client.fake_broker import FakeServer, stored

Answer = RemotingCommand | Awaitable[RemotingCommand] | None
Override = Callable[[RemotingCommand], Answer]


class GroupBroker:
    """Topic T with as many queues as in the route. `overrides` answer instead of the broker, by request code."""

    def __init__(self) -> None:
        self.records: dict[int, list[bytes]] = defaultdict(list)
        self.committed: dict[int, int] = {}
        self.pulls: list[tuple[int, int]] = []
        """Queue and offset of every pull."""
        self.given_back: list[dict[str, str]] = []
        self.sends: list[RemotingCommand] = []
        self.locked_by: dict[tuple[str, int], str] = {}
        self.lock_bodies: list[tuple[int, dict[str, object]]] = []
        self.others: list[str] = []
        """Client ids of other members of the group."""
        self.suggest = 0
        self.overrides: dict[int, Override] = {}
        self.server: FakeServer | None = None

    def put(self, queue_id: int, body: bytes, *, sys_flag: int = 0, **properties: str) -> None:
        """Stores a message."""
        records = self.records[queue_id]
        message = Message("T", queue_id, body, encode_properties(properties), sys_flag=sys_flag)
        records.append(
            encode_record(
                message,
                queue_offset=len(records),
                physical_offset=1000 * queue_id + len(records),
                store_timestamp_ms=1_700_000_000_000,
                store_host=encode_host("127.0.0.1", 10911),
            )
        )

    def members(self) -> list[str]:
        """The client ids that sent heartbeats and have not unregistered, and `others`."""
        assert self.server is not None
        known: dict[str, None] = {}
        for command in self.server.memberships:
            if command.code == RequestCode.HEART_BEAT:
                known[decode_heartbeat(command.body).client_id] = None
            else:
                known.pop(command.ext_fields["clientID"], None)
        return [*known, *self.others]

    def handle(self, command: RemotingCommand) -> Answer:
        override = self.overrides.get(command.code)
        if override is not None and (answer := override(command)) is not None:
            return answer
        fields = command.ext_fields
        queue_id = int(fields.get("queueId", 0))
        is_own = fields.get("topic", "T") == "T"
        match command.code:
            case RequestCode.GET_CONSUMER_LIST_BY_GROUP:
                members = self.members()
                if not members:
                    return command.reply(1, "no consumer for this group, g")
                return command.reply(0, body=msgspec.json.encode({"consumerIdList": members}))
            case RequestCode.PULL_MESSAGE:
                first = int(fields["queueOffset"])
                if is_own:
                    self.pulls.append((queue_id, first))
                records = self.records[queue_id] if is_own else []
                found = records[first : first + 4]
                return self.pulled(command, 0 if found else 19, first + len(found), b"".join(found), len(records))
            case RequestCode.QUERY_CONSUMER_OFFSET:
                offset = self.committed.get(queue_id) if is_own else 0
                return command.reply(22) if offset is None else command.reply(0, ext_fields={"offset": str(offset)})
            case RequestCode.UPDATE_CONSUMER_OFFSET:
                if is_own:
                    self.committed[queue_id] = int(fields["commitOffset"])
                return command.reply(0)
            case RequestCode.GET_MIN_OFFSET:
                return command.reply(0, ext_fields={"offset": "0"})
            case RequestCode.GET_MAX_OFFSET:
                return command.reply(0, ext_fields={"offset": str(len(self.records[queue_id]))})
            case RequestCode.CONSUMER_SEND_MSG_BACK:
                self.given_back.append(fields)
                return command.reply(0)
            case RequestCode.SEND_MESSAGE_V2:
                self.sends.append(command)
                return stored(command)
            case RequestCode.LOCK_BATCH_MQ | RequestCode.UNLOCK_BATCH_MQ:
                return self._lock(command)
        return command.reply(3, f" request type {command.code} not supported")

    def pulled(
        self, command: RemotingCommand, code: int, next_offset: int, body: bytes = b"", end: int = 0, first: int = 0
    ) -> RemotingCommand:
        """The answer to a pull of a queue that holds [first, end)."""
        fields = {"suggestWhichBrokerId": self.suggest, "nextBeginOffset": next_offset, "minOffset": first}
        fields["maxOffset"] = end
        return command.reply(code, "REMARK", {name: str(value) for name, value in fields.items()}, body)

    def _lock(self, command: RemotingCommand) -> RemotingCommand:
        body = msgspec.json.decode(command.body)
        self.lock_bodies.append((command.code, body))
        granted = []
        for queue in body["mqSet"]:
            key = (queue["topic"], queue["queueId"])
            if command.code == RequestCode.UNLOCK_BATCH_MQ:
                self.locked_by.pop(key, None)
            elif self.locked_by.setdefault(key, body["clientId"]) == body["clientId"]:
                granted.append(queue)
        return command.reply(0, body=msgspec.json.encode({"lockOKMQSet": granted}))
