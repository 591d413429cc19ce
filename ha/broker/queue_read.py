"""Reading one queue: from a queue offset to the records of the next messages, with RocketMQ's statuses and limits.

Damage. Bytes of the log that are damaged raise DamagedBytes where they are read. While they may still be healed the
answer is OFFSET_FOUND_NULL at the same offset: the pull waits, or comes again. Once no peer has them, the messages
there are left out as RocketMQ leaves out those whose file is gone: the others are delivered, and if there is none the
answer is MESSAGE_WAS_REMOVING with the next offset behind. An entry that does not point to its message is mended from
the log first: each record says which queue and offset it has, and that is compared.

Source: DefaultMessageStore.getMessage; table and limits in the remoting specification, §4.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from ha.broker.options import BrokerOptions
from ha.errors import DamagedBytes, OffsetGone
from ha.protocol.codes import ResponseCode
from ha.protocol.record import RECORD_PLACE

if TYPE_CHECKING:
    from ha.store.commitlog import CommitLog
    from ha.store.consume_queue import ConsumeQueue, QueueEntry

Mend = Callable[["ConsumeQueue", int], Awaitable[bool]]
"""Has the entry at a queue offset written anew from the log; False if that can't be done or it was right."""

SCAN_COUNT_MIN = 800
"""Entries looked at in one read (RocketMQ: 16000 bytes of the queue), or as many as messages were asked for, if more.
"""
SCAN_COUNT_MAX = 8192
"""But no more than this, whatever a stranger asks for."""

Wanted = tuple[int, int, int]
"""Of a message that an answer will have: queue offset, physical offset, size."""
_MEND_COUNT_MAX = 4
"""So many wrong entries are mended for one read."""

BLANK_SIZE = 0x7FFFFFFF
"""Record size in an entry that stands for no message (RocketMQ: fillPreBlank)."""


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
        self, log: CommitLog, options: BrokerOptions, *, corrects_offsets: bool = True, mend: Mend | None = None
    ) -> None:
        """`corrects_offsets` is False on a slave: what lies outside a queue then keeps the asked offset.

        `mend` is asked to mend an entry that is wrong, and the read begins again.
        """
        self._log = log
        self._options = options
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
            next_offset = 0 if self._corrects_offsets else queue_offset
            return QueueRead(ReadStatus.NO_MESSAGE_IN_QUEUE, next_offset, 0, 0)
        for _ in range(_MEND_COUNT_MAX):
            try:
                return await self._read_once(queue, queue_offset, message_count_max, message_bytes_max, tags_codes)
            except _WrongEntryError as wrong:
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
        """Raises _WrongEntryError."""
        min_offset, max_offset = queue.min_offset, queue.max_offset
        outside = _outside(queue_offset, min_offset, max_offset)
        if outside is not None:
            status, corrected_offset = outside
            return QueueRead(
                status, corrected_offset if self._corrects_offsets else queue_offset, min_offset, max_offset
            )
        head = queue.read(queue_offset, 1)
        if not head:
            return QueueRead(ReadStatus.OFFSET_FOUND_NULL, queue_offset, min_offset, max_offset)
        behind_bytes = self._log.max_offset.value - head[0].physical_offset
        is_far_behind = behind_bytes > self._options.access_in_memory_bytes_max
        count_max, bytes_max = self.limits(message_count_max, message_bytes_max, is_far_behind=is_far_behind)
        # Without a filter no more entries are wanted than messages; with one, RocketMQ looks at so many.
        scan_count = count_max if tags_codes is None else min(max(SCAN_COUNT_MIN, message_count_max), SCAN_COUNT_MAX)
        wanted, scanned_count, has_removed = _choose(
            self._log,
            queue.read(queue_offset, scan_count),
            queue_offset,
            count_max,
            bytes_max,
            tags_codes,
        )
        next_offset = queue_offset + scanned_count
        if not wanted:
            status = ReadStatus.MESSAGE_WAS_REMOVING if has_removed else ReadStatus.NO_MATCHED_MESSAGE
            return QueueRead(status, next_offset, min_offset, max_offset)
        try:
            wanted, body = await _fetch(self._log, wanted)
        except DamagedBytes:
            return QueueRead(ReadStatus.OFFSET_FOUND_NULL, queue_offset, min_offset, max_offset)
        except OffsetGone:  # retention took the segment since `_choose` looked where the log begins
            return QueueRead(ReadStatus.MESSAGE_WAS_REMOVING, next_offset, min_offset, max_offset)
        if not wanted:
            return QueueRead(ReadStatus.MESSAGE_WAS_REMOVING, next_offset, min_offset, max_offset)
        _check_places(body, wanted, queue.queue_id)
        return QueueRead(ReadStatus.FOUND, next_offset, min_offset, max_offset, body, len(wanted), is_far_behind)


