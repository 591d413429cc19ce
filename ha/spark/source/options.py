"""Parses the source's options; names and behaviour are spark-sql-kafka's where the concept is the same.

Precedence, as in spark-sql-kafka: startingTimestamp, then startingOffsetsByTimestamp, then startingOffsets; the same
for the ending options. Unlike in spark-sql-kafka, an option that can't be honoured (an ending in a stream, a rate limit
in a batch, anything of Kafka's own client, an unknown name) is refused with a reason, not logged or ignored; and no
subscription at all means every topic.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from ha.arrow.read_options import DEFAULT_COLUMNS, ReadOptions, RowFilter
from ha.arrow.schema import COLUMNS, check_columns
from ha.errors import OptionError
from ha.protocol.compression import BODY_SIZE_MAX
from ha.spark.option_values import (
    JSON_FORMS,
    QUEUE_TEXT,
    GivenOptions,
    Table,
    choice,
    count,
    flag,
    keys,
    known_option,
    milliseconds,
    servers,
    size,
    tag_expression,
    topic_name,
    words,
)
from ha.spark.source.kafka_columns import SOURCES
from ha.spark.source.positions import EARLIEST, LATEST, AtEdge, Position, check_batch_positions, parse_position

Kind = Literal["batch", "stream"]


class SourceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed options of a source. Counts are records unless the name says otherwise."""

    kind: Kind
    paths: tuple[str, ...] = ()
    """Store directories or globs, not expanded yet"""
    broker_names: tuple[str, ...] = ()
    """Name of the broker for each path; the same name twice means replicas of one log"""
    servers: tuple[str, ...] = ()
    """Name servers, host:port"""
    archive: str | None = None
    """Path of an archive of the log; a stream reads the archived messages first"""
    subscribe: tuple[str, ...] | None = None
    subscribe_pattern: str | None = None
    assign: dict[str, tuple[str, ...]] | None = None
    """topic -> queues ("3" on every broker, or "broker-a:3")"""
    tags: frozenset[str] | None = None
    """Tags of the selected messages; None: any, or none"""
    keys: frozenset[str] | None = None
    """A selected message has one of them as a key or as its unique id; None: no condition"""
    starting: Position = AtEdge(EARLIEST)
    starting_option: str = "startingOffsets"
    """Name of the option that determines `starting`, for error messages"""
    no_match: Literal["error", "latest"] = "error"
    """Result of a starting time after a queue's last record: error (OptionError), or latest (the queue's end)"""
    ending: Position = AtEdge(LATEST)
    ending_option: str = "endingOffsets"
    min_partitions: int | None = None
    cores: int = 1
    """Minimum number of tasks if min_partitions is None (fewer for few records): the cores of the driver's host, the
    only ones known here"""
    max_records_per_partition: int | None = None
    max_bytes_per_partition: int = 256 << 20
    max_offsets_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_trigger_delay_ms: int = 15 * 60 * 1000
    max_bytes_per_trigger: int | None = None
    fail_on_data_loss: bool = True
    isolation: Literal["read_uncommitted", "read_committed"] = "read_uncommitted"
    """read_committed: excludes rows that a halog sink has not committed (ha.spark.sink.committed_source)"""
    commit_topic: str | None = None
    """With read_committed: the sink's topic for commits; None: the sink's default"""
    offset_retries: int = 3
    """Number of retries if a queue ends before the offset that the query has reached"""
    offset_retry_interval_ms: int = 1000
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    """The selected columns, which with `kafka_columns` may also be Kafka's (`kafka_columns.SOURCES`)"""
    kafka_columns: bool = False
    damaged_records: Literal["report", "skip", "fail"] = "report"
    verify_crc: bool = False
    decompress: bool = True
    message_size_max: int = BODY_SIZE_MAX
    batch_rows: int = 16_384
    network: dict[str, str] = {}
    """Options for pulling over the network, as given; keys as in NETWORK_OPTIONS"""

    @property
    def reads_whole_topics(self) -> bool:
        """Whether all records of the selected topics are read, which can be done in physical order."""
        return self.assign is None and self.starting == AtEdge(EARLIEST) and self.ending == AtEdge(LATEST)

    @property
    def is_trigger_unlimited(self) -> bool:
        """Whether a micro-batch reads all records that exist."""
        return self.max_offsets_per_trigger is None and self.max_bytes_per_trigger is None

    @property
    def reads_everything(self) -> bool:
        """Whether all records of all topics are read."""
        return self.reads_whole_topics and self.subscribe is None and self.subscribe_pattern is None

    @property
    def where(self) -> RowFilter:
        """The messages of the queues that are rows, by tag and key."""
        return RowFilter(tags=self.tags, keys=self.keys)

    def read_options(self, columns: tuple[str, ...]) -> ReadOptions:
        """Returns the read options of a task."""
        return ReadOptions(
            columns=columns,
            batch_rows=self.batch_rows,
            decompress=self.decompress,
            message_size_max=self.message_size_max,
            on_damage=self.damaged_records,
            verify_crc=self.verify_crc,
            # With an archive, records that retention deleted after planning may be in it. If the task fails, they are
            # read from there when the query is started again.
            fail_on_data_loss=self.fail_on_data_loss or self.archive is not None,
            where=self.where,
        )


