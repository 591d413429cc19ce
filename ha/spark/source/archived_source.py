"""Implements the option `archive` of a stream: a `LogSource` that adds an archive's messages to those of a log.

Positions are queue offsets, as without an archive. A queue begins with its first archived message and ends where the
log ends; messages that retention deleted from the log are read from the archive. So each message is read once, a
checkpoint stays valid regardless of archiving, merges and retention, and an archive can be added to a query later.

If the log of a broker begins after the end of its archive, the messages in between count as lost (failOnDataLoss).
Other messages that are neither in the log nor in the archive were erased, or deleted before they could be archived;
they don't count as lost here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import pyarrow as pa

from ha.arrow.places import LIGHT_QUEUE_PREFIX
from ha.arrow.queues import UNWRITTEN
from ha.arrow.read_options import ReadOptions
from ha.errors import OptionError
from ha.spark.jobs.archive.manifest import ArchivedFile, Manifest, State, brokers
from ha.spark.jobs.archive.options import archive_path
from ha.spark.jobs.archive.read import archive_states
from ha.spark.jobs.archive.rows import FileRange, read_files
from ha.spark.source.log_source import Brokers, LogPartition, LogSource, QueueKey, QueueRange, QueueSlice
from ha.spark.source.options import SourceOptions
from ha.spark.source.planning import report_loss

_Offsets = dict[int, tuple[int, int]]
"""Queue id -> queue offsets [begin, end)"""


class ArchivedSource(LogSource):
    """Combines the messages of `log` and of the archive that the options name. Implements `LogSource`.

    The constructor raises OptionError for a light queue, for a topic that the archive does not hold, and as in
    `check_broker_names`; and the errors of `archive_states`.
    """

    def __init__(self, log: LogSource, options: SourceOptions) -> None:
        assert options.archive is not None
        self._log = log
        self._options = options
        self._folder = archive_path(options.archive)
        self._named = frozenset(options.subscribe or options.assign or ())
        self._applied: dict[str, int] = {}
        self._states: dict[str, State] = {}
        self._files: dict[QueueKey, list[tuple[ArchivedFile, int, int, int]]] = {}
        self._ranges: dict[QueueKey, QueueRange] = {}
        self._created_again: set[QueueKey] = set()
        self._checked: dict[QueueKey, tuple[int, int]] = {}
        self._refresh_archive()
        for topic in sorted(self._named):
            if topic.startswith(LIGHT_QUEUE_PREFIX):
                raise OptionError("archive", f"{topic} is a light queue, which an archive does not hold", "no archive")
            if not any(state.holds(topic) for state in self._states.values()):
                accepted = "an archive of it, or of all topics"
                raise OptionError("archive", f"{self._folder} does not contain the topic {topic}", accepted)

    def _refresh_archive(self) -> bool:
        applied = {name: Manifest(self._folder, name).applied() for name in brokers(self._folder)}
        if applied and applied == self._applied:
            return False
        states = [state for state in archive_states(self._folder) if state.scope is not None]
        self._applied = applied
        self._files, self._ranges = {}, {}
        known = self._log.brokers()
        if self._options.servers:
            check_broker_names([state.broker_name for state in states], known)
        self._states = {known.name_of(state.broker_name): state for state in states}
        self._created_again = {
            QueueKey(topic, broker, queue_id)
            for broker, state in self._states.items()
            for topic, queue_id in state.created_again(self._named or None)
        }
        for broker, state in self._states.items():
            for file in state.files.values():
                for span in file.queues if self._is_wanted(file.topic) else ():
                    queue = QueueKey(file.topic or "", broker, span.queue_id)
                    size = file.bytes * span.rows // max(1, file.rows)
                    self._files.setdefault(queue, []).append((file, span.first, span.last + 1, size))
            for topic, span in state.spans():
                if not self._is_wanted(topic):
                    continue
                queue = QueueKey(topic, broker, span.queue_id)
                begin, end = self._ranges.get(queue, (span.first, span.last + 1))
                self._ranges[queue] = QueueRange(min(begin, span.first), max(end, span.last + 1))
        return True

    def _is_wanted(self, topic: str | None) -> bool:
        """Returns whether the query may read `topic`.

        Files of other topics are not listed, as the list is made again after each change of the archive, possibly every
        few seconds.
        """
        return topic is not None and (not self._named or topic in self._named)

    def refresh(self) -> bool:
        """Refreshes the log, then the archive. In the other order, messages that are archived and deleted from the log
        in between would seem to be in neither.

        Returns False if nothing has changed. Raises the errors of the constructor and of the log's `refresh`.
        """
        return self._log.refresh() | self._refresh_archive()

    def brokers(self) -> Brokers:
        """Returns the brokers of the log, followed by those that only the archive has."""
        known = self._log.brokers()
        names = [*known, *sorted(self._states.keys() - set(known))]
        return Brokers(names, known.aliases, are_registered=known.are_registered)

    def min_offset(self, broker: str) -> int | None:
        """Returns the physical offset at which the log of `broker` begins; None if the log does not know it, or for a
        broker that only the archive has."""
        return self._log.min_offset(broker) if broker in self._log.brokers() else None

    def queues(self, topics: frozenset[str] | None) -> list[QueueKey]:
        """Returns the queues of the log and of the archive, sorted."""
        archived = (queue for queue in self._files if topics is None or queue.topic in topics)
        return sorted({*self._log.queues(topics), *archived})

    def topics(self) -> list[str]:
        """Returns the topics of the log and of the archive, sorted."""
        return sorted({*self._log.topics(), *(queue.topic for queue in self._files)})

    def queue_range(self, queue: QueueKey) -> QueueRange:
        """Returns the range from the first message in the archive or the log to the end of the log, or to the end of
        the archive if the log does not have the queue. Raises OptionError as in `_check_not_created_again`."""
        archived, logged = self._ranges.get(queue, QueueRange(0, 0)), self._log_range(queue)
        self._check_not_created_again(queue, archived, logged)
        if logged.end == 0 or archived.end == 0:
            return logged if archived.end == 0 else archived
        return QueueRange(min(archived.begin, logged.begin), logged.end)

    def _check_not_created_again(self, queue: QueueKey, archived: QueueRange, logged: QueueRange) -> None:
        """Raises OptionError if two messages may have the same queue offset, because the archive has messages of an
        earlier topic of the same name.

        This shows in a message of the log that is stored after the end of the archive, but whose queue offset the
        archive has as well.
        """
        last = min(archived.end, logged.end) - 1
        covered = self._states[queue.broker].covered_end or 0 if queue in self._ranges else 0
        if logged.begin <= last and self._checked.get(queue) != (last, covered):
            self._checked[queue] = last, covered
            if covered <= self._log.physical_offset(queue, last) < UNWRITTEN:
                self._created_again.add(queue)
        if queue in self._created_again:
            reason = f"{queue} was deleted and created again, so its queue offsets don't identify its messages"
            accepted = (
                "no archive, one that was begun later, or ha.spark.topic, which returns the messages of both topics"
            )
            raise OptionError("archive", reason, accepted)

    def _log_range(self, queue: QueueKey) -> QueueRange:
        # Brokers return an error for the range of a queue that they don't have.
        return QueueRange(0, 0) if self._is_only_archived(queue) else self._log.queue_range(queue)

    def _is_only_archived(self, queue: QueueKey) -> bool:
        return queue in self._ranges and queue not in self._log.queues(frozenset({queue.topic}))

    def is_away(self, queue: QueueKey) -> bool:
        """Returns whether only the archive has `queue`, as its broker is not registered now. Always False with `path`,
        as no broker can be added later."""
        return bool(self._options.servers) and self._is_only_archived(queue)

    def offset_for_time(self, queue: QueueKey, timestamp_ms: int) -> int | None:
        """Always raises OptionError: archived messages can't be searched by time."""
        raise OptionError("archive", "archived messages are not searched by time", "startingOffsets, and a filter")

    def physical_offset(self, queue: QueueKey, queue_offset: int) -> int:
        """Returns the physical offset of a message in the log; -1 for a broker that only the archive has."""
        return self._log.physical_offset(queue, queue_offset) if queue.broker in self._log.brokers() else -1

    def queue_bytes(self, queue: QueueKey, begin: int, end: int) -> int | None:
        """Returns the size of the records [begin, end) in bytes; None if the log does not know the size of its records.

        Archived messages count with their share (by rows) of the size of the compressed files.
        """
        split = self._split(queue, begin, end)
        archived = 0
        for _, first, last, size in self._files.get(queue, ()):
            count = min(split, last) - max(begin, first)
            archived += size * max(0, count) // (last - first)
        logged = self._log.queue_bytes(queue, split, end) if split < end else 0
        return None if logged is None else archived + logged

    def _split(self, queue: QueueKey, begin: int, end: int) -> int:
        """Returns the first queue offset of [begin, end) that is read from the log; `end` if none is."""
        logged = self._log_range(queue)
        log_begin = self._ranges[queue].end if self.is_away(queue) else logged.begin if logged.end else end
        return min(end, max(begin, log_begin))

    def archived_tasks(self, slices: Sequence[QueueSlice]) -> tuple[list[LogPartition], list[QueueSlice]]:
        """Returns the tasks for messages that the log no longer has, and the slices to read from the log.

        Raises RecordsGone, unless failOnDataLoss is off, if retention deleted messages that were not archived yet.
        """
        archived: dict[tuple[str, str], _Offsets] = {}
        others = []
        for queue, begin, end in slices:
            split = self._split(queue, begin, end)
            if begin < split:
                self._check_loss(queue, begin, split)
                archived.setdefault((queue.broker, queue.topic), {})[queue.queue_id] = begin, split
            if split < end:
                others.append(QueueSlice(queue, split, end))
        files = [(key, file) for key, offsets in archived.items() for file in self._chosen(*key, offsets)]
        count = self._options.min_partitions or self._options.cores
        share = sum(file.bytes for _, file in files) // count + 1
        limit = min(share, self._options.max_bytes_per_partition)
        rows_max = self._options.max_records_per_partition or sys.maxsize
        tasks: list[LogPartition] = []
        ranges: list[FileRange] = []
        size = rows = 0
        for (broker, topic), file in files:
            state = self._states[broker]
            parts = _cut(_common_offsets(file, archived[broker, topic]), rows_max)
            for offsets in parts:
                more = sum(end - begin for begin, end in offsets.values())
                if ranges and (size >= limit or rows + more > rows_max):
                    tasks.append(ArchivedPartition(ranges))
                    ranges, size, rows = [], 0, 0
                ranges.append(FileRange.of(self._folder, state.broker_name, broker, file, offsets))
                size += file.bytes // len(parts)
                rows += more
        return [*tasks, *([ArchivedPartition(ranges)] if ranges else [])], others

    def _chosen(self, broker: str, topic: str, offsets: _Offsets) -> list[ArchivedFile]:
        found = {
            file.path: file
            for queue_id, (begin, end) in offsets.items()
            for file, first, last, _ in self._files.get(QueueKey(topic, broker, queue_id), ())
            if first < end and last > begin
        }
        return sorted(found.values(), key=lambda file: (str(file.date), file.physical_begin))

    def _check_loss(self, queue: QueueKey, begin: int, end: int) -> None:
        state = self._states.get(queue.broker)
        log_begin = self.min_offset(queue.broker)
        covered = state.covered_end or 0 if state is not None and state.holds(queue.topic) else 0
        if log_begin is not None and log_begin <= covered:
            return
        begin = max(begin, self._ranges[queue].end if queue in self._ranges else 0)
        if begin < end:
            reason = "retention deleted them, and they are not in the archive"
            report_loss(self._options.fail_on_data_loss, str(queue), begin, end, reason)

    def queue_partition(self, slices: Sequence[QueueSlice]) -> LogPartition:
        """Returns a task's partition for `slices`: archived messages first, then those in the log. Errors as in
        `archived_tasks`."""
        tasks, others = self.archived_tasks(slices)
        return PartitionChain([*tasks, *([self._log.queue_partition(others)] if others else [])])

    def range_partitions(
        self, bytes_each: int, count_min: int, topics: frozenset[str] | None
    ) -> list[LogPartition] | None:
        """Returns None: streams are read by queue."""
        return None

    def close(self) -> None:
        """Closes the log."""
        self._log.close()


