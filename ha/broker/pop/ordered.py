"""The messages that the last pop in order mode took from a queue: they block the queue until they are done or due.

The objects are never changed: each change returns a new one, so that it can be undone. Source:
ConsumerOrderInfoManager.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ha.protocol.pop_records import OrderedRecord, OrderRecord


class OrderedMessage(msgspec.Struct, frozen=True, gc=False):
    """One message. `count`: how often it was popped before; `due_ms`: when it becomes visible again, in ms since the
    epoch."""

    count: int
    due_ms: int
    is_acknowledged: bool = False


class OrderedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One pop of a queue. Times in ms since the epoch, the invisible time in ms; `messages` by queue offset, ascending.

    Messages of earlier pops at higher offsets than those of this one are kept, so that none is lost. Acknowledged ones
    are kept while a message before them is not acknowledged, so that they are not delivered again.
    """

    pop_time_ms: int
    invisible_ms: int
    attempt_id: str
    messages: Mapping[int, OrderedMessage]

    def due_ms(self, now_ms: int) -> int | None:
        """Returns the time at which the queue is no longer blocked, in ms since the epoch; None if it is not blocked at
        `now_ms`."""
        due = max((each.due_ms for each in self.messages.values() if not each.is_acknowledged), default=0)
        return due if due > now_ms else None

    def is_same_attempt(self, attempt_id: str | None) -> bool:
        """Returns whether a pop with `attempt_id` is a retry of this one, whose answer the client did not get."""
        return bool(attempt_id) and attempt_id == self.attempt_id

    @property
    def next_offset(self) -> int:
        """Queue offset of the first message that is not acknowledged, or the offset after the last message."""
        unfinished = (offset for offset, each in self.messages.items() if not each.is_acknowledged)
        return next(unfinished, max(self.messages, default=-1) + 1)

    @property
    def left_count(self) -> int:
        """Number of messages that are not acknowledged."""
        return sum(not each.is_acknowledged for each in self.messages.values())

    def is_acknowledged(self, offset: int) -> bool:
        """Returns whether a message was acknowledged."""
        message = self.messages.get(offset)
        return message is not None and message.is_acknowledged

    def count_of(self, offset: int, *, is_same_attempt: bool) -> int:
        """Returns the `count` of a message in the next pop: one more than in this one, or 0 if it is not in this one.

        `is_same_attempt`: the next pop is a retry of this one, so the count stays.
        """
        message = self.messages.get(offset)
        return 0 if message is None else message.count + (not is_same_attempt)

    def acknowledge(self, offset: int) -> OrderedBatch:
        """Returns the batch with the message at `offset` acknowledged."""
        message = msgspec.structs.replace(self.messages[offset], is_acknowledged=True)
        return self._with(offset, message)

    def delay(self, offset: int, due_ms: int) -> OrderedBatch:
        """Returns the batch with a new due time (ms since the epoch) of the message at `offset`."""
        return self._with(offset, msgspec.structs.replace(self.messages[offset], due_ms=due_ms))

    def _with(self, offset: int, message: OrderedMessage) -> OrderedBatch:
        return msgspec.structs.replace(self, messages={**self.messages, offset: message})

    def to_record(self) -> OrderRecord:
        """Converts the batch for a record of POP state."""
        messages = [
            OrderedRecord(offset, each.count, each.due_ms, int(each.is_acknowledged))
            for offset, each in self.messages.items()
        ]
        return OrderRecord(self.pop_time_ms, self.invisible_ms, self.attempt_id, messages)

    @classmethod
    def of_record(cls, record: OrderRecord) -> OrderedBatch:
        """Returns the batch contained in a record of POP state."""
        messages = {
            each.offset: OrderedMessage(each.count, each.due_ms, bool(each.is_acknowledged))
            for each in sorted(record.messages, key=lambda each: each.offset)
        }
        return cls(
            pop_time_ms=record.pop_time_ms,
            invisible_ms=record.invisible_ms,
            attempt_id=record.attempt_id,
            messages=messages,
        )


def ordered_batch(
    before: OrderedBatch | None,
    offsets: Sequence[int],
    *,
    pop_time_ms: int,
    invisible_ms: int,
    attempt_id: str | None,
) -> OrderedBatch:
    """Creates the batch of a pop that takes the messages at `offsets`, which must be ascending and not empty.

    `before`: the batch of the previous pop, if there is one.
    """
    is_same = before is not None and before.is_same_attempt(attempt_id)
    due_ms = pop_time_ms + invisible_ms
    messages: dict[int, OrderedMessage] = {}
    if before is not None:
        messages = {
            offset: each
            for offset, each in before.messages.items()
            if offset > offsets[-1] or (each.is_acknowledged and offset > before.next_offset)
        }
    for offset in offsets:
        count = 0 if before is None else before.count_of(offset, is_same_attempt=is_same)
        messages[offset] = OrderedMessage(count, due_ms)
    return OrderedBatch(
        pop_time_ms=pop_time_ms,
        invisible_ms=invisible_ms,
        attempt_id=attempt_id or "",
        messages=dict(sorted(messages.items())),
    )
