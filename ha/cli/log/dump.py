"""`ha log dump`: prints the records of a store as JSON lines."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ha.arrow import LogReader, ReadOptions, RowFilter
from ha.arrow.places import RecordRun
from ha.arrow.queues import ENTRY_DTYPE
from ha.arrow.rows import Row, run_rows
from ha.cli.log.stores import Span, opened, span_of
from ha.cli.showing import safe_json
from ha.protocol.codes import SysFlag
from ha.protocol.compression import BODY_SIZE_MAX

_NAMES = {
    "topic": "topic",
    "queueId": "queue",
    "queueOffset": "queue_offset",
    "physicalOffset": "physical_offset",
    "storeSize": "size",
    "tags": "tags",
    "keys": "keys",
    "uniqKey": "message_id",
    "msgId": "offset_message_id",
    "bornTimestamp": "born_timestamp_ms",
    "storeTimestamp": "store_timestamp_ms",
    "bornHost": "born_host",
    "storeHost": "store_host",
    "flag": "flag",
    "sysFlag": "sys_flag",
    "reconsumeTimes": "reconsume_times",
    "preparedTransactionOffset": "prepared_transaction_offset",
    "crcOk": "crc_ok",
    "properties": "properties",
    "body": "body",
}
"""Columns and their names in JSON, which are those of `ha consume --json` where it has them."""
_TIMES = ("bornTimestamp", "storeTimestamp")
_BATCH_ROWS, _BATCH_BYTES = 256, 4 << 20


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Which records to print: those at physical offsets [from_, to) that match `where`, at most `count`. None: no
    limit."""

    from_: int | None = None
    to: int | None = None
    where: RowFilter = RowFilter()
    count: int | None = None
    with_body: bool = True
    message_size_max: int = BODY_SIZE_MAX


class Dumped(msgspec.Struct):
    """What was printed and skipped. Offsets are physical, in bytes."""

    count: int = 0
    next_offset: int = 0
    """Offset from which to resume without omitting a message: that of the first record that was not printed completely,
    or the end of the span. While batch queues are printed, which are not in physical order, the start of the span"""
    is_complete: bool = False
    damaged_count: int = 0
    """Number of records printed whose CRC is wrong (`crc_ok` is false)"""
    gaps: list[str] = []
    """Descriptions of bytes that are not records"""


def dump(path: Path, choice: Choice, stop: threading.Event) -> Dumped:
    """Prints the chosen records of the store at `path`, until `stop` is set.

    Raises StoreUnreadable if the store can't be read, or if topics or keys are chosen and a store with records has no
    consume queues; UsageError if the log has no bytes in the chosen physical offsets.
    """
    done = Dumped()
    with opened(path) as (reader,):
        if _is_by_queue(choice):
            reader.check_has_queues()
        span = _span(reader, choice)
        done.next_offset = span.begin
        where = msgspec.structs.replace(choice.where, physical_begin=span.begin, physical_end=span.end)
        options = ReadOptions(
            batch_rows=_BATCH_ROWS,
            batch_bytes=_BATCH_BYTES,
            fail_on_data_loss=False,
            decompress=choice.with_body,
            message_size_max=choice.message_size_max,
            where=where,
        )
        if not stop.is_set():
            done.is_complete = _print(_runs(reader, span, choice, options), choice, stop, done)
        if done.is_complete and _is_by_queue(choice):
            done.next_offset = span.begin
            done.is_complete = _print(_batch_runs(reader, choice, options), choice, stop, done, in_order=False)
        if done.is_complete:
            done.next_offset = span.end
        done.gaps = [
            f"physical offsets [{gap.begin}, {gap.end}) are in no segment file"
            for gap in _missing(reader, Span(span.begin, done.next_offset))
        ]
        done.gaps += [
            f"physical offsets [{damage.physical_offset}, {damage.resumed_at}) are not records: {damage.reason}"
            for damage in reader.damages
        ]
    sys.stdout.buffer.flush()
    return done


def _is_by_queue(choice: Choice) -> bool:
    """Returns whether records are found through their queues and the key index, not in the log."""
    return choice.where.topics is not None or choice.where.keys is not None


