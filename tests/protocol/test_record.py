"""Commitlog records against the released broker's bytes and whole recorded commitlogs."""

import mmap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.protocol.codes import SysFlag
from ha.protocol.properties import DELAY_LEVELS_MS, decode_properties, java_hash, tags_code
from ha.protocol.record import (
    FILLER_MAGIC,
    MAGIC_V1,
    Filler,
    Message,
    MessageRecord,
    RecordHead,
    Unparsable,
    decode_host,
    decode_record,
    decode_records,
    encode_host,
    scan_record,
    split_records,
    verify_record,
)
from ha.protocol.record_encoding import encode_filler, encode_record, record_size

from .golden import STORES, commitlog, manifest

STORE_HOST = encode_host("10.0.0.1", 10911)
BORN_MS = 1700000000000


def message(topic: str, queue_id: int, body: bytes, properties: bytes, born_host: str = "10.0.0.9") -> Message:
    return Message(
        topic, queue_id, body, properties, flag=3, born_timestamp_ms=BORN_MS, born_host=encode_host(born_host, 4321)
    )


M1 = message("T1", 0, b"hello", b"UNIQ_KEY\x01ABC\x02TAGS\x01TagA\x02KEYS\x01k0 k1\x02")
M2 = message("T1", 0, b"world!", b"WAIT\x01false", "fd00::9")
M3 = message("%RETRY%" + "x" * 130, 2, b"v2", b"")

R1 = bytes.fromhex(
    "00000084 daa320a7 3610a686 00000000 00000003 0000000000000000 0000000000000000 00000000 0000018bcfe56800"
    "0a000009000010e1 000001a1fd8ffea4 0a00000100002a9f 00000000 0000000000000000 00000005 68656c6c6f 02 5431 0022"
    "554e49515f4b45590141424302544147530154616741024b455953016b30206b3102"
)
R2 = bytes.fromhex(
    "00000079 daa320a7 718498e8 00000000 00000003 0000000000000001 0000000000000084 00000010 0000018bcfe56800"
    "fd000000000000000000000000000009000010e1 000001a1fd8ffef3 0a00000100002a9f 00000000 0000000000000000 00000006"
    "776f726c6421 02 5431 000a 574149540166616c7365"
)
R3 = bytes.fromhex(
    "000000e7 daa320ab 706b9d0f 00000002 00000003 0000000000000000 00000000000000fd 00000000 0000018bcfe56800"
    "0a000009000010e1 000001a1fd8ffef6 0a00000100002a9f 00000000 0000000000000000 00000002 7632 0089 25524554525925"
    + "78" * 130
    + "0000"
)
VECTORS = [
    pytest.param(M1, 0, 0, 0x1A1FD8FFEA4, R1, id="R1 V1"),
    pytest.param(M2, 1, 132, 0x1A1FD8FFEF3, R2, id="R2 IPv6 born host"),
    pytest.param(M3, 0, 253, 0x1A1FD8FFEF6, R3, id="R3 V2"),
]


@pytest.mark.parametrize(("put", "queue_offset", "physical_offset", "store_timestamp_ms", "expected"), VECTORS)
def test_released_broker_wrote_the_same_record(
    put: Message, queue_offset: int, physical_offset: int, store_timestamp_ms: int, expected: bytes
) -> None:
    encoded = encode_record(
        put,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        store_timestamp_ms=store_timestamp_ms,
        store_host=STORE_HOST,
    )
    assert encoded == expected
    assert record_size(put) == len(expected)

    record = decode_record(expected)
    assert record.to_message() == Message(
        put.topic,
        put.queue_id,
        put.body,
        put.properties,
        flag=3,
        sys_flag=record.sys_flag,
        born_timestamp_ms=BORN_MS,
        born_host=put.born_host,
    )
    assert (record.queue_offset, record.physical_offset) == (queue_offset, physical_offset)
    assert (record.store_timestamp_ms, record.store_host) == (store_timestamp_ms, ("10.0.0.1", 10911))
    assert verify_record(expected, 0, len(expected)) == len(expected)


def test_versions_and_hosts_of_the_vectors() -> None:
    first, second, third = decode_records(R1 + R2 + R3)
    assert (first.version, second.version, third.version) == (1, 1, 2)
    assert (first.sys_flag, second.sys_flag) == (0, SysFlag.BORNHOST_V6)
    assert (first.born_host, second.born_host) == (("10.0.0.9", 4321), ("fd00::9", 4321))
    assert first.body_crc == 907060870
    assert first.property_map() == {"UNIQ_KEY": "ABC", "TAGS": "TagA", "KEYS": "k0 k1"}


