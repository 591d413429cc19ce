"""Reading one queue: from a queue offset to the records of the next messages, with RocketMQ's statuses and limits.

Damage. Bytes of the log that are damaged raise DamagedBytes where they are read. While they may still be healed the
answer is OFFSET_FOUND_NULL at the same offset: the pull waits, or comes again. Once no peer has them, the messages
there are left out as RocketMQ leaves out those whose file is gone: the others are delivered, and if there is none the
answer is MESSAGE_WAS_REMOVING with the next offset behind. An entry that does not point to its message is mended from
the log first: each record says which queue and offset it has, and that is compared.

Source: DefaultMessageStore.getMessage; table and limits in the remoting specification, §4.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from ha.broker.choosing import Limits, Wanted, WrongEntryError, choose
from ha.broker.options import BrokerOptions
from ha.errors import DamagedBytes, OffsetGone
from ha.protocol.codes import ResponseCode
from ha.protocol.compiled import with_compiled_twin
from ha.protocol.store_files import ENTRY, ENTRY_SIZE

if TYPE_CHECKING:
    from ha.store.commitlog import CommitLog
    from ha.store.consume_queue import ConsumeQueue
    from ha.store.mapped_file import RunBlocking

Mend = Callable[["ConsumeQueue", int], Awaitable[bool]]
"""Has the entry at a queue offset written anew from the log; False if that can't be done or it was right."""

Span = tuple[int, memoryview | bytes]
"""Where some bytes of the log begin (physical offset), and they."""

SCAN_COUNT_MIN = 800
"""Entries looked at in one read (RocketMQ: 16000 bytes of the queue), or as many as messages were asked for, if more.
"""
SCAN_COUNT_MAX = 8192
"""But no more than this, whatever a stranger asks for."""

_MEND_COUNT_MAX = 4
"""So many wrong entries are mended for one read."""

_GAP_BYTES_MAX = 128 * 1024
"""What lies between two messages is read with them if it is no more: the system reads so much ahead anyway, of what it
has in memory it takes as long as a read of its own does, and other queues' consumers find it read (recent_reads.py)."""
_SPAN_BYTES_MAX = 1024 * 1024
"""So much is read, and its checksums compared, in one turn, unless one message is more."""


