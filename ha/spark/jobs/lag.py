"""`ha spark lag`: measures how far consumer groups are behind the end of the log, in messages, bytes and seconds.

For a store directory, `config/consumerOffset.json` has the offsets of every group (with RocketMQ 5 also a second table,
for pull consumers). Over the network, brokers are asked for the given groups and topics; bytes are unknown there.

A group is measured in each topic in which it has committed an offset, in all queues that consumers read. In a queue in
which it has committed none, it is behind by all messages, as in brokers' own figures.

Seconds are the age of the oldest message that the group has not consumed: `now` minus its store timestamp.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec
import pyarrow.compute as pc

from ha.arrow import LogReader, ReadOptions
from ha.arrow.deleted import topic_table
from ha.audit.range import has_plain_entries
from ha.client import ClientOptions, MessageQueue, PullConsumer, PullStatus, ReadFrom
from ha.client.options import name_server_addresses
from ha.errors import OptionError, RemoteProtocolError, RouteNotFound, StoreUnreadable
from ha.protocol.bodies import ConsumerOffsets
from ha.protocol.java_json import read_as
from ha.spark.jobs import Progress, no_progress
from ha.spark.jobs.waves import Runner, spark_runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLE_SIZE_MAX = 256 << 20
"""Maximum size of consumerOffset.json in bytes"""
_QUEUES_PER_TASK = 64
_NAMES_SHOWN_MAX = 10
_LOOKING_GROUP = "halog-lag"
"""Consumer group for pulling the oldest unconsumed messages, so that the measured groups are not affected."""


class LagOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the job: either `path`, or `servers` with `groups` and `topics`."""

    path: str | None = None
    """Store directory of a broker"""
    servers: str | None = None
    """Name servers, host:port joined with ';'"""
    groups: tuple[str, ...] = ()
    """Consumer groups to measure; default with `path`: all groups that have an offset"""
    topics: tuple[str, ...] = ()
    """Topics to measure; default with `path`: all topics that the groups have offsets for"""
    now_ms: int | None = None
    """Time against which the age of messages is measured, in ms since 1970; default: the time of the run"""


class QueueLag(msgspec.Struct, frozen=True, kw_only=True):
    """The lag of one group in one queue. `committed`, `begin` and `end` are queue offsets.

    `committed`: queue offset of the next message to consume; `begin` if the group has committed none in this queue.
    """

    group: str
    topic: str
    queue_id: int
    broker_name: str
    committed: int
    begin: int
    """Queue offset of the first message still in the log"""
    end: int
    """Queue offset after the last message"""
    messages: int
    """Number of messages in the queue that the group has not consumed yet"""
    lost: int
    """Number of messages deleted by retention before the group consumed them"""
    ahead: int
    """Number of entries by which the committed offset is beyond the queue's end, for example because messages were
    truncated or the offset belongs to another log; usually 0"""
    bytes: int | None
    """Size of the unconsumed records in bytes; None if unknown, because they are on brokers (the job's option
    `servers`)"""
    seconds: float | None
    """Age of the oldest unconsumed message in seconds; 0 if there is no such message; None if the age is unknown"""
    is_unknown: bool = False
    """Whether the queue does not exist in this log; over the network, whether the topic has no route. Without a route,
    `queue_id` is -1 and `broker_name` is empty"""


class GroupLag(msgspec.Struct, frozen=True, kw_only=True):
    """The lag of a group: sums over its queues that exist in the log, and for `seconds` the maximum.

    `bytes` is None if it is unknown for any queue, `seconds` if it is unknown for all. `unknown_topics`: topics for
    which the group has an offset in a queue that does not exist; over the network, topics without a route.
    """

    group: str
    topics: int
    queues: int
    messages: int
    lost: int
    bytes: int | None
    seconds: float | None
    unknown_topics: tuple[str, ...]


class LagResult(msgspec.Struct, frozen=True, kw_only=True):
    """The lag of every group. `now_ms` is the time against which ages are measured."""

    source: str
    queues: tuple[QueueLag, ...]
    groups: tuple[GroupLag, ...]
    now_ms: int
    newest_ms: int | None
    """Store timestamp of the log's newest message, in ms since 1970; None if unknown. An old one means an idle log."""

    @property
    def exit_code(self) -> int:
        """Exit code of the command, always 0: the caller decides how much lag is too much."""
        return 0


