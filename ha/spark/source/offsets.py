"""Encodes offsets as JSON, and determines where a query starts and ends.

A query's position is one queue offset per queue, the next one to read: `{"flights":{"0":23,"1":7}}` with one broker,
`{"flights":{"broker-a:0":23}}` with several. The prefixed form is always accepted. Topics with many queues have a
shorter form (see `runs`).

A stream's offsets have more keys, which can't be topics:

    $broker   the broker's name, if there is only one: the checkpoint stays valid when a second broker is added, and is
              refused with `servers` while a different broker is the only one registered
    $initial  in a query's initial offset: "latest" if by the options a queue may start at its end, otherwise "offsets"
    $start    in a batch's end: where the batch starts in queues that the previous end does not have; in the end of the
              first batch, where it starts in all queues
    $read     with `path`, for each broker: a physical offset (bytes) after all messages that were read. When a topic of
              RocketMQ is deleted and created again, its queue offsets begin at 0 again. This shows in a message that
              has a queue offset already read, but is stored after $read

Spark stores a batch's end in the checkpoint, but not the initial offset, and asks for it again if the first batch was
not finished; "latest" has moved by then, and "earliest" as well once retention has run. With $start the checkpoint
describes every batch completely. Kafka's source writes its own file into the checkpoint for this; Python sources don't
know where the checkpoint is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec

from ha.errors import OptionError
from ha.protocol.topic_names import is_system_topic
from ha.spark.source.log_source import Brokers, LogSource, QueueKey
from ha.spark.source.options import SourceOptions
from ha.spark.source.positions import EARLIEST, LATEST, AtEdge, AtOffsets, AtTime, PerQueue, Position
from ha.spark.source.runs import decode_run, encode_runs

BROKER = "$broker"
INITIAL = "$initial"
START = "$start"
READ = "$read"

OffsetMap = dict[QueueKey, int]
"""queue -> the queue offset to read next"""


class StreamOffset(msgspec.Struct, frozen=True, kw_only=True):
    """A stream's decoded offset; `started`, `initial` and `read` are $start, $initial and $read."""

    positions: OffsetMap
    started: OffsetMap = {}
    initial: str | None = None
    read: dict[str, int] = {}
    """broker -> physical offset (bytes) after all messages that were read"""


def encode_queue(queue: QueueKey, brokers: tuple[str, ...]) -> str:
    """Returns the queue's name in JSON: its number, prefixed by its broker's name if there are several."""
    return str(queue.queue_id) if len(brokers) == 1 else f"{queue.broker}:{queue.queue_id}"


def encode_positions(
    positions: Mapping[QueueKey, int], brokers: tuple[str, ...]
) -> dict[str, dict[str, int | list[int]]]:
    """Returns `positions` for JSON: topic -> queue -> queue offset (see `runs`). Equal positions give equal JSON."""
    found: dict[str, dict[str, int | list[int]]] = {}
    for (topic, broker), queues in groupby(sorted(positions), key=itemgetter(0, 1)):
        prefix = "" if len(brokers) == 1 else f"{broker}:"
        runs = encode_runs([(queue.queue_id, positions[queue]) for queue in queues])
        found.setdefault(topic, {}).update((prefix + text, value) for text, value in runs)
    return found


def decode_positions(
    found: Mapping[str, Any], brokers: Brokers, option: str = "checkpoint", *, unnamed: str | None = None
) -> OffsetMap:
    """Returns the positions in parsed JSON. Keys that begin with "$" are skipped.

    `unnamed`: the broker of queues without a broker's name, if it is known. Raises OptionError, naming `option`, if the
    positions are malformed, name a broker that is not one of `brokers`, or lack its name although there are several.
    """
    _check_offsets(found, option)
    positions: OffsetMap = {}
    for topic, queues in found.items():
        if topic.startswith("$"):
            continue
        if not isinstance(queues, dict):
            raise OptionError(option, f"{queues!r} of {topic} are no offsets", '{"flights":{"0":23}}')
        for text, value in queues.items():
            try:
                prefix, first, numbers = decode_run(text, value)
            except ValueError as error:
                raise OptionError(option, f"{topic}: {error}", '{"flights":{"0":23}}') from None
            if not prefix and unnamed is not None:
                prefix = f"{unnamed}:"
            for queue in decode_queue(topic, f"{prefix}{first}", brokers, option, one=True):
                for queue_id, number in enumerate(numbers, first):
                    key = QueueKey(topic, queue.broker, queue_id)
                    # Checkpoints of earlier versions list replicas as several brokers; the lowest offset counts.
                    positions[key] = min(number, positions.get(key, number))
    return positions


