"""Reads records row by row with the reference codec. Slower than `ha.arrow.decode`, but without pyarrow."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ha.arrow.heads import Heads
from ha.arrow.places import Places, RecordRun
from ha.arrow.plain import passes, plain_rows
from ha.arrow.read_options import ReadOptions
from ha.errors import OptionError
from ha.protocol.codes import SysFlag
from ha.protocol.record import decode_record

Row = dict[str, object]
"""Column -> value, as in `ha.arrow.schema`, with timestamps in µs. The row of a damaged record has only the columns
that are known without the record."""


def run_rows(run: RecordRun, broker_name: str) -> Iterator[Row]:
    """Yields a row for each message of a run that passes the filter, and one with crcOk=false for each damaged record
    that does.

    Body CRCs are always checked, and `options.on_damage` has no effect. Inner batches are divided even without
    `options.decompress`. A body is None if decompressing it needs a package that is not installed.
    """
    heads = Heads(np.frombuffer(run.buffer, np.uint8), run.positions, run.segment.start)
    if run.places is not None:
        run.places.check(heads)
    for row in range(len(heads)):
        arguments = (row, run.buffer, heads, run.places, run.segment.start, broker_name, run.options)
        is_batch = bool(heads.sys_flag[row] & SysFlag.INNER_BATCH)
        try:
            found = rows_at(*arguments, decompress=run.options.decompress or is_batch)
        except OptionError:
            found = rows_at(*arguments, decompress=False)
            for each in found:
                each["body"] = None
        yield from (each for each in found if passes(run.options.where, each))


def rows_at(
    row: int,
    buffer: bytes | memoryview,
    heads: Heads,
    places: Places | None,
    base_offset: int | None,
    broker_name: str,
    options: ReadOptions,
    *,
    decompress: bool = True,
) -> list[Row]:
    """Returns a row for each message of the record in `row` of `heads` (several for an inner batch), or one row with
    crcOk=false if the record is damaged. Raises OptionError as in `plain.inflate`."""
    if not heads.sound[row]:
        known: Row = {"brokerName": broker_name, "crcOk": False}
        if places is not None:
            known |= _entry(places, row)
        elif base_offset is not None:
            known["physicalOffset"] = int(heads.positions[row]) + base_offset
        return [known]
    record = decode_record(buffer, int(heads.positions[row]), verify_crc=False)
    is_batch = bool(record.sys_flag & SysFlag.INNER_BATCH)
    found = plain_rows(record, broker_name, options.message_size_max, decompress=decompress)
    if places is not None and not is_batch:  # a light queue's id and offset are only in its entry
        found[0] |= {name: value for name, value in _entry(places, row).items() if name != "topic"}
    return found


def _entry(places: Places, row: int) -> Row:
    return {
        "topic": places.topics[places.topic_numbers[row]],
        "queueId": int(places.queue_ids[row]),
        "queueOffset": int(places.queue_offsets[row]),
        "physicalOffset": int(places.physical_offsets[row]),
        "storeSize": int(places.sizes[row]),
    }