class _WrongEntryError(Exception):
    """The entry at `queue_offset` does not point to its message."""

    def __init__(self, queue_offset: int) -> None:
        super().__init__(queue_offset)
        self.queue_offset = queue_offset


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


def _choose(
    log: CommitLog,
    entries: Sequence[QueueEntry],
    queue_offset: int,
    count_max: int,
    bytes_max: int,
    tags_codes: frozenset[int] | None,
) -> tuple[list[Wanted], int, bool]:
    """Choose the messages of one answer among `entries`, the first of which is at `queue_offset`.

    With them: how many entries were looked at, and whether any of those is of a message that retention took.
    _WrongEntryError for an entry that can't be right, if nothing before it is wanted.
    """
    log_start = log.min_offset
    log_end = log.max_offset.value
    wanted: list[Wanted] = []
    total_size = scanned_count = 0
    has_removed = False
    previous_end = 0
    for physical_offset, size, tags_code in entries:
        if size != BLANK_SIZE:
            if size <= 0 or physical_offset < previous_end or physical_offset + size > log_end:
                if wanted:
                    break
                raise _WrongEntryError(queue_offset + scanned_count)
            previous_end = physical_offset + size
        if physical_offset < log_start:
            has_removed = True
        elif size != BLANK_SIZE and (tags_codes is None or tags_code in tags_codes):
            if wanted and (len(wanted) == count_max or total_size + size > bytes_max):
                break
            total_size += size
            wanted.append((queue_offset + scanned_count, physical_offset, size))
        scanned_count += 1
    return wanted, scanned_count, has_removed


async def _fetch(log: CommitLog, wanted: list[Wanted]) -> tuple[list[Wanted], bytes]:
    """Read what is wanted, but for messages that are damaged for good. DamagedBytes if one may yet be healed."""
    try:
        return wanted, await _read_runs(log, _runs(wanted))
    except DamagedBytes as damaged:
        if not damaged.is_hopeless:
            raise
    kept, parts = [], []
    for each in wanted:
        try:
            parts.append(await _read_runs(log, _runs([each])))
        except DamagedBytes as damaged:
            if not damaged.is_hopeless:
                raise
        else:
            kept.append(each)
    return kept, b"".join(parts)


def _runs(wanted: Sequence[Wanted]) -> list[tuple[int, int]]:
    """Join what is adjacent in the log."""
    runs: list[tuple[int, int]] = []
    run_start = run_end = -1
    for _, physical_offset, size in wanted:
        if physical_offset != run_end:
            if run_start >= 0:
                runs.append((run_start, run_end))
            run_start = physical_offset
        run_end = physical_offset + size
    runs.append((run_start, run_end))
    return runs


def _check_places(body: bytes, wanted: Sequence[Wanted], queue_id: int) -> None:
    """_WrongEntryError unless each record says that it is where its entry stands."""
    at = 0
    place = RECORD_PLACE.unpack_from
    for queue_offset, physical_offset, size in wanted:
        if size < RECORD_PLACE.size or place(body, at) != (size, queue_id, queue_offset, physical_offset):
            raise _WrongEntryError(queue_offset)
        at += size


async def _read_runs(log: CommitLog, runs: Sequence[tuple[int, int]]) -> bytes:
    parts: list[memoryview | bytes] = []
    for start, end in runs:
        while start < end:
            hot = log.read_hot(start, end - start)
            part = hot if hot is not None else await log.read(start, end - start, "pull")
            if not part:
                raise OffsetGone(start, log.min_offset, log.max_offset.value)
            parts.append(part)
            start += len(part)
    return b"".join(parts)
