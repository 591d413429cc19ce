"""Decodes the records that a `LogReader` chooses into record batches, and joins small ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from ha.arrow.decode import decode_batches
from ha.arrow.places import RecordRun
from ha.arrow.read_options import ReadCounts, ReadOptions


def batches_of(
    runs: Iterable[RecordRun], broker_name: str, options: ReadOptions, counts: ReadCounts
) -> Iterator[pa.RecordBatch]:
    """Yields the messages of `runs` as record batches, and adds to `counts`. Errors as in `LogReader.read_queue`."""
    return _coalesced(_decoded(runs, broker_name, counts), options)


def _decoded(runs: Iterable[RecordRun], broker_name: str, counts: ReadCounts) -> Iterator[pa.RecordBatch]:
    for run in runs:
        yield from decode_batches(
            run.buffer,
            run.positions,
            base_offset=run.segment.start,
            broker_name=broker_name,
            options=run.options,
            places=run.places,
            counts=counts,
            file=run.segment.path,
        )


def _coalesced(batches: Iterator[pa.RecordBatch], options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """Joins small batches, which a selective filter leaves, into fewer larger ones."""
    waiting: list[pa.RecordBatch] = []
    count = size = 0
    for batch in batches:
        if not len(batch):
            continue
        if waiting and (count + len(batch) > options.batch_rows or size + batch.nbytes > options.batch_bytes):
            yield pa.concat_batches(waiting)
            waiting, count, size = [], 0, 0
        waiting.append(batch)
        count += len(batch)
        size += batch.nbytes
        if count * 2 > options.batch_rows or size * 2 > options.batch_bytes:
            yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)
            waiting, count, size = [], 0, 0
    if waiting:
        yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)
