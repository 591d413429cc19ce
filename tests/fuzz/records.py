"""Commitlog records, batch bodies, property strings and message ids."""

from typing import Any
from zlib import crc32

from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.protocol.batch import decode_batch, encode_batch
from ha.protocol.codes import SysFlag
from ha.protocol.compiled import pure
from ha.protocol.message_id import decode_message_id, encode_message_id
from ha.protocol.properties import DELAY_LEVELS_MS, decode_properties, encode_properties, find_property, java_hash
from ha.protocol.recall_handle import RecallHandle, decode_recall_handle, encode_recall_handle
from ha.protocol.record import (
    CRC_MASK,
    MAGIC_V1,
    MAGIC_V2,
    TOPIC_SIZE_V1_MAX,
    Filler,
    Message,
    MessageRecord,
    RecordHead,
    decode_record,
    decode_records,
    encode_host,
    scan_record,
    verify_record,
)
from ha.protocol.record_digest import digest_records
from ha.protocol.record_encoding import encode_record
from tests.fuzz.harness import Harness
from tests.protocol.golden import STORES, commitlog
from tests.protocol.twins import outcome

V4 = encode_host("10.1.2.3", 10911)
V6 = encode_host("2001:db8::1", 4321)
HEAD_SIZES = {0: 88, 0x10: 100, 0x20: 100, 0x30: 112}
NAMES = (b"TAGS", b"KEYS", b"UNIQ_KEY", b"WAIT", b"DELAY", b"a")


def records(data: bytes) -> None:
    """Raw bytes at the start of a buffer: all functions that read records agree on them."""
    check_record(data)
    try:
        found = decode_records(data)
    except RemoteProtocolError:
        return
    assert sum(record.total_size for record in found) == len(data)


def record_fields(data: bytes) -> None:
    """The same with the right total size, magic and body CRC, to reach the other checks."""
    if len(data) < 90:
        return
    raw = bytearray(data[1:])
    raw[0:4] = len(raw).to_bytes(4, "big")
    raw[4:8] = (MAGIC_V2 if data[0] & 1 else MAGIC_V1).to_bytes(4, "big", signed=True)
    body_at = HEAD_SIZES[raw[39] & 0x30]
    body_size = int.from_bytes(raw[body_at - 4 : body_at], "big")
    if data[0] & 2 and body_at + body_size < len(raw):
        raw[8:12] = (crc32(raw[body_at : body_at + body_size]) & CRC_MASK).to_bytes(4, "big")
    check_record(bytes(raw))


def check_record(buffer: bytes) -> MessageRecord | None:
    """The functions that read the start of `buffer` must not contradict each other."""
    record: MessageRecord | None = None
    broken: MessageRecord | None = None
    try:
        broken = decode_record(buffer, verify_crc=False)
        record = decode_record(buffer)
    except RemoteProtocolError:
        pass
    try:
        size = verify_record(buffer, 0, len(buffer))
        assert isinstance(size, Filler) or (record is not None and size == record.total_size)
    except RemoteProtocolError:
        assert record is None
    head = scan_record(buffer, 0, len(buffer))
    try:
        verified: int | Filler | None = verify_record(buffer, 0, len(buffer), verify_crc=False)
    except RemoteProtocolError:
        verified = None
    assert verified == (head if isinstance(head, Filler) else head.total_size if isinstance(head, RecordHead) else None)
    if broken is None:
        assert not isinstance(head, RecordHead)
        return None
    assert isinstance(head, RecordHead), head
    assert (head.topic, head.queue_id, head.queue_offset) == (broken.topic, broken.queue_id, broken.queue_offset)
    assert (head.physical_offset, head.total_size) == (broken.physical_offset, broken.total_size)
    assert (head.sys_flag, head.store_timestamp_ms) == (broken.sys_flag, broken.store_timestamp_ms)
    check_digest(buffer, head)
    known = broken.property_map()
    assert (head.tags, head.unique_key) == (known.get("TAGS"), known.get("UNIQ_KEY"))
    if record is not None:
        check_round_trip(buffer, record)
    return record


def check_digest(buffer: bytes, head: RecordHead) -> None:
    """Both twins of dispatch return the same as the reader of a single record."""
    options: dict[str, Any] = {"delay_levels_ms": DELAY_LEVELS_MS, "with_keys": True, "with_tags": True}
    places = head.physical_offset, head.physical_offset + len(buffer)
    digests = [
        digest(buffer, *places, count_max=2, bytes_max=len(buffer), **options)
        for digest in (digest_records, pure(digest_records))
    ]
    assert digests[0] == digests[1]
    assert digests[0].count >= 1
    assert digests[0].first_offset == head.physical_offset


def check_round_trip(buffer: bytes, record: MessageRecord) -> None:
    """Encoding the message gives the bytes of the record, unless halog would not write it in this form."""
    try:
        raw = encode_record(
            record.to_message(),
            queue_offset=record.queue_offset,
            physical_offset=record.physical_offset,
            store_timestamp_ms=record.store_timestamp_ms,
            store_host=encode_host(*record.store_host),
        )
    except LocalProtocolError:
        assert "\ufffd" in record.topic
        return
    is_v2 = len(record.topic.encode()) > TOPIC_SIZE_V1_MAX
    if "\ufffd" not in record.topic and is_v2 == (record.version == 2):
        assert raw == buffer[: record.total_size]