class _QueueTask(msgspec.Struct, frozen=True):
    path: str
    broker_name: str | None
    now_ms: int
    items: tuple[tuple[str, str, int, int], ...]


def lag(spark: SparkSession, options: LagOptions, progress: Progress = no_progress) -> LagResult:
    """Measures the lag of each group. Progress is in queues, or with `servers` in pairs of group and topic.

    Raises OptionError, also for a named group or topic without a committed offset; StoreUnreadable, also for a damaged
    offset table; with `servers` ClientError.
    """
    return lag_with(spark_runner(spark), options, progress)


def lag_with(run: Runner, options: LagOptions, progress: Progress = no_progress) -> LagResult:
    """Measures like `lag`, with a runner for the tasks."""
    if (options.path is None) == (options.servers is None):
        raise OptionError("path", "give either a path or servers", "one of path=<store directory>, servers=<host:port>")
    if options.path is not None:
        return _of_store(run, Path(options.path), options, progress)
    return anyio.run(_of_brokers, options, progress)


# ---- a store directory


def committed_offsets(path: Path) -> list[tuple[str, str, int, int]]:
    """Returns (group, topic, queue id, committed queue offset) from a store's config folder, sorted.

    Reads consumerOffset.json, or its backup if that file is missing or can't be read. Returns an empty list if there is
    neither, because no group has committed yet. Raises StoreUnreadable if there is one, but none can be read.
    """
    folder = path / "config"
    reasons = []
    for name in ("consumerOffset.json", "consumerOffset.json.bak"):
        try:
            raw = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            reasons.append(f"{name}: {error.strerror}")
            continue
        if len(raw) > TABLE_SIZE_MAX:
            reasons.append(f"{name}: {len(raw)} bytes, more than the {TABLE_SIZE_MAX} that are read")
            continue
        try:
            found = read_as(ConsumerOffsets, raw)
        except RemoteProtocolError as error:
            reasons.append(f"{name}: {error}")
            continue
        rows: dict[tuple[str, str, int], int] = {}
        for table in (found.pull_offset_table or {}, found.offset_table):
            for key, offsets in table.items():
                topic, _, group = key.rpartition("@")
                rows |= {(group, topic, queue_id): offset for queue_id, offset in offsets.items()}
        return [(*key, offset) for key, offset in sorted(rows.items())]
    if reasons:
        raise StoreUnreadable(folder, "; ".join(reasons))
    return []


def _check_named(option: str, named: Sequence[str], found: Container[str], known: Collection[str]) -> None:
    """Raises OptionError if a name in `named` is not in `found`: without a committed offset, its lag is unknown, not 0.

    `known`: names to show in the message.
    """
    for name in named:
        if name not in found:
            reason = f"{name!r} has no committed offset: it is misspelt, or nothing was consumed yet"
            some = ", ".join(sorted(known)[:_NAMES_SHOWN_MAX])
            raise OptionError(option, reason, some + (", …" if len(known) > _NAMES_SHOWN_MAX else "") or "none yet")


def _of_store(run: Runner, path: Path, options: LagOptions, progress: Progress) -> LagResult:
    with LogReader(path) as reader:
        known = committed_offsets(path)
        wanted = [
            row
            for row in known
            if (not options.groups or row[0] in options.groups) and (not options.topics or row[1] in options.topics)
        ]
        _check_named("groups", options.groups, {row[0] for row in wanted}, {row[0] for row in known})
        _check_named("topics", options.topics, {row[1] for row in wanted}, {row[1] for row in known})
        wanted += _without_offset(reader, wanted)
        now_ms = int(time.time() * 1000) if options.now_ms is None else options.now_ms
        newest_ms = _newest_ms(reader)
        broker_name = reader.broker_name
    # Sorted by queue: a task reads the entries of a queue once for all of its groups in the task.
    wanted.sort(key=lambda row: (row[1], row[2], row[0]))
    tasks = [
        _QueueTask(str(path.absolute()), broker_name, now_ms, tuple(wanted[at : at + _QUEUES_PER_TASK]))
        for at in range(0, len(wanted), _QUEUES_PER_TASK)
    ]
    found: list[QueueLag] = []
    progress("queues", 0, len(wanted))
    for wave in run(_look, tasks):
        found += [queue for part in wave for queue in part]
        progress("queues", len(found), len(wanted))
    found.sort(key=lambda queue: (queue.group, queue.topic, queue.queue_id))
    return _result(str(path), found, now_ms, newest_ms)


