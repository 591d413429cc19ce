"""JSON bodies and config files against what the released JVM classes write."""

import zlib
from typing import Any

import pytest

from ha.errors import RemoteProtocolError
from ha.protocol.bodies import (
    BrokerData,
    ClusterInfo,
    ConsumerData,
    ConsumerOffsets,
    DataVersion,
    GroupConfig,
    GroupTable,
    HAConnectionRuntimeInfo,
    HARuntimeInfo,
    HeartbeatData,
    ProducerData,
    QueueData,
    RegisterBrokerBody,
    SubscriptionData,
    TopicConfig,
    TopicConfigTable,
    TopicRouteData,
    decode_compressed,
    decode_heartbeat,
    encode_compressed,
)
from ha.protocol.group_requests import LockQueuesBody
from ha.protocol.java_json import dumps, dumps_pretty, read_as
from ha.protocol.pop import RequestModeBody

from .golden import STORES, store_files

ADDRS = {0: "10.0.0.1:10911", 1: "10.0.0.2:10911"}
BROKER = BrokerData(broker_name="b0", cluster="C", broker_addrs=ADDRS, enable_acting_master=False)
TOPIC = TopicConfig(topic_name="t", read_queue_nums=4, write_queue_nums=4)
VERSION = DataVersion(counter=2, timestamp=1)
TOPIC_JSON = (
    '{"attributes":{},"order":false,"perm":6,"readQueueNums":4,"topicFilterType":"SINGLE_TAG","topicName":"t",'
    '"topicSysFlag":0,"writeQueueNums":4}'
)
VERSION_JSON = '{"counter":2,"stateVersion":0,"timestamp":1}'
REGISTER_JSON = (
    f'{{"filterServerList":[],"topicConfigSerializeWrapper":{{"dataVersion":{VERSION_JSON},'
    '"mappingDataVersion":{"$ref":"$.topicConfigSerializeWrapper.dataVersion"},'
    f'"topicConfigTable":{{"t":{TOPIC_JSON}}},"topicQueueMappingDetailMap":{{}},"topicQueueMappingInfoMap":{{}}}}}}'
)
GROUP_JSON = (
    '{"attributes":{},"brokerId":0,"consumeBroadcastEnable":true,"consumeEnable":true,"consumeFromMinEnable":true,'
    '"consumeMessageOrderly":false,"consumeTimeoutMinute":15,"groupName":"g","groupRetryPolicy":{"type":"CUSTOMIZED"},'
    '"groupSysFlag":0,"notifyConsumerIdsChangedEnable":true,"retryMaxTimes":16,"retryQueueNums":1,'
    '"whichBrokerWhenConsumeSlowly":1}'
)
BROKER_JSON = (
    '{"brokerAddrs":{0:"10.0.0.1:10911",1:"10.0.0.2:10911"},"brokerName":"b0","cluster":"C","enableActingMaster":false}'
)
HEARTBEAT = HeartbeatData(
    client_id="10.0.0.9@1#2",
    consumer_data_set=[
        ConsumerData(
            group_name="cg",
            subscription_data_set=[
                SubscriptionData(topic="t", sub_string="a||b", sub_version=5, tags_set=["a"], code_set=[97])
            ],
        )
    ],
    heartbeat_fingerprint=0,
    producer_data_set=[ProducerData(group_name="pg")],
    without_sub=False,
)