NETWORK_OPTIONS = ("readFrom", "pullTimeout", "pullBatchSize")
"""Options that only `servers` uses; `network` reads them from SourceOptions.network."""

_VALUES: Table = {
    "brokerName": ("broker_names", words),
    "tags": ("tags", tag_expression),
    "keys": ("keys", keys),
    "startingOffsetsByTimestampStrategy": ("no_match", choice("error", "latest")),
    "minPartitions": ("min_partitions", count()),
    "maxRecordsPerPartition": ("max_records_per_partition", count()),
    "maxBytesPerPartition": ("max_bytes_per_partition", size()),
    "maxOffsetsPerTrigger": ("max_offsets_per_trigger", count()),
    "minOffsetsPerTrigger": ("min_offsets_per_trigger", count()),
    "maxTriggerDelay": ("max_trigger_delay_ms", milliseconds()),
    "maxBytesPerTrigger": ("max_bytes_per_trigger", size()),
    "failOnDataLoss": ("fail_on_data_loss", flag),
    "isolation": ("isolation", choice("read_uncommitted", "read_committed")),
    "commitTopic": ("commit_topic", topic_name),
    "fetchOffset.numRetries": ("offset_retries", count(least=0)),
    "fetchOffset.retryIntervalMs": ("offset_retry_interval_ms", milliseconds()),
    "damagedRecords": ("damaged_records", choice("report", "skip", "fail")),
    "verifyCrc": ("verify_crc", flag),
    "decompress": ("decompress", flag),
    "maxMessageSize": ("message_size_max", size()),
    "maxRecordsPerBatch": ("batch_rows", count()),
}
_TOGETHER = (
    "path",
    "paths",
    "servers",
    "archive",
    "subscribe",
    "topic",
    "subscribePattern",
    "assign",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsets",
    "includeHeaders",
    "includeProperties",
    "columns",
    "kafkaColumns",
)
"""Options that are not in _VALUES, as several determine one field, or as what they accept depends on other options."""
_BATCH_ONLY = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets")
_STREAM_ONLY = (
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "maxBytesPerTrigger",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
)
_OPTIONS = {name.lower(): name for name in (*_TOGETHER, *_VALUES, *_BATCH_ONLY, *NETWORK_OPTIONS)}

_KAFKA_ONLY = {
    "groupidprefix": "nothing: a reader joins no consumer group",
    "kafkaconsumer.polltimeoutms": "pullTimeout, with servers",
    "includetimestamp": "the column storeTimestamp",
    "continuous": "a micro-batch trigger",
}