def _check_offsets(found: object, option: str) -> None:
    """Raises OptionError unless `found` is a JSON object."""
    if not isinstance(found, Mapping):
        raise OptionError(option, f"{found!r} are not offsets", '{"flights":{"0":23}}')


def _check_brokers_named(found: Mapping[str, Any], brokers: Brokers) -> None:
    """Raises OptionError if queues in a stream's offset lack their broker's name. halog 0.1 did not write that of a
    single broker."""
    for topic, queues in found.items():
        for text in queues if isinstance(queues, dict) and not topic.startswith("$") else ():
            if ":" not in text:
                raise OptionError(
                    "checkpoint",
                    f"the broker of {topic} queue {text} is not named, so it may be another one than {brokers[0]}",
                    "`path` for the next batch, which names it, or a new checkpoint and startingOffsets",
                )


def decode_queue(topic: str, text: str, brokers: Brokers, option: str, *, one: bool) -> list[QueueKey]:
    """Returns the queues that `text` (see QUEUE_TEXT) names: one queue or, if it has no broker's name, one per broker.

    Raises OptionError for a broker that is not read; with `one`, also for a text that names queues of several brokers.
    """
    broker, _, number = text.rpartition(":")
    broker = brokers.name_of(broker)
    if broker and broker not in brokers:
        what = "registered with the name servers" if brokers.are_registered else "read"
        raise OptionError(option, f"{topic} queue {text} is of a broker that is not {what}", ", ".join(brokers))
    if not broker and one and len(brokers) > 1:
        raise OptionError(
            option,
            f"{topic} queue {number} is the name of {len(brokers)} queues, as several brokers are read",
            f'the broker\'s name before the number, such as "{brokers[0]}:{number}"',
        )
    return [QueueKey(topic, name, int(number)) for name in ([broker] if broker else brokers)]


def encode_stream(offset: StreamOffset, brokers: tuple[str, ...]) -> dict[str, Any]:
    """Returns a stream's offset as a JSON object."""
    found: dict[str, Any] = encode_positions(offset.positions, brokers)
    if len(brokers) == 1:
        found[BROKER] = brokers[0]
    if offset.initial is not None:
        found[INITIAL] = offset.initial
    if offset.read:
        found[READ] = dict(sorted(offset.read.items()))
    if offset.started:
        found[START] = encode_positions(offset.started, brokers)
    return found


def decode_stream(found: Mapping[str, Any], brokers: Brokers) -> StreamOffset:
    """Decodes a stream's offset. Raises OptionError if it is malformed, or may be an offset of other brokers."""
    _check_offsets(found, "checkpoint")
    _check_offsets(found.get(READ, {}), "checkpoint")
    # A single store may have been renamed, so its name counts only if there are several.
    unnamed = found.get(BROKER) if len(brokers) > 1 or brokers.are_registered else None
    if unnamed is None and brokers.are_registered and len(brokers) == 1:
        _check_brokers_named(found, brokers)
    read = {brokers.name_of(name): place for name, place in found.get(READ, {}).items()}
    if len(brokers) == 1 and len(read) == 1:
        read = dict(zip(brokers, read.values(), strict=True))
    return StreamOffset(
        positions=decode_positions(found, brokers, unnamed=unnamed),
        started=decode_positions(found.get(START, {}), brokers, unnamed=unnamed),
        initial=found.get(INITIAL),
        read=read,
    )


def subscribed(source: LogSource, options: SourceOptions) -> list[QueueKey]:
    """Returns the existing queues that the options subscribe to, sorted. Topics and queues that don't exist are
    skipped.

    Raises OptionError if `assign` names a broker that is not read.
    """
    brokers = source.brokers()
    if options.assign is not None:
        wanted = {
            queue
            for topic, texts in options.assign.items()
            for text in texts
            for queue in decode_queue(topic, text, brokers, "assign", one=False)
        }
        return [queue for queue in source.queues(frozenset(options.assign)) if queue in wanted]
    if options.subscribe is not None:
        return source.queues(frozenset(options.subscribe))
    if options.subscribe_pattern is not None:
        pattern = re.compile(options.subscribe_pattern)
        return source.queues(frozenset(topic for topic in source.topics() if pattern.fullmatch(topic)))
    return source.queues(None)


