"""Pulls ranges of a queue over the network, as the bytes that brokers send.

A broker answers a pull with at most 32 messages and 256 KiB (8 messages and 64 KiB if it assumes them to be on disk),
so sequential pulls would cost a round trip for every 32 messages or fewer. But an answer never holds more than was
requested (only an inner batch is always whole), so the queue offsets of further pulls are known in advance. A range is
therefore cut into slots of 32 offsets. Many slots are requested at once, and each is continued separately if an answer
was short.

An answer lacks messages that the broker can't read (damage beyond repair, a segment that retention has just deleted),
and blank entries of the queue, which are not messages. A pull of one offset alone shows which of the two it is.

Uses the SDK and raw records. Does not depend on Spark, and decodes no messages.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from struct import Struct
from typing import TypeVar

import anyio
import msgspec

from ha.arrow.places import LIGHT_QUEUE_PREFIX
from ha.client import MessageQueue, PullConsumer, PullStatus, RawPull
from ha.errors import BrokerError, ConnectionFailed, RecordsGone, RequestTimedOut
from ha.protocol.codes import ResponseCode, SysFlag
from ha.protocol.record import RECORD_SIZE_MIN
from ha.spark.calls import unwrapped_tasks

T = TypeVar("T")

SLOT_ENTRIES = 32
"""Number of queue entries of a slot without tags: RocketMQ's maxTransferCountOnMessageInMemory, the maximum of an
answer"""
FILTERED_SLOT_ENTRIES = 3200
"""Number of queue entries of a slot with tags. For one answer, a broker examines entries until it has examined its
maximum (800 or more) or found 32 matches"""
_PASSING = frozenset(
    {
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.FLOW_CONTROL,
        ResponseCode.GO_AWAY,
    }
)
"""Response codes of errors after which a request is retried; GO_AWAY is that of a RocketMQ broker that is shutting down
"""
_PAUSE_S = 0.2
_REMOVED = "MESSAGE_WAS_REMOVING"
"""Remark of an answer that has no messages because the broker can't read them"""
_RECORD_HEAD = Struct(">i16xq8xi")
"""Size, queue offset and sysFlag of a record"""


class PullSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Options of pulling. `lanes`: number of slots requested at once. `tags`: tags by which brokers filter (none: no
    filter). `slot_entries`: number of queue offsets in a slot without `tags`.

    `retry_s`: time for which a request is repeated on transient errors, and for which a slot waits for a broker that
    does not have its messages yet. `fail_on_data_loss`: False skips and counts messages that no longer exist.
    """

    slot_entries: int = SLOT_ENTRIES
    lanes: int = 16
    retry_s: float = 30.0
    tags: tuple[str, ...] = ()
    fail_on_data_loss: bool = True


class Slot(msgspec.Struct):
    """Queue offsets [begin, end) and their records: `bodies` are the bodies of the broker's answers, in order.

    With tags there may be records of other tags (equal hashes), and records after `end` if the broker examined more
    than requested. `has_batches`: whether there are inner batches, which may begin before `begin` and end after `end`
    (False for a light queue). `gone`: number of queue offsets whose records were deleted or can't be read.
    """

    begin: int
    end: int
    bodies: list[bytes] = []
    has_batches: bool = False
    gone: int = 0


async def pull_slots(
    consumer: PullConsumer, queue: MessageQueue, begin: int, end: int, settings: PullSettings
) -> list[Slot]:
    """Pulls the first slots of [begin, end), at most `lanes`, at the same time, and returns them in order.

    The caller continues at the end of the last one. Raises RecordsGone for missing messages if `fail_on_data_loss` is
    on, and in any case if the broker does not have the queue offsets within `retry_s`; ConnectionFailed,
    RequestTimedOut and transient BrokerErrors after `retry_s`, other BrokerErrors at once.
    """
    size = FILTERED_SLOT_ENTRIES if settings.tags else settings.slot_entries
    last = min(end, begin + size * settings.lanes)
    slots = [Slot(first, min(last, first + size)) for first in range(begin, last, size)]
    if len(slots) == 1:
        await _fill(consumer, queue, slots[0], settings)
        return slots
    async with unwrapped_tasks() as tasks:
        for slot in slots:
            tasks.start_soon(_fill, consumer, queue, slot, settings)
    return slots


async def _fill(consumer: PullConsumer, queue: MessageQueue, slot: Slot, settings: PullSettings) -> None:
    at = slot.begin
    tags = "||".join(settings.tags) or "*"
    is_light = queue.topic.startswith(LIGHT_QUEUE_PREFIX)  # its records have offsets of other queues
    give_up: float | None = None  # set while the broker does not have the messages
    while at < slot.end:
        count = SLOT_ENTRIES if settings.tags else slot.end - at
        position = at
        raw = await with_retries(
            lambda offset=position, count=count: consumer.pull_raw(  # type: ignore[misc]
                queue, offset, max_messages=count, tags=tags
            ),
            settings.retry_s,
        )
        offsets: set[int] | None = set()
        if raw.status is PullStatus.FOUND:
            slot.bodies.append(raw.body)
            offsets = None if is_light else _queue_offsets(raw.body)
            slot.has_batches |= offsets is None and not is_light
        if offsets is not None and not settings.tags and at >= raw.min_offset:
            absent = [offset for offset in range(at, min(raw.next_offset, slot.end)) if offset not in offsets]
            await _check_left_out(consumer, queue, slot, raw, absent, settings)
        if at < raw.min_offset:
            end = min(raw.min_offset, slot.end)
            if settings.fail_on_data_loss:
                raise RecordsGone(
                    f"{queue.topic} queue {queue.queue_id} of {queue.broker_name}", at, end, "the broker deleted them"
                )
            slot.gone += end - at
            at = max(end, raw.next_offset if raw.status is PullStatus.FOUND else end)
            give_up = None
        elif raw.next_offset > at and at < raw.max_offset:
            at = raw.next_offset
            give_up = None
        elif give_up is None:
            give_up = anyio.current_time() + settings.retry_s
        elif anyio.current_time() > give_up:
            # A slave that is behind the broker with which the query was planned, or a truncated log.
            raise RecordsGone(
                f"{queue.topic} queue {queue.queue_id} of {queue.broker_name}",
                at,
                slot.end,
                f"the broker asked ({raw.broker_id}) does not have them (yet, or any longer): its queue ends at "
                f"{raw.max_offset}",
            )
        else:
            await anyio.sleep(_PAUSE_S)


async def _check_left_out(
    consumer: PullConsumer,
    queue: MessageQueue,
    slot: Slot,
    raw: RawPull,
    absent: list[int],
    settings: PullSettings,
) -> None:
    """Adds to `slot.gone` the number of messages that were deleted or can't be read. `absent`: the queue offsets for
    which the answer `raw` has no record; some of them may be blank entries.

    Raises RecordsGone instead if there is such a message and `fail_on_data_loss` is on.
    """
    if raw.status is PullStatus.FOUND:
        missing = [
            offset
            for offset in absent
            if (
                await with_retries(
                    lambda offset=offset: consumer.pull_raw(queue, offset, max_messages=1, tags="*"),  # type: ignore[misc]
                    settings.retry_s,
                )
            ).remark
            == _REMOVED
        ]
    else:
        missing = absent if raw.remark == _REMOVED else []
    if missing and settings.fail_on_data_loss:
        what = f"{queue.topic} queue {queue.queue_id} of {queue.broker_name}"
        reason = f"the broker ({raw.broker_id}) can't read {len(missing)} of them: they were deleted, or are damaged"
        raise RecordsGone(what, missing[0], missing[-1] + 1, reason)
    slot.gone += len(missing)


def _queue_offsets(body: bytes) -> set[int] | None:
    """Returns the queue offsets of the records in `body`; None if it has an inner batch, which has several, or does not
    consist of records."""
    found = set()
    position = 0
    while position + RECORD_SIZE_MIN <= len(body):
        size, queue_offset, sys_flag = _RECORD_HEAD.unpack_from(body, position)
        if size < RECORD_SIZE_MIN or sys_flag & SysFlag.INNER_BATCH:
            return None
        found.add(queue_offset)
        position += size
    return found if position == len(body) else None


async def with_retries(attempt: Callable[[], Awaitable[T]], retry_s: float) -> T:
    """Returns the result of the idempotent `attempt`, repeated for `retry_s` on transient errors.

    ConnectionFailed, RequestTimedOut, and BrokerErrors with a code in _PASSING are transient; the last one is raised
    after `retry_s`. Other errors are raised at once.
    """
    give_up = anyio.current_time() + retry_s
    pause_s = _PAUSE_S
    while True:
        try:
            return await attempt()
        except (ConnectionFailed, RequestTimedOut) as error:
            failure: Exception = error
        except BrokerError as error:
            if error.code not in _PASSING:
                raise
            failure = error
        if anyio.current_time() + pause_s > give_up:
            raise failure
        await anyio.sleep(pause_s * random.uniform(0.5, 1.5))
        pause_s = min(2 * pause_s, 2.0)
