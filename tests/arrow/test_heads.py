"""Fields read as columns are those of the record parser."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ha.arrow.heads import Heads
from ha.protocol.record import RecordHead, decode_record, scan_record
from tests.fuzz.records import example_records
from tests.protocol.test_sound_records import LIMITS, record_of

EXAMPLES = example_records()


@given(
    chosen=st.lists(st.sampled_from(EXAMPLES), min_size=1, max_size=4),
    before=st.binary(max_size=3),
    behind=st.binary(max_size=130),
    damage=st.lists(st.tuples(st.one_of(st.integers(0, 120), st.integers(0, 800)), st.integers(0, 255)), max_size=3),
)
def test_columns_are_the_fields_of_the_record_parser(
    chosen: list[bytes], before: bytes, behind: bytes, damage: list[tuple[int, int]]
) -> None:
    raw = bytearray(before)
    positions = []
    for one in [*chosen, behind]:
        positions.append(len(raw))
        raw += one
    for place, value in damage:
        if place < len(raw):
            raw[place] = value
    heads = Heads(np.frombuffer(bytes(raw), np.uint8), np.array(positions, np.int64), None)
    for row, position in enumerate(positions):
        head = scan_record(raw, position, len(raw))
        assert heads.sound[row] == isinstance(head, RecordHead), head
        if not heads.sound[row]:
            continue
        record = decode_record(raw, position, verify_crc=False)
        assert (heads.total_size[row], heads.sys_flag[row]) == (record.total_size, record.sys_flag)
        for name, value in {
            "body_crc": record.body_crc,
            "queue_id": record.queue_id,
            "flag": record.flag,
            "queue_offset": record.queue_offset,
            "physical_offset": record.physical_offset,
            "born_ms": record.born_timestamp_ms,
            "store_ms": record.store_timestamp_ms,
            "reconsume_times": record.reconsume_times,
            "prepared_offset": record.prepared_transaction_offset,
            "body_size": len(record.body),
        }.items():
            assert heads.field(name)[row] == value, name
        body_at, properties_at = int(heads.body_at[row]), int(heads.properties_at[row])
        assert raw[body_at : body_at + len(record.body)] == record.body
        assert raw[properties_at : properties_at + int(heads.properties_size[row])] == record.properties
        topic_at = int(heads.topic_at[row])
        topic = raw[topic_at : topic_at + int(heads.topic_size[row])]
        assert str(topic, "utf-8", "replace") == record.topic


def test_columns_have_the_limits_of_the_record_parser() -> None:
    for magic, topic_size, properties_size, is_sound in LIMITS:
        record = record_of(magic, topic_size, properties_size, 0)
        assert Heads(np.frombuffer(record, np.uint8), np.zeros(1, np.int64), None).sound.tolist() == [is_sound]
