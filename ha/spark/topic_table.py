"""Combines the messages of a topic in an archive and the later ones in the log into one table, each message once.

An archive covers the log of a broker up to a physical offset, and records the queue offsets of each file. Each queue of
the log is read from the first message that the archive does not cover. A table is made from one state of the archive:
messages that `ha spark archive` adds later are read from the log, if they are still there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType

from ha.arrow import DEFAULT_COLUMNS
from ha.arrow.plain import plain_body
from ha.arrow.queues import UNWRITTEN
from ha.errors import OptionError
from ha.protocol.codes import SysFlag
from ha.spark.data_source import HalogDataSource
from ha.spark.jobs.archive.body_columns import BodyDecoder, body_fields, columns_of
from ha.spark.jobs.archive.manifest import BodyColumns, State
from ha.spark.jobs.archive.read import archive_states, read_states
from ha.spark.source.archived_source import check_broker_names
from ha.spark.source.log_source import LogSource, QueueKey
from ha.spark.source.offsets import check_topics_exist, encode_positions, encode_queue
from ha.spark.source.opening import open_source
from ha.spark.source.options import SourceOptions, parse_options
from ha.spark.source.positions import EARLIEST, AtEdge

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

_DECODED = "decodedBody"


def topic(spark: SparkSession, name: str, *, archive: str, **options: str) -> DataFrame:
    """Returns the messages of topic `name`: those in the archive at `archive`, then those in the log.

    `options` are those of the data source: `path` or `servers`, and for example `failOnDataLoss`; none that select
    offsets, times, tags, keys or columns. The columns are the default ones of the source, as far as the archive has
    them, and those that the archive decodes from the bodies of this topic (`columns_from`), also for messages in the
    log. `damagedRecords` applies to the log: the archive has damaged records if it was written with them.

    The archive is read as it is now, and the log as it is at the first query, from the end of this state of the archive
    on. Call this function again to get a new table

    - if a query fails with RecordsGone, because retention has deleted messages that only a later state of the archive
      has (a query never leaves them out, unless failOnDataLoss is off),
    - if a query does not find a Parquet file, because a compaction has replaced it (with a Delta table not before
      VACUUM, with an Iceberg table not before its snapshots expire),
    - to include queues that did not exist yet.

    Queries also fail with RecordsGone if a queue ends before its last archived message, because the log is that of a
    slave that is behind, or another log; and with `servers`, if all messages of a queue after the last archived one
    were deleted before they could be archived, because brokers don't report when they were deleted.

    If a topic was deleted and created again, the table has the messages of both topics, as far as the archive has the
    earlier ones. They are distinguished by physical offsets, because with RocketMQ queue offsets begin at 0 again.

    Raises OptionError for an invalid option, an archive without the topic, an unknown topic, and a node that is still
    recovering; ArchiveError if the archive can't be read; and StoreUnreadable, OSError or ClientError if the log can't
    be read.
    """
    parsed = _parse({**options, "topic": name})
    folder = Path(archive)
    states = [state for state in archive_states(folder) if state.scope is not None]
    if not any(state.holds(name) for state in states):
        raise OptionError(
            "archive", f"{archive} does not contain the topic {name}", "an archive of it, or of all topics"
        )
    rows = read_states(spark, folder, states).where(F.col("topic") == name)
    with closing(open_source(parsed)) as source:
        if parsed.servers:
            check_broker_names([state.broker_name for state in states], source.brokers())
        starts = start_offsets(source, name, states)
        if not any(topic == name for state in states for topic, _ in state.spans()):
            check_topics_exist(source, parsed)
    columns = [column for column in DEFAULT_COLUMNS if column in rows.columns]
    scopes = [state.scope for state in states if state.scope is not None]
    body_columns = columns_of((scope.body_columns for scope in scopes if scope.body_columns is not None), name)
    of_body = [] if body_columns is None else [field.name for field in body_fields([body_columns])]
    if parsed.decompress:
        rows = rows.withColumn("body", _inflated(parsed.message_size_max))
    archived = rows.select(*columns, *(F.col(f"`{column}`") for column in of_body))
    if not starts:
        return archived
    spark.dataSource.register(HalogDataSource)
    # Only these queues are read, and each has its broker's name: before the first query, further queues may appear, and
    # further brokers register.
    given = {
        **options,
        "assign": json.dumps({name: [encode_queue(queue, ()) for queue in starts]}),
        "columns": ",".join(columns),
        "startingOffsets": json.dumps(encode_positions(starts, ())),
    }
    live = spark.read.format("halog").options(**given).load()
    if body_columns is not None:
        decoded = _decoded(body_columns, name, parsed).alias(_DECODED)
        live = live.select(*columns, decoded).select(*columns, f"{_DECODED}.*")
    return archived.unionByName(live)


def _parse(options: Mapping[str, str]) -> SourceOptions:
    """Returns the parsed options. Raises OptionError if they are invalid, or select a part of the topic, other columns
    or only committed rows."""
    parsed = parse_options(options, "batch")
    if not parsed.reads_whole_topics:
        option = parsed.ending_option if parsed.starting == AtEdge(EARLIEST) else parsed.starting_option
        raise OptionError(option, "a topic with its archive is read as a whole", "leave it out, and filter the table")
    for option in ("tags", "keys"):
        if getattr(parsed, option) is not None:
            raise OptionError(option, "archived messages are not selected by it", "leave it out, and filter the table")
    if parsed.columns != DEFAULT_COLUMNS:
        raise OptionError("columns", "a topic with its archive has the default columns", "leave it out")
    if parsed.isolation != "read_uncommitted":
        raise OptionError("isolation", "an archive has the rows that are not committed, too", "read_uncommitted")
    return parsed


def start_offsets(source: LogSource, name: str, states: Sequence[State]) -> dict[QueueKey, int]:
    """Returns for each queue of topic `name` the queue offset at which reading the log starts.

    For a broker with an archive in `states`, reading starts at the first message at or after the physical end of the
    archive; for any other broker, at the queue's first message. Earlier messages that neither the archive nor the log
    has were deleted before they could be archived; they are not reported as lost again. If the log may lack later
    messages, or the queue ends before its last archived message, the result is an offset that the queue does not have,
    so that the query fails with RecordsGone. Raises OptionError while a node recovers.
    """
    brokers = source.brokers()
    archived = {brokers.name_of(state.broker_name): state for state in states if state.holds(name)}
    ends: dict[QueueKey, int] = {}
    again = {
        QueueKey(name, broker, queue) for broker in archived for _, queue in archived[broker].created_again({name})
    }
    for broker, state in archived.items():
        for topic, span in state.spans():
            if topic == name:
                key = QueueKey(name, broker, span.queue_id)
                ends[key] = max(ends.get(key, 0), span.last + 1)
    starts = {}
    for queue in source.queues(frozenset({name})):
        begin, end = source.queue_range(queue)
        if queue.broker not in archived:
            starts[queue] = begin
            continue
        covered = archived[queue.broker].covered_end or 0
        archived_end, log_begin = ends.get(queue), source.min_offset(queue.broker)
        first = _first_behind(source, queue, covered, archived_end)
        if archived_end is not None and begin < end == first < archived_end and queue not in again:
            starts[queue] = archived_end  # beyond the queue's end
        elif begin < first or (log_begin is not None and log_begin <= covered):
            starts[queue] = first
        elif archived_end is None:
            starts[queue] = begin if log_begin is None else 0
        else:
            starts[queue] = archived_end if archived_end <= begin and queue not in again else 0
    return starts


def _first_behind(source: LogSource, queue: QueueKey, physical_offset: int, expected: int | None) -> int:
    """Returns the queue offset of the first message at or after `physical_offset`, or the queue's end if there is none.

    `expected`: the queue offset at which the search begins, which is the result unless the topic was deleted and
    created again; None if unknown. Raises OptionError while a node recovers.
    """
    low, high = source.queue_range(queue)
    probes = [] if expected is None else [expected, expected - 1]
    while low < high:
        at = next((offset for offset in probes if low <= offset < high), (low + high) // 2)
        probes = [offset for offset in probes if offset != at]
        place = source.first_physical_offset(queue, at, high)  # of the next message, if this one can't be read
        if place == UNWRITTEN:
            raise OptionError(
                "path", f"a node recovers, and is yet to write {queue} again", "the same once it is ready"
            )
        if place != -1 and place < physical_offset:
            low = at + 1
        else:
            high = at
    return low


def _decoded(columns: BodyColumns, name: str, options: SourceOptions) -> Column:
    """Returns a struct column with the columns that `ha spark archive` decodes from message bodies with `columns`."""
    size_max = options.message_size_max

    def decode(batches: Iterator[tuple[pa.Array, pa.Array]]) -> Iterator[pa.Array]:
        decoder = BodyDecoder(columns)
        for bodies, sys_flags in batches:
            yield decoder.decode(name, bodies, sys_flags, size_max)

    sys_flag = F.lit(0) if options.decompress else F.col("sysFlag")  # 0: the source returned plain bodies
    kind = from_arrow_schema(pa.schema(body_fields([columns])))
    column: Column = arrow_udf(decode, kind)("body", sys_flag)  # type: ignore[call-overload]
    return column


def _inflated(size_max: int) -> Column:
    """Returns a column with the decompressed bodies of an archive, which contains them as they are stored in the log.

    As in the Spark source, a body that is damaged or longer than `size_max` bytes is null.
    """
    plain = F.udf(lambda body, flags: plain_body(body and bytes(body), flags, size_max), BinaryType(), useArrow=True)
    body, flags = F.col("body"), F.col("sysFlag")
    is_compressed = flags.bitwiseAND(SysFlag.COMPRESSED) != 0
    return F.when(is_compressed, plain(F.when(is_compressed, body), flags)).otherwise(body)
