"""In a group nothing acknowledged is lost, and nothing delivered to a consumer disappears, across changes of master.

Promises for the files of every member after convergence:
- A message answered with PUT_OK by any member is at the reported physical offset, topic, queue and queue offset; no two
  of them share a queue offset.
- So is each message delivered to a consumer by any member.
- A rejected message is stored nowhere; every record is a complete message that was sent, and is stored once.

Fault model: `is_excused` says whether a message may be lost, because all members that had to keep it lost it lawfully.

Not checked: who acknowledged (terms), how many members had it meanwhile (in_sync).
"""

from collections.abc import Callable

from tests.checkers.durability import check_strangers
from tests.checkers.history import Accepted, Consumed, History, body_id_of
from tests.checkers.statuses import REFUSALS
from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation

CHECKER = "kept"
_SHOWN_MAX = 4


def check(
    history: History,
    image: StoreImage,
    *,
    is_excused: Callable[[Accepted], bool],
    is_lost: Callable[[bytes], bool] = lambda body_id: False,
) -> tuple[list[Violation], int]:
    """Checks one member; also returns the number of acknowledged messages that are lost lawfully.

    `is_lost` says of a body whether all members that had to keep it have lost it in a power loss.
    """
    records = {record.physical_offset: record for record in image.records()}
    found = []
    lost = 0
    for accepted in history.answers:
        answered, sent = accepted.answered, accepted.sent
        if answered.status != "PUT_OK" or answered.physical_offset < image.begin:
            continue
        record = records.get(answered.physical_offset)
        there = None if record is None else body_id_of(record.body)
        if record is not None and there == sent.body_id:
            if (record.topic, record.queue_id, record.queue_offset) != (
                sent.topic,
                sent.queue_id,
                answered.queue_offset,
            ):
                text = f"{accepted}: {image.name} has it as {record.topic}-{record.queue_id} {record.queue_offset}"
                found.append(Violation(CHECKER, text))
        elif is_excused(accepted):
            lost += 1
        elif len(found) < _SHOWN_MAX:
            text = f"{accepted} is lost: {image.name}, whose log is {image.log_range()}, has {there!r} there"
            found.append(Violation(CHECKER, text))
    found += _check_consumed(history, image, is_lost)
    found += _check_refused(history, image)
    found += check_strangers(history, {image.name: image})
    return found, lost


class QueueOffsets:
    """Live: no queue offset is reported for two messages."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, int, int], Accepted] = {}

    def on_acknowledged(
        self, accepted: Accepted, *, is_lost: Callable[[Accepted], bool] = lambda accepted: False
    ) -> list[Violation]:
        """A client received PUT_OK. The queue offset of a lawfully lost message is free again."""
        sent = accepted.sent
        place = sent.topic, sent.queue_id, accepted.answered.queue_offset
        first = self._told.get(place)
        if first is None or is_lost(first):
            first = self._told[place] = accepted
        return [] if first is accepted else [Violation(CHECKER, f"{accepted} has the queue offset of {first}")]


def _check_consumed(history: History, image: StoreImage, is_lost: Callable[[bytes], bool]) -> list[Violation]:
    queued = {
        (record.topic, record.queue_id, record.queue_offset): body_id_of(record.body)
        for record in image.records()
        if record.is_queued
    }
    found = []
    for event in history.of(Consumed):
        there = queued.get((event.topic, event.queue_id, event.queue_offset))
        if there == event.body_id or (there is None and image.begin > 0) or is_lost(event.body_id):
            continue
        text = (
            f"{event.node} gave {event.body_id!r} to consumer {event.client} at {event.time_s:.3f} s as "
            f"{event.topic}-{event.queue_id} offset {event.queue_offset}; now {image.name} has {there!r} there"
        )
        found.append(Violation(CHECKER, text))
    return found[:_SHOWN_MAX]


def _check_refused(history: History, image: StoreImage) -> list[Violation]:
    refused = {a.sent.body_id: a for a in history.answers if a.answered.status in REFUSALS}
    found = []
    for record in image.records():
        accepted = refused.get(body_id_of(record.body) or b"")
        if accepted is not None:
            text = f"{accepted}: it was refused, but {image.name} has it at {record.physical_offset}"
            found.append(Violation(CHECKER, text))
    return found[:_SHOWN_MAX]