def parse_options(raw: Mapping[str, str], kind: Kind) -> SourceOptions:
    """Parses the options for a `kind` of query; names may be in any case. Raises OptionError for the first invalid
    option found."""
    given = GivenOptions({_known(key): value for key, value in raw.items()})
    for name in _BATCH_ONLY if kind == "stream" else _STREAM_ONLY:
        if name in given:
            reason = "a stream has no end" if kind == "stream" else "there are no triggers in a batch"
            raise OptionError(name, reason, "leave it out" if kind == "stream" else "leave it out, or use readStream")
    paths, addresses = _where(given)
    network = {name: given.values[name] for name in NETWORK_OPTIONS if name in given}
    if network and not addresses:
        raise OptionError(next(iter(network)), "it is for reading over the network", "together with the option servers")
    archive = _archive(given, kind)
    if addresses:
        reason = "with servers, sizes are not known without reading"
        if archive is None and "maxBytesPerPartition" in given:
            raise OptionError("maxBytesPerPartition", reason, "maxRecordsPerPartition")
        if "maxBytesPerTrigger" in given:
            raise OptionError("maxBytesPerTrigger", reason, "maxOffsetsPerTrigger")
    subscribe, pattern, assign = _what(given)
    is_from_end = kind == "stream" and archive is None
    starting, starting_option = parse_position(given, "starting", AtEdge(LATEST if is_from_end else EARLIEST))
    ending, ending_option = parse_position(given, "ending", AtEdge(LATEST))
    if kind == "batch":
        check_batch_positions(starting, starting_option, ending, ending_option)
    options = SourceOptions(
        kind=kind,
        paths=paths,
        servers=addresses,
        archive=archive,
        subscribe=subscribe,
        subscribe_pattern=pattern,
        assign=assign,
        starting=starting,
        starting_option=starting_option,
        ending=ending,
        ending_option=ending_option,
        cores=len(os.sched_getaffinity(0)),
        columns=_columns(given),
        kafka_columns=bool(given.read("kafkaColumns", flag)),
        network=network,
        **given.fields(_VALUES),
    )
    if options.commit_topic is not None and options.isolation != "read_committed":
        raise OptionError("commitTopic", "commits are not read", "together with isolation=read_committed")
    most, least = options.max_offsets_per_trigger, options.min_offsets_per_trigger
    if least is not None and most is not None and least > most:
        raise OptionError("minOffsetsPerTrigger", f"it is above maxOffsetsPerTrigger ({most})", f"{most} or less")
    if "maxTriggerDelay" in given and least is None:
        raise OptionError("maxTriggerDelay", "nothing is delayed", "together with minOffsetsPerTrigger")
    return options


def parse_any(raw: Mapping[str, str]) -> SourceOptions:
    """Parses the options before the kind of query is known: as a stream's, or as a batch's if they have an ending.

    Raises OptionError if they are valid for neither.
    """
    kind: Kind = "stream" if any(_known(key) in _STREAM_ONLY for key in raw) else "batch"
    if kind == "batch" and not any(_known(key) in _BATCH_ONLY for key in raw):
        # A stream accepts all other options of a batch, and more, such as archive and startingOffsets=latest.
        kind = "stream"
    return parse_options(raw, kind)


def _known(key: str) -> str:
    lower = key.lower()
    if lower.startswith("kafka.") or lower in _KAFKA_ONLY:
        instead = "servers for the address, or nothing" if lower.startswith("kafka.") else _KAFKA_ONLY[lower]
        raise OptionError(key, "it sets up a Kafka client, and there is none here", instead)
    return known_option(key, _OPTIONS, "reading")