def _common_offsets(file: ArchivedFile, offsets: _Offsets) -> _Offsets:
    """Returns the part of `offsets` that `file` can contain, according to its first and last queue offsets."""
    found: _Offsets = {}
    for span in file.queues:
        begin, end = offsets.get(span.queue_id, (0, 0))
        begin, end = max(begin, span.first), min(end, span.last + 1)
        if begin < end:
            found[span.queue_id] = begin, end
    return found


def _cut(offsets: _Offsets, rows_max: int) -> list[_Offsets]:
    """Cuts queue offsets into parts of at most `rows_max` rows.

    The queues of a file advance together, so that the rows of each part are in few of the file's row groups.
    """
    count = -(-sum(end - begin for begin, end in offsets.values()) // rows_max)
    parts: list[_Offsets] = []
    rows = rows_max
    for number in range(count):
        for queue_id, (begin, end) in offsets.items():
            first, last = (begin + (end - begin) * at // count for at in (number, number + 1))
            while first < last:
                if rows == rows_max:
                    parts.append({})
                    rows = 0
                step = min(last - first, rows_max - rows)
                known, _ = parts[-1].get(queue_id, (first, first))
                parts[-1][queue_id] = known, first + step
                first += step
                rows += step
    return parts


def check_broker_names(archived: Sequence[str], known: Sequence[str]) -> None:
    """Raises OptionError if the archive and the name servers each have a broker name that the other lacks. These may be
    names of the same broker, whose messages would then be read twice: archives of RocketMQ's stores, and those of
    earlier versions, have the name of the store's directory.

    `archived`: broker names in the archive. `known`: broker names at the name servers. If only one side has additional
    names, they belong to brokers that no longer exist, or that are not archived.
    """
    unknown, missing = sorted(set(archived) - set(known)), sorted(set(known) - set(archived))
    if unknown and missing:
        reason = f"it has the brokers {', '.join(unknown)}, but not {', '.join(missing)}: is that the same one?"
        raise OptionError("archive", reason, "path instead of servers, or an archive made with broker_name")


class ArchivedPartition(LogPartition):
    """Reads rows from the files of an archive."""

    def __init__(self, ranges: Sequence[FileRange]) -> None:
        super().__init__()
        self.ranges = list(ranges)

    def read(self, options: ReadOptions) -> Iterator[pa.RecordBatch]:
        """Yields the rows, each file's in physical order."""
        for part in self.ranges:
            yield from read_files(part, options)


class PartitionChain(LogPartition):
    """Reads several partitions, one after the other."""

    def __init__(self, parts: Sequence[LogPartition]) -> None:
        super().__init__()
        self.parts = list(parts)

    def read(self, options: ReadOptions) -> Iterator[pa.RecordBatch]:
        """Yields the rows of all parts."""
        for part in self.parts:
            yield from part.read(options)
