"""Committed consumer offsets are kept, and never beyond the log.

Each consumer commits higher and higher queue offsets, one request at a time for each queue, of messages that it was
given. Promises, when a client gets the answer to its question for a committed offset, from whoever was master at some
moment since it asked:
- it is no lower than what that client had been told to be committed before it asked;
- it is no higher than what it ever asked to commit;
- it is not beyond the end of the queue, as the log of the member that answers says (apache/rocketmq#4771).
Fault model: any that keeps what is acknowledged.
Does not look at: members that were not master meanwhile, whose answers may be old; a member that has started again
within the lease of its term is one of them, whatever the service still says (terms).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation

CHECKER = "consumer_offsets"


class Place(NamedTuple):
    """One queue of one consumer group."""

    group: str
    topic: str
    queue_id: int


class ConsumerOffsets:
    """Judges what consumers are told of their offsets."""

    def __init__(self) -> None:
        self._asked: dict[Place, int] = {}
        self._answered: dict[Place, int] = {}
        self._log_ends: dict[Place, float] = {}
        self.answered_count = 0
        self.forgot_at_s = -math.inf
        """When all that had to keep them last lost some of the log"""

    def on_commit(self, place: Place, queue_offset: int) -> None:
        """A consumer asks to commit."""
        self._asked[place] = max(queue_offset, self._asked.get(place, 0))

    def on_committed(self, place: Place, queue_offset: int, *, log_end: float = math.inf) -> None:
        """It was told that this is committed, in a log that ended there (physical offset) at that time."""
        self._log_ends[place] = log_end
        self._answered[place] = max(queue_offset, self._answered.get(place, 0))
        self.answered_count += 1

    def forget_beyond(self, log_end: int, now_s: float) -> None:
        """All that had to keep the log behind a physical offset have lost it, lawfully, and offsets that are there.

        Consumers may be ahead of what is left, and commit that.
        """
        gone = [place for place, end in self._log_ends.items() if end > log_end]
        for place in gone:
            del self._answered[place], self._log_ends[place]
        if gone:
            self.forgot_at_s = now_s

    def least(self, place: Place) -> int:
        """What a question for this queue that is asked now has to be answered at least; 0 if nothing is committed."""
        return self._answered.get(place, 0)

    def check(self, place: Place, told: int, least: int, node: str, image: StoreImage) -> list[Violation]:
        """`node`, whose files `image` has, told `told`; `least` was due when it was asked."""
        found = []
        name = f"{place.group} of {place.topic}-{place.queue_id}"
        if told < least:
            text = f"{node} says that {told} is the offset of {name}, which had been told that {least} is committed"
            found.append(Violation(CHECKER, text))
        if told > self._asked.get(place, 0):
            text = f"{node} says that {told} is the offset of {name}, and it never asked for more than "
            found.append(Violation(CHECKER, text + f"{self._asked.get(place, 0)}"))
        end = queue_end(image, place.topic, place.queue_id)
        if told > end and self.forgot_at_s < 0:
            text = f"{node} says that {told} is the offset of {name}, and by its log that queue ends at {end}"
            found.append(Violation(CHECKER, text))
        return found


def queue_end(image: StoreImage, topic: str, queue_id: int) -> int:
    """Queue offset behind the last message of a queue that the log has."""
    return max(
        (r.queue_offset + 1 for r in image.records() if r.topic == topic and r.queue_id == queue_id and r.is_queued),
        default=0,
    )