def _where(given: GivenOptions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    paths = given.read("path", words) or ()
    if "paths" in given:  # load(["a", "b"])
        try:
            listed = json.loads(given.values["paths"])
        except (ValueError, RecursionError):
            listed = None
        if not isinstance(listed, list) or not all(isinstance(item, str) and item for item in listed):
            raise OptionError("paths", "it is no list of paths", JSON_FORMS["paths"])
        paths += tuple(listed)
    addresses: tuple[str, ...] = given.read("servers", servers) or ()
    if paths and addresses:
        raise OptionError(
            "servers", "path is given too", "one of the two: path reads files, servers pulls from brokers"
        )
    if not paths and not addresses:
        raise OptionError("path", "it is missing", "a store directory (or servers, to pull over the network)")
    return tuple(_local(path) for path in paths), addresses


def _archive(given: GivenOptions, kind: Kind) -> str | None:
    archive = given.text("archive")
    if archive is None:
        return None
    if kind == "batch":
        raise OptionError("archive", "it is for streams", "ha.spark.topic(spark, topic, archive=…, path=…)")
    for name in ("startingTimestamp", "startingOffsetsByTimestamp"):
        if name in given:
            raise OptionError(name, "archived messages are not searched by time", "startingOffsets, and a filter")
    for name in ("tags", "keys"):
        if name in given:
            raise OptionError(name, "archived messages are not selected by it", f"a filter on the column {name}")
    if given.values.get("isolation", "").lower() == "read_committed":
        raise OptionError("isolation", "an archive has the rows that are not committed, too", "read_uncommitted")
    return archive


def _local(path: str) -> str:
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+):/", path)
    if scheme is None:
        return path
    if scheme[1].lower() != "file":
        raise OptionError(
            "path", f"{scheme[1]} is not a place where files can be mapped", "a directory of this host, or servers"
        )
    return "/" + path[len("file:") :].lstrip("/")


def _what(given: GivenOptions) -> tuple[tuple[str, ...] | None, str | None, dict[str, tuple[str, ...]] | None]:
    named = [name for name in ("subscribe", "topic", "subscribePattern", "assign") if name in given]
    if len(named) > 1:
        raise OptionError(
            named[1], f"{named[0]} is given too", "only one of subscribe (or topic), subscribePattern, assign"
        )
    subscribe = given.read("subscribe", words) or given.read("topic", words)
    pattern = given.text("subscribePattern")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise OptionError(
                "subscribePattern", f"{pattern!r} is no regular expression ({error})", "such as flights.*"
            ) from None
    assign = None
    if "assign" in given:
        assign = {}
        for topic, queues in given.json_object("assign").items():
            texts = tuple(str(queue) for queue in queues) if isinstance(queues, list) else ()
            if not texts or any(isinstance(q, bool) or QUEUE_TEXT.fullmatch(str(q)) is None for q in queues):
                raise OptionError("assign", f"{queues!r} of {topic} is no list of queues", JSON_FORMS["assign"])
            assign[topic] = texts
        if not assign:
            raise OptionError("assign", "it names no queue", JSON_FORMS["assign"])
    return (tuple(dict.fromkeys(subscribe)) if subscribe else None), pattern, assign


def _columns(given: GivenOptions) -> tuple[str, ...]:
    named = given.read("columns", words)
    is_kafka = given.read("kafkaColumns", flag)
    known = {**SOURCES, **COLUMNS} if is_kafka else COLUMNS
    if named is None:
        columns = tuple(SOURCES) if is_kafka else DEFAULT_COLUMNS
    elif named == ("*",):
        columns = tuple(known)
    else:
        by_lower_name = {name.lower(): name for name in known}
        columns = check_columns((by_lower_name.get(word.lower(), word) for word in named), known)
    if "includeHeaders" in given and "includeProperties" in given:
        raise OptionError("includeHeaders", "it is another name of includeProperties", "one of the two")
    properties = "headers" if is_kafka else "properties"
    if (given.read("includeHeaders", flag) or given.read("includeProperties", flag)) and properties not in columns:
        columns = (*columns, properties)
    return columns