def batch(data: bytes) -> None:
    """A batch body: both twins decode the same, and encoding the entries gives an equal body of the same size."""
    compiled = outcome(decode_batch, data)
    entries = outcome(pure(decode_batch), data)  # whose coverage the fuzzer sees
    assert compiled == entries
    assert outcome(decode_batch, memoryview(data), count_max=2) == outcome(pure(decode_batch), data, count_max=2)
    if isinstance(entries, tuple):  # refused
        return
    assert entries
    raw = encode_batch(entries)
    assert len(raw) == len(data)
    assert decode_batch(raw) == entries


def properties(data: bytes) -> None:
    """Any bytes are a property string; one property found alone is the one found among all."""
    known = decode_properties(data)
    for name in NAMES:
        assert find_property(data, name) == known.get(name.decode()), name
    for value in known.values():
        assert -(1 << 31) <= java_hash(value) < 1 << 31
    try:
        raw = encode_properties(known)
    except LocalProtocolError:
        return
    assert decode_properties(raw) == known


def message_id(data: bytes) -> None:
    """Any text: an id or the one error; an id is the same written again."""
    text = str(data, "utf-8", "replace")
    try:
        host, port, offset = decode_message_id(text)
    except RemoteProtocolError:
        return
    assert encode_message_id(encode_host(host, port), offset) == text.upper()


def recall_handle(data: bytes) -> None:
    """Any text: a handle or the one error; a handle is the same written and read again."""
    try:
        handle = decode_recall_handle(str(data, "utf-8", "replace"))
    except RemoteProtocolError:
        return
    assert -(10**18) < handle.timestamp_ms < 10**18
    assert decode_recall_handle(encode_recall_handle(handle)) == handle


def example_records() -> list[bytes]:
    """One record of each kind."""
    messages = [
        (Message("T", 0, b"hello", b"TAGS\x01a\x02KEYS\x01k1 k2\x02UNIQ_KEY\x010A\x02"), V4),
        (Message("größe", 3, b"", b"a\x01b", flag=-1, sys_flag=SysFlag.COMPRESSED), V6),
        (Message("SCHEDULE_TOPIC_XXXX", 2, b"later", b"DELAY\x013\x02", born_host=V6), V4),
        (Message("%RETRY%" + "g" * 150, 0, b"x", born_host=V6), V6),
    ]
    return [
        encode_record(m, queue_offset=n, physical_offset=n, store_timestamp_ms=1_700_000_000_000, store_host=host)
        for n, (m, host) in enumerate(messages)
    ]


def record_seeds() -> list[bytes]:
    """Those, two in a row, and the first ones of the golden stores."""
    examples = example_records()
    golden = []
    for version in STORES:
        content = next(iter(commitlog(version).values()))
        position = 0
        for _ in range(6):
            size = int.from_bytes(content[position : position + 4], "big")
            golden.append(content[position : position + size])
            position += size
    return [*examples, b"".join(examples), *golden, (20).to_bytes(4, "big") + b"\xcb\xd4\x31\x94" + bytes(12)]


def batch_seeds() -> list[bytes]:
    """One, two, one with everything empty, and some with sizes that can't be."""
    head = (22).to_bytes(4, "big") + bytes(12)
    return [
        *(word * 8 for word in (b"\x80\0\0\0", b"\x7f\xff\xff\xff")),
        *(head + size + bytes(2) for size in (b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff")),
        head + bytes(4) + b"\xff\xff" + bytes(40),
        encode_batch([(0, b"a", b"TAGS\x01x\x02")]),
        encode_batch([(1, b"a", b""), (-1, b"bb" * 20, b"K\x01v")]),
        encode_batch([(0, b"", b"")]),
    ]


def property_seeds() -> list[bytes]:
    """Regular and irregular ones."""
    return [
        encode_properties({"TAGS": "a", "KEYS": "k1 k2", "UNIQ_KEY": "0A", "größe": "数"}),
        b"TAGS\x01a\x02TAGS\x01\x02TAGS\x01b",
        b"\x02\x02\x01\x02KEYS\x01\x01\x02XTAGS\x01y\x02",
        b"a\xff\x01\xfe\x02" * 5,
    ]


WORDS = (
    b"\xda\xa3\x20\xa7",
    b"\xda\xa3\x20\xab",
    b"\xcb\xd4\x31\x94",
    b"SCHEDULE_TOPIC_XXXX",
    b"\x00\x00\x00\x10",
    b"\x00\x00\x00\x20",
    b"\x00\x00\x00\x30",
    b"\x7f\xff\xff\xff",
    b"\x7f\xff",
    b"\xff\xff",
    *(name + b"\x01" for name in NAMES),
    b"\x02TAGS\x01",
    b"DELAY\x01-1\x02",
    b"DELAY\x01\xd9\xa3\x02",
)

HARNESSES = {
    "records": Harness(run=records, seeds=record_seeds, words=WORDS),
    "record_fields": Harness(
        run=record_fields, seeds=lambda: [bytes([3]) + raw for raw in record_seeds()], words=WORDS
    ),
    "batch": Harness(run=batch, seeds=batch_seeds, words=WORDS),
    "properties": Harness(run=properties, seeds=property_seeds, words=WORDS),
    "message_id": Harness(
        run=message_id,
        seeds=lambda: [encode_message_id(host, 12345).encode() for host in (V4, V6)] + ["٣".encode() * 32],
        size_max=128,
    ),
    "recall_handle": Harness(
        run=recall_handle,
        seeds=lambda: [encode_recall_handle(RecallHandle("T", "b", 1, "k")).encode(), b"djEgVCBiIHggaw"],
        size_max=256,
    ),
}
