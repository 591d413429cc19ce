"""How a PushConsumer consumes."""

from __future__ import annotations

from enum import Enum

import msgspec


class MessageModel(Enum):
    """Who gets a message; RocketMQ's names."""

    CLUSTERING = "CLUSTERING"
    """One member of the group; where it got to is kept by the brokers."""
    BROADCASTING = "BROADCASTING"
    """Every member; each keeps for itself how far it is, and what failed is not repeated."""


class ConsumeMode(Enum):
    """What may happen at the same time."""

    CONCURRENTLY = "CONCURRENTLY"
    """Messages of a queue are handled side by side; one that failed is delivered again later, by the broker."""
    ORDERLY = "ORDERLY"
    """One message of a queue at a time, in order, by one member of the group; one that failed is tried again before
    anything behind it."""


class StartFrom(Enum):
    """Where a group that never consumed a queue begins."""

    LAST = "CONSUME_FROM_LAST_OFFSET"
    """With what arrives from now on. Brokers make young queues begin with their first message all the same."""
    FIRST = "CONSUME_FROM_FIRST_OFFSET"


class PushOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, sizes in bytes. The defaults are DefaultMQPushConsumer's where it has them."""

    concurrency: int = 20
    """Messages handled at the same time, over all queues."""
    pull_count: int = 32
    """Messages asked for at once; brokers may send fewer."""
    queue_count_max: int = 1_000
    """Messages of one queue held here, waiting or being handled; beyond it the queue is not pulled from."""
    queue_bytes_max: int = 100 * 1024 * 1024
    queue_span_max: int = 2_000
    """How far, in queue offsets, messages may be handled ahead of one that is not finished."""
    total_count_max: int = 10_000
    """As `queue_count_max`, over all queues. A pull under way may go beyond by what it brings."""
    total_bytes_max: int = 256 * 1024 * 1024
    long_poll_s: float = 15.0
    """How long a broker may keep a pull until a message arrives."""
    pull_pause_s: float = 3.0
    """After a pull that failed."""
    commit_interval_s: float = 5.0
    rebalance_interval_s: float = 20.0
    lock_interval_s: float = 20.0
    """How often a member in ORDERLY mode renews its locks, which brokers drop after 60 s …"""
    lock_valid_s: float = 30.0
    """… and it itself no longer trusts after this time."""
    consume_timeout_s: float = 900.0
    """A handler that takes longer is cancelled, and its message is one that failed."""
    suspend_s: float = 1.0
    """ORDERLY: the pause before a message that failed is tried again."""
    reconsume_times_max: int | None = None
    """How often a message is delivered again before it goes to the dead letters (%DLQ%group). None: CONCURRENTLY what
    the broker has for the group (16), ORDERLY without end."""
    close_grace_s: float = 10.0
    """How long the end of the block waits for handlers that are at work, before it cancels them."""
