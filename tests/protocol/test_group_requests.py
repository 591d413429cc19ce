"""What groups and administrators ask: the JVM's exact bodies (vectors of 5.3.3), and bytes that are none."""

import pytest

from ha.errors import RemoteProtocolError
from ha.protocol import java_json
from ha.protocol.admin_requests import (
    ConsumerConnections,
    ProducerConnections,
    QueueConsumption,
    QueueStats,
    decode_consume_stats,
    decode_topic_stats,
)
from ha.protocol.group_requests import (
    ConsumeDirectlyResult,
    ConsumerList,
    ConsumeStatus,
    LockedQueuesBody,
    LockQueuesBody,
    ProcessQueueInfo,
    QueueBody,
    decode_consumer_status,
    decode_queue_offsets,
    decode_running_info,
    encode_consumer_status,
    encode_queue_offsets,
    encode_running_info,
)

QUEUE = ("t", "b0", 1)
QUEUE_TEXT = b'{"brokerName":"b0","queueId":1,"topic":"t"}'


def test_locks() -> None:
    asked = LockQueuesBody(
        client_id="c", consumer_group="g", mq_set=[QueueBody(broker_name="b0", queue_id=1, topic="t")]
    )
    text = b'{"clientId":"c","consumerGroup":"g","mqSet":[' + QUEUE_TEXT + b'],"onlyThisBroker":false}'
    assert java_json.dumps(asked) == text
    assert java_json.read_as(LockQueuesBody, text) == asked
    answer = b'{"lockOKMQSet":[' + QUEUE_TEXT + b"]}"
    assert java_json.read_as(LockedQueuesBody, answer).queues == asked.mq_set
    assert java_json.dumps(LockedQueuesBody(queues=asked.mq_set)) == answer


def test_offsets_in_both_forms() -> None:
    text = b'{"offsetTable":{' + QUEUE_TEXT + b":9}}"
    assert encode_queue_offsets({QUEUE: 9}) == text
    assert decode_queue_offsets(text) == {QUEUE: 9}
    listed = b'{"offsetTable":[{"brokerName":"b0","offset":9,"queueId":1,"topic":"t"}]}'
    assert decode_queue_offsets(listed) == {QUEUE: 9}
    assert decode_queue_offsets(b"{}") == {}


def test_running_info() -> None:
    text = (
        b'{"mqPopTable":{},"mqTable":{' + QUEUE_TEXT + b':{"cachedMsgCount":0,"cachedMsgMaxOffset":0,'
        b'"cachedMsgMinOffset":0,"cachedMsgSizeInMiB":0,"commitOffset":0,"droped":false,"lastConsumeTimestamp":0,'
        b'"lastLockTimestamp":0,"lastPullTimestamp":0,"locked":false,"transactionMsgCount":0,'
        b'"transactionMsgMaxOffset":0,"transactionMsgMinOffset":0,"tryUnlockTimes":0}},"properties":{"k":"v"},'
        b'"statusTable":{"t":{"consumeFailedMsgs":0,"consumeFailedTPS":0.0,"consumeOKTPS":0.0,"consumeRT":0.0,'
        b'"pullRT":0.0,"pullTPS":0.0}},"subscriptionSet":[],"userConsumerInfo":{}}'
    )
    assert encode_running_info({QUEUE: ProcessQueueInfo()}, {"k": "v"}, {"t": ConsumeStatus()}, []) == text
    info = decode_running_info(text)
    assert (info.queues, info.properties) == ({QUEUE: ProcessQueueInfo()}, {"k": "v"})
    assert info.statuses == {"t": ConsumeStatus()}


def test_consumer_status() -> None:
    answered = encode_consumer_status({QUEUE: 3})
    assert answered == b'{"consumerTable":{},"messageQueueTable":{' + QUEUE_TEXT + b":3}}"
    told = b'{"consumerTable":{"c":{' + QUEUE_TEXT + b':3}},"messageQueueTable":{}}'
    assert decode_consumer_status(told) == {"c": {QUEUE: 3}}


def test_a_message_consumed_directly() -> None:
    text = b'{"autoCommit":true,"consumeResult":"CR_SUCCESS","order":false,"spentTimeMills":0}'
    assert java_json.dumps(ConsumeDirectlyResult()) == text
    assert java_json.read_as(ConsumeDirectlyResult, text) == ConsumeDirectlyResult()


def test_statistics() -> None:
    text = (
        b'{"consumeTps":0.5,"offsetTable":{'
        + QUEUE_TEXT
        + b':{"brokerOffset":9,"consumerOffset":4,"lastTimestamp":7,"pullOffset":0}}}'
    )
    assert decode_consume_stats(text) == (
        {QUEUE: QueueConsumption(broker_offset=9, consumer_offset=4, last_timestamp=7)},
        0.5,
    )
    text = (
        b'{"offsetTable":{' + QUEUE_TEXT + b':{"lastUpdateTimestamp":5,"maxOffset":3,"minOffset":1}},"topicPutTps":0.0}'
    )
    assert decode_topic_stats(text) == {QUEUE: QueueStats(last_update_timestamp=5, max_offset=3, min_offset=1)}


@pytest.mark.parametrize("number", [1 << 63, -(10**30)])
def test_numbers_beyond_java_s_long_are_refused(number: int) -> None:
    for decode, key in ((decode_topic_stats, b"maxOffset"), (decode_consume_stats, b"brokerOffset")):
        with pytest.raises(RemoteProtocolError):
            decode(b'{"offsetTable":{' + QUEUE_TEXT + b':{"' + key + b'":%d}}}' % number)


def test_connections() -> None:
    text = (
        b'{"connectionSet":[{"clientAddr":"10.0.0.9:1","clientId":"c","language":"GO","version":317}],'
        b'"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET","consumeType":"CONSUME_PASSIVELY","messageModel":"CLUSTERING",'
        b'"subscriptionTable":{"t":{"classFilterMode":false,"codeSet":[],"expressionType":"TAG","subString":"*",'
        b'"subVersion":5,"tagsSet":[],"topic":"t"}}}'
    )
    found = java_json.read_as(ConsumerConnections, text)
    assert [(each.client_id, each.language) for each in found.connection_set] == [("c", "GO")]
    assert found.subscription_table["t"].sub_version == 5
    assert java_json.dumps(found) == text
    assert java_json.read_as(ProducerConnections, text).connection_set == found.connection_set
    assert java_json.read_as(ConsumerList, b'{"consumerIdList":["a"]}').consumer_id_list == ["a"]


@pytest.mark.parametrize("body", [b'{"offsetTable":5}', b'{"offsetTable":{"a":1}}', b'{"offsetTable":[5]}'])
def test_what_is_no_table_of_offsets_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_queue_offsets(body)
