"""Compares the journals of a run's clients with the files of every node, using only the independent checkers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ha.protocol.codes import ResponseCode
from tests.checkers import derived, durability, prefix, queue_offsets, soundness
from tests.checkers.history import STATUS_OF_CODE, Answered, Consumed, Converged, History, Promise, Sent
from tests.checkers.store import StoreImage
from tests.faults.consuming import JournaledConsumer
from tests.faults.producing import TOPIC, JournaledProducer, body_id
from tests.scenarios.brokers import Broker

MASTER = "master"
INDEX_SLOT_COUNT = 1000
"""maxHashSlotNum of tests.node.processes.FREE_PORTS"""


def write_history(
    producers: Sequence[JournaledProducer],
    consumers: Sequence[JournaledConsumer],
    promise: Promise,
) -> History:
    """The clients' journals as a history for the checkers, in order of time. Nodes are named like their folders."""
    history = History()
    history.add(promise)
    events: list[tuple[float, int, Sent | Answered]] = []
    for producer in producers:
        for out in producer.sent:
            sent = Sent(out.time_s, producer.name, out.sequence, TOPIC, out.queue_id, body_id(out.sequence))
            events.append((out.time_s, 0, sent))
        for time_s, answer in producer.answered:
            status = STATUS_OF_CODE.get(answer.code, ResponseCode(answer.code).name)
            answered = Answered(
                time_s,
                producer.name,
                answer.sequence,
                status,
                queue_offset=answer.queue_offset,
                physical_offset=answer.physical_offset,
                node=promise.node,
            )
            events.append((time_s, 1, answered))
    for _, _, event in sorted(events, key=lambda entry: entry[:2]):
        history.add(event)
    for consumer in consumers:
        for queue_id, sequences in consumer.consumed.items():
            for offset, sequence in enumerate(sequences):
                history.add(Consumed(0.0, consumer.name, TOPIC, queue_id, offset, body_id(sequence)))
    return history


@dataclass(frozen=True)
class Findings:
    """The faults found at the end of a run."""

    lost: list[str]
    others: list[str]

    @property
    def all(self) -> list[str]:
        return [*self.lost, *self.others]


def check_run(
    brokers: Sequence[Broker],
    producers: Sequence[JournaledProducer],
    consumers: Sequence[JournaledConsumer],
    *,
    is_sync_flush: bool = False,
    slaves_promised: int = 1,
) -> Findings:
    """Counts lost messages and finds other violations. `brokers`, the master first, were stopped in order and had
    converged.

    The master's folder is named "master".
    """
    promise = Promise(MASTER, is_sync_flush=is_sync_flush, copies=1 + slaves_promised, slaves_flush=is_sync_flush)
    history = write_history(producers, consumers, promise)
    images = {
        broker.directory.name: StoreImage.from_directory(broker.root, name=broker.directory.name) for broker in brokers
    }
    # All of them were found equal, so each must have everything.
    end = images[MASTER].log_range()[1]
    history.add(Converged(math.inf, tuple(images), end))
    lost = durability.check(history, images)
    found = [*prefix.check(history, images, MASTER), *queue_offsets.check(history, images[MASTER], MASTER)]
    for image in images.values():
        found += soundness.check(image)
        found += derived.check(image, is_complete=True, index_slot_count=INDEX_SLOT_COUNT)
    others = [str(each) for each in found[:20]] + check_given(history, images[MASTER])
    return Findings([str(each) for each in lost], others)


def check_given(history: History, image: StoreImage) -> list[str]:
    """Checks that each consumer received all messages, in order and at their stored offsets."""
    stored = {
        (record.queue_id, record.queue_offset): record.body.partition(b"\n")[0]
        for record in image.records()
        if record.topic == TOPIC
    }
    given: dict[str, int] = {}
    wrong = []
    for event in history.of(Consumed):
        given[event.client] = given.get(event.client, 0) + 1
        found = stored.get((event.queue_id, event.queue_offset))
        if found != event.body_id:
            place = f"{event.queue_id}/{event.queue_offset}"
            wrong.append(f"{event.client} was given {event.body_id!r} at {place}, where {found!r} is stored")
    wrong += [f"{client} was given {count} of {len(stored)}" for client, count in given.items() if count != len(stored)]
    return wrong[:20]
