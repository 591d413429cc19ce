"""Names of topics that mean something to brokers and clients alike. Source: MixAll, TopicValidator."""

from __future__ import annotations

RETRY_PREFIX = "%RETRY%"
"""Before a consumer group's name: the topic of the messages that it is to get again."""
DLQ_PREFIX = "%DLQ%"
"""Before a consumer group's name: the topic of those that it was given too often, its dead letters."""
