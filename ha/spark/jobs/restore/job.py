"""`restore` (also called replay): sends messages of an archive, or of a store directory, into a topic of a running
broker.

Queue q goes to queue q of the target topic, modulo the number of its queues, on the broker of the same name if the
target topic has one (`ReplayPlan.target_of`). Each message is sent once, in the order of its source queue, even with
kills, retries and repeated runs, as long as the state file is kept (see `send.py`). A run reads the ends of the target
queues to find out which messages were already sent. A later run therefore sends only new messages of the source.
docs/spark.md, "Send messages again", lists the cases in which a message is stored twice or is missing.

Kept: body (decompressed, as the SDK sends plain bodies), flag, keys, tags, UNIQ_KEY and all properties except those
that the broker sets or that describe the original sending (DROPPED_PROPERTIES). Not kept: born and store time and host,
sysFlag, reconsume times, and bytes of properties that are not UTF-8, which become U+FFFD as everywhere in RocketMQ.
HALOG_ORIGIN and HALOG_BORN_TIMESTAMP hold the message's original place and time.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from ha.arrow import LogReader, ReadOptions, RowFilter
from ha.client import Producer, PullConsumer, ReadFrom
from ha.client.options import name_server_addresses
from ha.errors import BrokerError, HalogError, OptionError, RestoreFailed
from ha.protocol.codes import ResponseCode
from ha.spark.jobs import Progress, no_progress
from ha.spark.jobs.archive.manifest import State
from ha.spark.jobs.archive.options import EXIT_INCOMPLETE, archive_path
from ha.spark.jobs.archive.read import archive_states, read_states
from ha.spark.jobs.restore.send import SENT_COLUMNS, QueueReplay, ReplayPlan, TargetQueue, replay_batches
from ha.spark.jobs.synced import replace_file
from ha.spark.jobs.tasks import run_tasks

_STATE_VERSION = 1
_BATCH_ROWS = 1000
_BATCH_BYTES = 16 << 20


class RestoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Source, target and filters of a restore. A filter that is None selects all messages."""

    topic: str
    """The source's topic"""
    archive: str | None = None
    """An archive written by `archive`; give either this or `path`"""
    path: str | None = None
    """A store directory; give either this or `archive`"""
    broker_name: str | None = None
    """With an archive: only this broker's messages. With a store: the broker's name (default: the one that the store
    states, else the directory's)"""
    servers: str = ""
    """Name servers, host:port, separated by ';' or ','; not needed for a dry run"""
    target: str | None = None
    """The topic to send to; default: the source's"""
    state: str | None = None
    """State file of the replay. The first run creates it; later runs with the same file send only what earlier ones
    have not sent. Required, except for a dry run"""
    queues: tuple[int, ...] | None = None
    begin_ms: int | None = None
    """Only messages stored at or after this time, ms since 1970; None: from the first one on"""
    end_ms: int | None = None
    """Only messages stored before this time, ms since 1970; None: up to the last one"""
    tags: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None
    """Only messages with one of these keys (a word of KEYS, or the UNIQ_KEY); None: all"""
    messages_per_s: float | None = None
    """Maximum number of messages per second of all tasks together; None: no limit"""
    skip_unsendable: bool = False
    """Skip and count messages that no broker accepts (damaged, empty, too long), instead of raising RestoreFailed"""
    fail_on_data_loss: bool = True
    """With a store: raise RecordsGone if retention deletes messages while they are read, instead of continuing"""
    dry_run: bool = False
    """Count the selected messages, and send nothing"""


