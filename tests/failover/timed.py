"""Timer messages during failovers of real processes: none is delivered before its time, and none is lost."""

from __future__ import annotations

import random
import time
from collections import Counter

import trio

from ha.client import Message, Producer, SendStatus
from ha.errors import ClientError
from tests.failover.members import read_topic

TOPIC = "Timed"
PAUSE_S = 0.05
DELAYS_S = (0.2, 1.0, 5.0)
"""Largest delays, drawn with equal chance"""
LATE_S = 5.0
"""Time for the last messages after they are due"""


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class TimedMessages:
    """Sends timer messages until `stop`, each once."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._due_ms: dict[bytes, int] = {}
        self._acknowledged: set[bytes] = set()
        self._is_over = False
        self._ended = trio.Event()
        self.repeated = 0
        """Messages that were delivered again after a failover"""

    @property
    def acknowledged(self) -> int:
        return len(self._acknowledged)

    async def run(self, name_server: str) -> None:
        async with Producer(name_server, group="timed") as producer:
            number = 0
            while not self._is_over:
                body = b"timed %d" % number
                number += 1
                due_ms = wall_clock_ms() + int(1000 * self._chance.choice(DELAYS_S) * self._chance.random())
                self._due_ms[body] = due_ms
                try:
                    result = await producer.send(Message(TOPIC, body, deliver_at_ms=due_ms))
                except ClientError:
                    pass  # it may be stored
                else:
                    if result.status is SendStatus.SEND_OK:
                        self._acknowledged.add(body)
                await trio.sleep(PAUSE_S)
        self._ended.set()

    async def stop(self) -> None:
        self._is_over = True
        await self._ended.wait()

    async def violations(self, name_server: str) -> list[str]:
        """Waits until all messages are due, reads the topic, and returns the broken promises."""
        await trio.sleep(max(0.0, (max(self._due_ms.values()) - wall_clock_ms()) / 1000) + LATE_S)
        delivered = await read_topic(name_server, TOPIC)
        counts = Counter(message.body for message in delivered)
        self.repeated = sum(count - 1 for count in counts.values())
        lost = [f"{body!r} was acknowledged, and not delivered" for body in sorted(self._acknowledged - counts.keys())]
        early = [
            f"{message.body!r} was delivered {self._due_ms[message.body] - message.store_timestamp_ms} ms early"
            for message in delivered
            if message.store_timestamp_ms < self._due_ms[message.body]
        ]
        return lost + early
