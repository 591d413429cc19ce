"""Committed consumer offsets are kept, and never point beyond the log.

Each consumer commits increasing queue offsets of messages that it received, one request at a time per queue. Promises
for a queried committed offset, answered by a member that was master at some moment since the request:
- It is not lower than the offset whose commit had been acknowledged before the request.
- It is not higher than any offset the client requested to commit.
- It is not beyond the end of the queue in the log of the answering member (apache/rocketmq#4771).

Fault model: any that preserves acknowledged data.

Not checked: members that were not master meanwhile, whose answers may be stale; this includes a member that has
restarted within the lease of its term, whatever the service reports (terms).
"""

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
    """Checks the offsets that consumers are told."""

    def __init__(self) -> None:
        self._asked: dict[Place, int] = {}
        self._answered: dict[Place, int] = {}
        self._log_ends: dict[Place, float] = {}
        self.answered_count = 0
        self.forgot_at_s = -math.inf
        """When all members that had to keep the offsets last lost some of the log"""

    def on_commit(self, place: Place, queue_offset: int) -> None:
        """A consumer requests a commit."""
        self._asked[place] = max(queue_offset, self._asked.get(place, 0))

    def on_committed(self, place: Place, queue_offset: int, *, log_end: float = math.inf) -> None:
        """A commit was acknowledged, by a member whose log ended at physical offset `log_end`."""
        self._log_ends[place] = log_end
        self._answered[place] = max(queue_offset, self._answered.get(place, 0))
        self.answered_count += 1

    def forget_beyond(self, log_end: int, now_s: float) -> None:
        """Records a lawful loss of the log behind a physical offset, and of the offsets in it, by all members that had
        to keep it.

        Consumers may be ahead of the remaining log, and commit those offsets.
        """
        gone = [place for place, end in self._log_ends.items() if end > log_end]
        for place in gone:
            del self._answered[place], self._log_ends[place]
        if gone:
            self.forgot_at_s = now_s

    def least(self, place: Place) -> int:
        """The lowest lawful answer to a query for this queue that starts now; 0 if nothing is committed."""
        return self._answered.get(place, 0)

    def check(self, place: Place, told: int, least: int, node: str, image: StoreImage) -> list[Violation]:
        """Checks that `node`, with the files `image`, answered `told`; `least` was the lowest lawful answer at the
        request."""
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
    """Queue offset after the last message of a queue in the log."""
    return max(
        (r.queue_offset + 1 for r in image.records() if r.topic == topic and r.queue_id == queue_id and r.is_queued),
        default=0,
    )
