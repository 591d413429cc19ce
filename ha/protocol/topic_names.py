"""Rules for topic names, and the names with a special meaning for brokers and clients.

Sources: MixAll, TopicValidator.
"""

from __future__ import annotations

NAME_SIZE_MAX = 255
"""Maximum length of the names of groups, retry topics and dead-letter topics in bytes of UTF-8 (other topics: 127);
also the maximum length of a directory name in most file systems"""

AUTO_CREATE_TOPIC = "TBW102"
"""The topic whose settings and brokers are used for topics that are created by the first send"""
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
"""Topic that holds delayed messages until they are due"""
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
"""Topic that holds half messages until their producer ends the transaction"""
OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
"""Topic of op messages, which name the half messages whose transactions have ended"""
GIVEN_UP_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
"""Topic that holds half messages that are no longer checked, after the maximum number of checks or near the end of
retention"""
TIMER_TOPIC = "rmq_sys_wheel_timer"
"""Topic that holds timer messages until they are due"""
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
"""Topic that holds the trace data of clients"""
TABLES_TOPIC = "rmq_sys_halog_tables"
"""Topic that holds the topics, consumer groups, offsets and users of a failover group (group_records.py). RocketMQ
treats all topics that begin with rmq_sys_ as system topics and keeps their queues."""

POP_TOPIC = "rmq_sys_halog_pop"
"""Topic that records which messages POP consumers have received and acknowledged (pop_records.py)"""

RETRY_PREFIX = "%RETRY%"
"""Prefix of a consumer group's name in the name of its retry topic"""
DLQ_PREFIX = "%DLQ%"
"""Prefix of a consumer group's name in the name of its dead-letter topic"""
REPLY_SUFFIX = "_REPLY_TOPIC"
"""Suffix of a cluster's name in the name of its reply topic (RocketMQ: getReplyTopic)"""
SYSTEM_TOPIC_PREFIX = "rmq_sys_"
"""Prefix of system topics"""
INTERNAL_TOPICS = frozenset({SCHEDULE_TOPIC, HALF_TOPIC, OP_TOPIC, GIVEN_UP_TOPIC})
"""System topics without SYSTEM_TOPIC_PREFIX that hold or refer to messages of all topics"""
_SYSTEM_TOPICS = frozenset(
    {AUTO_CREATE_TOPIC, SCHEDULE_TOPIC, GIVEN_UP_TOPIC, "BenchmarkTest", "OFFSET_MOVED_EVENT", "SELF_TEST_TOPIC"}
)


def is_system_topic(topic: str) -> bool:
    """Returns whether a topic's name alone shows that it is a system, retry or dead-letter topic.

    False for the topics that are named after brokers and clusters: their names can be anything.
    """
    return topic in _SYSTEM_TOPICS or topic.startswith((SYSTEM_TOPIC_PREFIX, "RMQ_SYS_", RETRY_PREFIX, DLQ_PREFIX))


def is_queue_directory(topic: str, queue_id: int) -> bool:
    """Returns whether the topic and queue id of a record can name the directory of a consume queue.

    Dispatch and reindexing skip all other records: a record must not create files outside the store.
    """
    return (
        queue_id >= 0
        and topic not in ("", ".", "..")
        and "/" not in topic
        and topic.isprintable()
        and len(topic.encode()) <= NAME_SIZE_MAX
    )
