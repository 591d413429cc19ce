"""Messages by key, by unique key and by offset."""

import errno
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from ha.broker import message_queries
from ha.protocol.codes import ResponseCode
from ha.protocol.message_id import decode_message_id
from ha.protocol.record import Message, encode_host
from ha.protocol.record_encoding import encode_record
from ha.protocol.remoting import RemotingCommand
from tests.broker.node import HOST, SEND_V2, Node
from tests.security.brokers import admin, alice, guarded_broker

ALWAYS = {"beginTimestamp": 0, "endTimestamp": (1 << 63) - 1, "maxNum": 64}


async def send(node: Node, body: bytes, keys: str, unique_key: str, **changes: Any) -> RemotingCommand:
    return await node.send(body, i=f"KEYS\x01{keys}\x02UNIQ_KEY\x01{unique_key}\x02", **changes)


async def query(node: Node, key: str, *, topic: str = "TT", unique: bool | None = None, **changes: Any) -> list[bytes]:
    answer = await node.ask(12, topic=topic, key=key, **{"_UNIQUE_KEY_QUERY": unique, **ALWAYS, **changes})
    if answer.code == 22:
        assert answer.ext_fields == {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"}
        return []
    assert answer.code == 0, answer
    assert int(answer.ext_fields["indexLastUpdateTimestamp"]) > 0
    assert int(answer.ext_fields["indexLastUpdatePhyoffset"]) >= 0
    return [record.body for record in node.records(answer)]


async def test_by_key(node: Node) -> None:
    await send(node, b"one", "a b", "U1")
    await send(node, b"two", "b", "U2", e=1)
    await send(node, b"other", "b", "U3", b="Other")
    await node.dispatched()
    assert await query(node, "a") == [b"one"]
    assert await query(node, "b") == [b"one", b"two"], "oldest first"
    assert await query(node, "b", topic="Other") == [b"other"]
    assert await query(node, "b", maxNum=1) == [b"two"], "the newest"
    assert await query(node, "U2") == await query(node, "U2", unique=True, maxNum=0) == [b"two"]
    for nothing in ("c", "", "a b"):
        assert await query(node, nothing) == []
    assert await query(node, "b", topic="None") == []
    assert await query(node, "b", maxNum=-5) == []
    assert await query(node, "b", endTimestamp=1) == []
    assert await query(node, "b", beginTimestamp=1 << 62) == []


async def test_without_free_descriptors_the_answer_is_to_try_later(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request ended the broker: reading the log may have to open a file."""
    sent = await send(node, b"one", "a", "U1")
    await node.dispatched()
    message_id = sent.ext_fields["msgId"]
    group = {"consumerGroup": "g", "clientId": "c"}
    asked: list[tuple[int, dict[str, Any]]] = [
        (12, {"topic": "TT", "key": "a", **ALWAYS}),
        (33, {"offset": decode_message_id(message_id)[2]}),
        (309, {"msgId": message_id, **group}),
        (36, {"offset": decode_message_id(message_id)[2], "group": "g", "delayLevel": 1}),
    ]

    async def read_all(*_: object) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(type(node.store.log), "read_all", read_all)
        for code, fields in asked:
            assert (await node.ask(code, **fields)).code == ResponseCode.SYSTEM_BUSY, code
    assert await query(node, "a") == [b"one"]


async def test_hash_collision_is_not_returned(node: Node) -> None:
    """Aa and BB have the same Java hash, and so have TT#Aa and TT#BB."""
    await send(node, b"one", "Aa", "U1")
    await node.dispatched()
    assert await query(node, "Aa") == [b"one"]
    assert await query(node, "BB") == []


async def test_oldest_messages_are_omitted_if_the_answer_is_full(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_queries, "ANSWER_SIZE_MAX", 2500)
    for number in range(4):
        await send(node, b"%d" % number * 1000, "k", f"U{number}")
    await node.dispatched()
    assert await query(node, "k") == [b"2" * 1000, b"3" * 1000]
    monkeypatch.setattr(message_queries, "ANSWER_SIZE_MAX", 10)
    assert await query(node, "k") == [b"3" * 1000], "one always"


async def test_messages_per_key_are_bounded(node: Node) -> None:
    for number in range(70):
        await send(node, b"%d" % number, "k", f"U{number}")
    await node.dispatched()
    assert await query(node, "k", maxNum=1000) == [b"%d" % number for number in range(6, 70)]


async def test_by_offset(node: Node) -> None:
    await node.send(b"first")
    sent = await node.send(b"second")
    offset = decode_message_id(sent.ext_fields["msgId"])[2]
    for topic in (None, "", "TT"):
        [record] = node.records(await node.ask(33, offset=offset, topic=topic))
        assert (record.body, record.physical_offset) == (b"second", offset)
    end = node.store.log.max_offset.value
    for wrong in (1, offset - 1, offset + 1, end - 1, end, end + 1, -1, 1 << 62, -(1 << 62)):
        answer = await node.ask(33, offset=wrong)
        assert answer.code == 1
        assert answer.remark == f"can not find message by the offset, {wrong}"
        assert not answer.body
    other = await node.ask(33, offset=offset, topic="Other")
    assert (other.code, bytes(other.body)) == (1, b"")


async def test_in_an_empty_log(node: Node) -> None:
    assert (await node.ask(33, offset=0)).code == 1
    assert await query(node, "k") == []


async def test_offset_inside_a_record_is_refused(node: Node) -> None:
    """A forged record inside a body does not have the offset at which it lies."""
    await node.send(b"one")
    raw = bytes((await node.ask(33, offset=0)).body)
    await node.send(raw)
    rest = await node.store.log.read_all(len(raw), node.store.log.max_offset.value - len(raw))
    assert raw in rest
    at = rest.find(raw) + len(raw)
    assert (await node.ask(33, offset=at)).code == 1


async def test_what_is_read_by_an_offset_is_limited(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send what looks like the head of a record, as large as its segment, and ask for it."""
    await node.send()
    await node.dispatched()
    at = node.store.log.max_offset.value + 88
    size = 500_000
    await node.send(struct.pack(">i8xi4xqq", size, 0, 0, at) + bytes(100))
    await node.send(bytes(size))
    monkeypatch.setattr(message_queries, "RECORD_SIZE_MAX", size - 1)
    sizes: list[int] = []
    read_all = node.store.log.read_all

    async def counted(offset: int, size: int, *more: Any) -> bytes:
        sizes.append(size)
        return await read_all(offset, size, *more)

    monkeypatch.setattr(node.store.log, "read_all", counted)
    assert (await node.ask(33, offset=at)).code == 1
    assert max(sizes) < 1000


async def test_forged_record_in_a_body_shows_nothing_of_other_topics(autojump_clock: MockClock, tmp_path: Path) -> None:
    """A body that ends like the start of a record made the records after it readable, as the properties of that."""
    async with guarded_broker(tmp_path) as node:
        await alice(node).ask(310, b"x", **{**SEND_V2, "i": ""})
        inside = node.store.log.max_offset.value + 88  # behind the fixed fields and the body's length
        properties = bytes(1000)
        forged = encode_record(
            Message("TT", 0, b"", properties),
            queue_offset=1,
            physical_offset=inside,
            store_timestamp_ms=1,
            store_host=encode_host(HOST, 1),
        ).removesuffix(properties)
        sent = await alice(node).ask(310, forged, **{**SEND_V2, "i": ""})
        await admin(node).ask(310, b"secret" * 200, **{**SEND_V2, "b": "Other", "i": ""})
        assert bytes(await node.store.log.read_all(inside, len(forged))) == forged, "it is where it says"
        answer = await alice(node).ask(33, offset=inside, topic="TT")
        assert b"secret" not in bytes(answer.body)
        assert (answer.code, answer.remark) == (1, f"can not find message by the offset, {inside} in topic TT")
        own = await alice(node).ask(33, offset=decode_message_id(sent.ext_fields["msgId"])[2], topic="TT")
        assert [record.body for record in node.records(own)] == [forged]
