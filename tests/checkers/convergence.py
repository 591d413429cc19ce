"""The cluster converges after the faults.

Promises, after the cluster had enough time: every slave's log ends where its master's does and equals it from the
slave's start on; queues are complete on every node; every message of the log was consumed, at its queue offset.

Fault model: faults are over; links and disks work, every node runs. Slaves that lawfully diverged from their master (it
lost its tail, see `prefix`) have been wiped, as an operator does. Messages before the image's `misread_to` may not be
shown to consumers.

Not checked: how long it took (the driver limits it), the index (checked by derived, once the nodes have stopped).
"""

from collections.abc import Mapping

from tests.checkers import derived
from tests.checkers.history import Consumed, History, body_id_of
from tests.checkers.prefix import first_difference
from tests.checkers.store import StoreImage
from tests.checkers.violation import Violation

CHECKER = "convergence"


def check(
    history: History, images: Mapping[str, StoreImage], master: str, *, consumed_topics: frozenset[str] = frozenset()
) -> list[Violation]:
    """Checks running nodes. `consumed_topics`: topics whose messages must all have been consumed from the master."""
    found = check_logs(images, master)
    for image in images.values():
        found.extend(derived.check_queues(image, is_complete=True))
    if consumed_topics:
        found.extend(check_consumed(history, images[master], consumed_topics))
    return found


def check_logs(images: Mapping[str, StoreImage], master: str) -> list[Violation]:
    """Checks the logs alone: all are equal."""
    found = []
    ours = images[master]
    end = ours.log_range()[1]
    for name, image in images.items():
        begin, slave_end = image.log_range()
        if slave_end != end:
            text = f"{name} ends at {slave_end}, {master} at {end}, although the faults are over"
            found.append(Violation(CHECKER, text))
            continue
        differs = first_difference(ours, image, max(begin, ours.begin), end)
        if differs is not None:
            found.append(Violation(CHECKER, f"{name} differs from {master} at physical offset {differs}"))
    return found


def check_consumed(history: History, image: StoreImage, topics: frozenset[str]) -> list[Violation]:
    """Checks that every message of these topics was consumed."""
    found = []
    had = {(event.topic, event.queue_id, event.queue_offset, event.body_id) for event in history.of(Consumed)}
    missed = [
        record
        for record in image.records()
        if record.topic in topics
        and record.is_queued
        and record.physical_offset >= image.misread_to
        and (record.topic, record.queue_id, record.queue_offset, body_id_of(record.body)) not in had
    ]
    if missed:
        first = missed[0]
        text = (
            f"{len(missed)} messages of {image.name} were never consumed, the first is {first.topic}-{first.queue_id} "
            f"offset {first.queue_offset} at {first.physical_offset}"
        )
        found.append(Violation(CHECKER, text))
    return found
