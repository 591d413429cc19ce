"""Queue offsets are dense and never reused, and the reported offset is the stored one.

Promises: within each topic and queue the messages of the log have consecutive queue offsets, from 0 if the log starts
at 0. A stored message has the queue offset reported to its client. No two reported messages share a queue offset, and
no node delivers two different messages at one queue offset, unless the first was lost lawfully.

Fault model: as in durability: kills never free an offset, a power loss frees those of unflushed messages. Records
before the image's `misread_to` may have any queue and queue offset.

Not checked: prepared and rolled-back transactions (they have none), the files of consume queues (derived).
"""

from tests.checkers.durability import LATE_S, may_have_lost
from tests.checkers.history import Accepted, Consumed, History, body_id_of
from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation

CHECKER = "queue_offsets"


def check(history: History, image: StoreImage, node: str) -> list[Violation]:
    """Checks the log of one node, and the history of that node's answers."""
    return [*check_log(image), *_answered_is_stored(history, image, node), *_used_twice(history, node)]


def check_log(image: StoreImage) -> list[Violation]:
    """Checks a log alone: offsets are dense."""
    found = []
    following: dict[tuple[str, int], int] = {}
    begins_at_0 = image.begin == image.misread_to == 0
    for record in image.records():
        if not record.is_queued or record.physical_offset < image.misread_to:
            continue
        queue = record.topic, record.queue_id
        expected = following.get(queue, 0 if begins_at_0 else record.queue_offset)
        if record.queue_offset != expected:
            text = (
                f"{image.name}: the record at {record.physical_offset} has offset {record.queue_offset} in queue "
                f"{record.topic}-{record.queue_id}, where {expected} comes next"
            )
            found.append(Violation(CHECKER, text))
        following[queue] = record.queue_offset + 1
    return found


def _answered_is_stored(history: History, image: StoreImage, node: str) -> list[Violation]:
    found = []
    records = {record.physical_offset: record for record in image.records()}
    for accepted in history.answers:
        if not accepted.is_stored or accepted.answered.node != node:
            continue
        record = records.get(accepted.answered.physical_offset)
        if record is None or body_id_of(record.body) != accepted.sent.body_id:
            continue  # lost, lawfully or not: checked by durability
        if record.queue_offset != accepted.answered.queue_offset and record.physical_offset >= image.misread_to:
            text = f"{accepted}: it is stored with queue offset {record.queue_offset}"
            found.append(Violation(CHECKER, text))
    return found


def _used_twice(history: History, node: str) -> list[Violation]:
    found = []
    seen: dict[tuple[str, int, int], Accepted] = {}
    for accepted in history.answers:
        if not accepted.is_stored or accepted.answered.node != node:
            continue
        sent = accepted.sent
        place = sent.topic, sent.queue_id, accepted.answered.queue_offset
        first = seen.get(place)
        if first is not None and not _was_lost(history, first, node, before_s=accepted.answered.time_s):
            found.append(Violation(CHECKER, f"{accepted} has the queue offset of {first}"))
        seen[place] = accepted
    given: dict[tuple[str, int, int], tuple[int, Consumed]] = {}
    for position, event in enumerate(history.events):
        if not isinstance(event, Consumed) or event.node != node:
            continue
        spot = event.topic, event.queue_id, event.queue_offset
        before = given.get(spot)
        if before is not None and before[1].body_id != event.body_id:
            promise = history.promise_at(node, position)
            is_flushed = promise is not None and promise.is_sync_flush
            since_s = before[1].time_s - LATE_S
            if not may_have_lost(history, node, since_s, is_flushed=is_flushed, before_s=event.time_s):
                text = (
                    f"{node} gave consumer {event.client} {event.body_id!r} at {event.time_s:.3f} s and consumer "
                    f"{before[1].client} {before[1].body_id!r} at {before[1].time_s:.3f} s, both as "
                    f"{event.topic}-{event.queue_id} offset {event.queue_offset}"
                )
                found.append(Violation(CHECKER, text))
        given[spot] = position, event
    return found


def _was_lost(history: History, first: Accepted, node: str, *, before_s: float) -> bool:
    """Whether a message may lawfully have been lost before a moment, and its offset be free again."""
    promise = history.promise_of(first)
    is_flushed = promise is not None and promise.is_sync_flush and first.answered.status == "PUT_OK"
    return may_have_lost(history, node, first.sent.time_s, is_flushed=is_flushed, before_s=before_s)
