"""Defines the interface of a log for planning, independent of where its bytes are.

Planning (offsets, limits, partitions) is written once, for `LogSource`. `local` implements this interface over store
directories and `network` over brokers; `archived_source` and `ha.spark.sink.committed_source` are wrappers of such a
source. The driver holds the source; a task gets a `LogPartition`, which holds only names and numbers, and opens files
or connections on the executor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from ha.arrow.read_options import ReadOptions


class Brokers(tuple[str, ...]):
    """Names of brokers. `aliases`: another name of a broker, which checkpoints and options may contain -> its name.

    `are_registered`: whether these are the brokers that name servers know; others may register later. If so, an offset
    without a broker's name may belong to another broker, even if there is only one name here. Otherwise, a single name
    is that of a single store, to which such an offset belongs even if the store has been renamed.
    """

    aliases: Mapping[str, str]
    are_registered: bool

    def __new__(
        cls, names: Iterable[str], aliases: Mapping[str, str] | None = None, *, are_registered: bool = False
    ) -> Brokers:
        """Creates the tuple of `names`. Aliases that are names themselves are ignored."""
        made = super().__new__(cls, names)
        made.aliases = {alias: name for alias, name in (aliases or {}).items() if alias not in made}
        made.are_registered = are_registered
        return made

    def name_of(self, given: str) -> str:
        """Returns the name of the broker that `given` is an alias of; any other text unchanged."""
        return self.aliases.get(given, given)


class QueueKey(NamedTuple):
    """One queue of one broker. Sorts by topic, then broker, then number."""

    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic} queue {self.queue_id} of {self.broker}"


class QueueRange(NamedTuple):
    """Readable queue offsets [begin, end); (0, 0) for a queue that does not exist."""

    begin: int
    end: int


class QueueSlice(NamedTuple):
    """Queue offsets [begin, end) of one queue."""

    queue: QueueKey
    begin: int
    end: int

    @property
    def entry_count(self) -> int:
        return self.end - self.begin


class LogPartition(InputPartition):
    """The part of the log that one task reads. Must be picklable: no open file, no connection."""

    def __init__(self) -> None:
        super().__init__(None)

    def read(self, options: ReadOptions) -> Iterator[pa.RecordBatch]:
        """Yields the rows in batches of `options.columns`. Runs on an executor.

        Raises RecordsGone if planned records were deleted, unless options.fail_on_data_loss is off, and in any case if
        a broker does not have them within pullTimeout; CorruptLog for a damaged record if options.on_damage is "fail";
        and errors of the store, the archive or the connection.
        """
        raise NotImplementedError


class LogSource(Protocol):
    """The log on the driver. Used by one thread; may keep state and connections between calls."""

    def refresh(self) -> bool:
        """Updates queues and ranges; returns False if nothing has changed. Between two refreshes, the answers of the
        other methods are consistent."""

    def brokers(self) -> Brokers:
        """Returns the brokers' names, in a fixed order. With a single broker, offsets are written without its name."""

    def min_offset(self, broker: str) -> int | None:
        """Returns the physical offset (bytes) at which the log of `broker` begins; None if that is unknown."""

    def queues(self, topics: frozenset[str] | None) -> list[QueueKey]:
        """Returns all queues of `topics` (None: of all topics), sorted. A topic that does not exist has none."""

    def topics(self) -> list[str]:
        """Returns every topic that has a queue (with `servers`: that the name servers know), sorted.

        `subscribePattern` is matched against these.
        """

    def queue_range(self, queue: QueueKey) -> QueueRange:
        """Returns the confirmed, readable queue offsets of `queue`."""

    def is_away(self, queue: QueueKey) -> bool:
        """Returns whether only an archive has `queue`, as its broker is not registered now (by default False).

        Its end is then unknown: `queue_range` returns that of the archive, and the broker may have later messages.
        """
        return False

    def offset_for_time(self, queue: QueueKey, timestamp_ms: int) -> int | None:
        """Returns the queue offset of the first message stored at or after `timestamp_ms`; None if there is none."""

    def physical_offset(self, queue: QueueKey, queue_offset: int) -> int:
        """Returns the physical offset (bytes) of a message; -1 if that is unknown, or the message no longer exists;
        UNWRITTEN if its queue entry is not written, for example because a recovering node has yet to write it again."""

    def first_physical_offset(self, queue: QueueKey, begin: int, end: int) -> int:
        """Returns the physical offset (bytes) of the first message at queue offsets [begin, end) for which it is known,
        possibly of a later one; -1 if there is none; UNWRITTEN as in `physical_offset`."""
        found = (self.physical_offset(queue, offset) for offset in range(begin, end))
        return next((physical_offset for physical_offset in found if physical_offset != -1), -1)

    def queue_bytes(self, queue: QueueKey, begin: int, end: int) -> int | None:
        """Returns the size of the records [begin, end) in bytes; None if that is unknown without reading them."""

    def archived_tasks(self, slices: Sequence[QueueSlice]) -> tuple[list[LogPartition], list[QueueSlice]]:
        """Returns tasks for the part of `slices` that only an archive has (by default none), and the other slices."""
        return [], list(slices)

    def queue_partition(self, slices: Sequence[QueueSlice]) -> LogPartition:
        """Returns a task's partition for `slices`, in this order."""

    def range_partitions(
        self, bytes_each: int, count_min: int, topics: frozenset[str] | None
    ) -> list[LogPartition] | None:
        """Returns tasks that read `topics` (None: all) in physical ranges of the log, about `count_min` or more, of up
        to `bytes_each` bytes. None if the log can't be read that way, or if that would take longer: then it is read
        queue by queue.
        """

    def close(self) -> None:
        """Closes files and connections."""
