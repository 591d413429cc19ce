"""Timer messages are delivered: none before its time, none lost, each once.

Promises for the log of the master at the end of a run, when nothing more is due there:
- A message is delivered at or after its due time, by the clock of the node that stored the delivered copy. A clock may
  be set back between the decision to deliver and the put. Unless `clock_is_steady`, the time of the decision, which the
  copy has in its property TIMER_DEQUEUE_MS, counts as well. Exception: the message or its copy was in the log when a
  bit flipped that no node can notice, such as one of its due time or store time (before the image's `misread_to`).
- A message that was answered with PUT_OK, and is due, is delivered. Exceptions: a fault lost it before, so that the log
  has neither the message in rmq_sys_wheel_timer nor a delivered copy (`may_lose`); or such a bit flipped.
- A message is delivered once. Exception (`may_repeat`): a master crashed or was replaced, could not save its progress
  because the disk was full or too slow, or its clock was set back, so that what is due no longer grows.
- Only messages that were sent are delivered.

Bodies of timer messages are their keys. Not checked: how late a message is, and unanswered messages that are not
delivered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tests.checkers.records import Rec
from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation

CHECKER = "timers"
TIMER_TOPIC = "rmq_sys_wheel_timer"


@dataclass(frozen=True)
class TimerSent:
    """A timer message as its producer knows it. `due_ms`: since the epoch; `is_acknowledged`: answered with PUT_OK."""

    key: bytes
    due_ms: int
    is_acknowledged: bool


def check(
    sent: Iterable[TimerSent],
    image: StoreImage,
    topic: str,
    *,
    now_ms: int,
    may_lose: bool,
    may_repeat: bool,
    clock_is_steady: bool,
) -> list[Violation]:
    """Checks the messages `sent` to `topic`. `now_ms`: what is due by then on the master must be delivered."""
    waiting: dict[bytes, Rec] = {}
    delivered: dict[bytes, list[Rec]] = {}
    misread: set[bytes] = set()
    for record in image.records():
        if record.topic == topic:
            delivered.setdefault(record.body, []).append(record)
        elif record.topic == TIMER_TOPIC and record.property_map.get("REAL_TOPIC") == topic:
            waiting[record.body] = record
        else:
            continue
        if record.physical_offset < image.misread_to:
            misread.add(record.body)
    found = []
    known = {message.key: message for message in sent}
    for key, records in delivered.items():
        message = known.get(key)
        if message is None:
            found.append(f"nobody sent {key!r}, delivered at {records[0].physical_offset}")
            continue
        found += [
            f"{key!r} was delivered {message.due_ms - record.store_ms} ms before its time, at {record.physical_offset}"
            for record in records
            if _delivered_ms(record, clock_is_steady=clock_is_steady) < message.due_ms and key not in misread
        ]
        if len(records) > 1 and not may_repeat:
            places = ", ".join(str(record.physical_offset) for record in records)
            found.append(f"{key!r} was delivered {len(records)} times, at {places}, without a reason")
    for message in known.values():
        if message.key in delivered or message.due_ms > now_ms or not message.is_acknowledged:
            continue
        if message.key in waiting:
            if message.key not in misread:
                late_ms, place = now_ms - message.due_ms, waiting[message.key].physical_offset
                found.append(f"{message.key!r} is {late_ms} ms overdue, stored at {place}, not delivered")
        elif not may_lose:
            found.append(f"{message.key!r} was answered PUT_OK, and is not in the log")
    return [Violation(CHECKER, text) for text in found]


def _delivered_ms(record: Rec, *, clock_is_steady: bool) -> int:
    """Returns the latest time by which the clock can have shown that `record` is due."""
    decided_ms = 0 if clock_is_steady else int(record.property_map.get("TIMER_DEQUEUE_MS", 0))
    return max(record.store_ms, decided_ms)
