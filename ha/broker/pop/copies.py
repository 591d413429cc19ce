"""Finds copies in retry topics whose original messages are still in flight according to the log.

A message is copied to its retry topic first, and its removal is in the next record of POP state. If the master dies in
between, the state that is read from the log still has the message, which would be delivered twice. Such a copy follows
the second-to-last record of POP state in the log: a record is made once the one before is appended, and contains the
removals of all copies appended until then. (If the master died while it wrote several records for the same changes, a
copy may lie further back, and is not found.)

A copy states the physical offset of its original as a negative number (`copy_mark`) in a field that RocketMQ uses only
for half and committed messages: `prepared_transaction_offset`.
"""

from __future__ import annotations

import logging

from ha.broker.pop.state import PopState
from ha.errors import DamagedBytes, OffsetGone, RemoteProtocolError
from ha.protocol.pop import ORIGIN_GROUP, popped_topic, retry_topic
from ha.protocol.properties import decode_properties
from ha.protocol.record import RECORD_PLACE, MessageRecord, decode_record
from ha.store.consume_queue import ConsumeQueue
from ha.store.files import is_passing
from ha.store.message_store import MessageStore

logger = logging.getLogger(__name__)


def copy_mark(physical_offset: int) -> int:
    """Converts the physical offset of a record to the `prepared_transaction_offset` of its copy, or back."""
    return -1 - physical_offset


async def finish_copied(store: MessageStore, state: PopState, records: ConsumeQueue) -> None:
    """Removes from `state` the messages whose copies are in the log after the second-to-last record of POP state.

    `records`: the queue of these records. Raises OSError if a record can't be read for the moment (`is_passing`).
    """
    end = store.log.max_offset.value
    behind = records.last_record_before(records.last_record_before(end))
    finished = 0
    for topic in _retry_topics(state):
        for queue_id in store.queues.topics().get(topic, ()):
            queue = store.queues.get(topic, queue_id)
            for physical_offset, size in () if queue is None else queue.records_in(behind + 1, end):
                copy = await _record(store, physical_offset, size)
                if copy is not None and copy.prepared_transaction_offset < 0:
                    group = decode_properties(copy.properties).get(ORIGIN_GROUP, "")
                    finished += await _finish_original(store, state, group, copy_mark(copy.prepared_transaction_offset))
    if finished:
        logger.info("pop.copies_found count=%d", finished)


def _retry_topics(state: PopState) -> set[str]:
    """Returns the topics to which messages in flight are copied."""
    found = set()
    for (group, topic, _), queue in state.queues.items():
        if queue.batches:
            asked, flag = popped_topic(group, topic)
            found |= {topic} if flag else {retry_topic(group, asked, is_v2=is_v2) for is_v2 in (False, True)}
    return found


async def _finish_original(store: MessageStore, state: PopState, group: str, physical_offset: int) -> bool:
    original = await _record(store, physical_offset, 0)
    if original is None:
        return False
    queue = state.get((group, original.topic, original.queue_id))
    if queue is None or original.queue_offset not in queue.batches:
        return False
    state.finish(queue, original.queue_offset, is_copied=True)
    return True


async def _record(store: MessageStore, physical_offset: int, size: int) -> MessageRecord | None:
    """Returns the record at `physical_offset`; None if it is damaged or gone. `size`: its bytes, or 0 to read the size
    first. Raises OSError if it can't be read for the moment (`is_passing`)."""
    try:
        if not size:
            head = await store.log.read_all(physical_offset, RECORD_PLACE.size)
            size = RECORD_PLACE.unpack(head)[0]
        return decode_record(await store.log.read_all(physical_offset, size))
    except OSError as error:
        if is_passing(error):
            raise
        return None
    except (DamagedBytes, OffsetGone, RemoteProtocolError):
        return None