@pytest.mark.parametrize(
    ("put", "queue_offset", "physical_offset", "store_timestamp_ms", "size", "tail"),
    [
        pytest.param(M1, 0, 0, 0x1A1FD901114, 152, "6b30206b31025f5f43524333322301 3930343234363935373102", id="R1"),
        pytest.param(
            M2,
            1,
            152,
            0x1A1FD901156,
            142,
            "001f574149540166616c7365025f5f435243333223013238373439383139393102",
            id="R2",
        ),
        pytest.param(M3, 0, 294, 0x1A1FD90115C, 251, "00145f5f435243333223013138323232343135393102", id="R3"),
    ],
)
def test_property_crc_as_the_released_broker_appends_it(
    put: Message, queue_offset: int, physical_offset: int, store_timestamp_ms: int, size: int, tail: str
) -> None:
    encoded = encode_record(
        put,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        store_timestamp_ms=store_timestamp_ms,
        store_host=STORE_HOST,
        append_property_crc=True,
    )
    assert len(encoded) == size == record_size(put, append_property_crc=True)
    assert encoded.endswith(bytes.fromhex(tail))
    assert decode_record(encoded).total_size == size


def described(record: MessageRecord, properties_end_with_separator: bool) -> dict[str, object]:
    return {
        "size": record.total_size,
        "magic": "DAA320A7" if record.version == 1 else "DAA320AB",
        "bodyCRC": record.body_crc,
        "queueId": record.queue_id,
        "flag": record.flag,
        "queueOffset": record.queue_offset,
        "physicalOffset": record.physical_offset,
        "sysFlag": record.sys_flag,
        "bornTimestamp": record.born_timestamp_ms,
        "bornHost": "{}:{}".format(*record.born_host),
        "storeTimestamp": record.store_timestamp_ms,
        "storeHost": "{}:{}".format(*record.store_host),
        "reconsumeTimes": record.reconsume_times,
        "preparedTransactionOffset": record.prepared_transaction_offset,
        "bodyLength": len(record.body),
        "topic": record.topic,
        "propertiesLength": len(record.properties),
        "propertiesEndWithSeparator": properties_end_with_separator,
        "properties": record.property_map(),
    }


@pytest.mark.parametrize("version", STORES)
def test_recorded_commitlog_decodes_to_its_manifest_and_encodes_to_its_bytes(version: str) -> None:
    segments = commitlog(version)
    for expected in manifest(version)["commitlog"]:
        segment = segments[expected["file"]]
        position = expected["offset"] - int(expected["file"])
        head = scan_record(segment, position, len(segment))
        if expected["kind"] == "blank":
            assert head == verify_record(segment, position, len(segment)) == Filler(expected["size"])
            assert segment[position : position + 8] == encode_filler(expected["fileRest"])
            continue
        record = decode_record(segment, position)
        facts = described(record, record.properties.endswith(b"\x02"))
        assert facts == {name: expected[name] for name in facts}

        encoded = encode_record(
            record.to_message(),
            queue_offset=record.queue_offset,
            physical_offset=record.physical_offset,
            store_timestamp_ms=record.store_timestamp_ms,
            store_host=encode_host(*record.store_host),
        )
        assert encoded == segment[position : position + record.total_size]
        assert verify_record(segment, position, len(segment)) == record.total_size


@pytest.mark.parametrize("version", STORES)
def test_scan_yields_what_the_recorded_consume_queues_hold(version: str) -> None:
    found: list[list[Any]] = []
    for name, segment in commitlog(version).items():
        position = 0
        while isinstance(head := scan_record(segment, position, len(segment)), RecordHead):
            if head.sys_flag & SysFlag.TRANSACTION_MASK not in (
                SysFlag.TRANSACTION_PREPARED,
                SysFlag.TRANSACTION_ROLLBACK,
            ):
                entry = [head.topic, head.queue_id, head.queue_offset, head.physical_offset, head.total_size]
                found.append([*entry, head.tags_code])
            assert head.physical_offset == int(name) + position
            position += head.total_size
    assert sorted(found) == sorted(manifest(version)["consumequeue"])
    assert any(entry[0] == "SCHEDULE_TOPIC_XXXX" and entry[5] > 1_700_000_000_000 for entry in found)


def test_scan_reads_tags_keys_and_unique_key() -> None:
    head = scan_record(R1, 0, len(R1))
    assert head == RecordHead(132, "T1", 0, 0, 0, 0, 0x1A1FD8FFEA4, 2598919, "TagA", ["k0", "k1"], "ABC")
    assert isinstance(second := scan_record(R2, 0, len(R2)), RecordHead)
    assert (second.tags_code, second.keys, second.unique_key, second.store_timestamp_ms) == (0, [], None, 0x1A1FD8FFEF3)
    assert isinstance(third := scan_record(R3, 0, len(R3)), RecordHead)
    assert third.topic == "%RETRY%" + "x" * 130


