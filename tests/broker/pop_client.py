"""A POP consumer for tests of whole brokers."""

from typing import Any

import msgspec

from ha.protocol.pop import Handle
from ha.protocol.record import MessageRecord, decode_records
from ha.protocol.remoting import RemotingCommand
from tests.broker.node import Node

POP: dict[str, Any] = {
    "consumerGroup": "g",
    "topic": "TT",
    "queueId": -1,
    "maxMsgNums": 32,
    "invisibleTime": 10_000,
    "pollTime": 0,
    "bornTime": 0,
    "initMode": 0,
    "order": False,
}


class Popped(msgspec.Struct, frozen=True):
    """A message and what its consumer needs to acknowledge it. `topic`: the one that it was read from."""

    record: MessageRecord
    handle: Handle
    topic: str

    @property
    def body(self) -> bytes:
        return self.record.body


def bodies(messages: list[Popped]) -> list[bytes]:
    return [message.body for message in messages]


async def send(node: Node, *bodies: bytes, **changes: Any) -> None:
    """Sends messages to queue 0 of TT."""
    for body in bodies:
        assert (await node.send(body, **changes)).code == 0


async def pop(node: Node, **changes: Any) -> RemotingCommand:
    """Pops all queues of TT, without waiting."""
    return await node.ask(200050, **{**POP, **changes})


async def pop_messages(node: Node, **changes: Any) -> list[Popped]:
    """The popped messages; none for POLLING_TIMEOUT."""
    answer = await pop(node, **changes)
    assert answer.code in (0, 210), answer
    return popped_of(answer, **changes)


def popped_of(answer: RemotingCommand, **changes: Any) -> list[Popped]:
    """The messages of an answer with handles made as RocketMQ's client makes them."""
    asked = {**POP, **changes}
    if not answer.ext_fields["msgOffsetInfo"]:
        return []
    starts = {}
    for part in answer.ext_fields["startOffsetInfo"].split(";"):
        words = part.split(" ")
        starts[int(words[0]), int(words[1])] = int(words[2])
    offsets: list[tuple[int, int, int]] = []
    for part in answer.ext_fields["msgOffsetInfo"].split(";"):
        words = part.split(" ")
        offsets += [(int(words[0]), int(words[1]), int(number)) for number in words[2].split(",")]
    records = decode_records(answer.body)
    assert len(records) == len(offsets)
    found = []
    for record, (flag, queue_id, offset) in zip(records, offsets, strict=True):
        assert (record.queue_id, record.queue_offset) == (queue_id, offset)
        assert record.topic == asked["topic"]
        handle = Handle(
            start_offset=starts[flag, queue_id],
            pop_time_ms=int(answer.ext_fields["popTime"]),
            invisible_ms=int(answer.ext_fields["invisibleTime"]),
            revive_queue=int(answer.ext_fields["reviveQid"]),
            flag=flag,
            broker_name="b0",
            queue_id=queue_id,
            offset=offset,
        )
        stated = record.property_map().get("POP_CK")
        assert stated == (handle.encode() if flag else None)
        separator = {0: "", 1: "_", 2: "+"}[flag]
        topic = f"%RETRY%{asked['consumerGroup']}{separator}{asked['topic']}" if flag else asked["topic"]
        found.append(Popped(record, handle, topic))
    return found


def ack_fields(message: Popped, **changes: Any) -> dict[str, Any]:
    """The fields of an acknowledgement."""
    return {
        "consumerGroup": "g",
        "topic": message.topic,
        "queueId": message.handle.queue_id,
        "extraInfo": message.handle.encode(),
        "offset": message.handle.offset,
        **changes,
    }


async def ack(node: Node, message: Popped, **changes: Any) -> RemotingCommand:
    """Acknowledges a message."""
    return await node.ask(200051, **ack_fields(message, **changes))


async def change(node: Node, message: Popped, invisible_ms: int, **changes: Any) -> tuple[RemotingCommand, Popped]:
    """Changes the invisible time; returns the answer and the message with its new handle."""
    answer = await node.ask(200053, **ack_fields(message, invisibleTime=invisible_ms, **changes))
    if answer.code:
        return answer, message
    handle = msgspec.structs.replace(
        message.handle,
        start_offset=message.handle.offset,
        pop_time_ms=int(answer.ext_fields["popTime"]),
        invisible_ms=int(answer.ext_fields["invisibleTime"]),
        revive_queue=int(answer.ext_fields["reviveQid"]),
    )
    return answer, msgspec.structs.replace(message, handle=handle)
