"""Message ids, and the layouts of derived store files."""

import struct

import pytest

from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.protocol.codes import PutStatus, ResponseCode
from ha.protocol.message_id import (
    UniqueIdGenerator,
    decode_message_id,
    encode_message_id,
    encode_message_ids,
    unique_id_properties,
)
from ha.protocol.record import encode_host
from ha.protocol.store_files import (
    CHECKPOINT_SIZE,
    ENTRY,
    ENTRY_FILL,
    INDEX_ENTRY,
    Checkpoint,
    IndexHeader,
    index_entry_position,
    index_file_size,
    index_key,
    index_key_hash,
    index_slot_position,
    segment_name,
    segment_start,
)

from .golden import STORES, manifest, store_files


def test_offset_message_id() -> None:
    message_id = encode_message_id(encode_host("10.0.0.1", 10911), 315)
    assert message_id == "0A00000100002A9F000000000000013B"
    assert decode_message_id(message_id) == ("10.0.0.1", 10911, 315)
    wide = encode_message_id(encode_host("fd00::9", 1), 2**40)
    assert len(wide) == 56
    assert decode_message_id(wide) == ("fd00::9", 1, 2**40)
    for host in ("10.0.0.1", "fd00::9"):
        store_host = encode_host(host, 10911)
        for offsets in ([0xABCDEF], [315, 0, 2**62]):
            ids = [encode_message_id(store_host, offset) for offset in offsets]
            assert encode_message_ids(store_host, offsets) == ",".join(ids)


@pytest.mark.parametrize("version", STORES)
def test_offset_message_ids_that_real_brokers_answered(version: str) -> None:
    singles = [sent for sent in manifest(version)["sent"] if sent["kind"] == "single"]
    records = {record.get("properties", {}).get("UNIQ_KEY"): record for record in manifest(version)["commitlog"]}
    assert len(singles) == 40
    for sent in singles:
        record = records[sent["msgId"]]
        host, port = record["storeHost"].split(":")
        assert encode_message_id(encode_host(host, int(port)), record["offset"]) == sent["offsetMsgId"]


def test_unique_id_of_the_released_client() -> None:
    start_ms = 1_000_000
    generator = UniqueIdGenerator(
        address=bytes.fromhex("fd000000000000000000000000000002"),
        process_id=0x5A14,
        process_hash=0x30946E09,
        wall_clock_ms=lambda: start_ms + 0x68FCBBF4,
        month_ms=lambda now_ms: (start_ms, start_ms + 31 * 86_400_000),
    )
    assert generator.next() == "FD0000000000000000000000000000025A1430946E0968FCBBF40000"
    assert generator.next() == "FD0000000000000000000000000000025A1430946E0968FCBBF40001"


