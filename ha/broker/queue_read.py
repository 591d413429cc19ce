"""Reads messages of one queue from a queue offset on, with RocketMQ's statuses and limits.

Damaged bytes of the log do not make a read fail. While they may still be repaired, the answer is OFFSET_FOUND_NULL at
the same offset, so that the pull waits or is repeated. Once several repairs have failed (`DamagedBytes.is_hopeless`),
the messages in these bytes are skipped, as RocketMQ skips messages of deleted files. The other messages are delivered;
if there are none, the answer is MESSAGE_WAS_REMOVING with the next offset.

An entry that does not point to its message, or that the disk can't read, is repaired from the log, where every record
states its queue and queue offset, and the read is repeated. The answer is OFFSET_FOUND_NULL if the entry can't be
repaired, or if too many files are open.

Source: DefaultMessageStore.getMessage.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from enum import Enum

import msgspec
import trio

from ha.broker.choosing import Limits, Wanted, WrongEntryError, choose
from ha.broker.options import BrokerOptions
from ha.errors import DamagedBytes, OffsetGone
from ha.protocol.codes import ResponseCode
from ha.protocol.compiled import with_compiled_twin
from ha.protocol.store_files import ENTRY, ENTRY_SIZE
from ha.store.commitlog import CommitLog
from ha.store.consume_queue import ConsumeQueue
from ha.store.files import is_passing
from ha.store.mapped_file import RunBlocking

RepairEntry = Callable[["ConsumeQueue", int], Awaitable[bool]]
"""Rewrites the entry at a queue offset from the log; returns False if that is impossible or the entry was correct."""

Span = tuple[int, memoryview | bytes]
"""A physical offset, and the bytes of the log from there on."""

SCAN_COUNT_MIN = 800
"""Number of entries scanned per read with a filter, unless more messages are requested (RocketMQ: 16000 bytes of the
queue)."""
SCAN_COUNT_MAX = 8192
"""Maximum number of entries scanned per read with a filter, even if more messages are requested."""

UNREADABLE_RETRY_S = 1.0
"""Time in seconds after which the read of a waiting consumer is repeated if too many files were open, as nothing
signals that descriptors are free again. RocketMQ: 5 s."""

_FEWER_ENTRIES = 16
"""Factor by which a read has fewer entries after the disk could not read all of them: a disk may try for seconds to
read a bad sector."""

_REPAIR_COUNT_MAX = 4
"""Maximum number of wrong entries repaired per read."""

_GAP_BYTES_MAX = 128 * 1024
"""Maximum bytes between two messages that are read together. The system reads that much ahead anyway, copying these
bytes takes about as long as a second read, and consumers of other queues find them cached (recent_reads.py)."""
_SPAN_BYTES_MAX = 1024 * 1024
"""Maximum bytes read and verified before other tasks run, unless a single message is larger."""


class ReadStatus(Enum):
    """The result of a read (RocketMQ: GetMessageStatus). Its name is the remark of the response to a pull."""

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
        """Returns the response code for a pull at queue offset `asked_offset` with this status."""
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
    """The result of a read. Offsets are queue offsets (entries).

    next_offset: where the next read begins.
    body: the records as stored, concatenated.
    is_far_behind: the read began more than `access_in_memory_bytes_max` before the log's end, so that the messages are
    assumed not to be in memory. False without messages.
    is_interrupted: the read failed because too many files were open.
    """

    status: ReadStatus
    next_offset: int
    min_offset: int
    max_offset: int
    body: bytes = b""
    message_count: int = 0
    is_far_behind: bool = False
    is_interrupted: bool = False


class QueueReader:
    """Reads the queues of one log. Returns bytes as stored, without decoding records."""

    def __init__(
        self,
        log: CommitLog,
        options: BrokerOptions,
        *,
        run_blocking: RunBlocking,
        corrects_offsets: Callable[[], bool] = lambda: True,
        repair_entry: RepairEntry | None = None,
    ) -> None:
        """`corrects_offsets` returns whether `next_offset` of a read outside the queue is the nearest valid offset. If
        not, it is the requested offset: on a slave or a new master, whose queue may lag behind what consumers have read
        from another broker.

        `repair_entry` corrects a wrong entry, after which the read is repeated.
        """
        self._log = log
        self._options = options
        self._run_blocking = run_blocking
        self._corrects_offsets = corrects_offsets
        self._repair_entry = repair_entry
        self.interrupted_at = -math.inf
        """Time (Trio's clock) of the last read that failed temporarily, because too many files were open; -inf if none
        did"""

    async def read(
        self,
        queue: ConsumeQueue | None,
        queue_offset: int,
        *,
        message_count_max: int,
        message_bytes_max: int,
        tags_codes: frozenset[int] | None,
    ) -> QueueRead:
        """Reads the messages whose tag hash is in `tags_codes` (None: all messages), starting at `queue_offset`.

        `message_count_max` and `message_bytes_max` are the consumer's limits; a single message may be larger. The
        result may have no messages although some follow: the status and `next_offset` say how to go on. Raises OSError
        if the disk can't read.
        """
        outside = self._outside(queue, queue_offset)
        if outside is not None:
            return outside
        assert queue is not None
        is_interrupted = False
        for _ in range(_REPAIR_COUNT_MAX):
            try:
                try:
                    return await self._read_once(queue, queue_offset, message_count_max, message_bytes_max, tags_codes)
                except WrongEntryError as wrong:
                    if self._repair_entry is None or not await self._repair_entry(queue, wrong.queue_offset):
                        break
            except DamagedBytes:
                break
            except OffsetGone:  # retention deleted a segment meanwhile: the messages of the next one are still there
                continue
            except OSError as error:
                is_interrupted = self._note(error)
                if not is_interrupted:
                    raise
                break
        return QueueRead(
            ReadStatus.OFFSET_FOUND_NULL,
            queue_offset,
            queue.min_offset,
            queue.max_offset,
            is_interrupted=is_interrupted,
        )

    def _note(self, error: OSError) -> bool:
        """Returns whether an error is temporary (`is_passing`); if so, sets `interrupted_at`."""
        if is_passing(error):
            self.interrupted_at = trio.current_time()
            return True
        return False

    def read_nowait(
        self,
        queue: ConsumeQueue | None,
        queue_offset: int,
        *,
        message_count_max: int,
        message_bytes_max: int,
        tags_codes: frozenset[int] | None,
    ) -> QueueRead | None:
        """Like `read`, but returns None if the entries or messages are not in memory, have to be repaired, or can't be
        read: then call `read`."""
        outside = self._outside(queue, queue_offset)
        if outside is not None:
            return outside
        assert queue is not None
        try:
            entries = queue.read_cached(queue_offset, self._scan_count(message_count_max, tags_codes))
            if not entries:
                return None
            read, wanted = self._choose(queue, queue_offset, entries, message_count_max, message_bytes_max, tags_codes)
            if not wanted.count:
                return read
            spans: list[Span] = []
            if read_spans_nowait(self._log, wanted, wanted.physical_offsets[0], spans, _SPAN_BYTES_MAX) is not None:
                return None
            return msgspec.structs.replace(read, body=gathered(spans, wanted, queue.queue_id))
        except (WrongEntryError, OSError):
            return None

    def limits(self, message_count_max: int, message_bytes_max: int, *, is_far_behind: bool) -> tuple[int, int]:
        """Returns the limits of an answer, in messages and bytes, given those of the consumer."""
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
        """Reads once. Raises WrongEntryError if an entry does not point to its message or can't be read, OffsetGone if
        retention deleted a message meanwhile, and OSError if the disk can't read the log."""
        min_offset, max_offset = queue.min_offset, queue.max_offset
        scan_count = self._scan_count(message_count_max, tags_codes)
        entries = await self._entries(queue, queue_offset, scan_count)
        if not entries:
            return QueueRead(ReadStatus.OFFSET_FOUND_NULL, queue_offset, min_offset, max_offset)
        read, wanted = self._choose(queue, queue_offset, entries, message_count_max, message_bytes_max, tags_codes)
        if not wanted.count:
            return read
        try:
            found, body = await _fetch(self._log, wanted, queue.queue_id)
        except DamagedBytes:
            return QueueRead(ReadStatus.OFFSET_FOUND_NULL, queue_offset, min_offset, max_offset)
        if found is None:
            return QueueRead(ReadStatus.MESSAGE_WAS_REMOVING, read.next_offset, min_offset, max_offset)
        return msgspec.structs.replace(read, body=body, message_count=found.count)

    async def _entries(self, queue: ConsumeQueue, queue_offset: int, count: int) -> bytes:
        """Reads up to `count` entries; fewer if the disk can't read all of them. Raises WrongEntryError if it can't
        read the first one, and OSError if no file can be opened."""
        while True:
            try:
                return await queue.fetch_raw(queue_offset, count, self._run_blocking)
            except OSError as error:
                if is_passing(error):
                    raise
                if count == 1:
                    raise WrongEntryError(queue_offset) from error
                count = max(1, count // _FEWER_ENTRIES)

    def _outside(self, queue: ConsumeQueue | None, queue_offset: int) -> QueueRead | None:
        """Returns the result of a read outside the queue, with the queue offset to continue at; None if `queue_offset`
        is in the queue."""
        min_offset, max_offset = (0, 0) if queue is None else (queue.min_offset, queue.max_offset)
        if max_offset == 0:
            status, corrected_offset = ReadStatus.NO_MESSAGE_IN_QUEUE, 0
        elif queue_offset < min_offset:
            status, corrected_offset = ReadStatus.OFFSET_TOO_SMALL, min_offset
        elif queue_offset < max_offset:
            return None
        elif queue_offset == max_offset:
            status, corrected_offset = ReadStatus.OFFSET_OVERFLOW_ONE, queue_offset
        else:
            status, corrected_offset = ReadStatus.OFFSET_OVERFLOW_BADLY, max_offset
        return QueueRead(status, corrected_offset if self._corrects_offsets() else queue_offset, min_offset, max_offset)

    def _scan_count(self, message_count_max: int, tags_codes: frozenset[int] | None) -> int:
        """Returns how many entries to scan: without a filter, as many as messages may be returned; with a filter,
        SCAN_COUNT_MIN to SCAN_COUNT_MAX."""
        if tags_codes is None:
            options = self._options
            return max(1, min(max(options.transfer_hot_count_max, options.transfer_cold_count_max), message_count_max))
        return min(max(SCAN_COUNT_MIN, message_count_max), SCAN_COUNT_MAX)

    def _choose(
        self,
        queue: ConsumeQueue,
        queue_offset: int,
        entries: bytes,
        message_count_max: int,
        message_bytes_max: int,
        tags_codes: frozenset[int] | None,
    ) -> tuple[QueueRead, Wanted]:
        """Returns the result without its bytes, and the messages to read for it. Raises WrongEntryError."""
        log_end = self._log.max_offset.value
        is_far_behind = log_end - ENTRY.unpack_from(entries)[0] > self._options.access_in_memory_bytes_max
        count_max, bytes_max = self.limits(message_count_max, message_bytes_max, is_far_behind=is_far_behind)
        if tags_codes is None:
            entries = entries[: count_max * ENTRY_SIZE]
        limits = Limits(count_max, bytes_max, self._log.min_offset, log_end)
        wanted, scanned_count, has_removed = choose(entries, queue_offset, limits, tags_codes)
        status, count = ReadStatus.FOUND, wanted.count
        if not count:
            status = ReadStatus.MESSAGE_WAS_REMOVING if has_removed else ReadStatus.NO_MATCHED_MESSAGE
        read = QueueRead(
            status,
            queue_offset + scanned_count,
            queue.min_offset,
            queue.max_offset,
            message_count=count,
            is_far_behind=is_far_behind and count > 0,
        )
        return read, wanted


async def _fetch(log: CommitLog, wanted: Wanted, queue_id: int) -> tuple[Wanted | None, bytes]:
    """Reads the chosen messages except those damaged beyond repair; returns the messages read (None if there are none)
    and their records.

    Raises DamagedBytes if one may still be repaired. Raises WrongEntryError if a record read is not the one that its
    entry names.
    """
    try:
        return wanted, gathered(await read_spans(log, wanted), wanted, queue_id)
    except DamagedBytes as damaged:
        if not damaged.is_hopeless:
            raise
    kept, parts = [], []
    for each in wanted.split():
        try:
            parts.append(gathered(await read_spans(log, each), each, queue_id))
        except DamagedBytes as damaged:
            if not damaged.is_hopeless:
                raise
        else:
            kept.append(each)
    return Wanted.joined(kept), b"".join(parts)


async def read_spans(log: CommitLog, wanted: Wanted) -> list[Span]:
    """Reads the parts of the log that hold `wanted`, ascending. Messages close to each other share a read. Raises
    DamagedBytes, and OffsetGone if retention deleted some meanwhile."""
    spans: list[Span] = []
    begin: int | None = wanted.physical_offsets[0]
    while begin is not None:
        begin = read_spans_nowait(log, wanted, begin, spans)
        if begin is not None:
            span = await log.read(begin, _near_size(wanted, begin, _SPAN_BYTES_MAX), "pull")
            if not span:
                raise OffsetGone(begin, log.min_offset, log.max_offset.value)
            spans.append((begin, span))
            begin = _wanted_from(wanted, begin + len(span))
    return spans


def read_spans_nowait(log: CommitLog, wanted: Wanted, begin: int, spans: list[Span], cached_max: int = 0) -> int | None:
    """Adds to `spans` the bytes of `wanted` from physical offset `begin` on, up to the first byte that is not in
    memory; at most about `cached_max` bytes may be read from the page cache. Returns the physical offset of the first
    missing byte, or None if all were added."""
    at: int | None = begin
    end = wanted.physical_offsets[-1] + wanted.sizes[-1]
    while at is not None:
        span = log.read_nowait(at, end - at)  # bytes in memory cost nothing, whatever their number
        if not span and cached_max > 0:
            span = log.read_cached(at, _near_size(wanted, at, cached_max))
            cached_max -= len(span or b"")
        if not span:
            return at
        spans.append((at, span))
        at = _wanted_from(wanted, at + len(span))
    return None


def _near_size(wanted: Wanted, begin: int, size_max: int) -> int:
    """Returns how many bytes to read from physical offset `begin`, which is within a message: see `near_end`."""
    number = bisect_right(wanted.physical_offsets, begin) - 1
    return near_end(wanted, number, begin, _GAP_BYTES_MAX, size_max) - begin


def _wanted_from(wanted: Wanted, physical_offset: int) -> int | None:
    """Returns the physical offset of the first wanted byte at or after `physical_offset`; None if there is none."""
    places, sizes = wanted.physical_offsets, wanted.sizes
    behind = bisect_right(places, physical_offset)
    if places[behind - 1] + sizes[behind - 1] > physical_offset:  # the last read ended within a message
        return physical_offset
    return places[behind] if behind < len(places) else None


@with_compiled_twin
def near_end(wanted: Wanted, number: int, begin: int, gap_max: int, size_max: int) -> int:
    """Returns the physical offset of the end of a read that begins at physical offset `begin`, within message `number`:
    the end of the last message that is read with it.

    At most `gap_max` bytes lie between two messages of the read, and it has at most `size_max` bytes unless it is one
    message.
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
    """Returns the records of `wanted` from `spans`, concatenated. Raises ValueError if `spans` lack bytes of one.

    Raises WrongEntryError unless each record states the position that its entry has.
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
