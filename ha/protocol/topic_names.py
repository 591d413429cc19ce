"""Names of topics that mean something to brokers and clients alike. Source: MixAll, TopicValidator."""

from __future__ import annotations

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