class RestoreResult(msgspec.Struct, kw_only=True):
    """The result of one run. `queues` has the result of each source queue."""

    topic: str
    target: str
    dry_run: bool
    replay_id: str = ""
    queues: list[QueueReplay] = []
    seconds: float = 0.0

    @property
    def rows(self) -> int:
        """Number of messages that passed the filters."""
        return sum(queue.rows for queue in self.queues)

    @property
    def sent(self) -> int:
        """Number of messages stored by this run."""
        return sum(queue.sent for queue in self.queues)

    @property
    def already(self) -> int:
        """Number of messages that earlier runs had sent."""
        return sum(queue.already for queue in self.queues)

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0, or 3 if messages were skipped or stored less safely than SEND_OK."""
        return EXIT_INCOMPLETE if any(queue.unsendable or queue.weakly_stored for queue in self.queues) else 0


class ReplayScope(msgspec.Struct, frozen=True):
    """The options that decide which messages are sent where. All runs with one state file must have the same."""

    topic: str
    target: str
    source: str
    broker_name: str | None
    queues: tuple[int, ...] | None
    begin_ms: int | None
    end_ms: int | None
    tags: tuple[str, ...] | None
    keys: tuple[str, ...] | None


class ReplayState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a state file. `targets`: the target's queues at the start of the replay, used by all its runs."""

    version: int = _STATE_VERSION
    replay_id: str
    scope: ReplayScope
    source_brokers: tuple[str, ...]
    targets: tuple[TargetQueue, ...]


def restore(spark: SparkSession, options: RestoreOptions, progress: Progress = no_progress) -> RestoreResult:
    """Sends the selected messages, or counts them (`dry_run`).

    Progress in tasks (for an archive, in one step), stage "restore" or "count". Raises OptionError,
    StoreUnreadable, RecordsGone, DiskFailed, ArchiveDamaged, ArchiveConflict, RestoreFailed and ClientError. After any
    error but OptionError, and after a kill, call it again with the same options.
    """
    _check(spark, options)
    started = time.monotonic()
    result = RestoreResult(topic=options.topic, target=options.target or options.topic, dry_run=options.dry_run)
    source = _StoreSource(spark, options) if options.path is not None else _ArchiveSource(spark, options)
    if options.dry_run:
        result.queues = source.count(progress)
    else:
        assert options.state is not None
        is_again = Path(options.state).exists()
        state = _replay_state(options, source.brokers())
        result.replay_id = state.replay_id
        plan = ReplayPlan(
            servers=options.servers,
            replay_id=state.replay_id,
            targets=state.targets,
            source_brokers=state.source_brokers,
            messages_per_s=options.messages_per_s,
            skip_unsendable=options.skip_unsendable,
            is_again=is_again,
        )
        result.queues = source.send(plan, progress)
    result.queues.sort(key=lambda queue: (queue.topic, queue.broker_name, queue.queue_id))
    result.seconds = time.monotonic() - started
    return result


class _QueueTask(msgspec.Struct, frozen=True, kw_only=True):
    """Task: send or count the messages at queue offsets [begin, end) of one queue of a store."""

    path: str
    broker_name: str
    topic: str
    queue_id: int
    begin: int
    end: int
    where: RowFilter
    fail_on_data_loss: bool


class _StoreSource:
    """Reads the messages from a store directory with ha.arrow, in one task per queue."""

    def __init__(self, spark: SparkSession, options: RestoreOptions) -> None:
        self._spark = spark
        self._slots = max(1, spark.sparkContext.defaultParallelism)
        assert options.path is not None
        path = Path(options.path).absolute()
        where = RowFilter(
            tags=_set(options.tags),
            keys=_set(options.keys),
            store_begin_ms=options.begin_ms,
            store_end_ms=options.end_ms,
        )
        with LogReader(path, broker_name=options.broker_name or _earlier_name(options)) as reader:
            self._broker_name = reader.broker_name
            self._tasks = [
                _QueueTask(
                    path=str(path),
                    broker_name=reader.broker_name,
                    topic=topic,
                    queue_id=queue_id,
                    begin=begin,
                    end=end,
                    where=where,
                    fail_on_data_loss=options.fail_on_data_loss,
                )
                for topic, queue_id in reader.queues([options.topic])
                if options.queues is None or queue_id in options.queues
                for begin, end in [reader.queue_range(topic, queue_id)]
            ]
        if not self._tasks:
            raise OptionError(
                "topic", f"{path} has none of the requested queues of {options.topic}", "a topic stored there"
            )

    def brokers(self) -> list[str]:
        return [self._broker_name]

    def count(self, progress: Progress) -> list[QueueReplay]:
        return run_tasks(self._spark, _count_queue, self._tasks, partial(progress, "count"))

    def send(self, plan: ReplayPlan, progress: Progress) -> list[QueueReplay]:
        plan = _shared(plan, min(self._slots, len(self._tasks)))
        items = [(plan, task) for task in self._tasks]
        done = run_tasks(self._spark, _send_queue, items, partial(progress, "restore"))
        return [queue for queues in done for queue in queues]