@pytest.mark.parametrize("record", [R1, R2, R3])
def test_scan_of_a_truncated_record_needs_more_bytes(record: bytes) -> None:
    for cut in range(len(record)):
        assert scan_record(record, 0, cut) is None
        with pytest.raises(RemoteProtocolError):
            verify_record(record, 0, cut)
        with pytest.raises(RemoteProtocolError):
            decode_record(record[:cut])


@pytest.mark.parametrize("record", [R1, R2, R3])
def test_records_are_found_between_other_bytes(record: bytes) -> None:
    padded = b"\xff" * 7 + record + b"\xee" * 9
    assert decode_record(padded, 7) == decode_record(record)
    assert scan_record(padded, 7, len(padded)) == scan_record(record, 0, len(record))


def test_scheduled_record_has_its_due_time_for_tags_code() -> None:
    def code(properties: bytes, **options: object) -> int:
        encoded = encode_record(
            Message("SCHEDULE_TOPIC_XXXX", 2, b"", properties),
            queue_offset=0,
            physical_offset=0,
            store_timestamp_ms=1000,
            store_host=STORE_HOST,
        )
        head = scan_record(encoded, 0, len(encoded), **options)  # type: ignore[arg-type]
        assert isinstance(head, RecordHead)
        return head.tags_code

    assert code(b"DELAY\x013\x02") == 1000 + 10_000
    assert code(b"DELAY\x0199\x02") == 1000 + 2 * 3_600_000 == 1000 + DELAY_LEVELS_MS[-1]
    assert code(b"DELAY\x012\x02", delay_levels_ms=(7, 8)) == 1008
    assert code(b"TAGS\x01TagA\x02") == 2598919
    assert code(b"DELAY\x01x\x02") == 0


@pytest.mark.parametrize(
    ("position", "value", "claimed"),
    [
        pytest.param(4, b"\0\0\0\0", 132, id="magic"),
        pytest.param(0, b"\0\0\0\x5a", 0, id="too small"),
        pytest.param(84, b"\xff\xff\xff\xff", 132, id="negative body size"),
        pytest.param(84, b"\0\0\x10\0", 132, id="body beyond the record"),
        pytest.param(93, b"\x7f", 132, id="topic beyond the record"),
        pytest.param(93, b"\x80", 132, id="negative topic size"),
        pytest.param(96, b"\0\x21", 132, id="properties too short"),
        pytest.param(96, b"\x80\0", 132, id="negative properties size"),
        pytest.param(36, b"\0\0\0\x30", 132, id="host widths"),
    ],
)
def test_damaged_records_are_unparsable_and_fail_verification(position: int, value: bytes, claimed: int) -> None:
    damaged = bytearray(R1)
    damaged[position : position + len(value)] = value
    head = scan_record(damaged, 0, len(damaged))
    assert isinstance(head, Unparsable)
    assert head.total_size == claimed
    with pytest.raises(RemoteProtocolError):
        verify_record(damaged, 0, len(damaged))


def test_wrong_body_crc_is_found_by_verification_and_decoding_only() -> None:
    damaged = bytearray(R1)
    damaged[88] ^= 1
    assert isinstance(scan_record(damaged, 0, len(damaged)), RecordHead)
    assert decode_record(damaged, verify_crc=False).body == b"iello"
    assert verify_record(damaged, 0, len(damaged), verify_crc=False) == 132
    with pytest.raises(RemoteProtocolError, match="CRC"):
        decode_record(damaged)
    with pytest.raises(RemoteProtocolError, match="CRC"):
        verify_record(damaged, 0, len(damaged))


def test_record_that_is_shorter_than_its_head_is_unparsable() -> None:
    smallest = encode_record(
        Message("", 0, b""), queue_offset=0, physical_offset=0, store_timestamp_ms=0, store_host=STORE_HOST
    )
    wide = smallest[:39] + b"\x30" + smallest[40:]
    assert isinstance(scan_record(wide, 0, len(wide)), Unparsable)
    with pytest.raises(RemoteProtocolError, match="truncated in its head"):
        verify_record(wide, 0, len(wide))


def test_records_are_read_from_a_mapping() -> None:
    with mmap.mmap(-1, 4096) as mapping:
        mapping[100 : 100 + len(R1)] = R1
        assert decode_record(mapping, 100) == decode_record(R1)
        assert verify_record(mapping, 100, 4096) == 132
        assert scan_record(mapping, 100, 4096) == scan_record(R1, 0, 132)
        # closing the mapping would raise BufferError if a view of it had been left behind


