"""The state of POP consumption in memory: which messages are in flight, and where each group's next pop begins.

    QueueKey        group, topic, queue id; the topic may be one of the group's retry topics
    PopQueue        a queue of one group: its next offset, its messages in flight, its ordered messages
    Batch           messages in flight that were popped together; each of them refers to the same object
    OrderedBatch    the messages of the last pop in order mode, of which no queue has more than one

Changes take effect at once and are remembered until they are in the log. `take_changes` returns them as a record, and
`settle` takes the outcome of that record. If it was not stored, `settle` undoes its changes and all later ones, with
the exceptions that its docstring names. No I/O, clock or tasks.

Memory: about 120 bytes per message in flight and 400 per batch, bounded by `Limits`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import count, groupby, islice
from typing import TypeAlias

import msgspec

from ha.broker.pop.ordered import OrderedBatch
from ha.protocol.pop_records import (
    CHANGED,
    OFFSET_COUNT_MAX,
    REMOVED,
    WHOLE,
    PopRecord,
    QueueRecord,
    TakenRecord,
    from_runs,
    to_runs,
)

QueueKey: TypeAlias = tuple[str, str, int]
"""(group, topic, queue id)"""

STALE_COUNT_MIN = 1024
"""Number by which stale entries in the schedule must outnumber valid ones to be removed"""
_SUSPENDED = 1
_RUN_SIZE = 24
_ORDERED_SIZE = 32
"""Estimated bytes of one run, and of one ordered message, in a record"""
_SLICE_COUNT_MAX = 512
"""Maximum number of messages per queue record of a snapshot, so that a part names fewer than OFFSET_COUNT_MAX"""


class Batch(msgspec.Struct, eq=False, kw_only=True):
    """Messages of one queue that were popped together, or one whose invisible time was changed. Times in ms since
    the epoch.

    offsets: queue offsets of all its messages, including those no longer in flight.
    is_suspended: the next delivery of its messages does not count as a retry.
    left: how many messages are still in flight.
    is_scheduled: whether it is in the schedule.
    """

    queue: PopQueue
    offsets: Sequence[int]
    pop_time_ms: int
    due_ms: int
    is_suspended: bool = False
    left: int = 0
    is_scheduled: bool = False


class PopQueue:
    """One queue of one group. Changed only by `PopState`."""

    __slots__ = ("batches", "committed", "is_busy", "key", "next_offset", "order", "undo")

    def __init__(self, key: QueueKey, next_offset: int = 0) -> None:
        self.key = key
        self.next_offset = next_offset
        """Queue offset from which the next pop reads"""
        self.batches: dict[int, Batch] = {}
        """Queue offset of each message in flight -> its batch"""
        self.order: OrderedBatch | None = None
        self.undo: Undo | None = None
        """Values of the queue at the last record; None if it has not changed since then"""
        self.is_busy = False
        """Whether a pop reads from it; others skip it meanwhile"""
        self.committed: int | None = None
        """Committed offset of the group when this state last read or set it. If the present one differs, others have
        reset or committed it since"""

    def in_flight(self, offset: int, pop_time_ms: int) -> Batch | None:
        """Returns the batch of the message at `offset` if it is in flight with this pop time; otherwise None."""
        batch = self.batches.get(offset)
        return batch if batch is not None and batch.pop_time_ms == pop_time_ms else None


class Undo(msgspec.Struct):
    """The values of one queue before its changes. `batches`: queue offset of each changed message -> the batch it was
    in; None if it was not in flight."""

    next_offset: int
    order: OrderedBatch | None
    batches: dict[int, Batch | None] = {}
    copied: set[int] = set()
    """Queue offsets of messages that left the state because their copies are in the log"""
    reset_to: int | None = None
    """Queue offset set by a reset, by the last one if there were several; None if there was none"""
    is_new: bool = False

    def remember(self, batches: dict[int, Batch | None]) -> None:
        """Saves the batches of messages that are about to change, unless they were saved before an earlier change."""
        if self.batches.keys().isdisjoint(batches):
            self.batches.update(batches)
            return
        for offset, batch in batches.items():
            self.batches.setdefault(offset, batch)

    def split(self, queue: PopQueue, offsets: Sequence[int]) -> Undo | None:
        """Moves the messages at `offsets`, whose changes are left to a later record, to a new object and returns it;
        None if `offsets` is empty.

        `queue`: the queue with all changes. The next offset in the new object is at most the queue offset of the first
        message that the later record takes.
        """
        if not offsets:
            return None
        batches = {offset: self.batches.pop(offset) for offset in offsets}
        next_offset = min([queue.next_offset, *(offset for offset, batch in batches.items() if batch is None)])
        later = Undo(next_offset, queue.order, batches, reset_to=self.reset_to)
        later.copied = self.copied.intersection(offsets)
        self.copied -= later.copied
        return later


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on messages in flight, per queue of a group and in total, and on the number of such queues."""

    per_queue: int
    total: int
    queue_count: int


