"""Options of a PushConsumer."""

from __future__ import annotations

from enum import Enum

import msgspec

from ha.client.options import check_numbers


class MessageModel(Enum):
    """Which members receive a message; RocketMQ's names."""

    CLUSTERING = "CLUSTERING"
    """One member of the group receives each message; brokers store the positions."""
    BROADCASTING = "BROADCASTING"
    """Every member of the group receives each message, and stores its own positions. A failed message is dropped, or
    with ORDERLY retried by the same member; it never becomes a dead letter."""


class ConsumeMode(Enum):
    """Whether the messages of a queue are consumed in order: PushConsumer then handles them in order, SimpleConsumer
    receives them in order."""

    CONCURRENTLY = "CONCURRENTLY"
    """Messages of a queue are handled concurrently; the broker redelivers failed ones later."""
    ORDERLY = "ORDERLY"
    """Messages of a queue are handled one at a time, in order, by one member of the group; a failed message is retried
    before the next one."""


class StartFrom(Enum):
    """Where a group starts in a queue that it has never consumed."""

    LAST = "CONSUME_FROM_LAST_OFFSET"
    """At the messages that arrive from now on; but if a queue still has its first message, brokers may start there."""
    FIRST = "CONSUME_FROM_FIRST_OFFSET"
    """At the oldest message of the queue."""


_MAY_BE_ZERO = frozenset({"queue_span_max", "long_poll_s", "suspend_s", "reconsume_times_max", "close_grace_s"})


class PushOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a PushConsumer. Times are in seconds, sizes in bytes. The defaults are those of RocketMQ's
    DefaultMQPushConsumer, where it has the option."""

    concurrency: int = 20
    """Maximum number of concurrent handlers, over all queues."""
    pull_count: int = 32
    """Maximum number of messages per pull; brokers may send fewer."""
    queue_count_max: int = 1_000
    """Number of messages of one queue, waiting or being handled, at which pulling from the queue pauses."""
    queue_bytes_max: int = 100 * 1024 * 1024
    """Bytes of one queue's messages (decompressed bodies, plus 1 KiB for each message), waiting or being handled, at
    which pulling from the queue pauses."""
    queue_span_max: int = 2_000
    """Distance, in queue offsets, from the lowest unfinished message to the next pull, above which pulling from the
    queue pauses."""
    total_count_max: int = 10_000
    """Number of messages of all queues, waiting or being handled, at which pulling pauses. Pulls in flight may exceed
    it."""
    total_bytes_max: int = 256 * 1024 * 1024
    """Bytes of the messages of all queues, counted as for `queue_bytes_max`, at which pulling pauses. Pulls in flight
    may exceed it."""
    long_poll_s: float = 15.0
    """Maximum time for which a broker may hold a pull until a message arrives; more than 60 s counts as 60 s."""
    pull_pause_s: float = 3.0
    """Maximum pause after a failed pull. The first pause is 0.1 s, and each is twice as long as the one before; all are
    shortened at random by up to half."""
    commit_interval_s: float = 5.0
    """Interval at which positions are saved."""
    rebalance_interval_s: float = 20.0
    """Maximum interval between two rebalances."""
    lock_interval_s: float = 20.0
    """With ORDERLY: interval between lock renewals. Brokers drop a lock that is not renewed for 60 s."""
    lock_valid_s: float = 30.0
    """With ORDERLY: time after a renewal for which this member relies on its lock; must be less than the brokers'
    60 s."""
    consume_timeout_s: float = 900.0
    """Maximum time in seconds for a handler to handle one message; a handler that takes longer is cancelled, and its
    message has failed."""
    suspend_s: float = 1.0
    """With ORDERLY: pause before a failed message is retried."""
    reconsume_times_max: int | None = None
    """Maximum redeliveries before a message becomes a dead letter (%DLQ%group). None: 16 with CONCURRENTLY, unlimited
    with ORDERLY. Takes precedence over the group's setting at the broker."""
    close_grace_s: float = 10.0
    """Maximum time for which leaving the block waits for running handlers before it cancels them."""

    def __post_init__(self) -> None:
        """Raises ValueError for a negative value, and for 0 where the consumer could not work with it."""
        check_numbers(self, _MAY_BE_ZERO)