def test_unique_ids_follow_the_month_and_wrap_their_counter() -> None:
    now_ms = 1500
    generator = UniqueIdGenerator(
        address=b"\x0a\0\0\1",
        process_id=1,
        process_hash=-1,
        wall_clock_ms=lambda: now_ms,
        month_ms=lambda at_ms: (at_ms // 1000 * 1000, at_ms // 1000 * 1000 + 1000),
    )
    assert generator.next() == "0A0000010001FFFFFFFF000001F40000"
    now_ms = 900
    assert generator.next()[20:] == "000000000001"
    now_ms = 2000
    assert generator.next()[20:] == "000000000002"
    now_ms = 2001
    ids = [generator.next() for _ in range(65536)]
    assert len(set(ids)) == 65536
    assert (ids[-4][-4:], ids[-3][-4:]) == ("FFFF", "0000")
    assert generator.next_many(0) == []
    assert [each[-4:] for each in generator.next_many(3)] == ["0003", "0004", "0005"]
    assert [each[-4:] for each in generator.next_many(65533)][-5:] == ["FFFE", "FFFF", "0000", "0001", "0002"]
    assert generator.next()[20:] == "000000010003"
    with pytest.raises(LocalProtocolError):
        UniqueIdGenerator(
            address=b"abc", process_id=1, process_hash=0, wall_clock_ms=lambda: 0, month_ms=lambda now: (0, 1)
        )


def test_unique_ids_as_properties() -> None:
    ids = ["0A000001", "FD000000"]
    assert unique_id_properties(ids) == [f"UNIQ_KEY\x01{each}\x02".encode() for each in ids]


def test_segment_names() -> None:
    assert segment_name(1073741824) == "00000000001073741824"
    assert segment_start("00000000001073741824") == 1073741824
    for name in ("1073741824", "0000000000107374182x", "00000000001073741824.bak", "٠" * 20, ".keep"):
        assert segment_start(name) is None


def test_consume_queue_entries_of_the_specification() -> None:
    assert ENTRY.pack(0, 132, 2598919) + ENTRY.pack(132, 121, 0) == bytes.fromhex(
        "0000000000000000 00000084 000000000027a807 0000000000000084 00000079 0000000000000000"
    )
    assert bytes.fromhex("0000000000000000 7fffffff 0000000000000000") == ENTRY_FILL


@pytest.mark.parametrize("version", STORES)
def test_consume_queues_of_real_brokers(version: str) -> None:
    files = store_files(version)
    for topic, queue_id, index, *entry in manifest(version)["consumequeue"]:
        start, position = divmod(index * ENTRY.size, 200)
        raw = files[f"consumequeue/{topic}/{queue_id}/{segment_name(start * 200)}"]
        assert list(ENTRY.unpack_from(raw, position)) == entry


def test_index_bytes_of_the_specification() -> None:
    """Index file with 5 slots after record R1, whose keys are ABC, k0 and k1."""
    stored_ms, slots, keys = 0x1A1FD8FFEA4, 5, ["ABC", "k0", "k1"]
    header = IndexHeader(stored_ms, stored_ms, 0, 0, len(keys), 1 + len(keys))
    raw = bytearray(index_file_size(slots, 4))
    raw[:40] = header.pack()
    for number, key in enumerate(keys, 1):
        key_hash = index_key_hash(index_key("T1", key))
        struct.pack_into(">i", raw, index_slot_position(key_hash % slots), number)
        INDEX_ENTRY.pack_into(raw, index_entry_position(slots, number), key_hash, 0, 0, 0)
    assert raw == bytes.fromhex(
        "000001a1fd8ffea4 000001a1fd8ffea4 0000000000000000 0000000000000000 00000003 00000004"
        "00000001 00000000 00000000 00000002 00000003" + "00" * 20 + "6de586e4 0000000000000000 00000000 00000000"
        "04b68d0b 0000000000000000 00000000 00000000 04b68d0c 0000000000000000 00000000 00000000"
    )
    assert IndexHeader.unpack(raw) == header


def test_index_hashes_are_never_negative() -> None:
    assert index_key_hash("topicA#k0") == 0x171CBA56
    assert 0x171CBA56 % 5 == 3
    assert index_key_hash("polygenelubricants") == 0


@pytest.mark.parametrize("version", STORES)
def test_index_and_checkpoint_of_real_brokers(version: str) -> None:
    files, expected = store_files(version), manifest(version)
    for name, fields in expected["indexHeaders"].items():
        header = IndexHeader.unpack(files[f"index/{name}"])
        assert header == IndexHeader(*fields.values())
        assert list(fields) == [
            "beginTimestamp",
            "endTimestamp",
            "beginPhyOffset",
            "endPhyOffset",
            "hashSlotCount",
            "indexCount",
        ]
        assert header.pack() == files[f"index/{name}"][:40]
        assert len(files[f"index/{name}"]) == index_file_size(1000, 4000)
    checkpoint = Checkpoint.unpack(files["checkpoint"])
    assert checkpoint.physic_msg_timestamp_ms == expected["checkpoint"]["physicMsgTimestamp"]
    assert checkpoint.logics_msg_timestamp_ms == expected["checkpoint"]["logicsMsgTimestamp"]
    assert checkpoint.index_msg_timestamp_ms == expected["checkpoint"]["indexMsgTimestamp"]
    assert checkpoint.logics_physical_offset == (expected["commitlog"][-1]["offset"] if version == "5.5.0" else 0)
    assert checkpoint.pack() == files["checkpoint"]


def test_checkpoint_of_the_specification() -> None:
    packed = Checkpoint(0x1A1FD8FFEF6, 0x1A1FD8FFEF6).pack()
    assert packed == bytes.fromhex("000001a1fd8ffef6 000001a1fd8ffef6") + bytes(CHECKPOINT_SIZE - 16)
    for raw in (b"", packed[:39]):
        with pytest.raises(RemoteProtocolError):
            Checkpoint.unpack(raw)
        with pytest.raises(RemoteProtocolError):
            IndexHeader.unpack(raw)


def test_statuses_answer_with_the_codes_of_the_specification() -> None:
    assert {status.name: (int(status.response_code), status.is_stored) for status in PutStatus} == {
        "PUT_OK": (0, True),
        "FLUSH_DISK_TIMEOUT": (10, True),
        "SLAVE_NOT_AVAILABLE": (11, True),
        "FLUSH_SLAVE_TIMEOUT": (12, True),
        "IN_SYNC_REPLICAS_NOT_ENOUGH": (1, False),
        "CREATE_MAPPED_FILE_FAILED": (1, False),
        "MESSAGE_ILLEGAL": (13, False),
        "PROPERTIES_SIZE_EXCEEDED": (13, False),
        "SERVICE_NOT_AVAILABLE": (14, False),
        "OS_PAGE_CACHE_BUSY": (2, False),
        "UNKNOWN_ERROR": (1, False),
    }
    assert {ResponseCode(status.response_code) for status in PutStatus if status.is_stored} == {0, 10, 11, 12}