JVM_TEXTS = [
    pytest.param(
        TopicRouteData(
            broker_datas=[BROKER], queue_datas=[QueueData(broker_name="b0", read_queue_nums=4, write_queue_nums=4)]
        ),
        f'{{"brokerDatas":[{BROKER_JSON}],"filterServerTable":{{}},"queueDatas":[{{"brokerName":"b0","perm":6,'
        '"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}',
        id="route",
    ),
    pytest.param(
        ClusterInfo(broker_addr_table={"b0": BROKER}, cluster_addr_table={"C": ["b0"]}),
        f'{{"brokerAddrTable":{{"b0":{BROKER_JSON}}},"clusterAddrTable":{{"C":["b0"]}}}}',
        id="cluster",
    ),
    pytest.param(VERSION, VERSION_JSON, id="data version"),
    pytest.param(
        HEARTBEAT,
        '{"clientID":"10.0.0.9@1#2","consumerDataSet":[{"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET",'
        '"consumeType":"CONSUME_PASSIVELY","groupName":"cg","messageModel":"CLUSTERING","subscriptionDataSet":['
        '{"classFilterMode":false,"codeSet":[97],"expressionType":"TAG","subString":"a||b","subVersion":5,'
        '"tagsSet":["a"],"topic":"t"}],"unitMode":false}],"heartbeatFingerprint":0,"producerDataSet":['
        '{"groupName":"pg"}],"withoutSub":false}',
        id="heartbeat",
    ),
    pytest.param(
        ConsumerOffsets(offset_table={"t@g": {0: 5, 1: 6}}), '{"offsetTable":{"t@g":{0:5,1:6}}}', id="offsets"
    ),
    pytest.param(
        ConsumerOffsets(data_version=VERSION, group_topic_map={}, offset_table={"t@g": {0: 5}}),
        f'{{"dataVersion":{VERSION_JSON},"groupTopicMap":{{}},"offsetTable":{{"t@g":{{0:5}}}}}}',
        id="5.x offsets",
    ),
    pytest.param(
        TopicConfigTable(
            data_version=VERSION,
            mapping_data_version=VERSION,
            topic_config_table={"t": TOPIC},
            topic_queue_mapping_detail_map={},
            topic_queue_mapping_info_map={},
        ),
        f'{{"dataVersion":{VERSION_JSON},"mappingDataVersion":{VERSION_JSON},"topicConfigTable":{{"t":{TOPIC_JSON}}},'
        '"topicQueueMappingDetailMap":{},"topicQueueMappingInfoMap":{}}',
        id="topics",
    ),
    pytest.param(GroupConfig(group_name="g"), GROUP_JSON, id="group"),
    pytest.param(
        GroupTable(data_version=VERSION, subscription_group_table={"g": GroupConfig(group_name="g")}),
        f'{{"dataVersion":{VERSION_JSON},"forbiddenTable":{{}},"subscriptionGroupTable":{{"g":{GROUP_JSON}}}}}',
        id="groups",
    ),
    pytest.param(
        HARuntimeInfo(
            master=True,
            master_commit_log_max_offset=100,
            in_sync_slave_nums=1,
            ha_connection_info=[
                HAConnectionRuntimeInfo(addr="10.0.0.2:5555", diff=10, in_sync=True, slave_ack_offset=90)
            ],
        ),
        '{"haClientRuntimeInfo":{"lastReadTimestamp":0,"lastWriteTimestamp":0,"masterFlushOffset":0,"maxOffset":0,'
        '"transferredByteInSecond":0},"haConnectionInfo":[{"addr":"10.0.0.2:5555","diff":10,"inSync":true,'
        '"slaveAckOffset":90,"transferFromWhere":0,"transferredByteInSecond":0}],"inSyncSlaveNums":1,"master":true,'
        '"masterCommitLogMaxOffset":100}',
        id="HA state",
    ),
]


@pytest.mark.parametrize(("body", "text"), JVM_TEXTS)
def test_bodies_equal_the_text_of_the_jvm(body: Any, text: str) -> None:
    assert dumps(body).decode() == text
    assert read_as(type(body), text.encode()) == body


def test_groups_with_some_of_the_fields_are_read() -> None:
    text = (
        b'{"dataVersion":{"counter":1},"subscriptionGroupTable":{"g":{"attributes":{},"brokerId":0,'
        b'"consumeBroadcastEnable":true,"consumeEnable":true,"consumeFromMinEnable":true,"groupName":"g",'
        b'"groupRetryPolicy":{"type":"CUSTOMIZED"},"retryMaxTimes":3,"retryQueueNums":1}}}'
    )
    assert read_as(GroupTable, text).subscription_group_table["g"].retry_max_times == 3


def test_route_for_later_clients_is_standard_json() -> None:
    text = dumps(BROKER, bare_integer_keys=False)
    assert b'"brokerAddrs":{"0":"10.0.0.1:10911","1":"10.0.0.2:10911"}' in text
    assert read_as(BrokerData, text) == BROKER


def test_heartbeat_with_ordinals_and_strings_is_read() -> None:
    heartbeat = decode_heartbeat(
        b'{"clientID":"c","consumerDataSet":[{"consumeFromWhere":4,"consumeType":1,"groupName":"g","messageModel":1,'
        b'"subscriptionDataSet":[{"codeSet":["2598919"],"subString":"TagA","subVersion":"17","tagsSet":["TagA"],'
        b'"topic":"t"}]}]}'
    )
    subscription = SubscriptionData(
        topic="t", sub_string="TagA", sub_version=17, tags_set=["TagA"], code_set=[2598919], expression_type="TAG"
    )
    assert heartbeat == HeartbeatData(
        client_id="c",
        consumer_data_set=[
            ConsumerData(
                consume_from_where="CONSUME_FROM_FIRST_OFFSET",
                consume_type="CONSUME_PASSIVELY",
                group_name="g",
                message_model="CLUSTERING",
                subscription_data_set=[subscription],
                unit_mode=False,
            )
        ],
        producer_data_set=[],
    )
    assert decode_heartbeat(dumps(HEARTBEAT)) == HEARTBEAT