def _without_offset(reader: LogReader, rows: Sequence[tuple[str, str, int, int]]) -> list[tuple[str, str, int, int]]:
    """Returns rows for the queues in which a group has no offset although it has one in the topic, with the queue
    offset of the first message. Queues that consumers no longer read are omitted."""
    topics = topic_table(reader.path).topic_config_table
    committed: dict[tuple[str, str], set[int]] = {}
    for group, topic, queue_id, _ in rows:
        committed.setdefault((group, topic), set()).add(queue_id)
    return [
        (group, topic, queue_id, reader.queue_range(topic, queue_id).begin)
        for (group, topic), queue_ids in committed.items()
        for _, queue_id in reader.queues([topic])
        if queue_id not in queue_ids and (topic not in topics or queue_id < topics[topic].read_queue_nums)
    ]


def _look(task: _QueueTask) -> list[QueueLag]:
    found = []
    with LogReader(task.path, broker_name=task.broker_name) as reader:
        known = set(reader.queues())
        for (topic, queue_id), rows in groupby(task.items, key=lambda item: (item[1], item[2])):
            committed = {group: offset for group, _, _, offset in rows}
            found += _queue_lags(reader, topic, queue_id, committed, task.now_ms, (topic, queue_id) in known)
    return found


def _queue_lags(
    reader: LogReader, topic: str, queue_id: int, committed: dict[str, int], now_ms: int, is_known: bool
) -> list[QueueLag]:
    """Returns the lag of each group in `committed`, in the same order."""
    begin, end = reader.queue_range(topic, queue_id)
    firsts = {group: min(max(offset, begin), end) for group, offset in committed.items()}
    sizes = _bytes_behind(reader, topic, queue_id, set(firsts.values()), end)
    ages = {
        first: _age_s(_stored_ms(reader, topic, queue_id, first, end), now_ms) if first < end else 0.0
        for first in sizes
    }
    queue = MessageQueue(topic, reader.broker_name, queue_id)
    return [
        _lag_in(queue, group, offset, (begin, end), sizes[firsts[group]], ages[firsts[group]], is_known=is_known)
        for group, offset in committed.items()
    ]


def _lag_in(
    queue: MessageQueue,
    group: str,
    committed: int,
    bounds: tuple[int, int],
    size: int | None,
    seconds: float | None,
    *,
    is_known: bool = True,
) -> QueueLag:
    begin, end = bounds
    return QueueLag(
        group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        broker_name=queue.broker_name,
        committed=committed,
        begin=begin,
        end=end,
        messages=end - min(max(committed, begin), end),
        lost=max(0, min(begin, end) - committed) if is_known else 0,
        ahead=max(0, committed - end) if is_known else 0,
        bytes=size,
        seconds=seconds,
        is_unknown=not is_known,
    )


def _bytes_behind(reader: LogReader, topic: str, queue_id: int, firsts: set[int], end: int) -> dict[int, int]:
    """Returns the size of the records from each queue offset of `firsts` to `end`; entries are read once for all of
    them."""
    if not has_plain_entries(reader, topic, queue_id):  # entries of batches: sizes of partial ranges would not add up
        return {first: reader.queue_bytes(topic, queue_id, first, end) for first in firsts}
    found, above, total = {}, end, 0
    for first in sorted(firsts, reverse=True):
        total += reader.queue_bytes(topic, queue_id, first, above)
        found[first], above = total, first
    return found


def _stored_ms(reader: LogReader, topic: str, queue_id: int, begin: int, end: int) -> int | None:
    """Returns the store timestamp (ms) of the first readable message at queue offsets [begin, end); None if there is
    none among the first 16."""
    options = ReadOptions(columns=("storeTimestamp",), batch_rows=16, on_damage="skip", fail_on_data_loss=False)
    for batch in reader.read_queue(topic, queue_id, begin, min(end, begin + 16), options):
        known = pc.drop_null(batch.column(0))
        if len(known):
            return int(known[0].value) // 1000
    return None