def test_oversized_topic_or_properties_are_local_errors() -> None:
    places: dict[str, Any] = {"queue_offset": 0, "physical_offset": 0, "store_timestamp_ms": 0}
    for put in (Message("t", 0, b"", bytes(32768)), Message("t" * 32768, 0, b"")):
        with pytest.raises(LocalProtocolError):
            encode_record(put, store_host=STORE_HOST, **places)
    with pytest.raises(LocalProtocolError):
        encode_filler(7)


def test_filler_holds_its_size() -> None:
    assert encode_filler(74) == bytes.fromhex("0000004a cbd43194")
    assert FILLER_MAGIC == -875286124


hosts = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
ports = st.integers(0, 65535)
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
messages = st.builds(
    Message,
    topic=st.text(st.characters(codec="utf-8"), max_size=60),
    queue_id=int32,
    body=st.binary(max_size=300),
    properties=st.binary(max_size=100),
    flag=int32,
    sys_flag=st.integers(0, 0xFFF).map(lambda flags: flags & ~0x30),
    born_timestamp_ms=int64,
    born_host=st.builds(encode_host, hosts, ports),
    reconsume_times=int32,
    prepared_transaction_offset=int64,
)


@given(
    put=messages, queue_offset=int64, physical_offset=int64, store_ms=int64, host=hosts, port=ports, crc=st.booleans()
)
def test_any_message_round_trips(
    put: Message, queue_offset: int, physical_offset: int, store_ms: int, host: str, port: int, crc: bool
) -> None:
    store_host = encode_host(host, port)
    encoded = encode_record(
        put,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        store_timestamp_ms=store_ms,
        store_host=store_host,
        append_property_crc=crc,
    )
    assert len(encoded) == record_size(put, store_host_size=len(store_host), append_property_crc=crc)
    record = decode_record(encoded)
    again = record.to_message()
    assert record.properties.startswith(put.properties)
    again.properties = put.properties if crc else record.properties
    again.sys_flag &= ~0x30
    assert again == put
    assert (record.queue_offset, record.physical_offset, record.store_timestamp_ms) == (
        queue_offset,
        physical_offset,
        store_ms,
    )
    assert encode_host(*record.store_host) == store_host
    head = scan_record(encoded, 0, len(encoded))
    assert isinstance(head, RecordHead)
    properties = decode_properties(record.properties)
    assert head.unique_key == properties.get("UNIQ_KEY")
    assert head.topic == put.topic
    if put.topic != "SCHEDULE_TOPIC_XXXX":
        assert head.tags_code == tags_code(properties.get("TAGS"))


@given(st.lists(st.sampled_from([R1, R2, R3]), max_size=4), st.booleans(), st.data())
def test_split_records_equal_decoded_records(records: list[bytes], verify_crc: bool, data: st.DataObject) -> None:
    raw = bytearray(b"".join(records))
    for _ in range(data.draw(st.integers(0, 2)) if raw else 0):
        position = data.draw(st.one_of(st.integers(0, min(len(raw), 100) - 1), st.integers(0, len(raw) - 1)))
        raw[position] = data.draw(st.integers(0, 255))
    body = bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    refused = None
    try:
        decoded = decode_records(body, verify_crc=verify_crc)
    except RemoteProtocolError as error:
        refused = str(error)
    if refused is not None:
        with pytest.raises(RemoteProtocolError) as caught:
            split_records(body, verify_crc=verify_crc)
        assert str(caught.value) == refused
        return
    parts = split_records(body, verify_crc=verify_crc)
    assert [(content, properties) for _, content, properties in parts] == [(r.body, r.properties) for r in decoded]
    for (fields, _, _), record in zip(parts, decoded, strict=True):
        size, magic, crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born, born_host, *rest = fields
        assert (size, magic == MAGIC_V1, crc) == (record.total_size, record.version == 1, record.body_crc)
        assert (queue_id, flag, queue_offset) == (record.queue_id, record.flag, record.queue_offset)
        assert (physical_offset, sys_flag, born) == (record.physical_offset, record.sys_flag, record.born_timestamp_ms)
        stored, store_host, times, prepared, body_size = rest
        assert (decode_host(born_host), decode_host(store_host)) == (record.born_host, record.store_host)
        assert (stored, times, prepared) == (
            record.store_timestamp_ms,
            record.reconsume_times,
            record.prepared_transaction_offset,
        )
        assert body_size == len(record.body)


def test_hosts_are_address_and_port() -> None:
    assert encode_host("10.0.0.1", 10911) == bytes.fromhex("0a00000100002a9f")
    assert decode_host(bytes.fromhex("fd000000000000000000000000000009000010e1")) == ("fd00::9", 4321)
    with pytest.raises(ValueError, match="localhost"):
        encode_host("localhost", 1)


def test_tag_hash_is_javas() -> None:
    assert java_hash("TagA") == 2598919