@pytest.mark.parametrize("text", [b"[]", b'{"consumerDataSet":[{"consumeType":7}]}', b'{"consumerDataSet":3}', b"\xff"])
def test_invalid_heartbeat_is_refused(text: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_heartbeat(text)


def test_registration_with_a_reference_is_read() -> None:
    assert zlib.crc32(REGISTER_JSON.encode()) & 0x7FFFFFFF == 1645359917
    body = read_as(RegisterBrokerBody, REGISTER_JSON.encode())
    wrapper = body.topic_config_serialize_wrapper
    assert wrapper.data_version == wrapper.mapping_data_version == VERSION
    assert wrapper.topic_config_table == {"t": TOPIC}
    resolved = REGISTER_JSON.replace('{"$ref":"$.topicConfigSerializeWrapper.dataVersion"}', VERSION_JSON)
    assert dumps(body).decode() == resolved


COMPRESSED = (
    bytes.fromhex("0000002c")
    + VERSION_JSON.encode()
    + bytes.fromhex("0000000100000016")
    + b"T1 4 4 6 SINGLE_TAG {}"
    + bytes.fromhex("00000002")
    + b"[]"
    + bytes(4)
)
REGISTRATION = RegisterBrokerBody(
    topic_config_serialize_wrapper=TopicConfigTable(
        data_version=VERSION,
        topic_config_table={"T1": TopicConfig(topic_name="T1", read_queue_nums=4, write_queue_nums=4)},
    )
)


def test_compressed_registration_decompresses_to_the_released_bytes() -> None:
    assert zlib.decompress(encode_compressed(REGISTRATION)) == COMPRESSED
    assert decode_compressed(zlib.compress(COMPRESSED)) == REGISTRATION


def test_compressed_registration_of_4_9_has_neither_attributes_nor_mappings() -> None:
    topics = {"T1": TopicConfig(topic_name="T1", read_queue_nums=4, write_queue_nums=4, attributes=None)}
    body = RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigTable(data_version=VERSION, topic_config_table=topics)
    )
    old = COMPRESSED.replace(b"\x16T1 4 4 6 SINGLE_TAG {}", b"\x13T1 4 4 6 SINGLE_TAG")[:-4]
    assert decode_compressed(zlib.compress(old)) == body
    assert zlib.decompress(encode_compressed(body))[:-4] == old


@pytest.mark.parametrize("cut", range(0, len(COMPRESSED) - 4, 5))
def test_truncated_compressed_registration_is_refused(cut: int) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_compressed(zlib.compress(COMPRESSED[:cut]))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no zlib",
        zlib.compress(COMPRESSED)[:-5],
        zlib.compress(COMPRESSED.replace(b"T1 4 4 6", b"T1 4 4 x")),
        zlib.compress(COMPRESSED.replace(b"T1 4 4 6", b"T1_4_4_6")),
        zlib.compress(COMPRESSED.replace(b"\0\0\0\x2c", b"\xff\xff\xff\xff")),
        zlib.compress(bytes(65 * 1024 * 1024)),
    ],
)
def test_invalid_compressed_registration_is_refused(raw: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_compressed(raw)


@pytest.mark.parametrize("version", STORES)
def test_config_files_of_real_brokers_are_read(version: str) -> None:
    files = store_files(version)
    topics = read_as(TopicConfigTable, files["config/topics.json"])
    assert topics.topic_config_table["GoldenTopic"].write_queue_nums == 4
    assert topics.topic_config_table["SCHEDULE_TOPIC_XXXX"].read_queue_nums == 18
    assert topics.data_version.counter == 2
    offsets = read_as(ConsumerOffsets, files["config/consumerOffset.json"])
    if version == "4.9.7":
        assert offsets == ConsumerOffsets(offset_table={})
        assert dumps_pretty(offsets) == files["config/consumerOffset.json"]
        # the state version and attributes came with 5.x; without them the file is written as it was
        assert set(dumps_pretty(topics).splitlines()) - set(files["config/topics.json"].splitlines()) == {
            b'\t\t"stateVersion":0,',
            b'\t\t\t"attributes":{},',
        }
    else:
        assert offsets.offset_table["RMQ_SYS_TRANS_HALF_TOPIC@CID_RMQ_SYS_TRANS"] == {0: 2}
        assert offsets.pull_offset_table == {"GoldenTopic@golden_reader": {0: 11, 1: 16, 2: 12, 3: 10}}
        assert dumps_pretty(topics) == files["config/topics.json"]


def test_data_version_of_4_9_equals_its_later_form() -> None:
    old = b'{"counter":2,"timestamp":1}'
    assert read_as(DataVersion, old) == VERSION
    assert dumps(DataVersion(counter=2, state_version=None, timestamp=1)) == old


def test_data_versions_count_changes() -> None:
    assert VERSION.next(9) == DataVersion(counter=3, timestamp=9)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (SubscriptionData, '{"codeSet":[%d]}'),
        (SubscriptionData, '{"subVersion":%d}'),
        (HeartbeatData, '{"heartbeatFingerprint":%d}'),
        (QueueData, '{"writeQueueNums":%d}'),
        (LockQueuesBody, '{"mqSet":[{"queueId":%d}]}'),
        (RequestModeBody, '{"popShareQueueNum":%d}'),
    ],
)
def test_numbers_in_requests_are_limited_as_in_java(kind: type[Any], text: str) -> None:
    read_as(kind, (text % (2**31 - 1)).encode())
    with pytest.raises(RemoteProtocolError, match="not of type"):
        read_as(kind, (text % 2**63).encode())
