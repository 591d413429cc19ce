"""What the name of a topic can be, and those that mean something to brokers and clients alike.

Source: MixAll, TopicValidator.
"""

from __future__ import annotations

NAME_SIZE_MAX = 255
"""Bytes of the longest name, in UTF-8: of a retry or dead-letter topic, and of a group; of any other topic 127. A file
system's directories have no longer names, either."""

AUTO_CREATE_TOPIC = "TBW102"
"""The topic after whose pattern, and by whose brokers, others are made when they are first sent to."""
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
"""Where delayed messages wait until they are due."""
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
"""Where half messages wait until their producer ends the transaction."""
OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
"""What says which half messages are ended."""
GIVEN_UP_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
"""Half messages about which nobody is asked any more."""
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
"""What clients tell of the ways of their messages."""
TABLES_TOPIC = "rmq_sys_halog_tables"
"""What a failover group knows of topics, consumer groups and offsets (group_records.py). RocketMQ takes every topic of
this prefix for a system topic, and keeps its queues."""

RETRY_PREFIX = "%RETRY%"
"""Before a consumer group's name: the topic of the messages that it is to get again."""
DLQ_PREFIX = "%DLQ%"
"""Before a consumer group's name: the topic of those that it was given too often, its dead letters."""
REPLY_SUFFIX = "_REPLY_TOPIC"
"""After a cluster's name: the topic of replies (RocketMQ: getReplyTopic)."""
SYSTEM_TOPIC_PREFIX = "rmq_sys_"
"""Prefix of the names of system topics."""
INTERNAL_TOPICS = frozenset({SCHEDULE_TOPIC, HALF_TOPIC, OP_TOPIC, GIVEN_UP_TOPIC})
"""System topics that hold messages of all topics, or refer to them; without those of that prefix."""


def is_queue_directory(topic: str, queue_id: int) -> bool:
    """Whether the queue of a record can be a directory: a replica's bytes must not lead to files elsewhere, or to none.

    Records for which it can't are passed over by who makes queues of records.
    """
    return (
        queue_id >= 0
        and topic not in ("", ".", "..")
        and "/" not in topic
        and topic.isprintable()
        and len(topic.encode()) <= NAME_SIZE_MAX
    )
