"""Typed ext fields: names, types, ranges, and errors that say which field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import RemoteProtocolError
from ha.protocol.headers import (
    GetMaxOffsetRequest,
    GetMinOffsetRequest,
    GetRouteInfoRequest,
    Header,
    HeartbeatResponse,
    OffsetResponse,
    PullMessageRequest,
    PullMessageResponse,
    QueryConsumerOffsetRequest,
    RecallMessageRequest,
    RecallMessageResponse,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    SendMessageRequest,
    SendMessageRequestV2,
    SendMessageResponse,
    UnregisterBrokerRequest,
    UpdateConsumerOffsetRequest,
    parse_header,
)

from .test_remoting import PULL_EXT, SEND_EXT

SEND_EXT_FULL = {
    "producerGroup": "pg",
    "topic": "T1",
    "defaultTopic": "TBW102",
    "defaultTopicQueueNums": "4",
    "queueId": "0",
    "sysFlag": "0",
    "bornTimestamp": "1700000000000",
    "flag": "0",
    "properties": "TAGS\x01TagA\x02",
    "reconsumeTimes": "0",
    "unitMode": "false",
    "batch": "false",
    "bname": "b0",
}


@pytest.mark.parametrize(
    ("ext_fields", "header_type"), [(SEND_EXT, SendMessageRequestV2), (SEND_EXT_FULL, SendMessageRequest)]
)
def test_sends_are_read_under_both_sets_of_names(
    ext_fields: dict[str, str], header_type: type[SendMessageRequest]
) -> None:
    header = parse_header(SendMessageRequest, ext_fields)
    assert type(header) is header_type
    assert (header.producer_group, header.topic, header.default_topic) == ("pg", "T1", "TBW102")
    assert (header.default_topic_queue_nums, header.queue_id, header.sys_flag, header.flag) == (4, 0, 0, 0)
    assert (header.born_timestamp, header.properties, header.reconsume_times) == (1700000000000, "TAGS\x01TagA\x02", 0)
    assert (header.unit_mode, header.batch, header.max_reconsume_times, header.broker_name) == (
        False,
        False,
        None,
        "b0",
    )
    assert header.to_ext_fields() == ext_fields


REQUIRED = {
    SendMessageRequestV2: "abcdefgh",
    SendMessageRequest: [
        "producerGroup",
        "topic",
        "defaultTopic",
        "defaultTopicQueueNums",
        "queueId",
        "sysFlag",
        "bornTimestamp",
        "flag",
    ],
    SendMessageResponse: ["msgId", "queueId", "queueOffset"],
    RecallMessageRequest: ["topic", "recallHandle"],
    RecallMessageResponse: ["msgId"],
    PullMessageRequest: [
        "consumerGroup",
        "topic",
        "queueId",
        "queueOffset",
        "maxMsgNums",
        "sysFlag",
        "commitOffset",
        "suspendTimeoutMillis",
        "subVersion",
    ],
    PullMessageResponse: ["suggestWhichBrokerId", "nextBeginOffset", "minOffset", "maxOffset"],
    QueryConsumerOffsetRequest: ["consumerGroup", "topic", "queueId"],
    UpdateConsumerOffsetRequest: ["consumerGroup", "topic", "queueId", "commitOffset"],
    GetMaxOffsetRequest: ["topic", "queueId"],
    GetMinOffsetRequest: ["topic", "queueId"],
    OffsetResponse: ["offset"],
    RegisterBrokerRequest: ["brokerName", "brokerAddr", "clusterName", "haServerAddr", "brokerId"],
    RegisterBrokerResponse: [],
    UnregisterBrokerRequest: ["brokerName", "brokerAddr", "clusterName", "brokerId"],
    GetRouteInfoRequest: ["topic"],
    HeartbeatResponse: [],
}
"""The fields that the specification stars, per header."""


@pytest.mark.parametrize("header_type", REQUIRED, ids=lambda header_type: header_type.__name__)
def test_starred_fields_and_only_those_are_required(header_type: type[Header]) -> None:
    required = dict.fromkeys(REQUIRED[header_type], "1")
    parse_header(header_type, {**required, "aFieldOfALaterVersion": "x"})
    for name in required:
        with pytest.raises(RemoteProtocolError, match=f"`{name}`"):
            parse_header(header_type, {key: value for key, value in required.items() if key != name})


def test_pull_of_the_released_classes() -> None:
    header = parse_header(PullMessageRequest, PULL_EXT)
    assert (header.consumer_group, header.topic, header.queue_id, header.queue_offset) == ("g", "t", 1, 2)
    assert (header.max_msg_nums, header.sys_flag, header.suspend_timeout_millis, header.sub_version) == (
        32,
        6,
        15000,
        3,
    )
    assert (header.commit_offset, header.subscription, header.expression_type) == (0, "*", None)
    assert header.to_ext_fields() == PULL_EXT


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("d", "x", r"\$\.d` \(default_topic_queue_nums\)"),
        ("e", "2147483648", r"\$\.e` \(queue_id\)"),
        ("e", "-2147483649", r"\$\.e` \(queue_id\)"),
        ("g", "9223372036854775808", r"\$\.g` \(born_timestamp\)"),
        ("h", "", r"\$\.h` \(flag\)"),
        ("j", "1.5", r"\$\.j` \(reconsume_times\)"),
    ],
)
def test_wrong_values_are_named_with_their_field(field: str, value: str, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        parse_header(SendMessageRequest, {**SEND_EXT, field: value})


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("TRUE", True), ("false", False), ("yes", False), ("", False)]
)
def test_booleans_are_read_as_java_reads_them(text: str, value: bool) -> None:
    header = parse_header(SendMessageRequest, {**SEND_EXT, "k": "nonsense", "m": text})
    assert (header.unit_mode, header.batch) == (False, value)
    assert (
        parse_header(GetRouteInfoRequest, {"topic": "t", "acceptStandardJsonOnly": text}).accept_standard_json_only
        is value
    )


def test_answers_have_only_strings_and_omit_unset_fields() -> None:
    assert SendMessageResponse(msg_id="0A", queue_id=1, queue_offset=2).to_ext_fields() == {
        "msgId": "0A",
        "queueId": "1",
        "queueOffset": "2",
    }
    full = SendMessageResponse(
        msg_id="0A",
        queue_id=1,
        queue_offset=2,
        transaction_id="T",
        batch_uniq_id="B",
        region_id="DefaultRegion",
        trace_on=True,
        recall_handle="H",
    )
    assert full.to_ext_fields() == Header.to_ext_fields(full)
    assert full.to_ext_fields()["TRACE_ON"] == "true"
    send = SendMessageRequestV2(
        producer_group="P",
        topic="T",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=-1,
        sys_flag=2,
        born_timestamp=1 << 40,
        flag=3,
        properties="K\x01V\x02",
        reconsume_times=5,
        unit_mode=True,
        max_reconsume_times=6,
        batch=True,
        broker_name="B",
    )
    assert send.to_ext_fields() == Header.to_ext_fields(send)
    assert PullMessageResponse(
        suggest_which_broker_id=0, next_begin_offset=2, min_offset=0, max_offset=2
    ).to_ext_fields() == {"suggestWhichBrokerId": "0", "nextBeginOffset": "2", "minOffset": "0", "maxOffset": "2"}
    assert HeartbeatResponse().to_ext_fields() == {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"}
    assert RegisterBrokerResponse().to_ext_fields() == {}
    assert RegisterBrokerRequest(
        broker_name="b", broker_addr="a", cluster_name="c", ha_server_addr="h", broker_id=1, body_crc32=7
    ).to_ext_fields() == {
        "brokerName": "b",
        "brokerAddr": "a",
        "clusterName": "c",
        "haServerAddr": "h",
        "brokerId": "1",
        "compressed": "false",
        "bodyCrc32": "7",
    }


@pytest.mark.parametrize("header_type", REQUIRED, ids=lambda header_type: header_type.__name__)
@given(data=st.data())
def test_any_strings_are_a_header_or_an_error(header_type: type[Header], data: st.DataObject) -> None:
    names = st.sampled_from(header_type.__struct_encode_fields__)
    values = st.sampled_from(["1", "0", "-1", "true", "99999999999", "9" * 30, "1e400", "nan", "null", ""]) | st.text(
        max_size=5
    )
    try:
        header = parse_header(header_type, data.draw(st.dictionaries(names, values)))
    except RemoteProtocolError:
        return
    assert parse_header(header_type, header.to_ext_fields()) == header