def _span(reader: LogReader, choice: Choice) -> Span:
    """Returns the span of the log to read; it begins near --since if the store has consume queues."""
    begin, end = reader.min_offset, reader.end_offset()
    span = span_of(begin, end, choice.from_, choice.to)
    since_ms = choice.where.store_begin_ms
    if since_ms is not None and reader.queues():
        # The first queued record after this time may follow others that are in no queue.
        near = min(reader.physical_offset_for_time(since_ms), _last_before(reader, since_ms))
        span = Span(min(span.end, max(span.begin, near)), span.end)
    return span


def _last_before(reader: LogReader, time_ms: int) -> int:
    """Returns the physical offset of the last queued record stored before `time_ms`; -1 if there is none."""
    found = -1
    for topic, queue_id in reader.queues():
        first = reader.offset_for_time(topic, queue_id, time_ms)
        stop = reader.queue_range(topic, queue_id).end if first is None else first
        if stop > 0:
            found = max(found, reader.physical_offset(topic, queue_id, stop - 1))
    return found


def _runs(reader: LogReader, span: Span, choice: Choice, options: ReadOptions) -> Iterator[RecordRun]:
    """Yields the records in physical order.

    If a topic or key is given, they are found through the queues (and the key index), without batch queues. Otherwise
    they are read from the log itself, including records that are in no queue.
    """
    runs = reader.range_runs if _is_by_queue(choice) else reader.walk_runs
    return runs(span.begin, span.end, options)


def _missing(reader: LogReader, span: Span) -> list[Span]:
    """Returns the parts of `span` that no segment holds."""
    segments = reader.segments()
    ends = [span.begin, *(segment.end for segment in segments)]
    starts = [*(segment.start for segment in segments), span.end]
    gaps = (Span(max(span.begin, end), min(span.end, start)) for end, start in zip(ends, starts, strict=True))
    return [gap for gap in gaps if gap.begin < gap.end]


def _batch_runs(reader: LogReader, choice: Choice, options: ReadOptions) -> Iterator[RecordRun]:
    """Yields the records of the chosen topics' batch queues, queue by queue."""
    for topic, queue_id in reader.queues():
        if choice.where.topics is not None and topic not in choice.where.topics:
            continue
        if reader.entries(topic, queue_id, 0, 0).dtype != ENTRY_DTYPE:
            begin, end = reader.queue_range(topic, queue_id)
            yield from reader.queue_runs(topic, queue_id, begin, end, options)


def _print(
    runs: Iterator[RecordRun], choice: Choice, stop: threading.Event, done: Dumped, *, in_order: bool = True
) -> bool:
    """Prints the records; returns whether all were printed. `in_order`: they are in physical order."""
    write = sys.stdout.buffer.write
    for run in runs:
        if in_order:
            done.next_offset = run.segment.start + int(run.positions[0])
        if stop.is_set():  # also checked here, because many runs may have no record to print
            return False
        for row in shown_rows(run, with_body=choice.with_body):
            if in_order and row["physical_offset"] is not None:
                done.next_offset = row["physical_offset"]  # a record may hold several messages
            if stop.is_set() or done.count == choice.count:
                return False
            write(safe_json(row) + b"\n")
            done.count += 1
            done.damaged_count += row["crc_ok"] is False
    return True


def shown_rows(run: RecordRun, *, with_body: bool = True) -> Iterator[dict[str, Any]]:
    """Yields each message of `run`, as the JSON object that `ha log dump` prints."""
    for row in run_rows(run, ""):
        yield _printable(row, with_body)


def _printable(row: Row, with_body: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {to: row.get(name) for name, to in _NAMES.items() if with_body or name != "body"}
    for name in _TIMES:
        if shown[_NAMES[name]] is not None:
            shown[_NAMES[name]] //= 1000
    if shown["properties"] is not None:
        shown["properties"] = dict(shown["properties"])
    body = shown.get("body")
    if body is not None:
        try:
            shown["body"] = body.decode()
        except UnicodeDecodeError:
            del shown["body"]
            shown["body_base64"] = body
    elif with_body and shown["crc_ok"] and shown["sys_flag"] & SysFlag.COMPRESSED:
        del shown["body"]
        shown["body_error"] = (
            "it can't be decompressed: it is damaged, longer than maxMessageSize, or needs halog[compression]"
        )
    return shown