_Changes: TypeAlias = "dict[QueueKey, tuple[PopQueue | None, Undo | None]]"


class PopState:
    """The POP state of all queues of all groups."""

    def __init__(
        self,
        limits: Limits,
        on_change: Callable[[], None] = lambda: None,
        on_scheduled: Callable[[int], None] = lambda due_ms: None,
        on_room: Callable[[PopQueue], None] = lambda queue: None,
    ) -> None:
        """`on_change` is called when there are changes to write. `on_scheduled` is called for each batch that is added
        to the schedule, with the time at which the batch is due (ms since the epoch). `on_room`: see `mark_full`."""
        self.limits = limits
        self.queues: dict[QueueKey, PopQueue] = {}
        self.in_flight_count = 0
        self._on_change = on_change
        self._on_scheduled = on_scheduled
        self._on_room = on_room
        self._batch_count = 0
        self._schedule: list[tuple[int, int, Batch]] = []
        self._sequence = count()
        self._full: dict[PopQueue | None, dict[PopQueue, None]] = {}
        """Full queues, by the queue whose messages have to leave the state first; None: those of any queue"""
        self._changed: _Changes = {}
        self._taken: _Changes = {}

    # ---- reading

    def get(self, key: QueueKey) -> PopQueue | None:
        """Returns the state of a queue of a group; None if the group never popped from it."""
        return self.queues.get(key)

    def room(self, queue: PopQueue) -> int:
        """Returns the number of further messages of `queue` that may be in flight; 0 or less if none."""
        limits = self.limits
        return min(limits.per_queue - len(queue.batches), limits.total - self.in_flight_count)

    def mark_full(self, queue: PopQueue) -> None:
        """Registers a queue without `room`: `on_room` is called with it once, as soon as it may have some."""
        reason = queue if self.in_flight_count < self.limits.total else None
        self._full.setdefault(reason, {})[queue] = None

    @property
    def next_due_ms(self) -> int | None:
        """Earliest time in the schedule, in ms since the epoch; None if no message is scheduled.

        The messages of a batch are not scheduled from `take_due` until the batch is passed to `reschedule`; then the
        time of the next attempt counts.
        """
        schedule = self._schedule
        while schedule and not schedule[0][2].left:
            heappop(schedule)[2].is_scheduled = False
        return schedule[0][0] if schedule else None

    def is_in_flight(self, batch: Batch, offset: int) -> bool:
        """Returns whether the message is still in flight as part of `batch`."""
        return batch.queue.batches.get(offset) is batch and self.queues.get(batch.queue.key) is batch.queue

    def left_of(self, batch: Batch) -> list[int]:
        """Returns the queue offsets of the messages of `batch` that are still in flight, ascending."""
        return [offset for offset in batch.offsets if self.is_in_flight(batch, offset)]

    def take_due(self, now_ms: int, count_max: int) -> list[Batch]:
        """Removes due batches from the schedule, until they have at least `count_max` messages, and returns them.
        For another attempt, pass them to `reschedule`."""
        found: list[Batch] = []
        total = 0
        while total < count_max and self.next_due_ms is not None and self._schedule[0][0] <= now_ms:
            batch = heappop(self._schedule)[2]
            batch.is_scheduled = False
            found.append(batch)
            total += batch.left
        return found

    def reschedule(self, batch: Batch, due_ms: int) -> None:
        """Returns a batch to the schedule, for another attempt at `due_ms`."""
        if batch.left and not batch.is_scheduled:
            batch.is_scheduled = True
            heappush(self._schedule, (due_ms, next(self._sequence), batch))
            self._on_scheduled(due_ms)

    # ---- changes

    def open(self, key: QueueKey, next_offset: int) -> PopQueue | None:
        """Adds a queue whose first pop reads from `next_offset`; returns None if there are too many queues."""
        if len(self.queues) >= self.limits.queue_count:
            return None
        queue = self.queues[key] = PopQueue(key, next_offset)
        self._undo_of(queue).is_new = True
        return queue

    def move(self, queue: PopQueue, next_offset: int) -> None:
        """Sets the queue offset from which the next pop reads."""
        if queue.next_offset != next_offset:
            self._undo_of(queue)
            queue.next_offset = next_offset

    def take(self, queue: PopQueue, offsets: Sequence[int], next_offset: int, pop_time_ms: int, due_ms: int) -> None:
        """Records that the messages at the queue offsets `offsets` were popped, and are due again at `due_ms` (ms since
        the epoch). The next pop begins at `next_offset`."""
        undo = self._undo_of(queue)
        batch = Batch(queue=queue, offsets=offsets, pop_time_ms=pop_time_ms, due_ms=due_ms)
        queue.next_offset = next_offset
        for offset in queue.batches.keys() & offsets:  # the group's offset was reset
            undo.batches.setdefault(offset, queue.batches[offset])
            self._set(queue, offset, None)
        undo.remember(dict.fromkeys(offsets))
        self._add(queue, offsets, batch)

    def acknowledge(self, queue: PopQueue, offsets: Iterable[int], pop_time_ms: int) -> list[int]:
        """Records that messages popped at `pop_time_ms` were processed. Returns the queue offsets of those that were
        not in flight from a pop at that time."""
        batches: dict[int, Batch] = queue.batches
        missing: list[int] = []
        for batch, group in groupby(offsets, batches.get):
            if batch is None or batch.pop_time_ms != pop_time_ms:
                missing += group
                continue
            done: dict[int, Batch | None] = dict.fromkeys(group, batch)
            self._undo_of(queue).remember(done)
            for offset in done:
                del batches[offset]
            self._count_removed(batch, len(done))
        self._drop_stale()
        return missing

    def finish(self, queue: PopQueue, offset: int, *, is_copied: bool = False) -> None:
        """Records that a message is lost or, with `is_copied`, that its copy is in the log."""
        undo = self._undo_of(queue)
        undo.batches.setdefault(offset, queue.batches.get(offset))
        if is_copied:
            undo.copied.add(offset)
        self._set(queue, offset, None)

    def change(self, queue: PopQueue, offset: int, pop_time_ms: int, due_ms: int, *, is_suspended: bool) -> None:
        """Sets the pop time and the due time (ms since the epoch) of a message in flight."""
        self._undo_of(queue).batches.setdefault(offset, queue.batches.get(offset))
        batch = Batch(queue=queue, offsets=(offset,), pop_time_ms=pop_time_ms, due_ms=due_ms, is_suspended=is_suspended)
        self._set(queue, offset, batch)

    def set_order(self, queue: PopQueue, order: OrderedBatch | None) -> None:
        """Sets the ordered messages of a queue; the previous object must not have been changed."""
        if queue.order != order:
            self._undo_of(queue)
            queue.order = order

    def reset(self, queue: PopQueue, next_offset: int) -> None:
        """Makes the next pop begin at another queue offset. Messages in flight from there on, and ordered ones, leave
        the state: they will be popped again."""
        undo = self._undo_of(queue)
        for offset in [offset for offset in queue.batches if offset >= next_offset]:
            undo.batches.setdefault(offset, queue.batches[offset])
            self._set(queue, offset, None)
        queue.next_offset, queue.order = next_offset, None
        undo.reset_to = next_offset

    def remove(self, key: QueueKey) -> None:
        """Forgets a queue whose topic or group was deleted."""
        queue = self.queues.pop(key, None)
        if queue is None:
            return
        for offset in list(queue.batches):
            self._set(queue, offset, None)
        queue.undo = None
        self._changed[key] = None, None
        self._on_change()

    def _undo_of(self, queue: PopQueue) -> Undo:
        """Marks a queue as changed, and returns its values before the change."""
        undo = queue.undo
        if undo is None:
            undo = queue.undo = Undo(queue.next_offset, queue.order)
            self._changed[queue.key] = queue, undo
            self._on_change()
        return undo

    def _set(self, queue: PopQueue, offset: int, batch: Batch | None) -> None:
        known = queue.batches.get(offset)
        if known is batch:
            return
        if known is not None:
            del queue.batches[offset]
            self._count_removed(known, 1)
        if batch is not None:
            self._add(queue, (offset,), batch)
        self._drop_stale()

    def _count_removed(self, batch: Batch, count: int) -> None:
        batch.left -= count
        self._batch_count -= not batch.left
        self.in_flight_count -= count
        for reason in (batch.queue, None) if self._full else ():
            for queue in self._full.pop(reason, ()):
                self._on_room(queue)

    def _drop_stale(self) -> None:
        if len(self._schedule) > 2 * self._batch_count + STALE_COUNT_MIN:
            for *_, batch in self._schedule:
                batch.is_scheduled = batch.left > 0  # an undone change may add messages again, which then schedules it
            self._schedule = [entry for entry in self._schedule if entry[2].left]
            heapify(self._schedule)

    def _add(self, queue: PopQueue, offsets: Sequence[int], batch: Batch) -> None:
        """Adds messages, none of which is in flight, to a batch."""
        before = len(queue.batches)
        queue.batches.update(dict.fromkeys(offsets, batch))
        count = len(queue.batches) - before
        self._batch_count += bool(count) and not batch.left
        batch.left += count
        self.in_flight_count += count
        self.reschedule(batch, batch.due_ms)

    # ---- the log

    @property
    def has_changes(self) -> bool:
        """Whether something was changed since the last record."""
        return bool(self._changed)

    def take_changes(self, size_max: int) -> PopRecord:
        """Returns changes since the last record, about `size_max` bytes at most: all changes of some queues, and
        possibly only a part of those of the last one. `has_changes` then tells whether more are left. `settle` must be
        called before the next `take_changes`.
        """
        assert not self._taken, "the previous record is not settled"
        records: list[QueueRecord] = []
        left: _Changes = {}
        size = message_count = 0
        count_max = _message_count(size_max)
        for key, (queue, undo) in self._changed.items():
            message_count += 0 if undo is None else len(undo.batches)
            if records and (size >= size_max or message_count > OFFSET_COUNT_MAX):
                break
            record = QueueRecord(*key, REMOVED)
            if queue is not None and undo is not None:
                offsets = sorted(undo.batches)
                queue.undo = undo.split(queue, offsets[count_max:])
                if queue.undo is not None:
                    left[key] = queue, queue.undo
                kind = WHOLE if undo.is_new else CHANGED  # a queue of this name may have been removed just before
                record = _record_of(queue, kind, offsets[:count_max], undo.batches)
            records.append(record)
            size += _size_of(record)
            if left:
                break
        changes = iter(self._changed.items())
        self._taken, self._changed = dict(islice(changes, len(records))), left | dict(changes)
        return PopRecord(queues=records)

    def settle(self, *, is_stored: bool) -> list[PopQueue]:
        """Takes the outcome of the record that `take_changes` returned. If it was not stored, undoes its changes and
        all later ones.

        Returns the queues of a stored record that still exist; otherwise those with undone changes, from which more
        messages may be popped. Some changes are written again instead of undone: resets, removals of queues, and
        removals of messages whose copies are stored.
        """
        taken, self._taken = self._taken, {}
        if is_stored:
            return [queue for queue, _ in taken.values() if queue is not None and self.queues.get(queue.key) is queue]
        removed = []
        undone: dict[PopQueue, None] = {}
        copied: list[tuple[PopQueue, int]] = []
        resets: dict[PopQueue, int] = {}
        for changes in (self._changed, taken):
            for key, (queue, undo) in changes.items():
                if queue is None or undo is None or undo.is_new:
                    removed.append(key)  # of a new queue, too: its name may have been in use
                if queue is None or undo is None or self.queues.get(key) is not queue:
                    continue
                undone[queue] = queue.undo = None
                for offset, batch in undo.batches.items():
                    self._set(queue, offset, batch)
                queue.next_offset, queue.order = undo.next_offset, undo.order
                copied += [(queue, offset) for offset in undo.copied]
                if undo.reset_to is not None:
                    resets.setdefault(queue, undo.reset_to)
                if undo.is_new:
                    del self.queues[key]
        self._changed = {key: (None, None) for key in removed if key not in self.queues}
        for queue, offset in copied:
            if offset in queue.batches:
                self.finish(queue, offset, is_copied=True)
        for queue, next_offset in resets.items():
            if self.queues.get(queue.key) is queue:
                self.reset(queue, next_offset)
        if self._changed:
            self._on_change()
        return list(undone)

    def apply(self, record: PopRecord) -> None:
        """Applies a record read from the log. Its changes are not returned by `take_changes`."""
        for change in record.queues:
            key = change.group, change.topic, change.queue_id
            queue = self.queues.get(key)
            if change.kind in (REMOVED, WHOLE) and queue is not None:
                for offset in list(queue.batches):
                    self._set(queue, offset, None)
                del self.queues[key]
                queue = None
            if change.kind == REMOVED:
                continue
            if queue is None:
                queue = self.queues[key] = PopQueue(key)
            queue.next_offset = change.next_offset
            queue.order = None if change.order is None else OrderedBatch.of_record(change.order)
            for offset in from_runs(change.done):
                if offset in queue.batches:
                    self._set(queue, offset, None)
            for taken in change.taken:
                batch = Batch(
                    queue=queue,
                    offsets=tuple(from_runs(taken.runs)),
                    pop_time_ms=taken.pop_time_ms,
                    due_ms=taken.due_ms,
                    is_suspended=bool(taken.marks & _SUSPENDED),
                )
                for offset in queue.batches.keys() & batch.offsets:
                    self._set(queue, offset, None)
                self._add(queue, batch.offsets, batch)

    def snapshot(self, size_max: int) -> Iterator[PopRecord]:
        """Yields the whole state in records of about `size_max` bytes; the last one may be empty.

        The state may change, and changes may be written, between two of these records. No record removes anything, so
        an incomplete snapshot loses nothing.
        """
        part: list[QueueRecord] = []
        size = 0
        slice_count = min(_SLICE_COUNT_MAX, _message_count(size_max))
        for key in list(self.queues):
            offsets = sorted(self.queues[key].batches) if key in self.queues else []
            for start in range(0, len(offsets) or 1, slice_count):
                queue = self.queues.get(key)
                if queue is None:
                    break
                record = _record_of(queue, CHANGED, offsets[start : start + slice_count], {})
                part.append(record)
                size += _size_of(record)
                if size >= size_max:
                    yield PopRecord(queues=part)
                    part, size = [], 0
        yield PopRecord(queues=part)