def missing_topics(source: LogSource, options: SourceOptions) -> list[str]:
    """Returns the topics that the options name but that have no queue: they are misspelt, or have no message yet."""
    named = options.subscribe if options.subscribe is not None else tuple(options.assign or ())
    return [topic for topic in named if not source.queues(frozenset({topic}))]


def check_topics_exist(source: LogSource, options: SourceOptions) -> None:
    """Raises OptionError if a topic or queue named for a batch does not exist: most likely it is misspelt."""
    for topic in missing_topics(source, options):
        known = [name for name in source.topics() if not is_system_topic(name)]
        names = ", ".join(known[:10]) + (", …" if len(known) > 10 else "")
        option = "assign" if options.assign is not None else "subscribe"
        raise OptionError(option, f"topic {topic!r} has no queue in the log", f"a topic of this log: {names or 'none'}")
    for topic, texts in (options.assign or {}).items():
        found = source.queues(frozenset({topic}))
        for text in texts:
            if not set(decode_queue(topic, text, source.brokers(), "assign", one=False)) & set(found):
                numbers = ", ".join(sorted({encode_queue(queue, source.brokers()) for queue in found}))
                raise OptionError(
                    "assign", f"{topic} has no queue {text} in the log", f"a queue with messages: {numbers}"
                )


def starting_positions(source: LogSource, options: SourceOptions, queues: Iterable[QueueKey]) -> OffsetMap:
    """Returns for each of `queues` the queue offset at which a new query starts. Raises OptionError as in
    `_resolve`."""
    return _resolve(source, options, options.starting, options.starting_option, list(queues), at_start=True)


def ending_positions(source: LogSource, options: SourceOptions, queues: Iterable[QueueKey]) -> OffsetMap:
    """Returns for each of `queues` the queue offset at which a batch ends. Raises OptionError as in `_resolve`."""
    return _resolve(source, options, options.ending, options.ending_option, list(queues), at_start=False)


def _resolve(
    source: LogSource,
    options: SourceOptions,
    position: Position,
    option: str,
    queues: list[QueueKey],
    *,
    at_start: bool,
) -> OffsetMap:
    """Returns a queue offset for every queue; for a time after the last record, the queue's end.

    Raises OptionError for offsets or times by queue that omit a queue or name a topic that is not read, for an offset
    above 0 of a queue that does not exist, and for a starting time after the last record of a queue, unless
    startingOffsetsByTimestampStrategy is latest.
    """
    if isinstance(position, AtEdge):
        return {queue: _edge(source, queue, position.edge) for queue in queues}
    if isinstance(position, AtOffsets):
        offsets = _named(position.offsets, source.brokers(), queues, option)
        for queue, offset in offsets.items():
            if queue not in queues and offset > 0:
                raise OptionError(
                    option, f"{queue} does not exist", f"0, {EARLIEST} or {LATEST} for it, or leave it out"
                )
        return {queue: _edge(source, queue, offsets[queue]) for queue in queues}
    if isinstance(position, AtTime):
        times = dict.fromkeys(queues, position.timestamp_ms)
    else:
        times = _named(position.timestamps_ms, source.brokers(), queues, option)
    found: OffsetMap = {}
    for queue in queues:
        at_time = source.offset_for_time(queue, times[queue])
        if at_time is None and at_start and options.no_match == "error":
            reason = f"{queue} has no record stored at {times[queue]} ms or later"
            raise OptionError(option, reason, "an earlier time, or startingOffsetsByTimestampStrategy=latest")
        found[queue] = source.queue_range(queue).end if at_time is None else at_time
    return found


def _edge(source: LogSource, queue: QueueKey, offset: int) -> int:
    if offset == EARLIEST:
        return source.queue_range(queue).begin
    if offset == LATEST:
        return source.queue_range(queue).end
    return offset


def _named(found: PerQueue, brokers: Brokers, queues: list[QueueKey], option: str) -> OffsetMap:
    numbers = decode_positions(found, brokers, option)
    topics = {queue.topic for queue in queues}
    for queue in queues:
        if queue not in numbers:
            raise OptionError(
                option, f"{queue} is left out", f"every queue that is read ({EARLIEST} earliest, {LATEST} latest)"
            )
    for queue in numbers:
        if topics and queue.topic not in topics:
            raise OptionError(
                option, f"{queue.topic} is not read", "topics that are subscribed to: " + ", ".join(topics)
            )
    return numbers
