"""The status reported to a client is true.

Promises, checked when an answer reaches its client:
- PUT_OK from a SYNC_FLUSH master: the record's bytes are on its disk. PUT_OK with n copies promised: n - 1 different
  slaves hold these bytes at this offset, and as many have reported so to this process of the master.
- Every answer that means "stored" reports an offset at which the master's log holds this message.
- FLUSH_DISK_TIMEOUT is sent only with SYNC_FLUSH; FLUSH_SLAVE_TIMEOUT and SLAVE_NOT_AVAILABLE only if copies are
  promised.
- A message delivered to a consumer by a SYNC_FLUSH node is on that node's disk, so a power loss can't undo it.
- Once all faults are over (`calm`), every answer is PUT_OK.

At the end (`check_refused`): a rejected message is in no log.

Fault model: any. A node that crashed between the send and the arrival of the answer is excused: it may have held the
bytes when it answered.

Not checked: later loss of the message (durability), whether a timeout was reported in time.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from tests.checkers.durability import LATE_S
from tests.checkers.history import Accepted, Consumed, History, body_id_of
from tests.checkers.records import BadRecord, Rec, parse_at
from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation

CHECKER = "statuses"
REFUSALS = frozenset(
    {
        "IN_SYNC_REPLICAS_NOT_ENOUGH",
        "SERVICE_NOT_AVAILABLE",
        "CREATE_MAPPED_FILE_FAILED",
        "MESSAGE_ILLEGAL",
        "PROPERTIES_SIZE_EXCEEDED",
        "OS_PAGE_CACHE_BUSY",
    }
)
"""Statuses which mean that nothing was stored."""

ReadNode = Callable[[str, int, int], bytes]
"""(node, physical offset, size) -> bytes; fewer where the node holds none"""


class Statuses:
    """Checks answers as they arrive.

    `read` reads the current log of a node, `read_disk` what a power loss would keep of it. `slaves` are the names of
    all slaves.
    """

    def __init__(
        self, history: History, read: ReadNode, read_disk: ReadNode, slaves: Iterable[str], *, segment_size: int
    ) -> None:
        self._history = history
        self._read = read
        self._read_disk = read_disk
        self._slaves = tuple(slaves)
        self._segment_size = segment_size
        self._reported: dict[tuple[str, str], int] = {}
        self._calm_since_s = math.inf

    def on_report(self, master: str, slave: str, offset: int) -> None:
        """A slave's report was handed to the network."""
        key = master, slave
        self._reported[key] = max(offset, self._reported.get(key, -1))

    def on_start(self, node: str) -> None:
        """A node's process starts: reports to the previous process do not count for it.

        They count until then, because the last answers of the previous process may still be in flight.
        """
        for key in [key for key in self._reported if key[0] == node]:
            del self._reported[key]

    def calm(self, since_s: float) -> None:
        """From now on there are no faults, and all slaves have caught up. `math.inf`: that has ended."""
        self._calm_since_s = since_s

    def on_answer(self, accepted: Accepted) -> list[Violation]:
        """A client received its answer, which is in the history by now."""
        answered = accepted.answered
        status = answered.status
        if accepted.sent.time_s >= self._calm_since_s and status != "PUT_OK":
            return [Violation(CHECKER, f"{accepted}: nothing disturbs the cluster, so it should be PUT_OK")]
        if not accepted.is_stored:
            return []
        promise = self._history.promise_of(accepted)
        if promise is None:
            return [Violation(CHECKER, f"{accepted}: nobody said what {answered.node} promises")]
        if status == "FLUSH_DISK_TIMEOUT" and not promise.is_sync_flush:
            return [Violation(CHECKER, f"{accepted}: {answered.node} does not wait for its disk")]
        if status in ("FLUSH_SLAVE_TIMEOUT", "SLAVE_NOT_AVAILABLE") and not (
            promise.waits_for_slaves or promise.copies > 1
        ):
            return [Violation(CHECKER, f"{accepted}: {answered.node} does not wait for slaves")]
        if self._is_excused(answered.node, accepted):
            return []
        record, reason = self._record(answered.node, answered.physical_offset)
        if record is None:
            return [Violation(CHECKER, f"{accepted}: {answered.node} has no record there: {reason}")]
        found = []
        if body_id_of(record.body) != accepted.sent.body_id:
            text = f"{accepted}: {answered.node} has {body_id_of(record.body)!r} there"
            found.append(Violation(CHECKER, text))
        if record.queue_offset != answered.queue_offset:
            text = f"{accepted}: {answered.node} has it with queue offset {record.queue_offset}"
            found.append(Violation(CHECKER, text))
        if status == "PUT_OK":
            if promise.is_sync_flush:
                found.extend(self._judge_flush(accepted, record))
            if promise.copies > 1:
                found.extend(self._judge_copies(accepted, record, promise.copies))
        return found

    def on_consumed(self, event: Consumed, physical_offset: int) -> list[Violation]:
        """A consumer received a message, which is in the history by now; its record is at `physical_offset`."""
        promise = self._history.promise_at(event.node, len(self._history.events))
        if promise is None or not promise.is_sync_flush:
            return []
        crashes = self._history.crashes(event.node, event.time_s - LATE_S)
        if any(crash.kind in ("corrupt", "wipe") for crash in crashes):
            return []
        end = physical_offset - physical_offset % self._segment_size + self._segment_size
        try:
            record = parse_at(partial(self._read_disk, event.node), physical_offset, end, self._segment_size)
        except BadRecord as bad:
            there, reason = None, bad.reason
        else:
            there = body_id_of(record.body)
            reason = f"{there!r} is"
        if there == event.body_id:
            return []
        text = (
            f"{event.node} gave {event.body_id!r} to consumer {event.client} at {event.time_s:.3f} s, but at "
            f"{physical_offset} of its disk it is not ({reason}): after a power cut nobody would know it"
        )
        return [Violation(CHECKER, text)]

    def _record(self, node: str, offset: int) -> tuple[Rec | None, str]:
        end = offset - offset % self._segment_size + self._segment_size

        def read(at: int, size: int) -> bytes:
            return self._read(node, at, size)

        try:
            return parse_at(read, offset, end, self._segment_size), ""
        except BadRecord as bad:
            return None, bad.reason

    def _is_excused(self, node: str, accepted: Accepted) -> bool:
        crashes = self._history.crashes(node, accepted.sent.time_s)
        return any(crash.kind != "kill" for crash in crashes)

    def _judge_flush(self, accepted: Accepted, record: Rec) -> list[Violation]:
        node = accepted.answered.node
        flushed = self._read_disk(node, record.physical_offset, record.size)
        if flushed == record.raw:
            return []
        text = (
            f"{accepted}: of the record's {record.size} bytes not all are on {node}'s disk; "
            f"a power cut now would take an acknowledged message"
        )
        return [Violation(CHECKER, text)]

    def _judge_copies(self, accepted: Accepted, record: Rec, copies: int) -> list[Violation]:
        node = accepted.answered.node
        holding, excused, reported = [], [], []
        for slave in self._slaves:
            if self._read(slave, record.physical_offset, record.size) == record.raw:
                holding.append(slave)
            elif self._is_excused(slave, accepted):
                excused.append(slave)
            if self._reported.get((node, slave), -1) >= record.end:
                reported.append(slave)
        needed = copies - 1
        found = []
        if len(holding) + len(excused) < needed:
            text = (
                f"{accepted}: {len(holding)} slaves hold the record ({', '.join(holding) or 'none'}) "
                f"where {needed} must for {copies} copies"
            )
            found.append(Violation(CHECKER, text))
        if len(reported) < needed and not any(self._history.crashes(node, accepted.sent.time_s)):
            text = (
                f"{accepted}: {len(reported)} slaves have acknowledged {record.end} ({', '.join(reported) or 'none'}) "
                f"where {needed} must for {copies} copies"
            )
            found.append(Violation(CHECKER, text))
        return found


def check_refused(history: History, images: Mapping[str, StoreImage]) -> list[Violation]:
    """Checks at the end that rejected messages were not stored."""
    found = []
    refused = {a.sent.body_id: a for a in history.answers if a.answered.status in REFUSALS}
    for name, image in images.items():
        for record in image.records():
            accepted = refused.get(body_id_of(record.body) or b"")
            if accepted is not None:
                text = f"{accepted}: it was refused, but {name} holds it at {record.physical_offset}"
                found.append(Violation(CHECKER, text))
    return found