def _record_of(queue: PopQueue, kind: int, offsets: Sequence[int], before: Mapping[int, Batch | None]) -> QueueRecord:
    """Returns a record of the messages at `offsets`: of those in flight, and of those that were in flight in `before`
    and no longer are.

    Its next offset is that of the queue without the changes that are left to a later record, so that a crash in between
    loses no message.
    """
    done: list[int] = []
    in_flight: dict[Batch, list[int]] = {}
    for batch, group in groupby(offsets, queue.batches.get):
        if batch is not None:
            in_flight.setdefault(batch, []).extend(group)
        else:
            done += [offset for offset in group if before.get(offset) is not None]
    taken = [
        TakenRecord(batch.pop_time_ms, batch.due_ms, _SUSPENDED if batch.is_suspended else 0, to_runs(messages))
        for batch, messages in in_flight.items()
    ]
    order = None if queue.order is None else queue.order.to_record()
    next_offset = queue.next_offset if queue.undo is None else queue.undo.next_offset
    return QueueRecord(*queue.key, kind, next_offset, taken, to_runs(done), order)


def _message_count(size_max: int) -> int:
    """Returns the number of messages of a queue, at least 1, that take at most `size_max` bytes, even if each is a run
    and a batch of its own."""
    return max(1, size_max // (4 * _RUN_SIZE))


def _size_of(record: QueueRecord) -> int:
    """Returns the estimated size of `record` in bytes."""
    run_count = len(record.done) // 2 + sum(2 + len(taken.runs) // 2 for taken in record.taken)
    size = len(record.group) + len(record.topic) + 64 + _RUN_SIZE * run_count
    if record.order is not None:
        size += len(record.order.attempt_id) + _ORDERED_SIZE * (1 + len(record.order.messages))
    return size