def _queue_batches(task: _QueueTask, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    options = ReadOptions(
        columns=columns,
        batch_rows=_BATCH_ROWS,
        batch_bytes=_BATCH_BYTES,
        decompress=False,
        fail_on_data_loss=task.fail_on_data_loss,
        where=task.where,
    )
    with LogReader(task.path, broker_name=task.broker_name) as reader:
        yield from reader.read_queue(task.topic, task.queue_id, task.begin, task.end, options)


def _count_queue(task: _QueueTask) -> QueueReplay:
    found = QueueReplay(topic=task.topic, broker_name=task.broker_name, queue_id=task.queue_id)
    for batch in _queue_batches(task, ("queueOffset", "bodySize")):
        found.rows += batch.num_rows
        found.body_bytes += sum(size or 0 for size in batch["bodySize"].to_pylist())
        found.first = batch["queueOffset"][0].as_py() if found.first is None else found.first
        found.last = batch["queueOffset"][-1].as_py()
    return found


def _send_queue(item: tuple[ReplayPlan, _QueueTask]) -> list[QueueReplay]:
    plan, task = item
    return replay_batches(plan, _queue_batches(task, SENT_COLUMNS))


class _ArchiveSource:
    """Reads the messages from an archive. Spark partitions the rows by queue and sorts them."""

    def __init__(self, spark: SparkSession, options: RestoreOptions) -> None:
        assert options.archive is not None
        self._slots = max(1, spark.sparkContext.defaultParallelism)
        self._topic = options.topic
        folder = archive_path(options.archive)
        states = archive_states(folder)
        _check_archive(folder, states, options)
        rows = read_states(spark.newSession(), folder, states)
        rows.sparkSession.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(_BATCH_ROWS))
        rows.sparkSession.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", str(_BATCH_BYTES))
        rows.sparkSession.conf.set("spark.sql.session.timeZone", "UTC")
        for condition in _conditions(options):
            rows = rows.where(condition)
        self._rows: DataFrame = rows

    def brokers(self) -> list[str]:
        return sorted(row[0] for row in self._rows.select("brokerName").distinct().collect())

    def count(self, progress: Progress) -> list[QueueReplay]:
        place = F.col("queueOffset")
        size = F.coalesce(F.octet_length("body"), F.lit(0))
        counted = self._rows.groupBy("brokerName", "queueId").agg(F.count("*"), F.sum(size), F.min(place), F.max(place))
        progress("count", 0, 1)
        found = [
            QueueReplay(
                topic=self._topic,
                broker_name=row[0],
                queue_id=row[1],
                rows=row[2],
                body_bytes=row[3],
                first=row[4],
                last=row[5],
            )
            for row in counted.collect()
        ]
        progress("count", 1, 1)
        return found

    def send(self, plan: ReplayPlan, progress: Progress) -> list[QueueReplay]:
        plan = _shared(plan, self._slots)

        def send(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            try:
                outcome: object = replay_batches(plan, batches)
            except RestoreFailed as error:
                outcome = [error.place, error.reason]
            except HalogError as error:
                outcome = [f"{plan.targets[0].queue.topic} at {plan.servers}", str(error)]
            yield pa.RecordBatch.from_pydict({"outcome": [msgspec.json.encode(outcome)]})

        progress("restore", 0, 1)
        ordered = (
            self._rows.select(*SENT_COLUMNS)
            .repartition(self._slots, "brokerName", "queueId")
            .sortWithinPartitions("brokerName", "queueId", "queueOffset", "physicalOffset")
        )
        queues: list[QueueReplay] = []
        for row in ordered.mapInArrow(send, "outcome binary").collect():
            outcome = msgspec.json.decode(bytes(row[0]))
            if outcome and isinstance(outcome[0], str):
                raise RestoreFailed(*outcome)
            queues += msgspec.convert(outcome, list[QueueReplay])
        progress("restore", 1, 1)
        return queues


def _check_archive(folder: Path, states: Iterable[State], options: RestoreOptions) -> None:
    """Raises OptionError if the archive has none of the requested queues, or if a broker's part of it lacks a column
    that the filters compare: without it, no message of this broker would be selected."""
    scopes = {
        state.broker_name: state.scope
        for state in states
        for topic, span in state.spans()
        if topic == options.topic
        and options.broker_name in (None, state.broker_name)
        and (options.queues is None or span.queue_id in options.queues)
    }
    if not scopes:
        reason = f"{folder} has none of the requested queues of {options.topic}"
        raise OptionError("topic", reason, "a topic archived there")
    needed = {"tags": ("tags",), "keys": ("keys", "uniqKey")}
    for broker_name, scope in scopes.items():
        for option, columns in needed.items():
            lacking = [name for name in columns if scope is None or name not in scope.columns]
            if lacking and getattr(options, option) is not None:
                reason = f"the archive of {broker_name} has no column {', '.join(lacking)}"
                raise OptionError(option, reason, "None, or an archive made with this column (extra_columns)")


def _conditions(options: RestoreOptions) -> Iterator[Column]:
    yield F.col("topic") == options.topic
    if options.broker_name is not None:
        yield F.col("brokerName") == options.broker_name
    if options.queues is not None:
        yield F.col("queueId").isin(*options.queues)
    stored = F.col("storeTimestamp")
    # The archive is partitioned by date: this condition avoids opening files of other days.
    if options.begin_ms is not None:
        yield stored >= F.timestamp_millis(F.lit(options.begin_ms))
        yield F.col("date") >= F.lit(_day(options.begin_ms)).cast("date")
    if options.end_ms is not None:
        yield stored < F.timestamp_millis(F.lit(options.end_ms))
        yield F.col("date") <= F.lit(_day(options.end_ms)).cast("date")
    if options.tags is not None:
        yield F.col("tags").isin(*options.tags)
    if options.keys is not None:
        words = F.array(*map(F.lit, options.keys))
        yield F.arrays_overlap(F.coalesce(F.col("keys"), F.array().cast("array<string>")), words) | F.col(
            "uniqKey"
        ).isin(*options.keys)


def _day(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).date().isoformat()


def _set(values: tuple[str, ...] | None) -> frozenset[str] | None:
    return None if values is None else frozenset(values)


def _shared(plan: ReplayPlan, tasks: int) -> ReplayPlan:
    """Returns the plan for one of `tasks` concurrent tasks, which gets its share of the maximum rate."""
    if plan.messages_per_s is None:
        return plan
    return msgspec.structs.replace(plan, messages_per_s=plan.messages_per_s / tasks)


def _earlier_name(options: RestoreOptions) -> str | None:
    """Returns the name of the store directory if this restore was begun by an earlier version of halog, which used it
    as the broker's name; else None. Raises OptionError if the state file can't be decoded."""
    file = Path(options.state or "")
    if options.path is None or not file.is_file():
        return None
    name = Path(options.path).resolve().name
    return name if _load_state(file).source_brokers == (name,) else None


def _load_state(file: Path) -> ReplayState:
    try:
        return msgspec.json.decode(file.read_bytes(), type=ReplayState)
    except msgspec.DecodeError as error:
        raise OptionError("state", f"{file} is no replay's state: {error}", "a file that restore wrote") from None


def _replay_state(options: RestoreOptions, brokers: list[str]) -> ReplayState:
    """Reads the state file, or creates it; brokers that are new in the source are added to it.

    Raises OptionError if it is the state of another replay, can't be decoded or can't be written; without a state file,
    also RestoreFailed and ClientError as in `_find_targets`.
    """
    assert options.state is not None
    file = Path(options.state)
    source = archive_path(options.archive) if options.archive is not None else Path(options.path or "").absolute()
    scope = ReplayScope(
        options.topic,
        options.target or options.topic,
        str(source),
        options.broker_name,
        options.queues,
        options.begin_ms,
        options.end_ms,
        options.tags,
        options.keys,
    )
    if file.exists():
        state = _load_state(file)
        if state.scope != scope:
            differing = [name for name in scope.__struct_fields__ if getattr(scope, name) != getattr(state.scope, name)]
            reason = f"{file} is the state of another replay, with other values of {', '.join(differing)}"
            raise OptionError("state", reason, "the same options as before, or another file")
        if not set(brokers) <= set(state.source_brokers):
            state = msgspec.structs.replace(
                state, source_brokers=(*state.source_brokers, *sorted(set(brokers) - set(state.source_brokers)))
            )
            _write_state(file, state)
        return state
    targets = anyio.run(_find_targets, options.servers, scope.target, backend="trio")
    state = ReplayState(
        replay_id=uuid.uuid4().hex[:16], scope=scope, source_brokers=tuple(sorted(brokers)), targets=targets
    )
    _write_state(file, state)
    return state


def _write_state(file: Path, state: ReplayState) -> None:
    try:
        replace_file(file, msgspec.json.format(msgspec.json.encode(state), indent=1))
    except OSError as error:
        raise OptionError(
            "state", f"{file} can't be written: {error.strerror}", "a file in a folder there is"
        ) from None


async def _find_targets(servers: str, topic: str) -> tuple[TargetQueue, ...]:
    """Returns the queues of `topic` and their current ends; for a new topic, the queues that it will get.

    Raises RestoreFailed if it has no writable queue; ClientError.
    """
    async with (
        Producer(servers, group="halog-restore") as producer,
        PullConsumer(servers, group="halog-restore", read_from=ReadFrom.MASTER) as consumer,
    ):
        found = []
        for queue in sorted(await producer.queues(topic)):
            try:
                floor = await consumer.max_offset(queue)
            except BrokerError as error:
                if error.code != ResponseCode.TOPIC_NOT_EXIST:
                    raise
                floor = 0
            found.append(TargetQueue(queue, floor))
    counts = Counter(target.queue.broker_name for target in found)
    if not counts:
        raise RestoreFailed(topic, "no broker takes messages of this topic")
    return tuple(found)


def _check(spark: SparkSession, options: RestoreOptions) -> None:
    if (options.archive is None) == (options.path is None):
        raise OptionError("archive, path", "both or none are given", "one of them")
    if options.messages_per_s is not None and options.messages_per_s <= 0:
        raise OptionError("messages_per_s", f"{options.messages_per_s}", "more than 0, or None for no limit")
    if options.begin_ms is not None and options.end_ms is not None and options.begin_ms >= options.end_ms:
        raise OptionError("begin_ms, end_ms", "the range is empty", "begin_ms < end_ms")
    if options.dry_run:
        return
    if options.state is None:
        raise OptionError("state", "none is given, so a second run could not find the messages of the first", "a file")
    try:
        name_server_addresses(options.servers)
    except ValueError as error:
        raise OptionError("servers", str(error), "host:port[;host:port…]") from None
    if spark.conf.get("spark.speculation", "false") == "true":
        raise OptionError("spark.speculation", "two tasks would send the same messages", "false")