def _newest_ms(reader: LogReader) -> int | None:
    ages = []
    for topic, queue_id in reader.queues():
        begin, end = reader.queue_range(topic, queue_id)
        if begin < end:
            ages.append(_stored_ms(reader, topic, queue_id, end - 1, end))
    return max((age for age in ages if age is not None), default=None)


def _age_s(stored_ms: int | None, now_ms: int) -> float | None:
    return None if stored_ms is None else max(0, now_ms - stored_ms) / 1000


# ---- brokers


async def _of_brokers(options: LagOptions, progress: Progress) -> LagResult:
    if not options.groups or not options.topics:
        lacking = "topics" if options.groups else "groups"
        raise OptionError(lacking, f"servers needs {lacking} by name", "one or more names")
    try:
        servers = list(name_server_addresses(options.servers))
    except ValueError as error:
        raise OptionError("servers", str(error), "host:port[;host:port…]") from None
    now_ms = int(time.time() * 1000) if options.now_ms is None else options.now_ms
    found: list[QueueLag] = []
    total = len(options.groups) * len(options.topics)
    client = ClientOptions()
    async with PullConsumer(servers, group=_LOOKING_GROUP, read_from=ReadFrom.MASTER, options=client) as looking:
        bounds: dict[MessageQueue, tuple[int, int]] = {}
        known: set[str] = set()
        for done, group in enumerate(options.groups):
            async with PullConsumer(servers, group=group, read_from=ReadFrom.MASTER, options=client) as consumer:
                for topic in options.topics:
                    try:
                        queues = await looking.queues(topic)
                    except RouteNotFound:
                        nowhere = MessageQueue(topic, "", -1)
                        found.append(_lag_in(nowhere, group, 0, (0, 0), None, None, is_known=False))
                        continue
                    offsets = {queue: await consumer.committed_offset(queue) for queue in queues}
                    if not any(offset is not None for offset in offsets.values()):
                        continue
                    known.add(group)
                    for queue, offset in offsets.items():
                        if queue not in bounds:
                            bounds[queue] = (await looking.min_offset(queue), await looking.max_offset(queue))
                        begin, end = bounds[queue]
                        committed = begin if offset is None else offset
                        first = min(max(committed, begin), end)
                        stored_ms = await _oldest_ms(looking, queue, first) if first < end else None
                        age_s = _age_s(stored_ms, now_ms) if first < end else 0.0
                        size = None if first < end else 0
                        found.append(_lag_in(queue, group, committed, (begin, end), size, age_s))
            progress("groups", (done + 1) * len(options.topics), total)
    _check_named("groups", options.groups, known, known)
    found_topics = {queue.topic for queue in found}
    _check_named("topics", options.topics, found_topics, found_topics)
    return _result(";".join(servers), found, now_ms, None)


async def _oldest_ms(consumer: PullConsumer, queue: MessageQueue, queue_offset: int) -> int | None:
    result = await consumer.pull(queue, queue_offset, max_messages=1)
    if result.status is not PullStatus.FOUND or not result.messages:
        return None
    return result.messages[0].store_timestamp_ms


def _result(source: str, queues: list[QueueLag], now_ms: int, newest_ms: int | None) -> LagResult:
    by_group: dict[str, list[QueueLag]] = {}
    for queue in queues:
        by_group.setdefault(queue.group, []).append(queue)
    groups = tuple(_group_lag(group, by_group[group]) for group in sorted(by_group))
    return LagResult(source=source, queues=tuple(queues), groups=groups, now_ms=now_ms, newest_ms=newest_ms)


def _group_lag(group: str, queues: list[QueueLag]) -> GroupLag:
    known = [queue for queue in queues if not queue.is_unknown]
    sizes = [queue.bytes for queue in known]
    ages = [queue.seconds for queue in known if queue.seconds is not None]
    return GroupLag(
        group=group,
        topics=len({queue.topic for queue in known}),
        queues=len(known),
        messages=sum(queue.messages for queue in known),
        lost=sum(queue.lost for queue in known),
        bytes=None if None in sizes else sum(size for size in sizes if size is not None),
        seconds=max(ages, default=None),
        unknown_topics=tuple(sorted({queue.topic for queue in queues if queue.is_unknown})),
    )