class ReadStatus(Enum):
    """RocketMQ's GetMessageStatus; the name is the remark of a pull's answer."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
    OFFSET_RESET = "OFFSET_RESET"

    def response_code(self, asked_offset: int) -> ResponseCode:
        """The code of a pull of queue offset `asked_offset` that ended so."""
        match self:
            case ReadStatus.FOUND:
                return ResponseCode.SUCCESS
            case ReadStatus.NO_MATCHED_MESSAGE | ReadStatus.MESSAGE_WAS_REMOVING:
                return ResponseCode.PULL_RETRY_IMMEDIATELY
            case ReadStatus.OFFSET_FOUND_NULL | ReadStatus.OFFSET_OVERFLOW_ONE:
                return ResponseCode.PULL_NOT_FOUND
            case ReadStatus.NO_MESSAGE_IN_QUEUE:
                return ResponseCode.PULL_OFFSET_MOVED if asked_offset else ResponseCode.PULL_NOT_FOUND
            case ReadStatus.OFFSET_OVERFLOW_BADLY | ReadStatus.OFFSET_TOO_SMALL | ReadStatus.OFFSET_RESET:
                return ResponseCode.PULL_OFFSET_MOVED


class QueueRead(msgspec.Struct, frozen=True, gc=False):
    """What a read came to. Offsets are queue offsets (entries); `body` is the records one after the other, as stored.

    is_far_behind: the reader is further behind the log's end than what is taken to be in memory.
    """

    status: ReadStatus
    next_offset: int
    min_offset: int
    max_offset: int
    body: bytes = b""
    message_count: int = 0
    is_far_behind: bool = False


class QueueReader:
    """Reads the queues of one log. What it returns are bytes as stored; no record is decoded."""

    def __init__(
        self,
        log: CommitLog,
        options: BrokerOptions,
        *,
        run_blocking: RunBlocking,
        corrects_offsets: Callable[[], bool] = lambda: True,
        mend: Mend | None = None,
    ) -> None:
        """`corrects_offsets` says False on a slave: what lies outside a queue then keeps the asked offset.

        `mend` is asked to mend an entry that is wrong, and the read begins again.
        """
        self._log = log
        self._options = options
        self._run_blocking = run_blocking
        self._corrects_offsets = corrects_offsets
        self._mend = mend

    async def read(
        self,
        queue: ConsumeQueue | None,
        queue_offset: int,
        *,
        message_count_max: int,
        message_bytes_max: int,
        tags_codes: frozenset[int] | None,
    ) -> QueueRead:
        """Read the messages at `queue_offset` and after whose tag hash is in `tags_codes` (None: all).

        `message_count_max` and `message_bytes_max` are the consumer's own wish. At least one message is returned if
        there is one, however large.
        """
        if queue is None:
            next_offset = 0 if self._corrects_offsets() else queue_offset
            return QueueRead(ReadStatus.NO_MESSAGE_IN_QUEUE, next_offset, 0, 0)
        for _ in range(_MEND_COUNT_MAX):
            try:
                return await self._read_once(queue, queue_offset, message_count_max, message_bytes_max, tags_codes)
            except WrongEntryError as wrong:
                try:
                    if self._mend is None or not await self._mend(queue, wrong.queue_offset):
                        break
                except (DamagedBytes, OSError):
                    break
        return QueueRead(ReadStatus.OFFSET_FOUND_NULL, queue_offset, queue.min_offset, queue.max_offset)

    def limits(self, message_count_max: int, message_bytes_max: int, *, is_far_behind: bool) -> tuple[int, int]:
        """How many messages, and bytes of more than one, an answer may have to a consumer that wishes for so many."""
        options = self._options
        count_max, bytes_max = options.transfer_hot_count_max, options.transfer_hot_bytes_max
        if is_far_behind:
            count_max, bytes_max = options.transfer_cold_count_max, options.transfer_cold_bytes_max
        return max(1, min(count_max, message_count_max)), min(bytes_max, message_bytes_max)

    async def _read_once(
        self,
        queue: ConsumeQueue,
        queue_offset: int,
        message_count_max: int,
        message_bytes_max: int,
        tags_codes: frozenset[int] | None,
    ) -> QueueRead:
        """Raises WrongEntryError."""
        min_offset, max_offset = queue.min_offset, queue.max_offset
        outside = _outside(queue_offset, min_offset, max_offset)
        if outside is not None:
            status, corrected_offset = outside
            return QueueRead(
                status, corrected_offset if self._corrects_offsets() else queue_offset, min_offset, max_offset
            )
        # Without a filter no more entries are wanted than messages; with one, RocketMQ looks at so many.
        scan_count = min(max(SCAN_COUNT_MIN, message_count_max), SCAN_COUNT_MAX)
        if tags_codes is None:
            counts_max = (self.limits(message_count_max, 0, is_far_behind=is_far)[0] for is_far in (False, True))
            scan_count = max(counts_max)
        entries = await queue.fetch_raw(queue_offset, scan_count, self._run_blocking)
        if not entries:
            return QueueRead(ReadStatus.OFFSET_FOUND_NULL, queue_offset, min_offset, max_offset)
        log_end = self._log.max_offset.value
        is_far_behind = log_end - ENTRY.unpack_from(entries)[0] > self._options.access_in_memory_bytes_max
        count_max, bytes_max = self.limits(message_count_max, message_bytes_max, is_far_behind=is_far_behind)
        if tags_codes is None:
            entries = entries[: count_max * ENTRY_SIZE]
        limits = Limits(count_max, bytes_max, self._log.min_offset, log_end)
        wanted, scanned_count, has_removed = choose(entries, queue_offset, limits, tags_codes)
        next_offset = queue_offset + scanned_count
        if not wanted.count:
            status = ReadStatus.MESSAGE_WAS_REMOVING if has_removed else ReadStatus.NO_MATCHED_MESSAGE
            return QueueRead(status, next_offset, min_offset, max_offset)
        try:
            read, body = await _fetch(self._log, wanted, queue.queue_id)
        except DamagedBytes:
            return QueueRead(ReadStatus.OFFSET_FOUND_NULL, queue_offset, min_offset, max_offset)
        except OffsetGone:  # retention took the segment since it was looked where the log begins
            return QueueRead(ReadStatus.MESSAGE_WAS_REMOVING, next_offset, min_offset, max_offset)
        if read is None:
            return QueueRead(ReadStatus.MESSAGE_WAS_REMOVING, next_offset, min_offset, max_offset)
        return QueueRead(ReadStatus.FOUND, next_offset, min_offset, max_offset, body, read.count, is_far_behind)


def _outside(queue_offset: int, min_offset: int, max_offset: int) -> tuple[ReadStatus, int] | None:
    """The status and the corrected offset of a read outside [min_offset, max_offset), else None."""
    if max_offset == 0:
        return ReadStatus.NO_MESSAGE_IN_QUEUE, 0
    if queue_offset < min_offset:
        return ReadStatus.OFFSET_TOO_SMALL, min_offset
    if queue_offset == max_offset:
        return ReadStatus.OFFSET_OVERFLOW_ONE, queue_offset
    if queue_offset > max_offset:
        return ReadStatus.OFFSET_OVERFLOW_BADLY, max_offset
    return None


async def _fetch(log: CommitLog, wanted: Wanted, queue_id: int) -> tuple[Wanted | None, bytes]:
    """Read what is wanted, but for messages that are damaged for good. DamagedBytes if one may yet be healed.

    WrongEntryError if a record that is read is not the one that its entry says.
    """
    try:
        return wanted, gathered(await read_spans(log, wanted), wanted, queue_id)
    except DamagedBytes as damaged:
        if not damaged.is_hopeless:
            raise
    kept, parts = [], []
    for each in wanted.one_by_one():
        try:
            parts.append(gathered(await read_spans(log, each), each, queue_id))
        except DamagedBytes as damaged:
            if not damaged.is_hopeless:
                raise
        else:
            kept.append(each)
    return Wanted.joined(kept), b"".join(parts)


async def read_spans(log: CommitLog, wanted: Wanted) -> list[Span]:
    """What of the log holds the messages of `wanted`, ascending: those that are near each other are in one read."""
    spans: list[Span] = []
    places, sizes = wanted.physical_offsets, wanted.sizes
    number, begin, end = 0, places[0], places[-1] + sizes[-1]
    while True:
        # What is in memory costs nothing to look at, however far it reaches.
        span = log.read_nowait(begin, end - begin)
        if span is None:
            stop = near_end(wanted, number, begin, _GAP_BYTES_MAX, _SPAN_BYTES_MAX)
            span = await log.read(begin, stop - begin, "pull")
        if not span:
            raise OffsetGone(begin, log.min_offset, log.max_offset.value)
        spans.append((begin, span))
        begin += len(span)
        if begin >= end:
            return spans
        behind = bisect_right(places, begin)
        if places[behind - 1] + sizes[behind - 1] > begin:  # a segment ends there, or what is sound
            number = behind - 1
        else:
            number, begin = behind, places[behind]


@with_compiled_twin
def near_end(wanted: Wanted, number: int, begin: int, gap_max: int, size_max: int) -> int:
    """Where the last message ends that is read together with one, of which `begin` is what comes next.

    Between two of them lie at most `gap_max` bytes, and from `begin` on it is at most `size_max` if it isn't that one.
    """
    places, sizes = wanted.physical_offsets, wanted.sizes
    end = places[number] + sizes[number]
    for place, size in zip(places[number + 1 :], sizes[number + 1 :], strict=True):
        if place - end > gap_max or place + size - begin > size_max:
            break
        end = place + size
    return end


@with_compiled_twin
def gathered(spans: list[Span], wanted: Wanted, queue_id: int) -> bytes:
    """The records of `wanted`, which lie in `spans`, one after the other. ValueError if one is not all there.

    WrongEntryError unless each says that it is where its entry stands.
    """
    parts: list[memoryview | bytes] = []
    number = 0
    for begin, size in zip(wanted.physical_offsets, wanted.sizes, strict=True):
        place, end = begin, begin + size
        while place < end:
            while number < len(spans) and spans[number][0] + len(spans[number][1]) <= place:
                number += 1
            if number == len(spans) or spans[number][0] > place:
                raise ValueError(f"{place} is in none of the spans")
            base, span = spans[number]
            parts.append(span[place - base : end - base])
            place += len(parts[-1])
    body = b"".join(parts)
    wanted.check(body, queue_id)
    return body
