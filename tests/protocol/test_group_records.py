"""Records of a failover group's tables: encoding, and refused input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import RemoteProtocolError
from ha.protocol.access_bodies import UserConfig
from ha.protocol.bodies import DataVersion, GroupConfig, TopicConfig
from ha.protocol.group_records import (
    DELETED_TOPICS_MAX,
    SNAPSHOT_PROPERTIES,
    SNAPSHOT_TAGS_CODE,
    SnapshotPart,
    TablesRecord,
    config_size,
    decode_tables_record,
    encode_tables_record,
    entry_size_max,
    remember_deleted,
)

DELTA = TablesRecord(
    epoch=3,
    topics={"T": TopicConfig(topic_name="T", read_queue_nums=4, write_queue_nums=4), "gone": None},
    deleted_topics={"gone": 1 << 40},
    topics_version=DataVersion(counter=2, timestamp=7),
    removed_offsets=["gone@g"],
    offsets={"T@g": {0: 5, 3: 1 << 40}},
    delays={3: 17},
    users={"u": UserConfig(username="u", password="p", user_status="disable"), "gone": None},
    users_version=DataVersion(counter=4, timestamp=7),
)
WRITTEN = (
    b'{"version":1,"epoch":3,"topics":{"T":{"attributes":{},"order":false,"perm":6,"readQueueNums":4,'
    b'"topicFilterType":"SINGLE_TAG","topicName":"T","topicSysFlag":0,"writeQueueNums":4},"gone":null},'
    b'"deletedTopics":{"gone":1099511627776},'
    b'"topicsVersion":{"counter":2,"stateVersion":0,"timestamp":7},'
    b'"users":{"u":{"username":"u","password":"p","userStatus":"disable"},"gone":null},'
    b'"usersVersion":{"counter":4,"stateVersion":0,"timestamp":7},"removedOffsets":["gone@g"],'
    b'"offsets":{"T@g":{"0":5,"3":1099511627776}},"delays":{"3":17}}'
)


def test_only_the_latest_deleted_topics_are_remembered() -> None:
    known = {f"T{number}": number for number in range(DELETED_TOPICS_MAX)}
    remember_deleted(known, {"T5": 10**6, "T6": 3, "new": 10**6 + 1})
    assert len(known) == DELETED_TOPICS_MAX
    assert "T0" not in known
    assert (known["T5"], known["T6"], known["new"]) == (10**6, 6, 10**6 + 1)


def test_a_delta() -> None:
    assert encode_tables_record(DELTA) == WRITTEN
    assert decode_tables_record(WRITTEN) == DELTA


def test_a_part_of_a_snapshot() -> None:
    part = TablesRecord(epoch=3, snapshot=SnapshotPart(2, True), groups={"g": GroupConfig(group_name="g")})
    body = encode_tables_record(part)
    assert body.startswith(b'{"version":1,"epoch":3,"snapshot":{"part":2,"isLast":true},"groups":{"g":{')
    assert decode_tables_record(body) == part
    assert SNAPSHOT_PROPERTIES == b"TAGS\x01s\x02"
    assert ord("s") == SNAPSHOT_TAGS_CODE


def test_unknown_fields_of_later_releases_are_ignored() -> None:
    assert decode_tables_record(WRITTEN[:-1] + b',"more":[1]}') == DELTA


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"version":1}',
        b'{"epoch":1}',
        b'{"version":2,"epoch":1}',
        b'{"version":1,"epoch":"1"}',
        b'{"version":1,"epoch":1,"offsets":{"T@g":{"x":1}}}',
        b'{"version":1,"epoch":1,"offsets":{"T@g":{"0":1.5}}}',
        b'{"version":1,"epoch":1,"topics":{"T":7}}',
        b'{"version":1,"epoch":1,"snapshot":3}',
        b'{"version":1,"epoch":1,"topics":{"\xff":null}}',
        WRITTEN[:-1],
        WRITTEN + b"x",
        b'{"version":1,"epoch":1,"groups":{"g":{"groupName":"g","groupRetryPolicy":' + b'{"a":' * 5000,
    ],
)
def test_invalid_records_are_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_tables_record(body)


def test_the_longest_offsets_fit_their_size() -> None:
    longest = {(1 << 31) - 1 - number: -(1 << 63) for number in range(1000)}
    size = len(encode_tables_record(TablesRecord(epoch=1, offsets={"T@g": longest})))
    assert size - len(encode_tables_record(TablesRecord(epoch=1))) <= entry_size_max("T@g", 1000) + len('"offsets":{},')


NAMES = st.text(max_size=20)
OFFSETS = st.dictionaries(st.integers(0, 16_384), st.integers(-(1 << 63), (1 << 63) - 1), max_size=5)


@given(
    st.dictionaries(NAMES, OFFSETS, max_size=4),
    st.lists(NAMES, max_size=4),
    st.dictionaries(NAMES, st.builds(TopicConfig, topic_name=NAMES, read_queue_nums=st.integers(0, 9)), max_size=4),
)
def test_size_limits_and_round_trip(
    offsets: dict[str, dict[int, int]], removed: list[str], topics: dict[str, TopicConfig]
) -> None:
    record = TablesRecord(epoch=1, offsets=offsets, removed_offsets=removed, topics=dict(topics))
    body = encode_tables_record(record)
    assert decode_tables_record(body) == record
    bound = (
        100
        + sum(entry_size_max(key, len(by_queue)) for key, by_queue in offsets.items())
        + sum(entry_size_max(key, 0) for key in removed)
        + sum(config_size(name, config) for name, config in topics.items())
    )
    assert len(body) <= bound
