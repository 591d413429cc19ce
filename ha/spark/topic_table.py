"""A topic as one table: the messages in an archive and, behind them, those in the log, each once.

An archive covers the log of a broker up to a physical offset, and records the queue offsets of each file. The log is
read from the queue offset behind the last archived message of each queue. A table is made from one state of the
archive: what `ha spark archive` adds later is read from the log, as long as retention keeps it there.
"""

from __future__ import annotations

import json
from contextlib import closing
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType

from ha.arrow import DEFAULT_COLUMNS
from ha.arrow.plain import inflate
from ha.errors import OptionError, RemoteProtocolError
from ha.protocol.codes import SysFlag
from ha.spark.data_source import HalogDataSource
from ha.spark.jobs.archive.manifest import State
from ha.spark.jobs.archive.read import archive_states, delta_session, is_delta, read_states
from ha.spark.source.log_source import LogSource
from ha.spark.source.offsets import encode_queue
from ha.spark.source.opening import open_source
from ha.spark.source.options import parse_options
from ha.spark.source.positions import EARLIEST

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

_Ends = dict[tuple[str, int], int]
"""(broker, queue id) -> queue offset behind the last archived message"""


def topic(spark: SparkSession, name: str, *, archive: str, **options: str) -> DataFrame:
    """Returns the messages of topic `name`: those in the archive at `archive`, then those in the log.

    `options` are those of the data source: `path` or `servers`, and for example `failOnDataLoss`. The columns are the
    default ones of the source, as far as the archive has them.

    The archive is read as it is now, and the log as it is at the first query, from where this state of the archive
    ends. Meanwhile the archive may grow, and retention may delete: if it deletes what only a later state of the archive
    has, the query fails with RecordsGone and leaves nothing out; call this again. Do so, too, if a query does not find
    a Parquet file, which a compaction has replaced (a Delta table keeps them until VACUUM), or for a queue that did not
    exist yet.

    Raises OptionError for an invalid option, an archive without the topic, or an unknown topic, and ArchiveDamaged.
    """
    folder = Path(archive)
    states = [state for state in archive_states(folder) if state.scope is not None]
    if not any(_holds(state, name) for state in states):
        raise OptionError(
            "archive", f"{archive} does not contain the topic {name}", "an archive of it, or of all topics"
        )
    session = delta_session(spark) if is_delta(folder) else spark
    rows = read_states(session, folder, states).where((F.col("topic") == name) & _covered_by(states))
    ends = _ends_in_table(rows) if is_delta(folder) else _ends_in_files(states, name)
    with closing(open_source(parse_options({**options, "topic": name}, "batch"))) as source:
        starts = _starts(source, name, ends, {state.broker_name for state in states if state.holes})
    columns = [column for column in DEFAULT_COLUMNS if column in rows.columns]
    archived = rows.withColumn("body", _inflated(options)).select(*columns)
    if not starts:
        return archived
    session.dataSource.register(HalogDataSource)
    log = session.read.format("halog").options(**options, topic=name, columns=",".join(columns))
    return archived.unionByName(log.option("startingOffsets", json.dumps({name: starts})).load())


def _holds(state: State, name: str) -> bool:
    return state.scope is not None and (state.scope.topics is None or name in state.scope.topics)


def _covered_by(states: list[State]) -> Column:
    """Returns the condition for rows of these states: a Delta table may have newer ones."""
    broker, place = F.col("brokerName"), F.col("physicalOffset")
    return reduce(or_, ((broker == state.broker_name) & (place < (state.covered_end or 0)) for state in states))


def _ends_in_files(states: list[State], name: str) -> _Ends:
    ends: _Ends = {}
    for state in states:
        for file in state.files.values():
            if file.topic == name:
                for span in file.queues:
                    key = state.broker_name, span.queue_id
                    ends[key] = max(ends.get(key, 0), span.last + 1)
    return ends


def _ends_in_table(rows: DataFrame) -> _Ends:
    found = rows.groupBy("brokerName", "queueId").agg(F.max("queueOffset")).collect()
    return {(broker, queue_id): last + 1 for broker, queue_id, last in found if queue_id is not None}


def _starts(source: LogSource, name: str, ends: Mapping[tuple[str, int], int], has_holes: set[str]) -> dict[str, int]:
    """Returns the queue offset from which each queue in the log is read.

    Messages that were deleted before they could be archived are a hole in the archive: they are no loss again.
    """
    aliases = getattr(source.brokers(), "aliases", {})
    known = {(aliases.get(broker, broker), queue_id): end for (broker, queue_id), end in ends.items()}
    holed = {aliases.get(broker, broker) for broker in has_holes}
    starts = {}
    for queue in source.queues(frozenset({name})):
        start = known.get((queue.broker, queue.queue_id), EARLIEST)
        if queue.broker in holed and start != EARLIEST:
            start = max(start, source.queue_range(queue).begin)
        starts[encode_queue(queue, source.brokers())] = start
    return starts


def _inflated(options: Mapping[str, str]) -> Column:
    """Returns the body before compression, as the source does; the archive has it as stored."""
    size_max = parse_options({**options, "topic": "-"}, "batch").message_size_max
    plain = F.udf(lambda body, flags: _inflate(body, flags, size_max), BinaryType(), useArrow=True)
    body, flags = F.col("body"), F.col("sysFlag")
    is_compressed = flags.bitwiseAND(SysFlag.COMPRESSED) != 0
    return F.when(is_compressed, plain(F.when(is_compressed, body), flags)).otherwise(body)


def _inflate(body: bytes | None, sys_flag: int, size_max: int) -> bytes | None:
    if body is None:
        return None
    try:
        return inflate(bytes(body), sys_flag, size_max)
    except RemoteProtocolError:
        return None
